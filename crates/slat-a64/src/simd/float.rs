//! Floating-point numbers in software: formats, unpacking, rounding, and NaNs (DDI 0487, J1.3, shared/functions/float).
//!
//! Everything is computed with integers. Compiled code lets the host compute most results (`jit/float.rs`), but some of
//! the host's results differ from Arm's. Arm detects underflow before rounding, x86 after rounding. The flushing of
//! denormals and the choice among NaNs differ, and half precision is missing. `rustc_apfloat` has no square root and no
//! flushing, and detects underflow after rounding, too.

/// FPSR's cumulative exception bits.
pub(crate) const IOC: u32 = 1 << 0;
pub(crate) const DZC: u32 = 1 << 1;
pub(crate) const OFC: u32 = 1 << 2;
pub(crate) const UFC: u32 = 1 << 3;
pub(crate) const IXC: u32 = 1 << 4;
pub(crate) const IDC: u32 = 1 << 7;
/// FPSR's cumulative saturation bit.
pub(crate) const QC: u32 = 1 << 27;

const FZ16: u32 = 1 << 19;
const FZ: u32 = 1 << 24;
const DN: u32 = 1 << 25;
const AHP: u32 = 1 << 26;

/// FPCR.RMode, the rounding mode. 0: to nearest.
const MODE: u32 = 3 << 22;

/// Whether single and double precision are rounded to nearest, and denormals are not flushed to zero.
pub(crate) fn is_usual(fpcr: u32) -> bool {
    fpcr & (FZ | MODE) == 0
}

/// FPCR and FPSR while an instruction is computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Env {
    pub(crate) fpcr: u32,
    pub(crate) fpsr: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    Up,
    Down,
    Zero,
    /// Round to the nearest number. If two numbers are equally near, round to the number farther from zero.
    Away,
    /// Round to odd: an inexact result gets an odd lowest bit.
    Odd,
}

impl Rounding {
    pub(crate) fn of(mode: u32) -> Self {
        match mode & 3 {
            0 => Rounding::Nearest,
            1 => Rounding::Up,
            2 => Rounding::Down,
            _ => Rounding::Zero,
        }
    }
}

impl Env {
    pub(crate) fn rounding(&self) -> Rounding {
        Rounding::of(self.fpcr >> 22)
    }
    pub(crate) fn raise(&mut self, bits: u32) {
        self.fpsr |= bits;
    }
}

/// A floating-point format: half, single or double precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    /// The number of bits of the fraction.
    pub(crate) fraction: u32,
    /// The number of bits of the exponent.
    pub(crate) exponent: u32,
}

impl Format {
    pub(crate) const fn of(size: u8) -> Self {
        let [fraction, exponent] = match size {
            1 => [10, 5],
            2 => [23, 8],
            _ => [52, 11],
        };
        Format { fraction, exponent }
    }
    pub(crate) const fn bits(self) -> u32 {
        1 + self.exponent + self.fraction
    }
    pub(crate) const fn is_half(self) -> bool {
        self.exponent == 5
    }
    /// Returns the largest exponent field. Infinities and NaNs have it.
    pub(crate) const fn most(self) -> u64 {
        (1 << self.exponent) - 1
    }
    pub(crate) const fn fraction_mask(self) -> u64 {
        (1 << self.fraction) - 1
    }
    /// Returns the exponent of the smallest normal number.
    const fn least_exponent(self) -> i32 {
        2 - (1 << (self.exponent - 1))
    }
    pub(crate) const fn sign(self, negative: bool) -> u64 {
        (negative as u64) << (self.bits() - 1)
    }
    pub(crate) const fn zero(self, negative: bool) -> u64 {
        self.sign(negative)
    }
    pub(crate) const fn infinity(self, negative: bool) -> u64 {
        self.sign(negative) | self.most() << self.fraction
    }
    /// Returns the largest finite number.
    pub(crate) const fn largest(self, negative: bool) -> u64 {
        self.infinity(negative) - 1
    }
    pub(crate) const fn default_nan(self) -> u64 {
        self.infinity(false) | 1 << (self.fraction - 1)
    }
    pub(crate) const fn is_negative(self, bits: u64) -> bool {
        bits >> (self.bits() - 1) & 1 != 0
    }
    pub(crate) const fn exponent_of(self, bits: u64) -> u64 {
        bits >> self.fraction & self.most()
    }
    pub(crate) const fn is_nan(self, bits: u64) -> bool {
        self.exponent_of(bits) == self.most() && bits & self.fraction_mask() != 0
    }
    pub(crate) const fn is_quiet(self, bits: u64) -> bool {
        self.is_nan(bits) && bits >> (self.fraction - 1) & 1 != 0
    }
    pub(crate) const fn is_signalling(self, bits: u64) -> bool {
        self.is_nan(bits) && bits >> (self.fraction - 1) & 1 == 0
    }
    const fn flushes(self, fpcr: u32) -> bool {
        fpcr & if self.is_half() { FZ16 } else { FZ } != 0
    }
}

/// A number other than zero: `mantissa` times two to the `exponent`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Number {
    pub(crate) negative: bool,
    pub(crate) exponent: i32,
    pub(crate) mantissa: u128,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    Zero(bool),
    Infinity(bool),
    /// A NaN. Function [`nan`] handles its bits.
    Nan,
    Number(Number),
}

impl Value {
    pub(crate) fn is_negative(self) -> bool {
        match self {
            Value::Zero(negative) | Value::Infinity(negative) => negative,
            Value::Number(number) => number.negative,
            Value::Nan => false,
        }
    }
    pub(crate) fn negated(self) -> Self {
        match self {
            Value::Zero(negative) => Value::Zero(!negative),
            Value::Infinity(negative) => Value::Infinity(!negative),
            Value::Nan => Value::Nan,
            Value::Number(n) => Value::Number(Number {
                negative: !n.negative,
                ..n
            }),
        }
    }
}

/// Returns the value of a number in a format. May flush denormals to zero (FPUnpackBase).
pub(crate) fn unpack(bits: u64, format: Format, env: &mut Env) -> Value {
    let negative = format.is_negative(bits);
    let fraction = bits & format.fraction_mask();
    let exponent = format.exponent_of(bits);
    if exponent == 0 {
        if fraction == 0 {
            return Value::Zero(negative);
        }
        if format.flushes(env.fpcr) {
            if !format.is_half() {
                env.raise(IDC);
            }
            return Value::Zero(negative);
        }
    } else if exponent == format.most() {
        return match fraction {
            0 => Value::Infinity(negative),
            _ => Value::Nan,
        };
    }
    finite(negative, exponent, fraction, format)
}

/// Returns the value of a finite number other than zero.
fn finite(negative: bool, exponent: u64, fraction: u64, format: Format) -> Value {
    let hidden = u64::from(exponent != 0) << format.fraction;
    let exponent = exponent.max(1) as i32 - 1 + format.least_exponent() - format.fraction as i32;
    let mantissa = (hidden | fraction).into();
    Value::Number(Number {
        negative,
        exponent,
        mantissa,
    })
}

/// Returns the result of an operation if an operand is the NaN `bits` (FPProcessNaN).
pub(crate) fn nan(bits: u64, format: Format, env: &mut Env) -> u64 {
    if format.is_signalling(bits) {
        env.raise(IOC);
    }
    match env.fpcr & DN {
        0 => bits | 1 << (format.fraction - 1),
        _ => format.default_nan(),
    }
}

/// Returns the result of an operation if one of its operands is a NaN (FPProcessNaNs): the first signalling NaN, or
/// else the first NaN.
pub(crate) fn nan_of(operands: &[u64], format: Format, env: &mut Env) -> Option<u64> {
    let signalling = operands.iter().find(|bits| format.is_signalling(**bits));
    let chosen = signalling.or_else(|| operands.iter().find(|bits| format.is_nan(**bits)))?;
    Some(nan(*chosen, format, env))
}

/// Raises the invalid operation exception, and returns the default NaN.
pub(crate) fn invalid(format: Format, env: &mut Env) -> u64 {
    env.raise(IOC);
    format.default_nan()
}

/// Rounds a number by the rounding mode in FPCR.
pub(crate) fn round(number: Number, format: Format, env: &mut Env) -> u64 {
    let rounding = env.rounding();
    round_by(number, format, rounding, false, env)
}

/// Shifts to the right. If any 1 bit is shifted out, the lowest bit of the result is 1.
pub(crate) fn shift_right_sticky(value: u128, count: u32) -> u128 {
    match count {
        0 => value,
        1..=127 => value >> count | u128::from(value & ((1 << count) - 1) != 0),
        _ => u128::from(value != 0),
    }
}

/// Whether rounding increases the magnitude of a number. `rest` / `unit` is the part that rounding drops, as a fraction
/// of the last place; it is not zero if the number is inexact.
fn rounds_up(rounding: Rounding, negative: bool, odd: bool, rest: u128, unit: u128) -> bool {
    match rounding {
        Rounding::Nearest => rest > unit / 2 || (rest == unit / 2 && odd),
        Rounding::Away => rest >= unit / 2,
        Rounding::Up => rest != 0 && !negative,
        Rounding::Down => rest != 0 && negative,
        Rounding::Zero | Rounding::Odd => false,
    }
}

/// Rounds a number to a format (FPRoundBase). `alternative` selects the alternative half-precision format.
fn round_by(
    number: Number,
    format: Format,
    rounding: Rounding,
    alternative: bool,
    env: &mut Env,
) -> u64 {
    let Number {
        negative,
        exponent,
        mantissa,
    } = number;
    // Shift the leading bit to bit 126.
    let up = mantissa.leading_zeros() - 1;
    let mantissa = mantissa << up;
    let exponent = exponent - up as i32 + 126;
    let least = format.least_exponent();
    if exponent < least && format.flushes(env.fpcr) {
        env.raise(UFC);
        return format.zero(negative);
    }
    let mut biased = (exponent - least + 1).max(0) as u64;
    let below = (least - exponent).max(0) as u32;
    let mantissa = shift_right_sticky(mantissa, below);
    let unit = 1u128 << (126 - format.fraction);
    let mut integer = (mantissa >> (126 - format.fraction)) as u64;
    let rest = mantissa & (unit - 1);
    if biased == 0 && rest != 0 {
        env.raise(UFC);
    }
    if rounds_up(rounding, negative, integer & 1 != 0, rest, unit) {
        integer += 1;
        if integer == 1 << format.fraction {
            biased = 1;
        }
        if integer == 2 << format.fraction {
            biased += 1;
            integer /= 2;
        }
    }
    if rounding == Rounding::Odd && rest != 0 {
        integer |= 1;
    }
    if alternative {
        // The alternative half-precision format has no infinities.
        if biased > format.most() {
            env.raise(IOC);
            return format.sign(negative) | ((1 << (format.bits() - 1)) - 1);
        }
    } else if biased >= format.most() {
        env.raise(OFC | IXC);
        return overflow(negative, format, rounding);
    }
    if rest != 0 {
        env.raise(IXC);
    }
    format.sign(negative) | biased << format.fraction | integer & format.fraction_mask()
}

/// Returns the result for a number that overflows the format: infinity or the largest number.
pub(crate) fn overflow(negative: bool, format: Format, rounding: Rounding) -> u64 {
    let to_infinity = match rounding {
        Rounding::Nearest | Rounding::Away => true,
        Rounding::Up => !negative,
        Rounding::Down => negative,
        Rounding::Zero | Rounding::Odd => false,
    };
    match to_infinity {
        true => format.infinity(negative),
        false => format.largest(negative),
    }
}

/// Rounds a number to an integer. Returns the integer's magnitude, of at most 128 bits, and whether the result is
/// exact.
pub(crate) fn to_integer(number: Number, rounding: Rounding) -> (u128, bool) {
    let Number {
        negative,
        exponent,
        mantissa,
    } = number;
    if exponent >= 0 {
        let fits = exponent as u32 <= mantissa.leading_zeros();
        return (
            if fits {
                mantissa << exponent
            } else {
                u128::MAX
            },
            true,
        );
    }
    // The shift loses no bits: in this case mantissas have at most 64 bits, so enough of the upper bits are zero.
    let below = exponent.unsigned_abs();
    let (mantissa, below) = match below {
        0..=120 => (mantissa, below),
        _ => (shift_right_sticky(mantissa, below - 120), 120),
    };
    let unit = 1u128 << below;
    let (integer, rest) = (mantissa >> below, mantissa & (unit - 1));
    let up = rounds_up(rounding, negative, integer & 1 != 0, rest, unit);
    (integer + u128::from(up), rest == 0)
}

/// Converts between formats (FPConvert).
pub(crate) fn convert(
    bits: u64,
    from: Format,
    to: Format,
    rounding: Rounding,
    env: &mut Env,
) -> u64 {
    let negative = from.is_negative(bits);
    let alternative = |format: Format| format.is_half() && env.fpcr & AHP != 0;
    let (from_alternative, to_alternative) = (alternative(from), alternative(to));
    // Conversions never flush half-precision denormals.
    let mut unflushed = Env {
        fpcr: env.fpcr & !FZ16,
        ..*env
    };
    let is_special = from.exponent_of(bits) == from.most();
    let value = match from_alternative && is_special {
        true => finite(negative, from.most(), bits & from.fraction_mask(), from),
        false => unpack(bits, from, &mut unflushed),
    };
    let result = match value {
        Value::Nan => {
            let signals = from.is_signalling(bits);
            if signals || to_alternative {
                unflushed.raise(IOC);
            }
            if to_alternative {
                to.zero(negative)
            } else if unflushed.fpcr & DN != 0 {
                to.default_nan()
            } else {
                let fraction = bits & from.fraction_mask();
                let payload = match from.fraction > to.fraction {
                    true => fraction >> (from.fraction - to.fraction),
                    false => fraction << (to.fraction - from.fraction),
                };
                to.infinity(negative) | payload & to.fraction_mask() | 1 << (to.fraction - 1)
            }
        }
        Value::Infinity(_) if to_alternative => {
            unflushed.raise(IOC);
            to.sign(negative) | ((1 << (to.bits() - 1)) - 1)
        }
        Value::Infinity(_) => to.infinity(negative),
        Value::Zero(_) => to.zero(negative),
        Value::Number(number) => round_by(number, to, rounding, to_alternative, &mut unflushed),
    };
    env.fpsr = unflushed.fpsr;
    result
}
