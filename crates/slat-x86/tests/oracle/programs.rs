//! Makes whole programs: loops, calls, strings, vectors, code that changes itself, and accesses and code that cross
//! from one page into the next. Only whole programs test the work of the compilers of blocks and regions beyond
//! single instructions. This work is: keeping values across branches, restoring state when a loop is left, and
//! translating code again.
//!
//! A program always ends: its loops count in memory that nothing else writes, its other branches lead forward, and its
//! functions call none. It may end early by a fault, which both CPUs must raise at the same instruction.

use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Code, Instruction, InstructionBlock, MemoryOperand,
    Mnemonic, OpKind, Register, RflagsBits,
};

use crate::forms::{self, Case};
use crate::judge;
use crate::native::{AT, CODE_LEN, DATA, DATA_LEN, PAGE};
use crate::rng::Rng;
use crate::sequences::{self, Pool};
use crate::vendor;

const FUNCTIONS: usize = 3;
/// The largest number of instructions in a part without branches.
const STRETCH: usize = 8;
/// The largest depth of nested loops.
const DEPTH: usize = 2;
/// The offset of the loops' counters in the data, above all data that instructions write.
const COUNTERS: usize = DATA + DATA_LEN - 0x80;

/// Makes a program. `None`: the random program cannot be encoded, or is too long.
pub fn random(pool: &Pool, base: usize, rng: &mut Rng) -> Option<Case> {
    let mut case = Case::start(base, rng);
    // Masks floating-point exceptions: single instructions test them.
    case.regs.fx[..2].copy_from_slice(&0x37fu16.to_le_bytes());
    case.regs.fx[2] = 0;
    case.regs.fx[3] &= 0x3f;
    case.regs.fx[24] |= 0x80;
    case.regs.fx[25] |= 0x1f;
    let mut program = Program {
        pool,
        base,
        case: &case,
        rng,
        code: vec![],
        name: FIRST,
        functions: vec![],
    };
    program.functions = (0..FUNCTIONS).map(|_| program.new_name()).collect();
    let end = program.new_name();
    for _ in 0..2 + program.rng.below(4) {
        program.part(0, true);
    }
    program.branch(Code::Jmp_rel32_64, end);
    for function in program.functions.clone() {
        program.label(function);
        program.stretch();
        program.part(DEPTH, false);
        program.push(Instruction::with(Code::Retnq));
    }
    program.label(end);
    let Program { code, .. } = program;
    let len = encode(&code, base as u64)?.len();
    let last = CODE_LEN.checked_sub(len + 0x20)?;
    // In half of the cases, the operands cross the boundary of the two pages.
    let at = match rng.one_in(2) {
        true if len < PAGE - AT => PAGE - rng.below(len),
        _ => AT + rng.below(last.checked_sub(AT)?),
    }
    .min(last);
    case.program_at = Some(at);
    case.regs.rip = (base + at) as u64;
    case.bytes = encode(&code, case.regs.rip)?;
    // The judge gets this instruction instead of the whole program: it leaves AF undefined.
    case.instruction = Instruction::with2(Code::And_r32_rm32, Register::EAX, Register::EAX).ok()?;
    (at + case.bytes.len() + 0x20 <= CODE_LEN).then_some(case)
}

/// Encodes instructions whose addresses are labels for branches.
fn encode(code: &[Instruction], rip: u64) -> Option<Vec<u8>> {
    let block = InstructionBlock::new(code, rip);
    let result = BlockEncoder::encode(64, block, BlockEncoderOptions::NONE).ok()?;
    Some(result.code_buffer)
}

/// The first label. Labels are numbers that are not addresses of the arena. An instruction without a label has
/// address 0.
const FIRST: u64 = 1;

struct Program<'a> {
    pool: &'a Pool,
    base: usize,
    case: &'a Case,
    rng: &'a mut Rng,
    code: Vec<Instruction>,
    /// The next unused label.
    name: u64,
    functions: Vec<u64>,
}

impl Program<'_> {
    fn new_name(&mut self) -> u64 {
        self.name += 1;
        self.name - 1
    }

    fn push(&mut self, instruction: Instruction) {
        self.code.push(instruction);
    }

    /// Gives the next instruction a label.
    fn label(&mut self, name: u64) {
        let mut nop = Instruction::with(Code::Nopd);
        nop.set_ip(name);
        self.push(nop);
    }

    fn branch(&mut self, code: Code, name: u64) {
        self.push(Instruction::with_branch(code, name).expect("a branch"));
    }

    /// Makes a part of a program, inside `loops` loops. Only the main program calls functions.
    fn part(&mut self, loops: usize, may_call: bool) {
        match self.rng.below(10) {
            0 | 1 if loops < DEPTH => self.loop_of_parts(loops, may_call),
            2 | 3 => self.skip(),
            4 if may_call => self.call(),
            5 => self.string(),
            6 => self.patch(),
            7 => self.divide(),
            8 => self.chain(),
            _ => self.stretch(),
        }
    }

    /// Appends a part without branches.
    fn stretch(&mut self) {
        for _ in 0..=self.rng.below(STRETCH) {
            let of = match self.rng.one_in(3) {
                true => &self.pool.any,
                false => &self.pool.integer,
            };
            let code = of[self.rng.below(of.len())];
            if let Some(instruction) = self.plain(code) {
                self.push(instruction);
                if judge::undefined_flags(&instruction) & !RflagsBits::AF != 0 {
                    self.define_flags();
                }
            }
        }
    }

    /// Returns an instruction that does not use the stack, and whose address does not fault.
    fn plain(&mut self, code: Code) -> Option<Instruction> {
        let mut instruction = sequences::placed(code, self.base, self.rng)?;
        if instruction.stack_pointer_increment() != 0
            || matches!(
                instruction.mnemonic(),
                Mnemonic::Div | Mnemonic::Idiv | Mnemonic::Lahf
            )
            || !vendor::allowed_in_sequences(&instruction, &self.case.regs)
            || vendor::ends_sequence(&instruction, &self.case.regs)
        {
            return None;
        }
        let has_memory =
            (0..instruction.op_count()).any(|n| instruction.op_kind(n) == OpKind::Memory);
        if has_memory {
            let size = instruction.memory_size().size();
            let at = match self.rng.below(4) {
                // The operand crosses the page boundary, unless it is a vector, because most vectors must be aligned.
                0 if size < 16 => PAGE - self.rng.below(size.max(1)),
                1 => PAGE + 32 * self.rng.below(16),
                _ => 32 * self.rng.below(4),
            };
            instruction.set_memory_displacement64((self.base + DATA + at) as u64);
        }
        // Removes the label: no branch leads to this instruction.
        instruction.set_ip(0);
        Some(instruction)
    }

    /// Appends additions that pass CF or OF on, like those of large numbers, and a use of a flag. At the beginning of a
    /// loop the additions use the flags of the previous turn.
    fn chain(&mut self) {
        const SUMS: [Code; 6] = [
            Code::Adcx_r64_rm64,
            Code::Adox_r64_rm64,
            Code::Adcx_r32_rm32,
            Code::Adox_r32_rm32,
            Code::Adc_r64_rm64,
            Code::VEX_Mulx_r64_r64_rm64,
        ];
        const LOOKS: [Code; 6] = [
            Code::Seto_rm8,
            Code::Setb_rm8,
            Code::Sete_rm8,
            Code::Sets_rm8,
            Code::Setp_rm8,
            Code::Setle_rm8,
        ];
        for _ in 0..1 + self.rng.below(4) {
            let code = self.rng.pick(&SUMS);
            if self.pool.any.contains(&code) || self.pool.integer.contains(&code) {
                let sum = self.plain(code);
                self.code.extend(sum);
            }
        }
        let code = self.rng.pick(&LOOKS);
        let look = self.plain(code);
        self.code.extend(look);
    }

    fn loop_of_parts(&mut self, loops: usize, may_call: bool) {
        let counter = MemoryOperand::with_base_displ(
            Register::RIP,
            (self.base + COUNTERS + 8 * loops) as i64,
        );
        let turns = 1 + self.rng.below(12) as u32;
        // The steps are large, so that CF and OF change from turn to turn.
        const STEP: u32 = 0x3000_0000;
        let (step, count) = match self.rng.one_in(2) {
            true => (
                STEP,
                Instruction::with2(Code::Sub_rm32_imm32, counter, STEP),
            ),
            false => (1, Instruction::with1(Code::Dec_rm32, counter)),
        };
        let first = turns.wrapping_mul(step);
        let start = Instruction::with2(Code::Mov_rm32_imm32, counter, first);
        self.push(start.expect("a store"));
        let again = self.new_name();
        self.label(again);
        if self.rng.one_in(3) {
            self.chain();
        }
        for _ in 0..1 + self.rng.below(2) {
            self.part(loops + 1, may_call);
        }
        self.push(count.expect("a count"));
        self.branch(Code::Jne_rel32_64, again);
    }

    /// Appends a part that a conditional branch skips.
    fn skip(&mut self) {
        const CONDITIONS: [Code; 16] = [
            Code::Jo_rel32_64,
            Code::Jno_rel32_64,
            Code::Jb_rel32_64,
            Code::Jae_rel32_64,
            Code::Je_rel32_64,
            Code::Jne_rel32_64,
            Code::Jbe_rel32_64,
            Code::Ja_rel32_64,
            Code::Js_rel32_64,
            Code::Jns_rel32_64,
            Code::Jp_rel32_64,
            Code::Jnp_rel32_64,
            Code::Jl_rel32_64,
            Code::Jge_rel32_64,
            Code::Jle_rel32_64,
            Code::Jg_rel32_64,
        ];
        let after = self.new_name();
        self.stretch();
        let condition = self.rng.pick(&CONDITIONS);
        self.branch(condition, after);
        self.stretch();
        self.label(after);
    }

    /// Appends a call: direct, by a register, or by a return to an address that was pushed.
    fn call(&mut self) {
        let function = self.functions[self.rng.below(FUNCTIONS)];
        let way = self.rng.below(3);
        if way == 0 {
            return self.branch(Code::Call_rel32_64, function);
        }
        let register = self.register();
        let target = MemoryOperand::with_base_displ(Register::RIP, function as i64);
        let address = Instruction::with2(Code::Lea_r64_m, register, target).expect("an address");
        if way == 1 {
            self.push(address);
            return self.push(Instruction::with1(Code::Call_rm64, register).expect("a call"));
        }
        let after = self.new_name();
        let back = MemoryOperand::with_base_displ(Register::RIP, after as i64);
        let push = Instruction::with1(Code::Push_r64, register).expect("a push");
        self.push(Instruction::with2(Code::Lea_r64_m, register, back).expect("an address"));
        self.push(push);
        self.push(address);
        self.push(push);
        self.push(Instruction::with(Code::Retnq));
        self.label(after);
    }

    /// Returns one of the first eight registers, except RSP.
    fn register(&mut self) -> Register {
        forms::nth(Register::RAX, self.rng.pick(&[0, 1, 2, 3, 5, 6, 7]))
    }

    /// Appends a string instruction, which often crosses from one page to the other, in either direction.
    fn string(&mut self) {
        let place = |rng: &mut Rng| {
            let at = match rng.one_in(3) {
                true => PAGE - rng.below(64),
                false => 0x200 + rng.below(PAGE),
            };
            (self.base + DATA + at) as u64
        };
        let (from, to) = (place(self.rng), place(self.rng));
        let count = self.rng.below(40) as u64;
        for (register, value) in [
            (Register::RSI, from),
            (Register::RDI, to),
            (Register::RCX, count),
        ] {
            let set = Instruction::with2(Code::Mov_r64_imm64, register, value);
            self.push(set.expect("a constant"));
        }
        let direction = self.rng.pick(&[Code::Cld, Code::Cld, Code::Std]);
        self.push(Instruction::with(direction));
        // REPE and REPNE differ only for comparisons.
        let prefix = self.rng.pick(&[0xf3u8, 0xf3, 0xf2]);
        let operation = self
            .rng
            .pick(&[0xa4u8, 0xa5, 0xaa, 0xab, 0xa6, 0xae, 0xaf, 0xac]);
        let bytes = match self.rng.one_in(4) {
            true => vec![prefix, 0x48, operation],
            false => vec![prefix, operation],
        };
        self.bytes(&bytes);
        self.push(Instruction::with(Code::Cld));
    }

    /// Appends a store to the immediate of an instruction that follows soon.
    fn patch(&mut self) {
        match self.rng.below(3) {
            // mov [rip + 1], al; mov ecx, imm32
            0 => self.bytes(&[0x88, 0x05, 1, 0, 0, 0, 0xb9, 1, 2, 3, 4]),
            // mov [rip + 6], eax; jmp over two bytes; add edx, imm32
            1 => self.bytes(&[
                0x89, 0x05, 6, 0, 0, 0, 0xeb, 2, 0x90, 0x90, 0x81, 0xc2, 1, 2, 3, 4,
            ]),
            // inc byte [rip + 2]; add ebx, imm8
            _ => self.bytes(&[0xfe, 0x05, 2, 0, 0, 0, 0x83, 0xc3, 1]),
        }
    }

    /// Appends a division that does not fault: xor edx, edx; or ecx, 1; div ecx.
    fn divide(&mut self) {
        self.bytes(&[0x31, 0xd2, 0x83, 0xc9, 1, 0xf7, 0xf1]);
        self.define_flags();
    }

    /// Appends code that sets all flags by cmp eax, ecx, except for AF, which no instruction here reads: AND and
    /// similar ones leave AF undefined, but the instructions after them should see their other flags.
    fn define_flags(&mut self) {
        self.bytes(&[0x39, 0xc8]);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.push(Instruction::with_declare_byte(bytes).expect("at most 16 bytes"));
    }
}
