//! The buffer that the page walker of a software CPU fills: the pages whose dirty bits it has set. What it is for, and
//! who drains it, is in `vm/drain.rs`.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::{OnceBox, SpinLock};
use crate::addr::Gfn;
use crate::heap::{self, OutOfMemory};

/// The buffer of one CPU; made when its walker first needs it. Only the CPU makes it.
pub(crate) type WalkerBuffer = OnceBox<SpinLock<WrittenPages>>;

/// The entries of a buffer, at most [`WrittenPages::MOST`].
pub(crate) struct WrittenPages(Vec<(u16, Gfn)>);

impl WrittenPages {
    /// As many as a buffer of Intel's has.
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

    /// Whether it must be drained before the next dirty bit is set.
    pub(crate) fn is_full(&self) -> bool {
        self.0.len() == Self::MOST
    }

    /// Adds the page `gfn` of address space `space`. It is not full.
    pub(crate) fn push(&mut self, space: usize, gfn: Gfn) {
        debug_assert!(!self.is_full());
        self.0.push((space as u16, gfn));
    }

    /// Takes all entries out: address space and page.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = (usize, Gfn)> {
        self.0.drain(..).map(|(space, gfn)| (space.into(), gfn))
    }
}
