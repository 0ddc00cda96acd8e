//! Tables by index: the interface for vCPUs.
//!
//! A page walker begins at a root and uses a part of the index at each level. Which root, and what the index is,
//! depends on the MMU: a second-level walker has one root and translates guest frames; the walker of a shadow
//! table has a root for each address space of the guest and translates virtual pages. The other interface, [by
//! gfn](super::by_gfn), is for work that comes from the host, which knows neither.

use super::lookup::descend;
use super::{Path, Table};
use crate::addr::{Access, Gfn, Level, PageIndex, Pfn};
use crate::format::{Entry, Format, Leaf};
use crate::platform::Platform;
use crate::sync::atomic::{AtomicU64, Ordering::*};
use crate::trail::Trail;

/// An MMU, as vCPUs use it. The caller of every method is in a reader section. Look-ups are the same for every MMU,
/// because walkers are ([`lookup_page`](super::lookup_page)).
pub(crate) trait ByIndex<P: Platform, F: Format> {
    fn platform(&self) -> &P;

    /// Finds the entry at which a page walker would end. Takes no lock.
    #[inline]
    fn lookup(&self, key: Key) -> Found<'_> {
        descend::<P, F>(self.platform(), key, Level::PAGE)
    }

    /// Returns whether the level 1 table for `key`, if there is one, exists because of NX.
    fn is_nx_split(&self, key: Key) -> bool {
        let (found, platform) = (self.lookup(key), self.platform());
        let frame = found.table;
        let is_nx_split = || Table { platform, frame }.meta().nx_split.load(Relaxed);
        found.level == Level::PAGE && is_nx_split()
    }

    /// Installs `leaf` for the region of `level` around `target`. Adds missing tables; splits a larger leaf on the path in
    /// place, so that its other pages stay mapped throughout. Calls `valid` under the lock of the table that
    /// receives the leaf, immediately before the install, and `done` under that lock, immediately after it.
    fn map(
        &self,
        target: Target<'_>,
        level: Level,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
        done: impl FnOnce(),
    ) -> Mapped;

    /// Installs `leaf`, and leaves for the frames after it, in those of the `pages` level 1 entries from `target` on that
    /// are absent; all are in one table. Calls `valid` like [`Self::map`]. Returns how many leaves it installed;
    /// `None` if `valid` returned `false`, a larger leaf is on the path, or there is no memory for tables.
    fn map_absent(
        &self,
        target: Target<'_>,
        pages: u64,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
    ) -> Option<u64>;

    /// Installs an MMIO entry of `generation` for `target`, if the entry is empty, or an MMIO entry of any generation:
    /// [`Mapped::New`]. [`Mapped::Stale`]: it did not; that matters to nobody. Or what a shadow MMU asks for.
    fn map_mmio(&self, target: Target<'_>, generation: u64, path: &mut Path<'_>) -> Mapped;

    /// Returns the largest level, up to `level`, at which the MMU can map `gfn`.
    fn mappable_level(&self, gfn: Gfn, level: Level) -> Level {
        let _ = gfn;
        level
    }
}

/// What [`ByIndex::map`] did.
#[must_use]
pub(crate) enum Mapped {
    /// The leaf was installed in an absent entry.
    New,
    /// The rights of the new leaf were added to an existing leaf for the same page. That needs no flush.
    Widened,
    /// An existing leaf for the same page has all these rights: another vCPU was faster.
    Spurious,
    /// The entry conflicts: it is a leaf for another page, or a table of smaller leaves. A range operation zaps it,
    /// which also moves dirty bits to the log; then the fault begins again.
    Conflict,
    /// A huge leaf of this level on the path was broken (break-before-make). The caller flushes,
    /// [`ByGfn::mend`](super::ByGfn::mend) installs its pieces, and the fault begins again.
    MustMend(Level),
    /// Another thread has broken a leaf on the path and not mended it yet.
    Broken,
    /// The entry, in the region of this level, was cleared and not flushed yet (break-before-make). The fault begins again after
    /// a flush of the region.
    Unflushed(Level),
    /// A table of the guest's on the path was protected and not flushed yet. The fault begins again after a flush of these
    /// tables.
    Unprotected,
    /// No leaf was installed: `valid` returned `false`; or other threads zapped the tables that the call added so
    /// often that the frames allocated ahead were used up.
    Stale,
    /// No leaf was installed: what the MMU has allocated ahead is used up. The fault allocates more and begins again.
    Unprepared,
    /// No leaf was installed: from now on the MMU notices stores to the guest's tables on the path, but it has not noticed
    /// earlier ones. The fault reads them again.
    Tracked,
    /// No leaf was installed: an entry is to refer to the page of this level for the first time, and the page has to be
    /// compared with the guest's table before. Then the same fault goes on.
    Unsynced(Level),
    /// An entry of this level on the path is not what the guest's tables say now, or a leaf for another page. The fault has
    /// it zapped, and begins again.
    Replaced(Level),
}

/// What a walk starts from, and what it translates.
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

/// Where a leaf is to be installed.
#[derive(Clone, Copy)]
pub(crate) struct Target<'t> {
    pub(crate) key: Key,
    /// What the guest's tables say, if the walker of a shadow table translates the key.
    pub(crate) trail: Option<&'t Trail>,
}

impl<'t> Target<'t> {
    /// Returns what the guest's tables say. For a format that shadows none that is nothing, and the compiler knows it.
    #[inline(always)]
    pub(crate) fn trail<F: Format>(self) -> Option<&'t Trail> {
        if F::SHADOWS { self.trail } else { None }
    }

    /// Returns the frame that a leaf of level 1 there is to map.
    #[inline(always)]
    pub(crate) fn gfn<F: Format>(self) -> Gfn {
        self.trail::<F>().map_or(self.key.gfn(), |trail| trail.gfn)
    }
}

impl From<Key> for Target<'_> {
    fn from(key: Key) -> Self {
        Target { key, trail: None }
    }
}

/// Where walks begin.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Root {
    frame: Pfn,
    level: Level,
}

impl Root {
    /// Returns the root with the table of `level` in `frame`.
    pub(crate) fn new(frame: Pfn, level: Level) -> Self {
        Root { frame, level }
    }

    /// Returns the frame of the root table.
    #[inline(always)]
    pub(crate) fn frame(self) -> Pfn {
        self.frame
    }

    /// Returns the level of the root table. For a format that shadows no tables that is the top, and the compiler knows it.
    #[inline(always)]
    pub(crate) fn level<F: Format>(self) -> Level {
        if F::SHADOWS { self.level } else { F::TOP }
    }
}

/// The entry at which a walk without locks has ended.
pub(crate) struct Found<'t> {
    pub(super) entry: &'t AtomicU64,
    pub(crate) bits: u64,
    pub(crate) level: Level,
    /// The frame of the table that holds the entry.
    pub(crate) table: Pfn,
}

impl Found<'_> {
    /// Returns what the entry means; never [`Entry::Table`].
    #[inline]
    pub(crate) fn entry<F: Format>(&self) -> Entry {
        F::decode(self.bits, self.level)
    }

    /// Returns the leaf in the entry, if it allows `access` and has the bits set that the access sets.
    #[inline(always)]
    pub(crate) fn ready<F: Format>(&self, access: Access) -> Option<Leaf> {
        let (set, clear) = F::ready(access);
        let ready = self.bits & (set | clear) == set;
        ready.then(|| F::decode_leaf(self.bits))
    }

    /// Sets accessed, and dirty if `write`, as a page walker does when it uses the leaf: without a lock, and only if
    /// the entry is unchanged. Returns `false` if it has changed: walk again.
    #[inline]
    pub(crate) fn mark<F: Format>(&self, write: bool) -> bool {
        let marked = F::mark(self.bits, write);
        marked == self.bits
            || self
                .entry
                .compare_exchange(self.bits, marked, Relaxed, Relaxed)
                .is_ok()
    }
}
