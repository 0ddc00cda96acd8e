//! Shows how a hypervisor uses the engine: it makes a memslot and a vCPU, handles faults, emulates a device, and moves
//! a page.
//!
//! The platform is in [`plain_memory`]; read that first. Run it: `cargo run -p slat --example platform`.

#[path = "plain_memory/cpu.rs"]
mod cpu;
mod plain_memory;
#[path = "plain_memory/relocate.rs"]
mod relocate;
#[cfg(test)]
#[path = "plain_memory/under_test.rs"]
mod under_test;

use std::error::Error;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use cpu::Cpu;
use plain_memory::PlainMemory;
use relocate::relocate;
use slat::{Config, Ept, Gpa, Hva, PAGE_SIZE, Region, Stop, Vm};

/// The address at which guest memory begins, and the number of its pages.
const RAM: Gpa = Gpa(0x10_0000);
const PAGES: u64 = 256;

fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    // 1 MiB of guest memory, of which nothing is resident, on a host with 2 MiB.
    let host = Arc::new(PlainMemory::new(512, PAGES as usize));
    let vm = Vm::<_, Ept>::new(host.clone(), Config::default())?;
    let memory = Region::new(0, RAM, PAGES * PAGE_SIZE, Hva(0));
    vm.set_memory_region(0, &memory)?;
    let mut cpu = Cpu::new(&vm)?;
    writeln!(out, "memslot 0: {} to {}", RAM, Gpa(RAM.0 + memory.size))?;

    // The first store to a page faults: the engine asks the platform for a frame and maps it.
    for page in [0, 1, 7] {
        let gpa = Gpa(RAM.0 + page * PAGE_SIZE);
        let before = cpu.stats();
        cpu.store(gpa, 0x5107 + page)?;
        let faults = cpu.stats().since(&before).pf_fixed;
        let frame = host.resident(Hva(page * PAGE_SIZE)).ok_or("it is mapped")?;
        writeln!(out, "store {gpa}: {faults} fault, now in {frame:?}")?;
    }
    let before = cpu.stats();
    let value = cpu.load(RAM)?;
    let faults = cpu.stats().since(&before).pf_taken;
    writeln!(out, "load {RAM}: {value:#x}, {faults} faults")?;

    // At an address without a memslot, the client emulates a device.
    let device = Gpa(0xfee0_0000);
    match cpu.load(device) {
        Err(Stop::Mmio { gpa }) => writeln!(out, "load {gpa}: no memslot, a device")?,
        other => return Err(format!("{device}: {other:?}").into()),
    }

    // The host moves the first page. No CPU uses it between the begin and the end of the invalidation.
    let flushes = host.flushes.load(Relaxed);
    let invalidation = vm.invalidate(memory.backing..Hva(PAGE_SIZE));
    let (old, new) = relocate(&host, memory.backing).ok_or("no frame is free")?;
    drop(invalidation);
    let flushes = host.flushes.load(Relaxed) - flushes;
    writeln!(
        out,
        "the host moves a page: {flushes} flush, {old:?} -> {new:?}"
    )?;
    let before = cpu.stats();
    let value = cpu.load(RAM)?;
    let faults = cpu.stats().since(&before).pf_fixed;
    writeln!(out, "load {RAM}: {value:#x}, {faults} fault")?;

    // Call this in your own tests.
    vm.audit()?;
    writeln!(out, "audit: {} leaves, all right", vm.stats().pages_4k)?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = String::new();
    let result = run(&mut out);
    print!("{out}");
    result
}

#[test]
fn the_readme_shows_what_it_prints() {
    let mut out = String::new();
    run(&mut out).unwrap();
    assert!(include_str!("../README.md").contains(&out), "{out}");
}
