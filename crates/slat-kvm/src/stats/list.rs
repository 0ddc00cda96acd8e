//! The statistics and their names.
//!
//! KVM's statistics are first in the list. The engine's other counters follow, under their own names. The file contains
//! the names, so a reader that knows KVM's names finds those statistics and skips the others.

use crate::arch::{self, Exits};
use crate::counters::BUCKETS;
use crate::errno::Result;
use crate::heap;
use kvm_bindings::*;
use slat::Stats;

/// The kind of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A counter: the value only grows.
    Counter,
    /// A gauge: the value is the current one, and may grow or shrink.
    Gauge,
    /// The largest value so far.
    Peak,
    /// The current state, 1 or 0.
    Flag,
    /// Nanoseconds. The value only grows.
    Time,
    /// Counts of durations, in buckets of doubling width.
    TimeHistogram,
}

/// The source of a value.
#[derive(Clone, Copy, Debug)]
enum Source {
    /// The engine's counter of this index.
    Engine(usize),
    /// The vCPU's counter of this index.
    Exits(usize),
    HaltHistogram,
    Blocking,
    /// The value is always 0, because the counted event does not exist in slat ([`NEVER_VM`], [`NEVER_VCPU`]).
    Never,
}

/// One statistic of a VM or a vCPU, as KVM's binary statistics describe it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) name: &'static str,
    kind: Kind,
    source: Source,
}

/// The engine's statistics that are gauges.
const GAUGES: &[&str] = &[
    "pages_4k",
    "pages_2m",
    "pages_1g",
    "nx_lpage_splits",
    "mmu_unsync",
];
/// The statistics that the engine counts for a VM as a whole.
const VM: &[&str] = &[
    "remote_tlb_flush",
    "remote_tlb_flush_requests",
    "pages_4k",
    "pages_2m",
    "pages_1g",
    "nx_lpage_splits",
    "mmu_shadow_zapped",
    "mmu_recycled",
    "mmu_cache_miss",
    "mmu_pte_write",
    "mmu_pde_zapped",
    "mmu_flooded",
    "mmu_unsync",
];
/// The statistics that the engine counts for each vCPU.
const VCPU: &[&str] = &[
    "pf_taken",
    "pf_fixed",
    "pf_emulate",
    "pf_spurious",
    "pf_fast",
    "pf_mmio_spte_created",
    "pf_guest",
    "invlpg",
];
/// KVM's statistics of structures that slat does not have. These statistics are always 0: slat's reverse maps have no
/// recorded length, and slat does not find shadow pages by a hash.
const NEVER_VM: &[(&str, Kind)] = &[
    ("max_mmu_rmap_size", Kind::Peak),
    ("max_mmu_page_hash_collisions", Kind::Peak),
];
/// KVM's statistics of polling before a halt, which a slat vCPU never does. These statistics are always 0, like the
/// architecture's statistics in [`arch::NEVER`].
const NEVER_VCPU: &[(&str, Kind)] = &[
    ("halt_successful_poll", Kind::Counter),
    ("halt_attempted_poll", Kind::Counter),
    ("halt_poll_invalid", Kind::Counter),
    ("halt_poll_success_ns", Kind::Time),
    ("halt_poll_fail_ns", Kind::Time),
    ("halt_poll_success_hist", Kind::TimeHistogram),
    ("halt_poll_fail_hist", Kind::TimeHistogram),
];

fn never(&(name, kind): &(&'static str, Kind)) -> Entry {
    let source = Source::Never;
    Entry { name, kind, source }
}

/// Returns the engine's statistics whose names `wanted` accepts.
fn of_engine(wanted: impl Fn(&str) -> bool) -> impl Iterator<Item = Entry> {
    let all = Stats::NAMES.iter().enumerate();
    let wanted = all.filter(move |(_, name)| wanted(name));
    wanted.map(|(index, name)| Entry {
        name,
        kind: if GAUGES.contains(name) {
            Kind::Gauge
        } else {
            Kind::Counter
        },
        source: Source::Engine(index),
    })
}

/// Returns the list of a VM's statistics.
///
/// # Errors
/// `ENOMEM`.
pub(super) fn of_vm() -> Result<Vec<Entry>> {
    let mut list = heap::with_room(Stats::NAMES.len() + NEVER_VM.len())?;
    list.extend(of_engine(|name| VM.contains(&name)));
    list.extend(NEVER_VM.iter().map(never));
    list.extend(of_engine(|name| !VM.contains(&name)));
    Ok(list)
}

/// Returns the list of a vCPU's statistics.
///
/// # Errors
/// `ENOMEM`.
pub(super) fn of_vcpu() -> Result<Vec<Entry>> {
    let exits = Exits::NAMES.iter().enumerate().map(|(index, name)| Entry {
        name,
        kind: if name.ends_with("_ns") {
            Kind::Time
        } else {
            Kind::Counter
        },
        source: Source::Exits(index),
    });
    let halts = [
        Entry {
            name: "halt_wait_hist",
            kind: Kind::TimeHistogram,
            source: Source::HaltHistogram,
        },
        Entry {
            name: "blocking",
            kind: Kind::Flag,
            source: Source::Blocking,
        },
    ];
    let of_arch = arch::NEVER.iter().map(|name| (*name, Kind::Counter));
    let of_arch = of_arch.chain(arch::NEVER_IN.iter().map(|name| (*name, Kind::Flag)));
    let never_vcpu = NEVER_VCPU.len() + arch::NEVER.len() + arch::NEVER_IN.len();
    let most = Stats::NAMES.len() + Exits::NAMES.len() + halts.len() + never_vcpu;
    let mut list = heap::with_room(most)?;
    list.extend(of_engine(|name| VCPU.contains(&name)));
    list.extend(exits);
    list.extend(halts);
    list.extend(NEVER_VCPU.iter().map(never));
    list.extend(of_arch.map(|entry| never(&entry)));
    // The VM's own statistics are left out: a vCPU's share of a VM's gauge has no meaning.
    list.extend(of_engine(|name| {
        !VM.contains(&name) && !VCPU.contains(&name)
    }));
    Ok(list)
}

impl Entry {
    /// Returns the number of values of the statistic.
    pub(super) fn len(&self) -> usize {
        match self.kind {
            Kind::TimeHistogram => BUCKETS,
            _ => 1,
        }
    }

    /// Appends the `kvm_stats_desc` of this statistic, without the name. `offset` is the offset of the statistic's
    /// values in the file.
    pub(super) fn describe(&self, bytes: &mut Vec<u8>, offset: u32) {
        let (kind, unit, exponent) = match self.kind {
            Kind::Counter => (KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_UNIT_NONE, 0),
            Kind::Gauge => (KVM_STATS_TYPE_INSTANT, KVM_STATS_UNIT_NONE, 0),
            Kind::Peak => (KVM_STATS_TYPE_PEAK, KVM_STATS_UNIT_NONE, 0),
            Kind::Flag => (KVM_STATS_TYPE_INSTANT, KVM_STATS_UNIT_BOOLEAN, 0),
            Kind::Time => (KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_UNIT_SECONDS, -9),
            Kind::TimeHistogram => (KVM_STATS_TYPE_LOG_HIST, KVM_STATS_UNIT_SECONDS, -9i16),
        };
        let base = KVM_STATS_BASE_POW10;
        let bucket_size = 0u32;
        bytes.extend((kind | unit | base).to_le_bytes());
        bytes.extend(exponent.to_le_bytes());
        bytes.extend((self.len() as u16).to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes.extend(bucket_size.to_le_bytes());
    }

    /// Calls `give` with each value, [`Self::len`] times.
    pub(super) fn values(&self, engine: &Stats, exits: Option<&Exits>, mut give: impl FnMut(u64)) {
        match (self.source, exits) {
            (Source::Engine(index), _) => {
                give(engine.iter().nth(index).map_or(0, |(_, value)| value))
            }
            (Source::Exits(index), Some(exits)) => give(exits.value(index)),
            (Source::HaltHistogram, Some(exits)) => exits.halts.wait_hist.iter().for_each(give),
            (Source::Blocking, Some(exits)) => give(exits.halts.is_blocking().into()),
            // The source is [`Source::Never`]. (The list of a VM's statistics has no source that needs a vCPU's
            // counters.)
            _ => (0..self.len()).for_each(|_| give(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_found_and_found_once() {
        for (list, wanted) in [(of_vm().unwrap(), VM), (of_vcpu().unwrap(), VCPU)] {
            let names: BTreeSet<_> = list.iter().map(|entry| entry.name).collect();
            assert_eq!(names.len(), list.len());
            for name in wanted {
                assert!(names.contains(name), "{name}");
            }
        }
    }

    #[test]
    fn an_entry_gives_as_many_values_as_it_says() {
        let exits = Exits::default();
        for entry in of_vcpu().unwrap() {
            let mut given = 0;
            entry.values(&Stats::default(), Some(&exits), |_| given += 1);
            assert_eq!(given, entry.len(), "{}", entry.name);
        }
    }
}
