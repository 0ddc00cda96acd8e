//! Tests properties of instructions: flags, precise faults, fresh code, restartable strings, atomicity, translations.

use crate::common::*;
use slat_x86::*;

#[test]
fn arithmetic_flags_of_add_sub_inc_and_shifts() {
    // mov al,0x7f; add al,1; pushf; mov al,0; sub al,1; pushf; stc; inc al; pushf; mov eax,0x80000001;
    // shl eax,1; pushf; hlt
    let code = b"\xb0\x7f\x04\x01\x9c\xb0\x00\x2c\x01\x9c\xf9\xfe\xc0\x9c\xb8\x01\x00\x00\x80\xd1\xe0\x9c\xf4";
    let mut guest = Guest::new(code);
    guest.halt();
    let arithmetic = |n| guest.stack(n) & 0x8d5;
    assert_eq!(arithmetic(3), 0x890, "0x7f + 1: OF SF AF");
    assert_eq!(arithmetic(2), 0x095, "0 - 1: SF AF PF CF");
    assert_eq!(
        arithmetic(1),
        0x055,
        "0xff + 1 by INC: ZF AF PF, and CF stays"
    );
    assert_eq!(arithmetic(0), 0x801, "0x80000001 << 1: CF OF");
}

/// A block that begins with ADCX does not change the flags of the previous block, including AF, which the oracle's
/// programs do not compare.
#[test]
fn a_chain_of_sums_leaves_the_other_flags_alone() {
    // mov ecx,18; cmp ecx,ecx; jmp again; again: adcx eax,ebx; pushf; dec ecx; jne again; hlt
    let code = b"\xb9\x12\0\0\0\x39\xc9\xeb\0\x66\x0f\x38\xf6\xc3\x9c\xff\xc9\x75\xf6\xf4";
    let mut guest = Guest::new(code);
    guest.halt();
    assert_eq!(guest.stack(17) & 0x8d5, 0x44, "equal: ZF PF");
    for left in 1..18u64 {
        let parity = u64::from(left.count_ones() % 2 == 0) << 2;
        let aux = u64::from(left == 15) << 4;
        let flags = guest.stack(left - 1) & 0x8d5;
        assert_eq!(flags, parity | aux, "{left} turns left");
    }
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
    for code in [
        &b"\x50"[..],
        b"\xff\xd0",
        b"\xe8\x00\x00\x00\x00",
        b"\x9c",
        b"\xc8\x10\x00\x00",
    ] {
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
    // l: call f; inc byte [f+1]; nop; dec ecx; jnz l; hlt; f: mov al,1; add bl,al; ret
    let code =
        b"\xe8\x0c\x00\x00\x00\xfe\x05\x07\x00\x00\x00\x90\xff\xc9\x75\xf0\xf4\xb0\x01\x00\xc3\xc3";
    let mut guest = Guest::new(code);
    guest.cpu.state.gpr[RCX] = 5;
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RBX] & 0xff, 1 + 2 + 3 + 4 + 5);
}

/// A block is first decoded for one execution, then kept, then verified. A store after any of these steps must be seen.
const EARLIER_RUNS: std::ops::Range<usize> = 1..5;

#[test]
fn code_that_the_host_overwrote_is_executed_anew() {
    for runs in EARLIER_RUNS {
        let mut guest = Guest::new(b"\xb0\x01\xf4");
        for value in std::iter::repeat_n(1, runs).chain([9]) {
            guest.memory().write(CODE + 1, &[value]);
            guest.cpu.state.rip = CODE;
            guest.halt();
            assert_eq!(guest.cpu.state.gpr[RAX] as u8, value, "after {runs} runs");
        }
    }
}

#[test]
fn bytes_that_were_no_instruction_become_one() {
    // Each change makes an instruction invalid or valid, and its first bytes stay the same: lock nop becomes lock
    // inc; ud2 before other bytes becomes the prefix.
    for runs in EARLIER_RUNS {
        let mut guest = Guest::new(b"\xf0\x90\x06\xf4");
        for _ in 0..runs {
            guest.cpu.state.rip = CODE;
            guest.halt_in_handler(vector::UD);
        }
        guest.memory().write(CODE, b"\xf0\xff\x06\xf4");
        guest.cpu.state.rip = CODE;
        guest.cpu.state.gpr[RSI] = DATA;
        guest.halt();
        assert_eq!(guest.memory().read64(DATA), 1, "after {runs} runs");
    }

    let mut guest = Guest::new(b"\x0f\x0bkvX\xf4");
    guest.halt_in_handler(vector::UD);
    guest.memory().write(CODE + 4, b"m");
    guest.cpu.state.rip = CODE;
    guest.halt();
    assert_eq!(guest.cpu.state.rip, CODE + 6);
}

#[test]
fn an_instruction_across_two_pages_runs_and_its_second_page_is_watched() {
    let memory = Memory::new(MMIO as usize);
    let start = CODE + 0x1000 - 3;
    // mov eax,imm32; hlt
    memory.write(start, b"\xb8\x01\x02\x03\x04\xf4");
    let mut guest = Guest::with_memory(memory, b"");
    let values = [0x0403_0201, 0x0403_7701].into_iter();
    for expected in values.flat_map(|value| EARLIER_RUNS.map(move |_| value)) {
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
    assert_eq!(
        (state.gpr[RSI], state.gpr[RDI]),
        (DATA + 0x800, DATA + 0x9000)
    );
    assert_eq!((state.gpr[RCX], guest.stack(1)), (0x1000, CODE));
    guest.machine.rights.clear();
    guest.cpu.state.rip = CODE;
    guest.halt();
    assert_eq!(guest.memory().read::<0x1800>(DATA + 0x8800)[..], source[..]);
}

#[test]
fn overlapping_and_backward_moves_go_element_by_element() {
    // rep movsb to the next byte fills memory with the first byte.
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
    let reads = |page| {
        guest
            .machine
            .translations
            .iter()
            .filter(|t| **t == (page, Access::Read))
            .count()
    };
    assert_eq!((reads(DATA), reads(DATA + 0x1000)), (2, 2));
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
    assert_eq!(
        (guest.cpu.state.gpr[RAX], guest.cpu.state.rip),
        (1, CODE + 8)
    );
}

#[test]
fn the_fxsave_image_goes_out_and_in() {
    let mut state = State::reset();
    for i in 0..16 {
        state.xmm[i] = 0x0111_2222_3333_4444_5555_6666_7777_8888 * (i as u128 + 1);
    }
    state.fsw = 3 << 11;
    for i in 0..8 {
        state.st[i] = F80 {
            mantissa: i as u64 + 1,
            exponent: 0x3fff,
        };
    }
    let image = state.to_fxsave();
    assert_eq!(image[32], 4, "ST(0) is the register that TOP names");
    let mut other = State::reset();
    other.set_fxsave(&image);
    assert_eq!(other, state);
}

/// An access that locks the bus ends the run before or after its instruction, if the caller has requested that.
#[test]
fn a_locked_access_across_cache_lines_is_a_bus_lock() {
    // lock xadd [rsi],eax; xchg [rsi],ebx; lock inc qword [rsi]; lock bts [rsi],ecx; add [rsi],eax; hlt
    let code = b"\xf0\x0f\xc1\x06\x87\x1e\xf0\x48\xff\x06\xf0\x0f\xab\x0e\x01\x06\xf4";
    let instructions = [(0, 4), (4, 6), (6, 10), (10, 14)];
    for (at, splits) in [
        (60, [false, false, true, false]),
        (61, [true; 4]),
        (64, [false; 4]),
        (4094, [true; 4]),
    ] {
        for bus_locks in [
            BusLocks::Executed,
            BusLocks::ExitBefore,
            BusLocks::ExitAfter,
        ] {
            let mut guest = Guest::new(code);
            guest.cpu.set_bus_locks(bus_locks);
            let state = &mut guest.cpu.state;
            state.gpr[RSI] = DATA + at;
            (state.gpr[RAX], state.gpr[RBX], state.gpr[RCX]) = (1, 7, 4);
            for ((start, end), splits) in instructions.into_iter().zip(splits) {
                let rip = match bus_locks {
                    BusLocks::ExitBefore => start,
                    _ => end,
                };
                if splits && bus_locks != BusLocks::Executed {
                    assert_eq!(guest.run(), Exit::BusLock);
                    assert_eq!(guest.cpu.state.rip, CODE + rip);
                }
            }
            guest.halt();
            let value = u64::from_le_bytes(guest.memory().read(DATA + at));
            assert_eq!(value, 24, "7, one more, bit 4, and EAX, which is 0");
        }
    }
    // An instruction that faults has not locked the bus.
    let mut guest = Guest::new(code);
    guest.cpu.set_bus_locks(BusLocks::ExitAfter);
    guest.cpu.state.gpr[RSI] = DATA + 0xffe;
    guest.machine.absent(DATA + 0x1000);
    guest.halt_in_handler(vector::PF);
}
