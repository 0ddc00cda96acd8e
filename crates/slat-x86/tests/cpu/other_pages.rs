//! Tests that compiled code which continues in another page always executes the current contents of that page.
#![cfg(feature = "jit")]

use crate::common::*;
use slat_x86::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The address of the tests' code. Each test has pages of its own.
const PAGES: u64 = 0x20_0000;
/// The distance from the caller's page to the function's.
const DISTANCE: u64 = 0x2000;
/// The function: mov eax,N; ret
const FUNCTION: &[u8] = b"\xb8\x00\0\0\0\xc3";

/// Code at `caller`, which calls the function at `callee`.
struct Program {
    guest: Guest,
    caller: u64,
    callee: u64,
}

impl Program {
    /// Makes a program of `before`, CALL, and `after`. Jumps lead to the program's own instructions.
    fn new(test: u64, before: &[u8], after: &[u8]) -> Self {
        let caller = PAGES + test * 0x10_000;
        let callee = caller + DISTANCE;
        let mut guest = Guest::interpreted(Memory::new(MMIO as usize), b"");
        compiled::always(&mut guest.cpu);
        let from = before.len() as u64 + 5;
        let to = ((DISTANCE - from) as u32).to_le_bytes();
        let code = [before, b"\xe8", &to, after].concat();
        guest.memory().write(caller, &code);
        guest.memory().write(callee, FUNCTION);
        let mut program = Self {
            guest,
            caller,
            callee,
        };
        // The function runs first, because a region has only the blocks that are known when it is compiled.
        program.guest.memory().write64(STACK - 8, HANDLERS);
        program.guest.cpu.state.gpr[RSP] = STACK - 8;
        program.run_at(program.callee);
        program
    }

    fn run_at(&mut self, rip: u64) {
        self.guest.cpu.state.rip = rip;
        self.guest.halt();
    }

    /// Runs the program with these values of RBX and RCX. Returns RBX.
    fn run(&mut self, rbx: u64, rcx: u64) -> u64 {
        let gpr = &mut self.guest.cpu.state.gpr;
        (gpr[RSP], gpr[RBX], gpr[RCX]) = (STACK, rbx, rcx);
        self.run_at(self.caller);
        self.guest.cpu.state.gpr[RBX]
    }

    /// Sets the value that the function returns.
    fn returns(&self, value: u8) {
        self.guest.memory().write(self.callee + 1, &[value]);
    }
}

/// add ebx,eax; dec ecx; jne to the CALL; hlt
const SUMS: &[u8] = b"\x01\xc3\xff\xc9\x75\xf5\xf4";

#[test]
fn the_clients_stores_to_the_other_page_are_seen_in_the_next_run() {
    let mut program = Program::new(1, b"", SUMS);
    for value in 0..200 {
        program.returns(value);
        assert_eq!(program.run(0, 5), 5 * u64::from(value));
    }
    // The page has its first contents again, so the code that was compiled first is valid again.
    program.returns(0);
    assert_eq!(program.run(0, 5), 0);
}

#[test]
fn its_own_stores_to_the_other_page_are_executed() {
    // add ebx,eax; inc byte [rdi]; dec ecx; jne to the CALL; hlt
    let mut program = Program::new(2, b"", b"\x01\xc3\xfe\x07\xff\xc9\x75\xf3\xf4");
    program.guest.cpu.state.gpr[RDI] = program.callee + 1;
    program.run(0, 3);
    program.returns(0);
    assert_eq!(program.run(0, 100), 99 * 100 / 2);
    // The change is near an address to which the path has stored before: mov [rdi],cl; CALL; add ebx,eax; mov
    // [rdi-0x7f],cl; dec ecx; jne; hlt
    let after = b"\x01\xc3\x88\x4f\x81\xff\xc9\x75\xf0\xf4";
    let mut program = Program::new(3, b"\x88\x0f", after);
    program.guest.cpu.state.gpr[RDI] = program.callee + 0x80;
    program.run(0, 3);
    for _ in 0..50 {
        program.returns(0);
        assert_eq!(program.run(0, 50), (2..=50).sum::<u64>());
    }
}

#[test]
fn stores_to_the_other_page_between_two_calls_are_executed() {
    // add ebx,eax; inc byte [rdi]; CALL; add ebx,eax; hlt
    let call = ((DISTANCE as u32) - 14).to_le_bytes();
    let after = [b"\x01\xc3\xfe\x07\xe8", &call[..], b"\x01\xc3\xf4"].concat();
    let mut program = Program::new(4, b"", &after);
    program.guest.cpu.state.gpr[RDI] = program.callee + 1;
    for value in 1..100 {
        program.returns(value);
        assert_eq!(program.run(0, 0), 2 * u64::from(value) + 1);
    }
}

/// test eax,eax; jne on; dec ecx; jne to the CALL; on: hlt
const WAITS: &[u8] = b"\x85\xc0\x75\x04\xff\xc9\x75\xf3\xf4";

/// Runs a program that waits until its function returns another number. `change` changes the function meanwhile.
fn sees(mut program: Program, change: impl FnOnce(&Arc<Memory>, u64)) {
    program.run(0, 50);
    let Program {
        mut guest,
        caller,
        callee,
    } = program;
    let state = &mut guest.cpu.state;
    state.rip = caller;
    state.gpr[RCX] = u64::from(u32::MAX);
    let (memory, attention) = (guest.machine.memory.clone(), guest.attention.clone());
    let running = std::thread::spawn(move || (guest.run(), guest.cpu.state.gpr[RAX]));
    std::thread::sleep(Duration::from_millis(30));
    assert!(!running.is_finished());
    change(&memory, callee + 1);
    for _ in 0..20_000 {
        if !running.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    attention.store(1, Ordering::SeqCst);
    assert_eq!(running.join().unwrap(), (Exit::Hlt, 1));
}

#[test]
fn another_cpus_store_to_the_other_page_ends_a_loop_in_both() {
    sees(Program::new(5, b"", WAITS), |memory, at| {
        // mov byte [rdi],1; hlt
        let code = PAGES + 0xe000;
        let mut other = Guest::interpreted(memory.clone(), b"");
        memory.write(code, b"\xc6\x07\x01\xf4");
        other.cpu.state.rip = code;
        other.cpu.state.gpr[RDI] = at;
        other.halt();
    });
}

#[test]
fn the_clients_store_to_the_other_page_is_seen_after_an_instruction_that_serialises() {
    // push rcx; xor eax,eax; cpuid; pop rcx; CALL; test eax,eax; jne on; dec ecx; jne to the PUSH; on: hlt
    let before = b"\x51\x31\xc0\x0f\xa2\x59";
    let after = b"\x85\xc0\x75\x04\xff\xc9\x75\xed\xf4";
    sees(Program::new(6, before, after), |memory, at| {
        memory.write(at, &[1]);
    });
}

#[test]
fn a_kick_ends_a_loop_in_two_pages() {
    // jmp to the CALL
    let mut program = Program::new(7, b"", b"\xeb\xf9");
    for _ in 0..3 {
        let attention = program.guest.attention.clone();
        let state = &mut program.guest.cpu.state;
        (state.rip, state.gpr[RSP]) = (program.caller, STACK);
        attention.store(0, Ordering::SeqCst);
        let kick = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            attention.store(1, Ordering::SeqCst);
        });
        assert_eq!(program.guest.run(), Exit::Attention);
        kick.join().unwrap();
    }
}

#[test]
fn what_is_mapped_at_the_other_page_is_executed() {
    // again: mov cr3,rsi; CALL; add ebx,eax; xchg rsi,rdi; dec ecx; jne again; hlt
    let after = b"\x01\xc3\x48\x87\xf7\xff\xc9\x75\xef\xf4";
    let mut program = Program::new(8, b"\x0f\x22\xde", after);
    let page = program.callee >> 12;
    program
        .guest
        .memory()
        .write(program.callee + 0x1000, FUNCTION);
    (program.guest.memory()).write(program.callee + 0x1001, &[100]);
    let spaces = &mut program.guest.machine.spaces;
    spaces.insert((0x2000, page), page + 1);
    program.returns(1);
    let gpr = &mut program.guest.cpu.state.gpr;
    (gpr[RSI], gpr[RDI]) = (0x1000, 0x2000);
    for _ in 0..3 {
        assert_eq!(program.run(0, 100), 50 * 101);
    }
    // Stores the same code in both pages.
    (program.guest.memory()).write(program.callee + 0x1001, &[1]);
    assert_eq!(program.run(0, 100), 100);
}

#[test]
fn the_other_page_is_fetched_when_it_is_entered_and_faults_there() {
    // test ecx,ecx; je on; CALL; on: hlt
    let mut program = Program::new(9, b"\x85\xc9\x74\x05", b"\xf4");
    program.run(0, 1);
    program.run(0, 1);
    let callee = program.callee;
    program.guest.machine.absent(callee);
    program.guest.cpu.flush_tlb();
    program.guest.machine.translations.clear();
    program.run(0, 0);
    let mut fetched = program.guest.machine.translations.iter();
    assert!(!fetched.any(|(at, _)| at >> 12 == callee >> 12));
    // The page fault is in the function, after the CALL has pushed the return address.
    program.run(0, 1);
    let state = &program.guest.cpu.state;
    assert_eq!(state.cr2, callee);
    let memory = program.guest.memory();
    assert_eq!(memory.read64(state.gpr[RSP] + 8), callee);
    assert_eq!(memory.read64(STACK - 8), program.caller + 9);
}

#[test]
fn a_cpu_whose_other_page_is_different_executes_its_own() {
    let mut first = Program::new(10, b"", SUMS);
    first.returns(1);
    assert_eq!(first.run(0, 50), 50);
    assert_eq!(first.run(0, 50), 50);
    // The caller's page has the same contents, so its existing region is used.
    let mut second = Program::new(10, b"", SUMS);
    second.returns(2);
    assert_eq!(second.run(0, 50), 100);
    assert_eq!(second.run(0, 50), 100);
    assert_eq!(first.run(0, 50), 50);
}
