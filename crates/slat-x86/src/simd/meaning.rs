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

/// An operation on each element of two vectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Each {
    And,
    /// AND of the first operand's complement and the second operand.
    AndNot,
    Or,
    Xor,
    /// Equality: an element of the result is all ones if the elements are equal, otherwise all zeroes.
    Equal,
    /// "Greater than", signed. Operations are signed unless their names say otherwise.
    Greater,
    Add,
    Subtract,
    Multiply,
    Divide,
    Min,
    Max,
    MinUnsigned,
    MaxUnsigned,
    /// The elements of the lower halves of both sources, in turn.
    InterleaveLow,
    InterleaveHigh,
    /// A shift by the second operand.
    ShiftLeft,
    ShiftRight,
    ShiftSigned,
}
