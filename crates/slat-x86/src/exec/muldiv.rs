//! MUL IMUL DIV IDIV.

use super::{alu, bmi};
use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Flow, Handler, Op};
use crate::sem::alu::{Imul, flags_of_product};
use crate::sem::{Compute, Now};
use crate::vector;
use iced_x86::{Instruction, Mnemonic};

/// Writes the double-width result: AX for bytes, else DX:AX of the size.
fn set_double<T: Int>(cpu: &mut Cpu, low: T, high: T) {
    if T::BITS == 8 {
        u16::set(cpu, 0, (low.zx() | high.zx() << 8) as u16);
    } else {
        T::set(cpu, 0, low);
        T::set(cpu, 2, high);
    }
}

fn multiply<T: Int, const SIGNED: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = cpu.operand::<T>(op, 0)?;
    let (low, high) = Now::new().product(T::get(cpu, 0), b, SIGNED);
    set_double(cpu, low, high);
    cpu.note(flags_of_product(&mut Now::new(), low, high, SIGNED));
    Ok(())
}
fn mul<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    multiply::<T, false>(cpu, op)
}
fn imul<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    multiply::<T, true>(cpu, op)
}

/// Returns the dividend's halves.
fn dividend<T: Int>(cpu: &Cpu) -> (u64, u64) {
    if T::BITS == 8 {
        let ax = u16::get(cpu, 0).zx();
        (ax & 0xff, ax >> 8)
    } else {
        (T::get(cpu, 0).zx(), T::get(cpu, 2).zx())
    }
}

fn div<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let divisor = cpu.operand::<T>(op, 0)?.zx();
    let (low, high) = dividend::<T>(cpu);
    // The quotient fits if and only if the high half is below the divisor.
    if divisor <= high {
        return Err(cpu.raise(vector::DE, None));
    }
    let (quotient, remainder) = if high == 0 {
        (low / divisor, low % divisor)
    } else {
        let wide = u128::from(high) << T::BITS | u128::from(low);
        (
            (wide / u128::from(divisor)) as u64,
            (wide % u128::from(divisor)) as u64,
        )
    };
    set_double(cpu, T::of(quotient), T::of(remainder));
    Ok(())
}

fn idiv<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let divisor = i128::from(cpu.operand::<T>(op, 0)?.sx());
    let (low, high) = dividend::<T>(cpu);
    let wide = i128::from(T::of(high).sx()) << T::BITS | i128::from(low);
    let quotient = wide.checked_div(divisor);
    match quotient {
        Some(quotient) if i128::from(T::of(quotient as u64).sx()) == quotient => {
            let remainder = wide - quotient * divisor;
            set_double(cpu, T::of(quotient as u64), T::of(remainder as u64));
            Ok(())
        }
        _ => Err(cpu.raise(vector::DE, None)),
    }
}

pub(crate) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    Some(match insn.mnemonic() {
        Mnemonic::Mul => by_size!(op.size, mul),
        Mnemonic::Imul => match insn.op_count() {
            1 => by_size!(op.size, imul),
            2 => alu::binary::<Imul>(op),
            _ => bmi::sources::<Imul>(op),
        },
        Mnemonic::Div => by_size!(op.size, div),
        Mnemonic::Idiv => by_size!(op.size, idiv),
        _ => return None,
    })
}
