//! GICv2 (IHI 0048).

use super::*;
use slat_gic::gic::V2_VCPUS;

const SGIR: u64 = 0xf00;
const CPENDSGIR: u64 = 0xf10;
const SPENDSGIR: u64 = 0xf20;

fn guest() -> Guest {
    Guest::new(Model::V2, 3)
}

/// GICD_TYPER, GICD_IIDR, GICC_IIDR.
#[test]
fn identification() {
    let mut guest = guest();
    assert_eq!(guest.read(0, DIST, 4), 2 | 2 << 5);
    assert_eq!(guest.read(0, DIST, 8), 0x4b00_343b);
    assert_eq!(guest.read(0, CPU, 0xfc), 0x04b2_043b);
    guest.write(0, DIST, 4, 0);
    guest.write(0, DIST, 8, 0);
    assert_eq!(guest.read(0, DIST, 8), 0x4b00_343b);
    let many = vcpus(9);
    assert_eq!(many.len(), V2_VCPUS + 1);
    let refused = Gic::new(Model::V2, 96, &many).unwrap_err();
    assert_eq!(refused.errno(), 7);
}

/// After reset nothing is enabled, and all interrupts are in group 0.
#[test]
fn reset() {
    let mut guest = Guest::after_reset(Model::V2, 2);
    assert_eq!(guest.read(0, DIST, 0), 0);
    assert_eq!(guest.read(0, CPU, 0), 0);
    assert_eq!(guest.read(0, CPU, 4), 0);
    assert_eq!(guest.read(0, DIST, IGROUPR), 0);
    assert_eq!(guest.read(0, DIST, ISENABLER), 0xffff);
    assert_eq!(guest.read(0, DIST, ISENABLER + 4), 0);
    guest.pend(40, 0);
    guest.write(0, DIST, 0, 1);
    guest.write(0, CPU, 4, 0xff);
    assert!(guest.is_quiet(0));
    guest.write(0, CPU, 0, 1);
    assert!(guest.irq(0));
}

/// The acknowledgement of an SGI returns its source. If several sources send the same SGI, it is taken several times
/// (IHI 0048, 3.2.4, GICD_SGIR, GICC_IAR).
#[test]
fn sgis_have_sources() {
    let mut guest = guest();
    guest.write(2, DIST, SGIR, 1 << 16 | 5);
    guest.write(1, DIST, SGIR, 1 << 16 | 5);
    assert!(guest.bit(0, ISPENDR, 5));
    assert_eq!(guest.read(0, CPU, 0x18), 5 | 1 << 10);
    assert_eq!(guest.ack(0, 0), 5 | 1 << 10);
    assert!(guest.is_quiet(0) && guest.bit(0, ISPENDR, 5));
    guest.end(0, 0, 5 | 1 << 10);
    assert_eq!(guest.ack(0, 0), 5 | 2 << 10);
    guest.end(0, 0, 5 | 2 << 10);
    assert_eq!(guest.ack(0, 0), SPURIOUS);
}

/// The target list filter of GICD_SGIR.
#[test]
fn sgis_have_filters() {
    for (filter, targets) in [
        (0, [false, true, true]),
        (1, [true, false, true]),
        (2, [false, true, false]),
        (3, [false; 3]),
    ] {
        let mut guest = guest();
        guest.write(1, DIST, SGIR, filter << 24 | 0b1110 << 16 | 3);
        let pending = [0, 1, 2].map(|vcpu| guest.irq(vcpu));
        assert_eq!(pending, targets, "filter {filter}");
        assert_eq!(guest.read(1, DIST, SGIR), 0);
    }
}

/// GICD_SPENDSGIR and GICD_CPENDSGIR change sources; GICD_ISPENDR and GICD_ICPENDR of SGIs ignore writes.
#[test]
fn sources_can_be_set_and_cleared() {
    let mut guest = guest();
    guest.set_bit(0, ISPENDR, 6);
    assert!(!guest.bit(0, ISPENDR, 6));
    guest.write(0, DIST, SPENDSGIR + 4, 0x0005_0000);
    assert_eq!(guest.read(0, DIST, CPENDSGIR + 4), 0x0005_0000);
    guest.set_bit(0, ICPENDR, 6);
    assert!(guest.bit(0, ISPENDR, 6));
    guest.gic.write(0, DIST, CPENDSGIR + 6, &[1], &NoMemory);
    assert_eq!(guest.ack(0, 0), 6 | 2 << 10);
    guest.end(0, 0, 6);
    assert!(!guest.bit(0, ISPENDR, 6));
}

/// GICD_ITARGETSR: as in KVM, the first target gets the interrupt, and without any the first vCPU does.
#[test]
fn targets() {
    let mut guest = guest();
    guest.pend(40, 0x80);
    for (targets, written, target) in [
        (0b110, 0b110, 1),
        (0xfc, 0b100, 2),
        (0, 0, 0),
        (0b111, 0b111, 0),
    ] {
        guest.gic.write(0, DIST, 0x828, &[targets], &NoMemory);
        assert_eq!(guest.read(0, DIST, 0x828), written);
        let asserted: Vec<_> = (0..3).filter(|vcpu| guest.irq(*vcpu)).collect();
        assert_eq!(asserted, [target]);
    }
    // The target of a private interrupt is the vCPU itself.
    guest.write(2, DIST, 0x800, 0xffff_ffff);
    assert_eq!(guest.read(2, DIST, 0x81c), 0x0404_0404);
}

/// Group 1 is acknowledged by GICC_AIAR, and by GICC_IAR if GICC_CTLR.AckCtl is set.
#[test]
fn groups_have_registers() {
    let mut guest = guest();
    guest.set_group(0, 40, 1);
    guest.pend(40, 0x80);
    assert!(guest.irq(0));
    assert_eq!(guest.read(0, CPU, 0x18), 1022);
    assert_eq!(guest.ack(0, 0), 1022);
    assert_eq!(guest.read(0, CPU, 0x28), 40);
    assert_eq!(guest.ack(0, 1), 40);
    guest.end(0, 1, 40);
    guest.set_bit(0, ISPENDR, 40);
    guest.write(0, CPU, 0, 0x7);
    assert_eq!(guest.read(0, CPU, 0x18), 40);
    assert_eq!(guest.ack(0, 0), 40);
    guest.end(0, 0, 40);
    guest.pend(41, 0x80);
    assert_eq!(guest.ack(0, 1), SPURIOUS, "GICC_AIAR does not show group 0");
}

/// GICC_CTLR.FIQEn signals group 0 as FIQ, group 1 is always IRQ.
#[test]
fn fiq() {
    let mut guest = guest();
    guest.pend(40, 0x80);
    assert!(guest.irq(0) && !guest.fiq(0));
    guest.write(0, CPU, 0, 0xb);
    assert!(guest.fiq(0) && !guest.irq(0));
    guest.set_group(0, 40, 1);
    assert!(guest.irq(0) && !guest.fiq(0));
}

/// GICC_CTLR enables each group.
#[test]
fn groups_are_enabled_separately() {
    let mut guest = guest();
    guest.pend(40, 0x10);
    guest.set_group(0, 41, 1);
    guest.pend(41, 0x80);
    guest.write(0, CPU, 0, 2);
    assert_eq!(guest.ack(0, 0), 1022);
    assert_eq!(guest.ack(0, 1), 41, "a disabled group does not hide it");
    guest.write(0, CPU, 0, 1);
    assert_eq!(guest.ack(0, 0), 40);
    assert_eq!(guest.read(0, CPU, 0), 1);
    guest.write(0, CPU, 0, 0xffff_ffff);
    assert_eq!(guest.read(0, CPU, 0), 0x21f);
}

/// GICC_APR0 has the active preemption levels of both groups; the other three registers are zero.
#[test]
fn active_priorities() {
    let mut guest = guest();
    guest.set_group(0, 41, 1);
    guest.pend(40, 0x80);
    assert_eq!(guest.ack(0, 0), 40);
    guest.pend(41, 0x18);
    assert_eq!(guest.ack(0, 1), 41);
    assert_eq!(guest.read(0, CPU, 0xd0), 1 << 16 | 1 << 3);
    guest.write(0, CPU, 0xd4, 0xff);
    assert_eq!(guest.read(0, CPU, 0xd4), 0);
    guest.write(0, CPU, 0xd0, 1 << 31);
    assert_eq!(guest.running(0), 0xf8);
}

/// Only GICD_IPRIORITYR, GICD_ITARGETSR and the registers of SGI sources accept bytes; nothing accepts halfwords or
/// doublewords; accesses are aligned.
#[test]
fn widths() {
    let mut guest = guest();
    guest.set_priority(0, 41, 0x40);
    let mut read = |offset, data: &mut [u8]| {
        data.fill(0xff);
        guest.gic.read(0, DIST, offset, data);
        data.to_vec()
    };
    assert_eq!(read(0x429, &mut [0; 1]), [0x40]);
    assert_eq!(read(0x428, &mut [0; 4]), [0, 0x40, 0, 0]);
    assert_eq!(read(0x428, &mut [0; 2]), [0; 2]);
    assert_eq!(read(0x428, &mut [0; 8]), [0; 8]);
    assert_eq!(read(0x428, &mut [0; 3]), [0; 3]);
    assert_eq!(read(0x427, &mut [0; 4]), [0; 4]);
    assert_eq!(read(0x100, &mut [0; 1]), [0], "GICD_ISENABLER has SGIs");
    assert_eq!(read(0x100, &mut [0; 4]), [0xff, 0xff, 0, 0]);
    guest.gic.write(0, DIST, 0x104, &[0xff; 2], &NoMemory);
    guest.gic.write(0, DIST, 0x104, &[0xff; 8], &NoMemory);
    guest.gic.write(0, DIST, 0x104, &[0xff; 16], &NoMemory);
    guest.gic.write(0, DIST, 0x104, &[], &NoMemory);
    assert_eq!(guest.read(0, DIST, 0x104), 0);
}

/// Registers of interrupts that do not exist, and addresses without registers, read as zero and ignore writes.
#[test]
fn what_does_not_exist() {
    let mut guest = guest();
    for offset in [
        0x10c,
        0x20c,
        0x460,
        0x860,
        0xc18,
        0x00c,
        0xe00,
        0xfe8,
        0x1000,
        1 << 40,
    ] {
        guest.write(0, DIST, offset, 0xffff_ffff);
        assert_eq!(guest.read(0, DIST, offset), 0, "{offset:#x}");
    }
    guest.write(0, Frame::Redistributor(0), 0, 1);
    assert_eq!(guest.read(0, Frame::Redistributor(0), 0), 0);
    assert!(
        guest.gic.read_icc(0, Icc::Rpr).is_err() && guest.gic.write_icc(0, Icc::Pmr, 0).is_err()
    );
}
