//! The address space in which a vCPU accesses memory. System management mode has an address space of its own.

use super::VcpuMachine;
use crate::arch::x86_64::cpuid;
use crate::vm::ORDINARY;
use slat_x86::SmramMap;

impl VcpuMachine {
    /// Makes the vCPU use the memslots of address space `space`. Returns whether the vCPU used another address space
    /// before. If so, the caller makes the CPU drop its translations.
    pub(crate) fn use_space(&mut self, space: usize) -> bool {
        if self.space == space {
            return false;
        }
        self.space = space;
        self.memory.engine.use_space(space);
        self.memory.flush();
        // While one address space is in use, the engine does not notice stores to the guest's tables in the other
        // address space.
        self.memory_restored |= self.shadows_nested;
        true
    }

    /// Runs `work`, an access for a device of the vCPU, in the ordinary address space. Devices use only this address
    /// space, in any mode of the vCPU.
    fn as_device<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        let space = self.space;
        self.use_space(ORDINARY);
        let result = work(self);
        self.use_space(space);
        result
    }

    /// Writes guest-physical memory for a device of the vCPU, which is entered; marks the pages in the dirty log.
    /// Returns `false` if the address is not memory, or not accessible.
    pub(crate) fn write_guest(&mut self, gpa: u64, bytes: &[u8]) -> bool {
        self.as_device(|machine| machine.write_here(gpa, bytes))
    }

    /// Reads an aligned word of guest-physical memory for a device of the vCPU, which is entered. `None`: `gpa` is not
    /// memory, or not accessible.
    pub(crate) fn read_guest_word(&mut self, gpa: u64) -> Option<u64> {
        self.as_device(|machine| machine.read_word_here(gpa))
    }

    /// Reads SMRAM for a vCPU that is entered and in the address space of system management mode. Returns `false` if
    /// the address is not memory, or not accessible.
    pub(crate) fn read_smram(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.read_here(gpa, bytes)
    }

    /// Writes SMRAM, like [`read_smram`](Self::read_smram).
    pub(crate) fn write_smram(&mut self, gpa: u64, bytes: &[u8]) -> bool {
        self.write_here(gpa, bytes)
    }

    /// Returns the layout in which the vCPU saves its registers in SMRAM. As in KVM, long mode in CPUID determines the
    /// layout.
    pub(crate) fn smram_map(&self) -> SmramMap {
        match cpuid::lookup(&self.cpuid, 0x8000_0001, 0)[3] & cpuid::EXTENDED_EDX_LONG_MODE {
            0 => SmramMap::Bits32,
            _ => SmramMap::Bits64,
        }
    }
}
