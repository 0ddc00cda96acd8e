//! The firmware that a guest calls by HVC or SMC (SMCCC 1.1, DEN 0028): the architecture's calls, PSCI, and the
//! services of a hypervisor. Also the registers by which a client chooses the firmware's version.

mod psci;
mod services;

use crate::arch::aarch64::machine::VcpuMachine;
use crate::arch::aarch64::settings::{Action, HYPERVISOR, STOLEN_TIME};
use crate::arch::aarch64::state::{PSCI_1_3, VmState};
use crate::errno::{Result, fail};
use crate::vcpu_common::VcpuCommon;
use crate::vm::VmObject;
use kvm_bindings::*;
pub(crate) use psci::SYSTEM_CALL_RETURNED;

/// The numbers of the firmware's registers: PSCI's version, and the states of the workarounds 1 to 3 of SMCCC.
pub(crate) const NUMBERS: [u16; 4] = [PSCI_VERSION_REGISTER, 1, 2, 3];
const PSCI_VERSION_REGISTER: u16 = 0;

/// The versions of PSCI that a client may choose. The major version is in the upper half.
const PSCI_VERSIONS: [u64; 5] = [
    psci::VERSION_0_2,
    0x1_0000,
    psci::VERSION_1_1,
    0x1_0002,
    PSCI_1_3,
];

/// Returns the state of a workaround. A processor in software needs no workaround.
fn workaround(register: u16) -> Option<u64> {
    match register {
        1 => Some(KVM_REG_ARM_SMCCC_ARCH_WORKAROUND_1_NOT_REQUIRED.into()),
        2 => Some(KVM_REG_ARM_SMCCC_ARCH_WORKAROUND_2_NOT_REQUIRED.into()),
        3 => Some(KVM_REG_ARM_SMCCC_ARCH_WORKAROUND_3_NOT_REQUIRED.into()),
        _ => None,
    }
}

/// Returns the value of a register of the firmware.
///
/// # Errors
/// `ENOENT`.
pub(crate) fn get(vm: &VmState, register: u16) -> Result<u64> {
    match workaround(register) {
        Some(value) => Ok(value),
        None if register == PSCI_VERSION_REGISTER => Ok(vm.psci_version()),
        None => fail(libc::ENOENT),
    }
}

/// Sets a register of the firmware. As in KVM, all vCPUs have the same registers. A client may say that its guest came
/// from a host where a workaround was less effective.
///
/// # Errors
/// `ENOENT` for a register that does not exist, `EINVAL` for a value that the register cannot have.
pub(crate) fn set(vm: &VmState, register: u16, value: u64) -> Result<()> {
    match workaround(register) {
        Some(most) if value <= most => Ok(()),
        None if register == PSCI_VERSION_REGISTER && PSCI_VERSIONS.contains(&value) => {
            vm.set_psci_version(value);
            Ok(())
        }
        None if register != PSCI_VERSION_REGISTER => fail(libc::ENOENT),
        _ => fail(libc::EINVAL),
    }
}

/// The next step of the run loop after a call of the firmware.
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
        /// The first word of the data of `KVM_EXIT_SYSTEM_EVENT`.
        flags: u64,
    },
    /// The client suspends the VM: `KVM_EXIT_SYSTEM_EVENT`. The guest's registers still have the values that they had
    /// at the call.
    Suspend,
    /// The client carries out the call: `KVM_EXIT_HYPERCALL`. It sets X0 to X3.
    Forward,
}

impl Outcome {
    /// Lets the guest continue with `value` in X0.
    fn value(value: u64) -> Self {
        Outcome::Return([value, 0, 0, 0])
    }
}

/// The errors of SMCCC. PSCI uses the same values.
const NOT_SUPPORTED: u64 = -1i64 as u64;

/// The numbers of functions that Arm defines, in their form for 32-bit calls.
const SMCCC_VERSION: u32 = 0x8000_0000;
const SMCCC_ARCH_FEATURES: u32 = 0x8000_0001;
const SMCCC_WORKAROUND_1: u32 = 0x8000_8000;
const SMCCC_WORKAROUND_2: u32 = 0x8000_7fff;
const SMCCC_WORKAROUND_3: u32 = 0x8000_3fff;

/// The bit in a function's number that makes the call a 64-bit call.
const CALL64: u32 = 1 << 30;

/// Version 1.1 of SMCCC. The major version is in the upper half.
const SMCCC_1_1: u64 = 0x1_0001;
/// The result of SMCCC_ARCH_FEATURES for a workaround that the processor does not need.
const NOT_REQUIRED: u64 = 1;

impl VmObject {
    /// Carries out a call of the firmware by the vCPU `caller`, with the values of X0 to X3. Call inside the engine's
    /// reader section.
    pub(crate) fn call_firmware(
        &self,
        caller: &VcpuCommon,
        machine: &mut VcpuMachine,
        call: [u64; 4],
    ) -> Outcome {
        let number = call[0] as u32;
        match self.arch.settings().action(number) {
            Action::Handle => {}
            Action::Deny => return Outcome::value(NOT_SUPPORTED),
            Action::Forward => return Outcome::Forward,
        }
        match number {
            SMCCC_VERSION => Outcome::value(SMCCC_1_1),
            SMCCC_ARCH_FEATURES => Outcome::value(self.architecture_feature(call[1] as u32)),
            SMCCC_WORKAROUND_1 | SMCCC_WORKAROUND_2 | SMCCC_WORKAROUND_3 => Outcome::value(0),
            _ if psci::has(number) => self.call_psci(caller, call),
            _ => match services::call(machine, call) {
                Some(values) => Outcome::Return(values),
                None => Outcome::value(NOT_SUPPORTED),
            },
        }
    }

    /// Returns the result of SMCCC_ARCH_FEATURES for a function.
    fn architecture_feature(&self, number: u32) -> u64 {
        let has_stolen_time = || self.arch.settings().has_service(HYPERVISOR, STOLEN_TIME);
        match number {
            SMCCC_VERSION | SMCCC_ARCH_FEATURES => 0,
            SMCCC_WORKAROUND_1 | SMCCC_WORKAROUND_2 | SMCCC_WORKAROUND_3 => NOT_REQUIRED,
            services::STOLEN_TIME_FEATURES if has_stolen_time() => 0,
            _ => NOT_SUPPORTED,
        }
    }
}
