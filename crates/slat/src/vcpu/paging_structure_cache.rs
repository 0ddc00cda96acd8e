//! The paging-structure cache of a vCPU: the level 1 tables that its walks have reached recently. The next look-up in
//! one of these tables begins at that table and not at the root (Intel SDM 3A, "Paging-Structure Caches"). The cache
//! contains no leaf: every look-up loads the page-table entry from the table.
//!
//! # How long a cache entry is valid
//! A cache entry is valid until the end of the reader section in which the walk reached the table, or until the
//! section's next quiescent point ([`crate::sync::quiesce`]), whichever comes first: the vCPU then calls
//! [`PagingStructureCache::clear`]. A table that leaves the tree after the walk (a *detached* table) is freed only
//! after every reader has passed a quiescent point. So every table in the cache is still allocated.
//!
//! # Why a detached table in the cache may be used
//! A look-up through the cache is the last step of a walk whose first steps were taken earlier in the same section.
//! Walkers take no lock and may be slow, so every change of the tables is already safe against such a walk. The cases:
//!
//! * *Zaps, invalidations, slot changes, conversions, recovery of NX huge pages, ends of dirty logs, a huge leaf that
//!   replaces a table.* A table that leaves the tree is detached as a whole and keeps its leaves. A TLB may also still
//!   contain each of these leaves, from before the table was detached. Such translations are allowed until the flush,
//!   and only after a flush, which waits for this vCPU's quiescent point, does each of these operations return or let
//!   the host page be reused.
//! * *Leaves that a fault installs in a detached table.* This fault is in a reader section that began before the flush
//!   of the table. If the fault did not see an invalidation of its page, that invalidation waits for the same flush
//!   (see `vm::invalidate`).
//! * *Changes in place* (write protection, aging, cleared dirty bits, single zapped leaves, widened rights). Every
//!   look-up loads the page-table entry from the table, so the cache hides none of these changes.
//! * *Accessed and dirty bits.* A look-up through the cache sets neither: it accepts only a leaf in which all bits that
//!   the access would set are set. For any other entry the vCPU walks from the root. So no look-up through the cache
//!   sets a dirty bit in a detached table, or in a leaf after `Tree::zap_noting` has read its dirty bit.
//! * *Harvests of a dirty log* do not find the leaves of a detached table. But if a harvest has removed a page from the
//!   log, and the flush of a detached table is not complete, the harvest itself flushes (`Vm::get_dirty_log`). This
//!   empties the cache, like a TLB. Before that flush, a leaf of the detached table that is writable without a fault
//!   maps a page that is in the log.
//! * *Splits and broken leaves* change entries of higher levels, which the cache does not contain. The table that
//!   replaces a split leaf is new, so it is not in the cache before a walk from the root reaches it.
//! * *Write protection of a higher entry* ([`crate::table`]'s hierarchical protection): the cache gets a table only if
//!   its path allows writes. An operation that write-protects the path later also flushes, and so waits for this vCPU.
//! * *MMIO entries* are not leaves: a walk from the root finds them, and compares their generation there.
//!
//! # Order within one vCPU
//! A look-up must not find an older state than an earlier look-up of the same page: after one has found a new host
//! page, which a fault installed, the next must not find the old host page in a detached table. Therefore
//! [`PagingStructureCache::forget`] drops the table as soon as an entry does not allow an access, before the fault
//! begins. (A processor, too, drops the cached entries of an address whose access faults.) Only a walk from the root
//! that needs no fault puts its table in the cache.

use alloc::boxed::Box;

use crate::addr::{Gpa, Granule, Gva, Pfn};
use crate::heap;
use crate::heap::OutOfMemory;

/// A direct-mapped cache of level 1 tables, by the region that they translate.
pub(super) struct PagingStructureCache {
    entries: Box<[Entry; ENTRIES]>,
    /// The current stamp, from 1 to [`STAMPS`] - 1. A cache entry is valid only if the low bits of its tag are this
    /// stamp, so raising the stamp empties the cache.
    stamp: u64,
}

/// An entry of the cache.
#[derive(Clone, Copy)]
struct Entry {
    /// The address of the region that `table` translates, plus the stamp that was current when this cache entry was
    /// written. 0: the cache entry is empty.
    tag: u64,
    /// The frame of the table.
    table: Pfn,
}

/// The number of cache entries. 512 entries take 8 KiB; 512 level 1 tables of 4 KiB translate 1 GiB.
const ENTRIES: usize = if cfg!(loom) { 2 } else { 512 };
/// The number of stamps: as many as fit in a tag below the bit that marks virtual addresses.
const STAMPS: u64 = TableRegion::VIRTUAL;

/// Returns log2 of the number of bytes that a level 1 table translates.
const fn region_shift(granule: Granule) -> u32 {
    granule.shift() + granule.index_bits()
}

/// The region that a level 1 table translates: of guest-physical addresses, or, for a shadow table, of virtual
/// addresses. The tags of the two kinds are never equal.
#[derive(Clone, Copy)]
pub(super) struct TableRegion {
    /// The region's address; for virtual addresses, also [`VIRTUAL`](Self::VIRTUAL).
    tag: u64,
    /// The region's index in the cache.
    index: usize,
}

impl TableRegion {
    /// The bit of a tag that marks a region of virtual addresses: it is below all bits of a region's address.
    const VIRTUAL: u64 = 1 << (region_shift(Granule::Kib4) - 1);

    /// Returns the region around `gpa` that a table of `granule` translates.
    #[inline(always)]
    pub(super) const fn of_gpa(gpa: Gpa, granule: Granule) -> Self {
        let number = gpa.0 >> region_shift(granule);
        TableRegion {
            tag: number << region_shift(granule),
            index: number as usize % ENTRIES,
        }
    }

    /// Returns the region around `gva` that a shadow table translates.
    #[inline(always)]
    pub(super) const fn of_gva(gva: Gva) -> Self {
        let TableRegion { tag, index } = Self::of_gpa(Gpa(gva.0), Granule::Kib4);
        TableRegion {
            tag: tag | Self::VIRTUAL,
            index,
        }
    }
}

impl PagingStructureCache {
    /// Makes an empty cache. Its memory is allocated as zeroes, and first written when a table is put in.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(super) fn new() -> Result<Self, OutOfMemory> {
        let entries = heap::zeroed::<[Entry; ENTRIES]>()?;
        Ok(PagingStructureCache {
            // SAFETY: a cache entry consists of two integers, and all bytes of these may be 0.
            entries: unsafe { entries.assume_init() },
            stamp: 1,
        })
    }

    /// Returns the table for `region`, if it was [`put`](Self::put) in since the last [`clear`](Self::clear), and not
    /// replaced or dropped.
    #[inline(always)]
    pub(super) fn get(&self, region: TableRegion) -> Option<Pfn> {
        let entry = &self.entries[region.index];
        (entry.tag == self.tag(region)).then_some(entry.table)
    }

    /// Stores `table` as the table for `region`.
    #[inline(always)]
    pub(super) fn put(&mut self, region: TableRegion, table: Pfn) {
        let tag = self.tag(region);
        self.entries[region.index] = Entry { tag, table };
    }

    /// Drops the table for `region`.
    pub(super) fn forget(&mut self, region: TableRegion) {
        if self.get(region).is_some() {
            self.entries[region.index].tag = 0;
        }
    }

    /// Drops all tables.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.stamp += 1;
        if self.stamp == STAMPS {
            self.start_over();
        }
    }

    /// Restarts at the first stamp. Zeroes all cache entries first, because some may have an equal stamp from long ago.
    #[cold]
    fn start_over(&mut self) {
        self.entries.iter_mut().for_each(|entry| entry.tag = 0);
        self.stamp = 1;
    }

    #[inline(always)]
    fn tag(&self, region: TableRegion) -> u64 {
        region.tag | self.stamp
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const REGION: u64 = 1 << region_shift(Granule::Kib4);

    fn gpa(address: u64) -> TableRegion {
        TableRegion::of_gpa(Gpa(address), Granule::Kib4)
    }

    fn gva(address: u64) -> TableRegion {
        TableRegion::of_gva(Gva(address))
    }

    #[test]
    fn a_region_is_what_one_table_translates() {
        for granule in [Granule::Kib4, Granule::Kib16, Granule::Kib64] {
            let mut cache = cache(0);
            let at = |address| TableRegion::of_gpa(Gpa(address), granule);
            let size = granule.bytes() * granule.entries() as u64;
            cache.put(at(3 * size), Pfn(7));
            let found = [3 * size - 1, 3 * size, 4 * size - 1, 4 * size].map(|a| cache.get(at(a)));
            assert_eq!(found, [None, Some(Pfn(7)), Some(Pfn(7)), None]);
        }
    }

    #[test]
    fn a_virtual_address_is_no_guest_physical_one() {
        let addresses = (0..64).map(|bit| 1 << bit).chain([0, u64::MAX]);
        for address in addresses.clone() {
            let mut cache = cache(0);
            cache.put(gva(address), Pfn(7));
            assert_eq!(cache.get(gva(address)), Some(Pfn(7)));
            let found = addresses
                .clone()
                .find(|other| cache.get(gpa(*other)).is_some());
            assert_eq!(found, None, "{address:#x}");
            cache.forget(gva(address));
            assert_eq!(cache.get(gva(address)), None);
        }
    }

    /// Makes a cache with tables for the first `regions` regions. The table of region n is in frame n.
    fn cache(regions: u64) -> PagingStructureCache {
        let mut cache = PagingStructureCache::new().unwrap();
        (0..regions).for_each(|n| cache.put(gpa(n * REGION), Pfn(n)));
        cache
    }

    #[test]
    fn a_table_is_found_for_every_page_of_its_region_and_for_no_other() {
        let cache = cache(ENTRIES as u64);
        for n in 0..ENTRIES as u64 {
            for offset in [0, 1, 0x1234, REGION - 1] {
                assert_eq!(cache.get(gpa(n * REGION + offset)), Some(Pfn(n)));
            }
            // Each of these regions shares region n's cache entry. The last one is above all addresses that tables
            // translate.
            for other in [1, 2, 1 << 16, u64::MAX / REGION / ENTRIES as u64] {
                let far = (n + other * ENTRIES as u64) * REGION;
                assert_eq!(cache.get(gpa(far)), None, "{far:#x}");
            }
        }
    }

    #[test]
    fn a_new_cache_is_empty() {
        let cache = cache(0);
        let any = (0..2 * ENTRIES as u64).any(|n| cache.get(gpa(n * REGION)).is_some());
        assert!(!any);
    }

    #[test]
    fn the_last_table_put_in_an_entry_is_the_one_it_holds() {
        let mut cache = cache(1);
        let other = gpa(ENTRIES as u64 * REGION);
        cache.put(other, Pfn(7));
        assert_eq!((cache.get(gpa(0)), cache.get(other)), (None, Some(Pfn(7))));
        // To forget region 0, which is no longer in the cache entry, must not drop the other region.
        cache.forget(gpa(0));
        assert_eq!(cache.get(other), Some(Pfn(7)));
        cache.forget(other);
        assert_eq!((cache.get(gpa(0)), cache.get(other)), (None, None));
    }

    #[test]
    fn nothing_is_found_after_a_clear() {
        let mut cache = cache(3);
        cache.clear();
        cache.put(gpa(REGION), Pfn(9));
        let found = [0, 1, 2].map(|n| cache.get(gpa(n * REGION)));
        assert_eq!(found, [None, Some(Pfn(9)), None]);
    }

    #[test]
    fn what_was_put_under_a_stamp_is_not_found_when_the_stamp_comes_again() {
        let mut cache = cache(ENTRIES as u64);
        let first = cache.stamp;
        // Pretend that almost all stamps were used: after two more clears the first stamp returns.
        cache.stamp = STAMPS - 2;
        cache.put(gpa(REGION), Pfn(9));
        let mut clears = 0;
        while cache.stamp != first {
            cache.clear();
            clears += 1;
            let any = (0..ENTRIES as u64).any(|n| cache.get(gpa(n * REGION)).is_some());
            assert!(!any, "after {clears} clears");
        }
        assert_eq!(clears, 2);
    }
}
