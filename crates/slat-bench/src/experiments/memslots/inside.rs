//! Measures the time that is spent in the memory system. The operations of each case run one after the other, on the
//! engine without guests ([`crate::bare`]). In place of a guest access that faults, the engine's fault is called. In
//! place of a change of the host's mappings, there is only the invalidation for such a change. So the times include
//! neither the guest's instructions nor the host's madvise, refault and zeroing.
//!
//! Three systems do these operations: slat, the array ([`crate::array`]), and *tables*, which has one memslot for all
//! memory and never looks up a memslot. slat and the array do all the work of *tables* and more, so the time of
//! *tables* is a lower bound of their times.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use slat::format::X86;
use slat::{
    Access, Ept, Format, Gfn, Gpa, Hva, Level, MmuKind, Region, Stats, Stop, Translation, Vcpu, Vm,
};

use super::Case;
use super::layout::{Layout, gpa};
use crate::Failure;
use crate::array::{ArrayVcpu, ArrayVm};
use crate::bare::{self, Bare, PAGE};
use crate::rounds::thread_time;

/// The difference between a backing address and its guest address. The memory at the backing addresses is never
/// accessed.
const DISPLACEMENT: u64 = 1 << 44;

/// A memory system that is measured.
pub(super) trait System: Sized {
    type Cpu: SystemCpu;
    fn new() -> Self;
    /// Makes a system with the memslots `regions`, which are in ascending order.
    fn with(regions: &[Region]) -> Result<Self, Failure>;
    fn set(&self, region: &Region) -> Result<(), Failure>;
    /// Begins an invalidation of `backing`, and ends it at once.
    fn invalidate(&self, backing: Range<Hva>);
    fn cpu(&self) -> Self::Cpu;
    fn stats(&self) -> Stats;
}

/// A CPU of a [`System`], outside a reader section.
pub(super) trait SystemCpu {
    /// Enters a reader section, runs `accesses`, and leaves the section.
    fn inside<R>(&mut self, accesses: impl FnOnce(&mut Self) -> R) -> R;
    /// Makes an access to a page that no leaf maps.
    fn fault(&mut self, gpa: Gpa) -> Result<Translation, Stop>;
    /// Makes an access to a page that a leaf maps.
    fn walk(&mut self, gpa: Gpa) -> Result<Translation, Stop>;
}

/// An MMU of slat, with a format of its tables.
pub(super) trait Mmu {
    type Format: Format;
    const KIND: MmuKind;
}

pub(super) struct Tdp;
pub(super) struct Direct;
pub(super) struct Shadow;

impl Mmu for Tdp {
    type Format = Ept;
    const KIND: MmuKind = MmuKind::Tdp;
}

impl Mmu for Direct {
    type Format = Ept;
    const KIND: MmuKind = MmuKind::Direct;
}

impl Mmu for Shadow {
    type Format = X86<5>;
    const KIND: MmuKind = MmuKind::Shadow;
}

/// The engine of slat with the MMU `M`.
pub(super) struct Slat<M: Mmu>(Arc<Vm<Bare, M::Format>>);

impl<M: Mmu> System for Slat<M> {
    type Cpu = SlatCpu<M>;

    fn new() -> Self {
        Slat(bare::vm_with(Level::PAGE, M::KIND))
    }

    fn with(regions: &[Region]) -> Result<Self, Failure> {
        let slat = Self::new();
        regions.iter().try_for_each(|region| slat.set(region))?;
        Ok(slat)
    }

    fn set(&self, region: &Region) -> Result<(), Failure> {
        Ok(bare::set(&self.0, region)?)
    }

    fn invalidate(&self, backing: Range<Hva>) {
        drop(self.0.invalidate(backing));
    }

    fn cpu(&self) -> SlatCpu<M> {
        SlatCpu(self.0.create_vcpu().expect("memory for a vCPU"))
    }

    fn stats(&self) -> Stats {
        self.0.stats()
    }
}

pub(super) struct SlatCpu<M: Mmu>(Vcpu<Bare, M::Format>);

impl<M: Mmu> SystemCpu for SlatCpu<M> {
    fn inside<R>(&mut self, accesses: impl FnOnce(&mut Self) -> R) -> R {
        self.0.enter_unguarded(0);
        let result = accesses(self);
        self.0.leave();
        result
    }

    #[inline]
    fn fault(&mut self, gpa: Gpa) -> Result<Translation, Stop> {
        let translation = self.0.translate(gpa, Access::Write)?;
        // The array's system looks up its own memslot and the engine's covering memslot. To be fair, slat looks up the
        // memslot twice, too.
        std::hint::black_box(self.0.slot_at(gpa).is_some());
        Ok(translation)
    }

    #[inline]
    fn walk(&mut self, gpa: Gpa) -> Result<Translation, Stop> {
        self.0.translate(gpa, Access::Write)
    }
}

/// The rival, whose memslots are in an array.
pub(super) struct Array(Arc<ArrayVm>);

impl System for Array {
    type Cpu = ArrayVcpu;

    fn new() -> Self {
        Array(ArrayVm::new(DISPLACEMENT))
    }

    fn with(regions: &[Region]) -> Result<Self, Failure> {
        Ok(Array(ArrayVm::with_slots(DISPLACEMENT, regions)?))
    }

    fn set(&self, region: &Region) -> Result<(), Failure> {
        Ok(self.0.set_memory_region(region)?)
    }

    fn invalidate(&self, backing: Range<Hva>) {
        drop(self.0.invalidate(backing));
    }

    fn cpu(&self) -> ArrayVcpu {
        self.0.create_vcpu()
    }

    fn stats(&self) -> Stats {
        self.0.stats()
    }
}

impl SystemCpu for ArrayVcpu {
    fn inside<R>(&mut self, accesses: impl FnOnce(&mut Self) -> R) -> R {
        self.enter();
        let result = accesses(self);
        self.leave();
        result
    }

    #[inline]
    fn fault(&mut self, gpa: Gpa) -> Result<Translation, Stop> {
        ArrayVcpu::fault(self, gpa, Access::Write)
    }

    #[inline]
    fn walk(&mut self, gpa: Gpa) -> Result<Translation, Stop> {
        ArrayVcpu::walk(self, gpa, Access::Write)
    }
}

/// Only slat's tables: one memslot covers all memory, so the measured memslots cost nothing.
pub(super) struct Tables(Arc<Vm<Bare, Ept>>);

impl System for Tables {
    type Cpu = SlatCpu<Tdp>;

    fn new() -> Self {
        let vm = bare::vm();
        let covering = bare::region(0, 0, 1 << 30, DISPLACEMENT);
        vm.set_memory_region(0, &covering).expect("the only slot");
        Tables(vm)
    }

    fn with(_: &[Region]) -> Result<Self, Failure> {
        Ok(Self::new())
    }

    /// In place of changing a memslot, only zaps its translations. The backing address determines the guest address.
    fn set(&self, region: &Region) -> Result<(), Failure> {
        let first = Hva(region.backing.0 - DISPLACEMENT).0 / PAGE;
        self.0.zap(0, Gfn(first)..Gfn(first + region.size / PAGE));
        Ok(())
    }

    fn invalidate(&self, backing: Range<Hva>) {
        let gfn = |hva: Hva| Gfn((hva.0 - DISPLACEMENT) / PAGE);
        self.0.zap(0, gfn(backing.start)..gfn(backing.end));
    }

    fn cpu(&self) -> SlatCpu<Tdp> {
        SlatCpu(self.0.create_vcpu().expect("memory for a vCPU"))
    }

    fn stats(&self) -> Stats {
        self.0.stats()
    }
}

fn hva(page: u64) -> Hva {
    Hva(DISPLACEMENT + gpa(page))
}

fn region(layout: &Layout, index: u64) -> Region {
    let pages = layout.slot(index);
    let (id, start) = (index as u32 + 1, pages.start);
    bare::region(id, gpa(start), pages.end - start, hva(start).0)
}

fn regions(layout: &Layout) -> Vec<Region> {
    (0..layout.slots()).map(|i| region(layout, i)).collect()
}

/// A system with the memslots of a case, and a CPU of this system.
pub(super) struct Inside<S: System> {
    system: S,
    cpu: S::Cpu,
    layout: Layout,
}

impl<S: System> Inside<S> {
    pub(super) fn new(layout: Layout) -> Result<Self, Failure> {
        let system = S::with(&regions(&layout))?;
        Ok(Inside {
            cpu: system.cpu(),
            system,
            layout,
        })
    }

    /// Measures an operation of `case`. Returns the mean time of `times` operations.
    ///
    /// # Errors
    /// If the operation has not done its work.
    pub(super) fn measure(&mut self, case: Case, times: u32) -> Result<Duration, Failure> {
        let before = self.system.stats().pf_fixed;
        let (time, expected) = match case {
            Case::Map => self.timed(times, Self::map)?,
            Case::Unmap => self.timed(times, |inside| inside.unmap(1))?,
            Case::Unmap2m => self.timed(times, |inside| inside.unmap(512))?,
            Case::MoveActive => self.moved(times, true)?,
            Case::MoveInactive => self.moved(times, false)?,
            Case::Rw => self.read_write(times)?,
            Case::Setup => self.setup(times)?,
        };
        let faults = self.system.stats().pf_fixed - before;
        if faults != expected {
            return Err(format!("{faults} faults, not {expected}").into());
        }
        Ok(time / times)
    }

    /// Runs `operation` `times` times. Returns the time and the number of faults.
    fn timed(
        &mut self,
        times: u32,
        operation: impl Fn(&mut Self) -> Result<u64, Failure>,
    ) -> Result<(Duration, u64), Failure> {
        let mut faults = 0;
        let began = thread_time();
        for _ in 0..times {
            faults += operation(self)?;
        }
        Ok((thread_time() - began, faults))
    }

    /// Makes a fault on each of `pages`, like a guest that writes to unmapped pages. Returns the number of faults, as
    /// do the following functions.
    fn write(&mut self, pages: impl Iterator<Item = u64>) -> Result<u64, Failure> {
        self.cpu.inside(|cpu| {
            let mut written = 0;
            for page in pages {
                let there = cpu.fault(Gpa(gpa(page)))?;
                debug_assert_eq!(there.host.0, hva(page).0);
                written += 1;
            }
            Ok(written)
        })
    }

    /// Invalidates a range in the same steps in which a host would unmap it. A step has at most `chunk` pages, and is
    /// within one slot, because slots are not contiguous in the host.
    fn discard(&self, range: Range<u64>, chunk: u64) {
        for piece in self.layout.pieces(range, chunk) {
            self.system.invalidate(hva(piece.start)..hva(piece.end));
        }
    }

    /// Invalidates all of the memory in one step.
    fn discard_all(&self) {
        self.system.invalidate(hva(0)..hva(self.layout.pages()));
    }

    /// Writes to every page of one half of the memory, and invalidates that half.
    fn map(&mut self) -> Result<u64, Failure> {
        let mut faults = 0;
        for half in self.layout.halves() {
            faults += self.write(half.clone())?;
            self.discard(half, u64::MAX >> 1);
        }
        Ok(faults)
    }

    /// Writes to one page of a half, and invalidates the half, `chunk` pages at a time.
    fn unmap(&mut self, chunk: u64) -> Result<u64, Failure> {
        let mut faults = 0;
        for half in self.layout.halves() {
            faults += self.write(half.start..half.start + 1)?;
            self.discard(half, chunk);
        }
        Ok(faults)
    }

    /// Moves the last slot after all others, and back. The time includes only the moves, not the guest's faults between
    /// the moves.
    fn moved(&mut self, times: u32, active: bool) -> Result<(Duration, u64), Failure> {
        let moved = self.layout.moved();
        let home = region(&self.layout, moved);
        let away = home.with_gpa(Gpa(gpa(self.layout.destination())));
        let goes = self.layout.slot(moved);
        let (gone, stays): (Vec<_>, Vec<_>) = self
            .layout
            .written(active)
            .partition(|page| goes.contains(page));
        self.discard_all();
        let mut faults = self.write(stays.into_iter())?;
        let mut time = Duration::ZERO;
        for _ in 0..times {
            faults += self.write(gone.iter().copied())?;
            let began = thread_time();
            self.system.set(&away)?;
            self.system.set(&home)?;
            time += thread_time() - began;
        }
        Ok((time, faults))
    }

    /// Writes to every page twice.
    fn read_write(&mut self, times: u32) -> Result<(Duration, u64), Failure> {
        let mut faults = 0;
        let mut time = Duration::ZERO;
        for _ in 0..times {
            self.discard_all();
            let began = thread_time();
            let area = self.layout.area();
            faults += self.write(area.clone())?;
            self.cpu.inside(|cpu| {
                for page in area {
                    cpu.walk(Gpa(gpa(page)))?;
                }
                Ok::<_, Failure>(())
            })?;
            time += thread_time() - began;
        }
        Ok((time, faults))
    }

    /// Creates all slots in a system that has none.
    fn setup(&mut self, times: u32) -> Result<(Duration, u64), Failure> {
        let regions = regions(&self.layout);
        let mut time = Duration::ZERO;
        for _ in 0..times {
            let system = S::new();
            let began = thread_time();
            for region in &regions {
                system.set(region)?;
            }
            time += thread_time() - began;
            // The translation of the last page shows that the slots exist.
            let last = self.layout.pages() - 1;
            let there = system.cpu().inside(|cpu| cpu.fault(Gpa(gpa(last))))?;
            if there.host.0 != hva(last).0 {
                return Err(format!("page {last} is at {}", there.host).into());
            }
        }
        Ok((time, 0))
    }
}
