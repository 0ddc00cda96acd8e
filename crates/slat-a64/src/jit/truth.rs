//! Truth values of the code that is emitted. A comparison is emitted where it is used, so that a compare and a branch
//! of the guest become a compare and a branch of the host.

use super::values::Values;
use cranelift_codegen::ir::condcodes::{CondCode, IntCC};
use cranelift_codegen::ir::types::{I8, I32, I64};
use cranelift_codegen::ir::{InstBuilder, InstructionData, Opcode, Value};

/// A condition in generated code, in one of several forms.
#[derive(Clone, Copy, Debug)]
pub(super) enum Truth {
    Constant(bool),
    /// A value of 8 bits that is 0 or 1.
    Is(Value),
    /// A comparison of two values of one type.
    Compare(IntCC, Value, Value),
    /// Bit `n` of a value is 1 if `set`, else 0.
    Bit {
        value: Value,
        n: u32,
        set: bool,
    },
    /// A value is zero if `is`, else it is not zero.
    Zero {
        value: Value,
        is: bool,
    },
}

impl Truth {
    pub(super) fn opposite(self, v: &mut Values<'_>) -> Self {
        match self {
            Truth::Constant(is) => Truth::Constant(!is),
            Truth::Is(value) => Truth::Is(v.b.ins().bxor_imm(value, 1)),
            Truth::Compare(cc, a, b) => Truth::Compare(cc.complement(), a, b),
            Truth::Bit { value, n, set } => Truth::Bit {
                value,
                n,
                set: !set,
            },
            Truth::Zero { value, is } => Truth::Zero { value, is: !is },
        }
    }

    /// Returns an 8-bit value that is 1 if this condition is true, else 0.
    pub(super) fn value(self, v: &mut Values<'_>) -> Value {
        match self {
            Truth::Constant(is) => v.b.ins().iconst(I8, i64::from(is)),
            Truth::Is(value) => value,
            Truth::Compare(cc, a, b) => v.b.ins().icmp(cc, a, b),
            Truth::Bit { value, n: 63, set } => {
                let cc = match set {
                    true => IntCC::SignedLessThan,
                    false => IntCC::SignedGreaterThanOrEqual,
                };
                v.b.ins().icmp_imm(cc, value, 0)
            }
            Truth::Bit { value, n, set } => {
                let shifted = match n {
                    0 => value,
                    n => v.b.ins().ushr_imm(value, i64::from(n)),
                };
                let bit = v.b.ins().ireduce(I8, shifted);
                let bit = v.b.ins().band_imm(bit, 1);
                match set {
                    true => bit,
                    false => v.b.ins().bxor_imm(bit, 1),
                }
            }
            Truth::Zero { value, is } => {
                let cc = if is { IntCC::Equal } else { IntCC::NotEqual };
                match v.difference(value) {
                    Some((a, b, _)) => v.b.ins().icmp(cc, a, b),
                    None => v.b.ins().icmp_imm(cc, value, 0),
                }
            }
        }
    }

    /// Returns a value that is not 0 if this condition is true, for a branch.
    pub(super) fn condition(self, v: &mut Values<'_>) -> Value {
        match self {
            Truth::Bit { value, n, set } if n != 63 => {
                let bit = v.b.ins().band_imm(value, 1 << n);
                let cc = if set { IntCC::NotEqual } else { IntCC::Equal };
                v.b.ins().icmp_imm(cc, bit, 0)
            }
            other => other.value(v),
        }
    }

    /// Returns a 64-bit value that is negative if this condition is true.
    pub(super) fn negative(self, v: &mut Values<'_>) -> Value {
        match self {
            Truth::Bit {
                value,
                n,
                set: true,
            } => match 63 - n {
                0 => value,
                by => v.b.ins().ishl_imm(value, i64::from(by)),
            },
            other => {
                let is = other.value(v);
                let is = v.b.ins().uextend(I64, is);
                v.b.ins().ineg(is)
            }
        }
    }

    /// Returns a 64-bit value that is zero if this condition is true.
    pub(super) fn zero(self, v: &mut Values<'_>) -> Value {
        match self {
            Truth::Zero { value, is: true } => value,
            other => {
                let not = other.opposite(v).value(v);
                v.b.ins().uextend(I64, not)
            }
        }
    }

    pub(super) fn both(self, other: Self, v: &mut Values<'_>) -> Self {
        match (self, other) {
            (Truth::Constant(true), is) | (is, Truth::Constant(true)) => is,
            (Truth::Constant(false), _) | (_, Truth::Constant(false)) => Truth::Constant(false),
            // HI and GT combine two comparisons of the same operands: not lower, or not less, and not equal. Emit one
            // comparison.
            (
                Truth::Compare(
                    cc @ (IntCC::UnsignedGreaterThanOrEqual | IntCC::SignedGreaterThanOrEqual),
                    a,
                    b,
                ),
                Truth::Zero { value, is: false },
            ) if v.is_difference(value, a, b) => {
                let cc = match cc {
                    IntCC::SignedGreaterThanOrEqual => IntCC::SignedGreaterThan,
                    _ => IntCC::UnsignedGreaterThan,
                };
                Truth::Compare(cc, a, b)
            }
            (a, b) => {
                let (a, b) = (a.value(v), b.value(v));
                Truth::Is(v.b.ins().band(a, b))
            }
        }
    }

    pub(super) fn either(self, other: Self, v: &mut Values<'_>) -> Self {
        match (self, other) {
            (Truth::Constant(false), is) | (is, Truth::Constant(false)) => is,
            (Truth::Constant(true), _) | (_, Truth::Constant(true)) => Truth::Constant(true),
            (a, b) => {
                let (a, b) = (a.value(v), b.value(v));
                Truth::Is(v.b.ins().bor(a, b))
            }
        }
    }

    pub(super) fn differ(self, other: Self, v: &mut Values<'_>) -> Self {
        match (self, other) {
            (Truth::Constant(false), is) | (is, Truth::Constant(false)) => is,
            (Truth::Constant(true), is) | (is, Truth::Constant(true)) => is.opposite(v),
            (
                Truth::Bit {
                    value: sign,
                    n,
                    set: true,
                },
                Truth::Bit {
                    value: overflow,
                    n: same,
                    set: true,
                },
            ) if n == same => match v.less(sign, overflow, n) {
                Some(less) => less,
                None => {
                    let value = v.b.ins().bxor(sign, overflow);
                    Truth::Bit {
                        value,
                        n,
                        set: true,
                    }
                }
            },
            (a, b) => {
                let (a, b) = (a.value(v), b.value(v));
                Truth::Is(v.b.ins().bxor(a, b))
            }
        }
    }
}

impl Values<'_> {
    fn instruction(&self, value: Value) -> Option<InstructionData> {
        let dfg = &self.b.func.dfg;
        dfg.value_def(value).inst().map(|inst| dfg.insts[inst])
    }

    /// If `value` is the result of a binary operation `wanted`, returns its operands.
    fn binary(&self, value: Value, wanted: Opcode) -> Option<(Value, Value)> {
        match self.instruction(value) {
            Some(InstructionData::Binary { opcode, args }) if opcode == wanted => {
                Some((args[0], args[1]))
            }
            _ => None,
        }
    }

    /// If `value` is `a - b`, returns `a`, `b` and `false`. If `value` is the lower half of a difference of lower
    /// halves, returns the operands and `true`.
    pub(super) fn difference(&self, value: Value) -> Option<(Value, Value, bool)> {
        if let Some((a, b)) = self.binary(value, Opcode::Isub) {
            return Some((a, b, false));
        }
        let whole = self.half_of(value)?;
        let (a, b) = self.binary(whole, Opcode::Isub)?;
        (self.is_half(a) && self.is_half(b)).then_some((a, b, true))
    }

    fn is_difference(&self, value: Value, a: Value, b: Value) -> bool {
        let strip = |value| self.reduced(value).unwrap_or(value);
        self.difference(value)
            .is_some_and(|(x, y, _)| (x, y) == (strip(a), strip(b)))
    }

    /// If `value` is the low 32 bits of a longer value, returns the longer value.
    fn reduced(&self, value: Value) -> Option<Value> {
        match self.instruction(value) {
            Some(InstructionData::Unary {
                opcode: Opcode::Ireduce,
                arg,
            }) => Some(arg),
            _ => None,
        }
    }

    /// If `sign` is the difference of two numbers, and `overflow` tells whether that difference overflowed, returns
    /// whether the first number is less than the second one. Bit `n` is the sign bit.
    fn less(&mut self, sign: Value, overflow: Value, n: u32) -> Option<Truth> {
        let (a, b, is_half) = self.difference(sign)?;
        let (changed, other) = self.binary(overflow, Opcode::Band)?;
        if self.binary(changed, Opcode::Bxor)? != (a, sign)
            || self.binary(other, Opcode::Bxor)? != (a, b)
            || is_half != (n == 31)
        {
            return None;
        }
        let (a, b) = match is_half {
            false => (a, b),
            true => (self.b.ins().ireduce(I32, a), self.b.ins().ireduce(I32, b)),
        };
        Some(Truth::Compare(IntCC::SignedLessThan, a, b))
    }
}
