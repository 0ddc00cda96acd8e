//! Translates an access of a vCPU. There are three steps, each used if the previous one does not suffice:
//!
//! 1. A look-up in the level 1 table that an earlier walk has found, or a walk from the root. This takes no lock and
//!    needs no slot. The next steps continue where this walk has ended.
//! 2. [`Vcpu::translate_mapped`]: sets the accessed or dirty bit of a leaf that allows the access; or finds an MMIO
//!    entry of the current generation, and so reports MMIO without a slot look-up.
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

/// The translation of a page of guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// The address of the host page. The page has the size of the format's granule, for example 4 KiB.
    pub host: Hpa,
    /// The level of the leaf that maps the page.
    pub level: Level,
    /// Whether later writes may use this translation: the leaf is writable and already dirty.
    pub write: bool,
    /// Whether instruction fetches may use this translation.
    pub execute: bool,
    /// Set only if the access is a write: whether the page contains a guest table that is shadowed. If so, call
    /// [`Vcpu::stored`] after the store.
    pub tracked: bool,
}

/// The reason why an access has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// No memslot contains the page, or the access is a write to a read-only memslot. The client must emulate the
    /// access.
    Mmio {
        /// The address that was accessed.
        gpa: Gpa,
    },
    /// The guest fetches an instruction from a memslot that does not have the right to execute, or whose memory is not
    /// write-back ([`Region::rights`](crate::Region), [`Region::memory`](crate::Region)). The access changed nothing.
    NoExecute {
        /// The address that was accessed.
        gpa: Gpa,
    },
    /// A flush took place while the vCPU was outside its section, or its attention word is set. Every translation that
    /// the CPU remembers is void: drop them, call [`Vcpu::quiesce`], check the attention word, and execute the access
    /// again.
    Retry,
    /// The platform cannot resolve the memslot's backing. (KVM_RUN returns EFAULT in this case.)
    BadAddress {
        /// The address that was accessed.
        gpa: Gpa,
        /// The address that backs the page.
        hva: Hva,
        /// The platform's error.
        error: ResolveError,
    },
    /// The vCPU's dirty ring is full except for its reserve. The client must collect ring entries, reset the ring, and
    /// run the vCPU again. The access changed nothing.
    DirtyRingFull,
    /// The memory is missing, which the client can repair (KVM_EXIT_MEMORY_FAULT). The access is never MMIO. There are
    /// three cases. First, the page is private and has no memslot, or its memslot has no private backing, or this
    /// backing cannot be resolved. Second, the private backing also backs the slot's shared pages
    /// ([`Region::private`](crate::Region)), and cannot be resolved. Third, the page is not present yet
    /// ([`ResolveError::Absent`]): provide the page, and run the vCPU again.
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
    /// There was no memory for a page table. The access changed nothing.
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
        // The two branches return the same translation. But in the first, the common one, the leaf is of level 1, which
        // the compiler then knows, and the vCPU remembers the leaf.
        let key = self.key(gfn);
        let reached = match self.walk(gpa) {
            Some(Ok(found)) => {
                if let Some(leaf) = found.ready::<F>(access) {
                    // SAFETY: the walk has just found the leaf, in this reader section.
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

    /// Returns how `gfn` is mapped now in the vCPU's address space. Like [`Vm::lookup`](crate::Vm::lookup), but it uses
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

    /// Continues [`Vcpu::translate`] if its walk found no leaf that is ready for the access. `reached` is where that
    /// walk ended.
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

    /// Ends an access to `gpa`, which is beyond the addresses that the tables translate.
    #[cold]
    fn outside_tables(&self, gpa: Gpa) -> Stop {
        assert!(self.is_entered(), "Vcpu::translate outside enter/leave");
        self.counters().pf_emulate.add(1);
        Stop::Mmio { gpa }
    }

    /// Translates `gpa` like [`Vcpu::translate`], with the same errors, but counts no fault of the guest.
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

    /// Translates `gpa`: continues the walk that has `reached` a table, and handles a fault if the entry does not allow
    /// the access. For `of_guest` see [`Vcpu::fault`].
    fn translate_from(
        &mut self,
        gpa: Gpa,
        access: Access,
        reached: Reached,
        of_guest: bool,
    ) -> Result<Translation, Stop> {
        // A fault may install the page in another table than the cached one, so drop the cached table.
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

    /// Continues `walk`. If it ends at a leaf that allows the access, sets the accessed and dirty bits and returns the
    /// translation; if it ends at a current MMIO entry, returns [`Stop::Mmio`]. `None`: a fault is needed.
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

    /// Whether an MMIO entry that contains the bits `generation` was made in the current generation of the slots.
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
