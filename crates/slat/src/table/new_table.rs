//! A table that is being made. No other thread can reach it yet, so its entries are filled by plain stores.

use super::{Run, Table};
use crate::addr::{Level, Pfn};
use crate::format::{Entry, Format};
use crate::frame::TableMeta;
use crate::platform::Platform;
use crate::sync::atomic::AtomicU64;
use core::slice;

/// An allocated frame for a table. Only the owner of this value knows the frame.
pub(crate) struct NewFrame(Pfn);

impl NewFrame {
    /// Makes a `NewFrame` of `frame`, for the modules that allocate frames. No other code may know the frame.
    pub(super) fn of(frame: Pfn) -> Self {
        NewFrame(frame)
    }

    /// Returns the frame. From then on other threads may know it.
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

    /// Returns the entries, for plain stores. The table is published later by a `Release` store, so a walker that sees
    /// the table also sees these stores.
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

    /// Fills the table so that it maps the same as the entry `bits` of `level`, which is the next higher level: with
    /// the pieces of a leaf, or with empty entries.
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

    /// Calls `store`, which must store, with `Release`, an entry that refers to the frame.
    ///
    /// # Errors
    /// If `store` returns an error, it must not have stored the entry. Returns this error, and the table.
    pub(super) fn publish<T, E>(
        self,
        store: impl FnOnce(Pfn) -> Result<T, E>,
    ) -> Result<T, (E, Self)> {
        store(self.table.frame).map_err(|error| (error, self))
    }

    /// Returns the frame of the completed table. From then on other threads may know it.
    pub(crate) fn finish(self) -> Pfn {
        self.table.frame
    }

    /// Returns the frame. The contents of the table are not used.
    pub(super) fn unused(self) -> NewFrame {
        NewFrame(self.table.frame)
    }
}
