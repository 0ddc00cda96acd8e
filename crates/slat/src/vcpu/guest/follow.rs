//! Updates the shadow pages when the guest changes its tables: after stores, INVLPG and flushes.

use core::ops::Range;

use super::HostWords;
use crate::addr::{Access, Gfn, Gpa, Hpa, PageIndex};
use crate::format::Format;
use crate::frame::ENTRIES;
use crate::guest_walk::GuestPaging;
use crate::platform::Platform;
use crate::shadow::trail::{PageOf, Role};
use crate::shadow::{Compared, ReadEntries, ShadowMmu};
use crate::table::Key;
use crate::vcpu::Vcpu;
use crate::vcpu::translate::Stop;

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Call after the guest has completed a store to `bytes` bytes at `gpa`, in one page, if the store's translation
    /// was [`tracked`](crate::Translation::tracked). Zaps the shadow entries that were made from the old contents.
    /// Returns whether all translations that the CPU remembers are void now.
    ///
    /// # Panics
    /// If the vCPU is not entered ([`Vcpu::enter`]).
    #[must_use = "the CPU must not use translations that are void"]
    pub fn stored(&mut self, gpa: Gpa, bytes: u64) -> bool {
        self.counters().mmu_pte_write.add(1);
        let range = gpa..Gpa(gpa.0 + bytes);
        let missed = self.missed();
        // The written memory may contain a guest page table, which may be shadowed in any address space.
        for index in 0..self.vm().spaces.len() {
            let tables = self.vm().spaces[index].mmu.get(self.section());
            let is_own = index == self.space_index();
            let mmu = tables.shadow().filter(|mmu| is_own || mmu.has_tables());
            if mmu.is_some_and(|mmu| mmu.stored(range.clone())) {
                self.outside(|vcpu| {
                    vcpu.vm().follow(&vcpu.vm().spaces[index], &range);
                });
            }
        }
        self.missed() != missed
    }

    /// Call when the guest executes INVLPG for `gva`, or INVPCID for that address in the current PCID. The caller must
    /// drop the translations of this address that its CPU remembers. Returns whether all other translations that the
    /// CPU remembers are void, too.
    ///
    /// # Panics
    /// If the vCPU is not entered ([`Vcpu::enter`]).
    #[must_use = "the CPU must not use translations that are void"]
    pub fn invlpg<W: HostWords>(&mut self, gva: u64, paging: &GuestPaging, words: &mut W) -> bool {
        self.counters().invlpg.add(1);
        self.presence.tables.clear();
        let missed = self.missed();
        self.follow_address(gva, paging, words);
        self.missed() != missed
    }

    /// Compares the guest's level 1 entry for `gva` with its shadow page, if the two may differ. If the MMU may have
    /// missed stores to tables of any level, compares all of the guest's tables: INVLPG drops a processor's cached
    /// entries of higher tables for every address, not only for `gva`.
    pub(super) fn follow_address<W: HostWords>(
        &mut self,
        gva: u64,
        paging: &GuestPaging,
        words: &mut W,
    ) {
        let key = Key {
            context: self.context,
            index: PageIndex::of_gva(gva),
        };
        let Some(root) = Role::root(paging, gva) else {
            return;
        };
        let elsewhere = self.distrust_stores_elsewhere();
        let mmu = self.tables().shadow();
        if elsewhere || mmu.is_some_and(ShadowMmu::is_distrusted) {
            return self.compare_unsynced(words);
        }
        if let Some((page, index)) = mmu.and_then(|mmu| mmu.begin_sync_of(key, root)) {
            self.sync(page, index..index + 1, words);
        }
    }

    /// Call when the guest executes an instruction that flushes its TLB: a load of CR3 (unless the load keeps the TLB),
    /// a change of CR0 or CR4 that flushes, or INVPCID of more than one address. Compares the guest tables to which the
    /// MMU may have missed stores with their shadow pages. The caller must drop all translations that its CPU
    /// remembers.
    ///
    /// # Panics
    /// If the vCPU is not entered ([`Vcpu::enter`]).
    pub fn flush_guest<W: HostWords>(&mut self, words: &mut W) {
        self.presence.tables.clear();
        self.distrust_stores_elsewhere();
        self.compare_unsynced(words);
    }

    fn distrust_stores_elsewhere(&self) -> bool {
        let own = (self.section(), self.counters());
        (self.vm()).distrust_stores_elsewhere(self.space_index(), own)
    }

    /// Compares all unsynced shadow pages with the guest's tables. This may need TLB flushes, which is allowed because
    /// the caller's CPU drops all its translations anyway.
    fn compare_unsynced<W: HostWords>(&mut self, words: &mut W) {
        let distrusts = self.tables().shadow().map(ShadowMmu::distrusts);
        self.compare_in_parts(words);
        if let (Some(distrusts), Some(mmu)) = (distrusts, self.tables().shadow()) {
            mmu.were_compared(distrusts);
        }
    }

    fn compare_in_parts<W: HostWords>(&mut self, words: &mut W) {
        /// The number of shadow pages that are compared at a time.
        const SOME: usize = 32;
        while self.tables().shadow().is_some_and(|mmu| mmu.has_unsynced()) {
            let mut pages = [None; SOME];
            let mut count = 0;
            let flushed = self.outside(|vcpu| {
                vcpu.vm().begin_sync(vcpu.space(), |page| {
                    let free = pages.get_mut(count);
                    count += usize::from(free.is_some());
                    free.map(|free| *free = Some(page)).is_some()
                })
            });
            self.set_flushed(flushed);
            let mut left = false;
            for page in pages.into_iter().flatten() {
                self.sync(page, 0..ENTRIES, words);
                left |= self
                    .tables()
                    .shadow()
                    .is_some_and(|mmu| mmu.is_unsynced(&page));
            }
            if count < SOME {
                return;
            }
            if left {
                // Other CPUs store to these tables all the time, so the loop would never reach the remaining pages. So
                // zap these.
                for page in pages.into_iter().flatten() {
                    self.forget_table(page.gfn);
                }
            }
        }
    }

    /// Compares the entries `indexes` of the shadow page `page` with the guest's table. Zaps the shadow entries that
    /// the guest's table does not grant any more. `None`: entries were zapped, and the vCPU has left its reader section
    /// to do this.
    pub(super) fn sync<W: HostWords>(
        &mut self,
        page: PageOf,
        indexes: Range<usize>,
        words: &mut W,
    ) -> Option<Compared> {
        let mut entries = [0; ENTRIES];
        let entries = &mut entries[..indexes.len()];
        let Some(changes) = self.read_table(&page, indexes.start, entries, words) else {
            // The guest's table cannot be read now, so zap all shadow entries that were made from it.
            self.forget_table(page.gfn);
            return None;
        };
        let read = ReadEntries {
            page,
            indexes,
            entries,
            changes,
            flushed: self.flushed.clone(),
        };
        let compared = self.tables().shadow()?.compare(&read);
        match &compared {
            Some(compared) => self.counters().mmu_unsync.sub(compared.synced.into()),
            None => self.outside(|vcpu| {
                vcpu.vm().zap_ungranted(vcpu.space(), &read);
            }),
        }
        compared
    }

    /// Reads, into `entries`, the guest's entries that the shadow page `page` shadows, from index `first` on. Returns
    /// how often the MMU had counted a change of the guest's table before this read. `None`: the table cannot be read.
    fn read_table<W: HostWords>(
        &mut self,
        page: &PageOf,
        first: usize,
        entries: &mut [u64],
        words: &mut W,
    ) -> Option<u64> {
        let changes = self.tables().shadow()?.changes_of(page.gfn);
        let mut host = self.reach_table(page.gfn.gpa(), Access::Read);
        if host == Err(Stop::Retry) {
            // The first try has mapped the page, but a flush took place meanwhile.
            host = self.reach_table(page.gfn.gpa(), Access::Read);
        }
        let host = host.ok()?.host;
        for (i, entry) in entries.iter_mut().enumerate() {
            let (gpa, size) = page.guest_entry(first + i);
            *entry = words.read(Hpa(host.0 + gpa.offset()), size).ok()?;
        }
        Some(changes)
    }

    /// Zaps the shadow pages of the guest table in frame `gfn`.
    pub(in crate::vcpu) fn forget_table(&mut self, gfn: Gfn) {
        let gfns = gfn..gfn.add(1);
        self.outside(|vcpu| {
            vcpu.vm().forget_tables(vcpu.space(), &gfns);
        });
    }
}
