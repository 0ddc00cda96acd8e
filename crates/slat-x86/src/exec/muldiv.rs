//! MUL, IMUL, DIV and IDIV.

use super::{alu, bmi};
use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Flow, Op, Row, rows};
use crate::sem::alu::Imul;
use crate::sem::{self, Compute, DivideError, Now};
use crate::vector;

/// Writes a result of double width: bytes to AX, wider results to DX:AX, EDX:EAX or RDX:RAX.
fn set_double<T: Int>(cpu: &mut Cpu, (low, high): (T, T)) {
    if T::BITS == 8 {
        u16::set(cpu, 0, (low.zx() | high.zx() << 8) as u16);
    } else {
        T::set(cpu, 0, low);
        T::set(cpu, 2, high);
    }
}

fn multiply<T: Int, const SIGNED: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = cpu.operand::<T>(op, 0)?;
    let product = Now::new().product(T::get(cpu, 0), b, SIGNED);
    let flags = sem::alu::multiplied(&mut Now::new(), product, SIGNED);
    set_double(cpu, product);
    cpu.note(flags);
    Ok(())
}
fn mul<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    multiply::<T, false>(cpu, op)
}
fn imul<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    multiply::<T, true>(cpu, op)
}

/// Returns the dividend: its low half and its high half.
fn dividend<T: Int>(cpu: &Cpu) -> (T, T) {
    if T::BITS == 8 {
        let ax = u16::get(cpu, 0).zx();
        (T::of(ax), T::of(ax >> 8))
    } else {
        (T::get(cpu, 0), T::get(cpu, 2))
    }
}

fn divide<T: Int, const SIGNED: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let divisor = cpu.operand::<T>(op, 0)?;
    let halves = dividend::<T>(cpu);
    match sem::division::divide(&mut Now::new(), halves, divisor, SIGNED) {
        Ok(results) => set_double(cpu, results),
        Err(DivideError) => return Err(cpu.raise(vector::DE, None)),
    }
    Ok(())
}
fn div<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    divide::<T, false>(cpu, op)
}
fn idiv<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    divide::<T, true>(cpu, op)
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Mul => by_size!(op.size, mul),
    Imul => match insn.op_count() {
        1 => by_size!(op.size, imul),
        2 => alu::binary::<Imul>(op),
        _ => bmi::sources::<Imul>(op),
    },
    Div => by_size!(op.size, div),
    Idiv => by_size!(op.size, idiv),
};
