//! The engine without guests, on a platform whose host memory is always resident.
//!
//! On this platform, all measured time is spent in the memory system: the host does not allocate, zero or unmap pages,
//! and no guest instruction is executed. As for a VM in userspace, slat-host allocates the tables' frames.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use slat::{
    Config, Entries, Ept, Format, Gfn, Gpa, HostPage, HostRun, Hva, Level, MmuKind, PAGE_SHIFT,
    Pfn, Platform, Region, RegionError, Request, ResolveError, Stale, TableMeta, Vm, VmId, WaitFor,
};
use slat::{Prefetch, Setting};
use slat_host::frames::Frames;

/// The size in bytes of a guest page, the smallest unit that is mapped.
pub const PAGE: u64 = slat::PAGE_SIZE;
/// The guest address of the memory that an experiment measures.
pub const DATA: u64 = 4 << 30;

/// A platform whose host memory has physical addresses equal to its backing addresses. The memory itself is never
/// accessed.
pub struct Bare {
    frames: Frames,
    /// The size of the pages by which the host maps the memory.
    level: Level,
}

/// Creates a VM with one address space, on a host with 4 KiB pages. Prefetch is off, so each page takes a fault.
pub fn vm() -> Arc<Vm<Bare, Ept>> {
    vm_on(Level::PAGE)
}

/// Creates a VM like [`vm`]'s, but on a host that maps its memory by pages of `level`.
pub fn vm_on(level: Level) -> Arc<Vm<Bare, Ept>> {
    vm_with(level, MmuKind::Tdp)
}

/// Creates a VM like [`vm_on`]'s, with tables of format `F` that `mmu` makes.
pub fn vm_with<F: Format>(level: Level, mmu: MmuKind) -> Arc<Vm<Bare, F>> {
    let config = Config::default().with_mmu(mmu);
    let vm = Vm::new(Arc::new(Bare::new(level)), config).expect("frames for the root");
    vm.set_policy(Setting::Prefetch(Prefetch::Off));
    vm
}

/// Returns the region that sets memslot `slot` to `pages` pages at `gpa`, backed by the memory at `backing`.
pub fn region(slot: u32, gpa: u64, pages: u64, backing: u64) -> Region {
    Region::new(slot, Gpa(gpa), pages << PAGE_SHIFT, Hva(backing))
}

/// Creates, moves or changes a memslot as `region` says, or deletes the memslot if the region's size is 0.
///
/// # Errors
/// The errors of [`Vm::set_memory_region`] and [`Vm::remove_memory_region`].
pub fn set<F: Format>(vm: &Vm<Bare, F>, region: &Region) -> Result<(), RegionError> {
    match vm.set_memory_region(0, region) {
        Err(RegionError::Empty(slot)) => vm.remove_memory_region(0, slot),
        set => set,
    }
}

impl Bare {
    /// Makes a host that maps its memory by pages of `level`.
    pub fn new(level: Level) -> Self {
        Bare {
            frames: Frames::default(),
            level,
        }
    }

    fn page(&self, backing: Hva) -> HostPage {
        HostPage::new(Pfn(backing.0 >> PAGE_SHIFT), self.level)
    }
}

// SAFETY:
// - frames and their metadata are allocated from `Frames`, whose chunks live as long as it does;
// - no code accesses memory at the addresses that `resolve` returns;
// - no hardware walks these tables, so there is nothing to flush.
unsafe impl Platform for Bare {
    fn alloc_table(&self, _: VmId) -> Option<Pfn> {
        self.frames.alloc()
    }

    fn alloc_root(&self, _: VmId, tables: usize) -> Option<Pfn> {
        self.frames.alloc_run(tables)
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        // SAFETY: the caller promises that this platform has allocated the frame and that the frame is freed once, as
        // `free` requires.
        unsafe { self.frames.free(&[frame]) }
    }

    fn alloc_tables(&self, _: VmId, frames: usize, take: &mut dyn FnMut(Pfn)) {
        self.frames.alloc_many(frames, take);
    }

    unsafe fn free_tables(&self, _: VmId, frames: &[Pfn]) {
        // SAFETY: the caller promises that this platform has allocated the frames and that each is freed once, as
        // `free` requires.
        unsafe { self.frames.free(frames) }
    }

    #[inline]
    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        <Frames>::entries(frame)
    }

    #[inline]
    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        <Frames>::meta(frame)
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        Ok(self.page(request.backing))
    }

    fn resolve_resident(&self, _: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        found(HostRun {
            backing: backing.start,
            pages: (backing.end.0 - backing.start.0) >> PAGE_SHIFT,
            first: self.page(backing.start),
        });
    }

    fn flush(&self, _vm: VmId, _range: Range<Gfn>, _stale: Stale) {}

    fn wait(&self, round: u32, _what: WaitFor) {
        const SPINS: u32 = 128;
        if round < SPINS {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}
