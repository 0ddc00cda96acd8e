//! Lazy arithmetic flags.
//!
//! Most flags are overwritten before anything reads them, so the common operations only record what they did: the operation,
//! its operands and its result. A reader computes the flag it needs from the record. Rare operations compute their flags at
//! once. While there is a record, the arithmetic bits of `state.rflags` are stale.

use crate::Cpu;
use crate::int::Int;
use crate::state::flags::{AF, ARITHMETIC, CF, OF, PF, SF, ZF};

/// The last flag-setting operation. The low two bits of a kind are the operand size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lazy {
    pub(crate) kind: u8,
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) result: u64,
}

/// The flags are in `state.rflags`.
pub(crate) const DONE: u8 = 0;
/// `result = a + b`
pub(crate) const ADD: u8 = 4;
/// `result = a - b`
pub(crate) const SUB: u8 = 8;
/// CF and OF are clear.
pub(crate) const LOGIC: u8 = 12;
/// `a + 1`: `b` is the carry flag, which stays.
pub(crate) const INC: u8 = 16;
/// `a - 1`: `b` is the carry flag, which stays.
pub(crate) const DEC: u8 = 20;
/// `a` holds CF, OF and AF in bits 0 to 2; the others follow from the result.
pub(crate) const GIVEN: u8 = 24;

impl Lazy {
    pub(crate) const fn done() -> Self {
        Self {
            kind: DONE,
            a: 0,
            b: 0,
            result: 0,
        }
    }
    fn top(&self) -> u32 {
        (8 << (self.kind & 3)) - 1
    }
}

impl Cpu {
    /// Records an operation of one of the lazy kinds.
    #[inline(always)]
    pub(crate) fn note<T: Int>(&mut self, kind: u8, a: T, b: T, result: T) {
        self.lazy = Lazy {
            kind: kind | T::SIZE,
            a: a.zx(),
            b: b.zx(),
            result: result.zx(),
        };
    }

    /// Sets all arithmetic flags at once: the given ones, and the others computed from the result.
    #[inline(always)]
    pub(crate) fn put_flags<T: Int>(&mut self, carry: bool, overflow: bool, aux: bool, result: T) {
        let given = u64::from(carry) | u64::from(overflow) << 1 | u64::from(aux) << 2;
        self.lazy = Lazy {
            kind: GIVEN | T::SIZE,
            a: given,
            b: 0,
            result: result.zx(),
        };
    }

    /// Sets the flags in `mask` to those in `value` (bits of [`state::flags`](crate::state::flags)).
    pub(crate) fn set_flags(&mut self, mask: u64, value: u64) {
        if mask & ARITHMETIC == ARITHMETIC {
            self.lazy.kind = DONE;
        }
        let all = self.flags();
        self.state.rflags = all & !mask | value & mask;
    }

    /// Returns RFLAGS with the arithmetic flags computed.
    pub(crate) fn flags(&mut self) -> u64 {
        if self.lazy.kind >= ADD {
            let mut value = result_flags(self.lazy.result, self.lazy.top());
            value |= if self.cf() { CF } else { 0 };
            value |= if self.of() { OF } else { 0 };
            let Lazy { kind, a, b, result } = self.lazy;
            value |= match kind & !3 {
                ADD | SUB => (a ^ b ^ result) & AF,
                INC if result & 15 == 0 => AF,
                DEC if result & 15 == 15 => AF,
                GIVEN => (a & 4) << 2,
                _ => 0,
            };
            self.state.rflags = self.state.rflags & !ARITHMETIC | value;
            self.lazy.kind = DONE;
        }
        self.state.rflags
    }

    #[inline(always)]
    pub(crate) fn cf(&self) -> bool {
        let lazy = &self.lazy;
        match lazy.kind & !3 {
            DONE => self.state.rflags & CF != 0,
            ADD => lazy.result < lazy.a,
            SUB => lazy.a < lazy.b,
            LOGIC => false,
            GIVEN => lazy.a & 1 != 0,
            _ => lazy.b != 0,
        }
    }

    #[inline(always)]
    pub(crate) fn zf(&self) -> bool {
        if self.lazy.kind < ADD {
            return self.state.rflags & ZF != 0;
        }
        self.lazy.result == 0
    }

    #[inline(always)]
    fn sf(&self) -> bool {
        if self.lazy.kind < ADD {
            return self.state.rflags & SF != 0;
        }
        self.lazy.result >> self.lazy.top() & 1 != 0
    }

    fn pf(&self) -> bool {
        if self.lazy.kind < ADD {
            return self.state.rflags & PF != 0;
        }
        (self.lazy.result as u8).count_ones() & 1 == 0
    }

    #[inline(always)]
    fn of(&self) -> bool {
        let Lazy { kind, a, b, result } = self.lazy;
        let vector = match kind & !3 {
            DONE => return self.state.rflags & OF != 0,
            ADD => (a ^ result) & (b ^ result),
            SUB => (a ^ b) & (a ^ result),
            LOGIC => return false,
            GIVEN => return a & 2 != 0,
            INC => return result == 1 << self.lazy.top(),
            _ => return result == (1 << self.lazy.top()) - 1,
        };
        vector >> self.lazy.top() & 1 != 0
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

/// Returns ZF, SF and PF of a result whose sign bit is bit `top`.
fn result_flags(result: u64, top: u32) -> u64 {
    let mut value = 0;
    if result == 0 {
        value |= ZF;
    }
    if result >> top & 1 != 0 {
        value |= SF;
    }
    if (result as u8).count_ones() & 1 == 0 {
        value |= PF;
    }
    value
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
