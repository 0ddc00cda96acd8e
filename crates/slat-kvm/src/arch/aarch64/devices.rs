//! The devices of the architecture's machines on the bus of a VM, and their timers, of which there are none.

/// A device on the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// A frame of the GIC.
    Gic,
    /// The ITS with this number.
    Its(usize),
}

/// The kind of a timer of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VmTimer {}
