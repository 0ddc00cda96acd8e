//! Translates bit instructions (tests, scans and counts, BMI1 and BMI2), and the integer arithmetic of multi-precision
//! code: double shifts and division.

use super::condition::Flags;
use super::helpers;
use super::translate::Translator;
use crate::op::{MEM, NONE, Op};
use crate::sem::{Bits, Compute, Operation, by_mnemonic, division, moves, shift};
use cranelift_codegen::ir::types::I64;
use cranelift_codegen::ir::{InstBuilder, Value};
use iced_x86::{Instruction, Mnemonic};

impl Translator<'_> {
    /// Translates a bit instruction, double shift or division. Returns `None` without effect if there is no
    /// translation.
    pub(super) fn bit_instruction(&mut self, insn: &Instruction, op: &Op) -> Option<()> {
        use Mnemonic::*;
        let size = op.size;
        if size == 0 {
            return None;
        }
        match insn.mnemonic() {
            Movbe => self.move_swapped(op),
            Mulx => {
                let b = self.operand(op, 2, size);
                let a = self.get(2, size);
                let (low, high) = self.halves(a, b, false);
                // The low half is written first: if both destinations are the same register, the register must end with
                // the high half.
                self.set(op.r[1], size, low);
                self.set(op.r[0], size, high);
            }
            Shld | Shrd => return self.double_shift(op),
            Div | Idiv => return self.divide(op),
            mnemonic => {
                return by_mnemonic!(mnemonic, sources self.sources(op))
                    .or_else(|| by_mnemonic!(mnemonic, scan self.scan(op)))
                    .or_else(|| by_mnemonic!(mnemonic, bit_test self.bit_test(op))?);
            }
        }
        Some(())
    }

    /// Translates BT, BTS, BTR and BTC, except with an operand in memory and a bit number in a register, which may
    /// select a bit outside of the operand.
    fn bit_test<A: Operation>(&mut self, op: &Op) -> Option<()> {
        if op.r[0] == MEM && op.r[1] != NONE {
            return None;
        }
        let index = self.operand(op, 1, op.size);
        self.modify::<A>(op, index);
        Some(())
    }

    /// Translates BSF and BSR. If the source is 0, the destination keeps its value.
    fn scan<A: Operation>(&mut self, op: &Op) {
        let size = op.size;
        let (source, no) = (self.operand(op, 1, size), self.no());
        let (n, flags) = A::apply(self, source, source, no);
        // Read the whole register: all of it stays unchanged if the source is 0.
        let old = self.get(op.r[0], 3);
        self.set(op.r[0], size, n);
        let new = self.get(op.r[0], 3);
        let kept = self.is_zero(source);
        let value = self.select(kept, old, new);
        self.set(op.r[0], 3, value);
        self.set_flags(flags);
    }

    /// Translates MOVBE.
    fn move_swapped(&mut self, op: &Op) {
        let (value, no) = (self.operand(op, 1, op.size), self.no());
        let (value, _) = moves::Movbe::apply(self, value, value, no);
        self.write(op, value);
    }

    /// Translates SHLD and SHRD of 4 or 8 bytes by an immediate count other than 0.
    fn double_shift(&mut self, op: &Op) -> Option<()> {
        let size = op.size;
        let count = op.imm & shift::last_count(8 << size);
        if op.r[2] != NONE || size < 2 || count == 0 {
            return None;
        }
        let (fill, count) = (self.get(op.r[1], size), self.immediate(size, count));
        let mut flags = Flags::InCpu;
        self.change(op, |this, a| {
            let (result, of_result) = match op.mnemonic {
                Mnemonic::Shld => shift::shld(this, a, fill, count),
                _ => shift::shrd(this, a, fill, count),
            };
            flags = of_result;
            result
        });
        self.set_flags(flags);
        Some(())
    }

    /// Translates DIV and IDIV of 4 or 8 bytes.
    fn divide(&mut self, op: &Op) -> Option<()> {
        let size = op.size;
        if size < 2 {
            return None;
        }
        let is_signed = op.mnemonic == Mnemonic::Idiv;
        let divisor = self.operand(op, 0, size);
        let halves = (self.get(0, size), self.get(2, size));
        let Ok((quotient, remainder)) = division::divide(self, halves, divisor, is_signed);
        self.set(0, size, quotient);
        self.set(2, size, remainder);
        Some(())
    }

    /// Emits the division of a number by a divisor that is greater than the number's high half. The number is given as
    /// two halves of 4 or 8 bytes each.
    pub(super) fn divide_halves(
        &mut self,
        (low, high): (Value, Value),
        divisor: Value,
    ) -> (Value, Value) {
        let size = self.size_of(low);
        if size < 3 {
            let [low, high, divisor] = [low, high, divisor].map(|value| self.wide(value));
            let high = self.b.ins().ishl_imm(high, 32);
            let dividend = self.b.ins().bor(high, low);
            let (quotient, remainder) = self.divide_words(dividend, divisor);
            return (self.narrow(quotient, size), self.narrow(remainder, size));
        }
        let (wide, short, on) = (self.cold(), self.b.create_block(), self.b.create_block());
        let results = [0; 2].map(|_| self.b.append_block_param(on, I64));
        self.b.ins().brif(high, wide, &[], short, &[]);
        self.b.switch_to_block(wide);
        let helper = helpers::divide as *const () as usize;
        let both = self.call(helper, &[low, high, divisor], 2);
        (self.b.ins()).jump(on, &[both[0].into(), both[1].into()]);
        self.b.switch_to_block(short);
        let (quotient, remainder) = self.divide_words(low, divisor);
        (self.b.ins()).jump(on, &[quotient.into(), remainder.into()]);
        self.b.switch_to_block(on);
        results.into()
    }

    /// Emits the division of a 64-bit number by a divisor other than 0.
    fn divide_words(&mut self, dividend: Value, divisor: Value) -> (Value, Value) {
        let quotient = self.b.ins().udiv(dividend, divisor);
        let product = self.b.ins().imul(quotient, divisor);
        (quotient, self.b.ins().isub(dividend, product))
    }
}
