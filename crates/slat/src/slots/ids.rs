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
    len: usize,
}

impl Ids {
    pub(super) const EMPTY: Self = Ids {
        first: EMPTY,
        others: Vec::new(),
        len: 0,
    };

    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(super) fn get(&self, id: u32) -> Option<&OwnedSlot> {
        let (page, slot) = (id as usize / SLOTS, id as usize % SLOTS);
        let page = match page.checked_sub(1) {
            None => &self.first,
            Some(other) => self.others.get(other)?.as_ref()?,
        };
        page[slot].as_ref()
    }

    /// The place of the slot `id`, if there is one.
    fn place(&mut self, id: u32) -> Option<&mut Option<OwnedSlot>> {
        let (page, slot) = (id as usize / SLOTS, id as usize % SLOTS);
        let page = match page.checked_sub(1) {
            None => &mut self.first,
            Some(other) => self.others.get_mut(other)?.as_mut()?,
        };
        Some(&mut page[slot])
    }

    /// Makes a place for the slot `id`.
    pub(super) fn prepare(&mut self, id: u32) -> Result<(), OutOfMemory> {
        let Some(other) = (id as usize / SLOTS).checked_sub(1) else {
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

    /// Puts `new`, for which there is a place, or nothing in the place of the slot `id`, if there is one.
    pub(super) fn exchange(&mut self, id: u32, new: Option<OwnedSlot>) -> Option<OwnedSlot> {
        let comes = new.is_some();
        let old = match self.place(id) {
            Some(place) => core::mem::replace(place, new),
            None => {
                assert!(!comes, "a place was made before");
                None
            }
        };
        self.len = self.len + usize::from(comes) - usize::from(old.is_some());
        old
    }
}
