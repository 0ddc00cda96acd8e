//! The destination of a GSI: there is none without an interrupt controller.

/// A line or a message to which a GSI is routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {}

impl Target {
    /// Whether a GSI must not have both targets.
    pub(crate) fn excludes(self, _other: Target) -> bool {
        match self {}
    }
}
