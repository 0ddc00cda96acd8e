//! Priorities: mask, grouping, preemption (IHI 0048, 3.3; IHI 0069, 4.8).

use super::*;

/// The highest priority wins, and of equal ones the lowest INTID.
#[test]
fn the_highest_priority_wins() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        for (intid, priority) in [(50, 0x80), (45, 0x40), (44, 0x40), (60, 0xf0)] {
            guest.pend(intid, priority);
        }
        for expected in [44, 45, 50, 60] {
            assert_eq!(guest.ack(0, group), expected);
            guest.end(0, group, expected);
        }
        assert_eq!(guest.ack(0, group), SPURIOUS);
    });
}

/// Five bits of a priority exist; the others read as zero (GICD_IPRIORITYR).
#[test]
fn five_bits_of_priority_exist() {
    with_both(|mut guest| {
        guest.set_priority(0, 41, 0xff);
        assert_eq!(guest.read(0, DIST, 0x428), 0x0000_f800);
        guest.write(0, DIST, 0x428, 0xffff_ffff);
        assert_eq!(guest.read(0, DIST, 0x428), 0xf8f8_f8f8);
        guest.set_mask(0, 0xff);
        let mask = match guest.model {
            Model::V2 => guest.read(0, CPU, 4),
            Model::V3 => guest.get(0, Icc::Pmr) as u32,
        };
        assert_eq!(mask, 0xf8);
    });
}

/// Only a priority higher than the mask is signaled (IHI 0048, 3.3.2; IHI 0069, 4.8).
#[test]
fn the_mask_is_exclusive() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        guest.pend(40, 0x80);
        guest.set_mask(0, 0x80);
        assert!(guest.is_quiet(0));
        assert_eq!(guest.ack(0, group), SPURIOUS);
        guest.set_mask(0, 0x88);
        assert_eq!(guest.ack(0, group), 40);
    });
}

/// Changing the priority of a pending interrupt takes effect (KVM's, too, at the next entry).
#[test]
fn priorities_of_pending_interrupts_change() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        guest.pend(40, 0x80);
        guest.pend(41, 0x90);
        guest.set_priority(0, 41, 0x10);
        assert_eq!(guest.ack(0, group), 41);
        guest.set_priority(0, 41, 0xf0);
        assert_eq!(
            guest.running(0),
            0x10,
            "the running priority is the one of the acknowledgement"
        );
    });
}

/// A higher group priority preempts, an equal one does not; an EOI restores the running priority from before (IHI 0048,
/// 3.3.1; IHI 0069, 4.8).
#[test]
fn preemption() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        guest.pend(40, 0x80);
        assert_eq!(guest.ack(0, group), 40);
        assert_eq!(guest.running(0), 0x80);
        guest.pend(41, 0x80);
        assert!(guest.is_quiet(0));
        guest.pend(42, 0x78);
        assert!(!guest.is_quiet(0));
        assert_eq!(guest.ack(0, group), 42);
        assert_eq!(guest.running(0), 0x78);
        guest.end(0, group, 42);
        assert_eq!(guest.running(0), 0x80);
        guest.end(0, group, 40);
        assert_eq!(guest.running(0), 0xff);
        assert_eq!(guest.ack(0, group), 41);
    });
}

/// The binary point divides the priority; the subpriority orders, but does not preempt (IHI 0048, 3.3.3).
#[test]
fn priority_grouping() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        // Bits 7:6 are the group priority: binary point 5 of group 0, 6 of group 1.
        guest.set_binary_point(0, group, 5 + group);
        guest.pend(40, 0x80);
        guest.pend(41, 0x90);
        assert_eq!(guest.ack(0, group), 40);
        guest.pend(42, 0x88);
        guest.set_priority(0, 42, 0xa8);
        assert!(guest.is_quiet(0));
        guest.pend(43, 0x78);
        assert_eq!(guest.ack(0, group), 43);
        assert_eq!(
            guest.running(0),
            0x40,
            "the running priority is a group priority"
        );
        guest.end(0, group, 43);
        guest.end(0, group, 40);
        assert_eq!(guest.ack(0, group), 41, "0x90 before 0xa8");
    });
}

/// The smallest binary points make all five bits the group priority (GICC_BPR, GICC_ABPR, ICC_BPR0_EL1, ICC_BPR1_EL1).
#[test]
fn binary_points_have_a_minimum() {
    with_both(|mut guest| {
        for (group, least) in [(0, 2), (1, 3)] {
            let read = |guest: &mut Guest| match (guest.model, group) {
                (Model::V2, 0) => guest.read(0, CPU, 0x08),
                (Model::V2, _) => guest.read(0, CPU, 0x1c),
                (Model::V3, 0) => guest.get(0, Icc::Bpr(Group::Zero)) as u32,
                (Model::V3, _) => guest.get(0, Icc::Bpr(Group::One)) as u32,
            };
            assert_eq!(read(&mut guest), least, "after reset");
            for value in 0..10 {
                guest.set_binary_point(0, group, value);
                assert_eq!(read(&mut guest), (value & 7).max(least));
            }
        }
    });
}

/// With the greatest binary point of group 0 nothing preempts: no bit is the group priority.
#[test]
fn a_binary_point_of_seven_forbids_preemption() {
    with_both(|mut guest| {
        guest.set_group(0, 40, 0);
        guest.set_group(0, 41, 0);
        guest.set_binary_point(0, 0, 7);
        guest.pend(40, 0xf0);
        assert_eq!(guest.ack(0, 0), 40);
        assert_eq!(guest.running(0), 0);
        guest.pend(41, 0x00);
        assert!(guest.is_quiet(0));
    });
}

/// CBPR: the binary point of group 0 counts for group 1, too (GICC_CTLR.CBPR, ICC_CTLR_EL1.CBPR).
#[test]
fn a_common_binary_point() {
    with_both(|mut guest| {
        for intid in 40..44 {
            guest.set_group(0, intid, 1);
        }
        guest.set_binary_point(0, 0, 5);
        guest.pend(40, 0x80);
        assert_eq!(guest.ack(0, 1), 40);
        guest.pend(41, 0x78);
        assert_eq!(guest.ack(0, 1), 41);
        guest.end(0, 1, 41);
        match guest.model {
            Model::V2 => guest.write(0, CPU, 0x00, 0x13),
            Model::V3 => guest.set(0, Icc::Ctlr, 1),
        }
        guest.pend(42, 0x98);
        guest.pend(41, 0x80);
        assert!(guest.is_quiet(0));
        guest.pend(43, 0x38);
        assert_eq!(guest.ack(0, 1), 43);
        assert_eq!(guest.running(0), 0);
    });
}

/// The pending interrupt of the highest priority is shown even if it is masked or cannot preempt (GICC_HPPIR,
/// ICC_HPPIR1_EL1), and reading it changes nothing.
#[test]
fn the_highest_pending_interrupt_is_shown() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        let show = |guest: &mut Guest| match guest.model {
            Model::V2 => guest.read(0, CPU, 0x18),
            Model::V3 => guest.get(0, Icc::Hppir(Group::One)) as u32,
        };
        assert_eq!(show(&mut guest), SPURIOUS);
        guest.pend(40, 0x40);
        assert_eq!(guest.ack(0, group), 40);
        guest.pend(41, 0x80);
        guest.set_mask(0, 0x10);
        assert_eq!(show(&mut guest), 41);
        assert_eq!(show(&mut guest), 41);
        guest.write(0, DIST, 0, 0);
        assert_eq!(show(&mut guest), SPURIOUS);
    });
}

/// An EOI without an active priority drops nothing; one of a special INTID ends nothing (GICC_EOIR, ICC_EOIR1_EL1).
#[test]
fn ends_that_end_nothing() {
    with_both(|mut guest| {
        let group = reset_group(guest.model);
        guest.end(0, group, 40);
        assert_eq!(guest.running(0), 0xff);
        guest.pend(40, 0x80);
        assert_eq!(guest.ack(0, group), 40);
        for special in 1020..1024 {
            guest.end(0, group, special);
            assert_eq!(guest.running(0), 0x80);
        }
        // An INTID that is not active: the priority drops.
        guest.end(0, group, 50);
        assert_eq!(guest.running(0), 0xff);
        assert!(guest.bit(0, ISACTIVER, 40));
    });
}
