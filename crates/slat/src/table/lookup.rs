//! Walks to one address, without locks, like a hardware page walker. They are the same for the tables of every MMU.
//!
//! # Which walks may be made
//! A walk dereferences the frame that its [`Root`] names, and then the frames in the entries that it finds. So to begin
//! a walk is unsafe. As long as the [`Cursor`], or an entry that it has found, is used, two conditions must hold. The
//! caller is in one reader section of the VM. And the root, with tables of format `F`, is either the permanent root of
//! one of the VM's MMUs, or a shadow page that was found as a root in this section, or earlier if the MMU has zapped no
//! root since ([`roots_zapped`](crate::shadow::ShadowMmu::roots_zapped)).

use core::marker::PhantomData;

use super::by_index::Leveled;
use super::{Found, Key, Root, Table};
use crate::addr::{Gfn, Level, PageIndex, Pfn};
use crate::format::{Format, root_pages};
use crate::platform::Platform;
use crate::sync::atomic::Ordering::*;

impl<'a, P: Platform, F: Format> Table<'a, P, F> {
    /// Loads the entry on the path to `index` in this table, which has `level`. `above` contains the bits that are set
    /// in all entries on the path to the table.
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

/// A walk to one address, and the table that it has reached, without a borrow: so it can be stored while the reader
/// section ends.
#[derive(Clone, Copy)]
pub(crate) struct Reached {
    pub(crate) key: Key,
    /// The table that the walk has reached. If the walk has not begun, this is the root table.
    table: Leveled,
    /// The bits that are set in all entries on the walk's path to the table.
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

    /// Makes a walk to `key` that has ended at the entry `found`.
    #[inline(always)]
    pub(crate) fn by(key: Key, found: &Found<'_>) -> Self {
        Reached {
            key,
            table: Leveled::new(found.table, found.level),
            above: found.above,
        }
    }

    /// Changes the walk to the address `pages` pages before, which the same level 1 table must translate.
    pub(crate) fn before(mut self, pages: u64) -> Self {
        self.key.index = self.key.index.before(pages);
        self
    }
}

/// A walk to one address, in the reader section `'s`. It continues in the table that it has reached, and reads the
/// entry in this table again. If the table was detached meanwhile, the walk is like any walk that has reached a table
/// before its detachment ([`crate::table`]).
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
    /// Makes a cursor that continues the walk `reached`.
    ///
    /// # Safety
    /// - The conditions of the [module comment](self) hold as long as `'s` lasts.
    /// - If the walk has begun, it was in the section `'s`, or in the previous section of the same reader, and the
    ///   generation was not raised between these sections ([`crate::sync::quiesce`]).
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

    /// Whether an entry on the path was write-protected when the walk passed it.
    #[inline(always)]
    pub(crate) fn is_protected(&self) -> bool {
        F::is_protected(self.reached.above)
    }

    /// Changes the walk to the address `pages` pages after, which the same level 1 table must translate.
    pub(crate) fn after(mut self, pages: u64) -> Self {
        self.reached.key.index = self.reached.key.index.add(pages);
        self
    }

    /// Makes the walk continue in the table of `level` in frame `frame`. The path to this table has no write-protected
    /// entry.
    pub(super) fn go_on_in(&mut self, frame: Pfn, level: Level) {
        self.reached.table = Leveled::new(frame, level);
        self.reached.above = u64::MAX;
    }

    /// Returns a cursor that repeats the walk from its root.
    #[inline(always)]
    pub(crate) fn restarted(mut self) -> Self {
        self.reached = Reached::nothing::<F>(self.reached.key);
        self
    }

    /// Finds the entry of `level` on the path to the address, or the entry of a higher level at which the path ends.
    /// Takes no lock. All accesses find their entry by this function, except [walks](super::ByGfn::walk) over a range
    /// and [`lookup_page`].
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

    /// Returns whether the level 1 table on the path, if there is one, exists only because of the policy
    /// `nx_huge_pages`.
    pub(crate) fn is_nx_split(&mut self) -> bool {
        let found = self.find(Level::PAGE);
        let table = || Table::<P, F>::new(self.platform, found.table);
        found.level == Level::PAGE && table().meta().nx_split.load(Relaxed)
    }
}

/// Like [`Cursor::find`] from the root to level 1, but faster for walks that reach level 1. Returns `Ok` with an entry
/// of level 1, or `Err` with the entry of a higher level at which the walk ends.
///
/// # Safety
/// - The conditions of the [module comment](self) hold as long as the result is used, and the root is of the top level.
#[inline(always)]
pub(crate) unsafe fn lookup_page<P: Platform, F: Format>(
    platform: &P,
    key: Key,
) -> Result<Found<'_>, Found<'_>> {
    let find =
        |frame, level, above| Table::<P, F>::new(platform, frame).find(key.index, level, above);
    let (mut frame, mut above) = (root_table::<F>(key.context, key.gfn()), u64::MAX);
    // The number of iterations is a constant, so that the compiler can unroll the loop.
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

/// Finds the entry for `index` in the level 1 table `table`, in which an earlier [`lookup_page`] has ended, and to
/// which the path was not write-protected. So it repeats only the last step of that walk.
///
/// # Safety
/// - On `platform`, `lookup_page` has found an entry in `table`, which also translates `index`. Since then the caller
///   has been in one reader section and passed no quiescent point, and stays in this section as long as the result is
///   used.
#[inline(always)]
pub(crate) unsafe fn lookup_in<P: Platform, F: Format>(
    platform: &P,
    table: Pfn,
    index: PageIndex,
) -> Found<'_> {
    Table::<P, F>::new(platform, table).find(index, Level::PAGE, u64::MAX)
}
