//! Functions that the random tests of guests that are hypervisors share.

use kvm_bindings::kvm_segment;
use slat::MmuKind;

/// Returns the first word of a segment in a control block.
pub fn packed(segment: &kvm_segment) -> u64 {
    let attributes = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.dpl) << 5
        | u64::from(segment.present) << 7
        | u64::from(segment.l) << 9
        | u64::from(segment.db) << 10
        | u64::from(segment.g) << 11;
    u64::from(segment.selector) | attributes << 16 | u64::from(segment.limit) << 32
}

/// Returns the number in an environment variable.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// Returns the MMUs to test: the one that SLAT_MMU names, or all.
pub fn chosen_mmus() -> impl Iterator<Item = MmuKind> {
    let only = std::env::var("SLAT_MMU").ok();
    (MmuKind::ALL.iter().copied())
        .filter(move |mmu| only.as_ref().is_none_or(|name| *name == mmu.name()))
}
