//! Tests each class of intercepts.

use super::*;

/// The exit code of each intercept of an instruction, and the instruction.
const INTERCEPTS: &[(u64, &[u8])] = &[
    (0x00, b"\x0f\x20\xc0"),             // mov rax, cr0
    (0x00, b"\x0f\x01\xe0"),             // smsw eax
    (0x03, b"\x0f\x20\xd8"),             // mov rax, cr3
    (0x08, b"\x44\x0f\x20\xc0"),         // mov rax, cr8
    (0x10, b"\x0f\x06"),                 // clts
    (0x12, b"\x0f\x22\xd0"),             // mov cr2, rax
    (0x14, b"\x0f\x22\xe0"),             // mov cr4, rax
    (0x18, b"\x44\x0f\x22\xc1"),         // mov cr8, rcx
    (0x20, b"\x0f\x21\xc0"),             // mov rax, dr0
    (0x36, b"\x0f\x23\xf0"),             // mov dr6, rax
    (0x66, b"\x0f\x01\x0c\x24"),         // sidt [rsp]
    (0x67, b"\x0f\x01\x04\x24"),         // sgdt [rsp]
    (0x68, b"\x0f\x00\xc0"),             // sldt eax
    (0x69, b"\x0f\x00\xc8"),             // str eax
    (0x6a, b"\x0f\x01\x1c\x24"),         // lidt [rsp]
    (0x6b, b"\x0f\x01\x14\x24"),         // lgdt [rsp]
    (0x6c, b"\x0f\x00\xd1"),             // lldt cx
    (0x6d, b"\x0f\x00\xd9"),             // ltr cx
    (0x6e, b"\x0f\x31"),                 // rdtsc
    (0x6f, b"\x0f\x33"),                 // rdpmc
    (0x70, b"\x9c"),                     // pushf
    (0x71, b"\x9d"),                     // popf
    (0x72, b"\x0f\xa2"),                 // cpuid
    (0x73, b"\x0f\xaa"),                 // rsm
    (0x74, b"\x48\xcf"),                 // iretq
    (0x75, b"\xcd\x80"),                 // int 0x80
    (0x76, b"\x0f\x08"),                 // invd
    (0x77, b"\xf3\x90"),                 // pause
    (0x78, b"\xf4"),                     // hlt
    (0x79, b"\x0f\x01\x3c\x24"),         // invlpg [rsp]
    (0x7a, b"\x0f\x01\xdf"),             // invlpga
    (0x80, b"\x0f\x01\xd8"),             // vmrun
    (0x81, b"\x0f\x01\xd9"),             // vmmcall
    (0x82, b"\x0f\x01\xda"),             // vmload
    (0x83, b"\x0f\x01\xdb"),             // vmsave
    (0x84, b"\x0f\x01\xdc"),             // stgi
    (0x85, b"\x0f\x01\xdd"),             // clgi
    (0x87, b"\x0f\x01\xf9"),             // rdtscp
    (0x88, b"\xf1"),                     // int1
    (0x89, b"\x0f\x09"),                 // wbinvd
    (0x8a, b"\x0f\x01\xc8"),             // monitor
    (0x8b, b"\x0f\x01\xc9"),             // mwait
    (0x8d, b"\x0f\x01\xd1"),             // xsetbv
    (0xa2, b"\x66\x0f\x38\x82\x04\x24"), // invpcid rax, [rsp]
];

#[test]
fn each_intercept_has_its_exit_code() {
    for (code, instruction) in INTERCEPTS {
        let mut l2 = instruction.to_vec();
        l2.extend(b"\x0f\x01\xd9");
        let mut guest = hypervisor(&l2);
        put(&guest, at::CR4, guest.cpu.state.cr4 | 1 << 18);
        intercept(&guest, *code);
        guest.cpu.state.gpr[RSP] = L2_STACK;
        assert_eq!(exit(&mut guest), *code, "{instruction:x?}");
        assert_eq!(get(&guest, at::RIP), L2, "{code:#x}: before it");
        let next = L2 + instruction.len() as u64;
        assert_eq!(get(&guest, at::NEXT_RIP), next, "{code:#x}");
    }
}

#[test]
fn a_change_of_cr0_is_intercepted_selectively() {
    // mov cr0, rax; vmmcall
    let mut guest = hypervisor(b"\x0f\x22\xc0\x0f\x01\xd9");
    let cr0 = guest.cpu.state.cr0;
    // The first value changes TS, and the second one changes WP.
    for (value, code) in [(cr0 ^ 8, 0x81), (cr0 ^ 1 << 16, 0x65)] {
        fill(&guest);
        intercept(&guest, 0x65);
        put(&guest, at::RAX, value);
        again(&mut guest);
        assert_eq!(exit(&mut guest), code);
    }
}

#[test]
fn ports_are_intercepted_by_the_map() {
    // out dx, eax; vmmcall
    let mut guest = hypervisor(b"\xef\x0f\x01\xd9");
    intercept(&guest, 0x7b);
    guest.cpu.state.gpr[RDX] = 0x3f6;
    // Intercepts only the last of the four ports that the OUT uses.
    guest
        .memory()
        .write(IO_MAP + 0x3f9 / 8, &[1 << (0x3f9 % 8)]);
    assert_eq!(exit(&mut guest), 0x7b);
    assert_eq!(get(&guest, at::INFO_1), 0x3f6 << 16 | 1 << 6 | 4 << 7);
    assert_eq!(get(&guest, at::INFO_2), L2 + 1);
    guest.memory().write(IO_MAP + 0x3f9 / 8, &[0]);
    again(&mut guest);
    assert!(matches!(
        guest.run(),
        Exit::Io {
            port: 0x3f6,
            write: true,
            ..
        }
    ));
    guest.cpu.complete_io(&[]);
    assert_eq!(exit(&mut guest), 0x81);
}

#[test]
fn msrs_are_intercepted_by_the_map() {
    // wrmsr; vmmcall
    let mut guest = hypervisor(b"\x0f\x30\x0f\x01\xd9");
    guest.cpu.state.gpr[RDX] = 0;
    // Each entry is: the MSR, the byte of the permission map, and the bit for writes of the MSR.
    for (msr, at, bit) in [
        (0x174u64, 0x5d, 1),
        (0xc000_0081, 0x820, 3),
        (0xc001_0117, 0x1045, 7),
    ] {
        for set in [false, true] {
            fill(&guest);
            intercept(&guest, 0x7c);
            put(&guest, at::RAX, 0x1000);
            guest.memory().write(MSR_MAP + at, &[u8::from(set) << bit]);
            guest.cpu.state.gpr[RCX] = msr;
            again(&mut guest);
            let code = exit(&mut guest);
            assert_eq!(code, if set { 0x7c } else { 0x81 }, "{msr:#x}");
            assert_eq!(get(&guest, at::INFO_1), u64::from(set));
            guest.memory().write(MSR_MAP + at, &[0]);
        }
    }
    fill(&guest);
    intercept(&guest, 0x7c);
    guest.cpu.state.gpr[RCX] = 0x4000_0000;
    again(&mut guest);
    assert_eq!(exit(&mut guest), 0x7c, "no map has it");
}

#[test]
fn exceptions_are_the_guests_or_the_hypervisors() {
    // ud2
    let mut guest = hypervisor(b"\x0f\x0b");
    assert_eq!(exit(&mut guest), 0x78, "its own handler halts");
    assert_eq!(get(&guest, at::RIP), HANDLERS + 6 * 16);
    fill(&guest);
    put32(&guest, at::EXCEPTIONS, 1 << 6);
    again(&mut guest);
    assert_eq!(exit(&mut guest), 0x46);
    assert_eq!(get(&guest, at::RIP), L2);
    // int3
    let mut guest = hypervisor(b"\xcc");
    put32(&guest, at::EXCEPTIONS, 1 << 3);
    assert_eq!(exit(&mut guest), 0x43);
    assert_eq!(
        (get(&guest, at::RIP), get(&guest, at::NEXT_RIP)),
        (L2, L2 + 1)
    );
}

#[test]
fn an_alignment_check_is_an_exception_to_intercept() {
    // mov eax, [rsp + 1], in user mode with CR0.AM and RFLAGS.AC set.
    let mut guest = hypervisor(b"\x8b\x44\x24\x01\x0f\x01\xd9");
    let user = |selector, rights| Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        rights,
    };
    put_segment(&guest, 0x410, &user(0x23, 0xa0fb));
    put_segment(&guest, 0x420, &user(0x1b, 0xc0f3));
    guest.memory().write(VMCB + 0x4cb, &[3]);
    put(&guest, at::CR0, guest.cpu.state.cr0 | 1 << 18);
    put(&guest, at::RFLAGS, 2 | 1 << 18);
    put32(&guest, at::EXCEPTIONS, 1 << 17);
    assert_eq!(exit(&mut guest), 0x51);
    assert_eq!((get(&guest, at::RIP), get(&guest, at::INFO_1)), (L2, 0));
}

#[test]
fn an_intercepted_page_fault_leaves_cr2_alone() {
    // mov [0x300000], eax
    let mut guest = hypervisor(b"\x89\x04\x25\x00\x00\x30\x00");
    guest.machine.absent(0x30_0000);
    put32(&guest, at::EXCEPTIONS, 1 << 14);
    put(&guest, at::CR2, 0x77);
    assert_eq!(exit(&mut guest), 0x4e);
    assert_eq!(get(&guest, at::INFO_1), 2);
    assert_eq!(get(&guest, at::INFO_2), 0x30_0000);
    assert_eq!(get(&guest, at::CR2), 0x77);
}
