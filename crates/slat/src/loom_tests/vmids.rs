//! VMIDs: CPUs enter guests while a generation begins, and one CPU flushes by VMID.

use std::sync::{Arc, Mutex};
use std::vec::Vec;

use super::{model, spawn};
use crate::sync::atomic::{AtomicU64, Ordering::*};
use crate::{Vmid, VmidAllocator};

const CPUS: usize = 2;
/// With 2 bits the numbers are 1 to 3, so that the fourth VM begins a new generation.
const BITS: u32 = 2;

struct Machine {
    vmids: VmidAllocator,
    /// Each VM's number, and the version of its tables.
    vms: [(Vmid, AtomicU64); 4],
    /// The TLB of each CPU, with at most one entry per number: the VM for which the entry was loaded, and the version
    /// of its tables. Each TLB entry has its own lock, so that only a flush of this number orders the flushing CPU's
    /// stores before the CPU's later accesses.
    tlbs: [[loom::sync::Mutex<Option<(usize, u64)>>; 1 << BITS]; CPUS],
    /// For each CPU, the guest that it runs, and the guest's number. This is for checks: loom does not model this lock.
    inside: Mutex<[Option<(usize, u16)>; CPUS]>,
    /// All versions of VM 0's tables below this one are flushed. This is for checks: loom does not model this lock.
    flushed: Mutex<u64>,
}

impl Machine {
    fn new() -> Arc<Self> {
        Arc::new(Machine {
            vmids: VmidAllocator::new(BITS, CPUS).unwrap(),
            vms: [0; 4].map(|_| (Vmid::new(), AtomicU64::new(0))),
            tlbs: [[0; 1 << BITS]; CPUS].map(|tlb| tlb.map(|_| loom::sync::Mutex::new(None))),
            inside: Mutex::default(),
            flushed: Mutex::default(),
        })
    }

    /// Enters `vm` on `cpu`, makes its guest access memory, and exits.
    fn run(&self, cpu: usize, vm: usize) {
        let running = self.vmids.enter(cpu, &self.vms[vm].0);
        if running.must_flush() {
            for entry in &self.tlbs[cpu] {
                *entry.lock().unwrap() = None;
            }
        }
        {
            let mut inside = self.inside.lock().unwrap();
            for (other, number) in inside.iter().flatten() {
                assert_eq!(*other == vm, *number == running.number());
            }
            inside[cpu] = Some((vm, running.number()));
        }
        let flushed = *self.flushed.lock().unwrap();
        let mut entry = self.tlbs[cpu][usize::from(running.number())]
            .lock()
            .unwrap();
        let used = *entry.get_or_insert_with(|| (vm, self.vms[vm].1.load(Relaxed)));
        drop(entry);
        assert_eq!(used.0, vm, "an entry of another VM");
        assert!(vm != 0 || used.1 >= flushed, "an entry of before the flush");
        self.inside.lock().unwrap()[cpu] = None;
        drop(running);
    }

    /// Changes the tables of VM 0, and flushes.
    fn change(&self) {
        self.vms[0].1.store(1, Relaxed);
        if let Some(number) = self.vms[0].0.number() {
            for tlb in &self.tlbs {
                let mut entry = tlb[usize::from(number)].lock().unwrap();
                *entry = entry.filter(|(vm, _)| *vm != 0);
            }
        }
        *self.flushed.lock().unwrap() = 1;
    }
}

/// Runs the guests `vms` one after another on each CPU. If `change`, another CPU changes VM 0's tables at the same
/// time.
fn run(vms: [&'static [usize]; CPUS], before: &'static [usize], change: bool) {
    model(3, move || {
        let machine = Machine::new();
        before.iter().for_each(|vm| machine.run(0, *vm));
        let cpus: Vec<_> = (vms.into_iter().enumerate())
            .map(|(cpu, vms)| {
                let machine = machine.clone();
                spawn(move || vms.iter().for_each(|vm| machine.run(cpu, *vm)))
            })
            .collect();
        if change {
            machine.change();
        }
        cpus.into_iter().for_each(|cpu| cpu.join().unwrap());
    });
}

#[test]
fn guests_that_run_while_a_generation_begins_keep_their_numbers() {
    run([&[0, 3], &[1, 0]], &[0, 1, 2], false);
}

#[test]
fn two_generations_begin_while_a_guest_runs() {
    run([&[0], &[3, 1, 2, 0]], &[0, 1, 2], false);
}

#[test]
fn a_flush_by_number_reaches_a_vm_that_gets_one() {
    run([&[0], &[0]], &[], true);
}

#[test]
fn a_flush_by_number_reaches_a_vm_that_gets_another_one() {
    run([&[3], &[1, 2, 0]], &[0, 1, 2], true);
}
