//! The entries that a walker may have cached: the ghosts (changed entries that were not flushed yet), and all entries
//! that a walker reaches through ghosts.

use alloc::vec::Vec;
use core::ops::Range;

use slat::{Gfn, Pfn, Stale};

use super::Inner;
use super::entry::{Ghost, Place, Value, overlap};
use super::table::root_pages;

impl Inner {
    /// Drops the ghosts of `range` that were made before `moment` and whose kind `stale` includes.
    pub(super) fn flush(&mut self, range: &Range<u64>, stale: Stale, moment: u64) {
        let is_meant = |ghost: &Ghost| match ghost.value {
            Value::Leaf { .. } => stale.level.is_none_or(|level| level == ghost.place.level),
            Value::Table { .. } | Value::TableWrite => stale.tables,
        };
        let all = core::mem::take(&mut self.ghosts);
        let (gone, kept): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|g| g.number < moment && overlap(&g.place.gfns(), range) && is_meant(g));
        let mut left = Vec::new();
        for ghost in &gone {
            self.each_cached(ghost, &mut |place, value| {
                let leaf = matches!(value, Value::Leaf { .. });
                if leaf && !overlap(&place.gfns(), range) {
                    let number = ghost.number;
                    left.push(Ghost {
                        place,
                        value,
                        number,
                    });
                }
            });
        }
        for ghost in gone {
            if let Some(below) = ghost.value.table() {
                self.forget_below(below);
            }
        }
        self.ghosts = kept;
        self.ghosts.append(&mut left);
    }

    /// Calls `each` for a ghost, and for all entries that a page walker reaches through it.
    pub(super) fn each_cached(&self, ghost: &Ghost, each: &mut impl FnMut(Place, Value)) {
        each(ghost.place, ghost.value);
        if let Some(frame) = ghost.value.table() {
            self.each_below(frame, each);
        }
    }

    fn each_below(&self, frame: Pfn, each: &mut impl FnMut(Place, Value)) {
        let Some((walker, table)) = self.walker.zip(self.tables.get(&frame)) else {
            return;
        };
        for (i, bits) in table.seen.iter().enumerate() {
            let place = table.place(i);
            if let Some(value) = walker.value(*bits, place.level) {
                each(place, value);
                if let Some(below) = value.table() {
                    self.each_below(below, each);
                }
            }
        }
    }

    /// Returns the leaf that translates `gfn` in the tables, as they were at the last comparison.
    pub(super) fn leaf(&self, space: usize, gfn: u64) -> Option<(Place, Value)> {
        let walker = self.walker?;
        let root_pages = root_pages(walker.granule, walker.top);
        let root_place = Place {
            space,
            granule: walker.granule,
            level: walker.top,
            gfn: gfn / root_pages * root_pages,
        };
        let mut tables = self.tables.values();
        let mut table = tables.find(|table| table.place == root_place)?;
        loop {
            let index = walker.granule.index(Gfn(gfn), table.place.level);
            let place = table.place(index);
            match walker.value(table.seen[index], place.level)? {
                Value::Table { frame, .. } => table = self.tables.get(&frame)?,
                leaf => return Some((place, leaf)),
            }
        }
    }

    /// Whether the tables still allow everything that `ghost` allows, as they do after a leaf was split in place.
    pub(super) fn is_explained(&self, ghost: &Ghost) -> bool {
        if let Value::Table { .. } | Value::TableWrite = ghost.value {
            return false;
        }
        let gfns = ghost.place.gfns();
        let mut gfn = gfns.start;
        while gfn < gfns.end {
            let Some((place, leaf)) = self.leaf(ghost.place.space, gfn) else {
                return false;
            };
            let was = ghost.value.at(gfn - gfns.start);
            if !was.is_kept_by(Some(leaf.at(gfn - place.gfn))) {
                return false;
            }
            gfn = place.gfns().end;
        }
        true
    }
}
