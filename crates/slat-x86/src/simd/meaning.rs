//! What vector instructions mean, of those that the compiler translates by their meaning.

/// The elements of a vector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Elements {
    Bytes,
    Words,
    Doublewords,
    Quadwords,
    Singles,
    Doubles,
    /// The lowest one alone; the others are the first source's.
    Single,
    Double,
}

/// What becomes of each element.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Each {
    And,
    /// The first one's complement, and the second one.
    AndNot,
    Or,
    Xor,
    /// All ones or all zeroes.
    Equal,
    /// With sign, like the others that do not say otherwise.
    Greater,
    Add,
    Subtract,
    Multiply,
    Divide,
    Min,
    Max,
    MinUnsigned,
    MaxUnsigned,
    /// The elements of the lower halves of both, in turns.
    InterleaveLow,
    InterleaveHigh,
    /// By the second operand.
    ShiftLeft,
    ShiftRight,
    ShiftSigned,
}
