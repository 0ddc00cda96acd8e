//! Walks of one address, without locks: as a page walker in hardware walks, whichever MMU made the tables.
//!
//! # Which walks may be made
//! A walk reads the table in whatever frame its [`Root`] names, and then those that it finds there. So all of these functions
//! are unsafe, with one condition: the caller is in a reader section of the VM, and the root is that of one of its trees or
//! MMUs, with tables of format `F`, which stays; or it is that of a shadow page that was found in this section, or whose MMU
//! has zapped no root since
//! ([`roots_zapped`](crate::shadow::ShadowMmu::roots_zapped)). A [`Cursor`] has, in addition, only been
//! in sections of which it says it may be used there.

use super::{Found, Key, Root, Table};
use crate::addr::{Gfn, Level, PageIndex, Pfn};
use crate::format::{Format, root_pages};
use crate::platform::Platform;
use crate::sync::atomic::Ordering::*;

impl<'a, P: Platform, F: Format> Table<'a, P, F> {
    /// Loads the entry on the path to `index` of this table, which has `level`. All entries above it have the bits `above`.
    #[inline(always)]
    fn find(&self, index: PageIndex, level: Level, above: u64) -> Found<'a> {
        let entry = self.entry(F::GRANULE.index(index.as_gfn(), level));
        Found {
            entry,
            bits: entry.load(Acquire),
            level,
            table: self.frame,
            above,
        }
    }
}

/// Returns the root table that translates `index`, one of [`all_gfns`](crate::format::all_gfns).
#[inline]
pub(super) fn root_table<F: Format>(root: Root, index: Gfn) -> Pfn {
    if F::ROOT_TABLES == 1 {
        root.frame()
    } else {
        root.frame().add(index.0 / root_pages::<F>())
    }
}

/// A walk to one address that goes on where it has ended: in the table that it has reached, whose entry it reads again.
///
/// It may be used as long as what it has read may be: in one reader section, or in the next one if no generation was missed
/// between them ([`crate::sync::quiesce`]). After that it has to [start again](Self::restart). The table may have been detached
/// meanwhile; then the walk is one that had reached it before ([`crate::table`]).
#[derive(Clone, Copy)]
pub(crate) struct Cursor {
    pub(crate) key: Key,
    /// Where it has ended: frame and level of a table. `None`: it has not begun.
    at: Option<(Pfn, Level)>,
    /// The bits that all entries have by which it has come there.
    above: u64,
}

impl Cursor {
    /// Makes a walk to `key` that has not begun.
    #[inline(always)]
    pub(crate) fn new(key: Key) -> Self {
        Cursor {
            key,
            at: None,
            above: u64::MAX,
        }
    }

    /// Whether an entry by which it has come where it is was write-protected then.
    #[inline(always)]
    pub(crate) fn is_protected<F: Format>(&self) -> bool {
        F::is_protected(self.above)
    }

    /// Returns the walk to the address `pages` pages after this one, in the same table of level 1.
    pub(crate) fn after(mut self, pages: u64) -> Self {
        self.key.index = self.key.index.add(pages);
        self
    }

    /// Returns the walk to the address `pages` pages before this one, in the same table of level 1.
    pub(crate) fn before(mut self, pages: u64) -> Self {
        self.key.index = self.key.index.before(pages);
        self
    }

    /// Has the walk begin with the root.
    pub(crate) fn restart(&mut self) {
        (self.at, self.above) = (None, u64::MAX);
    }

    /// Finds the entry of `level` on the path, or the one above it at which the path ends. All accesses that
    /// are not a [walk](super::ByGfn::walk) over a range or [`lookup_page`] find their entry by this. Takes no lock.
    ///
    /// # Safety
    /// - the walk may be made ([`self`]), as long as the result is used.
    #[inline]
    pub(crate) unsafe fn find<'p, P: Platform, F: Format>(
        &mut self,
        platform: &'p P,
        level: Level,
    ) -> Found<'p> {
        let Key { context, index } = self.key;
        let root = || {
            let root = root_table::<F>(context, index.as_gfn());
            (root, context.level::<F>(), u64::MAX)
        };
        let reached = self.at.filter(|(_, at)| *at >= level);
        let reached = reached.map(|(frame, at)| (frame, at, self.above));
        let (mut frame, mut at, mut above) = reached.unwrap_or_else(root);
        loop {
            let found = Table::<P, F>::new(platform, frame).find(index, at, above);
            match F::next_table(found.bits, at) {
                Some(lower) if at > level => {
                    (frame, at, above) = (lower, at.below(), above & found.bits);
                }
                _ => {
                    (self.at, self.above) = (Some((frame, at)), above);
                    return found;
                }
            }
        }
    }
}

/// Finds the entry of `level` on the path to `key`, or the one above it at which the path ends.
///
/// # Safety
/// - the walk may be made ([`self`]), as long as the result is used.
#[inline]
pub(crate) unsafe fn descend<P: Platform, F: Format>(
    platform: &P,
    key: Key,
    level: Level,
) -> Found<'_> {
    // SAFETY: the caller's promise.
    unsafe { Cursor::new(key).find::<P, F>(platform, level) }
}

/// Returns whether the level 1 table for `key`, if there is one, exists because of NX.
///
/// # Safety
/// - the walk may be made ([`self`]).
pub(crate) unsafe fn is_nx_split<P: Platform, F: Format>(platform: &P, key: Key) -> bool {
    // SAFETY: the caller's promise.
    let found = unsafe { descend::<P, F>(platform, key, Level::PAGE) };
    let is_nx_split = || {
        Table::<P, F>::new(platform, found.table)
            .meta()
            .nx_split
            .load(Relaxed)
    };
    found.level == Level::PAGE && is_nx_split()
}

/// Like [`descend`] to level 1, but for walks that usually reach it: `Ok` if it does, `Err` if
/// it ends above.
///
/// # Safety
/// - the walk may be made ([`self`]), as long as the result is used, and its root is of the top level.
#[inline(always)]
pub(crate) unsafe fn lookup_page<P: Platform, F: Format>(
    platform: &P,
    key: Key,
) -> Result<Found<'_>, Found<'_>> {
    let find =
        |frame, level, above| Table::<P, F>::new(platform, frame).find(key.index, level, above);
    let (mut frame, mut above) = (root_table::<F>(key.context, key.gfn()), u64::MAX);
    // The number of steps is a constant, so that the compiler unrolls them.
    for step in 0..F::TOP.0 - 1 {
        let level = Level(F::TOP.0 - step);
        let found = find(frame, level, above);
        match F::next_table(found.bits, level) {
            Some(lower) => (frame, above) = (lower, above & found.bits),
            None => return Err(found),
        }
    }
    Ok(find(frame, Level::PAGE, above))
}

/// Repeats the last step of an earlier [`lookup_page`], in the level 1 `table` at which it ended, by a path that was not
/// write-protected.
///
/// # Safety
/// - on `platform`, `lookup_page` has found an entry of `table` for a page that it translates, too, and the
///   caller has been in one reader section since, without a quiescent point, and stays in it as long as the
///   result is used.
#[inline(always)]
pub(crate) unsafe fn lookup_in<P: Platform, F: Format>(
    platform: &P,
    table: Pfn,
    index: PageIndex,
) -> Found<'_> {
    Table::<P, F>::new(platform, table).find(index, Level::PAGE, u64::MAX)
}
