//! Additions, multiplications, divisions, and CRCs.

use super::{cut, get, operand, plus, set, set_x_or_sp, shifted, sign_and_zero, x, x_or_sp};
use crate::insn::{Operand, ThreeSource, TwoSource};
use crate::tier::Tier;
use crate::width::Width;

pub(super) fn adr<T: Tier>(t: &mut T, rd: u8, page: bool, offset: i32) {
    let pc = t.pc();
    let target = match page {
        false => pc.wrapping_add(offset as u64),
        true => (pc & !0xfff).wrapping_add((i64::from(offset) << 12) as u64),
    };
    let target = t.number(target);
    set(t, rd, target);
}

/// Computes `a` plus or minus `b`. Returns the result and the flags N, Z, C, V.
#[inline(always)]
pub(super) fn sum<T: Tier>(
    t: &mut T,
    width: Width,
    subtracts: bool,
    a: T::Value,
    b: T::Value,
) -> (T::Value, [T::Bool; 4]) {
    let result = if subtracts { t.sub(a, b) } else { t.add(a, b) };
    let result = cut(t, width, result);
    let [n, z] = sign_and_zero(t, width, result);
    let (carry, other) = match subtracts {
        true => {
            let borrow = t.is_less(a, b);
            (t.opposite(borrow), t.xor(a, b))
        }
        false => (t.is_less(result, a), t.xor(b, result)),
    };
    let overflow = overflow(t, width, a, result, other);
    (result, [n, z, carry, overflow])
}

/// Returns the overflow flag: whether `a` and the result have different signs, and the sign of `other` is set. For a
/// sum, the caller passes `b` XOR the result as `other`; for a difference, `a` XOR `b`.
fn overflow<T: Tier>(
    t: &mut T,
    width: Width,
    a: T::Value,
    result: T::Value,
    other: T::Value,
) -> T::Bool {
    let changed = t.xor(a, result);
    let both = t.and(changed, other);
    t.bit(both, width.bits() - 1)
}

/// ADD, SUB, ADDS, SUBS, with every form of second operand.
#[inline(always)]
pub(super) fn add<T: Tier>(
    t: &mut T,
    width: Width,
    [subtracts, sets]: [bool; 2],
    sp: [bool; 2],
    [rd, rn]: [u8; 2],
    second: Operand,
) {
    let a = if sp[1] { x_or_sp(t, rn) } else { x(t, rn) };
    let a = cut(t, width, a);
    let b = operand(t, width, second);
    if sets {
        let (result, flags) = sum(t, width, subtracts, a, b);
        t.set_flags(flags);
        set(t, rd, result);
        return;
    }
    let result = if subtracts { t.sub(a, b) } else { t.add(a, b) };
    let result = cut(t, width, result);
    if sp[0] {
        set_x_or_sp(t, rd, result);
    } else {
        set(t, rd, result);
    }
}

/// ADC, SBC, ADCS, SBCS (AddWithCarry).
pub(super) fn carry<T: Tier>(
    t: &mut T,
    width: Width,
    [subtracts, sets]: [bool; 2],
    [rd, rn, rm]: [u8; 3],
) {
    let a = get(t, width, rn);
    let mut b = get(t, width, rm);
    if subtracts {
        b = t.not(b);
        b = cut(t, width, b);
    }
    let [_, _, carry, _] = t.flags();
    let more = t.widened(carry);
    let part = t.add(a, b);
    let part = cut(t, width, part);
    let result = t.add(part, more);
    let result = cut(t, width, result);
    if sets {
        // At most one of the two additions carries.
        let first = t.is_less(part, a);
        let second = t.is_less(result, part);
        let carry = t.either(first, second);
        let [n, z] = sign_and_zero(t, width, result);
        let other = t.xor(b, result);
        let overflow = overflow(t, width, a, result, other);
        t.set_flags([n, z, carry, overflow]);
    }
    set(t, rd, result);
}

pub(super) fn two_source<T: Tier>(t: &mut T, width: Width, op: TwoSource, [rd, rn, rm]: [u8; 3]) {
    let (a, b) = (get(t, width, rn), get(t, width, rm));
    let result = match op {
        TwoSource::Udiv => t.div(a, b, false),
        TwoSource::Sdiv => {
            let (a, b) = (
                t.sign_extend(a, width.bits()),
                t.sign_extend(b, width.bits()),
            );
            let quotient = t.div(a, b, true);
            cut(t, width, quotient)
        }
        TwoSource::Shift(kind) => {
            let mask = t.number(u64::from(width.bits()) - 1);
            let count = t.and(b, mask);
            shifted(t, width, kind, a, count)
        }
        TwoSource::Crc { bits, castagnoli } => {
            let crc = t.zero_extend(a, 32);
            t.crc(crc, b, bits.into(), castagnoli)
        }
    };
    set(t, rd, result);
}

pub(super) fn three_source<T: Tier>(
    t: &mut T,
    width: Width,
    op: ThreeSource,
    [rd, rn, rm, ra]: [u8; 4],
) {
    let (a, b, c) = (get(t, width, rn), get(t, width, rm), get(t, width, ra));
    let accumulate = |t: &mut T, product, subtracts| {
        let result = if subtracts {
            t.sub(c, product)
        } else {
            t.add(c, product)
        };
        cut(t, width, result)
    };
    let result = match op {
        ThreeSource::Madd | ThreeSource::Msub => {
            let product = t.mul(a, b);
            accumulate(t, product, op == ThreeSource::Msub)
        }
        ThreeSource::Long {
            is_signed,
            subtracts,
        } => {
            let mut half = |v| match is_signed {
                true => t.sign_extend(v, 32),
                false => t.zero_extend(v, 32),
            };
            let (a, b) = (half(a), half(b));
            let product = t.mul(a, b);
            accumulate(t, product, subtracts)
        }
        ThreeSource::High { is_signed } => t.mul_high(a, b, is_signed),
    };
    set(t, rd, result);
}

/// Adds the offset of an access to the base.
#[inline(always)]
pub(super) fn offset<T: Tier>(t: &mut T, base: T::Value, offset: i32) -> T::Value {
    plus(t, base, offset.into())
}
