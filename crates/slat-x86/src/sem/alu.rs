//! Arithmetic and logic: ADD, OR, ADC, SBB, AND, SUB, XOR, CMP, TEST, ADCX, ADOX, INC, DEC, NEG, NOT, MUL and IMUL.

use super::condition::OVERFLOW;
use super::{CARRY, Compute, Flags, FlagsOf, Operation, logic, operations};

operations! {
    Add |c, a, b, _carry| {
        let result = c.add(a, b);
        (result, Flags::Add { a, result })
    }
    Sub |c, a, b, _carry| subtract(c, a, b)
    Cmp |c, a, b, _carry| subtract(c, a, b), WRITES = false
    And |c, a, b, _carry| logic(c.and(a, b))
    Or |c, a, b, _carry| logic(c.or(a, b))
    Xor |c, a, b, _carry| logic(c.xor(a, b))
    Test |c, a, b, _carry| logic(c.and(a, b)), WRITES = false
    Adc |c, a, b, carry| {
        let (result, out) = c.sum(a, b, carry);
        let changed = (c.xor(a, result), c.xor(b, result));
        (result, with_carry(c, out, changed, (a, b, result)))
    }, READS = CARRY
    // For ADCX the flag CF, and for ADOX the flag OF, is carry in and carry out. No other flag changes.
    Adcx |c, a, b, carry| {
        let (result, out) = c.sum(a, b, carry);
        (result, Flags::Rotated { carry: Some(out), overflow: None })
    }, READS = CARRY
    Adox |c, a, b, carry| {
        let (result, out) = c.sum(a, b, carry);
        (result, Flags::Rotated { carry: None, overflow: Some(out) })
    }, READS = OVERFLOW
    Sbb |c, a, b, carry| {
        // Subtract `b`, then the carry. At most one of the two subtractions borrows.
        let (part, first) = (c.sub(a, b), c.is_less(a, b));
        let more = c.widened(carry, a);
        let (result, second) = (c.sub(part, more), c.is_less(part, more));
        let changed = (c.xor(a, b), c.xor(a, result));
        let out = c.either(first, second);
        (result, with_carry(c, out, changed, (a, b, result)))
    }, READS = CARRY
    Inc |c, a, _b, _carry| {
        let (result, carry) = (c.plus(a, 1), c.kept_carry());
        (result, Flags::Inc { carry, result })
    }
    Dec |c, a, _b, _carry| {
        let (result, carry) = (c.plus(a, -1), c.kept_carry());
        (result, Flags::Dec { carry, result })
    }
    Neg |c, a, _b, _carry| {
        let (zero, result) = (c.number(0, a), c.neg(a));
        (result, Flags::Sub { a: zero, b: a, result })
    }
    Not |c, a, _b, _carry| (c.not(a), Flags::InCpu)
    // This is IMUL with two or three operands.
    Imul |c, a, b, _carry| {
        let halves = c.product(a, b, true);
        (halves.0, multiplied(c, halves, true))
    }
}

#[inline(always)]
fn subtract<C: Compute>(c: &mut C, a: C::Value, b: C::Value) -> (C::Value, FlagsOf<C>) {
    let result = c.sub(a, b);
    (result, Flags::Sub { a, b, result })
}

/// Returns the flags after ADC or SBB. OF is set if both values in `changed` have their sign bits set.
#[inline(always)]
fn with_carry<C: Compute>(
    c: &mut C,
    carry: C::Bool,
    changed: (C::Value, C::Value),
    (a, b, result): (C::Value, C::Value, C::Value),
) -> FlagsOf<C> {
    let both = c.and(changed.0, changed.1);
    let overflow = c.is_negative(both);
    let aux = c.xor(a, b);
    let aux = c.xor(aux, result);
    Flags::Given {
        carry,
        overflow,
        aux: Some(c.bit(aux, 4)),
        result,
    }
}

/// Returns the flags after MUL or IMUL. The arguments are the halves of the product. CF and OF are set if the product
/// does not fit into its low half.
#[inline(always)]
pub(crate) fn multiplied<C: Compute>(
    c: &mut C,
    (low, high): (C::Value, C::Value),
    is_signed: bool,
) -> FlagsOf<C> {
    let extended = match is_signed {
        true => {
            let last = c.number(i64::from(c.bits(low)) - 1, low);
            c.sar(low, last)
        }
        false => c.number(0, low),
    };
    let rest = c.xor(high, extended);
    let zero = c.number(0, low);
    let wide = c.is_less(zero, rest);
    Flags::Given {
        carry: wide,
        overflow: wide,
        aux: None,
        result: low,
    }
}
