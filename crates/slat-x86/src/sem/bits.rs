//! Bit tests, scans and counts, BMI1 and BMI2. The formulas reduce counts and positions to the operand's width
//! themselves.

use super::{Compute, Flags, FlagsOf, Operation, logic, operations};

operations! {
    Bt |c, a, n, _carry| (a, selected(c, a, n).1), WRITES = false
    Bts |c, a, n, _carry| {
        let (mask, flags) = selected(c, a, n);
        (c.or(a, mask), flags)
    }
    Btr |c, a, n, _carry| {
        let (mask, flags) = selected(c, a, n);
        let others = c.not(mask);
        (c.and(a, others), flags)
    }
    Btc |c, a, n, _carry| {
        let (mask, flags) = selected(c, a, n);
        (c.xor(a, mask), flags)
    }

    // If the source is 0, the caller does not write the result. The flags that the manual leaves undefined are those of
    // a logical operation.
    Bsf |c, a, _b, _carry| (c.trailing_zeros(a), logic(a).1)
    Bsr |c, a, _b, _carry| {
        let (above, top) = (c.leading_zeros(a), c.number(i64::from(c.bits(a)) - 1, a));
        (c.sub(top, above), logic(a).1)
    }

    Tzcnt |c, a, _b, _carry| {
        let (result, carry) = (c.trailing_zeros(a), Some(c.is_zero(a)));
        (result, Flags::Logic { carry, result })
    }
    Lzcnt |c, a, _b, _carry| {
        let (result, carry) = (c.leading_zeros(a), Some(c.is_zero(a)));
        (result, Flags::Logic { carry, result })
    }
    // POPCNT sets ZF by its source, and clears PF even if the result has even parity.
    Popcnt |c, a, _b, _carry| {
        let (zero, no) = (c.is_zero(a), c.no());
        (c.ones(a), Flags::Compared { carry: no, zero, parity: no })
    }

    Andn |c, a, b, _carry| {
        let a = c.not(a);
        logic(c.and(a, b))
    }
    Blsr |c, a, _b, _carry| {
        let less = c.plus(a, -1);
        let (result, carry) = (c.and(a, less), Some(c.is_zero(a)));
        (result, Flags::Logic { carry, result })
    }
    Blsmsk |c, a, _b, _carry| {
        let less = c.plus(a, -1);
        let (result, carry) = (c.xor(a, less), Some(c.is_zero(a)));
        (result, Flags::Logic { carry, result })
    }
    Blsi |c, a, _b, _carry| {
        let (negative, zero) = (c.neg(a), c.number(0, a));
        let (result, carry) = (c.and(a, negative), Some(c.is_less(zero, a)));
        (result, Flags::Logic { carry, result })
    }
    Bzhi |c, a, n, _carry| {
        let byte = c.number(0xff, a);
        let n = c.and(n, byte);
        let (result, is_whole) = low_bits(c, a, n);
        let carry = Some(is_whole);
        (result, Flags::Logic { carry, result })
    }
    Bextr |c, a, control, _carry| {
        let (byte, eight, none) = (c.number(0xff, a), c.number(8, a), c.number(0, a));
        let (start, n) = (c.and(control, byte), c.shr(control, eight));
        let (n, width) = (c.and(n, byte), c.number(c.bits(a).into(), a));
        let (shifted, is_inside) = (c.shr(a, start), c.is_less(start, width));
        let field = c.select(is_inside, shifted, none);
        logic(low_bits(c, field, n).0)
    }

    Rorx |c, a, n, _carry| (c.ror(a, n), Flags::InCpu)
    Shlx |c, a, n, _carry| {
        let n = modulo(c, n);
        (c.shl(a, n), Flags::InCpu)
    }
    Shrx |c, a, n, _carry| {
        let n = modulo(c, n);
        (c.shr(a, n), Flags::InCpu)
    }
    Sarx |c, a, n, _carry| {
        let n = modulo(c, n);
        (c.sar(a, n), Flags::InCpu)
    }
}

/// Returns the count modulo the operand's width.
#[inline(always)]
fn modulo<C: Compute>(c: &mut C, n: C::Value) -> C::Value {
    let last = c.number(i64::from(c.bits(n)) - 1, n);
    c.and(n, last)
}

/// Returns a mask of the bit that a bit test selects, and the flags, of which CF is the value of that bit.
#[inline(always)]
fn selected<C: Compute>(c: &mut C, a: C::Value, n: C::Value) -> (C::Value, FlagsOf<C>) {
    let (n, one) = (modulo(c, n), c.number(1, a));
    let (mask, low) = (c.shl(one, n), c.shr(a, n));
    let (carry, overflow) = (Some(c.bit(low, 0)), None);
    (mask, Flags::Rotated { carry, overflow })
}

/// Returns the lower `n` bits of a value, and whether `n` is at least the width.
#[inline(always)]
fn low_bits<C: Compute>(c: &mut C, a: C::Value, n: C::Value) -> (C::Value, C::Bool) {
    let (ones, width) = (c.number(-1, a), c.number(c.bits(a).into(), a));
    let above = c.shl(ones, n);
    let below = c.not(above);
    let (low, is_whole) = (c.and(a, below), c.is_at_most(width, n));
    (c.select(is_whole, a, low), is_whole)
}
