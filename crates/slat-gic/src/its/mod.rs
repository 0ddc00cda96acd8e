//! The Interrupt Translation Service: registers, and the translation of messages (IHI 0069, chapter 5).
//!
//! As in KVM, the tables of the guest are not used while the ITS runs: commands change the maps here, and the VMM saves
//! them into the guest's tables before it reads the guest's memory ([`Its::save_tables`]). A command that the
//! architecture calls an error is ignored, and the queue does not stall.

mod commands;
mod tables;

use crate::error::Error;
use crate::gic::Gic;
use crate::identity::{IMPLEMENTER, PRODUCT, PRODUCT_SHIFT};
use crate::memory::Memory;
use crate::registers::region::{Region, doubles, find, number, part, replace, store, word, words};
use crate::registers::v3::with_attributes;
use alloc::collections::BTreeMap;

/// The size in bytes of the ITS's registers: control frame and translation frame.
pub const ITS_SIZE: u64 = 0x2_0000;
/// The offset of GITS_TRANSLATER, to which devices write their messages.
pub const TRANSLATER: u64 = 0x1_0040;

/// The number of bits of DeviceIDs and of EventIDs, and the size in bytes of an entry of each table.
const DEVICE_BITS: u32 = 16;
const EVENT_BITS: u32 = 16;
const ENTRY: u64 = 8;
/// The number of events that guests may map to LPIs. Without a limit, a guest could use up the host's memory. There are
/// fewer LPIs than this number.
const MAX_EVENTS: usize = 1 << 20;

/// Fields of GITS_CTLR.
const ENABLE: u64 = 1 << 0;
const QUIESCENT: u64 = 1 << 31;
/// GITS_IIDR: the revision of the tables' layout. Only one revision exists.
const REVISION_SHIFT: u32 = 12;
/// The value of GITS_TYPER: there are physical LPIs; and the size of a translation table entry, of EventIDs and of
/// DeviceIDs, each minus one. GITS_TYPER.PTA is zero: redistributors are named by their processor number.
const TYPER: u64 =
    1 | (ENTRY - 1) << 4 | ((EVENT_BITS - 1) as u64) << 8 | ((DEVICE_BITS - 1) as u64) << 13;

/// Fields of GITS_CBASER and GITS_BASER.
const VALID: u64 = 1 << 63;
const INDIRECT: u64 = 1 << 62;
const INNER_SHIFT: u32 = 59;
const OUTER_SHIFT: u32 = 53;
/// The address of a queue is aligned to 64 KiB, as in KVM, and the size of the queue is in pages of 4 KiB.
const QUEUE_ADDRESS: u64 = 0x000f_ffff_ffff_0000;
const QUEUE_UNALIGNED: u64 = 0xf000;
const QUEUE_PAGES: u64 = 0xff;
const QUEUE_PAGE_SHIFT: u32 = 12;
/// The bits of an offset in the queue that GITS_CREADR and GITS_CWRITER hold. An offset is a multiple of a command's 32
/// bytes.
const QUEUE_OFFSET: u64 = 0xf_ffe0;
const TYPE_SHIFT: u32 = 56;
const ENTRY_SHIFT: u32 = 48;
const TABLE_READ_ONLY: u64 = 7 << TYPE_SHIFT | 0x1f << ENTRY_SHIFT;
const PAGE_SIZE: u64 = 3 << 8;
/// The value of the page size field: 64 KiB, the only page size.
const PAGE_64K: u64 = 2 << 8;
const TYPE_DEVICES: u64 = 1;
const TYPE_COLLECTIONS: u64 = 4;
/// The value of GITS_BASER after reset: inner shareable, write-back.
const RESET_TABLE: u64 = 3 << INNER_SHIFT | 1 << 10 | PAGE_64K | (ENTRY - 1) << ENTRY_SHIFT;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    Control,
    Implementer,
    Type,
    QueueBase,
    Writer,
    Reader,
    Tables,
    Identification,
}

/// The registers of the control frame (IHI 0069, the ITS register map).
const REGISTERS: [Region<Register>; 8] = [
    word(0x0000, Register::Control),
    word(0x0004, Register::Implementer),
    doubles(0x0008, 8, Register::Type),
    doubles(0x0080, 8, Register::QueueBase),
    doubles(0x0088, 8, Register::Writer),
    doubles(0x0090, 8, Register::Reader),
    doubles(0x0100, 0x40, Register::Tables),
    words(0xffd0, 0x30, Register::Identification),
];
/// The offsets between which the VMM accesses registers of 64 bits.
const FIRST_DOUBLE: u64 = 0x0008;
const LAST_DOUBLE_END: u64 = 0xffd0;

/// An event of a device that the guest has mapped to an LPI.
#[derive(Clone, Copy, Debug)]
struct Event {
    lpi: u32,
    /// The number of the collection. `None`: the collection was unmapped after the event was mapped to it.
    collection: Option<u16>,
}

/// A device that the guest has mapped.
#[derive(Clone, Debug)]
struct Device {
    /// The address of the interrupt translation table.
    table: u64,
    event_bits: u32,
    events: BTreeMap<u32, Event>,
}

/// The result of [`Its::signal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The LPI is pending.
    Pending,
    /// The guest has not mapped the event.
    Unmapped,
}

/// An interrupt translation service (ITS).
#[derive(Clone, Debug)]
pub struct Its {
    enabled: bool,
    queue_base: u64,
    reader: u64,
    writer: u64,
    device_table: u64,
    collection_table: u64,
    devices: BTreeMap<u32, Device>,
    /// The vCPU of each collection. `None`: events were mapped to the collection before the collection was mapped.
    collections: BTreeMap<u16, Option<usize>>,
    /// The number of events of all devices.
    events: usize,
}

impl Default for Its {
    fn default() -> Self {
        Self::new()
    }
}

impl Its {
    /// Creates an ITS as after reset. The owner then calls [`Gic::attach_its`].
    pub const fn new() -> Self {
        Its {
            enabled: false,
            queue_base: 0,
            reader: 0,
            writer: 0,
            device_table: RESET_TABLE | TYPE_DEVICES << TYPE_SHIFT,
            collection_table: RESET_TABLE | TYPE_COLLECTIONS << TYPE_SHIFT,
            devices: BTreeMap::new(),
            collections: BTreeMap::new(),
            events: 0,
        }
    }

    /// Resets the ITS: KVM_DEV_ARM_ITS_CTRL_RESET.
    pub fn reset(&mut self, gic: &mut Gic) {
        self.device_table &= !VALID;
        self.collection_table &= !VALID;
        self.queue_base = 0;
        self.reader = 0;
        self.writer = 0;
        self.enabled = false;
        self.clear(gic);
        gic.settle();
    }

    /// Unmaps all devices and all collections.
    fn clear(&mut self, gic: &mut Gic) {
        self.unmap_devices(gic);
        self.unmap_collections();
    }

    fn unmap_devices(&mut self, gic: &mut Gic) {
        while let Some((_, device)) = self.devices.pop_first() {
            self.forget_events(gic, &device);
        }
    }

    /// Unmaps the events of a device that is no longer in the map.
    fn forget_events(&mut self, gic: &mut Gic, device: &Device) {
        self.events -= device.events.len();
        for event in device.events.values() {
            gic.unmap_lpi(event.lpi);
        }
    }

    fn unmap_collections(&mut self) {
        self.collections.clear();
        for event in self
            .devices
            .values_mut()
            .flat_map(|device| device.events.values_mut())
        {
            event.collection = None;
        }
    }

    /// Returns the vCPU of a collection. `None`: the collection is not mapped.
    fn target(&self, collection: Option<u16>) -> Option<usize> {
        self.collections.get(&collection?).copied().flatten()
    }

    fn event(&self, device: u32, event: u32) -> Option<Event> {
        self.devices.get(&device)?.events.get(&event).copied()
    }

    /// Translates a message that a device has written to GITS_TRANSLATER, and makes its LPI pending.
    ///
    /// # Errors
    /// [`Error::Busy`]: the ITS or the LPIs of the target are disabled.
    pub fn signal(&self, gic: &mut Gic, device: u32, event: u32) -> Result<Delivery, Error> {
        let delivery = self.translate(gic, device, event);
        gic.settle();
        delivery
    }

    fn translate(&self, gic: &mut Gic, device: u32, event: u32) -> Result<Delivery, Error> {
        if !self.enabled {
            return Err(Error::Busy);
        }
        let Some(event) = self.event(device, event) else {
            return Ok(Delivery::Unmapped);
        };
        let Some(vcpu) = self.target(event.collection) else {
            return Ok(Delivery::Unmapped);
        };
        if !gic.vcpus[vcpu].lpis_enabled {
            return Err(Error::Busy);
        }
        gic.set_lpi_pending(event.lpi, true);
        Ok(Delivery::Pending)
    }

    /// Reads a register for the guest. An access to an offset without a register, or of a wrong width, reads as zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let region = find(&REGISTERS, offset, data.len(), 1);
        let value = region.map_or(0, |region| self.read_register(region, offset, data.len()));
        store(value, data);
    }

    /// Writes a register for the guest, which may execute commands.
    pub fn write(&mut self, offset: u64, data: &[u8], gic: &mut Gic, memory: &impl Memory) {
        let region = find(&REGISTERS, offset, data.len(), 1);
        if let (Some(region), Some(value)) = (region, number(data)) {
            self.write_register(region, offset, data.len(), value, gic, memory);
            gic.settle();
        }
    }

    fn read_register(&self, region: &Region<Register>, offset: u64, width: usize) -> u64 {
        let value = match region.register {
            Register::Control => {
                let quiescent = if self.reader == self.writer {
                    QUIESCENT
                } else {
                    0
                };
                let enabled = if self.enabled { ENABLE } else { 0 };
                quiescent | enabled
            }
            Register::Implementer => u64::from(PRODUCT << PRODUCT_SHIFT | IMPLEMENTER),
            Register::Type => TYPER,
            Register::QueueBase => self.queue_base,
            Register::Writer => self.writer,
            Register::Reader => self.reader,
            Register::Tables => match offset & 0x38 {
                0 => self.device_table,
                8 => self.collection_table,
                _ => 0,
            },
            Register::Identification => identification(offset),
        };
        match region.is_double() {
            true => part(value, offset as u32, width),
            false => value,
        }
    }

    fn write_register(
        &mut self,
        region: &Region<Register>,
        offset: u64,
        width: usize,
        value: u64,
        gic: &mut Gic,
        memory: &impl Memory,
    ) {
        let half = offset as u32;
        match region.register {
            Register::Control => self.write_control(value, gic, memory),
            Register::QueueBase if !self.enabled => {
                let new = replace(self.queue_base, half, width, value);
                self.queue_base = with_attributes(new, INNER_SHIFT, OUTER_SHIFT) & !QUEUE_UNALIGNED;
                self.reader = 0;
                self.writer = 0;
            }
            Register::Writer => {
                let new = replace(self.writer, half, width, value) & QUEUE_OFFSET;
                if new < self.queue_size() {
                    self.writer = new;
                    self.execute(gic, memory);
                }
            }
            Register::Tables if !self.enabled => self.write_table(half, width, value, gic),
            _ => (),
        }
    }

    /// Writes GITS_CTLR. As in KVM, an ITS without tables or queue stays disabled.
    fn write_control(&mut self, value: u64, gic: &mut Gic, memory: &impl Memory) {
        let enable = value & ENABLE != 0;
        let bases = self.device_table & self.collection_table & self.queue_base;
        if self.enabled || !enable || bases & VALID != 0 {
            self.enabled = enable;
            self.execute(gic, memory);
        }
    }

    fn write_table(&mut self, offset: u32, width: usize, value: u64, gic: &mut Gic) {
        // The collection table has only one level. The ITS has no tables but the device table and the collection table.
        let (old, kind, missing) = match offset & 0x38 {
            0 => (&mut self.device_table, TYPE_DEVICES, 0),
            8 => (&mut self.collection_table, TYPE_COLLECTIONS, INDIRECT),
            _ => return,
        };
        let new = replace(*old, offset, width, value) & !(TABLE_READ_ONLY | PAGE_SIZE | missing);
        let new = new | kind << TYPE_SHIFT | (ENTRY - 1) << ENTRY_SHIFT | PAGE_64K;
        let new = with_attributes(new, INNER_SHIFT, OUTER_SHIFT);
        // A driver that resumes after suspend writes the register's current value again. Such a write must not unmap
        // anything.
        match (core::mem::replace(old, new) != new, kind) {
            (true, TYPE_DEVICES) => self.unmap_devices(gic),
            (true, _) => self.unmap_collections(),
            (false, _) => (),
        }
    }

    fn queue_size(&self) -> u64 {
        ((self.queue_base & QUEUE_PAGES) + 1) << QUEUE_PAGE_SHIFT
    }

    /// Whether the VMM's attribute interface has a register at `offset`: KVM_HAS_DEVICE_ATTR.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the offset is not aligned. [`Error::NoAttribute`]: there is no register.
    pub fn has_register(&self, offset: u64) -> Result<(), Error> {
        client_region(offset).map(|_| ())
    }

    /// Reads a register for the VMM: KVM_DEV_ARM_VGIC_GRP_ITS_REGS. 64-bit registers are read whole.
    ///
    /// # Errors
    /// Those of [`has_register`](Self::has_register).
    pub fn client_read(&self, offset: u64) -> Result<u64, Error> {
        let region = client_region(offset)?;
        Ok(self.read_register(region, offset, client_width(region)))
    }

    /// Writes a register for the VMM. 64-bit registers are written whole.
    ///
    /// # Errors
    /// Those of [`client_read`](Self::client_read); [`Error::Invalid`]: GITS_IIDR names another layout of the tables,
    /// or GITS_CREADR is outside the queue; [`Error::Busy`]: GITS_CREADR of an enabled ITS.
    pub fn client_write(
        &mut self,
        offset: u64,
        value: u64,
        gic: &mut Gic,
        memory: &impl Memory,
    ) -> Result<(), Error> {
        let region = client_region(offset)?;
        match region.register {
            Register::Implementer => match value >> REVISION_SHIFT & 0xf {
                0 => Ok(()),
                _ => Err(Error::Invalid),
            },
            Register::Reader if self.enabled => Err(Error::Busy),
            Register::Reader => {
                let new = value & QUEUE_OFFSET;
                if new >= self.queue_size() {
                    return Err(Error::Invalid);
                }
                self.reader = new;
                Ok(())
            }
            _ => {
                self.write_register(region, offset, client_width(region), value, gic, memory);
                gic.settle();
                Ok(())
            }
        }
    }
}

/// Returns the region of a register that the VMM names.
fn client_region(offset: u64) -> Result<&'static Region<Register>, Error> {
    let alignment = match (FIRST_DOUBLE..LAST_DOUBLE_END).contains(&offset) {
        true => 8,
        false => 4,
    };
    if !offset.is_multiple_of(alignment) {
        return Err(Error::Invalid);
    }
    find(&REGISTERS, offset, 4, 1).ok_or(Error::NoAttribute)
}

fn client_width(region: &Region<Register>) -> usize {
    match region.is_double() {
        true => 8,
        false => 4,
    }
}

/// Reads an identification register: part 0x492 of Arm, GICv3, a page of 64 KiB (IHI 0069, identification
/// registers).
fn identification(offset: u64) -> u64 {
    match offset {
        0xffd0 => 0x40,
        0xffe0 => 0x92,
        0xffe4 => 0xb4,
        0xffe8 => 0x3b,
        0xfff0 => 0x0d,
        0xfff4 => 0xf0,
        0xfff8 => 0x05,
        0xfffc => 0xb1,
        _ => 0,
    }
}
