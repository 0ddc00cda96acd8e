//! The attributes of an ITS.

use super::*;
use slat_gic::its::TRANSLATER;

#[test]
fn its_attributes() {
    let mut client = Client::initialized(Model::V3, 1);
    client.device.attach_its();
    let mut its = ItsDevice::new();
    let vm = Vm {
        vcpus: &client.vcpus,
        memory: &client.memory,
        address_bits: 40,
    };
    let gic = client.device.gic().unwrap();
    let mut set = |its: &mut ItsDevice, group, attribute, value| {
        its.set(&vm, gic, group, attribute, value)
            .map_err(|error| error.errno())
    };
    let get = |its: &ItsDevice, group, attribute| {
        its.get(group, attribute).map_err(|error| error.errno())
    };
    let has = |its: &ItsDevice, group, attribute| {
        its.has(group, attribute).map_err(|error| error.errno())
    };
    assert_eq!(get(&its, group::ADDRESS, address::ITS), Ok(u64::MAX));
    assert_eq!(
        get(&its, group::ITS_REGISTERS, 0x80),
        Err(ENXIO),
        "no address"
    );
    assert_eq!(set(&mut its, group::ADDRESS, 0, 0), Err(ENODEV));
    assert_eq!(get(&its, group::ADDRESS, 0), Err(ENODEV));
    assert_eq!(
        set(&mut its, group::ADDRESS, address::ITS, 0x808_1000),
        Err(EINVAL)
    );
    assert_eq!(
        set(&mut its, group::ADDRESS, address::ITS, 1 << 40),
        Err(E2BIG)
    );
    set(&mut its, group::ADDRESS, address::ITS, 0x808_0000).unwrap();
    assert_eq!(
        set(&mut its, group::ADDRESS, address::ITS, 0x808_0000),
        Err(EEXIST)
    );
    assert_eq!(its.find(0x808_0000 + TRANSLATER), Some(TRANSLATER));
    assert_eq!(TRANSLATER, 0x1_0040);
    assert_eq!(its.find(0x80a_0000), None);
    for offset in [0x1, 0x2, 0x84, 0x94, 0x104] {
        assert_eq!(
            get(&its, group::ITS_REGISTERS, offset),
            Err(EINVAL),
            "{offset:#x}"
        );
        assert_eq!(
            has(&its, group::ITS_REGISTERS, offset),
            Err(EINVAL),
            "{offset:#x}"
        );
    }
    for offset in [0x10, 0x98, 0x140, 0x1_0040, 1 << 40] {
        assert_eq!(
            get(&its, group::ITS_REGISTERS, offset),
            Err(ENXIO),
            "{offset:#x}"
        );
        assert_eq!(
            set(&mut its, group::ITS_REGISTERS, offset, 0),
            Err(ENXIO),
            "{offset:#x}"
        );
        assert_eq!(
            has(&its, group::ITS_REGISTERS, offset),
            Err(ENXIO),
            "{offset:#x}"
        );
    }
    assert_eq!(get(&its, group::ITS_REGISTERS, 0xffe8), Ok(0x3b));
    // GITS_IIDR: the layout of the tables.
    assert_eq!(
        set(&mut its, group::ITS_REGISTERS, 4, 0x4b00_143b),
        Err(EINVAL)
    );
    set(&mut its, group::ITS_REGISTERS, 4, 0x4b00_043b).unwrap();
    // GITS_CREADR: inside the queue, and before the ITS is enabled.
    assert_eq!(
        set(&mut its, group::ITS_REGISTERS, 0x90, 0x1000),
        Err(EINVAL)
    );
    set(&mut its, group::ITS_REGISTERS, 0x90, 0x45).unwrap();
    assert_eq!(get(&its, group::ITS_REGISTERS, 0x90), Ok(0x40));
    for offset in [0x80, 0x100, 0x108] {
        set(
            &mut its,
            group::ITS_REGISTERS,
            offset,
            1 << 63 | 0x4000_0000,
        )
        .unwrap();
    }
    set(&mut its, group::ITS_REGISTERS, 0, 1).unwrap();
    assert_eq!(set(&mut its, group::ITS_REGISTERS, 0x90, 0), Err(EBUSY));
    for order in [
        control::INITIALIZE,
        control::SAVE_ITS_TABLES,
        control::RESTORE_ITS_TABLES,
        control::RESET_ITS,
    ] {
        assert_eq!(has(&its, group::CONTROL, order), Ok(()));
        set(&mut its, group::CONTROL, order, 0).unwrap();
    }
    assert_eq!(get(&its, group::ITS_REGISTERS, 0), Ok(1 << 31));
    assert_eq!(
        has(&its, group::CONTROL, control::SAVE_PENDING_TABLES),
        Err(ENXIO)
    );
    assert_eq!(set(&mut its, group::DISTRIBUTOR, 0, 0), Err(ENXIO));
    assert_eq!(get(&its, group::CONTROL, 0), Err(ENXIO));
    assert_eq!(has(&its, group::DISTRIBUTOR, 0), Err(ENXIO));
}
