//! Tests the search for memory that was not accessed during some passes.

use std::ops::Range;

use slat::format::Entry;
use slat::{ColdMap, Format, Gfn, Granule};

use super::Runner;
use crate::host::HostMemory;
use crate::machine::Machine;

/// The engine's age map for some pages of the backing, and a plain model of the map.
pub(super) struct Cold {
    map: ColdMap,
    pages: Range<u64>,
    /// For each page, the number of passes since its last use. `None`: the page is not mapped.
    ages: Vec<Option<u8>>,
}

impl Cold {
    /// Makes a map that covers the pages of the first huge leaves. The map covers only a part of the first and of the
    /// last of these leaves.
    pub(super) fn new(granule: Granule, host_pages: u64) -> Self {
        let pages = 77..host_pages.min(8 * granule.entries() as u64) - 300;
        let [start, end] =
            [pages.start, pages.end].map(|page| granule.add_pages(HostMemory::BASE, page));
        Cold {
            map: ColdMap::with_granule(start..end, granule).expect("some kilobytes"),
            ages: vec![None; pages.end as usize],
            pages,
        }
    }
}

impl<M: Machine, F: Format> Runner<M, F> {
    /// Makes a pass over all pages with the engine and with the model: a page that was used since the last pass gets
    /// age 0, and every other page gets one pass older. Compares the ages of all pages.
    pub(super) fn cold(&mut self) {
        let used = self.pages_used();
        let cold = &mut self.cold;
        for (age, used) in cold.ages.iter_mut().zip(used) {
            *age = match (used, *age) {
                (None, _) => None,
                (Some(true), old) => {
                    if old.is_some_and(|old| old > 0) {
                        self.tally.count("page used again");
                    }
                    Some(0)
                }
                (Some(false), None) => Some(0),
                (Some(false), Some(old)) => Some((old + 1).min(ColdMap::MOST_PASSES)),
            };
        }
        let mut found = vec![None; cold.ages.len()];
        for range in self.vm.cold_ranges(&mut cold.map, 3) {
            let first = F::GRANULE.pages_between(HostMemory::BASE, range.hvas.start);
            let end = F::GRANULE.pages_between(HostMemory::BASE, range.hvas.end);
            let ages = &cold.ages[first as usize..end as usize];
            assert_eq!(ages.iter().min(), Some(&Some(range.passes)), "{range:?}");
            found[first as usize..end as usize].copy_from_slice(ages);
            self.tally.count("page not used for three passes");
        }
        for page in cold.pages.clone() {
            let age = cold.ages[page as usize];
            assert_eq!(cold.map.passes(Self::hva(page)), age, "page {page:#x}");
            let is_cold = age.filter(|age| *age >= 3);
            assert_eq!(found[page as usize], is_cold, "page {page:#x}");
        }
    }

    /// Returns for each page of the map whether a leaf that maps it has the accessed bit. `None`: no leaf maps
    /// the page.
    fn pages_used(&self) -> Vec<Option<bool>> {
        let mut used = vec![None; self.cold.ages.len()];
        let all = Gfn(0)..Gfn(crate::model::capacity::<F>());
        for (space, model) in self.models.iter().enumerate() {
            self.vm
                .visit_leaves(space, all.clone(), &mut |gfn, level, entry| {
                    let Entry::Leaf(leaf) = entry else {
                        return;
                    };
                    let (_, slot) = model.slot_at(gfn.0).expect("a slot has every leaf");
                    let first = slot.host_page(gfn.0);
                    for page in first..first + F::GRANULE.pages(level) {
                        if self.cold.pages.contains(&page) {
                            let used: &mut Option<bool> = &mut used[page as usize];
                            *used = Some(leaf.accessed || *used == Some(true));
                        }
                    }
                });
        }
        used
    }
}
