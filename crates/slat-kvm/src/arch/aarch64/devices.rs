//! The devices of the architecture's machines on the bus of a VM, and their timers: there are none.

/// A device on the bus.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Device {}

/// The kind of a timer of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VmTimer {}
