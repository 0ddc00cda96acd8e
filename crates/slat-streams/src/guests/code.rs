//! Makes random instructions. Kinds that are hard to execute correctly are frequent.

use super::layout::{CODE, DATA, LOGGED, linear};
use crate::memory::PAGE;
use slat_model::Rng;

/// System instructions: descriptor tables, control and debug registers, MSRs, fast calls, invalidations. If an
/// instruction needs a ModRM byte, the random byte that follows is used as the ModRM byte.
const SYSTEM: [&[u8]; 26] = [
    &[0x0f, 0x00],
    &[0x0f, 0x01],
    &[0x0f, 0x01, 0xc1],
    &[0x0f, 0x01, 0xf8],
    &[0x0f, 0x02],
    &[0x0f, 0x03],
    &[0x0f, 0x05],
    &[0x0f, 0x06],
    &[0x0f, 0x07],
    &[0x0f, 0x08],
    &[0x0f, 0x09],
    &[0x0f, 0x20],
    &[0x0f, 0x21],
    &[0x0f, 0x22],
    &[0x0f, 0x23],
    &[0x0f, 0x30],
    &[0x0f, 0x31],
    &[0x0f, 0x32],
    &[0x0f, 0x34],
    &[0x0f, 0x35],
    &[0x0f, 0xa2],
    &[0x0f, 0xae],
    &[0x0f, 0xc7],
    &[0x9b],
    &[0xf4],
    &[0x0f, 0x0b],
];
const STRINGS: [u8; 14] = [
    0xa4, 0xa5, 0xa6, 0xa7, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf, 0x6c, 0x6d, 0x6e, 0x6f,
];
/// Instructions that read, change and write a memory operand.
const LOCKABLE: [&[u8]; 16] = [
    &[0x00],
    &[0x01],
    &[0x11],
    &[0x29],
    &[0x31],
    &[0x80],
    &[0x81],
    &[0x83],
    &[0x87],
    &[0xf7],
    &[0xff],
    &[0x0f, 0xab],
    &[0x0f, 0xb1],
    &[0x0f, 0xba],
    &[0x0f, 0xc1],
    &[0x0f, 0xc7],
];
/// Far transfers, interrupts, segment registers, stacks, flags.
const TRANSFERS: [&[u8]; 36] = [
    &[0x9a],
    &[0xea],
    &[0xca],
    &[0xcb],
    &[0xcc],
    &[0xcd],
    &[0xce],
    &[0xcf],
    &[0x48, 0xcf],
    &[0xf1],
    &[0xff],
    &[0x8e],
    &[0x8c],
    &[0xc4],
    &[0xc5],
    &[0x0f, 0xb2],
    &[0x0f, 0xb4],
    &[0x0f, 0xb5],
    &[0x06],
    &[0x07],
    &[0x0f, 0xa1],
    &[0x0f, 0xa9],
    &[0x17],
    &[0x60],
    &[0x61],
    &[0x8f],
    &[0xc8],
    &[0xc9],
    &[0x9c],
    &[0x9d],
    &[0xfa],
    &[0xfb],
    &[0xc2],
    &[0xc3],
    &[0xe8],
    &[0x63],
];
const PREFIXES: [u8; 11] = [
    0x66, 0x67, 0xf2, 0xf3, 0xf0, 0x2e, 0x36, 0x3e, 0x26, 0x64, 0x65,
];

fn byte(rng: &mut Rng) -> u8 {
    rng.below(256) as u8
}

/// Appends a ModRM byte, and the bytes that this byte requires in 32-bit or 64-bit addressing. Then appends a few
/// bytes, which the processor takes as an immediate operand or as the next instruction.
fn operands(rng: &mut Rng, code: &mut Vec<u8>) {
    let modrm = byte(rng);
    code.push(modrm);
    let (kind, rm) = (modrm >> 6, modrm & 7);
    if kind != 3 && rm == 4 {
        code.push(byte(rng));
    }
    let displacement = linear(rng).to_le_bytes();
    match kind {
        1 => code.push(displacement[0]),
        2 => code.extend(&displacement[..4]),
        0 if rm == 5 => code.extend(&displacement[..4]),
        _ => {}
    }
    for _ in 0..rng.pick(&[0, 0, 1, 4]) {
        code.push(byte(rng));
    }
}

/// Appends one instruction, or bytes that are not a valid instruction.
fn instruction(rng: &mut Rng, code: &mut Vec<u8>) {
    for _ in 0..rng.pick(&[0, 0, 0, 1, 1, 2]) {
        code.push(rng.pick(&PREFIXES));
    }
    let kind = rng.below(13);
    if kind < 8 && rng.one_in(3) {
        code.push(0x40 | byte(rng) & 15);
    }
    match kind {
        0 => code.extend(rng.pick(&SYSTEM)),
        1 | 2 => {
            if rng.one_in(2) {
                code.push(rng.pick(&[0xf2, 0xf3]));
            }
            return code.push(rng.pick(&STRINGS));
        }
        3 => {
            code.push(0xf0);
            code.extend(rng.pick(&LOCKABLE));
        }
        4 => code.extend(rng.pick(&TRANSFERS)),
        5 => code.push(0xd8 | byte(rng) & 7),
        6 => code.extend([0x0f, byte(rng)]),
        7 => code.extend([0x0f, rng.pick(&[0x38, 0x3a]), byte(rng)]),
        8 => return (0..rng.below(4)).for_each(|_| code.push(byte(rng))),
        // A near jump or call to any address nearby.
        9 => {
            code.push(rng.pick(&[0xeb, 0x74, 0x75, 0x72, 0xe2, 0xe3, 0xe0]));
            return code.push(byte(rng));
        }
        // mov rbx, address; inc byte [rbx]; and sometimes a jmp to the inc
        11 => {
            code.extend([0x48, 0xbb]);
            code.extend(&linear(rng).to_le_bytes());
            let loops = rng.one_in(2);
            return code.extend(if loops {
                &[0xfe, 0x03, 0xeb, 0xfc][..]
            } else {
                &[0xfe, 0x03]
            });
        }
        // mov r, address: the address is interesting, and may be used by a later operand.
        10 => {
            let long = rng.one_in(2);
            if long {
                code.push(0x48);
            }
            code.push(0xb8 | byte(rng) & 7);
            let value = linear(rng).to_le_bytes();
            return code.extend(&value[..if long { 8 } else { 4 }]);
        }
        _ => code.push(byte(rng)),
    }
    operands(rng, code);
}

/// The opcodes of ordinary instructions with a ModRM byte, each with the size of its immediate operand.
const ORDINARY: [(&[u8], usize); 44] = [
    (&[0x01], 0),
    (&[0x03], 0),
    (&[0x09], 0),
    (&[0x10], 0),
    (&[0x11], 0),
    (&[0x13], 0),
    (&[0x19], 0),
    (&[0x1b], 0),
    (&[0x21], 0),
    (&[0x2b], 0),
    (&[0x31], 0),
    (&[0x38], 0),
    (&[0x39], 0),
    (&[0x3b], 0),
    (&[0x63], 0),
    (&[0x69], 4),
    (&[0x6b], 1),
    (&[0x80], 1),
    (&[0x81], 4),
    (&[0x83], 1),
    (&[0x85], 0),
    (&[0x87], 0),
    (&[0x88], 0),
    (&[0x89], 0),
    (&[0x8a], 0),
    (&[0x8b], 0),
    (&[0x8d], 0),
    (&[0xc0], 1),
    (&[0xc1], 1),
    (&[0xd1], 0),
    (&[0xd3], 0),
    (&[0xf6], 1),
    (&[0xf7], 4),
    (&[0xfe], 0),
    (&[0xff], 0),
    (&[0x0f, 0xa3], 0),
    (&[0x0f, 0xa4], 1),
    (&[0x0f, 0xaf], 0),
    (&[0x0f, 0xb1], 0),
    (&[0x0f, 0xb6], 0),
    (&[0x0f, 0xb7], 0),
    (&[0x0f, 0xbe], 0),
    (&[0x0f, 0xbf], 0),
    (&[0x0f, 0xc1], 0),
];

/// Appends an instruction of 64-bit code that is frequent in programs, and rarely faults.
fn ordinary(rng: &mut Rng, code: &mut Vec<u8>) {
    match rng.below(16) {
        // push; pop
        0 => return code.push(0x50 | byte(rng) & 7),
        1 => return code.push(0x58 | byte(rng) & 7),
        // pushfq; a short jump forwards
        2 => return code.push(0x9c),
        3 => return code.extend([0x70 | byte(rng) & 15, rng.below(9) as u8]),
        _ => {}
    }
    if rng.one_in(8) {
        code.push(0x66);
    }
    if rng.one_in(2) {
        // The prefix does not select the registers R12 to R15, because the code uses R15 as its counter.
        code.push(0x48 | byte(rng) & 0xa);
    }
    let immediate = match rng.below(4) {
        // SETcc, CMOVcc
        0 => {
            code.extend([0x0f, rng.pick(&[0x40, 0x90]) | byte(rng) & 15]);
            0
        }
        _ => {
            let (opcode, immediate) = rng.pick(&ORDINARY);
            code.extend(opcode);
            immediate
        }
    };
    let modrm = byte(rng);
    match rng.below(3) {
        // The operand is a word of existing memory, at an absolute address.
        0 => {
            code.extend([modrm & 0x38 | 4, 0x25]);
            let base = rng.pick(&[DATA, DATA, LOGGED.gpa, CODE + 0x800]);
            code.extend(&((base + rng.below(0x1000)) as u32).to_le_bytes());
        }
        _ => code.push(modrm | 0xc0),
    }
    code.extend((0..immediate).map(|_| byte(rng)));
}

/// The way in which a generated piece of guest code ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The code ends with a jump to its beginning.
    Repeats,
    /// The code decrements R15 and jumps to its beginning, until R15 is 0; then it executes HLT. Only in 64-bit code.
    Counts,
}

/// Returns code. Sometimes the code begins shortly before the end of a page, so that an instruction crosses the page
/// boundary.
pub fn code(rng: &mut Rng, end: End) -> Vec<u8> {
    let mut code = Vec::new();
    if rng.one_in(4) {
        // A jump skips the zeroes before the code, because zeroes are instructions, too.
        let skipped = PAGE - 5 - 1 - rng.below(12) as usize;
        code.push(0xe9);
        code.extend(&(skipped as u32).to_le_bytes());
        code.resize(5 + skipped, 0);
    }
    let most = if end == End::Counts { 60 } else { 20 };
    for _ in 0..1 + rng.below(most) {
        match end == End::Counts && !rng.one_in(4) {
            true => ordinary(rng, &mut code),
            false => instruction(rng, &mut code),
        }
    }
    // dec r15; jne to the beginning. Or only jmp to the beginning.
    let jump: &[u8] = match end {
        End::Repeats => &[0xe9],
        End::Counts => &[0x49, 0xff, 0xcf, 0x0f, 0x85],
    };
    code.extend(jump);
    let back = -(code.len() as i64 + 4);
    code.extend(&back.to_le_bytes()[..4]);
    if end == End::Counts {
        // hlt; jmp to it
        code.extend([0xf4, 0xeb, 0xfd]);
    }
    code
}
