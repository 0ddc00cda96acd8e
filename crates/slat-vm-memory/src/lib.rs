//! rust-vmm's guest memory over slat's memslots, so that a VM has one dirty log.
//!
//! With KVM, a VMM that migrates its guest has two logs: KVM's log of the pages that vCPUs write, and the VMM's own
//! bitmap of the pages that its devices write. The VMM must harvest and join both. With this crate, a write through
//! [`vm-memory`](vm_memory) marks its pages in the log of the memslot ([`slat_kvm::VmFd::mark_dirty`]), so
//! `KVM_GET_DIRTY_LOG` returns both kinds of pages.
//!
//! | item | contents |
//! |---|---|
//! | [`memory`], [`region`] | make vm-memory's collection of regions, or one region, and the memslots for these regions |
//! | [`Memslot`] | a memslot and the host memory that backs it; the [`Bitmap`](vm_memory::bitmap::Bitmap) of its region |
//!
//! A region's memslot exists as long as the region's mapping. When the last owner drops the region, the memslot is
//! deleted first, and then the mapping is removed. So to plug guest memory, use [`region`] and vm-memory's
//! `insert_region`; to unplug it, `remove_region`.
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
//! As with every bitmap of vm-memory, two kinds of writes are not logged: writes through raw pointers
//! (`get_host_address`, `ptr_guard_mut`), and writes of other processes that map the memory. Call
//! [`mark_dirty`](slat_kvm::VmFd::mark_dirty) after such writes. Dirty rings cannot record a write that no vCPU makes,
//! so in a VM with dirty rings, memslots of this crate cannot log ([`Error::Rings`]).

mod error;
mod memslot;

pub use error::Error;
pub use memslot::Memslot;

use slat_kvm::VmFd;
use std::sync::Arc;
use vm_memory::mmap::{FromRangesError, MmapRegionBuilder};
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

/// Makes guest memory of anonymous host memory: a region and a memslot for each of `ranges`, which are in ascending
/// order. The memslots are numbered from 0, and have `flags` (`KVM_MEM_LOG_DIRTY_PAGES`, `KVM_MEM_READONLY`).
///
/// # Errors
/// The errors of [`region`], and an error if ranges overlap or are not sorted. After an error, the VM has none of the
/// memslots.
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

/// Makes a region of the host memory `backing` at guest-physical address `start`, and for it the memslot with the
/// number `slot` and KVM's `flags`. As in KVM, the upper 16 bits of `slot` are the address space.
///
/// # Errors
/// [`Error::Memslot`] if KVM_SET_USER_MEMORY_REGION refuses the memslot; [`Error::Rings`] if the memslot is to log and
/// the VM has dirty rings. The VM is unchanged then.
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
    // SAFETY: the region owns the memslot, and the memslot owns `backing`, which is mapped at `memory`.
    let view = unsafe { view.with_raw_mmap_pointer(memory) };
    let view = view.build().map_err(FromRangesError::from)?;
    let region = GuestRegionMmap::new(view, start);
    Ok(region.ok_or(FromRangesError::InvalidGuestRegion)?)
}
