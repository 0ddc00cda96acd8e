//! Mapping more than was asked for: what is resident around a fault, and whole ranges ahead of time.
//!
//! A fault that installed a 4 KiB leaf looks at the aligned window around its page, in both directions
//! and up to the window's very end, and maps what is resident and absent: not in a slot that logs
//! (every page would look written), not when a huge leaf was installed (there is nothing left to map).
//! What is prefetched starts with the accessed bit clear.
//!
//! The adaptive window begins with nothing. A fault right behind what the vCPU mapped last is taken as
//! a sequence: the window opens at 8 pages and doubles, up to a whole table. Any other fault closes
//! it, so that scattered accesses cost no page that nobody asked for.

use core::ops::Range;

use super::Sequence;
use super::fault::{SlotFacts, Stop};
use crate::addr::{Access, Gfn, Gpa, Hva, Level};
use crate::format::Format;
use crate::format::Leaf;
use crate::platform::{HostRun, MemoryType, Platform};
use crate::policy::Prefetch;
use crate::slots::SlotFlags;
use crate::table::{ENTRIES, Path};
use crate::vcpu::Vcpu;

/// What the adaptive window remembers of one vCPU.
#[derive(Default)]
pub(crate) struct Window {
    /// Behind the last page that was mapped.
    next: Gfn,
    /// Pages; 0 is closed.
    size: u64,
}

impl Window {
    const FIRST: u64 = 8;

    /// The window for a fault at `gfn`.
    fn after_fault(&mut self, gfn: Gfn) -> u64 {
        self.size = if gfn == self.next {
            (self.size * 2).clamp(Self::FIRST, ENTRIES as u64)
        } else {
            0
        };
        self.size
    }
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Maps what is resident in the window around `gfn`, which was just mapped.
    pub(super) fn prefetch(&mut self, gfn: Gfn, slot: &SlotFacts, sequence: Sequence) {
        let size = match self.vm().policy.prefetches() {
            Prefetch::Off => 0,
            Prefetch::Window(size) => size,
            Prefetch::Adaptive => self.window().after_fault(gfn),
        };
        let mut end = gfn.add(1);
        if size > 1 {
            let start = Gfn(gfn.0 & !(size - 1));
            let window = start.max(slot.gfns.start)..start.add(size).min(slot.gfns.end);
            end = window.end;
            self.map_resident(window, slot, sequence);
        }
        self.window().next = end;
    }

    /// Maps what is resident and absent in `range`, which lies in the slot and in one table of level 1.
    /// Returns how many of its pages are mapped then, by whomever.
    fn map_resident(&mut self, range: Range<Gfn>, slot: &SlotFacts, sequence: Sequence) -> u64 {
        let hva = |gfn: Gfn| Hva(slot.hva_base.0 + ((gfn.0 - slot.gfns.start.0) << 12));
        let backing = hva(range.start)..hva(range.end);
        let readonly = slot.flags.has(SlotFlags::READONLY);
        // The fault has used some, and its table may be gone by now.
        if self.fill_frames().is_err() {
            return 0;
        }
        let (vm, space, frames) = self.parts();
        let owe = || vm.flushes.owe();
        let mut path = Path::new(frames, &owe);
        let (mut installed, mut mapped) = (0, 0);
        vm.platform
            .resolve_resident(backing.clone(), &mut |run: HostRun| {
                let leaf = Leaf {
                    pfn: run.first.pfn,
                    write: run.first.writable && !readonly,
                    execute: run.first.memory == MemoryType::WriteBack,
                    may_write: false,
                    accessed: false,
                    dirty: false,
                    memory: run.first.memory,
                };
                let gfn = range.start.add((run.backing.0 - backing.start.0) >> 12);
                let valid = || vm.in_progress.holds(sequence, &backing, vm.lock_wait());
                let tree = &vm.spaces[space].tree;
                if let Some(new) = tree.map_absent(gfn, run.pages, leaf, &mut path, valid) {
                    installed += new;
                    mapped += run.pages;
                }
            });
        let counters = self.counters();
        counters.pages_4k.add(installed);
        counters.prefetched.add(installed);
        mapped
    }

    /// Maps guest memory ahead of its use, for reading: KVM_PRE_FAULT_MEMORY. Pages that are not
    /// resident are brought in. Returns the bytes mapped, from `range.start` on, at least one page.
    ///
    /// # Errors
    /// [`Stop`], if not even the first page could be mapped.
    pub fn prefault(&mut self, range: Range<Gpa>) -> Result<u64, Stop> {
        let mut at = range.start;
        while at < range.end {
            match self.prefault_one(at, range.end) {
                Ok(next) => at = next,
                Err(stop) if at == range.start => return Err(stop),
                Err(_) => break,
            }
        }
        Ok(at.0.min(range.end.0) - range.start.0)
    }

    /// One leaf, and, if it is a page, what is resident behind it in the same table. Returns the
    /// address behind what was mapped.
    fn prefault_one(&mut self, gpa: Gpa, end: Gpa) -> Result<Gpa, Stop> {
        let gfn = gpa.gfn();
        let level = self.translate(gpa, Access::Read)?.level;
        let next = Gfn(gfn.align_down(level).0 + level.pages());
        if level > Level::PAGE {
            return Ok(next.gpa());
        }
        let sequence = self.vm().in_progress.sequence();
        let table_end = Gfn(gfn.align_down(Level::MEGA).0 + Level::MEGA.pages());
        let Ok(slot) = self.find_slot(gfn).map(|slot| SlotFacts::of(slot, gfn)) else {
            return Ok(next.gpa());
        };
        let end = Gfn(end.0.div_ceil(1 << 12))
            .min(slot.gfns.end)
            .min(table_end);
        if slot.log.is_some() || next >= end {
            return Ok(next.gpa());
        }
        // Only a stretch without a gap lets the walk go on behind it.
        let before = end.0 - next.0;
        match self.map_resident(next..end, &slot, sequence) {
            mapped if mapped == before => Ok(end.gpa()),
            _ => Ok(next.gpa()),
        }
    }
}
