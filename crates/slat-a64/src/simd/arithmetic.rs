//! Floating-point operations (DDI 0487, J1.3, shared/functions/float).

use super::float::{
    DZC, Env, Format, IOC, IXC, Number, OFC, Rounding, UFC, Value, invalid, nan, nan_of, overflow,
    round, shift_right_sticky, to_integer, unpack,
};

/// Adds two numbers. Returns `None` if the sum is zero. Bits far below the sum's leading bit are combined into one
/// sticky bit.
fn sum(a: Number, b: Number) -> Option<Number> {
    // Shift each mantissa until its leading bit is bit 124: then the sum cannot overflow, and bits that are shifted out
    // are far below the result's bits.
    let raised = |n: Number| {
        let up = n.mantissa.leading_zeros() - 3;
        (n.exponent - up as i32, n.mantissa << up)
    };
    let ((ea, ma), (eb, mb)) = (raised(a), raised(b));
    let exponent = ea.max(eb);
    let ma = shift_right_sticky(ma, (exponent - ea) as u32);
    let mb = shift_right_sticky(mb, (exponent - eb) as u32);
    let (negative, mantissa) = match (a.negative == b.negative, ma >= mb) {
        (true, _) => (a.negative, ma + mb),
        (false, true) => (a.negative, ma - mb),
        (false, false) => (b.negative, mb - ma),
    };
    (mantissa != 0).then_some(Number {
        negative,
        exponent,
        mantissa,
    })
}

fn product(a: Number, b: Number) -> Number {
    Number {
        negative: a.negative != b.negative,
        exponent: a.exponent + b.exponent,
        mantissa: a.mantissa * b.mantissa,
    }
}

/// Returns the result of adding a number and its opposite: a zero, whose sign depends on the rounding mode.
fn cancelled(format: Format, env: &Env) -> u64 {
    format.zero(env.rounding() == Rounding::Down)
}

/// Adds two values that are not NaNs.
fn add_values(a: Value, b: Value, format: Format, env: &mut Env) -> u64 {
    match (a, b) {
        (Value::Infinity(x), Value::Infinity(y)) if x != y => invalid(format, env),
        (Value::Infinity(x), _) | (_, Value::Infinity(x)) => format.infinity(x),
        (Value::Zero(x), Value::Zero(y)) if x == y => format.zero(x),
        (Value::Zero(_), Value::Zero(_)) => cancelled(format, env),
        (Value::Number(n), _) if !matches!(b, Value::Number(_)) => round(n, format, env),
        (_, Value::Number(n)) if !matches!(a, Value::Number(_)) => round(n, format, env),
        (Value::Number(a), Value::Number(b)) => match sum(a, b) {
            Some(sum) => round(sum, format, env),
            None => cancelled(format, env),
        },
        _ => unreachable!("a NaN"),
    }
}

pub(crate) fn add(a: u64, b: u64, format: Format, env: &mut Env) -> u64 {
    let (x, y) = (unpack(a, format, env), unpack(b, format, env));
    match nan_of(&[a, b], format, env) {
        Some(nan) => nan,
        None => add_values(x, y, format, env),
    }
}

pub(crate) fn sub(a: u64, b: u64, format: Format, env: &mut Env) -> u64 {
    let (x, y) = (unpack(a, format, env), unpack(b, format, env));
    match nan_of(&[a, b], format, env) {
        Some(nan) => nan,
        None => add_values(x, y.negated(), format, env),
    }
}

/// Multiplies. If `extended` (FMULX), infinity times zero is 2.
pub(crate) fn mul(a: u64, b: u64, extended: bool, format: Format, env: &mut Env) -> u64 {
    let (x, y) = (unpack(a, format, env), unpack(b, format, env));
    if let Some(nan) = nan_of(&[a, b], format, env) {
        return nan;
    }
    let negative = x.is_negative() != y.is_negative();
    match (x, y) {
        (Value::Infinity(_), Value::Zero(_)) | (Value::Zero(_), Value::Infinity(_)) => {
            match extended {
                true => format.sign(negative) | power_of_two(1, format),
                false => invalid(format, env),
            }
        }
        (Value::Infinity(_), _) | (_, Value::Infinity(_)) => format.infinity(negative),
        (Value::Number(x), Value::Number(y)) => round(product(x, y), format, env),
        _ => format.zero(negative),
    }
}

/// Returns the bits of a power of two.
pub(crate) fn power_of_two(exponent: i32, format: Format) -> u64 {
    let bias = (1 << (format.exponent - 1)) - 1;
    ((exponent + bias) as u64) << format.fraction
}

pub(crate) fn div(a: u64, b: u64, format: Format, env: &mut Env) -> u64 {
    let (x, y) = (unpack(a, format, env), unpack(b, format, env));
    if let Some(nan) = nan_of(&[a, b], format, env) {
        return nan;
    }
    let negative = x.is_negative() != y.is_negative();
    match (x, y) {
        (Value::Infinity(_), Value::Infinity(_)) | (Value::Zero(_), Value::Zero(_)) => {
            invalid(format, env)
        }
        (Value::Infinity(_), _) => format.infinity(negative),
        (_, Value::Zero(_)) => {
            env.raise(DZC);
            format.infinity(negative)
        }
        (Value::Number(x), Value::Number(y)) => {
            // Shift so that the quotient has 60 to 127 bits.
            let up = x.mantissa.leading_zeros() - 1;
            let numerator = x.mantissa << up;
            let quotient = numerator / y.mantissa;
            let rest = u128::from(quotient * y.mantissa != numerator);
            let exponent = x.exponent - up as i32 - y.exponent;
            round(
                Number {
                    negative,
                    exponent,
                    mantissa: quotient | rest,
                },
                format,
                env,
            )
        }
        _ => format.zero(negative),
    }
}

/// Adds `addend` to the product of `a` and `b`, with one rounding (FPMulAdd).
pub(crate) fn mul_add(addend: u64, a: u64, b: u64, format: Format, env: &mut Env) -> u64 {
    let c = unpack(addend, format, env);
    let (x, y) = (unpack(a, format, env), unpack(b, format, env));
    let is_invalid = matches!(
        (x, y),
        (Value::Infinity(_), Value::Zero(_)) | (Value::Zero(_), Value::Infinity(_))
    );
    if is_invalid && format.is_quiet(addend) {
        return invalid(format, env);
    }
    if let Some(nan) = nan_of(&[addend, a, b], format, env) {
        return nan;
    }
    if is_invalid {
        return invalid(format, env);
    }
    let negative = x.is_negative() != y.is_negative();
    let product = match (x, y) {
        (Value::Number(x), Value::Number(y)) => Value::Number(product(x, y)),
        (Value::Infinity(_), _) | (_, Value::Infinity(_)) => Value::Infinity(negative),
        _ => Value::Zero(negative),
    };
    add_values(c, product, format, env)
}

/// FRECPS (2 - a b) and FRSQRTS (half of 3 - a b), with one rounding.
pub(crate) fn step(a: u64, b: u64, root: bool, format: Format, env: &mut Env) -> u64 {
    let a = a ^ format.sign(true);
    let (x, y) = (unpack(a, format, env), unpack(b, format, env));
    if let Some(nan) = nan_of(&[a, b], format, env) {
        return nan;
    }
    let negative = x.is_negative() != y.is_negative();
    let half = if root { -1 } else { 0 };
    let constant = Number {
        negative: false,
        exponent: half,
        mantissa: if root { 3 } else { 2 },
    };
    match (x, y) {
        (Value::Infinity(_), Value::Zero(_)) | (Value::Zero(_), Value::Infinity(_)) => {
            round(constant, format, env)
        }
        (Value::Infinity(_), _) | (_, Value::Infinity(_)) => format.infinity(negative),
        (Value::Number(x), Value::Number(y)) => {
            let product = product(x, y);
            let product = Number {
                exponent: product.exponent + half,
                ..product
            };
            match sum(constant, product) {
                Some(sum) => round(sum, format, env),
                None => cancelled(format, env),
            }
        }
        _ => round(constant, format, env),
    }
}

pub(crate) fn sqrt(a: u64, format: Format, env: &mut Env) -> u64 {
    match unpack(a, format, env) {
        Value::Nan => nan(a, format, env),
        Value::Zero(negative) => format.zero(negative),
        Value::Infinity(false) => format.infinity(false),
        Value::Number(n) if !n.negative => {
            // Shift so that the exponent is even, and the root has at least 60 bits.
            let mut up = n.mantissa.leading_zeros() - 1;
            if (n.exponent - up as i32) % 2 != 0 {
                up -= 1;
            }
            let mantissa = n.mantissa << up;
            let root = mantissa.isqrt();
            let rest = u128::from(root * root != mantissa);
            // Append a sticky bit to the root, which is 1 if there is a remainder.
            let exponent = (n.exponent - up as i32) / 2 - 1;
            round(
                Number {
                    negative: false,
                    exponent,
                    mantissa: root << 1 | rest,
                },
                format,
                env,
            )
        }
        _ => invalid(format, env),
    }
}

/// Compares two values that are not NaNs.
fn order(x: Value, y: Value) -> core::cmp::Ordering {
    use core::cmp::Ordering::{Equal, Greater, Less};
    let rank = |v: Value| match v {
        Value::Infinity(true) => -2,
        Value::Number(n) if n.negative => -1,
        Value::Number(_) => 1,
        Value::Infinity(false) => 2,
        _ => 0,
    };
    match rank(x).cmp(&rank(y)) {
        Equal => match (x, y) {
            (Value::Number(a), Value::Number(b)) => {
                match sum(
                    a,
                    Number {
                        negative: !b.negative,
                        ..b
                    },
                ) {
                    None => Equal,
                    Some(n) if n.negative => Less,
                    Some(_) => Greater,
                }
            }
            _ => Equal,
        },
        other => other,
    }
}

/// Compares two numbers (FPCompare). Returns N, Z, C, V in the low four bits.
pub(crate) fn compare(a: u64, b: u64, signals: bool, format: Format, env: &mut Env) -> u64 {
    let (x, y) = (unpack(a, format, env), unpack(b, format, env));
    if format.is_nan(a) || format.is_nan(b) {
        if signals || format.is_signalling(a) || format.is_signalling(b) {
            env.raise(IOC);
        }
        return 0b0011;
    }
    match order(x, y) {
        core::cmp::Ordering::Less => 0b1000,
        core::cmp::Ordering::Equal => 0b0110,
        core::cmp::Ordering::Greater => 0b0010,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extreme {
    Max,
    Min,
    /// FMAXNM: if one operand is a quiet NaN and the other is a number, the result is the number.
    MaxNumber,
    MinNumber,
}

pub(crate) fn extreme(a: u64, b: u64, which: Extreme, format: Format, env: &mut Env) -> u64 {
    let is_max = matches!(which, Extreme::Max | Extreme::MaxNumber);
    let (mut a, mut b) = (a, b);
    if matches!(which, Extreme::MaxNumber | Extreme::MinNumber) {
        let least = format.infinity(is_max);
        match (format.is_quiet(a), format.is_quiet(b)) {
            (true, false) => a = least,
            (false, true) => b = least,
            _ => {}
        }
    }
    let (x, y) = (unpack(a, format, env), unpack(b, format, env));
    if let Some(nan) = nan_of(&[a, b], format, env) {
        return nan;
    }
    let is_greater = order(x, y) == core::cmp::Ordering::Greater;
    match if is_greater == is_max { x } else { y } {
        Value::Infinity(negative) => format.infinity(negative),
        Value::Number(n) => round(n, format, env),
        _ => {
            // The result is a zero: either both operands are zeros, or the nonzero operand loses against the zero.
            let negative = match (x, y) {
                (Value::Zero(p), Value::Zero(q)) => {
                    if is_max {
                        p && q
                    } else {
                        p || q
                    }
                }
                (Value::Zero(p), _) | (_, Value::Zero(p)) => p,
                _ => unreachable!("no zero"),
            };
            format.zero(negative)
        }
    }
}

/// Rounds to an integer in the same format (FPRoundInt).
pub(crate) fn round_integer(
    a: u64,
    rounding: Rounding,
    exact: bool,
    format: Format,
    env: &mut Env,
) -> u64 {
    match unpack(a, format, env) {
        Value::Nan => nan(a, format, env),
        Value::Infinity(negative) => format.infinity(negative),
        Value::Zero(negative) => format.zero(negative),
        Value::Number(n) if n.exponent >= 0 => a,
        Value::Number(n) => {
            let (integer, was_exact) = to_integer(n, rounding);
            if exact && !was_exact {
                env.raise(IXC);
            }
            integer_value(n.negative, integer, format, env)
        }
    }
}

/// Converts an integer that the format can represent exactly to a number of the format.
fn integer_value(negative: bool, integer: u128, format: Format, env: &mut Env) -> u64 {
    match integer {
        0 => format.zero(negative),
        mantissa => round(
            Number {
                negative,
                exponent: 0,
                mantissa,
            },
            format,
            env,
        ),
    }
}

/// FRINT32 and FRINT64: rounds to an integer of `bits` bits (FPRoundIntN).
pub(crate) fn round_to_bits(
    a: u64,
    rounding: Rounding,
    bits: u32,
    format: Format,
    env: &mut Env,
) -> u64 {
    let out_of_range = |env: &mut Env| {
        env.raise(IOC);
        format.sign(true) | power_of_two(bits as i32 - 1, format)
    };
    match unpack(a, format, env) {
        Value::Zero(negative) => format.zero(negative),
        Value::Number(n) => {
            let (integer, was_exact) = to_integer(n, rounding);
            let limit = (1u128 << (bits - 1)) - u128::from(!n.negative);
            if integer > limit {
                return out_of_range(env);
            }
            if !was_exact {
                env.raise(IXC);
            }
            integer_value(n.negative, integer, format, env)
        }
        _ => out_of_range(env),
    }
}

/// Converts to a fixed-point number of `bits` bits, of which the lowest `fraction` are its fraction. The result
/// saturates (FPToFixed).
pub(crate) fn to_fixed(
    a: u64,
    rounding: Rounding,
    [bits, fraction]: [u32; 2],
    is_signed: bool,
    format: Format,
    env: &mut Env,
) -> u64 {
    let mask = u64::MAX >> (64 - bits);
    let [largest, least] = match is_signed {
        true => [mask >> 1, 1 << (bits - 1)],
        false => [mask, 0],
    };
    let saturated = |negative, env: &mut Env| {
        env.raise(IOC);
        if negative { least } else { largest }
    };
    match unpack(a, format, env) {
        Value::Nan => {
            env.raise(IOC);
            0
        }
        Value::Zero(_) => 0,
        Value::Infinity(negative) => saturated(negative, env),
        Value::Number(n) => {
            let scaled = Number {
                exponent: n.exponent + fraction as i32,
                ..n
            };
            let (integer, was_exact) = to_integer(scaled, rounding);
            let limit = if n.negative { least } else { largest };
            if integer > limit.into() {
                return saturated(n.negative, env);
            }
            if !was_exact {
                env.raise(IXC);
            }
            let integer = integer as u64;
            (if n.negative {
                integer.wrapping_neg()
            } else {
                integer
            }) & mask
        }
    }
}

/// Converts a fixed-point number of `bits` bits, of which the lowest `fraction` are its fraction (FixedToFP).
pub(crate) fn from_fixed(
    a: u64,
    [bits, fraction]: [u32; 2],
    is_signed: bool,
    format: Format,
    env: &mut Env,
) -> u64 {
    let a = crate::bits::zero_extend(a, bits);
    let negative = is_signed && a >> (bits - 1) != 0;
    let magnitude = match negative {
        true => crate::bits::sign_extend(a, bits).wrapping_neg(),
        false => a,
    };
    match magnitude {
        0 => 0,
        _ => {
            let exponent = -(fraction as i32);
            round(
                Number {
                    negative,
                    exponent,
                    mantissa: magnitude.into(),
                },
                format,
                env,
            )
        }
    }
}

/// Returns the fraction of a number, left-aligned in 52 bits and without the leading one, and the exponent field. A
/// denormal is normalized first: its exponent field is then 0 or negative.
fn normalized(a: u64, format: Format) -> (u64, i32) {
    let fraction = (a & format.fraction_mask()) << (52 - format.fraction);
    let exponent = format.exponent_of(a) as i32;
    if exponent != 0 {
        return (fraction, exponent);
    }
    let up = fraction.leading_zeros() - 11;
    (fraction << up & ((1 << 52) - 1), 1 - up as i32)
}

/// Makes a positive number from an exponent field and the low eight bits of an estimate, which are its fraction. With
/// an exponent field of 0 or -1, the number is a denormal.
fn estimated(exponent: i32, estimate: u64, format: Format) -> u64 {
    let fraction = (estimate & 0xff) << 44;
    let (fraction, exponent) = match exponent {
        0 => (1 << 51 | fraction >> 1, 0),
        -1 => (1 << 50 | fraction >> 2, 0),
        _ => (fraction, exponent as u64),
    };
    exponent << format.fraction | fraction >> (52 - format.fraction)
}

/// Returns 2^17 / (`a` + 1/2), rounded: from 256 to 511 for `a` from 256 to 511 (RecipEstimate).
pub(crate) fn reciprocal(a: u64) -> u64 {
    ((1u64 << 19) / (2 * a + 1)).div_ceil(2)
}

/// Returns an estimate, from 256 to 511, of the reciprocal square root of `a`, which is from 128 to 511
/// (RecipSqrtEstimate).
pub(crate) fn reciprocal_root(a: u64) -> u64 {
    let a = if a < 256 {
        2 * a + 1
    } else {
        2 * ((a & !1) + 1)
    };
    let mut b = 512;
    while a * (b + 1) * (b + 1) < 1 << 28 {
        b += 1;
    }
    b.div_ceil(2)
}

/// FRECPE.
pub(crate) fn reciprocal_estimate(a: u64, format: Format, env: &mut Env) -> u64 {
    let negative = format.is_negative(a);
    match unpack(a, format, env) {
        Value::Nan => nan(a, format, env),
        Value::Infinity(_) => format.zero(negative),
        Value::Zero(_) => {
            env.raise(DZC);
            format.infinity(negative)
        }
        Value::Number(_) => {
            let bias = (1 << (format.exponent - 1)) - 1;
            let (fraction, exponent) = normalized(a, format);
            // The operand is less than 2 to the power of -(bias + 1), so its reciprocal overflows.
            if exponent < -1 {
                env.raise(OFC | IXC);
                return overflow(negative, format, env.rounding());
            }
            let flushes = match format.is_half() {
                true => env.fpcr & 1 << 19 != 0,
                false => env.fpcr & 1 << 24 != 0,
            };
            if flushes && exponent >= 2 * bias - 1 {
                env.raise(UFC);
                return format.zero(negative);
            }
            let estimate = reciprocal(1 << 8 | fraction >> 44);
            format.sign(negative) | estimated(2 * bias - 1 - exponent, estimate, format)
        }
    }
}

/// FRSQRTE.
pub(crate) fn root_estimate(a: u64, format: Format, env: &mut Env) -> u64 {
    let negative = format.is_negative(a);
    match unpack(a, format, env) {
        Value::Nan => nan(a, format, env),
        Value::Zero(_) => {
            env.raise(DZC);
            format.infinity(negative)
        }
        Value::Infinity(false) => format.zero(false),
        Value::Number(n) if !n.negative => {
            let bias = (1 << (format.exponent - 1)) - 1;
            let (fraction, exponent) = normalized(a, format);
            let scaled = match exponent & 1 {
                0 => 1 << 8 | fraction >> 44,
                _ => 1 << 7 | fraction >> 45,
            };
            let estimate = reciprocal_root(scaled);
            estimated((3 * bias - 1 - exponent).div_euclid(2), estimate, format)
        }
        _ => invalid(format, env),
    }
}

/// FRECPX.
pub(crate) fn reciprocal_exponent(a: u64, format: Format, env: &mut Env) -> u64 {
    unpack(a, format, env);
    if format.is_nan(a) {
        return nan(a, format, env);
    }
    let exponent = match format.exponent_of(a) {
        0 => format.most() - 1,
        exponent => !exponent & format.most(),
    };
    format.sign(format.is_negative(a)) | exponent << format.fraction
}

/// Returns the absolute value of the difference.
pub(crate) fn difference(a: u64, b: u64, format: Format, env: &mut Env) -> u64 {
    sub(a, b, format, env) & !format.sign(true)
}
