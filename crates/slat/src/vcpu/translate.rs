//! Accesses of a vCPU: the walk, and the steps that follow if the walk finds no entry that allows the access.
//!
//! 1. A look-up in the level 1 table that an earlier walk has found, or a walk from the root. Takes no lock and needs
//!    no slot. The next steps continue from where this walk has ended.
//! 2. [`Vcpu::translate_mapped`]: a leaf whose accessed or dirty bit has to be set; or an MMIO entry of the current
//!    generation, which reports MMIO without a slot look-up.
//! 3. A fault ([`super::fault`]).

use core::fmt;

use super::{PausedWalk, Vcpu};
use crate::addr::{Access, Gfn, Gpa, Hpa, Hva, Level};
use crate::format::{Entry, Format, Leaf};
use crate::heap::OutOfMemory;
use crate::platform::{Platform, ResolveError};
use crate::table::Reached;
use crate::trace::Event;
use crate::vm::Mapping;

/// A page of guest memory as the second level (the nested tables of the VM) translates it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// The first byte of the host page. The page has the size of the format's granule, for example 4 KiB.
    pub host: Hpa,
    /// The level of the leaf that maps the page.
    pub level: Level,
    /// Whether writes need neither another fault nor a dirty bit to be set.
    pub write: bool,
    /// Whether fetches need no other fault.
    pub execute: bool,
    /// For a translation for a write: whether the page contains a table of the guest that is shadowed. If so, call
    /// [`Vcpu::stored`] after the store.
    pub tracked: bool,
}

/// The reason why an access has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// No memslot contains the page, or the access is a write to a read-only memslot. The client emulates the access.
    Mmio {
        /// The address that was accessed.
        gpa: Gpa,
    },
    /// The guest fetches an instruction from a memslot that does not have the right to execute, or whose memory is not
    /// write-back ([`Region::rights`](crate::Region), [`Region::memory`](crate::Region)). Nothing was changed.
    NoExecute {
        /// The address that was accessed.
        gpa: Gpa,
    },
    /// The vCPU has left its section, and a flush was done meanwhile, or its attention word is set. Every translation
    /// that it remembers is void: drop them, call [`Vcpu::quiesce`], check the attention word, and execute again.
    Retry,
    /// The memslot's backing cannot be resolved: KVM_RUN returns EFAULT.
    BadAddress {
        /// The address that was accessed.
        gpa: Gpa,
        /// The address that backs its page.
        hva: Hva,
        /// The platform's error.
        error: ResolveError,
    },
    /// The vCPU's dirty ring is full up to its reserve: the client collects entries, resets the ring, and runs the vCPU
    /// again. Nothing was changed.
    DirtyRingFull,
    /// The client can repair the cause of the access: KVM_EXIT_MEMORY_FAULT; it is never MMIO. There are three cases.
    /// The page is private, and has no memslot, or a memslot without private backing, or private backing that cannot be
    /// resolved. Or the slot's only backing is private, also for shared pages ([`Region::private`](crate::Region)), and
    /// cannot be resolved. Or the page is not present yet ([`ResolveError::Absent`]): bring the page, and run the vCPU
    /// again.
    MemoryFault {
        /// The address that was accessed.
        gpa: Gpa,
        /// The kind of the access.
        access: Access,
        /// Whether the page is private.
        private: bool,
        /// Whether the platform has reported that the page is not present yet.
        absent: bool,
    },
    /// No memory for a page table. Nothing was changed.
    OutOfMemory {
        /// The address that was accessed.
        gpa: Gpa,
    },
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stop::Mmio { gpa } => write!(f, "guest access to {gpa}: no memslot, emulate it"),
            Stop::NoExecute { gpa } => write!(
                f,
                "guest fetch from {gpa}: the memslot must not be executed; give it the right, and write-back memory"
            ),
            Stop::Retry => f.write_str("guest access interrupted: quiesce and execute again"),
            Stop::BadAddress { gpa, hva, error } => write!(
                f,
                "guest access to {gpa} (backed by {hva}): {error}; map it, or delete the memslot"
            ),
            Stop::MemoryFault {
                gpa, absent: true, ..
            } => write!(
                f,
                "guest access to {gpa}: the page is not there yet; bring it, and run the vCPU again"
            ),
            Stop::MemoryFault { gpa, .. } => write!(
                f,
                "guest access to {gpa}: there is no private memory for it; share it, or give the memslot some"
            ),
            Stop::DirtyRingFull => f.write_str("guest write: the dirty ring is full, reset it"),
            Stop::OutOfMemory { gpa } => write!(f, "guest access to {gpa}: {OutOfMemory}"),
        }
    }
}

impl core::error::Error for Stop {}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Returns the host page to which `gpa` translates for `access`. Walks first, and faults if the walk finds no entry
    /// that allows the access. The translation may be used until [`Vcpu::quiesce`] or [`Vcpu::leave`].
    ///
    /// # Errors
    /// [`Stop`]. After [`Stop::Retry`] all earlier translations are void.
    ///
    /// # Panics
    /// If the vCPU is not entered ([`Vcpu::enter`]).
    #[inline(always)]
    pub fn translate(&mut self, gpa: Gpa, access: Access) -> Result<Translation, Stop> {
        let gfn = F::GRANULE.gfn(gpa);
        if let Some(leaf) = self.cached_leaf(gpa, access) {
            return Ok(translation::<F>(leaf, Level::PAGE, gfn));
        }
        // The two branches are equal. But in the first, the compiler knows the level, which is the common one.
        let key = self.key(gfn);
        let reached = match self.walk(gpa) {
            Some(Ok(found)) => {
                if let Some(leaf) = found.ready::<F>(access) {
                    // SAFETY: the walk has found the leaf just now.
                    unsafe { self.remember(gpa, found.to_remember::<F>()) };
                    return Ok(translation::<F>(leaf, Level::PAGE, gfn));
                }
                Reached::by(key, &found)
            }
            Some(Err(found)) => {
                if let Some(leaf) = found.ready::<F>(access) {
                    return Ok(translation::<F>(leaf, found.level, gfn));
                }
                Reached::by(key, &found)
            }
            None => return Err(self.outside_tables(gpa)),
        };
        self.translate_slowly(gpa, access, reached)
    }

    /// Returns how `gfn` is mapped now in the vCPU's address space, like [`Vm::lookup`](crate::Vm::lookup). But it uses
    /// the vCPU's reader section, so it costs only the walk. Like a translation, the result may be used until
    /// [`Vcpu::quiesce`] or [`Vcpu::leave`].
    ///
    /// # Panics
    /// If the vCPU is not entered ([`Vcpu::enter`]).
    #[inline]
    pub fn lookup(&self, gfn: Gfn) -> Option<Mapping> {
        assert!(self.is_entered(), "Vcpu::lookup outside enter/leave");
        let platform = &*self.vm().platform;
        self.space().mapping(self.section(), platform, gfn)
    }

    /// Continues [`Vcpu::translate`] if its walk, which has `reached` a table, did not suffice.
    #[cold]
    #[inline(never)]
    fn translate_slowly(
        &mut self,
        gpa: Gpa,
        access: Access,
        reached: Reached,
    ) -> Result<Translation, Stop> {
        self.for_owner(
            |vcpu| vcpu.translate_from(gpa, access, reached, true),
            |answer| *answer == Err(Stop::Retry),
        )
    }

    /// Ends an access to `gpa`, which the tables cannot translate.
    #[cold]
    fn outside_tables(&self, gpa: Gpa) -> Stop {
        assert!(self.is_entered(), "Vcpu::translate outside enter/leave");
        self.counters().pf_emulate.add(1);
        Stop::Mmio { gpa }
    }

    /// Translates `gpa`; maps its page if it is not mapped. Does not count as a fault of the guest. Has the errors of
    /// [`Vcpu::translate`].
    pub(super) fn translate_uncounted(
        &mut self,
        gpa: Gpa,
        access: Access,
    ) -> Result<Translation, Stop> {
        assert!(self.is_entered(), "a translation outside enter/leave");
        if !self.may_walk(gpa) {
            return Err(Stop::Mmio { gpa });
        }
        let begin = Reached::nothing::<F>(self.key(F::GRANULE.gfn(gpa)));
        self.translate_from(gpa, access, begin, false)
    }

    /// Translates `gpa` by the entry that a walk finds that continues where it has `reached` a table, or by a fault.
    /// `of_guest`: see [`Vcpu::fault`].
    fn translate_from(
        &mut self,
        gpa: Gpa,
        access: Access,
        reached: Reached,
        of_guest: bool,
    ) -> Result<Translation, Stop> {
        // A fault may install the page in another table than the cached one.
        self.forget(gpa);
        let mut walk = self.pause(reached);
        if let Some(answer) = self.translate_mapped(&mut walk, gpa, access) {
            return answer;
        }
        if of_guest {
            self.counters().pf_taken.add(1);
            self.vm().platform.trace(Event::PageFault {
                fault_address: gpa.0,
                access,
            });
        }
        self.fault(walk, gpa, access, of_guest)
    }

    /// Returns the result of an access to `gpa` by the entry at which `walk` ends. `None`: no entry allows the access.
    fn translate_mapped(
        &mut self,
        walk: &mut PausedWalk,
        gpa: Gpa,
        access: Access,
    ) -> Option<Result<Translation, Stop>> {
        let gfn = F::GRANULE.gfn(gpa);
        loop {
            let found = self.look(walk);
            return match found.entry::<F>() {
                Entry::Leaf(leaf) if leaf.allows(access) => {
                    let write = access == Access::Write;
                    let is_marked = match write && !leaf.dirty && self.vm().has_walker_buffers() {
                        true => self.mark_logged(&found, gfn)?,
                        false => found.mark::<F>(write),
                    };
                    if !is_marked {
                        continue;
                    }
                    let leaf = Leaf {
                        dirty: leaf.dirty || write,
                        ..leaf
                    };
                    Some(Ok(translation::<F>(leaf, found.level, gfn)))
                }
                Entry::Mmio { generation, .. } if self.is_current(generation) => {
                    self.counters().mmio_cached.add(1);
                    let addr = gpa.0;
                    (self.vm().platform).trace(Event::HandleMmioPageFault { addr, gfn });
                    Some(Err(Stop::Mmio { gpa }))
                }
                _ => None,
            };
        }
    }

    /// Whether an MMIO entry with these generation bits belongs to the current slot set.
    pub(super) fn is_current(&self, generation: u64) -> bool {
        let mask = (1u64 << F::MMIO_GENERATION_BITS) - 1;
        self.vm().caches_mmio() && self.slots().generation & mask == generation
    }
}

/// Returns the translation of `gfn` by `leaf`, which is of `level`.
#[inline]
pub(super) fn translation<F: Format>(leaf: Leaf, level: Level, gfn: Gfn) -> Translation {
    let pfn = leaf.pfn.add(F::GRANULE.page_in(gfn, level));
    Translation {
        host: F::GRANULE.hpa(pfn),
        level,
        write: leaf.write && leaf.dirty,
        execute: leaf.execute,
        tracked: false,
    }
}
