//! Counters, with the names of KVM's statistics where KVM has them.
//!
//! Every reader ([`crate::sync::quiesce`]) has its own set, written by its owner alone, so that
//! counting costs a plain load and store; the sum over all readers is the VM's.

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

        /// Live counters of one owner.
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
    /// Second-level faults taken: the walk found nothing that allows the access.
    pf_taken,
    /// Faults that installed a leaf or widened one.
    pf_fixed,
    /// Faults that found the leaf there already: another vCPU was faster.
    pf_spurious,
    /// The faults, among those fixed or spurious, for which the engine looked up neither slot nor host page: the leaf
    /// had lost a right to the dirty log only.
    pf_fast,
    /// Faults abandoned because an invalidation or slot change came in between, and taken again.
    pf_retried,
    /// Faults that found no memslot, or a write to a read-only one.
    pf_emulate,
    /// MMIO entries installed.
    pf_mmio_spte_created,
    /// MMIO accesses answered from an MMIO entry, with no slot look-up.
    mmio_cached,
    /// Memslot look-ups by guest frame.
    slot_lookups,
    /// Look-ups answered by a slot that the vCPU used lately, with no search.
    slot_lookups_saved,
    /// Entries of the guest's own page tables that were read to translate an address.
    guest_pte_reads,
    /// 4 KiB leaves (a gauge: now present).
    pages_4k,
    /// 2 MiB leaves (a gauge).
    pages_2m,
    /// 1 GiB leaves (a gauge).
    pages_1g,
    /// Huge leaves split in place.
    splits,
    /// Tables replaced by a huge leaf in place, when a dirty log ended.
    collapses,
    /// Level 1 tables whose frames a huge leaf could map if NX allowed it (a gauge).
    nx_lpage_splits,
    /// Entries that eager splits have looked at.
    split_entries_visited,
    /// Pages mapped ahead of their use.
    prefetched,
    /// Shadow pages made: of their frame and role there was none. With [`MmuKind::Tdp`](crate::MmuKind)
    /// those of nested tables.
    mmu_cache_miss,
    /// Shadow pages zapped.
    mmu_shadow_zapped,
    /// The zapped shadow pages that were the oldest, and were zapped because the limit of pages was reached
    /// ([`Vm::set_mmu_pages`](crate::Vm)).
    mmu_recycled,
    /// Stores to tables of the guest's that the MMU was told of. None if it shadows no tables.
    mmu_pte_write,
    /// Entries that referred to a shadow page, and that such a store has changed: they were cleared.
    mmu_pde_zapped,
    /// Shadow pages zapped because the guest has stored to the table over and over without using it:
    /// it may be one no more.
    mmu_flooded,
    /// Shadow pages that do not follow the guest's table, until the guest flushes its TLB (a gauge).
    mmu_unsync,
    /// Page faults of the guest's: its tables do not allow the access.
    pf_guest,
    /// INVLPG instructions.
    invlpg,
    /// Leaves zapped by slot changes and invalidations, one by one or with their table.
    zapped,
    /// Flushes of all vCPUs.
    remote_tlb_flush,
    /// Flush requests. Several requests may share one flush.
    remote_tlb_flush_requests,
    /// Invalidations of backing ranges that some memslot uses.
    invalidations,
    /// Memslots created, deleted, moved, or given other flags.
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

    /// For gauges, whose sum over all owners is what counts.
    #[inline]
    pub(crate) fn sub(&self, n: u64) {
        self.add(n.wrapping_neg());
    }
}

impl Counters {
    /// The gauge of leaves of `level`.
    #[inline]
    pub(crate) fn leaves_of(&self, level: Level) -> &Counter {
        match level {
            Level::PAGE => &self.pages_4k,
            Level::MEGA => &self.pages_2m,
            _ => &self.pages_1g,
        }
    }

    /// The gauges of leaves, by level.
    pub(crate) fn leaves(&self) -> [&Counter; 3] {
        [Level::PAGE, Level::MEGA, Level::GIGA].map(|level| self.leaves_of(level))
    }
}
