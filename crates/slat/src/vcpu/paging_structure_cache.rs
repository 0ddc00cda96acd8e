//! The paging-structure cache of a vCPU: the level 1 tables that its walks have reached recently. The next look-up in
//! one of these tables begins at that table and not at the root (Intel SDM 3A, "Paging-Structure Caches"). The cache
//! contains no leaf: every look-up loads the page-table entry from the table.
//!
//! # How long a cache entry is valid
//! A cache entry is valid until the end of the reader section in which the walk reached the table, or until the
//! section's next quiescent point ([`crate::sync::quiesce`]), whichever comes first: the vCPU then calls
//! [`PagingStructureCache::clear`]. A table that is detached after the walk is freed only after every reader has passed
//! a quiescent point. So every table in the cache is still allocated.
//!
//! # Why a detached table may be used
//! A look-up through the cache is the last step of a walk whose first steps were taken earlier in the same section.
//! Walkers take no lock and may be slow, so every change of the tables already allows for such a walk. The cases:
//!
//! * *Zaps, invalidations, slot changes, conversions, recovery of NX huge pages, ends of dirty logs, a huge leaf that
//!   replaces a table.* A table that leaves the tree is detached as a whole and keeps its leaves. A vCPU could have
//!   kept each of these leaves in its TLB since before the table was detached. Such translations are allowed until the
//!   flush, and each of these operations returns, or lets the host page be reused, only after a flush that waits for
//!   this vCPU's quiescent point.
//! * *Leaves that a late fault installs in a detached table.* That fault is in a reader section that began
//!   before the flush. Any invalidation that it did not see waits for the same flush (see
//!   `vm::invalidate`).
//! * *Changes in place* (write protection, aging, cleared dirty bits, single zapped leaves, widened rights). The
//!   page-table entry is loaded anew, so the cache hides none of them.
//! * *Accessed and dirty bits.* A look-up through the cache sets neither: it accepts only a leaf in which all bits that
//!   the access would set are set. For any other entry the vCPU walks from the root. So no look-up through the cache
//!   sets a dirty bit in a table after `Tree::zap_noting` has read it, or in a detached table.
//! * *Harvests of a dirty log* do not find the leaves of a detached table. A harvest that has taken a page flushes,
//!   because the flush of the detached table is not complete (`Vm::get_dirty_log`), and that covers the cache like a
//!   TLB. A leaf through which writes are not noted maps a page that is in the log.
//! * *Splits and broken leaves* change entries of higher levels, which the cache does not contain. The table that
//!   replaces a split leaf is new: a walk from the root reaches it first.
//! * *Write protection of a higher entry* ([`crate::table`]'s hierarchical protection): the cache gets a table only if
//!   its path allows writes. An operation that protects the path later flushes, too, and waits for this vCPU.
//! * *MMIO entries* are not leaves: a walk from the root finds them, and compares their generation there.
//!
//! # Order within one vCPU
//! Two look-ups of one page must not go back in time: the second must not find an old page in a detached table if the
//! first has found the new page, which a fault installed. Therefore [`PagingStructureCache::forget`] drops the table as
//! soon as an entry does not allow an access, before the fault begins. In the same way, a processor drops what it has
//! cached for an address whose access faults. Only a walk from the root that needs no fault puts a table in.

use alloc::boxed::Box;

use crate::addr::{Gpa, Granule, Gva, Pfn};
use crate::heap;
use crate::heap::OutOfMemory;

/// The cache: level 1 tables by the region that they translate, direct-mapped.
pub(super) struct PagingStructureCache {
    entries: Box<[Entry; ENTRIES]>,
    /// The current stamp: the low bits of the tags of all valid cache entries, from 1 to [`STAMPS`] - 1. Raising it
    /// empties the cache.
    stamp: u64,
}

/// An entry of the cache.
#[derive(Clone, Copy)]
struct Entry {
    /// The region that `table` translates, and the stamp that was current when the cache entry was written. 0: the
    /// cache entry is empty.
    tag: u64,
    /// The frame of the table.
    table: Pfn,
}

/// The cache takes 8 KiB. Its level 1 tables of 4 KiB translate 1 GiB in total.
const ENTRIES: usize = if cfg!(loom) { 2 } else { 512 };
/// The number of stamps: as many as fit below the bit that distinguishes a virtual address from a guest-physical one.
const STAMPS: u64 = TableRegion::VIRTUAL;

/// Returns log2 of the number of bytes that a level 1 table translates.
const fn region_shift(granule: Granule) -> u32 {
    granule.shift() + granule.index_bits()
}

/// The region that a level 1 table translates: a region of guest-physical addresses, or with the shadow MMU also of
/// virtual addresses. A region of one kind never has the tag of a region of the other kind.
#[derive(Clone, Copy)]
pub(super) struct TableRegion {
    /// The region's address; for virtual addresses, also [`VIRTUAL`](Self::VIRTUAL).
    tag: u64,
    /// The region's index in the cache.
    index: usize,
}

impl TableRegion {
    /// The bit of a tag that marks a region of virtual addresses: it is below the lowest address bit of any region.
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
    /// Makes an empty cache. Its memory is not touched before the first use.
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

    /// Returns the table for `region` if [`put`](Self::put) has stored it since the last [`clear`](Self::clear).
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

    /// Restarts at the first stamp. Empties all cache entries first, because old cache entries may have that stamp.
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

    /// Makes a cache with tables for the first `regions` regions. Each table has the number of its region.
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
            // These regions share the cache entry of region 0; the last one is beyond the addresses that any tree
            // translates.
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
        // A region that was forgotten is not found, and the other regions are.
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
        // Skips all but the last few clears, after which the stamp comes again.
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
