//! Slots by id. Ids are small numbers, which most clients count up from 0: a table, in pages that are
//! there as soon as one of their slots is, and the first one always.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::OwnedSlot;
use crate::heap;
use crate::table::OutOfMemory;

/// Slots of a page.
const SLOTS: usize = 32;

type Page = [Option<OwnedSlot>; SLOTS];

const EMPTY: Page = [const { None }; SLOTS];

pub(super) struct Ids {
    first: Page,
    others: Vec<Option<Box<Page>>>,
}

/// Which of the other pages, if not the first, and where in it.
fn place(id: u32) -> (Option<usize>, usize) {
    let (page, slot) = (id as usize / SLOTS, id as usize % SLOTS);
    (page.checked_sub(1), slot)
}

impl Ids {
    pub(super) const EMPTY: Self = Ids {
        first: EMPTY,
        others: Vec::new(),
    };

    #[inline]
    pub(super) fn get(&self, id: u32) -> Option<&OwnedSlot> {
        let (page, slot) = place(id);
        let page = match page {
            None => &self.first,
            Some(other) => self.others.get(other)?.as_ref()?,
        };
        page[slot].as_ref()
    }

    /// The place of the slot `id`, if there is one.
    #[inline]
    pub(super) fn place(&mut self, id: u32) -> Option<&mut Option<OwnedSlot>> {
        let (page, slot) = place(id);
        let page = match page {
            None => &mut self.first,
            Some(other) => self.others.get_mut(other)?.as_mut()?,
        };
        Some(&mut page[slot])
    }

    /// Makes a place for the slot `id`.
    #[inline]
    pub(super) fn make_place(&mut self, id: u32) -> Result<(), OutOfMemory> {
        let (Some(other), _) = place(id) else {
            return Ok(());
        };
        if self.others.len() <= other {
            let missing = other + 1 - self.others.len();
            self.others.try_reserve(missing).map_err(|_| OutOfMemory)?;
            self.others.resize_with(other + 1, || None);
        }
        if self.others[other].is_none() {
            self.others[other] = Some(heap::boxed(EMPTY)?);
        }
        Ok(())
    }
}
