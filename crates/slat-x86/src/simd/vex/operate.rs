//! Handlers of instructions that a stub executes. A handler fetches the operands, calls the stub, and stores the
//! result.

use super::host::{self, Entry, Stub, Work};
use super::table;
use super::{is_wide, load, store};
use crate::Cpu;
use crate::int::Int;
use crate::op::{Break, Flow, Handler, MEM, Op, Row, bytes_of, rows};
use crate::simd::forms::Kind;
use crate::simd::host::runs_on_host;
use crate::simd::lanes::Lanes;
use crate::simd::operate::{UNALIGNED, strings, with_unmasked};
use crate::simd::pairs;
use crate::simd::table as legacy;
use crate::state::flags;
use iced_x86::{CpuidFeature, Instruction, Mnemonic as M, OpKind};

pub(super) const ROWS: &[Row] = &[Row {
    mnemonics: &[pairs::VEX, table::PLAIN, table::IMMEDIATE],
    lower,
}];

pub(super) const WITH_GPR: &[Row] = rows! { |insn, op|
    Vmovmskps | Vmovmskpd | Vpmovmskb => {
        op.imm = table::signs(op.mnemonic, if is_wide(insn) { 32 } else { 16 })? as usize as u64;
        to_gpr::<u32, false>
    },
    Vcvtss2si | Vcvttss2si | Vcvtsd2si | Vcvttsd2si => {
        let size = insn.op0_register().size();
        op.imm = table::to_gpr(op.mnemonic, size)? as usize as u64;
        if size == 8 { to_gpr::<u64, true> } else { to_gpr::<u32, true> }
    },
    Vcvtsi2ss | Vcvtsi2sd => {
        let size = bytes_of(insn, 2);
        op.imm = table::from_gpr(op.mnemonic, size)? as usize as u64;
        if size == 8 { from_gpr::<u64> } else { from_gpr::<u32> }
    },
};

/// The rows of string comparisons. They use the stubs without VEX. The handlers also clear the upper half of the
/// register that gets a mask.
pub(super) const STRINGS: &[Row] = rows! { |insn, op|
    Vpcmpestri => comparison(op, M::Pcmpestri, strings::<0, true>, strings::<UNALIGNED, true>)?,
    Vpcmpestri64 => comparison(op, M::Pcmpestri64, strings::<0, true>, strings::<UNALIGNED, true>)?,
    Vpcmpistri => comparison(op, M::Pcmpistri, strings::<0, true>, strings::<UNALIGNED, true>)?,
    Vpcmpestrm => comparison(op, M::Pcmpestrm, string_mask::<0>, string_mask::<UNALIGNED>)?,
    Vpcmpestrm64 => comparison(op, M::Pcmpestrm64, string_mask::<0>, string_mask::<UNALIGNED>)?,
    Vpcmpistrm => comparison(op, M::Pcmpistrm, string_mask::<0>, string_mask::<UNALIGNED>)?,
};

/// Chooses the handler of a string comparison: `registers` if the second operand is a register, `load` if it is in
/// memory.
fn comparison(op: &mut Op, without_vex: M, registers: Handler, load: Handler) -> Option<Handler> {
    op.aux = op.imm as u8;
    op.imm = legacy::string(without_vex)? as usize as u64;
    Some(if op.r[1] == MEM { load } else { registers })
}

fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    op.aux = op.imm as u8;
    let Found {
        kind,
        stub,
        by_constant,
        sources,
    } = find(insn, is_wide(insn))?;
    op.imm = stub as usize as u64;
    if op.mnemonic == M::Vinsertps && op.r[2] == MEM {
        // If the source of VINSERTPS is in memory, the bits of the immediate that select a source element have no
        // effect.
        op.aux &= 0x3f;
    }
    // FMA instructions also read their destination operand.
    let accumulates = insn.code().cpuid_features().contains(&CpuidFeature::FMA);
    Some(match (kind, accumulates, sources) {
        (Kind::Int, _, 1) if by_constant => shift_by_constant,
        (Kind::Int, _, 1) => vector::<1, 1, false>,
        (Kind::Int, _, 2) => vector::<1, 2, false>,
        (Kind::Int, _, 3) => vector::<1, 3, false>,
        (Kind::Float(_), true, 2) => vector::<0, 2, true>,
        (Kind::Float(_), _, 1) => vector::<1, 1, true>,
        (Kind::Float(_), _, 2) => vector::<1, 2, true>,
        (Kind::IntFlags, _, 1) => compare::<false>,
        (Kind::FloatFlags, _, 1) => compare::<true>,
        _ => return None,
    })
}

/// The stub of an instruction, and its operands.
pub(super) struct Found {
    pub(super) kind: Kind,
    pub(super) stub: Stub,
    /// Whether the instruction shifts by an immediate, but its stub by a count in a register. The handler then copies
    /// the immediate to this register.
    pub(super) by_constant: bool,
    /// The number of the last operand that is not an immediate.
    pub(super) sources: u32,
}

pub(super) fn find(insn: &Instruction, wide: bool) -> Option<Found> {
    let mnemonic = insn.mnemonic();
    let last = insn.op_count().checked_sub(1)?;
    let immediate = insn.op_kind(last) == OpKind::Immediate8;
    let found = match immediate {
        true => table::immediate(mnemonic, wide),
        false => table::plain(mnemonic, wide),
    };
    let (kind, stub) = found.or_else(|| table::plain(mnemonic, wide))?;
    Some(Found {
        kind,
        stub,
        by_constant: found.is_none(),
        sources: last - u32::from(immediate),
    })
}

fn string_mask<const FROM: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    strings::<FROM, false>(cpu, op)?;
    cpu.state.ymm_high[0] = 0;
    Ok(())
}

/// Stores operands `FIRST` to `LAST`, which are vectors, in `work`. One of these operands may be in memory. `work` is
/// changed in place, because returning it would take longer than most instructions.
#[inline(always)]
fn fetch<const FIRST: usize, const LAST: usize>(cpu: &mut Cpu, op: &Op, work: &mut Work) -> Flow {
    work.imm = op.aux;
    for k in FIRST..=LAST {
        work.v[k] = match op.r[k] {
            MEM => load(cpu, op)?,
            r => cpu.ymm(r),
        };
    }
    Ok(())
}

/// Calls the stub. Returns the arithmetic flags that the instruction has set.
#[inline(always)]
fn call<const FLOAT: bool>(cpu: &mut Cpu, op: &Op, work: &mut Work) -> Result<u64, Break> {
    Ok(match FLOAT {
        false => host::int(Entry(op.imm), work),
        true if runs_on_host(cpu.state.mxcsr) => {
            host::float(Entry(op.imm), work, &mut cpu.state.mxcsr)
        }
        true => call_unmasked(cpu, op, work)?,
    })
}

#[cold]
fn call_unmasked(cpu: &mut Cpu, op: &Op, work: &mut Work) -> Result<u64, Break> {
    with_unmasked(cpu, |mxcsr| {
        let result = host::float(Entry(op.imm), work, mxcsr);
        (result, lanes(op.mnemonic).has_denormal(&work.v[0]))
    })
}

/// Returns the elements of an instruction's result that can underflow.
fn lanes(mnemonic: M) -> Lanes {
    let sizes = [false, true].into_iter();
    let mut kinds = sizes.filter_map(|wide| {
        table::plain(mnemonic, wide).or_else(|| table::immediate(mnemonic, wide))
    });
    match kinds.next() {
        Some((Kind::Float(lanes), _)) => lanes,
        _ => Lanes::None,
    }
}

/// Executes an instruction whose operands and result are vectors. The first operand is a register or memory.
fn vector<const FIRST: usize, const LAST: usize, const FLOAT: bool>(
    cpu: &mut Cpu,
    op: &Op,
) -> Flow {
    let mut work = Work::default();
    fetch::<FIRST, LAST>(cpu, op, &mut work)?;
    call::<FLOAT>(cpu, op, &mut work)?;
    match op.r[0] {
        MEM => return store(cpu, op, work.v[0]),
        r => cpu.set_ymm(r, work.v[0]),
    }
    Ok(())
}

fn shift_by_constant(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut work = Work::default();
    fetch::<1, 1>(cpu, op, &mut work)?;
    work.v[2] = [op.aux.into(), 0];
    call::<false>(cpu, op, &mut work)?;
    cpu.set_ymm(op.r[0], work.v[0]);
    Ok(())
}

/// Executes an instruction that compares two vectors and sets flags.
fn compare<const FLOAT: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut work = Work::default();
    fetch::<0, 1>(cpu, op, &mut work)?;
    let result = call::<FLOAT>(cpu, op, &mut work)?;
    cpu.set_flags(flags::ARITHMETIC, result & flags::ARITHMETIC);
    Ok(())
}

fn to_gpr<T: Int, const FLOAT: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut work = Work::default();
    fetch::<1, 1>(cpu, op, &mut work)?;
    call::<FLOAT>(cpu, op, &mut work)?;
    T::set(cpu, op.r[0], T::of(work.gpr));
    Ok(())
}

fn from_gpr<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut work = Work::default();
    fetch::<1, 1>(cpu, op, &mut work)?;
    work.gpr = cpu.operand::<T>(op, 2)?.zx();
    call::<true>(cpu, op, &mut work)?;
    cpu.set_ymm(op.r[0], work.v[0]);
    Ok(())
}
