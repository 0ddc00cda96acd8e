//! Instructions on bits, and integer arithmetic that multi-precision code is made of: bit tests, scans and counts, BMI1 and BMI2,
//! ADX, double shifts, division.

use super::condition::Flags;
use super::helpers;
use super::translate::{TYPES, Translator};
use crate::op::{MEM, NONE, Op};
use crate::sem::{Bits, Compute, Operation, Readable, by_mnemonic};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::I64;
use cranelift_codegen::ir::{InstBuilder, Value};
use iced_x86::{Instruction, Mnemonic};

impl Translator<'_> {
    /// Translates an instruction of this file. `None`, with nothing done: there is no translation.
    pub(super) fn bit_instruction(&mut self, insn: &Instruction, op: &Op) -> Option<()> {
        use Mnemonic::*;
        let size = op.size;
        if size == 0 {
            return None;
        }
        match insn.mnemonic() {
            Bsf | Bsr => self.scan(op),
            Movbe => self.move_swapped(op),
            Mulx => {
                let b = self.operand(op, 2, size);
                let a = self.get(2, size);
                let (low, high) = self.product(a, b, false);
                // The low half first: if both destinations are one register it keeps the high half.
                self.set(op.r[1], size, low);
                self.set(op.r[0], size, high);
            }
            Adcx | Adox => self.add_with_flag(op),
            Shld | Shrd => return self.double_shift(op),
            Div | Idiv => return self.divide(op),
            mnemonic => {
                return by_mnemonic!(mnemonic, sources self.sources(op))
                    .or_else(|| by_mnemonic!(mnemonic, bit_test self.bit_test(op))?);
            }
        }
        Some(())
    }

    /// Returns bit `n` of a value, 0 or 1 in 8 bits.
    pub(super) fn bit_of(&mut self, value: Value, n: Value) -> Value {
        let value = self.b.ins().ushr(value, n);
        self.bit(value, 0)
    }

    /// BT, BTS, BTR and BTC, but of memory with a register as bit offset, which may select a bit beyond the operand.
    fn bit_test<A: Operation>(&mut self, op: &Op) -> Option<()> {
        if op.r[0] == MEM && op.r[1] != NONE {
            return None;
        }
        let index = self.operand(op, 1, op.size);
        self.modify::<A>(op, index);
        Some(())
    }

    /// BSF and BSR, which leave the destination alone if the source is 0.
    fn scan(&mut self, op: &Op) {
        let size = op.size;
        let v = self.operand(op, 1, size);
        let n = match op.mnemonic {
            Mnemonic::Bsf => self.b.ins().ctz(v),
            _ => {
                let n = self.b.ins().clz(v);
                let top = self.immediate(size, (8 << size) - 1);
                self.b.ins().isub(top, n)
            }
        };
        // All of the register: nothing of it is written.
        let old = self.get(op.r[0], 3);
        self.set(op.r[0], size, n);
        let new = self.get(op.r[0], 3);
        let kept = self.is_zero(v);
        let value = self.b.ins().select(kept, old, new);
        self.set(op.r[0], 3, value);
        self.set_flags(Flags::Logic {
            carry: None,
            result: v,
        });
    }

    /// MOVBE.
    fn move_swapped(&mut self, op: &Op) {
        let value = self.operand(op, 1, op.size);
        let value = self.b.ins().bswap(value);
        self.write(op, value);
    }

    /// ADCX and ADOX: an addition with one flag as carry in and out, that leaves the others alone.
    fn add_with_flag(&mut self, op: &Op) {
        let size = op.size;
        let is_carry = op.mnemonic == Mnemonic::Adcx;
        let b = self.operand(op, 1, size);
        let a = self.get(op.r[0], size);
        let flag = if is_carry {
            self.carry()
        } else {
            self.overflow()
        };
        let more = self.b.ins().uextend(TYPES[usize::from(size)], flag);
        let sum = self.b.ins().iadd(a, b);
        let first = self.b.ins().icmp(IntCC::UnsignedLessThan, sum, a);
        let result = self.b.ins().iadd(sum, more);
        let second = self.b.ins().icmp(IntCC::UnsignedLessThan, result, sum);
        let out = self.b.ins().bor(first, second);
        let flags = match is_carry {
            true => Flags::Rotated {
                carry: Some(out),
                overflow: None,
            },
            false => Flags::Rotated {
                carry: None,
                overflow: Some(out),
            },
        };
        self.set(op.r[0], size, result);
        self.set_flags(flags);
    }

    /// SHLD and SHRD of 4 or 8 bytes by an immediate count that is not 0.
    fn double_shift(&mut self, op: &Op) -> Option<()> {
        let size = op.size;
        let bits: i64 = 8 << size;
        let count = op.imm as i64 & (bits - 1);
        if op.r[2] != NONE || size < 2 || count == 0 {
            return None;
        }
        let is_left = op.mnemonic == Mnemonic::Shld;
        let fill = self.get(op.r[1], size);
        let fill = match is_left {
            true => self.b.ins().ushr_imm(fill, bits - count),
            false => self.b.ins().ishl_imm(fill, bits - count),
        };
        let (a, result) = self.change(op, |this, a| {
            let shifted = match is_left {
                true => this.b.ins().ishl_imm(a, count),
                false => this.b.ins().ushr_imm(a, count),
            };
            this.b.ins().bor(shifted, fill)
        });
        let last = if is_left { bits - count } else { count - 1 };
        let last = self.immediate(size, last as u64);
        let carry = self.bit_of(a, last);
        let changed = self.b.ins().bxor(a, result);
        let overflow = self.is_negative(changed);
        self.set_flags(Flags::Given {
            carry,
            overflow,
            aux: None,
            result,
        });
        Some(())
    }

    /// DIV and IDIV of 4 or 8 bytes. What raises #DE is the interpreter's.
    fn divide(&mut self, op: &Op) -> Option<()> {
        let size = op.size;
        if size < 2 {
            return None;
        }
        let divisor = self.operand(op, 0, size);
        let (low, high) = (self.get(0, size), self.get(2, size));
        let (quotient, remainder) = match op.mnemonic {
            Mnemonic::Div => self.divide_unsigned(low, high, divisor, size),
            _ => self.divide_signed(low, high, divisor, size),
        };
        let (quotient, remainder) = (self.narrow(quotient, size), self.narrow(remainder, size));
        self.set(0, size, quotient);
        self.set(2, size, remainder);
        Some(())
    }

    /// Returns quotient and remainder, in 64 bits.
    fn divide_unsigned(
        &mut self,
        low: Value,
        high: Value,
        divisor: Value,
        size: u8,
    ) -> (Value, Value) {
        // The quotient fits if and only if the high half is below the divisor, which is not 0 then.
        let fails = (self.b.ins()).icmp(IntCC::UnsignedLessThanOrEqual, divisor, high);
        self.interpret_if(fails);
        if size < 3 {
            let [low, high, divisor] = [low, high, divisor].map(|value| self.wide(value));
            let high = self.b.ins().ishl_imm(high, 32);
            let dividend = self.b.ins().bor(high, low);
            return self.quotient(dividend, divisor);
        }
        let (wide, short, on) = (self.cold(), self.b.create_block(), self.b.create_block());
        let results = [0; 2].map(|_| self.b.append_block_param(on, I64));
        self.b.ins().brif(high, wide, &[], short, &[]);
        self.b.switch_to_block(wide);
        let helper = helpers::divide as *const () as usize;
        let both = self.call(helper, &[low, high, divisor], 2);
        (self.b.ins()).jump(on, &[both[0].into(), both[1].into()]);
        self.b.switch_to_block(short);
        let (quotient, remainder) = self.quotient(low, divisor);
        (self.b.ins()).jump(on, &[quotient.into(), remainder.into()]);
        self.b.switch_to_block(on);
        results.into()
    }

    /// Divides 64 bits by a divisor that is not 0.
    fn quotient(&mut self, dividend: Value, divisor: Value) -> (Value, Value) {
        let quotient = self.b.ins().udiv(dividend, divisor);
        let product = self.b.ins().imul(quotient, divisor);
        (quotient, self.b.ins().isub(dividend, product))
    }

    /// Returns quotient and remainder, in 64 bits. Dividends of more are the interpreter's.
    fn divide_signed(
        &mut self,
        low: Value,
        high: Value,
        divisor: Value,
        size: u8,
    ) -> (Value, Value) {
        let (dividend, divisor) = if size < 3 {
            let (low, high) = (self.wide(low), self.wide(high));
            let high = self.b.ins().ishl_imm(high, 32);
            let divisor = self.b.ins().sextend(I64, divisor);
            (self.b.ins().bor(high, low), divisor)
        } else {
            let sign = self.b.ins().sshr_imm(low, 63);
            let is_wide = self.b.ins().icmp(IntCC::NotEqual, high, sign);
            self.interpret_if(is_wide);
            (low, divisor)
        };
        let by_zero = self.is_zero(divisor);
        self.interpret_if(by_zero);
        // Without signs, as the host would not divide the smallest number by -1.
        let [a, b] = [dividend, divisor].map(|value| self.b.ins().iabs(value));
        let quotient = self.b.ins().udiv(a, b);
        let negated = self.b.ins().ineg(quotient);
        let signs = self.b.ins().bxor(dividend, divisor);
        let is_negative = self.is_negative(signs);
        let signed = self.b.ins().select(is_negative, negated, quotient);
        // Whether it fits: it has its sign, in the operand's width.
        let fails = if size < 3 {
            let narrow = self.narrow(signed, size);
            let again = self.b.ins().sextend(I64, narrow);
            self.b.ins().icmp(IntCC::NotEqual, again, signed)
        } else {
            let is_large = self.is_negative(quotient);
            self.b.ins().band_not(is_large, is_negative)
        };
        self.interpret_if(fails);
        let product = self.b.ins().imul(signed, divisor);
        (signed, self.b.ins().isub(dividend, product))
    }
}
