//! The guest's side of steal time: its MSR, and the structure in its memory.

use crate::arch::x86_64::machine::VcpuMachine;
use crate::arch::x86_64::msr::{KVM_ENABLED, index};
use crate::steal_time::{StealTime, is_available};
use crate::thread::bits;
use slat_x86::MsrFault;

/// The low bits of `MSR_KVM_STEAL_TIME` that have to be clear, because the structure is aligned to 64 bytes.
const RESERVED: u64 = 0x3e;
/// The offset of the field `version` in the guest's structure (`struct kvm_steal_time`).
const VERSION: u64 = 8;
/// The offset of the field `preempted`.
const PREEMPTED: u64 = 16;
/// The value of the field `preempted` while the vCPU does not run: `KVM_VCPU_PREEMPTED`.
const PREEMPTED_NOW: u8 = 1;

/// The steal time of a vCPU, and the changes that the guest's structure does not show yet.
#[derive(Debug, Default)]
pub(crate) struct Steal {
    time: StealTime,
    /// Whether the guest's structure has to be written although no time was stolen.
    changed: bool,
    /// Whether the guest's structure says that the vCPU does not run.
    preempted: bool,
}

impl VcpuMachine {
    /// Returns the guest-physical address of the guest's steal-time structure, if the guest has set an address.
    fn steal_time_address(&self) -> Option<u64> {
        let value = self.msr(index::KVM_STEAL_TIME);
        (value & KVM_ENABLED != 0).then_some(value & !(RESERVED | KVM_ENABLED))
    }

    /// Writes `MSR_KVM_STEAL_TIME`.
    pub(crate) fn set_steal_time(&mut self, value: u64) -> std::result::Result<(), MsrFault> {
        if value & RESERVED != 0 || !is_available() {
            return Err(MsrFault::Invalid);
        }
        if value & KVM_ENABLED == 0 {
            self.end_steal_time();
        }
        self.store(index::KVM_STEAL_TIME, value);
        self.steal.changed = value & KVM_ENABLED != 0;
        self.common.attention.raise(bits::RETRY);
        Ok(())
    }

    /// Clears `MSR_KVM_STEAL_TIME` and stops watching the thread.
    pub(crate) fn end_steal_time(&mut self) {
        self.store(index::KVM_STEAL_TIME, 0);
        self.steal.time.forget();
        (self.steal.changed, self.steal.preempted) = (false, false);
    }

    /// Begins to count stolen time. Call before the vCPU runs: in `KVM_RUN`, and after a halt. Call outside the
    /// engine's reader section.
    pub(crate) fn begin_to_run(&mut self) {
        if self.steal_time_address().is_some() {
            self.steal.time.begin();
        }
    }

    /// Stops counting stolen time, and marks the vCPU as preempted. Call when the vCPU stops running: before a halt,
    /// and before `KVM_RUN` returns. Call inside the engine's reader section.
    pub(crate) fn stop_running(&mut self) {
        if let Some(address) = self.steal_time_address() {
            self.steal.time.end();
            // As with KVM, the structure is written at the next start even if no time was stolen, so the structure's
            // version counts how often the vCPU has begun to run.
            self.steal.changed = true;
            self.steal.preempted = self.write_guest(address + PREEMPTED, &[PREEMPTED_NOW]);
        }
    }

    /// Adds the time that was stolen since the last call to the guest's structure. Call inside the engine's reader
    /// section. Does nothing if the structure is not in memory.
    pub(crate) fn write_steal_time(&mut self) {
        let Some(address) = self.steal_time_address() else {
            return;
        };
        if !self.steal.time.is_watching() {
            // The guest has enabled steal time during this run, so counting has not begun yet.
            self.outside(|machine| machine.steal.time.begin());
        }
        if std::mem::take(&mut self.steal.preempted) {
            self.write_guest(address + PREEMPTED, &[0]);
        }
        let Some((stolen, waited)) = self.steal.time.stolen() else {
            return;
        };
        if !std::mem::take(&mut self.steal.changed) && stolen == 0 {
            return;
        }
        let words = (
            self.read_guest_word(address),
            self.read_guest_word(address + VERSION),
        );
        let (Some(before), Some(version)) = words else {
            return;
        };
        // The structure's version is odd while its other fields change. A reader that finds an odd version reads again.
        let odd = (version as u32).wrapping_add(1) | 1;
        if self.write_guest(address + VERSION, &odd.to_le_bytes())
            && self.write_guest(address, &before.wrapping_add(stolen).to_le_bytes())
            && self.write_guest(address + VERSION, &odd.wrapping_add(1).to_le_bytes())
        {
            self.steal.time.was_told(waited);
        }
    }
}
