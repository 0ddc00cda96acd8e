//! axaddrspace, with the tables of page_table_multiarch.

use ax_memory_addr::{PhysAddr, VirtAddr};
use axaddrspace::{AddrSpaceError, AddrSpaceResult, MappingFlags, NestedPageTableOps, PageSize};
use axvm_types::GuestPhysAddr;
use page_table_multiarch::{PageTable64, PagingHandler, PagingResult};

use super::{AddressSpace, SPACE};
use crate::tables::multiarch::{Entry, FourLevels, Source};

/// The tables, as a wrapper that converts between the flag types of the two crates, whose bits are equal.
pub struct Tables(PageTable64<FourLevels, Entry, Source>);

fn flags(flags: MappingFlags) -> page_table_entry::MappingFlags {
    page_table_entry::MappingFlags::from_bits_retain(flags.bits())
}

fn of_flags(flags: page_table_entry::MappingFlags) -> MappingFlags {
    MappingFlags::from_bits_retain(flags.bits())
}

fn size(size: PageSize) -> page_table_multiarch::PageSize {
    match size {
        PageSize::Size4K => page_table_multiarch::PageSize::Size4K,
        PageSize::Size2M => page_table_multiarch::PageSize::Size2M,
        PageSize::Size1G => page_table_multiarch::PageSize::Size1G,
        PageSize::Size1M => unreachable!("a table of 64-bit entries has no leaf of 1 MiB"),
    }
}

fn of_size(size: page_table_multiarch::PageSize) -> PageSize {
    match size {
        page_table_multiarch::PageSize::Size2M => PageSize::Size2M,
        page_table_multiarch::PageSize::Size1G => PageSize::Size1G,
        _ => PageSize::Size4K,
    }
}

fn guest(at: GuestPhysAddr) -> memory_addr::VirtAddr {
    at.as_usize().into()
}

fn host(at: PhysAddr) -> memory_addr::PhysAddr {
    at.as_usize().into()
}

fn of_host(at: memory_addr::PhysAddr) -> PhysAddr {
    at.as_usize().into()
}

fn result<T>(result: PagingResult<T>) -> AddrSpaceResult<T> {
    result.map_err(|_| AddrSpaceError::MappingState)
}

type Mapped = (
    memory_addr::PhysAddr,
    page_table_entry::MappingFlags,
    page_table_multiarch::PageSize,
);

fn of_mapped((at, flags, size): Mapped) -> (PhysAddr, MappingFlags, PageSize) {
    (of_host(at), of_flags(flags), of_size(size))
}

impl NestedPageTableOps for Tables {
    fn root_paddr(&self) -> PhysAddr {
        of_host(self.0.root_paddr())
    }

    fn levels(&self) -> usize {
        4
    }

    fn alloc_frame(&self) -> Option<PhysAddr> {
        Source::alloc_frame().map(of_host)
    }

    fn dealloc_frame(&self, frame: PhysAddr) {
        Source::dealloc_frame(host(frame));
    }

    fn phys_to_virt(&self, at: PhysAddr) -> VirtAddr {
        Source::phys_to_virt(host(at)).as_usize().into()
    }

    fn map(
        &mut self,
        at: GuestPhysAddr,
        to: PhysAddr,
        page: PageSize,
        rights: MappingFlags,
    ) -> AddrSpaceResult {
        result(
            self.0
                .cursor()
                .map(guest(at), host(to), size(page), flags(rights)),
        )
    }

    fn unmap(&mut self, at: GuestPhysAddr) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        result(self.0.cursor().unmap(guest(at))).map(of_mapped)
    }

    fn map_linear(
        &mut self,
        at: GuestPhysAddr,
        to: PhysAddr,
        size: usize,
        rights: MappingFlags,
        allow_huge: bool,
    ) -> AddrSpaceResult {
        let offset = to.as_usize().wrapping_sub(at.as_usize());
        let to = |at: memory_addr::VirtAddr| at.as_usize().wrapping_add(offset).into();
        result(
            self.0
                .cursor()
                .map_region(guest(at), to, size, flags(rights), allow_huge),
        )
    }

    fn unmap_region(&mut self, at: GuestPhysAddr, size: usize) -> AddrSpaceResult {
        result(self.0.cursor().unmap_region(guest(at), size))
    }

    fn remap(&mut self, at: GuestPhysAddr, to: PhysAddr, rights: MappingFlags) -> bool {
        self.0
            .cursor()
            .remap(guest(at), host(to), flags(rights))
            .is_ok()
    }

    fn protect_region(&mut self, at: GuestPhysAddr, size: usize, rights: MappingFlags) -> bool {
        self.0
            .cursor()
            .protect_region(guest(at), size, flags(rights))
            .is_ok()
    }

    fn query(&self, at: GuestPhysAddr) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        result(self.0.query(guest(at))).map(of_mapped)
    }
}

/// The guest address space of axaddrspace.
pub struct AddrSpace(axaddrspace::AddrSpace<Tables>);

const FLAGS: MappingFlags = MappingFlags::READ.union(MappingFlags::WRITE);

impl AddressSpace for AddrSpace {
    const NAME: &'static str = "axaddrspace";

    fn new() -> Self {
        let tables = Tables(PageTable64::try_new().expect("a frame for the root"));
        AddrSpace(
            axaddrspace::AddrSpace::new_empty(tables, 0.into(), SPACE).expect("a valid range"),
        )
    }

    fn map_linear(&mut self, at: usize, host: usize, size: usize) {
        self.0
            .map_linear(at.into(), host.into(), size, FLAGS)
            .expect("a valid area");
    }

    fn map_alloc(&mut self, at: usize, size: usize, populate: bool) {
        self.0
            .map_alloc(at.into(), size, FLAGS, populate)
            .expect("a valid area");
    }

    fn unmap(&mut self, at: usize, size: usize) {
        self.0.unmap(at.into(), size).expect("an area");
    }

    fn translate(&self, at: usize) -> Option<usize> {
        self.0.translate(at.into()).map(|host| host.as_usize())
    }

    fn fault(&mut self, at: usize) -> bool {
        self.0.handle_page_fault(at.into(), MappingFlags::WRITE)
    }
}
