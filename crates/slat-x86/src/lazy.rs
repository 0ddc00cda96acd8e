//! The record of the last operation that has set flags: see `flags`.

/// The record of the last operation that has set flags. Values are zero-extended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lazy {
    /// The kind of the record, such as [`ADD`], plus the logarithm of the operand size in its low two bits.
    pub(crate) kind: u8,
    /// OF and AF of kind [`GIVEN`], as [`GIVEN_OF`] and [`GIVEN_AF`].
    pub(crate) given: u8,
    pub(crate) x: u64,
    pub(crate) y: u64,
    /// The result. Kinds [`ADD`] and [`SUB`] do not use this field.
    pub(crate) result: u64,
}

/// No operation is recorded: the flags are in `state.rflags`.
pub(crate) const DONE: u8 = 0;
/// The operation is a sum: `x` is the result, and `y` is one of the operands.
pub(crate) const ADD: u8 = 4;
/// The operation is the difference `x - y`, which is the result.
pub(crate) const SUB: u8 = 8;
/// The operation is logical, so OF is clear.
pub(crate) const LOGIC: u8 = 12;
/// The result is the operand plus 1.
pub(crate) const INC: u8 = 16;
/// The result is the operand minus 1.
pub(crate) const DEC: u8 = 20;
/// OF is set if the sign bits of `y` and of the result differ.
pub(crate) const SHL: u8 = 24;
/// OF is set if the two upper bits of the result differ.
pub(crate) const SHR: u8 = 28;
/// OF and AF are not computed, but stored in `given`.
pub(crate) const GIVEN: u8 = 32;

pub(crate) const GIVEN_OF: u8 = 1;
pub(crate) const GIVEN_AF: u8 = 2;

/// The largest value of `x`. No `y` is greater, so CF is clear.
pub(crate) const NO_CARRY: u64 = u64::MAX;

/// Encodes OF and AF for field [`Lazy::given`].
pub(crate) fn given(overflow: bool, aux: bool) -> u8 {
    let bit = |is_set, bit| if is_set { bit } else { 0 };
    bit(overflow, GIVEN_OF) | bit(aux, GIVEN_AF)
}

impl Lazy {
    pub(crate) const fn done() -> Self {
        Self {
            kind: DONE,
            given: 0,
            x: NO_CARRY,
            y: 0,
            result: 0,
        }
    }

    /// Returns CF.
    #[inline(always)]
    pub(crate) fn carry(&self) -> bool {
        self.x < self.y
    }

    /// Records that CF is `carry`.
    pub(crate) fn set_carry(&mut self, carry: bool) {
        (self.x, self.y) = (0, carry.into());
    }
}
