//! The client's settings of a VM, which are fixed when the first vCPU runs: the filter of SMCCC calls (vm.rst), the
//! optional services of the firmware (fw-pseudo-registers.rst), and the identification of the processor.

use crate::arch::aarch64::identification::{IdRegister, Identification};
use crate::errno::{Result, fail};
use crate::heap;
use kvm_bindings::*;
use std::ops::RangeInclusive;

/// The treatment of a guest's call of the firmware (SMCCC).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// The firmware carries out the call.
    Handle,
    /// The guest is told that the firmware does not have the function.
    Deny,
    /// The client carries out the call.
    Forward,
}

/// The actions of `kvm_smccc_filter`.
const HANDLE: u32 = kvm_smccc_filter_action_KVM_SMCCC_FILTER_HANDLE;
const DENY: u32 = kvm_smccc_filter_action_KVM_SMCCC_FILTER_DENY;
const FORWARD: u32 = kvm_smccc_filter_action_KVM_SMCCC_FILTER_FWD_TO_USER;

/// The functions of Arm's architecture, as 32-bit and as 64-bit calls. No filter can apply to them.
const RESERVED: [RangeInclusive<u32>; 2] = [0x8000_0000..=0x8000_ffff, 0xc000_0000..=0xc000_ffff];

/// The number of registers of services. Each register has a bit for each service that the guest may call.
pub(crate) const SERVICE_REGISTERS: usize = 4;
/// The number of the register of the standard services, and its bit for random numbers (DEN 0098).
pub(crate) const STANDARD: usize = 0;
pub(crate) const RANDOM_NUMBERS: u64 = 1 << 0;
/// The number of the register of the standard services of hypervisors, and its bit for stolen time (DEN 0057).
pub(crate) const HYPERVISOR: usize = 1;
pub(crate) const STOLEN_TIME: u64 = 1 << 0;
/// The number of the register of KVM's own services, and its bits: for the list of these services, and for the host's
/// clock.
pub(crate) const VENDOR: usize = 2;
pub(crate) const FEATURES: u64 = 1 << 0;
pub(crate) const HOST_CLOCK: u64 = 1 << 1;
/// The number of the register of KVM's services from 64 on: these list the processors on which the guest may run. A
/// client that enables these services carries out their calls itself.
pub(crate) const VENDOR_64: usize = 3;
const PROCESSORS: u64 = 1 << 0 | 1 << 1;
/// The services that a client can enable, by register.
const SERVICES: [u64; SERVICE_REGISTERS] = [
    RANDOM_NUMBERS,
    STOLEN_TIME,
    FEATURES | HOST_CLOCK,
    PROCESSORS,
];

/// The client's choices for a VM: the filter of firmware calls, the services, and the registers that identify the
/// processor.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Whether a vCPU has run.
    has_run: bool,
    /// Ranges of functions of the firmware, each with the treatment of its calls. No two ranges overlap.
    filter: Vec<(RangeInclusive<u32>, Action)>,
    services: [u64; SERVICE_REGISTERS],
    identification: Identification,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            has_run: false,
            filter: Vec::new(),
            services: [
                SERVICES[STANDARD],
                SERVICES[HYPERVISOR],
                SERVICES[VENDOR],
                0,
            ],
            identification: Identification::default(),
        }
    }
}

impl Settings {
    /// Fixes the settings, because a vCPU is about to run for the first time. Without a GIC that has system registers
    /// (`has_gic`), the field GIC of ID_AA64PFR0 becomes 0. As in KVM, a client that reads this field before the first
    /// run sees 1.
    pub(crate) fn vcpu_runs(&mut self, has_gic: bool) {
        self.has_run = true;
        if !has_gic {
            self.identification.hide_gic();
        }
    }

    /// Carries out `KVM_ARM_VM_SMCCC_FILTER`: chooses what happens to the calls of some functions.
    ///
    /// # Errors
    /// `EINVAL` for padding, an unknown action, an empty range of functions, or a range beyond the last function.
    /// `EEXIST` if the filter already has one of the functions, or if one belongs to Arm's architecture. `EBUSY` after
    /// a vCPU has run. `ENOMEM`.
    pub(crate) fn add_filter(&mut self, asked: &kvm_smccc_filter) -> Result<()> {
        let action = match u32::from(asked.action) {
            HANDLE => Action::Handle,
            DENY => Action::Deny,
            FORWARD => Action::Forward,
            _ => return fail(libc::EINVAL),
        };
        let end = asked.base.checked_add(asked.nr_functions.wrapping_sub(1));
        let Some(last) = end.filter(|_| asked.nr_functions != 0 && asked.pad == [0; 15]) else {
            return fail(libc::EINVAL);
        };
        if self.has_run {
            return fail(libc::EBUSY);
        }
        let overlaps =
            |range: &RangeInclusive<u32>| *range.start() <= last && asked.base <= *range.end();
        let ranges = self.filter.iter().map(|(range, _)| range);
        if ranges.chain(&RESERVED).any(overlaps) {
            return fail(libc::EEXIST);
        }
        heap::reserve(&mut self.filter, 1)?;
        self.filter.push((asked.base..=last, action));
        Ok(())
    }

    /// Returns the treatment that the filter gives to the calls of a function.
    pub(crate) fn action(&self, function: u32) -> Action {
        let found = self
            .filter
            .iter()
            .find(|(range, _)| range.contains(&function));
        found.map_or(Action::Handle, |(_, action)| *action)
    }

    /// Whether the guest may call a service.
    pub(crate) fn has_service(&self, register: usize, service: u64) -> bool {
        self.services[register] & service != 0
    }

    /// Returns a register of services, which has a bit for each service that the guest may call.
    ///
    /// # Errors
    /// `ENOENT`.
    pub(crate) fn services(&self, register: usize) -> Result<u64> {
        match self.services.get(register) {
            Some(services) => Ok(*services),
            None => fail(libc::ENOENT),
        }
    }

    /// Sets a register of services.
    ///
    /// # Errors
    /// `ENOENT` for an unknown register, `EINVAL` for an unknown service, `EBUSY` for a change after a vCPU has run.
    pub(crate) fn set_services(&mut self, register: usize, value: u64) -> Result<()> {
        let before = self.services(register)?;
        match () {
            () if value & !SERVICES[register] != 0 => fail(libc::EINVAL),
            () if self.has_run && value != before => fail(libc::EBUSY),
            () => {
                self.services[register] = value;
                Ok(())
            }
        }
    }

    /// Returns the registers that identify the processor.
    pub(crate) fn identification(&self) -> &Identification {
        &self.identification
    }

    /// Enables `KVM_CAP_ARM_WRITABLE_IMP_ID_REGS`.
    pub(crate) fn allow_implementation(&mut self) {
        self.identification.allow_implementation();
    }

    /// Sets a register that identifies the processor.
    ///
    /// # Errors
    /// Those of [`Identification::set`].
    pub(crate) fn identify(&mut self, register: IdRegister, value: u64) -> Result<()> {
        self.identification.set(register, value, self.has_run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(base: u32, nr_functions: u32, action: u8) -> kvm_smccc_filter {
        kvm_smccc_filter {
            base,
            nr_functions,
            action,
            pad: [0; 15],
        }
    }

    #[test]
    fn the_filter_says_what_happens_to_a_call() {
        let mut settings = Settings::default();
        let errno = |result: Result<()>| result.err().map(|error| error.errno());
        assert_eq!(errno(settings.add_filter(&filter(0x8400_0000, 2, 1))), None);
        assert_eq!(errno(settings.add_filter(&filter(u32::MAX, 1, 2))), None);
        assert_eq!(settings.action(0x8400_0001), Action::Deny);
        assert_eq!(settings.action(0x8400_0002), Action::Handle);
        assert_eq!(settings.action(u32::MAX), Action::Forward);
        let refused = [
            (filter(0x8400_0001, 1, 1), libc::EEXIST),
            (filter(0x7fff_ffff, 2, 1), libc::EEXIST),
            (filter(0x8500_0000, 0, 1), libc::EINVAL),
            (filter(u32::MAX, 2, 1), libc::EINVAL),
            (filter(0x8500_0000, 1, 3), libc::EINVAL),
        ];
        for (asked, expected) in refused {
            assert_eq!(
                errno(settings.add_filter(&asked)),
                Some(expected),
                "{asked:?}"
            );
        }
        settings.vcpu_runs(false);
        let late = settings.add_filter(&filter(0x8500_0000, 1, 1));
        assert_eq!(errno(late), Some(libc::EBUSY));
    }

    #[test]
    fn services_can_be_taken_away_before_the_first_run() {
        let mut settings = Settings::default();
        assert_eq!(settings.services(VENDOR).unwrap(), 3);
        settings.set_services(VENDOR, 0).unwrap();
        assert!(!settings.has_service(VENDOR, HOST_CLOCK));
        let errno = |result: Result<()>| result.unwrap_err().errno();
        assert_eq!(errno(settings.set_services(VENDOR, 4)), libc::EINVAL);
        assert_eq!(settings.services(VENDOR_64).unwrap(), 0);
        settings.set_services(VENDOR_64, 3).unwrap();
        assert_eq!(errno(settings.set_services(VENDOR_64, 4)), libc::EINVAL);
        assert_eq!(errno(settings.set_services(4, 0)), libc::ENOENT);
        settings.vcpu_runs(false);
        settings.set_services(VENDOR, 0).unwrap();
        assert_eq!(errno(settings.set_services(VENDOR, 3)), libc::EBUSY);
    }
}
