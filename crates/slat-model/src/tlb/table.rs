//! The tables that a walker can reach, each with a copy, and the meaning of their bits for the walker.

use alloc::boxed::Box;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering::Acquire};

use slat::format::Entry;
use slat::{Entries, Granule, Level, Pfn, VmId};

use super::entry::{Place, Value};

/// What the model knows about the format of the tables and about the VM.
#[derive(Clone, Copy)]
pub(super) struct Walker {
    pub(super) vm: VmId,
    pub(super) decode: fn(u64, Level) -> Entry,
    /// Whether an entry that refers to a table lacks the right to write.
    pub(super) is_protected: fn(u64) -> bool,
    /// Returns a leaf without its right to write.
    pub(super) protect: fn(u64) -> u64,
    /// The bit with the right to write in an entry that refers to a table, if page walkers cache this right for the
    /// whole path below the entry, like the right of a leaf. Otherwise 0.
    pub(super) path_write: u64,
    pub(super) break_before_make: bool,
    pub(super) granule: Granule,
    pub(super) top: Level,
}

impl Walker {
    pub(super) fn value(&self, bits: u64, level: Level) -> Option<Value> {
        match (self.decode)(bits, level) {
            Entry::Table(frame) => Some(Value::Table {
                frame,
                write: !(self.is_protected)(bits),
            }),
            Entry::Leaf(leaf) => Some(Value::Leaf {
                pfn: leaf.pfn,
                memory: leaf.memory,
                write: leaf.write,
                execute: leaf.execute,
                dirty: leaf.dirty,
            }),
            Entry::Empty | Entry::Mmio { .. } | Entry::Broken(_) => None,
        }
    }

    /// Returns the entry `bits` of a table of `level` with only the rights that a page walker may cache if the path to
    /// the table is write-protected.
    pub(super) fn below_protected(&self, bits: u64, level: Level) -> u64 {
        match self.value(bits, level) {
            Some(Value::Leaf { write: true, .. }) => (self.protect)(bits),
            Some(Value::Table { .. }) => bits & !self.path_write,
            _ => bits,
        }
    }
}

pub(super) struct Table {
    /// The position of the table's first entry.
    pub(super) place: Place,
    pub(super) entries: NonNull<Entries>,
    /// The table at the next higher level, which refers to this table.
    pub(super) above: Option<Pfn>,
    pub(super) seen: Box<[u64]>,
}

// SAFETY: the entries are read atomically, and their memory stays allocated until the table is dropped from the model
// ([`Tlb::watch_at`]).
unsafe impl Send for Table {}

impl Table {
    fn live(&self) -> &[AtomicU64] {
        let entries = NonNull::slice_from_raw_parts(self.entries.cast(), self.seen.len());
        // SAFETY: the entries' memory is allocated, as the contract of `Tlb::watch_at` requires. The model drops tables
        // that were freed or forgotten.
        unsafe { entries.as_ref() }
    }

    /// Reads entry `index`.
    pub(super) fn read(&self, index: usize) -> u64 {
        self.live()[index].load(Acquire)
    }

    /// Whether the table equals its copy. The two are usually equal, so this loop has no branch; a random run spends
    /// half of its time here.
    pub(super) fn is_as_seen(&self) -> bool {
        let entries = self.live().iter().zip(&self.seen);
        entries.fold(0, |all, (entry, seen)| all | (entry.load(Acquire) ^ seen)) == 0
    }

    pub(super) fn place(&self, index: usize) -> Place {
        Place {
            gfn: self.place.gfn + index as u64 * self.place.pages(),
            ..self.place
        }
    }
}

/// Returns the number of frames that one table of the root translates.
pub(super) fn root_pages(granule: Granule, top: Level) -> u64 {
    granule.pages(top) * granule.entries() as u64
}
