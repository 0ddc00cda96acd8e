//! The buffer that the page walker of a software CPU fills: the pages whose dirty bits it has set. What it is for, and
//! who drains it, is in `vm/drain.rs`.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr;

use super::SpinLock;
use crate::addr::Gfn;
use crate::heap::{self, OutOfMemory};
use crate::sync::atomic::{AtomicPtr, Ordering::*};

/// The buffer of one CPU; made when its walker first needs it.
pub(crate) struct WalkerBuffer(AtomicPtr<SpinLock<WrittenPages>>);

impl WalkerBuffer {
    pub(crate) fn new() -> Self {
        WalkerBuffer(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the buffer. `None`: nothing was ever written to it.
    pub(crate) fn get(&self) -> Option<&SpinLock<WrittenPages>> {
        // SAFETY: the pointer was made by `Box::into_raw`, and the memory is freed when `self` is dropped.
        unsafe { self.0.load(Acquire).as_ref() }
    }

    /// Returns the buffer, and makes it if there is none. Only the CPU calls it, so no two make one.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn get_or_make(&self) -> Result<&SpinLock<WrittenPages>, OutOfMemory> {
        if let Some(made) = self.get() {
            return Ok(made);
        }
        let new = Box::into_raw(heap::boxed(SpinLock::new(WrittenPages::new()?))?);
        self.0.store(new, Release);
        // SAFETY: as in `get`.
        Ok(unsafe { &*new })
    }
}

impl Drop for WalkerBuffer {
    fn drop(&mut self) {
        let buffer = self.0.swap(ptr::null_mut(), Relaxed);
        if !buffer.is_null() {
            // SAFETY: made by `Box::into_raw`; `&mut self` proves that there is no other reference.
            drop(unsafe { Box::from_raw(buffer) });
        }
    }
}

/// The entries of a buffer, at most [`WrittenPages::MOST`].
pub(crate) struct WrittenPages(Vec<(u16, Gfn)>);

impl WrittenPages {
    /// As many as a buffer of Intel's has.
    pub(crate) const MOST: usize = if cfg!(loom) { 1 } else { 512 };

    fn new() -> Result<Self, OutOfMemory> {
        let mut pages = Vec::new();
        (pages.try_reserve_exact(Self::MOST)).map_err(|_| OutOfMemory)?;
        Ok(WrittenPages(pages))
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
