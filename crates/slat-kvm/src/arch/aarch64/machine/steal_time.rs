//! Stolen time (DEN 0057): the structure in guest memory that says how long a vCPU has waited for the host.

use crate::arch::aarch64::machine::VcpuMachine;

/// The size of the structure in guest memory: revision and attributes, which are zero, and the stolen nanoseconds.
const BYTES: usize = 16;
/// The offset of the stolen nanoseconds in the structure.
const STOLEN: u64 = 8;

impl VcpuMachine {
    /// Returns the guest-physical address of the structure. `None`: the client has not set it.
    pub(crate) fn stolen_time(&self) -> Option<u64> {
        self.stolen_time
    }

    /// Sets the guest-physical address of the structure.
    pub(crate) fn set_stolen_time(&mut self, address: u64) {
        self.stolen_time = Some(address);
    }

    /// Begins to count from zero, because the guest asks for the address of its structure. Returns the address. Call
    /// inside the engine's reader section.
    pub(crate) fn start_stolen_time(&mut self) -> Option<u64> {
        let address = self.stolen_time?;
        self.watch_steal_time();
        if let Some((_, waited)) = self.steal.stolen() {
            self.steal.was_told(waited);
        }
        self.write_here(address, &[0; BYTES]);
        Some(address)
    }

    fn watch_steal_time(&mut self) {
        if !self.steal.is_watching() {
            self.outside(|machine| machine.steal.begin());
        }
    }

    /// Adds to the guest's structure the stolen time that the structure does not contain yet. If the structure is not in
    /// accessible memory, changes nothing; a later call then adds this time, too. Call inside the engine's reader
    /// section.
    pub(crate) fn write_steal_time(&mut self) {
        let Some(address) = self.stolen_time else {
            return;
        };
        self.watch_steal_time();
        let Some((stolen, waited)) = self.steal.stolen().filter(|(stolen, _)| *stolen != 0) else {
            return;
        };
        let mut before = [0; 8];
        if self.read_here(address + STOLEN, &mut before) {
            let now = u64::from_le_bytes(before).wrapping_add(stolen);
            if self.write_here(address + STOLEN, &now.to_le_bytes()) {
                self.steal.was_told(waited);
            }
        }
    }
}
