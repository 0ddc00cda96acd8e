//! The ITS: registers and commands (IHI 0069, 5.2 and 5.3).

use super::*;
use slat_gic::its::{Delivery, Its};
use slat_gic::memory::Memory;

pub const MEMORY: u64 = 0x4000_0000;
const QUEUE: u64 = MEMORY;
pub const DEVICES: u64 = MEMORY + 0x1_0000;
pub const COLLECTIONS: u64 = MEMORY + 0x2_0000;
pub const CONFIGURATION: u64 = MEMORY + 0x3_0000;
pub const PENDING: u64 = MEMORY + 0x5_0000;
pub const EVENTS: u64 = MEMORY + 0x9_0000;
const VALID: u64 = 1 << 63;

/// A guest of two vCPUs with LPIs, and an ITS.
pub struct Msi {
    pub guest: Guest,
    pub its: Its,
    pub memory: TestMemory,
    writer: u64,
}

impl Msi {
    pub fn new() -> Self {
        let mut guest = Guest::new(Model::V3, 2);
        guest.gic.attach_its();
        let memory = TestMemory::new(MEMORY, 0x20_0000);
        let mut msi = Msi {
            guest,
            its: Its::new(),
            memory,
            writer: 0,
        };
        for vcpu in 0..2 {
            let frame = Frame::Redistributor(vcpu);
            msi.write64(frame, 0x70, CONFIGURATION | 15);
            msi.write64(frame, 0x78, PENDING + vcpu as u64 * 0x1_0000);
            msi.write(frame, 0, 1);
        }
        msi.set_its(0x80, QUEUE | VALID);
        msi.set_its(0x100, DEVICES | VALID);
        msi.set_its(0x108, COLLECTIONS | VALID);
        msi.set_its32(0, 1);
        msi
    }

    pub fn write(&mut self, frame: Frame, offset: u64, value: u32) {
        let data = value.to_le_bytes();
        self.guest.gic.write(0, frame, offset, &data, &self.memory);
    }

    pub fn write64(&mut self, frame: Frame, offset: u64, value: u64) {
        let data = value.to_le_bytes();
        self.guest.gic.write(0, frame, offset, &data, &self.memory);
    }

    pub fn set_its(&mut self, offset: u64, value: u64) {
        let data = value.to_le_bytes();
        self.its
            .write(offset, &data, &mut self.guest.gic, &self.memory);
    }

    pub fn set_its32(&mut self, offset: u64, value: u32) {
        let data = value.to_le_bytes();
        self.its
            .write(offset, &data, &mut self.guest.gic, &self.memory);
    }

    pub fn its(&self, offset: u64) -> u64 {
        let mut data = [0; 8];
        self.its.read(offset, &mut data);
        u64::from_le_bytes(data)
    }

    fn its32(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.its.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Lets the ITS execute a command.
    pub fn command(&mut self, words: [u64; 4]) {
        for (word, index) in words.into_iter().zip(0..) {
            self.memory.set_u64(QUEUE + self.writer + 8 * index, word);
        }
        self.writer = (self.writer + 32) % 0x1000;
        self.set_its(0x88, self.writer);
        assert_eq!(self.its(0x90), self.writer);
    }

    /// MAPD of a device with 16 events.
    pub fn map_device(&mut self, device: u32, valid: bool) {
        let table = EVENTS + u64::from(device) * 0x100;
        self.command([
            0x08 | u64::from(device) << 32,
            3,
            u64::from(valid) << 63 | table,
            0,
        ]);
    }

    /// MAPC.
    pub fn map_collection(&mut self, collection: u16, vcpu: Option<u32>) {
        let target = vcpu.map_or(0, |vcpu| VALID | u64::from(vcpu) << 16);
        self.command([0x09, 0, target | u64::from(collection), 0]);
    }

    /// MAPTI.
    pub fn map_event(&mut self, device: u32, event: u32, lpi: u32, collection: u16) {
        self.command([
            0x0a | u64::from(device) << 32,
            u64::from(lpi) << 32 | u64::from(event),
            collection.into(),
            0,
        ]);
    }

    /// Maps a device, unless it has events, a collection, and an event.
    pub fn map(&mut self, device: u32, event: u32, lpi: u32, collection: u16, vcpu: u32) {
        if event == 0 {
            self.map_device(device, true);
        }
        self.map_collection(collection, Some(vcpu));
        self.map_event(device, event, lpi, collection);
    }

    /// Writes a configuration, which an INVALL of collection 0 brings into effect.
    pub fn configure(&mut self, lpi: u32, byte: u8) {
        self.memory
            .set_u8(CONFIGURATION + u64::from(lpi - 8192), byte);
        self.command([0x0d, 0, 0, 0]);
    }

    pub fn signal(&mut self, device: u32, event: u32) {
        let delivery = self.its.signal(&mut self.guest.gic, device, event);
        assert_eq!(delivery, Ok(Delivery::Pending));
    }

    fn is_unmapped(&mut self, device: u32, event: u32) -> bool {
        self.its.signal(&mut self.guest.gic, device, event) == Ok(Delivery::Unmapped)
    }

    pub fn byte(&self, gpa: u64) -> u8 {
        let mut byte = [0];
        self.memory.read(gpa, &mut byte).unwrap();
        byte[0]
    }

    /// Whether an LPI of vCPU 0 is shown as pending.
    pub fn pending(&mut self, lpi: u32) -> bool {
        self.guest.get(0, Icc::Hppir(Group::One)) == u64::from(lpi)
    }
}

/// GITS_TYPER, GITS_IIDR, identification registers, and GITS_CTLR.
#[test]
fn identification() {
    let mut msi = Msi::new();
    assert_eq!(msi.its(0x08), 15 << 13 | 15 << 8 | 7 << 4 | 1);
    assert_eq!(msi.its32(0x0c), 0);
    assert_eq!(msi.its32(0x04), 0x4b00_043b);
    let pidr = [0xffd0, 0xffe0, 0xffe4, 0xffe8, 0xfff0, 0xfffc].map(|at| msi.its32(at));
    assert_eq!(pidr, [0x40, 0x92, 0xb4, 0x3b, 0x0d, 0xb1]);
    assert_eq!(msi.its32(0), 1 << 31 | 1);
    msi.set_its32(0x04, 0);
    assert_eq!(msi.its32(0x04), 0x4b00_043b);
    // A processor's write to GITS_TRANSLATER has no DeviceID, and does nothing.
    msi.set_its32(0x1_0040, 0);
    assert_eq!(msi.its32(0x1_0040), 0);
}

/// GITS_CBASER and GITS_BASER have KVM's fixed fields: 64 KiB pages, inner shareable, entries of 8 bytes, and types
/// that cannot be changed. While the ITS is enabled, the guest cannot change these registers at all.
#[test]
fn base_registers() {
    let mut msi = Msi::new();
    msi.set_its(0x80, 0);
    msi.set_its(0x100, 0);
    assert_ne!(msi.its(0x80), 0, "fixed");
    msi.set_its32(0, 0);
    msi.set_its(0x80, u64::MAX);
    // The outer cacheability is that of the inner one; the address is aligned to 64 KiB.
    assert_eq!(msi.its(0x80), !(7 << 53 | 0xf000));
    assert_eq!(msi.its(0x90), 0);
    msi.set_its(0x100, 0x0000_4444_0000_0000 | 2 << 10 | 5);
    assert_eq!(
        msi.its(0x100),
        1 << 56 | 7 << 48 | 3 << 59 | 0x4444_0000_0000 | 1 << 10 | 2 << 8 | 5
    );
    msi.set_its(0x108, 1 << 62);
    assert_eq!(msi.its(0x108), 4 << 56 | 7 << 48 | 3 << 59 | 2 << 8);
    msi.set_its(0x110, u64::MAX);
    assert_eq!(msi.its(0x110), 0);
    // Without valid tables it stays disabled.
    msi.set_its32(0, 1);
    assert_eq!(msi.its32(0), 1 << 31);
}

/// A message of a mapped event reaches the vCPU of its collection; MAPI uses the EventID as INTID.
#[test]
fn translation() {
    let mut msi = Msi::new();
    assert!(msi.is_unmapped(1, 0));
    msi.map(1, 0, 8200, 5, 1);
    msi.memory.set_u8(CONFIGURATION + 8, 0x81);
    msi.command([0x0c | 1 << 32, 0, 0, 0]);
    msi.signal(1, 0);
    assert!(msi.guest.irq(1) && msi.guest.is_quiet(0));
    assert!(msi.is_unmapped(1, 1) && msi.is_unmapped(2, 0));
    // MAPI: a device with enough EventIDs.
    msi.command([0x08 | 3 << 32, 13, VALID | (EVENTS + 0x1_0000), 0]);
    msi.command([0x0b | 3 << 32, 8300, 5, 0]);
    msi.signal(3, 8300);
    // INT is a message, CLEAR takes it back.
    msi.command([0x04 | 1 << 32, 0, 0, 0]);
    assert!(msi.guest.is_quiet(1));
    msi.command([0x03 | 1 << 32, 0, 0, 0]);
    assert_eq!(msi.guest.ack(1, 1), 8200);
    msi.guest.end(1, 1, 8200);
    assert!(msi.guest.is_quiet(1));
    // A disabled ITS and disabled LPIs refuse messages.
    msi.write(Frame::Redistributor(1), 0, 0);
    assert_eq!(
        msi.its
            .signal(&mut msi.guest.gic, 1, 0)
            .unwrap_err()
            .errno(),
        16
    );
    msi.write(Frame::Redistributor(1), 0, 1);
    msi.set_its32(0, 0);
    assert_eq!(
        msi.its
            .signal(&mut msi.guest.gic, 1, 0)
            .unwrap_err()
            .errno(),
        16
    );
}

/// MOVI, MAPC of a mapped collection, and MOVALL move pending LPIs.
#[test]
fn lpis_move() {
    let mut msi = Msi::new();
    msi.map(0, 0, 8200, 0, 0);
    msi.map_collection(1, Some(1));
    msi.configure(8200, 0x01);
    msi.signal(0, 0);
    assert!(msi.guest.irq(0));
    msi.command([0x01, 0, 1, 0]);
    assert!(msi.guest.is_quiet(0) && msi.guest.irq(1));
    msi.map_collection(1, Some(0));
    assert!(msi.guest.irq(0) && msi.guest.is_quiet(1));
    msi.command([0x0e, 0, 0, 1 << 16]);
    assert!(msi.guest.is_quiet(0) && msi.guest.irq(1));
    msi.command([0x0e, 0, 1 << 16, 1 << 16]);
    assert!(msi.guest.irq(1));
}

/// DISCARD, MAPD and an invalid GITS_BASER unmap events, and their LPIs with them.
#[test]
fn unmapping() {
    let mut msi = Msi::new();
    msi.map(0, 0, 8200, 0, 0);
    msi.configure(8200, 0x01);
    msi.signal(0, 0);
    msi.command([0x0f, 0, 0, 0]);
    assert!(msi.guest.is_quiet(0) && msi.is_unmapped(0, 0));
    // Two events are mapped to one LPI. The LPI's pending state is dropped with the last of the two.
    msi.map_event(0, 0, 8200, 0);
    msi.map_event(0, 1, 8200, 0);
    msi.signal(0, 1);
    msi.command([0x0f, 0, 0, 0]);
    assert!(msi.guest.irq(0));
    msi.map_device(0, false);
    assert!(msi.guest.is_quiet(0) && msi.is_unmapped(0, 1));
    msi.map(0, 0, 8200, 0, 0);
    msi.signal(0, 0);
    msi.set_its32(0, 0);
    msi.set_its(0x100, DEVICES);
    assert!(msi.guest.is_quiet(0));
    msi.set_its(0x100, DEVICES | VALID);
    msi.set_its32(0, 1);
    assert!(msi.is_unmapped(0, 0));
}

/// While a collection is unmapped, its events are lost. As in KVM, mapping the collection again does not bring them
/// back.
#[test]
fn collections_can_be_unmapped() {
    let mut msi = Msi::new();
    msi.map(0, 0, 8200, 2, 0);
    msi.map_collection(2, None);
    assert!(msi.is_unmapped(0, 0));
    msi.map_collection(2, Some(0));
    assert!(msi.is_unmapped(0, 0));
    // An event may be mapped before its collection.
    msi.map_event(0, 1, 8201, 7);
    assert!(msi.is_unmapped(0, 1));
    msi.map_collection(7, Some(1));
    msi.signal(0, 1);
}

/// Commands that are errors are ignored, and the queue goes on.
#[test]
fn errors_are_ignored() {
    let mut msi = Msi::new();
    msi.map(0, 0, 8200, 0, 0);
    msi.configure(8200, 0x01);
    let errors = [
        // A DeviceID, an EventID, an LPI, a vCPU, and a size that are too large.
        [0x08 | 1 << 48, 3, VALID | EVENTS, 0],
        [0x0a, 8201 << 32 | 16, 0, 0],
        [0x0a, 8191 << 32 | 1, 0, 0],
        [0x0a, 65536 << 32 | 1, 0, 0],
        [0x0b, 1, 0, 0],
        [0x09, 0, VALID | 2 << 16 | 1, 0],
        [0x08 | 1 << 32, 16, VALID | EVENTS, 0],
        [0x0e, 0, 2 << 16, 0],
        [0x0e, 0, 0, 2 << 16],
        // Devices, events and collections that are not mapped.
        [0x0a | 5 << 32, 8201 << 32 | 1, 0, 0],
        [0x01, 9, 0, 0],
        [0x01, 0, 9, 0],
        [0x0f, 9, 0, 0],
        [0x03, 9, 0, 0],
        [0x04, 9, 0, 0],
        [0x0c, 9, 0, 0],
        [0x0d, 0, 9, 0],
        // An event that is mapped.
        [0x0a, 8201 << 32, 0, 0],
        // SYNC, and numbers without a command.
        [0x05, 0, 0, 0],
        [0x00, 0, 0, 0],
        [0xff, u64::MAX, u64::MAX, u64::MAX],
    ];
    for error in errors {
        msi.command(error);
        msi.signal(0, 0);
        assert_eq!(msi.guest.ack(0, 1), 8200, "{error:x?}");
        msi.guest.end(0, 1, 8200);
    }
    // Commands outside memory are skipped.
    msi.set_its32(0, 0);
    msi.set_its(0x80, VALID | 0x10_0000);
    msi.set_its32(0, 1);
    msi.set_its(0x88, 0x40);
    assert_eq!(msi.its(0x90), 0x40);
    msi.set_its(0x88, 0x1000);
    assert_eq!(msi.its(0x88), 0x40, "outside the queue");
}

/// A device table of two levels: MAPD needs a valid first level, in memory.
#[test]
fn two_levels() {
    let mut msi = Msi::new();
    msi.set_its32(0, 0);
    msi.set_its(0x100, DEVICES | VALID | 1 << 62);
    msi.set_its32(0, 1);
    // Device 9000 is in the second page.
    let map = |msi: &mut Msi| {
        msi.map_collection(0, Some(0));
        msi.command([0x08 | 9000 << 32, 3, VALID | EVENTS, 0]);
        msi.map_event(9000, 0, 8200, 0);
        !msi.is_unmapped(9000, 0)
    };
    assert!(!map(&mut msi));
    msi.memory.set_u64(DEVICES + 8, 0x1_0000 | VALID);
    assert!(!map(&mut msi), "not in memory");
    msi.memory
        .set_u64(DEVICES + 8, (EVENTS + 0x1_0000) & !0xffff);
    assert!(!map(&mut msi), "not valid");
    msi.memory
        .set_u64(DEVICES + 8, (EVENTS + 0x1_0000) & !0xffff | VALID);
    assert!(map(&mut msi));
}
