//! `axaddrspace::AddrSpace` on slat: an area is a memslot, and the engine makes the mappings.
//!
//! `run` puts this file in place of the crate's own module. The crate's tests follow it there.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use axerrno::{AxError, AxResult, ax_err};
use memory_addr::{MemoryAddr, PhysAddr, is_aligned_4k};
pub use page_table_entry::MappingFlags;
use page_table_multiarch::PagingHandler;
use slat::{
    Access, Change, Config, Gfn, Gpa, Hva, MemoryType, PAGE_SIZE, Region, RegionError, Rights,
    Stop, Vcpu, Vm,
};

use super::{GuestPhysAddr, GuestPhysAddrRange};

mod platform;

use platform::{ALLOCATED, Host};

/// The tables and flushes of x86_64, where the tests run. On other architectures, these two types are different.
type Format = slat::Ept;
type Flushes = super::npt::arch::ExtendedPageTableMetadata;

/// The only address space of a VM of the engine.
const SPACE: usize = 0;

/// A guest's memory.
pub struct AddrSpace<H: PagingHandler + 'static> {
    range: GuestPhysAddrRange,
    vm: Arc<Vm<Host<H>, Format>>,
    /// The vCPU that makes faults and look-ups for all CPUs of the guest. Only one thread at a time uses the address
    /// space, and no other code changes the VM. So the vCPU stays in its reader section, except for changes of
    /// memslots ([`Self::change`]).
    vcpu: Vcpu<Host<H>, Format>,
    /// The areas by their first address, as memslots.
    areas: BTreeMap<Gpa, Area>,
}

#[derive(Clone, Copy)]
struct Area {
    region: Region,
    flags: MappingFlags,
    /// Whether faults map the area's pages.
    is_lazy: bool,
}

impl Area {
    fn end(&self) -> Gpa {
        Gpa(self.region.gpa.0 + self.region.size)
    }

    /// Returns the part of the area from `start` to `end`, as memslot `slot`. `None`: that part is empty.
    fn part(&self, start: Gpa, end: Gpa, slot: u32) -> Option<Area> {
        let (start, end) = (start.max(self.region.gpa), end.min(self.end()));
        if start >= end {
            return None;
        }
        let backing = Hva(self.region.backing.0 + (start.0 - self.region.gpa.0));
        let mut region = self.region.with_gpa(start).with_backing(backing);
        region.slot = slot;
        region.size = end.0 - start.0;
        Some(Area { region, ..*self })
    }
}

fn gpa(address: GuestPhysAddr) -> Gpa {
    Gpa(address.as_usize() as u64)
}

fn of_region(error: RegionError) -> AxError {
    match error {
        RegionError::OutOfMemory => AxError::NoMemory,
        RegionError::Overlap { .. } => AxError::AlreadyExists,
        _ => AxError::InvalidInput,
    }
}

impl<H: PagingHandler + 'static> AddrSpace<H> {
    /// Returns the address space base.
    pub const fn base(&self) -> GuestPhysAddr {
        self.range.start
    }

    /// Returns the address space end.
    pub const fn end(&self) -> GuestPhysAddr {
        self.range.end
    }

    /// Returns the address space size.
    pub fn size(&self) -> usize {
        self.range.size()
    }

    /// Returns the root physical address of the page table.
    pub fn page_table_root(&self) -> PhysAddr {
        let root = self.vm.root(SPACE).expect("its tables have one root");
        PhysAddr::from_usize(root.hpa().0 as usize)
    }

    /// Checks if the address space contains the given address range.
    pub fn contains_range(&self, start: GuestPhysAddr, size: usize) -> bool {
        self.range
            .contains_range(GuestPhysAddrRange::from_start_size(start, size))
    }

    /// Creates an empty address space, whose tables have `level` levels.
    pub fn new_empty(level: usize, base: GuestPhysAddr, size: usize) -> AxResult<Self> {
        if level != 4 {
            return ax_err!(InvalidInput, "the tables have 4 levels");
        }
        let host = Arc::new(Host::new());
        let vm = Vm::new(host, Config::default()).map_err(|_| AxError::NoMemory)?;
        let mut vcpu = vm.create_vcpu().map_err(|_| AxError::NoMemory)?;
        vcpu.enter_unguarded(0);
        Ok(AddrSpace {
            range: GuestPhysAddrRange::from_start_size(base, size),
            vcpu,
            vm,
            areas: BTreeMap::new(),
        })
    }

    /// Maps guest memory to host memory from `start_paddr` on.
    pub fn map_linear(
        &mut self,
        start_vaddr: GuestPhysAddr,
        start_paddr: PhysAddr,
        size: usize,
        flags: MappingFlags,
    ) -> AxResult {
        if !start_paddr.is_aligned_4k() {
            return ax_err!(InvalidInput, "address not aligned");
        }
        self.map(
            start_vaddr,
            Hva(start_paddr.as_usize() as u64),
            size,
            flags,
            false,
        )
    }

    /// Maps guest memory to frames of its own. If `populate`, allocates the frames now; otherwise when the guest
    /// accesses a page.
    pub fn map_alloc(
        &mut self,
        start: GuestPhysAddr,
        size: usize,
        flags: MappingFlags,
        populate: bool,
    ) -> AxResult {
        self.map(start, Hva(ALLOCATED | gpa(start).0), size, flags, !populate)
    }

    fn map(
        &mut self,
        start: GuestPhysAddr,
        backing: Hva,
        size: usize,
        flags: MappingFlags,
        is_lazy: bool,
    ) -> AxResult {
        self.check(start, size)?;
        let rights = Rights::ALL
            .with_write(flags.contains(MappingFlags::WRITE))
            .with_execute(flags.contains(MappingFlags::EXECUTE));
        let memory = match flags.intersects(MappingFlags::DEVICE | MappingFlags::UNCACHED) {
            true => MemoryType::Device,
            false => MemoryType::WriteBack,
        };
        let region = Region::new(self.new_slot(), gpa(start), size as u64, backing)
            .with_rights(rights)
            .with_memory(memory);
        self.change(|vm| vm.set_memory_region(SPACE, &region))?;
        self.areas.insert(
            region.gpa,
            Area {
                region,
                flags,
                is_lazy,
            },
        );
        if !is_lazy && self.fill(&region).is_err() {
            self.unmap(start, size)?;
            return ax_err!(NoMemory, "a page of the area cannot be mapped");
        }
        Ok(())
    }

    /// Changes memslots, and waits until no vCPU uses the old memslots. So this address space's own vCPU leaves its
    /// reader section meanwhile. That vCPU keeps no translation.
    fn change(
        &mut self,
        change: impl FnOnce(&Vm<Host<H>, Format>) -> Result<(), RegionError>,
    ) -> AxResult {
        self.vcpu.leave();
        let changed = change(&self.vm);
        self.vcpu.enter_unguarded(0);
        self.vcpu.quiesce();
        changed.map_err(of_region)
    }

    /// Repeats `access` until no flush interrupts it.
    fn until_done<R>(
        &mut self,
        mut access: impl FnMut(&mut Vcpu<Host<H>, Format>) -> Result<R, Stop>,
    ) -> Result<R, Stop> {
        loop {
            match access(&mut self.vcpu) {
                Err(Stop::Retry) => self.vcpu.quiesce(),
                done => return done,
            }
        }
    }

    /// Maps all pages of a memslot.
    fn fill(&mut self, region: &Region) -> Result<(), Stop> {
        let mut next = region.gpa;
        let end = Gpa(next.0 + region.size);
        while next < end {
            next.0 += self.until_done(|vcpu| vcpu.prefault(next..end))?;
        }
        Ok(())
    }

    /// Returns a number that no memslot uses.
    fn new_slot(&self) -> u32 {
        let is_used = |slot: &u32| self.areas.values().any(|area| area.region.slot == *slot);
        (0..)
            .find(|slot| !is_used(slot))
            .expect("areas are fewer than numbers")
    }

    fn check(&self, start: GuestPhysAddr, size: usize) -> AxResult {
        if !self.contains_range(start, size) {
            return ax_err!(InvalidInput, "address out of range");
        }
        if !start.is_aligned_4k() || !is_aligned_4k(size) {
            return ax_err!(InvalidInput, "address not aligned");
        }
        Ok(())
    }

    /// Removes mappings within the specified range. Parts of areas outside the range stay mapped.
    pub fn unmap(&mut self, start: GuestPhysAddr, size: usize) -> AxResult {
        self.check(start, size)?;
        self.remove(gpa(start)..Gpa(gpa(start).0 + size as u64))
    }

    fn remove(&mut self, range: Range<Gpa>) -> AxResult {
        let before: Vec<Area> = (self.areas.range(..range.end))
            .map(|(_, area)| *area)
            .filter(|area| area.end() > range.start)
            .collect();
        let mut changes = Vec::new();
        let mut after = Vec::new();
        for area in &before {
            let slot = area.region.slot;
            let left = area.part(Gpa(0), range.start, slot);
            let right = match left {
                None => area.part(range.end, area.end(), slot),
                Some(_) if area.end() > range.end => {
                    let slot = self.new_slot();
                    area.part(range.end, area.end(), slot)
                }
                Some(_) => None,
            };
            if left.is_none() && right.is_none() {
                changes.push(Change::Remove(slot));
            }
            after.extend(left.into_iter().chain(right));
        }
        changes.extend(after.iter().map(|area| Change::Set(area.region)));
        self.change(|vm| vm.set_memory_regions(SPACE, &changes))?;

        for area in before {
            self.areas.remove(&area.region.gpa);
            if let Some(Area { region, .. }) = area.part(range.start, range.end, 0)
                && region.backing.0 & ALLOCATED != 0
            {
                let end = Hva(region.backing.0 + region.size);
                self.vm.platform().free(region.backing..end);
            }
        }
        self.areas
            .extend(after.into_iter().map(|area| (area.region.gpa, area)));
        Ok(())
    }

    /// Removes all mappings in the address space.
    pub fn clear(&mut self) {
        self.remove(Gpa(0)..Gpa(u64::MAX))
            .expect("deleting memslots needs no memory that it does not have");
    }

    fn area(&self, address: GuestPhysAddr) -> Option<&Area> {
        let (_, area) = self.areas.range(..=gpa(address)).next_back()?;
        (area.end() > gpa(address)).then_some(area)
    }

    /// Handles a page fault at the given address. Returns `true` if the guest may repeat the access.
    pub fn handle_page_fault(&mut self, vaddr: GuestPhysAddr, access_flags: MappingFlags) -> bool {
        match self.area(vaddr) {
            Some(area) if area.is_lazy && area.flags.contains(access_flags) => {}
            _ => return false,
        }
        let access = match access_flags {
            flags if flags.contains(MappingFlags::WRITE) => Access::Write,
            flags if flags.contains(MappingFlags::EXECUTE) => Access::Execute,
            _ => Access::Read,
        };
        self.until_done(|vcpu| vcpu.translate(gpa(vaddr), access))
            .is_ok()
    }

    /// Returns the host-physical address of `vaddr`, if it is mapped.
    pub fn translate(&self, vaddr: GuestPhysAddr) -> Option<PhysAddr> {
        let address = gpa(vaddr);
        let mapping = self.vcpu.lookup(Gfn(address.0 / PAGE_SIZE))?;
        let host = mapping.pfn.hpa().0 + address.0 % PAGE_SIZE;
        self.range
            .contains(vaddr)
            .then(|| PhysAddr::from_usize(host as usize))
    }

    /// Returns the bytes from `vaddr` on, with one slice for each page. `None`: the bytes are not mapped, or extend
    /// beyond the area.
    pub fn translated_byte_buffer(
        &self,
        vaddr: GuestPhysAddr,
        len: usize,
    ) -> Option<Vec<&'static mut [u8]>> {
        if self.area(vaddr)?.end().0 < gpa(vaddr).0.checked_add(len as u64)? {
            return None;
        }
        let end = vaddr + len;
        let mut next = vaddr;
        let mut slices = Vec::new();
        while next < end {
            let page_end = (next.align_down_4k() + PAGE_SIZE as usize).min(end);
            let bytes = H::phys_to_virt(self.translate(next)?).as_mut_ptr();
            // SAFETY: the bytes are guest memory, which the caller and the guest share, as in the crate's own module.
            slices.push(unsafe { core::slice::from_raw_parts_mut(bytes, page_end - next) });
            next = page_end;
        }
        Some(slices)
    }

    /// Returns the host-physical address of `vaddr` and the size of its area.
    pub fn translate_and_get_limit(&self, vaddr: GuestPhysAddr) -> Option<(PhysAddr, usize)> {
        Some((
            self.translate(vaddr)?,
            self.area(vaddr)?.region.size as usize,
        ))
    }
}

impl<H: PagingHandler + 'static> fmt::Debug for AddrSpace<H> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("AddrSpace")
            .field("range", &self.range)
            .field("page_table_root", &self.page_table_root())
            .field(
                "areas",
                &self
                    .areas
                    .values()
                    .map(|area| area.region)
                    .collect::<Vec<_>>(),
            )
            .finish()
    }
}

impl<H: PagingHandler + 'static> Drop for AddrSpace<H> {
    fn drop(&mut self) {
        self.clear();
    }
}
