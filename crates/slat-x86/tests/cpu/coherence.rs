//! Tests code that changes while CPUs have it decoded or compiled: by stores of the same CPU, of another CPU, or of
//! the client.
#![cfg(feature = "jit")]

use crate::common::*;
use slat_x86::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The addresses of the second CPU's code and stack.
const OTHER: u64 = CODE + 0x3000;
const OTHER_STACK: u64 = STACK - 0x2000;

/// Runs `test` with the interpreter, and with compiled code.
fn both(test: impl Fn(&dyn Fn(Arc<Memory>, &[u8]) -> Guest)) {
    test(&|memory, code| Guest::with_memory(memory, code));
    test(&|memory, code| {
        let mut guest = Guest::with_memory(memory, code);
        compiled::always(&mut guest.cpu);
        guest
    });
}

fn memory() -> Arc<Memory> {
    Memory::new(MMIO as usize)
}

/// Makes a second CPU that runs `code`.
fn second(guest: &dyn Fn(Arc<Memory>, &[u8]) -> Guest, memory: &Arc<Memory>, code: &[u8]) -> Guest {
    let first = memory.read::<64>(CODE);
    let mut other = guest(memory.clone(), code);
    memory.write(CODE, &first);
    memory.write(OTHER, code);
    other.cpu.state.rip = OTHER;
    other.cpu.state.gpr[RSP] = OTHER_STACK;
    other
}

/// Runs `guest` to its HLT on a thread of its own. Ends the run after twenty seconds.
fn halts_beside(mut guest: Guest, meanwhile: impl FnOnce()) -> Guest {
    let attention = guest.attention.clone();
    let running = std::thread::spawn(move || {
        let exit = guest.run();
        (exit, guest)
    });
    meanwhile();
    let began = Instant::now();
    while !running.is_finished() && began.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(1));
    }
    attention.store(1, Ordering::SeqCst);
    let (exit, guest) = running.join().unwrap();
    assert_eq!(exit, Exit::Hlt, "at {:#x}", guest.cpu.state.rip);
    guest
}

#[test]
fn a_cpu_leaves_its_endless_loop_when_another_one_patches_it() {
    both(|guest| {
        let memory = memory();
        // jmp $; hlt
        let first = guest(memory.clone(), b"\xeb\xfe\xf4");
        // mov byte [rdi],0; hlt
        let mut other = second(guest, &memory, b"\xc6\x07\x00\xf4");
        other.cpu.state.gpr[RDI] = CODE + 1;
        halts_beside(first, || {
            std::thread::sleep(Duration::from_millis(30));
            other.halt();
        });
    });
}

#[test]
fn a_cpu_that_begins_to_run_later_has_its_stores_seen() {
    // The second CPU stores to the page, so its TLB contains the page, and stops. The first CPU decodes the page. Then
    // the second CPU runs again, and stores to the page.
    let check = |guest: &dyn Fn(Arc<Memory>, &[u8]) -> Guest, run: fn(&mut Guest)| {
        let memory = memory();
        let first = guest(memory.clone(), b"\xeb\xfe\xf4");
        // mov byte [rdi],dl; hlt; mov byte [rdi],0; hlt
        let mut other = second(guest, &memory, b"\x88\x17\xf4\xc6\x07\x00\xf4");
        other.cpu.state.gpr[RDI] = CODE + 1;
        other.cpu.state.gpr[RDX] = 0xfe;
        other.halt();
        halts_beside(first, || {
            std::thread::sleep(Duration::from_millis(30));
            run(&mut other);
        });
    };
    both(|guest| check(guest, Guest::halt));
    // Each run executes one instruction.
    both(|guest| {
        check(guest, |other| {
            other.cpu.requests.debugger.single_step = true;
            assert!(matches!(other.run(), Exit::Debug { .. }));
        });
    });
}

#[test]
fn values_that_another_cpu_patches_into_code_are_seen_in_their_order() {
    const LAST: u32 = 20_000;
    both(|guest| {
        let memory = memory();
        // again: mov eax,0 (the immediate is aligned); cmp eax,ebx; jb bad; mov ebx,eax; cmp eax,ecx; jne
        // again; hlt; bad: ud2
        let code = b"\x90\x90\x90\xb8\0\0\0\0\x39\xd8\x72\x07\x89\xc3\x39\xc8\x75\xf1\xf4\x0f\x0b";
        let mut first = guest(memory.clone(), code);
        first.cpu.state.gpr[RCX] = LAST.into();
        first.cpu.state.gpr[RBX] = 0;
        first.cpu.state.rip = CODE + 3;
        // again: inc eax; mov [rdi],eax; cmp eax,ecx; jne again; hlt
        let mut other = second(guest, &memory, b"\xff\xc0\x89\x07\x39\xc8\x75\xf8\xf4");
        other.cpu.state.gpr[RDI] = CODE + 4;
        other.cpu.state.gpr[RCX] = LAST.into();
        let first = halts_beside(first, || other.halt());
        assert_eq!(first.cpu.state.gpr[RBX], LAST.into());
    });
}

#[test]
fn a_breakpoint_is_patched_over_as_kernels_do_it() {
    // Linux's text_poke writes INT3 over the first byte, then the other bytes, then the first byte. After each step all
    // CPUs serialise. Here the first CPU serialises in each turn (CPUID), and the second waits for some turns.
    both(|guest| {
        let memory = memory();
        // again: inc qword [rsi]; xor eax,eax; cpuid; call target; cmp edx,0x11111111; je fine; cmp edx,0x22222222; jne
        // bad; fine: cmp dword [rsi+8],0; je again; hlt; bad: ud2; target: mov edx,0x11111111; ret
        let code = b"\x48\xff\x06\x31\xc0\x0f\xa2\xe8\x1b\0\0\0\x81\xfa\x11\x11\x11\x11\x74\x08\x81\xfa\x22\x22\x22\x22\x75\x07\
            \x83\x7e\x08\x00\x74\xde\xf4\x0f\x0b\x90\x90\xba\x11\x11\x11\x11\xc3";
        let mut first = guest(memory.clone(), code);
        first.cpu.state.gpr[RSI] = DATA;
        let target = CODE + 0x27;
        assert_eq!(memory.read::<2>(target), [0xba, 0x11]);
        // mov [rdi],al; hlt / mov [rdi],eax; hlt
        let mut byte = second(guest, &memory, b"\x88\x07\xf4\x89\x07\xf4");
        // #BP: dec qword [rsp]; iretq. This returns to the patched instruction.
        memory.write(
            HANDLERS + 16 * u64::from(vector::BP),
            b"\x48\xff\x0c\x24\x48\xcf",
        );
        let mut store = |byte_only: bool, at: u64, value: u64| {
            byte.cpu.state.rip = OTHER + if byte_only { 0 } else { 3 };
            byte.cpu.state.gpr[RDI] = at;
            byte.cpu.state.gpr[RAX] = value;
            byte.halt();
        };
        let turns = || memory.read64(DATA);
        let wait = || {
            let from = turns();
            let began = Instant::now();
            // While the breakpoint is there, the first CPU completes no turn, but its IRET serialises.
            while turns() < from + 3 && began.elapsed() < Duration::from_millis(3) {
                std::thread::yield_now();
            }
        };
        let first = halts_beside(first, || {
            for round in 0..100 {
                let value = [0x2222_2222, 0x1111_1111][round % 2];
                store(true, target, 0xcc);
                wait();
                store(false, target + 1, value);
                wait();
                store(true, target, 0xba);
                wait();
            }
            memory.write64(DATA + 8, 1);
        });
        assert_eq!(first.cpu.state.rip, CODE + 35, "another HLT");
        assert!(turns() > 100);
    });
}

#[test]
fn the_clients_stores_are_seen_in_the_next_run() {
    both(|guest| {
        // mov eax,N; hlt
        let mut guest = guest(memory(), b"\xb8\x01\0\0\0\xf4");
        for n in 1..200u64 {
            guest.memory().write(CODE + 1, &[n as u8]);
            guest.cpu.state.rip = CODE;
            guest.halt();
            assert_eq!(guest.cpu.state.gpr[RAX], n);
        }
    });
}

#[test]
fn the_clients_stores_are_seen_after_an_instruction_that_serialises() {
    both(|guest| {
        let memory = memory();
        // again: cpuid; mov eax,0; test eax,eax; je again; hlt
        let first = guest(memory.clone(), b"\x0f\xa2\xb8\0\0\0\0\x85\xc0\x74\xf5\xf4");
        halts_beside(first, || {
            std::thread::sleep(Duration::from_millis(30));
            memory.write(CODE + 3, &[1]);
        });
    });
}

#[test]
fn code_that_changes_itself_in_a_loop_executes_what_it_wrote() {
    both(|guest| {
        // again: add eax,1; inc byte [rdi] (the immediate of the ADD); dec ecx; jne again; hlt
        let mut guest = guest(memory(), b"\x83\xc0\x00\xfe\x07\xff\xc9\x75\xf7\xf4");
        guest.cpu.state.gpr[RDI] = CODE + 2;
        guest.cpu.state.gpr[RCX] = 100;
        guest.cpu.state.gpr[RAX] = 0;
        guest.halt();
        assert_eq!(guest.cpu.state.gpr[RAX], 99 * 100 / 2);
        // The next instruction: mov byte [rip+1],5; mov al,0; hlt
        guest
            .memory()
            .write(CODE, b"\xc6\x05\x01\0\0\0\x05\xb0\0\xf4");
        guest.cpu.state.rip = CODE;
        guest.halt();
        assert_eq!(guest.cpu.state.gpr[RAX] & 0xff, 5);
    });
}

#[test]
fn code_that_runs_once_marks_no_page_and_executes_what_it_wrote() {
    // mov byte [rip+1],5; mov al,0; hlt
    let mut guest = Guest::new(b"\xc6\x05\x01\0\0\0\x05\xb0\0\xf4");
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RAX] & 0xff, 5);
    let counters = guest.cpu.counters();
    // With the compiler, the code was compiled at once, and the block is kept.
    if counters.instructions_compiled == 0 {
        assert_eq!((counters.code_stores, counters.pages_compared), (0, 0));
    }
}

#[test]
fn stores_to_a_page_that_held_code_become_fast() {
    both(|guest| {
        // again: mov [rdi],ecx; dec ecx; jne again; hlt
        let mut guest = guest(memory(), b"\x89\x0f\xff\xc9\x75\xfa\xf4");
        guest.memory().write(DATA, b"\x90\xf4");
        // The block is kept at its second run, which marks the page.
        for start in [DATA, DATA, CODE] {
            guest.cpu.state.rip = start;
            guest.cpu.state.gpr[RDI] = DATA + 8;
            guest.cpu.state.gpr[RCX] = 10_000;
            guest.halt();
        }
        let stores = guest.cpu.counters().code_stores;
        assert!((1..20).contains(&stores), "{stores} slow stores");
    });
}

#[test]
fn blocks_are_not_compared_with_memory_at_every_entry() {
    let mut guest = Guest::new(b"\xff\xc9\x75\xfc\xf4");
    // dec ecx; jne $-2; hlt
    guest.cpu.state.gpr[RCX] = 1_000_000;
    guest.halt();
    let counters = *guest.cpu.counters();
    assert!(counters.instructions > 2_000_000 - 10);
    assert!(counters.pages_compared < 10, "{counters:?}");
}

#[test]
fn compiled_code_is_what_runs() {
    let mut guest = Guest::new(b"\xff\xc9\x75\xfc\xf4");
    compiled::always(&mut guest.cpu);
    guest.cpu.state.gpr[RCX] = 1_000_000;
    guest.halt();
    let counters = guest.cpu.counters();
    assert!(counters.instructions_compiled > 1_999_990, "{counters:?}");
    assert!(counters.blocks < 10, "{counters:?}");
}

#[test]
fn compiled_loops_see_attention() {
    let mut guest = Guest::new(b"\xeb\xfe");
    compiled::always(&mut guest.cpu);
    let attention = guest.attention.clone();
    let done = Arc::new(AtomicBool::new(false));
    let ended = done.clone();
    let running = std::thread::spawn(move || {
        let exit = guest.run();
        ended.store(true, Ordering::SeqCst);
        exit
    });
    std::thread::sleep(Duration::from_millis(20));
    assert!(!done.load(Ordering::SeqCst));
    attention.store(1, Ordering::SeqCst);
    assert_eq!(running.join().unwrap(), Exit::Attention);
}
