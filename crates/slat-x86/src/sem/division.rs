//! DIV and IDIV.

use super::Compute;

/// Returns the quotient and the remainder. The dividend is given as two halves, the low half first. The fault is #DE.
/// The manual leaves the flags undefined; this function does not change them.
#[inline(always)]
pub(crate) fn divide<C: Compute>(
    c: &mut C,
    halves: (C::Value, C::Value),
    divisor: C::Value,
    is_signed: bool,
) -> Result<(C::Value, C::Value), C::Fault> {
    match is_signed {
        true => signed(c, halves, divisor),
        false => unsigned(c, halves, divisor),
    }
}

#[inline(always)]
fn unsigned<C: Compute>(
    c: &mut C,
    (low, high): (C::Value, C::Value),
    divisor: C::Value,
) -> Result<(C::Value, C::Value), C::Fault> {
    // The quotient fits if and only if the high half is less than the divisor. So the divisor is not 0, either.
    let fails = c.is_at_most(divisor, high);
    c.fault_if(fails)?;
    Ok(c.quotient((low, high), divisor))
}

#[inline(always)]
fn signed<C: Compute>(
    c: &mut C,
    (low, high): (C::Value, C::Value),
    divisor: C::Value,
) -> Result<(C::Value, C::Value), C::Fault> {
    let (is_below, is_divisor_below) = (c.is_negative(high), c.is_negative(divisor));
    let is_negative = c.differ(is_below, is_divisor_below);

    // Divide the absolute values, and apply the signs afterwards.
    let (negated, flipped, borrows) = (c.neg(low), c.not(high), c.is_zero(low));
    let more = c.widened(borrows, high);
    let flipped = c.add(flipped, more);
    let halves = (
        c.select(is_below, negated, low),
        c.select(is_below, flipped, high),
    );
    let negated = c.neg(divisor);
    let divisor = c.select(is_divisor_below, negated, divisor);
    let (quotient, remainder) = unsigned(c, halves, divisor)?;

    let negated = c.neg(quotient);
    // Only the absolute value of the smallest number has the sign bit set.
    let (others, none) = (c.not(negated), c.number(-1, quotient));
    let mask = c.select(is_negative, others, none);
    let large = c.and(quotient, mask);
    let fails = c.is_negative(large);
    c.fault_if(fails)?;
    let quotient = c.select(is_negative, negated, quotient);
    let negated = c.neg(remainder);
    Ok((quotient, c.select(is_below, negated, remainder)))
}
