//! Makes random instructions: for every form (iced-x86 `Code`) that user code may execute, random operands and
//! registers, and a memory operand at an address that suits the test.

use iced_x86::{
    Code, CpuidFeature, Decoder, DecoderOptions, Encoder, FlowControl, Instruction, Mnemonic,
    OpCodeOperandKind, OpKind, Register,
};

use std::sync::OnceLock;

use crate::memory;
use crate::native::{AT, BRANCH_TARGET, DATA, DATA_LEN, Placed, Regs, STACK, STACK_LEN};
use crate::rng::Rng;

/// Instructions and the state in which they start, ready to run on either CPU.
pub struct Case {
    /// The last instruction, which mostly is the only one.
    pub instruction: Instruction,
    pub bytes: Vec<u8>,
    /// The offset of a program in the code pages; `None` for one instruction or a few.
    pub program_at: Option<usize>,
    pub regs: Regs,
    pub data: Vec<u8>,
    pub stack: Vec<u8>,
}

impl Case {
    /// Makes a case with random registers and memory, and no instruction yet.
    pub fn start(base: usize, rng: &mut Rng) -> Case {
        let (data, stack) = (random_bytes(DATA_LEN, rng), random_bytes(STACK_LEN, rng));
        Case {
            instruction: Instruction::new(),
            bytes: vec![],
            program_at: None,
            regs: random_regs(base, rng),
            data,
            stack,
        }
    }

    /// Returns the bytes to execute, and their place.
    pub fn placed(&self) -> Placed<'_> {
        match self.program_at {
            Some(at) => Placed::program(&self.bytes, at),
            None => Placed::short(&self.bytes),
        }
    }

    /// Appends an instruction. `None`: the instruction cannot be encoded.
    pub fn push(&mut self, instruction: &Instruction) -> Option<()> {
        let mut encoder = Encoder::new(64);
        encoder
            .encode(instruction, self.regs.rip + self.bytes.len() as u64)
            .ok()?;
        self.bytes.extend(encoder.take_buffer());
        self.instruction = *instruction;
        Some(())
    }
}

/// Returns random bytes that contain useful operands. Copies a part of a random array that is made once, and replaces
/// a few operands in it. Making all bytes anew would take most of a case's time.
fn random_bytes(len: usize, rng: &mut Rng) -> Vec<u8> {
    const OPERAND: usize = 16;
    const SUPPLY: usize = 1 << 20;
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    let operand = |rng: &mut Rng| if rng.one_in(2) { rng.x87() } else { rng.xmm() };
    let bytes = BYTES.get_or_init(|| {
        let mut rng = Rng(1);
        let operands = std::iter::repeat_with(|| operand(&mut rng).to_le_bytes());
        operands.take(SUPPLY / OPERAND).flatten().collect()
    });
    let start = OPERAND * rng.below((SUPPLY - len) / OPERAND);
    let mut part = bytes[start..start + len].to_vec();
    for _ in 0..16 {
        let at = OPERAND * rng.below(len / OPERAND);
        part[at..at + OPERAND].copy_from_slice(&operand(rng).to_le_bytes());
    }
    part
}

const FEATURES: &[CpuidFeature] = &[
    CpuidFeature::INTEL8086,
    CpuidFeature::INTEL186,
    CpuidFeature::INTEL286,
    CpuidFeature::INTEL386,
    CpuidFeature::INTEL486,
    CpuidFeature::X64,
    CpuidFeature::ADX,
    CpuidFeature::AES,
    CpuidFeature::AVX,
    CpuidFeature::AVX2,
    CpuidFeature::BMI1,
    CpuidFeature::BMI2,
    CpuidFeature::CET_IBT,
    CpuidFeature::CLFSH,
    CpuidFeature::CMOV,
    CpuidFeature::CMPXCHG16B,
    CpuidFeature::CX8,
    CpuidFeature::F16C,
    CpuidFeature::FMA,
    CpuidFeature::FPU,
    CpuidFeature::FPU287,
    CpuidFeature::FPU387,
    CpuidFeature::FXSR,
    CpuidFeature::LZCNT,
    CpuidFeature::MMX,
    CpuidFeature::MOVBE,
    CpuidFeature::MULTIBYTENOP,
    CpuidFeature::PAUSE,
    CpuidFeature::PCLMULQDQ,
    CpuidFeature::POPCNT,
    CpuidFeature::PREFETCHW,
    CpuidFeature::SHA,
    CpuidFeature::SSE,
    CpuidFeature::SSE2,
    CpuidFeature::SSE3,
    CpuidFeature::SSE4_1,
    CpuidFeature::SSE4_2,
    CpuidFeature::SSE4A,
    CpuidFeature::SSSE3,
    CpuidFeature::VAES,
    CpuidFeature::VPCLMULQDQ,
];

/// Instructions that affect the system around the CPU, depend on privilege, or are not deterministic.
const LEFT_OUT: &[Mnemonic] = &[
    Mnemonic::Arpl,
    Mnemonic::Lar,
    Mnemonic::Lsl,
    Mnemonic::Verr,
    Mnemonic::Verw,
    Mnemonic::Sldt,
    Mnemonic::Str,
    Mnemonic::Smsw,
    Mnemonic::Sgdt,
    Mnemonic::Sidt,
    Mnemonic::Int,
    Mnemonic::Int1,
    Mnemonic::Int3,
    Mnemonic::Into,
    Mnemonic::Iret,
    Mnemonic::Iretd,
    Mnemonic::Iretq,
    Mnemonic::Hlt,
    Mnemonic::Cli,
    Mnemonic::Sti,
    Mnemonic::In,
    Mnemonic::Out,
    Mnemonic::Insb,
    Mnemonic::Insw,
    Mnemonic::Insd,
    Mnemonic::Outsb,
    Mnemonic::Outsw,
    Mnemonic::Outsd,
    Mnemonic::Retf,
    Mnemonic::Lss,
    Mnemonic::Lfs,
    Mnemonic::Lgs,
    Mnemonic::Lds,
    Mnemonic::Les,
    Mnemonic::Cpuid,
    Mnemonic::Swapgs,
    Mnemonic::Mwait,
    Mnemonic::Monitor,
    Mnemonic::Ud0,
    Mnemonic::Ud1,
    Mnemonic::Clts,
    Mnemonic::Invd,
    Mnemonic::Wbinvd,
    Mnemonic::Invlpg,
    Mnemonic::Lgdt,
    Mnemonic::Lidt,
    Mnemonic::Lldt,
    Mnemonic::Ltr,
    Mnemonic::Lmsw,
    Mnemonic::Rsm,
    Mnemonic::Fstdw,
    Mnemonic::Fstsg,
    // Each of these mnemonics is two instructions: FWAIT, and the instruction that does not wait.
    Mnemonic::Fclex,
    Mnemonic::Fdisi,
    Mnemonic::Feni,
    Mnemonic::Finit,
    Mnemonic::Fsave,
    Mnemonic::Fstcw,
    Mnemonic::Fstenv,
    Mnemonic::Fstsw,
    Mnemonic::Frstpm,
    Mnemonic::Fsetpm,
];

/// Returns all forms that the oracle can judge.
pub fn all() -> Vec<Code> {
    Code::values()
        .filter(|code| {
            let op = code.op_code();
            op.is_instruction()
                && op.mode64()
                && !op.must_be_cpl0()
                && !LEFT_OUT.contains(&code.mnemonic())
                && code
                    .cpuid_features()
                    .iter()
                    .all(|f| FEATURES.contains(f) && on_host(*f))
                && operands_known(*code)
        })
        .collect()
}

/// Returns whether the host has the feature. Only instructions that the host has can be judged.
fn on_host(feature: CpuidFeature) -> bool {
    use std::arch::is_x86_feature_detected as has;
    match feature {
        CpuidFeature::ADX => has!("adx"),
        CpuidFeature::AES => has!("aes"),
        CpuidFeature::AVX => has!("avx"),
        CpuidFeature::AVX2 => has!("avx2"),
        CpuidFeature::F16C => has!("f16c"),
        CpuidFeature::FMA => has!("fma"),
        CpuidFeature::BMI1 => has!("bmi1"),
        CpuidFeature::BMI2 => has!("bmi2"),
        CpuidFeature::CMPXCHG16B => has!("cmpxchg16b"),
        CpuidFeature::LZCNT => has!("lzcnt"),
        CpuidFeature::MOVBE => has!("movbe"),
        CpuidFeature::PCLMULQDQ => has!("pclmulqdq"),
        CpuidFeature::POPCNT => has!("popcnt"),
        CpuidFeature::SHA => has!("sha"),
        CpuidFeature::SSE3 => has!("sse3"),
        CpuidFeature::SSSE3 => has!("ssse3"),
        CpuidFeature::SSE4_1 => has!("sse4.1"),
        CpuidFeature::SSE4_2 => has!("sse4.2"),
        CpuidFeature::SSE4A => has!("sse4a"),
        CpuidFeature::VAES => has!("vaes"),
        CpuidFeature::VPCLMULQDQ => has!("vpclmulqdq"),
        _ => true,
    }
}

/// Unusual prefixes, which an assembler would not write, to add to instructions.
pub struct Prefixes {
    known: Vec<Code>,
}

impl Prefixes {
    pub fn new() -> Prefixes {
        Prefixes { known: all() }
    }

    /// Adds one or two prefixes, if the result can still be judged.
    pub fn try_on(&self, case: &mut Case, rng: &mut Rng) {
        const PREFIXES: [u8; 9] = [0x66, 0x67, 0xf2, 0xf3, 0xf0, 0x26, 0x2e, 0x36, 0x3e];
        let mut bytes = vec![rng.pick(&PREFIXES)];
        if rng.one_in(2) {
            bytes.push(rng.pick(&PREFIXES));
        }
        bytes.extend(&case.bytes);
        if bytes.len() > 15 {
            return;
        }
        let decoded = Decoder::with_ip(64, &bytes, case.regs.rip, DecoderOptions::NONE).decode();
        let plain = |instruction: &Instruction| {
            instruction.flow_control() == FlowControl::Next && !instruction.is_string_instruction()
        };
        let changed = decoded.code() != case.instruction.code();
        let judged = decoded.is_invalid()
            || self.known.contains(&decoded.code())
                && plain(&decoded)
                && decoded.len() == bytes.len();
        let tamed = changed && crate::sequences::NEEDS_TAMING.contains(&decoded.mnemonic());
        if plain(&case.instruction) && judged && !tamed {
            case.bytes = bytes;
            case.instruction = decoded;
        }
    }
}

fn operands_known(code: Code) -> bool {
    use OpCodeOperandKind as K;
    let moves_segment = matches!(
        code.op_code().op0_kind(),
        K::seg_reg | K::fs | K::gs | K::ss | K::ds | K::es
    );
    !moves_segment
        && code.op_code().op_kinds().iter().all(|kind| {
            !matches!(
                kind,
                K::farbr2_2
                    | K::farbr4_2
                    | K::mem_mpx
                    | K::mem_mib
                    | K::seg_reg
                    | K::fs
                    | K::gs
                    | K::cr_reg
                    | K::dr_reg
                    | K::tr_reg
                    | K::br16_1
                    | K::br16_2
                    | K::br32_1
                    | K::br32_4
                    | K::xbegin_2
                    | K::xbegin_4
            )
        })
}

const GPR8: [Register; 20] = [
    Register::AL,
    Register::CL,
    Register::DL,
    Register::BL,
    Register::AH,
    Register::CH,
    Register::DH,
    Register::BH,
    Register::SPL,
    Register::BPL,
    Register::SIL,
    Register::DIL,
    Register::R8L,
    Register::R9L,
    Register::R10L,
    Register::R11L,
    Register::R12L,
    Register::R13L,
    Register::R14L,
    Register::R15L,
];

pub fn nth(first: Register, n: usize) -> Register {
    first + n as u32
}

/// Makes a case of `code`. `None` if these random operands cannot be encoded.
pub fn random(code: Code, base: usize, rng: &mut Rng) -> Option<Case> {
    let (mut instruction, memory) = operands(code, base, rng)?;
    let mut case = Case::start(base, rng);
    if let Some(n) = memory {
        memory::place(&mut instruction, n, base, &mut case.regs, rng);
    }
    memory::tame(&mut instruction, base, &mut case, rng)?;
    case.push(&instruction)?;
    Some(case)
}

/// Returns an instruction of form `code` with random registers and immediates, and the number of the operand that has
/// to be in memory, if any.
pub fn operands(code: Code, base: usize, rng: &mut Rng) -> Option<(Instruction, Option<u32>)> {
    use OpCodeOperandKind as K;
    let op_code = code.op_code();
    let mut instruction = Instruction::new();
    instruction.set_code(code);
    let mut memory = None;
    for (n, &kind) in op_code.op_kinds().iter().enumerate() {
        let n = n as u32;
        let mut reg = |register: Register| {
            instruction.set_op_kind(n, OpKind::Register);
            instruction.set_op_register(n, register);
        };
        let any = rng.below(16);
        // Uses few registers, so that operands often coincide.
        let any = if rng.one_in(3) { any % 4 } else { any };
        let to_memory = rng.one_in(2);
        match kind {
            K::mem => memory = Some(n),
            K::mem_vsib32x | K::mem_vsib64x => {
                memory = Some(n);
                instruction.set_memory_index(nth(Register::XMM0, any));
            }
            K::mem_vsib32y | K::mem_vsib64y => {
                memory = Some(n);
                instruction.set_memory_index(nth(Register::YMM0, any));
            }
            K::r8_or_mem
            | K::r16_or_mem
            | K::r32_or_mem
            | K::r64_or_mem
            | K::xmm_or_mem
            | K::ymm_or_mem
            | K::mm_or_mem
                if to_memory =>
            {
                memory = Some(n);
            }
            K::r8_or_mem | K::r8_reg | K::r8_opcode => reg(rng.pick(&GPR8)),
            K::r16_or_mem | K::r16_reg | K::r16_rm | K::r16_opcode => reg(nth(Register::AX, any)),
            K::r32_or_mem | K::r32_reg | K::r32_rm | K::r32_opcode | K::r32_vvvv => {
                reg(nth(Register::EAX, any))
            }
            K::r64_or_mem | K::r64_reg | K::r64_rm | K::r64_opcode | K::r64_vvvv => {
                reg(nth(Register::RAX, any))
            }
            K::xmm_or_mem | K::xmm_reg | K::xmm_rm | K::xmm_vvvv | K::xmm_is4 => {
                reg(nth(Register::XMM0, any))
            }
            K::ymm_or_mem | K::ymm_reg | K::ymm_rm | K::ymm_vvvv | K::ymm_is4 => {
                reg(nth(Register::YMM0, any))
            }
            K::mm_or_mem | K::mm_reg | K::mm_rm => reg(nth(Register::MM0, any % 8)),
            K::al => reg(Register::AL),
            K::cl => reg(Register::CL),
            K::ax => reg(Register::AX),
            K::dx => reg(Register::DX),
            K::eax => reg(Register::EAX),
            K::rax => reg(Register::RAX),
            K::st0 => reg(Register::ST0),
            K::sti_opcode => reg(nth(Register::ST0, any % 8)),
            K::imm8_const_1 => immediate(&mut instruction, n, OpKind::Immediate8, 1),
            K::imm8 if n == 1 && code.mnemonic() == Mnemonic::Enter => {
                immediate(
                    &mut instruction,
                    n,
                    OpKind::Immediate8_2nd,
                    rng.below(10) as u64,
                );
            }
            K::imm8 => immediate(
                &mut instruction,
                n,
                OpKind::Immediate8,
                rng.integer() as u8 as u64,
            ),
            K::imm8sex16 => sign_extended(&mut instruction, n, OpKind::Immediate8to16, rng),
            K::imm8sex32 => sign_extended(&mut instruction, n, OpKind::Immediate8to32, rng),
            K::imm8sex64 => sign_extended(&mut instruction, n, OpKind::Immediate8to64, rng),
            K::imm16 => immediate(
                &mut instruction,
                n,
                OpKind::Immediate16,
                rng.integer() as u16 as u64,
            ),
            K::imm32 => immediate(
                &mut instruction,
                n,
                OpKind::Immediate32,
                rng.integer() as u32 as u64,
            ),
            K::imm32sex64 => immediate(
                &mut instruction,
                n,
                OpKind::Immediate32to64,
                rng.integer() as i32 as u64,
            ),
            K::imm64 => immediate(&mut instruction, n, OpKind::Immediate64, rng.integer()),
            K::seg_rSI => instruction.set_op_kind(n, OpKind::MemorySegRSI),
            K::es_rDI => instruction.set_op_kind(n, OpKind::MemoryESRDI),
            K::seg_rDI => instruction.set_op_kind(n, OpKind::MemorySegRDI),
            K::seg_rBX_al => {
                instruction.set_op_kind(n, OpKind::Memory);
                instruction.set_memory_base(Register::RBX);
                instruction.set_memory_index(Register::AL);
            }
            K::mem_offs => {
                instruction.set_op_kind(n, OpKind::Memory);
                instruction.set_memory_displ_size(8);
                instruction
                    .set_memory_displacement64((base + DATA + rng.below(DATA_LEN - 16)) as u64);
            }
            K::br64_1 | K::br64_4 => {
                instruction.set_op_kind(n, OpKind::NearBranch64);
                instruction.set_near_branch64((base + BRANCH_TARGET) as u64);
            }
            _ => return None,
        }
    }
    if memory == Some(0) && op_code.can_use_lock_prefix() && rng.one_in(2) {
        instruction.set_has_lock_prefix(true);
    }
    if op_code.can_use_rep_prefix() && code.is_string_instruction() && rng.one_in(2) {
        instruction.set_has_rep_prefix(true);
    } else if op_code.can_use_repne_prefix() && code.is_string_instruction() && rng.one_in(2) {
        instruction.set_has_repne_prefix(true);
    }
    Some((instruction, memory))
}

fn immediate(instruction: &mut Instruction, n: u32, kind: OpKind, value: u64) {
    instruction.set_op_kind(n, kind);
    instruction.set_immediate_u64(n, value);
}

fn sign_extended(instruction: &mut Instruction, n: u32, kind: OpKind, rng: &mut Rng) {
    instruction.set_op_kind(n, kind);
    instruction.set_immediate_i64(n, i64::from(rng.integer() as i8));
}

/// Flags that user code can set freely, except for those that would trap (TF) or check alignment (AC).
pub const FREE_FLAGS: u64 = 0x8d5;
pub const DF: u64 = 0x400;

fn random_regs(base: usize, rng: &mut Rng) -> Regs {
    let mut regs = Regs {
        fx: [0; 512],
        high: [0; 256],
        gpr: [0; 16],
        rflags: 0x202,
        rip: (base + AT) as u64,
    };
    for gpr in &mut regs.gpr {
        *gpr = rng.integer();
    }
    regs.gpr[4] = (base + STACK + 0x800 + 8 * rng.below(16)) as u64;
    regs.rflags |= rng.next() & FREE_FLAGS;
    if rng.one_in(4) {
        regs.rflags |= DF;
    }
    let mut fx = |at: usize, bytes: &[u8]| regs.fx[at..at + bytes.len()].copy_from_slice(bytes);
    let mut fcw = 0x37fu16;
    if rng.one_in(2) {
        fcw = (fcw & !0xf00) | (rng.pick(&[0, 2, 3]) << 8) | ((rng.next() as u16 & 3) << 10);
    }
    if rng.one_in(8) {
        fcw &= !(rng.next() as u16 & 0x3f);
    }
    fx(0, &fcw.to_le_bytes());
    // Sets sticky exception flags mostly where the exceptions are masked.
    let mut sticky = rng.next() as u16 & fcw & 0x3f;
    if rng.one_in(20) {
        // Makes an exception pending, and sets the error summary and busy flags.
        sticky = rng.next() as u16 & 0x3f;
        if sticky & !fcw != 0 {
            sticky |= 0x8080;
        }
    }
    let top = if rng.one_in(2) {
        0
    } else {
        rng.below(8) as u16
    };
    let fsw = (rng.next() as u16 & 0x4700) | top << 11 | if rng.one_in(2) { sticky } else { 0 };
    fx(2, &fsw.to_le_bytes());
    fx(
        4,
        &[if rng.one_in(3) {
            rng.next() as u8
        } else {
            0xff
        }],
    );
    let mut mxcsr = 0x1f80u32;
    if rng.one_in(2) {
        mxcsr |= rng.next() as u32 & 0xe07f;
    }
    if rng.one_in(8) {
        mxcsr &= !(rng.next() as u32 & 0x1f80);
    }
    fx(24, &mxcsr.to_le_bytes());
    if crate::vendor::is_intel() {
        fx(6, &(rng.next() as u16 & 0x7ff).to_le_bytes());
        fx(8, &(rng.next() >> 17).to_le_bytes());
        fx(16, &(rng.next() >> 17).to_le_bytes());
    }
    for n in 0..8 {
        fx(32 + 16 * n, &rng.x87().to_le_bytes()[..10]);
    }
    for n in 0..16 {
        fx(160 + 16 * n, &rng.xmm().to_le_bytes());
    }
    // The upper halves are often all zero, as in code that does not use them.
    if is_x86_feature_detected!("avx") && !rng.one_in(4) {
        for half in regs.high.chunks_exact_mut(16) {
            half.copy_from_slice(&rng.xmm().to_le_bytes());
        }
    }
    regs
}
