//! VMRUN's checks of the guest's registers and the control area (AMD64 volume 2, 15.5.1, "Canonicalization and
//! Consistency Checks"). If a check fails, the hypervisor gets VMEXIT_INVALID.

use crate::Cpu;
use crate::features::Features;
use crate::nested::code;
use crate::nested::vmcb::{Control, Registers, virtual_interrupt};
use crate::state::{Segment, control::*, is_pat};
use crate::svm::feature;

/// The size of the I/O permission map in bytes. The next constant is the size of the MSR permission map.
const IO_MAP_BYTES: u64 = 0x3000;
const MSR_MAP_BYTES: u64 = 0x2000;

impl Cpu {
    /// Whether VMRUN can run a guest with the registers `guest` and the control area `control`.
    pub(crate) fn is_runnable(&self, guest: &Registers, control: &Control) -> bool {
        are_registers_valid(guest, &self.features)
            && self.is_control_valid(control, self.state.cr0)
            && (!control.nested_paging() || is_pat(guest.pat))
    }

    /// Whether a hypervisor whose CR0 is `cr0` can run a guest with the control area `control`.
    pub(crate) fn is_control_valid(&self, control: &Control, cr0: u64) -> bool {
        use virtual_interrupt::*;
        let features = &self.features;
        let has = |bit| features.svm & bit != 0;
        // A map may reach to the very end of the physical address space, but not beyond.
        let ends_beyond = |at: u64, bytes: u64| {
            (at | at.wrapping_add(bytes - 1)) & features.beyond_physical() != 0
        };
        let bad_paging = control.has_unknown_paging()
            || control.nested_paging()
                && (!has(feature::NESTED_PAGING)
                    || cr0 & CR0_PG == 0
                    || control.nested_cr3() & features.beyond_physical() != 0);
        let flush = control.tlb_control();
        let bad_flush =
            !(matches!(flush, 0 | 1) || has(feature::FLUSH_BY_ASID) && matches!(flush, 3 | 7));
        let interrupts = control.virtual_interrupt();
        let bad_interrupts = interrupts & NOT_OFFERED != 0
            || interrupts & GIF_ENABLE != 0 && !has(feature::VIRTUAL_GIF)
            || interrupts & NMI_ENABLE != 0
                && !(has(feature::VIRTUAL_NMI) && control.intercepts(code::NMI));
        let bad_event = control.event().is_valid() && !control.event().is_injectable();
        control.intercepts(code::VMRUN)
            && control.asid() != 0
            && !ends_beyond(control.io_map(), IO_MAP_BYTES)
            && !ends_beyond(control.msr_map(), MSR_MAP_BYTES)
            && !(bad_paging || bad_flush || bad_interrupts || bad_event)
    }
}

/// Whether a CPU with `features` can have the registers `guest`. Paging in real mode is allowed (15.19); all other
/// illegal combinations are refused.
pub(crate) fn are_registers_valid(guest: &Registers, features: &Features) -> bool {
    let Registers {
        cs,
        efer,
        cr0,
        cr3,
        cr4,
        dr6,
        dr7,
        ..
    } = *guest;
    let pages = cr0 & CR0_PG != 0;
    let long = pages && efer & EFER_LME != 0;
    let bad_long = long && (cr4 & CR4_PAE == 0 || cr0 & CR0_PE == 0)
        || long && cs.rights & Segment::UNUSABLE == 0 && cs.long() && cs.big()
        || !long && cr4 & CR4_PCIDE != 0;
    let bad = efer & EFER_SVME == 0
        || efer & !(features.efer | EFER_LMA) != 0
        || cr0 & (CR0_CD | CR0_NW) == CR0_NW
        || cr0 >> 32 != 0
        || cr3 & features.beyond_physical() != 0
        || cr4 & !features.cr4 != 0
        || (dr6 | dr7) >> 32 != 0;
    !(bad || bad_long)
}
