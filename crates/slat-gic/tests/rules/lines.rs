//! Lines, pending and active state (IHI 0048, 3.2.4; IHI 0069, 4.1).

use super::*;

/// A level is pending while its line is high, and software cannot clear it then (GICD_ICPENDR).
#[test]
fn a_level_is_pending_while_its_line_is_high() {
    with_both(|mut guest| {
        guest.enable_level(40, 0x80);
        guest.gic.set_spi(40, true).unwrap();
        assert!(guest.bit(0, ISPENDR, 40) && !guest.is_quiet(0));
        guest.set_bit(0, ICPENDR, 40);
        assert!(guest.bit(0, ICPENDR, 40));
        guest.gic.set_spi(40, false).unwrap();
        assert!(!guest.bit(0, ISPENDR, 40) && guest.is_quiet(0));
    });
}

/// A level that software has set pending stays so without its line (GICD_ISPENDR).
#[test]
fn software_latches_a_level() {
    with_both(|mut guest| {
        guest.enable_level(40, 0x80);
        guest.gic.set_spi(40, true).unwrap();
        guest.set_bit(0, ISPENDR, 40);
        guest.gic.set_spi(40, false).unwrap();
        assert!(guest.bit(0, ISPENDR, 40));
        guest.set_bit(0, ICPENDR, 40);
        assert!(!guest.bit(0, ISPENDR, 40));
    });
}

/// An edge-triggered interrupt is pending until it is acknowledged, even if its line falls.
#[test]
fn an_edge_is_latched() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        guest.set_triggers(40, true);
        guest.set_bit(0, ISENABLER, 40);
        guest.gic.set_spi(40, true).unwrap();
        guest.gic.set_spi(40, false).unwrap();
        assert!(guest.bit(0, ISPENDR, 40));
        assert_eq!(guest.ack(0, group), 40);
        assert!(!guest.bit(0, ISPENDR, 40) && guest.bit(0, ISACTIVER, 40));
        // A further edge makes the active interrupt pending, too, so it is signalled again after its EOI.
        guest.gic.set_spi(40, true).unwrap();
        assert!(guest.bit(0, ISPENDR, 40) && guest.is_quiet(0));
        guest.end(0, group, 40);
        assert_eq!(guest.ack(0, group), 40);
    });
}

/// The acknowledgement of a level-triggered interrupt clears its pending latch, but does not lower its line.
#[test]
fn a_level_comes_again_if_its_line_stays_high() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        guest.enable_level(40, 0x80);
        guest.set_bit(0, ISPENDR, 40);
        guest.gic.set_spi(40, true).unwrap();
        assert_eq!(guest.ack(0, group), 40);
        assert!(guest.bit(0, ISPENDR, 40) && guest.bit(0, ISACTIVER, 40) && guest.is_quiet(0));
        guest.end(0, group, 40);
        assert_eq!(guest.ack(0, group), 40);
        guest.gic.set_spi(40, false).unwrap();
        guest.end(0, group, 40);
        assert_eq!(guest.ack(0, group), SPURIOUS);
    });
}

/// The end of a level-triggered SPI (its deactivation) is reported for irqfds that resample. That of an edge-triggered
/// SPI is not.
#[test]
fn ends_of_levels_are_reported() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        guest.enable_level(40, 0x80);
        guest.set_triggers(48, true);
        guest.pend(40, 0x80);
        guest.pend(48, 0x88);
        let ended = |guest: &mut Guest| {
            let mut all = vec![];
            guest.gic.take_ended(|intid| all.push(intid));
            all
        };
        assert_eq!(guest.ack(0, group), 40);
        guest.end(0, group, 40);
        assert_eq!(ended(&mut guest), [40]);
        assert_eq!(guest.ack(0, group), 48);
        guest.end(0, group, 48);
        assert!(ended(&mut guest).is_empty());
        // With EOImode the interrupt ends with its deactivation.
        guest.separate_deactivation(0);
        guest.pend(40, 0x80);
        assert_eq!(guest.ack(0, group), 40);
        guest.end(0, group, 40);
        assert!(ended(&mut guest).is_empty());
        guest.deactivate(0, 40);
        assert_eq!(ended(&mut guest), [40]);
    });
}

/// EOImode separates the drop of the priority from the deactivation (IHI 0048, 3.2.1; IHI 0069, 4.1).
#[test]
fn priority_drop_and_deactivation() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        guest.separate_deactivation(0);
        guest.pend(40, 0x80);
        guest.pend(41, 0x80);
        assert_eq!(guest.ack(0, group), 40);
        assert_eq!(guest.ack(0, group), SPURIOUS, "41 does not preempt 40");
        guest.end(0, group, 40);
        assert_eq!(guest.running(0), 0xff);
        assert!(guest.bit(0, ISACTIVER, 40));
        // 40 can be pending again, but it is active.
        guest.set_bit(0, ISPENDR, 40);
        assert_eq!(guest.ack(0, group), 41);
        guest.end(0, group, 41);
        assert_eq!(guest.ack(0, group), SPURIOUS);
        // Any vCPU can deactivate an SPI, if its own interface separates deactivation.
        guest.deactivate(1, 40);
        assert!(guest.bit(0, ISACTIVER, 40));
        guest.separate_deactivation(1);
        guest.deactivate(1, 40);
        assert!(!guest.bit(0, ISACTIVER, 40));
        assert_eq!(guest.ack(0, group), 40);
    });
}

/// Without EOImode the deactivate register does nothing.
#[test]
fn deactivation_needs_eoi_mode() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        guest.pend(40, 0x80);
        assert_eq!(guest.ack(0, group), 40);
        guest.deactivate(0, 40);
        assert!(guest.bit(0, ISACTIVER, 40));
    });
}

/// Software can set and clear the active state (GICD_ISACTIVER, GICD_ICACTIVER).
#[test]
fn software_changes_the_active_state() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        guest.pend(40, 0x80);
        guest.set_bit(0, ISACTIVER, 40);
        assert!(guest.is_quiet(0) && guest.bit(0, ICACTIVER, 40));
        guest.set_bit(0, ICACTIVER, 40);
        assert_eq!(guest.ack(0, group), 40);
    });
}

/// A disabled interrupt becomes pending and is not signaled (GICD_ISENABLER).
#[test]
fn a_disabled_interrupt_waits() {
    with_both(|mut guest| {
        guest.set_bit(0, ISPENDR, 40);
        assert!(guest.bit(0, ISPENDR, 40) && guest.is_quiet(0));
        guest.set_bit(0, ISENABLER, 40);
        assert!(!guest.is_quiet(0));
        guest.set_bit(0, ICENABLER, 40);
        assert!(guest.is_quiet(0) && !guest.bit(0, ISENABLER, 40));
    });
}

/// PPIs are levels of one vCPU, SGIs are edges and enabled after reset; software cannot change that (GICD_ICFGR).
#[test]
fn private_interrupts_have_fixed_triggers() {
    with_both(|mut guest| {
        for (intid, triggers) in [(0, 0xaaaa_aaaa), (16, 0)] {
            let (frame, offset) = place(guest.model, 1, 0xc00, 2, intid);
            guest.write(1, frame, offset, !triggers);
            assert_eq!(guest.read(1, frame, offset), triggers);
        }
        assert!(guest.bit(1, ISENABLER, 15) && !guest.bit(1, ISENABLER, 16));
        guest.set_bit(1, ISENABLER, 27);
        guest.gic.set_ppi(1, 27, true).unwrap();
        assert!(guest.is_quiet(0) && !guest.is_quiet(1));
        guest.gic.set_ppi(1, 27, false).unwrap();
        assert!(guest.is_quiet(1));
        assert!(guest.gic.set_ppi(0, 15, true).is_err() && guest.gic.set_ppi(0, 32, true).is_err());
        assert!(guest.gic.set_ppi(2, 27, true).is_err());
        assert!(guest.gic.set_spi(31, true).is_err() && guest.gic.set_spi(96, true).is_err());
    });
}

/// KVM's SPIs are edges after reset, and their lines reach the first vCPU.
#[test]
fn spis_are_edges_after_reset() {
    with_both(|mut guest| {
        assert_eq!(guest.read(0, DIST, 0xc08), 0xaaaa_aaaa);
        guest.set_bit(0, ISENABLER, 95);
        guest.gic.set_spi(95, true).unwrap();
        assert!(!guest.is_quiet(0) && guest.is_quiet(1));
    });
}

/// The owner hears of each vCPU whose signals have changed, once.
#[test]
fn changed_vcpus_are_named() {
    with_both(|mut guest| {
        guest.changed();
        for vcpu in 0..2 {
            guest.set_bit(vcpu, ISENABLER, 27);
            guest.gic.set_ppi(vcpu, 27, true).unwrap();
        }
        assert_eq!(guest.changed(), [0, 1]);
        assert!(guest.changed().is_empty());
        // A second interrupt changes nothing.
        guest.pend(40, 0x80);
        assert!(guest.changed().is_empty());
        // The distributor concerns all vCPUs.
        guest.write(0, DIST, 0, 0);
        assert_eq!(guest.changed(), [0, 1]);
        assert!(guest.is_quiet(0) && guest.is_quiet(1));
    });
}
