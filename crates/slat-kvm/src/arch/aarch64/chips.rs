//! The interrupt controllers of a VM.

/// arm64's part of the interrupts of a VM. The VM has no interrupt controller, because slat has no GIC yet.
#[derive(Default)]
pub(crate) struct Controllers;
