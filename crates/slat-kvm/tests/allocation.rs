//! Tests allocations that fail: for every n, the n-th allocation fails while a vCPU is created and while it runs.
#![cfg(target_arch = "x86_64")]

mod common;
mod long_mode;

use long_mode::{Machine, answer};
use slat_model::FailingHeap;

#[global_allocator]
static HEAP: FailingHeap = FailingHeap;

#[test]
fn a_vcpu_without_heap_memory_is_not_made_and_can_be_made_again() {
    // Builds the decoder's tables, which allocate memory once in a process.
    drop(Machine::new().vm.create_vcpu(0).unwrap());
    for stay in [false, true] {
        for n in 0.. {
            let machine = Machine::new();
            let (vcpu, failed) = FailingHeap::failing(n, stay, || machine.vm.create_vcpu(0));
            let mut vcpu = match vcpu {
                Ok(vcpu) => vcpu,
                Err(error) => {
                    assert!(failed);
                    assert_eq!(error.errno(), libc::ENOMEM, "allocation {n}");
                    machine.vm.create_vcpu(0).unwrap()
                }
            };
            machine.start(&vcpu);
            while answer(vcpu.run().unwrap()) {}
            machine.check_end(&vcpu);
            if !failed {
                assert!(n > 5, "{n} allocations");
                break;
            }
        }
    }
}

#[test]
fn a_run_without_heap_memory_goes_on_or_is_enomem_and_can_be_repeated() {
    let mut refused = 0;
    for stay in [false, true] {
        for n in 0.. {
            let machine = Machine::new();
            let mut vcpu = machine.vm.create_vcpu(0).unwrap();
            machine.start(&vcpu);
            let ((), failed) = FailingHeap::failing(n, stay, || {
                loop {
                    match vcpu.run() {
                        Ok(exit) => {
                            if !answer(exit) {
                                return;
                            }
                        }
                        Err(error) => {
                            assert_eq!(error.errno(), libc::ENOMEM, "allocation {n}");
                            refused += 1;
                            FailingHeap::recover();
                        }
                    }
                }
            });
            machine.check_end(&vcpu);
            if !failed {
                break;
            }
        }
    }
    assert!(refused > 0, "no run needed memory for second-level tables");
}
