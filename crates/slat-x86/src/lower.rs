//! Lowering converts a decoded instruction to an operation. Module `operands` does the part that is the same for all
//! instructions. The other parts are in one table, whose rows are in the files of the handlers.

mod operands;

use crate::Cpu;
use crate::exec;
use crate::mode;
use crate::op::{Break, Flow, Handler, Lower, MEM, NONE, Op, Row, form};
use crate::pool::List;
use crate::{simd, svm, vector, x87};
use iced_x86::{Code, CpuidFeature, EncodingKind, FlowControl, Instruction, Mnemonic};

/// How the instructions with one mnemonic are lowered.
#[derive(Clone, Copy)]
enum Lowering {
    General(Lower),
    /// A SIMD instruction, which the host may lack and the guest may have disabled.
    Simd(Lower),
}

/// The rows of the table of general instructions, file by file.
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

/// The table of instructions, by mnemonic. x87 instructions have no rows, because their opcodes identify them (module
/// `x87`).
static TABLE: [Option<Lowering>; Table::MNEMONICS] = {
    let mut table = Table::EMPTY;
    table.add(&GENERAL, false);
    table.add(&simd::ROWS, true);
    table.add(&simd::VEX_ROWS, true);
    table.by_mnemonic
};

/// The table under construction, at compile time.
struct Table {
    by_mnemonic: [Option<Lowering>; Table::MNEMONICS],
    /// For each mnemonic, the number of its row.
    rows: [u16; Table::MNEMONICS],
    count: u16,
}

impl Table {
    /// The number of elements of the table: more than the number of the last mnemonic that has a row.
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

    /// Adds a row. If one of its mnemonics already has a row, the crate does not compile.
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

/// Appends the operations of an instruction, at most two. Returns whether the instruction ends the block. `code` is the
/// instruction's bytes, and `blank` is the result of [`blank`] for the mode. `offset` and `len` are the instruction's
/// position and length in the block.
pub(crate) fn lower(
    insn: &Instruction,
    code: &[u8],
    mode: u8,
    blank: &Op,
    offset: u8,
    len: u8,
    ops: &mut List<Op>,
) -> bool {
    let ends = insn.flow_control() != FlowControl::Next;
    if ends
        && insn.is_jcc_short_or_near()
        && let Some(previous) = ops.last_mut()
    {
        let condition = exec::control::condition_number(insn.condition_code());
        if exec::alu::fuse(previous, condition, insn.near_branch_target(), len) {
            return true;
        }
    }
    let op = ops.push(*blank);
    (op.offset, op.len) = (offset, len);
    if lower_into(op, insn, code, mode) {
        let behind = offset.wrapping_add(len);
        ops.push(Op {
            handler: check,
            offset: behind,
            len: 0,
            count: 0,
            ..invalid()
        });
    }
    ends
}

/// Returns the operation of one instruction. The arguments are those of [`lower`]. Also returns whether a check must
/// follow as the next operation, because the handler may store without checking whether the store has changed code.
pub(crate) fn alone(insn: &Instruction, code: &[u8], mode: u8, offset: u8, len: u8) -> (Op, bool) {
    let mut op = Op {
        offset,
        len,
        ..blank(mode)
    };
    let may_store = lower_into(&mut op, insn, code, mode);
    (op, may_store)
}

/// Returns the initial operation for a mode. Lowering an instruction begins with a copy of it.
pub(crate) fn blank(mode: u8) -> Op {
    Op {
        address_size: (mode::width(mode) / 8) as u8,
        ..invalid()
    }
}

/// Lowers an instruction into its operation. Returns whether a check must follow as the next operation.
#[inline(always)]
fn lower_into(op: &mut Op, insn: &Instruction, code: &[u8], mode: u8) -> bool {
    op.mnemonic = insn.mnemonic();
    operands::fill_in(insn, mode, op);
    let has_vex = || insn.encoding() == EncodingKind::VEX;
    let row = TABLE.get(op.mnemonic as usize).copied().flatten();
    let (handler, may_store) = match row {
        _ if mode & mode::NO_VEX != 0 && has_vex() => (Some(undefined as Handler), false),
        Some(Lowering::General(lower)) => (lower(insn, op), false),
        Some(Lowering::Simd(lower)) => match insn.code() {
            // The string instructions MOVSD and CMPSD have the same mnemonics as two SSE2 instructions.
            Code::Movsd_m32_m32 => (exec::string::moving(insn, op), false),
            Code::Cmpsd_m32_m32 => (exec::string::comparing(insn, op), false),
            _ => (lower_simd(lower, insn, mode, op), stores(op)),
        },
        None => (lower_x87(insn, code, mode, op), op.r[0] == MEM),
    };
    op.handler = handler.unwrap_or_else(|| missing(insn));
    may_store
}

/// Whether a SIMD instruction may store to memory.
fn stores(op: &Op) -> bool {
    let is_hidden = matches!(
        op.mnemonic,
        Mnemonic::Maskmovq | Mnemonic::Maskmovdqu | Mnemonic::Vmaskmovdqu
    );
    op.r[0] == MEM || is_hidden
}

/// Chooses the handler of a SIMD instruction. The handler raises #UD or #NM if the guest has disabled such
/// instructions.
fn lower_simd(lower: Lower, insn: &Instruction, mode: u8, op: &mut Op) -> Option<Handler> {
    if !simd::is_offered(insn) {
        return Some(undefined);
    }
    let off = match insn.encoding() {
        EncodingKind::VEX => mode::NO_AVX | mode::TASK_SWITCHED,
        _ => mode::NO_X87 | mode::NO_SSE | mode::TASK_SWITCHED,
    };
    match mode & off {
        0 => simd::choose(lower, insn, op),
        _ => lower_simd_or_off(lower, insn, mode, op),
    }
}

/// Chooses the handler of a SIMD instruction like [`lower_simd`], but for a mode in which the guest has disabled some
/// SIMD instructions.
#[inline(never)]
fn lower_simd_or_off(lower: Lower, insn: &Instruction, mode: u8, op: &mut Op) -> Option<Handler> {
    let handler = simd::choose(lower, insn, op)?;
    let is_mmx = !insn.cpuid_features().iter().any(|f| is_sse(*f));
    let off = match (insn.encoding(), is_mmx) {
        (EncodingKind::VEX, _) => mode::NO_AVX,
        (_, true) => mode::NO_X87,
        (_, false) => mode::NO_SSE,
    };
    Some(match mode {
        _ if mode & off != 0 => undefined,
        _ if mode & mode::TASK_SWITCHED != 0 => not_available,
        _ => handler,
    })
}

/// Chooses the handler of an instruction that has no row in [`Table`]: an x87 instruction, or an instruction that this
/// CPU does not have.
#[inline(never)]
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

/// Returns the handler of an instruction that this CPU does not implement, although its CPUID may report the feature.
#[cold]
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

/// The check operation, which ends the block if the last store has changed code. It follows an instruction that may
/// store to memory but does not check for changed code itself.
fn check(cpu: &mut Cpu, _: &Op) -> Flow {
    if cpu.stop { Err(Break::End) } else { Ok(()) }
}

/// Raises #UD for bytes that are no instruction; if `aux` is set, raises #GP, because the instruction is too long.
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
