//! The compiler of the guests' code, which does not exist yet.

/// Starts the compiler's threads: there are none.
pub(crate) fn prepare() {}

/// Returns the reason why no code is compiled.
pub(crate) fn why_not() -> Option<&'static str> {
    Some("slat has no compiler for arm64 guests yet")
}
