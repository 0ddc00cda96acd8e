//! [`Memslot`]: a memslot with the host memory that backs it.

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

/// A memslot of a VM, with the host memory that backs it. It is also the [`Bitmap`] of its vm-memory region. Dropping
/// it deletes the memslot, and then unmaps the memory. It keeps the VM alive.
pub struct Memslot {
    vm: Arc<VmFd>,
    /// The arguments with which the memslot was created. Since then, the flag KVM_MEM_LOG_DIRTY_PAGES may have changed.
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
            // Refuse size 0: for KVM, it would delete the memslot.
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

    /// Returns the memslot's number: the upper 16 bits are the address space.
    pub fn number(&self) -> u32 {
        self.region.slot
    }

    /// Starts or stops dirty logging. In a new log no page is marked, or, if the VM has KVM_DIRTY_LOG_INITIALLY_SET,
    /// every page.
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

    /// Returns the guest-physical address of the byte at `offset` in the memslot.
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
/// The backing stays mapped until the memslot is deleted, and only vm-memory accesses it.
unsafe fn set(vm: &VmFd, region: kvm_userspace_memory_region) -> Result<(), Error> {
    let slot = region.slot;
    if region.flags & KVM_MEM_LOG_DIRTY_PAGES != 0 {
        // To find out whether the VM has dirty rings, ask it to clear no page of a log, which changes nothing.
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
        // If deleting fails, the VM is broken, and a vCPU may still use the memory: then do not unmap it.
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
        // Ignore an error: the harvest of the log would return the same error.
        let _ = self
            .vm
            .mark_dirty(self.space(), self.address(offset), len as u64);
    }

    /// Whether the page is marked in the memslot's log now. A harvest clears the mark. Always `false` if the memslot
    /// does not log.
    fn dirty_at(&self, offset: usize) -> bool {
        let marked = self.vm.is_marked_dirty(self.space(), self.address(offset));
        marked.unwrap_or(false)
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Memslot> {
        RefSlice::new(self, offset)
    }
}
