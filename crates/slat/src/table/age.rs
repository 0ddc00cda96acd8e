//! Aging: accessed bits are read and cleared without a lock, as in KVM since Linux 6.15, so that a host which looks for
//! unused memory delays no fault.
//!
//! # Why no lock is needed
//! Nothing but the accessed bit of a leaf changes, and that by a compare-exchange of the entry: what the walk has read is still
//! there, or nothing happens.
//!
//! * *Tables.* The caller is in a reader section, and reaches tables as any walker does. A table that was removed meanwhile is
//!   not freed before the section ends; what is cleared in its leaves matters to nobody.
//! * *Entries.* Only leaves, broken ones included, are changed. An entry that was zapped, split or collapsed since it was read
//!   has other bits, so the exchange fails: an entry that refers to a table keeps all its bits, and a cleared one the flush that
//!   it names. If the same bits came back in between, they mean the same leaf.
//! * *The holder of the table's lock* may have read the entry before the bit was cleared, and store what it made of that
//!   ([`At::update`](super::At), [`At::put`](super::At)). Then the bit is set again: the page looks used once more. It loses no dirty
//!   bit by that. It stores plainly only if the leaf is settled ([`Format::is_settled`]), or does not need dirty bits: and a
//!   settled leaf is dirty already, or not writable, so all that a walker can add to it now is the accessed bit. Otherwise it
//!   exchanges what it has read, fails, and reads again, as it does when a walker sets a bit.
//! * *Walkers in hardware* set bits by atomic operations. If one marks the leaf between the load and the exchange, the
//!   exchange fails, and the next one keeps the dirty bit.
//! * *Another thread that ages* exchanges the same bits. One of the two succeeds, and counts the leaf.
//!
//! The MMU of shadow pages finds leaves by its lists, which change under its lock, so it ages under that
//! ([`ByGfn::age`](super::ByGfn)).

use core::ops::Range;

use super::walk::Stopped;
use super::{Table, Tree, Walk};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::atomic::{AtomicU64, Ordering::*};

/// One step of a walk that ages.
struct Aging<'w, P: Platform, F: Format, S> {
    tree: &'w Tree<P, F>,
    walk: &'w mut Walk,
    clear: bool,
    seen: &'w mut S,
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Does [`ByGfn::age`](super::ByGfn::age), without a lock.
    pub(super) fn age_unlocked(
        &self,
        walk: &mut Walk,
        clear: bool,
        seen: &mut impl FnMut(Gfn, Level, bool),
    ) {
        self.each_root(walk, |walk, root, gfns| {
            let mut aging = Aging {
                tree: self,
                walk,
                clear,
                seen: &mut *seen,
            };
            aging.table(root, F::TOP, gfns)
        });
    }
}

impl<P: Platform, F: Format, S: FnMut(Gfn, Level, bool)> Aging<'_, P, F, S> {
    /// Ages the leaves for `range` in the table of `level` in `frame`, and in the tables below it.
    fn table(&mut self, frame: Pfn, level: Level, range: Range<Gfn>) -> Result<(), Stopped> {
        let table = self.tree.table(frame);
        if level == Level::PAGE {
            return self.pages(&table, range);
        }
        let mut gfn = range.start.align_down(level);
        while gfn < range.end {
            let next = gfn.add(level.pages());
            let below = range.start.max(gfn)..range.end.min(next);
            if self.walk.is_spent() {
                return Err(Stopped { at: below.start });
            }
            self.walk.visits();
            if let Some(lower) = self.entry(table.entry(level.index(gfn)), gfn, level) {
                self.table(lower, level.below(), below)?;
            }
            gfn = next;
        }
        Ok(())
    }

    /// Ages the leaves for `range` in a table of level 1.
    fn pages(&mut self, table: &Table<'_, P>, range: Range<Gfn>) -> Result<(), Stopped> {
        let wanted = range.end.0 - range.start.0;
        let allowed = self.walk.count_up_to(wanted as u32);
        let first = Level::PAGE.index(range.start);
        let entries = &table.entries()[first..first + allowed as usize];
        for (entry, gfn) in entries.iter().zip(range.start.0..) {
            self.entry(entry, Gfn(gfn), Level::PAGE);
        }
        let at = range.start.add(allowed.into());
        match at == range.end {
            true => Ok(()),
            false => Err(Stopped { at }),
        }
    }

    /// Ages the leaf in `entry`, for `gfn`, if it is one. Returns the table that it refers to, if it does.
    #[inline(always)]
    fn entry(&mut self, entry: &AtomicU64, gfn: Gfn, level: Level) -> Option<Pfn> {
        // `Acquire`: the entries of a new table are visible, too.
        let mut bits = entry.load(Acquire);
        loop {
            if let Some(lower) = F::next_table(bits, level) {
                return Some(lower);
            }
            if F::is_absent(bits) {
                return None;
            }
            let aged = F::clear_accessed(bits);
            let young = aged != bits;
            if young
                && self.clear
                && let Err(now) = entry.compare_exchange(bits, aged, Relaxed, Acquire)
            {
                bits = now;
                continue;
            }
            (self.seen)(gfn, level, young);
            return None;
        }
    }
}
