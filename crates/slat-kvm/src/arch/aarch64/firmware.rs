//! The firmware that a guest calls by HVC: SMCCC 1.1 (DEN 0028) and PSCI 1.1 (DEN 0022). Also the registers by which a
//! client chooses the firmware's version.

use crate::arch::aarch64::state::{Power, Start};
use crate::arch::aarch64::vcpu_state::{PSCI_1_1, VcpuState};
use crate::errno::{Result, fail};
use crate::vcpu_common::VcpuCommon;
use crate::vm::VmObject;
use kvm_bindings::*;

/// The numbers of the registers: PSCI's version, and the states of the workarounds 1 to 3 of SMCCC.
pub(crate) const NUMBERS: [u16; 4] = [PSCI_VERSION_REGISTER, 1, 2, 3];
const PSCI_VERSION_REGISTER: u16 = 0;

/// The versions of PSCI that a client may choose. The major version is in the upper half.
const PSCI_VERSIONS: [u64; 3] = [PSCI_0_2, 0x1_0000, PSCI_1_1];
const PSCI_0_2: u64 = 2;

/// Returns the state of a workaround. A processor in software needs no workaround.
fn workaround(register: u16) -> Option<u64> {
    match register {
        1 => Some(KVM_REG_ARM_SMCCC_ARCH_WORKAROUND_1_NOT_REQUIRED.into()),
        2 => Some(KVM_REG_ARM_SMCCC_ARCH_WORKAROUND_2_NOT_REQUIRED.into()),
        3 => Some(KVM_REG_ARM_SMCCC_ARCH_WORKAROUND_3_NOT_REQUIRED.into()),
        _ => None,
    }
}

/// Returns the value of a register.
///
/// # Errors
/// `ENOENT`.
pub(crate) fn get(state: &VcpuState, register: u16) -> Result<u64> {
    match workaround(register) {
        Some(value) => Ok(value),
        None if register == PSCI_VERSION_REGISTER => Ok(state.psci_version),
        None => fail(libc::ENOENT),
    }
}

/// Sets a register. A client may say that its guest came from a host where a workaround was less effective.
///
/// # Errors
/// `ENOENT` for a register that does not exist, `EINVAL` for a value that the register cannot have.
pub(crate) fn set(state: &mut VcpuState, register: u16, value: u64) -> Result<()> {
    match workaround(register) {
        Some(most) if value <= most => Ok(()),
        None if register == PSCI_VERSION_REGISTER && PSCI_VERSIONS.contains(&value) => {
            state.psci_version = value;
            Ok(())
        }
        None if register != PSCI_VERSION_REGISTER => fail(libc::ENOENT),
        _ => fail(libc::EINVAL),
    }
}

/// What the run loop does after a call of the firmware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The guest continues with these values in X0 to X3.
    Return([u64; 4]),
    /// The vCPU is off, until another vCPU starts it.
    Off,
    /// The vCPU waits for an interrupt. Then the guest continues with 0 in X0.
    Standby,
    /// The client stops or resets the VM: `KVM_EXIT_SYSTEM_EVENT` with this type and these flags.
    System {
        /// `KVM_SYSTEM_EVENT_SHUTDOWN` or `KVM_SYSTEM_EVENT_RESET`.
        kind: u32,
        /// The first word of the event's data.
        flags: u64,
    },
}

/// The results that PSCI and SMCCC share.
const NOT_SUPPORTED: u64 = -1i64 as u64;
const INVALID_PARAMETERS: u64 = -2i64 as u64;
const ALREADY_ON: u64 = -4i64 as u64;
const ON_PENDING: u64 = -5i64 as u64;
const INTERNAL_FAILURE: u64 = -6i64 as u64;

/// AFFINITY_INFO's answers.
const ON: u64 = 0;
const OFF: u64 = 1;

/// MIGRATE_INFO_TYPE's answer: no trusted operating system has to be migrated.
const NO_MIGRATION: u64 = 2;

/// The functions, by their numbers for 32-bit calls. A 64-bit call has [`CALL64`] set, too.
mod function {
    pub(super) const SMCCC_VERSION: u32 = 0x8000_0000;
    pub(super) const SMCCC_ARCH_FEATURES: u32 = 0x8000_0001;
    pub(super) const SMCCC_WORKAROUND_1: u32 = 0x8000_8000;
    pub(super) const SMCCC_WORKAROUND_2: u32 = 0x8000_7fff;
    pub(super) const SMCCC_WORKAROUND_3: u32 = 0x8000_3fff;
    pub(super) const PSCI_VERSION: u32 = 0x8400_0000;
    pub(super) const CPU_SUSPEND: u32 = 0x8400_0001;
    pub(super) const CPU_OFF: u32 = 0x8400_0002;
    pub(super) const CPU_ON: u32 = 0x8400_0003;
    pub(super) const AFFINITY_INFO: u32 = 0x8400_0004;
    pub(super) const MIGRATE_INFO_TYPE: u32 = 0x8400_0006;
    pub(super) const SYSTEM_OFF: u32 = 0x8400_0008;
    pub(super) const SYSTEM_RESET: u32 = 0x8400_0009;
    pub(super) const PSCI_FEATURES: u32 = 0x8400_000a;
    pub(super) const SYSTEM_RESET2: u32 = 0x8400_0012;
}
const CALL64: u32 = 1 << 30;

/// SMCCC 1.1.
const SMCCC_1_1: u64 = 0x1_0001;
/// What SMCCC_ARCH_FEATURES says of a workaround that the processor does not need.
const NOT_REQUIRED: u64 = 1;

impl VmObject {
    /// Carries out a call of the firmware by the vCPU `caller`, with the values of X0 to X3.
    pub(crate) fn call_firmware(
        &self,
        caller: &VcpuCommon,
        version: u64,
        [number, a, b, c]: [u64; 4],
    ) -> Outcome {
        let number = number as u32;
        let is64 = number & CALL64 != 0;
        let narrow = |value: u64| if is64 { value } else { value as u32 as u64 };
        let (a, b, c) = (narrow(a), narrow(b), narrow(c));
        let returns = |value| Outcome::Return([value, 0, 0, 0]);
        match number & !CALL64 {
            // These functions have no 64-bit form.
            _ if is64 && !has_64_bits(number & !CALL64) => returns(NOT_SUPPORTED),
            function::SMCCC_VERSION => returns(SMCCC_1_1),
            function::SMCCC_ARCH_FEATURES => returns(architecture_feature(a as u32)),
            function::SMCCC_WORKAROUND_1
            | function::SMCCC_WORKAROUND_2
            | function::SMCCC_WORKAROUND_3 => returns(0),
            function::PSCI_VERSION => returns(version),
            // The processor has no state in which it loses its registers.
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
            function::PSCI_FEATURES if version > PSCI_0_2 => returns(feature(version, a as u32)),
            function::SYSTEM_RESET2 if version >= PSCI_1_1 => match a {
                // The architectural warm reset, and the resets that vendors define.
                0 | 0x8000_0000..=0xffff_ffff => Outcome::System {
                    kind: KVM_SYSTEM_EVENT_RESET,
                    flags: KVM_SYSTEM_EVENT_RESET_FLAG_PSCI_RESET2.into(),
                },
                _ => returns(INVALID_PARAMETERS),
            },
            _ => returns(NOT_SUPPORTED),
        }
    }

    /// Starts a vCPU that is off (PSCI's CPU_ON).
    fn start_vcpu(&self, affinity: u64, start: Start) -> u64 {
        if start.pc & 3 != 0 {
            return INVALID_PARAMETERS;
        }
        let vcpus = self.interrupts.vcpus.read();
        let Some(target) = vcpus.iter().find(|vcpu| vcpu.arch.affinity == affinity) else {
            return INVALID_PARAMETERS;
        };
        match target.arch.start(start) {
            Power::Off => {
                target.notice();
                0
            }
            Power::Starting(_) => ON_PENDING,
            Power::On => ALREADY_ON,
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
            .filter(|vcpu| vcpu.arch.affinity & mask == affinity & mask);
        // One vCPU that is on makes the group be on.
        let states = found.map(|vcpu| if vcpu.arch.is_on() { ON } else { OFF });
        states.min().unwrap_or(INVALID_PARAMETERS)
    }
}

/// The value of X0 after a call for the system's end that the client has not carried out.
pub(crate) const SYSTEM_CALL_RETURNED: u64 = INTERNAL_FAILURE;

/// Whether a function of PSCI has a form for 64-bit calls.
fn has_64_bits(number: u32) -> bool {
    matches!(
        number,
        function::CPU_SUSPEND
            | function::CPU_ON
            | function::AFFINITY_INFO
            | function::SYSTEM_RESET2
    )
}

/// Returns what SMCCC_ARCH_FEATURES says of a function.
fn architecture_feature(number: u32) -> u64 {
    match number {
        function::SMCCC_VERSION | function::SMCCC_ARCH_FEATURES => 0,
        function::SMCCC_WORKAROUND_1
        | function::SMCCC_WORKAROUND_2
        | function::SMCCC_WORKAROUND_3 => NOT_REQUIRED,
        _ => NOT_SUPPORTED,
    }
}

/// Returns what PSCI_FEATURES says of a function.
fn feature(version: u64, number: u32) -> u64 {
    let is64 = number & CALL64 != 0;
    match number & !CALL64 {
        number if is64 && !has_64_bits(number) => NOT_SUPPORTED,
        function::SYSTEM_RESET2 if version < PSCI_1_1 => NOT_SUPPORTED,
        function::SMCCC_VERSION
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
