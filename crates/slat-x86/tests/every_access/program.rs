//! Random code in which almost every instruction has a memory operand in a page of its own, or in two: a loop, with or
//! without branches over parts of it.

use crate::common::*;

/// The address of the operands. In each iteration, each operand has a slot of two pages.
pub const AREA: u64 = 0x10_0000;
const SLOT: u64 = 0x2000;
/// The number of rounds of the loop.
pub const ITERATIONS: u64 = 2;
/// The code page to which indirect jumps lead.
const OTHER: u64 = CODE + 0x1000;
/// The value of R12, which is an index register.
const INDEX: u64 = 8;
const FS_BASE: u64 = 0x40;
/// The registers in which instructions compute: all except RSP, RBP (which points to the slots), R12, R14 (which is
/// added to RBP) and R15 (the number of rounds).
const FREE: &[u8] = &[0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 13];

/// The register field of an instruction's ModR/M byte.
#[derive(Clone, Copy)]
enum Field {
    /// Any general register.
    Any,
    /// The number of any of the first eight XMM, MMX or x87 registers.
    Low,
    /// A part of the opcode.
    Is(u8),
    /// The number of one of the eight operations of an opcode.
    Operation,
}
use Field::*;

/// An instruction with a memory operand: legacy prefixes, REX.W, opcode, register field, bytes of the immediate, and
/// whether the operand has to be aligned.
type Form = (&'static [u8], bool, &'static [u8], Field, usize, bool);

#[rustfmt::skip]
const FORMS: &[Form] = &[
    // MOV and similar instructions.
    (b"", true, b"\x8b", Any, 0, false), (b"", false, b"\x8b", Any, 0, false), (b"\x66", false, b"\x8b", Any, 0, false),
    (b"", false, b"\x8a", Any, 0, false), (b"", true, b"\x89", Any, 0, false), (b"", false, b"\x89", Any, 0, false),
    (b"\x66", false, b"\x89", Any, 0, false), (b"", false, b"\x88", Any, 0, false), (b"", true, b"\xc7", Is(0), 4, false),
    (b"", false, b"\xc6", Is(0), 1, false), (b"", true, b"\x0f\xb6", Any, 0, false), (b"", false, b"\x0f\xb7", Any, 0, false),
    (b"", true, b"\x0f\xbe", Any, 0, false), (b"", true, b"\x63", Any, 0, false), (b"", true, b"\x0f\xc3", Any, 0, false),
    // Arithmetic.
    (b"", true, b"\x01", Any, 0, false), (b"", true, b"\x03", Any, 0, false), (b"", false, b"\x29", Any, 0, false),
    (b"", false, b"\x2b", Any, 0, false), (b"\x66", false, b"\x21", Any, 0, false), (b"", false, b"\x08", Any, 0, false),
    (b"", true, b"\x31", Any, 0, false), (b"", true, b"\x11", Any, 0, false), (b"", false, b"\x13", Any, 0, false),
    (b"", true, b"\x19", Any, 0, false), (b"", true, b"\x39", Any, 0, false), (b"", false, b"\x3a", Any, 0, false),
    (b"", true, b"\x85", Any, 0, false), (b"", true, b"\x81", Operation, 4, false), (b"", false, b"\x83", Operation, 1, false),
    (b"", false, b"\x80", Operation, 1, false), (b"", true, b"\xff", Is(0), 0, false), (b"", false, b"\xff", Is(1), 0, false),
    (b"", false, b"\xfe", Is(0), 0, false), (b"", true, b"\xf7", Is(3), 0, false), (b"", false, b"\xf7", Is(2), 0, false),
    (b"", true, b"\xf7", Is(0), 4, false), (b"", true, b"\xf7", Is(4), 0, false), (b"", false, b"\xf7", Is(5), 0, false),
    (b"", true, b"\x0f\xaf", Any, 0, false), (b"", false, b"\x69", Any, 4, false), (b"", true, b"\xc1", Operation, 1, false),
    (b"", false, b"\xd3", Operation, 0, false), (b"", false, b"\xd0", Is(4), 0, false), (b"", true, b"\x0f\xa4", Any, 1, false),
    (b"", false, b"\x0f\x92", Is(0), 0, false), (b"", false, b"\x0f\x9f", Is(0), 0, false), (b"", true, b"\x0f\x44", Any, 0, false),
    (b"", false, b"\x0f\x4c", Any, 0, false), (b"", true, b"\x0f\xba", Is(4), 1, false), (b"", false, b"\x0f\xba", Is(7), 1, false),
    (b"\xf3", true, b"\x0f\xb8", Any, 0, false),
    // Atomic operations, and the same operations without LOCK.
    (b"", true, b"\x87", Any, 0, false), (b"\xf0", true, b"\x01", Any, 0, false), (b"\xf0", false, b"\xff", Is(1), 0, false),
    (b"\xf0", true, b"\x0f\xc1", Any, 0, false), (b"\xf0", true, b"\x0f\xb1", Any, 0, false), (b"", false, b"\x0f\xb1", Any, 0, false),
    (b"", false, b"\x0f\xc1", Any, 0, false), (b"\xf0", false, b"\x0f\xba", Is(5), 1, false), (b"", false, b"\x0f\xc7", Is(1), 0, false),
    (b"\xf0", true, b"\x0f\xc7", Is(1), 0, true),
    // SSE and MMX.
    (b"", false, b"\x0f\x10", Low, 0, false), (b"", false, b"\x0f\x11", Low, 0, false), (b"", false, b"\x0f\x28", Low, 0, true),
    (b"", false, b"\x0f\x29", Low, 0, true), (b"\xf3", false, b"\x0f\x10", Low, 0, false), (b"\xf2", false, b"\x0f\x11", Low, 0, false),
    (b"\x66", false, b"\x0f\xd6", Low, 0, false), (b"\x66", false, b"\x0f\x6e", Low, 0, false), (b"\x66", false, b"\x0f\xfe", Low, 0, true),
    (b"", false, b"\x0f\x58", Low, 0, true), (b"\xf2", false, b"\x0f\x58", Low, 0, false), (b"\xf3", false, b"\x0f\x59", Low, 0, false),
    (b"\xf2", false, b"\x0f\x2a", Low, 0, false), (b"\xf2", true, b"\x0f\x2c", Any, 0, false), (b"\x66", false, b"\x0f\x2e", Low, 0, false),
    (b"\x66", false, b"\x0f\xe7", Low, 0, true), (b"\x66", false, b"\x0f\x70", Low, 1, true), (b"\x66", false, b"\x0f\xc4", Low, 1, false),
    (b"", false, b"\x0f\x13", Low, 0, false), (b"", false, b"\x0f\x16", Low, 0, false), (b"", false, b"\x0f\x6f", Low, 0, false),
    (b"", false, b"\x0f\x7f", Low, 0, false), (b"", false, b"\x0f\xfe", Low, 0, false),
    // x87.
    (b"", false, b"\xd9", Is(0), 0, false), (b"", false, b"\xdd", Is(0), 0, false), (b"", false, b"\xdb", Is(5), 0, false),
    (b"", false, b"\xdd", Is(3), 0, false), (b"", false, b"\xdb", Is(7), 0, false), (b"", false, b"\xdf", Is(5), 0, false),
    (b"", false, b"\xdf", Is(7), 0, false), (b"", false, b"\xd8", Operation, 0, false), (b"", false, b"\xd9", Is(7), 0, false),
    (b"", false, b"\xdd", Is(7), 0, false), (b"", false, b"\xdd", Is(6), 0, false), (b"", false, b"\x0f\xae", Is(0), 0, true),
    (b"", false, b"\x0f\xae", Is(3), 0, false),
];

/// String instructions, with and without REX.W.
const STRINGS: &[u8] = b"\xa4\xa5\xaa\xab\xac\xad\xae\xaf\xa6\xa7";

pub struct Program {
    pub code: Vec<u8>,
    /// The bytes of the page [`OTHER`].
    other: Vec<u8>,
    /// The operands of indirect jumps and of returns: addresses and values.
    targets: Vec<(u64, u64)>,
    /// The number of slots of an iteration.
    slots: u64,
}

impl Program {
    /// Makes a program. With `is_single`, the program is a single block. The compiler handles such a loop in another
    /// way: it keeps registers in values from turn to turn.
    pub fn random(random: &mut Random, is_single: bool) -> Self {
        let mut program = Self {
            code: vec![],
            other: vec![],
            targets: vec![],
            slots: 0,
        };
        let slots = match is_single {
            true => 1 + random.below(4),
            // With few blocks the loop is a single path.
            false => 2 + random.below(16),
        };
        for _ in 0..slots {
            program.computes(random);
            if is_single {
                program.operand(random);
                continue;
            }
            let skipped = random.below(4) == 0;
            let from = skipped.then(|| program.jump(&[0x0f, 0x80 + random.below(16) as u8]));
            program.one(random);
            if let Some(from) = from {
                program.land(from);
            }
        }
        // add rbp,r14; dec r15; jnz to the beginning; hlt
        program.bytes(b"\x4c\x01\xf5\x49\xff\xcf");
        let from = program.jump(b"\x0f\x85");
        let back = -(program.code.len() as i32);
        program.code[from..from + 4].copy_from_slice(&back.to_le_bytes());
        program.bytes(b"\xf4");
        program
    }

    /// Returns the address after the HLT at the end.
    pub fn end(&self) -> u64 {
        CODE + self.code.len() as u64
    }

    /// Returns the number of bytes of all slots.
    pub fn area(&self) -> u64 {
        self.slots * SLOT * ITERATIONS
    }

    /// Writes code and operands.
    pub fn load(&self, memory: &Memory, operands: &[u8]) {
        memory.write(CODE, &self.code);
        memory.write(OTHER, &self.other);
        self.reset(memory, operands);
    }

    /// Writes the operands.
    pub fn reset(&self, memory: &Memory, operands: &[u8]) {
        memory.write(AREA, operands);
        for stack in [STACK, IST_STACK] {
            memory.write(stack - 0x100, &[0; 0x100]);
        }
        for (at, target) in &self.targets {
            for iteration in 0..ITERATIONS {
                memory.write64(at + iteration * self.stride(), *target);
            }
        }
    }

    fn stride(&self) -> u64 {
        self.slots * SLOT
    }

    /// Makes a guest start at the beginning, always with the same registers. `rounds` is the number of turns of the
    /// loop, all on the first iteration's slots.
    pub fn start(&self, state: &mut slat_x86::State, rounds: Option<u64>) {
        let mut random = Random(5);
        state.gpr = std::array::from_fn(|_| random.next());
        state.xmm = std::array::from_fn(|_| u128::from(random.next()) << 64 | 0x3ff0 << 48);
        (state.fcw, state.fsw, state.ftw) = (0x37f, 0, 0);
        (state.fip, state.fdp, state.fop) = (0, 0, 0);
        state.st = Default::default();
        state.mxcsr = 0x1f80;
        state.rflags = 2;
        state.rip = CODE;
        (state.cr2, state.fs.base) = (0, FS_BASE);
        state.ss = state.ds;
        state.gpr[RSP] = STACK;
        state.gpr[RBP] = AREA;
        state.gpr[12] = INDEX;
        state.gpr[14] = if rounds.is_some() { 0 } else { self.stride() };
        state.gpr[15] = rounds.unwrap_or(ITERATIONS);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.code.extend_from_slice(bytes);
    }

    /// Appends a jump whose offset is filled in later. Returns the position of the offset.
    fn jump(&mut self, opcode: &[u8]) -> usize {
        self.bytes(opcode);
        self.bytes(&[0; 4]);
        self.code.len() - 4
    }

    /// Makes the jump whose offset is at `from` lead to the current position.
    fn land(&mut self, from: usize) {
        let offset = (self.code.len() - from - 4) as u32;
        self.code[from..from + 4].copy_from_slice(&offset.to_le_bytes());
    }

    /// Returns the displacement from RBP of an operand in a new slot.
    fn slot(&mut self, offset: u64) -> u64 {
        self.slots += 1;
        (self.slots - 1) * SLOT + offset
    }

    /// Returns an offset in a slot. Often the operand there crosses into the second page.
    fn offset(random: &mut Random, aligned: bool) -> u64 {
        match (aligned, random.below(3)) {
            (true, _) => 0x10 * random.below(0x80),
            (_, 0) => 0xff8 + random.below(8),
            _ => 0x40 + random.below(0xe00),
        }
    }

    /// Appends lea r,[rbp+disp].
    fn lea(&mut self, r: u8, disp: u64) {
        self.bytes(&[0x48, 0x8d, 0x85 | r << 3]);
        self.bytes(&(disp as u32).to_le_bytes());
    }

    /// Makes RSP point into a new slot.
    fn stack(&mut self, random: &mut Random) -> u64 {
        let slot = self.slot(0x100 + Self::offset(random, false));
        self.lea(4, slot);
        slot
    }

    /// Appends a few instructions on registers, so that compiled code has changed registers to write back.
    fn computes(&mut self, random: &mut Random) {
        for _ in 0..random.below(4) {
            let (r, s) = (random.pick(FREE), random.pick(FREE));
            let rex = 0x48 | (s >> 3) << 2 | r >> 3;
            let operands = 0xc0 | (s & 7) << 3 | r & 7;
            match random.below(4) {
                0 => self.bytes(&[rex & 0x4d, 0xff, random.pick(&[0xc0, 0xc8]) | r & 7]),
                1 => {
                    let count = 1 + random.below(31) as u8;
                    self.bytes(&[rex & 0x49, 0xc1, random.pick(&[0xe0, 0xe8]) | r & 7, count]);
                }
                _ => self.bytes(&[
                    rex,
                    random.pick(b"\x01\x11\x19\x21\x29\x31\x39\x85\x89"),
                    operands,
                ]),
            }
        }
    }

    /// Appends an instruction of [`FORMS`] on the operand at `disp` from RBP.
    fn form(&mut self, random: &mut Random, form: &Form, mut disp: u64) {
        let &(prefixes, wide, opcode, field, immediate, _) = form;
        let r = match field {
            Any => random.pick(FREE),
            Low => random.below(8) as u8,
            Is(number) => number,
            Operation => random.below(8) as u8,
        };
        let (mut modrm, mut sib, mut x) = (0x85 | (r & 7) << 3, None, 0);
        match random.below(8) {
            0 | 1 => {
                let scale = random.below(4) as u8;
                disp = disp.wrapping_sub(INDEX << scale);
                (modrm, x) = (modrm & !1, 2);
                // The base is RBP, and the index is R12.
                sib = Some(scale << 6 | 4 << 3 | 5);
            }
            2 => {
                disp = disp.wrapping_sub(FS_BASE);
                self.bytes(b"\x64");
            }
            3 => self.bytes(b"\x67"),
            _ => {}
        }
        self.bytes(prefixes);
        self.bytes(&[0x40 | u8::from(wide) << 3 | (r >> 3) << 2 | x]);
        self.bytes(opcode);
        self.bytes(&[modrm]);
        self.code.extend(sib);
        self.bytes(&(disp as u32).to_le_bytes());
        for _ in 0..immediate {
            // The immediate is not 0, because a shift by 0 does nothing.
            self.bytes(&[1 + random.below(100) as u8]);
        }
    }

    /// Appends instructions with memory operands.
    fn one(&mut self, random: &mut Random) {
        match random.below(18) {
            10 | 11 => self.function(random),
            0 => {
                // push r
                self.stack(random);
                self.bytes(&[0x50 + random.pick(&[0, 1, 2, 3, 6, 7])]);
            }
            1 => {
                // pop r
                self.stack(random);
                self.bytes(&[0x58 + random.pick(&[0, 1, 2, 3, 6, 7])]);
            }
            2 => {
                // push [m] / pop [m]
                self.stack(random);
                let (opcode, number) = random.pick(&[(0xff, 6), (0x8f, 0)]);
                let disp = Self::offset(random, false);
                let disp = self.slot(disp);
                self.bytes(&[opcode, 0x85 | number << 3]);
                self.bytes(&(disp as u32).to_le_bytes());
            }
            3 => {
                // call over nothing; pushfq
                self.stack(random);
                match random.below(2) {
                    0 => self.bytes(b"\xe8\0\0\0\0"),
                    _ => self.bytes(b"\x9c"),
                }
            }
            4 => {
                // mov rdi,rbp; lea rbp,slot; leave; mov rbp,rdi, or ENTER
                self.bytes(b"\x48\x89\xef");
                if random.below(2) == 0 {
                    let offset = Self::offset(random, false);
                    let disp = self.slot(offset);
                    self.lea(5, disp);
                    self.bytes(b"\xc9");
                } else {
                    self.stack(random);
                    self.bytes(b"\xc8\x20\0\0");
                }
                self.bytes(b"\x48\x89\xfd");
            }
            5 => {
                // A `ret` that leads to the next instruction, directly or by the other page.
                let slot = self.stack(random);
                self.bytes(b"\xc3");
                self.leads_on(random, slot);
            }
            6 => {
                // jmp [m], call [m]
                let number = random.pick(&[4, 2]);
                if number == 2 {
                    self.stack(random);
                }
                let offset = Self::offset(random, false);
                let disp = self.slot(offset);
                self.bytes(&[0xff, 0x85 | number << 3]);
                self.bytes(&(disp as u32).to_le_bytes());
                self.leads_on(random, disp);
            }
            7 | 8 => self.string(random),
            9 => {
                // maskmovdqu xmm,xmm
                let offset = Self::offset(random, false);
                let disp = self.slot(offset);
                self.lea(7, disp);
                self.bytes(&[0x66, 0x0f, 0xf7, 0xc0 | random.below(64) as u8]);
            }
            _ => self.operand(random),
        }
    }

    /// Appends a call of a function. The function returns to the instruction after the call, or in every other round
    /// to the one after that.
    fn function(&mut self, random: &mut Random) {
        self.stack(random);
        let call = self.jump(b"\xe8");
        let back = self.code.len();
        // inc r13
        self.bytes(b"\x49\xff\xc5");
        let over = self.jump(b"\xe9");
        self.land(call);
        self.computes(random);
        self.operand(random);
        if random.below(2) == 0 {
            // test r15b,1; jz after the next instruction; add qword [rsp],n
            self.bytes(b"\x41\xf6\xc7\x01\x74\x08\x48\x81\x04\x24");
            let after = (self.code.len() + 5 - back) as u32;
            self.bytes(&after.to_le_bytes());
        }
        self.bytes(b"\xc3");
        self.land(over);
    }

    /// Appends an instruction of [`FORMS`] with a new operand.
    fn operand(&mut self, random: &mut Random) {
        let form = &FORMS[random.below(FORMS.len() as u64) as usize];
        let offset = Self::offset(random, form.5);
        let disp = self.slot(offset);
        self.form(random, form, disp);
    }

    /// Makes the indirect jump that was just appended lead to this place, directly or by the other page. The jump's
    /// operand is at `disp`.
    fn leads_on(&mut self, random: &mut Random, disp: u64) {
        let here = CODE + self.code.len() as u64;
        let mut target = here;
        if random.below(2) == 0 {
            target = OTHER + self.other.len() as u64;
            self.other.push(0xe9);
            let offset = here.wrapping_sub(target + 5) as u32;
            self.other.extend(offset.to_le_bytes());
        }
        self.targets.push((AREA + disp, target));
    }

    fn string(&mut self, random: &mut Random) {
        for r in [6, 7] {
            let offset = match random.below(3) {
                0 => 0xff0 + random.below(16),
                1 => 0xfc0,
                _ => 0x200 + random.below(0xc00),
            };
            let disp = self.slot(offset);
            self.lea(r, disp);
        }
        // mov ecx,n
        self.bytes(&[0xb9, random.below(20) as u8, 0, 0, 0]);
        let down = random.below(6) == 0;
        if down {
            self.bytes(b"\xfd");
        }
        match random.below(4) {
            0 => {}
            1 => self.bytes(b"\xf2"),
            _ => self.bytes(b"\xf3"),
        }
        self.bytes(&[0x40 | (random.below(2) as u8) << 3, random.pick(STRINGS)]);
        if down {
            self.bytes(b"\xfc");
        }
    }
}
