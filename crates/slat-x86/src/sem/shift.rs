//! Shifts and rotates by a count other than 0: SHL, SHR, SAR, ROL, ROR, RCL, RCR, SHLD and SHRD.

use super::{CARRY, Compute, Flags, FlagsOf, Operation, operations};

operations! {
    Shl |c, a, n, _carry| {
        let (result, less) = (c.shl(a, n), c.plus(n, -1));
        let before = c.shl(a, less);
        (result, Flags::Shl { before, result })
    }
    Shr |c, a, n, _carry| {
        let (result, carry) = (c.shr(a, n), last_down(c, a, n));
        (result, Flags::Shr { carry, result })
    }
    Sar |c, a, n, _carry| {
        let (result, less) = (c.sar(a, n), c.plus(n, -1));
        let before = c.sar(a, less);
        let carry = Some(c.bit(before, 0));
        (result, Flags::Logic { carry, result })
    }
    Rol |c, a, n, _carry| {
        let result = c.rol(a, n);
        let carry = c.bit(result, 0);
        (result, turned_left(c, carry, result))
    }
    Ror |c, a, n, _carry| {
        let result = c.ror(a, n);
        let carry = c.is_negative(result);
        (result, turned_right(c, carry, result))
    }
    // RCL and RCR rotate the operand together with CF: after `width + 1` steps, both have their old values.
    Rcl |c, a, n, carry| {
        let (one, less, rest) = (c.number(1, a), c.plus(n, -1), rest(c, a, n));
        let (up, down, carry) = (c.shl(a, n), c.shr(a, rest), c.widened(carry, a));
        let (carry, around) = (c.shl(carry, less), c.shr(down, one));
        let up = c.or(up, carry);
        let (result, carry) = (c.or(up, around), c.bit(down, 0));
        (result, turned_left(c, carry, result))
    }, READS = CARRY
    Rcr |c, a, n, carry| {
        let (one, rest) = (c.number(1, a), rest(c, a, n));
        let (down, up, carry) = (c.shr(a, n), c.shl(a, rest), c.widened(carry, a));
        let (carry, around) = (c.shl(carry, rest), c.shl(up, one));
        let down = c.or(down, carry);
        let (result, carry) = (c.or(down, around), last_down(c, a, n));
        (result, turned_right(c, carry, result))
    }, READS = CARRY
}

/// Returns the effective count of a shift or rotate of `bits` bits by `count`. RCL and RCR rotate `bits + 1` bits, so
/// their count is reduced modulo `bits + 1`.
#[inline(always)]
pub(crate) fn count<A: Operation>(count: u64, bits: u32) -> u64 {
    let count = count & last_count(bits);
    match A::READS {
        Some(_) => count % u64::from(bits + 1),
        None => count,
    }
}

/// Returns the mask of the count for shifts of `bits` bits: a shift ignores the higher bits of its count.
#[inline(always)]
pub(crate) fn last_count(bits: u32) -> u64 {
    if bits == 64 { 63 } else { 31 }
}

/// SHLD: shifts to the left, and shifts in bits of `fill`. For words, the manual leaves counts above 16 undefined. For
/// such a count, this function and [`shrd`] shift in the operand's own bits after all bits of `fill`, as much hardware
/// does.
#[inline(always)]
pub(crate) fn shld<C: Compute>(
    c: &mut C,
    a: C::Value,
    fill: C::Value,
    n: C::Value,
) -> (C::Value, FlagsOf<C>) {
    let ((high, low), m) = double(c, a, fill, n);
    let rest = rest(c, high, m);
    let (up, down) = (c.shl(high, m), c.shr(low, rest));
    let result = c.or(up, down);
    let last = c.shr(a, rest);
    let carry = c.bit(last, 0);
    (result, flags_of_double(c, carry, a, result))
}

/// SHRD: shifts to the right, and shifts in bits of `fill`.
#[inline(always)]
pub(crate) fn shrd<C: Compute>(
    c: &mut C,
    a: C::Value,
    fill: C::Value,
    n: C::Value,
) -> (C::Value, FlagsOf<C>) {
    let ((low, high), m) = double(c, a, fill, n);
    let rest = rest(c, low, m);
    let (down, up) = (c.shr(low, m), c.shl(high, rest));
    let result = c.or(down, up);
    let carry = last_down(c, a, n);
    (result, flags_of_double(c, carry, a, result))
}

/// Returns the two values that SHLD or SHRD combines, and the count, which is at most 16 for a word.
#[inline(always)]
fn double<C: Compute>(
    c: &mut C,
    a: C::Value,
    fill: C::Value,
    n: C::Value,
) -> ((C::Value, C::Value), C::Value) {
    if c.bits(a) != 16 {
        return ((a, fill), n);
    }
    let (width, less) = (c.number(16, a), c.plus(n, -16));
    let is_far = c.is_less(width, n);
    let halves = (c.select(is_far, fill, a), c.select(is_far, a, fill));
    (halves, c.select(is_far, less, n))
}

#[inline(always)]
fn flags_of_double<C: Compute>(
    c: &mut C,
    carry: C::Bool,
    a: C::Value,
    result: C::Value,
) -> FlagsOf<C> {
    let changed = c.xor(a, result);
    Flags::Given {
        carry,
        overflow: c.is_negative(changed),
        aux: None,
        result,
    }
}

/// Returns the last bit that is shifted out to the right.
#[inline(always)]
fn last_down<C: Compute>(c: &mut C, a: C::Value, n: C::Value) -> C::Bool {
    let less = c.plus(n, -1);
    let before = c.shr(a, less);
    c.bit(before, 0)
}

/// Returns the number of bits that a shift by `n` keeps.
#[inline(always)]
fn rest<C: Compute>(c: &mut C, a: C::Value, n: C::Value) -> C::Value {
    let width = c.number(c.bits(a).into(), a);
    c.sub(width, n)
}

/// Returns the flags after a rotate to the left. The manual defines OF for a count of 1 only. This function and
/// [`turned_right`] apply that rule to every count.
#[inline(always)]
fn turned_left<C: Compute>(c: &mut C, carry: C::Bool, result: C::Value) -> FlagsOf<C> {
    let top = c.is_negative(result);
    let overflow = Some(c.differ(carry, top));
    let carry = Some(carry);
    Flags::Rotated { carry, overflow }
}

#[inline(always)]
fn turned_right<C: Compute>(c: &mut C, carry: C::Bool, result: C::Value) -> FlagsOf<C> {
    let (top, next) = (c.is_negative(result), c.bit(result, c.bits(result) - 2));
    let overflow = Some(c.differ(top, next));
    let carry = Some(carry);
    Flags::Rotated { carry, overflow }
}
