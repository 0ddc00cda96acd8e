//! The arithmetic flags of compiled code: computed when used.
//!
//! The translator knows the operation that set them last in the same block, and computes a condition from its operands: after a
//! comparison that is one comparison of the host's. At the end of a block, and where the region leaves, it writes the record that the
//! interpreter has (`flags::Lazy`), which is what a block begins with.

use super::helpers;
use super::translate::Translator;
use crate::Cpu;
use crate::flags;
use crate::sem::{self, Compute};
use crate::state::flags::{ARITHMETIC, CF, PF, ZF};
use cranelift_codegen::ir::condcodes::{CondCode, IntCC};
use cranelift_codegen::ir::types::{I8, I64};
use cranelift_codegen::ir::{InstBuilder, Value};
use std::mem::offset_of;

/// What set the arithmetic flags. Operands and results have the operation's type; truth values are 0 or 1 in 8 bits.
pub(super) type Flags = sem::Flags<Value, Value, Carry>;

/// The carry flag that an instruction leaves alone.
#[derive(Clone, Copy, Debug)]
pub(super) enum Carry {
    /// The CPU's record has it.
    Recorded,
    /// 0 or 1 in 8 bits.
    Is(Value),
}

/// What a record has of the carry flag: see [`flags::Lazy`].
enum Comparison {
    Stays,
    /// Of two values.
    Of(Value, Value),
    Never,
    Is(Value),
}

impl Translator<'_> {
    /// Returns the flags with another CF and OF, as far as they are given.
    pub(super) fn with_flags(&mut self, carry: Option<Value>, overflow: Option<Value>) -> Flags {
        let carry = carry.unwrap_or_else(|| self.carry());
        let Some(result) = self.flags.result() else {
            if let Flags::Compared { .. } = self.flags {
                self.record_flags();
            }
            let overflow = overflow.or(match self.flags {
                Flags::Rotated { overflow, .. } => overflow,
                _ => None,
            });
            return Flags::Rotated { carry, overflow };
        };
        Flags::Given {
            carry,
            overflow: overflow.unwrap_or_else(|| self.overflow()),
            aux: self.aux(),
            result,
        }
    }

    /// Returns the carry flag, for an instruction that leaves it alone.
    pub(super) fn kept_carry(&mut self) -> Carry {
        match self.flags {
            Flags::Recorded => Carry::Recorded,
            Flags::Inc { carry, .. } | Flags::Dec { carry, .. } => carry,
            _ => Carry::Is(self.carry()),
        }
    }

    /// Call when an instruction has set the flags.
    pub(super) fn set_flags(&mut self, flags: Flags) {
        let flags = match flags {
            Flags::Recorded => return,
            Flags::Rotated { carry, overflow } => self.with_flags(Some(carry), overflow),
            flags => flags,
        };
        let before = std::mem::replace(&mut self.flags, flags);
        let were_recorded = std::mem::replace(&mut self.are_flags_recorded, false);
        if let Flags::Compared { parity, .. } = before
            && !were_recorded
        {
            self.keep_computed(parity);
        }
    }

    /// Brings the CPU's record up to date.
    pub(super) fn record_flags(&mut self) {
        if !std::mem::replace(&mut self.are_flags_recorded, true) {
            self.record(self.flags);
        }
    }

    /// Writes a record of `flags`.
    pub(super) fn record(&mut self, flags: Flags) {
        self.has_changed = true;
        use Comparison::*;
        let kept = |carry| match carry {
            Carry::Recorded => Stays,
            Carry::Is(carry) => Is(carry),
        };
        let (kind, carry, sized) = match flags {
            Flags::Recorded => return,
            Flags::Add { a, result } => (flags::ADD, Of(result, a), result),
            Flags::Sub { a, b, result } => (flags::SUB, Of(a, b), result),
            Flags::Logic { carry, result } => (flags::LOGIC, carry.map_or(Never, Is), result),
            Flags::Inc { carry, result } => (flags::INC, kept(carry), result),
            Flags::Dec { carry, result } => (flags::DEC, kept(carry), result),
            Flags::Shl { before, result } => {
                let size = self.size_of(result);
                let largest = self.immediate(size, (1 << ((8 << size) - 1)) - 1);
                (flags::SHL, Of(largest, before), result)
            }
            Flags::Shr { carry, result } => (flags::SHR, Is(carry), result),
            Flags::Given {
                carry,
                overflow,
                aux,
                result,
            } => {
                debug_assert_eq!((flags::GIVEN_OF, flags::GIVEN_AF), (1, 2));
                let mut given = overflow;
                if let Some(aux) = aux {
                    let aux = self.b.ins().ishl_imm(aux, 1);
                    given = self.b.ins().bor(given, aux);
                }
                self.set_field(offset_of!(Cpu, lazy.given), given);
                (flags::GIVEN, Is(carry), result)
            }
            Flags::Compared {
                carry,
                zero,
                parity,
            } => return self.record_compared(carry, zero, parity),
            Flags::Rotated { carry, overflow } => {
                let mut values = vec![self.wide(carry)];
                let mut helper = helpers::carried as *const () as usize;
                if let Some(overflow) = overflow {
                    values.push(self.wide(overflow));
                    helper = helpers::rotated as *const () as usize;
                }
                self.call(helper, &values, 0);
                return;
            }
        };
        let kind = kind | self.size_of(sized);
        let kind = self.b.ins().iconst(I8, i64::from(kind));
        self.set_field(offset_of!(Cpu, lazy.kind), kind);
        let (x, y) = match carry {
            Stays => (None, None),
            Of(x, y) => (Some(x), Some(y)),
            Never => (Some(self.constant(flags::NO_CARRY as i64)), None),
            Is(carry) => (Some(self.constant(0)), Some(carry)),
        };
        let result = (!matches!(flags, Flags::Add { .. } | Flags::Sub { .. })).then_some(sized);
        for (value, offset) in [
            (x, offset_of!(Cpu, lazy.x)),
            (y, offset_of!(Cpu, lazy.y)),
            (result, offset_of!(Cpu, lazy.result)),
        ] {
            if let Some(value) = value {
                let value = self.wide(value);
                self.set_field(offset, value);
            }
        }
    }

    /// Writes CF, ZF and PF where flags without a record are, and clears the others.
    fn record_compared(&mut self, carry: Value, zero: Value, parity: Value) {
        let rflags = self.field(I64, offset_of!(Cpu, state.rflags));
        let mut rflags = self.b.ins().band_imm(rflags, !(ARITHMETIC as i64));
        let carry = self.wide(carry);
        for (flag, value) in [(CF, carry), (ZF, zero), (PF, parity)] {
            let value = self.wide(value);
            let bit = (self.b.ins()).ishl_imm(value, i64::from(flag.trailing_zeros()));
            rflags = self.b.ins().bor(rflags, bit);
        }
        self.set_field(offset_of!(Cpu, state.rflags), rflags);
        let kind = self.b.ins().iconst(I8, i64::from(flags::DONE));
        self.set_field(offset_of!(Cpu, lazy.kind), kind);
        let none = self.constant(0);
        self.set_field(offset_of!(Cpu, lazy.x), none);
        self.set_field(offset_of!(Cpu, lazy.y), carry);
    }

    /// Returns the size index of a value.
    pub(super) fn size_of(&self, value: Value) -> u8 {
        self.b.func.dfg.value_type(value).bytes().trailing_zeros() as u8
    }

    /// Returns the sign bit of a value, as 0 or 1 in 8 bits.
    pub(super) fn sign(&mut self, value: Value) -> Value {
        self.b.ins().icmp_imm(IntCC::SignedLessThan, value, 0)
    }

    /// Returns CF.
    pub(super) fn carry(&mut self) -> Value {
        match self.flags {
            Flags::Add { a, result } => self.b.ins().icmp(IntCC::UnsignedLessThan, result, a),
            Flags::Sub { a, b, .. } => self.b.ins().icmp(IntCC::UnsignedLessThan, a, b),
            Flags::Logic { carry: None, .. } => self.no(),
            Flags::Shl { before, .. } => self.sign(before),
            Flags::Logic {
                carry: Some(carry), ..
            }
            | Flags::Inc {
                carry: Carry::Is(carry),
                ..
            }
            | Flags::Dec {
                carry: Carry::Is(carry),
                ..
            }
            | Flags::Shr { carry, .. }
            | Flags::Given { carry, .. }
            | Flags::Compared { carry, .. }
            | Flags::Rotated { carry, .. } => carry,
            Flags::Recorded | Flags::Inc { .. } | Flags::Dec { .. } => {
                let x = self.field(I64, offset_of!(Cpu, lazy.x));
                let y = self.field(I64, offset_of!(Cpu, lazy.y));
                self.b.ins().icmp(IntCC::UnsignedLessThan, x, y)
            }
        }
    }

    fn zero(&mut self) -> Value {
        if let Flags::Compared { zero, .. } = self.flags {
            return zero;
        }
        match self.flags.result() {
            Some(result) => self.b.ins().icmp_imm(IntCC::Equal, result, 0),
            None => self.recorded_zero(),
        }
    }

    /// Returns ZF of the record, as `Cpu::zf` does.
    fn recorded_zero(&mut self) -> Value {
        let kind = self.field(I8, offset_of!(Cpu, lazy.kind));
        let kind = self.b.ins().band_imm(kind, !3 & 0xff);
        let [x, y, result] = [
            offset_of!(Cpu, lazy.x),
            offset_of!(Cpu, lazy.y),
            offset_of!(Cpu, lazy.result),
        ]
        .map(|offset| self.field(I64, offset));
        let rflags = self.field(I64, offset_of!(Cpu, state.rflags));
        let flag = self.b.ins().band_imm(rflags, ZF as i64);
        let flag = self.b.ins().icmp_imm(IntCC::NotEqual, flag, 0);
        let sum = self.b.ins().icmp_imm(IntCC::Equal, x, 0);
        let difference = self.b.ins().icmp(IntCC::Equal, x, y);
        let mut zero = self.b.ins().icmp_imm(IntCC::Equal, result, 0);
        for (number, value) in [
            (flags::SUB, difference),
            (flags::ADD, sum),
            (flags::DONE, flag),
        ] {
            let is = (self.b.ins()).icmp_imm(IntCC::Equal, kind, i64::from(number));
            zero = self.b.ins().select(is, value, zero);
        }
        zero
    }

    /// Returns AF of an addition or a subtraction.
    fn aux_of(&mut self, a: Value, b: Value, result: Value) -> Value {
        let aux = self.b.ins().bxor(a, b);
        let aux = self.b.ins().bxor(aux, result);
        let aux = self.b.ins().band_imm(aux, 16);
        self.b.ins().icmp_imm(IntCC::NotEqual, aux, 0)
    }

    /// Returns AF, unless the record has it. `None`: it is clear.
    fn aux(&mut self) -> Option<Value> {
        let low_nibble_is = |this: &mut Self, result, nibble| {
            let low = this.b.ins().band_imm(result, 15);
            this.b.ins().icmp_imm(IntCC::Equal, low, nibble)
        };
        match self.flags {
            Flags::Add { a, result } => {
                let b = self.b.ins().isub(result, a);
                Some(self.aux_of(a, b, result))
            }
            Flags::Sub { a, b, result } => Some(self.aux_of(a, b, result)),
            Flags::Inc { result, .. } => Some(low_nibble_is(self, result, 0)),
            Flags::Dec { result, .. } => Some(low_nibble_is(self, result, 15)),
            Flags::Given { aux, .. } => aux,
            Flags::Logic { .. } | Flags::Shl { .. } | Flags::Shr { .. } => None,
            Flags::Recorded | Flags::Compared { .. } | Flags::Rotated { .. } => None,
        }
    }

    pub(super) fn overflow(&mut self) -> Value {
        let difference = |this: &mut Self, x, y, d| {
            let a = this.b.ins().bxor(x, y);
            let b = this.b.ins().bxor(x, d);
            let both = this.b.ins().band(a, b);
            this.sign(both)
        };
        match self.flags {
            Flags::Add { a, result } => {
                let b = self.b.ins().isub(result, a);
                difference(self, result, a, b)
            }
            Flags::Sub { a, b, result } => difference(self, a, b, result),
            Flags::Logic { .. } | Flags::Compared { .. } => self.no(),
            // The result is the smallest number, or the largest.
            Flags::Inc { result, .. } => {
                let before = self.b.ins().iadd_imm(result, -1);
                let changed = self.b.ins().band_not(result, before);
                self.sign(changed)
            }
            Flags::Dec { result, .. } => {
                let before = self.b.ins().iadd_imm(result, 1);
                let changed = self.b.ins().band_not(before, result);
                self.sign(changed)
            }
            Flags::Shl { before, result } => {
                let changed = self.b.ins().bxor(before, result);
                self.sign(changed)
            }
            Flags::Shr { result, .. } => {
                let next = self.b.ins().ishl_imm(result, 1);
                let changed = self.b.ins().bxor(result, next);
                self.sign(changed)
            }
            Flags::Given { overflow, .. } => overflow,
            Flags::Rotated {
                overflow: Some(overflow),
                ..
            } => overflow,
            Flags::Recorded | Flags::Rotated { overflow: None, .. } => self.asked(0),
        }
    }

    fn negative(&mut self) -> Value {
        if let Flags::Compared { .. } = self.flags {
            return self.no();
        }
        match self.flags.result() {
            Some(result) => self.sign(result),
            None => self.asked(8),
        }
    }

    fn parity(&mut self) -> Value {
        if let Flags::Compared { parity, .. } = self.flags {
            return parity;
        }
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
        let cc = match condition & 1 {
            0 => cc,
            _ => cc.complement(),
        };
        match self.flags {
            Flags::Sub { a, b, .. } => Some(self.b.ins().icmp(cc, a, b)),
            Flags::Logic {
                carry: None,
                result,
            } => Some(self.b.ins().icmp_imm(cc, result, 0)),
            _ => None,
        }
    }
}
