//! rust-vmm's guest memory over slat's memslots, so that a VM has one dirty log.
//!
//! On KVM, a VMM that migrates its guest has two logs. KVM's log has the pages that vCPUs write. The VMM's own bitmap
//! has the pages that devices write. The VMM has to harvest and join both logs. Here a write through
//! [`vm-memory`](vm_memory) marks its pages in the log of the memslot ([`slat_kvm::VmFd::mark_dirty`]), and
//! `KVM_GET_DIRTY_LOG` returns both kinds of pages.
//!
//! | item | idea |
//! |---|---|
//! | [`memory`], [`region`] | make vm-memory's own collection and regions, and the memslots with them |
//! | [`Memslot`] | a memslot and the host memory that backs it; the [`Bitmap`](vm_memory::bitmap::Bitmap) of its region |
//!
//! A region's memslot exists as long as the region's mapping. When the last user of the region drops the region, the
//! memslot is deleted first, and then the mapping is removed. So [`region`] and `insert_region` plug guest memory, and
//! `remove_region` unplugs it.
//!
//! ```
//! use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;
//! use slat_vm_memory::{Memslot, memory};
//! use std::sync::Arc;
//! use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
//!
//! let vm = Arc::new(slat_kvm::Kvm::new()?.create_vm()?);
//! let memory = memory(&vm, KVM_MEM_LOG_DIRTY_PAGES, &[(GuestAddress(0), 0x10_0000)])?;
//! memory.write_obj(42u32, GuestAddress(0x3ffe))?;
//!
//! let region = memory.find_region(GuestAddress(0)).ok_or("it is there")?;
//! assert_eq!(Memslot::of(region).dirty_log()?[0], 0b1_1000);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Writes that are not logged
//! As with any bitmap of vm-memory, two kinds of writes are not logged: writes through raw pointers
//! (`get_host_address`, `ptr_guard_mut`), and writes by other processes that map the memory. Call
//! [`mark_dirty`](slat_kvm::VmFd::mark_dirty) after such writes. A VM with dirty rings has no log for a write that no
//! vCPU makes, so its memslots cannot be logged here ([`Error::Rings`]).

mod error;
mod memslot;

pub use error::Error;
pub use memslot::Memslot;

use slat_kvm::VmFd;
use std::sync::Arc;
use vm_memory::mmap::{FromRangesError, MmapRegionBuilder};
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

/// Makes guest memory of anonymous host memory, a region and a memslot for each of `ranges`, which are in ascending
/// order. The memslots are those from number 0 on, with `flags`: `KVM_MEM_LOG_DIRTY_PAGES`, `KVM_MEM_READONLY`.
///
/// # Errors
/// The errors of [`region`]. It is also an error if ranges overlap or are not sorted. After an error, the VM has none
/// of the memslots.
pub fn memory(
    vm: &Arc<VmFd>,
    flags: u32,
    ranges: &[(GuestAddress, usize)],
) -> Result<GuestMemoryMmap<Memslot>, Error> {
    let regions = (0..).zip(ranges).map(|(slot, (start, size))| {
        let backing = MmapRegion::new(*size).map_err(FromRangesError::from)?;
        region(vm, slot, flags, *start, backing)
    });
    let regions = regions.collect::<Result<_, _>>()?;
    Ok(GuestMemoryMmap::from_regions(regions).map_err(FromRangesError::from)?)
}

/// Makes a region at guest-physical address `start` of the host memory `backing`, and memslot number `slot` for it,
/// with KVM's `flags`. As in KVM, the upper half of `slot` is the address space.
///
/// # Errors
/// [`Error::Memslot`] if KVM_SET_USER_MEMORY_REGION refuses the memslot; [`Error::Rings`] if the memslot would be
/// logged. Then the VM is unchanged.
pub fn region(
    vm: &Arc<VmFd>,
    slot: u32,
    flags: u32,
    start: GuestAddress,
    backing: MmapRegion,
) -> Result<GuestRegionMmap<Memslot>, Error> {
    let memory = backing.as_ptr();
    let (size, prot, mmap_flags) = (backing.size(), backing.prot(), backing.flags());
    let (file, hugetlbfs) = (backing.file_offset().cloned(), backing.is_hugetlbfs());

    let memslot = Memslot::create(vm, slot, flags, start, backing)?;
    let mut view = MmapRegionBuilder::new_with_bitmap(size, memslot)
        .with_mmap_prot(prot)
        .with_mmap_flags(mmap_flags);
    if let Some(file) = file {
        view = view.with_file_offset(file);
    }
    if let Some(hugetlbfs) = hugetlbfs {
        view = view.with_hugetlbfs(hugetlbfs);
    }
    // SAFETY: the memslot owns `backing`, which is mapped at `memory`. The region owns the memslot.
    let view = unsafe { view.with_raw_mmap_pointer(memory) };
    let view = view.build().map_err(FromRangesError::from)?;
    let region = GuestRegionMmap::new(view, start);
    Ok(region.ok_or(FromRangesError::InvalidGuestRegion)?)
}
