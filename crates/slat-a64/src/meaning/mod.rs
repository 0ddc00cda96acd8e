//! The meaning of instructions, written once for all tiers (DDI 0487, C6.2 and C7.2).
//!
//! [`execute`] calls functions of a [`Tier`] to read the operands, to compute, and to write the results. Each step that
//! can fail comes before every step that changes the state, so an instruction that ends early has changed nothing. An
//! integer of 32 bits is a value whose upper half is zero.

mod arithmetic;
mod bits;
mod control;
mod exclusive;
mod memory;
mod structures;
mod vector;

use crate::insn::{Extend, Insn, Operand, Shift};
use crate::tier::{Next, Tier};
use crate::width::Width;

/// Executes an instruction. Returns where execution continues.
#[inline(always)]
pub(crate) fn execute<T: Tier>(t: &mut T, insn: &Insn) -> Result<Next<T>, T::Stop> {
    if insn.uses_vectors() {
        t.check_vectors()?;
    }
    match *insn {
        Insn::Adr { rd, page, offset } => arithmetic::adr(t, rd, page, offset),
        Insn::AddSub {
            width,
            subtracts,
            sets,
            sp,
            rd,
            rn,
            operand,
        } => {
            arithmetic::add(t, width, [subtracts, sets], sp, [rd, rn], operand);
        }
        Insn::Carry {
            width,
            subtracts,
            sets,
            rd,
            rn,
            rm,
        } => {
            arithmetic::carry(t, width, [subtracts, sets], [rd, rn, rm]);
        }
        Insn::Logic {
            width,
            op,
            inverts,
            sets,
            sp,
            rd,
            rn,
            operand,
        } => {
            bits::logic(t, width, op, [inverts, sets, sp], [rd, rn], operand);
        }
        Insn::MoveWide {
            width,
            kind,
            rd,
            value,
        } => bits::move_wide(t, width, kind, rd, value),
        Insn::Bitfield {
            width,
            kind,
            rd,
            rn,
            immr,
            imms,
        } => {
            bits::bitfield(t, width, kind, [rd, rn], [immr.into(), imms.into()]);
        }
        Insn::Extract {
            width,
            rd,
            rn,
            rm,
            lsb,
        } => bits::extract(t, width, [rd, rn, rm], lsb),
        Insn::OneSource { width, op, rd, rn } => bits::one_source(t, width, op, rd, rn),
        Insn::TwoSource {
            width,
            op,
            rd,
            rn,
            rm,
        } => {
            arithmetic::two_source(t, width, op, [rd, rn, rm]);
        }
        Insn::ThreeSource {
            width,
            op,
            rd,
            rn,
            rm,
            ra,
        } => {
            arithmetic::three_source(t, width, op, [rd, rn, rm, ra]);
        }
        Insn::Select {
            width,
            otherwise,
            condition,
            rd,
            rn,
            rm,
        } => {
            control::select(t, width, otherwise, condition, [rd, rn, rm]);
        }
        Insn::ConditionalCompare {
            width,
            subtracts,
            condition,
            nzcv,
            rn,
            operand,
        } => {
            control::conditional_compare(t, width, subtracts, [condition, nzcv], rn, operand);
        }
        Insn::RotateIntoFlags { rn, amount, mask } => bits::rotate_into_flags(t, rn, amount, mask),
        Insn::SetFlags { rn, bits } => bits::set_flags(t, rn, bits.into()),
        Insn::InvertCarry => {
            let [n, z, c, v] = t.flags();
            let c = t.opposite(c);
            t.set_flags([n, z, c, v]);
        }
        Insn::ConvertFlags { to_arm } => bits::convert_flags(t, to_arm),

        Insn::Branch { .. }
        | Insn::BranchIf { .. }
        | Insn::CompareBranch { .. }
        | Insn::TestBranch { .. }
        | Insn::BranchRegister { .. } => return Ok(control::branch(t, insn)),

        Insn::Nop | Insn::Prefetch => {}
        Insn::Eret
        | Insn::Call { .. }
        | Insn::Hint(_)
        | Insn::Barrier(_)
        | Insn::SetPstate { .. }
        | Insn::ReadSystem { .. }
        | Insn::WriteSystem { .. }
        | Insn::SystemInstruction { .. } => return control::system(t, insn),

        Insn::Access {
            transfer,
            size,
            address,
            rt,
            unprivileged,
        } => {
            memory::access(t, transfer, size, address, rt, unprivileged)?;
        }
        Insn::Pair {
            transfer,
            size,
            address,
            rt,
            rt2,
        } => {
            memory::pair(t, transfer, size, address, [rt, rt2])?;
        }
        Insn::Ordered {
            transfer,
            size,
            rn,
            offset,
            rt,
        } => {
            memory::ordered(t, transfer, size, rn, offset, rt)?;
        }
        Insn::Simd(simd) => vector::simd(t, &simd),
        Insn::ClearExclusive => t.clear_exclusive(),
        Insn::LoadExclusive {
            size,
            pair,
            acquire,
            rn,
            rt,
            rt2,
        } => {
            exclusive::load(t, size, pair, acquire, rn, [rt, rt2])?;
        }
        Insn::StoreExclusive {
            size,
            pair,
            release,
            rn,
            rs,
            rt,
            rt2,
        } => {
            exclusive::store(t, size, pair, release, rn, [rs, rt, rt2])?;
        }
        Insn::Atomic {
            op,
            size,
            order,
            rs,
            rn,
            rt,
        } => {
            exclusive::atomic(t, op, size, order, [rs, rn, rt])?;
        }
        Insn::CompareSwap {
            size,
            pair,
            order,
            rs,
            rn,
            rt,
        } => {
            exclusive::compare_swap(t, size, pair, order, [rs, rn, rt])?;
        }
        Insn::Structures {
            loads,
            size,
            full,
            groups,
            elements,
            base,
            rt,
        } => {
            structures::whole(t, loads, size, full, [groups, elements], base, rt)?;
        }
        Insn::Lane {
            loads,
            size,
            lane,
            elements,
            base,
            rt,
        } => {
            structures::lane(t, loads, size, lane, elements, base, rt)?;
        }
        Insn::Replicate {
            size,
            full,
            elements,
            base,
            rt,
        } => {
            structures::replicate(t, size, full, elements, base, rt)?;
        }
    }
    Ok(Next::Following)
}

/// Returns a general register. Number 31 is the zero register.
#[inline(always)]
fn x<T: Tier>(t: &mut T, r: u8) -> T::Value {
    if r == 31 { t.number(0) } else { t.x(r) }
}

/// Returns a general register, truncated to `width`. Number 31 is the zero register.
#[inline(always)]
fn get<T: Tier>(t: &mut T, width: Width, r: u8) -> T::Value {
    let value = x(t, r);
    cut(t, width, value)
}

/// Writes a general register. A write of number 31 has no effect.
#[inline(always)]
fn set<T: Tier>(t: &mut T, r: u8, value: T::Value) {
    if r != 31 {
        t.set_x(r, value);
    }
}

/// Returns a general register. Number 31 is the stack pointer.
#[inline(always)]
fn x_or_sp<T: Tier>(t: &mut T, r: u8) -> T::Value {
    if r == 31 { t.sp() } else { t.x(r) }
}

/// Returns the base register of an access. If it is the stack pointer, checks the alignment first (CheckSPAlignment).
#[inline(always)]
fn base_of<T: Tier>(t: &mut T, r: u8) -> Result<T::Value, T::Stop> {
    if r == 31 {
        t.check_stack()?;
    }
    Ok(x_or_sp(t, r))
}

#[inline(always)]
fn set_x_or_sp<T: Tier>(t: &mut T, r: u8, value: T::Value) {
    if r == 31 {
        t.set_sp(value);
    } else {
        t.set_x(r, value);
    }
}

/// Truncates a value to `width`.
#[inline(always)]
fn cut<T: Tier>(t: &mut T, width: Width, value: T::Value) -> T::Value {
    match width {
        Width::W => t.zero_extend(value, 32),
        Width::X => value,
    }
}

/// Shifts by a constant.
#[inline(always)]
fn shl<T: Tier>(t: &mut T, value: T::Value, count: u32) -> T::Value {
    if count == 0 {
        return value;
    }
    let count = t.number(count.into());
    t.shl(value, count)
}

#[inline(always)]
fn shr<T: Tier>(t: &mut T, value: T::Value, count: u32) -> T::Value {
    if count == 0 {
        return value;
    }
    let count = t.number(count.into());
    t.shr(value, count)
}

/// Adds a constant.
#[inline(always)]
fn plus<T: Tier>(t: &mut T, value: T::Value, n: i64) -> T::Value {
    if n == 0 {
        return value;
    }
    let n = t.number(n as u64);
    t.add(value, n)
}

/// Shifts a value of the given width by a count below the width (ShiftReg).
#[inline(always)]
fn shifted<T: Tier>(
    t: &mut T,
    width: Width,
    kind: Shift,
    value: T::Value,
    count: T::Value,
) -> T::Value {
    match (kind, width) {
        (Shift::Lsl, _) => {
            let value = t.shl(value, count);
            cut(t, width, value)
        }
        (Shift::Lsr, _) => t.shr(value, count),
        (Shift::Asr, Width::X) => t.sar(value, count),
        (Shift::Asr, Width::W) => {
            let value = t.sign_extend(value, 32);
            let value = t.sar(value, count);
            t.zero_extend(value, 32)
        }
        (Shift::Ror, Width::X) => t.ror(value, count),
        (Shift::Ror, Width::W) => {
            let high = shl(t, value, 32);
            let twice = t.or(high, value);
            let value = t.shr(twice, count);
            t.zero_extend(value, 32)
        }
    }
}

/// Returns an extended and shifted register (ExtendReg).
#[inline(always)]
fn extended<T: Tier>(t: &mut T, rm: u8, extend: Extend) -> T::Value {
    let value = x(t, rm);
    let value = match (extend.bits, extend.is_signed) {
        (64, _) => value,
        (bits, true) => t.sign_extend(value, bits.into()),
        (bits, false) => t.zero_extend(value, bits.into()),
    };
    shl(t, value, extend.shift.into())
}

/// Returns the value of a second operand.
#[inline(always)]
fn operand<T: Tier>(t: &mut T, width: Width, operand: Operand) -> T::Value {
    match operand {
        Operand::Immediate(n) => t.number(n),
        Operand::Shifted { rm, amount: 0, .. } => get(t, width, rm),
        Operand::Shifted { rm, shift, amount } => {
            let value = get(t, width, rm);
            let count = t.number(amount.into());
            shifted(t, width, shift, value, count)
        }
        Operand::Extended { rm, extend } => {
            let value = extended(t, rm, extend);
            cut(t, width, value)
        }
    }
}

/// Returns N and Z of a result.
#[inline(always)]
fn sign_and_zero<T: Tier>(t: &mut T, width: Width, result: T::Value) -> [T::Bool; 2] {
    [t.bit(result, width.bits() - 1), t.is_zero(result)]
}
