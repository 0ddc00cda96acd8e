//! The meaning of those vector instructions that the compiler translates by their meaning.

/// The elements of a vector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Elements {
    Bytes,
    Words,
    Doublewords,
    Quadwords,
    Singles,
    Doubles,
    /// Only the lowest element is computed; the others are the first source's.
    Single,
    Double,
}

/// The operation on each element.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Each {
    And,
    /// AND of the first operand's complement and the second operand.
    AndNot,
    Or,
    Xor,
    /// All ones or all zeroes.
    Equal,
    /// Signed, like the other comparisons and operations that do not say otherwise.
    Greater,
    Add,
    Subtract,
    Multiply,
    Divide,
    Min,
    Max,
    MinUnsigned,
    MaxUnsigned,
    /// Elements of the lower halves of both sources, alternating.
    InterleaveLow,
    InterleaveHigh,
    /// Shift by the second operand.
    ShiftLeft,
    ShiftRight,
    ShiftSigned,
}
