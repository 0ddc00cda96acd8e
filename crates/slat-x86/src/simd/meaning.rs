//! The vector instructions that the compiler translates itself, described by their meaning.

/// The elements of a vector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Elements {
    Bytes,
    Words,
    Doublewords,
    Quadwords,
    Singles,
    Doubles,
    /// Only the lowest element is computed; the other elements are copied from the first source.
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
    /// Equality: an element becomes all ones or all zeroes.
    Equal,
    /// Signed comparison. Operations are signed unless their names say otherwise.
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
