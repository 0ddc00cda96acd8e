//! Memslots: which part of the guest's physical memory is backed by what.
//!
//! One address space has one [`Slots`]. What readers see of it is one immutable [`SlotSet`] behind
//! one pointer: persistent trees (by guest frame, by backing address), which frames are private
//! ([`attributes`]), and the MMIO generation. A change builds a new set beside the old one, path by path
//! ([`edit`]), and swaps the pointer; so a reader sees the old or the new set whole, and the VM runs on the
//! old one meanwhile. The index by id is only used by changes and sits behind the writers' lock.
//!
//! * Look-ups take no lock. The caller is inside a reader section ([`crate::sync::quiesce`]).
//! * Changes are serialized by [`Slots::change`]'s lock, held until the change is complete for its
//!   caller (zapped and flushed), as KVM's `slots_lock` is.
//! * What a change replaced is retired with the generation of the quiescence protocol at which
//!   nobody can hold it any more, and freed by a later change or by drop.

mod attributes;
mod edit;
mod memslot;
mod node;
mod region;

pub(crate) use attributes::PrivateFrames;
pub use attributes::{AttributesError, MemoryAttributes};
pub(crate) use memslot::{Memslot, OwnedSlot};
pub(crate) use region::{Change, plan};
pub use region::{MAX_SLOTS, Region, RegionError, SlotFlags};

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;
use core::ptr::NonNull;

use hashbrown::HashMap;

use crate::addr::{Gfn, Hva, PAGE_SHIFT};
use crate::heap;
use crate::sync::atomic::{AtomicPtr, Ordering::*, Watch};
use crate::sync::lock::{Guard, Lock};
use crate::sync::quiesce::Readers;
use crate::table::OutOfMemory;
use edit::Edit;
use node::{ByGfn, ByHva, ByPrivate, Header, Index};

/// All slots of one address space at one moment.
#[derive(Clone)]
pub(crate) struct SlotSet {
    by_gfn: Index<ByGfn>,
    by_hva: Index<ByHva>,
    /// The slots that have private backing.
    by_private: Index<ByPrivate>,
    /// The same in every address space of a VM.
    pub(crate) private: PrivateFrames,
    /// Raised by every change. An MMIO entry of another generation says nothing.
    pub(crate) generation: u64,
    alive: Watch,
    /// log2 of the pages of the smallest slot, or less: there were smaller ones.
    pub(crate) granule: u32,
}

impl SlotSet {
    /// A generation that no set has.
    pub(crate) const NEVER: u64 = u64::MAX;

    /// The slot that holds `gfn`.
    #[inline]
    pub(crate) fn find(&self, gfn: Gfn) -> Option<&Memslot> {
        // SAFETY: a set reached by `Slots::current` or under the writers' lock is whole, and its
        // nodes and slots stay until the reader section or the lock ends.
        unsafe { self.by_gfn.find(gfn.0) }
    }

    /// Calls `visit` for every slot with a page in `range`, in ascending order.
    pub(crate) fn in_gfns(&self, range: &Range<Gfn>, mut visit: impl FnMut(&Memslot)) {
        // SAFETY: as in `find`.
        unsafe {
            self.by_gfn
                .overlapping(&(range.start.0..range.end.0), &mut |slot| {
                    visit(slot);
                    true
                });
        }
    }

    /// Whether a slot other than `except` has a page in `range`; that slot's id.
    fn overlap(&self, range: &Range<Gfn>, except: u32) -> Option<u32> {
        let mut found = None;
        // SAFETY: as in `find`.
        unsafe {
            self.by_gfn
                .overlapping(&(range.start.0..range.end.0), &mut |slot| {
                    if slot.id() != except {
                        found = Some(slot.id());
                    }
                    found.is_none()
                });
        }
        found
    }

    /// Whether a slot has some of these `pages` for its private backing; that slot's id.
    fn private_taken(&self, private: Hva, pages: u64) -> Option<u32> {
        let first = private.0 >> PAGE_SHIFT;
        let range = first..first + pages;
        let mut found = None;
        // SAFETY: as in `find`.
        unsafe {
            self.by_private.overlapping(&range, &mut |slot| {
                found = Some(slot.id());
                false
            });
        }
        found
    }

    /// Calls `visit` for every slot that `range` of the backing stands behind, with the frames it
    /// stands behind, until it answers `false`. A slot that has both its backings there is visited
    /// for each.
    pub(crate) fn backed_by(
        &self,
        range: &Range<Hva>,
        mut visit: impl FnMut(&Memslot, Range<Gfn>) -> bool,
    ) {
        let pages = range.start.0 >> PAGE_SHIFT..range.end.0.div_ceil(1 << PAGE_SHIFT);
        // SAFETY: as in `find`.
        let more = unsafe {
            self.by_hva.overlapping(&pages, &mut |slot| {
                visit(slot, slot.gfns_backed_by(range, slot.backing()))
            })
        };
        if !more {
            return;
        }
        let mut visit_private = |slot: &Memslot| match slot.private() {
            Some(private) => visit(slot, slot.gfns_backed_by(range, private)),
            None => true,
        };
        // SAFETY: as in `find`.
        unsafe { self.by_private.overlapping(&pages, &mut visit_private) };
    }
}

/// The slots of one address space.
pub(crate) struct Slots {
    current: AtomicPtr<SlotSet>,
    writer: Lock<Writer>,
}

struct Writer {
    by_id: HashMap<u32, OwnedSlot>,
    pages: u64,
    retired: Vec<Retired>,
}

// SAFETY: the pointers are owned by the set; what they point to is `Send + Sync`.
unsafe impl Send for Writer {}

/// Something that readers may hold until `generation` has passed.
struct Retired {
    generation: u64,
    what: What,
}

enum What {
    Node(NonNull<Header>),
    /// Nobody but readers looks at it any more; its log goes with it.
    Slot(OwnedSlot),
    Set(NonNull<SlotSet>),
}

impl What {
    /// # Safety
    /// - it is in no published set, and no reader holds it.
    unsafe fn free(self) {
        match self {
            // SAFETY: the caller's promise; each node is retired once.
            What::Node(node) => unsafe { node::free(node) },
            What::Slot(slot) => drop(slot),
            // SAFETY: leaked from a box, retired once.
            What::Set(set) => drop(unsafe { Box::from_raw(set.as_ptr()) }),
        }
    }
}

impl Slots {
    pub(crate) fn new() -> Result<Self, OutOfMemory> {
        let empty = heap::boxed(SlotSet {
            by_gfn: Index::new(None),
            by_hva: Index::new(None),
            by_private: Index::new(None),
            private: PrivateFrames::NONE,
            generation: 0,
            alive: Watch::new(),
            granule: 0,
        })?;
        Ok(Slots {
            current: AtomicPtr::new(Box::into_raw(empty)),
            writer: Lock::new(Writer {
                by_id: HashMap::new(),
                pages: 0,
                retired: Vec::new(),
            }),
        })
    }

    /// The set as it is now. The caller is inside a reader section and drops the reference before it
    /// leaves, or holds the writers' lock.
    #[inline]
    pub(crate) fn current(&self) -> &SlotSet {
        // Sequentially consistent, as the reader's word and the swap are: a writer that finds a
        // reader outside knows that it will load the new set when it comes in.
        // SAFETY: the pointer is never null, and a replaced set is freed only when every reader
        // section that could have loaded it has ended.
        let set = unsafe { &*self.current.load(SeqCst) };
        set.alive.used();
        set
    }

    /// Begins a change: whoever holds the result is the only one who changes these slots.
    pub(crate) fn change(&self, wait: impl FnMut(u32)) -> SlotsChange<'_> {
        SlotsChange {
            slots: self,
            writer: self.writer.lock(wait),
        }
    }
}

/// A set to be published; the one it replaces has a place in the list of what is retired.
pub(crate) struct Prepared(Box<SlotSet>);

/// The right to change the slots of one address space.
pub(crate) struct SlotsChange<'a> {
    slots: &'a Slots,
    writer: Guard<'a, Writer>,
}

impl SlotsChange<'_> {
    /// Never more than this many retired objects wait for readers that nobody has asked.
    const MANY_RETIRED: usize = 256;

    pub(crate) fn by_id(&self, id: u32) -> Option<&OwnedSlot> {
        self.writer.by_id.get(&id)
    }

    pub(crate) fn set(&self) -> &SlotSet {
        self.slots.current()
    }

    /// Pages in all slots together.
    pub(crate) fn pages(&self) -> u64 {
        self.writer.pages
    }

    pub(crate) fn len(&self) -> usize {
        self.writer.by_id.len()
    }

    /// Publishes a set in which `new` (or nothing) stands in the place of the slot `id`.
    ///
    /// Prepares all that can fail first; on failure nothing has changed.
    pub(crate) fn replace(
        &mut self,
        id: u32,
        new: Option<OwnedSlot>,
        readers: &Readers,
    ) -> Result<(), OutOfMemory> {
        self.reclaim(readers);
        let old_set = self.set().clone();
        let writer = &mut *self.writer;
        writer.by_id.try_reserve(1).map_err(|_| OutOfMemory)?;
        let mut edit = Edit::new()?;
        let prepared = build(&mut edit, old_set, writer.by_id.get(&id), new.as_ref())
            .and_then(heap::boxed)
            .and_then(|set| {
                let retired = edit.replaced() + 2;
                let room = writer.retired.try_reserve(retired);
                room.map(|()| set).map_err(|_| OutOfMemory)
            });
        let set = match prepared {
            Ok(set) => Prepared(set),
            Err(OutOfMemory) => {
                edit.abort();
                return Err(OutOfMemory);
            }
        };

        // From here on nothing fails.
        let generation = self.publish(set, readers);
        let writer = &mut *self.writer;
        let pages = |slot: &Option<OwnedSlot>| slot.as_ref().map_or(0, |slot| slot.pages());
        writer.pages += pages(&new);
        let old = match new {
            Some(new) => writer.by_id.insert(id, new),
            None => writer.by_id.remove(&id),
        };
        writer.pages -= pages(&old);
        writer.retired.extend(
            edit.commit()
                .map(What::Node)
                .chain(old.map(What::Slot))
                .map(|what| Retired { generation, what }),
        );
        Ok(())
    }

    /// A set with the same slots and other private frames, for [`publish`](Self::publish).
    pub(crate) fn prepare(
        &mut self,
        private: PrivateFrames,
        readers: &Readers,
    ) -> Result<Prepared, OutOfMemory> {
        self.reclaim(readers);
        let retired = &mut self.writer.retired;
        retired.try_reserve(1).map_err(|_| OutOfMemory)?;
        let mut set = self.set().clone();
        set.private = private;
        set.generation += 1;
        heap::boxed(set).map(Prepared)
    }

    /// Swaps the set that readers see, and retires the old one. Returns the generation at which nobody
    /// can hold what is not in the new set.
    pub(crate) fn publish(&mut self, Prepared(set): Prepared, readers: &Readers) -> u64 {
        let replaced = self.slots.current.swap(Box::into_raw(set), SeqCst);
        // A reader that enters from now on sees the new set; those inside have passed when the next
        // generation has.
        let generation = readers.next_generation();
        let what = NonNull::new(replaced).map(What::Set);
        let retired = what.map(|what| Retired { generation, what });
        self.writer.retired.extend(retired);
        generation
    }

    /// Frees what nobody can hold any more; asks readers to move on when much has piled up.
    fn reclaim(&mut self, readers: &Readers) {
        let retired = &mut self.writer.retired;
        let Some(last) = retired.last() else { return };
        if !readers.all_passed(last.generation) {
            if retired.len() >= Self::MANY_RETIRED {
                readers.ask();
            }
            return;
        }
        for retired in retired.drain(..) {
            // SAFETY: retired when it left the published set; the list ascends in generation, and
            // every reader has passed the last.
            unsafe { retired.what.free() };
        }
    }
}

/// The set with `new` in the place of `old`.
fn build(
    edit: &mut Edit,
    mut set: SlotSet,
    old: Option<&OwnedSlot>,
    new: Option<&OwnedSlot>,
) -> Result<SlotSet, OutOfMemory> {
    if let Some(slot) = new {
        let granule = slot.pages().ilog2();
        set.granule = match set.by_gfn.is_empty() {
            true => granule,
            false => set.granule.min(granule),
        };
    }
    let private = |slot: Option<&OwnedSlot>| slot.is_some_and(|slot| slot.private().is_some());
    // SAFETY: the caller holds the writers' lock: the set stays whole. A slot of the index by id is in all
    // trees that have a place for it, and the keys of the new one are in none but for the old one's: ids are
    // unique.
    unsafe {
        set.by_gfn = edit.exchange(set.by_gfn, old, new)?;
        set.by_hva = edit.exchange(set.by_hva, old, new)?;
        let old = old.filter(|_| private(old));
        let new = new.filter(|_| private(new));
        set.by_private = edit.exchange(set.by_private, old, new)?;
    }
    set.generation += 1;
    Ok(set)
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: `&mut self`: no reader is left. The current set's nodes and what was retired are disjoint.
        unsafe {
            let set = Box::from_raw(self.current.load(Relaxed));
            set.by_gfn.free();
            set.by_hva.free();
            set.by_private.free();
            for retired in self.writer.get_mut().retired.drain(..) {
                retired.what.free();
            }
        }
    }
}

#[cfg(test)]
mod tests;
