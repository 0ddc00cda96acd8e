//! Page-table entries as a walker reads them, and ghosts: changed entries that a walker may still have cached.

use core::ops::Range;

use slat::{Granule, Level, MemoryType, Pfn};

/// The position of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) space: usize,
    /// The granule, which all tables of the model have in common.
    pub(super) granule: Granule,
    pub(super) level: Level,
    /// The first frame that the entry translates.
    pub(super) gfn: u64,
}

impl Place {
    pub(super) fn pages(&self) -> u64 {
        self.granule.pages(self.level)
    }

    pub(super) fn gfns(&self) -> Range<u64> {
        self.gfn..self.gfn + self.pages()
    }
}

/// The parts of a valid entry that a page walker uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Table {
        frame: Pfn,
        write: bool,
    },
    /// For ghosts only: the right to write in an entry that refers to a table.
    TableWrite,
    Leaf {
        pfn: Pfn,
        memory: MemoryType,
        write: bool,
        execute: bool,
        /// Whether the dirty bit was set. A page walker that has cached a dirty leaf does not set the bit again.
        dirty: bool,
    },
}

impl Value {
    /// Whether `now`, the current entry at the same position, allows everything that `self` allows.
    pub(super) fn is_kept_by(&self, now: Option<Value>) -> bool {
        match (*self, now) {
            (
                Value::Leaf {
                    write,
                    execute,
                    dirty,
                    ..
                },
                Some(Value::Leaf {
                    write: now_write,
                    execute: now_execute,
                    dirty: now_dirty,
                    ..
                }),
            ) => {
                let kept = (!write || now_write) && (!execute || now_execute);
                kept && (!dirty || now_dirty) && now.is_some_and(|now| self.means(&now))
            }
            (
                Value::Table { frame, write },
                Some(Value::Table {
                    frame: now,
                    write: stays,
                }),
            ) => frame == now && (!write || stays),
            _ => false,
        }
    }

    /// Returns the table that the entry refers to.
    pub(super) fn table(&self) -> Option<Pfn> {
        match self {
            Value::Table { frame, .. } => Some(*frame),
            _ => None,
        }
    }

    /// Whether both values refer to the same frame and, if they are leaves, have the same memory type.
    fn means(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::Table { frame, .. }, Value::Table { frame: other, .. }) => frame == other,
            (
                Value::Leaf { pfn, memory, .. },
                Value::Leaf {
                    pfn: other_pfn,
                    memory: other_memory,
                    ..
                },
            ) => pfn == other_pfn && memory == other_memory,
            _ => false,
        }
    }

    /// Returns the part of a leaf for one 4 KiB page, at `offset` pages from the leaf's start.
    pub(super) fn at(self, offset: u64) -> Value {
        match self {
            Value::Leaf {
                pfn,
                memory,
                write,
                execute,
                dirty,
            } => Value::Leaf {
                pfn: pfn.add(offset),
                memory,
                write,
                execute,
                dirty,
            },
            table => table,
        }
    }
}

/// A page-table entry that was changed or zapped, and that a TLB may still hold because no flush has followed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ghost {
    pub(super) place: Place,
    pub(super) value: Value,
    /// The number of ghosts that were made before this ghost.
    pub(super) number: u64,
}

impl Ghost {
    /// Whether `value` at `place` conflicts with this ghost: a page walker that may hold the ghost must not find such a
    /// value.
    pub(super) fn conflicts(&self, place: &Place, value: &Value) -> bool {
        if self.place.space != place.space || !overlap(&self.place.gfns(), &place.gfns()) {
            return false;
        }
        if self.place.level == place.level {
            return !self.value.means(value);
        }
        // A leaf that a page walker has reached through a removed table does not conflict with another table, but with
        // that other table's entries. A leaf conflicts with everything that is cached below it, and with a larger leaf.
        match (value, &self.value) {
            (Value::Leaf { .. }, Value::Leaf { .. }) => true,
            (Value::Leaf { .. }, Value::Table { .. }) => self.place.level < place.level,
            _ => false,
        }
    }
}

pub(super) fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
