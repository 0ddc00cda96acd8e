//! Compares tables with the model's copies of them. Every entry that was removed from a table since the last comparison
//! becomes a ghost.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use slat::{Gfn, Level, Pfn};

use super::entry::{Ghost, Place, Value};
use super::table::Table;
use super::{FINDINGS, Inner};

impl Inner {
    /// Adds the table in `frame` to the model. A page walker can now reach this table through an entry of the table
    /// `above`. The table's first entry is at `place`.
    pub(super) fn reach(&mut self, frame: Pfn, place: Place, above: Option<Pfn>) {
        let entries = self.entries.as_ref();
        let entries = entries.expect("tables are known while it watches")(frame);
        let seen = vec![0; place.granule.entries()].into_boxed_slice();
        let table = Table {
            place,
            entries,
            above,
            seen,
        };
        self.tables.insert(frame, table);
        self.touched.insert(frame);
        self.compare(frame);
    }

    pub(super) fn compare_touched(&mut self) {
        let touched: Vec<_> = self.touched.iter().copied().collect();
        for frame in touched {
            self.compare(frame);
        }
    }

    /// Compares a table with its copy. Makes ghosts of changed entries, and updates the copy.
    pub(super) fn compare(&mut self, frame: Pfn) {
        let protected = self.is_below_protected(frame);
        let Some((walker, table)) = self.walker.zip(self.tables.get_mut(&frame)) else {
            return;
        };
        if !protected && table.is_as_seen() {
            return;
        }
        let level = table.place.level;
        let mut changes = Vec::new();
        for i in 0..table.seen.len() {
            let now = match protected {
                true => walker.below_protected(table.read(i), level),
                false => table.read(i),
            };
            let was = core::mem::replace(&mut table.seen[i], now);
            if now != was {
                changes.push((i, was, now));
            }
        }
        for (i, was, now) in changes {
            if let Some(table) = self.tables.get(&frame) {
                let place = table.place(i);
                self.change(frame, place, was, now);
            }
        }
    }

    /// Whether an entry on the path to the table in `frame` is write-protected.
    fn is_below_protected(&self, frame: Pfn) -> bool {
        let Some(walker) = self.walker else {
            return false;
        };
        let (mut frame, mut protected) = (frame, false);
        while let Some(table) = self.tables.get(&frame)
            && let Some(above) = table.above
            && let Some(upper) = self.tables.get(&above)
        {
            let level = upper.place.level;
            let index = upper.place.granule.index(Gfn(table.place.gfn), level);
            let bits = upper.read(index);
            match walker.value(bits, level) {
                Some(Value::Table {
                    frame: lower,
                    write,
                }) if lower == frame => protected |= !write,
                // The entry was removed. A page walker that can still reach the table has cached the removed entry,
                // with the old right, before its removal.
                _ => return false,
            }
            frame = above;
        }
        protected
    }

    /// Removes the right to write from the copies of the table in `frame` and of the tables below it. The removed
    /// rights become ghosts, because a page walker may have cached them.
    fn protect_below(&mut self, frame: Pfn) {
        let Some((walker, table)) = self.walker.zip(self.tables.get_mut(&frame)) else {
            return;
        };
        let level = table.place.level;
        let mut lost = Vec::new();
        for i in 0..table.seen.len() {
            let was = table.seen[i];
            table.seen[i] = walker.below_protected(was, level);
            if table.seen[i] != was {
                lost.extend(walker.value(was, level).map(|value| match value {
                    Value::Table { .. } => (table.place(i), Value::TableWrite),
                    leaf => (table.place(i), leaf),
                }));
            }
        }
        for (place, value) in lost {
            self.add_ghost(place, value);
        }
        for below in self.below(frame) {
            self.protect_below(below);
        }
    }

    fn add_ghost(&mut self, place: Place, value: Value) {
        let number = self.made;
        self.made += 1;
        self.ghosts.push(Ghost {
            place,
            value,
            number,
        });
        self.lost = true;
    }

    /// Records the change of an entry of the table in `frame` from `was` to `now`. The entry is at `place`.
    fn change(&mut self, frame: Pfn, place: Place, was: u64, now: u64) {
        let walker = self.walker.expect("tables are known while it watches");
        let value = |bits| walker.value(bits, place.level);
        let (was, now) = (value(was), value(now));
        if let Some(value) = was
            && !value.is_kept_by(now)
        {
            let stays = value
                .table()
                .filter(|_| now.and_then(|now| now.table()) == value.table());
            if let Some(below) = stays {
                self.protect_below(below);
                self.add_ghost(place, Value::TableWrite);
            } else {
                if let Some(below) = value.table() {
                    self.compare_below(below);
                }
                self.add_ghost(place, value);
            }
        }
        let Some(value) = now else { return };
        if walker.break_before_make
            && let Some(ghost) = self.ghosts.iter().find(|g| g.conflicts(&place, &value))
        {
            self.conflicts += 1;
            if self.findings.len() < FINDINGS {
                let finding = format!("{value:x?} of {place:x?} conflicts with {ghost:x?}");
                self.findings.push(finding);
            }
        }
        if let Some(below) = value.table()
            && was.and_then(|was| was.table()) != Some(below)
        {
            let level = place.level.below();
            self.reach(below, Place { level, ..place }, Some(frame));
        }
    }

    fn compare_below(&mut self, frame: Pfn) {
        self.compare(frame);
        for below in self.below(frame) {
            self.compare_below(below);
        }
    }

    /// Returns the tables to which entries of the table in `frame` refer.
    fn below(&self, frame: Pfn) -> Vec<Pfn> {
        let Some((walker, table)) = self.walker.zip(self.tables.get(&frame)) else {
            return Vec::new();
        };
        let level = table.place.level;
        if level == Level::PAGE {
            return Vec::new();
        }
        let values = table.seen.iter().map(|bits| walker.value(*bits, level));
        let tables = values.filter_map(|value| match value {
            Some(value) => value.table(),
            None => None,
        });
        tables.collect()
    }

    pub(super) fn forget_below(&mut self, frame: Pfn) {
        for below in self.below(frame) {
            self.forget_below(below);
        }
        self.tables.remove(&frame);
        self.touched.remove(&frame);
    }
}
