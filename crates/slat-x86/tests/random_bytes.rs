//! Executes random bytes as code, in all three code sizes. The CPU always returns an exit and does not panic, and an
//! instruction that faults has not changed the registers.

mod common;
use common::*;
use slat_x86::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

fn run_cases(bits: u32, cases: u64) {
    let memory = Memory::new(MMIO as usize);
    // A case may become an endless loop, for instance of exceptions in real mode.
    let attention = Arc::new(AtomicU32::new(0));
    let done = Arc::new(AtomicBool::new(false));
    let watchdog = std::thread::spawn({
        let (attention, done) = (attention.clone(), done.clone());
        move || {
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
                attention.store(1, Ordering::Relaxed);
            }
        }
    });
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ u64::from(bits));
    // The cases themselves are single steps, which are always interpreted; only the code after a fault is compiled.
    let cases = match std::env::var_os("SLAT_TEST_COMPILED") {
        Some(_) => cases / 10,
        None => cases,
    };
    for case in 0..cases {
        let mut code = [0; 16];
        for part in code.chunks_mut(8) {
            part.copy_from_slice(&random.next().to_le_bytes());
        }
        // Makes prefixes and the two-byte map more frequent than by chance.
        match random.next() % 4 {
            0 => code[0] = 0x0f,
            1 => (code[0], code[1]) = (0x48 | code[0] & 7, 0x0f),
            2 => code[0] = [0x66, 0xf2, 0xf3, 0xf0, 0x67, 0x65][(random.next() % 6) as usize],
            _ => {}
        }
        let mut guest = Guest::with_memory(memory.clone(), &code);
        guest.attention = attention.clone();
        attention.store(0, Ordering::Relaxed);
        for r in [
            RAX, RCX, RDX, RBX, RBP, RSI, RDI, 8, 9, 10, 11, 12, 13, 14, 15,
        ] {
            guest.cpu.state.gpr[r] = match random.next() % 4 {
                0 => random.next(),
                1 => random.next() % 64,
                2 => DATA + 0xffc,
                _ => DATA + random.next() % 0x2000,
            };
        }
        let mut code_rights = 0xa09b;
        if bits != 64 {
            // The code segment is one of compatibility mode.
            code_rights = if bits == 32 { 0xc09b } else { 0x809b };
        }
        guest.cpu.state.cs.rights = code_rights;
        guest.machine.read_only(DATA + 0x1000);
        // TF ends the case after one instruction: the handler of the trap halts.
        guest.cpu.state.rflags |= 0x100;
        let before = guest.cpu.state.clone();
        let mut exits = 0;
        loop {
            let exit = guest.run();
            exits += 1;
            match exit {
                Exit::Mmio { write: false, .. } => guest.cpu.complete_mmio_read(&[0; 8]),
                Exit::Io {
                    write, size, count, ..
                } => {
                    let data = vec![0; usize::from(size) * count as usize];
                    guest.cpu.complete_io(if write { &[] } else { &data });
                    break;
                }
                Exit::Mmio { .. } => {}
                _ => break,
            }
            if exits > 200 {
                break;
            }
        }
        let state = &guest.cpu.state;
        let handler = state.rip.wrapping_sub(HANDLERS);
        let faulted = handler < 16 * 32
            && handler % 16 == 1
            && handler / 16 != 1
            && handler / 16 != 3
            && handler / 16 != 4;
        let string = code
            .iter()
            .any(|b| matches!(b, 0xa4..=0xa7 | 0xaa..=0xaf | 0x6c..=0x6f));
        let software = code.contains(&0xcd) || code.contains(&0xf1);
        // Checks RIP in the frame: only a fault of the first instruction is judged.
        let at_start = state.gpr[RSP] < MMIO - 64 && (0..2).any(|n| guest.stack(n) == CODE);
        if faulted && at_start && !string && !software {
            for r in (0..16).filter(|r| *r != RSP) {
                assert_eq!(
                    state.gpr[r], before.gpr[r],
                    "case {case}, {bits} bits: {code:x?} changed r{r}"
                );
            }
        }
    }
    done.store(true, Ordering::Relaxed);
    watchdog.join().unwrap();
}

#[test]
fn random_64_bit_code_is_survived() {
    run_cases(64, 30_000);
}

#[test]
fn random_32_bit_code_is_survived() {
    run_cases(32, 15_000);
}

#[test]
fn random_16_bit_code_is_survived() {
    run_cases(16, 15_000);
}
