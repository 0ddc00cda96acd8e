//! Lowering: from a decoded instruction to an operation.

use crate::Cpu;
use crate::cpu::mode;
use crate::exec;
use crate::op::{Break, Flow, Handler, MEM, NONE, Op, form, segment};
use crate::pool::List;
use crate::{simd, svm, vector, x87};
use iced_x86::{CpuidFeature, EncodingKind, FlowControl, Instruction, Mnemonic, OpKind, Register};

/// Appends the operations of an instruction, at most two. Returns whether the instruction ends the block. `code` is the
/// instruction's own bytes, `offset` and `len` are its position in the block.
pub(crate) fn lower(
    insn: &Instruction,
    code: &[u8],
    mode: u8,
    offset: u8,
    len: u8,
    ops: &mut List<Op>,
) -> bool {
    if insn.is_jcc_short_or_near()
        && let Some(previous) = ops.last_mut()
    {
        let condition = exec::control::condition_number(insn.condition_code());
        if exec::alu::fuse(previous, condition, insn.near_branch_target(), len) {
            return true;
        }
    }
    let (op, may_store) = alone(insn, code, mode, offset, len);
    ops.push(op);
    if may_store {
        let behind = offset.wrapping_add(len);
        ops.push(Op {
            handler: check,
            offset: behind,
            len: 0,
            count: 0,
            ..invalid()
        });
    }
    insn.flow_control() != FlowControl::Next
}

/// Returns the operation of one instruction; the arguments are those of [`lower`]. Also returns whether the next
/// operation must be a check, because the handler may store and does not check whether the store changed code.
pub(crate) fn alone(insn: &Instruction, code: &[u8], mode: u8, offset: u8, len: u8) -> (Op, bool) {
    let mut op = Op {
        offset,
        len,
        count: 1,
        mnemonic: insn.mnemonic(),
        ..invalid()
    };
    operands(insn, mode, &mut op);
    let vex = insn.encoding() == EncodingKind::VEX;
    let found = match vex && mode & mode::NO_VEX != 0 {
        true => Some(undefined as Handler),
        false => LOWERINGS.iter().find_map(|lower| lower(insn, &mut op)),
    };
    if let Some(handler) = found {
        op.handler = handler;
        return (op, false);
    }
    op.handler = floating(insn, code, mode, &mut op).unwrap_or_else(|| missing(insn));
    let hidden = matches!(
        insn.mnemonic(),
        Mnemonic::Maskmovq | Mnemonic::Maskmovdqu | Mnemonic::Vmaskmovdqu
    );
    (op, op.r[0] == MEM || hidden)
}

const LOWERINGS: [fn(&Instruction, &mut Op) -> Option<Handler>; 19] = [
    exec::data::lower,
    exec::alu::lower,
    exec::control::lower,
    exec::stack::lower,
    exec::shift::lower,
    exec::muldiv::lower,
    exec::bits::lower,
    exec::bmi::lower,
    exec::atomic::lower,
    exec::string::lower,
    exec::far::lower,
    exec::syscall::lower,
    exec::descriptor::lower,
    exec::io::lower,
    exec::system::lower,
    svm::instructions::lower,
    exec::fpu_state::lower,
    exec::decimal::lower,
    exec::xsave::lower,
];

/// Chooses the handler of an SSE, AVX or x87 instruction. The handler raises #UD or #NM if such
/// instructions are switched off.
fn floating(insn: &Instruction, code: &[u8], mode: u8, op: &mut Op) -> Option<Handler> {
    let vex = insn.encoding() == EncodingKind::VEX;
    if !vex && insn.encoding() != EncodingKind::Legacy {
        return None;
    }
    if let Some(handler) = simd::lower(insn, op) {
        let mmx = !insn.cpuid_features().iter().any(|f| is_sse(*f));
        let off = match (vex, mmx) {
            (true, _) => mode::NO_AVX,
            (_, true) => mode::NO_X87,
            (_, false) => mode::NO_SSE,
        };
        return Some(match mode {
            _ if mode & off != 0 => undefined,
            _ if mode & mode::TASK_SWITCHED != 0 => not_available,
            _ => handler,
        });
    }
    let handler = x87::lower(insn, code, op)?;
    let off = mode::NO_X87 | mode::TASK_SWITCHED;
    Some(if mode & off != 0 {
        not_available
    } else {
        handler
    })
}

fn is_sse(feature: CpuidFeature) -> bool {
    use CpuidFeature::*;
    matches!(
        feature,
        SSE | SSE2 | SSE3 | SSSE3 | SSE4_1 | SSE4_2 | SSE4A | AES | PCLMULQDQ | SHA | GFNI
    )
}

/// Returns the handler of an instruction that CPUs with our CPUID features have, but this one does not.
fn missing(insn: &Instruction) -> Handler {
    use CpuidFeature::*;
    let known = |f: &CpuidFeature| {
        is_sse(*f)
            || matches!(
                f,
                INTEL8086
                    | INTEL186
                    | INTEL286
                    | INTEL386
                    | INTEL486
                    | FPU
                    | FPU287
                    | FPU387
                    | MMX
                    | FXSR
                    | CMOV
                    | X64
            )
    };
    let ours = insn.encoding() == EncodingKind::Legacy && insn.cpuid_features().iter().all(known);
    match ours {
        true => unimplemented,
        false => undefined,
    }
}

fn undefined(cpu: &mut Cpu, _: &Op) -> Flow {
    Err(cpu.ud())
}
fn not_available(cpu: &mut Cpu, _: &Op) -> Flow {
    Err(cpu.raise(vector::NM, None))
}
fn unimplemented(cpu: &mut Cpu, _: &Op) -> Flow {
    Err(cpu.unimplemented("an instruction that this CPU does not implement"))
}

/// Ends the block if an instruction's store requires it. This operation follows an instruction that may store and does
/// not check for itself.
fn check(cpu: &mut Cpu, _: &Op) -> Flow {
    if cpu.stop { Err(Break::End) } else { Ok(()) }
}

/// Raises #UD for bytes that are no instruction, or #GP if `aux` is set: there are too many of them.
fn bad(cpu: &mut Cpu, op: &Op) -> Flow {
    Err(if op.aux != 0 { cpu.gp() } else { cpu.ud() })
}

/// Returns the operation for bytes that are no instruction.
pub(crate) fn invalid() -> Op {
    Op {
        handler: bad,
        imm: 0,
        disp: 0,
        r: [NONE; 4],
        base: NONE,
        index: NONE,
        scale: 0,
        seg: NONE,
        form: form::FULL,
        address_size: 8,
        size: 3,
        len: 1,
        offset: 0,
        aux: 0,
        lock: false,
        rep: 0,
        fusible: 0,
        count: 1,
        mnemonic: Mnemonic::INVALID,
    }
}

/// Fills in the fields that all instructions have.
fn operands(insn: &Instruction, mode: u8, op: &mut Op) {
    op.lock = insn.has_lock_prefix();
    op.rep = if insn.has_repe_prefix() {
        1
    } else if insn.has_repne_prefix() {
        2
    } else {
        0
    };
    op.address_size = (mode::width(mode) / 8) as u8;
    for k in 0..insn.op_count() {
        let kind = insn.op_kind(k);
        let mut number = NONE;
        match kind {
            OpKind::Register => number = register(insn.op_register(k)),
            OpKind::Memory => {
                number = MEM;
                memory(insn, mode, op);
            }
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
                op.imm = insn.near_branch_target();
            }
            OpKind::FarBranch16 | OpKind::FarBranch32 => {}
            OpKind::MemorySegSI | OpKind::MemorySegDI | OpKind::MemoryESDI => {
                string_operand(insn, 2, op);
            }
            OpKind::MemorySegESI | OpKind::MemorySegEDI | OpKind::MemoryESEDI => {
                string_operand(insn, 4, op);
            }
            OpKind::MemorySegRSI | OpKind::MemorySegRDI | OpKind::MemoryESRDI => {
                string_operand(insn, 8, op);
            }
            _ if k > 0
                && op.r[0] == NONE
                && insn.op_kind(0) != OpKind::Register
                && insn.op_kind(0) != OpKind::Memory => {}
            _ => op.imm = insn.immediate(k),
        }
        if k < 4 {
            op.r[k as usize] = number;
        }
    }
    let bytes = match insn.op0_kind() {
        OpKind::Register => insn.op0_register().size(),
        OpKind::Memory => insn.memory_size().size(),
        _ => 8,
    };
    op.size = if bytes <= 8 {
        bytes.max(1).trailing_zeros() as u8
    } else {
        3
    };
}

fn string_operand(insn: &Instruction, address_size: u8, op: &mut Op) {
    op.address_size = address_size;
    op.seg = segment(insn.memory_segment());
}

/// Returns the number of a register in its file; 16–19 for AH CH DH BH.
fn register(r: Register) -> u8 {
    let n = r.number() as u8;
    if r.is_gpr8() {
        match n {
            0..4 => n,
            4..8 => n + 12,
            _ => n - 4,
        }
    } else {
        n
    }
}

fn memory(insn: &Instruction, mode: u8, op: &mut Op) {
    let (base, index) = (insn.memory_base(), insn.memory_index());
    let relative = matches!(base, Register::RIP | Register::EIP);
    let gpr = |r: Register| match r {
        Register::None => NONE,
        r => r.full_register().number() as u8,
    };
    op.base = if relative { NONE } else { gpr(base) };
    op.index = gpr(index);
    op.scale = insn.memory_index_scale().trailing_zeros() as u8;
    op.disp = insn.memory_displacement64();
    op.seg = match insn.segment_prefix() {
        Register::ES | Register::CS | Register::SS | Register::DS
            if mode & mode::BITS == mode::BITS_64 =>
        {
            // The prefix has no effect; the base register decides whether a bad address is #SS or #GP.
            let stack = matches!(
                base,
                Register::RSP | Register::RBP | Register::ESP | Register::EBP
            );
            if stack { 2 } else { 3 }
        }
        _ => segment(insn.memory_segment()),
    };
    op.address_size = match (base, index) {
        // The index register of a gather is a vector register, and does not tell the address size.
        (Register::None, index) if !index.is_gpr() => insn.memory_displ_size().clamp(2, 8) as u8,
        (Register::None, index) => index.size() as u8,
        (base, _) => base.size() as u8,
    };
    let flat = mode & mode::BITS == mode::BITS_64 && op.seg < 4 && op.address_size == 8;
    op.form = match (flat, op.base != NONE, op.index != NONE) {
        (true, true, false) => form::BASE,
        (true, true, true) => form::INDEX,
        (true, false, false) => form::DISP,
        _ => form::FULL,
    };
}
