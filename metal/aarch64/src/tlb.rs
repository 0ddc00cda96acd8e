//! TLB maintenance for second-level translations.
//!
//! A CPU may cache translations of stage 2 alone (from an IPA to its page) and of both stages combined (from a VA to
//! its page). An invalidation by IPA drops only entries of the first kind. Entries of the second kind are dropped with
//! the VMID's stage 1. By the Arm ARM, "TLB maintenance instructions", an invalidation is complete, on all CPUs that
//! it addresses, after a DSB. The DSB before the invalidation makes the change of the table visible to the walkers of
//! these CPUs.

use core::arch::asm;
use core::ops::Range;

use crate::sysreg::read;
use slat::{Gfn, Gpa, Granule, Level, Stale};

/// The largest number of leaves that are flushed one by one. For more leaves, the whole VMID is flushed.
const FEW: u64 = 64;

/// Returns the operand of TLBI IPAS2E1: the IPA in units of 4 KiB. Higher bits give the level of the leaf in tables of
/// `granule`, if all leaves have one level; CPUs with FEAT_TTL use them.
fn operand(ipa: Gpa, hint: Option<(Granule, Level)>) -> u64 {
    const TTL_SHIFT: u32 = 44;
    let hint = hint.map_or(0, |(granule, level)| {
        // Arm counts levels from the root: pages are at level 3.
        (granule as u64 + 1) << 2 | u64::from(4 - level.0)
    });
    ipa.gfn().0 | hint << TTL_SHIFT
}

fn looks_at_levels() -> bool {
    const TTL: u64 = 0xf << 48;
    read!(id_aa64mmfr2_el1) & TTL != 0
}

/// Makes every CPU drop `stale` in `range` of the guest whose VMID this CPU's VTTBR_EL2 holds.
pub(crate) fn flush_range(range: &Range<Gfn>, stale: Stale, granule: Granule) {
    // Use one instruction for each leaf, with any address in the leaf.
    let leaf = stale.level.unwrap_or(Level::PAGE);
    let pages = granule.pages(leaf);
    let gfns = granule.align_down(range.start, leaf).0..range.end.0;
    let hint = stale.level.filter(|_| looks_at_levels());
    let hint = hint.map(|level| (granule, level));
    // SAFETY: a TLB may be invalidated at any time.
    unsafe {
        asm!("dsb ishst", options(nostack, preserves_flags));
        if (gfns.end - gfns.start) / pages > FEW {
            asm!("tlbi vmalls12e1is", options(nostack, preserves_flags));
        } else {
            for gfn in gfns.step_by(pages as usize) {
                let operand = operand(granule.gpa(Gfn(gfn)), hint);
                if stale.tables {
                    asm!("tlbi ipas2e1is, {}", in(reg) operand, options(nostack, preserves_flags));
                } else {
                    asm!("tlbi ipas2le1is, {}", in(reg) operand, options(nostack, preserves_flags));
                }
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

/// Makes every CPU drop the translations of every guest.
pub(crate) fn flush_everything() {
    // SAFETY: a TLB may be invalidated at any time.
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

/// Makes this CPU drop the translations of every guest.
pub(crate) fn flush_this_cpu() {
    // SAFETY: a TLB may be invalidated at any time.
    unsafe {
        asm!(
            "tlbi alle1",
            "dsb nsh",
            "isb",
            options(nostack, preserves_flags)
        );
    }
}

/// Makes this CPU drop the page at `ipa` of the guest whose VMID its VTTBR_EL2 holds.
pub(crate) fn forget(ipa: Gpa) {
    // SAFETY: a TLB may be invalidated at any time.
    unsafe {
        asm!(
            "dsb ishst",
            "tlbi ipas2e1, {}",
            "dsb nsh",
            "tlbi vmalle1",
            "dsb nsh",
            "isb",
            in(reg) operand(ipa, None),
            options(nostack, preserves_flags)
        );
    }
}
