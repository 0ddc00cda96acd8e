//! Whether a vCPU is in a reader section, and what the vCPU may use during the section.

use core::mem::replace;
use core::ptr::NonNull;

use super::paging_structure_cache::PagingStructureCache;
use crate::addr::Gpa;
use crate::sync::InSection;
use crate::sync::quiesce::{Reader, Readers};

/// A vCPU's reader, whether the reader is in a section, and the tables that the vCPU has reached in that section.
pub(super) struct Presence {
    /// The vCPU's reader. The VM keeps its memory, and only this vCPU uses it.
    pub(super) reader: NonNull<Reader>,
    /// Walks may begin for addresses below this one: in a section, the end of the addresses that the tables translate;
    /// otherwise 0. So one comparison checks both.
    pub(super) walkable: Gpa,
    /// Level 1 tables that walks have reached in this section since its last quiescent point, of guest-physical
    /// addresses below `walkable` and of virtual addresses. Empty outside a section.
    pub(super) tables: PagingStructureCache,
    /// The number of times that the vCPU has entered a section after it had missed a flush.
    pub(super) missed: u64,
}

impl Presence {
    #[inline(always)]
    pub(super) fn reader(&self) -> &Reader {
        // SAFETY: readers live as long as the VM, which the vCPU keeps alive.
        unsafe { self.reader.as_ref() }
    }

    #[inline(always)]
    pub(super) fn is_entered(&self) -> bool {
        self.walkable > Gpa(0)
    }

    #[inline(always)]
    pub(super) fn section(&self) -> InSection<'_> {
        assert!(self.is_entered(), "a vCPU outside its reader section");
        // SAFETY: `walkable` says that the reader, which only this vCPU owns, is in a section; only methods that borrow
        // the vCPU mutably end the section.
        unsafe { InSection::assume() }
    }

    /// Begins a section. Returns whether translations from before are void.
    pub(super) fn enter(&mut self, readers: &Readers, token: usize, walkable: Gpa) -> bool {
        if self.is_entered() {
            // Entering a section while in a section passes a quiescent point.
            self.tables.clear();
        }
        let missed = self.reader().enter(readers, token);
        self.walkable = walkable;
        self.missed += u64::from(missed);
        missed
    }

    pub(super) fn quiesce(&mut self, readers: &Readers) {
        self.tables.clear();
        self.reader().quiesce(readers);
    }

    /// Ends the section. Returns the value of `walkable` in the section.
    pub(super) fn leave(&mut self) -> Gpa {
        self.tables.clear();
        let walkable = replace(&mut self.walkable, Gpa(0));
        self.reader().leave();
        walkable
    }
}
