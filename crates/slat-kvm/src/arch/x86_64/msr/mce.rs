//! The machine-check registers: `KVM_X86_SETUP_MCE`, `KVM_X86_SET_MCE` and their MSRs (SDM volume 3, chapter 17).

use super::index::*;
use crate::errno::{self, fail};
use kvm_bindings::kvm_x86_mce;
use slat_x86::MsrFault;

/// MCG_CTL_P, a bit of MCG_CAP: the MSR IA32_MCG_CTL exists.
const CAP_CONTROL: u64 = 1 << 8;
/// MCG_SER_P, a bit of MCG_CAP: software error recovery is supported.
const CAP_RECOVERY: u64 = 1 << 24;
/// The field of MCG_CAP with the number of banks.
const CAP_BANKS: u64 = 0xff;
/// The field with the number of extended state registers. As in KVM, a client can set any number. The number has no
/// meaning without MCG_EXT_P.
const CAP_EXTENDED: u64 = 0x00ff_0000;

/// The greatest number of banks that a vCPU can have: the value that `KVM_CHECK_EXTENSION` returns.
pub(crate) const MAX_BANKS: u32 = 32;

/// The value that `KVM_X86_GET_MCE_CAP_SUPPORTED` returns. There are no corrected-error interrupts.
pub(crate) const SUPPORTED: u64 = CAP_CONTROL | CAP_RECOVERY;

/// MCIP, a bit of MCG_STATUS: a machine check is in progress.
const MCG_STATUS_IN_PROGRESS: u64 = 1 << 2;
const STATUS_ACTION_REQUIRED: u64 = 1 << 55;
const STATUS_SIGNALED: u64 = 1 << 56;
const STATUS_CONTEXT_CORRUPT: u64 = 1 << 57;
const STATUS_UNCORRECTED: u64 = 1 << 61;
const STATUS_OVERFLOW: u64 = 1 << 62;
const STATUS_VALID: u64 = 1 << 63;

/// The four registers of a machine-check bank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bank {
    control: u64,
    status: u64,
    address: u64,
    misc: u64,
}

impl Bank {
    fn register(&mut self, number: u32) -> &mut u64 {
        match number & 3 {
            0 => &mut self.control,
            1 => &mut self.status,
            2 => &mut self.address,
            _ => &mut self.misc,
        }
    }

    fn is_valid(&self) -> bool {
        self.status & STATUS_VALID != 0
    }

    /// Overwrites the bank with `error`.
    fn log(&mut self, error: &kvm_x86_mce) {
        self.status = error.status;
        self.address = error.addr;
        self.misc = error.misc;
    }
}

/// The effect of an error on the vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reported {
    /// Only the registers changed, or nothing changed.
    Logged,
    /// The vCPU gets #MC.
    Exception,
    /// #MC during a machine check, or while CR4.MCE is clear, shuts the vCPU down.
    Shutdown,
}

/// The machine-check registers of a vCPU.
#[derive(Clone, Debug)]
pub(crate) struct MachineCheck {
    capabilities: u64,
    status: u64,
    control: u64,
    banks: [Bank; MAX_BANKS as usize],
}

impl Default for MachineCheck {
    fn default() -> Self {
        MachineCheck {
            capabilities: MAX_BANKS.into(),
            status: 0,
            control: 0,
            banks: [Bank::default(); MAX_BANKS as usize],
        }
    }
}

impl MachineCheck {
    fn banks(&mut self) -> &mut [Bank] {
        let count = (self.capabilities & CAP_BANKS) as usize;
        &mut self.banks[..count]
    }

    fn has_control(&self) -> bool {
        self.capabilities & CAP_CONTROL != 0
    }

    /// Carries out `KVM_X86_SETUP_MCE`: sets the capabilities, and enables all errors.
    ///
    /// # Errors
    /// `EINVAL` for no banks, for too many banks, and for capabilities that are not supported.
    pub(crate) fn set_up(&mut self, capabilities: u64) -> errno::Result<()> {
        let banks = capabilities & CAP_BANKS;
        if banks == 0
            || banks > MAX_BANKS.into()
            || capabilities & !(SUPPORTED | CAP_BANKS | CAP_EXTENDED) != 0
        {
            return fail(libc::EINVAL);
        }
        self.capabilities = capabilities;
        if self.has_control() {
            self.control = u64::MAX;
        }
        for bank in self.banks() {
            bank.control = u64::MAX;
        }
        Ok(())
    }

    /// Carries out `KVM_X86_SET_MCE`: reports an error of the machine. `enabled` says whether CR4.MCE is set.
    ///
    /// # Errors
    /// `EINVAL` for a bank that does not exist, and for an error that is not valid.
    pub(crate) fn report(&mut self, error: &kvm_x86_mce, enabled: bool) -> errno::Result<Reported> {
        let mut error = *error;
        let (control, in_progress) = (self.control, self.status & MCG_STATUS_IN_PROGRESS != 0);
        let reports = !self.has_control() || control == u64::MAX;
        let Some(bank) = self.banks().get_mut(usize::from(error.bank)) else {
            return fail(libc::EINVAL);
        };
        if error.status & STATUS_VALID == 0 {
            return fail(libc::EINVAL);
        }
        let uncorrected = error.status & STATUS_UNCORRECTED != 0;
        let urgent = STATUS_CONTEXT_CORRUPT | STATUS_SIGNALED | STATUS_ACTION_REQUIRED;
        if uncorrected && error.status & urgent == 0 && error.mcg_status == 0 {
            // This error needs no action by the guest. Only the interrupt for corrected errors would signal the error,
            // and the CPU does not have this interrupt.
            bank.log(&error);
            self.status = error.mcg_status;
            return Ok(Reported::Logged);
        }
        if uncorrected {
            if !reports || bank.control != u64::MAX {
                return Ok(Reported::Logged);
            }
            if in_progress || !enabled {
                return Ok(Reported::Shutdown);
            }
            if bank.is_valid() {
                error.status |= STATUS_OVERFLOW;
            }
            bank.log(&error);
            self.status = error.mcg_status;
            return Ok(Reported::Exception);
        }
        if bank.is_valid() && bank.status & STATUS_UNCORRECTED != 0 {
            // A corrected error does not overwrite an uncorrected error.
            bank.status |= STATUS_OVERFLOW;
        } else {
            if bank.is_valid() {
                error.status |= STATUS_OVERFLOW;
            }
            bank.log(&error);
        }
        Ok(Reported::Logged)
    }

    /// Reads a machine-check MSR. `None`: the MSR is no machine-check MSR.
    pub(crate) fn read(&mut self, index: u32, by_guest: bool) -> Option<Result<u64, MsrFault>> {
        let value = match index {
            P5_MC_ADDR | P5_MC_TYPE => 0,
            MCG_CAP => self.capabilities,
            MCG_STATUS => self.status,
            MCG_CTL if by_guest && !self.has_control() => return Some(Err(MsrFault::Invalid)),
            MCG_CTL => self.control,
            MC_FIRST..=MC_LAST => match self.register(index) {
                Some(register) => *register,
                None => return Some(Err(MsrFault::Invalid)),
            },
            // The MSR would enable the interrupt for corrected errors, which the CPU does not have.
            MC_CTL2_FIRST..=MC_CTL2_LAST if by_guest || !self.has_bank(index - MC_CTL2_FIRST) => {
                return Some(Err(MsrFault::Invalid));
            }
            MC_CTL2_FIRST..=MC_CTL2_LAST => 0,
            _ => return None,
        };
        Some(Ok(value))
    }

    /// Writes a machine-check MSR. If `sets_status`, the guest may write a value other than 0 to a bank's status (AMD's
    /// HWCR.McStatusWrEn). `None`: the MSR is no machine-check MSR, or is read-only.
    pub(crate) fn write(
        &mut self,
        index: u32,
        value: u64,
        by_guest: bool,
        sets_status: bool,
    ) -> Option<Result<(), MsrFault>> {
        let allowed = match index {
            MCG_STATUS => true,
            // Only all ones or all zeros can be written: all errors are reported, or no errors are.
            MCG_CTL => {
                matches!(value, 0 | u64::MAX) && (self.has_control() || value == 0 && !by_guest)
            }
            // As in KVM, bits 0 and 10 may be clear: Linux clears one of them for the sake of old AMD processors.
            MC_FIRST..=MC_LAST if index & 3 == 0 => value == 0 || value | 1 << 10 | 1 == u64::MAX,
            MC_FIRST..=MC_LAST if index & 3 == 1 => !by_guest || value == 0 || sets_status,
            MC_FIRST..=MC_LAST => true,
            MC_CTL2_FIRST..=MC_CTL2_LAST => {
                !by_guest && value == 0 && self.has_bank(index - MC_CTL2_FIRST)
            }
            _ => return None,
        };
        let register = match index {
            MCG_STATUS => Some(&mut self.status),
            MCG_CTL => Some(&mut self.control),
            MC_CTL2_FIRST..=MC_CTL2_LAST if allowed => return Some(Ok(())),
            MC_CTL2_FIRST..=MC_CTL2_LAST => None,
            _ => self.register(index),
        };
        let Some(register) = register.filter(|_| allowed) else {
            return Some(Err(MsrFault::Invalid));
        };
        *register = value;
        Some(Ok(()))
    }

    fn has_bank(&self, bank: u32) -> bool {
        u64::from(bank) < self.capabilities & CAP_BANKS
    }

    fn register(&mut self, index: u32) -> Option<&mut u64> {
        let number = index - MC_FIRST;
        let bank = self.banks().get_mut((number / 4) as usize)?;
        Some(bank.register(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(bank: u8, status: u64) -> kvm_x86_mce {
        kvm_x86_mce {
            bank,
            status: status | STATUS_VALID,
            addr: 0x1234,
            misc: 0x5678,
            mcg_status: MCG_STATUS_IN_PROGRESS,
            ..Default::default()
        }
    }

    fn checks() -> MachineCheck {
        let mut checks = MachineCheck::default();
        checks.set_up(SUPPORTED | 10).unwrap();
        checks
    }

    fn read(checks: &mut MachineCheck, index: u32) -> u64 {
        checks.read(index, true).unwrap().unwrap()
    }

    #[test]
    fn capabilities_that_do_not_exist_are_refused() {
        let mut checks = MachineCheck::default();
        for wrong in [0, 33, 10 | 1 << 10, 10 | 1 << 27] {
            assert_eq!(checks.set_up(wrong).unwrap_err().errno(), libc::EINVAL);
        }
        assert_eq!(read(&mut checks, MCG_CAP), 32);
        assert_eq!(checks.read(MCG_CTL, true), Some(Err(MsrFault::Invalid)));
        assert_eq!(checks.read(MCG_CTL, false), Some(Ok(0)));
    }

    #[test]
    fn an_uncorrected_error_is_an_exception_once() {
        let mut checks = checks();
        let uncorrected = error(3, STATUS_UNCORRECTED | STATUS_SIGNALED);
        assert_eq!(
            checks.report(&uncorrected, false).unwrap(),
            Reported::Shutdown
        );
        assert_eq!(
            checks.report(&uncorrected, true).unwrap(),
            Reported::Exception
        );
        let bank: Vec<u64> = (0..4)
            .map(|n| read(&mut checks, MC_FIRST + 12 + n))
            .collect();
        assert_eq!(bank, [u64::MAX, uncorrected.status, 0x1234, 0x5678]);
        assert_eq!(read(&mut checks, MCG_STATUS), MCG_STATUS_IN_PROGRESS);
        assert_eq!(
            checks.report(&uncorrected, true).unwrap(),
            Reported::Shutdown
        );
        // The guest has handled the first error.
        checks.write(MCG_STATUS, 0, true, false).unwrap().unwrap();
        assert_eq!(
            checks.report(&uncorrected, true).unwrap(),
            Reported::Exception
        );
        let status = read(&mut checks, MC_FIRST + 13);
        assert_eq!(status, uncorrected.status | STATUS_OVERFLOW);
    }

    #[test]
    fn a_corrected_error_does_not_hide_a_worse_one() {
        let mut checks = checks();
        let (corrected, worse) = (error(0, 1), error(0, STATUS_UNCORRECTED | STATUS_SIGNALED));
        assert_eq!(checks.report(&corrected, true).unwrap(), Reported::Logged);
        assert_eq!(checks.report(&worse, true).unwrap(), Reported::Exception);
        assert_eq!(checks.report(&corrected, true).unwrap(), Reported::Logged);
        let status = read(&mut checks, MC_FIRST + 1);
        assert_eq!(status, worse.status | STATUS_OVERFLOW);
    }

    #[test]
    fn an_error_of_a_bank_that_does_not_report_is_dropped() {
        let mut checks = checks();
        let uncorrected = error(1, STATUS_UNCORRECTED | STATUS_SIGNALED);
        checks.write(MC_FIRST + 4, 0, true, false).unwrap().unwrap();
        assert_eq!(checks.report(&uncorrected, true).unwrap(), Reported::Logged);
        assert_eq!(read(&mut checks, MC_FIRST + 5), 0);
        assert!(checks.report(&error(10, 0), true).is_err());
        let mut invalid = error(1, 0);
        invalid.status = 0;
        assert!(checks.report(&invalid, true).is_err());
    }

    #[test]
    fn writes_are_checked() {
        let mut checks = checks();
        let refused = Some(Err(MsrFault::Invalid));
        let mut write = |index, value, by_guest, sets| checks.write(index, value, by_guest, sets);
        assert_eq!(write(MCG_CTL, 1, true, false), refused);
        assert_eq!(write(MCG_CTL, 0, true, false), Some(Ok(())));
        assert_eq!(write(MC_FIRST, 1, true, false), refused);
        assert_eq!(write(MC_FIRST, !(1 << 10), true, false), Some(Ok(())));
        assert_eq!(write(MC_FIRST + 1, 1, true, false), refused);
        assert_eq!(write(MC_FIRST + 1, 1, true, true), Some(Ok(())));
        assert_eq!(write(MC_FIRST + 1, 1, false, false), Some(Ok(())));
        assert_eq!(
            write(MC_FIRST + 40, 0, false, false),
            refused,
            "no such bank"
        );
        assert_eq!(write(MC_CTL2_FIRST, 0, true, false), refused);
        assert_eq!(write(MC_CTL2_FIRST, 0, false, false), Some(Ok(())));
        assert_eq!(write(MCG_CAP, 0, false, false), None);
    }
}
