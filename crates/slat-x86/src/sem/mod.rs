//! The meaning of integer instructions, written once for the interpreter and the compiler.
//!
//! Each instruction is a type, with a function that computes the result and the flags. The function is generic over
//! [`Compute`], which performs the arithmetic. For the interpreter, [`Now`] computes with integers. For the compiler,
//! the translator makes Cranelift values from the same formulas. `exec` and `jit` only fetch operands and write
//! results. So an instruction that is added here exists in both. The exchange of CMPXCHG and XCHG is an exception:
//! it is an access to memory, which each of the two makes in its own way. Only CMPXCHG's flags come from here.
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

/// The arithmetic that flags are computed with. Values have the width of the operands.
pub(crate) trait Bits {
    type Value: Copy;
    type Bool: Copy;
    /// Represents CF in the flags of an instruction that does not change CF.
    type Kept: Copy;

    /// Returns the number `n`, with the width of `like`.
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
    /// Whether `a` is less than or equal to `b`, unsigned.
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

/// The arithmetic that results are computed with, in addition to [`Bits`].
pub(crate) trait Compute: Bits + Sized {
    /// The fault of a computation that can fail.
    type Fault;

    /// Returns the width of `a` in bits.
    fn bits(&self, a: Self::Value) -> u32;
    /// Returns 1 if `a` is true, else 0, with the width of `like`.
    fn widened(&mut self, a: Self::Bool, like: Self::Value) -> Self::Value;
    fn kept_carry(&mut self) -> Self::Kept;

    fn or(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    fn neg(&mut self, a: Self::Value) -> Self::Value;

    /// Shifts to the left. For bytes and words, the interpreter calls this function and the following shifts also with
    /// counts above the width; the compiler never does.
    fn shl(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    fn shr(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    fn sar(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    /// Rotates to the left by the count modulo the width.
    fn rol(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    fn ror(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;

    /// Returns the sum of the operands and of the carry in, and the carry out.
    #[inline(always)]
    fn sum(
        &mut self,
        a: Self::Value,
        b: Self::Value,
        carry: Self::Bool,
    ) -> (Self::Value, Self::Bool) {
        two_sums(self, a, b, carry)
    }

    /// Returns the low and the high half of a product.
    fn product(
        &mut self,
        a: Self::Value,
        b: Self::Value,
        is_signed: bool,
    ) -> (Self::Value, Self::Value);
    /// Returns the number of trailing zeros. For 0, this function and [`leading_zeros`](Self::leading_zeros) return the
    /// width.
    fn trailing_zeros(&mut self, a: Self::Value) -> Self::Value;
    fn leading_zeros(&mut self, a: Self::Value) -> Self::Value;
    fn ones(&mut self, a: Self::Value) -> Self::Value;
    fn swap_bytes(&mut self, a: Self::Value) -> Self::Value;
    /// Sign-extends the lower half of `a`.
    fn extend_half(&mut self, a: Self::Value) -> Self::Value;
    /// Returns the unsigned quotient and remainder of a dividend that is given as two halves. The high half must be
    /// less than the divisor.
    fn quotient(
        &mut self,
        halves: (Self::Value, Self::Value),
        divisor: Self::Value,
    ) -> (Self::Value, Self::Value);
    /// Ends the instruction with its fault if `fails`.
    fn fault_if(&mut self, fails: Self::Bool) -> Result<(), Self::Fault>;

    fn select(&mut self, which: Self::Bool, a: Self::Value, b: Self::Value) -> Self::Value;
}

/// Returns a sum and its carry out. Of the two additions, at most one carries.
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

/// How an instruction changes the arithmetic flags: the kind of operation, and the values from which each flag is
/// computed when an instruction reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Flags<V, B, K> {
    /// The flags are those that the CPU holds. As the result of an instruction: the instruction changes no flag. As the
    /// source of flags ([`Readable::flags`](condition::Readable::flags)): no value is known from which to compute a
    /// flag, so it is read from the CPU: by the interpreter from RFLAGS, because the CPU has no record; by the compiler
    /// from the record, or from RFLAGS if there is none.
    InCpu,
    Add {
        a: V,
        result: V,
    },
    Sub {
        a: V,
        b: V,
        result: V,
    },
    /// OF and AF are clear. CF is `carry`, or clear if `carry` is `None`.
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
    /// A left shift. `before` is the operand shifted by one bit less than the count.
    Shl {
        before: V,
        result: V,
    },
    Shr {
        carry: B,
        result: V,
    },
    /// The flags have these values. AF is clear if `aux` is `None`.
    Given {
        carry: B,
        overflow: B,
        aux: Option<B>,
        result: V,
    },
    /// CF, ZF and PF have these values; the other flags are clear.
    Compared {
        carry: B,
        zero: B,
        parity: B,
    },
    /// CF and OF change, each unless its value is `None`. The other flags do not change.
    Rotated {
        carry: Option<B>,
        overflow: Option<B>,
    },
}

impl<V: Copy, B, K> Flags<V, B, K> {
    /// Returns the result from which ZF, SF and PF are computed, if they are.
    pub(crate) fn result(&self) -> Option<V> {
        match *self {
            Flags::InCpu | Flags::Compared { .. } | Flags::Rotated { .. } => None,
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

/// [`Flags`] with the types of `C`.
pub(crate) type FlagsOf<C> = Flags<<C as Bits>::Value, <C as Bits>::Bool, <C as Bits>::Kept>;

/// An operation on one or two operands, and possibly a flag or condition.
pub(crate) trait Operation: 'static {
    /// Whether the result is written: not by CMP and TEST.
    const WRITES: bool = true;
    /// The condition that the operation reads, if the operation always reads the same condition.
    const READS: Option<u8> = None;
    /// Returns the result and the flags. For an operation with one operand, both arguments are this operand.
    fn apply<C: Compute>(
        c: &mut C,
        a: C::Value,
        b: C::Value,
        holds: C::Bool,
    ) -> (C::Value, FlagsOf<C>);
}

/// How an operation uses the arithmetic flags.
#[cfg(feature = "jit")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FlagUse {
    Nothing,
    /// Sets all flags, and reads none.
    SetsAll,
    /// Reads flags, or leaves some flags unchanged.
    Depends,
}

/// Returns how an operation uses the arithmetic flags. Applies the operation to arbitrary operands to find out, because
/// the kind of [`Flags`] that [`Operation::apply`] returns does not depend on the operands.
#[cfg(feature = "jit")]
pub(crate) fn flag_use<A: Operation>() -> FlagUse {
    let (_, flags) = A::apply(&mut Now::<u32>::new(), 1, 1, false);
    match flags {
        _ if A::READS.is_some() => FlagUse::Depends,
        Flags::InCpu => FlagUse::Nothing,
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

/// Returns `result`, and the flags after a logical operation with this result.
#[inline(always)]
fn logic<V: Copy, B, K>(result: V) -> (V, Flags<V, B, K>) {
    let carry = None;
    (result, Flags::Logic { carry, result })
}

/// Calls a macro with the operations of a family and with further arguments. The name of each operation is its
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

/// Calls a function or method that is generic over an [`Operation`], with the operation whose name is the mnemonic.
/// `None`: the family has no such operation.
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
