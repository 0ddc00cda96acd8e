//! The client's interface to dirty logs: bitmaps, manual protection, and the rings.
//!
//! The engine logs; this module checks KVM's arguments, returns its errors, and allocates the memory of the rings, which is part of
//! each vCPU's file (from page 64 on), so that the client's own `mmap` maps it.

use crate::call::Call;
use crate::engine::EngineVcpu;
use crate::errno::{Error, Result, fail, no_memory};
use crate::heap;
use crate::run_page::{PAGE, Shared};
use crate::vm::VmObject;
use kvm_bindings::*;
use slat::{DirtyGfn, DirtyLogError, DirtyRing};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The most ring entries that a ring can have.
const MAX_ENTRIES: u32 = 65536;
/// The most bytes that a ring can have: what `KVM_CHECK_EXTENSION` returns.
pub const MAX_RING_SIZE: u32 = MAX_ENTRIES * size_of::<kvm_dirty_gfn>() as u32;
/// Offset of the ring in the file of a vCPU's descriptor.
pub const RING_OFFSET: usize = KVM_DIRTY_LOG_PAGE_OFFSET as usize * PAGE;

const _: () = assert!(size_of::<DirtyGfn>() == size_of::<kvm_dirty_gfn>());

/// The rings of a VM.
#[derive(Debug, Default)]
pub(crate) struct Rings {
    /// Bytes of each ring; 0: there are no rings.
    size: AtomicU32,
}

/// The memory of one ring, which the client maps, too.
struct RingMemory(Shared);

impl AsRef<[DirtyGfn]> for RingMemory {
    fn as_ref(&self) -> &[DirtyGfn] {
        let entries = self.0.start().cast::<DirtyGfn>();
        // SAFETY: shared memory of that many ring entries, mapped as long as `self` lives and aligned to a page; a ring entry
        // holds only atomics, of which every bit pattern is valid, whatever the client writes.
        unsafe { std::slice::from_raw_parts(entries, self.0.len() / size_of::<DirtyGfn>()) }
    }
}

impl Rings {
    /// Bytes of each vCPU's ring, or 0.
    pub(crate) fn size(&self) -> usize {
        self.size.load(Ordering::Acquire) as usize
    }

    /// Gives a new vCPU its ring, in the memory that its descriptor refers to. `None`: the VM has no rings.
    ///
    /// # Errors
    /// `ENOMEM`, or what the host returns for mapping the ring.
    pub(crate) fn equip(
        &self,
        vcpu: &mut EngineVcpu,
        fd: &OwnedFd,
    ) -> Result<Option<Arc<DirtyRing>>> {
        let size = self.size();
        if size == 0 {
            return Ok(None);
        }
        let memory = RingMemory(Shared::map(fd, RING_OFFSET, size)?);
        let ring = Arc::new(DirtyRing::new(memory).map_err(no_memory)?);
        vcpu.set_dirty_ring(ring.clone()).map_err(no_memory)?;
        Ok(Some(ring))
    }
}

/// Splits a client's slot number into address space and id.
fn space_and_id(slot: u32) -> Result<(usize, u32)> {
    let (space, id) = ((slot >> 16) as usize, slot & 0xffff);
    if space != 0 || id >= slat::MAX_SLOTS {
        return fail(libc::EINVAL);
    }
    Ok((space, id))
}

fn refused(error: DirtyLogError) -> Error {
    Error::new(error.errno())
}

impl VmObject {
    /// Begins a call for bitmaps. Fails with `ENXIO` in a VM with rings.
    fn begin_with_bitmaps(&self) -> Result<Call<'_>> {
        let call = self.begin()?;
        if self.rings.size() == 0 {
            Ok(call)
        } else {
            fail(libc::ENXIO)
        }
    }

    /// `KVM_GET_DIRTY_LOG`. Returns the pages written since the last call, a bit each; without manual protection, write-protects
    /// them again. Calls `ready` with the size in bytes before it harvests anything.
    ///
    /// # Errors
    /// `EINVAL` for a bad slot, `ENOENT` for a slot that is not logged, `ENXIO` with dirty rings, `ENOMEM`, the errors of `ready`.
    pub fn dirty_log(&self, slot: u32, ready: impl Fn(usize) -> Result<()>) -> Result<Vec<u64>> {
        let _call = self.begin_with_bitmaps()?;
        let (space, id) = space_and_id(slot)?;
        loop {
            let words = self.engine.dirty_log_words(space, id).map_err(refused)?;
            ready(words * size_of::<u64>())?;
            let mut bitmap = heap::zeroes(words)?;
            match self.engine.get_dirty_log(space, id, &mut bitmap) {
                Ok(()) => return Ok(bitmap),
                // The slot was replaced by a larger one meanwhile.
                Err(DirtyLogError::BufferTooSmall(_)) => {}
                Err(error) => return Err(refused(error)),
            }
        }
    }

    /// `KVM_CLEAR_DIRTY_LOG`: clears the pages that are set in a bitmap; their next write is logged again. `bitmap` returns the
    /// bitmap, of as many words as its argument says.
    ///
    /// # Errors
    /// `EINVAL` for a bad slot or range, `ENOENT` for a slot that is not logged, `ENXIO` with dirty rings, the errors of `bitmap`.
    pub fn clear_dirty_log<B: AsRef<[u64]>>(
        &self,
        slot: u32,
        first: u64,
        pages: u32,
        bitmap: impl FnOnce(usize) -> Result<B>,
    ) -> Result<()> {
        let _call = self.begin_with_bitmaps()?;
        let (space, id) = space_and_id(slot)?;
        if !first.is_multiple_of(64) {
            return fail(libc::EINVAL);
        }
        let words = self.engine.dirty_log_words(space, id).map_err(refused)?;
        let wanted = pages.div_ceil(64) as usize;
        if first / 64 + wanted as u64 > words as u64 {
            return fail(libc::EINVAL);
        }
        let bitmap = bitmap(wanted)?;
        self.engine
            .clear_dirty_log(space, id, first, pages.into(), bitmap.as_ref())
            .map_err(refused)
    }

    /// Carries out `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`.
    pub(crate) fn set_manual_dirty_log(&self, options: u64) -> Result<()> {
        let manual = options & u64::from(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE) != 0;
        let set = options & u64::from(KVM_DIRTY_LOG_INITIALLY_SET) != 0;
        let known = u64::from(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET);
        if options & !known != 0 || set && !manual {
            return fail(libc::EINVAL);
        }
        self.engine.set_manual_dirty_log(manual, set);
        Ok(())
    }

    /// Carries out `KVM_CAP_DIRTY_LOG_RING` and `KVM_CAP_DIRTY_LOG_RING_ACQ_REL`: allowed once, before there are vCPUs. (On x86 loads
    /// and stores have the order that the second one promises.)
    pub(crate) fn enable_dirty_rings(&self, size: u64) -> Result<()> {
        let least = PAGE as u64;
        // KVM looks at the low half only.
        let size = u64::from(size as u32);
        if !size.is_power_of_two() || size < least {
            return fail(libc::EINVAL);
        }
        if size > MAX_RING_SIZE.into() {
            return fail(libc::E2BIG);
        }
        self.before_vcpus(|| {
            if self.rings.size() != 0 {
                return fail(libc::EINVAL);
            }
            self.engine.use_dirty_rings();
            self.rings.size.store(size as u32, Ordering::Release);
            Ok(())
        })
    }

    /// `KVM_RESET_DIRTY_RINGS`: resets the ring entries that the client has collected. Returns how many there were.
    ///
    /// # Errors
    /// `EINVAL` without rings.
    pub fn reset_dirty_rings(&self) -> Result<i32> {
        let _call = self.begin()?;
        if self.rings.size() == 0 {
            return fail(libc::EINVAL);
        }
        Ok(self.engine.reset_dirty_rings() as i32)
    }
}
