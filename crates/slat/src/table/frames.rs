//! Allocates, frees and counts the frames for tables that a VM gets from its platform.
//!
//! All threads share the counts. They change only when frames are allocated or freed, so a fault that needs no new
//! table does not write them. They are not part of the loom models, because no protocol depends on their values.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::NewFrame;
use crate::addr::Pfn;
use crate::heap::OutOfMemory;
use crate::platform::{Platform, VmId};

/// Allocates and frees the frames for the tables of one VM.
pub(crate) struct TableFrames {
    vm: VmId,
    now: AtomicU64,
    peak: AtomicU64,
}

impl TableFrames {
    pub(crate) fn new(vm: VmId) -> Self {
        TableFrames {
            vm,
            now: AtomicU64::new(0),
            peak: AtomicU64::new(0),
        }
    }

    /// Allocates the frames of a root of `tables` tables ([`Platform::alloc_root`]), and passes each to `make`. Returns
    /// the first frame.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn allocate_root(
        &self,
        platform: &impl Platform,
        tables: usize,
        make: impl FnMut(NewFrame),
    ) -> Result<Pfn, OutOfMemory> {
        let root = platform.alloc_root(self.vm, tables).ok_or(OutOfMemory)?;
        self.allocated(tables as u64);
        let all = (0..tables as u64).map(|i| NewFrame::of(root.add(i)));
        all.for_each(make);
        Ok(root)
    }

    /// Allocates up to `frames` frames, and passes each to `take`.
    pub(super) fn allocate(
        &self,
        platform: &impl Platform,
        frames: usize,
        mut take: impl FnMut(Pfn),
    ) {
        let mut given = 0;
        platform.alloc_tables(self.vm, frames, &mut |frame| {
            given += 1;
            take(frame);
        });
        self.allocated(given);
    }

    /// Frees `frames`.
    ///
    /// # Safety
    /// - The frames belong to this VM, and no walker can reach a table in them.
    pub(super) unsafe fn free(&self, platform: &impl Platform, frames: &[Pfn]) {
        // SAFETY: the frames belong to this VM and no page walker can reach them, as this function's `# Safety` asks of
        // its caller.
        unsafe { platform.free_tables(self.vm, frames) };
        self.now.fetch_sub(frames.len() as u64, Relaxed);
    }

    fn allocated(&self, frames: u64) {
        let now = self.now.fetch_add(frames, Relaxed) + frames;
        if self.peak.load(Relaxed) < now {
            self.peak.fetch_max(now, Relaxed);
        }
    }

    /// Returns the number of frames allocated now, and the largest number so far.
    pub(crate) fn count(&self) -> (u64, u64) {
        (self.now.load(Relaxed), self.peak.load(Relaxed))
    }
}
