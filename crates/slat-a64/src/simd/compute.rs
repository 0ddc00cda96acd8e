//! The operations of vector instructions. Each takes whole registers, and returns a whole register.

use super::arithmetic::{self as fp, Extreme};
use super::float::{Env, Format, Rounding, convert};
use super::integer::{self, Integer, Lane};
use crate::bits::{ones, sign_extend, zero_extend};

/// An operation on lanes that are floating-point numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float {
    Add,
    Sub,
    Mul {
        extended: bool,
    },
    /// FNMUL.
    NegatedMul,
    Div,
    Extreme(Extreme),
    Difference,
    /// FRECPS and FRSQRTS.
    Step {
        root: bool,
    },
    Equal {
        absolute: bool,
    },
    GreaterEqual {
        absolute: bool,
    },
    Greater {
        absolute: bool,
    },
    /// Adds the product of the first two operands to the third operand. The product and the third operand may each be
    /// negated first.
    MulAdd {
        negates_product: bool,
        negates_addend: bool,
    },
    Abs,
    Neg,
    Sqrt,
    /// FRINTN and similar instructions. If `mode` is `None`, FPCR selects the rounding mode.
    Round {
        mode: Option<Rounding>,
        exact: bool,
    },
    /// FRINT32Z and similar instructions.
    RoundToBits {
        mode: Option<Rounding>,
        bits: u8,
    },
    /// Converts to an integer of the same width. The immediate is the number of fraction bits of the result.
    ToFixed {
        mode: Rounding,
    },
    FromFixed,
    ReciprocalEstimate,
    RootEstimate,
    ReciprocalExponent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Narrowing {
    Plain,
    /// SQXTN and UQXTN.
    Saturating,
    /// SQXTUN.
    ToUnsigned,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permutation {
    Zip,
    Unzip,
    Transpose,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bitwise {
    And,
    Bic,
    Orr,
    Orn,
    Eor,
    Not,
    /// The third operand selects between the first two.
    Select,
    /// Copies bits of the first operand to the third operand where the second operand has ones (if `ones`) or zeros.
    InsertIf {
        ones: bool,
    },
}

/// The form of an operation whose operands are extended: their lanes have half the width of the result's lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Widening {
    /// Whether the operation reads the upper halves of registers instead of the lower halves.
    pub(crate) upper: bool,
    /// Whether the first operand already has the width of the result.
    pub(crate) first_is_wide: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Lanes(Integer),
    /// The operation combines adjacent lanes of both operands.
    Pairs(Integer),
    /// The operation combines all lanes of the first operand. If `long`, the sum is twice as wide as a lane.
    Across {
        op: Integer,
        long: bool,
    },
    /// The result's lanes are twice as wide as `size`.
    Widen(Integer, Widening),
    /// The operand's lanes are twice as wide as `size`. The immediate is the count of a shift to the right.
    Narrow {
        kind: Narrowing,
        rounds: bool,
        upper: bool,
    },
    /// ADDHN and similar instructions.
    NarrowHigh {
        subtracts: bool,
        rounds: bool,
        upper: bool,
    },
    /// SADDLP and SADALP.
    AddPairsLong {
        adds: bool,
    },
    Dot,
    Bitwise(Bitwise),
    /// Reverses the order of the lanes within each group of this many bits.
    Reverse {
        group: u8,
    },
    Permute {
        kind: Permutation,
        second: bool,
    },
    /// EXT. The immediate is the index of the first extracted byte.
    Extract,
    /// A look-up in one register of a table. The immediate is the index of this register in the table.
    Table,
    /// Returns the first operand's lane whose index is the immediate, sign-extended if the function is signed.
    Element,
    /// Replaces lane 0 of the first operand by a lane of the third operand, whose index is the immediate.
    Insert,
    /// Copies the first operand's lane whose index is the immediate to all lanes.
    Duplicate,
    Float(Float),
    FloatPairs(Float),
    /// Returns the minimum or maximum of all lanes.
    FloatAcross(Extreme),
    /// Converts between formats. `size` is the size of the result, `from` the size of the operand.
    Convert {
        from: u8,
    },
    /// FCVTL: converts the lanes of half a register to lanes of twice the width, which is `size`.
    ConvertLong {
        upper: bool,
    },
    /// FCVTN, or FCVTXN if the rounding is to odd: converts lanes to lanes of half the width.
    ConvertNarrow {
        upper: bool,
        odd: bool,
    },
    /// Converts to or from a general register of this many bits. The immediate is the number of fraction bits.
    ToGeneral {
        mode: Rounding,
        bits: u8,
    },
    FromGeneral {
        bits: u8,
    },
    /// Returns N, Z, C, V in the low four bits. If `conditional` and bit 4 of the third operand is clear, does not
    /// compare, but returns the low four bits of the third operand.
    Compare {
        signals: bool,
        conditional: bool,
    },
}

/// A vector operation. Its result depends only on its operands, FPCR and FPSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) op: Op,
    /// The logarithm of the number of bytes of a lane.
    pub(crate) size: u8,
    /// The number of bytes of the result that are computed. The other bytes are zero.
    pub(crate) bytes: u8,
    pub(crate) is_signed: bool,
    pub(crate) immediate: u8,
}

fn get(v: u128, size: u8, n: u32) -> u64 {
    let bits = 8 << size;
    zero_extend((v >> (n * bits)) as u64, bits)
}

fn put(v: &mut u128, size: u8, n: u32, value: u64) {
    let bits = 8 << size;
    *v |= u128::from(zero_extend(value, bits)) << (n * bits);
}

/// Returns a register with `value` in one half. If `upper`, this is the upper half, and the lower half comes from `c`.
/// Otherwise the upper half is zero.
fn half(value: u128, upper: bool, c: u128) -> u128 {
    match upper {
        true => value << 64 | c & u128::from(u64::MAX),
        false => value,
    }
}

impl Function {
    fn lanes(&self) -> u32 {
        u32::from(self.bytes) >> self.size
    }
    fn lane(&self) -> Lane {
        self.lane_of(self.size)
    }
    fn lane_of(&self, size: u8) -> Lane {
        Lane {
            bits: 8 << size,
            is_signed: self.is_signed,
            immediate: self.immediate.into(),
        }
    }
    fn each(&self, mut f: impl FnMut(u32) -> u64) -> u128 {
        let mut result = 0;
        for n in 0..self.lanes() {
            put(&mut result, self.size, n, f(n));
        }
        result
    }
    /// Returns lanes 2n and 2n + 1 of the concatenated operands, in which the lanes of `a` come first.
    fn pair(&self, n: u32, a: u128, b: u128) -> [u64; 2] {
        let lanes = self.lanes();
        let at = |n| match n < lanes {
            true => get(a, self.size, n),
            false => get(b, self.size, n - lanes),
        };
        [at(2 * n), at(2 * n + 1)]
    }

    /// Whether the function computes with floating-point numbers.
    pub(crate) fn is_float(&self) -> bool {
        matches!(
            self.op,
            Op::Float(_)
                | Op::FloatPairs(_)
                | Op::FloatAcross(_)
                | Op::Convert { .. }
                | Op::ConvertLong { .. }
                | Op::ConvertNarrow { .. }
                | Op::ToGeneral { .. }
                | Op::FromGeneral { .. }
                | Op::Compare { .. }
        )
    }

    /// Computes the result of the operation from the values of its three operands.
    pub(crate) fn compute(&self, [a, b, c]: [u128; 3], env: &mut Env) -> u128 {
        let size = self.size;
        match self.op {
            Op::Lanes(op) => self.each(|n| {
                let [a, b, c] = [a, b, c].map(|v| get(v, size, n));
                integer::compute(op, self.lane(), a, b, c, env)
            }),
            Op::Pairs(op) => self.each(|n| {
                let [x, y] = self.pair(n, a, b);
                integer::compute(op, self.lane(), x, y, 0, env)
            }),
            Op::Across { op, long } => {
                let extended = |n| match self.is_signed {
                    true => sign_extend(get(a, size, n), 8 << size),
                    false => get(a, size, n),
                };
                let lane = Lane {
                    bits: 64,
                    ..self.lane()
                };
                let all = (1..self.lanes()).fold(extended(0), |all, n| {
                    integer::compute(op, lane, all, extended(n), 0, env)
                });
                let size = size + u8::from(long);
                zero_extend(all, 8 << size).into()
            }
            Op::Widen(op, widening) => self.widen(op, widening, [a, b, c], env),
            Op::Narrow {
                kind,
                rounds,
                upper,
            } => {
                let wide = self.lane_of(size + 1);
                let mut result = 0;
                for n in 0..self.narrow_lanes() {
                    let value = get(a, size + 1, n);
                    let value = match self.is_signed {
                        true => i128::from(sign_extend(value, wide.bits) as i64),
                        false => value.into(),
                    };
                    let value = integer::shift_right(value, self.immediate.into(), rounds);
                    let bits = 8 << size;
                    let value = match kind {
                        Narrowing::Plain => value as u64,
                        Narrowing::Saturating => {
                            integer::saturate(value, bits, self.is_signed, env)
                        }
                        Narrowing::ToUnsigned => integer::saturate(value, bits, false, env),
                    };
                    put(&mut result, size, n, value);
                }
                self.narrowed(result, upper, c)
            }
            Op::NarrowHigh {
                subtracts,
                rounds,
                upper,
            } => {
                let bits = 8 << size;
                let mut result = 0;
                for n in 0..8 >> size {
                    let (x, y) = (get(a, size + 1, n), get(b, size + 1, n));
                    let value = if subtracts {
                        x.wrapping_sub(y)
                    } else {
                        x.wrapping_add(y)
                    };
                    let value = value.wrapping_add(if rounds { 1 << (bits - 1) } else { 0 });
                    put(&mut result, size, n, value >> bits);
                }
                half(result, upper, c)
            }
            Op::AddPairsLong { adds } => {
                let mut result = 0;
                let extended = |n| match self.is_signed {
                    true => sign_extend(get(a, size, n), 8 << size),
                    false => get(a, size, n),
                };
                for n in 0..self.lanes() / 2 {
                    let sum = extended(2 * n).wrapping_add(extended(2 * n + 1));
                    let more = if adds { get(c, size + 1, n) } else { 0 };
                    put(&mut result, size + 1, n, sum.wrapping_add(more));
                }
                result
            }
            Op::Dot => self.each(|n| {
                let lane = self.lane_of(0);
                (4 * n..4 * n + 4).fold(get(c, 2, n), |sum, n| {
                    let extended = |v| match lane.is_signed {
                        true => sign_extend(get(v, 0, n), 8),
                        false => get(v, 0, n),
                    };
                    sum.wrapping_add(extended(a).wrapping_mul(extended(b)))
                })
            }),
            Op::Bitwise(op) => self.cut(match op {
                Bitwise::And => a & b,
                Bitwise::Bic => a & !b,
                Bitwise::Orr => a | b,
                Bitwise::Orn => a | !b,
                Bitwise::Eor => a ^ b,
                Bitwise::Not => !a,
                Bitwise::Select => c & a | !c & b,
                Bitwise::InsertIf { ones: true } => b & a | !b & c,
                Bitwise::InsertIf { ones: false } => !b & a | b & c,
            }),
            Op::Reverse { group } => {
                let lanes = u32::from(group) >> (3 + size);
                self.each(|n| get(a, size, n ^ (lanes - 1)))
            }
            Op::Permute { kind, second } => {
                let part = u32::from(second);
                let lanes = self.lanes();
                self.each(|n| match kind {
                    Permutation::Zip => {
                        let at = part * lanes / 2 + n / 2;
                        get(if n & 1 == 0 { a } else { b }, size, at)
                    }
                    Permutation::Unzip => self.pair(n, a, b)[part as usize],
                    Permutation::Transpose => {
                        get(if n & 1 == 0 { a } else { b }, size, (n & !1) + part)
                    }
                })
            }
            Op::Extract => {
                let lanes = u32::from(self.bytes);
                self.each(|n| match n + u32::from(self.immediate) {
                    at if at < lanes => get(a, 0, at),
                    at => get(b, 0, at - lanes),
                })
            }
            Op::Table => self.each(|n| {
                let at = get(b, 0, n).wrapping_sub(16 * u64::from(self.immediate));
                if at < 16 {
                    get(a, 0, at as u32)
                } else {
                    get(c, 0, n)
                }
            }),
            Op::Element => {
                let value = get(a, size, self.immediate.into());
                match self.is_signed {
                    true => sign_extend(value, 8 << size).into(),
                    false => value.into(),
                }
            }
            Op::Insert => {
                let at = u32::from(self.immediate) << (3 + size);
                let mask = u128::from(ones(8 << size)) << at;
                c & !mask | a << at & mask
            }
            Op::Duplicate => self.each(|_| get(a, size, self.immediate.into())),
            _ => self.compute_float([a, b, c], env),
        }
    }

    fn cut(&self, value: u128) -> u128 {
        match self.bytes {
            16 => value,
            bytes => value & u128::from(ones(8 * u32::from(bytes))),
        }
    }

    /// Returns the number of lanes that a narrowing instruction computes: one for a scalar, otherwise those of half a
    /// register.
    fn narrow_lanes(&self) -> u32 {
        if self.bytes == 16 { 8 >> self.size } else { 1 }
    }

    /// Returns a narrowed result: one lane for a scalar, otherwise half a register.
    fn narrowed(&self, value: u128, upper: bool, c: u128) -> u128 {
        match self.bytes {
            16 => half(value, upper, c),
            _ => self.cut(value),
        }
    }

    fn widen(&self, op: Integer, widening: Widening, abc: [u128; 3], env: &mut Env) -> u128 {
        let size = self.size;
        let lane = self.lane_of(size + 1);
        let narrow_lanes = (u32::from(self.bytes) / 2) >> size;
        let start = if widening.upper { 8 >> size } else { 0 };
        let mut result = 0;
        for n in 0..narrow_lanes {
            let extended = |v| {
                let value = get(v, size, start + n);
                if self.is_signed {
                    sign_extend(value, 8 << size)
                } else {
                    value
                }
            };
            let first = match widening.first_is_wide {
                true => get(abc[0], size + 1, n),
                false => extended(abc[0]),
            };
            // The only widening operation on lanes of 64 bits is PMULL, whose result is a single lane of 128 bits.
            if size == 3 {
                return polynomial_product(first, extended(abc[1]));
            }
            let accumulator = get(abc[2], size + 1, n);
            let value = integer::compute(op, lane, first, extended(abc[1]), accumulator, env);
            put(&mut result, size + 1, n, value);
        }
        result
    }

    fn compute_float(&self, [a, b, c]: [u128; 3], env: &mut Env) -> u128 {
        let size = self.size;
        let format = Format::of(size);
        let immediate = u32::from(self.immediate);
        match self.op {
            Op::Float(op) => self.each(|n| {
                let [a, b, c] = [a, b, c].map(|v| get(v, size, n));
                self.float(op, a, b, c, env)
            }),
            Op::FloatPairs(op) => self.each(|n| {
                let [x, y] = self.pair(n, a, b);
                self.float(op, x, y, 0, env)
            }),
            Op::FloatAcross(extreme) => self.across(extreme, a, 0, self.lanes(), env).into(),
            Op::Convert { from } => {
                let rounding = env.rounding();
                convert(
                    a as u64 & ones(8 << from),
                    Format::of(from),
                    format,
                    rounding,
                    env,
                )
                .into()
            }
            Op::ConvertLong { upper } => {
                let start = if upper { 16 >> size } else { 0 };
                let rounding = env.rounding();
                let narrow = Format::of(size - 1);
                self.each(|n| convert(get(a, size - 1, start + n), narrow, format, rounding, env))
            }
            Op::ConvertNarrow { upper, odd } => {
                let rounding = if odd { Rounding::Odd } else { env.rounding() };
                let wide = Format::of(size + 1);
                let mut result = 0;
                for n in 0..self.narrow_lanes() {
                    let value = convert(get(a, size + 1, n), wide, format, rounding, env);
                    put(&mut result, size, n, value);
                }
                self.narrowed(result, upper, c)
            }
            Op::ToGeneral { mode, bits } => {
                let to = [bits.into(), immediate];
                fp::to_fixed(get(a, size, 0), mode, to, self.is_signed, format, env).into()
            }
            Op::FromGeneral { bits } => {
                let from = [bits.into(), immediate];
                fp::from_fixed(a as u64, from, self.is_signed, format, env).into()
            }
            Op::Compare {
                signals,
                conditional,
            } => {
                if conditional && c >> 4 & 1 == 0 {
                    return c & 15;
                }
                fp::compare(get(a, size, 0), get(b, size, 0), signals, format, env).into()
            }
            _ => unreachable!("an operation on integers"),
        }
    }

    /// Returns the minimum or maximum of `count` lanes, by combining the results of the two halves (Reduce).
    fn across(&self, which: Extreme, a: u128, start: u32, count: u32, env: &mut Env) -> u64 {
        if count == 1 {
            return get(a, self.size, start);
        }
        let low = self.across(which, a, start, count / 2, env);
        let high = self.across(which, a, start + count / 2, count / 2, env);
        fp::extreme(low, high, which, Format::of(self.size), env)
    }

    fn float(&self, op: Float, a: u64, b: u64, c: u64, env: &mut Env) -> u64 {
        let format = Format::of(self.size);
        let sign = format.sign(true);
        let fixed = [format.bits(), self.immediate.into()];
        let truth = |is: bool| if is { u64::MAX } else { 0 };
        // A comparison returns N, Z, C, V in bits 3 to 0. Z and C mean equal; C without V means greater or equal.
        let compare = |absolute: bool, signals: bool, env: &mut Env| {
            let mask = if absolute { !sign } else { u64::MAX };
            fp::compare(a & mask, b & mask, signals, format, env)
        };
        match op {
            Float::Add => fp::add(a, b, format, env),
            Float::Sub => fp::sub(a, b, format, env),
            Float::Mul { extended } => fp::mul(a, b, extended, format, env),
            Float::NegatedMul => fp::mul(a, b, false, format, env) ^ sign,
            Float::Div => fp::div(a, b, format, env),
            Float::Extreme(which) => fp::extreme(a, b, which, format, env),
            Float::Difference => fp::difference(a, b, format, env),
            Float::Step { root } => fp::step(a, b, root, format, env),
            Float::Equal { absolute } => truth(compare(absolute, false, env) == 0b0110),
            Float::GreaterEqual { absolute } => truth(compare(absolute, true, env) & 0b0011 == 2),
            Float::Greater { absolute } => truth(compare(absolute, true, env) == 0b0010),
            Float::MulAdd {
                negates_product,
                negates_addend,
            } => {
                let a = if negates_product { a ^ sign } else { a };
                let c = if negates_addend { c ^ sign } else { c };
                fp::mul_add(c, a, b, format, env)
            }
            Float::Abs => a & !sign,
            Float::Neg => a ^ sign,
            Float::Sqrt => fp::sqrt(a, format, env),
            Float::Round { mode, exact } => {
                fp::round_integer(a, mode.unwrap_or(env.rounding()), exact, format, env)
            }
            Float::RoundToBits { mode, bits } => {
                fp::round_to_bits(a, mode.unwrap_or(env.rounding()), bits.into(), format, env)
            }
            Float::ToFixed { mode } => fp::to_fixed(a, mode, fixed, self.is_signed, format, env),
            Float::FromFixed => fp::from_fixed(a, fixed, self.is_signed, format, env),
            Float::ReciprocalEstimate => fp::reciprocal_estimate(a, format, env),
            Float::RootEstimate => fp::root_estimate(a, format, env),
            Float::ReciprocalExponent => fp::reciprocal_exponent(a, format, env),
        }
    }
}

/// Multiplies polynomials of 64 bits.
fn polynomial_product(a: u64, b: u64) -> u128 {
    let a = u128::from(a);
    (0..64)
        .filter(|n| b >> n & 1 != 0)
        .fold(0, |product, n| product ^ a << n)
}
