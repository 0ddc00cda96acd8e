//! Slots by id. Ids are small numbers, which most clients count up from 0: a table, in pages that are
//! there as soon as one of their slots is.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::OwnedSlot;
use crate::heap;
use crate::table::OutOfMemory;

/// Slots of a page.
const SLOTS: usize = 32;

type Page = [Option<OwnedSlot>; SLOTS];

pub(super) struct Ids {
    pages: Vec<Option<Box<Page>>>,
    len: usize,
}

fn place(id: u32) -> (usize, usize) {
    (id as usize / SLOTS, id as usize % SLOTS)
}

impl Ids {
    pub(super) const EMPTY: Self = Ids {
        pages: Vec::new(),
        len: 0,
    };

    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(super) fn get(&self, id: u32) -> Option<&OwnedSlot> {
        let (page, slot) = place(id);
        self.pages.get(page)?.as_ref()?[slot].as_ref()
    }

    /// Makes a place for the slot `id`.
    pub(super) fn prepare(&mut self, id: u32) -> Result<(), OutOfMemory> {
        let (page, _) = place(id);
        if self.pages.len() <= page {
            let missing = page + 1 - self.pages.len();
            self.pages.try_reserve(missing).map_err(|_| OutOfMemory)?;
            self.pages.resize_with(page + 1, || None);
        }
        if self.pages[page].is_none() {
            self.pages[page] = Some(heap::boxed([const { None }; SLOTS])?);
        }
        Ok(())
    }

    /// Puts `new`, for which there is a place, or nothing in the place of the slot `id`, if there is one.
    pub(super) fn exchange(&mut self, id: u32, new: Option<OwnedSlot>) -> Option<OwnedSlot> {
        let (page, slot) = place(id);
        let comes = new.is_some();
        let old = match self.pages.get_mut(page) {
            Some(Some(page)) => core::mem::replace(&mut page[slot], new),
            _ => {
                assert!(!comes, "a place was made before");
                None
            }
        };
        self.len = self.len + usize::from(comes) - usize::from(old.is_some());
        old
    }
}
