//! The routes that a VM has until its client sets other routes.

use crate::arch::x86_64::target::{IOAPIC_PINS, PIC_LINES, Target};
use crate::errno::Result;
use crate::heap;
use crate::routing::Routes;

/// Creates the routes of a PC. Each GSI below 16 is routed to the 8259's line and the I/O APIC's pin of the same
/// number, and each GSI from 16 to 23 to a pin.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn pc() -> Result<Routes> {
    let mut routes = heap::with_room((IOAPIC_PINS + 2 * PIC_LINES) as usize)?;
    for gsi in 0..IOAPIC_PINS {
        if gsi < 2 * PIC_LINES {
            routes.push((gsi, Target::Pic(gsi as u8)));
        }
        routes.push((gsi, Target::IoApic(gsi as u8)));
    }
    Ok(Routes::new(routes))
}

#[cfg(test)]
mod tests {
    use crate::arch::x86_64::target::Target;
    use crate::routing::{MAX_ROUTES, Routes};
    use kvm_bindings::*;

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
            Routes::from_client(entries, |entry| Target::of(entry, true, false))
                .map_err(|error| error.errno())
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
        let no_chips = Routes::from_client(&[chip(3, ioapic, 3)], |entry| {
            Target::of(entry, false, false)
        });
        assert_eq!(no_chips.err().map(|error| error.errno()), invalid);
    }

    #[test]
    fn a_pc_has_its_lines_and_pins() {
        let routes = super::pc().unwrap();
        assert_eq!(routes.of(15).count(), 2);
        assert_eq!(routes.of(16).collect::<Vec<_>>(), [Target::IoApic(16)]);
        assert_eq!(routes.of(24).count(), 0);
    }
}
