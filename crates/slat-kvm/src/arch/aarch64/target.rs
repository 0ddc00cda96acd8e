//! The line or the message to which a GSI is routed.

use crate::errno::{Result, fail};
use kvm_bindings::*;

/// The number of lines that routes can name: KVM's `KVM_IRQCHIP_NUM_PINS`. It is the number of SPIs, whose INTIDs are
/// 32 to 1019.
const LINES: u32 = 1020 - 32;

/// A line or a message to which a GSI is routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// The line of an SPI, counted from the first SPI.
    Spi(u32),
    /// A message-signalled interrupt (MSI), which the ITS translates.
    Msi(Msi),
}

/// A message-signalled interrupt (MSI): a device raises it by a write of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Msi {
    /// The address to which the device writes the word.
    pub(crate) address: u64,
    /// The word that the device writes: the number of the interrupt among the device's interrupts, which Arm calls
    /// EventID.
    pub(crate) event: u32,
    /// The ID of the device at the ITS (Arm: DeviceID), if the client has given it.
    pub(crate) device: Option<u32>,
}

impl Msi {
    /// Makes a message of the fields of the API. `flags` says whether `device` is valid.
    pub(crate) fn new([low, high]: [u32; 2], event: u32, flags: u32, device: u32) -> Self {
        Msi {
            address: u64::from(high) << 32 | u64::from(low),
            event,
            device: (flags & KVM_MSI_VALID_DEVID != 0).then_some(device),
        }
    }
}

impl Target {
    /// Returns the target that an entry of the client's routing table names.
    ///
    /// # Errors
    /// `EINVAL` for numbers beyond the limits, and for unknown kinds.
    pub(crate) fn of(entry: &kvm_irq_routing_entry) -> Result<Self> {
        match entry.type_ {
            KVM_IRQ_ROUTING_IRQCHIP => {
                // SAFETY: all fields of the union consist of integers, so every bit pattern is valid, whatever the kind
                // of the entry.
                let kvm_irq_routing_irqchip { irqchip, pin } = unsafe { entry.u.irqchip };
                match irqchip < KVM_NR_IRQCHIPS && pin < LINES {
                    true => Ok(Target::Spi(pin)),
                    false => fail(libc::EINVAL),
                }
            }
            KVM_IRQ_ROUTING_MSI => {
                // SAFETY: all fields of the union consist of integers, so every bit pattern is valid, whatever the kind
                // of the entry.
                let msi = unsafe { entry.u.msi };
                // SAFETY: both fields of the union are integers, so every bit pattern is valid.
                let device = unsafe { msi.__bindgen_anon_1.devid };
                let address = [msi.address_lo, msi.address_hi];
                Ok(Target::Msi(Msi::new(
                    address,
                    msi.data,
                    entry.flags,
                    device,
                )))
            }
            _ => fail(libc::EINVAL),
        }
    }

    /// Whether a GSI that has the target `self` must not have a second target. As in KVM, a GSI is routed to only one
    /// line or one message.
    pub(crate) fn excludes(self, _other: Target) -> bool {
        true
    }
}
