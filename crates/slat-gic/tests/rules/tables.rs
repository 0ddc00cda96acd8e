//! Saving and restoring the tables of an ITS: the layout of KVM's revision 0.

use super::its::{COLLECTIONS, DEVICES, EVENTS, Msi};
use super::*;
use slat_gic::its::Its;

const VALID: u64 = 1 << 63;

/// The words in memory.
#[test]
fn layout() {
    let mut msi = Msi::new();
    msi.map(2, 0, 8200, 3, 1);
    msi.map_event(2, 5, 8300, 9);
    msi.map(7, 0, 9000, 3, 1);
    msi.command([0x0f | 7 << 32, 0, 0, 0]);
    msi.map_event(7, 15, 9001, 3);
    msi.its.save_tables(&msi.guest.gic, &msi.memory).unwrap();
    let device = |id: u64| EVENTS + id * 0x100;
    assert_eq!(
        msi.memory.u64(DEVICES + 16),
        VALID | 5 << 49 | device(2) >> 8 << 5 | 3
    );
    assert_eq!(
        msi.memory.u64(DEVICES + 56),
        VALID | device(7) >> 8 << 5 | 3
    );
    assert_eq!(msi.memory.u64(device(2)), 5 << 48 | 8200 << 16 | 3);
    assert_eq!(msi.memory.u64(device(2) + 40), 8300 << 16 | 9);
    assert_eq!(msi.memory.u64(device(7)), 0);
    assert_eq!(msi.memory.u64(device(7) + 120), 9001 << 16 | 3);
    assert_eq!(msi.memory.u64(COLLECTIONS), VALID | 1 << 16 | 3);
    // Events name collection 9, which is not mapped.
    assert_eq!(
        msi.memory.u64(COLLECTIONS + 8),
        VALID | 0xffff_ffff << 16 | 9
    );
    assert_eq!(msi.memory.u64(COLLECTIONS + 16), 0);
    // An unmapped device leaves no valid entry behind.
    msi.map_device(7, false);
    assert_eq!(msi.memory.u64(DEVICES + 56), 0);
}

/// Restores the tables of `msi` into a new ITS and GIC. Returns the errno.
fn restore(msi: &mut Msi) -> Result<(), i32> {
    let fresh = Msi::new();
    msi.guest = fresh.guest;
    let mut its = Its::new();
    for offset in [0x80, 0x100, 0x108] {
        let value = msi.its.client_read(offset).unwrap();
        its.client_write(offset, value, &mut msi.guest.gic, &msi.memory)
            .unwrap();
    }
    for vcpu in 0..2 {
        let frame = Frame::Redistributor(vcpu);
        msi.write(frame, 0, 0);
        msi.write64(frame, 0x70, its::CONFIGURATION | 15);
        msi.write(frame, 0, 1);
    }
    let restored = its.restore_tables(&mut msi.guest.gic, &msi.memory);
    its.client_write(0, 1, &mut msi.guest.gic, &msi.memory)
        .unwrap();
    msi.its = its;
    restored.map_err(|error| error.errno())
}

fn saved() -> Msi {
    let mut msi = Msi::new();
    msi.memory.set_u8(its::CONFIGURATION + 8, 0x41);
    msi.map(2, 0, 8200, 3, 1);
    msi.map_event(2, 9, 8200, 3);
    msi.its.save_tables(&msi.guest.gic, &msi.memory).unwrap();
    msi
}

#[test]
fn what_was_saved_is_restored() {
    let mut msi = saved();
    restore(&mut msi).unwrap();
    msi.signal(2, 9);
    assert_eq!(msi.guest.ack(1, 1), 8200);
    assert_eq!(msi.guest.running(1), 0x40);
}

/// Inconsistent tables are refused, and nothing is mapped then.
#[test]
fn inconsistent_tables_are_refused() {
    let device = EVENTS + 0x200;
    let entry = VALID | device >> 8 << 5;
    let cases: [(&str, u64, u64, i32); 10] = [
        ("an LPI below 8192", device, 100 << 16 | 3, 22),
        ("an LPI above the table", device, 1 << 32 | 3, 22),
        ("an unknown collection", device, 8200 << 16 | 4, 22),
        (
            "an event after the last",
            device,
            16 << 48 | 8200 << 16 | 3,
            22,
        ),
        ("too many events", DEVICES + 16, entry | 16, 22),
        (
            "events outside memory",
            DEVICES + 16,
            VALID | 0x100 << 5 | 3,
            14,
        ),
        ("an unknown vCPU", COLLECTIONS, VALID | 2 << 16 | 3, 22),
        ("a collection twice", COLLECTIONS + 8, VALID | 3, 17),
        (
            "a valid device in no second level",
            DEVICES + 8 * 100,
            VALID,
            14,
        ),
        (
            "a device with no events at zero",
            DEVICES,
            VALID | 0x100 << 5,
            14,
        ),
    ];
    for (what, address, value, errno) in cases {
        let mut msi = saved();
        // The first case of an unlimited device scans on after its last entry.
        if address > DEVICES + 16 && address < COLLECTIONS {
            let old = msi.memory.u64(DEVICES + 16);
            msi.memory.set_u64(DEVICES + 16, old | 98 << 49);
        }
        msi.memory.set_u64(address, value);
        assert_eq!(restore(&mut msi), Err(errno), "{what}");
        let unmapped = msi.its.signal(&mut msi.guest.gic, 2, 9).unwrap();
        assert_eq!(unmapped, slat_gic::its::Delivery::Unmapped, "{what}");
        msi.its.save_tables(&msi.guest.gic, &msi.memory).unwrap();
        assert_eq!(msi.memory.u64(COLLECTIONS), 0, "{what}");
    }
}

/// Tables outside memory cannot be saved; tables that are not valid need not be.
#[test]
fn saving_can_fail() {
    let msi = saved();
    assert_eq!(
        msi.its
            .save_tables(&msi.guest.gic, &NoMemory)
            .unwrap_err()
            .errno(),
        14
    );
    let mut msi = Msi::new();
    msi.map_collection(0, Some(0));
    assert_eq!(
        msi.its
            .save_tables(&msi.guest.gic, &NoMemory)
            .unwrap_err()
            .errno(),
        14
    );
    Its::new().save_tables(&msi.guest.gic, &NoMemory).unwrap();
    Its::new()
        .restore_tables(&mut msi.guest.gic, &NoMemory)
        .unwrap();
}

/// Devices that share one large table do not keep the client busy: the entries that are read are limited.
#[test]
fn shared_tables_are_limited() {
    let mut msi = Msi::new();
    for device in 0..300 {
        msi.memory.set_u64(
            DEVICES + 8 * device,
            VALID | 1 << 49 | EVENTS >> 8 << 5 | 15,
        );
    }
    assert_eq!(restore(&mut msi), Err(22));
}

/// KVM_DEV_ARM_ITS_CTRL_RESET unmaps everything.
#[test]
fn reset() {
    let mut msi = saved();
    msi.its.reset(&mut msi.guest.gic);
    for offset in [0x80, 0x88, 0x90] {
        assert_eq!(msi.its(offset), 0);
    }
    assert_eq!((msi.its(0x100) | msi.its(0x108)) >> 63, 0);
    assert_eq!(msi.its.client_read(0).unwrap(), 1 << 31);
    msi.its.save_tables(&msi.guest.gic, &msi.memory).unwrap();
}

/// As in KVM, writing another value to a table's register drops the contents of the table. Writing the same value
/// changes nothing.
#[test]
fn tables_that_change_lose_their_entries() {
    let mut msi = saved();
    msi.set_its32(0, 0);
    let [devices, collections] = [0x100, 0x108].map(|offset| msi.its(offset));
    msi.set_its(0x100, devices);
    msi.set_its(0x108, collections);
    msi.its.save_tables(&msi.guest.gic, &msi.memory).unwrap();
    assert_ne!(msi.memory.u64(COLLECTIONS), 0);
    // Two pages for one.
    msi.set_its(0x108, collections | 1);
    msi.its.save_tables(&msi.guest.gic, &msi.memory).unwrap();
    assert_eq!(msi.memory.u64(COLLECTIONS), 0);
    msi.memory.set_u64(DEVICES + 16, 1);
    msi.set_its(0x100, devices | 1);
    msi.its.save_tables(&msi.guest.gic, &msi.memory).unwrap();
    assert_eq!(msi.memory.u64(DEVICES + 16), 1, "no device is saved");
}

/// The guest takes away the part of the table that has a device's entry. As in KVM, that device is not saved, and the
/// entry before it does not point to it.
#[test]
fn devices_without_an_entry_are_not_saved() {
    const INDIRECT: u64 = 1 << 62;
    const PAGES: [u64; 2] = [its::MEMORY + 0x10_0000, its::MEMORY + 0x11_0000];
    let mut msi = Msi::new();
    msi.set_its32(0, 0);
    let devices = msi.its(0x100);
    msi.set_its(0x100, devices | INDIRECT);
    msi.set_its32(0, 1);
    for (page, index) in PAGES.into_iter().zip(0..) {
        msi.memory.set_u64(DEVICES + 8 * index, VALID | page);
    }
    msi.map_device(2, true);
    msi.map_device(8192, true);
    let save = |msi: &Msi| {
        msi.its.save_tables(&msi.guest.gic, &msi.memory).unwrap();
        msi.memory.u64(PAGES[0] + 16) >> 49
    };
    assert_eq!(save(&msi), 1 << 14 | 8190);
    assert_ne!(msi.memory.u64(PAGES[1]), 0);
    msi.memory.set_u64(PAGES[1], 7);
    msi.memory.set_u64(DEVICES + 8, 0);
    assert_eq!(save(&msi), 1 << 14);
    assert_eq!(msi.memory.u64(PAGES[1]), 7);
}
