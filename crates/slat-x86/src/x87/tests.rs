//! Compares the quick handlers with the reference on random states. Each form of an instruction runs on 400 states, or
//! on as many as `SLAT_X87_ROUNDS` says.

use super::*;
use crate::CodePages;
use crate::machine::HostPage;
use iced_x86::{Decoder, DecoderOptions};
use std::ptr::NonNull;

/// The address of the memory operand: at offset 3 of a page that the TLB has.
const DATA: u64 = 0x20_0003;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 16) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// Returns a random value of a register: zero, normal, denormal, infinity, NaN or unsupported.
    fn register(&mut self) -> F80 {
        let sign = self.pick(&[0, 0x8000]);
        let exponent = match self.below(8) {
            0 => self.pick(&[0, 1, 0x7ffe, 0x7fff]),
            1 => self.next() as u16 & 0x7fff,
            // Exponents near the limits of single and double precision.
            2 => self.pick(&[0x3c00, 0x3c01, 0x43ff, 0x3f80, 0x3f81, 0x407f]),
            _ => 0x3fff - 70 + self.below(140) as u16,
        };
        let mantissa = match self.below(8) {
            0 => 0,
            1 => 1 << 63,
            2 => 3 << 62,
            3 => self.next(),
            4 => 1 << self.below(64) | 1 << 63,
            5 => u64::MAX,
            6 => self.next() << self.below(64) | 1 << 63,
            _ => self.next() | 1 << 63,
        };
        match self.below(8) {
            0 => F80 {
                mantissa: 0,
                exponent: sign,
            },
            _ => F80 {
                mantissa,
                exponent: sign | exponent,
            },
        }
    }

    /// Returns random bytes for the memory operand. Often they are a special value of one of the formats.
    fn memory(&mut self) -> [u8; 16] {
        let mut bytes = [0; 16];
        match self.below(6) {
            0 => {
                let F80 { mantissa, exponent } = self.register();
                bytes[..8].copy_from_slice(&mantissa.to_le_bytes());
                bytes[8..10].copy_from_slice(&exponent.to_le_bytes());
            }
            1 => bytes[..8].copy_from_slice(&f64::from_bits(self.next()).to_le_bytes()),
            2 => {
                let special: [u64; 7] = [
                    0,
                    1,
                    0x7ff0 << 48,
                    0x7ff8 << 48,
                    0x7ff4 << 48,
                    0x8000 << 48,
                    0x000f << 48,
                ];
                bytes[..8].copy_from_slice(&self.pick(&special).to_le_bytes());
            }
            3 => {
                let special = [0, 1, 0x7f80_0000, 0x7fc0_0000, 0x7fa0_0000, 0x007f_0000];
                bytes[..4].copy_from_slice(&u32::to_le_bytes(self.pick(&special)));
            }
            4 => {
                let word = self.pick(&[0x37f, 0x27f, 0xf7f, 0x33f, 0x340]);
                bytes[..2].copy_from_slice(&u16::to_le_bytes(word));
            }
            _ => bytes[..8].copy_from_slice(&(self.below(2000) as i64 - 1000).to_le_bytes()),
        }
        bytes
    }

    /// Makes a random x87 state. Most of these states are usual, with no register empty or only ST(7).
    fn state(&mut self, state: &mut State) {
        state.fcw = match self.below(10) {
            0 => 0x40 | self.next() as u16 & 0x1f3f,
            1 => 0x340 | self.next() as u16 & 0x3f,
            2..=4 => 0x37f,
            _ => 0x7f | self.pick(&[0, 1, 2, 3]) << 8 | self.pick(&[0, 1, 2, 3]) << 10,
        };
        state.fsw = self.next() as u16 & 0x7f7f;
        if self.one_in(2) {
            state.fsw &= 0x7f00;
        }
        if state.fsw & !state.fcw & 0x3f != 0 {
            state.fsw |= 0x8080;
        }
        for n in 0..8 {
            state.st[n] = self.register();
        }
        state.ftw = match self.below(6) {
            0 => self.next() as u8,
            1 | 2 => 0xff,
            _ => !(1 << state.physical(7)),
        };
        state.fop = self.next() as u16 & 0x7ff;
        (state.fip, state.fdp) = (self.next(), self.next());
        state.rflags = flags::ALWAYS | self.next() & flags::ARITHMETIC;
        state.gpr[0] = self.next();
        state.gpr[6] = DATA;
    }
}

#[repr(align(4096))]
struct Page {
    _bytes: [u8; 4096],
}

/// A CPU with one page of memory.
struct Bench {
    cpu: Cpu,
    page: *mut Page,
}

impl Bench {
    fn new() -> Bench {
        slat_guard::install().unwrap();
        let mut cpu = Cpu::try_new(CodePages::try_new().unwrap()).unwrap();
        cpu.state.efer |= crate::state::control::EFER_LMA;
        cpu.state.cs.rights |= 1 << 13;
        cpu.derive();
        assert!(cpu.is_64());
        let page = Box::into_raw(Box::new(Page { _bytes: [0; 4096] }));
        let host = HostPage {
            base: NonNull::new(page.cast()).unwrap(),
            read: true,
            write: true,
            execute: false,
            tracked: None,
            bits: 12,
            global: false,
        };
        let table = cpu.table;
        cpu.tlb().fill(table, DATA, &host, false);
        Bench { cpu, page }
    }

    /// Executes an operation. Returns the state and the memory after it, and whether it was left to the reference.
    fn run(
        &mut self,
        op: &Op,
        handler: Handler,
        state: &State,
        memory: &[u8; 16],
    ) -> (String, bool) {
        self.cpu.state = state.clone();
        self.cpu.adopt_flags();
        let at = (self.page.cast::<[u8; 16]>()).wrapping_byte_add((DATA & 0xfff) as usize);
        // SAFETY: the address is within the page, which is never freed, and which only this thread uses.
        unsafe { at.write_unaligned(*memory) };
        let left = quick::LEFT.get();
        let flow = handler(&mut self.cpu, op);
        self.cpu.flags();
        let State {
            fcw,
            fsw,
            ftw,
            fop,
            fip,
            fdp,
            st,
            gpr,
            rflags,
            ..
        } = &self.cpu.state;
        // SAFETY: the address is within the page, which is never freed, and which only this thread uses.
        let memory = unsafe { at.read_unaligned() };
        let all = format!(
            "{flow:x?} fcw {fcw:x} fsw {fsw:x} ftw {ftw:x} fop {fop:x} fip {fip:x} fdp {fdp:x} {st:x?} {gpr:x?} {rflags:x} {memory:x?}"
        );
        (all, quick::LEFT.get() != left)
    }
}

/// Returns the operation of an instruction with its quick handler and its reference handler. `None`: both handlers are
/// the same.
fn both(code: &[u8]) -> Option<(Op, Handler, Handler)> {
    let insn = Decoder::with_ip(64, code, 0x1000, DecoderOptions::NONE).decode();
    if insn.is_invalid() {
        return None;
    }
    let mode = 2;
    let (op, _) = crate::lower::alone(&insn, code, mode, 0, insn.len() as u8);
    // A ModR/M byte in `op.r` may equal the number that means a memory operand, so replace it.
    let mut again = op;
    again.r[MODRM] = crate::op::NONE;
    let reference = lower_reference(&insn, code[0], code[1], &mut again);
    (op.imm >> 16 != 0).then_some((op, op.handler, reference))
}

#[test]
fn quick_handlers_do_what_the_reference_does() {
    let mut bench = Bench::new();
    let mut random = Random(0x1234_5678_9abc_def1);
    let rounds = std::env::var("SLAT_X87_ROUNDS").map_or(400, |rounds| rounds.parse().unwrap());
    let (mut forms, mut differ) = (0, vec![]);
    for opcode in 0xd8..=0xdf {
        // The first forms have a memory operand at RSI; the remaining forms have only registers.
        for modrm in (0..8).map(|reg| reg << 3 | 6).chain(0xc0..=0xff) {
            let Some((op, quick, reference)) = both(&[opcode, modrm]) else {
                continue;
            };
            forms += 1;
            let (mut left, mut done, mut wrong) = (0, 0, 0);
            let (mut state, mut other) = (bench.cpu.state.clone(), bench.cpu.state.clone());
            for _ in 0..rounds {
                random.state(&mut state);
                random.state(&mut other);
                let memory = random.memory();
                let (expected, _) = bench.run(&op, reference, &state, &memory);
                // First leave random sticky flags in the host's status word.
                bench.run(&op, quick, &other, &memory);
                let (actual, was_left) = bench.run(&op, quick, &state, &memory);
                if was_left {
                    left += 1;
                } else {
                    done += 1;
                }
                if actual != expected {
                    if wrong == 0 {
                        let before = (state.fcw, state.fsw, state.ftw, state.st, memory);
                        differ.push(format!(
                            "{opcode:x} {modrm:x}: {before:x?}\nexpected {expected}\nactual   {actual}"
                        ));
                    }
                    wrong += 1;
                }
            }
            // FLD ST(7) never runs quickly, because it needs the same register both full and empty.
            let never = (opcode, modrm) == (0xd9, 0xc7);
            assert!(
                left > 0 && (done > rounds / 20 || never),
                "{opcode:x} {modrm:x}: {done} of {rounds}"
            );
        }
    }
    println!("{forms} forms");
    assert!(forms > 300);
    let (shown, count) = (&differ[..differ.len().min(8)], differ.len());
    assert!(
        differ.is_empty(),
        "{count} forms differ:\n{}",
        shown.join("\n")
    );
}
