//! Tests linear addresses that lead to a device. A vCPU remembers where such an address leads, until the guest
//! invalidates the translation as the manual asks.
#![cfg(target_arch = "x86_64")]

mod common;
mod long_mode;

use long_mode::Machine;
use slat_kvm::VcpuExit;

const CODE: u64 = 0x1000;

/// Runs a guest that reads the device at 0x400000 twice, then maps 2 MiB at this address to 0x600000, executes
/// `invalidate`, and reads again. Returns the addresses of the exits.
fn reads(invalidate: &[u8]) -> Vec<u64> {
    let machine = Machine::new();
    let code = [
        // mov ebx,0x400000; mov eax,[rbx]; mov eax,[rbx]; add qword [0x6010],0x200000
        &b"\xbb\0\0\x40\0\x8b\x03\x8b\x03\x48\x81\x04\x25\x10\x60\0\0\0\0\x20\0"[..],
        invalidate,
        // mov eax,[rbx]; hlt
        b"\x8b\x03\xf4",
    ];
    machine.memory.write(CODE, &code.concat());
    let mut vcpu = machine.vm.create_vcpu(0).unwrap();
    machine.start(&vcpu);
    let mut seen = vec![];
    loop {
        match vcpu.run().unwrap() {
            VcpuExit::MmioRead(gpa, data) => {
                data.fill(0);
                seen.push(gpa);
            }
            VcpuExit::Hlt => return seen,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_device_is_found_elsewhere_after_an_invalidation() {
    let ways: [(&str, &[u8]); 4] = [
        ("invlpg [rbx]", b"\x0f\x01\x3b"),
        // This instruction invalidates another address in the same large page.
        ("invlpg [rbx+0x5000]", b"\x0f\x01\xbb\0\x50\0\0"),
        ("mov rax,cr3; mov cr3,rax", b"\x0f\x20\xd8\x0f\x22\xd8"),
        (
            "mov rax,cr4; btc rax,7; mov cr4,rax",
            b"\x0f\x20\xe0\x48\x0f\xba\xf8\x07\x0f\x22\xe0",
        ),
    ];
    for (name, invalidate) in ways {
        assert_eq!(
            reads(invalidate),
            [0x40_0000, 0x40_0000, 0x60_0000],
            "{name}"
        );
    }
}
