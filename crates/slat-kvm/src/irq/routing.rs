//! The lines and messages to which a GSI (a client's number for an interrupt) is routed: `KVM_SET_GSI_ROUTING`.

use crate::errno::{Result, fail};
use crate::heap;
use kvm_bindings::*;

/// The number of GSIs, and of routes, that a VM can have: KVM's `KVM_MAX_IRQ_ROUTES`.
pub(crate) const MAX_ROUTES: u32 = 4096;
/// Lines of one 8259.
const PIC_LINES: u32 = 8;
/// Pins of the I/O APIC.
pub(crate) const IOAPIC_PINS: u32 = 24;

/// A line or a message to which a GSI is routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A line of the 8259 pair, 0 to 15.
    Pic(u8),
    /// A pin of the I/O APIC.
    IoApic(u8),
    /// A message.
    Msi {
        /// The address that a device would write to.
        address: u64,
        /// The word that a device would write.
        data: u32,
    },
    /// A source of the SynIC of a virtual processor.
    Sint {
        /// The VP index.
        vp: u32,
        /// The source.
        sint: u32,
    },
}

impl Target {
    /// Whether a GSI must not have both targets. As in KVM, a GSI is routed to each chip at most once, or to one
    /// message, or to one source.
    fn excludes(self, other: Target) -> bool {
        match (self, other) {
            (Target::Pic(one), Target::Pic(another)) => {
                (u32::from(one) < PIC_LINES) == (u32::from(another) < PIC_LINES)
            }
            (Target::Pic(_), Target::IoApic(_)) | (Target::IoApic(_), Target::Pic(_)) => false,
            _ => true,
        }
    }
}

/// All routes of a VM, by GSI.
#[derive(Debug, Default)]
pub(crate) struct Routes(Vec<(u32, Target)>);

impl Routes {
    /// Creates the routes of a PC. Each GSI below 16 is routed to the 8259's line and the I/O APIC's pin of the same
    /// number, and each GSI from 16 to 23 to a pin.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn pc() -> Result<Self> {
        let mut routes = heap::with_room((IOAPIC_PINS + 2 * PIC_LINES) as usize)?;
        for gsi in 0..IOAPIC_PINS {
            if gsi < 2 * PIC_LINES {
                routes.push((gsi, Target::Pic(gsi as u8)));
            }
            routes.push((gsi, Target::IoApic(gsi as u8)));
        }
        Ok(Routes(routes))
    }

    /// Checks a client's table. `has_chips`: routes may name lines and pins. `extended_ids`: see [`Message::from_msi`].
    ///
    /// [`Message::from_msi`]: slat_irqchip::message::Message::from_msi
    ///
    /// # Errors
    /// `EINVAL` for numbers beyond the limits, unknown kinds and flags, and a GSI with two targets that exclude
    /// each other; `ENOMEM`.
    pub(crate) fn from_client(
        entries: &[kvm_irq_routing_entry],
        has_chips: bool,
        extended_ids: bool,
    ) -> Result<Self> {
        let mut routes = heap::with_room(entries.len())?;
        for entry in entries {
            let known = match entry.type_ {
                // The flag says that the id of the device is valid, which other architectures use.
                KVM_IRQ_ROUTING_MSI => KVM_MSI_VALID_DEVID,
                _ => 0,
            };
            if entry.gsi >= MAX_ROUTES || entry.flags & !known != 0 {
                return fail(libc::EINVAL);
            }
            let target = target(entry, has_chips, extended_ids)?;
            // The new route comes after all earlier routes of this GSI in the client's table. VMMs list GSIs in order,
            // so the new route is mostly the last one.
            let at = routes.partition_point(|(gsi, _)| *gsi <= entry.gsi);
            routes.insert(at, (entry.gsi, target));
        }
        let conflict = |group: &[(u32, Target)]| {
            (1..group.len()).any(|i| group[..i].iter().any(|other| other.1.excludes(group[i].1)))
        };
        match routes.chunk_by(|one, next| one.0 == next.0).any(conflict) {
            true => fail(libc::EINVAL),
            false => Ok(Routes(routes)),
        }
    }

    /// Returns the targets of `gsi`; none if there is no route.
    pub(crate) fn of(&self, gsi: u32) -> impl Iterator<Item = Target> + '_ {
        let first = self.0.partition_point(|route| route.0 < gsi);
        (self.0[first..].iter())
            .take_while(move |route| route.0 == gsi)
            .map(|route| route.1)
    }

    /// The first GSI that is routed to `target`. `None`: no GSI is.
    pub(crate) fn gsi_of(&self, target: Target) -> Option<u32> {
        (self.0.iter().find(|route| route.1 == target)).map(|route| route.0)
    }

    /// The messages of the GSIs below `end`.
    pub(crate) fn messages_below(&self, end: u32) -> impl Iterator<Item = (u64, u32)> + '_ {
        (self.0.iter())
            .take_while(move |route| route.0 < end)
            .filter_map(|route| match route.1 {
                Target::Msi { address, data } => Some((address, data)),
                _ => None,
            })
    }
}

fn target(entry: &kvm_irq_routing_entry, has_chips: bool, extended_ids: bool) -> Result<Target> {
    match entry.type_ {
        KVM_IRQ_ROUTING_IRQCHIP if has_chips => {
            // SAFETY: plain integers, whatever the kind of the entry.
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
            // SAFETY: as above.
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
            // SAFETY: as above.
            let kvm_irq_routing_hv_sint { vcpu, sint } = unsafe { entry.u.hv_sint };
            Ok(Target::Sint { vp: vcpu, sint })
        }
        _ => fail(libc::EINVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chip(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
        let mut entry = kvm_irq_routing_entry {
            gsi,
            type_: KVM_IRQ_ROUTING_IRQCHIP,
            ..Default::default()
        };
        entry.u.irqchip = kvm_irq_routing_irqchip { irqchip, pin };
        entry
    }

    fn msi(gsi: u32, data: u32) -> kvm_irq_routing_entry {
        let mut entry = kvm_irq_routing_entry {
            gsi,
            type_: KVM_IRQ_ROUTING_MSI,
            ..Default::default()
        };
        entry.u.msi.data = data;
        entry
    }

    #[test]
    fn a_gsi_leads_to_each_chip_once_or_to_one_message() {
        let check = |entries: &[kvm_irq_routing_entry]| {
            Routes::from_client(entries, true, false).map_err(|error| error.errno())
        };
        let [master, slave, ioapic] = [
            KVM_IRQCHIP_PIC_MASTER,
            KVM_IRQCHIP_PIC_SLAVE,
            KVM_IRQCHIP_IOAPIC,
        ];
        let routes = check(&[msi(9, 5), chip(3, master, 3), chip(3, ioapic, 4)]).unwrap();
        let found: Vec<_> = routes.of(3).collect();
        assert_eq!(found, [Target::Pic(3), Target::IoApic(4)]);
        assert_eq!(routes.of(9).count(), 1);
        assert_eq!(routes.of(4).count(), 0);
        assert_eq!(routes.gsi_of(Target::IoApic(4)), Some(3));
        let refused = |entries: &[kvm_irq_routing_entry]| check(entries).err();
        let invalid = Some(libc::EINVAL);
        assert_eq!(refused(&[chip(3, master, 3), chip(3, master, 4)]), invalid);
        assert_eq!(refused(&[chip(3, master, 3), chip(3, slave, 3)]), None);
        assert_eq!(refused(&[msi(3, 1), chip(3, ioapic, 3)]), invalid);
        assert_eq!(refused(&[msi(3, 1), msi(3, 2)]), invalid);
        assert_eq!(refused(&[chip(3, ioapic, 24)]), invalid);
        assert_eq!(refused(&[chip(3, slave, 8)]), invalid);
        assert_eq!(refused(&[msi(MAX_ROUTES, 0)]), invalid);
        let no_chips = Routes::from_client(&[chip(3, ioapic, 3)], false, false);
        assert_eq!(no_chips.err().map(|error| error.errno()), invalid);
    }

    #[test]
    fn a_pc_has_its_lines_and_pins() {
        let routes = Routes::pc().unwrap();
        assert_eq!(routes.of(15).count(), 2);
        assert_eq!(routes.of(16).collect::<Vec<_>>(), [Target::IoApic(16)]);
        assert_eq!(routes.of(24).count(), 0);
    }
}
