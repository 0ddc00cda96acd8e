//! The fault pipeline, step by step:
//!
//! 1. an MMIO entry of the current generation answers MMIO, with no look-up ([`Vcpu::translate`]);
//! 2. a leaf that is write-protected only for the dirty log is fixed in place;
//! 3. the slot by gfn; none: an MMIO entry is installed. A write to a read-only slot is MMIO, too;
//! 4. the backing is resolved, holding nothing, outside the reader section;
//! 5. the level: the largest that slot, alignment, host mapping and dirty log allow;
//! 6. the install, under the lock of one table, if what was known still holds
//!    ([`crate::vm::invalidate`]); otherwise from the beginning. A huge leaf in the way is split in
//!    place.

use alloc::sync::Arc;
use core::fmt;
use core::ops::Range;

use super::DirtyLog;
use crate::addr::{Access, Gfn, Gpa, Hpa, Hva, Level, PAGE_SHIFT};
use crate::format::{Entry, Format, Leaf};
use crate::platform::{HostPage, MemoryType, Platform, ResolveError, WaitFor};
use crate::slots::{Memslot, SlotFlags};
use crate::table::{LeafCounts, Mapped, OutOfMemory, Tree, Zapped};
use crate::vcpu::Vcpu;

/// A page of guest memory as the second level translates it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// First byte of the 4 KiB host page.
    pub host: Hpa,
    /// Level of the leaf it came from.
    pub level: Level,
    /// Writes need no further fault.
    pub write: bool,
    /// Fetches need no further fault.
    pub execute: bool,
}

/// Why an access has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// No memslot holds the page, or it is a write to a read-only one: the client emulates it.
    Mmio {
        /// The address that was accessed.
        gpa: Gpa,
    },
    /// The vCPU was outside while something was flushed, or is wanted elsewhere. Every translation
    /// it remembers is void: drop them, call [`Vcpu::quiesce`], look at the attention word, and
    /// execute again.
    Retry,
    /// The memslot's backing cannot be had: KVM_RUN answers EFAULT.
    BadAddress {
        /// The address that was accessed.
        gpa: Gpa,
        /// What backs its page.
        hva: Hva,
        /// What the platform said.
        error: ResolveError,
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
            Stop::Retry => f.write_str("guest access interrupted: quiesce and execute again"),
            Stop::BadAddress { gpa, hva, error } => write!(
                f,
                "guest access to {gpa} (backed by {hva}): {error}; map it, or delete the memslot"
            ),
            Stop::OutOfMemory { gpa } => write!(f, "guest access to {gpa}: {OutOfMemory}"),
        }
    }
}

impl core::error::Error for Stop {}

/// What the fault needs of its slot. A copy: the slot may go while the backing is resolved.
struct SlotFacts {
    gfns: Range<Gfn>,
    hva: Hva,
    flags: SlotFlags,
    log: Option<Arc<DirtyLog>>,
}

impl SlotFacts {
    fn of(slot: &Memslot, gfn: Gfn) -> Self {
        SlotFacts {
            gfns: slot.gfns(),
            hva: slot.hva(gfn),
            flags: slot.flags,
            log: slot.dirty.clone(),
        }
    }

    /// What backs a leaf of `level` around `gfn`, the page of these facts; the leaf fits the slot.
    fn hvas(&self, gfn: Gfn, level: Level) -> Range<Hva> {
        let start = Hva(self.hva.0 - ((gfn.0 - gfn.align_down(level).0) << PAGE_SHIFT));
        start..start.add_pages(level.pages())
    }
}

/// What one attempt came to.
enum Attempt {
    Done(Translation),
    /// Something changed meanwhile.
    Again,
    Stop(Stop),
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// The host page behind `gpa` for `access`: the walk, and the fault if the walk finds nothing
    /// that allows it. The answer may be used until [`Vcpu::quiesce`] or [`Vcpu::leave`].
    ///
    /// # Errors
    /// [`Stop`]. After [`Stop::Retry`] all earlier answers are void.
    ///
    /// # Panics
    /// If the vCPU was not entered.
    #[inline]
    pub fn translate(&mut self, gpa: Gpa, access: Access) -> Result<Translation, Stop> {
        assert!(
            self.reader().is_inside(),
            "Vcpu::translate outside enter/leave"
        );
        let gfn = gpa.gfn();
        if gfn.0 >= Tree::<P, F>::capacity() {
            self.counters().pf_emulate.add(1);
            return Err(Stop::Mmio { gpa });
        }
        let found = self.space().tree.lookup(gfn);
        match found.entry {
            Entry::Leaf(leaf) if allows(&leaf, access) => Ok(translation(leaf, found.level, gfn)),
            Entry::Mmio { generation } if self.is_current(generation) => {
                self.counters().mmio_cached.add(1);
                Err(Stop::Mmio { gpa })
            }
            _ => self.fault(gpa, access),
        }
    }

    /// An access through an answer of [`Vcpu::translate`] found the host page at `hva` gone: asks the
    /// platform again, outside, for as long as that takes. `Ok`: try the access again.
    ///
    /// # Errors
    /// [`Stop::BadAddress`] if the page cannot be had, [`Stop::Retry`] as in `translate`.
    pub fn revalidate(&mut self, gpa: Gpa, hva: Hva, access: Access) -> Result<(), Stop> {
        let mut slept = false;
        match self.resolve(hva, access, &mut slept) {
            Err(error) if error != ResolveError::Interrupted => {
                Err(Stop::BadAddress { gpa, hva, error })
            }
            Ok(_) if !slept => Ok(()),
            _ => Err(Stop::Retry),
        }
    }

    /// Whether an MMIO entry with these generation bits still tells the truth.
    fn is_current(&self, generation: u64) -> bool {
        let mask = (1u64 << F::MMIO_GENERATION_BITS) - 1;
        self.vm().policy.mmio_caching()
            && self.space().slots.current().generation & mask == generation
    }

    #[cold]
    fn fault(&mut self, gpa: Gpa, access: Access) -> Result<Translation, Stop> {
        self.counters().pf_taken.add(1);
        if self.fill_frames().is_err() {
            return Err(Stop::OutOfMemory { gpa });
        }
        let mut slept = false;
        loop {
            match self.attempt(gpa, access, &mut slept) {
                // It slept through a flush: what it returned to its CPU before is void, whatever
                // the answer is this time.
                Attempt::Done(_) | Attempt::Stop(_) if slept => return Err(Stop::Retry),
                Attempt::Stop(stop) => return Err(stop),
                Attempt::Done(translation) => return Ok(translation),
                Attempt::Again => {
                    self.counters().pf_retried.add(1);
                    if slept {
                        return Err(Stop::Retry);
                    }
                    if self.fill_frames().is_err() {
                        return Err(Stop::OutOfMemory { gpa });
                    }
                }
            }
        }
    }

    fn attempt(&mut self, gpa: Gpa, access: Access, slept: &mut bool) -> Attempt {
        let gfn = gpa.gfn();
        // Everything it goes by is looked at after the sequence was taken, the leaf, too: a move may
        // have put another page of the same slot there since the walk that faulted.
        let sequence = self.vm().in_progress.sequence();
        let found = self.space().tree.lookup(gfn);
        let slot = match self.find_slot(gfn) {
            Ok(slot) => SlotFacts::of(slot, gfn),
            Err(generation) => return Attempt::Stop(self.no_slot(gpa, generation)),
        };
        if access == Access::Write && slot.flags.has(SlotFlags::READONLY) {
            self.counters().pf_emulate.add(1);
            return Attempt::Stop(Stop::Mmio { gpa });
        }
        let known = match found.entry {
            Entry::Leaf(leaf) if access == Access::Write && leaf.may_write => {
                Some(known_page(&leaf, found.level, gfn))
            }
            _ => None,
        };
        let host = match known {
            Some(host) => host,
            None => match self.resolve(slot.hva, access, slept) {
                Ok(host) => host,
                Err(ResolveError::Interrupted) => return Attempt::Stop(Stop::Retry),
                Err(error) if self.holds(sequence, &slot.hvas(gfn, Level::PAGE)) => {
                    return Attempt::Stop(Stop::BadAddress {
                        gpa,
                        hva: slot.hva,
                        error,
                    });
                }
                // The slot may have gone, or its memory come back, or be about to.
                Err(_) => return self.stale(&slot.hvas(gfn, Level::PAGE), slept),
            },
        };
        let leaf = leaf_for(&slot, &host, access);
        let level = match slot.log {
            Some(_) => Level::PAGE,
            None => self
                .vm()
                .fitting_level(&slot.gfns, gfn, host.pfn, host.level),
        };
        let leaf = Leaf {
            pfn: leaf.pfn.align_down(level),
            ..leaf
        };
        let mapped = self.install(gfn, level, leaf, &slot, sequence);
        let counters = self.counters();
        match mapped {
            Mapped::New => {
                counters.leaves_added(level);
                counters.pf_fixed.add(1);
            }
            Mapped::Widened if known.is_some() => counters.pf_fast.add(1),
            Mapped::Widened => counters.pf_fixed.add(1),
            Mapped::Spurious => counters.pf_spurious.add(1),
            Mapped::Stale => return self.stale(&slot.hvas(gfn, level), slept),
            Mapped::Replaced(detached, leaves) => {
                counters.leaves_added(level);
                counters.pf_fixed.add(1);
                let zapped = Zapped { leaves, detached };
                self.flush_as_vcpu(gfn.align_down(level), level, zapped, slept);
            }
        }
        Attempt::Done(translation(leaf, level, gfn))
    }

    /// Step 3, when the slot set of `generation` holds nothing there.
    fn no_slot(&mut self, gpa: Gpa, generation: u64) -> Stop {
        self.counters().pf_emulate.add(1);
        if self.vm().policy.mmio_caching() && F::MMIO_GENERATION_BITS > 0 {
            let (vm, space, frames) = self.parts();
            let tree = &vm.spaces[space].tree;
            let mut splits = LeafCounts::default();
            let made = tree.map_mmio(gpa.gfn(), generation, frames, &mut splits);
            self.counters().leaves_split(&splits);
            self.counters().pf_mmio_spte_created.add(made as u64);
        }
        Stop::Mmio { gpa }
    }

    /// Step 4.
    fn resolve(
        &mut self,
        hva: Hva,
        access: Access,
        slept: &mut bool,
    ) -> Result<HostPage, ResolveError> {
        let host = self.outside(slept, |vcpu| vcpu.vm().platform.resolve(hva, access))?;
        let allowed = match access {
            Access::Read => true,
            Access::Write => host.writable,
            Access::Execute => is_executable(&host),
        };
        if allowed {
            Ok(host)
        } else {
            Err(ResolveError::BadAddress)
        }
    }

    /// Step 6.
    fn install(
        &mut self,
        gfn: Gfn,
        level: Level,
        leaf: Leaf,
        slot: &SlotFacts,
        sequence: crate::vm::Sequence,
    ) -> Mapped {
        let (vm, space, frames) = self.parts();
        let mut splits = LeafCounts::default();
        let mut marked = false;
        let hvas = slot.hvas(gfn, level);
        let mapped = vm.spaces[space].tree.map(
            gfn.align_down(level),
            level,
            leaf,
            frames,
            &mut splits,
            || vm.in_progress.holds(sequence, &hvas, vm.lock_wait()),
            |mapped| {
                if matches!(mapped, Mapped::Replaced(..)) {
                    // Under the lock: who finds the old leaf gone sees that its flush is owed.
                    vm.owe_flush();
                }
                if let (Some(log), true) = (&slot.log, leaf.write) {
                    log.mark(gfn.0 - slot.gfns.start.0);
                    marked = true;
                }
            },
        );
        let counters = self.counters();
        counters.leaves_split(&splits);
        counters.dirty_pages.add(marked as u64);
        mapped
    }

    fn holds(&self, sequence: crate::vm::Sequence, hvas: &Range<Hva>) -> bool {
        let vm = self.vm();
        vm.in_progress.holds(sequence, hvas, vm.lock_wait())
    }

    /// What it knew did not hold: waits for an invalidation of `hvas` to end, if that was it.
    fn stale(&mut self, hvas: &Range<Hva>, slept: &mut bool) -> Attempt {
        let covered = |vcpu: &Self| vcpu.vm().in_progress.covers(hvas, vcpu.vm().lock_wait());
        if covered(self) {
            let wanted = self.outside(slept, |vcpu| {
                let mut round = 0;
                while covered(vcpu) {
                    if vcpu
                        .attention()
                        .flag()
                        .load(core::sync::atomic::Ordering::Relaxed)
                        != 0
                    {
                        return true;
                    }
                    vcpu.vm().platform.wait(round, WaitFor::Invalidation);
                    round += 1;
                }
                false
            });
            if wanted {
                return Attempt::Stop(Stop::Retry);
            }
        }
        Attempt::Again
    }

    fn flush_as_vcpu(&mut self, gfn: Gfn, level: Level, zapped: Zapped, slept: &mut bool) {
        self.outside(slept, |vcpu| {
            let vm = vcpu.vm();
            let range = gfn..gfn.add(level.pages());
            vm.flush(vcpu.space(), range, zapped, vcpu.counters());
        });
    }
}

fn allows(leaf: &Leaf, access: Access) -> bool {
    match access {
        Access::Read => true,
        Access::Write => leaf.write,
        Access::Execute => leaf.execute,
    }
}

fn translation(leaf: Leaf, level: Level, gfn: Gfn) -> Translation {
    let pfn = leaf.pfn.add(gfn.0 & (level.pages() - 1));
    Translation {
        host: pfn.hpa(),
        level,
        write: leaf.write,
        execute: leaf.execute,
    }
}

/// Step 2: the page behind a leaf that lost its right to write to the dirty log only.
fn known_page(leaf: &Leaf, level: Level, gfn: Gfn) -> HostPage {
    HostPage {
        pfn: leaf.pfn.add(gfn.0 & (level.pages() - 1)),
        level,
        writable: true,
        memory: leaf.memory,
    }
}

fn is_executable(host: &HostPage) -> bool {
    host.memory == MemoryType::WriteBack
}

/// The leaf for one page; rights and marks as KVM starts them.
fn leaf_for(slot: &SlotFacts, host: &HostPage, access: Access) -> Leaf {
    let allowed = host.writable && !slot.flags.has(SlotFlags::READONLY);
    // In a logged slot only a write makes a page writable, because it is what the log records.
    let write = allowed && (slot.log.is_none() || access == Access::Write);
    Leaf {
        pfn: host.pfn,
        write,
        execute: is_executable(host),
        may_write: allowed && !write,
        accessed: true,
        dirty: access == Access::Write,
        memory: host.memory,
    }
}
