//! The buffer that the page walker of a software CPU fills with the pages whose dirty bits it has set. `vm/drain.rs`
//! explains how it is used.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::{OnceBox, SpinLock};
use crate::addr::Gfn;
use crate::heap::{self, OutOfMemory};

/// The buffer of one software CPU, which is allocated when its page walker first needs it.
pub(crate) type WalkerBuffer = OnceBox<SpinLock<WrittenPages>>;

/// The contents of a buffer: the number of the address space and the page of each entry, at most [`WrittenPages::MOST`]
/// entries.
pub(crate) struct WrittenPages(Vec<(u16, Gfn)>);

impl WrittenPages {
    /// The largest number of entries: as many as in an Intel PML buffer.
    pub(crate) const MOST: usize = if cfg!(loom) { 1 } else { 512 };

    /// Makes an empty buffer.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn buffer() -> Result<Box<SpinLock<Self>>, OutOfMemory> {
        let mut pages = Vec::new();
        (pages.try_reserve_exact(Self::MOST)).map_err(|_| OutOfMemory)?;
        heap::boxed(SpinLock::new(WrittenPages(pages)))
    }

    /// Whether the buffer must be drained before the next dirty bit is set.
    pub(crate) fn is_full(&self) -> bool {
        self.0.len() == Self::MOST
    }

    /// Adds the page `gfn` of address space `space`. The buffer must not be full.
    pub(crate) fn push(&mut self, space: usize, gfn: Gfn) {
        debug_assert!(!self.is_full());
        self.0.push((space as u16, gfn));
    }

    /// Removes and returns all entries: address space and page.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = (usize, Gfn)> {
        self.0.drain(..).map(|(space, gfn)| (space.into(), gfn))
    }
}
