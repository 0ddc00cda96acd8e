//! Tests events that interrupt the flow of instructions: exceptions, interrupts, privilege changes, single steps.

use crate::common::*;
use slat_x86::*;

/// Makes the guest run at CPL 3.
pub fn as_user(guest: &mut Guest) {
    let segment = |selector, rights| Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        rights,
    };
    guest.cpu.state.cs = segment(0x23, 0xa0fb);
    guest.cpu.state.ss = segment(0x1b, 0xc0f3);
}

#[test]
fn an_exception_switches_to_its_ist_stack_with_an_aligned_frame() {
    // ud2
    let mut guest = Guest::new(b"\x0f\x0b");
    Guest::gate(guest.memory(), vector::UD, HANDLERS, 0, 1);
    guest.cpu.state.gpr[RSP] = STACK - 3;
    guest.cpu.state.rflags |= 0x200;
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RSP], IST_STACK - 40);
    let frame: Vec<u64> = (0..5).map(|n| guest.stack(n)).collect();
    assert_eq!(
        frame,
        [CODE, 8, 0x1_0202, STACK - 3, 16],
        "a fault: with RF"
    );
    assert_eq!(
        guest.cpu.state.rflags & 0x200,
        0,
        "an interrupt gate clears IF"
    );
}

#[test]
fn division_by_zero_and_overflow_are_de_with_registers_intact() {
    for code in [&b"\x48\xf7\xf1"[..], b"\x48\xf7\xf9"] {
        let mut guest = Guest::new(code);
        guest.cpu.state.gpr[RAX] = 5;
        guest.halt_in_handler(vector::DE);
        assert_eq!((guest.stack(0), guest.cpu.state.gpr[RAX]), (CODE, 5));
    }
    // idiv rcx: -2^63 / -1
    let mut guest = Guest::new(b"\x48\xf7\xf9");
    guest.cpu.state.gpr[RAX] = 1 << 63;
    guest.cpu.state.gpr[RDX] = u64::MAX;
    guest.cpu.state.gpr[RCX] = u64::MAX;
    guest.halt_in_handler(vector::DE);
}

#[test]
fn a_fault_in_delivery_is_a_double_fault_and_a_third_ends_the_run() {
    // ud2 whose gate is not present. A #NP during the delivery of #UD is delivered as #NP. A #NP during the delivery
    // of #GP becomes #DF.
    let mut guest = Guest::new(b"\x0f\x0b");
    guest.memory().write64(IDT + 16 * 6, 0);
    guest.memory().write64(IDT + 16 * 13, 0);
    guest.halt_in_handler(vector::DF);
    assert_eq!((guest.stack(0), guest.stack(1)), (0, CODE));

    let mut guest = Guest::new(b"\x0f\x0b");
    guest.cpu.state.idtr.limit = 0;
    assert_eq!(guest.run(), Exit::Shutdown);
    assert_eq!(guest.cpu.state.rip, CODE);
}

/// EXT in the error code of a fault during a delivery is set for interrupts, for exceptions only on Intel's CPUs,
/// and never for INT n.
#[test]
fn an_exception_is_an_external_event_to_intel_alone() {
    const VECTOR: u8 = 0x80;
    for (vendor, of_exception) in [(b"Genu", 1), (b"Auth", 0)] {
        let cases: [(&[u8], u8, u64); 3] = [
            // ud2
            (b"\x0f\x0b", vector::UD, of_exception),
            // int 0x80
            (b"\xcd\x80", VECTOR, 0),
            // sti; nop
            (b"\xfb\x90", VECTOR, 1),
        ];
        for (code, vector, external) in cases {
            let mut guest = Guest::new(code);
            guest
                .cpu
                .set_features(Features::from_cpuid(|leaf, _| match leaf {
                    0 => [0xd, u32::from_le_bytes(*vendor), 0, 0],
                    _ => [0; 4],
                }));
            if code[0] == 0xfb {
                guest.cpu.inject_interrupt(VECTOR);
            }
            // The IDT entry of the vector becomes zero, which is no gate.
            guest.memory().write64(IDT + 16 * u64::from(vector), 0);
            guest.halt_in_handler(vector::GP);
            let error = u64::from(vector) << 3 | 2 | external;
            assert_eq!(guest.stack(0), error, "{code:x?}");
        }
    }
}

#[test]
fn interrupts_wait_for_the_instruction_after_sti() {
    // sti; inc eax; inc eax; hlt
    let mut guest = Guest::new(b"\xfb\xff\xc0\xff\xc0\xf4");
    guest.cpu.requests.interrupt_window = true;
    assert!(!guest.cpu.can_take_interrupt());
    assert_eq!(guest.run(), Exit::InterruptWindow);
    assert_eq!(
        guest.cpu.state.rip,
        CODE + 3,
        "after the shadowed instruction"
    );
    guest.cpu.requests.interrupt_window = false;
    guest.cpu.inject_interrupt(0x80);
    guest.halt_in_handler(0x80);
    assert_eq!(guest.stack(0), CODE + 3);
    assert_eq!(guest.cpu.state.gpr[RAX], 1);
}

#[test]
fn an_nmi_is_held_back_until_iret() {
    // The handler's code is: hlt; iretq.
    let mut guest = Guest::new(b"\x90\xf4");
    guest.memory().write(HANDLERS + 16 * 2, b"\xf4\x48\xcf");
    guest.cpu.inject_nmis(1);
    guest.halt_in_handler(vector::NMI);
    guest.cpu.inject_nmis(1);
    guest.halt_in_handler(vector::NMI);
    assert_eq!(
        guest.stack(0),
        CODE,
        "the second came after IRET, before the next instruction"
    );
    guest.halt();
    assert_eq!(guest.cpu.state.rip, CODE + 2);
}

/// One NMI is delivered and a second one stays pending; further NMIs are lost.
#[test]
fn two_nmis_wait_at_most() {
    // inc eax; jmp $+0; hlt. In the handler: inc ecx; iretq.
    for (sent, came) in [(1, 1), (2, 2), (3, 2), (255, 2)] {
        let mut guest = Guest::new(b"\xff\xc0\xeb\x00\xf4");
        guest.memory().write(HANDLERS + 16 * 2, b"\xff\xc1\x48\xcf");
        guest.cpu.inject_nmis(sent);
        guest.halt();
        assert_eq!(guest.cpu.state.gpr[RCX], came, "{sent} sent");
    }
    // While the handler runs, one more NMI stays pending.
    let mut guest = Guest::new(b"\xf4");
    guest
        .memory()
        .write(HANDLERS + 16 * 2, b"\xf4\xff\xc1\x48\xcf");
    guest.cpu.inject_nmis(1);
    guest.halt_in_handler(vector::NMI);
    guest.cpu.inject_nmis(2);
    guest.halt_in_handler(vector::NMI);
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RCX], 2);
}

#[test]
fn an_nmi_waits_for_the_instruction_after_sti() {
    let mut guest = Guest::new(b"\x90\xf4");
    guest.cpu.state.events.sti_shadow = true;
    guest.cpu.inject_nmis(1);
    guest.halt_in_handler(vector::NMI);
    assert_eq!(guest.stack(0), CODE + 1);
}

/// An acknowledged interrupt is delivered even if IF is clear. So the CPU must deliver the interrupt before an NMI,
/// and not during the NMI's handler.
#[test]
fn an_nmi_comes_after_an_acknowledged_interrupt_and_holds_back_another() {
    let mut guest = Guest::new(b"\x90\xf4");
    guest.cpu.state.rflags |= 0x200;
    guest.cpu.inject_interrupt(0x80);
    guest.cpu.inject_nmis(1);
    guest.halt_in_handler(vector::NMI);
    assert_eq!(guest.stack(0), HANDLERS + 16 * 0x80);
    assert_eq!(guest.stack(2) & 0x200, 0, "in the interrupt's handler");

    let mut guest = Guest::new(b"\x90\xf4");
    guest.cpu.state.rflags |= 0x200;
    assert!(guest.cpu.can_take_interrupt());
    guest.cpu.inject_nmis(1);
    assert!(!guest.cpu.can_take_interrupt());
}

#[test]
fn an_interrupt_from_user_code_switches_stacks_and_iret_goes_back() {
    // int 0x80; hlt in user code is #GP.
    let mut guest = Guest::new(b"\xcd\x80\xf4");
    Guest::gate(guest.memory(), 0x80, HANDLERS, 3, 0);
    guest.memory().write(HANDLERS, b"\x48\xcf");
    as_user(&mut guest);
    guest.halt_in_handler(vector::GP);
    assert_eq!(guest.cpu.state.cs.selector, 8);
    assert_eq!(guest.cpu.state.gpr[RSP], KERNEL_STACK - 48);
    let frame: Vec<u64> = (0..6).map(|n| guest.stack(n)).collect();
    assert_eq!(frame, [0, CODE + 2, 0x23, 0x1_0002, STACK, 0x1b]);
}

#[test]
fn a_software_interrupt_through_an_inner_gate_is_gp_with_the_vector() {
    let mut guest = Guest::new(b"\xcd\x81");
    as_user(&mut guest);
    guest.halt_in_handler(vector::GP);
    assert_eq!((guest.stack(0), guest.stack(1)), (0x81 * 8 + 2, CODE));
}

#[test]
fn syscall_and_sysret_change_privilege_and_back() {
    // Kernel: sysretq to user code at CODE + 0x100, which is syscall. That returns to the kernel at CODE + 8: hlt.
    let mut guest = Guest::new(b"\x48\x0f\x07\x90\x90\x90\x90\x90\xf4");
    guest.memory().write(CODE + 0x100, b"\x0f\x05");
    let state = &mut guest.cpu.state;
    state.star = 8 << 32 | 0x13 << 48;
    state.lstar = CODE + 8;
    state.sfmask = 0x200;
    state.gpr[RCX] = CODE + 0x100;
    state.gpr[11] = 0x202;
    guest.halt();
    let state = &guest.cpu.state;
    assert_eq!(
        (state.rip, state.gpr[RCX], state.gpr[11]),
        (CODE + 9, CODE + 0x102, 0x202)
    );
    assert_eq!(
        (state.cs.selector, state.ss.selector, state.rflags & 0x200),
        (8, 16, 0)
    );
}

#[test]
fn user_code_may_not_touch_supervisor_pages_or_privileged_state() {
    // hlt; cli; in al,dx; mov cr3,rax; rdmsr; wrmsr; lgdt [rsi]; invlpg [rsi]; swapgs; mov dr0,rax
    for code in [
        &b"\xf4"[..],
        b"\xfa",
        b"\xec",
        b"\x0f\x22\xd8",
        b"\x0f\x32",
        b"\x0f\x30",
        b"\x0f\x01\x16",
        b"\x0f\x01\x3e",
        b"\x0f\x01\xf8",
        b"\x0f\x23\xc0",
    ] {
        let mut guest = Guest::new(code);
        as_user(&mut guest);
        guest.cpu.state.gpr[RSI] = DATA;
        guest.halt_in_handler(vector::GP);
        assert_eq!(guest.stack(1), CODE, "{code:x?}");
    }
    // mov rax,[rsi] of a supervisor page
    let mut guest = Guest::new(b"\x48\x8b\x06");
    as_user(&mut guest);
    let supervisor = Rights {
        present: true,
        write: true,
        execute: true,
        user: false,
    };
    guest.machine.rights.insert(DATA >> 12, supervisor);
    guest.cpu.state.gpr[RSI] = DATA;
    guest.halt_in_handler(vector::PF);
    assert_eq!(guest.stack(0), 5);
}

#[test]
fn addresses_that_are_not_canonical_are_gp_or_ss() {
    // mov rax,[rsi]; mov rax,[rbp]; push rax; ret to a non-canonical address
    for (code, vector) in [
        (&b"\x48\x8b\x06"[..], vector::GP),
        (b"\x48\x8b\x45\x00", vector::SS),
        (b"\xff\xe6", vector::GP),
    ] {
        let mut guest = Guest::new(code);
        guest.cpu.state.gpr[RSI] = 1 << 60;
        guest.cpu.state.gpr[RBP] = 1 << 60;
        guest.halt_in_handler(vector);
        assert_eq!((guest.stack(0), guest.stack(1)), (0, CODE));
    }
    let mut guest = Guest::new(b"\x50");
    Guest::gate(guest.memory(), vector::SS, HANDLERS, 0, 1);
    guest.cpu.state.gpr[RSP] = 1 << 60;
    guest.halt();
    assert_eq!(
        (guest.stack(0), guest.stack(1), guest.stack(4)),
        (0, CODE, 1 << 60)
    );
}

#[test]
fn single_stepping_traps_after_each_instruction() {
    // The #DB handler counts in rbx and returns: inc rbx; iretq.
    let mut guest = Guest::new(b"\x90\x90\x9d\xf4");
    guest.memory().write(HANDLERS + 16, b"\x48\xff\xc3\x48\xcf");
    guest.memory().write64(STACK, 2);
    guest.cpu.state.rflags |= 0x100;
    guest.halt();
    assert_eq!(
        guest.cpu.state.gpr[RBX], 3,
        "two NOPs and the POPF that ends it"
    );
    assert_eq!(guest.cpu.state.dr6 & 1 << 14, 1 << 14);
}

#[test]
fn an_instruction_breakpoint_comes_before_its_instruction_and_rf_steps_over_it() {
    // inc eax; inc eax; hlt. The handler sets RF in the frame: bts qword [rsp+16],16; iretq.
    let mut guest = Guest::new(b"\xff\xc0\xff\xc0\xf4");
    guest.memory().write(
        HANDLERS + 16,
        b"\x48\x0f\xba\x6c\x24\x10\x10\x89\xc3\x48\xcf",
    );
    guest.cpu.state.dr[1] = CODE + 2;
    guest.cpu.state.dr7 = 0x408;
    guest.halt();
    assert_eq!((guest.cpu.state.gpr[RAX], guest.cpu.state.gpr[RBX]), (2, 1));
    assert_eq!(guest.cpu.state.dr6 & 15, 2);
}

#[test]
fn hypercalls_and_msrs_reach_the_machine() {
    // vmcall; mov ecx,0x10; rdmsr (unknown: #GP)
    let mut guest = Guest::new(b"\x0f\x01\xc1\x89\xc3\xb9\x10\x00\x00\x00\x0f\x32");
    let state = &mut guest.cpu.state;
    (state.gpr[RAX], state.gpr[RCX]) = (1, 3);
    guest.halt_in_handler(vector::GP);
    assert_eq!(guest.machine.hypercalls, [(1, 0, true)]);
    let state = &guest.cpu.state;
    assert_eq!((state.gpr[RBX], state.gpr[RDX]), (7, 3));
    assert_eq!(guest.stack(1), CODE + 10);
}

#[test]
fn a_machine_may_have_no_hypercall() {
    // vmcall
    let mut guest = Guest::new(b"\x0f\x01\xc1");
    guest.cpu.state.gpr[RAX] = 99;
    guest.halt_in_handler(vector::UD);
    assert_eq!(guest.stack(0), CODE);
}

#[test]
fn a_hypercall_that_the_machine_does_not_answer_is_finished_from_outside() {
    // vmcall; mov ebx,eax
    let mut guest = Guest::new(b"\x0f\x01\xc1\x89\xc3\xf4");
    guest.cpu.state.gpr[RAX] = 100;
    assert_eq!(guest.run(), Exit::Hypercall);
    assert_eq!(guest.cpu.state.rip, CODE);
    guest.cpu.complete_hypercall(|state, long_mode| {
        assert!(long_mode);
        state.gpr[RAX] = 9;
    });
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RBX], 9);
    assert_eq!(guest.machine.hypercalls.len(), 1);
}

/// The caller handles three refused accesses: RDMSR of an unknown MSR, RDMSR of an MSR that the CPU has, and WRMSR of
/// this MSR with an invalid value.
#[test]
fn refused_msrs_are_finished_from_outside() {
    const FS_BASE: u32 = 0xc000_0100;
    // mov ecx,0x10; rdmsr; mov ebx,eax; mov ecx,FS_BASE; rdmsr; mov esi,edx; mov edx,0x12345678; wrmsr
    let code = b"\xb9\x10\0\0\0\x0f\x32\x89\xc3\xb9\x00\x01\x00\xc0\x0f\x32\x89\xd6\xba\x78\x56\x34\x12\x0f\x30";
    let mut guest = Guest::new(code);
    guest.machine.forbidden_msrs = vec![(FS_BASE, false)];
    guest.machine.outside_msrs = vec![MsrFault::Unknown, MsrFault::Forbidden, MsrFault::Invalid];
    guest.cpu.state.fs.base = 0x1234;
    let msr = |index, value, why| Exit::Msr { index, value, why };

    assert_eq!(guest.run(), msr(0x10, None, MsrFault::Unknown));
    assert_eq!(guest.run(), msr(0x10, None, MsrFault::Unknown), "again");
    assert_eq!(guest.cpu.state.rip, CODE + 5);
    guest.cpu.complete_msr(Some(7));
    assert_eq!(guest.run(), msr(FS_BASE, None, MsrFault::Forbidden));
    guest.cpu.complete_msr(Some(5 << 32 | 6));
    let written = Some(0x1234_5678 << 32 | 6);
    assert_eq!(guest.run(), msr(FS_BASE, written, MsrFault::Invalid));
    let state = &guest.cpu.state;
    assert_eq!(
        (state.gpr[RBX], state.gpr[RSI], state.fs.base),
        (7, 5, 0x1234)
    );
    guest.cpu.complete_msr(None);
    guest.halt_in_handler(vector::GP);
    assert_eq!(guest.stack(1), CODE + 23);
}

/// CPUID faulting: CPUID is #GP(0) only outside CPL 0.
#[test]
fn cpuid_can_fault_in_user_mode() {
    for (faults, user) in [(false, false), (true, false), (false, true), (true, true)] {
        // cpuid; hlt. HLT raises #GP in user mode.
        let mut guest = Guest::new(b"\x0f\xa2\xf4");
        guest.machine.cpuid_faults = faults;
        if user {
            as_user(&mut guest);
        }
        match user {
            true => guest.halt_in_handler(vector::GP),
            false => guest.halt(),
        }
        if user {
            let expected = CODE + if faults { 0 } else { 2 };
            assert_eq!(guest.stack(1), expected, "{faults}");
        }
    }
}

#[test]
fn a_machine_can_forbid_an_msr() {
    // mov ecx,FS_BASE; wrmsr; rdmsr
    let mut guest = Guest::new(b"\xb9\x00\x01\x00\xc0\x0f\x30\x0f\x32");
    guest.machine.forbidden_msrs = vec![(0xc000_0100, false)];
    (guest.cpu.state.gpr[RAX], guest.cpu.state.gpr[RDX]) = (0x5000, 0);
    guest.halt_in_handler(vector::GP);
    assert_eq!(
        (guest.stack(1), guest.cpu.state.fs.base),
        (CODE + 7, 0x5000)
    );
}

#[test]
fn a_real_mode_cpu_starts_at_the_reset_vector_and_enters_protected_and_long_mode() {
    let memory = Memory::new(MMIO as usize);
    let mut guest = Guest::with_memory(memory, b"");
    guest.cpu = Executor::try_new(guest.memory().code.clone()).unwrap();
    let state = &mut guest.cpu.state;
    state.cs.base = 0xf0000;
    state.cs.selector = 0xf000;
    // lgdt [cs:0x10]; mov eax,cr0; or al,1; mov cr0,eax; jmp 0x30:dword 0xf0100
    guest.memory().write(0xffff0, b"\xe9\x0d\x00");
    guest.memory().write(0xf0000, b"\x66\x2e\x0f\x01\x16\x20\x00\x0f\x20\xc0\x0c\x01\x0f\x22\xc0\x66\xea\x00\x01\x0f\x00\x30\x00");
    guest.memory().write(
        0xf0020,
        &[
            0xff,
            0,
            (GDT & 0xff) as u8,
            (GDT >> 8 & 0xff) as u8,
            (GDT >> 16) as u8,
            0,
        ],
    );
    guest.memory().write64(GDT + 0x30, 0x00cf_9b00_0000_ffff);
    // mov ax,0x10; mov ss,ax; mov esp,STACK; mov ecx,0xc0000080; rdmsr; or ah,1; wrmsr; mov eax,cr4; or al,0x20;
    // mov cr4,eax; mov eax,cr0; or eax,0x80000000; mov cr0,eax; jmp 8:0xf0200
    guest.memory().write(
        0xf0100,
        b"\x66\xb8\x10\x00\x8e\xd0\xbc\x00\x00\x04\x00\x54\x5d\xb9\x80\x00\x00\xc0\x0f\x32\x80\xcc\x01\x0f\x30\x0f\x20\xe0\x0c\x20\x0f\x22\xe0\x0f\x20\xc0\x0d\x00\x00\x00\x80\x0f\x22\xc0\xea\x00\x02\x0f\x00\x08\x00",
    );
    // mov rax,0x123456789abcdef0; hlt
    guest
        .memory()
        .write(0xf0200, b"\x48\xb8\xf0\xde\xbc\x9a\x78\x56\x34\x12\xf4");
    guest.halt();
    let state = &guest.cpu.state;
    assert_eq!(
        (state.rip, state.gpr[RAX]),
        (0xf020b, 0x1234_5678_9abc_def0)
    );
    assert_eq!((state.efer & 0x500, state.gpr[RBP]), (0x500, STACK));
}

#[test]
fn an_unknown_but_valid_instruction_ends_the_run_with_its_bytes_and_avx_is_ud() {
    // vaddps ymm0,ymm0,ymm0
    let mut guest = Guest::new(b"\xc5\xfc\x58\xc0");
    guest.halt_in_handler(vector::UD);
}
