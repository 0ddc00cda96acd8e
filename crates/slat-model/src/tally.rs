//! Counts the events of a run.

use std::collections::BTreeMap;

/// The number of occurrences of each event, by name. A tally shows which checks were never reached.
#[derive(Clone, Debug, Default)]
pub struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    /// The names that every long run must count, with every format.
    pub const USUAL: [&'static str; 36] = [
        "slot set",
        "several slots set",
        "several slots refused",
        "slot refused",
        "slot found",
        "page read",
        "page written",
        "page executed",
        "huge page",
        "page of space 1",
        "address space changed",
        "MMIO",
        "MMIO from an entry",
        "bad address",
        "frames converted",
        "private frame",
        "conversion refused",
        "retried meanwhile",
        "log taken",
        "log cleared",
        "log refused",
        "clear refused",
        "still mapped when logging began",
        "split eagerly",
        "prefaulted to the end",
        "prefaulted in part",
        "NX tables recovered",
        "one young leaf",
        "page not used for three passes",
        "page used again",
        "mapping looked up",
        "mapping cached less than the host has it",
        "fetch refused by a slot",
        "access to a frame not mapped",
        "access that the mapping allows",
        "access that the mapping does not allow",
    ];
    /// The names of the events that must also occur in a run with [`MmuKind::Tdp`](slat::MmuKind).
    pub const OF_TDP: [&'static str; 4] = [
        "still mapped when several slots were set",
        "still mapped when logging ended",
        "huge page recovered",
        "huge page promoted",
    ];
    /// The names of the events that must also occur in a run with dirty rings.
    pub const OF_RINGS: [&'static str; 4] = [
        "ring pushed",
        "ring full",
        "ring reset",
        "ring left with pages",
    ];

    /// The names that a run of [`Mix::CLONES`](crate::Mix::CLONES) must count; the last name only with
    /// [`MmuKind::Tdp`](slat::MmuKind).
    pub const OF_CLONES: [&'static str; 4] = [
        "VM cloned",
        "VM ended beside a clone",
        "page copied for a write",
        "mapping copied to a clone",
    ];

    /// Names that a run of [`Mix::SNAPSHOTS`](crate::Mix::SNAPSHOTS) must have counted.
    pub const OF_SNAPSHOTS: [&'static str; 6] = [
        "snapshot begun",
        "snapshot complete",
        "snapshot dropped before its end",
        "page kept before a write",
        "page kept before it was taken away",
        "page kept in the background",
    ];

    pub(crate) fn count(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    /// Returns the number of occurrences of `what`.
    pub fn of(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }

    /// Adds another tally.
    pub fn add(&mut self, other: &Tally) {
        for (what, n) in &other.0 {
            *self.0.entry(what).or_default() += n;
        }
    }

    /// Returns all names, with their number of occurrences.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(what, n)| (*what, *n))
    }
}
