//! Integer operations on lanes.

use super::float::{Env, QC};
use crate::bits::{ones, zero_extend};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Integer {
    Add,
    Sub,
    Mul,
    /// Adds the product of the first two operands to the third operand.
    MulAdd,
    MulSub,
    Max,
    Min,
    Difference,
    /// Adds the absolute difference of the first two operands to the third operand.
    DifferenceAdd,
    HalvingAdd {
        rounds: bool,
    },
    HalvingSub,
    SaturatingAdd,
    SaturatingSub,
    /// SUQADD and USQADD: add a signed and an unsigned lane.
    SaturatingAddOther,
    Greater,
    GreaterEqual,
    Equal,
    Test,
    /// Shifts to the left by the lowest byte of the second operand. A negative count shifts to the right.
    ShiftBy {
        rounds: bool,
        saturates: bool,
    },
    PolynomialMul,
    /// SQDMULH and SQRDMULH.
    DoublingMulHigh {
        rounds: bool,
    },
    /// SQRDMLAH and SQRDMLSH.
    DoublingMulAddHigh {
        subtracts: bool,
    },
    /// SQDMULL. The operands were already extended.
    DoublingMul,
    /// SQDMLAL and SQDMLSL.
    DoublingMulAdd {
        subtracts: bool,
    },
    Abs {
        saturates: bool,
    },
    Neg {
        saturates: bool,
    },
    LeadingZeros,
    LeadingSigns,
    Ones,
    ReverseBits,
    /// Shifts to the right by the immediate, and then adds the third operand.
    ShiftRight {
        rounds: bool,
        adds: bool,
    },
    ShiftLeft,
    /// SLI and SRI: bits that the shift does not write keep the value of the third operand.
    InsertLeft,
    InsertRight,
    /// SQSHL and UQSHL, and SQSHLU with an unsigned result.
    SaturatingShiftLeft {
        to_unsigned: bool,
    },
    UnsignedReciprocal,
    UnsignedRootReciprocal,
}

/// The width and signedness of a lane, and the instruction's immediate.
#[derive(Clone, Copy)]
pub(crate) struct Lane {
    pub(crate) bits: u32,
    pub(crate) is_signed: bool,
    pub(crate) immediate: u32,
}

impl Lane {
    /// Returns the signed or unsigned value of a lane.
    fn value(self, a: u64) -> i128 {
        match self.is_signed {
            true => signed(a, self.bits),
            false => zero_extend(a, self.bits).into(),
        }
    }
    fn saturated(self, value: i128, env: &mut Env) -> u64 {
        saturate(value, self.bits, self.is_signed, env)
    }
}

fn signed(a: u64, bits: u32) -> i128 {
    (crate::bits::sign_extend(a, bits) as i64).into()
}

/// Returns the value that a lane can hold and that is nearest to `value`. Sets QC if they differ.
pub(crate) fn saturate(value: i128, bits: u32, is_signed: bool, env: &mut Env) -> u64 {
    let (least, most) = match is_signed {
        true => (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1),
        false => (0, (1i128 << bits) - 1),
    };
    if value < least || value > most {
        env.raise(QC);
    }
    zero_extend(value.clamp(least, most) as u64, bits)
}

/// Shifts to the right. If `rounds`, the result is rounded to nearest, and ties are rounded up.
pub(crate) fn shift_right(value: i128, count: u32, rounds: bool) -> i128 {
    match (count, rounds) {
        (0, _) => value,
        (1..=126, true) => (value + (1 << (count - 1))) >> count,
        (_, true) => 0,
        (_, false) => value >> count.min(127),
    }
}

fn shift_by(lane: Lane, a: u64, b: u64, [rounds, saturates]: [bool; 2], env: &mut Env) -> u64 {
    let value = lane.value(a);
    let count = i32::from(b as i8);
    if count < 0 {
        return shift_right(value, count.unsigned_abs(), rounds) as u64;
    }
    let count = count as u32;
    if !saturates {
        return if count < lane.bits {
            (value << count) as u64
        } else {
            0
        };
    }
    // A left shift by the width or more saturates every value except 0.
    let shifted = match count < lane.bits {
        true => value << count,
        false => value.signum() << 64,
    };
    lane.saturated(shifted, env)
}

fn polynomial_mul(a: u64, b: u64) -> u64 {
    (0..64)
        .filter(|n| b >> n & 1 != 0)
        .fold(0, |product, n| product ^ a << n)
}

/// Computes one lane. Bits above the lane are zero or ignored, in the operands and in the result.
pub(crate) fn compute(op: Integer, lane: Lane, a: u64, b: u64, c: u64, env: &mut Env) -> u64 {
    let (x, y) = (lane.value(a), lane.value(b));
    let bits = lane.bits;
    let truth = |is: bool| if is { u64::MAX } else { 0 };
    let doubled = |rounds: bool| {
        let rounding = if rounds { 1 << (bits - 1) } else { 0 };
        (2 * x * y, rounding)
    };
    match op {
        Integer::Add => a.wrapping_add(b),
        Integer::Sub => a.wrapping_sub(b),
        Integer::Mul => a.wrapping_mul(b),
        Integer::MulAdd => c.wrapping_add(a.wrapping_mul(b)),
        Integer::MulSub => c.wrapping_sub(a.wrapping_mul(b)),
        Integer::Max => x.max(y) as u64,
        Integer::Min => x.min(y) as u64,
        Integer::Difference => (x - y).unsigned_abs() as u64,
        Integer::DifferenceAdd => c.wrapping_add((x - y).unsigned_abs() as u64),
        Integer::HalvingAdd { rounds } => ((x + y + i128::from(rounds)) >> 1) as u64,
        Integer::HalvingSub => ((x - y) >> 1) as u64,
        Integer::SaturatingAdd => lane.saturated(x + y, env),
        Integer::SaturatingSub => lane.saturated(x - y, env),
        Integer::SaturatingAddOther => {
            let other = Lane {
                is_signed: !lane.is_signed,
                ..lane
            };
            lane.saturated(x + other.value(b), env)
        }
        Integer::Greater => truth(x > y),
        Integer::GreaterEqual => truth(x >= y),
        Integer::Equal => truth(x == y),
        Integer::Test => truth(zero_extend(a & b, bits) != 0),
        Integer::ShiftBy { rounds, saturates } => shift_by(lane, a, b, [rounds, saturates], env),
        Integer::PolynomialMul => polynomial_mul(a, b),
        Integer::DoublingMulHigh { rounds } => {
            let (product, rounding) = doubled(rounds);
            lane.saturated((product + rounding) >> bits, env)
        }
        Integer::DoublingMulAddHigh { subtracts } => {
            let (product, rounding) = doubled(true);
            let product = if subtracts { -product } else { product };
            lane.saturated(((lane.value(c) << bits) + product + rounding) >> bits, env)
        }
        Integer::DoublingMul => lane.saturated(2 * x * y, env),
        Integer::DoublingMulAdd { subtracts } => {
            let product = lane.saturated(2 * x * y, env);
            let product = lane.value(product);
            let product = if subtracts { -product } else { product };
            lane.saturated(lane.value(c) + product, env)
        }
        Integer::Abs { saturates: false } => signed(a, bits).unsigned_abs() as u64,
        Integer::Abs { saturates: true } => saturate(signed(a, bits).abs(), bits, true, env),
        Integer::Neg { saturates: false } => a.wrapping_neg(),
        Integer::Neg { saturates: true } => saturate(-signed(a, bits), bits, true, env),
        Integer::LeadingZeros => u64::from(zero_extend(a, bits).leading_zeros() - (64 - bits)),
        Integer::LeadingSigns => {
            let a = crate::bits::sign_extend(a, bits);
            let differing = a ^ (a as i64 >> 63) as u64;
            u64::from(differing.leading_zeros() - (64 - bits) - 1)
        }
        Integer::Ones => zero_extend(a, bits).count_ones().into(),
        Integer::ReverseBits => a.reverse_bits() >> (64 - bits),
        Integer::ShiftRight { rounds, adds } => {
            let shifted = shift_right(x, lane.immediate, rounds) as u64;
            if adds {
                c.wrapping_add(shifted)
            } else {
                shifted
            }
        }
        Integer::ShiftLeft => a << lane.immediate,
        Integer::InsertLeft => a << lane.immediate | c & ones(lane.immediate),
        Integer::InsertRight => {
            let kept = !ones(bits - lane.immediate);
            let shifted = zero_extend(a, bits)
                .checked_shr(lane.immediate)
                .unwrap_or(0);
            shifted | c & kept
        }
        Integer::SaturatingShiftLeft { to_unsigned } => saturate(
            x << lane.immediate,
            bits,
            lane.is_signed && !to_unsigned,
            env,
        ),
        Integer::UnsignedReciprocal => match a as u32 >> 31 {
            0 => u32::MAX.into(),
            _ => super::arithmetic::reciprocal(u64::from(a as u32 >> 23)) << 23,
        },
        Integer::UnsignedRootReciprocal => match a as u32 >> 30 {
            0 => u32::MAX.into(),
            _ => super::arithmetic::reciprocal_root(u64::from(a as u32 >> 23)) << 23,
        },
    }
}
