//! The tables that a walker can reach, each with a copy, and the meaning of their bits to the walker.

use alloc::boxed::Box;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering::Acquire};

use slat::format::Entry;
use slat::{Entries, Granule, Level, Pfn, VmId};

use super::entry::{Place, Value};

/// The model's knowledge of a format, and of the VM.
#[derive(Clone, Copy)]
pub(super) struct Walker {
    pub(super) vm: VmId,
    pub(super) decode: fn(u64, Level) -> Entry,
    /// Whether an entry that refers to a table is write-protected.
    pub(super) is_protected: fn(u64) -> bool,
    /// Removes the right to write from a leaf.
    pub(super) protect: fn(u64) -> u64,
    /// The right to write of an entry that refers to a table, if walkers cache it as a right of the whole path,
    /// like that of a leaf; else 0.
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

    /// Returns `bits`, read from a table of `level` whose path is write-protected, with the rights
    /// that a walker may cache.
    pub(super) fn below_protected(&self, bits: u64, level: Level) -> u64 {
        match self.value(bits, level) {
            Some(Value::Leaf { write: true, .. }) => (self.protect)(bits),
            Some(Value::Table { .. }) => bits & !self.path_write,
            _ => bits,
        }
    }
}

pub(super) struct Table {
    /// Position of the table's first entry.
    pub(super) place: Place,
    pub(super) entries: NonNull<Entries>,
    /// The table above, which refers to this table.
    pub(super) above: Option<Pfn>,
    pub(super) seen: Box<[u64]>,
}

// SAFETY: the entries are read atomically, and are memory until the table is dropped from the model
// ([`Tlb::watch_at`]).
unsafe impl Send for Table {}

impl Table {
    fn live(&self) -> &[AtomicU64] {
        let entries = NonNull::slice_from_raw_parts(self.entries.cast(), self.seen.len());
        // SAFETY: the entries are memory, as the contract of `Tlb::watch_at` asks. The model drops tables that were
        // freed or forgotten.
        unsafe { entries.as_ref() }
    }

    /// Reads entry `index`.
    pub(super) fn read(&self, index: usize) -> u64 {
        self.live()[index].load(Acquire)
    }

    /// Whether the table equals its copy. Usually it does, so this loop has no branch: half of a random run is
    /// spent here.
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
