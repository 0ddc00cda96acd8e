//! Makes code from the formulas of `sem`: each function of [`Compute`] emits Cranelift instructions.

use super::Tier;
use super::condition::Carry;
use super::translate::{TYPES, Translator};
use crate::sem::{Bits, Compute, two_sums};
use cranelift_codegen::ir::condcodes::{CondCode, IntCC};
use cranelift_codegen::ir::types::{I8, I64, I128};
use cranelift_codegen::ir::{InstBuilder, InstructionData, Opcode, Value};
use std::convert::Infallible;

/// Defines functions that each emit one Cranelift instruction.
macro_rules! instructions {
    ($($name:ident($($a:ident),*) $instruction:ident;)*) => {
        $(
            fn $name(&mut self, $($a: Value),*) -> Value {
                self.b.ins().$instruction($($a),*)
            }
        )*
    };
}

/// Defines functions that emit shifts. A constant count becomes an immediate.
macro_rules! shifts {
    ($($name:ident, $instruction:ident, $with_immediate:ident;)*) => {
        $(
            fn $name(&mut self, a: Value, count: Value) -> Value {
                match self.constant_of(count) {
                    Some(count) => self.b.ins().$with_immediate(a, count),
                    None => self.b.ins().$instruction(a, count),
                }
            }
        )*
    };
}

/// Defines functions that emit comparisons.
macro_rules! comparisons {
    ($($name:ident, $cc:ident;)*) => {
        $(
            fn $name(&mut self, a: Value, b: Value) -> Value {
                self.b.ins().icmp(IntCC::$cc, a, b)
            }
        )*
    };
}

impl Bits for Translator<'_> {
    type Value = Value;
    /// A truth value: 8 bits that are 0 or 1.
    type Bool = Value;
    type Kept = Carry;

    instructions! {
        xor(a, b) bxor;
        not(a) bnot;
        differ(a, b) bxor;
    }
    comparisons! {
        is_equal, Equal;
        is_at_most, UnsignedLessThanOrEqual;
        is_less_signed, SignedLessThan;
        is_at_most_signed, SignedLessThanOrEqual;
    }

    fn and(&mut self, a: Value, b: Value) -> Value {
        match self.is_same(a, b) {
            // The AND of a register with itself is the register. Compilers use it to test for 0.
            true => a,
            false => self.b.ins().band(a, b),
        }
    }
    fn add(&mut self, a: Value, b: Value) -> Value {
        match self.constant_of(b) {
            Some(n) => self.plus(a, n),
            None => self.b.ins().iadd(a, b),
        }
    }
    fn is_less(&mut self, a: Value, b: Value) -> Value {
        match self.constant_of(b) {
            Some(0) => self.no(),
            _ => self.b.ins().icmp(IntCC::UnsignedLessThan, a, b),
        }
    }
    fn either(&mut self, a: Value, b: Value) -> Value {
        match self.constant_of(b) {
            Some(0) => a,
            _ => self.b.ins().bor(a, b),
        }
    }
    fn number(&mut self, n: i64, like: Value) -> Value {
        self.immediate(self.size_of(like), n as u64)
    }
    fn sub(&mut self, a: Value, b: Value) -> Value {
        match (self.constant_of(a), self.constant_of(b)) {
            (Some(n), Some(m)) => self.number(n.wrapping_sub(m), a),
            (None, Some(0)) => a,
            _ => self.b.ins().isub(a, b),
        }
    }
    fn plus(&mut self, a: Value, n: i64) -> Value {
        match self.constant_of(a) {
            _ if self.size_of(a) == 3 => self.moved(a, n),
            _ if n == 0 => a,
            Some(m) => self.number(m.wrapping_add(n), a),
            None => self.b.ins().iadd_imm(a, n),
        }
    }
    fn no(&mut self) -> Value {
        self.b.ins().iconst(I8, 0)
    }
    fn is_zero(&mut self, a: Value) -> Value {
        self.b.ins().icmp_imm(IntCC::Equal, a, 0)
    }
    fn is_negative(&mut self, a: Value) -> Value {
        self.b.ins().icmp_imm(IntCC::SignedLessThan, a, 0)
    }
    fn is_even(&mut self, a: Value) -> Value {
        let low = self.wide(a);
        let low = self.b.ins().band_imm(low, 0xff);
        let high = self.b.ins().ushr_imm(low, 4);
        let nibble = self.b.ins().bxor(low, high);
        let nibble = self.b.ins().band_imm(nibble, 15);
        // Bit n of this constant is 1 if the number n has an even number of ones.
        let table = self.constant(0x9669);
        let bit = self.b.ins().ushr(table, nibble);
        let bit = self.b.ins().band_imm(bit, 1);
        self.b.ins().ireduce(I8, bit)
    }
    fn bit(&mut self, a: Value, n: u32) -> Value {
        let low = match n {
            0 => a,
            _ => self.b.ins().ushr_imm(a, i64::from(n)),
        };
        let low = match self.size_of(a) {
            0 => low,
            _ => self.b.ins().ireduce(I8, low),
        };
        self.b.ins().band_imm(low, 1)
    }
    fn opposite(&mut self, a: Value) -> Value {
        let dfg = &self.b.func.dfg;
        match dfg.value_def(a).inst().map(|inst| dfg.insts[inst]) {
            // Emit the opposite comparison instead, which needs no further instruction.
            Some(InstructionData::IntCompare { args, cond, .. }) => {
                (self.b.ins()).icmp(cond.complement(), args[0], args[1])
            }
            Some(InstructionData::IntCompareImm { arg, cond, imm, .. }) => {
                self.b.ins().icmp_imm(cond.complement(), arg, imm)
            }
            _ => self.b.ins().bxor_imm(a, 1),
        }
    }
}

impl Compute for Translator<'_> {
    /// Compiled code raises no faults: it leaves an instruction that faults to the interpreter.
    type Fault = Infallible;

    instructions! {
        or(a, b) bor;
        neg(a) ineg;
        select(which, a, b) select;
        trailing_zeros(a) ctz;
        leading_zeros(a) clz;
        ones(a) popcnt;
        swap_bytes(a) bswap;
    }
    shifts! {
        shl, ishl, ishl_imm;
        shr, ushr, ushr_imm;
        sar, sshr, sshr_imm;
        rol, rotl, rotl_imm;
        ror, rotr, rotr_imm;
    }

    fn bits(&self, a: Value) -> u32 {
        8 << self.size_of(a)
    }
    fn widened(&mut self, a: Value, like: Value) -> Value {
        match (self.size_of(like), self.constant_of(a)) {
            (0, _) => a,
            (_, Some(n)) => self.number(n, like),
            (size, None) => self.b.ins().uextend(TYPES[usize::from(size)], a),
        }
    }
    fn kept_carry(&mut self) -> Carry {
        Translator::kept_carry(self)
    }
    fn extend_half(&mut self, a: Value) -> Value {
        let size = self.size_of(a);
        let half = self.b.ins().ireduce(TYPES[usize::from(size) - 1], a);
        self.b.ins().sextend(TYPES[usize::from(size)], half)
    }
    fn quotient(&mut self, halves: (Value, Value), divisor: Value) -> (Value, Value) {
        self.divide_halves(halves, divisor)
    }
    fn fault_if(&mut self, fails: Value) -> Result<(), Infallible> {
        self.interpret_if(fails);
        Ok(())
    }
    fn sum(&mut self, a: Value, b: Value, carry: Value) -> (Value, Value) {
        if !self.has_pairs(a) {
            return two_sums(self, a, b, carry);
        }
        // Add 128-bit numbers, so that the host's ADC is used: adding the carry to a low half of ones carries into the
        // high half.
        let (carry, ones) = (self.widened(carry, a), self.constant(-1));
        let a = self.b.ins().iconcat(carry, a);
        let b = self.b.ins().iconcat(ones, b);
        let (sum, carry) = self.b.ins().uadd_overflow(a, b);
        let (_, result) = self.b.ins().isplit(sum);
        (result, carry)
    }
    fn product(&mut self, a: Value, b: Value, is_signed: bool) -> (Value, Value) {
        let size = self.size_of(a);
        if size == 3 {
            let low = self.b.ins().imul(a, b);
            let high = match is_signed {
                true => self.b.ins().smulhi(a, b),
                false => self.b.ins().umulhi(a, b),
            };
            return (low, high);
        }
        let [a, b] = [a, b].map(|value| match is_signed {
            true => self.b.ins().sextend(I64, value),
            false => self.b.ins().uextend(I64, value),
        });
        let product = self.b.ins().imul(a, b);
        let high = self.b.ins().ushr_imm(product, 8 << size);
        (self.narrow(product, size), self.narrow(high, size))
    }
}

impl Translator<'_> {
    /// Computes a product like [`product`](Compute::product), for callers that use both halves of the product.
    pub(super) fn halves(&mut self, a: Value, b: Value, is_signed: bool) -> (Value, Value) {
        if !self.has_pairs(a) {
            return self.product(a, b, is_signed);
        }
        let [a, b] = [a, b].map(|value| match is_signed {
            true => self.b.ins().sextend(I128, value),
            false => self.b.ins().uextend(I128, value),
        });
        let product = self.b.ins().imul(a, b);
        self.b.ins().isplit(product)
    }

    /// Whether the tier has instructions on pairs of values of this size.
    fn has_pairs(&self, half: Value) -> bool {
        self.tier == Tier::Full && self.size_of(half) == 3
    }

    /// Whether two values are equal because they are the same value, or the same part of one value.
    fn is_same(&self, a: Value, b: Value) -> bool {
        let dfg = &self.b.func.dfg;
        let whole = |value| match dfg.value_def(value).inst().map(|inst| dfg.insts[inst]) {
            Some(InstructionData::Unary {
                opcode: Opcode::Ireduce,
                arg,
            }) => arg,
            _ => value,
        };
        a == b || dfg.value_type(a) == dfg.value_type(b) && whole(a) == whole(b)
    }

    /// Returns the number if a value is a constant.
    pub(super) fn constant_of(&self, value: Value) -> Option<i64> {
        let dfg = &self.b.func.dfg;
        match dfg.insts[dfg.value_def(value).inst()?] {
            InstructionData::UnaryImm {
                opcode: Opcode::Iconst,
                imm,
            } => Some(imm.bits()),
            _ => None,
        }
    }
}
