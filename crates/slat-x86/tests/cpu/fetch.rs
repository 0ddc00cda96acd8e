//! Tests code that crosses page ends, whose second page can be fetched only at the first, second or later try.
//! Execution continues, the faults are right, and the guest ends like one whose fetches never fail.

use crate::common::*;
use slat_x86::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Ends a guest that makes no progress, by [`Exit::Attention`].
struct Watchdog {
    done: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watchdog {
    const LIMIT: Duration = Duration::from_secs(30);

    fn over(guest: &Guest) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let (seen, attention) = (done.clone(), guest.attention.clone());
        let thread = std::thread::spawn(move || {
            std::thread::park_timeout(Self::LIMIT);
            if !seen.load(Ordering::Acquire) {
                attention.store(1, Ordering::Relaxed);
            }
        });
        Watchdog {
            done,
            thread: Some(thread),
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Release);
        let thread = self.thread.take().unwrap();
        thread.thread().unpark();
        thread.join().unwrap();
    }
}

const ERROR: u32 = 0x10;
const PAGE_FAULT: Fault = Fault::Page { error_code: ERROR };
/// The second page of the code.
const SECOND: u64 = CODE + 0x1000;

#[test]
fn an_instruction_whose_second_page_is_mapped_at_the_second_fault_is_executed() {
    // mov eax, 0x12345678, with one byte in the first page
    let mut guest = Guest::new(&[]);
    let _watchdog = Watchdog::over(&guest);
    let at = SECOND - 1;
    guest.memory().write(at, b"\xb8\x78\x56\x34\x12\xf4");
    guest
        .machine
        .failing_fetches
        .insert(SECOND >> 12, (2, PAGE_FAULT));
    for _ in 0..2 {
        (guest.cpu.state.rip, guest.cpu.state.gpr[RSP]) = (at, STACK);
        guest.halt_in_handler(vector::PF);
        assert_eq!(
            (guest.cpu.state.cr2, guest.stack(0)),
            (SECOND, ERROR.into())
        );
        assert_eq!(guest.stack(1), at);
    }
    guest.cpu.state.rip = at;
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RAX], 0x1234_5678);
}

#[test]
fn an_instruction_that_crosses_no_more_does_not_fetch_the_second_page() {
    let mut guest = Guest::new(&[]);
    let _watchdog = Watchdog::over(&guest);
    let at = SECOND - 2;
    for runs in 1..4 {
        guest.memory().write(at, b"\xb8\x78\x56\x34\x12\xf4");
        for _ in 0..runs {
            guest.cpu.state.rip = at;
            guest.halt();
            assert_eq!(guest.cpu.state.gpr[RAX], 0x1234_5678);
        }
        // nop; hlt: the short form of inc eax is a prefix here. The next page is absent.
        guest.memory().write(at, b"\x90\xf4");
        guest
            .machine
            .failing_fetches
            .insert(SECOND >> 12, (9, PAGE_FAULT));
        guest.cpu.flush_tlb();
        guest.cpu.state.rip = at;
        guest.halt();
        assert_eq!(guest.cpu.state.rip, SECOND, "after {runs} runs");
        guest.machine.failing_fetches.clear();
        guest.cpu.flush_tlb();
    }
}

#[test]
fn bytes_that_are_no_instruction_need_no_second_page() {
    // lock nop
    let mut guest = Guest::new(&[]);
    let at = SECOND - 2;
    guest.memory().write(at, b"\xf0\x90");
    guest
        .machine
        .failing_fetches
        .insert(SECOND >> 12, (9, PAGE_FAULT));
    for _ in 0..3 {
        (guest.cpu.state.rip, guest.cpu.state.gpr[RSP]) = (at, STACK);
        guest.halt_in_handler(vector::UD);
        assert_eq!(guest.stack(0), at);
    }
}

#[test]
fn linear_addresses_of_32_bits_begin_again_after_the_last() {
    let mut guest = Guest::new(&[]);
    mode_of(32, &mut guest);
    guest.machine.moved.insert(0xf_ffff, 0xf);
    guest.memory().write(0xffff, b"\xb8");
    guest.memory().write(0, b"\x78\x56\x34\x12\xf4");
    guest.cpu.state.rip = 0xffff_ffff;
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RAX], 0x1234_5678);
}

#[test]
fn code_beyond_its_segment_is_not_executed() {
    // The distance of the limit from the first byte; the expected sum; and the address of the next instruction.
    for (limit, sum, end) in [(4, 9, 5), (3, 2, 2), (2, 2, 2), (1, 2, 2), (0, 1, 1)] {
        let mut guest = Guest::new(&[]);
        mode_of(16, &mut guest);
        // inc bx; inc bx; add bx,7
        guest.memory().write(0x8000, b"\x43\x43\x83\xc3\x07");
        for _ in 0..3 {
            let state = &mut guest.cpu.state;
            (state.cs.base, state.cs.limit) = (0, 0x8000 + limit);
            (state.rip, state.gpr[RBX], state.gpr[RSP]) = (0x8000, 0, 0x2000);
            guest.halt();
            let state = &guest.cpu.state;
            assert_eq!(state.rip, 0x601 + 16 * u64::from(vector::GP), "{limit}");
            assert_eq!(state.gpr[RBX], sum, "{limit}");
            assert_eq!(
                guest.memory().read(0x2000 - 6),
                (0x8000 + end as u16).to_le_bytes()
            );
        }
    }
}

/// Puts a guest into the code size.
fn mode_of(bits: u32, guest: &mut Guest) {
    let state = &mut guest.cpu.state;
    match bits {
        16 => {
            (state.cr0, state.cr4, state.efer) = (0x10, 0x600, 0);
            for segment in [&mut state.cs, &mut state.ds, &mut state.es, &mut state.ss] {
                (segment.selector, segment.base, segment.limit) = (0, 0, 0xffff);
                segment.rights = 0x93;
            }
            state.idtr = Table {
                base: IDT,
                limit: 0x3ff,
            };
            // Handlers within reach: HLT at 0x600.
            for vector in 0..256 {
                let at = 0x600 + 16 * vector;
                guest
                    .memory()
                    .write(IDT + 4 * vector, &(at as u32).to_le_bytes());
                guest.memory().write(at, &[0xf4]);
            }
        }
        32 => {
            (state.cr0, state.efer) = (0x8005_0033, 0);
            state.cs.rights = 0xc09b;
            guest.memory().write64(GDT + 8, 0x00cf_9b00_0000_ffff);
            for vector in 0..256 {
                let at = HANDLERS + 16 * vector;
                let gate = at & 0xffff | 8 << 16 | 0x8e << 40 | (at >> 16) << 48;
                guest.memory().write64(IDT + 8 * vector, gate);
            }
        }
        _ => {}
    }
}

/// A guest that repeatedly runs code which crosses page ends.
struct Crossing {
    guest: Guest,
    bits: u32,
    /// The beginning of the code, which ends with HLT.
    start: u64,
    /// The address after the HLT.
    end: u64,
    /// The numbers of the code's pages.
    pages: std::ops::RangeInclusive<u64>,
    /// The number of exceptions that are still allowed.
    faults: u64,
    traps: u64,
}

/// Instructions that use only registers, and have the same meaning in all modes.
const SHORT: [&[u8]; 8] = [
    b"\x90",
    b"\x01\xd8",
    b"\x31\xca",
    b"\xf7\xd0",
    b"\x0f\xaf\xc1",
    b"\x84\xc0\x74\x00",
    b"\xeb\x00",
    b"\xf3\x90",
];

impl Crossing {
    /// The address of the code, within reach of 16 bits.
    const BASE: u64 = 0x8000;

    fn new(bits: u32, code: &[u8], start: u64) -> Self {
        let mut guest = Guest::new(&[]);
        mode_of(bits, &mut guest);
        guest.memory().write(start, code);
        for (r, register) in guest.cpu.state.gpr.iter_mut().enumerate() {
            *register = 3 + r as u64;
        }
        let pages = start >> 12..=(start + code.len() as u64 - 1) >> 12;
        Crossing {
            guest,
            bits,
            start,
            end: start + code.len() as u64,
            pages,
            faults: 0,
            traps: 0,
        }
    }

    /// Runs to the HLT at the end. The handlers of exceptions return with all registers as they were before.
    fn round(&mut self, trap: bool, what: &str) {
        let guest = &mut self.guest;
        guest.cpu.state.rip = self.start;
        guest.cpu.state.gpr[RSP] = 0x7f00;
        guest.cpu.state.rflags = 2 | u64::from(trap) << 8;
        loop {
            let before = guest.cpu.state.gpr;
            let exit = guest.run();
            if exit == Exit::OutOfMemory {
                continue;
            }
            assert_eq!(exit, Exit::Hlt, "{what}: at {:#x}", guest.cpu.state.rip);
            let handler = match self.bits {
                16 => 0x600,
                _ => HANDLERS,
            };
            let vector = guest.cpu.state.rip.wrapping_sub(handler + 1) / 16;
            let in_handler = guest.cpu.state.rip % 16 == 1
                && [u64::from(vector::DB), u64::from(vector::PF)].contains(&vector)
                && guest.cpu.state.gpr[RSP] != before[RSP];
            if !in_handler {
                return;
            }
            let has_code = vector == u64::from(vector::PF) && self.bits != 16;
            let slot = u64::from(self.bits / 8);
            let rsp = guest.cpu.state.gpr[RSP];
            let frame = |n: u64| {
                let word = guest.memory().read64(rsp + n * slot);
                word & u64::MAX >> (64 - self.bits)
            };
            let rip = frame(u64::from(has_code));
            if vector == u64::from(vector::PF) {
                self.faults += 1;
                if has_code {
                    assert_eq!(frame(0), u64::from(ERROR), "{what}: the error code");
                }
                let cr2 = guest.cpu.state.cr2;
                assert!(self.pages.contains(&(cr2 >> 12)), "{what}: CR2 {cr2:#x}");
                // The page that cannot be fetched is that of RIP, or the page into which its instruction crosses.
                assert!(
                    cr2 == rip || cr2 & 0xfff == 0 && cr2 > rip && cr2 - rip < 15,
                    "{what}: CR2 {cr2:#x}, RIP {rip:#x}"
                );
            } else {
                self.traps += 1;
            }
            guest.cpu.state.rip = rip;
            guest.cpu.state.gpr[RSP] = before[RSP];
            if rip == self.end {
                // This exit is the trap after HLT, which ends the halt.
                return;
            }
            guest.cpu.state.rflags = guest.cpu.state.rflags & !0x100 | u64::from(trap) << 8;
        }
    }
}

fn every_kind_of_failure(bits: u32, guests: u64) {
    let mut random = Random(0x5851_f42d_4c95_7f2d ^ u64::from(bits));
    let mut faults = 0;
    for n in 0..guests {
        let what = format!("{bits} bits, guest {n}");
        // The code around two page ends, and the offsets of immediates that may change.
        let mut code = vec![];
        let mut immediates = vec![];
        let start = Crossing::BASE + 0x1000 - 1 - random.below(30);
        let behind = start + 0x1000 + random.below(40);
        while start + (code.len() as u64) < behind {
            // Most of the second page is one jump.
            let at = start + code.len() as u64;
            let left = (Crossing::BASE + 0x2000) as i64 - at as i64 - 40;
            if at > Crossing::BASE + 0x1010 && left > 200 {
                let to = (left as u64 + random.below(30)) as usize;
                code.push(0xe9);
                let offset = (to as u32).to_le_bytes();
                code.extend_from_slice(if bits == 16 { &offset[..2] } else { &offset });
                code.extend(std::iter::repeat_n(0x90, to));
                continue;
            }
            if random.below(3) == 0 {
                let insn = random.pick(&SHORT);
                code.extend_from_slice(insn);
                continue;
            }
            // mov, add or xor of a register and an immediate, with or without prefixes
            for _ in 0..random.below(3) {
                code.push(random.pick(&[0x26, 0x2e, 0x3e]));
            }
            let (opcode, len) = match (random.below(3), bits) {
                (0, _) => (0xb0, 1),
                (1, 16) => (0xb8, 2),
                (1, _) => (0xb8, 4),
                (_, 16) => (0x05, 2),
                _ => (0x05, 4),
            };
            code.push(
                opcode
                    | if opcode >= 0xb0 {
                        random.pick(&[0, 1, 2, 3])
                    } else {
                        0
                    },
            );
            for _ in 0..len {
                immediates.push(code.len());
                code.push(random.next() as u8);
            }
        }
        code.push(0xf4);
        let mut tried = Crossing::new(bits, &code, start);
        let mut plain = Crossing::new(bits, &code, start);
        let _watchdog = Watchdog::over(&tried.guest);
        for round in 0..8 {
            // Some rounds are single-stepped, because the CPU handles single steps separately.
            let trap = random.below(4) == 0;
            for page in tried.pages.clone() {
                let k = random.below(4) as usize;
                let fault = match random.below(4) {
                    0 => Fault::Retry,
                    1 => Fault::OutOfMemory,
                    _ => PAGE_FAULT,
                };
                if random.below(2) == 0 {
                    tried.guest.cpu.flush_tlb();
                    tried.guest.machine.failing_fetches.insert(page, (k, fault));
                }
            }
            if random.below(3) == 0 && !immediates.is_empty() {
                let at = start + random.pick(&immediates) as u64;
                let byte = [random.next() as u8];
                tried.guest.memory().write(at, &byte);
                plain.guest.memory().write(at, &byte);
            }
            let what = format!("{what}, round {round}");
            tried.round(trap, &what);
            plain.round(trap, &what);
            let (t, p) = (&tried.guest.cpu.state, &plain.guest.cpu.state);
            assert_eq!((t.gpr, t.rip, t.rflags), (p.gpr, p.rip, p.rflags), "{what}");
            assert_eq!(tried.traps, plain.traps, "{what}");
        }
        assert_eq!(plain.faults, 0);
        faults += tried.faults;
    }
    assert!(faults > guests, "{faults} faults");
}

#[test]
fn a_fetch_that_fails_some_times_changes_nothing_in_16_bit_code() {
    every_kind_of_failure(16, 300);
}

#[test]
fn a_fetch_that_fails_some_times_changes_nothing_in_32_bit_code() {
    every_kind_of_failure(32, 300);
}

#[test]
fn a_fetch_that_fails_some_times_changes_nothing_in_64_bit_code() {
    every_kind_of_failure(64, 300);
}
