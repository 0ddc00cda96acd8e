//! A hypervisor in a page, on AMD's SVM and nested paging. See docs/hypervisor.md, which walks through it.
//!
//! Runs under QEMU: `-cpu max,+svm -accel tcg -smp 2 -m 2G -kernel` this. `metal/run --arch npt` does it.
#![no_std]
#![no_main]

extern crate alloc;

use alloc::boxed::Box;
use alloc::format;
use alloc::sync::Arc;
use core::error::Error;

use metal_core::{Command, Cpu, Exit, Heap, Host, Machine, Op};
use metal_x86::{MEMORY, Pc, Virtualization, print};
use slat::format::Npt;
use slat::{Config, Gpa, Hva, PAGE_SIZE, Region, Stop, Vm};

/// A CPU whose nested walker walks the engine's tables.
type Svm = metal_npt::Svm<Npt>;

#[global_allocator]
static HEAP: Heap = Heap::new();

/// Entry point of each CPU, on a stack of its own.
#[unsafe(no_mangle)]
extern "C" fn monitor(cpu: usize) -> ! {
    // SAFETY: once, by the first CPU; the memory is described as it is.
    let host = (cpu == 0).then(|| unsafe { Host::<Pc<Svm>>::new(MEMORY, &HEAP) });
    metal_x86::start(cpu);
    let mut svm = Svm::new(cpu);
    match host {
        Some(host) => {
            hypervisor(&mut svm, host.clone()).expect("the first guest");
            metal_core::run(svm, host)
        }
        None => Svm::second().serve(svm),
    }
}

/// A complete hypervisor: its guest writes all of its memory, and beyond it.
fn hypervisor(cpu: &mut Svm, host: Arc<Host<Pc<Svm>>>) -> Result<(), Box<dyn Error>> {
    const CODE: Gpa = Gpa(0);
    const RAM: Gpa = Gpa(1 << 30);
    const PAGES: u64 = 2048;
    const BEYOND: u64 = 3;

    // The guest's memory: which host memory backs which guest-physical address. No table is filled yet.
    let config = Config::default().with_physical_bits(Pc::<Svm>::physical_bits());
    let vm = Vm::<_, Npt>::new(host.clone(), config)?;
    let slots = [
        (CODE, PAGE_SIZE, host.small()),
        (RAM, PAGES * PAGE_SIZE, host.large()),
    ];
    for (slot, (gpa, size, backing)) in (0..).zip(slots) {
        let region = Region::new(slot, gpa, size, Hva(backing.0));
        vm.set_memory_region(0, &region)?;
    }
    host.load(Svm::program());

    // Its CPU.
    let mut vcpu = vm.create_vcpu()?;
    let root = vm.root(0).ok_or("a VM has an address space")?.hpa();
    let command = Command {
        op: Op::Write,
        gpa: RAM,
        step: PAGE_SIZE,
        count: PAGES + BEYOND,
        value: 1,
    };
    cpu.begin(CODE, &command);

    let mut device_accesses = 0;
    loop {
        match cpu.run(vm.id(), root) {
            Exit::Fault { gpa, access, .. } => match vcpu.hardware_fault(gpa, access) {
                // The tables allow the access now: the same instruction again.
                Ok(()) => {}
                // At an address without memory there is a device. This device ignores stores, and reads as 0.
                Err(Stop::Mmio { .. }) => {
                    device_accesses += 1;
                    cpu.complete_mmio(0);
                }
                Err(stop) => return Err(stop.into()),
            },
            // The interrupt only had to stop the guest.
            Exit::Kicked => {}
            Exit::Done { .. } => break,
            _ => return Err("the guest did what nobody expects".into()),
        }
    }

    let stats = vm.stats();
    print(&format!(
        "a hypervisor in a page: {PAGES} pages written after {} faults, {} leaves of 2 MiB, {} of 4 KiB; \
         {device_accesses} accesses to a device\n",
        stats.pf_taken, stats.pages_2m, stats.pages_4k,
    ));
    Ok(())
}
