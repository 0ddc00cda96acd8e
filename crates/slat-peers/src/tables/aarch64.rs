//! The tables of the crate aarch64-paging, as stage 2 tables with four levels.

use std::ptr::NonNull;

use aarch64_paging::descriptor::{PhysicalAddress, Stage2Attributes};
use aarch64_paging::paging::{
    Constraints, MemoryRegion, PageTable, RootTable, Stage2, Translation,
};

use super::{BASE, HUGE, Order, PAGES, Peer};
use crate::frames;

struct Source;

impl Translation<Stage2Attributes> for Source {
    fn allocate_table(&mut self) -> (NonNull<PageTable<Stage2Attributes>>, PhysicalAddress) {
        let frame = frames::alloc_frame();
        // SAFETY: this code owns the frame, and the contract requires a frame of zeroes.
        unsafe { frame.write_bytes(0, 4096) };
        (frame.cast(), PhysicalAddress(frame.as_ptr() as usize))
    }

    unsafe fn deallocate_table(&mut self, table: NonNull<PageTable<Stage2Attributes>>) {
        frames::free_frame(table.cast());
    }

    fn physical_to_virtual(&self, table: PhysicalAddress) -> NonNull<PageTable<Stage2Attributes>> {
        frames::frame_at(table.0 as u64).cast()
    }
}

pub struct Tables(RootTable<Stage2, Source>);

fn read_only() -> Stage2Attributes {
    Stage2Attributes::VALID
        | Stage2Attributes::S2AP_ACCESS_RO
        | Stage2Attributes::ACCESS_FLAG
        | Stage2Attributes::SH_INNER
}

fn read_write() -> Stage2Attributes {
    Stage2Attributes::VALID
        | Stage2Attributes::S2AP_ACCESS_RW
        | Stage2Attributes::ACCESS_FLAG
        | Stage2Attributes::SH_INNER
}

fn region(first: u64, pages: u64) -> MemoryRegion {
    let start = (BASE + (first << 12)) as usize;
    MemoryRegion::new(start, start + ((pages as usize) << 12))
}

impl Tables {
    fn set(&mut self, attributes: Stage2Attributes) {
        let to = PhysicalAddress(BASE as usize);
        self.0
            .map_range(
                &region(0, PAGES),
                to,
                attributes,
                Constraints::NO_BLOCK_MAPPINGS,
            )
            .expect("the range is within the tree");
    }
}

impl Peer for Tables {
    const NAME: &'static str = "aarch64-paging";

    fn new() -> Self {
        Tables(RootTable::new(Source, 0, Stage2))
    }

    fn map(&mut self) {
        self.set(read_write());
    }

    fn translate(&self, order: &Order) -> u64 {
        order.translate(|address| {
            let start = address as usize;
            let mut found = 0;
            self.0
                .walk_range(
                    &MemoryRegion::new(start, start + 4096),
                    &mut |_, entry, _| {
                        found = entry.output_address().0 as u64;
                        Ok(())
                    },
                )
                .expect("the range is within the tree");
            found
        })
    }

    fn protect(&mut self) {
        self.set(read_only());
    }

    fn unmap(mut self) {
        self.set(Stage2Attributes::empty());
        self.0.compact_subtables();
    }

    fn huge() -> Option<Self> {
        let mut tables = Self::new();
        for first in (0..PAGES).step_by(HUGE as usize) {
            let region = region(first, HUGE);
            let to = PhysicalAddress((BASE + (first << 12)) as usize);
            tables
                .0
                .map_range(&region, to, read_write(), Constraints::empty())
                .expect("the range is within the tree");
        }
        Some(tables)
    }

    fn split(&mut self) {
        for first in (0..PAGES).step_by(HUGE as usize) {
            let to = PhysicalAddress((BASE + (first << 12)) as usize);
            self.0
                .map_range(&region(first, 1), to, read_only(), Constraints::empty())
                .expect("the range is within the tree");
        }
    }
}
