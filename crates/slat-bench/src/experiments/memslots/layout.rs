//! The guest memory of memslot_perf_test: its size in each case, the number of memslots, and the part that the case
//! uses.

use std::ops::Range;

use super::Case;
use crate::bare::{DATA, PAGE};

/// The number of pages at the beginning of the memslots that no case uses.
const EXTRA: u64 = (64 << 10) / PAGE;
/// The number of pages that the guest writes while a slot moves.
const MOVED: u64 = (192 << 10) / PAGE;
const MIB: u64 = (1 << 20) / PAGE;

/// The guest memory in memslots. It begins at [`DATA`], which is page number 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The number of memslots, without slot 0, which every VM has.
    slots: u64,
    pages: u64,
}

impl Layout {
    /// Makes the layout of `case` with `slots` memslots. `None`: the case has fewer pages than memslots.
    pub(crate) fn new(case: Case, slots: u64) -> Option<Self> {
        let mib = match case {
            Case::Map => 32,
            Case::Unmap | Case::Unmap2m => 128,
            Case::MoveActive | Case::MoveInactive | Case::Rw | Case::Setup => 512,
        };
        let layout = Layout {
            slots: slots - 1,
            pages: mib * MIB + EXTRA,
        };
        (layout.slots <= layout.pages).then_some(layout)
    }

    /// Returns the pages of memslot number `index`, whose id is `index + 1`. The last memslot has the remaining pages,
    /// too.
    pub(crate) fn slot(&self, index: u64) -> Range<u64> {
        let each = self.pages / self.slots;
        let end = if index + 1 == self.slots {
            self.pages
        } else {
            (index + 1) * each
        };
        index * each..end
    }

    /// Returns the number of memslots.
    pub(crate) fn slots(&self) -> u64 {
        self.slots
    }

    /// Returns the total number of pages.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the pages that the cases use.
    pub(crate) fn area(&self) -> Range<u64> {
        EXTRA..self.pages
    }

    /// Returns the two halves of the pages that the cases use.
    pub(crate) fn halves(&self) -> [Range<u64>; 2] {
        let Range { start, end } = self.area();
        let middle = u64::midpoint(start, end);
        [start..middle, middle..end]
    }

    /// Cuts `range` into pieces of at most `chunk` pages. The host unmaps each piece in one call. Each piece is within
    /// one memslot, because memslots are not contiguous in the host.
    pub(crate) fn pieces(
        &self,
        range: Range<u64>,
        chunk: u64,
    ) -> impl Iterator<Item = Range<u64>> + use<> {
        let layout = *self;
        let each = layout.pages / layout.slots;
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let slot = layout.slot((at / each).min(layout.slots - 1));
            let in_chunk = range.start + ((at - range.start) / chunk + 1) * chunk;
            let piece = at..slot.end.min(range.end).min(in_chunk);
            at = piece.end;
            Some(piece)
        })
    }

    /// Returns the index of the memslot that moves, which is the last memslot.
    pub(crate) fn moved(&self) -> u64 {
        self.slots - 1
    }

    /// Returns the pages that the guest writes while the slot moves. If the slot is `active`, half of these pages are
    /// in it (or the whole slot, if it is smaller).
    pub(crate) fn written(&self, active: bool) -> Range<u64> {
        let slot = self.slot(self.moved());
        let inside = match active {
            true => (MOVED / 2).min(slot.end - slot.start),
            false => 0,
        };
        slot.start + inside - MOVED..slot.start + inside
    }

    /// Returns the first page of the slot's new address, which is after all memory.
    pub(crate) fn destination(&self) -> u64 {
        self.pages
    }
}

/// Returns the guest address of a page.
pub(crate) fn gpa(page: u64) -> u64 {
    DATA + page * PAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_fill_the_memory_and_every_page_is_in_one() {
        for slots in [10, 30, 509, 8194, 32764] {
            let layout = Layout::new(Case::Rw, slots).unwrap();
            assert_eq!(layout.slots(), slots - 1);
            let mut end = 0;
            for index in 0..layout.slots() {
                let slot = layout.slot(index);
                assert_eq!(slot.start, end);
                assert!(slot.start < slot.end);
                end = slot.end;
            }
            assert_eq!(end, layout.pages());
        }
    }

    #[test]
    fn the_map_case_ends_at_8194_slots_or_a_few_more_and_the_others_go_on() {
        assert!(Layout::new(Case::Map, 8194).is_some());
        assert!(Layout::new(Case::Map, 32764).is_none());
        assert!(Layout::new(Case::Unmap, 32764).is_some());
    }

    #[test]
    fn pieces_are_in_order_within_their_slot_and_chunk() {
        let layout = Layout::new(Case::Unmap2m, 509).unwrap();
        for chunk in [1, 512] {
            for half in layout.halves() {
                let mut at = half.start;
                for piece in layout.pieces(half.clone(), chunk) {
                    assert_eq!(piece.start, at);
                    assert!(piece.end - piece.start <= chunk);
                    let inside =
                        |slot: Range<u64>| slot.start <= piece.start && piece.end <= slot.end;
                    assert!((0..layout.slots()).map(|i| layout.slot(i)).any(inside));
                    at = piece.end;
                }
                assert_eq!(at, half.end);
            }
        }
    }

    #[test]
    fn half_of_what_is_written_lies_in_the_slot_that_moves_if_it_is_in_use() {
        for slots in [10, 32764] {
            let layout = Layout::new(Case::MoveActive, slots).unwrap();
            let slot = layout.slot(layout.moved());
            let inside = |page: &u64| slot.contains(page);
            assert_eq!(
                layout.written(true).filter(inside).count() as u64,
                MOVED / 2
            );
            assert_eq!(layout.written(false).filter(inside).count(), 0);
        }
    }
}
