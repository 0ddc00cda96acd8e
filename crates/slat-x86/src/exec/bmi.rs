//! Instructions with a separate destination operand: the bit counts, BMI1 and BMI2.

use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Flow, Handler, NONE, Op, Row, family_rows, rows};
use crate::sem::{Compute, Now, Operation};

/// Executes operation `A` of `sem` on the second and the third operand, and writes the result to the first one.
fn from_sources<T: Int, A: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    let a = cpu.operand::<T>(op, 1)?;
    let b = match op.r[2] {
        NONE => T::of(op.imm),
        _ => cpu.operand::<T>(op, 2)?,
    };
    let (result, flags) = A::apply(&mut Now::new(), a, b, false);
    T::set(cpu, op.r[0], result);
    cpu.note(flags);
    Ok(())
}
pub(super) fn sources<A: Operation>(op: &Op) -> Handler {
    by_size!(op.size, from_sources, A)
}

fn pdep<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut mask = cpu.operand::<T>(op, 2)?.zx();
    let source = T::get(cpu, op.r[1]).zx();
    let (mut result, mut at) = (0, 0);
    while mask != 0 {
        let lowest = mask & mask.wrapping_neg();
        if source >> at & 1 != 0 {
            result |= lowest;
        }
        mask &= mask - 1;
        at += 1;
    }
    T::set(cpu, op.r[0], T::of(result));
    Ok(())
}
fn pext<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut mask = cpu.operand::<T>(op, 2)?.zx();
    let source = T::get(cpu, op.r[1]).zx();
    let (mut result, mut at) = (0, 0);
    while mask != 0 {
        let lowest = mask & mask.wrapping_neg();
        if source & lowest != 0 {
            result |= 1 << at;
        }
        mask &= mask - 1;
        at += 1;
    }
    T::set(cpu, op.r[0], T::of(result));
    Ok(())
}
fn mulx<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = cpu.operand::<T>(op, 2)?;
    let (low, high) = Now::new().product(T::get(cpu, 2), b, false);
    // The low half is written first: if both destinations are the same register, the register must end with the high
    // half.
    T::set(cpu, op.r[1], low);
    T::set(cpu, op.r[0], high);
    Ok(())
}

/// Chooses a handler of an instruction that has only 32- and 64-bit forms.
macro_rules! wide {
    ($op:expr, $f:ident) => {
        if $op.size == 2 { $f::<u32> } else { $f::<u64> }
    };
}

pub(crate) const SOURCES: &[Row] = family_rows!(sources sources);
pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Pdep => wide!(op, pdep),
    Pext => wide!(op, pext),
    Mulx => wide!(op, mulx),
};
