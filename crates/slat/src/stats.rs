//! Counters of the engine's events. A counter that KVM also has is called like KVM's statistic.
//!
//! Every reader ([`crate::sync::quiesce`]) has its own set of counters, which only its owner writes. So an increment
//! costs a plain load and store. The VM's counts are the sums over all readers.

use core::sync::atomic::{AtomicU64, Ordering::*};

use crate::addr::Level;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A snapshot of the counters.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// Counters that one owner (for example a vCPU) increases.
        #[derive(Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Stats {
                Stats { $($name: self.$name.get(),)* }
            }
        }

        impl Stats {
            /// The name of every counter, in the order of [`Stats::iter`].
            pub const NAMES: &[&str] = &[$(stringify!($name),)*];

            /// Name and value of every counter, in a fixed order.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// Adds another snapshot, counter by counter.
            pub fn add(&mut self, other: &Stats) {
                $(self.$name = self.$name.wrapping_add(other.$name);)*
            }

            /// Returns the counts since `earlier`.
            pub fn since(&self, earlier: &Stats) -> Stats {
                Stats { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }
        }
    };
}

counters! {
    /// Second-level faults taken: the walk found no entry that allows the access.
    pf_taken,
    /// Faults that installed a leaf, or added rights to one.
    pf_fixed,
    /// Faults that found the leaf already installed, because another vCPU was faster.
    pf_spurious,
    /// Fixed or spurious faults for which the engine looked up neither slot nor host page: the leaf had lost a right
    /// only because of the dirty log.
    pf_fast,
    /// Faults abandoned and retried because of an invalidation or slot change meanwhile.
    pf_retried,
    /// Faults that found no memslot, or that were a write to a read-only memslot.
    pf_emulate,
    /// MMIO entries installed.
    pf_mmio_spte_created,
    /// MMIO accesses served by an MMIO entry, with no slot look-up.
    mmio_cached,
    /// Memslot look-ups by guest frame.
    slot_lookups,
    /// Look-ups served by a slot that the vCPU used recently, with no search.
    slot_lookups_saved,
    /// Entries of the guest's own page tables that were read to translate an address.
    guest_pte_reads,
    /// 4 KiB leaves (a gauge: the number that exist now).
    pages_4k,
    /// 2 MiB leaves (a gauge).
    pages_2m,
    /// 1 GiB leaves (a gauge).
    pages_1g,
    /// Huge leaves split in place.
    splits,
    /// Tables replaced by a huge leaf in place, when dirty logging ends or by promotion.
    collapses,
    /// Level 1 tables that a huge leaf could replace if the policy `nx_huge_pages` allowed it (a gauge).
    nx_lpage_splits,
    /// Page-table entries read by eager splits: splits that do not wait for the guest to write.
    split_entries_visited,
    /// Pages mapped ahead of their use.
    prefetched,
    /// Shadow pages made because no page existed for their frame and role. With [`MmuKind::Tdp`](crate::MmuKind), only
    /// nested tables have shadow pages.
    mmu_cache_miss,
    /// Shadow pages zapped.
    mmu_shadow_zapped,
    /// Shadow pages zapped because they were the oldest and the limit of pages was reached (see
    /// [`Vm::set_mmu_pages`](crate::Vm)).
    mmu_recycled,
    /// Stores of the guest to its page tables that were reported to the MMU. 0 if the MMU shadows no tables.
    mmu_pte_write,
    /// Entries that referred to a shadow page and were cleared because the guest had changed its table.
    mmu_pde_zapped,
    /// Shadow pages zapped because the guest has stored to the table again and again without using it: the memory may
    /// not be a table any more.
    mmu_flooded,
    /// Shadow pages that are not synced with the guest's table until the guest flushes its TLB (a gauge).
    mmu_unsync,
    /// Page faults of the guest: its own tables do not allow the access.
    pf_guest,
    /// INVLPG instructions of the guest that were reported to the MMU.
    invlpg,
    /// Leaves zapped by slot changes and invalidations, one by one or with their table.
    zapped,
    /// Flushes of all vCPUs.
    remote_tlb_flush,
    /// Flush requests. Several requests may share one flush.
    remote_tlb_flush_requests,
    /// Invalidations of backing ranges that some memslot uses.
    invalidations,
    /// Memslots created, deleted, moved, or changed in their flags.
    slot_changes,
    /// Pages marked in a dirty log.
    dirty_pages,
}

/// One counter, written by one owner at a time.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Subtracts `n`. One owner's counter may wrap below 0: of a gauge, only the sum over all owners is meaningful.
    #[inline]
    pub(crate) fn sub(&self, n: u64) {
        self.add(n.wrapping_neg());
    }
}

impl Counters {
    /// Returns the gauge of leaves of `level`.
    #[inline]
    pub(crate) fn leaves_of(&self, level: Level) -> &Counter {
        match level {
            Level::PAGE => &self.pages_4k,
            Level::MEGA => &self.pages_2m,
            _ => &self.pages_1g,
        }
    }

    /// Returns the gauges of leaves, by level.
    pub(crate) fn leaves(&self) -> [&Counter; 3] {
        [Level::PAGE, Level::MEGA, Level::GIGA].map(|level| self.leaves_of(level))
    }
}
