//! [`Memslot`]: a memslot with its memory and its log.

use crate::Error;
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use slat_kvm::VmFd;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use vm_memory::bitmap::{Bitmap, RefSlice, WithBitmapSlice};
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

/// `ENXIO`: the VM has dirty rings.
const ENXIO: i32 = 6;
/// `EINVAL`: a bad argument.
const EINVAL: i32 = 22;

/// A memslot of a VM with the host memory that backs it, and the [`Bitmap`] of the region for which the memslot is
/// made. Dropping this value deletes the memslot, and then unmaps the memory. This value keeps the VM alive.
pub struct Memslot {
    vm: Arc<VmFd>,
    /// The region with which the memslot was created. Of the flags, KVM_MEM_LOG_DIRTY_PAGES may have changed.
    region: kvm_userspace_memory_region,
    /// The memory. `drop` unmaps it.
    backing: ManuallyDrop<MmapRegion>,
}

impl Memslot {
    /// Returns the memslot of `region`.
    pub fn of(region: &GuestRegionMmap<Memslot>) -> &Memslot {
        MmapRegion::bitmap(region)
    }

    /// Creates memslot number `slot` at `start`, backed by `backing`.
    ///
    /// # Errors
    /// [`Error::Memslot`], [`Error::Rings`]; then the VM is unchanged.
    pub(crate) fn create(
        vm: &Arc<VmFd>,
        slot: u32,
        flags: u32,
        start: GuestAddress,
        backing: MmapRegion,
    ) -> Result<Self, Error> {
        let region = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: start.0,
            memory_size: backing.size() as u64,
            userspace_addr: backing.as_ptr() as u64,
        };
        if backing.size() == 0 {
            // For KVM, a region of size 0 would delete a memslot.
            return Err(refused(region, slat_kvm::Error::new(EINVAL)));
        }
        // SAFETY: `drop` unmaps the memory after it has deleted the memslot.
        unsafe { set(vm, region)? };
        Ok(Memslot {
            vm: vm.clone(),
            region,
            backing: ManuallyDrop::new(backing),
        })
    }

    /// Returns the memslot's number: the upper half is the address space.
    pub fn number(&self) -> u32 {
        self.region.slot
    }

    /// Starts or stops dirty logging. A new log is empty, or full if the VM has KVM_DIRTY_LOG_INITIALLY_SET.
    ///
    /// # Errors
    /// [`Error::Memslot`], [`Error::Rings`].
    pub fn log_dirty_pages(&self, on: bool) -> Result<(), Error> {
        let others = self.region.flags & !KVM_MEM_LOG_DIRTY_PAGES;
        let flags = match on {
            true => others | KVM_MEM_LOG_DIRTY_PAGES,
            false => others,
        };
        let region = kvm_userspace_memory_region {
            flags,
            ..self.region
        };
        // SAFETY: `drop` unmaps the memory after it has deleted the memslot.
        unsafe { set(&self.vm, region) }
    }

    /// Harvests the memslot's log by KVM_GET_DIRTY_LOG: a bit for each page that a vCPU or a device has written.
    ///
    /// # Errors
    /// `ENOENT` if the memslot is not logged, `ENXIO` if dirty rings were enabled after dirty logging started, `EIO` in
    /// a forked child.
    pub fn dirty_log(&self) -> slat_kvm::Result<Vec<u64>> {
        self.vm.get_dirty_log(self.region.slot, self.backing.size())
    }

    fn space(&self) -> usize {
        (self.region.slot >> 16) as usize
    }

    /// Returns the guest-physical address of byte `offset`.
    fn address(&self, offset: usize) -> u64 {
        self.region.guest_phys_addr.wrapping_add(offset as u64)
    }
}

/// Creates, changes or deletes the memslot `region` of `vm`.
///
/// # Errors
/// [`Error::Memslot`], [`Error::Rings`].
///
/// # Safety
/// The backing stays mapped until the memslot is deleted, and vm-memory alone accesses it.
unsafe fn set(vm: &VmFd, region: kvm_userspace_memory_region) -> Result<(), Error> {
    let slot = region.slot;
    if region.flags & KVM_MEM_LOG_DIRTY_PAGES != 0 {
        // A request to clear no page changes nothing, and its result tells whether the VM has rings.
        match vm.clear_dirty_log(slot, 0, 0, &[]) {
            Err(error) if error.errno() == ENXIO => return Err(Error::Rings(slot)),
            _ => {}
        }
    }
    // SAFETY: the backing stays mapped and only vm-memory accesses it, as this function's `# Safety` asks of its
    // caller. vm-memory expects that guests write the memory at any time.
    let set = unsafe { vm.set_user_memory_region(region) };
    set.map_err(|error| refused(region, error))
}

fn refused(region: kvm_userspace_memory_region, error: slat_kvm::Error) -> Error {
    Error::Memslot {
        slot: region.slot,
        start: region.guest_phys_addr,
        size: region.memory_size,
        error,
    }
}

impl Drop for Memslot {
    fn drop(&mut self) {
        let nothing = kvm_userspace_memory_region {
            flags: 0,
            memory_size: 0,
            ..self.region
        };
        // SAFETY: the call deletes the memslot.
        let deleted = unsafe { set(&self.vm, nothing) };
        // If the VM refuses, it is dead, and a vCPU may still be in the guest: keep the memory mapped for that vCPU.
        if deleted.is_ok() {
            // SAFETY: only this code drops the memory, which is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.backing) };
        }
    }
}

impl fmt::Debug for Memslot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Memslot").field(&self.region).finish()
    }
}

impl<'a> WithBitmapSlice<'a> for Memslot {
    type S = RefSlice<'a, Memslot>;
}

/// vm-memory calls these with offsets from the region's start.
impl Bitmap for Memslot {
    /// Marks the pages in the VM's log. vm-memory calls this after the write.
    fn mark_dirty(&self, offset: usize, len: usize) {
        // Ignore an error: the log of such a VM cannot be harvested either, and the harvest returns the error.
        let _ = self
            .vm
            .mark_dirty(self.space(), self.address(offset), len as u64);
    }

    /// Whether the page is marked in the VM's log now. A harvest clears the mark. Always `false` without a log.
    fn dirty_at(&self, offset: usize) -> bool {
        let marked = self.vm.is_marked_dirty(self.space(), self.address(offset));
        marked.unwrap_or(false)
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Memslot> {
        RefSlice::new(self, offset)
    }
}
