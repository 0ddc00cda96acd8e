//! The commands in the ITS's command queue (IHI 0069, 5.3).

use super::{
    DEVICE_BITS, Device, ENTRY, EVENT_BITS, Event, INDIRECT, Its, MAX_EVENTS, QUEUE_ADDRESS,
};
use crate::gic::Gic;
use crate::interrupt::LPIS;
use crate::memory::{Memory, read_u64, write_u64};
use alloc::collections::BTreeMap;

/// The size of a command in bytes.
const COMMAND: u64 = 32;

const MOVI: u64 = 0x01;
const INT: u64 = 0x03;
const CLEAR: u64 = 0x04;
const MAPD: u64 = 0x08;
const MAPC: u64 = 0x09;
const MAPTI: u64 = 0x0a;
const MAPI: u64 = 0x0b;
const INV: u64 = 0x0c;
const INVALL: u64 = 0x0d;
const MOVALL: u64 = 0x0e;
const DISCARD: u64 = 0x0f;

/// Fields of GITS_BASER: bits 47:16 of the table's address; bits 51:48 of this address, which are in bits 15:12 of the
/// register; and the number of pages minus one.
const TABLE_ADDRESS: u64 = 0x0000_ffff_ffff_0000;
const TABLE_ADDRESS_HIGH_SHIFT: u32 = 36;
const TABLE_PAGES: u64 = 0xff;
pub(super) const TABLE_PAGE: u64 = 0x1_0000;
/// Fields of an entry in the first level of a two-level table.
pub(super) const LEVEL_ONE_VALID: u64 = 1 << 63;
pub(super) const LEVEL_ONE_ADDRESS: u64 = 0x000f_ffff_ffff_0000;

/// A command of the ITS, as its four 64-bit words.
struct Command([u64; 4]);

impl Command {
    fn field(&self, word: usize, shift: u32, bits: u32) -> u64 {
        self.0[word] >> shift & ((1 << bits) - 1)
    }

    fn device(&self) -> u32 {
        self.field(0, 32, 32) as u32
    }

    fn event(&self) -> u32 {
        self.field(1, 0, 32) as u32
    }

    fn collection(&self) -> u16 {
        self.field(2, 0, 16) as u16
    }

    fn is_valid(&self) -> bool {
        self.field(2, 63, 1) != 0
    }

    /// Returns the processor number in word number `word` of the command.
    fn processor(&self, word: usize) -> u32 {
        self.field(word, 16, 32) as u32
    }
}

/// A table that GITS_BASER describes.
pub(super) struct Table {
    pub(super) base: u64,
    pub(super) size: u64,
    pub(super) is_indirect: bool,
}

impl Table {
    pub(super) fn of(register: u64) -> Self {
        let high = (register & 0xf000) << TABLE_ADDRESS_HIGH_SHIFT;
        Table {
            base: register & TABLE_ADDRESS | high,
            size: ((register & TABLE_PAGES) + 1) * TABLE_PAGE,
            is_indirect: register & INDIRECT != 0,
        }
    }

    /// Returns the address of an entry, if the table has such an entry and it is in guest memory.
    pub(super) fn entry(&self, index: u64, memory: &impl Memory) -> Option<u64> {
        let address = match self.is_indirect {
            false => (index < self.size / ENTRY).then_some(self.base + index * ENTRY)?,
            true => {
                let entries = TABLE_PAGE / ENTRY;
                let first = index / entries;
                if first >= self.size / ENTRY {
                    return None;
                }
                let pointer = read_u64(memory, self.base + first * ENTRY).ok()?;
                if pointer & LEVEL_ONE_VALID == 0 {
                    return None;
                }
                (pointer & LEVEL_ONE_ADDRESS) + index % entries * ENTRY
            }
        };
        memory.has(address).then_some(address)
    }
}

impl Its {
    /// Returns the address of the entry of a device in the device table.
    pub(super) fn device_entry(&self, device: u32, memory: &impl Memory) -> Option<u64> {
        let exists = device < 1 << DEVICE_BITS;
        let table = Table::of(self.device_table);
        exists.then(|| table.entry(device.into(), memory)).flatten()
    }

    /// Whether the guest's collection table is large enough for an entry of `collection`.
    pub(super) fn has_collection_entry(&self, collection: u16, memory: &impl Memory) -> bool {
        let table = Table::of(self.collection_table);
        table.entry(collection.into(), memory).is_some()
    }

    /// Executes the commands between GITS_CREADR and GITS_CWRITER. A command that is not in memory is skipped (IHI
    /// 0069, 5.3 allows this).
    pub(super) fn execute(&mut self, gic: &mut Gic, memory: &impl Memory) {
        if !self.enabled {
            return;
        }
        while self.reader != self.writer {
            let address = (self.queue_base & QUEUE_ADDRESS) + self.reader;
            let mut words = [0; 4];
            let mut is_read = true;
            for (word, at) in words.iter_mut().zip((address..).step_by(8)) {
                match read_u64(memory, at) {
                    Ok(value) => *word = value,
                    Err(_) => is_read = false,
                }
            }
            if is_read {
                // `None` means that the command was wrong. Such a command is ignored.
                let _ = self.command(&Command(words), gic, memory);
            }
            self.reader += COMMAND;
            if self.reader == self.queue_size() {
                self.reader = 0;
            }
        }
    }

    /// Executes a command. Returns `None` if the command is an error. Such a command changes nothing.
    fn command(&mut self, command: &Command, gic: &mut Gic, memory: &impl Memory) -> Option<()> {
        match command.field(0, 0, 8) {
            MAPD => self.map_device(command, gic, memory),
            MAPC => self.map_collection(command, gic, memory),
            MAPTI => {
                let lpi = command.field(1, 32, 32) as u32;
                self.map_event(command, lpi, gic, memory)
            }
            MAPI => self.map_event(command, command.event(), gic, memory),
            MOVI => self.move_event(command, gic),
            DISCARD => self.discard(command, gic, memory),
            INT => self
                .translate(gic, command.device(), command.event())
                .ok()
                .map(|_| ()),
            CLEAR => {
                let event = self.event(command.device(), command.event())?;
                gic.set_lpi_pending(event.lpi, false);
                Some(())
            }
            INV => {
                let event = self.event(command.device(), command.event())?;
                gic.reload_lpi(event.lpi, memory).ok()
            }
            INVALL => {
                let vcpu = self.target(Some(command.collection()))?;
                gic.reload_lpis(vcpu, memory);
                Some(())
            }
            MOVALL => {
                let from = gic.vcpu_with_id(command.processor(2))?;
                let to = gic.vcpu_with_id(command.processor(3))?;
                if from != to {
                    gic.move_lpis(from, to);
                }
                Some(())
            }
            // SYNC does nothing, because all earlier commands are complete. Other commands do not exist.
            _ => None,
        }
    }

    /// Maps or unmaps a device. If the device was mapped already, its events are unmapped.
    fn map_device(&mut self, command: &Command, gic: &mut Gic, memory: &impl Memory) -> Option<()> {
        let device = command.device();
        let entry = self.device_entry(device, memory)?;
        let event_bits = command.field(1, 0, 5) as u32 + 1;
        if command.is_valid() && event_bits > EVENT_BITS {
            return None;
        }
        let table = command.field(2, 8, 44) << 8;
        if command.is_valid() {
            self.add_device(device, table, event_bits, gic);
            return Some(());
        }
        self.remove_device(device, gic);
        // Clears the device's entry in the guest's table. An earlier save may have stored the device in this entry, and
        // a restore would map the device again.
        write_u64(memory, entry, 0).ok()
    }

    /// Maps a device without events.
    pub(super) fn add_device(&mut self, device: u32, table: u64, event_bits: u32, gic: &mut Gic) {
        let new = Device {
            table,
            event_bits,
            events: BTreeMap::new(),
        };
        if let Some(old) = self.devices.insert(device, new) {
            self.forget_events(gic, &old);
        }
    }

    fn remove_device(&mut self, device: u32, gic: &mut Gic) {
        if let Some(old) = self.devices.remove(&device) {
            self.forget_events(gic, &old);
        }
    }

    fn map_collection(
        &mut self,
        command: &Command,
        gic: &mut Gic,
        memory: &impl Memory,
    ) -> Option<()> {
        let collection = command.collection();
        if !command.is_valid() {
            self.collections.remove(&collection);
            for event in self.events_of(collection) {
                event.collection = None;
            }
            return Some(());
        }
        let vcpu = gic.vcpu_with_id(command.processor(2))?;
        let is_known = self.collections.contains_key(&collection);
        if !is_known && !self.has_collection_entry(collection, memory) {
            return None;
        }
        self.collections.insert(collection, Some(vcpu));
        for event in self.events_of(collection) {
            gic.retarget_lpi(event.lpi, vcpu);
        }
        Some(())
    }

    fn events_of(&mut self, collection: u16) -> impl Iterator<Item = &mut Event> {
        let devices = self.devices.values_mut();
        let events = devices.flat_map(|device| device.events.values_mut());
        events.filter(move |event| event.collection == Some(collection))
    }

    fn map_event(
        &mut self,
        command: &Command,
        lpi: u32,
        gic: &mut Gic,
        memory: &impl Memory,
    ) -> Option<()> {
        let (device, event) = (command.device(), command.event());
        let mapped = self.devices.get(&device)?;
        let is_allowed = u64::from(event) < 1 << mapped.event_bits
            && (LPIS..gic.lpi_limit()).contains(&lpi)
            && !mapped.events.contains_key(&event);
        if !is_allowed {
            return None;
        }
        let collection = command.collection();
        let is_known = self.collections.contains_key(&collection);
        if !is_known && !self.has_collection_entry(collection, memory) {
            return None;
        }
        self.add_event(device, event, lpi, collection, gic, memory)
    }

    /// Maps an event of a mapped device, and the LPI. A collection that is not mapped yet gets its vCPU later.
    pub(super) fn add_event(
        &mut self,
        device: u32,
        event: u32,
        lpi: u32,
        collection: u16,
        gic: &mut Gic,
        memory: &impl Memory,
    ) -> Option<()> {
        let mapped = self
            .devices
            .get_mut(&device)
            .filter(|_| self.events < MAX_EVENTS)?;
        let target = self.collections.get(&collection).copied().flatten();
        gic.map_lpi(lpi, target, memory).ok()?;
        self.collections.entry(collection).or_insert(None);
        let new = Event {
            lpi,
            collection: Some(collection),
        };
        match mapped.events.insert(event, new) {
            Some(old) => gic.unmap_lpi(old.lpi),
            None => self.events += 1,
        }
        Some(())
    }

    fn move_event(&mut self, command: &Command, gic: &mut Gic) -> Option<()> {
        let collection = Some(command.collection());
        let event = self.event(command.device(), command.event())?;
        self.target(event.collection)?;
        let vcpu = self.target(collection)?;
        let device = self.devices.get_mut(&command.device())?;
        device.events.get_mut(&command.event())?.collection = collection;
        gic.retarget_lpi(event.lpi, vcpu);
        Some(())
    }

    fn discard(&mut self, command: &Command, gic: &mut Gic, memory: &impl Memory) -> Option<()> {
        let (device, event) = (command.device(), command.event());
        let mapped = self.event(device, event)?;
        self.target(mapped.collection)?;
        let device = self.devices.get_mut(&device)?;
        device.events.remove(&event)?;
        let entry = device.table + u64::from(event) * ENTRY;
        self.events -= 1;
        gic.unmap_lpi(mapped.lpi);
        write_u64(memory, entry, 0).ok()
    }
}
