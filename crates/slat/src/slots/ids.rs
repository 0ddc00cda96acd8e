//! The writer's table of slots by id. Most clients number their slots from 0 up. The table consists of pages. The first
//! page always exists. Each other page is allocated when a slot first needs it. For a client that uses only the id
//! 32,763, a single array would cost 1.3 MB; the pages cost 10 KiB.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::OwnedSlot;
use crate::heap;
use crate::heap::OutOfMemory;

/// The number of entries in a page.
const SLOTS: usize = 32;

type Page = [Option<OwnedSlot>; SLOTS];

const EMPTY: Page = [const { None }; SLOTS];

pub(super) struct Ids {
    first: Page,
    others: Vec<Option<Box<Page>>>,
}

/// Returns the index of the page in `others` (`None` for the first page), and the index in the page.
fn position(id: u32) -> (Option<usize>, usize) {
    let (page, index) = (id as usize / SLOTS, id as usize % SLOTS);
    (page.checked_sub(1), index)
}

impl Ids {
    pub(super) const EMPTY: Self = Ids {
        first: EMPTY,
        others: Vec::new(),
    };

    #[inline]
    pub(super) fn get(&self, id: u32) -> Option<&OwnedSlot> {
        let (page, index) = position(id);
        let page = match page {
            None => &self.first,
            Some(other) => self.others.get(other)?.as_ref()?,
        };
        page[index].as_ref()
    }

    /// Returns the entry for the id `id`. `None`: its page does not exist.
    #[inline]
    pub(super) fn entry(&mut self, id: u32) -> Option<&mut Option<OwnedSlot>> {
        let (page, index) = position(id);
        let page = match page {
            None => &mut self.first,
            Some(other) => self.others.get_mut(other)?.as_mut()?,
        };
        Some(&mut page[index])
    }

    /// Returns the entry for the id `id`. Allocates the entry's page if it does not exist.
    #[inline]
    pub(super) fn make_entry(&mut self, id: u32) -> Result<&mut Option<OwnedSlot>, OutOfMemory> {
        let (page, index) = position(id);
        let Some(other) = page else {
            return Ok(&mut self.first[index]);
        };
        if self.others.len() <= other {
            let missing = other + 1 - self.others.len();
            self.others.try_reserve(missing).map_err(|_| OutOfMemory)?;
            self.others.resize_with(other + 1, || None);
        }
        let page = match &mut self.others[other] {
            Some(page) => page,
            missing => missing.insert(heap::boxed(EMPTY)?),
        };
        Ok(&mut page[index])
    }
}
