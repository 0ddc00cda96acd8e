//! Dirty rings. The engine writes the rings. This module allocates their memory, which is part of each vCPU's file
//! (from page 64 on), so that the client's own `mmap` maps it.

use crate::engine::{EngineVcpu, EngineVm};
use crate::errno::{Result, fail, no_memory};
use crate::run_page::Shared;
pub use crate::run_page::ring_offset;
use kvm_bindings::kvm_dirty_gfn;
use slat::{DirtyGfn, DirtyRing};
use slat_host::page_size;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The greatest number of entries of a dirty ring.
const MAX_ENTRIES: u32 = 65536;
/// The greatest number of bytes of a dirty ring: the value that `KVM_CHECK_EXTENSION` returns.
pub const MAX_RING_SIZE: u32 = MAX_ENTRIES * size_of::<kvm_dirty_gfn>() as u32;

const _: () = assert!(size_of::<DirtyGfn>() == size_of::<kvm_dirty_gfn>());

/// The dirty rings of a VM.
#[derive(Debug, Default)]
pub(crate) struct Rings {
    /// The number of bytes of each ring; 0: there are no rings.
    size: AtomicU32,
}

/// Returns `size`, the number of bytes of a ring, if it is valid.
///
/// # Errors
/// `EINVAL` for a size that is no power of two, or less than a page; `E2BIG` for a size above [`MAX_RING_SIZE`].
pub(crate) fn check_size(size: u32) -> Result<u32> {
    if !size.is_power_of_two() || size < page_size() as u32 {
        return fail(libc::EINVAL);
    }
    if size > MAX_RING_SIZE {
        return fail(libc::E2BIG);
    }
    Ok(size)
}

/// The memory of one ring, which the client also maps.
struct RingMemory(Shared);

impl AsRef<[DirtyGfn]> for RingMemory {
    fn as_ref(&self) -> &[DirtyGfn] {
        let entries = self.0.start().cast::<DirtyGfn>();
        // SAFETY: the slice is the whole shared memory, which is aligned to a page and mapped as long as `self` lives.
        // A ring entry holds only atomics, for which every bit pattern is valid, whatever the client writes.
        unsafe { std::slice::from_raw_parts(entries, self.0.len() / size_of::<DirtyGfn>()) }
    }
}

impl Rings {
    /// Returns the number of bytes of each vCPU's ring, or 0.
    pub(crate) fn size(&self) -> usize {
        self.size.load(Ordering::Acquire) as usize
    }

    /// Gives each vCPU of a VM a ring of `size` bytes. Call before the VM has vCPUs.
    ///
    /// # Errors
    /// `EINVAL` for a second call.
    pub(crate) fn enable(&self, engine: &EngineVm, size: u32) -> Result<()> {
        if self.size() != 0 {
            return fail(libc::EINVAL);
        }
        engine.use_dirty_rings();
        self.size.store(size, Ordering::Release);
        Ok(())
    }

    /// Gives a new vCPU its dirty ring. The ring's memory is part of the vCPU's file, to which the vCPU's descriptor
    /// refers. `None`: the VM has no rings.
    ///
    /// # Errors
    /// `ENOMEM`, or the host's error for mapping the ring.
    pub(crate) fn equip(
        &self,
        vcpu: &mut EngineVcpu,
        fd: &OwnedFd,
    ) -> Result<Option<Arc<DirtyRing>>> {
        let size = self.size();
        if size == 0 {
            return Ok(None);
        }
        let memory = RingMemory(Shared::map(fd, ring_offset(), size)?);
        let ring = Arc::new(DirtyRing::new(memory).map_err(no_memory)?);
        vcpu.set_dirty_ring(ring.clone()).map_err(no_memory)?;
        Ok(Some(ring))
    }
}
