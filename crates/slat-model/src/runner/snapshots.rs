//! Snapshots of the VM while it runs: the platform must be given each page once, before it is written to for the first
//! time, with the content that it had when the snapshot began.

use std::cell::RefCell;
use std::ops::Range;

use slat::{Access, Format, Gfn, Level, Snapshot, SnapshotError};

use super::Runner;
use super::contents::Contents;
use crate::host::HostMemory;
use crate::machine::Machine;
use crate::watched::Watched;

/// A snapshot in progress.
pub(super) struct Saving<M: Machine, F: Format> {
    snapshot: Snapshot<Watched<M::Platform>, F>,
    owed: RefCell<Owed>,
}

/// What the platform was not given yet.
struct Owed {
    /// For each page of host memory, whether it is owed.
    pages: Vec<bool>,
    left: u64,
    /// The words that the guest had written before the snapshot.
    words: Contents,
}

impl Owed {
    fn has(&self, page: u64) -> bool {
        self.pages.get(page as usize) == Some(&true)
    }

    /// Takes `pages`, whose words `word` returns; pages without memory have none.
    ///
    /// # Panics
    /// If a page was not owed, or has another word than when the snapshot began.
    fn take(&mut self, pages: &Range<u64>, word: impl Fn(u64) -> Option<u64>) {
        for page in pages.clone() {
            assert!(
                self.has(page),
                "page {page:#x} was given twice, or for nothing"
            );
            self.pages[page as usize] = false;
        }
        self.left -= pages.end - pages.start;
        let written = self.words.range(pages.clone()).map(|(page, _)| *page);
        let checked: Vec<u64> = match pages.end - pages.start <= 64 {
            true => pages.clone().collect(),
            false => written.collect(),
        };
        for page in checked {
            let before = self.words.get(&page).copied();
            let now = word(page);
            let same = match before {
                Some(_) => now == before,
                None => now.is_none_or(|now| now == 0),
            };
            assert!(
                same,
                "page {page:#x} was given with {now:x?}, when the snapshot began it had {before:x?}"
            );
        }
    }
}

impl<M: Machine, F: Format> Runner<M, F> {
    /// Begins a snapshot, unless there is one.
    pub(super) fn begin_snapshot(&mut self) {
        if self.saving.is_some() {
            let again = self.vm.begin_snapshot().map(drop);
            assert_eq!(again, Err(SnapshotError::InProgress));
            return;
        }
        let mut pages = vec![false; self.machine.pages() as usize];
        for model in &self.models {
            for slot in model.slots.values() {
                let shared = (slot.base..slot.base + slot.pages)
                    .filter(|gfn| !model.has_private(&(*gfn..*gfn + 1)));
                shared.for_each(|gfn| pages[slot.host_page(gfn) as usize] = true);
            }
        }
        let keeps_contents = self.machine.load(slat::Pfn(0)).is_some();
        let has_page = |page: u64| pages[page as usize] && self.machine.page(page).is_some();
        let words = self.memory.iter().map(|(page, word)| (*page, *word));
        let words = words.filter(|(page, _)| keeps_contents && has_page(*page));
        let owed = Owed {
            words: words.collect(),
            left: pages.iter().filter(|owed| **owed).count() as u64,
            pages,
        };
        let snapshot = self.vm.begin_snapshot().expect("there is memory");
        assert_eq!(snapshot.pages_left(), owed.left);
        let owed = RefCell::new(owed);
        self.saving = Some(Saving { snapshot, owed });
        self.tally.count("snapshot begun");
    }

    /// Gives the platform some pages of the snapshot.
    pub(super) fn keep_next(&mut self, most: u64) {
        if let Some(Saving { snapshot, owed }) = &self.saving {
            let before = owed.borrow().left;
            let pages = snapshot.keep_next(most);
            self.receive_kept();
            let left = owed.borrow().left;
            assert_eq!((before - left, pages == 0), (pages, before == 0));
            assert!(pages <= most, "{pages} pages, at most {most}");
            assert_eq!(snapshot.pages_left(), left);
            self.tally.count("page kept in the background");
        }
    }

    /// Ends the snapshot, if there is one. If `whole`, gives the platform everything before that.
    pub(super) fn end_snapshot(&mut self, whole: bool) {
        if let Some(Saving { snapshot, owed }) = &self.saving
            && whole
        {
            while snapshot.keep_next(700) > 0 {}
            self.receive_kept();
            let missing = owed.borrow().pages.iter().position(|owed| *owed);
            assert_eq!(missing, None, "a page that the platform was never given");
            self.tally.count("snapshot complete");
        }
        self.receive_kept();
        if self.saving.take().is_some() && !whole {
            self.tally.count("snapshot dropped before its end");
        }
    }

    /// Takes the pages that the platform was given. Call before their contents change. Returns whether there were any.
    fn receive_kept(&self) -> bool {
        let mut any = false;
        for backing in self.platform.take_kept(self.vm.id()) {
            let page = |hva| F::GRANULE.pages_between(HostMemory::BASE, hva);
            let pages = page(backing.start)..page(backing.end);
            let Some(saving) = &self.saving else {
                panic!("pages {pages:x?} were given, and there is no snapshot");
            };
            let word = |page| self.machine.load(self.machine.page(page)?.pfn);
            saving.owed.borrow_mut().take(&pages, word);
            any = true;
        }
        any
    }

    /// Counts the pages that the platform was given in an operation, as `what`.
    pub(super) fn tally_kept(&mut self, what: &'static str) {
        if self.receive_kept() {
            self.tally.count(what);
        }
    }

    /// Checks that the snapshot, if there is one, has `pages`. `why` says why it must.
    pub(super) fn check_saved(
        &self,
        pages: impl IntoIterator<Item = u64>,
        why: impl Fn() -> String,
    ) {
        self.receive_kept();
        let Some(saving) = &self.saving else {
            return;
        };
        let owed = saving.owed.borrow();
        if let Some(page) = pages.into_iter().find(|page| owed.has(*page)) {
            panic!(
                "page {page:#x} is {}, and the snapshot does not have it",
                why()
            );
        }
    }

    /// Returns the largest level up to `level` of a leaf around `gfn` that `access` may make: if it is a write, the
    /// snapshot has all pages of the leaf.
    pub(super) fn kept_level(&self, i: usize, gfn: u64, access: Access, mut level: Level) -> Level {
        let slot = self.models[self.cpus[i].space].slot_at(gfn);
        if let (Some(saving), Some((_, slot)), Access::Write) = (&self.saving, slot, access) {
            let owed = saving.owed.borrow();
            while level > Level::PAGE {
                let block = F::GRANULE.block(Gfn(gfn), level);
                let end = block.end.0.min(slot.base + slot.pages);
                let mut gfns = block.start.0.max(slot.base)..end;
                if !gfns.any(|gfn| owed.has(slot.host_page(gfn))) {
                    break;
                }
                level = level.below();
            }
        }
        level
    }

    /// Whether there is a snapshot.
    pub(super) fn is_saving(&self) -> bool {
        self.saving.is_some()
    }
}
