//! The line, the message or the source to which a GSI is routed.

use crate::errno::{Result, fail};
use kvm_bindings::*;

/// The number of lines of each of the two 8259s.
pub(crate) const PIC_LINES: u32 = 8;
/// The number of pins of the I/O APIC.
pub(crate) const IOAPIC_PINS: u32 = 24;

/// A line or a message to which a GSI is routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A line of the 8259 pair, 0 to 15.
    Pic(u8),
    /// A pin of the I/O APIC.
    IoApic(u8),
    /// A message-signalled interrupt (MSI) to local APICs.
    Msi {
        /// The address to which a device writes the message.
        address: u64,
        /// The data that a device writes.
        data: u32,
    },
    /// A source of the SynIC of a virtual processor.
    Sint {
        /// The VP index.
        vp: u32,
        /// The index of the interrupt source (SINT).
        sint: u32,
    },
}

impl Target {
    /// Returns the target that an entry of the client's routing table names. `has_chips` says whether the entry may
    /// name lines and pins of chips. `extended_ids` says whether destinations of messages have 32 bits in the client's
    /// structs.
    ///
    /// # Errors
    /// `EINVAL` for numbers beyond the limits, and for unknown kinds.
    pub(crate) fn of(
        entry: &kvm_irq_routing_entry,
        has_chips: bool,
        extended_ids: bool,
    ) -> Result<Self> {
        match entry.type_ {
            KVM_IRQ_ROUTING_IRQCHIP if has_chips => {
                // SAFETY: all fields of the union consist of integers, so every bit pattern is valid, whatever the kind
                // of the entry.
                let kvm_irq_routing_irqchip { irqchip, pin } = unsafe { entry.u.irqchip };
                match irqchip {
                    KVM_IRQCHIP_PIC_MASTER if pin < PIC_LINES => Ok(Target::Pic(pin as u8)),
                    KVM_IRQCHIP_PIC_SLAVE if pin < PIC_LINES => {
                        Ok(Target::Pic((pin + PIC_LINES) as u8))
                    }
                    KVM_IRQCHIP_IOAPIC if pin < IOAPIC_PINS => Ok(Target::IoApic(pin as u8)),
                    _ => fail(libc::EINVAL),
                }
            }
            KVM_IRQ_ROUTING_MSI => {
                // SAFETY: all fields of the union consist of integers, so every bit pattern is valid, whatever the kind
                // of the entry.
                let msi = unsafe { entry.u.msi };
                if extended_ids && msi.address_hi & 0xff != 0 {
                    return fail(libc::EINVAL);
                }
                Ok(Target::Msi {
                    address: u64::from(msi.address_hi) << 32 | u64::from(msi.address_lo),
                    data: msi.data,
                })
            }
            KVM_IRQ_ROUTING_HV_SINT => {
                // SAFETY: all fields of the union consist of integers, so every bit pattern is valid, whatever the kind
                // of the entry.
                let kvm_irq_routing_hv_sint { vcpu, sint } = unsafe { entry.u.hv_sint };
                Ok(Target::Sint { vp: vcpu, sint })
            }
            _ => fail(libc::EINVAL),
        }
    }

    /// Whether a GSI must not be routed to both `self` and `other`. As in KVM, a GSI is routed either to chips, to each
    /// at most once, or to one message, or to one source.
    pub(crate) fn excludes(self, other: Target) -> bool {
        match (self, other) {
            (Target::Pic(one), Target::Pic(another)) => {
                (u32::from(one) < PIC_LINES) == (u32::from(another) < PIC_LINES)
            }
            (Target::Pic(_), Target::IoApic(_)) | (Target::IoApic(_), Target::Pic(_)) => false,
            _ => true,
        }
    }
}
