//! Lowering: from a decoded instruction to an operation.

use crate::Cpu;
use crate::exec;
use crate::mode;
use crate::op::{Break, Flow, Handler, Lower, MEM, NONE, Op, Row, form, segment};
use crate::pool::List;
use crate::{simd, svm, vector, x87};
use iced_x86::{
    Code, CpuidFeature, EncodingKind, FlowControl, Instruction, Mnemonic, OpKind, Register,
};

/// How the instructions of a mnemonic are lowered.
#[derive(Clone, Copy)]
enum Lowering {
    General(Lower),
    /// A SIMD instruction: the host may not have it, and the guest may have switched it off.
    Simd(Lower),
}

/// The rows of general instructions.
const GENERAL: [&[Row]; 27] = [
    exec::data::ROWS,
    exec::alu::BINARY,
    exec::alu::UNARY,
    exec::control::ROWS,
    exec::stack::ROWS,
    exec::shift::ROWS,
    exec::shift::DOUBLE,
    exec::muldiv::ROWS,
    exec::bits::TESTS,
    exec::bits::SCANS,
    exec::bits::CRC,
    exec::bmi::ROWS,
    exec::bmi::SOURCES,
    exec::atomic::ROWS,
    exec::string::ROWS,
    exec::far::ROWS,
    exec::syscall::ROWS,
    exec::descriptor::ROWS,
    exec::io::ROWS,
    exec::system::ROWS,
    exec::registers::ROWS,
    exec::msr::ROWS,
    exec::hypercall::ROWS,
    exec::fpu_state::ROWS,
    exec::decimal::ROWS,
    exec::xsave::ROWS,
    svm::instructions::ROWS,
];

/// The table of instructions, by mnemonic. x87 instructions have no rows: their opcodes tell them (`x87`).
static TABLE: [Option<Lowering>; Table::MNEMONICS] = {
    let mut table = Table::EMPTY;
    table.add(&GENERAL, false);
    table.add(&simd::ROWS, true);
    table.add(&simd::VEX_ROWS, true);
    table.by_mnemonic
};

/// The table while the compiler makes it.
struct Table {
    by_mnemonic: [Option<Lowering>; Table::MNEMONICS],
    /// The number of the row of each mnemonic.
    rows: [u16; Table::MNEMONICS],
    count: u16,
}

impl Table {
    /// More than the last mnemonic with a row, as a number.
    const MNEMONICS: usize = 2048;

    const EMPTY: Self = Self {
        by_mnemonic: [None; Self::MNEMONICS],
        rows: [0; Self::MNEMONICS],
        count: 0,
    };

    /// Adds the rows of several files.
    const fn add(&mut self, files: &[&[Row]], is_simd: bool) {
        let mut file = 0;
        while file < files.len() {
            let mut n = 0;
            while n < files[file].len() {
                self.add_row(&files[file][n], is_simd);
                n += 1;
            }
            file += 1;
        }
    }

    /// Adds a row. Does not compile if one of its mnemonics has another row.
    const fn add_row(&mut self, row: &Row, is_simd: bool) {
        self.count += 1;
        let mut list = 0;
        while list < row.mnemonics.len() {
            let mut n = 0;
            while n < row.mnemonics[list].len() {
                let mnemonic = row.mnemonics[list][n] as usize;
                let known = self.rows[mnemonic];
                assert!(known == 0 || known == self.count, "a mnemonic has two rows");
                self.rows[mnemonic] = self.count;
                self.by_mnemonic[mnemonic] = Some(match is_simd {
                    true => Lowering::Simd(row.lower),
                    false => Lowering::General(row.lower),
                });
                n += 1;
            }
            list += 1;
        }
    }
}

/// Returns how an instruction is lowered; `None` for an instruction without a row.
fn lowering(insn: &Instruction) -> Option<Lowering> {
    match insn.code() {
        // Two string instructions have the mnemonics of SSE2 instructions.
        Code::Movsd_m32_m32 => Some(Lowering::General(exec::string::moving)),
        Code::Cmpsd_m32_m32 => Some(Lowering::General(exec::string::comparing)),
        _ => *TABLE.get(insn.mnemonic() as usize)?,
    }
}

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
    let is_vex = insn.encoding() == EncodingKind::VEX;
    let row = lowering(insn);
    let handler = match row {
        _ if is_vex && mode & mode::NO_VEX != 0 => Some(undefined as Handler),
        Some(Lowering::General(lower)) => lower(insn, &mut op),
        Some(Lowering::Simd(lower)) => lower_simd(lower, insn, mode, &mut op),
        None => lower_x87(insn, code, mode, &mut op),
    };
    op.handler = handler.unwrap_or_else(|| missing(insn));
    let checks = matches!(row, Some(Lowering::General(_)));
    let hidden = matches!(
        op.mnemonic,
        Mnemonic::Maskmovq | Mnemonic::Maskmovdqu | Mnemonic::Vmaskmovdqu
    );
    (op, !checks && (op.r[0] == MEM || hidden))
}

/// Chooses the handler of a SIMD instruction. The handler raises #UD or #NM if such instructions are switched off.
fn lower_simd(lower: Lower, insn: &Instruction, mode: u8, op: &mut Op) -> Option<Handler> {
    let is_vex = match insn.encoding() {
        EncodingKind::VEX => true,
        EncodingKind::Legacy => false,
        _ => return None,
    };
    let handler = simd::choose(lower, insn, op)?;
    if mode & (mode::NO_AVX | mode::NO_X87 | mode::NO_SSE | mode::TASK_SWITCHED) == 0 {
        return Some(handler);
    }
    let is_mmx = !insn.cpuid_features().iter().any(|f| is_sse(*f));
    let off = match (is_vex, is_mmx) {
        (true, _) => mode::NO_AVX,
        (_, true) => mode::NO_X87,
        (_, false) => mode::NO_SSE,
    };
    Some(match mode {
        _ if mode & off != 0 => undefined,
        _ if mode & mode::TASK_SWITCHED != 0 => not_available,
        _ => handler,
    })
}

/// Like [`lower_simd`], for an instruction without a row: an x87 instruction, or none that this CPU has.
fn lower_x87(insn: &Instruction, code: &[u8], mode: u8, op: &mut Op) -> Option<Handler> {
    if insn.encoding() != EncodingKind::Legacy {
        return None;
    }
    let handler = x87::lower(insn, code, op)?;
    match mode & (mode::NO_X87 | mode::TASK_SWITCHED) {
        0 => Some(handler),
        _ => Some(not_available),
    }
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
