//! Guests with segments: in four modes, with random registers and random segments.

use crate::common::*;
use crate::programs::program;
use slat_x86::state::flags;
use slat_x86::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Real,
    Virtual8086,
    /// Protected mode, in a code segment of 16 bits.
    Protected16,
    /// Protected mode, in a code segment of 32 bits that has a base.
    Protected32,
}

impl Mode {
    pub const ALL: [Mode; 4] = [
        Mode::Real,
        Mode::Virtual8086,
        Mode::Protected16,
        Mode::Protected32,
    ];

    pub fn bits(self) -> u32 {
        match self {
            Mode::Protected32 => 32,
            _ => 16,
        }
    }

    /// Whether a selector is a paragraph number.
    pub fn has_paragraphs(self) -> bool {
        matches!(self, Mode::Real | Mode::Virtual8086)
    }
}

/// The beginning of the paragraphs and addresses of random segments, and the number of bytes for them. Tables and
/// handlers are elsewhere.
const FIRST: u64 = 0x1_0000;
const BYTES: u64 = 0x3_0000;
/// The handlers of exceptions in real mode: a HLT for each vector.
const REAL_HANDLERS: u64 = 0x9000;
/// The selector of the code segment of virtual-8086 mode's monitor.
const MONITOR_CODE: u16 = 0x30;

/// Returns a random paragraph number.
pub fn paragraph(random: &mut Random) -> u16 {
    ((FIRST + random.below(BYTES)) >> 4) as u16
}

fn segment(mode: Mode, random: &mut Random) -> Segment {
    if mode.has_paragraphs() {
        let mut segment = Segment::real(paragraph(random), 0x93);
        if mode == Mode::Virtual8086 {
            segment.rights = 0xf3;
        }
        segment.limit = random.pick(&[0xffff, 0xffff, 0xffff, 0x3fff, u32::MAX]);
        return segment;
    }
    // The stack pointer has either size, and data segments have all four writable types.
    let big = 1 << 14;
    let rights = random.pick(&[0x93, 0x93, 0x93, 0x93 | big, 0x93 | big, 0x97]);
    let expands_down = rights & 4 != 0;
    let limit = match (expands_down, mode) {
        (true, _) => random.pick(&[0xf, 0xff]),
        (_, Mode::Protected32) => random.pick(&[u32::MAX, 0x1_ffff, 0xffff, 0x3fff]),
        _ => random.pick(&[0xffff, 0xffff, 0xffff, 0x3fff, u32::MAX]),
    };
    Segment {
        selector: 16,
        base: match random.below(8) {
            // Linear addresses wrap around after the last one.
            0 => 0xffff_f000 + random.below(0x1000),
            _ => FIRST + random.below(BYTES),
        },
        limit,
        rights,
    }
}

/// Puts a guest into a mode, with random registers and segments and a random program. Returns the program.
pub fn prepare(guest: &mut Guest, mode: Mode, random: &mut Random) -> Vec<u8> {
    let mut segments: [Segment; 6] = std::array::from_fn(|_| segment(mode, random));
    if !mode.has_paragraphs() {
        segments[1].base = FIRST + random.below(BYTES);
    }
    set_mode(guest, mode, segments);
    let state = &mut guest.cpu.state;
    for r in &mut state.gpr[..8] {
        let low = match random.below(4) {
            0 => random.below(64),
            1 => 0x1_0000 - random.below(16),
            _ => random.below(0x1_0000),
        };
        let high = match random.below(if mode.bits() == 16 { 4 } else { 24 }) {
            0 => random.below(0x1_0000),
            _ => 0,
        };
        *r = low & 0xffff | high << 16;
    }
    // The program can push to most of the random stacks.
    let sp = random.pick(&[0, 1, 2, 3, 6, 0x102, 0xfffe, 0xffff, 0x1200, 0x3001, 0x2002]);
    let high = match state.ss.big() {
        true => random.pick(&[0, 0, 0, 1]),
        false => random.next() & 0xffff,
    };
    state.gpr[RSP] = high << 16 | sp;
    state.rip = match random.below(4) {
        0 => 0x1_0000 - random.below(0x200),
        1 => random.below(0x20),
        _ => random.below(0xf000),
    };
    // Some programs change themselves.
    if random.below(8) == 0 {
        state.ds = state.cs;
        state.ds.rights = state.es.rights & !4;
    }
    let (ip, base) = (state.rip, state.cs.base);
    let selector = mode.has_paragraphs().then_some(state.cs.selector);
    let code = program(random, mode.bits(), ip, selector);
    for address in (FIRST..FIRST + BYTES + 0x1_0000).step_by(8) {
        guest.memory().write64(address, random.next());
    }
    // A function near the end of the segment, which CALL reaches by a displacement that wraps around: inc dx; ret.
    guest.memory().write(base + 0xffe0, b"\x42\xc3\xf4");
    guest.memory().write(base + ip, &code);
    code
}

/// Puts a guest into a mode. `segments` are ES, CS, SS, DS, FS and GS, whose rights are completed here.
pub fn set_mode(guest: &mut Guest, mode: Mode, segments: [Segment; 6]) {
    let state = &mut guest.cpu.state;
    let [es, mut cs, ss, ds, fs, gs] = segments;
    (cs.rights, cs.limit) = match mode {
        Mode::Real => (0x9b, 0xffff),
        Mode::Virtual8086 => (0xf3, 0xffff),
        Mode::Protected16 => (0x9b, 0xffff),
        Mode::Protected32 => (0x409b, u32::MAX),
    };
    (state.es, state.cs, state.ss) = (es, cs, ss);
    (state.ds, state.fs, state.gs) = (ds, fs, gs);
    match mode {
        Mode::Real => {
            (state.cr0, state.efer) = (0x10, 0);
            state.idtr = Table {
                base: 0,
                limit: 0x3ff,
            };
            for vector in 0..=255 {
                let handler = REAL_HANDLERS + vector;
                guest.memory().write(handler, &[0xf4]);
                let handler = (handler as u32).to_le_bytes();
                guest.memory().write(4 * vector, &handler);
            }
        }
        Mode::Virtual8086 => {
            state.efer = 0;
            state.rflags |= flags::VM | flags::IOPL;
            let memory = guest.memory();
            let monitor = u64::from(MONITOR_CODE);
            memory.write64(GDT + monitor, 0x00cf_9b00_0000_ffff);
            memory.write(TSS + 8, &16u32.to_le_bytes());
            for vector in 0..=255 {
                let handler = HANDLERS + 16 * vector;
                let gate = handler & 0xffff | monitor << 16 | 0x8e << 40 | (handler >> 16) << 48;
                memory.write64(IDT + 8 * vector, gate);
            }
        }
        // Code segments of long mode: exceptions go to 64-bit code.
        Mode::Protected16 | Mode::Protected32 => {
            for (selector, base) in [(16, FIRST), (24, FIRST + 0x1_0000)] {
                let descriptor = 0x0040_9300_0000_ffff | base << 16;
                guest.memory().write64(GDT + selector, descriptor);
            }
        }
    }
}
