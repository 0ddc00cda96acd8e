//! The operations that are counted, in their order: for each format the life of a mapping, and then memslots.
//!
//! Each operation prints its name, and the number of its pages or calls.

use std::hint::black_box;
use std::sync::Arc;

use slat::format::{Npt, Stage2, Sv48x4};
use slat::{Access, Ept, Format, Gpa, Hva, Level, Prefetch, Setting, SlotFlags, Vcpu, Vm};

use crate::machine::{Machine, region, vm};

/// The address at which memslots begin.
const BASE: u64 = 1 << 30;
/// The number of pages of a memslot. Their leaves fill 32 tables of level 1.
const PAGES: u64 = 1 << 14;
const SLOT: u32 = 0;
const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: SlotFlags = SlotFlags(0);

type Measure<'m> = &'m mut dyn FnMut(&mut dyn FnMut());

/// Counts an operation.
struct Counter<'m> {
    format: &'static str,
    measure: Measure<'m>,
}

impl Counter<'_> {
    /// Counts the instructions of `operation`, which performs the operation called `name` `times` times.
    fn count(&mut self, name: &str, times: u64, mut operation: impl FnMut()) {
        (self.measure)(&mut operation);
        println!("{}/{name}\t{times}", self.format);
    }
}

/// Runs all operations, each through `measure`.
pub fn all(measure: Measure<'_>) {
    format::<Ept>("ept", measure);
    format::<Npt>("npt", measure);
    format::<Stage2<48>>("aarch64", measure);
    format::<Sv48x4>("riscv", measure);
    for slots in [8, 512] {
        memslots(slots, measure);
    }
}

fn format<F: Format>(format: &'static str, measure: Measure<'_>) {
    let mut counter = Counter { format, measure };
    life::<F>(&mut counter);
    log::<F>(&mut counter);
    readers::<F>(&mut counter);
    faults::<F>(&mut counter);
    huge::<F>(&mut counter);
}

fn set<F: Format>(vm: &Vm<Machine, F>, flags: SlotFlags) {
    let set = vm.set_memory_region(0, &region(SLOT, flags, BASE, PAGES));
    set.expect("a valid memslot");
}

/// Makes a VM with one memslot, and a CPU of the VM.
fn world<F: Format>(level: Level) -> (Arc<Vm<Machine, F>>, Vcpu<Machine, F>) {
    let vm = vm::<F>(level);
    set(&vm, NO_FLAGS);
    let vcpu = vm.create_vcpu().expect("memory for a vCPU");
    (vm, vcpu)
}

fn prefault<F: Format>(vcpu: &mut Vcpu<Machine, F>) {
    let range = Gpa(BASE)..Gpa(BASE + (PAGES << 12));
    assert_eq!(vcpu.enter(0).prefault(range), Ok(PAGES << 12));
}

/// Returns the address of the slot's page number `i` in an order in which all tables are visited again and again.
fn page(i: u64) -> Gpa {
    // The step is odd, so that each page is visited exactly once.
    const STEP: u64 = 5003;
    Gpa(BASE + ((i * STEP % PAGES) << 12))
}

fn translate<F: Format>(vcpu: &mut Vcpu<Machine, F>, pages: u64, access: Access) {
    for i in 0..pages {
        let host = vcpu
            .translate(page(i), access)
            .expect("memory is there")
            .host;
        assert_eq!(host.0, page(i).0);
    }
}

/// Counts the operations in the life of a mapping: map, use, protect, unmap.
fn life<F: Format>(counter: &mut Counter<'_>) {
    let (vm, mut vcpu) = world::<F>(Level::PAGE);
    counter.count("map", PAGES, || prefault(&mut vcpu));
    {
        let mut vcpu = vcpu.enter(0);
        counter.count("translate-first", PAGES, || {
            translate(&mut vcpu, PAGES, Access::Write);
        });
        counter.count("translate", PAGES, || {
            translate(&mut vcpu, PAGES, Access::Write)
        });
        counter.count("translate-after-quiesce", PAGES, || {
            for i in 0..PAGES {
                vcpu.quiesce();
                black_box(vcpu.translate(page(i), Access::Read)).expect("memory is there");
            }
        });
        counter.count("lookup-vcpu", PAGES, || {
            for i in 0..PAGES {
                black_box(vcpu.lookup(page(i).gfn())).expect("it is mapped");
            }
        });
    }
    counter.count("lookup", PAGES, || {
        for i in 0..PAGES {
            black_box(vm.lookup(0, page(i).gfn())).expect("it is mapped");
        }
    });
    counter.count("protect", PAGES, || set(&vm, LOGGED));
    set(&vm, NO_FLAGS);
    const INVALIDATED: u64 = 256;
    counter.count("invalidate", INVALIDATED, || {
        for i in 0..INVALIDATED {
            let hva = page(i).0;
            drop(vm.invalidate(Hva(hva)..Hva(hva + 4096)));
        }
    });
    counter.count("unmap", PAGES, || {
        vm.remove_memory_region(0, SLOT).expect("a memslot");
    });
}

/// Counts the operations of the dirty log: write faults on write-protected pages, and reading the log.
fn log<F: Format>(counter: &mut Counter<'_>) {
    const WRITTEN: u64 = PAGES / 4;
    let (vm, mut vcpu) = world::<F>(Level::PAGE);
    prefault(&mut vcpu);
    counter.count("protect-live", PAGES, || set(&vm, LOGGED));
    let mut write = |counter: &mut Counter<'_>, name| {
        let mut vcpu = vcpu.enter(0);
        counter.count(name, WRITTEN, || {
            translate(&mut vcpu, WRITTEN, Access::Write)
        });
    };
    write(counter, "write-first");
    let mut bitmap = vec![0; PAGES as usize / 64];
    let mut harvest = |counter: &mut Counter<'_>, name| {
        counter.count(name, WRITTEN, || {
            vm.get_dirty_log(0, SLOT, &mut bitmap).expect("it logs");
        });
        let written: u32 = bitmap.iter().map(|word| word.count_ones()).sum();
        assert_eq!(u64::from(written), WRITTEN);
    };
    harvest(counter, "harvest");
    write(counter, "write");
    vm.set_manual_dirty_log(true, false);
    harvest(counter, "harvest-manual");
    counter.count("clear", WRITTEN, || {
        (vm.clear_dirty_log(0, SLOT, 0, PAGES, &bitmap)).expect("it logs");
    });
}

/// Counts operations of readers of the dirty log, with one reader in addition to the VMM, and with four.
fn readers<F: Format>(counter: &mut Counter<'_>) {
    const WRITTEN: u64 = PAGES / 4;
    let names = [
        (1, ["reader-write", "reader-harvest", "reader-ranges"]),
        (
            4,
            ["readers-4-write", "readers-4-harvest", "readers-4-ranges"],
        ),
    ];
    for (readers, [write, harvest, ranges]) in names {
        let (vm, mut vcpu) = world::<F>(Level::PAGE);
        prefault(&mut vcpu);
        let readers = (0..readers).map(|_| vm.log_reader().expect("memory for a reader"));
        let mut readers: Vec<_> = readers.collect();
        translate(&mut vcpu.enter(0), WRITTEN, Access::Write);
        readers[0].begin().commit();
        counter.count(write, WRITTEN, || {
            translate(&mut vcpu.enter(0), WRITTEN, Access::Write);
        });
        counter.count(harvest, WRITTEN, || readers[0].begin().commit());
        let epoch = readers[0].begin();
        counter.count(ranges, PAGES, || assert_eq!(epoch.pages(), 0));
    }
}

/// Counts faults of one page each.
fn faults<F: Format>(counter: &mut Counter<'_>) {
    for (name, prefetch, faults) in [
        ("fault", Prefetch::Off, PAGES / 4),
        ("fault-prefetch", Prefetch::Adaptive, PAGES / 4),
    ] {
        let (vm, mut vcpu) = world::<F>(Level::PAGE);
        vm.set_policy(Setting::Prefetch(prefetch));
        let mut entered = vcpu.enter(0);
        counter.count(name, faults, || {
            for i in 0..faults {
                // The faults are on neighbouring pages, because programs often touch neighbouring pages.
                let gpa = Gpa(BASE + (i << 12));
                entered
                    .translate(gpa, Access::Write)
                    .expect("memory is there");
            }
        });
    }
    let (vm, mut vcpu) = world::<F>(Level::PAGE);
    vm.set_policy(Setting::Prefetch(Prefetch::Off));
    counter.count("fault-hardware", PAGES / 4, || {
        for i in 0..PAGES / 4 {
            vcpu.hardware_fault(page(i), Access::Write)
                .expect("memory is there");
        }
    });
    let mut entered = vcpu.enter(0);
    counter.count("mmio", PAGES / 4, || {
        for i in 0..PAGES / 4 {
            let beyond = Gpa(page(i).0 + (PAGES << 12));
            entered
                .translate(beyond, Access::Read)
                .expect_err("no memslot");
        }
    });
}

/// Counts operations on huge leaves.
fn huge<F: Format>(counter: &mut Counter<'_>) {
    let (vm, mut vcpu) = world::<F>(Level::MEGA);
    vm.set_manual_dirty_log(true, true);
    counter.count("map-huge", PAGES / 512, || prefault(&mut vcpu));
    set(&vm, LOGGED);
    let nothing = vec![0; PAGES as usize / 64];
    counter.count("split", PAGES, || {
        (vm.clear_dirty_log(0, SLOT, 0, PAGES, &nothing)).expect("it logs");
    });
    assert_eq!(vm.stats().pages_4k, PAGES);
}

/// Counts operations on memslots: looking up, creating and deleting them.
fn memslots(slots: u64, measure: Measure<'_>) {
    const TIMES: u64 = 512;
    let format = if slots > 8 { "slots-512" } else { "slots-8" };
    let mut counter = Counter { format, measure };
    let vm = vm::<Ept>(Level::PAGE);
    let of = |i: u64| region(i as u32, NO_FLAGS, BASE + i * (2 << 12), 1);
    (0..slots).for_each(|i| vm.set_memory_region(0, &of(i)).expect("a valid memslot"));
    let mut vcpu = vm.create_vcpu().expect("memory for a vCPU");
    {
        let mut vcpu = vcpu.enter(0);
        counter.count("lookup", TIMES, || {
            for i in 0..TIMES {
                black_box(vcpu.slot_at(of(i * 61 % slots).gpa)).expect("a memslot");
            }
        });
    }
    counter.count("change", 2 * TIMES, || {
        for _ in 0..TIMES {
            vm.remove_memory_region(0, slots as u32 / 2)
                .expect("a memslot");
            vm.set_memory_region(0, &of(slots / 2))
                .expect("a valid memslot");
        }
    });
}
