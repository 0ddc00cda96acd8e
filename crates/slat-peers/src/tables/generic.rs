//! The tables of the crate page-table-generic, with four levels and plain x86-64 entries. The flush does nothing, like
//! all flushes in this program.

use page_table_generic::{
    FrameAllocator, MapConfig, PageTable, PageTableEntry, PhysAddr, TableMeta, VirtAddr,
};

use super::{BASE, HUGE, Order, PAGES, Peer};
use crate::frames;

#[derive(Clone)]
struct Source;

impl FrameAllocator for Source {
    fn alloc_frame(&self) -> Option<PhysAddr> {
        Some(PhysAddr::from_usize(frames::alloc_frame().as_ptr() as usize))
    }

    fn dealloc_frame(&self, frame: PhysAddr) {
        frames::free_frame(frames::frame_at(frame.as_usize() as u64));
    }

    fn phys_to_virt(&self, address: PhysAddr) -> *mut u8 {
        address.as_usize() as *mut u8
    }
}

#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
struct Entry(u64);

const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const CONFIG: u64 = PRESENT | WRITE | USER;
const HUGE_BIT: u64 = 1 << 7;
const FRAME: u64 = 0x000f_ffff_ffff_f000;

impl PageTableEntry for Entry {
    type PteConfig = u64;

    fn new_page(address: PhysAddr, config: u64, huge: bool) -> Self {
        Entry(address.as_usize() as u64 | config | if huge { HUGE_BIT } else { 0 })
    }

    fn new_table(address: PhysAddr) -> Self {
        Entry(address.as_usize() as u64 | CONFIG)
    }

    fn paddr(&self, _directory: bool) -> PhysAddr {
        PhysAddr::from_usize((self.0 & FRAME) as usize)
    }

    fn config(&self, _directory: bool) -> u64 {
        self.0 & CONFIG
    }

    fn present(&self) -> bool {
        self.0 & PRESENT != 0
    }

    fn huge(&self, _directory: bool) -> bool {
        self.0 & HUGE_BIT != 0
    }

    fn unused(&self) -> bool {
        self.0 == 0
    }

    fn clear(&mut self) {
        self.0 = 0;
    }
}

#[derive(Clone, Copy)]
struct FourLevels;

impl TableMeta for FourLevels {
    type P = Entry;
    const PAGE_SIZE: usize = 4096;
    const LEVEL_BITS: &[usize] = &[9, 9, 9, 9];
    const MAX_BLOCK_LEVEL: usize = 3;

    fn flush(_address: Option<VirtAddr>) {}
}

pub struct Tables(PageTable<FourLevels, Source>);

const START: usize = BASE as usize;
const SIZE: usize = (PAGES as usize) << 12;

impl Tables {
    fn mapped(allow_huge: bool) -> MapConfig<u64> {
        MapConfig {
            vaddr: VirtAddr::from_usize(START),
            paddr: PhysAddr::from_usize(START),
            size: SIZE,
            pte: CONFIG,
            allow_huge,
            flush: false,
        }
    }
}

impl Peer for Tables {
    const NAME: &'static str = "page-table-generic";

    fn new() -> Self {
        Tables(PageTable::new(Source).expect("a frame for the root"))
    }

    fn map(&mut self) {
        self.0
            .map(&Self::mapped(false))
            .expect("nothing stands there");
    }

    fn translate(&self, order: &Order) -> u64 {
        order.translate(|address| {
            let found = self
                .0
                .translate_phys(VirtAddr::from_usize(address as usize));
            found.expect("mapped").as_usize() as u64
        })
    }

    fn protect(&mut self) {
        self.0
            .protect_region(VirtAddr::from_usize(START), SIZE, PRESENT | USER)
            .expect("mapped");
    }

    fn unmap(mut self) {
        self.0
            .unmap(VirtAddr::from_usize(START), SIZE)
            .expect("mapped");
    }

    fn huge() -> Option<Self> {
        let mut tables = Self::new();
        for first in (0..PAGES).step_by(HUGE as usize) {
            let start = START + ((first as usize) << 12);
            let config = MapConfig {
                vaddr: VirtAddr::from_usize(start),
                paddr: PhysAddr::from_usize(start),
                size: (HUGE as usize) << 12,
                ..Self::mapped(true)
            };
            tables.0.map(&config).expect("nothing stands there");
        }
        Some(tables)
    }

    fn split(&mut self) {
        for first in (0..PAGES).step_by(HUGE as usize) {
            let start = START + ((first as usize) << 12);
            self.0
                .split_huge_page(VirtAddr::from_usize(start))
                .expect("mapped by a huge leaf");
        }
    }
}
