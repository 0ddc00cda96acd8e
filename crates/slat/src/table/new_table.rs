//! A table that is being made: no other thread can reach it, so its entries are filled by plain stores.

use super::{Run, Table};
use crate::addr::{Level, Pfn};
use crate::format::{Entry, Format};
use crate::frame::TableMeta;
use crate::platform::Platform;
use crate::sync::atomic::AtomicU64;
use core::slice;

/// An allocated frame for a table, which only its owner knows.
pub(crate) struct NewFrame(Pfn);

impl NewFrame {
    /// Takes over `frame`, for the modules that allocate frames: no other code knows the frame.
    pub(super) fn of(frame: Pfn) -> Self {
        NewFrame(frame)
    }

    /// Returns the frame. From now on other threads may know it.
    pub(super) fn release(self) -> Pfn {
        self.0
    }
}

/// The table in a [`NewFrame`].
pub(crate) struct NewTable<'p, P: Platform, F: Format> {
    table: Table<'p, P, F>,
}

impl<'p, P: Platform, F: Format> NewTable<'p, P, F> {
    pub(crate) fn new(platform: &'p P, frame: NewFrame) -> Self {
        NewTable {
            table: Table::new(platform, frame.release()),
        }
    }

    pub(crate) fn meta(&self) -> &TableMeta {
        self.table.meta()
    }

    /// Returns the entries, for plain stores. A walker that sees the table published, by a `Release` store, sees these
    /// stores, too.
    pub(super) fn entries(&mut self) -> &mut [AtomicU64] {
        let first = self.table.platform.entries(self.table.frame);
        // SAFETY: an allocated frame has this number of entries, as `Platform`'s `# Safety` says. No other code knows
        // the frame (`NewFrame`) before `publish` or `finish`, which consume `self`.
        unsafe { slice::from_raw_parts_mut(first.cast().as_ptr(), F::GRANULE.entries()) }
    }

    /// Makes all entries of the table absent.
    pub(crate) fn clear(&mut self) {
        for entry in self.entries() {
            *entry.get_mut() = 0;
        }
        self.meta().begin(0);
    }

    /// Fills the table so that it means the same as the entry `bits` of the next higher `level`: with the pieces of a
    /// leaf, or with empty entries.
    pub(super) fn fill_below(&mut self, level: Level, bits: u64) {
        match F::decode(bits, level) {
            Entry::Leaf(huge) | Entry::Broken(huge) => {
                let run = Run::<F>::new(huge.piece(F::GRANULE, level, 0), level.below());
                run.fill(self.entries());
                self.meta().begin(F::GRANULE.entries() as u16);
            }
            _ => self.clear(),
        }
    }

    /// Calls `store` to store an entry that refers to the frame, with `Release`.
    ///
    /// # Errors
    /// The error of `store`, which has then stored nothing, and the table.
    pub(super) fn publish<T, E>(
        self,
        store: impl FnOnce(Pfn) -> Result<T, E>,
    ) -> Result<T, (E, Self)> {
        store(self.table.frame).map_err(|error| (error, self))
    }

    /// Finishes the table. Returns the frame, which other threads may know from now on.
    pub(crate) fn finish(self) -> Pfn {
        self.table.frame
    }

    /// Returns the frame. The contents of the table are dropped.
    pub(super) fn unused(self) -> NewFrame {
        NewFrame(self.table.frame)
    }
}
