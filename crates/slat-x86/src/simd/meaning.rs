//! Descriptions of the vector instructions that the compiler translates itself.

/// The size and type of a vector's elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Elements {
    Bytes,
    Words,
    Doublewords,
    Quadwords,
    Singles,
    Doubles,
    /// One element: only the lowest element is computed; all other elements are copied from the first source.
    Single,
    Double,
}

/// An operation on corresponding elements of two vectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Each {
    And,
    /// ANDs the second operand with the complement of the first operand.
    AndNot,
    Or,
    Xor,
    /// Equality: an element of the result is all ones if the elements are equal, otherwise all zeroes.
    Equal,
    /// "Greater than", signed. All operations are signed unless their names say otherwise.
    Greater,
    Add,
    Subtract,
    Multiply,
    Divide,
    Min,
    Max,
    MinUnsigned,
    MaxUnsigned,
    /// The result's elements are taken from the lower halves of the two sources in turn.
    InterleaveLow,
    InterleaveHigh,
    /// A shift to the left. The second operand is the count.
    ShiftLeft,
    ShiftRight,
    ShiftSigned,
}
