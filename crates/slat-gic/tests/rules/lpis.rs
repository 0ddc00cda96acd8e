//! LPIs and their tables (IHI 0069, 5.1).

use super::its::{CONFIGURATION, Msi, PENDING};
use super::*;

/// An LPI becomes pending, is acknowledged, and ends at its EOI without an active state.
#[test]
fn an_lpi_has_no_active_state() {
    let mut msi = Msi::new();
    msi.map(0, 0, 8200, 0, 0);
    msi.configure(8200, 0xa1);
    msi.signal(0, 0);
    let guest = &mut msi.guest;
    assert!(guest.irq(0));
    assert_eq!(guest.ack(0, 1), 8200);
    assert_eq!(guest.running(0), 0xa0);
    // A second message may come before the EOI.
    msi.signal(0, 0);
    let guest = &mut msi.guest;
    assert!(guest.is_quiet(0));
    // Even with EOImode, the EOI alone ends the LPI.
    guest.set(0, Icc::Ctlr, 2);
    guest.end(0, 1, 8200);
    assert_eq!(guest.running(0), 0xff);
    assert_eq!(guest.ack(0, 1), 8200);
    guest.end(0, 1, 8200);
    assert!(guest.is_quiet(0));
}

/// The configuration table is read when the LPI is mapped, and by INV, INVALL, GICR_INVLPIR and GICR_INVALLR.
#[test]
fn configurations_are_cached() {
    let mut msi = Msi::new();
    msi.map(0, 0, 8200, 0, 0);
    msi.signal(0, 0);
    assert!(msi.guest.is_quiet(0), "the byte was zero");
    type Invalidate = fn(&mut Msi);
    let ways: [Invalidate; 4] = [
        |msi| msi.command([0x0c, 0, 0, 0]),
        |msi| msi.command([0x0d, 0, 0, 0]),
        |msi| msi.write(Frame::Redistributor(0), 0xa0, 8200),
        |msi| msi.write(Frame::Redistributor(0), 0xb0, 0),
    ];
    for invalidate in ways {
        msi.memory.set_u8(CONFIGURATION + 8, 0x81);
        assert!(msi.guest.is_quiet(0));
        invalidate(&mut msi);
        assert!(msi.guest.irq(0));
        msi.memory.set_u8(CONFIGURATION + 8, 0x80);
        assert!(msi.guest.irq(0));
        invalidate(&mut msi);
        assert!(msi.guest.is_quiet(0));
    }
    // The upper half of GICR_INVLPIR is of virtual processors.
    msi.memory.set_u8(CONFIGURATION + 8, 0x81);
    msi.write(Frame::Redistributor(0), 0xa4, 8200);
    assert!(msi.guest.is_quiet(0));
}

/// Setting GICR_CTLR.EnableLPIs makes the GIC read the pending table, unless GICR_PENDBASER.PTZ says that it is zero.
#[test]
fn enabling_reads_the_pending_table() {
    for table_is_zero in [false, true] {
        let mut msi = Msi::new();
        msi.map(0, 0, 8200, 0, 0);
        msi.configure(8200, 0x81);
        msi.write(Frame::Redistributor(0), 0, 0);
        assert!(msi.its.signal(&mut msi.guest.gic, 0, 0).is_err());
        msi.memory.set_u8(PENDING + 8200 / 8, 1);
        let ptz = u64::from(table_is_zero) << 62;
        msi.write64(Frame::Redistributor(0), 0x78, PENDING | ptz);
        let mut data = [0; 8];
        msi.guest
            .gic
            .read(0, Frame::Redistributor(0), 0x78, &mut data);
        assert_eq!(u64::from_le_bytes(data) >> 62, 0);
        msi.write(Frame::Redistributor(0), 0, 1);
        assert_eq!(msi.guest.irq(0), !table_is_zero);
    }
}

/// Both tables are fixed while LPIs are enabled; without an ITS LPIs cannot be enabled.
#[test]
fn tables_are_fixed_while_lpis_are_enabled() {
    let mut msi = Msi::new();
    let rd = Frame::Redistributor(0);
    msi.write64(rd, 0x70, 0x1234_5000);
    msi.write64(rd, 0x78, 0x1234_0000);
    let mut data = [0; 8];
    msi.guest.gic.read(0, rd, 0x70, &mut data);
    assert_eq!(u64::from_le_bytes(data) & 0xffff_f000, CONFIGURATION);
    msi.guest.gic.read(0, rd, 0x78, &mut data);
    assert_eq!(u64::from_le_bytes(data) & 0xffff_0000, PENDING);
    let mut guest = Guest::new(Model::V3, 1);
    guest.write(0, rd, 0, 1);
    assert_eq!(guest.read(0, rd, 0), 6);
}

/// KVM_DEV_ARM_VGIC_SAVE_PENDING_TABLES writes one bit for each LPI, and a new mapping takes its bit.
#[test]
fn pending_tables_are_saved_and_taken() {
    let mut msi = Msi::new();
    for event in 0..4 {
        msi.map(0, event, 8200 + event, 0, 0);
        msi.configure(8200 + event, 0x01);
    }
    msi.signal(0, 1);
    msi.signal(0, 3);
    msi.memory.set_u8(PENDING + 1025, 0xf4);
    msi.memory.set_u8(PENDING, 0x55);
    msi.guest.gic.save_pending_tables(&msi.memory).unwrap();
    assert_eq!(msi.byte(PENDING + 1025), 0xfa);
    assert_eq!(msi.byte(PENDING), 0x55, "the first KiB is the guest's");
    // LPI 8204 has a bit in the table; its new event takes it.
    assert!(!msi.pending(8204));
    msi.map(0, 4, 8204, 0, 0);
    assert_eq!(msi.byte(PENDING + 1025), 0xea);
    msi.configure(8204, 0x01);
    let mut taken = vec![];
    for _ in 0..3 {
        let intid = msi.guest.ack(0, 1);
        msi.guest.end(0, 1, intid);
        taken.push(intid);
    }
    assert_eq!(taken, [8201, 8203, 8204]);
    // Without memory, saving is an error.
    let refused = msi.guest.gic.save_pending_tables(&NoMemory).unwrap_err();
    assert_eq!(refused.errno(), 14);
    let v2 = Guest::new(Model::V2, 1);
    assert_eq!(
        v2.gic.save_pending_tables(&NoMemory).unwrap_err().errno(),
        6
    );
}
