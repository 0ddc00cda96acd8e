//! The arithmetic flags of compiled code: computed when used.
//!
//! The translator knows the operation that set them last in the same block, and computes a condition from its operands: after a
//! comparison that is one comparison of the host's. At the end of a block, and where the region leaves, it writes the record that the
//! interpreter has (`flags::Lazy`), which is what a block begins with.

use super::helpers;
use super::translate::Translator;
use crate::Cpu;
use crate::flags;
use crate::state::flags::{CF, OF, ZF};
use cranelift_codegen::ir::condcodes::{CondCode, IntCC};
use cranelift_codegen::ir::types::{I8, I64};
use cranelift_codegen::ir::{InstBuilder, Value};
use std::mem::offset_of;

/// What set the arithmetic flags. Operands and results have the operation's type; `carry`, `overflow`, `aux` are 0 or 1 in 8 bits.
#[derive(Clone, Debug)]
pub(super) enum Flags {
    /// The CPU's record has it.
    Recorded,
    Add {
        a: Value,
        b: Value,
        result: Value,
    },
    Sub {
        a: Value,
        b: Value,
        result: Value,
    },
    Logic {
        result: Value,
    },
    Inc {
        a: Value,
        carry: Value,
        result: Value,
    },
    Dec {
        a: Value,
        carry: Value,
        result: Value,
    },
    Given {
        carry: Value,
        overflow: Value,
        aux: Option<Value>,
        result: Value,
    },
    /// CF and OF of a rotate; the others are those of `below`.
    Rotated {
        below: Box<Flags>,
        carry: Value,
        overflow: Value,
    },
}

impl Flags {
    /// Returns what set the flags that a rotate leaves alone.
    pub(super) fn below(&self) -> Flags {
        match self {
            Flags::Rotated { below, .. } => (**below).clone(),
            flags => flags.clone(),
        }
    }

    fn result(&self) -> Option<Value> {
        match *self {
            Flags::Recorded => None,
            Flags::Add { result, .. }
            | Flags::Sub { result, .. }
            | Flags::Logic { result }
            | Flags::Inc { result, .. }
            | Flags::Dec { result, .. }
            | Flags::Given { result, .. } => Some(result),
            Flags::Rotated { ref below, .. } => below.result(),
        }
    }
}

impl Translator<'_> {
    /// Returns the flags after ADC or SBB.
    pub(super) fn with_carry(
        &mut self,
        adds: bool,
        a: Value,
        b: Value,
        carry: Option<Value>,
        result: Value,
    ) -> Flags {
        let ins = |this: &mut Self, cc, x, y| this.b.ins().icmp(cc, x, y);
        let (without, with) = match adds {
            true => (
                ins(self, IntCC::UnsignedLessThan, result, a),
                ins(self, IntCC::UnsignedLessThanOrEqual, result, a),
            ),
            false => (
                ins(self, IntCC::UnsignedLessThan, a, b),
                ins(self, IntCC::UnsignedLessThanOrEqual, a, b),
            ),
        };
        let out = match carry {
            Some(carry) => self.b.ins().select(carry, with, without),
            None => without,
        };
        let other = if adds { b } else { a };
        let x = self.b.ins().bxor(a, if adds { result } else { b });
        let y = self.b.ins().bxor(other, result);
        let both = self.b.ins().band(x, y);
        let overflow = self.sign(both);
        let aux = self.b.ins().bxor(a, b);
        let aux = self.b.ins().bxor(aux, result);
        let aux = self.b.ins().band_imm(aux, 16);
        let aux = self.b.ins().icmp_imm(IntCC::NotEqual, aux, 0);
        Flags::Given {
            carry: out,
            overflow,
            aux: Some(aux),
            result,
        }
    }

    /// Call when an instruction has set the flags.
    pub(super) fn set_flags(&mut self, flags: Flags) {
        self.flags = flags;
        self.are_flags_recorded = false;
    }

    /// Brings the CPU's record up to date.
    pub(super) fn record_flags(&mut self) {
        if !std::mem::replace(&mut self.are_flags_recorded, true) {
            self.record(self.flags.clone());
        }
    }

    /// Writes a record of `flags`.
    pub(super) fn record(&mut self, flags: Flags) {
        let (kind, a, b, result) = match flags {
            Flags::Recorded => return,
            Flags::Add { a, b, result } => (flags::ADD, Some(a), Some(b), result),
            Flags::Sub { a, b, result } => (flags::SUB, Some(a), Some(b), result),
            Flags::Logic { result } => (flags::LOGIC, None, None, result),
            Flags::Inc { a, carry, result } => (flags::INC, Some(a), Some(carry), result),
            Flags::Dec { a, carry, result } => (flags::DEC, Some(a), Some(carry), result),
            Flags::Given {
                carry,
                overflow,
                aux,
                result,
            } => {
                let overflow = self.b.ins().ishl_imm(overflow, 1);
                let mut given = self.b.ins().bor(carry, overflow);
                if let Some(aux) = aux {
                    let aux = self.b.ins().ishl_imm(aux, 2);
                    given = self.b.ins().bor(given, aux);
                }
                (flags::GIVEN, Some(given), None, result)
            }
            Flags::Rotated {
                below,
                carry,
                overflow,
            } => {
                self.record(*below);
                let carry = self.wide(carry);
                let overflow = self.wide(overflow);
                let overflow = self
                    .b
                    .ins()
                    .ishl_imm(overflow, i64::from(OF.trailing_zeros()));
                debug_assert_eq!(CF, 1);
                let both = self.b.ins().bor(carry, overflow);
                self.call(helpers::rotated as *const () as usize, &[both], 0);
                return;
            }
        };
        let size = self.b.func.dfg.value_type(result).bytes().trailing_zeros();
        let kind = self.b.ins().iconst(I8, i64::from(kind) | i64::from(size));
        self.set_field(offset_of!(Cpu, lazy.kind), kind);
        let result = self.wide(result);
        self.set_field(offset_of!(Cpu, lazy.result), result);
        let operands = [(a, offset_of!(Cpu, lazy.a)), (b, offset_of!(Cpu, lazy.b))];
        for (operand, offset) in operands {
            if let Some(operand) = operand {
                let operand = self.wide(operand);
                self.set_field(offset, operand);
            }
        }
    }

    /// Reads the CPU's record: kind, operands, result.
    fn recorded(&mut self) -> [Value; 4] {
        [
            self.field(I8, offset_of!(Cpu, lazy.kind)),
            self.field(I64, offset_of!(Cpu, lazy.a)),
            self.field(I64, offset_of!(Cpu, lazy.b)),
            self.field(I64, offset_of!(Cpu, lazy.result)),
        ]
    }

    /// Returns the sign bit of a value, as 0 or 1 in 8 bits.
    fn sign(&mut self, value: Value) -> Value {
        self.b.ins().icmp_imm(IntCC::SignedLessThan, value, 0)
    }

    fn no(&mut self) -> Value {
        self.b.ins().iconst(I8, 0)
    }

    /// Returns CF.
    pub(super) fn carry(&mut self) -> Value {
        match self.flags {
            Flags::Add { a, result, .. } => self.b.ins().icmp(IntCC::UnsignedLessThan, result, a),
            Flags::Sub { a, b, .. } => self.b.ins().icmp(IntCC::UnsignedLessThan, a, b),
            Flags::Logic { .. } => self.no(),
            Flags::Inc { carry, .. }
            | Flags::Dec { carry, .. }
            | Flags::Given { carry, .. }
            | Flags::Rotated { carry, .. } => carry,
            Flags::Recorded => self.recorded_carry(),
        }
    }

    /// Returns CF of the record, as `Cpu::cf` does.
    fn recorded_carry(&mut self) -> Value {
        let [kind, a, b, result] = self.recorded();
        let kind = self.b.ins().band_imm(kind, !3 & 0xff);
        let less = self.b.ins().icmp(IntCC::UnsignedLessThan, result, a);
        let borrow = self.b.ins().icmp(IntCC::UnsignedLessThan, a, b);
        let kept = self.b.ins().icmp_imm(IntCC::NotEqual, b, 0);
        let given = self.b.ins().band_imm(a, 1);
        let given = self.b.ins().ireduce(I8, given);
        let rflags = self.field(I64, offset_of!(Cpu, state.rflags));
        let done = self.b.ins().band_imm(rflags, CF as i64);
        let done = self.b.ins().ireduce(I8, done);
        let mut carry = kept;
        let no = self.no();
        for (number, value) in [
            (flags::GIVEN, given),
            (flags::LOGIC, no),
            (flags::SUB, borrow),
            (flags::ADD, less),
            (flags::DONE, done),
        ] {
            let is = self.b.ins().icmp_imm(IntCC::Equal, kind, i64::from(number));
            carry = self.b.ins().select(is, value, carry);
        }
        carry
    }

    fn zero(&mut self) -> Value {
        match self.flags.result() {
            Some(result) => self.b.ins().icmp_imm(IntCC::Equal, result, 0),
            None => {
                let [kind, _, _, result] = self.recorded();
                let zero = self.b.ins().icmp_imm(IntCC::Equal, result, 0);
                let rflags = self.field(I64, offset_of!(Cpu, state.rflags));
                let flag = self.b.ins().band_imm(rflags, ZF as i64);
                let flag = self.b.ins().icmp_imm(IntCC::NotEqual, flag, 0);
                let done =
                    self.b
                        .ins()
                        .icmp_imm(IntCC::UnsignedLessThan, kind, i64::from(flags::ADD));
                self.b.ins().select(done, flag, zero)
            }
        }
    }

    fn overflow(&mut self) -> Value {
        let both = |this: &mut Self, a, b, c, d| {
            let x = this.b.ins().bxor(a, b);
            let y = this.b.ins().bxor(c, d);
            let both = this.b.ins().band(x, y);
            this.sign(both)
        };
        match self.flags {
            Flags::Add { a, b, result } => both(self, a, result, b, result),
            Flags::Sub { a, b, result } => both(self, a, b, a, result),
            Flags::Logic { .. } => self.no(),
            // The sign changed.
            Flags::Inc { a, result, .. } => {
                let not = self.b.ins().bnot(a);
                let changed = self.b.ins().band(not, result);
                self.sign(changed)
            }
            Flags::Dec { a, result, .. } => {
                let not = self.b.ins().bnot(result);
                let changed = self.b.ins().band(a, not);
                self.sign(changed)
            }
            Flags::Given { overflow, .. } | Flags::Rotated { overflow, .. } => overflow,
            Flags::Recorded => self.asked(0),
        }
    }

    fn negative(&mut self) -> Value {
        match self.flags.result() {
            Some(result) => self.sign(result),
            None => self.asked(8),
        }
    }

    fn parity(&mut self) -> Value {
        let Some(result) = self.flags.result() else {
            return self.asked(10);
        };
        let low = self.wide(result);
        let low = self.b.ins().band_imm(low, 0xff);
        let high = self.b.ins().ushr_imm(low, 4);
        let nibble = self.b.ins().bxor(low, high);
        let nibble = self.b.ins().band_imm(nibble, 15);
        // Bit n tells whether n has an even number of bits.
        let table = self.constant(0x9669);
        let bit = self.b.ins().ushr(table, nibble);
        let bit = self.b.ins().band_imm(bit, 1);
        self.b.ins().ireduce(I8, bit)
    }

    /// Asks the interpreter for a condition.
    fn asked(&mut self, condition: u8) -> Value {
        self.record_flags();
        let condition = self.constant(condition.into());
        let holds = self.call(helpers::condition as *const () as usize, &[condition], 1)[0];
        self.b.ins().ireduce(I8, holds)
    }

    /// Returns whether a condition (the low four bits of Jcc's opcode) holds, as 0 or 1 in 8 bits.
    pub(super) fn condition(&mut self, condition: u8) -> Value {
        if let Some(holds) = self.compared(condition) {
            return holds;
        }
        if let Flags::Recorded = self.flags
            && !matches!(condition >> 1, 1 | 2)
        {
            return self.asked(condition);
        }
        let holds = match condition >> 1 {
            0 => self.overflow(),
            1 => self.carry(),
            2 => self.zero(),
            3 => {
                let (carry, zero) = (self.carry(), self.zero());
                self.b.ins().bor(carry, zero)
            }
            4 => self.negative(),
            5 => self.parity(),
            n => {
                let (negative, overflow) = (self.negative(), self.overflow());
                let less = self.b.ins().bxor(negative, overflow);
                if n == 6 {
                    less
                } else {
                    let zero = self.zero();
                    self.b.ins().bor(less, zero)
                }
            }
        };
        match condition & 1 {
            0 => holds,
            _ => self.b.ins().bxor_imm(holds, 1),
        }
    }

    /// Returns a condition that is one comparison: of the operands of CMP and SUB, or of a logical result with 0.
    fn compared(&mut self, condition: u8) -> Option<Value> {
        use IntCC::*;
        let cc = match condition >> 1 {
            1 => UnsignedLessThan,
            2 => Equal,
            3 => UnsignedLessThanOrEqual,
            6 => SignedLessThan,
            7 => SignedLessThanOrEqual,
            _ => return None,
        };
        let cc = if condition & 1 == 0 {
            cc
        } else {
            cc.complement()
        };
        match self.flags {
            Flags::Sub { a, b, .. } => Some(self.b.ins().icmp(cc, a, b)),
            Flags::Logic { result } => Some(self.b.ins().icmp_imm(cc, result, 0)),
            _ => None,
        }
    }
}
