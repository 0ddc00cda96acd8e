//! Memslots: which part of the guest's physical memory is backed by what.
//!
//! One address space has one [`Slots`]. What readers see of it is one immutable [`SlotSet`] behind
//! one pointer: persistent trees (by guest frame, by backing address), which frames are private
//! ([`attributes`]), and the MMIO generation.
//! A change builds a new set beside the old one, path by path ([`tree`]), and swaps the pointer; so a
//! reader sees the old or the new set whole, and the VM runs on the old one meanwhile. The index by
//! id is only used by changes and sits behind the writers' lock.
//!
//! * Look-ups take no lock. The caller is inside a reader section ([`crate::sync::quiesce`]).
//! * Changes are serialized by [`Slots::change`]'s lock, held until the change is complete for its
//!   caller (zapped and flushed), as KVM's `slots_lock` is.
//! * What a change replaced is retired with the generation of the quiescence protocol at which
//!   nobody can hold it any more, and freed by a later change or by drop.

mod attributes;
mod region;
mod tree;

pub(crate) use attributes::PrivateFrames;
pub use attributes::{AttributesError, MemoryAttributes};
pub(crate) use region::{Change, plan};
pub use region::{MAX_SLOTS, Region, RegionError, SlotFlags};

use crate::sync::atomic::{AtomicPtr, Ordering::*, Watch};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;
use core::ptr::NonNull;

use hashbrown::HashMap;

use crate::addr::{Gfn, Hva, PAGE_SHIFT};
use crate::sync::lock::{Guard, Lock};
use crate::sync::quiesce::Readers;
use crate::table::OutOfMemory;
use crate::vm::DirtyLog;
use tree::{Edit, Node, Root};

/// One memslot. Immutable; a change of flags or place makes a new one.
#[derive(Clone)]
pub struct Memslot {
    /// The client's number, below [`crate::MAX_SLOTS`].
    pub id: u32,
    /// Its flags.
    pub flags: SlotFlags,
    /// First guest frame.
    pub base: Gfn,
    /// Length in 4 KiB pages, never 0.
    pub pages: u64,
    /// Backing of the first page.
    pub backing: Hva,
    /// Backing of the first page where it is private.
    pub private: Option<Hva>,
    /// Exists while the slot logs dirty pages.
    pub(crate) dirty: Option<Arc<DirtyLog>>,
    alive: Watch,
}

impl Memslot {
    /// The frames it holds.
    pub fn gfns(&self) -> Range<Gfn> {
        self.alive.used();
        self.base..self.base.add(self.pages)
    }

    /// Whether `gfn` is one of them. One comparison: which side of a slot a frame lies on is anybody's
    /// guess, also for a branch predictor.
    #[inline]
    pub(crate) fn holds(&self, gfn: Gfn) -> bool {
        self.alive.used();
        gfn.0.wrapping_sub(self.base.0) < self.pages
    }

    /// Backing address of the page at `gfn`, which lies in the slot.
    pub fn hva(&self, gfn: Gfn) -> Hva {
        self.backing.add_pages(gfn.0 - self.base.0)
    }

    /// The part of the slot that `range` stands behind, if its first page is backed by `backing`.
    fn gfns_backed_by(&self, range: &Range<Hva>, backing: Hva) -> Range<Gfn> {
        let first = range.start.0.saturating_sub(backing.0) >> PAGE_SHIFT;
        let end = range
            .end
            .0
            .saturating_sub(backing.0)
            .div_ceil(1 << PAGE_SHIFT);
        self.base.add(first.min(self.pages))..self.base.add(end.min(self.pages))
    }

    fn gfn_key(&self) -> u64 {
        tree::key(self.base.0, self.id)
    }

    /// Where it stands in an index by backing.
    fn hva_key(&self, backing: Hva) -> u64 {
        tree::key(hva_page(backing), self.id)
    }
}

fn hva_page(backing: Hva) -> u64 {
    backing.0 >> PAGE_SHIFT
}

/// All slots of one address space at one moment.
#[derive(Clone)]
pub(crate) struct SlotSet {
    by_gfn: Root,
    by_hva: Root,
    /// By private backing: the slots that have one.
    by_private: Root,
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
        unsafe { tree::find(self.by_gfn, gfn.0) }
    }

    /// Calls `visit` for every slot with a page in `range`, in ascending order.
    pub(crate) fn in_gfns(&self, range: &Range<Gfn>, mut visit: impl FnMut(&Memslot)) {
        // SAFETY: as in `find`.
        unsafe {
            tree::overlapping(self.by_gfn, &(range.start.0..range.end.0), &mut |slot| {
                visit(slot);
                true
            })
        };
    }

    /// Whether a slot other than `except` has a page in `range`; that slot's id.
    fn overlap(&self, range: &Range<Gfn>, except: u32) -> Option<u32> {
        let mut found = None;
        // SAFETY: as in `find`.
        unsafe {
            tree::overlapping(self.by_gfn, &(range.start.0..range.end.0), &mut |slot| {
                if slot.id != except {
                    found = Some(slot.id);
                }
                found.is_none()
            })
        };
        found
    }

    /// Whether a slot has some of these `pages` for its private backing; that slot's id.
    fn private_taken(&self, private: Hva, pages: u64) -> Option<u32> {
        let range = hva_page(private)..hva_page(private) + pages;
        let mut found = None;
        // SAFETY: as in `find`.
        unsafe {
            tree::overlapping(self.by_private, &range, &mut |slot| {
                found = Some(slot.id);
                false
            })
        };
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
            tree::overlapping(self.by_hva, &pages, &mut |slot| {
                visit(slot, slot.gfns_backed_by(range, slot.backing))
            })
        };
        if !more {
            return;
        }
        let mut visit_private = |slot: &Memslot| match slot.private {
            Some(private) => visit(slot, slot.gfns_backed_by(range, private)),
            None => true,
        };
        // SAFETY: as in `find`.
        unsafe { tree::overlapping(self.by_private, &pages, &mut visit_private) };
    }
}

/// The slots of one address space.
pub(crate) struct Slots {
    current: AtomicPtr<SlotSet>,
    writer: Lock<Writer>,
}

struct Writer {
    by_id: HashMap<u32, NonNull<Memslot>>,
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
    Node(NonNull<Node>),
    Slot(NonNull<Memslot>),
    Set(NonNull<SlotSet>),
}

impl What {
    /// # Safety
    /// - it is in no published set, and no reader holds it.
    unsafe fn free(self) {
        // SAFETY: slots and sets come from `Box::into_raw`, nodes from an edit; each is retired once.
        unsafe {
            match self {
                What::Node(node) => tree::free_node(node),
                What::Slot(slot) => drop(Box::from_raw(slot.as_ptr())),
                What::Set(set) => drop(Box::from_raw(set.as_ptr())),
            }
        }
    }
}

impl Slots {
    pub(crate) fn new() -> Self {
        let empty = SlotSet {
            by_gfn: None,
            by_hva: None,
            by_private: None,
            private: PrivateFrames::NONE,
            generation: 0,
            alive: Watch::new(),
            granule: 0,
        };
        Slots {
            current: AtomicPtr::new(Box::into_raw(Box::new(empty))),
            writer: Lock::new(Writer {
                by_id: HashMap::new(),
                pages: 0,
                retired: Vec::new(),
            }),
        }
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

    pub(crate) fn by_id(&self, id: u32) -> Option<&Memslot> {
        // SAFETY: slots in the index are alive; only a change frees them, and `self` is the change.
        self.writer
            .by_id
            .get(&id)
            .map(|slot| unsafe { slot.as_ref() })
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
        new: Option<Memslot>,
        readers: &Readers,
    ) -> Result<(), OutOfMemory> {
        self.reclaim(readers);
        let old_set = self.set().clone();
        let old = self.writer.by_id.get(&id).copied();
        let mut edit = Edit::new()?;
        let writer = &mut *self.writer;
        writer.by_id.try_reserve(1).map_err(|_| OutOfMemory)?;
        let pages = new.as_ref().map_or(0, |slot| slot.pages);
        let new = new.map(|slot| NonNull::from(Box::leak(Box::new(slot))));
        let prepared = build(&mut edit, old_set, old, new).and_then(|set| {
            writer
                .retired
                .try_reserve(edit.replaced() + 2)
                .map_err(|_| OutOfMemory)?;
            Ok(set)
        });
        let set = match prepared {
            Ok(set) => Prepared(Box::new(set)),
            Err(OutOfMemory) => {
                edit.abort();
                if let Some(new) = new {
                    // SAFETY: made above, never published.
                    unsafe { What::Slot(new).free() };
                }
                return Err(OutOfMemory);
            }
        };

        // From here on nothing fails.
        let old_pages = self.by_id(id).map_or(0, |slot| slot.pages);
        let generation = self.publish(set, readers);
        let writer = &mut *self.writer;
        match new {
            Some(new) => writer.by_id.insert(id, new),
            None => writer.by_id.remove(&id),
        };
        writer.pages = writer.pages + pages - old_pages;
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
        Ok(Prepared(Box::new(set)))
    }

    /// Swaps the set that readers see, and retires the old one. Returns the generation at which nobody can hold what is not in the new set.
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
    old: Option<NonNull<Memslot>>,
    new: Option<NonNull<Memslot>>,
) -> Result<SlotSet, OutOfMemory> {
    if let Some(slot) = old {
        // SAFETY: a live slot is in both trees of the set under the keys it computes.
        unsafe {
            let slot = slot.as_ref();
            set.by_gfn = edit.remove(set.by_gfn, slot.gfn_key())?;
            set.by_hva = edit.remove(set.by_hva, slot.hva_key(slot.backing))?;
            if let Some(private) = slot.private {
                set.by_private = edit.remove(set.by_private, slot.hva_key(private))?;
            }
        }
    }
    if let Some(new) = new {
        // SAFETY: `new` is alive until it is retired, and its keys are in neither tree: ids are
        // unique and the old slot with this id was removed.
        unsafe {
            let slot = new.as_ref();
            let granule = slot.pages.ilog2();
            set.granule = match set.by_gfn {
                Some(_) => set.granule.min(granule),
                None => granule,
            };
            let gfn_end = slot.base.0 + slot.pages;
            let hva_end = |backing| hva_page(backing) + slot.pages;
            let (key, end) = (slot.hva_key(slot.backing), hva_end(slot.backing));
            set.by_gfn = edit.insert(set.by_gfn, slot.gfn_key(), gfn_end, new)?;
            set.by_hva = edit.insert(set.by_hva, key, end, new)?;
            if let Some(private) = slot.private {
                let (key, end) = (slot.hva_key(private), hva_end(private));
                set.by_private = edit.insert(set.by_private, key, end, new)?;
            }
        }
    }
    set.generation += 1;
    Ok(set)
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: `&mut self`: no reader is left. The current set's nodes, the slots in the index
        // and what was retired are disjoint and together all there is.
        unsafe {
            let set = Box::from_raw(self.current.load(Relaxed));
            tree::free_tree(set.by_gfn);
            tree::free_tree(set.by_hva);
            tree::free_tree(set.by_private);
            let writer = self.writer.get_mut();
            for (_, slot) in writer.by_id.drain() {
                What::Slot(slot).free();
            }
            for retired in writer.retired.drain(..) {
                retired.what.free();
            }
        }
    }
}

#[cfg(test)]
mod tests;
