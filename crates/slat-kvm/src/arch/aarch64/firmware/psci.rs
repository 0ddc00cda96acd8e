//! PSCI 1.3 (DEN 0022): calls that switch processors, and the system, on and off.

use crate::arch::aarch64::firmware::{CALL64, NOT_SUPPORTED, Outcome, SMCCC_VERSION};
use crate::arch::aarch64::state::{PSCI_1_3, Power, Start};
use crate::vcpu_common::VcpuCommon;
use crate::vm::VmObject;
use kvm_bindings::*;

/// PSCI 0.2 and 1.1. The major version is in the upper half.
pub(super) const VERSION_0_2: u64 = 2;
pub(super) const VERSION_1_1: u64 = 0x1_0001;

/// The results of PSCI's functions.
const INVALID_PARAMETERS: u64 = -2i64 as u64;
const ALREADY_ON: u64 = -4i64 as u64;
const ON_PENDING: u64 = -5i64 as u64;
const INTERNAL_FAILURE: u64 = -6i64 as u64;

/// The results of AFFINITY_INFO.
const ON: u64 = 0;
const OFF: u64 = 1;

/// The result of MIGRATE_INFO_TYPE: no trusted operating system has to be migrated.
const NO_MIGRATION: u64 = 2;

/// The functions of PSCI: its range of numbers among Arm's standard services.
const FUNCTIONS: std::ops::RangeInclusive<u32> = 0x8400_0000..=0x8400_001f;

/// The functions, by their numbers for 32-bit calls. A 64-bit call has [`CALL64`] set, too.
mod function {
    pub(super) const PSCI_VERSION: u32 = 0x8400_0000;
    pub(super) const CPU_SUSPEND: u32 = 0x8400_0001;
    pub(super) const CPU_OFF: u32 = 0x8400_0002;
    pub(super) const CPU_ON: u32 = 0x8400_0003;
    pub(super) const AFFINITY_INFO: u32 = 0x8400_0004;
    pub(super) const MIGRATE_INFO_TYPE: u32 = 0x8400_0006;
    pub(super) const SYSTEM_OFF: u32 = 0x8400_0008;
    pub(super) const SYSTEM_RESET: u32 = 0x8400_0009;
    pub(super) const PSCI_FEATURES: u32 = 0x8400_000a;
    pub(super) const SYSTEM_SUSPEND: u32 = 0x8400_000e;
    pub(super) const SYSTEM_RESET2: u32 = 0x8400_0012;
    pub(super) const SYSTEM_OFF2: u32 = 0x8400_0015;
}

/// The type of SYSTEM_OFF2 that hibernates the system, and the bit for it in the result of PSCI_FEATURES.
const HIBERNATE_OFF: u64 = 1;

/// Whether a function is PSCI's.
pub(super) fn has(number: u32) -> bool {
    FUNCTIONS.contains(&(number & !CALL64))
}

impl VmObject {
    /// Carries out a call of PSCI by the vCPU `caller`, with the values of X0 to X3.
    pub(super) fn call_psci(&self, caller: &VcpuCommon, [number, a, b, c]: [u64; 4]) -> Outcome {
        let version = self.arch.psci_version();
        let number = number as u32;
        let is64 = number & CALL64 != 0;
        let narrow = |value: u64| if is64 { value } else { value as u32 as u64 };
        let (a, b, c) = (narrow(a), narrow(b), narrow(c));
        let returns = Outcome::value;
        match number & !CALL64 {
            // A 64-bit call of a function that has only a 32-bit form.
            _ if is64 && !has_64_bits(number & !CALL64) => returns(NOT_SUPPORTED),
            function::PSCI_VERSION => returns(version),
            // The processor has no power state in which it loses its registers, so CPU_SUSPEND always waits and keeps
            // all registers.
            function::CPU_SUSPEND => Outcome::Standby,
            function::CPU_OFF => {
                caller.arch.set_power(Power::Off);
                Outcome::Off
            }
            function::CPU_ON => returns(self.start_vcpu(a, Start { pc: b, context: c })),
            function::AFFINITY_INFO => returns(self.affinity_info(a, b)),
            function::MIGRATE_INFO_TYPE => returns(NO_MIGRATION),
            function::SYSTEM_OFF => Outcome::System {
                kind: KVM_SYSTEM_EVENT_SHUTDOWN,
                flags: 0,
            },
            function::SYSTEM_RESET => Outcome::System {
                kind: KVM_SYSTEM_EVENT_RESET,
                flags: 0,
            },
            function::PSCI_FEATURES if version > VERSION_0_2 => {
                returns(self.feature(version, a as u32))
            }
            function::SYSTEM_SUSPEND if version > VERSION_0_2 && self.arch.can_suspend() => {
                Outcome::Suspend
            }
            function::SYSTEM_RESET2 if version >= VERSION_1_1 => match a {
                // Types of SYSTEM_RESET2: the architectural warm reset, and the resets that vendors define.
                0 | 0x8000_0000..=0xffff_ffff => Outcome::System {
                    kind: KVM_SYSTEM_EVENT_RESET,
                    flags: KVM_SYSTEM_EVENT_RESET_FLAG_PSCI_RESET2.into(),
                },
                _ => returns(INVALID_PARAMETERS),
            },
            function::SYSTEM_OFF2 if version >= PSCI_1_3 => match (a, b) {
                (0 | HIBERNATE_OFF, 0) => Outcome::System {
                    kind: KVM_SYSTEM_EVENT_SHUTDOWN,
                    flags: KVM_SYSTEM_EVENT_SHUTDOWN_FLAG_PSCI_OFF2.into(),
                },
                _ => returns(INVALID_PARAMETERS),
            },
            _ => returns(NOT_SUPPORTED),
        }
    }

    /// Starts a vCPU that is off (PSCI's CPU_ON).
    fn start_vcpu(&self, affinity: u64, start: Start) -> u64 {
        let vcpus = self.interrupts.vcpus.read();
        let Some(target) = vcpus.iter().find(|vcpu| vcpu.arch.affinity() == affinity) else {
            return INVALID_PARAMETERS;
        };
        match target.arch.start(start) {
            Power::Off => {
                target.notice();
                0
            }
            Power::Starting(_) => ON_PENDING,
            Power::On | Power::Suspended => ALREADY_ON,
        }
    }

    /// Returns whether a vCPU with this affinity is on (PSCI's AFFINITY_INFO). `lowest`: the lowest level of affinity
    /// that counts.
    fn affinity_info(&self, affinity: u64, lowest: u64) -> u64 {
        let mask = match lowest {
            0..=3 => u64::MAX << (8 * lowest),
            _ => return INVALID_PARAMETERS,
        };
        let vcpus = self.interrupts.vcpus.read();
        let found = vcpus
            .iter()
            .filter(|vcpu| vcpu.arch.affinity() & mask == affinity & mask);
        // AFFINITY_INFO: a group of vCPUs counts as on if one of its vCPUs is on.
        let states = found.map(|vcpu| if vcpu.arch.is_on() { ON } else { OFF });
        states.min().unwrap_or(INVALID_PARAMETERS)
    }

    /// Returns the result of PSCI_FEATURES for a function.
    fn feature(&self, version: u64, number: u32) -> u64 {
        let is64 = number & CALL64 != 0;
        match number & !CALL64 {
            number if is64 && !has_64_bits(number) => NOT_SUPPORTED,
            function::SYSTEM_RESET2 if version < VERSION_1_1 => NOT_SUPPORTED,
            function::SYSTEM_OFF2 if version >= PSCI_1_3 => HIBERNATE_OFF,
            function::SYSTEM_SUSPEND if self.arch.can_suspend() => 0,
            SMCCC_VERSION
            | function::PSCI_VERSION
            | function::CPU_SUSPEND
            | function::CPU_OFF
            | function::CPU_ON
            | function::AFFINITY_INFO
            | function::MIGRATE_INFO_TYPE
            | function::SYSTEM_OFF
            | function::SYSTEM_RESET
            | function::PSCI_FEATURES
            | function::SYSTEM_RESET2 => 0,
            _ => NOT_SUPPORTED,
        }
    }
}

/// The value of X0 after a call that asks for the end of the system, if the client lets the guest continue.
pub(crate) const SYSTEM_CALL_RETURNED: u64 = INTERNAL_FAILURE;

/// Whether a function of PSCI has a form for 64-bit calls.
fn has_64_bits(number: u32) -> bool {
    matches!(
        number,
        function::CPU_SUSPEND
            | function::CPU_ON
            | function::AFFINITY_INFO
            | function::SYSTEM_SUSPEND
            | function::SYSTEM_RESET2
            | function::SYSTEM_OFF2
    )
}
