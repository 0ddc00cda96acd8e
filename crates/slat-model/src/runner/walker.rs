//! A hardware page walker: it reads the tables, sets accessed and dirty bits, and records the pages whose dirty bits it
//! has set in a buffer.

use std::sync::atomic::{AtomicU64, Ordering::*};

use slat::format::Entry;
use slat::{Access, Format, Gfn, Level, Pfn, Platform};

use super::Runner;
use crate::machine::Machine;
use crate::model::Expected;

impl<M: Machine, F: Format> Runner<M, F> {
    /// Makes the page walker of vCPU `i` write to `gpa`, if the tables allow the write.
    pub(super) fn walk_for_write(&mut self, i: usize, gpa: u64) {
        let (gfn, space) = (gpa >> F::GRANULE.shift(), self.cpus[i].space);
        let Some((entry, level)) = self.walk(space, gfn) else {
            return;
        };
        let bits = entry.load(Acquire);
        let Entry::Leaf(leaf) = F::decode(bits, level) else {
            return;
        };
        if !leaf.write {
            return;
        }
        let expected = self.models[space].expect(&*self.machine, gfn, Access::Write);
        let Expected::Page(page) = expected else {
            panic!("a walker may write to frame {gfn:#x}: {leaf:?}, expected {expected:?}");
        };
        assert_eq!(leaf.pfn.add(gfn & (F::GRANULE.pages(level) - 1)), page.pfn);
        let host = self.models[space]
            .slot_at(gfn)
            .map(|(_, slot)| slot.host_page(gfn));
        self.check_saved(host, || format!("writable by a walker: {leaf:?}"));
        let is_logged = F::SETS_DIRTY && !leaf.dirty;
        let full = is_logged.then(|| self.platform.buffers.take_full(i));
        let full = full.flatten();
        for (space, gfn) in full.iter().flatten() {
            self.vm.drain(*space, [*gfn]);
        }
        entry.store(F::mark(bits, true), Release);
        if is_logged {
            self.platform.buffers.write(i, (space, Gfn(gfn)));
        }
        if !self.models[space].mode.rings {
            self.models[space].note_write(gfn);
        }
        self.tally.count(match full {
            Some(_) => "written when a buffer was full",
            None => "written by a walker",
        });
    }

    /// Returns the entry at which a walk for a write to `gfn` ends, and the entry's level. `None`: an entry at a higher
    /// level does not allow the write.
    fn walk(&self, space: usize, gfn: u64) -> Option<(&AtomicU64, Level)> {
        let top_pages = F::GRANULE.pages(F::TOP) * F::GRANULE.entries() as u64;
        let root = (gfn / top_pages < F::ROOT_TABLES as u64).then_some(self.vm.root(space)?)?;
        let (mut frame, mut level): (Pfn, Level) = (root.add(gfn / top_pages), F::TOP);
        loop {
            let index = F::GRANULE.index(Gfn(gfn), level);
            // SAFETY: the frames of tables that a walk reaches are allocated, and are accessed atomically. The runner
            // is the only thread, so no table is freed during the walk. The index is less than the number of entries in
            // a table.
            let entry = unsafe {
                let entries = self.platform.entries(frame);
                entries.cast::<AtomicU64>().add(index).as_ref()
            };
            let bits = entry.load(Acquire);
            match F::decode(bits, level) {
                Entry::Table(_) if F::is_protected(bits) => return None,
                Entry::Table(lower) => (frame, level) = (lower, Level(level.0 - 1)),
                _ => return Some((entry, level)),
            }
        }
    }
}
