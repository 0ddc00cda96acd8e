//! The widths of general registers.

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
    /// Returns the width that bit `n` of an instruction selects.
    pub(crate) const fn of(is_x: bool) -> Self {
        if is_x { Width::X } else { Width::W }
    }
}
