//! Whether a vCPU is in a reader section, and what the vCPU may use during the section.

use core::mem::replace;
use core::ptr::NonNull;

use super::paging_structure_cache::PagingStructureCache;
use crate::addr::Gpa;
use crate::sync::InSection;
use crate::sync::quiesce::{Reader, Readers};

/// A vCPU's reader, whether the reader is in a section, and the tables that the vCPU has reached during the section.
pub(super) struct Presence {
    /// The vCPU's reader. The VM owns the reader's memory; only this vCPU uses it.
    pub(super) reader: NonNull<Reader>,
    /// In a section, the end of the addresses that the tables translate; outside a section, 0. A walk may begin for an
    /// address below this, so one comparison checks both conditions.
    pub(super) walkable: Gpa,
    /// The level 1 tables that walks have reached in this section since its last quiescent point: for guest-physical
    /// addresses below `walkable`, and for virtual addresses. Empty outside a section.
    pub(super) tables: PagingStructureCache,
    /// How often a flush took place while the vCPU was outside a section, as noticed when it entered the next section.
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
        // SAFETY: `walkable` is not 0, so the reader, which only this vCPU uses, is in a section; only methods that
        // borrow the vCPU mutably end the section.
        unsafe { InSection::assume() }
    }

    /// Begins a section. Returns whether translations that the vCPU remembers from earlier are void.
    pub(super) fn enter(&mut self, readers: &Readers, token: usize, walkable: Gpa) -> bool {
        if self.is_entered() {
            // If the vCPU is already in a section, this call is a quiescent point, which empties the cache.
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

    /// Ends the section. Returns the value that `walkable` had in the section.
    pub(super) fn leave(&mut self) -> Gpa {
        self.tables.clear();
        let walkable = replace(&mut self.walkable, Gpa(0));
        self.reader().leave();
        walkable
    }
}
