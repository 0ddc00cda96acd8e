//! Quirks: behaviour of KVM that differs from hardware until the client disables it (`KVM_CAP_DISABLE_QUIRKS2`).
//!
//! | quirk | implemented in |
//! |---|---|
//! | `LINT0_REENABLED` | the bootstrap processor's APIC after reset ([`slat_irqchip::lapic::Lapic::accept_external`]) |
//! | `LAPIC_MMIO_HOLE`, `OUT_7E_INC_RIP` | exits (`run`) |
//! | `MISC_ENABLE_NO_MWAIT` | the MSR (`msr`) |
//! | `FIX_HYPERCALL_INSN`, `MWAIT_NEVER_UD_FAULTS` | the CPU's machine (`machine`) |
//! | `CD_NW_CLEARED`, `SLOT_ZAP_ALL` | nowhere: guests do not notice caches, and deleting a slot zaps only that slot's leaves |

use crate::errno::{Result, fail};
use kvm_bindings::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// The quirks that can be disabled: the value that `KVM_CHECK_EXTENSION` returns for `KVM_CAP_DISABLE_QUIRKS2`.
pub const SUPPORTED: u32 = KVM_X86_QUIRK_LINT0_REENABLED
    | KVM_X86_QUIRK_CD_NW_CLEARED
    | KVM_X86_QUIRK_LAPIC_MMIO_HOLE
    | KVM_X86_QUIRK_OUT_7E_INC_RIP
    | KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT
    | KVM_X86_QUIRK_FIX_HYPERCALL_INSN
    | KVM_X86_QUIRK_MWAIT_NEVER_UD_FAULTS
    | KVM_X86_QUIRK_SLOT_ZAP_ALL;

/// The quirks that the client of a VM has disabled.
#[derive(Debug, Default)]
pub(crate) struct Quirks {
    disabled: AtomicU64,
}

impl Quirks {
    /// Whether the VM has this quirk.
    pub(crate) fn has(&self, quirk: u32) -> bool {
        self.disabled.load(Ordering::Relaxed) & u64::from(quirk) == 0
    }

    /// Disables quirks. No call enables them again.
    ///
    /// # Errors
    /// `EINVAL` for a quirk that does not exist.
    pub(crate) fn disable(&self, quirks: u64) -> Result<()> {
        if quirks & !u64::from(SUPPORTED) != 0 {
            return fail(libc::EINVAL);
        }
        self.disabled.fetch_or(quirks, Ordering::Relaxed);
        Ok(())
    }
}
