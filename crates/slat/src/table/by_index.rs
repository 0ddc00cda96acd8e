//! Tables by index: the interface for vCPUs.
//!
//! A page walker begins at a root and uses a part of the index at each level. The root and the kind of index depend on
//! the MMU: a second-level walker has one root and translates guest frames. The walker of a shadow table has a root for
//! each address space of the guest and translates virtual pages. The other interface, [by gfn](super::by_gfn), is for
//! operations that come from the host, which knows neither roots nor indexes.
//!
//! Look-ups are the same for every MMU, because walkers are ([`super::lookup`]). [`super::map`] installs entries in a
//! tree.

use crate::addr::{Access, Gfn, Level, PageIndex, Pfn};
use crate::format::{Entry, Format, Leaf, can_shadow};
use crate::sync::atomic::{AtomicU64, Ordering::*};

/// The result of an install ([`Tree::map`](super::Tree::map)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Installed {
    /// The leaf is in an entry that was absent.
    New,
    /// The rights of the new leaf were added to an existing leaf for the same page. That needs no flush.
    Widened,
    /// An existing leaf for the same page already has all these rights: another vCPU was faster.
    Spurious,
}

/// The reason why nothing was installed. The fault does what the variant says, and begins again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// `valid` returned `false`: wait for the end of the cause (an invalidation, or a slot's move or deletion), and
    /// look up again.
    Stale,
    /// The frames or records that were allocated in advance are used up. The fault allocates more.
    Unprepared,
    /// The entry, in the region of this level, is a leaf for another page, or refers to a table of smaller leaves; or
    /// there is a larger leaf on the path that the caller did not want to split. A range operation zaps it, which also
    /// moves dirty bits to the log.
    Conflict(Level),
    /// A huge leaf of this level on the path was broken (break-before-make): flush, and then call
    /// [`ByGfn::mend`](super::ByGfn::mend) to install its pieces.
    MustMend(Level),
    /// Another thread has broken a leaf on the path: wait until it has mended it.
    Broken,
    /// The entry, in the region of this level, was cleared and is not flushed yet (break-before-make): flush the
    /// region.
    Unflushed(Level),
    /// A table of the guest on the path was protected and is not flushed yet: flush these tables.
    Unprotected,
    /// From now on the MMU notices stores to the guest's tables on the path. It has not noticed earlier stores: read
    /// the tables again.
    Tracked,
    /// An entry is about to refer to the page of this level for the first time: first compare the page with the guest's
    /// table. Entries read from the other tables remain valid.
    Unsynced(Level),
    /// An entry of this level on the path does not match the guest's tables now, or is a leaf for another page: have it
    /// zapped.
    Replaced(Level),
}

/// The root from which a walk starts, and the index that it translates.
#[derive(Clone, Copy)]
pub(crate) struct Key {
    pub(crate) context: Root,
    pub(crate) index: PageIndex,
}

impl Key {
    /// Returns the frame that a second-level walker translates by this key.
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

    /// Returns the level of the root table. For a format that cannot shadow tables, it is the top level, which the
    /// compiler knows.
    #[inline(always)]
    pub(crate) fn level<F: Format>(self) -> Level {
        if can_shadow::<F>() {
            self.0.level()
        } else {
            F::TOP
        }
    }
}

/// A table: its frame and its level, in one word. A fault copies walks, which contain such words; a struct with a field
/// of one byte would be copied in pieces, which a CPU cannot load before it has stored all of them.
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

/// The entry at which a walk without locks has ended.
pub(crate) struct Found<'t> {
    pub(super) entry: &'t AtomicU64,
    pub(crate) bits: u64,
    pub(crate) level: Level,
    /// The frame of the table that holds the entry.
    pub(crate) table: Pfn,
    /// The bits that all entries on the path to the table have.
    pub(super) above: u64,
}

impl Found<'_> {
    /// Returns the meaning of the entry on its path: a leaf below a write-protected entry is write-protected. Never
    /// returns [`Entry::Table`].
    #[inline]
    pub(crate) fn entry<F: Format>(&self) -> Entry {
        F::decode(self.bits, self.level).below(self.is_protected::<F>())
    }

    /// Like [`Self::entry`], for an entry of level 1: returns the leaf. Decodes only the bits that the caller uses.
    #[inline(always)]
    pub(crate) fn page<F: Format>(&self) -> Option<Leaf> {
        debug_assert_eq!(self.level, Level::PAGE, "an entry of a higher level");
        // An entry of this level that is not absent is a leaf: it cannot refer to a table, and leaves of this level are
        // not broken.
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

    /// Returns the leaf in the entry, if its path allows `access` and the bits that the access would set are set.
    #[inline(always)]
    pub(crate) fn ready<F: Format>(&self, access: Access) -> Option<Leaf> {
        let (set, clear) = F::ready(access);
        let bits = self.bits & (self.above | !F::TABLE_WRITE);
        let ready = bits & (set | clear) == set;
        ready.then(|| F::decode_leaf(bits))
    }

    /// Returns the table that contains the entry, for a paging-structure cache. `None`: the path is write-protected,
    /// which a look-up that begins at the table would not see.
    #[inline(always)]
    pub(crate) fn to_remember<F: Format>(&self) -> Option<Pfn> {
        (!self.is_protected::<F>()).then_some(self.table)
    }

    /// Sets the accessed bit, and the dirty bit if `write`, like a page walker that uses the leaf: without a lock, and
    /// only if the entry is unchanged. Returns `false` if the entry has changed: walk again. Uses `Release`: the CPU
    /// records the dirty bit in a buffer, and a thread that sees the bit also sees that this buffer is locked
    /// (`vm/drain.rs`).
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
