//! The arithmetic flags of compiled code. A flag is computed only when an instruction reads it.
//!
//! The translator knows which operation of the path was the last to set the flags, and computes a condition from that
//! operation's operands. So a condition after a comparison becomes one comparison of the host. At the end of a path,
//! and where a region is left, compiled code writes the record that the interpreter uses (`flags::Lazy`). A path begins
//! with such a record.

use super::helpers;
pub(super) use super::kept::{Carry, Flags};
use super::translate::Translator;
use crate::Cpu;
use crate::flags::{self, DONE};
use crate::sem::{self, Bits, Readable};
use crate::state::flags::{AF, ARITHMETIC, CF, OF, PF, SF, ZF};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I64};
use cranelift_codegen::ir::{InstBuilder, Value};
use std::mem::offset_of;

/// What happens to the fields of the record from which CF is computed: see [`flags::Lazy`].
enum Comparison {
    Stays,
    /// CF becomes the comparison of these two values.
    Of(Value, Value),
    Never,
    Is(Value),
}

impl Translator<'_> {
    /// Returns `flags` in a form that can be recorded. If an instruction sets only CF and OF, takes the other flags
    /// from the operation before, or makes sure that they are in RFLAGS.
    pub(super) fn completed(&mut self, flags: Flags) -> Flags {
        let Flags::Rotated { carry, overflow } = flags else {
            return flags;
        };
        if let Some(flags) = self.rotated(carry, overflow) {
            return flags;
        }
        match self.now.flags {
            Flags::Rotated {
                carry: before,
                overflow: overflow_before,
            } => Flags::Rotated {
                carry: carry.or(before),
                overflow: overflow.or(overflow_before),
            },
            Flags::Compared { .. } => {
                self.record_flags();
                flags
            }
            // In a chain of ADCX or ADOX, only the first instruction needs this code, because after it the flags are in
            // RFLAGS.
            _ => {
                self.settle();
                flags
            }
        }
    }

    /// Emits code that makes sure that the flags are in RFLAGS, not in the CPU's record. Usually RFLAGS has them
    /// already: see [`write_rflags`](Self::write_rflags).
    fn settle(&mut self) {
        let kind = self.field(I8, offset_of!(Cpu, lazy.kind));
        let is_done = (self.b.ins()).icmp_imm(IntCC::UnsignedLessThan, kind, i64::from(flags::ADD));
        self.unless(is_done, |translator| {
            translator.call_keeping(helpers::SETTLE, &[]);
        });
        self.now.flags = Flags::Rotated {
            carry: None,
            overflow: None,
        };
    }

    /// Writes the flags to RFLAGS, instead of a record, before a block that begins with ADCX or ADOX. Without this, a
    /// loop of ADCX or ADOX would call a helper in each iteration.
    pub(super) fn write_rflags(&mut self) {
        if let Flags::InCpu | Flags::Compared { .. } | Flags::Rotated { .. } = self.now.flags {
            return self.record_flags();
        }
        let flags = [
            (CF, Some(self.carry())),
            (PF, Some(self.parity())),
            (AF, self.aux()),
            (ZF, Some(self.zero())),
            (SF, Some(self.negative())),
            (OF, Some(self.overflow())),
        ];
        self.record_in_rflags(ARITHMETIC, &flags);
        self.now.are_flags_recorded = true;
    }

    /// Returns CF, for an instruction that leaves CF unchanged.
    pub(super) fn kept_carry(&mut self) -> Carry {
        match self.now.flags {
            Flags::InCpu => Carry::InCpu,
            Flags::Inc { carry, .. } | Flags::Dec { carry, .. } => carry,
            _ => Carry::Is(self.carry()),
        }
    }

    /// Call after an instruction that has set the flags.
    pub(super) fn set_flags(&mut self, flags: Flags) {
        if let Flags::InCpu = flags {
            return;
        }
        let flags = self.completed(flags);
        let before = std::mem::replace(&mut self.now.flags, flags);
        let were_recorded = std::mem::replace(&mut self.now.are_flags_recorded, false);
        if let Flags::Compared { parity, .. } = before
            && !were_recorded
            && self.constant_of(parity).is_none()
        {
            self.keep_computed(parity);
        }
    }

    /// Writes the current flags to the CPU's record, unless the record already has them.
    pub(super) fn record_flags(&mut self) {
        if !std::mem::replace(&mut self.now.are_flags_recorded, true) {
            self.record(self.now.flags);
        }
    }

    /// Writes `flags` to the CPU's record. They must be in the form that [`completed`](Self::completed) returns.
    pub(super) fn record(&mut self, flags: Flags) {
        self.now.has_changed = true;
        use Comparison::*;
        let kept = |carry| match carry {
            Carry::InCpu => Stays,
            Carry::Is(carry) => Is(carry),
        };
        let (kind, carry, sized) = match flags {
            Flags::InCpu => return,
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
            } => {
                let flags = [(CF, Some(carry)), (ZF, Some(zero)), (PF, Some(parity))];
                return self.record_in_rflags(ARITHMETIC, &flags);
            }
            Flags::Rotated { carry, overflow } => {
                return self.record_in_rflags(0, &[(CF, carry), (OF, overflow)]);
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

    /// Emits code that writes `flags` to RFLAGS, clears the flags in `cleared`, and ends the record.
    fn record_in_rflags(&mut self, cleared: u64, flags: &[(u64, Option<Value>)]) {
        let given = flags.iter().filter(|(_, value)| value.is_some());
        let changed = given.fold(cleared, |mask, (flag, _)| mask | flag);
        let rflags = self.field(I64, offset_of!(Cpu, state.rflags));
        let mut rflags = self.b.ins().band_imm(rflags, !(changed as i64));
        for &(flag, value) in flags {
            let Some(value) = value else { continue };
            let value = self.wide(value);
            let bit = (self.b.ins()).ishl_imm(value, i64::from(flag.trailing_zeros()));
            rflags = self.b.ins().bor(rflags, bit);
            if flag == CF {
                let none = self.constant(0);
                self.set_field(offset_of!(Cpu, lazy.x), none);
                self.set_field(offset_of!(Cpu, lazy.y), value);
            }
        }
        self.set_field(offset_of!(Cpu, state.rflags), rflags);
        let kind = self.b.ins().iconst(I8, i64::from(DONE));
        self.set_field(offset_of!(Cpu, lazy.kind), kind);
    }

    /// Returns the logarithm of a value's size in bytes.
    pub(super) fn size_of(&self, value: Value) -> u8 {
        self.b.func.dfg.value_type(value).bytes().trailing_zeros() as u8
    }

    /// Emits code that computes ZF from the CPU's record, as `Cpu::zf` does.
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

    /// Emits a call of the interpreter's function that computes a condition.
    fn asked(&mut self, condition: u8) -> Value {
        self.record_flags();
        let condition = self.constant(condition.into());
        let holds = self.call(helpers::condition as *const () as usize, &[condition], 1)[0];
        self.b.ins().ireduce(I8, holds)
    }

    /// Returns whether a condition holds, as 0 or 1 in 8 bits. `condition` is the low four bits of Jcc's opcode.
    pub(super) fn condition(&mut self, condition: u8) -> Value {
        match self.now.flags {
            // One call of a helper computes such a condition, even if it depends on several flags.
            Flags::InCpu if condition >> 1 > 2 => self.asked(condition),
            _ => sem::condition(self, condition),
        }
    }
}

impl Readable for Translator<'_> {
    fn flags(&mut self) -> Flags {
        self.now.flags
    }
    fn recorded(&mut self, flag: u64) -> Value {
        match flag {
            // The last instruction has set only CF or OF: the other flags are in RFLAGS.
            _ if flag != CF && matches!(self.now.flags, Flags::Rotated { .. }) => {
                let rflags = self.field(I64, offset_of!(Cpu, state.rflags));
                self.bit(rflags, flag.trailing_zeros())
            }
            CF => {
                let x = self.field(I64, offset_of!(Cpu, lazy.x));
                let y = self.field(I64, offset_of!(Cpu, lazy.y));
                self.is_less(x, y)
            }
            ZF => self.recorded_zero(),
            OF => {
                self.settle();
                self.recorded(OF)
            }
            SF => self.asked(8),
            _ => self.asked(10),
        }
    }
    fn kept(&mut self, carry: Carry) -> Value {
        match carry {
            Carry::InCpu => self.recorded(CF),
            Carry::Is(carry) => carry,
        }
    }
}
