//! Makes random instructions: for every form (iced-x86 `Code`) that user code may execute, random operands, random
//! registers and a memory operand that lands where the test wants it.

use iced_x86::{
    Code, CpuidFeature, Encoder, Instruction, Mnemonic, OpCodeOperandKind, OpKind, Register,
};

use crate::native::{
    AT, BRANCH_TARGET, DATA, DATA_LEN, GS_BASE, HOLE, PAGE, Regs, STACK, STACK_LEN,
};
use crate::rng::Rng;

/// One instruction in one state, ready to run on either CPU.
pub struct Case {
    pub instruction: Instruction,
    pub bytes: Vec<u8>,
    pub regs: Regs,
    pub data: Vec<u8>,
    pub stack: Vec<u8>,
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
    CpuidFeature::BMI1,
    CpuidFeature::BMI2,
    CpuidFeature::CET_IBT,
    CpuidFeature::CLFSH,
    CpuidFeature::CMOV,
    CpuidFeature::CMPXCHG16B,
    CpuidFeature::CX8,
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
    CpuidFeature::SSSE3,
];

/// Instructions whose effect belongs to the system around the CPU, differs by privilege, or is not deterministic.
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
    // Two instructions each: FWAIT and the one that does not wait.
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

/// All forms the oracle can judge.
pub fn all() -> Vec<Code> {
    Code::values()
        .filter(|code| {
            let op = code.op_code();
            op.is_instruction()
                && op.mode64()
                && !op.must_be_cpl0()
                && !LEFT_OUT.contains(&code.mnemonic())
                && code.cpuid_features().iter().all(|f| FEATURES.contains(f))
                && operands_known(*code)
        })
        .collect()
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

fn nth(first: Register, n: usize) -> Register {
    first + n as u32
}

/// Makes a case of `code`, or None when this draw of operands cannot be encoded.
pub fn random(code: Code, base: usize, rng: &mut Rng) -> Option<Case> {
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
        // Few registers, so that operands often coincide.
        let any = if rng.one_in(3) { any % 4 } else { any };
        let to_memory = rng.one_in(2);
        match kind {
            K::mem => memory = Some(n),
            K::r8_or_mem
            | K::r16_or_mem
            | K::r32_or_mem
            | K::r64_or_mem
            | K::xmm_or_mem
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
            K::xmm_or_mem | K::xmm_reg | K::xmm_rm => reg(nth(Register::XMM0, any)),
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
    let mut regs = random_regs(base, rng);
    if let Some(n) = memory {
        place_memory(&mut instruction, n, base, &mut regs, rng);
    }
    if memory == Some(0) && op_code.can_use_lock_prefix() && rng.one_in(2) {
        instruction.set_has_lock_prefix(true);
    }
    if op_code.can_use_rep_prefix() && code.is_string_instruction() && rng.one_in(2) {
        instruction.set_has_rep_prefix(true);
    } else if op_code.can_use_repne_prefix() && code.is_string_instruction() && rng.one_in(2) {
        instruction.set_has_repne_prefix(true);
    }
    let mut data = vec![0; DATA_LEN];
    let mut stack = vec![0; STACK_LEN];
    for bytes in [&mut data, &mut stack] {
        for chunk in bytes.chunks_exact_mut(16) {
            let value = if rng.one_in(2) { rng.x87() } else { rng.xmm() };
            chunk.copy_from_slice(&value.to_le_bytes());
        }
    }
    tame(
        &mut instruction,
        base,
        &mut regs,
        &mut data,
        &mut stack,
        rng,
    )?;
    let mut encoder = Encoder::new(64);
    encoder.encode(&instruction, (base + AT) as u64).ok()?;
    regs.rip = (base + AT) as u64;
    Some(Case {
        instruction,
        bytes: encoder.take_buffer(),
        regs,
        data,
        stack,
    })
}

fn immediate(instruction: &mut Instruction, n: u32, kind: OpKind, value: u64) {
    instruction.set_op_kind(n, kind);
    instruction.set_immediate_u64(n, value);
}

fn sign_extended(instruction: &mut Instruction, n: u32, kind: OpKind, rng: &mut Rng) {
    instruction.set_op_kind(n, kind);
    instruction.set_immediate_i64(n, i64::from(rng.integer() as i8));
}

/// Flags that user code can set freely, without those that would trap (TF) or check alignment (AC).
const FREE_FLAGS: u64 = 0x8d5;
const DF: u64 = 0x400;

fn random_regs(base: usize, rng: &mut Rng) -> Regs {
    let mut regs = Regs {
        fx: [0; 512],
        gpr: [0; 16],
        rflags: 0x202,
        rip: 0,
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
    // Sticky exception flags mostly where they are masked.
    let mut sticky = rng.next() as u16 & fcw & 0x3f;
    if rng.one_in(20) {
        // An exception that waits: error summary and busy go with it.
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
    if crate::judge::is_intel() {
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
    regs
}

/// Gives operand `n` an address of a random shape and sets the registers so that it points into the data pages:
/// mostly in the middle, sometimes across the page boundary, sometimes into the hole behind them.
fn place_memory(
    instruction: &mut Instruction,
    n: u32,
    base: usize,
    regs: &mut Regs,
    rng: &mut Rng,
) {
    instruction.set_op_kind(n, OpKind::Memory);
    let size = instruction.memory_size().size().max(1);
    let aligned = rng.one_in(2) || size >= 16;
    let offset = match rng.below(16) {
        0 => DATA + PAGE - rng.below(size) - 1 + rng.below(2),
        1 => HOLE - rng.below(size + 8),
        2 => DATA + PAGE - size,
        3 => HOLE - size,
        4 => DATA + 0x100 + rng.below(DATA_LEN - 0x300),
        _ if aligned => DATA + 0x100 + 16 * rng.below((DATA_LEN - 0x300) / 16),
        _ => DATA + 0x100 + size * rng.below((DATA_LEN - 0x300) / size),
    };
    let mut target = (base + offset) as u64;
    match rng.below(16) {
        0 => {
            instruction.set_segment_prefix(Register::GS);
            target = target.wrapping_sub(GS_BASE);
        }
        // These have no base in 64-bit mode.
        1 => instruction.set_segment_prefix(rng.pick(&[
            Register::ES,
            Register::CS,
            Register::SS,
            Register::DS,
        ])),
        _ => {}
    }
    if rng.one_in(8) {
        instruction.set_memory_base(Register::RIP);
        instruction.set_memory_displ_size(8);
        instruction.set_memory_displacement64(target);
        return;
    }
    let narrow = rng.one_in(12);
    let first = if narrow { Register::EAX } else { Register::RAX };
    let mut b = rng.below(16);
    // A register that is also an operand keeps its value for both roles; RSP stays a stack pointer.
    while b == 4 {
        b = rng.below(16);
    }
    let mut displacement = match rng.below(4) {
        0 => 0i64,
        1 => i64::from(rng.next() as i8),
        _ => i64::from(rng.next() as i32),
    };
    if narrow {
        displacement = i64::from(displacement as i8);
    }
    instruction.set_memory_base(nth(first, b));
    let mut scaled = 0;
    if rng.one_in(3) {
        let i = rng.below(16);
        if i != 4 && i != b {
            let scale = 1 << rng.below(4);
            instruction.set_memory_index(nth(first, i));
            instruction.set_memory_index_scale(scale);
            scaled = regs.gpr[i].wrapping_mul(u64::from(scale));
        }
    }
    instruction.set_memory_displacement64(displacement as u64);
    instruction.set_memory_displ_size(match displacement {
        0 => 0,
        -128..=127 => 1,
        _ => 8,
    });
    let mut value = target
        .wrapping_sub(scaled)
        .wrapping_sub(displacement as u64);
    if narrow {
        value = (value & 0xffff_ffff) | (rng.next() << 32);
    }
    regs.gpr[b] = value;
}

/// Bends what a form needs to be judged at all: string pointers, branch targets, shift counts whose result Intel
/// leaves undefined.
fn tame(
    instruction: &mut Instruction,
    base: usize,
    regs: &mut Regs,
    data: &mut [u8],
    stack: &mut [u8],
    rng: &mut Rng,
) -> Option<()> {
    use Mnemonic as M;
    let mnemonic = instruction.mnemonic();
    let target = (base + BRANCH_TARGET) as u64;
    let sp = (regs.gpr[4] as usize) - base - STACK;
    if instruction.is_string_instruction() {
        let span = if rng.one_in(12) {
            DATA_LEN
        } else {
            DATA_LEN - 0x400
        };
        regs.gpr[6] = (base + DATA + 0x200 + rng.below(span - 0x200)) as u64;
        regs.gpr[7] = (base + DATA + 0x200 + rng.below(span - 0x200)) as u64;
        if rng.one_in(8) {
            // For the source only; the destination is in ES whatever the prefix.
            instruction.set_segment_prefix(Register::GS);
            regs.gpr[6] -= GS_BASE;
        }
        regs.gpr[1] = if rng.one_in(8) {
            0
        } else {
            rng.below(40) as u64
        };
        if rng.one_in(3) {
            // Equal stretches, so that repeated compares run for a while.
            data.fill(regs.gpr[0] as u8);
            let odd = rng.below(DATA_LEN);
            data[odd] ^= 1;
        }
        return Some(());
    }
    match mnemonic {
        M::Maskmovq | M::Maskmovdqu => regs.gpr[7] = (base + DATA + rng.below(DATA_LEN)) as u64,
        M::Xlatb if rng.one_in(4) => {
            instruction.set_segment_prefix(Register::GS);
            regs.gpr[3] = (base + DATA + rng.below(DATA_LEN - 0x100)) as u64 - GS_BASE;
        }
        M::Xlatb => regs.gpr[3] = (base + DATA + rng.below(DATA_LEN - 0x100)) as u64,
        M::Leave | M::Enter => {
            regs.gpr[5] = (base + STACK + 0x400 + 8 * rng.below(0x100)) as u64;
            if mnemonic == M::Enter {
                // The old frame and the new one do not overlap: in which order one is read and the other written is not
                // architectural.
                regs.gpr[5] += 0xc00;
                instruction.set_immediate16(rng.below(0x200) as u16);
            }
        }
        M::Ret => stack[sp..sp + 8].copy_from_slice(&target.to_le_bytes()),
        M::Popf | M::Popfq => {
            let flags = 0x202 | rng.next() & (FREE_FLAGS | DF | 1 << 21);
            stack[sp..sp + 8].copy_from_slice(&flags.to_le_bytes());
        }
        M::Call | M::Jmp => match instruction.op0_kind() {
            OpKind::Register => {
                let r = instruction.op0_register();
                if r.size() != 8 || r == Register::RSP {
                    return None;
                }
                regs.gpr[r.number()] = target;
            }
            OpKind::Memory => {
                let address = address(instruction, regs) as usize;
                let at = address.checked_sub(base + DATA)?;
                if instruction.memory_size().size() != 8 {
                    return None;
                }
                if at + 8 <= DATA_LEN {
                    data[at..at + 8].copy_from_slice(&target.to_le_bytes());
                }
            }
            _ => {}
        },
        M::Bt | M::Bts | M::Btr | M::Btc
            if instruction.op0_kind() == OpKind::Memory
                && instruction.op1_kind() == OpKind::Register =>
        {
            // The offset reaches beyond the operand: keep it within the data, and off the address registers.
            let offset = instruction.op1_register();
            let full = offset.full_register();
            if full == instruction.memory_base().full_register()
                || full == instruction.memory_index().full_register()
                || full == Register::RSP
            {
                return None;
            }
            let near = rng.below(0x400) as i64 - 0x200;
            regs.gpr[offset.number()] = near as u64;
        }
        M::Shld | M::Shrd
            if instruction.op0_register().size() == 2 || instruction.memory_size().size() == 2 =>
        {
            let count = if instruction.op2_kind() == OpKind::Register {
                regs.gpr[1] as u8
            } else {
                instruction.immediate8()
            };
            if count & 31 > 16 {
                return None;
            }
        }
        // With a zero source the destination is undefined.
        M::Bsf | M::Bsr if instruction.op1_kind() == OpKind::Register => {
            regs.gpr[instruction.op1_register().number()] |= 1 << rng.below(16);
        }
        M::Fxrstor | M::Fxrstor64 => {
            let at = (address(instruction, regs) as usize).wrapping_sub(base + DATA);
            // Reserved bits of MXCSR would be #GP; pointers that are not canonical are mended in a way of the host's.
            for (field, len) in [(14, 2), (22, 2), (26, 2)] {
                if let Some(bytes) =
                    data.get_mut(at.wrapping_add(field)..at.wrapping_add(field + len))
                {
                    bytes.fill(0);
                }
            }
        }
        M::Dpps | M::Dppd => {
            // An unmasked exception of a product ends them before the sum has raised its own.
            regs.fx[24] |= 0x80;
            regs.fx[25] |= 0x1f;
        }
        M::Div | M::Idiv if rng.one_in(2) => {
            // Often a quotient that fits.
            regs.gpr[2] = if mnemonic == M::Idiv && rng.one_in(2) {
                u64::MAX
            } else {
                0
            };
        }
        _ => {}
    }
    Some(())
}

/// The linear address of the memory operand.
pub fn address(instruction: &Instruction, regs: &Regs) -> u64 {
    let value = |register: Register| match register {
        Register::None => 0,
        r if r.size() == 4 => regs.gpr[r.number()] & 0xffff_ffff,
        r => regs.gpr[r.number()],
    };
    let segment = if instruction.segment_prefix() == Register::GS {
        GS_BASE
    } else {
        0
    };
    if instruction.memory_base() == Register::RIP {
        return instruction.memory_displacement64().wrapping_add(segment);
    }
    let sum = value(instruction.memory_base())
        .wrapping_add(
            value(instruction.memory_index()).wrapping_mul(instruction.memory_index_scale().into()),
        )
        .wrapping_add(instruction.memory_displacement64());
    let offset = if instruction.memory_base().size() == 4 {
        sum & 0xffff_ffff
    } else {
        sum
    };
    offset.wrapping_add(segment)
}
