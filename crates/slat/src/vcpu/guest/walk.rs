//! Faults at guest-virtual addresses: a walk of the guest's tables decides what to install.

use super::{HostWords, VirtualPage, VirtualStop};
use crate::addr::{Access, Gfn, Gpa, Hpa, Level, PAGE_SIZE, PageIndex};
use crate::format::Format;
use crate::frame::ENTRIES;
use crate::guest_walk::{
    GuestPage, GuestPaging, GuestTables, PageRights, WalkError, walk_with_path,
};
use crate::platform::Platform;
use crate::shadow::trail::{Seen, Trail};
use crate::table::{Key, Reached};
use crate::vcpu::Vcpu;
use crate::vcpu::fault::{Fault, Next};
use crate::vcpu::translate::{Stop, Translation, translation};

/// An access to a guest-virtual address, and how to access the guest's tables.
pub(super) struct VirtualAccess<'w, W> {
    pub(super) gva: u64,
    pub(super) access: Access,
    pub(super) paging: &'w GuestPaging,
    pub(super) words: &'w mut W,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Makes the shadow tables allow the access, and returns the page. Each attempt walks the guest's tables. But an
    /// attempt after one that only compared a shadow page with its guest table may use the result of the last walk.
    ///
    /// # Errors
    /// [`VirtualStop`]. Contains [`Stop::Retry`] if a TLB flush took place during the call, even if the access is
    /// allowed now.
    pub(super) fn virtual_fault<W: HostWords>(
        &mut self,
        mut access: VirtualAccess<'_, W>,
    ) -> Result<VirtualPage, VirtualStop<W::Error>> {
        let mut compared = None;
        self.until_allowed(Gpa(access.gva), |vcpu| {
            let (page, trail) = match compared.take() {
                Some((page, trail)) => (page, Some(trail)),
                None => access.walk_guest(vcpu)?,
            };
            let Some(mut trail) = trail else {
                let page = access.page_without_leaf(vcpu, &page);
                return page.map_err(|stop| Next::Stop(stop.into()));
            };
            let key = Key {
                context: vcpu.roots.get(trail.number).unwrap_or(vcpu.context),
                index: PageIndex::of_gva(access.gva),
            };
            let walk = vcpu.pause(Reached::nothing::<F>(key));
            let gpa = Gpa(page.gpa.0 + access.gva % PAGE_SIZE);
            let mut fault = Fault::new(vcpu, walk, Some(&trail), gpa, access.access, true);
            match fault.attempt() {
                Ok(found) => {
                    if fault.is_new && found.level == Level::PAGE {
                        vcpu.prefetch_guest(access.gva, &trail, access.words);
                    }
                    Ok(access.page(&page, &trail, found))
                }
                Err(Next::Compare(level)) => {
                    let is_good = vcpu.compare(&mut trail, level, access.words);
                    compared = is_good.then_some((page, trail));
                    match is_good {
                        true => Err(Next::Compare(level)),
                        false => Err(Next::Again),
                    }
                }
                Err(Next::Stop(stop)) => Err(Next::Stop(stop.into())),
                Err(Next::Again) => Err(Next::Again),
            }
        })
    }

    /// Compares the shadow page of `level` on `trail` with its guest table ([`Next::Compare`]). Returns whether `trail`
    /// is still valid: no other store to the guest's tables was seen since the walk.
    fn compare<W: HostWords>(&mut self, trail: &mut Trail, level: Level, words: &mut W) -> bool {
        let mmu = self.tables().shadow();
        let Some(page) = mmu.and_then(|mmu| mmu.page_on(trail, level)) else {
            return false;
        };
        let compared = self.sync(page, 0..ENTRIES, words);
        compared.is_some_and(|compared| {
            let (before, after) = compared.changes;
            trail.was_compared(&page, before, after)
        })
    }
}

impl<W: HostWords> VirtualAccess<'_, W> {
    /// Walks the guest's tables. Returns the guest's page, and a trail: the guest's entries by which a shadow leaf can
    /// map the page. `None` as trail: no shadow leaf can grant this access.
    ///
    /// # Errors
    /// [`VirtualStop`].
    fn walk_guest<P: Platform, F: Format>(
        &mut self,
        vcpu: &mut Vcpu<P, F>,
    ) -> Result<(GuestPage, Option<Trail>), VirtualStop<W::Error>> {
        let (gva, access, paging) = (self.gva, self.access, self.paging);
        if vcpu.tables().shadow().is_some_and(|mmu| !mmu.has_begun()) {
            vcpu.outside(|vcpu| vcpu.vm().begin_shadowing(vcpu.space()));
        }
        let mut tables = Tables {
            vcpu,
            words: self.words,
            seen: Seen::default(),
        };
        let walked = walk_with_path(&mut tables, paging, gva, access);
        let seen = tables.seen;
        let (page, path) = match walked {
            Ok(found) => found,
            Err(WalkError::Memory(stop)) => return Err(stop),
            Err(WalkError::PageFault { code }) => {
                vcpu.counters().pf_guest.add(1);
                // SDM 3A, "Operations that Invalidate TLBs and Paging-Structure Caches": like INVLPG, a page fault
                // invalidates the cached translations of its address.
                vcpu.follow_address(gva, paging, self.words);
                return Err(VirtualStop::PageFault { code });
            }
        };
        let gpa = Gpa(page.gpa.0 + gva % PAGE_SIZE);
        let trail = Trail::new(paging, gva, access, &path, gpa.gfn(), seen);
        let is_enough =
            |trail: &Trail| trail.fits::<F>() && trail.rights.allow(&paging.of_leaf(), access);
        Ok((page, trail.filter(is_enough)))
    }

    /// Translates the guest-physical address of `page`, for which no shadow leaf can grant the access.
    ///
    /// # Errors
    /// [`Stop`].
    fn page_without_leaf<P: Platform, F: Format>(
        &self,
        vcpu: &mut Vcpu<P, F>,
        page: &GuestPage,
    ) -> Result<VirtualPage, Stop> {
        let gpa = Gpa(page.gpa.0 + self.gva % PAGE_SIZE);
        let found = vcpu.translate(gpa, self.access)?;
        Ok(VirtualPage {
            host: found.host,
            bits: page.bits,
            read: page.read,
            write: page.write && found.write,
            execute: page.execute && found.execute,
            tracked: found.tracked.then_some(page.gpa),
        })
    }

    /// Combines the guest's `page`, the rights of `trail`, and the translation `found` of its guest-physical address.
    fn page(&self, page: &GuestPage, trail: &Trail, found: Translation) -> VirtualPage {
        let granted = PageRights {
            write: found.write,
            execute: found.execute,
            ..trail.rights
        };
        let strict = self.paging.of_leaf();
        VirtualPage {
            host: found.host,
            bits: page.bits,
            read: granted.allow(&strict, Access::Read),
            write: granted.allow(&strict, Access::Write),
            execute: granted.allow(&strict, Access::Execute),
            tracked: found.tracked.then_some(page.gpa),
        }
    }
}

/// The guest table in which the MMU last set an accessed or dirty flag, with its host page, so that further flags in
/// this table need no new translation. Only kept if the table's slot has no log. It becomes void together with all
/// translations that the vCPU remembers.
#[derive(Clone, Copy)]
pub(in crate::vcpu) struct FlagsIn {
    gfn: Gfn,
    /// The host page that backs the guest's table.
    host: Hpa,
    /// The generation of the memslots at that time. It must still be the same: when dirty logging starts, there is no
    /// flush for a page that was not mapped writable, so a flush may not tell the vCPU about the start.
    generation: u64,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Returns the host page of the guest table that contains `gpa`, to set a flag in an entry.
    fn reach_flags(&mut self, gpa: Gpa) -> Result<Hpa, Stop> {
        let (gfn, generation) = (F::GRANULE.gfn(gpa), self.slots().generation);
        if let Some(last) = self.flags_in
            && (last.gfn, last.generation) == (gfn, generation)
        {
            return Ok(last.host);
        }
        let host = self.reach_table(gpa, Access::Write)?.host;
        let (slots, slot) = self.find_slot(gfn);
        let is_logged = slot.is_none_or(|slot| slot.log().is_some());
        let generation = slots.generation;
        self.flags_in = (!is_logged).then_some(FlagsIn {
            gfn,
            host,
            generation,
        });
        Ok(host)
    }

    /// Returns whether a walk to `gva` reads the guest table in frame `gfn`.
    pub(in crate::vcpu) fn walks_with<W: HostWords>(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        words: &mut W,
        gfn: Gfn,
    ) -> bool {
        let mut tables = Tables {
            vcpu: self,
            words,
            seen: Seen::default(),
        };
        // Only `seen` matters: which tables the walk has read.
        let _ = walk_with_path(&mut tables, paging, gva, access);
        tables.seen.has(gfn)
    }

    /// Translates a guest-physical address for an access to the guest's tables. Does not count as a fault of the
    /// guest.
    pub(in crate::vcpu) fn reach_table(
        &mut self,
        gpa: Gpa,
        access: Access,
    ) -> Result<Translation, Stop> {
        match self.reach_mapped_table(gpa, access) {
            Some(found) => Ok(found),
            None => self.translate_uncounted(gpa, access),
        }
    }

    /// Like [`Self::reach_table`], but never waits. `None`: the page is not mapped.
    pub(in crate::vcpu) fn reach_mapped_table(
        &mut self,
        gpa: Gpa,
        access: Access,
    ) -> Option<Translation> {
        let page = |leaf| translation::<F>(leaf, Level::PAGE, F::GRANULE.gfn(gpa));
        if let Some(leaf) = self.cached_leaf(gpa, access) {
            return Some(page(leaf));
        }
        let found = self.walk(gpa)?.ok()?;
        let leaf = found.ready::<F>(access)?;
        // SAFETY: the walk has found the leaf just now, in this reader section.
        unsafe { self.remember(gpa, found.to_remember::<F>()) };
        Some(page(leaf))
    }
}

/// Access to the guest's tables for [`walk_with_path`], which records the tables that the walk reads.
struct Tables<'v, P: Platform, F: Format, W> {
    vcpu: &'v mut Vcpu<P, F>,
    words: &'v mut W,
    seen: Seen,
}

impl<P: Platform, F: Format, W: HostWords> GuestTables for Tables<'_, P, F, W> {
    type Error = VirtualStop<W::Error>;

    fn read(&mut self, gpa: Gpa, size: usize) -> Result<u64, Self::Error> {
        if let Some(mmu) = self.vcpu.tables().shadow() {
            self.seen.reads(gpa, mmu.changes_of(gpa.gfn()));
        }
        match self.vcpu.reach_table(gpa, Access::Read) {
            Ok(found) => {
                self.vcpu.count_guest_pte_read();
                let entry = self.words.read(Hpa(found.host.0 + gpa.offset()), size);
                entry.map_err(VirtualStop::Memory)
            }
            // If no slot contains the table, all its entries count as not present.
            Err(Stop::Mmio { .. }) => Ok(0),
            Err(stop) => Err(stop.into()),
        }
    }

    fn compare_exchange(
        &mut self,
        gpa: Gpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Self::Error> {
        match self.vcpu.reach_flags(gpa) {
            Ok(page) => {
                let host = Hpa(page.0 + gpa.offset());
                let done = self.words.compare_exchange(host, size, old, new);
                done.map_err(VirtualStop::Memory)
            }
            // The table is in read-only memory: ignore the attempt to set a flag.
            Err(Stop::Mmio { .. }) => Ok(true),
            Err(stop) => Err(stop.into()),
        }
    }
}
