//! The tables of an ITS in guest memory, in the layout of KVM's revision 0 (its documentation of
//! KVM_DEV_TYPE_ARM_VGIC_ITS). All entries are little-endian words.
//!
//! | entry | 63 | 62:52 or 62:49 | 51:16 or 48:5 | 15:0 or 4:0 |
//! |---|---|---|---|---|
//! | device | valid | devices to the next entry | bits 51:8 of the address of its events | bits of EventIDs less one |
//! | event | 63:48: events to the next entry | | 47:16: LPI, zero if invalid | collection |
//! | collection | valid | | processor number | collection |
//!
//! The numbers of devices and events are the indices of their entries. Each entry has the distance to the next valid
//! entry; a distance of zero ends a table. Collections are in any order, and the first invalid entry ends their table.

use super::commands::{LEVEL_ONE_ADDRESS, LEVEL_ONE_VALID, TABLE_PAGE, Table};
use super::{DEVICE_BITS, Device, ENTRY, EVENT_BITS, Its, VALID};
use crate::error::Error;
use crate::gic::Gic;
use crate::interrupt::LPIS;
use crate::memory::{Memory, read_u64, write_u64};
use core::ops::Range;

/// Fields of a device's entry in the device table.
const DEVICE_NEXT_SHIFT: u32 = 49;
const DEVICE_NEXT_MAX: u64 = (1 << 14) - 1;
const DEVICE_TABLE_SHIFT: u32 = 5;
const DEVICE_TABLE: u64 = (1 << 44) - 1;
const DEVICE_SIZE: u64 = 0x1f;
/// Fields of an event's entry in its device's interrupt translation table.
const EVENT_NEXT_SHIFT: u32 = 48;
const EVENT_NEXT_MAX: u64 = (1 << 16) - 1;
const EVENT_LPI_SHIFT: u32 = 16;
/// Fields of a collection's entry in the collection table.
const COLLECTION_TARGET_SHIFT: u32 = 16;
/// The processor number that is saved for a collection that events name, but that is not mapped. The value is KVM's.
const UNMAPPED: u32 = u32::MAX;

/// The number of event entries that one restore reads. Without a limit, a guest whose devices all share one large table
/// would keep the VMM busy for minutes.
const MAX_READ: u64 = 1 << 24;

impl Its {
    /// Saves the maps into the guest's tables: KVM_DEV_ARM_ITS_SAVE_TABLES.
    ///
    /// # Errors
    /// [`Error::Fault`]: a table is not in memory.
    pub fn save_tables(&self, gic: &Gic, memory: &impl Memory) -> Result<(), Error> {
        self.save_devices(memory)?;
        self.save_collections(gic, memory)
    }

    fn save_devices(&self, memory: &impl Memory) -> Result<(), Error> {
        if self.device_table & VALID == 0 {
            return Ok(());
        }
        // If the guest has removed the part of the device table that has a device's entry, this device is not saved,
        // but all others are.
        let devices = self.devices.iter();
        let with_entries =
            devices.filter_map(|(&id, device)| Some((id, self.device_entry(id, memory)?, device)));
        let mut devices = with_entries.peekable();
        while let Some((id, entry, device)) = devices.next() {
            save_events(device, memory)?;
            let next = devices.peek().map_or(0, |(next, ..)| u64::from(*next - id));
            let value = VALID
                | next.min(DEVICE_NEXT_MAX) << DEVICE_NEXT_SHIFT
                | (device.table >> 8) << DEVICE_TABLE_SHIFT
                | u64::from(device.event_bits - 1);
            write_u64(memory, entry, value)?;
        }
        Ok(())
    }

    fn save_collections(&self, gic: &Gic, memory: &impl Memory) -> Result<(), Error> {
        if self.collection_table & VALID == 0 {
            return Ok(());
        }
        let table = Table::of(self.collection_table);
        let mut address = table.base;
        // The table has space for all mapped collections: a collection that does not fit cannot be mapped, and a change
        // of the table unmaps all collections.
        for (&collection, target) in &self.collections {
            let number = target.map_or(UNMAPPED, |vcpu| gic.vcpus[vcpu].name.id);
            let target = u64::from(number) << COLLECTION_TARGET_SHIFT;
            write_u64(memory, address, VALID | target | u64::from(collection))?;
            address += ENTRY;
        }
        // A full table needs no invalid entry at its end.
        if address < table.base + table.size {
            write_u64(memory, address, 0)?;
        }
        Ok(())
    }

    /// Restores the maps from the guest's tables: KVM_DEV_ARM_ITS_RESTORE_TABLES. The VMM has restored the GIC, and all
    /// registers of the ITS except GITS_CTLR.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::Exists`]: the tables are inconsistent. [`Error::Fault`]: a table is not in
    /// memory. Nothing is mapped then.
    pub fn restore_tables(&mut self, gic: &mut Gic, memory: &impl Memory) -> Result<(), Error> {
        let collections = self.restore_collections(gic, memory);
        let restored = collections.and_then(|()| self.restore_devices(gic, memory));
        if restored.is_err() {
            self.clear(gic);
        }
        gic.settle();
        restored
    }

    fn restore_collections(&mut self, gic: &Gic, memory: &impl Memory) -> Result<(), Error> {
        if self.collection_table & VALID == 0 {
            return Ok(());
        }
        let table = Table::of(self.collection_table);
        for address in (table.base..table.base + table.size).step_by(ENTRY as usize) {
            let entry = read_u64(memory, address)?;
            if entry & VALID == 0 {
                break;
            }
            let collection = entry as u16;
            let target = match (entry >> COLLECTION_TARGET_SHIFT) as u32 {
                UNMAPPED => None,
                number => Some(gic.vcpu_with_id(number).ok_or(Error::Invalid)?),
            };
            if self.collections.contains_key(&collection) {
                return Err(Error::Exists);
            }
            if !self.has_collection_entry(collection, memory) {
                return Err(Error::Invalid);
            }
            self.collections.insert(collection, target);
        }
        Ok(())
    }

    fn restore_devices(&mut self, gic: &mut Gic, memory: &impl Memory) -> Result<(), Error> {
        if self.device_table & VALID == 0 {
            return Ok(());
        }
        let table = Table::of(self.device_table);
        let all = 1 << DEVICE_BITS;
        let mut budget = MAX_READ;
        if !table.is_indirect {
            let devices = 0..all.min(table.size / ENTRY);
            return self
                .restore_device_page(table.base, devices, &mut budget, gic, memory)
                .map(|_| ());
        }
        let entries = TABLE_PAGE / ENTRY;
        let pages = (all / entries).min(table.size / ENTRY);
        for page in 0..pages {
            let pointer = read_u64(memory, table.base + page * ENTRY)?;
            if pointer & LEVEL_ONE_VALID == 0 {
                continue;
            }
            let devices = page * entries..(page + 1) * entries;
            let base = pointer & LEVEL_ONE_ADDRESS;
            if self.restore_device_page(base, devices, &mut budget, gic, memory)? {
                break;
            }
        }
        Ok(())
    }

    /// Restores the devices of a contiguous part of the device table. Returns whether an entry has ended the table.
    fn restore_device_page(
        &mut self,
        base: u64,
        devices: Range<u64>,
        budget: &mut u64,
        gic: &mut Gic,
        memory: &impl Memory,
    ) -> Result<bool, Error> {
        let mut device = devices.start;
        while device < devices.end {
            let entry = read_u64(memory, base + (device - devices.start) * ENTRY)?;
            if entry & VALID == 0 {
                device += 1;
                continue;
            }
            let id = device as u32;
            let event_bits = (entry & DEVICE_SIZE) as u32 + 1;
            if event_bits > EVENT_BITS || self.device_entry(id, memory).is_none() {
                return Err(Error::Invalid);
            }
            let events = (entry >> DEVICE_TABLE_SHIFT & DEVICE_TABLE) << 8;
            self.add_device(id, events, event_bits, gic);
            self.restore_events(id, events, event_bits, budget, gic, memory)?;
            let next = entry >> DEVICE_NEXT_SHIFT & DEVICE_NEXT_MAX;
            if next == 0 {
                return Ok(true);
            }
            device += next;
        }
        Ok(false)
    }

    fn restore_events(
        &mut self,
        device: u32,
        table: u64,
        event_bits: u32,
        budget: &mut u64,
        gic: &mut Gic,
        memory: &impl Memory,
    ) -> Result<(), Error> {
        let mut event = 0;
        while event < 1 << event_bits {
            *budget = budget.checked_sub(1).ok_or(Error::Invalid)?;
            let entry = read_u64(memory, table + event * ENTRY)?;
            let lpi = (entry >> EVENT_LPI_SHIFT) as u32;
            if lpi == 0 {
                event += 1;
                continue;
            }
            let next = entry >> EVENT_NEXT_SHIFT;
            let collection = entry as u16;
            let is_consistent = (LPIS..gic.lpi_limit()).contains(&lpi)
                && event + next < 1 << event_bits
                && self.collections.contains_key(&collection);
            if !is_consistent {
                return Err(Error::Invalid);
            }
            let added = self.add_event(device, event as u32, lpi, collection, gic, memory);
            added.ok_or(Error::Fault)?;
            if next == 0 {
                break;
            }
            event += next;
        }
        Ok(())
    }
}

/// Saves the events of a device. An event whose collection was unmapped can reach no vCPU: its entry becomes invalid.
fn save_events(device: &Device, memory: &impl Memory) -> Result<(), Error> {
    let address = |id: u32| device.table + u64::from(id) * ENTRY;
    let mut following = None;
    // Saves the last event first, because each entry has the distance to the next valid entry.
    for (&id, event) in device.events.iter().rev() {
        let Some(collection) = event.collection else {
            write_u64(memory, address(id), 0)?;
            continue;
        };
        let next = following.map_or(0, |next: u32| u64::from(next - id));
        let value = next.min(EVENT_NEXT_MAX) << EVENT_NEXT_SHIFT
            | u64::from(event.lpi) << EVENT_LPI_SHIFT
            | u64::from(collection);
        write_u64(memory, address(id), value)?;
        following = Some(id);
    }
    Ok(())
}
