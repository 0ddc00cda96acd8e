//! The meaning of integer instructions, written once for the interpreter and the compiler.
//!
//! An instruction is a type. Its functions compute the result and the flags. They are generic over [`Compute`], which
//! performs the arithmetic. For the interpreter, [`Now`] computes with integers. For the compiler, the translator makes
//! Cranelift values from the same formulas. `exec` and `jit` only fetch operands and write results. So an instruction
//! that is added here exists in both.
//!
//! A flag is computed only when an instruction reads it. [`mod@condition`] computes it from the last operation that has
//! set the flags.

pub(crate) mod alu;
pub(crate) mod bits;
mod condition;
pub(crate) mod division;
pub(crate) mod moves;
mod now;
pub(crate) mod shift;

pub(crate) use condition::{CARRY, Readable, condition};
pub(crate) use now::{DivideError, Now};

/// Arithmetic for computing flags. Values have the width of the operands.
pub(crate) trait Bits {
    type Value: Copy;
    type Bool: Copy;
    /// CF, for an instruction that does not change it.
    type Kept: Copy;

    /// Returns the number `n` with the width of `like`.
    fn number(&mut self, n: i64, like: Self::Value) -> Self::Value;
    fn add(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    fn sub(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    fn and(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    fn xor(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    fn not(&mut self, a: Self::Value) -> Self::Value;
    fn plus(&mut self, a: Self::Value, n: i64) -> Self::Value;

    fn no(&mut self) -> Self::Bool;
    fn is_zero(&mut self, a: Self::Value) -> Self::Bool;
    fn is_equal(&mut self, a: Self::Value, b: Self::Value) -> Self::Bool;
    /// Whether `a` is less than `b`, unsigned.
    fn is_less(&mut self, a: Self::Value, b: Self::Value) -> Self::Bool;
    /// Whether `a` is not greater than `b`, unsigned.
    fn is_at_most(&mut self, a: Self::Value, b: Self::Value) -> Self::Bool;
    fn is_less_signed(&mut self, a: Self::Value, b: Self::Value) -> Self::Bool;
    fn is_at_most_signed(&mut self, a: Self::Value, b: Self::Value) -> Self::Bool;
    fn is_negative(&mut self, a: Self::Value) -> Self::Bool;
    /// Whether the lowest byte of `a` has an even number of ones.
    fn is_even(&mut self, a: Self::Value) -> Self::Bool;
    /// Returns bit `n`.
    fn bit(&mut self, a: Self::Value, n: u32) -> Self::Bool;
    /// Whether exactly one of two values is true.
    fn differ(&mut self, a: Self::Bool, b: Self::Bool) -> Self::Bool;
    fn either(&mut self, a: Self::Bool, b: Self::Bool) -> Self::Bool;
    fn opposite(&mut self, a: Self::Bool) -> Self::Bool;
}

/// Arithmetic for computing results, besides that for flags.
pub(crate) trait Compute: Bits + Sized {
    /// The fault of a computation, if it can fail.
    type Fault;

    /// Returns the width of `a` in bits.
    fn bits(&self, a: Self::Value) -> u32;
    /// Returns 0 or 1, with the width of `like`.
    fn widened(&mut self, a: Self::Bool, like: Self::Value) -> Self::Value;
    fn kept_carry(&mut self) -> Self::Kept;

    fn or(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    fn neg(&mut self, a: Self::Value) -> Self::Value;

    /// Shifts to the left. The interpreter calls this function and the following ones also with counts above the width
    /// of a byte or word. The compiler never does.
    fn shl(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    fn shr(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    fn sar(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    /// Rotates to the left. The count is reduced modulo the width.
    fn rol(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    fn ror(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;

    /// Returns a sum and the carry out.
    #[inline(always)]
    fn sum(
        &mut self,
        a: Self::Value,
        b: Self::Value,
        carry: Self::Bool,
    ) -> (Self::Value, Self::Bool) {
        two_sums(self, a, b, carry)
    }

    /// Returns the halves of a product.
    fn product(
        &mut self,
        a: Self::Value,
        b: Self::Value,
        is_signed: bool,
    ) -> (Self::Value, Self::Value);
    /// Returns the number of trailing zeros. For 0, this function and the next one return the width.
    fn trailing_zeros(&mut self, a: Self::Value) -> Self::Value;
    fn leading_zeros(&mut self, a: Self::Value) -> Self::Value;
    fn ones(&mut self, a: Self::Value) -> Self::Value;
    fn swap_bytes(&mut self, a: Self::Value) -> Self::Value;
    /// Sign-extends the lower half of `a`.
    fn extend_half(&mut self, a: Self::Value) -> Self::Value;
    /// Returns the unsigned quotient and remainder. The dividend is given as two halves. The high half must be below
    /// the divisor.
    fn quotient(
        &mut self,
        halves: (Self::Value, Self::Value),
        divisor: Self::Value,
    ) -> (Self::Value, Self::Value);
    /// If `fails`, ends the instruction with its fault.
    fn fault_if(&mut self, fails: Self::Bool) -> Result<(), Self::Fault>;

    fn select(&mut self, which: Self::Bool, a: Self::Value, b: Self::Value) -> Self::Value;
}

/// Returns a sum and its carry out. This is done by two additions, of which at most one can carry.
#[inline(always)]
pub(crate) fn two_sums<C: Compute>(
    c: &mut C,
    a: C::Value,
    b: C::Value,
    carry: C::Bool,
) -> (C::Value, C::Bool) {
    let part = c.add(a, b);
    let first = c.is_less(part, a);
    let more = c.widened(carry, a);
    let result = c.add(part, more);
    let second = c.is_less(result, more);
    (result, c.either(first, second))
}

/// The change of the arithmetic flags by an instruction: the operation, with the values from which a flag is computed
/// when it is read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Flags<V, B, K> {
    /// The flags do not change. For the compiler, they are the flags of the CPU's record.
    Recorded,
    Add {
        a: V,
        result: V,
    },
    Sub {
        a: V,
        b: V,
        result: V,
    },
    /// OF and AF are clear. CF is `carry`; without `carry`, CF is clear.
    Logic {
        carry: Option<B>,
        result: V,
    },
    Inc {
        carry: K,
        result: V,
    },
    Dec {
        carry: K,
        result: V,
    },
    /// `before` is the operand, shifted by one bit less than the count.
    Shl {
        before: V,
        result: V,
    },
    Shr {
        carry: B,
        result: V,
    },
    /// If there is no `aux`, AF is clear.
    Given {
        carry: B,
        overflow: B,
        aux: Option<B>,
        result: V,
    },
    /// CF, ZF and PF are given, and do not depend on a result. The other flags are clear.
    Compared {
        carry: B,
        zero: B,
        parity: B,
    },
    /// CF and OF change if they have a value here. The other flags never change.
    Rotated {
        carry: Option<B>,
        overflow: Option<B>,
    },
}

impl<V: Copy, B, K> Flags<V, B, K> {
    /// Returns the result from which ZF, SF and PF are computed.
    pub(crate) fn result(&self) -> Option<V> {
        match *self {
            Flags::Recorded | Flags::Compared { .. } | Flags::Rotated { .. } => None,
            Flags::Add { result, .. }
            | Flags::Sub { result, .. }
            | Flags::Logic { result, .. }
            | Flags::Inc { result, .. }
            | Flags::Dec { result, .. }
            | Flags::Shl { result, .. }
            | Flags::Shr { result, .. }
            | Flags::Given { result, .. } => Some(result),
        }
    }
}

/// The flags with the types of `C`.
pub(crate) type FlagsOf<C> = Flags<<C as Bits>::Value, <C as Bits>::Bool, <C as Bits>::Kept>;

/// An operation on one or two operands. It may also have a condition as an input.
pub(crate) trait Operation: 'static {
    /// Whether the result is written. CMP and TEST do not write it.
    const WRITES: bool = true;
    /// The condition that the operation has as an input, if it always has the same one.
    const READS: Option<u8> = None;
    /// Returns the result and the flags. If the operation has only one operand, both arguments are this operand.
    fn apply<C: Compute>(
        c: &mut C,
        a: C::Value,
        b: C::Value,
        holds: C::Bool,
    ) -> (C::Value, FlagsOf<C>);
}

/// The use of the arithmetic flags by an operation.
#[cfg(feature = "jit")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FlagUse {
    Nothing,
    /// Sets all flags, and reads none.
    SetsAll,
    /// Reads flags, or does not change some flags.
    Depends,
}

/// Returns how an operation uses the arithmetic flags. This function applies the operation to arbitrary operands,
/// because the kind of flags that [`Operation::apply`] returns does not depend on the operands.
#[cfg(feature = "jit")]
pub(crate) fn flag_use<A: Operation>() -> FlagUse {
    let (_, flags) = A::apply(&mut Now::<u32>::new(), 1, 1, false);
    match flags {
        _ if A::READS.is_some() => FlagUse::Depends,
        Flags::Recorded => FlagUse::Nothing,
        Flags::Inc { .. } | Flags::Dec { .. } | Flags::Rotated { .. } => FlagUse::Depends,
        Flags::Add { .. }
        | Flags::Sub { .. }
        | Flags::Logic { .. }
        | Flags::Shl { .. }
        | Flags::Shr { .. }
        | Flags::Given { .. }
        | Flags::Compared { .. } => FlagUse::SetsAll,
    }
}

/// Defines types that implement [`Operation`] by formulas.
macro_rules! operations {
    ($($name:ident |$c:ident, $a:ident, $b:ident, $carry:ident| $body:expr $(, READS = $reads:ident)? $(, WRITES = $writes:literal)?)*) => {
        $(
            pub(crate) struct $name;
            impl Operation for $name {
                $(const READS: Option<u8> = Some($reads);)?
                $(const WRITES: bool = $writes;)?
                #[inline(always)]
                fn apply<C: Compute>(
                    $c: &mut C,
                    $a: C::Value,
                    $b: C::Value,
                    $carry: C::Bool,
                ) -> (C::Value, FlagsOf<C>) {
                    $body
                }
            }
        )*
    };
}
use operations;

/// Returns `result`, with the flags of a logical operation.
#[inline(always)]
fn logic<V: Copy, B, K>(result: V) -> (V, Flags<V, B, K>) {
    let carry = None;
    (result, Flags::Logic { carry, result })
}

/// Calls a macro with the operations of a family, followed by the other arguments. Each operation has the name of its
/// mnemonic.
macro_rules! family {
    (binary $then:ident $($rest:tt)*) => {
        $then! {
            [alu::Add alu::Or alu::Adc alu::Sbb alu::And alu::Sub alu::Xor alu::Cmp alu::Test alu::Adcx alu::Adox]
            $($rest)*
        }
    };
    (unary $then:ident $($rest:tt)*) => {
        $then! { [alu::Inc alu::Dec alu::Neg alu::Not moves::Bswap] $($rest)* }
    };
    (scan $then:ident $($rest:tt)*) => {
        $then! { [bits::Bsf bits::Bsr] $($rest)* }
    };
    (bit_test $then:ident $($rest:tt)*) => {
        $then! { [bits::Bt bits::Bts bits::Btr bits::Btc] $($rest)* }
    };
    (sources $then:ident $($rest:tt)*) => {
        $then! {
            [bits::Tzcnt bits::Lzcnt bits::Popcnt bits::Andn bits::Blsr bits::Blsmsk bits::Blsi bits::Bextr bits::Bzhi
             bits::Rorx bits::Shlx bits::Shrx bits::Sarx]
            $($rest)*
        }
    };
    (shift $then:ident $($rest:tt)*) => {
        $then! { [shift::Shl shift::Shr shift::Sar shift::Rol shift::Ror shift::Rcl shift::Rcr] $($rest)* }
    };
}
pub(crate) use family;

/// Calls a function or method that is generic over an [`Operation`], with the operation in a family that has the
/// mnemonic's name. `None`: the family has no such operation.
#[cfg(feature = "jit")]
macro_rules! by_mnemonic {
    ([$($file:ident::$name:ident)*] $mnemonic:expr, $f:ident $arguments:tt) => {
        match $mnemonic {
            $(Mnemonic::$name => Some($f::<$crate::sem::$file::$name>$arguments),)*
            _ => None,
        }
    };
    ([$($file:ident::$name:ident)*] $mnemonic:expr, $this:ident.$f:ident $arguments:tt) => {
        match $mnemonic {
            $(Mnemonic::$name => Some($this.$f::<$crate::sem::$file::$name>$arguments),)*
            _ => None,
        }
    };
    ($mnemonic:expr, $family:ident $($call:tt)*) => {
        $crate::sem::family! { $family by_mnemonic $mnemonic, $($call)* }
    };
}
#[cfg(feature = "jit")]
pub(crate) use by_mnemonic;
