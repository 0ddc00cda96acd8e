//! The devices on the bus of an arm64 VM. The VM itself has no timers.

/// A device on the VM's MMIO bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// One of the GIC's MMIO frames.
    Gic,
    /// The ITS with this number.
    Its(usize),
}

/// The kind of a timer of a VM. On arm64 there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VmTimer {}
