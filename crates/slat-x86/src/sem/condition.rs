//! Computes the flags and conditions that instructions read, from the last operation that has set the flags.
//!
//! The interpreter computes conditions from its record (`flags`), which may be of any operation. The compiler usually
//! knows the last operation, and emits code for that operation's formula only. So after a comparison, a condition
//! becomes one comparison of the host.

use super::{Bits, Flags, FlagsOf};
use crate::state::flags::{CF, OF, PF, SF, ZF};

/// Numbers of the conditions that depend on one flag. Instructions that read this flag use the number.
pub(crate) const OVERFLOW: u8 = 0;
pub(crate) const CARRY: u8 = 2;

/// A source of arithmetic flags: the interpreter's CPU, or the compiler's translator.
pub(crate) trait Readable: Bits + Sized {
    /// Returns the last operation that has set the flags.
    fn flags(&mut self) -> FlagsOf<Self>;
    /// Returns flag CF, PF, ZF, SF or OF from the CPU: from its record of the last operation, or from RFLAGS. Called for
    /// a flag that [`flags`](Self::flags) leaves to the CPU ([`Flags::InCpu`]).
    fn recorded(&mut self, flag: u64) -> Self::Bool;
    /// Returns CF, which the last operation has left unchanged.
    fn kept(&mut self, carry: Self::Kept) -> Self::Bool;

    /// Returns CF.
    #[inline(always)]
    fn carry(&mut self) -> Self::Bool {
        match self.flags() {
            Flags::Add { a, result } => self.is_less(result, a),
            Flags::Sub { a, b, .. } => self.is_less(a, b),
            Flags::Logic { carry: None, .. } => self.no(),
            Flags::Inc { carry, .. } | Flags::Dec { carry, .. } => self.kept(carry),
            Flags::Shl { before, .. } => self.is_negative(before),
            Flags::Logic {
                carry: Some(carry), ..
            }
            | Flags::Shr { carry, .. }
            | Flags::Given { carry, .. }
            | Flags::Compared { carry, .. }
            | Flags::Rotated {
                carry: Some(carry), ..
            } => carry,
            Flags::InCpu | Flags::Rotated { carry: None, .. } => self.recorded(CF),
        }
    }

    /// Returns ZF.
    #[inline(always)]
    fn zero(&mut self) -> Self::Bool {
        match self.flags() {
            Flags::Sub { a, b, .. } => self.is_equal(a, b),
            Flags::Compared { zero, .. } => zero,
            flags => match flags.result() {
                Some(result) => self.is_zero(result),
                None => self.recorded(ZF),
            },
        }
    }

    /// Returns SF.
    #[inline(always)]
    fn negative(&mut self) -> Self::Bool {
        match self.flags() {
            Flags::Compared { .. } => self.no(),
            flags => match flags.result() {
                Some(result) => self.is_negative(result),
                None => self.recorded(SF),
            },
        }
    }

    /// Returns PF.
    #[inline(always)]
    fn parity(&mut self) -> Self::Bool {
        match self.flags() {
            Flags::Compared { parity, .. } => parity,
            flags => match flags.result() {
                Some(result) => self.is_even(result),
                None => self.recorded(PF),
            },
        }
    }

    /// Returns OF.
    #[inline(always)]
    fn overflow(&mut self) -> Self::Bool {
        let changed = match self.flags() {
            Flags::Logic { .. } | Flags::Compared { .. } => return self.no(),
            Flags::Given { overflow, .. }
            | Flags::Rotated {
                overflow: Some(overflow),
                ..
            } => return overflow,
            Flags::InCpu | Flags::Rotated { overflow: None, .. } => return self.recorded(OF),
            // `a + b = result` means `result - b = a`: compute the OF of that subtraction.
            Flags::Add { a, result } => {
                let b = self.sub(result, a);
                both_changed(self, result, a, b)
            }
            Flags::Sub { a, b, result } => both_changed(self, a, b, result),
            // INC sets OF if its result is the smallest signed number, and DEC if its result is the largest.
            Flags::Inc { result, .. } => {
                let before = self.plus(result, -1);
                let before = self.not(before);
                self.and(result, before)
            }
            Flags::Dec { result, .. } => {
                let (before, after) = (self.plus(result, 1), self.not(result));
                self.and(before, after)
            }
            Flags::Shl { before, result } => self.xor(before, result),
            Flags::Shr { result, .. } => {
                let next = self.add(result, result);
                self.xor(result, next)
            }
        };
        self.is_negative(changed)
    }

    /// Returns AF after an operation that has a result. `None`: AF is clear.
    #[inline(always)]
    fn aux(&mut self) -> Option<Self::Bool> {
        let changed = match self.flags() {
            Flags::Add { a, result } => {
                let b = self.sub(result, a);
                let changed = self.xor(a, b);
                self.xor(changed, result)
            }
            Flags::Sub { a, b, result } => {
                let changed = self.xor(a, b);
                self.xor(changed, result)
            }
            Flags::Inc { result, .. } => {
                let before = self.plus(result, -1);
                self.xor(before, result)
            }
            Flags::Dec { result, .. } => {
                let before = self.plus(result, 1);
                self.xor(before, result)
            }
            Flags::Given { aux, .. } => return aux,
            Flags::Logic { .. } | Flags::Shl { .. } | Flags::Shr { .. } => return None,
            Flags::InCpu | Flags::Compared { .. } | Flags::Rotated { .. } => return None,
        };
        Some(self.bit(changed, 4))
    }

    /// Returns the flags after a rotate: CF and OF are replaced by `carry` and `overflow`, each unless `None`. Returns
    /// `None` if the other flags cannot be computed from a result.
    #[inline(always)]
    fn rotated(
        &mut self,
        carry: Option<Self::Bool>,
        overflow: Option<Self::Bool>,
    ) -> Option<FlagsOf<Self>> {
        let result = self.flags().result()?;
        Some(Flags::Given {
            carry: carry.unwrap_or_else(|| self.carry()),
            overflow: overflow.unwrap_or_else(|| self.overflow()),
            aux: self.aux(),
            result,
        })
    }
}

/// Returns a value whose sign bit is the OF of a subtraction: the operands have different signs, and the sign of the
/// result differs from that of the first operand.
#[inline(always)]
fn both_changed<C: Bits>(c: &mut C, a: C::Value, b: C::Value, result: C::Value) -> C::Value {
    let (operands, result) = (c.xor(a, b), c.xor(a, result));
    c.and(operands, result)
}

/// Whether condition `cc` holds. `cc` is the low four bits of Jcc's opcode.
#[inline(always)]
pub(crate) fn condition<C: Readable>(c: &mut C, cc: u8) -> C::Bool {
    let holds = match (cc >> 1, c.flags()) {
        (3, Flags::Sub { a, b, .. }) => c.is_at_most(a, b),
        (6, Flags::Sub { a, b, .. }) => c.is_less_signed(a, b),
        (7, Flags::Sub { a, b, .. }) => c.is_at_most_signed(a, b),
        // A logical operation clears OF, and also CF if `carry` is `None`.
        (3, Flags::Logic { carry: None, .. }) => c.zero(),
        (6, Flags::Logic { .. }) => c.negative(),
        (7, Flags::Logic { result, .. }) => {
            let none = c.number(0, result);
            c.is_at_most_signed(result, none)
        }
        (0, _) => c.overflow(),
        (1, _) => c.carry(),
        (2, _) => c.zero(),
        (3, _) => {
            let (carry, zero) = (c.carry(), c.zero());
            c.either(carry, zero)
        }
        (4, _) => c.negative(),
        (5, _) => c.parity(),
        (6, _) => is_less(c),
        _ => {
            let (less, zero) = (is_less(c), c.zero());
            c.either(less, zero)
        }
    };
    match cc & 1 {
        0 => holds,
        _ => c.opposite(holds),
    }
}

/// Whether the first operand of a comparison was less, signed: SF differs from OF.
#[inline(always)]
fn is_less<C: Readable>(c: &mut C) -> C::Bool {
    let (negative, overflow) = (c.negative(), c.overflow());
    c.differ(negative, overflow)
}
