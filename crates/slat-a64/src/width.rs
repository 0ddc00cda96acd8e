//! The widths of general registers and integer operations.

/// The width of an integer operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    W,
    X,
}

impl Width {
    pub(crate) const fn bits(self) -> u32 {
        match self {
            Width::W => 32,
            Width::X => 64,
        }
    }
    /// Returns 64 bits if `is_x`, else 32 bits.
    pub(crate) const fn of(is_x: bool) -> Self {
        if is_x { Width::X } else { Width::W }
    }
}
