//! Capabilities of exits.

use crate::Use;
use crate::common::*;
use kvm_bindings::*;
use slat_kvm::{IoEventAddress, VcpuExit};

pub const USES: &[Use] = &[
    (KVM_CAP_HLT, |_| drop(halts(&[0xf4]))),
    (KVM_CAP_COALESCED_MMIO, |_| {
        coalesces(IoEventAddress::Mmio(DEVICE))
    }),
    (KVM_CAP_COALESCED_PIO, |_| {
        coalesces(IoEventAddress::Pio(0x10))
    }),
    (KVM_CAP_INTERNAL_ERROR_DATA, |_| {
        // vaddps ymm0, ymm0, ymm0, which is #UD in real mode.
        let mut guest = Guest::new(&[0xc5, 0xfc, 0x58, 0xc0]);
        guest.memory.write(6 * 4, &[0x00, 0x80, 0, 0]);
        loop {
            match guest.vcpu.run().unwrap() {
                VcpuExit::InternalError => break,
                VcpuExit::MmioRead(..) => {}
                other => panic!("{other:?}"),
            }
        }
        // SAFETY: the part of the union that the exit fills in.
        let internal = unsafe { guest.vcpu.get_kvm_run().__bindgen_anon_1.internal };
        assert_eq!(internal.suberror, KVM_INTERNAL_ERROR_EMULATION);
        assert_ne!(internal.ndata, 0);
    }),
    (KVM_CAP_IMMEDIATE_EXIT, |_| {
        let mut guest = Guest::new(SPIN);
        guest.vcpu.set_kvm_immediate_exit(1);
        assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
    }),
    (KVM_CAP_EXIT_HYPERCALL, |hypercalls| {
        assert_eq!(
            enable(&vm(), KVM_CAP_EXIT_HYPERCALL, hypercalls as u64),
            Ok(())
        );
    }),
    (KVM_CAP_EXIT_ON_EMULATION_FAILURE, |_| {
        let vm = vm();
        let errno = enable(&vm, KVM_CAP_EXIT_ON_EMULATION_FAILURE, 2);
        assert_eq!(errno, Err(libc::EINVAL));
        assert_eq!(enable(&vm, KVM_CAP_EXIT_ON_EMULATION_FAILURE, 1), Ok(()));
    }),
    (KVM_CAP_X86_DISABLE_EXITS, |exits| {
        // sti; hlt: the halt lasts until the interrupt, whose handler writes a byte to a port.
        let mut guest = Guest::with(&[0xfb, 0xf4], |vm| {
            let refused = enable(vm, KVM_CAP_X86_DISABLE_EXITS, 1 << 8);
            assert_eq!(refused, Err(libc::EINVAL));
            let allowed = enable(vm, KVM_CAP_X86_DISABLE_EXITS, exits as u64);
            assert_eq!(allowed, Ok(()));
        });
        let late = enable(&guest.vm, KVM_CAP_X86_DISABLE_EXITS, exits as u64);
        assert_eq!(late, Err(libc::EINVAL));
        guest.memory.write(0x20 * 4, &[0x00, 0x20, 0, 0]);
        guest.memory.write(0x2000, &[0xe6, 0x10]);
        guest.vcpu.get_kvm_run().request_interrupt_window = 1;
        let exit = guest.vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::IrqWindowOpen), "{exit:?}");
        assert_eq!(guest.vcpu.get_regs().unwrap().rip, CODE + 2);
        guest.vcpu.get_kvm_run().request_interrupt_window = 0;
        guest.vcpu.interrupt(0x20).unwrap();
        let exit = guest.vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::IoOut(0x10, _)), "{exit:?}");
    }),
    (KVM_CAP_X86_USER_SPACE_MSR, |_| {
        // mov ecx, 0x12345678; rdmsr; hlt
        let code = [0x66, 0xb9, 0x78, 0x56, 0x34, 0x12, 0x0f, 0x32, 0xf4];
        let mut guest = Guest::new(&code);
        let reasons = KVM_MSR_EXIT_REASON_UNKNOWN;
        assert_eq!(
            enable(&guest.vm, KVM_CAP_X86_USER_SPACE_MSR, reasons.into()),
            Ok(())
        );
        match guest.vcpu.run().unwrap() {
            VcpuExit::X86Rdmsr(read) => {
                assert_eq!((read.index, *read.error), (0x1234_5678, 0));
                assert_eq!(read.reason.bits(), reasons);
                *read.data = 7 << 32 | 8;
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        let regs = guest.vcpu.get_regs().unwrap();
        assert_eq!((regs.rdx, regs.rax), (7, 8));
        let errno = enable(&guest.vm, KVM_CAP_X86_USER_SPACE_MSR, 8);
        assert_eq!(errno, Err(libc::EINVAL));
    }),
];

fn coalesces(address: IoEventAddress) {
    // mov [0x8000], al; out 0x10, al; hlt
    let mut guest = Guest::new(&[0xa2, 0x00, 0x80, 0xe6, 0x10, 0xf4]);
    guest.vm.register_coalesced_mmio(address, 1).unwrap();
    let exits = std::iter::from_fn(|| match guest.vcpu.run().unwrap() {
        VcpuExit::Hlt => None,
        _ => Some(()),
    });
    assert_eq!(exits.count(), 1, "the other access");
    guest.vcpu.map_coalesced_mmio_ring().unwrap();
    assert!(guest.vcpu.coalesced_mmio_read().unwrap().is_some());
}
