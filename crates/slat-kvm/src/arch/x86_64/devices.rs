//! A PC's interrupt controllers and timer on the bus of a VM: their addresses, and the alarms that they need. Local
//! APICs are not on the bus: a vCPU's access reaches the vCPU's own local APIC before the bus.

use crate::io_bus::{Range, Space};
use slat_irqchip::ioapic;

/// A device of a PC.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Device {
    /// The 8259 pair.
    Pics,
    /// The 8254.
    Timer,
    /// The 8254's port 0x61.
    Speaker,
    IoApic,
}

/// The port of [`Device::Speaker`]. The device's range on KVM's bus is longer, but the device serves only this port.
pub(crate) const SPEAKER: u64 = 0x61;

/// The devices of `KVM_CREATE_IRQCHIP`. The addresses are fixed. As in KVM, if `KVM_SET_IRQCHIP` gives the I/O APIC
/// another address, the guest cannot reach the I/O APIC at the new address.
pub(crate) const PC: [(Range, Device); 4] = [
    (Range::new(Space::Ports, 0x20, 2), Device::Pics),
    (Range::new(Space::Ports, 0xa0, 2), Device::Pics),
    (Range::new(Space::Ports, 0x4d0, 2), Device::Pics),
    (
        Range::new(Space::Memory, ioapic::DEFAULT_BASE, ioapic::WINDOW),
        Device::IoApic,
    ),
];
/// The devices of `KVM_CREATE_PIT2`.
pub(crate) const TIMER: (Range, Device) = (Range::new(Space::Ports, 0x40, 4), Device::Timer);
/// The port 0x61 of the 8254.
pub(crate) const TIMERS_PORT: (Range, Device) =
    (Range::new(Space::Ports, SPEAKER, 4), Device::Speaker);

/// The kind of a timer of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VmTimer {
    /// The 8254.
    Pit,
    /// The timer that ends the pause after an interrupt storm.
    Storm,
}
