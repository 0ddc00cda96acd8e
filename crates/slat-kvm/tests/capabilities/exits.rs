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
        // vaddps ymm0, ymm0, ymm0: this instruction raises #UD in real mode.
        let mut guest = Guest::new(&[0xc5, 0xfc, 0x58, 0xc0]);
        guest.memory.write(6 * 4, &[0x00, 0x80, 0, 0]);
        loop {
            match guest.vcpu.run().unwrap() {
                VcpuExit::InternalError => break,
                VcpuExit::MmioRead(..) => {}
                other => panic!("{other:?}"),
            }
        }
        // SAFETY: the exit has filled in this part of the union.
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
        // sti; hlt: the halt lasts until an interrupt arrives. Its handler writes a byte to a port.
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
    (KVM_CAP_X86_NOTIFY_VMEXIT, |_| {
        const CAP: u32 = KVM_CAP_X86_NOTIFY_VMEXIT;
        let enabled = u64::from(KVM_X86_NOTIFY_VMEXIT_ENABLED);
        let to_client = u64::from(KVM_X86_NOTIFY_VMEXIT_USER);
        // mov [0x1ef0],eax
        let code = [0x89, 0x04, 0x25, 0xf0, 0x1e, 0, 0];
        let mut guest = Guest::with(&code, |vm| {
            for bad in [0, to_client, enabled | 4] {
                assert_eq!(enable(vm, CAP, bad), Err(libc::EINVAL));
            }
            assert_eq!(enable(vm, CAP, enabled | to_client | 1000 << 32), Ok(()));
        });
        assert_eq!(enable(&guest.vm, CAP, enabled), Err(libc::EINVAL));
        deliver_db_endlessly(&guest);
        for _ in 0..2 {
            let exit = guest.vcpu.run().unwrap();
            let notified = matches!(exit, VcpuExit::Unsupported(KVM_EXIT_NOTIFY));
            assert!(notified, "{exit:?}");
        }
    }),
    (KVM_CAP_X86_BUS_LOCK_EXIT, |modes| {
        // lock inc word [0x303f], which crosses a boundary of cache lines; lock inc word [0x3030]; hlt
        let code = [
            0xf0, 0xff, 0x06, 0x3f, 0x30, 0xf0, 0xff, 0x06, 0x30, 0x30, 0xf4,
        ];
        let mut guest = Guest::new(&code);
        for bad in [modes as u64, 4] {
            let refused = enable(&guest.vm, KVM_CAP_X86_BUS_LOCK_EXIT, bad);
            assert_eq!(refused, Err(libc::EINVAL));
        }
        let off = KVM_BUS_LOCK_DETECTION_OFF.into();
        assert_eq!(enable(&guest.vm, KVM_CAP_X86_BUS_LOCK_EXIT, off), Ok(()));
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        let exit = KVM_BUS_LOCK_DETECTION_EXIT.into();
        assert_eq!(enable(&guest.vm, KVM_CAP_X86_BUS_LOCK_EXIT, exit), Ok(()));
        start_at_code(&guest.vcpu);
        let exit = guest.vcpu.run().unwrap();
        assert!(
            matches!(exit, VcpuExit::Unsupported(KVM_EXIT_X86_BUS_LOCK)),
            "{exit:?}"
        );
        let locked = KVM_RUN_X86_BUS_LOCK as u16;
        assert_eq!(guest.vcpu.get_kvm_run().flags, locked);
        // With an Intel processor, the instruction was executed before the exit. With an AMD processor, the next run
        // executes it.
        let supported = guest.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        let is_intel = supported.unwrap().as_slice()[0].ebx == u32::from_le_bytes(*b"Genu");
        let mut counter = [0; 2];
        guest.memory.read(0x303f, &mut counter);
        assert_eq!(u16::from_le_bytes(counter), 1 + u16::from(is_intel));
        let rip = guest.vcpu.get_regs().unwrap().rip;
        assert_eq!(rip, CODE + if is_intel { 5 } else { 0 });
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(guest.vcpu.get_kvm_run().flags, 0);
        guest.memory.read(0x303f, &mut counter);
        assert_eq!(counter, [2, 0]);
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

/// Puts the guest into 64-bit mode. Sets a data breakpoint at 0x1ef0, which is on the stack of the handler of #DB:
/// each delivery of #DB hits the breakpoint again.
fn deliver_db_endlessly(guest: &Guest) {
    let [gdt, idt, tss, stack] = [0x1800, 0x1900, 0x1a00, 0x1f00];
    let write = |at: u64, word: u64| guest.memory.write(at, &word.to_le_bytes());
    // The tables are at 0, 0x2000 and 0x3000. The last one maps a large page.
    write(0, 0x2003);
    write(0x2000, 0x3003);
    write(0x3000, 0x83);
    write(gdt + 8, 0x00af_9b00_0000_ffff);
    // The gate of #DB selects the first interrupt stack in the TSS.
    write(idt + 16, CODE | 8 << 16 | 1 << 32 | 0x8e << 40);
    write(tss + 36, stack);
    let mut sregs = guest.vcpu.get_sregs().unwrap();
    (sregs.cr3, sregs.cr4, sregs.efer) = (0, 1 << 5, 0x500);
    sregs.cr0 |= 1 << 31 | 1;
    (sregs.cs.selector, sregs.cs.l) = (8, 1);
    (sregs.gdt.base, sregs.gdt.limit) = (gdt, 15);
    (sregs.idt.base, sregs.idt.limit) = (idt, 31);
    (sregs.tr.base, sregs.tr.limit, sregs.tr.type_) = (tss, 0x67, 11);
    guest.vcpu.set_sregs(&sregs).unwrap();
    let mut registers = guest.vcpu.get_debug_regs().unwrap();
    registers.db[0] = stack - 16;
    registers.dr7 = 0x402 | 9 << 16;
    guest.vcpu.set_debug_regs(&registers).unwrap();
}

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
