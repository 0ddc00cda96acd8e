//! The system registers that the machine has: those that identify the processor's position among the vCPUs, those that
//! identify its caches, and those of the timers.

use crate::arch::aarch64::identification::IdRegister;
use crate::arch::aarch64::machine::VcpuMachine;
use crate::arch::aarch64::timer;
use slat_a64::SystemName;
use slat_gic::icc::Icc;

const MPIDR: SystemName = SystemName::new(3, 0, 0, 0, 5);
const CCSIDR: SystemName = SystemName::new(3, 1, 0, 0, 0);
const CLIDR: SystemName = SystemName::new(3, 1, 0, 0, 1);
const CSSELR: SystemName = SystemName::new(3, 2, 0, 0, 0);

/// CLIDR_EL1: the bits that exist.
const CLIDR_EXISTS: u64 = (1 << 47) - 1;
const AIDR: SystemName = SystemName::new(3, 1, 0, 0, 7);

/// The registers of `KVM_GET_REG_LIST` that the guest has, except those of the timers.
const LISTED: [SystemName; 3] = [MPIDR, CLIDR, CSSELR];

/// FPEXC32_EL2, a register for AArch32: clients save and restore it. Some of its bits are RES1.
const FPEXC32: SystemName = SystemName::new(3, 4, 5, 3, 0);
const FPEXC32_RESET: u64 = 0x700;
/// The registers of `KVM_GET_REG_LIST` that no guest of this processor has: DBGVCR32, DISR, DACR32, IFSR32, FPEXC32.
const ABSENT: [SystemName; 5] = [
    SystemName::new(2, 4, 0, 7, 0),
    SystemName::new(3, 0, 12, 1, 1),
    SystemName::new(3, 4, 3, 0, 0),
    SystemName::new(3, 4, 5, 0, 1),
    FPEXC32,
];

/// The registers of an external debugger, which this processor does not have: MDRAR, DBGCLAIMSET, DBGCLAIMCLR,
/// DBGAUTHSTATUS, MDCCSR, DBGDTR, and DBGDTRRX with DBGDTRTX. As in KVM they read as zero and ignore writes: kernels
/// look for such a debugger's console (Linux' `hvc_dcc`).
const DEBUGGER: [SystemName; 7] = [
    SystemName::new(2, 0, 1, 0, 0),
    SystemName::new(2, 0, 7, 8, 6),
    SystemName::new(2, 0, 7, 9, 6),
    SystemName::new(2, 0, 7, 14, 6),
    SystemName::new(2, 3, 0, 1, 0),
    SystemName::new(2, 3, 0, 4, 0),
    SystemName::new(2, 3, 0, 5, 0),
];

/// Returns the registers that the client saves and restores, although the guest does not have them, with their values
/// after reset. These include 16 breakpoints and 16 watchpoints (DBGBVR, DBGBCR, DBGWVR, DBGWCR), which KVM lists on
/// every processor.
pub(super) fn kept() -> Vec<(SystemName, u64)> {
    let debug = (0..16).flat_map(|n| (4..=7).map(move |op2| SystemName::new(2, 0, 0, n, op2)));
    let is_held = |name: &SystemName| slat_a64::system_registers().any(|held| held == *name);
    let absent = debug.filter(|name| !is_held(name)).chain(ABSENT);
    let reset = |name| if name == FPEXC32 { FPEXC32_RESET } else { 0 };
    absent.map(|name| (name, reset(name))).collect()
}

impl VcpuMachine {
    /// Reads a register for the guest. `None`: the access is UNDEFINED.
    pub(super) fn read_register(&mut self, name: SystemName, el1: bool) -> Option<u64> {
        Some(match name {
            MPIDR if el1 => self.common.arch.mpidr(),
            CLIDR if el1 => self.cache_levels,
            // CCSIDR describes no cache, because there is no level of caches that software has to manage.
            CCSIDR if el1 => 0,
            AIDR if el1 => {
                let register = IdRegister::of(AIDR)?;
                self.settings().identification().get(register)
            }
            CSSELR if el1 => self.cache_selector,
            _ if el1 && DEBUGGER.contains(&name) => 0,
            _ => match Icc::from_encoding(name.0).filter(|_| el1) {
                Some(register) => {
                    let interrupts = &self.vm.interrupts;
                    return interrupts.read_gic_register(&self.common, register);
                }
                None => return self.timers.read(name),
            },
        })
    }

    /// Writes a register for the guest. `None`: the access is UNDEFINED.
    pub(super) fn write_register(&mut self, name: SystemName, el1: bool, value: u64) -> Option<()> {
        match name {
            CSSELR if el1 => self.cache_selector = value & 0xf,
            _ if el1 && DEBUGGER.contains(&name) => (),
            _ => {
                if let Some(register) = Icc::from_encoding(name.0).filter(|_| el1) {
                    let interrupts = &self.vm.interrupts;
                    return interrupts.write_gic_register(&self.common, register, value);
                }
                self.timers.write(name, value)?;
                self.timer_rang();
            }
        }
        Some(())
    }

    /// Returns the names of the registers that a client can read.
    pub(crate) fn system_registers(&self) -> impl Iterator<Item = SystemName> + '_ {
        let kept = self.kept.iter().map(|(name, _)| *name);
        LISTED.into_iter().chain(timer::API_REGISTERS).chain(kept)
    }

    /// Reads a register for the client. `None`: the machine has no such register.
    pub(crate) fn system_register(&mut self, name: SystemName) -> Option<u64> {
        if let Some((_, value)) = self.kept.iter().find(|(kept, _)| *kept == name) {
            return Some(*value);
        }
        let is_listed = self.system_registers().any(|listed| listed == name);
        match is_listed {
            true => self.read_register(timer::api_name(name), true),
            false => None,
        }
    }

    /// Sets a register for the client. Returns `false` if the register cannot have the value.
    pub(crate) fn set_system_register(&mut self, name: SystemName, value: u64) -> bool {
        if let Some((_, kept)) = self.kept.iter_mut().find(|(kept, _)| *kept == name) {
            *kept = value;
            return true;
        }
        let name = timer::api_name(name);
        if let Some(counter) = timer::counter_of(name) {
            self.timers.set_counter(counter, value);
            self.timer_rang();
            return true;
        }
        match name {
            MPIDR => self.common.arch.set_mpidr(value),
            CLIDR if value & !CLIDR_EXISTS != 0 => return false,
            CLIDR => self.cache_levels = value,
            _ => return self.write_register(name, true, value).is_some(),
        }
        true
    }
}
