//! Pages of memslots that are not present yet. A bitmap that the client provides tells which pages these are. The
//! interface is that of a proposed series of patches for KVM, "KVM Userfault" (version 3, June 2025:
//! `KVM_MEM_USERFAULT`). It is for post-copy migration and lazy restore where userfaultfd is forbidden.
//!
//! A set bit means that the page is not present yet: an access ends with [`ResolveError::Absent`]. The client then
//! stores the page's contents, and clears the bit.
//!
//! # Concurrency
//! The bitmap is in the client's memory, which the client may change or unmap at any time. So its bits are read by
//! guarded loads. These are acquire operations on every architecture: if the client has cleared the bit by a release
//! operation, accesses after a load that sees the cleared bit see the page's contents. A bit is read only when a page
//! is resolved: if it is set later, a page that is already mapped stays mapped, as in the proposed series. The table of
//! bitmaps is changed only during an invalidation of the slot's memory, so that every leaf was resolved with the slot's
//! current bitmap.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{PoisonError, RwLock};

use slat::{Granule, Hva, OutOfMemory, Request, ResolveError};

/// A memslot's bitmap (`KVM_MEM_USERFAULT`): a set bit is a page that is not present yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Userfault {
    /// The backing address, and the private backing address, of the slot's first page, to which bit 0 belongs.
    pub backing: (Hva, Option<Hva>),
    /// The number of pages in the memslot.
    pub pages: u64,
    /// The address of the bitmap in this process.
    pub bitmap: u64,
}

impl Userfault {
    /// Returns the ranges of bits that belong to the pages that `range` backs. Pages have the size of `granule`.
    fn bits(&self, range: &Range<Hva>, granule: Granule) -> impl Iterator<Item = Range<u64>> {
        let (shared, private) = self.backing;
        let page = move |base: Hva, at: Hva| {
            (at.0.saturating_sub(base.0) >> granule.shift()).min(self.pages)
        };
        [Some(shared), private.filter(|private| *private != shared)]
            .into_iter()
            .flatten()
            .map(move |base| page(base, range.start)..page(base, range.end))
            .filter(|bits| !bits.is_empty())
    }

    /// Whether `page` is not present yet.
    ///
    /// # Errors
    /// [`ResolveError`]: the bitmap cannot be read.
    fn is_absent(&self, page: u64) -> Result<bool, ResolveError> {
        let byte = (self.bitmap + page / 8) as *const u8;
        // SAFETY: a guarded load may be made at any address.
        match unsafe { slat_guard::load(byte) } {
            Ok(bits) => Ok(bits >> (page % 8) & 1 != 0),
            Err(_) if slat_guard::was_kicked() => Err(ResolveError::Interrupted),
            Err(_) => Err(ResolveError::BadAddress),
        }
    }
}

/// The userfault bitmaps of a VM's memslots.
#[derive(Debug, Default)]
pub struct Userfaults {
    /// Whether any memslot has a userfault bitmap. If not, as in most VMs, faults need not check anything else.
    any: AtomicBool,
    /// The bitmaps, each with the number of its address space and of its slot.
    slots: RwLock<Vec<((usize, u32), Userfault)>>,
}

impl Userfaults {
    /// Returns the bitmap of a slot.
    pub fn get(&self, space: usize, slot: u32) -> Option<Userfault> {
        if !self.any.load(Acquire) {
            return None;
        }
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let found = slots.iter().find(|(of, _)| *of == (space, slot));
        found.map(|(_, userfault)| userfault.clone())
    }

    /// Sets or removes the userfault bitmap of a slot. Call during an invalidation of the slot's memory
    /// ([`slat::Vm::invalidate`]), or while there is no such slot.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing was changed. There is no error if the slot already has a bitmap, or if the bitmap is
    /// removed.
    pub fn set(
        &self,
        space: usize,
        slot: u32,
        userfault: Option<Userfault>,
    ) -> Result<(), OutOfMemory> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        if userfault.is_some() {
            slots.try_reserve(1).map_err(|_| OutOfMemory)?;
        }
        slots.retain(|(of, _)| *of != (space, slot));
        slots.extend(userfault.map(|userfault| ((space, slot), userfault)));
        self.any.store(!slots.is_empty(), Release);
        Ok(())
    }

    /// Checks that the page of `request` is present. `granule` is that of the VM. Returns whether the page's slot has a
    /// bitmap: then leaves must be small, because neighbouring pages may be absent.
    ///
    /// # Errors
    /// [`ResolveError::Absent`]; other errors if the bitmap cannot be read.
    pub(crate) fn check(&self, request: &Request, granule: Granule) -> Result<bool, ResolveError> {
        let Some(userfault) = self.get(request.space, request.slot) else {
            return Ok(false);
        };
        let page = Hva(request.backing.0 & !(granule.bytes() - 1));
        for bit in userfault.bits(&(page..granule.add_pages(page, 1)), granule) {
            if userfault.is_absent(bit.start)? {
                return Err(ResolveError::Absent);
            }
        }
        Ok(true)
    }

    /// Calls `found` for the parts of `stretch` (whole pages of `granule`) that are not absent, in ascending order. The
    /// flag that `found` gets tells whether a bitmap has bits for `stretch`. If several memslots use a page, the page
    /// counts as absent if it is absent by the bitmap of one of them.
    pub(crate) fn present(
        &self,
        stretch: Range<usize>,
        granule: Granule,
        found: &mut dyn FnMut(Range<usize>, bool),
    ) {
        if !self.any.load(Acquire) {
            return found(stretch, false);
        }
        let range = Hva(stretch.start as u64)..Hva(stretch.end as u64);
        // Copy the bitmaps' descriptions, so that no lock is held while a bitmap is read: such a read may block,
        // because the bitmap is in the client's memory.
        let mut slots = Vec::new();
        {
            let all = self.slots.read().unwrap_or_else(PoisonError::into_inner);
            if slots.try_reserve(all.len()).is_err() {
                return;
            }
            let touches = |of: &&Userfault| of.bits(&range, granule).next().is_some();
            let all = all.iter().map(|(_, userfault)| userfault);
            slots.extend(all.filter(touches).cloned());
        }
        if slots.is_empty() {
            return found(stretch, false);
        }
        let absent = |address: usize| {
            let page = Hva(address as u64);
            let page = page..granule.add_pages(page, 1);
            (slots.iter()).any(|of| {
                of.bits(&page, granule)
                    .any(|bit| of.is_absent(bit.start) != Ok(false))
            })
        };
        let mut from = stretch.start;
        let bytes = granule.bytes() as usize;
        for address in stretch.clone().step_by(bytes) {
            if absent(address) {
                if from < address {
                    found(from..address, true);
                }
                from = address + bytes;
            }
        }
        if from < stretch.end {
            found(from..stretch.end, true);
        }
    }
}
