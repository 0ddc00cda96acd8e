//! The address space in which a vCPU accesses memory. System management mode has a separate address space.

use super::VcpuMachine;
use crate::arch::x86_64::cpuid;
use crate::arch::x86_64::limits::ORDINARY;
use slat_x86::SmramMap;

impl VcpuMachine {
    /// Makes the vCPU use the memslots of address space `space`. Returns whether the vCPU used another address space
    /// before. If it returns true, the caller must make the CPU drop its translations.
    pub(crate) fn use_space(&mut self, space: usize) -> bool {
        if self.space == space {
            return false;
        }
        self.space = space;
        self.memory.engine.use_space(space);
        self.memory.flush();
        // The engine does not notice stores to the guest's tables through the address space that is not in use.
        self.memory_restored |= self.shadows_nested;
        true
    }

    /// Runs `work`, an access for a device of the vCPU, in the ordinary address space. Devices always use this address
    /// space, even if the vCPU is in system management mode.
    fn as_device<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        let space = self.space;
        self.use_space(ORDINARY);
        let result = work(self);
        self.use_space(space);
        result
    }

    /// Writes guest-physical memory for a device of the vCPU, and marks the pages in the dirty log. Returns `false` if
    /// the address is not memory, or not accessible. Call inside the engine's reader section.
    pub(crate) fn write_guest(&mut self, gpa: u64, bytes: &[u8]) -> bool {
        self.as_device(|machine| machine.write_here(gpa, bytes))
    }

    /// Reads an aligned word of guest-physical memory for a device of the vCPU. `None`: `gpa` is not memory, or not
    /// accessible. Call inside the engine's reader section.
    pub(crate) fn read_guest_word(&mut self, gpa: u64) -> Option<u64> {
        self.as_device(|machine| machine.read_word_here(gpa))
    }

    /// Reads SMRAM. Returns `false` if the address is not memory, or not accessible. Call inside the engine's reader
    /// section, when the vCPU uses the address space of system management mode.
    pub(crate) fn read_smram(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.read_here(gpa, bytes)
    }

    /// Writes SMRAM, like [`read_smram`](Self::read_smram).
    pub(crate) fn write_smram(&mut self, gpa: u64, bytes: &[u8]) -> bool {
        self.write_here(gpa, bytes)
    }

    /// Returns the layout in which the vCPU saves its registers in SMRAM. As in KVM, the layout depends on whether the
    /// guest's CPUID has long mode.
    pub(crate) fn smram_map(&self) -> SmramMap {
        match cpuid::lookup(&self.cpuid, 0x8000_0001, 0)[3] & cpuid::EXTENDED_EDX_LONG_MODE {
            0 => SmramMap::Bits32,
            _ => SmramMap::Bits64,
        }
    }
}
