//! Memslots: they say which memory backs which part of the guest's physical memory.
//!
//! Each address space has one [`Slots`]: two [`SlotSet`]s, each with all the slots. Readers see the *published* set. A
//! writer makes a change in the other set, the *inactive* one, and then publishes the changed set. So a reader sees
//! either the old set or the new set as a whole, and the VM runs on the old set during the change. The replaced set
//! becomes the inactive set. It stays unchanged for the readers that still use it. At the beginning of the next change,
//! the writer repeats the last change in the inactive set. So every change is made twice, once in each set. (KVM, too,
//! has two sets, active and inactive memslots, since Linux 5.17; one slot object is linked into both sets.)
//!
//! * Look-ups take no lock. The caller is in a reader section ([`crate::sync::quiesce`]).
//! * Changes are serialized by [`Slots::change`]'s lock. A deletion or a move holds this lock until the new set is
//!   published and the old slot's leaves are zapped, and releases the lock before the TLB flush. (KVM holds its
//!   `slots_lock` until the flush is done.) An operation on a dirty log takes the lock for each step anew. A change of
//!   memory attributes holds the lock until the new sets are published. The table of slots by id is only used under
//!   this lock.
//! * A reader that entered its section, or passed a quiescent point, after the last change was published does not use
//!   the inactive set. [`SlotsChange::catch_up`] waits for all other readers. Usually the TLB flush of the last change
//!   has already waited for them. `catch_up` also drops the slots that the last change replaced.
//! * A change allocates all memory that it needs, for both sets, before it changes anything. Both sets were built by
//!   the same edits, so memory that suffices for one set suffices for the other.
//! * A change makes one or several [`Edit`]s. All of them are made in the inactive set before it is published, so
//!   readers see all edits or none. Between two edits, slots of the inactive set may overlap: one edit has added a
//!   slot, and a later edit will remove the slot that it overlaps. This is harmless, because no thread looks up frames
//!   in the inactive set.

mod attributes;
mod batch;
mod ids;
mod index;
mod memslot;
mod region;
mod set;

pub(crate) use attributes::PrivateFrames;
pub use attributes::{AttributesError, MemoryAttributes};
pub(crate) use batch::Batch;
pub use batch::Change;
pub(crate) use memslot::{Limits, Memslot, OwnedSlot};
pub use region::{MAX_SLOTS, Region, RegionError, SlotFlags};
pub(crate) use region::{check, plan};
pub(crate) use set::{Place, SlotSet};

use alloc::vec::Vec;
use core::cell::UnsafeCell;
use core::mem;
use core::ops::Deref;

use crate::heap::OutOfMemory;
use crate::stats::Counter;
use crate::sync::InSection;
use crate::sync::atomic::{AtomicUsize, Ordering::*};
use crate::sync::fair::{FairGuard, FairLock};
use crate::sync::quiesce::Readers;
use ids::Ids;
use set::Spares;

/// The slots of one address space.
pub(crate) struct Slots {
    sets: [UnsafeCell<SlotSet>; 2],
    /// The index of the set that readers use (KVM: the active memslots).
    published: AtomicUsize,
    /// Counts calls of [`SlotsChange::replace`]. Only the holder of the writers' lock adds to it.
    changes: Counter,
    writer: FairLock<Writer>,
}

// SAFETY: any number of threads may read the published set, and only one thread, the holder of the writers' lock,
// changes the other set. Both sets are `Send + Sync`.
unsafe impl Sync for Slots {}

struct Writer {
    /// The last change, while it is not yet made in the inactive set.
    last: Option<LastChange>,
    by_id: Ids,
    /// The number of slots.
    len: usize,
    /// The number of pages in all slots.
    pages: u64,
    spares: Spares,
}

/// A change that is published, but not yet made in the inactive set.
struct LastChange {
    /// The generation of readers ([`Readers`]) after which no reader uses the inactive set.
    generation: u64,
    replaced: Replaced,
}

/// The slots as they were before the last change, one for each of its edits and in their order. `first` is separate
/// from `others`, so that a change of one slot needs no heap memory.
#[derive(Default)]
struct Replaced {
    first: Option<Was>,
    others: Vec<Was>,
}

/// The slot with the id `id` before the last change. `None`: there was no such slot.
struct Was {
    id: u32,
    old: Option<OwnedSlot>,
}

impl Replaced {
    fn iter(&self) -> impl Iterator<Item = &Was> {
        self.first.iter().chain(&self.others)
    }
}

/// The change of one slot.
pub(crate) struct Edit {
    pub(crate) id: u32,
    /// The slot that will have the id `id`. It replaces the slot with this id, if one exists. `None` deletes that slot.
    pub(crate) new: Option<OwnedSlot>,
}

impl Slots {
    pub(crate) fn new() -> Result<Self, OutOfMemory> {
        Ok(Slots {
            sets: [SlotSet::new()?, SlotSet::new()?].map(UnsafeCell::new),
            published: AtomicUsize::new(0),
            changes: Counter::default(),
            writer: FairLock::new(Writer {
                last: None,
                by_id: Ids::EMPTY,
                len: 0,
                pages: 0,
                spares: Spares::NONE,
            }),
        })
    }

    /// Returns the number of slots that were created, deleted, or replaced (moved, or given other flags).
    pub(crate) fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// Returns the set that readers use.
    #[inline(always)]
    pub(crate) fn current<'s>(&'s self, _: InSection<'s>) -> &'s SlotSet {
        // SAFETY: the reader stays in its section as long as the result is used.
        unsafe { self.published() }
    }

    /// Returns the set that readers use.
    ///
    /// # Safety
    /// - As long as the result is used, the caller is in a reader section, or holds the writers' lock and does not call
    ///   `catch_up`.
    #[inline]
    unsafe fn published(&self) -> &SlotSet {
        // Sequentially consistent, like the accesses to the word that says whether a reader is in its section, and like
        // the store in `publish`. So if a writer finds a reader outside its section, the reader will see the new set
        // when it enters the section.
        let index = self.published.load(SeqCst) % 2;
        // SAFETY: only the holder of the writers' lock changes a set, and only after the set was replaced and every
        // reader section that could have seen the set as the published one has ended.
        let set = unsafe { &*self.sets[index].get() };
        set.used();
        set
    }

    /// Returns the set that is not published. Only the holder of the writers' lock uses this set, after
    /// [`SlotsChange::catch_up`].
    fn inactive(&self) -> *mut SlotSet {
        self.sets[1 - self.published.load(Relaxed) % 2].get()
    }

    /// Begins a change: only the holder of the result changes these slots. Callers are served in the order of their
    /// calls. A caller that must wait calls `wait(round)` in each round of waiting.
    pub(crate) fn change(&self, wait: impl FnMut(u32)) -> SlotsChange<'_> {
        SlotsChange {
            slots: self,
            writer: self.writer.lock(wait),
        }
    }
}

/// The right to change the slots of one address space.
pub(crate) struct SlotsChange<'a> {
    slots: &'a Slots,
    writer: FairGuard<'a, Writer>,
}

impl SlotsChange<'_> {
    #[inline]
    pub(crate) fn by_id(&self, id: u32) -> Option<&OwnedSlot> {
        self.writer.by_id.get(id)
    }

    /// Returns the set that readers use.
    pub(crate) fn set(&self) -> &SlotSet {
        // SAFETY: the caller holds the writers' lock. The result borrows `self`, so `catch_up` cannot be called while
        // the result is used.
        unsafe { self.slots.published() }
    }

    /// Returns the total number of pages in all slots.
    pub(crate) fn pages(&self) -> u64 {
        self.writer.pages
    }

    /// Returns the number of slots.
    pub(crate) fn len(&self) -> usize {
        self.writer.len
    }

    /// Call before a change: waits for the readers that still use the inactive set, and repeats the last change in it.
    /// In each round of waiting for the reader with the token `token`, calls `wait(round, token)`. The caller must not
    /// be in a reader section.
    #[inline]
    pub(crate) fn catch_up(&mut self, readers: &Readers, wait: impl FnMut(u32, usize)) {
        let Writer {
            last,
            by_id,
            spares,
            ..
        } = &mut *self.writer;
        let Some(LastChange { generation, .. }) = last else {
            return;
        };
        if !readers.all_passed(*generation) {
            readers.synchronize(wait);
        }
        let replaced = last
            .take()
            .map_or_else(Replaced::default, |last| last.replaced);
        // SAFETY: every reader that was in a section when the set was replaced has passed a quiescent point since then,
        // and the writers' lock is held.
        let inactive = unsafe { &mut *self.slots.inactive() };
        for Was { id, old } in replaced.iter() {
            let new = by_id.get(*id).map(Deref::deref);
            inactive.exchange(old.as_deref(), new, spares);
        }
        spares.trim();
        // SAFETY: the caller holds the writers' lock, and the published set is not the set that this function changes.
        inactive.clone_rest(unsafe { self.slots.published() });
    }

    /// Makes all `edits`, which have different ids, and publishes the new set. Moves the slots out of `edits`. The
    /// caller has [caught up](Self::catch_up).
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing has changed.
    #[inline]
    pub(crate) fn replace(
        &mut self,
        edits: &mut [Edit],
        readers: &Readers,
    ) -> Result<(), OutOfMemory> {
        let (inactive, writer) = self.caught_up();
        for edit in edits.iter().filter(|edit| edit.new.is_some()) {
            writer.by_id.make_entry(edit.id)?;
        }
        let by_id = &writer.by_id;
        let pairs = edits.iter().map(|edit| {
            let old = by_id.get(edit.id).map(Deref::deref);
            (old, edit.new.as_deref())
        });
        inactive.prepare(pairs, &mut writer.spares)?;
        let mut replaced = Replaced::default();
        let others = edits.len().saturating_sub(1);
        (replaced.others.try_reserve_exact(others)).map_err(|_| OutOfMemory)?;
        // From here on nothing can fail.
        for edit in edits.iter_mut() {
            let id = edit.id;
            let entry = writer
                .by_id
                .entry(id)
                .expect("it is made, or the slot exists");
            let old = mem::replace(entry, edit.new.take());
            let (was, is) = (old.as_deref(), entry.as_deref());
            let pages = |slot: Option<&Memslot>| slot.map_or(0, |slot| slot.pages());
            writer.pages = writer.pages + pages(is) - pages(was);
            writer.len = writer.len + usize::from(is.is_some()) - usize::from(was.is_some());
            inactive.exchange(was, is, &mut writer.spares);
            match replaced.first {
                None => replaced.first = Some(Was { id, old }),
                Some(_) => replaced.others.push(Was { id, old }),
            }
        }
        self.slots.changes.add(edits.len() as u64);
        self.publish(replaced, readers);
        Ok(())
    }

    /// Returns the slots that the last [`replace`](Self::replace) removed or replaced, in the order of its edits.
    pub(crate) fn replaced(&self) -> impl Iterator<Item = &OwnedSlot> {
        let last = self.writer.last.iter();
        last.flat_map(|last| last.replaced.iter().filter_map(|was| was.old.as_ref()))
    }

    /// Publishes a set with the same slots and other private frames. The caller has [caught up](Self::catch_up).
    pub(crate) fn set_private(&mut self, private: PrivateFrames, readers: &Readers) {
        self.caught_up().0.private = private;
        self.publish(Replaced::default(), readers);
    }

    /// Returns the inactive set and the writer's data.
    fn caught_up(&mut self) -> (&mut SlotSet, &mut Writer) {
        assert!(
            self.writer.last.is_none(),
            "a change begins with `catch_up`"
        );
        // SAFETY: `catch_up` was called, so no reader uses the set, and `self` is borrowed as long as the result is
        // used.
        let inactive = unsafe { &mut *self.slots.inactive() };
        (inactive, &mut self.writer)
    }

    /// Raises the generation of the inactive set, and publishes this set.
    #[inline]
    fn publish(&mut self, replaced: Replaced, readers: &Readers) {
        self.caught_up().0.generation += 1;
        let published = self.slots.published.load(Relaxed);
        self.slots.published.swap(1 - published % 2, SeqCst);
        self.writer.last = Some(LastChange {
            // A reader that enters from now on sees the new set. When all readers have passed the next generation, no
            // reader in a section uses the old set.
            generation: readers.next_generation(),
            replaced,
        });
    }
}

#[cfg(test)]
mod tests;
