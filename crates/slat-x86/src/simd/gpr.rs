//! SIMD instructions that move data between XMM registers and general registers, except for plain moves.

use super::host::{self, Entry, Work};
use super::operate::{run_float, source};
use super::table;
use crate::Cpu;
use crate::int::Int;
use crate::op::{Flow, Handler, MEM, Op, Row, bytes_of, rows};
use iced_x86::Instruction;

/// Chooses a handler for an instruction with a general register of 4 or 8 bytes as its destination. The source is a
/// register, or memory with the given number of bytes.
macro_rules! to_gpr {
    ($insn:expr, $op:expr, $from:literal) => {{
        let size = $insn.op0_register().size();
        $op.imm = table::to_gpr($op.mnemonic, size)? as usize as u64;
        match (size, $op.r[1]) {
            (8, MEM) => to_gpr::<u64, $from>,
            (8, _) => to_gpr::<u64, 0>,
            (_, MEM) => to_gpr::<u32, $from>,
            _ => to_gpr::<u32, 0>,
        }
    }};
}

fn lower_from_gpr(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    let size = bytes_of(insn, 1);
    op.imm = table::from_gpr(op.mnemonic, size)? as usize as u64;
    Some(match size {
        8 => from_gpr::<u64>,
        _ => from_gpr::<u32>,
    })
}

pub(super) const ROWS: &[Row] = rows! { |insn, op|
    Cvtsi2ss | Cvtsi2sd => lower_from_gpr(insn, op)?,
    Cvtss2si | Cvttss2si => to_gpr!(insn, op, 4),
    Cvtsd2si | Cvttsd2si => to_gpr!(insn, op, 8),
    Movmskps | Movmskpd | Pmovmskb => {
        op.imm = table::signs(op.mnemonic, 4)? as usize as u64;
        signs
    },
    Pinsrb => insert::<u8>,
    Pinsrw => insert::<u16>,
    Pinsrd => insert::<u32>,
    Pinsrq => insert::<u64>,
    Pextrb => extract::<u8>,
    Pextrw => extract::<u16>,
    Pextrd | Extractps => extract::<u32>,
    Pextrq => extract::<u64>,
};

fn from_gpr<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = if op.r[1] == MEM {
        cpu.load_mem::<T>(op)?
    } else {
        T::get(cpu, op.r[1])
    };
    let dst = cpu.state.xmm[usize::from(op.r[0])];
    let mut work = Work {
        dst,
        src: 0,
        gpr: value.zx(),
        imm: 0,
    };
    run_float(cpu, op, &mut work)?;
    cpu.state.xmm[usize::from(op.r[0])] = work.dst;
    Ok(())
}

fn to_gpr<T: Int, const FROM: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    let src = source::<FROM>(cpu, op)?;
    let mut work = Work {
        dst: 0,
        src,
        gpr: 0,
        imm: 0,
    };
    run_float(cpu, op, &mut work)?;
    T::set(cpu, op.r[0], T::of(work.gpr));
    Ok(())
}

fn signs(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut work = Work {
        dst: 0,
        src: cpu.state.xmm[usize::from(op.r[1])],
        gpr: 0,
        imm: 0,
    };
    host::int_gpr(Entry(op.imm), &mut work);
    u32::set(cpu, op.r[0], work.gpr as u32);
    Ok(())
}

/// Returns the position, in bits, of the element of type `T` that the immediate selects.
fn element<T: Int>(op: &Op) -> u32 {
    (op.imm as u32 & (128 / T::BITS - 1)) * T::BITS
}

fn insert<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = if op.r[1] == MEM {
        cpu.load_mem::<T>(op)?.zx()
    } else {
        u64::get(cpu, op.r[1])
    };
    let dst = &mut cpu.state.xmm[usize::from(op.r[0])];
    *dst = inserted::<T>(op, *dst, value);
    Ok(())
}

/// Returns a copy of `vector` in which the element that the immediate selects is `value`.
pub(super) fn inserted<T: Int>(op: &Op, vector: u128, value: u64) -> u128 {
    let at = element::<T>(op);
    let ones = u128::from(u64::MAX >> (64 - T::BITS));
    vector & !(ones << at) | (u128::from(value) & ones) << at
}

pub(super) fn extract<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = T::of((cpu.state.xmm[usize::from(op.r[1])] >> element::<T>(op)) as u64);
    if op.r[0] == MEM {
        return cpu.store_mem::<T>(op, value);
    }
    u64::set(cpu, op.r[0], value.zx());
    Ok(())
}
