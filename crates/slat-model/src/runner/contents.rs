//! The words that the guest has written to its pages, to be compared when the guest reads them.

use std::collections::BTreeMap;
use std::ops::Range;

use slat::{Access, Format, Pfn, Translation};

use super::Runner;
use crate::host::HostChange;
use crate::machine::Machine;

/// The word in each page of host memory. Pages without an entry contain 0.
pub(super) type Contents = BTreeMap<u64, u64>;

impl<M: Machine, F: Format> Runner<M, F> {
    /// For a write, stores a new word in the page of `translation`. For any other access, compares the word in that
    /// page with the word that the model expects.
    pub(super) fn touch(&mut self, i: usize, gfn: u64, access: Access, translation: &Translation) {
        let frame = F::GRANULE.pfn(translation.host);
        let (_, slot) = self.models[self.cpus[i].space]
            .slot_at(gfn)
            .expect("a page is in a slot");
        let page = slot.host_page(gfn);
        if access == Access::Write {
            self.check_saved([page], || "written".into());
            let word = (self.vm.id().0 << 32) | (self.ops as u64 + 1);
            self.machine.store(frame, word);
            self.memory.insert(page, word);
        } else {
            self.compare_word(page, frame);
        }
    }

    /// Whether another VM may also use the frame that backs `gfn` for a vCPU.
    pub(super) fn is_shared(&self, i: usize, gfn: u64) -> bool {
        let slot = self.models[self.cpus[i].space].slot_at(gfn);
        slot.is_some_and(|(_, slot)| self.machine.is_shared(slot.host_page(gfn)))
    }

    fn compare_word(&self, page: u64, frame: Pfn) {
        let wanted = self.memory.get(&page).copied().unwrap_or(0);
        let found = self.machine.load(frame).unwrap_or(wanted);
        assert_eq!(
            found,
            wanted,
            "the word in page {page:#x} of {:?}, {frame:?}",
            self.vm.id()
        );
    }

    /// Checks the words of all pages that the guest has written, or that the guest of the parent VM has written before
    /// the clone was made.
    pub(super) fn check_contents(&self) {
        for page in self.memory.keys() {
            if let Some(found) = self.machine.page(*page) {
                self.compare_word(*page, found.pfn);
            }
        }
    }

    /// Changes host memory. A page that is replaced loses its word.
    pub(super) fn change_host(&mut self, pages: &Range<u64>, change: HostChange) {
        let frame = |page: u64| self.machine.page(page).map(|page| page.pfn);
        let written = self.memory.range(pages.clone()).map(|(page, _)| *page);
        let before: Vec<_> = written.map(|page| (page, frame(page))).collect();
        self.machine.change(pages, change);
        let lost = before
            .into_iter()
            .filter(|(page, was)| frame(*page) != *was);
        for (page, _) in lost.collect::<Vec<_>>() {
            self.memory.remove(&page);
        }
    }
}
