//! Walks of one address, without locks: as a page walker in hardware walks, whichever MMU made the tables.

use super::{Found, Key, Root, Table};
use crate::addr::{Gfn, Level, PageIndex, Pfn};
use crate::format::Format;
use crate::frame::ENTRIES;
use crate::platform::Platform;
use crate::sync::atomic::Ordering::*;

impl<'a, P: Platform> Table<'a, P> {
    /// Loads the entry on the path to `index` of this table, which has `level`.
    #[inline(always)]
    fn find(&self, index: PageIndex, level: Level) -> Found<'a> {
        let entry = self.entry(index.at(level));
        Found {
            entry,
            bits: entry.load(Acquire),
            level,
            table: self.frame,
        }
    }
}

/// Returns the root table that translates `index`, one of [`all_gfns`](crate::format::all_gfns).
#[inline]
pub(super) fn root_table<F: Format>(root: Root, index: Gfn) -> Pfn {
    if F::ROOT_TABLES == 1 {
        root.frame()
    } else {
        let pages = F::TOP.pages() * ENTRIES as u64;
        root.frame().add(index.0 / pages)
    }
}

/// Finds the entry of `level` on the path to `key`, or the one above it at which the path ends. All accesses that
/// are not a [walk](super::ByGfn::walk) over a range or [`lookup_page`] find their entry by this.
#[inline]
pub(super) fn descend<P: Platform, F: Format>(platform: &P, key: Key, level: Level) -> Found<'_> {
    let Key { context, index } = key;
    let table = |frame| Table { platform, frame };
    let root = root_table::<F>(context, key.gfn());
    let mut found = table(root).find(index, context.level::<F>());
    while found.level > level
        && let Some(lower) = F::next_table(found.bits, found.level)
    {
        found = table(lower).find(index, found.level.below());
    }
    found
}

/// Like [`ByIndex::lookup`](super::ByIndex::lookup), but for walks that usually end at level 1: `Ok` if it does, `Err` if
/// it ends above. Needs only the platform, so that a caller that walks often does not load the MMU.
///
/// # Safety
/// - `key` belongs to an MMU on `platform` with tables of format `F`, and its root is of the top level; the caller is in a reader section as long as
///   the result is used.
#[inline(always)]
pub(crate) unsafe fn lookup_page<P: Platform, F: Format>(
    platform: &P,
    key: Key,
) -> Result<Found<'_>, Found<'_>> {
    let find = |frame, level| Table { platform, frame }.find(key.index, level);
    let mut frame = root_table::<F>(key.context, key.gfn());
    // The number of steps is a constant, so that the compiler unrolls them.
    for step in 0..F::TOP.0 - 1 {
        let level = Level(F::TOP.0 - step);
        let found = find(frame, level);
        match F::next_table(found.bits, level) {
            Some(lower) => frame = lower,
            None => return Err(found),
        }
    }
    Ok(find(frame, Level::PAGE))
}

/// Repeats the last step of an earlier [`lookup_page`], in the level 1 `table` at which it ended.
///
/// # Safety
/// - on `platform`, `lookup_page` has found an entry of `table` for a page of the same 2 MiB, and the
///   caller has been in one reader section since, without a quiescent point, and stays in it as long as the
///   result is used.
#[inline(always)]
pub(crate) unsafe fn lookup_in<P: Platform>(
    platform: &P,
    table: Pfn,
    index: PageIndex,
) -> Found<'_> {
    let frame = table;
    Table { platform, frame }.find(index, Level::PAGE)
}
