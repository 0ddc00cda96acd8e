//! GICv3 (IHI 0069).

use super::*;

fn guest() -> Guest {
    Guest::new(Model::V3, 20)
}

const RD: Frame = Frame::Redistributor(1);

/// In GICD_CTLR, ARE and DS are always set. As in KVM, bit 1 alone enables the interrupts of both groups.
#[test]
fn control() {
    let mut guest = Guest::after_reset(Model::V3, 1);
    assert_eq!(guest.read(0, DIST, 0), 0x50);
    guest.write(0, DIST, 0, 0xffff_ffff);
    assert_eq!(guest.read(0, DIST, 0), 0x52);
    guest.write(0, DIST, 0, 1);
    assert_eq!(guest.read(0, DIST, 0), 0x50);
}

/// GICD_TYPER, GICD_IIDR, GICD_PIDR2, and those of a redistributor.
#[test]
fn identification() {
    let mut guest = guest();
    assert_eq!(guest.read(0, DIST, 4), 2 | 9 << 19);
    assert_eq!(guest.read(0, DIST, 8), 0x4b00_343b);
    assert_eq!(guest.read(0, DIST, 0xffe8), 0x3b);
    assert_eq!(guest.read(0, DIST, 0x10), 0xffff_ffff);
    guest.gic.attach_its();
    assert_eq!(guest.read(0, DIST, 4), 2 | 1 << 17 | 15 << 19);
    let rd = Frame::Redistributor(17);
    assert_eq!(guest.read(0, rd, 4), 0x4b00_043b);
    assert_eq!(guest.read(0, rd, 0xffe8), 0x3b);
    assert_eq!(guest.read(0, rd, 0x14), 0);
    guest.gic.set_last(17, true);
    let mut typer = [0; 8];
    guest.gic.read(0, rd, 8, &mut typer);
    assert_eq!(
        u64::from_le_bytes(typer),
        0x101 << 32 | 17 << 8 | 1 << 4 | 1
    );
    assert_eq!(guest.read(0, rd, 12), 0x101);
    assert_eq!(Gic::new(Model::V3, 96, &vcpus(513)).unwrap_err().errno(), 7);
}

/// Private interrupts are in the redistributors, SPIs in the distributor.
#[test]
fn private_interrupts_are_in_redistributors() {
    let mut guest = guest();
    guest.write(0, DIST, ISENABLER, 0xffff_ffff);
    guest.write(0, DIST, 0x400, 0xffff_ffff);
    assert_eq!(guest.read(0, DIST, ISENABLER), 0);
    assert_eq!(guest.read(0, DIST, 0x400), 0);
    assert_eq!(guest.read(0, RD, 0x1_0100), 0xffff);
    guest.write(0, RD, 0x1_0100, 1 << 27);
    assert_eq!(guest.read(5, RD, 0x1_0180), 1 << 27 | 0xffff);
    assert_eq!(guest.read(0, Frame::Redistributor(0), 0x1_0100), 0xffff);
    // They are in group 1 after reset, as KVM's are.
    assert_eq!(guest.read(0, RD, 0x1_0080), 0xffff_ffff);
    assert_eq!(guest.read(0, DIST, 0x84), 0xffff_ffff);
    // GICD_ITARGETSR and GICD_IGRPMODR do not exist.
    guest.write(0, DIST, 0x820, 0xffff_ffff);
    guest.write(0, DIST, 0xd04, 0xffff_ffff);
    assert_eq!(guest.read(0, DIST, 0x820) | guest.read(0, DIST, 0xd04), 0);
}

/// GICD_IROUTER sends an SPI to the vCPU with an affinity, or to none.
#[test]
fn routes() {
    let mut guest = guest();
    guest.pend(40, 0x80);
    let route = |guest: &mut Guest, value: u64| {
        let offset = 0x6000 + 8 * 40;
        guest
            .gic
            .write(0, DIST, offset, &value.to_le_bytes(), &NoMemory);
        let asserted: Vec<_> = (0..20).filter(|vcpu| guest.irq(*vcpu)).collect();
        asserted
    };
    assert_eq!(route(&mut guest, 3), [3]);
    assert_eq!(route(&mut guest, 0x102), [18]);
    assert!(route(&mut guest, 0x104).is_empty());
    // The routing mode and Aff3 do not exist, as in KVM.
    assert_eq!(route(&mut guest, 1 << 31 | 2), [2]);
    assert_eq!(guest.read(0, DIST, 0x6000 + 8 * 40), 2);
    guest.write(0, DIST, 0x6004 + 8 * 40, 0xff);
    assert_eq!(guest.read(0, DIST, 0x6004 + 8 * 40), 0);
    // An active interrupt goes to its new target after its deactivation.
    assert_eq!(guest.ack(2, 1), 40);
    guest.set_bit(0, ISPENDR, 40);
    assert!(route(&mut guest, 0).is_empty());
    guest.end(2, 1, 40);
    assert!(guest.irq(0));
}

/// ICC_SGI1R_EL1 has a cluster and a list, or all others (IHI 0069, 4.4).
#[test]
fn sgis_have_affinities() {
    let mut guest = guest();
    let mut send = |value: u64| {
        guest.set(1, Icc::Sgi1r, value);
        let asserted: Vec<_> = (0..20).filter(|vcpu| guest.irq(*vcpu)).collect();
        for vcpu in &asserted {
            assert_eq!(guest.ack(*vcpu, 1), 7);
            guest.end(*vcpu, 1, 7);
        }
        asserted
    };
    assert_eq!(send(7 << 24 | 0b1011), [0, 1, 3]);
    assert_eq!(send(7 << 24 | 1 << 16 | 0xffff), [16, 17, 18, 19]);
    assert!(send(7 << 24 | 2 << 16 | 0xffff).is_empty());
    assert!(send(7 << 24 | 1 << 32 | 1).is_empty(), "Aff2");
    assert!(send(7 << 24 | 1 << 48 | 1).is_empty(), "Aff3");
    let others: Vec<_> = (0..20).filter(|vcpu| *vcpu != 1).collect();
    assert_eq!(send(7 << 24 | 1 << 40), others);
}

/// ICC_SGI0R_EL1 and ICC_ASGI1R_EL1 generate SGIs of group 0 only.
#[test]
fn sgis_have_groups() {
    let mut guest = guest();
    for register in [Icc::Sgi0r, Icc::Asgi1r] {
        guest.set(1, register, 7 << 24 | 1);
        assert!(guest.is_quiet(0));
    }
    guest.set_group(0, 7, 0);
    guest.set(1, Icc::Sgi0r, 7 << 24 | 1);
    assert!(guest.fiq(0));
    assert_eq!(guest.ack(0, 0), 7);
    guest.end(0, 0, 7);
    guest.set(1, Icc::Sgi1r, 7 << 24 | 1);
    assert!(guest.fiq(0));
}

/// GICv3's SGIs have one pending bit, which software can change (GICR_ISPENDR0).
#[test]
fn sgis_can_be_set_pending() {
    let mut guest = guest();
    guest.set_bit(1, ISPENDR, 7);
    assert!(guest.irq(1));
    guest.set_bit(1, ICPENDR, 7);
    assert!(guest.is_quiet(1));
}

/// Group 0 is FIQ, group 1 is IRQ; each has its registers and its enable bit (IHI 0069, 4.6).
#[test]
fn groups() {
    let mut guest = guest();
    guest.set_group(0, 40, 0);
    guest.pend(40, 0x80);
    guest.pend(41, 0x90);
    assert!(guest.fiq(0) && !guest.irq(0));
    assert_eq!(guest.ack(0, 1), SPURIOUS);
    assert_eq!(guest.get(0, Icc::Hppir(Group::One)), u64::from(SPURIOUS));
    assert_eq!(guest.get(0, Icc::Hppir(Group::Zero)), 40);
    guest.set(0, Icc::Igrpen(Group::Zero), 0);
    assert!(guest.irq(0) && !guest.fiq(0));
    assert_eq!(guest.get(0, Icc::Hppir(Group::One)), 41);
    guest.set(0, Icc::Igrpen(Group::Zero), 1);
    assert_eq!(guest.ack(0, 0), 40);
    // Each group has an active priorities register.
    assert_eq!(guest.get(0, Icc::Apr(Group::Zero, 0)), 1 << 16);
    assert_eq!(guest.get(0, Icc::Apr(Group::One, 0)), 0);
    guest.pend(42, 0x08);
    assert_eq!(guest.ack(0, 1), 42);
    assert_eq!(guest.get(0, Icc::Apr(Group::One, 0)), 1 << 1);
    // An EOI drops the highest priority.
    guest.end(0, 1, 42);
    assert_eq!(guest.get(0, Icc::Apr(Group::One, 0)), 0);
    assert_eq!(guest.running(0), 0x80);
}

/// ICC_CTLR_EL1, ICC_SRE_EL1.
#[test]
fn cpu_interface_control() {
    let mut guest = guest();
    assert_eq!(guest.get(0, Icc::Ctlr), 0x8400);
    guest.set(0, Icc::Ctlr, 0xffff_ffff);
    assert_eq!(guest.get(0, Icc::Ctlr), 0x8403);
    assert_eq!(guest.get(0, Icc::Sre), 7);
    guest.set(0, Icc::Sre, 0);
    assert_eq!(guest.get(0, Icc::Sre), 7);
    guest.set(0, Icc::Igrpen(Group::One), 0xfffe);
    assert_eq!(guest.get(0, Icc::Igrpen(Group::One)), 0);
}

/// With a common binary point, ICC_BPR1_EL1 is the one of group 0 plus one, and ignores writes.
#[test]
fn the_common_binary_point_is_shown() {
    let mut guest = guest();
    guest.set_binary_point(0, 1, 4);
    guest.set(0, Icc::Ctlr, 1);
    for (zero, one) in [(2, 3), (6, 7), (7, 7)] {
        guest.set_binary_point(0, 0, zero);
        guest.set_binary_point(0, 1, 5);
        assert_eq!(guest.get(0, Icc::Bpr(Group::One)), one);
    }
    guest.set(0, Icc::Ctlr, 0);
    assert_eq!(guest.get(0, Icc::Bpr(Group::One)), 4);
}

/// Registers cannot be read or written against their nature, and 32 preemption levels need one register of four.
#[test]
fn undefined_accesses() {
    let mut guest = guest();
    for group in [Group::Zero, Group::One] {
        assert!(guest.gic.write_icc(0, Icc::Iar(group), 0).is_err());
        assert!(guest.gic.write_icc(0, Icc::Hppir(group), 0).is_err());
        assert!(guest.gic.read_icc(0, Icc::Eoir(group)).is_err());
        for number in 1..4 {
            assert!(guest.gic.read_icc(0, Icc::Apr(group, number)).is_err());
            assert!(guest.gic.write_icc(0, Icc::Apr(group, number), 0).is_err());
        }
    }
    for register in [Icc::Dir, Icc::Sgi1r, Icc::Asgi1r, Icc::Sgi0r] {
        assert!(guest.gic.read_icc(0, register).is_err());
    }
    assert!(guest.gic.write_icc(0, Icc::Rpr, 0).is_err());
}

/// The encodings of system registers: S3_0_C4_C6_0 and S3_0_C12_C8_0 to S3_0_C12_C12_7.
#[test]
fn encodings() {
    let name =
        |crn: u16, crm: u16, op2: u16| Icc::from_encoding(3 << 14 | crn << 7 | crm << 3 | op2);
    assert_eq!(name(4, 6, 0), Some(Icc::Pmr));
    assert_eq!(name(12, 8, 0), Some(Icc::Iar(Group::Zero)));
    assert_eq!(name(12, 8, 3), Some(Icc::Bpr(Group::Zero)));
    assert_eq!(name(12, 8, 7), Some(Icc::Apr(Group::Zero, 3)));
    assert_eq!(name(12, 9, 3), Some(Icc::Apr(Group::One, 3)));
    assert_eq!(name(12, 11, 1), Some(Icc::Dir));
    assert_eq!(name(12, 11, 5), Some(Icc::Sgi1r));
    assert_eq!(name(12, 12, 4), Some(Icc::Ctlr));
    assert_eq!(name(12, 12, 7), Some(Icc::Igrpen(Group::One)));
    for (crn, crm, op2) in [
        (4, 6, 1),
        (12, 0, 0),
        (12, 9, 4),
        (12, 11, 0),
        (12, 10, 0),
        (13, 8, 0),
    ] {
        assert_eq!(name(crn, crm, op2), None, "{crn} {crm} {op2}");
    }
    assert_eq!(Icc::from_encoding(2 << 14 | 12 << 7 | 8 << 3), None);
    let known = (0..=u16::MAX).filter(|name| Icc::from_encoding(*name).is_some());
    assert_eq!(known.count(), 1 + 8 + 4 + 5 + 8);
}

/// Registers of 64 bits accept both halves, and doublewords; others do not.
#[test]
fn widths() {
    let mut guest = guest();
    let rd = Frame::Redistributor(0);
    guest.gic.write(
        0,
        rd,
        0x78,
        &0x1234_0007_ffff_ffff_u64.to_le_bytes(),
        &NoMemory,
    );
    assert_eq!(guest.read(0, rd, 0x7c), 0x0004_0007);
    guest.write(0, rd, 0x7c, 0x0000_0001);
    let mut data = [0; 8];
    guest.gic.read(0, rd, 0x78, &mut data);
    assert_eq!(u64::from_le_bytes(data), 0x0000_0001_ffff_0f80);
    let mut data = [0xff; 2];
    guest.gic.read(0, rd, 0x78, &mut data);
    assert_eq!(data, [0, 0]);
    let mut data = [0xff; 8];
    guest.gic.read(0, rd, 0x1_0100, &mut data);
    assert_eq!(data, [0; 8]);
    assert_eq!(guest.read(0, rd, 0x2_0000), 0);
}
