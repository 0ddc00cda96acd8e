//! The tables of the crate x86_64. They are changed page by page.

use x86_64::structures::paging::mapper::{CleanUp, MappedPageTable, PageTableFrameMapping};
use x86_64::structures::paging::{
    FrameAllocator, FrameDeallocator, Mapper, Page, PageTable, PageTableFlags, PhysFrame, Size4KiB,
    Translate,
};
use x86_64::{PhysAddr, VirtAddr};

use super::{BASE, Order, PAGES, Peer};
use crate::frames;

struct Identity;

// SAFETY: a frame's physical address is its address in this process.
unsafe impl PageTableFrameMapping for Identity {
    fn frame_to_pointer(&self, frame: PhysFrame) -> *mut PageTable {
        frame.start_address().as_u64() as *mut PageTable
    }
}

struct Source;

// SAFETY: the arena gives every frame to one owner.
unsafe impl FrameAllocator<Size4KiB> for Source {
    fn allocate_frame(&mut self) -> Option<PhysFrame> {
        let address = PhysAddr::new(frames::alloc_frame().as_ptr() as u64);
        Some(PhysFrame::containing_address(address))
    }
}

impl FrameDeallocator<Size4KiB> for Source {
    unsafe fn deallocate_frame(&mut self, frame: PhysFrame) {
        frames::free_frame(frames::frame_at(frame.start_address().as_u64()));
    }
}

pub struct Tables {
    mapper: MappedPageTable<'static, Identity>,
    root: std::ptr::NonNull<u8>,
}

fn pages() -> impl Iterator<Item = (Page<Size4KiB>, PhysFrame<Size4KiB>)> {
    (0..PAGES).map(|page| {
        let address = BASE + (page << 12);
        (
            Page::containing_address(VirtAddr::new(address)),
            PhysFrame::containing_address(PhysAddr::new(address)),
        )
    })
}

impl Peer for Tables {
    const NAME: &'static str = "x86_64";

    fn new() -> Self {
        let root = frames::alloc_frame();
        // SAFETY: this code owns the frame until `unmap`, and a frame of zeroes is an empty table.
        let mapper = unsafe {
            root.write_bytes(0, 4096);
            MappedPageTable::new(root.cast().as_mut(), Identity)
        };
        Tables { mapper, root }
    }

    fn map(&mut self) {
        let flags = PageTableFlags::PRESENT | PageTableFlags::WRITABLE;
        for (page, frame) in pages() {
            // SAFETY: no memory is accessed by this mapping.
            let mapped = unsafe { self.mapper.map_to(page, frame, flags, &mut Source) };
            mapped.expect("nothing stands there").ignore();
        }
    }

    fn translate(&self, order: &Order) -> u64 {
        order.translate(|address| {
            let translated = self.mapper.translate_addr(VirtAddr::new(address));
            translated.expect("mapped").as_u64()
        })
    }

    fn protect(&mut self) {
        for (page, _) in pages() {
            // SAFETY: no memory is accessed by this mapping.
            let changed = unsafe { self.mapper.update_flags(page, PageTableFlags::PRESENT) };
            changed.expect("mapped").ignore();
        }
    }

    fn unmap(mut self) {
        for (page, _) in pages() {
            self.mapper.unmap(page).expect("mapped").1.ignore();
        }
        // SAFETY: `Source` has allocated all tables below the root.
        unsafe { self.mapper.clean_up(&mut Source) };
        frames::free_frame(self.root);
    }

    fn huge() -> Option<Self> {
        None
    }

    fn split(&mut self) {}
}
