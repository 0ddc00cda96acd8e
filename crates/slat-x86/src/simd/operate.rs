//! Handlers of instructions that a stub executes, with XMM and memory operands, and results in XMM registers or flags.
//! A handler fetches the operands, calls the stub, and stores the result.

use super::forms::Kind;
use super::host::{self, Entry, FLAGS, MASKS, NOT_FOR_HOST, Work, runs_on_host};
use super::lanes::Lanes;
use super::{pairs, table};
use crate::Cpu;
use crate::op::{Break, Flow, Handler, MEM, Op, Row};
use crate::state::{control, flags};
use iced_x86::{Instruction, Mnemonic, OpKind};

pub(super) const ROWS: &[Row] = &[
    Row {
        mnemonics: &[pairs::LEGACY, table::SHA, table::SHIFTS],
        lower,
    },
    Row {
        mnemonics: &[table::STRINGS],
        lower: lower_strings,
    },
];

fn lower_strings(_: &Instruction, op: &mut Op) -> Option<Handler> {
    op.aux = op.imm as u8;
    op.imm = table::string(op.mnemonic)? as usize as u64;
    Some(match (returns_index(op.mnemonic), op.r[1] == MEM) {
        (true, false) => strings::<0, true>,
        (true, true) => strings::<UNALIGNED, true>,
        (false, false) => strings::<0, false>,
        (false, true) => strings::<UNALIGNED, false>,
    })
}

fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    let mnemonic = op.mnemonic;
    op.aux = op.imm as u8;
    if insn.op1_kind() == OpKind::Immediate8 {
        op.imm = table::shift(mnemonic)? as usize as u64;
        op.r[1] = op.r[0];
        return Some(int::<0>);
    }
    let (kind, stub) = table::xmm(mnemonic)?;
    op.imm = stub as usize as u64;
    let from = if op.r[1] == MEM {
        insn.memory_size().size()
    } else {
        0
    };
    if mnemonic == Mnemonic::Insertps && from != 0 {
        // If the source of INSERTPS is in memory, the bits of the immediate that select a source element have no
        // effect.
        op.aux &= 0x3f;
    }
    macro_rules! by_source {
        ($handler:ident) => {
            match from {
                0 => $handler::<0>,
                2 => $handler::<2>,
                4 => $handler::<4>,
                8 => $handler::<8>,
                16 => $handler::<16>,
                _ => return None,
            }
        };
    }
    let handler: Handler = match kind {
        Kind::Int => by_source!(int),
        Kind::Float(_) => by_source!(float),
        Kind::IntFlags => by_source!(int_flags),
        Kind::FloatFlags => by_source!(float_flags),
        Kind::ImplicitXmm0 => by_source!(implicit_xmm0),
    };
    Some(handler)
}

/// Whether a string comparison returns an index in ECX. If not, it returns a mask in XMM0.
fn returns_index(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(mnemonic, Pcmpestri | Pcmpestri64 | Pcmpistri)
}

/// The value of `FROM` for a memory operand of 16 bytes that need not be aligned.
pub(super) const UNALIGNED: u8 = 17;

/// Reads the second operand: a register if `FROM` is 0, else `FROM` bytes of memory, zero-extended.
#[inline(always)]
pub(super) fn source<const FROM: u8>(cpu: &mut Cpu, op: &Op) -> Result<u128, Break> {
    Ok(match FROM {
        0 => cpu.state.xmm[usize::from(op.r[1])],
        2 => cpu.load_mem::<u16>(op)?.into(),
        4 => cpu.load_mem::<u32>(op)?.into(),
        8 => cpu.load_mem::<u64>(op)?.into(),
        16 => {
            let lin = cpu.lin(op, 16)?;
            cpu.aligned_operand(lin)?;
            cpu.load::<u128>(lin)?
        }
        _ => cpu.load_mem::<u128>(op)?,
    })
}

fn int<const FROM: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    let src = source::<FROM>(cpu, op)?;
    let dst = &mut cpu.state.xmm[usize::from(op.r[0])];
    *dst = host::int(Entry(op.imm), *dst, src, op.aux);
    Ok(())
}

fn implicit_xmm0<const FROM: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    let src = source::<FROM>(cpu, op)?;
    let xmm0 = cpu.state.xmm[0];
    let dst = &mut cpu.state.xmm[usize::from(op.r[0])];
    *dst = host::implicit_xmm0(Entry(op.imm), *dst, src, xmm0);
    Ok(())
}

fn int_flags<const FROM: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    let src = source::<FROM>(cpu, op)?;
    let result = host::int_flags(Entry(op.imm), cpu.state.xmm[usize::from(op.r[0])], src);
    cpu.set_flags(flags::ARITHMETIC, result & flags::ARITHMETIC);
    Ok(())
}

fn float<const FROM: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    let src = source::<FROM>(cpu, op)?;
    let dst = cpu.state.xmm[usize::from(op.r[0])];
    let mut work = Work {
        dst,
        src,
        gpr: 0,
        imm: op.aux,
    };
    run_float(cpu, op, &mut work)?;
    cpu.state.xmm[usize::from(op.r[0])] = work.dst;
    Ok(())
}

fn float_flags<const FROM: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    let src = source::<FROM>(cpu, op)?;
    let dst = cpu.state.xmm[usize::from(op.r[0])];
    let result = run_float(
        cpu,
        op,
        &mut Work {
            dst,
            src,
            gpr: 0,
            imm: 0,
        },
    )?;
    cpu.set_flags(flags::ARITHMETIC, result & flags::ARITHMETIC);
    Ok(())
}

/// Runs a floating-point stub with the guest's MXCSR. If it raises an exception that the guest has not masked, changes
/// only the flags in MXCSR, and raises #XM (#UD if CR4.OSXMMEXCPT is clear).
#[inline(always)]
pub(super) fn run_float(cpu: &mut Cpu, op: &Op, work: &mut Work) -> Result<u64, Break> {
    if runs_on_host(cpu.state.mxcsr) {
        return Ok(host::float(Entry(op.imm), work, &mut cpu.state.mxcsr));
    }
    run_unmasked(cpu, op, work)
}

/// The exceptions that are detected before a result is computed: invalid, denormal and divide-by-zero. If one of them
/// occurs unmasked, the instruction raises no exception of another kind.
const BEFORE_RESULT: u32 = 7;
const UNDERFLOW: u32 = 1 << 4;
const FLUSH_TO_ZERO: u32 = 1 << 15;

#[cold]
fn run_unmasked(cpu: &mut Cpu, op: &Op, work: &mut Work) -> Result<u64, Break> {
    with_unmasked(cpu, |mxcsr| {
        let result = host::float(Entry(op.imm), work, mxcsr);
        (result, lanes(op).has_denormal(&[work.dst]))
    })
}

/// Returns the elements of an instruction's result that can underflow.
fn lanes(op: &Op) -> Lanes {
    match table::xmm(op.mnemonic) {
        Some((Kind::Float(lanes), _)) => lanes,
        _ => Lanes::None,
    }
}

/// Runs an instruction for a guest that has not masked all exceptions. `run` executes the instruction with an MXCSR
/// that it gets, and returns the result, and whether an element of the result is denormal because of an underflow. That
/// MXCSR masks all exceptions, because otherwise this process would get a signal. This function makes up for the
/// differences from unmasked execution, except for one: with an unmasked overflow or underflow, hardware sets the
/// precision flag only if the result would be inexact even with an unbounded exponent.
pub(super) fn with_unmasked<T>(
    cpu: &mut Cpu,
    run: impl FnOnce(&mut u32) -> (T, bool),
) -> Result<T, Break> {
    let guest = cpu.state.mxcsr;
    let masks = (guest & MASKS) >> 7;
    let mut mxcsr = (guest | MASKS) & !(FLAGS | NOT_FOR_HOST);
    if masks & UNDERFLOW == 0 {
        mxcsr &= !FLUSH_TO_ZERO;
    }
    let (result, has_denormal) = run(&mut mxcsr);
    let mut raised = mxcsr & FLAGS;
    // An unmasked underflow is raised by every denormal result, even an exact one.
    if masks & UNDERFLOW == 0 && has_denormal {
        raised |= UNDERFLOW;
    }
    if raised & !masks & BEFORE_RESULT != 0 {
        raised &= BEFORE_RESULT;
    }
    cpu.state.mxcsr = guest | raised;
    if raised & !masks == 0 {
        return Ok(result);
    }
    let vector = if cpu.state.cr4 & control::CR4_OSXMMEXCPT != 0 {
        19
    } else {
        6
    };
    Err(cpu.raise(vector, None))
}

/// Executes PCMPESTRI or a variant. If `INDEX`, stores the resulting index in ECX, else the resulting mask in XMM0.
pub(super) fn strings<const FROM: u8, const INDEX: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = source::<FROM>(cpu, op)?;
    let a = cpu.state.xmm[usize::from(op.r[0])];
    let lengths = (cpu.state.gpr[0], cpu.state.gpr[2]);
    let found = host::strings(Entry(op.imm), a, b, lengths, op.aux);
    if INDEX {
        cpu.state.gpr[1] = found.index.into();
    } else {
        cpu.state.xmm[0] = found.mask;
    }
    cpu.set_flags(flags::ARITHMETIC, found.flags & flags::ARITHMETIC);
    Ok(())
}
