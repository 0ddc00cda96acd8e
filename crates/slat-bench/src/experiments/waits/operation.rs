//! The long operations on a large memslot. Each has a set-up before the operation, and a check of its result.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slat::Setting;
use slat::{
    Access, ColdMap, DirtyGfn, DirtyRing, Ept, Gfn, Gpa, Hva, Level, MemoryAttributes, Promotion,
    RegionError, SlotFlags, Stop, Switch, Vcpu, Vm,
};

use super::unrelated;
use crate::Failure;
use crate::bare::{self, Bare, PAGE};

/// The id of the large memslot. The next constant is its backing address.
const SLOT: u32 = 0;
const BACKING: u64 = 1 << 44;

/// The number of 4 KiB pages in a leaf of 2 MiB.
const MEGA: u64 = Level::MEGA.pages();
/// Every `APART`th page of the slot is recorded in a dirty ring. These pages are so far apart that each is
/// write-protected separately.
const APART: u64 = 64;
/// The number of vCPUs with a dirty ring. Each ring has KVM's maximum number of entries.
const RINGS: u64 = 8;
const RING_ENTRIES: u64 = 1 << 16;

/// A long operation on the large memslot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// No operation: the thread only computes for some time.
    Nothing,
    GetProtect,
    GetDirtyBit,
    Clear,
    Age,
    Cold,
    Zap,
    ZapDirtyBit,
    BeginSmall,
    BeginEager,
    BeginLazy,
    End,
    Delete,
    Invalidate,
    Attributes,
    NxRecovery,
    Promote,
    RingReset,
}

use Operation::*;

impl Operation {
    pub(super) const ALL: [(Operation, &str); 18] = [
        (Nothing, "nothing"),
        (GetProtect, "get-protect"),
        (GetDirtyBit, "get-dirty-bit"),
        (Clear, "clear"),
        (Age, "age"),
        (Cold, "cold"),
        (Zap, "zap"),
        (ZapDirtyBit, "zap-dirty-bit"),
        (BeginSmall, "begin-4k"),
        (BeginEager, "begin-eager"),
        (BeginLazy, "begin-lazy"),
        (End, "end"),
        (Delete, "delete"),
        (Invalidate, "invalidate"),
        (Attributes, "attributes"),
        (NxRecovery, "nx-recovery"),
        (Promote, "promote"),
        (RingReset, "ring-reset"),
    ];

    /// Returns the page size by which the host maps the large slot's memory.
    fn host(self) -> Level {
        match self {
            BeginEager | BeginLazy | End | NxRecovery | Promote => Level::MEGA,
            _ => Level::PAGE,
        }
    }

    /// Returns the policies that the operation needs.
    fn policies(self) -> &'static [(&'static str, &'static str)] {
        match self {
            GetDirtyBit | ZapDirtyBit => &[("dirty_log", "dirty-bit")],
            BeginLazy => &[("eager_page_split", "off")],
            NxRecovery => &[
                ("nx_huge_pages", "on"),
                ("nx_huge_pages_recovery_ratio", "1"),
            ],
            _ => &[],
        }
    }
}

/// A VM with a large memslot, for one operation.
pub(super) struct Subject {
    operation: Operation,
    vm: Arc<Vm<Bare, Ept>>,
    /// The CPUs that map and use the slot before the operation. Each CPU uses a part of the slot.
    cpus: Vec<Vcpu<Bare, Ept>>,
    /// The VMM's view of the vCPUs' dirty rings.
    rings: Vec<Arc<[DirtyGfn]>>,
    pages: u64,
    bitmap: Vec<u64>,
    /// The map of the pages that [`Cold`] finds.
    cold: ColdMap,
    /// The time for which the thread computes in the case [`Nothing`].
    nothing: Duration,
}

impl Subject {
    /// Creates a VM whose large slot has `pages` pages. `pages` must be a multiple of 2 MiB.
    ///
    /// # Errors
    /// The engine's errors.
    pub(super) fn new(
        operation: Operation,
        pages: u64,
        nothing: Duration,
    ) -> Result<Self, Failure> {
        let vm = bare::vm_on(operation.host());
        for (name, value) in operation.policies() {
            vm.set_policy(Setting::parse(name, value)?);
        }
        let mut rings = Vec::new();
        let cpus = match operation {
            RingReset => {
                vm.use_dirty_rings();
                RINGS
            }
            // With more than four CPUs, the set-up would not be much faster.
            _ => std::thread::available_parallelism().map_or(1, |n| n.get().min(4) as u64),
        };
        let cpus = (0..cpus).map(|_| vm.create_vcpu());
        let mut cpus: Vec<_> = cpus.collect::<Result<_, _>>()?;
        if operation == RingReset {
            for cpu in &mut cpus {
                let memory: Arc<[_]> = (0..RING_ENTRIES).map(|_| DirtyGfn::new()).collect();
                cpu.set_dirty_ring(Arc::new(DirtyRing::new(memory.clone())?))?;
                rings.push(memory);
            }
        }
        unrelated::create_slot(&vm)?;
        // Allocates frames in advance for the tables of the 4 KiB leaves, and for some tables above them.
        slat_host::frames::warm(&**vm.platform(), (pages / MEGA) as usize + 256);
        Ok(Subject {
            operation,
            vm,
            cpus,
            rings,
            pages,
            bitmap: vec![0; pages.div_ceil(64) as usize],
            cold: ColdMap::new(backing(if operation == Cold { pages } else { 0 }))?,
            nothing,
        })
    }

    pub(super) fn operation(&self) -> Operation {
        self.operation
    }

    pub(super) fn vm(&self) -> &Arc<Vm<Bare, Ept>> {
        &self.vm
    }

    /// Brings the slot into the state that the operation needs, whatever the previous operation has left.
    ///
    /// # Errors
    /// The engine's errors. It is also an error if the slot is not mapped as the operation needs.
    pub(super) fn set_up(&mut self) -> Result<(), Failure> {
        if self.operation == Nothing {
            return Ok(());
        }
        self.vm
            .set_memory_attributes(self.gfns(), MemoryAttributes::NONE)?;
        self.vm.set_manual_dirty_log(false, false);
        self.delete()?;
        match self.operation {
            RingReset => self.create(SlotFlags::LOG_DIRTY_PAGES)?,
            Promote => {
                self.vm.set_policy(Setting::HugePages(Switch::Off));
                self.create(SlotFlags(0))?;
                self.map()?;
                self.vm.set_policy(Setting::HugePages(Switch::On));
            }
            _ => {
                self.create(SlotFlags(0))?;
                self.map()?;
            }
        }
        match self.operation {
            // In this state, all bits of the dirty log are set, and no page is write-protected.
            GetProtect | Clear => {
                self.vm.set_manual_dirty_log(true, true);
                self.create(SlotFlags::LOG_DIRTY_PAGES)?;
                self.vm.set_manual_dirty_log(self.operation == Clear, false);
                self.bitmap.fill(u64::MAX);
            }
            GetDirtyBit | ZapDirtyBit => {
                self.create(SlotFlags::LOG_DIRTY_PAGES)?;
                self.access(Access::Write, 1)?;
            }
            Age => self.access(Access::Read, 1)?,
            Cold => drop(self.vm.cold_ranges(&mut self.cold, 1)),
            End => self.create(SlotFlags::LOG_DIRTY_PAGES)?,
            NxRecovery => self.access(Access::Execute, MEGA)?,
            RingReset => {
                self.access(Access::Write, APART)?;
                let entries = self.rings.iter().flat_map(|ring| ring.iter());
                let collected = entries.filter_map(DirtyGfn::collect).count() as u64;
                expect("pages in the rings", collected, self.pages / APART)?;
            }
            _ => {}
        }
        self.expect_mapped(self.before())
    }

    /// Performs the operation. Returns the number of pages, tables or ring entries that it reported.
    ///
    /// # Errors
    /// The engine's errors.
    pub(super) fn perform(&mut self) -> Result<u64, Failure> {
        let (vm, gfns) = (&self.vm, self.gfns());
        match self.operation {
            Nothing => {
                let began = Instant::now();
                while began.elapsed() < self.nothing {
                    std::hint::spin_loop();
                }
            }
            GetProtect | GetDirtyBit => vm.get_dirty_log(0, SLOT, &mut self.bitmap)?,
            Clear => vm.clear_dirty_log(0, SLOT, 0, self.pages, &self.bitmap)?,
            Age => return Ok(vm.age(backing(self.pages), true)),
            Cold => {
                let ranges = vm.cold_ranges(&mut self.cold, 1);
                return Ok(ranges
                    .map(|cold| (cold.hvas.end.0 - cold.hvas.start.0) / PAGE)
                    .sum());
            }
            Zap | ZapDirtyBit => vm.zap(0, gfns),
            BeginSmall | BeginEager | BeginLazy => self.create(SlotFlags::LOG_DIRTY_PAGES)?,
            End => self.create(SlotFlags(0))?,
            Delete => self.delete()?,
            Invalidate => drop(vm.invalidate(backing(self.pages))),
            Attributes => vm.set_memory_attributes(gfns, MemoryAttributes::PRIVATE)?,
            NxRecovery => return Ok(vm.recover_nx_huge_pages()),
            Promote => return Ok(vm.promote(&mut Promotion::default(), usize::MAX)),
            RingReset => return Ok(vm.reset_dirty_rings()),
        }
        Ok(0)
    }

    /// Checks the result of the operation. `told` is the number that the operation has returned.
    ///
    /// # Errors
    /// If the operation has not done its work.
    pub(super) fn check(&mut self, told: u64) -> Result<(), Failure> {
        self.expect_mapped(self.after())?;
        match self.operation {
            GetProtect | GetDirtyBit => {
                expect("pages dirty", self.marked(), self.pages)?;
                self.expect_noted()
            }
            Clear | BeginSmall | BeginEager | BeginLazy => self.expect_noted(),
            ZapDirtyBit => {
                self.vm.get_dirty_log(0, SLOT, &mut self.bitmap)?;
                expect("pages dirty after a zap", self.marked(), self.pages)
            }
            Age => expect("pages used", told, self.pages),
            Cold => expect("pages not used", told, self.pages),
            NxRecovery => expect("tables recovered", told, self.pages / MEGA),
            Promote => expect("leaves installed", told, self.vm.stats().pages_2m),
            RingReset => expect("entries reset", told, self.pages / APART),
            _ => Ok(()),
        }
    }

    /// Checks that from now on, the log records exactly the pages to which the guest writes.
    fn expect_noted(&mut self) -> Result<(), Failure> {
        let cpu = &mut self.cpus[0];
        cpu.enter_unguarded(0);
        let written =
            [0, self.pages - 1].map(|page| cpu.translate(Gpa(page * PAGE), Access::Write));
        cpu.leave();
        for result in written {
            result?;
        }
        self.vm.get_dirty_log(0, SLOT, &mut self.bitmap)?;
        expect("pages dirty after two writes", self.marked(), 2)
    }

    /// Returns the numbers of 4 KiB and 2 MiB leaves that map the slot before the operation.
    fn before(&self) -> [u64; 2] {
        match self.operation {
            Nothing => [0, 0],
            BeginEager | BeginLazy => [0, self.pages / MEGA],
            RingReset => [self.pages / APART, 0],
            _ => [self.pages, 0],
        }
    }

    /// Returns the numbers of 4 KiB and 2 MiB leaves that map the slot after the operation.
    fn after(&self) -> [u64; 2] {
        match self.operation {
            GetProtect | GetDirtyBit | Clear | Age | Cold | BeginSmall | BeginEager => {
                [self.pages, 0]
            }
            BeginLazy | RingReset => self.before(),
            // Huge leaves are restored in place, except in ranges where an invalidation has begun during the operation.
            End | Promote => [0, self.vm.stats().pages_2m.min(self.pages / MEGA)],
            Nothing | Zap | ZapDirtyBit | Delete | Invalidate | Attributes | NxRecovery => [0, 0],
        }
    }

    fn expect_mapped(&self, [small, mega]: [u64; 2]) -> Result<(), Failure> {
        let stats = self.vm.stats();
        // Each of the experiment's two small memslots may have one mapped page, so there may be up to two more 4 KiB
        // leaves.
        let others = stats.pages_4k.wrapping_sub(small);
        if others > 2 || stats.pages_2m != mega {
            let (is_small, is_mega) = (stats.pages_4k, stats.pages_2m);
            return Err(format!(
                "mapped by {is_small} leaves of 4 KiB and {is_mega} of 2 MiB, not {small} and {mega}"
            )
            .into());
        }
        Ok(())
    }

    fn gfns(&self) -> Range<Gfn> {
        Gfn(0)..Gfn(self.pages)
    }

    fn marked(&self) -> u64 {
        self.bitmap.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// Creates the slot, or changes its flags.
    fn create(&self, flags: SlotFlags) -> Result<(), Failure> {
        let region = bare::region(SLOT, 0, self.pages, BACKING);
        Ok(self.vm.set_memory_region(0, &region.with_flags(flags))?)
    }

    fn delete(&self) -> Result<(), Failure> {
        match self.vm.remove_memory_region(0, SLOT) {
            Ok(()) | Err(RegionError::NothingToDelete(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Maps all of the slot for reading and writing, by leaves as large as the host allows.
    fn map(&mut self) -> Result<(), Failure> {
        self.share(|cpu, pages| {
            let gpas = Gpa(pages.start * PAGE)..Gpa(pages.end * PAGE);
            match cpu.prefault(gpas.clone())? == gpas.end.0 - gpas.start.0 {
                true => Ok(()),
                false => Err(Stop::Mmio { gpa: gpas.end }),
            }
        })
    }

    /// Makes an access to one of every `apart` pages.
    fn access(&mut self, access: Access, apart: u64) -> Result<(), Failure> {
        self.share(|cpu, pages| {
            for page in pages.step_by(apart as usize) {
                cpu.translate(Gpa(page * PAGE), access)?;
            }
            Ok(())
        })
    }

    /// Runs `work` on all vCPUs at the same time. Each vCPU has its own part of the slot.
    fn share(
        &mut self,
        work: impl Fn(&mut Vcpu<Bare, Ept>, Range<u64>) -> Result<(), Stop> + Sync,
    ) -> Result<(), Failure> {
        let pages = self.pages;
        let part = (pages / self.cpus.len() as u64).next_multiple_of(MEGA);
        let work = &work;
        std::thread::scope(|scope| {
            let threads: Vec<_> = (self.cpus.iter_mut().zip(0..))
                .map(|(cpu, index)| {
                    let pages = (index * part).min(pages)..((index + 1) * part).min(pages);
                    scope.spawn(move || {
                        cpu.enter_unguarded(0);
                        let result = work(cpu, pages);
                        cpu.leave();
                        result
                    })
                })
                .collect();
            for thread in threads {
                thread.join().expect("accesses do not panic")?;
            }
            Ok(())
        })
    }
}

/// Returns the backing addresses of the first `pages` pages of the large slot.
fn backing(pages: u64) -> Range<Hva> {
    Hva(BACKING)..Hva(BACKING + pages * PAGE)
}

fn expect(what: &str, is: u64, expected: u64) -> Result<(), Failure> {
    match is == expected {
        true => Ok(()),
        false => Err(format!("{is} {what}, not {expected}").into()),
    }
}
