//! The scenarios' tools: a machine, fresh VMs on it, and the memory that backs them.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use core::fmt::Debug;
use core::ops::Range;
use core::ptr;
use core::sync::atomic::Ordering::SeqCst;

use slat::Setting;
use slat::{
    Config, Format, Gfn, Gpa, Hpa, Hva, Level, MmuKind, PAGE_SHIFT, PAGE_SIZE, Region, RegionError,
    SlotFlags, Stale, Stats, Vm, VmId,
};

use crate::guest::{CODE, Guest, GuestVm, Tables};
use crate::guest_tables;
use crate::{Command, Cpu, Host, Machine, Op};

/// The guest-physical address of the data slot. The next constant is the slot's number.
pub(crate) const DATA: Gpa = Gpa(1 << 30);
pub(crate) const DATA_SLOT: u32 = 1;
/// An address that no slot contains.
pub(crate) const HOLE: Gpa = Gpa(0xf000_0000);
const CODE_SLOT: u32 = 0;
const TABLES_SLOT: u32 = 2;
/// The number of the small page that contains the first of the guest's tables.
const FIRST_TABLE: u64 = CODE_PAGES + 1;
/// The number of pages of code is that of the prefetch window, so that a fault on code looks like any other fault.
pub(crate) const CODE_PAGES: u64 = 8;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// The machine, as it is passed to a scenario.
pub(crate) struct Bench<'a, M: Machine> {
    pub(crate) cpu: &'a mut M::Cpu,
    pub(crate) host: Arc<Host<M>>,
    /// The kind of MMU that makes the tables of its VMs.
    pub(crate) mmu: MmuKind,
}

/// A VM with its first vCPU, which the machine's first CPU runs.
pub(crate) struct TestVm<M: Machine> {
    pub(crate) vm: GuestVm<M>,
    pub(crate) guest: Guest<M>,
    /// The engine's counts when they were last checked.
    counted: Stats,
}

impl<M: Machine> Bench<'_, M> {
    /// Makes a VM with the program, and with `policies`, on a host with mappings of `level`.
    pub(crate) fn vm(
        &mut self,
        level: Level,
        policies: &[(&str, &str)],
    ) -> Result<TestVm<M>, String> {
        self.host.begin(level);
        let config = Config::default()
            .with_physical_bits(M::physical_bits())
            .with_mmu(self.mmu);
        let vm = Vm::new(self.host.clone(), config).map_err(|error| error.to_string())?;
        // The tables of the previous VM were freed, and their frames may be reused. A CPU that does not tag
        // translations with their VM may still cache translations of the previous VM.
        flush::<M>(vm.id());
        for (name, value) in policies {
            let refused = |error| format!("{name}={value}: {error}");
            vm.set_policy(Setting::parse(name, value).map_err(refused)?);
        }
        self.host.load(M::Cpu::program());
        let code = Region::new(
            CODE_SLOT,
            CODE,
            CODE_PAGES * page::<M>(),
            Hva(self.host.small().0),
        );
        set_region::<M>(&vm, &code)?;
        if Tables::<M>::SHADOWS {
            let at = self.host.small().0 + FIRST_TABLE * PAGE_SIZE;
            guest_tables::write(Hpa(at), DATA);
            let size = guest_tables::PAGES * PAGE_SIZE;
            let tables = Region::new(TABLES_SLOT, guest_tables::TABLES, size, Hva(at));
            set_region::<M>(&vm, &tables)?;
        }
        let mut guest = Guest::new(&vm)?;
        guest.prepare()?;
        Ok(TestVm {
            guest,
            counted: vm.stats(),
            vm,
        })
    }

    /// Returns the data slot, of `size` bytes.
    pub(crate) fn data_slot(&self, size: u64, flags: SlotFlags) -> Region {
        Region::new(DATA_SLOT, DATA, size, Hva(self.host.large().0)).with_flags(flags)
    }

    /// Returns the backing of `pages` of the data slot.
    pub(crate) fn backing(&self, pages: Range<u64>) -> Range<Hva> {
        let start = Hva(self.host.large().0);
        let at = |page| Tables::<M>::GRANULE.add_pages(start, page);
        at(pages.start)..at(pages.end)
    }

    /// Returns the physical address of page `number` of the data slot.
    pub(crate) fn page(&self, number: u64) -> Hpa {
        Hpa(self.host.large().0 + number * page::<M>())
    }

    /// Runs `command` on the machine's first CPU.
    pub(crate) fn run(&mut self, vm: &mut TestVm<M>, command: Command) -> Result<u32, String> {
        vm.guest.run(self.cpu, &command)
    }

    /// Runs `command`, then checks in physical memory that every word was written.
    pub(crate) fn write(&mut self, vm: &mut TestVm<M>, command: Command) -> Result<(), String> {
        self.run(vm, command)?;
        for i in 0..command.count {
            let offset = command.gpa.0 - DATA.0 + i * command.step;
            let word = read_word(Hpa(self.host.large().0 + offset));
            let written = command.value + i as u32;
            same("word written by the guest", word, written)
                .map_err(|error| format!("{error}, at {}", Gpa(DATA.0 + offset)))?;
        }
        Ok(())
    }
}

impl<M: Machine> TestVm<M> {
    pub(crate) fn set(&self, region: &Region) -> Result<(), String> {
        set_region::<M>(&self.vm, region)
    }

    /// Makes another vCPU, for the second CPU.
    pub(crate) fn second_guest(&self) -> Result<Guest<M>, String> {
        Guest::new(&self.vm)
    }

    /// Checks that the engine's counters and gauges rose as expected since the last check.
    pub(crate) fn counted(&mut self, expected: &[(&str, u64)]) -> Result<(), String> {
        let now = self.vm.stats();
        let since = now.since(&self.counted);
        self.counted = now;
        for (name, rise) in expected {
            let counter = since.iter().find(|(known, _)| known == name);
            let (_, seen) = counter.ok_or_else(|| format!("no counter {name}"))?;
            same(name, seen as i64, *rise as i64)?;
        }
        Ok(())
    }

    /// Returns the number of faults that the first CPU reported since the last call.
    pub(crate) fn faults(&self) -> u64 {
        self.guest.seen.faults.swap(0, SeqCst)
    }

    /// Checks that the first CPU reported `expected` faults since the last check.
    pub(crate) fn faulted(&mut self, expected: u64) -> Result<(), String> {
        same("faults seen", self.faults(), expected)
    }

    /// Ends the VM. Checks that its tables pass the audit, and that its frames are freed.
    pub(crate) fn end(self, host: &Host<M>) -> Result<(), String> {
        self.vm.audit().map_err(|error| format!("audit: {error}"))?;
        host.forget();
        let id = self.vm.id();
        drop(self);
        M::end_vm(id);
        same("table frames in use after the VM", host.frames_used(), 0)
    }
}

/// Flushes all translations of `vm`.
pub(crate) fn flush<M: Machine>(vm: VmId) {
    let everything = Gfn(0)..Gfn(u64::MAX >> PAGE_SHIFT);
    M::flush_guests(vm, &everything, Stale::ANYTHING);
}

fn set_region<M: Machine>(vm: &GuestVm<M>, region: &Region) -> Result<(), String> {
    let set = match vm.set_memory_region(0, region) {
        Err(RegionError::Empty(slot)) => vm.remove_memory_region(0, slot),
        set => set,
    };
    set.map_err(|error| error.to_string())
}

/// Returns the bytes of a page of the machine's tables.
pub(crate) fn page<M: Machine>() -> u64 {
    Tables::<M>::GRANULE.bytes()
}

/// Returns the pages that a leaf of level 2 of the machine's tables maps.
pub(crate) fn pieces<M: Machine>() -> u64 {
    Tables::<M>::GRANULE.pages(Level::MEGA)
}

/// Returns the bytes that a leaf of level 2 of the machine's tables maps.
pub(crate) fn huge<M: Machine>() -> u64 {
    pieces::<M>() * page::<M>()
}

/// Makes a command on `count` pages of the data slot, from `first` on, one word each.
pub(crate) fn pages<M: Machine>(op: Op, first: u64, count: u64) -> Command {
    every::<M>(op, first, count, page::<M>())
}

/// Makes a command on `count` addresses of the data slot, `step` bytes apart.
pub(crate) fn every<M: Machine>(op: Op, first_page: u64, count: u64, step: u64) -> Command {
    Command {
        op,
        gpa: Gpa(DATA.0 + first_page * page::<M>()),
        step,
        count,
        value: 0x100,
    }
}

/// Returns the rise that [`TestVm::counted`] sees for a gauge that fell by `n`.
pub(crate) fn fell(n: u64) -> u64 {
    n.wrapping_neg()
}

/// Reads a word of guest memory.
pub(crate) fn read_word(at: Hpa) -> u32 {
    // SAFETY: callers pass addresses of the guests' memory, which is never freed. The access is volatile, because a
    // guest may be writing the word.
    unsafe { ptr::read_volatile(at.0 as *const u32) }
}

/// Writes a word of guest memory.
pub(crate) fn write_word(at: Hpa, value: u32) {
    // SAFETY: callers pass addresses of the guests' memory, which is never freed. The access is volatile, because a
    // guest may be reading the word.
    unsafe { ptr::write_volatile(at.0 as *mut u32, value) }
}

/// Checks that `seen` is `expected`.
pub(crate) fn same<T: PartialEq + Debug>(what: &str, seen: T, expected: T) -> Result<(), String> {
    if seen == expected {
        Ok(())
    } else {
        Err(format!("{what}: {expected:?} expected, {seen:?} seen"))
    }
}

/// Checks that `holds` is true.
pub(crate) fn holds(what: &str, holds: bool) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what.to_string()) }
}
