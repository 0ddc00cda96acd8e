//! TLB maintenance for second-level translations.
//!
//! A CPU may keep stage 2 alone (an IPA to its page) and both stages combined (a VA to its page).
//! What is invalidated by IPA is the first only; the second goes with the VMID's stage 1. Arm ARM,
//! "TLB maintenance instructions": an invalidation is complete, on all CPUs it is for, after a DSB; the
//! DSB before it makes the change of the table seen by their walkers.

use core::arch::asm;
use core::ops::Range;

use slat::{Gfn, PAGE_SHIFT};

/// More pages than this are not worth an instruction each.
const FEW: u64 = 64;

/// What TLBI IPAS2E1 takes: the IPA in units of 4 KiB.
fn operand(gfn: Gfn) -> u64 {
    const _: () = assert!(PAGE_SHIFT == 12);
    gfn.0
}

/// Every CPU forgets `range` of the guest whose VMID this CPU's VTTBR_EL2 holds.
pub(crate) fn flush_range(range: &Range<Gfn>) {
    // SAFETY: a TLB may be invalidated at any time.
    unsafe {
        asm!("dsb ishst", options(nostack, preserves_flags));
        if range.end.0 - range.start.0 > FEW {
            asm!("tlbi vmalls12e1is", options(nostack, preserves_flags));
        } else {
            for gfn in range.start.0..range.end.0 {
                asm!("tlbi ipas2e1is, {}", in(reg) operand(Gfn(gfn)), options(nostack, preserves_flags));
            }
            asm!(
                "dsb ish",
                "tlbi vmalle1is",
                options(nostack, preserves_flags)
            );
        }
        asm!("dsb ish", "isb", options(nostack, preserves_flags));
    }
}

/// Every CPU forgets every guest.
pub(crate) fn flush_everything() {
    // SAFETY: as above.
    unsafe {
        asm!(
            "dsb ishst",
            "tlbi alle1is",
            "dsb ish",
            "isb",
            options(nostack, preserves_flags)
        );
    }
}

/// This CPU forgets the page `gfn` of the guest whose VMID its VTTBR_EL2 holds.
pub(crate) fn forget(gfn: Gfn) {
    // SAFETY: as above.
    unsafe {
        asm!(
            "dsb ishst",
            "tlbi ipas2e1, {}",
            "dsb nsh",
            "tlbi vmalle1",
            "dsb nsh",
            "isb",
            in(reg) operand(gfn),
            options(nostack, preserves_flags)
        );
    }
}
