//! The tables of the crate page_table_multiarch, with x86-64 entries. The crate frees tables only when the whole tree
//! is dropped.

use memory_addr::{PhysAddr, VirtAddr};
use page_table_multiarch::{MappingFlags, PageTable64, PagingHandler, PagingMetaData};

use super::{BASE, Order, PAGES, Peer};
use crate::frames;

/// The allocator of frames for this crate's tables.
pub struct Source;

impl PagingHandler for Source {
    fn alloc_frames(count: usize, _align: usize) -> Option<PhysAddr> {
        let first = frames::alloc_frames(count);
        Some(PhysAddr::from(first.as_ptr() as usize))
    }

    fn dealloc_frames(first: PhysAddr, count: usize) {
        for i in 0..count {
            frames::free_frame(frames::frame_at((first.as_usize() + i * 4096) as u64));
        }
    }

    fn phys_to_virt(address: PhysAddr) -> VirtAddr {
        VirtAddr::from(address.as_usize())
    }
}

/// The metadata of the tables. Its flush does nothing, like all flushes in this program.
pub struct FourLevels;

impl PagingMetaData for FourLevels {
    const LEVELS: usize = 4;
    const PA_MAX_BITS: usize = 52;
    const VA_MAX_BITS: usize = 48;
    type VirtAddr = VirtAddr;

    fn flush_tlb(_address: Option<VirtAddr>) {}
}

// The crate has only the entries of the architecture for which it is compiled.
#[cfg(target_arch = "aarch64")]
pub use page_table_entry::aarch64::A64PTE as Entry;
#[cfg(target_arch = "x86_64")]
pub use page_table_entry::x86_64::X64PTE as Entry;

pub struct Tables(PageTable64<FourLevels, Entry, Source>);

const START: usize = BASE as usize;
const SIZE: usize = (PAGES as usize) << 12;

impl Peer for Tables {
    const NAME: &'static str = "page_table_multiarch";

    fn new() -> Self {
        Tables(PageTable64::try_new().expect("a frame for the root"))
    }

    fn map(&mut self) {
        let flags = MappingFlags::READ | MappingFlags::WRITE;
        let identity = |address: VirtAddr| PhysAddr::from(address.as_usize());
        self.0
            .cursor()
            .map_region(VirtAddr::from(START), identity, SIZE, flags, false)
            .expect("nothing stands there");
    }

    fn translate(&self, order: &Order) -> u64 {
        order.translate(|address| {
            let found = self.0.query(VirtAddr::from(address as usize));
            found.expect("mapped").0.as_usize() as u64
        })
    }

    fn protect(&mut self) {
        self.0
            .cursor()
            .protect_region(VirtAddr::from(START), SIZE, MappingFlags::READ)
            .expect("mapped");
    }

    fn unmap(mut self) {
        self.0
            .cursor()
            .unmap_region(VirtAddr::from(START), SIZE)
            .expect("mapped");
    }

    fn huge() -> Option<Self> {
        None
    }

    fn split(&mut self) {}
}
