//! Walks to one address, without locks, like a hardware page walker, whichever MMU made the tables.
//!
//! # Which walks may be made
//! A walk reads the table in the frame that its [`Root`] names, and then the tables that it finds there. So beginning
//! a walk is unsafe, with one condition. As long as the [`Cursor`], or an entry that it has found, is used, the caller
//! is in one reader section of the VM, and the root is one of these, with tables of format `F`: the permanent root of
//! one of the VM's trees or MMUs; or the root of a shadow page that was found in this section, or whose MMU has zapped
//! no root since ([`roots_zapped`](crate::shadow::ShadowMmu::roots_zapped)). Then the cursor is safe to use.

use core::marker::PhantomData;

use super::by_index::Leveled;
use super::{Found, Key, Root, Table};
use crate::addr::{Gfn, Level, PageIndex, Pfn};
use crate::format::{Format, root_pages};
use crate::platform::Platform;
use crate::sync::atomic::Ordering::*;

impl<'a, P: Platform, F: Format> Table<'a, P, F> {
    /// Loads the entry on the path to `index` in this table, which has `level`. `above` contains the bits that all
    /// entries above have in common.
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

/// A walk to one address, and the table that it has reached. It can be kept when its reader section ends.
#[derive(Clone, Copy)]
pub(crate) struct Reached {
    pub(crate) key: Key,
    /// The table: for a walk that has not begun, the root's.
    table: Leveled,
    /// The bits that all entries on the walk's path to the table have in common.
    above: u64,
}

impl Reached {
    /// Makes a walk to `key` that has not begun.
    #[inline(always)]
    pub(crate) fn nothing<F: Format>(key: Key) -> Self {
        let Key { context, index } = key;
        let frame = root_table::<F>(context, index.as_gfn());
        Reached {
            key,
            table: Leveled::new(frame, context.level::<F>()),
            above: u64::MAX,
        }
    }

    /// Makes a walk to `key` that has `found` an entry.
    #[inline(always)]
    pub(crate) fn by(key: Key, found: &Found<'_>) -> Self {
        Reached {
            key,
            table: Leveled::new(found.table, found.level),
            above: found.above,
        }
    }

    /// Returns the walk to the address `pages` pages before this one, in the same table of level 1.
    pub(crate) fn before(mut self, pages: u64) -> Self {
        self.key.index = self.key.index.before(pages);
        self
    }
}

/// A walk to one address, in the reader section `'s`. It continues in the table that it has reached, and reads the
/// entry there again. That table may have been detached meanwhile: then the walk behaves like one that had reached the
/// table before ([`crate::table`]).
pub(crate) struct Cursor<'s, P: Platform, F: Format> {
    platform: &'s P,
    reached: Reached,
    format: PhantomData<F>,
}

impl<P: Platform, F: Format> Clone for Cursor<'_, P, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform, F: Format> Copy for Cursor<'_, P, F> {}

impl<'s, P: Platform, F: Format> Cursor<'s, P, F> {
    /// Makes a cursor that continues a walk from where it has `reached`.
    ///
    /// # Safety
    /// - the walk may be made ([`self`]) as long as `'s` lasts;
    /// - if it has begun, that was in the section `'s`, or in the last one of the same reader, and no generation was
    ///   missed between them ([`crate::sync::quiesce`]).
    #[inline(always)]
    pub(crate) unsafe fn new(platform: &'s P, reached: Reached) -> Self {
        Cursor {
            platform,
            reached,
            format: PhantomData,
        }
    }

    #[inline(always)]
    pub(crate) fn key(&self) -> Key {
        self.reached.key
    }

    /// Returns the position at which the walk has ended.
    #[inline(always)]
    pub(crate) fn reached(&self) -> Reached {
        self.reached
    }

    /// Whether an entry on the walk's path was write-protected when the walk passed it.
    #[inline(always)]
    pub(crate) fn is_protected(&self) -> bool {
        F::is_protected(self.reached.above)
    }

    /// Returns the walk to the address `pages` pages after this one, in the same table of level 1.
    pub(crate) fn after(mut self, pages: u64) -> Self {
        self.reached.key.index = self.reached.key.index.add(pages);
        self
    }

    /// Continues in the table of `level` in `frame`, whose path has no write-protected entry.
    pub(super) fn go_on_in(&mut self, frame: Pfn, level: Level) {
        self.reached.table = Leveled::new(frame, level);
        self.reached.above = u64::MAX;
    }

    /// Returns the walk from its root on.
    #[inline(always)]
    pub(crate) fn restarted(mut self) -> Self {
        self.reached = Reached::nothing::<F>(self.reached.key);
        self
    }

    /// Finds the entry of `level` on the path, or the entry above at which the path ends. All accesses except a
    /// [walk](super::ByGfn::walk) over a range and [`lookup_page`] find their entry by this. Takes no lock.
    #[inline]
    pub(crate) fn find(&mut self, level: Level) -> Found<'s> {
        let Reached { key, table, above } = match self.reached {
            reached if reached.table.level() >= level => reached,
            _ => Reached::nothing::<F>(self.reached.key),
        };
        let (mut frame, mut at, mut above) = (table.frame(), table.level(), above);
        loop {
            let found = Table::<P, F>::new(self.platform, frame).find(key.index, at, above);
            match F::next_table(found.bits, at) {
                Some(lower) if at > level => {
                    (frame, at, above) = (lower, at.below(), above & found.bits);
                }
                _ => {
                    self.reached = Reached::by(key, &found);
                    return found;
                }
            }
        }
    }

    /// Returns whether the level 1 table on the path, if there is one, exists because of NX.
    pub(crate) fn is_nx_split(&mut self) -> bool {
        let found = self.find(Level::PAGE);
        let table = || Table::<P, F>::new(self.platform, found.table);
        found.level == Level::PAGE && table().meta().nx_split.load(Relaxed)
    }
}

/// Like [`Cursor::find`] from the root to level 1, but for walks that usually reach level 1. Returns `Ok` if the walk
/// does, and `Err` if it ends above.
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

/// Repeats the last step of an earlier [`lookup_page`], in the level 1 `table` at which that walk ended, and whose
/// path was not write-protected.
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
