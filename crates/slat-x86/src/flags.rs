//! Lazy arithmetic flags.
//!
//! Most flags are overwritten before anything reads them. So common operations only record their operands and their
//! result. When an instruction reads a flag, it computes that flag from the record, by `sem::condition`. Rare
//! operations compute their flags at once. While there is a record, the arithmetic bits of `state.rflags` are stale. In
//! every record, CF is `x < y`. So INC and DEC, which do not change CF, leave `x` and `y` unchanged.
//!
//! ADD and SUB can be handled alike, because `a + b = r` means `r - b = a`. Both record as `x` and `y` the operands of
//! a subtraction, from which CF, OF and AF follow. The result of SUB is the difference of `x` and `y`. The result of
//! ADD is `x`.

use crate::Cpu;
use crate::int::Int;
pub(crate) use crate::lazy::*;
use crate::sem::alu::Cmp;
use crate::sem::{Bits, Flags, FlagsOf, Now, Operation, Readable, condition};
use crate::state::flags::{AF, ARITHMETIC, CF, OF, PF, SF, ZF};

/// Reads flags from the record, or from RFLAGS if there is no record. Values are zero-extended, except that the bits of
/// a difference beyond the operand's size are undefined.
struct Read<'a>(&'a Cpu);

impl Read<'_> {
    /// Returns the position of the operand's highest bit.
    #[inline(always)]
    fn top(&self) -> u32 {
        (8 << (self.0.lazy.kind & 3)) - 1
    }

    /// Returns a value shifted so that its sign bit is bit 63.
    #[inline(always)]
    fn signed(&self, a: u64) -> i64 {
        (a << (63 - self.top())) as i64
    }
}

/// Defines functions whose result is one expression of their arguments.
macro_rules! functions {
    ($($name:ident($($a:ident: $of:ty),*) -> $result:ty = $value:expr;)*) => {
        $(
            #[inline(always)]
            fn $name(&mut self $(, $a: $of)*) -> $result {
                $value
            }
        )*
    };
}

impl Bits for Read<'_> {
    type Value = u64;
    type Bool = bool;
    type Kept = ();

    functions! {
        number(n: i64, _like: u64) -> u64 = n as u64;
        add(a: u64, b: u64) -> u64 = a.wrapping_add(b);
        sub(a: u64, b: u64) -> u64 = a.wrapping_sub(b);
        and(a: u64, b: u64) -> u64 = a & b;
        xor(a: u64, b: u64) -> u64 = a ^ b;
        not(a: u64) -> u64 = !a;
        plus(a: u64, n: i64) -> u64 = a.wrapping_add(n as u64);
        no() -> bool = false;
        is_zero(a: u64) -> bool = a == 0;
        is_equal(a: u64, b: u64) -> bool = a == b;
        is_less(a: u64, b: u64) -> bool = a < b;
        is_at_most(a: u64, b: u64) -> bool = a <= b;
        is_even(a: u64) -> bool = (a as u8).count_ones() & 1 == 0;
        bit(a: u64, n: u32) -> bool = a >> n & 1 != 0;
        differ(a: bool, b: bool) -> bool = a != b;
        either(a: bool, b: bool) -> bool = a || b;
        opposite(a: bool) -> bool = !a;
    }

    #[inline(always)]
    fn is_less_signed(&mut self, a: u64, b: u64) -> bool {
        self.signed(a) < self.signed(b)
    }
    #[inline(always)]
    fn is_at_most_signed(&mut self, a: u64, b: u64) -> bool {
        self.signed(a) <= self.signed(b)
    }
    #[inline(always)]
    fn is_negative(&mut self, a: u64) -> bool {
        a >> self.top() & 1 != 0
    }
}

impl Readable for Read<'_> {
    #[inline(always)]
    fn flags(&mut self) -> FlagsOf<Self> {
        let lazy = &self.0.lazy;
        let (carry, result) = (lazy.carry(), lazy.result);
        match lazy.kind & !3 {
            ADD => Flags::Add {
                a: lazy.y,
                result: lazy.x,
            },
            SUB => Flags::Sub {
                a: lazy.x,
                b: lazy.y,
                result: lazy.x.wrapping_sub(lazy.y),
            },
            LOGIC => Flags::Logic {
                carry: Some(carry),
                result,
            },
            INC => Flags::Inc { carry: (), result },
            DEC => Flags::Dec { carry: (), result },
            SHL => Flags::Shl {
                before: lazy.y,
                result,
            },
            SHR => Flags::Shr { carry, result },
            GIVEN => Flags::Given {
                carry,
                overflow: lazy.given & GIVEN_OF != 0,
                aux: Some(lazy.given & GIVEN_AF != 0),
                result,
            },
            _ => Flags::InCpu,
        }
    }
    #[inline(always)]
    fn recorded(&mut self, flag: u64) -> bool {
        self.0.state.rflags & flag != 0
    }
    #[inline(always)]
    fn kept(&mut self, (): ()) -> bool {
        self.0.lazy.carry()
    }
    /// Returns CF, which is `x < y` in every record.
    #[inline(always)]
    fn carry(&mut self) -> bool {
        self.0.lazy.carry()
    }
}

impl Cpu {
    /// Records the flags that an instruction sets, as `sem` has returned them.
    #[inline(always)]
    pub(crate) fn note<T: Int>(&mut self, flags: FlagsOf<Now<T>>) {
        let lazy = &mut self.lazy;
        let (kind, result) = match flags {
            Flags::InCpu => return,
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
                // CF is the last bit that was shifted out: the sign bit of `before`. Choose `x` so that `x < y` has the
                // value of this bit.
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

    /// Records the flags of a comparison of `a` with `b`.
    #[inline(always)]
    pub(crate) fn note_comparison<T: Int>(&mut self, a: T, b: T) {
        self.note(Cmp::apply(&mut Now::new(), a, b, false).1);
    }

    /// Sets all arithmetic flags: CF, OF and AF from arguments, and ZF, SF and PF from the result.
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

    /// Sets CF and OF, each only if its argument is not `None`.
    pub(crate) fn rotate_flags(&mut self, carry: Option<bool>, overflow: Option<bool>) {
        let mut read = Read(self);
        let top = read.top();
        let Some(Flags::Given {
            carry,
            overflow,
            aux,
            result,
        }) = read.rotated(carry, overflow)
        else {
            let (mut mask, mut value) = (0, 0);
            for (flag, is_set) in [(CF, carry), (OF, overflow)] {
                mask |= if is_set.is_some() { flag } else { 0 };
                value |= if is_set == Some(true) { flag } else { 0 };
            }
            return self.set_flags(mask, value);
        };
        let lazy = &mut self.lazy;
        lazy.given = given(overflow, aux.unwrap_or(false));
        lazy.result = result & u64::MAX >> (63 - top);
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

    /// Ends the record of lazy flags. Call after all arithmetic flags were written to `state.rflags`.
    pub(crate) fn adopt_flags(&mut self) {
        self.lazy.kind = DONE;
        self.lazy.set_carry(self.state.rflags & CF != 0);
    }

    /// Returns RFLAGS with the arithmetic flags computed.
    pub(crate) fn flags(&mut self) -> u64 {
        if self.lazy.kind >= ADD {
            let mut read = Read(self);
            let aux = read.aux();
            let mut value = 0;
            for (flag, is_set) in [
                (CF, read.carry()),
                (PF, read.parity()),
                (AF, aux.unwrap_or(false)),
                (ZF, read.zero()),
                (SF, read.negative()),
                (OF, read.overflow()),
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
        Read(self).carry()
    }

    #[inline(always)]
    pub(crate) fn zf(&self) -> bool {
        Read(self).zero()
    }

    /// Returns the flag that operation `A` needs as an input, or `false` if it needs none.
    #[inline(always)]
    pub(crate) fn input_of<A: Operation>(&self) -> bool {
        A::READS.is_some_and(|cc| condition(&mut Read(self), cc))
    }

    /// Whether condition `CC` holds. `CC` is the low four bits of Jcc's opcode.
    #[inline(always)]
    pub(crate) fn condition<const CC: u8>(&self) -> bool {
        condition(&mut Read(self), CC)
    }
}

/// Calls a function that is generic over a condition, for the condition number `$cc`.
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
