//! Random programs for code segments: instructions, loops, calls, strings, the stack, loads of segment registers.

use crate::common::Random;
use crate::modes::paragraph;
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory};
use iced_x86::{Mnemonic, OpAccess, Register};

/// The approximate size of a program in bytes.
const LENGTH: usize = 120;

/// A program that is being made.
struct Program<'a> {
    random: &'a mut Random,
    bits: u32,
    /// The address of the program's first instruction, and the selector of its segment if that is a paragraph number.
    ip: u64,
    selector: Option<u16>,
    code: Vec<u8>,
    factory: InstructionInfoFactory,
}

/// Returns a program with a HLT at its end.
pub fn program(random: &mut Random, bits: u32, ip: u64, selector: Option<u16>) -> Vec<u8> {
    let mut program = Program {
        random,
        bits,
        ip,
        selector,
        code: Vec::new(),
        factory: InstructionInfoFactory::new(),
    };
    while program.code.len() < LENGTH {
        program.part(2);
    }
    program.code.extend([0xf4; 16]);
    program.code
}

/// Whether an instruction always has the same effect, ends soon, and continues with the next one.
fn is_usable(insn: &Instruction) -> bool {
    use Mnemonic::*;
    let registers = (0..insn.op_count()).map(|k| insn.op_register(k));
    let mut registers = registers.filter(|r| *r != Register::None);
    let is_known =
        |r: Register| r.is_gpr() || r.is_xmm() || r.is_mm() || r.is_st() || r.is_segment_register();
    insn.flow_control() == FlowControl::Next
        && !insn.is_invalid()
        && registers.all(is_known)
        && !insn.is_privileged()
        && !insn.has_rep_prefix()
        && !insn.has_repne_prefix()
        && !matches!(
            insn.mnemonic(),
            Rdtsc | Rdtscp | Rdrand | Rdseed | Cpuid | Rdpmc | Xgetbv | Rdpid | Popf | Popfd
        )
}

impl Program<'_> {
    fn emit(&mut self, bytes: &[u8]) {
        self.code.extend_from_slice(bytes);
    }

    /// Returns the address of the next instruction.
    fn here(&self) -> u64 {
        self.ip + self.code.len() as u64
    }

    /// In one of four cases appends an operand-size prefix or an address-size prefix. Returns the resulting size for
    /// the next instruction, in bytes.
    fn sized(&mut self, prefix: u8) -> usize {
        let other = self.random.below(4) == 0;
        if other {
            self.emit(&[prefix]);
        }
        if other == (self.bits == 16) { 4 } else { 2 }
    }

    fn number(&mut self, value: u64, bytes: usize) {
        self.emit(&value.to_le_bytes()[..bytes]);
    }

    /// Appends a part of the program, in which others may be nested up to `depth` times. Parts in loops and functions
    /// do not change CX and SP.
    fn part(&mut self, depth: u32) {
        match self.random.below(12) {
            0 if depth > 0 => self.counted(Self::repeat),
            1 if depth > 0 => self.call(depth - 1),
            2 => self.counted(Self::string),
            3 => self.load_segment(),
            4 | 5 => self.balanced(depth < 2),
            6 if depth == 2 => self.unbalanced(),
            7 => self.jump(),
            _ => self.instruction(depth < 2),
        }
    }

    fn parts(&mut self, depth: u32) {
        for _ in 0..1 + self.random.below(3) {
            self.part(depth);
        }
    }

    /// Appends a random instruction.
    fn instruction(&mut self, is_inside: bool) {
        loop {
            let mut bytes = [0; 16];
            for part in bytes.chunks_mut(8) {
                part.copy_from_slice(&self.random.next().to_le_bytes());
            }
            match self.random.below(8) {
                0 => bytes[0] = 0x0f,
                1 => bytes[0] = self.random.pick(&[0x66, 0x67, 0x66, 0x67, 0xf0]),
                2 => bytes[0] = self.random.pick(&[0x26, 0x2e, 0x36, 0x3e, 0x64, 0x65]),
                // Arithmetic and moves of a register and memory.
                3 => bytes[0] = self.random.below(0x40) as u8 & !4,
                4 => bytes[0] = 0x88 | bytes[0] & 3,
                5 => (bytes[0], bytes[1]) = (0x66, 0x67),
                // LES and LDS.
                6 if self.selector.is_some() && self.random.below(2) == 0 => {
                    (bytes[0], bytes[1]) = (0xc4 | bytes[0] & 1, bytes[1] & 0x3f);
                }
                _ => {}
            }
            let mut decoder =
                Decoder::with_ip(self.bits, &bytes, self.here(), DecoderOptions::NONE);
            let insn = decoder.decode();
            if is_usable(&insn) && !(is_inside && self.disturbs(&insn)) {
                let constants = decoder.get_constant_offsets(&insn);
                if constants.displacement_size() == 4 {
                    // The address is kept within 64 KiB, so that some segment contains it.
                    bytes[constants.displacement_offset() + 2..][..2].fill(0);
                }
                self.emit(&bytes[..insn.len()]);
                return;
            }
        }
    }

    /// Whether an instruction changes CX or SP, or loads SS.
    fn disturbs(&mut self, insn: &Instruction) -> bool {
        let used = self.factory.info(insn).used_registers().iter();
        let mut written =
            used.filter(|used| !matches!(used.access(), OpAccess::Read | OpAccess::CondRead));
        written.any(|used| {
            let register = used.register().full_register();
            matches!(register, Register::RCX | Register::RSP | Register::SS)
        })
    }

    /// Appends the code that `counts` appends, with a small number in ECX. CX is restored afterwards.
    fn counted(&mut self, counts: impl FnOnce(&mut Self)) {
        // PUSH CX, MOV ECX.
        self.emit(&[0x51]);
        if self.bits == 16 {
            self.emit(&[0x66]);
        }
        self.emit(&[0xb9]);
        let count = 1 + self.random.below(20);
        self.number(count, 4);
        counts(self);
        self.emit(&[0x59]);
    }

    /// Appends a loop.
    fn repeat(&mut self) {
        let start = self.code.len();
        self.parts(0);
        // LOOPNE, LOOPE, LOOP, or DEC CX and JNZ.
        match self.random.below(6) {
            kind @ 0..=2 => {
                self.sized(0x67);
                self.emit(&[0xe0 + kind as u8]);
            }
            _ => self.emit(&[0x49, 0x75]),
        }
        let back = start as i64 - self.code.len() as i64 - 1;
        self.emit(&[back as u8]);
    }

    /// Appends a function, with a jump over it, and a call of it.
    fn call(&mut self, depth: u32) {
        let kind = self.random.below(4);
        if let (3, Some(selector)) = (kind, self.selector) {
            return self.far_call(depth, selector);
        }
        if kind == 2 && self.here() < 0xff00 && self.bits == 16 {
            // Calls the function at the end of the segment, which is reached by wrapping around the beginning.
            let disp = 0xffe0u64.wrapping_sub(self.here() + 3);
            self.emit(&[0xe8]);
            return self.number(disp, 2);
        }
        let bytes = match kind {
            // Calls by a register: MOV AX, CALL AX.
            1 => {
                let bytes = if self.bits == 16 { 2 } else { 4 };
                self.emit(&[0xb8]);
                let to = self.here() + bytes as u64 + 4;
                self.number(to, bytes);
                self.emit(&[0xff, 0xd0]);
                bytes
            }
            _ => {
                let bytes = self.sized(0x66);
                self.emit(&[0xe8]);
                self.number(2, bytes);
                bytes
            }
        };
        let over = self.jump_over();
        self.parts(depth);
        if bytes == 4 && self.bits == 16 || bytes == 2 && self.bits == 32 {
            self.emit(&[0x66]);
        }
        self.emit(&[0xc3]);
        self.land(over);
    }

    /// Like [`call`](Self::call), but the function is in another segment, at the same address.
    fn far_call(&mut self, depth: u32, selector: u16) {
        let shift = self.random.below(16);
        let to = self.here() + 5 + 2;
        self.emit(&[0x9a]);
        self.number(to + 16 * shift, 2);
        self.number(u64::from(selector) - shift, 2);
        let over = self.jump_over();
        self.parts(depth);
        self.emit(&[0xcb]);
        self.land(over);
    }

    /// Appends a JMP to the position where [`land`](Self::land) is called.
    fn jump_over(&mut self) -> usize {
        self.emit(&[0xeb, 0]);
        self.code.len()
    }

    fn land(&mut self, from: usize) {
        self.code[from - 1] = (self.code.len() - from) as u8;
    }

    /// Appends a string instruction.
    fn string(&mut self) {
        if self.random.below(3) == 0 {
            let prefix = self.random.pick(&[0x26, 0x2e, 0x36, 0x3e, 0x64, 0x65]);
            self.emit(&[prefix]);
        }
        self.sized(0x66);
        self.sized(0x67);
        if self.random.below(2) == 0 {
            let prefix = self.random.pick(&[0xf2, 0xf3]);
            self.emit(&[prefix]);
        }
        let opcode = self
            .random
            .pick(&[0xa4, 0xa5, 0xa6, 0xa7, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf]);
        self.emit(&[opcode]);
    }

    /// Appends a load of ES, DS, FS or GS, mostly with a valid selector.
    fn load_segment(&mut self) {
        let selector = match self.selector {
            Some(_) => paragraph(self.random),
            None => self.random.pick(&[0x10, 0x10, 0x10, 0x10, 0x18, 0x50, 0]),
        };
        if self.random.below(3) == 0 {
            // Loads the selector by the stack.
            let word = self.word();
            self.emit(&[0x68]);
            self.number(selector.into(), word);
            let pop: &[u8] = self
                .random
                .pick(&[&[0x07], &[0x1f], &[0x0f, 0xa1], &[0x0f, 0xa9]]);
            return self.emit(pop);
        }
        if self.bits == 32 {
            self.emit(&[0x66]);
        }
        self.emit(&[0xb8]);
        self.number(selector.into(), 2);
        let number = self.random.pick(&[0, 3, 4, 5]);
        self.emit(&[0x8e, 0xc0 | number << 3]);
    }

    /// Appends pushes and pops. (POPA loads CX; the value differs if the stack has wrapped around.)
    fn balanced(&mut self, is_inside: bool) {
        let bytes = self.sized(0x66);
        let kind = self.random.below(7);
        match kind {
            0 if !is_inside => self.emit(&[0x60]),
            1 => self.emit(&[0x9c]),
            2 => {
                let byte = self.random.next() as u8;
                self.emit(&[0x6a, byte]);
            }
            3 => {
                // PUSH of a segment register.
                let push = self.random.pick(&[0x06, 0x0e, 0x16, 0x1e]);
                self.emit(&[push]);
            }
            4 => {
                // PUSH [BX], or [EBX].
                let modrm = if self.bits == 16 { 0x37 } else { 0x33 };
                self.emit(&[0xff, modrm]);
            }
            _ => {
                let register = self.random.below(8) as u8;
                self.emit(&[0x50 | register]);
            }
        }
        self.parts_between();
        let is_other = (bytes == 4) == (self.bits == 16);
        if is_other {
            self.emit(&[0x66]);
        }
        let register = self.random.pick(&[0, 2, 3, 5, 6, 7]);
        match kind == 0 && !is_inside {
            true => self.emit(&[0x61]),
            false => self.emit(&[0x58 | register]),
        }
    }

    fn parts_between(&mut self) {
        for _ in 0..self.random.below(3) {
            self.instruction(true);
        }
    }

    /// Appends an instruction that moves the stack pointer for good.
    fn unbalanced(&mut self) {
        self.sized(0x66);
        match self.random.below(5) {
            0 => {
                let (size, level) = (self.random.next() as u8, self.random.below(4) as u8);
                self.emit(&[0xc8, size, 0, level]);
            }
            1 => self.emit(&[0xc9]),
            2 => {
                let register = self.random.below(8) as u8;
                self.emit(&[0x58 | register]);
            }
            3 => {
                // POP of ES, DS.
                let pop = self.random.pick(&[0x07, 0x1f]);
                self.emit(&[pop]);
            }
            _ => {
                // CALL, and a RET that removes a few more bytes from the stack.
                let bytes = if self.code.last() == Some(&0x66) {
                    6 - self.word()
                } else {
                    self.word()
                };
                self.emit(&[0xe8]);
                self.number(2, bytes);
                let over = self.jump_over();
                if bytes != self.word() {
                    self.emit(&[0x66]);
                }
                let more = self.random.below(9);
                self.emit(&[0xc2]);
                self.number(more, 2);
                self.land(over);
            }
        }
    }

    /// Returns the size in bytes of an operand without a prefix.
    fn word(&self) -> usize {
        self.bits as usize / 8
    }

    /// Appends a jump over an instruction, in some cases.
    fn jump(&mut self) {
        let jcc = 0x70 | self.random.below(16) as u8;
        let opcode = self.random.pick(&[jcc, jcc, 0xe3, 0xeb]);
        self.emit(&[opcode, 0]);
        let from = self.code.len();
        self.instruction(true);
        self.land(from);
    }
}
