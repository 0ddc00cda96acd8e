//! Computes with integers while the interpreter executes.

use super::{Bits, Compute};
use crate::int::Int;
use std::marker::PhantomData;

/// Computes with integers of type `T`. A CF that an instruction does not change stays in the CPU's record.
pub(crate) struct Now<T>(PhantomData<T>);

impl<T> Now<T> {
    pub(crate) const fn new() -> Self {
        Self(PhantomData)
    }
}

/// Defines functions whose result is one expression of zero-extended operands.
macro_rules! functions {
    ($($name:ident |$a:ident $(, $b:ident)?| $value:expr;)*) => {
        $(
            #[inline(always)]
            fn $name(&mut self, $a: T $(, $b: T)?) -> T {
                let $a = $a.zx();
                $(let $b = $b.zx();)?
                T::of($value)
            }
        )*
    };
}

impl<T: Int> Bits for Now<T> {
    type Value = T;
    type Bool = bool;
    type Kept = ();

    functions! {
        add |a, b| a.wrapping_add(b);
        sub |a, b| a.wrapping_sub(b);
        and |a, b| a & b;
        xor |a, b| a ^ b;
        not |a| !a;
    }

    #[inline(always)]
    fn number(&mut self, n: i64, _: T) -> T {
        T::of(n as u64)
    }
    #[inline(always)]
    fn plus(&mut self, a: T, n: i64) -> T {
        T::of(a.zx().wrapping_add(n as u64))
    }
    #[inline(always)]
    fn no(&mut self) -> bool {
        false
    }
    #[inline(always)]
    fn is_zero(&mut self, a: T) -> bool {
        a.zx() == 0
    }
    #[inline(always)]
    fn is_equal(&mut self, a: T, b: T) -> bool {
        a == b
    }
    #[inline(always)]
    fn is_less(&mut self, a: T, b: T) -> bool {
        a.zx() < b.zx()
    }
    #[inline(always)]
    fn is_at_most(&mut self, a: T, b: T) -> bool {
        a.zx() <= b.zx()
    }
    #[inline(always)]
    fn is_less_signed(&mut self, a: T, b: T) -> bool {
        a.sx() < b.sx()
    }
    #[inline(always)]
    fn is_at_most_signed(&mut self, a: T, b: T) -> bool {
        a.sx() <= b.sx()
    }
    #[inline(always)]
    fn is_negative(&mut self, a: T) -> bool {
        a.top()
    }
    #[inline(always)]
    fn is_even(&mut self, a: T) -> bool {
        (a.zx() as u8).count_ones() & 1 == 0
    }
    #[inline(always)]
    fn bit(&mut self, a: T, n: u32) -> bool {
        a.zx() >> n & 1 != 0
    }
    #[inline(always)]
    fn differ(&mut self, a: bool, b: bool) -> bool {
        a != b
    }
    #[inline(always)]
    fn either(&mut self, a: bool, b: bool) -> bool {
        a || b
    }
    #[inline(always)]
    fn opposite(&mut self, a: bool) -> bool {
        !a
    }
}

/// The error of a division by 0, or of a quotient that does not fit.
pub(crate) struct DivideError;

impl<T: Int> Compute for Now<T> {
    type Fault = DivideError;

    functions! {
        or |a, b| a | b;
        neg |a| a.wrapping_neg();
        shl |a, count| a << (count & 63);
        shr |a, count| a >> (count & 63);
        sar |a, count| (T::of(a).sx() >> (count & 63)) as u64;
        trailing_zeros |a| a.trailing_zeros().min(T::BITS).into();
        leading_zeros |a| (a.leading_zeros() - (64 - T::BITS)).into();
        ones |a| a.count_ones().into();
        swap_bytes |a| a.swap_bytes() >> (64 - T::BITS);
        extend_half |a| {
            let unused = 64 - T::BITS / 2;
            ((a << unused) as i64 >> unused) as u64
        };
        rol |a, count| {
            let n = count as u32 % T::BITS;
            a << n | a.checked_shr(T::BITS - n).unwrap_or(0)
        };
        ror |a, count| {
            let n = count as u32 % T::BITS;
            a >> n | a.checked_shl(T::BITS - n).unwrap_or(0)
        };
    }

    #[inline(always)]
    fn bits(&self, _: T) -> u32 {
        T::BITS
    }
    #[inline(always)]
    fn widened(&mut self, a: bool, _: T) -> T {
        T::of(a.into())
    }
    #[inline(always)]
    fn kept_carry(&mut self) {}
    #[inline(always)]
    fn product(&mut self, a: T, b: T, is_signed: bool) -> (T, T) {
        let product = match is_signed {
            true => (i128::from(a.sx()) * i128::from(b.sx())) as u128,
            false => u128::from(a.zx()) * u128::from(b.zx()),
        };
        (T::of(product as u64), T::of((product >> T::BITS) as u64))
    }
    #[inline(always)]
    fn quotient(&mut self, (low, high): (T, T), divisor: T) -> (T, T) {
        let (low, high, divisor) = (low.zx(), high.zx(), divisor.zx());
        if high == 0 {
            return (T::of(low / divisor), T::of(low % divisor));
        }
        let wide = u128::from(high) << T::BITS | u128::from(low);
        let divisor = u128::from(divisor);
        (
            T::of((wide / divisor) as u64),
            T::of((wide % divisor) as u64),
        )
    }
    #[inline(always)]
    fn fault_if(&mut self, fails: bool) -> Result<(), DivideError> {
        if fails { Err(DivideError) } else { Ok(()) }
    }
    #[inline(always)]
    fn select(&mut self, which: bool, a: T, b: T) -> T {
        if which { a } else { b }
    }
}
