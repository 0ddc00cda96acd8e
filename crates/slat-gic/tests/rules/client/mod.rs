//! KVM's device attributes, and their errors.

mod addresses;
mod its;

use super::*;
use slat_gic::device::{Device, ItsDevice, Vm, address, control, group, value_size};
use slat_gic::gic::VcpuName;

/// The bits of a guest-physical address.
const ADDRESS_BITS: u32 = 40;

const ENXIO: i32 = 6;
const E2BIG: i32 = 7;
const EBUSY: i32 = 16;
const EEXIST: i32 = 17;
const ENODEV: i32 = 19;
const ENOENT: i32 = 2;
const EINVAL: i32 = 22;

struct Client {
    device: Device,
    vcpus: Vec<VcpuName>,
    memory: TestMemory,
}

impl Client {
    fn new(model: Model, count: u32) -> Self {
        Client {
            device: Device::new(model),
            vcpus: vcpus(count),
            memory: TestMemory::new(0x4000_0000, 0x10_0000),
        }
    }

    fn initialized(model: Model, count: u32) -> Self {
        let mut client = Self::new(model, count);
        client.set(group::CONTROL, control::INITIALIZE, 0).unwrap();
        client
    }

    fn set(&mut self, group: u32, attribute: u64, value: u64) -> Result<(), i32> {
        let vm = Vm {
            vcpus: &self.vcpus,
            memory: &self.memory,
            address_bits: ADDRESS_BITS,
        };
        self.device
            .set(&vm, group, attribute, value)
            .map_err(|error| error.errno())
    }

    fn get(&mut self, group: u32, attribute: u64) -> Result<u64, i32> {
        self.get_with(group, attribute, 0)
    }

    fn get_with(&mut self, group: u32, attribute: u64, input: u64) -> Result<u64, i32> {
        let vm = Vm {
            vcpus: &self.vcpus,
            memory: &self.memory,
            address_bits: ADDRESS_BITS,
        };
        self.device
            .get(&vm, group, attribute, input)
            .map_err(|error| error.errno())
    }

    fn has(&self, group: u32, attribute: u64) -> Result<(), i32> {
        let vm = Vm {
            vcpus: &self.vcpus,
            memory: &self.memory,
            address_bits: ADDRESS_BITS,
        };
        self.device
            .has(&vm, group, attribute)
            .map_err(|error| error.errno())
    }

    fn gic(&mut self) -> &mut Gic {
        self.device.gic().unwrap()
    }
}

/// The attribute of a vCPU's register.
fn of(vcpu: u64, offset: u64) -> u64 {
    vcpu << 32 | offset
}

#[test]
fn numbers_of_interrupts() {
    for model in [Model::V2, Model::V3] {
        let mut client = Client::new(model, 1);
        assert_eq!(client.get(group::INTERRUPTS, 0), Ok(32));
        for wrong in [0, 32, 65, 100, 1023, 1024, 4096] {
            assert_eq!(
                client.set(group::INTERRUPTS, 0, wrong),
                Err(EINVAL),
                "{wrong}"
            );
        }
        client.set(group::INTERRUPTS, 0, 992).unwrap();
        assert_eq!(client.set(group::INTERRUPTS, 0, 992), Err(EBUSY));
        client.set(group::CONTROL, control::INITIALIZE, 0).unwrap();
        client.set(group::CONTROL, control::INITIALIZE, 0).unwrap();
        assert_eq!(client.get(group::INTERRUPTS, 0), Ok(992));
        let mut client = Client::initialized(model, 1);
        assert_eq!(client.get(group::INTERRUPTS, 0), Ok(256));
        assert_eq!(client.set(group::INTERRUPTS, 0, 64), Err(EBUSY));
    }
}

/// A client of GICv3 chooses the revision before initialization.
#[test]
fn identity_before_initialization() {
    const IIDR: u64 = 8;
    const TYPER2: u64 = 0xc;
    let revision = |n: u64| 0x4b00_043b | n << 12;
    let mut client = Client::new(Model::V3, 1);
    let distributor = group::DISTRIBUTOR;
    assert_eq!(client.get(distributor, IIDR), Ok(revision(3)));
    assert_eq!(client.set(distributor, IIDR, revision(4)), Err(EINVAL));
    assert_eq!(client.get(distributor, TYPER2), Ok(0));
    client.set(distributor, TYPER2, 0).unwrap();
    assert_eq!(client.set(distributor, TYPER2, 0x100), Err(EINVAL));
    client.set(distributor, IIDR, revision(2)).unwrap();
    assert_eq!(client.get(distributor, IIDR), Ok(revision(2)));
    assert_eq!(client.get(distributor, 0), Err(EBUSY));
    assert_eq!(client.set(distributor, 4, 0), Err(EBUSY));
    // The number of interrupts can still be set.
    client.set(group::INTERRUPTS, 0, 64).unwrap();
    client.set(group::CONTROL, control::INITIALIZE, 0).unwrap();
    assert_eq!(client.get(distributor, IIDR), Ok(revision(2)));
    // There is no vCPU.
    let mut nobody = Client::new(Model::V3, 0);
    assert_eq!(nobody.get(distributor, IIDR), Err(EINVAL));
}

#[test]
fn groups_of_the_other_model() {
    let mut v2 = Client::initialized(Model::V2, 1);
    for unknown in [
        group::REDISTRIBUTOR,
        group::SYSTEM_REGISTERS,
        group::LINES,
        group::ITS_REGISTERS,
        9,
        100,
    ] {
        assert_eq!(v2.set(unknown, 0, 0), Err(ENXIO), "{unknown}");
        assert_eq!(v2.get(unknown, 0), Err(ENXIO), "{unknown}");
        assert_eq!(v2.has(unknown, 0), Err(ENXIO), "{unknown}");
    }
    assert_eq!(
        v2.set(group::CONTROL, control::SAVE_PENDING_TABLES, 0),
        Err(ENXIO)
    );
    let mut v3 = Client::initialized(Model::V3, 1);
    for unknown in [group::CPU_INTERFACE, group::ITS_REGISTERS, 9, 100] {
        assert_eq!(v3.set(unknown, 0, 0), Err(ENXIO), "{unknown}");
        assert_eq!(v3.get(unknown, 0), Err(ENXIO), "{unknown}");
        assert_eq!(v3.has(unknown, 0), Err(ENXIO), "{unknown}");
    }
    assert_eq!(v3.get(group::CONTROL, 0), Err(ENXIO));
    assert_eq!(v3.set(group::CONTROL, 7, 0), Err(ENXIO));
    v3.set(group::CONTROL, control::SAVE_PENDING_TABLES, 0)
        .unwrap();
    let mut early = Client::new(Model::V3, 1);
    assert_eq!(
        early.set(group::CONTROL, control::SAVE_PENDING_TABLES, 0),
        Err(ENXIO)
    );
    assert_eq!(
        [
            group::CONTROL,
            group::ADDRESS,
            group::SYSTEM_REGISTERS,
            group::LINES
        ]
        .map(value_size),
        [0, 8, 8, 4]
    );
}

/// GICv2 is initialized by the first access to a register, GICv3 is not.
#[test]
fn registers_need_initialization() {
    let mut v2 = Client::new(Model::V2, 1);
    assert_eq!(v2.get(group::DISTRIBUTOR, of(0, 8)), Ok(0x4b00_343b));
    assert!(v2.device.gic().is_some());
    let mut v3 = Client::new(Model::V3, 1);
    for group in [
        group::DISTRIBUTOR,
        group::REDISTRIBUTOR,
        group::SYSTEM_REGISTERS,
        group::LINES,
    ] {
        assert_eq!(v3.get(group, 0), Err(EBUSY));
        assert_eq!(v3.set(group, 0, 0), Err(EBUSY));
    }
}

/// A vCPU's id with GICv2, its affinity with GICv3.
#[test]
fn vcpus_are_named() {
    let mut v2 = Client::initialized(Model::V2, 2);
    for group in [group::DISTRIBUTOR, group::CPU_INTERFACE] {
        assert!(v2.get(group, of(1, 0)).is_ok());
        assert_eq!(v2.get(group, of(2, 0)), Err(EINVAL));
        assert_eq!(v2.has(group, of(2, 0)), Err(EINVAL));
    }
    let mut v3 = Client::initialized(Model::V3, 20);
    assert_eq!(v3.get(group::REDISTRIBUTOR, of(0x102, 0xc)), Ok(0x102));
    assert_eq!(v3.get(group::REDISTRIBUTOR, of(0x104, 0xc)), Err(EINVAL));
    assert_eq!(v3.get(group::LINES, of(17, 0)), Err(EINVAL));
    assert!(
        v3.get(group::DISTRIBUTOR, of(0x104, 0)).is_ok(),
        "the distributor is one"
    );
    let mut none = Client::initialized(Model::V3, 0);
    assert_eq!(none.get(group::DISTRIBUTOR, 0), Err(EINVAL));
}

/// Accesses to registers that do not exist return no error, but KVM_HAS_DEVICE_ATTR reports that they do not exist.
#[test]
fn registers_that_do_not_exist() {
    for model in [Model::V2, Model::V3] {
        let mut client = Client::initialized(model, 1);
        for offset in [0x0e00, 0x1_0000, 0x101, 0x120] {
            assert_eq!(
                client.has(group::DISTRIBUTOR, offset),
                Err(ENXIO),
                "{offset:#x}"
            );
            assert_eq!(client.get(group::DISTRIBUTOR, offset), Ok(0));
            assert_eq!(client.set(group::DISTRIBUTOR, offset, 1), Ok(()));
        }
        for offset in [0, 4, 8, 0x80, 0x11c, 0x400] {
            assert_eq!(
                client.has(group::DISTRIBUTOR, offset),
                Ok(()),
                "{offset:#x}"
            );
        }
    }
    let v2 = Client::initialized(Model::V2, 1);
    for (offset, known) in [
        (0, true),
        (4, true),
        (8, true),
        (0x1c, true),
        (0xd0, true),
        (0xdc, true),
        (0xfc, true),
        (0xc, false),
        (0x10, false),
        (0x14, false),
        (0x18, false),
        (0x1000, false),
        (0x2, false),
    ] {
        assert_eq!(
            v2.has(group::CPU_INTERFACE, offset).is_ok(),
            known,
            "{offset:#x}"
        );
    }
    let v3 = Client::initialized(Model::V3, 1);
    assert_eq!(v3.has(group::REDISTRIBUTOR, 0x1_0200), Ok(()));
    assert_eq!(v3.has(group::REDISTRIBUTOR, 0x1_0204), Err(ENXIO));
    assert_eq!(v3.has(group::LINES, 0), Ok(()));
    assert_eq!(v3.has(group::LINES, 1 << 10), Err(ENXIO));
    assert_eq!(v3.has(group::CONTROL, control::SAVE_PENDING_TABLES), Ok(()));
    assert_eq!(
        v2.has(group::CONTROL, control::SAVE_PENDING_TABLES),
        Err(ENXIO)
    );
}

/// GICD_IIDR: another product or revision is an error; the revision decides about GICR_CTLR.
#[test]
fn revisions() {
    let mut v3 = Client::initialized(Model::V3, 1);
    for wrong in [0x4b00_143b, 0x4b00_443b, 0x4b00_343c, 0] {
        assert_eq!(
            v3.set(group::DISTRIBUTOR, 8, wrong),
            Err(EINVAL),
            "{wrong:#x}"
        );
    }
    assert_eq!(v3.get(group::REDISTRIBUTOR, 0), Ok(6));
    v3.set(group::DISTRIBUTOR, 8, 0x4b00_243b).unwrap();
    assert_eq!(v3.get(group::DISTRIBUTOR, 8), Ok(0x4b00_243b));
    assert_eq!(v3.get(group::REDISTRIBUTOR, 0), Ok(0));
    assert_eq!(
        v3.set(group::DISTRIBUTOR, 0xc, 1),
        Err(EBUSY),
        "GICD_TYPER2"
    );
    v3.set(group::DISTRIBUTOR, 0xc, 0).unwrap();
    v3.set(group::DISTRIBUTOR, 4, 0).unwrap();
}

/// GICv2's groups are fixed for a client that does not know GICD_IIDR.
#[test]
fn groups_need_the_identity() {
    let mut v2 = Client::initialized(Model::V2, 1);
    v2.set(group::DISTRIBUTOR, 0x84, 0xff).unwrap();
    assert_eq!(v2.get(group::DISTRIBUTOR, 0x84), Ok(0));
    v2.set(group::DISTRIBUTOR, 8, 0x4b00_343b).unwrap();
    v2.set(group::DISTRIBUTOR, 0x84, 0xff).unwrap();
    assert_eq!(v2.get(group::DISTRIBUTOR, 0x84), Ok(0xff));
}

/// GICv3's client has the latch of a level, and its line, separately; writes replace the latch.
#[test]
fn the_latch_and_the_line() {
    let mut v3 = Client::initialized(Model::V3, 1);
    v3.set(group::DISTRIBUTOR, 0xc08, 0).unwrap();
    v3.gic().set_spi(40, true).unwrap();
    assert_eq!(v3.get(group::DISTRIBUTOR, 0x204), Ok(0));
    assert_eq!(read32(v3.gic(), 0, (DIST, 0x204)), 1 << 8);
    assert_eq!(v3.get(group::LINES, 32), Ok(1 << 8));
    v3.set(group::DISTRIBUTOR, 0x204, 0x0f).unwrap();
    v3.set(group::DISTRIBUTOR, 0x284, 0xff).unwrap();
    assert_eq!(v3.get(group::DISTRIBUTOR, 0x204), Ok(0x0f));
    assert_eq!(v3.get(group::DISTRIBUTOR, 0x284), Ok(0));
    v3.set(group::DISTRIBUTOR, 0x204, 0xf0).unwrap();
    assert_eq!(v3.get(group::DISTRIBUTOR, 0x204), Ok(0xf0));
    v3.set(group::LINES, 32, 0).unwrap();
    assert_eq!(read32(v3.gic(), 0, (DIST, 0x204)), 0xf0);
    // Lines may be restored before triggers; SGIs have none; private lines are a vCPU's.
    v3.set(group::DISTRIBUTOR, 0xc08, 0xaaaa_aaaa).unwrap();
    v3.set(group::LINES, 32, 1 << 9).unwrap();
    assert_eq!(v3.get(group::LINES, 32), Ok(0));
    v3.set(group::DISTRIBUTOR, 0xc08, 0).unwrap();
    assert_eq!(v3.get(group::LINES, 32), Ok(1 << 9));
    v3.set(group::LINES, 0, 0xffff_ffff).unwrap();
    assert_eq!(v3.get(group::LINES, 0), Ok(0xffff_0000));
    assert_eq!(v3.get(group::LINES, 256), Ok(0));
    v3.set(group::LINES, 992, 0xffff_ffff).unwrap();
    for wrong in [1, 31, 48, 1 << 10, 1 << 31] {
        assert_eq!(v3.get(group::LINES, wrong), Err(EINVAL), "{wrong}");
        assert_eq!(v3.set(group::LINES, wrong, 0), Err(EINVAL), "{wrong}");
    }
}

/// GICv2's client cannot name the source of an SGI: the vCPU itself becomes the source.
#[test]
fn v2_sgis_of_the_client() {
    let mut v2 = Client::initialized(Model::V2, 2);
    v2.set(group::DISTRIBUTOR, of(1, 0x200), 1 << 3).unwrap();
    assert_eq!(v2.get(group::DISTRIBUTOR, of(1, 0xf20)), Ok(0x0200_0000));
    v2.set(group::DISTRIBUTOR, of(1, 0xf20), 0x0100_0000)
        .unwrap();
    v2.set(group::DISTRIBUTOR, of(1, 0x280), 1 << 3).unwrap();
    assert_eq!(v2.get(group::DISTRIBUTOR, of(1, 0xf20)), Ok(0));
    assert_eq!(v2.get(group::DISTRIBUTOR, of(1, 0x200)), Ok(0));
}

/// GICv2's client has the priority mask in the lower five bits; registers with an effect have none for it.
#[test]
fn v2_cpu_interface_of_the_client() {
    let mut v2 = Client::initialized(Model::V2, 1);
    v2.set(group::CPU_INTERFACE, 4, 0x12).unwrap();
    assert_eq!(read32(v2.gic(), 0, (CPU, 4)), 0x90);
    assert_eq!(v2.get(group::CPU_INTERFACE, 4), Ok(0x12));
    v2.set(group::CPU_INTERFACE, 0, 1).unwrap();
    v2.set(group::DISTRIBUTOR, 0, 1).unwrap();
    v2.set(group::DISTRIBUTOR, 0x200, 1).unwrap();
    assert_eq!(v2.get(group::CPU_INTERFACE, 0x0c), Ok(0));
    assert!(v2.gic().signals(0).irq);
    v2.set(group::CPU_INTERFACE, 0xd0, 1 << 4).unwrap();
    assert_eq!(v2.get(group::CPU_INTERFACE, 0xd0), Ok(1 << 4));
    v2.set(group::CPU_INTERFACE, 0x10, 0).unwrap();
    assert_eq!(v2.get(group::CPU_INTERFACE, 0xd0), Ok(1 << 4), "no end");
    v2.set(group::CPU_INTERFACE, 0xd4, 1).unwrap();
    assert_eq!(v2.get(group::CPU_INTERFACE, 0xd4), Ok(0));
}

fn icc(crn: u64, crm: u64, op2: u64) -> u64 {
    3 << 14 | crn << 7 | crm << 3 | op2
}

#[test]
fn system_registers() {
    let mut v3 = Client::initialized(Model::V3, 20);
    let vcpu = 0x101 << 32;
    v3.set(group::SYSTEM_REGISTERS, vcpu | icc(4, 6, 0), 0xf8)
        .unwrap();
    assert_eq!(
        v3.get(group::SYSTEM_REGISTERS, vcpu | icc(4, 6, 0)),
        Ok(0xf8)
    );
    assert_eq!(v3.get(group::SYSTEM_REGISTERS, icc(4, 6, 0)), Ok(0));
    for unknown in [
        icc(12, 8, 0),
        icc(12, 12, 1),
        icc(12, 11, 3),
        icc(12, 11, 5),
        icc(3, 0, 0),
        0,
    ] {
        assert_eq!(
            v3.get(group::SYSTEM_REGISTERS, unknown),
            Err(ENXIO),
            "{unknown:#x}"
        );
        assert_eq!(
            v3.set(group::SYSTEM_REGISTERS, unknown, 0),
            Err(ENXIO),
            "{unknown:#x}"
        );
        assert_eq!(
            v3.has(group::SYSTEM_REGISTERS, unknown),
            Err(ENXIO),
            "{unknown:#x}"
        );
    }
    // Three of four active priorities registers of each group do not exist here.
    for number in 1..4 {
        for apr in [icc(12, 8, 4 + number), icc(12, 9, number)] {
            assert_eq!(v3.has(group::SYSTEM_REGISTERS, apr), Ok(()));
            assert_eq!(v3.get(group::SYSTEM_REGISTERS, apr), Err(EINVAL));
            assert_eq!(v3.set(group::SYSTEM_REGISTERS, apr, 0), Err(EINVAL));
        }
    }
    assert_eq!(
        v3.set(group::SYSTEM_REGISTERS, icc(12, 12, 5), 6),
        Err(EINVAL)
    );
    v3.set(group::SYSTEM_REGISTERS, icc(12, 12, 5), 1).unwrap();
    assert_eq!(v3.get(group::SYSTEM_REGISTERS, icc(12, 12, 5)), Ok(7));
    // ICC_CTLR_EL1 of a machine with more, with SErrors, and without Aff3.
    for wrong in [0x8500, 0x8c00, 0xc400, 0x0400] {
        assert_eq!(
            v3.set(group::SYSTEM_REGISTERS, icc(12, 12, 4), wrong),
            Err(EINVAL),
            "{wrong:#x}"
        );
    }
    v3.set(group::SYSTEM_REGISTERS, icc(12, 12, 4), 0x8302)
        .unwrap();
    assert_eq!(v3.get(group::SYSTEM_REGISTERS, icc(12, 12, 4)), Ok(0x8302));
    assert_eq!(
        v3.set(group::SYSTEM_REGISTERS, icc(12, 12, 4), 0x8400),
        Err(EINVAL)
    );
    assert_eq!(
        v3.get(group::SYSTEM_REGISTERS, of(0x104, icc(4, 6, 0))),
        Err(EINVAL)
    );
}
