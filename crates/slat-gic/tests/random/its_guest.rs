//! A guest that uses an ITS, and a model of the ITS's state.

use super::Pair;
use crate::common::{TestMemory, write32};
use crate::model::LPI;
use slat_gic::gic::Gic;
use slat_gic::its::{Delivery, Its};
use slat_gic::registers::Frame;
use std::collections::BTreeMap;

/// The LPIs that the guest uses, from 8192 on.
pub const LPIS: u32 = 24;
const DEVICES: u32 = 4;
const EVENTS: u32 = 8;
const COLLECTIONS: u16 = 4;

/// The addresses of the guest's tables.
pub const MEMORY: u64 = 0x4000_0000;
pub const MEMORY_SIZE: usize = 0x20_0000;
const QUEUE: u64 = MEMORY;
const QUEUE_SIZE: u64 = 0x1000;
const DEVICE_TABLE: u64 = MEMORY + 0x1_0000;
const COLLECTION_TABLE: u64 = MEMORY + 0x2_0000;
pub const CONFIGURATION: u64 = MEMORY + 0x3_0000;
pub const PENDING: u64 = MEMORY + 0x5_0000;
const EVENT_TABLES: u64 = MEMORY + 0x10_0000;

const CTLR: u64 = 0x0;
const CBASER: u64 = 0x80;
const CWRITER: u64 = 0x88;
const BASER: [u64; 2] = [0x100, 0x108];

/// The ITS, and the model of its state.
pub struct Tables {
    pub its: Its,
    writer: u64,
    /// The number of EventIDs of mapped devices.
    devices: BTreeMap<u32, u32>,
    /// LPI and collection by device and event.
    events: BTreeMap<(u32, u32), (u32, Option<u16>)>,
    collections: BTreeMap<u16, Option<usize>>,
}

/// Gives a redistributor the addresses of the LPIs' tables, and enables LPIs.
pub fn enable_lpis(gic: &mut Gic, vcpu: usize, memory: &TestMemory) {
    let frame = Frame::Redistributor(vcpu);
    let base = CONFIGURATION | 15;
    gic.write(vcpu, frame, 0x70, &base.to_le_bytes(), memory);
    let pending = PENDING + vcpu as u64 * 0x1_0000;
    gic.write(vcpu, frame, 0x78, &pending.to_le_bytes(), memory);
    write32(gic, vcpu, (frame, 0), 1, memory);
}

/// Gives an ITS its tables and its queue.
pub fn set_tables(its: &mut Its, gic: &mut Gic, memory: &TestMemory) {
    let valid = 1 << 63;
    for (offset, value) in [
        (CBASER, QUEUE),
        (BASER[0], DEVICE_TABLE),
        (BASER[1], COLLECTION_TABLE),
    ] {
        its.write(offset, &(value | valid).to_le_bytes(), gic, memory);
    }
}

pub fn enable(its: &mut Its, gic: &mut Gic, memory: &TestMemory) {
    its.write(CTLR, &1u32.to_le_bytes(), gic, memory);
}

/// Returns a command.
pub fn command(number: u64, device: u32, event: u32, lpi: u32, last: u64) -> [u64; 4] {
    [
        number | u64::from(device) << 32,
        u64::from(event) | u64::from(lpi) << 32,
        last,
        0,
    ]
}

impl Tables {
    pub fn new(pair: &mut Pair) -> Self {
        let mut its = Its::new();
        pair.gic.attach_its();
        for vcpu in 0..super::VCPUS {
            enable_lpis(&mut pair.gic, vcpu, &pair.memory);
            pair.plain.cpus[vcpu].lpis_enabled = true;
        }
        set_tables(&mut its, &mut pair.gic, &pair.memory);
        enable(&mut its, &mut pair.gic, &pair.memory);
        for lpi in 0..LPIS {
            let byte = pair.random.next() as u8 | 1;
            pair.memory.set_u8(CONFIGURATION + u64::from(lpi), byte);
        }
        Tables {
            its,
            writer: 0,
            devices: BTreeMap::new(),
            events: BTreeMap::new(),
            collections: BTreeMap::new(),
        }
    }

    /// Lets the ITS execute a command.
    fn execute(&mut self, pair: &mut Pair, command: [u64; 4]) {
        for (word, index) in command.into_iter().zip(0..) {
            pair.memory.set_u64(QUEUE + self.writer + 8 * index, word);
        }
        self.writer = (self.writer + 32) % QUEUE_SIZE;
        let data = self.writer.to_le_bytes();
        self.its.write(CWRITER, &data, &mut pair.gic, &pair.memory);
        let mut reader = [0; 8];
        self.its.read(0x90, &mut reader);
        assert_eq!(u64::from_le_bytes(reader), self.writer);
    }

    /// Reads an LPI's configuration into the model.
    fn configure(pair: &mut Pair, lpi: u32) {
        let byte =
            pair.memory.bytes.borrow()[(CONFIGURATION - MEMORY) as usize + (lpi - LPI) as usize];
        let irq = &mut pair.plain.lpis[(lpi - LPI) as usize];
        irq.enabled = byte & 1 != 0;
        irq.priority = byte & 0xf8;
    }

    fn pending_byte(vcpu: usize, lpi: u32) -> usize {
        (PENDING - MEMORY) as usize + vcpu * 0x1_0000 + lpi as usize / 8
    }

    fn pending_bit(pair: &Pair, vcpu: usize, lpi: u32) -> bool {
        pair.memory.bytes.borrow()[Self::pending_byte(vcpu, lpi)] >> (lpi % 8) & 1 != 0
    }

    /// Maps an event to an LPI in the model.
    fn map(&mut self, pair: &mut Pair, at: (u32, u32), lpi: u32, collection: u16) {
        let target = *self.collections.entry(collection).or_insert(None);
        let is_new = self.events.values().all(|(other, _)| *other != lpi);
        self.events.insert(at, (lpi, Some(collection)));
        if is_new {
            let pending = target.is_some_and(|vcpu| Self::pending_bit(pair, vcpu, lpi));
            let irq = &mut pair.plain.lpis[(lpi - LPI) as usize];
            irq.mapped = true;
            irq.target = target;
            irq.soft_pending = pending;
            Self::configure(pair, lpi);
        }
    }

    fn unmap(&mut self, pair: &mut Pair, at: (u32, u32)) {
        if let Some((lpi, _)) = self.events.remove(&at) {
            let is_last = self.events.values().all(|(other, _)| *other != lpi);
            pair.plain.lpis[(lpi - LPI) as usize].mapped = !is_last;
        }
    }

    fn target(&self, collection: Option<u16>) -> Option<usize> {
        *self.collections.get(&collection?)?
    }

    /// The effect of a device's message.
    fn deliver(&self, pair: &mut Pair, at: (u32, u32)) -> Option<Delivery> {
        let Some(&(lpi, collection)) = self.events.get(&at) else {
            return Some(Delivery::Unmapped);
        };
        let Some(vcpu) = self.target(collection) else {
            return Some(Delivery::Unmapped);
        };
        if !pair.plain.cpus[vcpu].lpis_enabled {
            return None;
        }
        pair.plain.lpis[(lpi - LPI) as usize].soft_pending = true;
        Some(Delivery::Pending)
    }

    pub fn operation(&mut self, pair: &mut Pair) {
        let random = &mut pair.random;
        let device = random.below(DEVICES.into()) as u32;
        let event = random.below(u64::from(EVENTS) + 1) as u32;
        let at = (device, event);
        let lpi = LPI + random.below(LPIS.into()) as u32;
        let collection = random.below(COLLECTIONS.into()) as u16;
        let vcpu = random.below(super::VCPUS as u64) as usize;
        let target = (vcpu as u64) << 16;
        match random.below(50) {
            40.. | 0..14 => {
                let expected = self.deliver(pair, at);
                let delivery = self.its.signal(&mut pair.gic, device, event);
                assert_eq!(delivery.ok(), expected);
            }
            14..16 => {
                let _ = self.deliver(pair, at);
                self.execute(pair, command(0x03, device, event, 0, 0));
            }
            16..24 => {
                let fits = self
                    .devices
                    .get(&device)
                    .is_some_and(|events| event < *events);
                if fits && !self.events.contains_key(&at) {
                    self.map(pair, at, lpi, collection);
                }
                self.execute(pair, command(0x0a, device, event, lpi, collection.into()));
            }
            24..26 => {
                self.collections.insert(collection, Some(vcpu));
                for (lpi, of) in self.events.values() {
                    if *of == Some(collection) {
                        pair.plain.lpis[(lpi - LPI) as usize].target = Some(vcpu);
                    }
                }
                let last = 1 << 63 | target | u64::from(collection);
                self.execute(pair, command(0x09, 0, 0, 0, last));
            }
            26 => {
                if pair.random.once_in(4) {
                    self.unmap_collection(collection);
                    self.execute(pair, command(0x09, 0, 0, 0, collection.into()));
                }
            }
            27 => self.map_device(pair, device),
            28..30 => {
                let new = self.target(Some(collection));
                let old = self.events.get(&at).copied();
                if let (Some(vcpu), Some((lpi, of))) = (new, old)
                    && self.target(of).is_some()
                {
                    self.events.insert(at, (lpi, Some(collection)));
                    pair.plain.lpis[(lpi - LPI) as usize].target = Some(vcpu);
                }
                self.execute(pair, command(0x01, device, event, 0, collection.into()));
            }
            30 => {
                let of = self.events.get(&at).and_then(|(_, of)| *of);
                if self.target(of).is_some() {
                    self.unmap(pair, at);
                }
                self.execute(pair, command(0x0f, device, event, 0, 0));
            }
            31 => {
                if let Some((lpi, _)) = self.events.get(&at) {
                    pair.plain.lpis[(lpi - LPI) as usize].soft_pending = false;
                }
                self.execute(pair, command(0x04, device, event, 0, 0));
            }
            32..34 => {
                // Without an INV command the new configuration does nothing.
                let is_enabled = !pair.random.once_in(4);
                let byte = pair.random.next() as u8 & !1 | u8::from(is_enabled);
                pair.memory
                    .set_u8(CONFIGURATION + u64::from(lpi - LPI), byte);
            }
            34 => {
                if let Some((lpi, _)) = self.events.get(&at) {
                    Self::configure(pair, *lpi);
                }
                self.execute(pair, command(0x0c, device, event, 0, 0));
            }
            35 => {
                if let Some(vcpu) = self.target(Some(collection)) {
                    self.configure_all(pair, vcpu);
                }
                self.execute(pair, command(0x0d, 0, 0, 0, collection.into()));
            }
            36 => {
                let to = pair.random.below(super::VCPUS as u64) as usize;
                for irq in pair.plain.lpis.iter_mut() {
                    if irq.mapped && irq.target == Some(vcpu) {
                        irq.target = Some(to);
                    }
                }
                let mut command = command(0x0e, 0, 0, 0, target);
                command[3] = (to as u64) << 16;
                self.execute(pair, command);
            }
            37 => self.switch_lpis(pair, vcpu),
            38 => {
                // GICR_INVLPIR and GICR_INVALLR.
                let all = pair.random.once_in(2);
                if pair.plain.cpus[vcpu].lpis_enabled && all {
                    self.configure_all(pair, vcpu);
                } else if pair.plain.cpus[vcpu].lpis_enabled {
                    Self::configure(pair, lpi);
                }
                let at = (Frame::Redistributor(vcpu), if all { 0xb0 } else { 0xa0 });
                write32(&mut pair.gic, vcpu, at, lpi, &pair.memory);
            }
            39.. => {
                // Commands that do not exist, and SYNC.
                let number = [0x05, 0x00, 0x77][pair.random.below(3) as usize];
                self.execute(pair, command(number, device, event, lpi, target));
            }
        }
    }

    fn configure_all(&self, pair: &mut Pair, vcpu: usize) {
        for lpi in LPI..LPI + LPIS {
            let irq = &pair.plain.lpis[(lpi - LPI) as usize];
            if irq.mapped && irq.target == Some(vcpu) {
                Self::configure(pair, lpi);
            }
        }
    }

    fn unmap_collection(&mut self, collection: u16) {
        self.collections.remove(&collection);
        for (_, of) in self.events.values_mut() {
            if *of == Some(collection) {
                *of = None;
            }
        }
    }

    fn map_device(&mut self, pair: &mut Pair, device: u32) {
        let valid = !pair.random.once_in(3);
        if self.devices.contains_key(&device) && !pair.random.once_in(8) {
            return;
        }
        for event in 0..EVENTS {
            self.unmap(pair, (device, event));
        }
        self.devices.remove(&device);
        let table = EVENT_TABLES + u64::from(device) * 0x100;
        if valid {
            self.devices.insert(device, EVENTS);
            // A guest gives an ITS a table of zeroes (IHI 0069, 5.2.2).
            for event in 0..u64::from(EVENTS) {
                pair.memory.set_u64(table + 8 * event, 0);
            }
        }
        let last = u64::from(valid) << 63 | table;
        let size = EVENTS.trailing_zeros() - 1;
        self.execute(pair, command(0x08, device, size, 0, last));
    }

    /// Disables the LPIs of a vCPU, or enables them with a new pending table.
    fn switch_lpis(&mut self, pair: &mut Pair, vcpu: usize) {
        let enable = !pair.plain.cpus[vcpu].lpis_enabled;
        pair.plain.cpus[vcpu].lpis_enabled = enable;
        if enable {
            let bits = pair.random.next() as u32 & pair.random.next() as u32;
            for lpi in LPI..LPI + LPIS {
                let byte = Self::pending_byte(vcpu, lpi);
                let bit = (bits >> (lpi - LPI) & 1) as u8;
                let mut bytes = pair.memory.bytes.borrow_mut();
                bytes[byte] = bytes[byte] & !(1 << (lpi % 8)) | bit << (lpi % 8);
                let irq = &mut pair.plain.lpis[(lpi - LPI) as usize];
                if irq.mapped && irq.target == Some(vcpu) {
                    irq.soft_pending = bit != 0;
                }
            }
        }
        let at = (Frame::Redistributor(vcpu), 0);
        write32(&mut pair.gic, vcpu, at, u32::from(enable), &pair.memory);
        assert_eq!(
            crate::read32(&mut pair.gic, vcpu, at),
            6 | u32::from(enable)
        );
    }

    /// Applies a save and a restore of the tables to the model: state that is not in the tables is lost.
    pub fn forget_unsaved(&mut self, pair: &mut Pair) {
        let old = std::mem::take(&mut self.events);
        for irq in pair.plain.lpis.iter_mut() {
            irq.mapped = false;
        }
        for (at, (lpi, collection)) in old {
            if let Some(collection) = collection {
                self.map(pair, at, lpi, collection);
            }
        }
    }
}
