//! LPIs: their configuration table, their pending tables, and their targets.
//!
//! As in KVM, an LPI exists while an ITS maps an event to it. Its configuration is read from the guest's table when the
//! LPI is mapped. It is read again only when the guest invalidates cached configurations by a command or a register
//! (IHI 0069, 5.1).

use super::Gic;
use crate::error::Error;
use crate::interrupt::{Group, Interrupt, LPIS, PRIORITIES, Trigger};
use crate::memory::{Fault, Memory};
use alloc::vec::Vec;

/// GICR_PROPBASER and GICR_PENDBASER after reset: inner shareable, write-back, as KVM's are.
pub(crate) const RESET_BASE: u64 = 3 << 7 | 1 << 10;
/// GICR_PENDBASER.PTZ: all bits of the pending table are zero.
const PENDING_TABLE_ZERO: u64 = 1 << 62;
const CONFIGURATION_ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const PENDING_ADDRESS: u64 = 0x000f_ffff_ffff_0000;
/// The number of bits of an INTID in a GIC with LPIs.
const ID_BITS: u64 = 16;

/// An LPI, and the number of events that are mapped to it.
#[derive(Clone, Debug)]
pub(crate) struct Lpi {
    pub(crate) interrupt: Interrupt,
    pub(crate) events: u32,
}

impl Gic {
    /// Returns the first INTID that is too large for the configuration table.
    pub(crate) fn lpi_limit(&self) -> u32 {
        let bits = (self.propbaser & 0x1f) + 1;
        1 << bits.min(ID_BITS)
    }

    /// Maps one more event to an LPI. For a new LPI, sets the target, and reads the configuration and the pending bit
    /// from the guest's tables.
    ///
    /// # Errors
    /// A table of the guest is not in memory. The LPI has not changed then.
    pub(crate) fn map_lpi(
        &mut self,
        intid: u32,
        target: Option<usize>,
        memory: &impl Memory,
    ) -> Result<(), Fault> {
        if let Some(lpi) = self.lpis.get_mut(&intid) {
            lpi.events += 1;
            return Ok(());
        }
        let mut interrupt = Interrupt::new(Group::One, Trigger::Edge, target);
        configure(&mut interrupt, self.configuration(intid, memory)?);
        if let Some(vcpu) = target {
            interrupt.latch = self.take_pending_bit(vcpu, intid, memory)?;
        }
        let lpi = Lpi {
            interrupt,
            events: 1,
        };
        self.lpis.insert(intid, lpi);
        self.requeue(0, intid);
        Ok(())
    }

    /// Unmaps one event from an LPI. When no event is mapped to the LPI any more, unmaps the LPI.
    pub(crate) fn unmap_lpi(&mut self, intid: u32) {
        let Some(lpi) = self.lpis.get_mut(&intid) else {
            return;
        };
        lpi.events -= 1;
        if lpi.events == 0 {
            let queued = lpi.interrupt.queued;
            self.move_entry(intid, queued, None);
            self.lpis.remove(&intid);
        }
    }

    fn configuration(&self, intid: u32, memory: &impl Memory) -> Result<u8, Fault> {
        let table = self.propbaser & CONFIGURATION_ADDRESS;
        let mut byte = [0];
        memory.read(table + u64::from(intid - LPIS), &mut byte)?;
        Ok(byte[0])
    }

    /// Reads the configuration of an LPI again. An unmapped LPI is ignored.
    ///
    /// # Errors
    /// The configuration table is not in memory.
    pub(crate) fn reload_lpi(&mut self, intid: u32, memory: &impl Memory) -> Result<(), Fault> {
        if intid < LPIS || !self.lpis.contains_key(&intid) {
            return Ok(());
        }
        let configuration = self.configuration(intid, memory)?;
        self.change(0, intid, |lpi| configure(lpi, configuration));
        Ok(())
    }

    /// Reads the configuration of all LPIs of a vCPU again. As in KVM, LPIs whose configuration cannot be read from
    /// guest memory keep their previous configuration.
    pub(crate) fn reload_lpis(&mut self, vcpu: usize, memory: &impl Memory) {
        for intid in self.lpis_of(vcpu) {
            let _ = self.reload_lpi(intid, memory);
        }
    }

    fn lpis_of(&self, vcpu: usize) -> Vec<u32> {
        let all = self.lpis.iter();
        let own = all.filter(|(_, lpi)| lpi.interrupt.target == Some(vcpu));
        own.map(|(intid, _)| *intid).collect()
    }

    /// Makes the vCPU `target` the target of an LPI.
    pub(crate) fn retarget_lpi(&mut self, intid: u32, target: usize) {
        self.change(0, intid, |lpi| lpi.target = Some(target));
    }

    /// Changes the target of all LPIs of the vCPU `from` to the vCPU `to` (IHI 0069, 5.3, MOVALL).
    pub(crate) fn move_lpis(&mut self, from: usize, to: usize) {
        for intid in self.lpis_of(from) {
            self.retarget_lpi(intid, to);
        }
    }

    /// Sets whether an LPI is pending.
    pub(crate) fn set_lpi_pending(&mut self, intid: u32, pending: bool) {
        self.change(0, intid, |lpi| lpi.latch = pending);
    }

    /// Enables or disables the LPIs of a vCPU (GICR_CTLR.EnableLPIs). Enabling reads the pending table, unless the
    /// guest has said that the table is zero (IHI 0069, 5.1.2; GICR_PENDBASER.PTZ).
    pub(crate) fn enable_lpis(&mut self, vcpu: usize, enable: bool, memory: &impl Memory) {
        if self.vcpus[vcpu].lpis_enabled == enable {
            return;
        }
        self.vcpus[vcpu].lpis_enabled = enable;
        let pendbaser = self.vcpus[vcpu].pendbaser;
        let is_read = enable && pendbaser & PENDING_TABLE_ZERO == 0;
        let mut is_readable = is_read;
        for intid in self.lpis_of(vcpu) {
            if is_readable {
                match pending_byte(pendbaser, intid, memory) {
                    Ok((_, byte)) => self.set_lpi_pending(intid, byte & bit_of(intid) != 0),
                    // As in KVM, if a part of the table is not in memory, neither this part nor the rest of the table
                    // is read.
                    Err(Fault) => is_readable = false,
                }
            }
            self.requeue(vcpu, intid);
        }
    }

    /// Reads and clears the bit of an LPI in the pending table of a vCPU. Returns whether the bit was set.
    fn take_pending_bit(
        &self,
        vcpu: usize,
        intid: u32,
        memory: &impl Memory,
    ) -> Result<bool, Fault> {
        let (address, byte) = pending_byte(self.vcpus[vcpu].pendbaser, intid, memory)?;
        let is_pending = byte & bit_of(intid) != 0;
        if is_pending {
            memory.write(address, &[byte & !bit_of(intid)])?;
        }
        Ok(is_pending)
    }

    /// Writes the pending bits of all LPIs into the guest's pending tables: KVM_DEV_ARM_VGIC_SAVE_PENDING_TABLES.
    ///
    /// # Errors
    /// [`Error::NoAttribute`]: this is a GICv2. [`Error::Fault`]: a pending table is not in memory.
    pub fn save_pending_tables(&self, memory: &impl Memory) -> Result<(), Error> {
        if self.model == super::Model::V2 {
            return Err(Error::NoAttribute);
        }
        for (&intid, lpi) in &self.lpis {
            let Some(vcpu) = lpi.interrupt.target else {
                continue;
            };
            let (address, byte) = pending_byte(self.vcpus[vcpu].pendbaser, intid, memory)?;
            let saved = match lpi.interrupt.latch {
                true => byte | bit_of(intid),
                false => byte & !bit_of(intid),
            };
            if saved != byte {
                memory.write(address, &[saved])?;
            }
        }
        Ok(())
    }
}

/// Applies a byte of the configuration table (IHI 0069, 5.1.1).
fn configure(lpi: &mut Interrupt, byte: u8) {
    lpi.enabled = byte & 1 != 0;
    lpi.priority = byte & PRIORITIES;
}

fn bit_of(intid: u32) -> u8 {
    1 << (intid % 8)
}

/// Returns the byte of a pending table that holds the bit of an LPI: its address and its value.
fn pending_byte(pendbaser: u64, intid: u32, memory: &impl Memory) -> Result<(u64, u8), Fault> {
    let address = (pendbaser & PENDING_ADDRESS) + u64::from(intid / 8);
    let mut byte = [0];
    memory.read(address, &mut byte)?;
    Ok((address, byte[0]))
}
