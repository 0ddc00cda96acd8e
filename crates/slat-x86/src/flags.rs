//! Lazy arithmetic flags.
//!
//! Most flags are overwritten before anything reads them, so the common operations only record what they did, in few words. A reader
//! computes the flag it needs from the record. Rare operations compute their flags at once. While there is a record, the arithmetic
//! bits of `state.rflags` are stale, except that CF is `x < y` always: so INC and DEC, which leave CF alone, leave `x` and `y` alone.
//!
//! ADD and SUB are one thing seen from two sides: `a + b = r` is `r - b = a`. Both record `x` and `y` of a subtraction, from which CF,
//! OF and AF follow alike; the result of SUB is the difference, that of ADD is `x`.

use crate::Cpu;
use crate::int::Int;
use crate::sem::{Flags, FlagsOf, Now};
use crate::state::flags::{AF, ARITHMETIC, CF, OF, PF, SF, ZF};

/// The last flag-setting operation. Values are zero-extended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lazy {
    /// One of the kinds; the low two bits are the operand size.
    pub(crate) kind: u8,
    /// OF and AF of kind [`GIVEN`], as [`GIVEN_OF`] and [`GIVEN_AF`].
    pub(crate) given: u8,
    pub(crate) x: u64,
    pub(crate) y: u64,
    /// The result, for all kinds but [`ADD`] and [`SUB`].
    pub(crate) result: u64,
}

/// The flags are in `state.rflags`.
pub(crate) const DONE: u8 = 0;
/// `x = y + b`
pub(crate) const ADD: u8 = 4;
/// The result is `x - y`.
pub(crate) const SUB: u8 = 8;
/// OF is clear.
pub(crate) const LOGIC: u8 = 12;
/// The result is one more than before.
pub(crate) const INC: u8 = 16;
/// The result is one less than before.
pub(crate) const DEC: u8 = 20;
/// OF is whether the sign bits of `y` and of the result differ.
pub(crate) const SHL: u8 = 24;
/// OF is whether the two upper bits of the result differ.
pub(crate) const SHR: u8 = 28;
/// OF and AF are in `given`.
pub(crate) const GIVEN: u8 = 32;

pub(crate) const GIVEN_OF: u8 = 1;
pub(crate) const GIVEN_AF: u8 = 2;

/// The `x` that is smaller than no `y`: CF is clear.
pub(crate) const NO_CARRY: u64 = u64::MAX;

fn given(overflow: bool, aux: bool) -> u8 {
    let bit = |is_set, bit| if is_set { bit } else { 0 };
    bit(overflow, GIVEN_OF) | bit(aux, GIVEN_AF)
}

impl Lazy {
    pub(crate) const fn done() -> Self {
        Self {
            kind: DONE,
            given: 0,
            x: NO_CARRY,
            y: 0,
            result: 0,
        }
    }

    fn top(&self) -> u32 {
        (8 << (self.kind & 3)) - 1
    }

    /// Returns the bits of a value that the operand has.
    fn operand(&self, value: u64) -> u64 {
        value & u64::MAX >> (63 - self.top())
    }

    #[inline(always)]
    fn carry(&self) -> bool {
        self.x < self.y
    }

    /// Records that CF is `carry`.
    fn set_carry(&mut self, carry: bool) {
        (self.x, self.y) = (0, carry.into());
    }

    #[inline(always)]
    fn is_zero(&self) -> bool {
        match self.kind & !3 {
            ADD => self.x == 0,
            SUB => self.x == self.y,
            _ => self.result == 0,
        }
    }

    /// Returns the result. Bits above the operand's are undefined.
    #[inline(always)]
    fn result(&self) -> u64 {
        match self.kind & !3 {
            ADD => self.x,
            SUB => self.x.wrapping_sub(self.y),
            _ => self.result,
        }
    }

    #[inline(always)]
    fn is_negative(&self) -> bool {
        self.result() >> self.top() & 1 != 0
    }

    #[inline(always)]
    fn overflow(&self) -> bool {
        let Lazy { x, y, result, .. } = *self;
        let vector = match self.kind & !3 {
            ADD | SUB => (x ^ y) & (x ^ x.wrapping_sub(y)),
            SHL => y ^ result,
            SHR => result ^ result << 1,
            INC => return result == 1 << self.top(),
            DEC => return result == (1 << self.top()) - 1,
            GIVEN => return self.given & GIVEN_OF != 0,
            _ => return false,
        };
        vector >> self.top() & 1 != 0
    }

    fn aux(&self) -> bool {
        let Lazy { x, y, result, .. } = *self;
        match self.kind & !3 {
            ADD | SUB => (x ^ y ^ x.wrapping_sub(y)) & AF != 0,
            INC => result & 15 == 0,
            DEC => result & 15 == 15,
            GIVEN => self.given & GIVEN_AF != 0,
            _ => false,
        }
    }

    fn is_even(&self) -> bool {
        (self.result() as u8).count_ones() & 1 == 0
    }
}

impl Cpu {
    /// Records the flags that an instruction sets.
    #[inline(always)]
    pub(crate) fn note<T: Int>(&mut self, flags: FlagsOf<Now<T>>) {
        let lazy = &mut self.lazy;
        let (kind, result) = match flags {
            Flags::Recorded => return,
            Flags::Add { a, result } => {
                (lazy.x, lazy.y) = (result.zx(), a.zx());
                lazy.kind = ADD | T::SIZE;
                return;
            }
            Flags::Sub { a, b, .. } => {
                (lazy.x, lazy.y) = (a.zx(), b.zx());
                lazy.kind = SUB | T::SIZE;
                return;
            }
            Flags::Logic { carry, result } => {
                match carry {
                    None => lazy.x = NO_CARRY,
                    Some(carry) => lazy.set_carry(carry),
                }
                (LOGIC, result)
            }
            Flags::Inc { result, .. } => (INC, result),
            Flags::Dec { result, .. } => (DEC, result),
            Flags::Shl { before, result } => {
                // CF is the sign of `before`.
                (lazy.x, lazy.y) = (u64::MAX >> (65 - T::BITS), before.zx());
                (SHL, result)
            }
            Flags::Shr { carry, result } => {
                lazy.set_carry(carry);
                (SHR, result)
            }
            Flags::Given {
                carry,
                overflow,
                aux,
                result,
            } => {
                lazy.set_carry(carry);
                lazy.given = given(overflow, aux.unwrap_or(false));
                (GIVEN, result)
            }
            Flags::Compared {
                carry,
                zero,
                parity,
            } => {
                let bit = |is_set, flag| if is_set { flag } else { 0 };
                let value = bit(carry, CF) | bit(zero, ZF) | bit(parity, PF);
                return self.set_flags(ARITHMETIC, value);
            }
            Flags::Rotated { carry, overflow } => return self.rotate_flags(carry, overflow),
        };
        lazy.kind = kind | T::SIZE;
        lazy.result = result.zx();
    }

    /// Records `a - b`.
    #[inline(always)]
    pub(crate) fn note_sub<T: Int>(&mut self, a: T, b: T) {
        let result = T::of(a.zx().wrapping_sub(b.zx()));
        self.note(Flags::Sub { a, b, result });
    }

    /// Records a logical operation.
    #[inline(always)]
    pub(crate) fn note_logic<T: Int>(&mut self, result: T) {
        self.note(Flags::Logic {
            carry: None,
            result,
        });
    }

    /// Sets all arithmetic flags at once: the given ones, and the others computed from the result.
    #[inline(always)]
    pub(crate) fn put_flags<T: Int>(&mut self, carry: bool, overflow: bool, aux: bool, result: T) {
        let aux = Some(aux);
        self.note(Flags::Given {
            carry,
            overflow,
            aux,
            result,
        });
    }

    /// Sets CF and, if given, OF.
    pub(crate) fn rotate_flags(&mut self, carry: bool, overflow: Option<bool>) {
        let lazy = &mut self.lazy;
        if lazy.kind < ADD {
            let bit = |is_set, flag| if is_set { flag } else { 0 };
            let mask = CF | bit(overflow.is_some(), OF);
            let value = bit(carry, CF) | bit(overflow == Some(true), OF);
            return self.set_flags(mask, value);
        }
        let overflow = overflow.unwrap_or_else(|| lazy.overflow());
        lazy.given = given(overflow, lazy.aux());
        lazy.result = lazy.operand(lazy.result());
        lazy.kind = GIVEN | lazy.kind & 3;
        lazy.set_carry(carry);
    }

    /// Sets the flags in `mask` to those in `value` (bits of [`state::flags`](crate::state::flags)).
    pub(crate) fn set_flags(&mut self, mask: u64, value: u64) {
        if mask & ARITHMETIC != ARITHMETIC {
            self.flags();
        }
        self.state.rflags = self.state.rflags & !mask | value & mask;
        self.adopt_flags();
    }

    /// Call after all arithmetic flags were written to `state.rflags`: there is no record any more.
    pub(crate) fn adopt_flags(&mut self) {
        self.lazy.kind = DONE;
        self.lazy.set_carry(self.state.rflags & CF != 0);
    }

    /// Returns RFLAGS with the arithmetic flags computed.
    pub(crate) fn flags(&mut self) -> u64 {
        let lazy = &self.lazy;
        if lazy.kind >= ADD {
            let mut value = 0;
            for (flag, is_set) in [
                (CF, lazy.carry()),
                (PF, lazy.is_even()),
                (AF, lazy.aux()),
                (ZF, lazy.is_zero()),
                (SF, lazy.is_negative()),
                (OF, lazy.overflow()),
            ] {
                value |= if is_set { flag } else { 0 };
            }
            self.state.rflags = self.state.rflags & !ARITHMETIC | value;
            self.lazy.kind = DONE;
        }
        self.state.rflags
    }

    #[inline(always)]
    pub(crate) fn cf(&self) -> bool {
        self.lazy.carry()
    }

    #[inline(always)]
    pub(crate) fn zf(&self) -> bool {
        self.recorded_or(ZF, Lazy::is_zero)
    }

    #[inline(always)]
    fn sf(&self) -> bool {
        self.recorded_or(SF, Lazy::is_negative)
    }

    fn pf(&self) -> bool {
        self.recorded_or(PF, Lazy::is_even)
    }

    #[inline(always)]
    fn of(&self) -> bool {
        self.recorded_or(OF, Lazy::overflow)
    }

    /// Returns what the record says, or if there is none, the flag of RFLAGS.
    #[inline(always)]
    fn recorded_or(&self, flag: u64, says: impl FnOnce(&Lazy) -> bool) -> bool {
        match self.lazy.kind {
            DONE..ADD => self.state.rflags & flag != 0,
            _ => says(&self.lazy),
        }
    }

    /// Whether condition `CC` (the low four bits of Jcc's opcode) holds.
    #[inline(always)]
    pub(crate) fn condition<const CC: u8>(&self) -> bool {
        let holds = match CC >> 1 {
            0 => self.of(),
            1 => self.cf(),
            2 => self.zf(),
            3 => self.cf() || self.zf(),
            4 => self.sf(),
            5 => self.pf(),
            6 => self.sf() != self.of(),
            _ => self.zf() || self.sf() != self.of(),
        };
        holds != (CC & 1 != 0)
    }
}

/// Calls a function that is generic over a condition for the condition `$cc`.
macro_rules! by_condition {
    ($cc:expr, $($f:ident)::+ $(, $t:ty)*) => {
        match $cc & 15 {
            0 => $($f)::+::<$($t,)* 0>,
            1 => $($f)::+::<$($t,)* 1>,
            2 => $($f)::+::<$($t,)* 2>,
            3 => $($f)::+::<$($t,)* 3>,
            4 => $($f)::+::<$($t,)* 4>,
            5 => $($f)::+::<$($t,)* 5>,
            6 => $($f)::+::<$($t,)* 6>,
            7 => $($f)::+::<$($t,)* 7>,
            8 => $($f)::+::<$($t,)* 8>,
            9 => $($f)::+::<$($t,)* 9>,
            10 => $($f)::+::<$($t,)* 10>,
            11 => $($f)::+::<$($t,)* 11>,
            12 => $($f)::+::<$($t,)* 12>,
            13 => $($f)::+::<$($t,)* 13>,
            14 => $($f)::+::<$($t,)* 14>,
            _ => $($f)::+::<$($t,)* 15>,
        }
    };
}
pub(crate) use by_condition;
