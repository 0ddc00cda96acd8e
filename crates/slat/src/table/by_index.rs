//! The interface to an MMU's tables by index, for vCPUs.
//!
//! A page walker begins at a root table, and at each level a part of the *index*, a page number, selects the entry. The
//! root and the kind of page number depend on the MMU: a second-level walker has one root and translates guest frames.
//! The walker of a shadow table has a root for each address space of the guest and translates virtual pages. The other
//! interface, [by gfn](super::by_gfn), is for operations that the host requests, which concern frames.
//!
//! Look-ups are the same for every MMU, because page walkers are the same ([`super::lookup`]). [`super::map`] installs
//! entries in a tree.

use crate::addr::{Access, Gfn, Level, PageIndex, Pfn};
use crate::format::{Entry, Format, Leaf, can_shadow};
use crate::sync::atomic::{AtomicU64, Ordering::*};

/// The result of an install ([`Tree::map`](super::Tree::map)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Installed {
    /// The leaf was installed in an entry that was absent.
    New,
    /// An existing leaf for the same page got the rights of the new leaf in addition. This needs no flush.
    Widened,
    /// An existing leaf for the same page already had all these rights: another vCPU was faster.
    Spurious,
}

/// The reason why nothing was installed. The fault must do what the variant's comment says, and then begin again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// What the fault has found (slot, host page, level, or guest entries) does not hold any more. Most often the
    /// fault's check `valid`, made under the lock of the table, has returned `false`, because of an invalidation, or a
    /// slot's move or deletion. If that still runs, wait for its end. Then look up slot and page again.
    Stale,
    /// The frames or records that were allocated in advance are used up: allocate more.
    Unprepared,
    /// The entry of this level is a leaf for another page, or refers to a table of smaller leaves, or is a larger leaf
    /// that the caller did not want to split: zap the region of this level by a range operation, which also moves dirty
    /// bits to the dirty log.
    Conflict(Level),
    /// This thread has broken a huge leaf of this level on the path (break-before-make): flush, and then call
    /// [`ByGfn::mend`](super::ByGfn::mend), which installs its pieces.
    MustMend(Level),
    /// Another thread has broken a leaf on the path: wait until that thread has replaced it by a valid entry.
    Broken,
    /// The entry of this level was cleared, and its old translation is not flushed yet (break-before-make): flush its
    /// region.
    Unflushed(Level),
    /// Guest tables on the path were write-protected, and this is not flushed yet: flush their frames.
    Unprotected,
    /// The MMU has just begun to notice stores to a guest table on the path, and may have missed earlier ones: read the
    /// guest's tables again.
    Tracked,
    /// An entry would refer to an unsynced shadow page of this level: first compare the shadow page with the guest's
    /// table. What was read from other guest tables remains valid.
    Unsynced(Level),
    /// An entry of this level on the path does not match the guest's tables any more, or is a leaf for another page:
    /// zap it.
    Replaced(Level),
}

/// The root from which a walk starts, and the index that it translates.
#[derive(Clone, Copy)]
pub(crate) struct Key {
    pub(crate) context: Root,
    pub(crate) index: PageIndex,
}

impl Key {
    /// Returns the frame that a second-level walk with this key translates.
    #[inline(always)]
    pub(crate) fn gfn(self) -> Gfn {
        self.index.as_gfn()
    }
}

/// The root at which walks begin.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Root(Leveled);

impl Root {
    /// Returns the root with the table of `level` in `frame`.
    pub(crate) fn new(frame: Pfn, level: Level) -> Self {
        Root(Leveled::new(frame, level))
    }

    /// Returns the frame of the root table.
    #[inline(always)]
    pub(crate) fn frame(self) -> Pfn {
        self.0.frame()
    }

    /// Returns the level of the root table. For a format that cannot shadow tables, it is always the top level, which
    /// the compiler then knows.
    #[inline(always)]
    pub(crate) fn level<F: Format>(self) -> Level {
        if can_shadow::<F>() {
            self.0.level()
        } else {
            F::TOP
        }
    }
}

/// A table's frame and level, packed in one word. A fault copies walks, which contain such words. With a separate field
/// of one byte, the struct would be stored in parts and then loaded as a whole, which makes a CPU wait for all the
/// stores.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Leveled(u64);

impl Leveled {
    const LEVEL_BITS: u32 = 3;

    #[inline(always)]
    pub(super) fn new(frame: Pfn, level: Level) -> Self {
        Leveled(frame.0 << Self::LEVEL_BITS | u64::from(level.0))
    }

    #[inline(always)]
    pub(super) fn frame(self) -> Pfn {
        Pfn(self.0 >> Self::LEVEL_BITS)
    }

    #[inline(always)]
    pub(super) fn level(self) -> Level {
        Level((self.0 & ((1 << Self::LEVEL_BITS) - 1)) as u8)
    }
}

/// The page-table entry at which a walk without locks has ended.
pub(crate) struct Found<'t> {
    pub(super) entry: &'t AtomicU64,
    pub(crate) bits: u64,
    pub(crate) level: Level,
    /// The frame of the table that contains the entry.
    pub(crate) table: Pfn,
    /// The bits that are set in all entries on the path to the table.
    pub(super) above: u64,
}

impl Found<'_> {
    /// Decodes the entry. If an entry on the path to the table is write-protected, returns a leaf without the right to
    /// write. Returns [`Entry::Table`] only for a walk that was to end above level 1 (`level` of
    /// [`Cursor::find`](super::Cursor::find)).
    #[inline]
    pub(crate) fn entry<F: Format>(&self) -> Entry {
        F::decode(self.bits, self.level).below(self.is_protected::<F>())
    }

    /// Like [`Self::entry`], but for an entry of level 1: returns the leaf, or `None` if the entry is absent. The
    /// compiler decodes only the bits that the caller uses.
    #[inline(always)]
    pub(crate) fn page<F: Format>(&self) -> Option<Leaf> {
        debug_assert_eq!(self.level, Level::PAGE, "an entry of a higher level");
        // At level 1 an entry that is not absent is a leaf: it cannot refer to a table, and break-before-make breaks
        // only huge leaves.
        (!F::is_absent(self.bits)).then(|| {
            let leaf = F::decode_leaf(self.bits);
            let write = leaf.write && !self.is_protected::<F>();
            let may_write = leaf.may_write || leaf.write && !write;
            Leaf {
                write,
                may_write,
                ..leaf
            }
        })
    }

    /// Whether the path to the table is write-protected ([`super::protect`]).
    #[inline(always)]
    pub(crate) fn is_protected<F: Format>(&self) -> bool {
        F::is_protected(self.above)
    }

    /// Returns the leaf in the entry if it is *ready* for `access`: the leaf and the path to it allow the access, and
    /// the accessed and dirty bits that the access would set are already set.
    #[inline(always)]
    pub(crate) fn ready<F: Format>(&self, access: Access) -> Option<Leaf> {
        let (set, clear) = F::ready(access);
        let bits = self.bits & (self.above | !F::TABLE_WRITE);
        let ready = bits & (set | clear) == set;
        ready.then(|| F::decode_leaf(bits))
    }

    /// Returns the table that contains the entry, for a paging-structure cache. `None`: the path to the table is
    /// write-protected, which a look-up that begins at the table would not notice.
    #[inline(always)]
    pub(crate) fn to_remember<F: Format>(&self) -> Option<Pfn> {
        (!self.is_protected::<F>()).then_some(self.table)
    }

    /// Sets the accessed bit, and the dirty bit if `write`, like a page walker that uses the leaf: without a lock, and
    /// only if the entry has not changed since it was read. Returns `false` if it has changed: walk again. Uses
    /// `Release`: the caller may hold the lock of its buffer for dirty pages, and a thread that sees the dirty bit must
    /// also see that this lock is held (`vm/drain.rs`).
    #[inline]
    pub(crate) fn mark<F: Format>(&self, write: bool) -> bool {
        let marked = F::mark(self.bits, write);
        marked == self.bits
            || self
                .entry
                .compare_exchange(self.bits, marked, Release, Relaxed)
                .is_ok()
    }
}
