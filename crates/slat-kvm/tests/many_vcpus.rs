//! Tests that a VM with the largest number of vCPUs needs little memory as long as these do little. The test is a
//! process of its own, because it measures the memory of the process.
#![cfg(target_arch = "x86_64")]

mod common;
use common::*;
use slat_kvm::VcpuExit;

/// The most host memory that a vCPU may use before it runs, and after it has executed an instruction.
const MADE: usize = 42 << 10;
const RUN: usize = 96 << 10;

#[test]
fn a_vcpu_takes_memory_when_it_is_used() {
    // hlt
    let mut guest = Guest::new(&[0xf4]);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    let count = guest.kvm.get_max_vcpus() - 1;
    let mut vcpus = Vec::with_capacity(count);
    let before = resident();
    for id in 1..=count {
        vcpus.push(guest.vm.create_vcpu(id as u64).unwrap());
    }
    let made = (resident() - before) / count;
    for vcpu in &mut vcpus {
        start_at_code(vcpu);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    }
    let run = (resident() - before) / count;
    println!("{count} vCPUs: {made} bytes each when made, {run} when they have run");
    assert!(made <= MADE, "{made}");
    assert!(run <= RUN, "{run}");
}
