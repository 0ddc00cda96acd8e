//! Addresses of frames.

use super::*;

#[test]
fn v2_addresses() {
    let mut v2 = Client::new(Model::V2, 1);
    assert_eq!(
        v2.get(group::ADDRESS, address::V2_DISTRIBUTOR),
        Ok(u64::MAX)
    );
    let vcpus = v2.vcpus.clone();
    assert_eq!(
        v2.device
            .check_ready(&vcpus, ADDRESS_BITS)
            .unwrap_err()
            .errno(),
        ENXIO
    );
    assert_eq!(
        v2.set(group::ADDRESS, address::V2_DISTRIBUTOR, 0x800_0800),
        Err(EINVAL)
    );
    assert_eq!(
        v2.set(group::ADDRESS, address::V2_DISTRIBUTOR, 1 << 40),
        Err(E2BIG)
    );
    assert_eq!(
        v2.set(
            group::ADDRESS,
            address::V2_CPU_INTERFACE,
            (1 << 40) - 0x1000
        ),
        Err(E2BIG)
    );
    assert_eq!(
        v2.set(group::ADDRESS, address::V2_DISTRIBUTOR, !0xfff),
        Err(EINVAL)
    );
    v2.set(group::ADDRESS, address::V2_DISTRIBUTOR, 0x800_0000)
        .unwrap();
    assert_eq!(
        v2.set(group::ADDRESS, address::V2_DISTRIBUTOR, 0x800_0000),
        Err(EEXIST)
    );
    v2.set(group::ADDRESS, address::V2_CPU_INTERFACE, 0x801_0000)
        .unwrap();
    assert_eq!(
        v2.get(group::ADDRESS, address::V2_CPU_INTERFACE),
        Ok(0x801_0000)
    );
    for other in [
        address::V3_DISTRIBUTOR,
        address::REDISTRIBUTORS,
        address::REDISTRIBUTOR_REGION,
        address::ITS,
        9,
    ] {
        assert_eq!(v2.set(group::ADDRESS, other, 0), Err(ENXIO));
        assert_eq!(v2.get(group::ADDRESS, other), Err(ENXIO));
        assert_eq!(v2.has(group::ADDRESS, other), Err(ENXIO));
    }
    v2.device.check_ready(&vcpus, ADDRESS_BITS).unwrap();
    assert!(v2.device.gic().is_some(), "the first run initializes");
    assert_eq!(v2.device.find(0x800_0ffc), Some((DIST, 0xffc)));
    assert_eq!(v2.device.find(0x801_1000), Some((CPU, 0x1000)));
    assert_eq!(v2.device.find(0x800_1000), None);
    let mut overlapping = Client::new(Model::V2, 1);
    overlapping
        .set(group::ADDRESS, address::V2_CPU_INTERFACE, 0x800_0000)
        .unwrap();
    overlapping
        .set(group::ADDRESS, address::V2_DISTRIBUTOR, 0x800_1000)
        .unwrap();
    assert_eq!(
        overlapping
            .device
            .check_ready(&vcpus, ADDRESS_BITS)
            .unwrap_err()
            .errno(),
        EINVAL
    );
}

const RD_SIZE: u64 = 0x2_0000;

#[test]
fn one_region_of_redistributors() {
    let mut v3 = Client::new(Model::V3, 2);
    let vcpus = v3.vcpus.clone();
    assert_eq!(
        v3.get(group::ADDRESS, address::REDISTRIBUTORS),
        Ok(u64::MAX)
    );
    v3.set(group::ADDRESS, address::V3_DISTRIBUTOR, 0x800_0000)
        .unwrap();
    assert_eq!(
        v3.device
            .check_ready(&vcpus, ADDRESS_BITS)
            .unwrap_err()
            .errno(),
        ENXIO
    );
    assert_eq!(
        v3.set(group::ADDRESS, address::REDISTRIBUTORS, 0x80a_1000),
        Err(EINVAL)
    );
    assert_eq!(
        v3.set(group::ADDRESS, address::REDISTRIBUTORS, 0x7fd_0000),
        Err(EINVAL),
        "overlaps"
    );
    assert_eq!(
        v3.set(group::ADDRESS, address::REDISTRIBUTORS, (1 << 40) - RD_SIZE),
        Err(E2BIG)
    );
    assert_eq!(
        v3.set(group::ADDRESS, address::REDISTRIBUTORS, u64::MAX - 0xffff),
        Err(EINVAL)
    );
    v3.set(group::ADDRESS, address::REDISTRIBUTORS, 0x80a_0000)
        .unwrap();
    assert_eq!(
        v3.set(group::ADDRESS, address::REDISTRIBUTORS, 0x90a_0000),
        Err(EEXIST)
    );
    assert_eq!(
        v3.get(group::ADDRESS, address::REDISTRIBUTORS),
        Ok(0x80a_0000)
    );
    assert_eq!(
        v3.device
            .check_ready(&vcpus, ADDRESS_BITS)
            .unwrap_err()
            .errno(),
        EBUSY,
        "not initialized"
    );
    v3.set(group::CONTROL, control::INITIALIZE, 0).unwrap();
    v3.device.check_ready(&vcpus, ADDRESS_BITS).unwrap();
    assert_eq!(
        v3.device.find(0x80a_0000 + RD_SIZE + 4),
        Some((Frame::Redistributor(1), 4))
    );
    assert_eq!(v3.device.find(0x80a_0000 + 2 * RD_SIZE), None);
    let typer = [0, 1].map(|vcpu| v3.get(group::REDISTRIBUTOR, of(vcpu, 8)).unwrap() >> 4 & 1);
    assert_eq!(typer, [0, 1]);
    // Another vCPU would get the next place.
    v3.device.vcpu_created(3).unwrap();
    assert_eq!(
        v3.device.find(0x80a_0000 + 2 * RD_SIZE),
        Some((Frame::Redistributor(2), 0))
    );
}

#[test]
fn regions_of_redistributors() {
    let region = |index: u64, base: u64, count: u64| index | base | count << 52;
    let mut v3 = Client::new(Model::V3, 3);
    let vcpus = v3.vcpus.clone();
    let attribute = address::REDISTRIBUTOR_REGION;
    v3.set(group::ADDRESS, address::V3_DISTRIBUTOR, 0x800_0000)
        .unwrap();
    for wrong in [
        region(0, 0x900_0000, 0),
        region(0, 0x900_0000, 1) | 1 << 12,
        region(1, 0x900_0000, 1),
        region(0, 0x7ff_0000, 1),
    ] {
        assert_eq!(
            v3.set(group::ADDRESS, attribute, wrong),
            Err(EINVAL),
            "{wrong:#x}"
        );
    }
    assert_eq!(v3.get_with(group::ADDRESS, attribute, 0), Err(ENOENT));
    v3.set(group::ADDRESS, attribute, region(0, 0x900_0000, 2))
        .unwrap();
    assert_eq!(
        v3.set(group::ADDRESS, attribute, region(0, 0xa00_0000, 2)),
        Err(EINVAL)
    );
    assert_eq!(
        v3.set(group::ADDRESS, attribute, region(1, 0x902_0000, 2)),
        Err(EINVAL),
        "overlaps"
    );
    assert_eq!(
        v3.set(group::ADDRESS, address::REDISTRIBUTORS, 0xb00_0000),
        Err(EINVAL),
        "mixed"
    );
    v3.set(group::CONTROL, control::INITIALIZE, 0).unwrap();
    assert_eq!(
        v3.device
            .check_ready(&vcpus, ADDRESS_BITS)
            .unwrap_err()
            .errno(),
        ENXIO,
        "one vCPU has no place"
    );
    let last = |v3: &mut Client| {
        [0, 1, 2].map(|vcpu| v3.get(group::REDISTRIBUTOR, of(vcpu, 8)).unwrap() >> 4 & 1)
    };
    assert_eq!(last(&mut v3), [0, 1, 0]);
    // The second region is contiguous with the first one.
    v3.set(group::ADDRESS, attribute, region(1, 0x904_0000, 8))
        .unwrap();
    assert_eq!(last(&mut v3), [0, 0, 1]);
    v3.device.check_ready(&vcpus, ADDRESS_BITS).unwrap();
    assert_eq!(
        v3.get_with(group::ADDRESS, attribute, 1),
        Ok(region(1, 0x904_0000, 8))
    );
    assert_eq!(v3.get_with(group::ADDRESS, attribute, 2), Err(ENOENT));
    assert_eq!(
        v3.device.find(0x904_0008),
        Some((Frame::Redistributor(2), 8))
    );
}

/// A distributor that is set after the redistributors, and overlaps them, is found at the first run.
#[test]
fn overlaps_are_found_at_the_first_run() {
    let mut v3 = Client::initialized(Model::V3, 1);
    let vcpus = v3.vcpus.clone();
    v3.set(group::ADDRESS, address::REDISTRIBUTORS, 0x800_0000)
        .unwrap();
    v3.set(group::ADDRESS, address::V3_DISTRIBUTOR, 0x801_0000)
        .unwrap();
    assert_eq!(
        v3.device
            .check_ready(&vcpus, ADDRESS_BITS)
            .unwrap_err()
            .errno(),
        EINVAL
    );
}

/// As in KVM, the region of a client that does not count its vCPUs may grow into the distributor, and beyond the last
/// address. Both are found at the first run.
#[test]
fn regions_grow_with_the_vcpus() {
    let cases = [(0, 0x7_0000), ((1 << ADDRESS_BITS) - 0x6_0000, 0)];
    for (redistributors, distributor) in cases {
        let mut v3 = Client::new(Model::V3, 4);
        let vcpus = std::mem::take(&mut v3.vcpus);
        v3.vcpus.push(vcpus[0]);
        v3.set(group::ADDRESS, address::REDISTRIBUTORS, redistributors)
            .unwrap();
        v3.set(group::ADDRESS, address::V3_DISTRIBUTOR, distributor)
            .unwrap();
        for count in 2..=4 {
            v3.vcpus.push(vcpus[count - 1]);
            v3.device.vcpu_created(count).unwrap();
        }
        v3.set(group::CONTROL, control::INITIALIZE, 0).unwrap();
        let refused = v3.device.check_ready(&vcpus, ADDRESS_BITS);
        assert_eq!(refused.unwrap_err().errno(), EINVAL);
        v3.device.check_ready(&vcpus[..3], ADDRESS_BITS).unwrap();
    }
}
