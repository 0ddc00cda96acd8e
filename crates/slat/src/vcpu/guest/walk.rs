//! Walks of the guest's tables, as the source of a fault: they say what to install.

use core::mem;

use super::{HostWords, VirtualPage, VirtualStop};
use crate::addr::{Access, Gfn, Gpa, Hpa, Level, PAGE_SIZE, PageIndex};
use crate::format::Format;
use crate::frame::ENTRIES;
use crate::guest_walk::{
    GuestPage, GuestPaging, GuestTables, PageRights, WalkError, walk_with_path,
};
use crate::platform::Platform;
use crate::shadow::trail::{Seen, Target, Trail};
use crate::table::Key;
use crate::vcpu::Vcpu;
use crate::vcpu::fault::{Source, Want, Wanted};
use crate::vcpu::translate::{Stop, Translation, translation};

/// An access to a guest-virtual address.
pub(super) struct Virtual<'w, W> {
    gva: u64,
    access: Access,
    paging: &'w GuestPaging,
    words: &'w mut W,
    /// What a walk has found last: the page, and how it came there.
    found: Option<(GuestPage, Trail)>,
    /// It may go on with what it has found.
    goes_on: bool,
}

impl<'w, W: HostWords> Virtual<'w, W> {
    pub(super) fn new(gva: u64, access: Access, paging: &'w GuestPaging, words: &'w mut W) -> Self {
        Virtual {
            gva,
            access,
            paging,
            words,
            found: None,
            goes_on: false,
        }
    }
}

impl<P: Platform, F: Format, W: HostWords> Source<P, F> for Virtual<'_, W> {
    type Page = VirtualPage;
    type Stop = VirtualStop<W::Error>;

    fn address(&self) -> Gpa {
        Gpa(self.gva)
    }

    /// Walks the guest's tables.
    fn resolve(&mut self, vcpu: &mut Vcpu<P, F>) -> Result<Wanted<'_, VirtualPage>, Self::Stop> {
        let (gva, access, paging) = (self.gva, self.access, self.paging);
        if vcpu.tables().shadow().is_some_and(|mmu| !mmu.has_begun()) {
            vcpu.outside(|vcpu| vcpu.vm().begin_shadowing(vcpu.space()));
        }
        if !mem::take(&mut self.goes_on) {
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
                    // SDM 3A, "Operations that Invalidate TLBs and Paging-Structure Caches": a page fault does, too.
                    vcpu.follow_address(gva, paging, self.words);
                    return Err(VirtualStop::PageFault { code });
                }
            };
            let gpa = Gpa(page.gpa.0 + gva % PAGE_SIZE);
            let trail = Trail::new(paging, gva, access, &path, gpa.gfn(), seen);
            let is_enough =
                |trail: &Trail| trail.fits::<F>() && trail.rights.allow(&paging.of_leaf(), access);
            let Some(trail) = trail.filter(is_enough) else {
                let found = vcpu.translate(gpa, access)?;
                return Ok(Wanted::Page(VirtualPage {
                    host: found.host,
                    bits: page.bits,
                    read: page.read,
                    write: page.write && found.write,
                    execute: page.execute && found.execute,
                    tracked: found.tracked.then_some(page.gpa),
                }));
            };
            self.found = Some((page, trail));
        }
        let (page, trail) = self.found.as_ref().expect("the walk has found a page");
        let key = Key {
            context: vcpu.roots.get(trail.number).unwrap_or(vcpu.context),
            index: PageIndex::of_gva(gva),
        };
        Ok(Wanted::Leaf(Want {
            target: Target::new(key, Some(trail)),
            gpa: Gpa(page.gpa.0 + gva % PAGE_SIZE),
            access,
            of_guest: true,
        }))
    }

    fn compare(&mut self, vcpu: &mut Vcpu<P, F>, level: Level) -> bool {
        let Some((_, trail)) = &mut self.found else {
            return false;
        };
        let mmu = vcpu.tables().shadow();
        let Some(page) = mmu.and_then(|mmu| mmu.page_on(trail, level)) else {
            return false;
        };
        let compared = vcpu.sync(page, 0..ENTRIES, self.words);
        self.goes_on = compared.is_some_and(|compared| {
            let (before, after) = compared.changes;
            trail.was_compared(&page, before, after)
        });
        self.goes_on
    }

    fn page(&mut self, vcpu: &mut Vcpu<P, F>, found: Translation, is_new: bool) -> VirtualPage {
        let (page, trail) = self.found.expect("the walk has found a page");
        if is_new && found.level == Level::PAGE {
            vcpu.prefetch_guest(self.gva, &trail, self.words);
        }
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

/// The guest's table in which flags were set last, in a slot without a log: further flags need no translation. It is one of those
/// that [`Vcpu::translate`] returns, and void when they are.
#[derive(Clone, Copy)]
pub(in crate::vcpu) struct FlagsIn {
    gfn: Gfn,
    /// The table's host page.
    host: Hpa,
    /// Of the slots. A log that begins does not flush a page that was not writable.
    generation: u64,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Returns the host page of the guest's table at `gpa`, to set a flag in it.
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

    /// Returns whether a walk to `gva` reads the guest's table in `gfn`.
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
        // However the walk ends.
        let _ = walk_with_path(&mut tables, paging, gva, access);
        tables.seen.has(gfn)
    }

    /// Translates a guest-physical address for an access to the guest's tables, which is no fault of the guest's.
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

    /// Like [`Self::reach_table`], but does not wait: finds the page if it is mapped.
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
        // SAFETY: the walk has found the leaf just now.
        unsafe { self.remember(gpa, found.to_remember::<F>()) };
        Some(page(leaf))
    }
}

/// The guest's tables, for a walk.
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
            // A table that is not in memory maps nothing.
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
            // The flags of tables in read-only memory do not change.
            Err(Stop::Mmio { .. }) => Ok(true),
            Err(stop) => Err(stop.into()),
        }
    }
}
