//! The system registers that the machine has: those that identify the processor's place and its caches, and the timers'.

use crate::arch::aarch64::machine::VcpuMachine;
use crate::arch::aarch64::timer;
use slat_a64::SystemName;

const MPIDR: SystemName = SystemName::new(3, 0, 0, 0, 5);
const CCSIDR: SystemName = SystemName::new(3, 1, 0, 0, 0);
const CLIDR: SystemName = SystemName::new(3, 1, 0, 0, 1);
const CSSELR: SystemName = SystemName::new(3, 2, 0, 0, 0);
const CTR: SystemName = SystemName::new(3, 3, 0, 0, 1);

/// MPIDR_EL1: RES1.
const MPIDR_ONE: u64 = 1 << 31;

/// CTR_EL0: lines of 64 bytes of data and instructions (as logarithms of words); instructions are tagged physically; a
/// granule of 64 bytes for exclusive accesses and for writing back; cleaning to the point of unification is not needed
/// (IDC), but invalidating instructions is; RES1.
const CTR_VALUE: u64 = 4 | 0b11 << 14 | 4 << 16 | 4 << 20 | 4 << 24 | 1 << 28 | 1 << 31;

/// The registers of `KVM_GET_REG_LIST` besides the timers'.
const LISTED: [SystemName; 3] = [MPIDR, CLIDR, CSSELR];

impl VcpuMachine {
    fn affinity(&self) -> u64 {
        MPIDR_ONE | self.common.arch.affinity
    }

    /// Reads a register for the guest. `None`: the access is UNDEFINED.
    pub(super) fn read_register(&mut self, name: SystemName, el1: bool) -> Option<u64> {
        Some(match name {
            CTR => CTR_VALUE,
            MPIDR if el1 => self.affinity(),
            // There is no level of caches that software has to manage, so no cache can be selected.
            CLIDR | CCSIDR if el1 => 0,
            CSSELR if el1 => self.cache_selector,
            _ => return self.timers.read(name, el1),
        })
    }

    /// Writes a register for the guest. `None`: the access is UNDEFINED.
    pub(super) fn write_register(&mut self, name: SystemName, el1: bool, value: u64) -> Option<()> {
        match name {
            CSSELR if el1 => self.cache_selector = value & 0xf,
            _ => {
                self.timers.write(name, el1, value)?;
                self.common.client.set_deadline(self.timers.deadline());
            }
        }
        Some(())
    }

    /// Returns the names of the registers that a client can read.
    pub(crate) fn system_registers() -> impl Iterator<Item = SystemName> {
        LISTED.into_iter().chain(timer::API_REGISTERS)
    }

    /// Reads a register for the client. `None`: the machine has no such register.
    pub(crate) fn system_register(&mut self, name: SystemName) -> Option<u64> {
        let is_listed = Self::system_registers().any(|listed| listed == name) || name == CTR;
        match is_listed {
            true => self.read_register(timer::api_name(name), true),
            false => None,
        }
    }

    /// Sets a register for the client. Returns `false` if the register cannot have the value.
    pub(crate) fn set_system_register(&mut self, name: SystemName, value: u64) -> bool {
        let name = timer::api_name(name);
        if timer::is_counter(name) {
            self.timers.set_counter(value);
            self.timer_rang();
            return true;
        }
        name == MPIDR && value == self.affinity()
            || self.write_register(name, true, value).is_some()
    }
}
