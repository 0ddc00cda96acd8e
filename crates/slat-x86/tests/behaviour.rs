//! What the CPU promises: precise faults, fresh code, restartable instructions, events.

mod common;
use common::*;
use slat_x86::*;
use std::sync::atomic::Ordering;

#[test]
fn arithmetic_flags_of_add_sub_inc_and_shifts() {
    // mov al,0x7f; add al,1; pushf; mov al,0; sub al,1; pushf; stc; inc al; pushf; mov eax,0x80000001; shl eax,1; pushf; hlt
    let code = b"\xb0\x7f\x04\x01\x9c\xb0\x00\x2c\x01\x9c\xf9\xfe\xc0\x9c\xb8\x01\x00\x00\x80\xd1\xe0\x9c\xf4";
    let mut guest = Guest::new(code);
    guest.halt();
    let arithmetic = |n| guest.stack(n) & 0x8d5;
    assert_eq!(arithmetic(3), 0x890, "0x7f + 1: OF SF AF");
    assert_eq!(arithmetic(2), 0x095, "0 - 1: SF AF PF CF");
    assert_eq!(arithmetic(1), 0x055, "0xff + 1 by INC: ZF AF PF, and CF stays");
    assert_eq!(arithmetic(0), 0x801, "0x80000001 << 1: CF OF");
}

#[test]
fn a_doubleword_write_clears_the_upper_half_and_a_byte_write_does_not() {
    // mov rax,-1; mov rbx,-1; mov eax,1; mov bl,0; mov bh,1; hlt
    let mut guest = Guest::new(b"\x48\xc7\xc0\xff\xff\xff\xff\x48\xc7\xc3\xff\xff\xff\xff\xb8\x01\x00\x00\x00\xb3\x00\xb7\x01\xf4");
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RAX], 1);
    assert_eq!(guest.cpu.state.gpr[RBX], 0xffff_ffff_ffff_0100);
}

#[test]
fn a_store_whose_second_page_faults_has_changed_nothing() {
    // mov [rsi],rax
    let mut guest = Guest::new(b"\x48\x89\x06\xf4");
    guest.machine.read_only(DATA + 0x1000);
    guest.cpu.state.gpr[RAX] = u64::MAX;
    guest.cpu.state.gpr[RSI] = DATA + 0xffc;
    guest.halt_in_handler(vector::PF);
    assert_eq!(guest.cpu.state.cr2, DATA + 0x1000);
    assert_eq!(guest.stack(0), 3, "a write to a present page");
    assert_eq!(guest.stack(1), CODE);
    assert_eq!(guest.memory().read64(DATA + 0xff8), 0);
    assert_eq!(guest.memory().read64(DATA + 0x1000), 0);
}

#[test]
fn a_push_and_a_call_that_fault_leave_the_stack_pointer() {
    for code in [&b"\x50"[..], b"\xff\xd0", b"\xe8\x00\x00\x00\x00", b"\x9c", b"\xc8\x10\x00\x00"] {
        let mut guest = Guest::new(code);
        Guest::gate(guest.memory(), vector::PF, HANDLERS, 0, 1);
        guest.machine.absent(STACK - 0x1000);
        guest.halt();
        assert_eq!(guest.stack(0), 2, "{code:x?}");
        assert_eq!(guest.stack(1), CODE, "{code:x?}");
        assert_eq!(guest.stack(4), STACK, "{code:x?}");
        assert_eq!(guest.cpu.state.cr2, STACK - 8, "{code:x?}");
    }
}

#[test]
fn code_that_overwrites_the_next_instruction_executes_the_new_one() {
    // mov byte [rip+1],0x42 (the immediate of the next instruction); mov al,0; hlt
    let mut guest = Guest::new(b"\xc6\x05\x01\x00\x00\x00\x42\xb0\x00\xf4");
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RAX] & 0xff, 0x42);
}

#[test]
fn code_in_another_block_that_was_overwritten_is_executed_anew() {
    // l: call f; mov byte [f+1],2; dec ecx; jnz l; hlt; f: mov al,1; add bl,al; ret
    let code = b"\xe8\x0c\x00\x00\x00\xc6\x05\x06\x00\x00\x00\x02\xff\xc9\x75\xf0\xf4\xb0\x01\x00\xc3\xc3";
    let mut guest = Guest::new(code);
    guest.cpu.state.gpr[RCX] = 3;
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RBX] & 0xff, 1 + 2 + 2);
}

#[test]
fn code_that_the_host_overwrote_is_executed_anew() {
    let mut guest = Guest::new(b"\xb0\x01\xf4");
    guest.halt();
    guest.memory().write(CODE + 1, &[9]);
    guest.cpu.state.rip = CODE;
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RAX] & 0xff, 9);
}

#[test]
fn an_instruction_across_two_pages_runs_and_its_second_page_is_watched() {
    let memory = Memory::new(MMIO as usize);
    let start = CODE + 0x1000 - 3;
    // mov eax,imm32; hlt
    memory.write(start, b"\xb8\x01\x02\x03\x04\xf4");
    let mut guest = Guest::with_memory(memory, b"");
    for expected in [0x0403_0201, 0x0403_7701] {
        guest.memory().write(start + 1, &[1, (expected >> 8) as u8]);
        guest.cpu.state.rip = start;
        guest.halt();
        assert_eq!(guest.cpu.state.gpr[RAX], expected);
    }
    guest.machine.absent(CODE + 0x1000);
    guest.cpu.flush_tlb();
    guest.cpu.state.rip = start;
    guest.halt_in_handler(vector::PF);
    assert_eq!(guest.cpu.state.cr2, CODE + 0x1000);
    assert_eq!((guest.stack(0), guest.stack(1)), (0x10, start));
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
    assert_eq!(frame, [CODE, 8, 0x202, STACK - 3, 16]);
    assert_eq!(guest.cpu.state.rflags & 0x200, 0, "an interrupt gate clears IF");
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
    // ud2 with its gate not present: #NP in the delivery of #UD is simply #NP; of #GP it is #DF.
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

#[test]
fn interrupts_wait_for_the_instruction_after_sti() {
    // sti; inc eax; inc eax; hlt
    let mut guest = Guest::new(b"\xfb\xff\xc0\xff\xc0\xf4");
    guest.cpu.interrupt_window = true;
    assert!(!guest.cpu.can_take_interrupt());
    assert_eq!(guest.run(), Exit::InterruptWindow);
    assert_eq!(guest.cpu.state.rip, CODE + 3, "after the shadowed instruction");
    guest.cpu.interrupt_window = false;
    guest.cpu.inject_interrupt(0x80);
    guest.halt_in_handler(0x80);
    assert_eq!(guest.stack(0), CODE + 3);
    assert_eq!(guest.cpu.state.gpr[RAX], 1);
}

#[test]
fn an_nmi_is_held_back_until_iret() {
    // In the handler: hlt; iretq.
    let mut guest = Guest::new(b"\x90\xf4");
    guest.memory().write(HANDLERS + 16 * 2, b"\xf4\x48\xcf");
    guest.cpu.inject_nmi();
    guest.halt_in_handler(vector::NMI);
    guest.cpu.inject_nmi();
    guest.halt_in_handler(vector::NMI);
    assert_eq!(guest.stack(0), CODE, "the second came after IRET, before the next instruction");
    guest.halt();
    assert_eq!(guest.cpu.state.rip, CODE + 2);
}

#[test]
fn an_interrupt_from_user_code_switches_stacks_and_iret_goes_back() {
    // int 0x80; hlt in user code is #GP.
    let mut guest = Guest::new(b"\xcd\x80\xf4");
    Guest::gate(guest.memory(), 0x80, HANDLERS, 3, 0);
    guest.memory().write(HANDLERS, b"\x48\xcf");
    let state = &mut guest.cpu.state;
    state.cs = Segment { selector: 0x23, base: 0, limit: u32::MAX, rights: 0xa0fb };
    state.ss = Segment { selector: 0x1b, base: 0, limit: u32::MAX, rights: 0xc0f3 };
    guest.halt_in_handler(vector::GP);
    assert_eq!(guest.cpu.state.cs.selector, 8);
    assert_eq!(guest.cpu.state.gpr[RSP], KERNEL_STACK - 48);
    let frame: Vec<u64> = (0..6).map(|n| guest.stack(n)).collect();
    assert_eq!(frame, [0, CODE + 2, 0x23, 2, STACK, 0x1b]);
}

#[test]
fn a_software_interrupt_through_an_inner_gate_is_gp_with_the_vector() {
    let mut guest = Guest::new(b"\xcd\x81");
    let state = &mut guest.cpu.state;
    state.cs = Segment { selector: 0x23, base: 0, limit: u32::MAX, rights: 0xa0fb };
    state.ss = Segment { selector: 0x1b, base: 0, limit: u32::MAX, rights: 0xc0f3 };
    guest.halt_in_handler(vector::GP);
    assert_eq!((guest.stack(0), guest.stack(1)), (0x81 * 8 + 2, CODE));
}

#[test]
fn syscall_and_sysret_change_privilege_and_back() {
    // Kernel: sysretq to user code at CODE + 0x100: syscall, which comes back to the kernel at CODE + 8: hlt.
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
    assert_eq!((state.rip, state.gpr[RCX], state.gpr[11]), (CODE + 9, CODE + 0x102, 0x202));
    assert_eq!((state.cs.selector, state.ss.selector, state.rflags & 0x200), (8, 16, 0));
}

#[test]
fn a_repeated_move_that_faults_in_the_middle_can_go_on() {
    // rep movsb
    let mut guest = Guest::new(b"\xf3\xa4\xf4");
    let source: Vec<u8> = (0..0x1800u32).map(|i| (i * 7) as u8).collect();
    guest.memory().write(DATA, &source);
    guest.machine.absent(DATA + 0x9000);
    let state = &mut guest.cpu.state;
    (state.gpr[RSI], state.gpr[RDI], state.gpr[RCX]) = (DATA, DATA + 0x8800, 0x1800);
    guest.halt_in_handler(vector::PF);
    let state = &guest.cpu.state;
    assert_eq!(state.cr2, DATA + 0x9000);
    assert_eq!((state.gpr[RSI], state.gpr[RDI]), (DATA + 0x800, DATA + 0x9000));
    assert_eq!((state.gpr[RCX], guest.stack(1)), (0x1000, CODE));
    guest.machine.rights.clear();
    guest.cpu.state.rip = CODE;
    guest.halt();
    assert_eq!(guest.memory().read::<0x1800>(DATA + 0x8800)[..], source[..]);
}

#[test]
fn overlapping_and_backward_moves_go_element_by_element() {
    // rep movsb onto the next byte: fills with the first.
    let mut guest = Guest::new(b"\xf3\xa4\xfd\xb9\x04\x00\x00\x00\x48\xbe\x03\x01\x02\x00\x00\x00\x00\x00\x48\xbf\x05\x01\x02\x00\x00\x00\x00\x00\xf3\xa4\xf4");
    guest.memory().write(DATA, b"abcdefgh");
    guest.memory().write(DATA + 0x100, b"ABCDEFGH");
    let state = &mut guest.cpu.state;
    (state.gpr[RSI], state.gpr[RDI], state.gpr[RCX]) = (DATA, DATA + 1, 7);
    guest.halt();
    assert_eq!(&guest.memory().read::<8>(DATA), b"aaaaaaaa");
    assert_eq!(&guest.memory().read::<8>(DATA + 0x100), b"ABABCDGH");
}

#[test]
fn scans_and_comparisons_stop_where_they_should() {
    // repne scasb; mov r8,rcx; hlt
    let mut guest = Guest::new(b"\xf2\xae\xf4");
    guest.memory().write(DATA, b"hello\0");
    let state = &mut guest.cpu.state;
    (state.gpr[RDI], state.gpr[RCX]) = (DATA, u64::MAX);
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RCX], u64::MAX - 6);
    // repe cmpsb
    let mut guest = Guest::new(b"\xf3\xa6\xf4");
    guest.memory().write(DATA, b"abcd");
    guest.memory().write(DATA + 16, b"abXd");
    let state = &mut guest.cpu.state;
    (state.gpr[RSI], state.gpr[RDI], state.gpr[RCX]) = (DATA, DATA + 16, 4);
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RCX], 1);
    assert_eq!(guest.cpu.state.rflags & 0x41, 0, "c is above X");
}

#[test]
fn port_input_waits_at_its_instruction_for_the_answer() {
    // in al,dx; hlt
    let mut guest = Guest::new(b"\xec\xf4");
    guest.cpu.state.gpr[RDX] = 0x1000;
    guest.cpu.state.gpr[RAX] = 0x1234_5678;
    let io = Exit::Io { port: 0x1000, size: 1, write: false, count: 1, data: [0; 4] };
    assert_eq!(guest.run(), io);
    assert_eq!(guest.cpu.state.rip, CODE);
    assert_eq!(guest.run(), io, "not completed: asked again");
    guest.cpu.complete_io(&[0xff]);
    guest.attention.store(1, Ordering::Relaxed);
    assert_eq!(guest.run(), Exit::Attention);
    assert_eq!((guest.cpu.state.rip, guest.cpu.state.gpr[RAX]), (CODE + 1, 0x1234_56ff));
    guest.attention.store(0, Ordering::Relaxed);
    guest.halt();
}

#[test]
fn port_output_and_string_ports() {
    // out 0x80,eax; rep outsb; rep insw; hlt
    let mut guest = Guest::new(b"\xe7\x80\xf3\x6e\xb9\x02\x00\x00\x00\xf3\x66\x6d\xf4");
    guest.memory().write(DATA, b"xy");
    let state = &mut guest.cpu.state;
    (state.gpr[RAX], state.gpr[RDX], state.gpr[RCX]) = (0x0102_0304, 0x3f8, 2);
    (state.gpr[RSI], state.gpr[RDI]) = (DATA, DATA + 0x100);
    let io = |port, size, write, data| Exit::Io { port, size, write, count: 1, data };
    let mut expect = |exit: Exit, answer: &[u8]| {
        assert_eq!(guest.run(), exit);
        guest.cpu.complete_io(answer);
    };
    expect(io(0x80, 4, true, [4, 3, 2, 1]), &[]);
    expect(io(0x3f8, 1, true, [b'x', 0, 0, 0]), &[]);
    expect(io(0x3f8, 1, true, [b'y', 0, 0, 0]), &[]);
    let both = Exit::Io { port: 0x3f8, size: 2, write: false, count: 2, data: [0; 4] };
    expect(both, &[1, 2, 3, 4]);
    guest.halt();
    assert_eq!(guest.memory().read::<4>(DATA + 0x100), [1, 2, 3, 4]);
    assert_eq!(guest.cpu.state.gpr[RSI], DATA + 2);
}

#[test]
fn an_mmio_read_is_answered_and_an_mmio_write_follows_its_instruction() {
    // mov rax,[rsi]; add eax,1; mov [rsi+8],eax; hlt
    let mut guest = Guest::new(b"\x48\x8b\x06\x83\xc0\x01\x89\x46\x08\xf4");
    guest.cpu.state.gpr[RSI] = MMIO;
    let read = Exit::Mmio { gpa: MMIO, len: 8, write: false, data: [0; 8] };
    assert_eq!(guest.run(), read);
    assert_eq!((guest.cpu.state.rip, guest.cpu.state.gpr[RAX]), (CODE, 0));
    guest.cpu.complete_mmio_read(&41u64.to_le_bytes());
    let write = Exit::Mmio { gpa: MMIO + 8, len: 4, write: true, data: [42, 0, 0, 0, 0, 0, 0, 0] };
    assert_eq!(guest.run(), write);
    assert_eq!(guest.cpu.state.rip, CODE + 9);
    guest.halt();
}

#[test]
fn an_mmio_read_completes_before_attention_is_looked_at() {
    let mut guest = Guest::new(b"\x48\x8b\x06\xf4");
    guest.cpu.state.gpr[RSI] = MMIO;
    assert!(matches!(guest.run(), Exit::Mmio { .. }));
    guest.cpu.complete_mmio_read(&[5, 0, 0, 0, 0, 0, 0, 0]);
    guest.attention.store(1, Ordering::Relaxed);
    assert_eq!(guest.run(), Exit::Attention);
    assert_eq!((guest.cpu.state.rip, guest.cpu.state.gpr[RAX]), (CODE + 3, 5));
}

#[test]
fn mmio_across_the_end_of_memory_is_split_at_the_page() {
    // mov [rsi],rax: four bytes are memory, four MMIO.
    let mut guest = Guest::new(b"\x48\x89\x06\xf4");
    guest.cpu.state.gpr[RSI] = MMIO - 4;
    guest.cpu.state.gpr[RAX] = 0x8877_6655_4433_2211;
    let write = Exit::Mmio { gpa: MMIO, len: 4, write: true, data: [0x55, 0x66, 0x77, 0x88, 0, 0, 0, 0] };
    assert_eq!(guest.run(), write);
    assert_eq!(guest.memory().read::<4>(MMIO - 4), [0x11, 0x22, 0x33, 0x44]);
    guest.halt();
}

#[test]
fn a_repeated_store_to_mmio_is_one_exit_per_element() {
    // rep stosd
    let mut guest = Guest::new(b"\xf3\xab\xf4");
    let state = &mut guest.cpu.state;
    (state.gpr[RDI], state.gpr[RCX], state.gpr[RAX]) = (MMIO, 3, 7);
    for i in 0..3 {
        let write = Exit::Mmio { gpa: MMIO + 4 * i, len: 4, write: true, data: [7, 0, 0, 0, 0, 0, 0, 0] };
        assert_eq!(guest.run(), write);
    }
    guest.halt();
}

#[test]
fn retry_starts_the_instruction_again_after_a_look_at_attention() {
    let mut guest = Guest::new(b"\x48\xff\x06\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    guest.machine.retries = 3;
    guest.halt();
    assert_eq!(guest.memory().read64(DATA), 1);
}

#[test]
fn host_memory_that_is_gone_is_translated_again_or_ends_the_run() {
    // mov rax,[rsi]; hlt
    let mut guest = Guest::new(b"\x48\x8b\x06\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    guest.halt();
    let page = guest.memory().at(DATA).cast();
    // SAFETY: a page of the test's own mapping.
    unsafe { libc::mprotect(page, 4096, libc::PROT_NONE) };
    guest.machine.bad_address = true;
    guest.cpu.state.rip = CODE;
    assert_eq!(guest.run(), Exit::BadAddress);
    assert_eq!((guest.cpu.state.rip, guest.machine.rechecks), (CODE, 1));
    // SAFETY: as above.
    unsafe { libc::mprotect(page, 4096, libc::PROT_READ) };
    guest.halt();
}

#[test]
fn an_old_translation_lives_until_it_is_flushed() {
    // mov rax,[rsi]; hlt
    let mut guest = Guest::new(b"\x48\x8b\x06\xf4");
    guest.memory().write64(DATA, 1);
    guest.memory().write64(DATA + 0x1000, 2);
    guest.memory().write(CODE + 0x1000, b"\x48\x8b\x06\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    let value = |guest: &mut Guest| {
        guest.cpu.state.rip = CODE;
        guest.halt();
        guest.cpu.state.gpr[RAX]
    };
    assert_eq!(value(&mut guest), 1);
    guest.machine.shift = 0x1000;
    assert_eq!(value(&mut guest), 1, "the TLB still has it");
    guest.cpu.flush_tlb();
    assert_eq!(value(&mut guest), 2);
    guest.machine.shift = 0;
    guest.cpu.state.cr3 += 0x1000;
    assert_eq!(value(&mut guest), 1, "another CR3 flushes");
}

#[test]
fn invlpg_forgets_one_page_and_a_write_of_cr3_all() {
    // mov rax,[rsi]; invlpg [rsi]; mov rax,[rsi]; mov rax,[rdi]; mov rbx,cr3; mov cr3,rbx; mov rax,[rdi]; hlt
    let code = b"\x48\x8b\x06\x48\x8b\x07\x0f\x01\x3e\x48\x8b\x06\x48\x8b\x07\x0f\x20\xdb\x0f\x22\xdb\x48\x8b\x07\xf4";
    let mut guest = Guest::new(code);
    (guest.cpu.state.gpr[RSI], guest.cpu.state.gpr[RDI]) = (DATA, DATA + 0x1000);
    guest.halt();
    let reads = |page| guest.machine.translations.iter().filter(|t| **t == (page, Access::Read)).count();
    assert_eq!((reads(DATA), reads(DATA + 0x1000)), (2, 2));
}

#[test]
fn attention_ends_an_endless_loop_at_once() {
    // jmp $
    let mut guest = Guest::new(b"\xeb\xfe");
    let attention = guest.attention.clone();
    let start = std::time::Instant::now();
    let helper = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        attention.store(1, Ordering::Relaxed);
    });
    assert_eq!(guest.run(), Exit::Attention);
    helper.join().unwrap();
    assert!(start.elapsed().as_millis() < 1000);
}

#[test]
fn locked_operations_of_two_cpus_lose_nothing() {
    // l: lock inc qword [rsi]; lock add [rsi+8],1; lock xadd; lock cmpxchg loop; dec rcx; jnz l; hlt
    let code = b"\xf0\x48\xff\x06\xf0\x48\x83\x46\x08\x01\xba\x01\x00\x00\x00\xf0\x48\x0f\xc1\x56\x10\x48\x8b\x46\x18\x48\x8d\x58\x01\xf0\x48\x0f\xb1\x5e\x18\x75\xf5\x48\xff\xc9\x75\xd6\xf4";
    const N: u64 = 50_000;
    let memory = Memory::new(MMIO as usize);
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let mut guest = Guest::with_memory(memory.clone(), code);
            std::thread::spawn(move || {
                guest.cpu.state.gpr[RSI] = DATA;
                guest.cpu.state.gpr[RCX] = N;
                guest.halt();
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    for i in 0..4 {
        assert_eq!(memory.read64(DATA + 8 * i), 2 * N, "counter {i}");
    }
}

#[test]
fn user_code_may_not_touch_supervisor_pages_or_privileged_state() {
    let user = |guest: &mut Guest| {
        let state = &mut guest.cpu.state;
        state.cs = Segment { selector: 0x23, base: 0, limit: u32::MAX, rights: 0xa0fb };
        state.ss = Segment { selector: 0x1b, base: 0, limit: u32::MAX, rights: 0xc0f3 };
    };
    // hlt; cli; in al,dx; mov cr3,rax; rdmsr; wrmsr; lgdt [rsi]; invlpg [rsi]; swapgs; mov dr0,rax
    for code in [&b"\xf4"[..], b"\xfa", b"\xec", b"\x0f\x22\xd8", b"\x0f\x32", b"\x0f\x30", b"\x0f\x01\x16", b"\x0f\x01\x3e", b"\x0f\x01\xf8", b"\x0f\x23\xc0"] {
        let mut guest = Guest::new(code);
        user(&mut guest);
        guest.cpu.state.gpr[RSI] = DATA;
        guest.halt_in_handler(vector::GP);
        assert_eq!(guest.stack(1), CODE, "{code:x?}");
    }
    // mov rax,[rsi] of a supervisor page
    let mut guest = Guest::new(b"\x48\x8b\x06");
    user(&mut guest);
    let supervisor = Rights { present: true, write: true, execute: true, user: false };
    guest.machine.rights.insert(DATA >> 12, supervisor);
    guest.cpu.state.gpr[RSI] = DATA;
    guest.halt_in_handler(vector::PF);
    assert_eq!(guest.stack(0), 5);
}

#[test]
fn addresses_that_are_not_canonical_are_gp_or_ss() {
    // mov rax,[rsi]; mov rax,[rbp]; push rax; ret to nowhere
    for (code, vector) in [(&b"\x48\x8b\x06"[..], vector::GP), (b"\x48\x8b\x45\x00", vector::SS), (b"\xff\xe6", vector::GP)] {
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
    assert_eq!((guest.stack(0), guest.stack(1), guest.stack(4)), (0, CODE, 1 << 60));
}

#[test]
fn single_stepping_traps_after_each_instruction() {
    // The #DB handler counts in rbx and returns: inc rbx; iretq.
    let mut guest = Guest::new(b"\x90\x90\x9d\xf4");
    guest.memory().write(HANDLERS + 16, b"\x48\xff\xc3\x48\xcf");
    guest.memory().write64(STACK, 2);
    guest.cpu.state.rflags |= 0x100;
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RBX], 3, "two NOPs and the POPF that ends it");
    assert_eq!(guest.cpu.state.dr6 & 1 << 14, 1 << 14);
}

#[test]
fn an_instruction_breakpoint_comes_before_its_instruction_and_rf_steps_over_it() {
    // inc eax; inc eax; hlt. The handler sets RF in the frame: bts qword [rsp+16],16; iretq.
    let mut guest = Guest::new(b"\xff\xc0\xff\xc0\xf4");
    guest.memory().write(HANDLERS + 16, b"\x48\x0f\xba\x6c\x24\x10\x10\x89\xc3\x48\xcf");
    guest.cpu.state.dr[1] = CODE + 2;
    guest.cpu.state.dr7 = 0x408;
    guest.halt();
    assert_eq!((guest.cpu.state.gpr[RAX], guest.cpu.state.gpr[RBX]), (2, 1));
    assert_eq!(guest.cpu.state.dr6 & 15, 2);
}

#[test]
fn bit_tests_in_memory_reach_beyond_the_operand() {
    // bts [rsi],rax; btr [rsi],rcx; hlt
    let mut guest = Guest::new(b"\x48\x0f\xab\x06\x48\x0f\xb3\x0e\xf4");
    let state = &mut guest.cpu.state;
    (state.gpr[RSI], state.gpr[RAX], state.gpr[RCX]) = (DATA + 64, 130, (-1i64) as u64);
    guest.memory().write64(DATA + 56, u64::MAX);
    guest.halt();
    assert_eq!(guest.memory().read64(DATA + 80), 4);
    assert_eq!(guest.memory().read64(DATA + 56), u64::MAX >> 1);
    assert_eq!(guest.cpu.state.rflags & 1, 1);
}

#[test]
fn the_forced_emulation_prefix_is_skipped_and_a_bare_ud2_is_not() {
    // ud2; "kvm"; inc eax; hlt
    let mut guest = Guest::new(b"\x0f\x0bkvm\xff\xc0\xf4");
    guest.halt();
    assert_eq!((guest.cpu.state.gpr[RAX], guest.cpu.state.rip), (1, CODE + 8));
}

#[test]
fn hypercalls_and_msrs_reach_the_machine() {
    // vmcall; mov ecx,0x10; rdmsr (unknown: #GP)
    let mut guest = Guest::new(b"\x0f\x01\xc1\x89\xc3\xb9\x10\x00\x00\x00\x0f\x32");
    let state = &mut guest.cpu.state;
    (state.gpr[RAX], state.gpr[RBX], state.gpr[RCX], state.gpr[RDX], state.gpr[RSI]) = (1, 2, 3, 4, 5);
    guest.halt_in_handler(vector::GP);
    assert_eq!(guest.machine.hypercalls, [(1, [2, 3, 4, 5])]);
    assert_eq!((guest.cpu.state.gpr[RBX], guest.stack(1)), (7, CODE + 10));
}

#[test]
fn a_real_mode_cpu_starts_at_the_reset_vector_and_enters_protected_and_long_mode() {
    let memory = Memory::new(MMIO as usize);
    let mut guest = Guest::with_memory(memory, b"");
    guest.cpu = Cpu::new();
    let state = &mut guest.cpu.state;
    state.cs.base = 0xf0000;
    state.cs.selector = 0xf000;
    // lgdt [cs:0x10]; mov eax,cr0; or al,1; mov cr0,eax; jmp 0x30:dword 0xf0100
    guest.memory().write(0xffff0, b"\xe9\x0d\x00");
    guest.memory().write(0xf0000, b"\x66\x2e\x0f\x01\x16\x20\x00\x0f\x20\xc0\x0c\x01\x0f\x22\xc0\x66\xea\x00\x01\x0f\x00\x30\x00");
    guest.memory().write(0xf0020, &[0xff, 0, (GDT & 0xff) as u8, (GDT >> 8 & 0xff) as u8, (GDT >> 16) as u8, 0]);
    guest.memory().write64(GDT + 0x30, 0x00cf_9b00_0000_ffff);
    // mov ax,0x10; mov ss,ax; mov esp,STACK; mov ecx,0xc0000080; rdmsr; or ah,1; wrmsr; mov eax,cr4; or al,0x20;
    // mov cr4,eax; mov eax,cr0; or eax,0x80000000; mov cr0,eax; jmp 8:0xf0200
    guest.memory().write(
        0xf0100,
        b"\x66\xb8\x10\x00\x8e\xd0\xbc\x00\x00\x04\x00\x54\x5d\xb9\x80\x00\x00\xc0\x0f\x32\x80\xcc\x01\x0f\x30\x0f\x20\xe0\x0c\x20\x0f\x22\xe0\x0f\x20\xc0\x0d\x00\x00\x00\x80\x0f\x22\xc0\xea\x00\x02\x0f\x00\x08\x00",
    );
    // mov rax,0x123456789abcdef0; hlt
    guest.memory().write(0xf0200, b"\x48\xb8\xf0\xde\xbc\x9a\x78\x56\x34\x12\xf4");
    guest.halt();
    let state = &guest.cpu.state;
    assert_eq!((state.rip, state.gpr[RAX]), (0xf020b, 0x1234_5678_9abc_def0));
    assert_eq!((state.efer & 0x500, state.gpr[RBP]), (0x500, STACK));
}

#[test]
fn an_unknown_but_valid_instruction_ends_the_run_with_its_bytes_and_avx_is_ud() {
    // vaddps ymm0,ymm0,ymm0
    let mut guest = Guest::new(b"\xc5\xfc\x58\xc0");
    guest.halt_in_handler(vector::UD);
}

#[test]
fn the_fxsave_image_goes_out_and_in() {
    let mut state = State::reset();
    for i in 0..16 {
        state.xmm[i] = 0x0111_2222_3333_4444_5555_6666_7777_8888 * (i as u128 + 1);
    }
    state.fsw = 3 << 11;
    for i in 0..8 {
        state.st[i] = F80 { mantissa: i as u64 + 1, exponent: 0x3fff };
    }
    let image = state.to_fxsave();
    assert_eq!(image[32], 4, "ST(0) is the register that TOP names");
    let mut other = State::reset();
    other.set_fxsave(&image);
    assert_eq!(other, state);
}
