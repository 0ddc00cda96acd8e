//! The mappings of a VM's guest-physical memory: numbers of pages by size, access and state. `slat map` draws pictures
//! from these numbers.

use crate::engine::EngineVm;
use slat::format::Entry;
use slat::{Gfn, Level};
use slat_host::granule;
use std::ops::Range;

/// The mappings of the frames in a part of guest memory. Each field is a number of 4 KiB pages. With the shadow MMU, a
/// page that several leaves map counts several times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// Pages that are mapped by leaves of 4 KiB, of 2 MiB, and of 1 GiB or larger.
    pub by_level: [u64; 3],
    /// Pages with an MMIO entry, including MMIO entries of an old generation.
    pub mmio: u64,
    /// The number of pages that are mapped without the right to execute.
    pub nx: u64,
    /// Pages that are not writable because their memslot has a dirty log.
    pub protected: u64,
    /// Pages that are mapped by a leaf whose dirty bit is set.
    pub dirty: u64,
    /// Pages that are mapped by a leaf whose accessed bit is set.
    pub accessed: u64,
    /// Pages that are private (`KVM_MEMORY_ATTRIBUTE_PRIVATE`), mapped or not.
    pub private: u64,
}

impl Cell {
    /// The names of the numbers, in the order of [`Self::values`].
    pub const NAMES: [&str; 9] = [
        "4k",
        "2m",
        "1g",
        "mmio",
        "nx",
        "protected",
        "dirty",
        "accessed",
        "private",
    ];

    /// Reads how `gfns` in address space `space` are mapped. Of a huge leaf, only the pages in `gfns` count.
    ///
    /// vCPUs may run meanwhile: [`slat::Vm::visit_leaves`] looks at 4,096 entries at a time, and locks one table at a
    /// time. Call outside a reader section. Uses no heap memory.
    pub fn read(engine: &EngineVm, space: usize, gfns: &Range<Gfn>) -> Self {
        let mut cell = Cell::default();
        engine.visit_leaves(space, gfns.clone(), &mut |gfn, level, entry| {
            let end = Gfn(gfn.0 + granule().pages(level));
            cell.add(overlap(&(gfn..end), gfns), level, &entry);
        });
        let mut at = gfns.start;
        while at < gfns.end {
            let (private, alike) = engine.private_around(at);
            if private {
                cell.private += overlap(&alike, &(at..gfns.end));
            }
            at = alike.end;
        }
        cell
    }

    /// Adds `pages` pages, which `entry` maps.
    fn add(&mut self, pages: u64, level: Level, entry: &Entry) {
        match entry {
            Entry::Leaf(leaf) | Entry::Broken(leaf) => {
                let level = usize::from(level.0).clamp(1, 3);
                let counted = |it: bool| if it { pages } else { 0 };
                self.by_level[level - 1] += pages;
                self.nx += counted(!leaf.execute);
                self.protected += counted(leaf.may_write && !leaf.write);
                self.dirty += counted(leaf.dirty);
                self.accessed += counted(leaf.accessed);
            }
            Entry::Mmio { .. } => self.mmio += pages,
            Entry::Empty | Entry::Table(_) => {}
        }
    }

    /// Returns the numbers, in the order of [`Self::NAMES`].
    pub fn values(&self) -> [u64; Self::NAMES.len()] {
        let [small, mega, giga] = self.by_level;
        [
            small,
            mega,
            giga,
            self.mmio,
            self.nx,
            self.protected,
            self.dirty,
            self.accessed,
            self.private,
        ]
    }

    /// Makes this struct from the numbers that [`values`](Self::values) returns.
    pub fn from_values(values: [u64; Self::NAMES.len()]) -> Self {
        let [
            small,
            mega,
            giga,
            mmio,
            nx,
            protected,
            dirty,
            accessed,
            private,
        ] = values;
        Cell {
            by_level: [small, mega, giga],
            mmio,
            nx,
            protected,
            dirty,
            accessed,
            private,
        }
    }
}

/// Returns the number of frames that are in both ranges.
fn overlap(a: &Range<Gfn>, b: &Range<Gfn>) -> u64 {
    let (start, end) = (a.start.max(b.start), a.end.min(b.end));
    end.0.saturating_sub(start.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_made_of_its_values() {
        let values = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        assert_eq!(Cell::from_values(values).values(), values);
    }

    #[test]
    fn ranges_overlap_in_their_common_frames() {
        let range = |start, end| Gfn(start)..Gfn(end);
        assert_eq!(overlap(&range(0, 10), &range(5, 20)), 5);
        assert_eq!(overlap(&range(0, u64::MAX), &range(5, 20)), 15);
        assert_eq!(overlap(&range(0, 5), &range(5, 20)), 0);
        assert_eq!(overlap(&range(30, 40), &range(5, 20)), 0);
    }
}
