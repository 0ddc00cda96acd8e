//! Aging: reads and clears accessed bits without a lock, like KVM since Linux 6.15. So a host that searches for unused
//! memory does not delay faults.
//!
//! # Why no lock is needed
//! Aging changes only the accessed bit of a leaf, by a compare-exchange of the entry. If the entry has changed since it
//! was read, the exchange fails and nothing changes.
//!
//! * *Tables.* The caller is in a reader section, and reaches tables like any walker. If a table is detached meanwhile,
//!   it is not freed before the section ends, and clearing a bit in its leaves has no effect.
//! * *Entries.* Aging changes only leaves, including broken ones (leaves that break-before-make has made invalid). If
//!   an entry was zapped, split or collapsed since it was read, it has other bits, so the exchange fails. So aging
//!   never changes an entry that refers to a table, or a cleared entry, which names its flush. If the same bits were
//!   stored again in between, they mean the same leaf.
//! * *The holder of the table's lock* may have read the entry before the accessed bit was cleared, and may then store a
//!   value computed from the old bits ([`At::update`](super::At), [`At::put`](super::At)). Then the bit is set again,
//!   and the page looks used. No dirty bit is lost: the holder uses a plain store only if dirty bits are not used, or
//!   if the leaf is settled ([`Format::is_settled`]): already dirty, or not writable, so that a walker can only add the
//!   accessed bit. Otherwise the holder uses a compare-exchange, which fails, and reads the entry again, as when a
//!   walker sets a bit.
//! * *Hardware page walkers* set bits by atomic operations. If a walker sets a bit in the leaf after aging has read the
//!   entry, the exchange fails, and the next attempt keeps the dirty bit.
//! * *Another thread that ages* may try to exchange the same bits. Only one of the two threads succeeds, and counts the
//!   leaf as used.
//!
//! The MMUs of shadow pages find leaves by their lists, which change under their lock, so they age under this lock
//! ([`ByGfn::age`](super::ByGfn)).

use core::ops::Range;
use core::slice;

use super::walk::Stopped;
use super::{Aged, Table, Tree, Walk};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::atomic::{AtomicU64, Ordering::*};

/// The state of one step of a walk that ages.
struct Aging<'w, P: Platform, F: Format, S> {
    tree: &'w Tree<P, F>,
    walk: &'w mut Walk,
    clear: bool,
    seen: &'w mut S,
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Implements [`ByGfn::age`](super::ByGfn::age), without a lock.
    pub(super) fn age_unlocked(&self, walk: &mut Walk, clear: bool, seen: &mut impl FnMut(Aged)) {
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

impl<P: Platform, F: Format, S: FnMut(Aged)> Aging<'_, P, F, S> {
    /// Ages the leaves for `range` in the table of `level` in frame `frame`, and in the tables below it.
    fn table(&mut self, frame: Pfn, level: Level, range: Range<Gfn>) -> Result<(), Stopped> {
        let table = self.tree.table(frame);
        if level == Level::PAGE {
            return self.pages(&table, range);
        }
        let mut gfn = F::GRANULE.align_down(range.start, level);
        while gfn < range.end {
            let next = gfn.add(F::GRANULE.pages(level));
            let below = range.start.max(gfn)..range.end.min(next);
            if self.walk.is_spent() {
                return Err(Stopped { at: below.start });
            }
            self.walk.visits();
            let entry = table.entry(F::GRANULE.index(gfn, level));
            // `Acquire`: if the entry refers to a new table, this thread also sees the entries of that table.
            match F::next_table(entry.load(Acquire), level) {
                Some(lower) => self.table(lower, level.below(), below)?,
                None => self.entries(slice::from_ref(entry), gfn, level),
            }
            gfn = next;
        }
        Ok(())
    }

    /// Ages the leaves for `range` in a table of level 1.
    fn pages(&mut self, table: &Table<'_, P, F>, range: Range<Gfn>) -> Result<(), Stopped> {
        let wanted = range.end.0 - range.start.0;
        let allowed = self.walk.count_up_to(wanted as u32);
        let first = F::GRANULE.index(range.start, Level::PAGE);
        let entries = &table.entries()[first..first + allowed as usize];
        let mut gfn = range.start;
        for some in entries.chunks(Aged::MOST) {
            self.entries(some, gfn, Level::PAGE);
            gfn = gfn.add(some.len() as u64);
        }
        match gfn == range.end {
            true => Ok(()),
            false => Err(Stopped { at: gfn }),
        }
    }

    /// Ages the leaves among the adjacent entries `entries` of `level`. The first entry is for `gfn`.
    #[inline(always)]
    fn entries(&mut self, entries: &[AtomicU64], gfn: Gfn, level: Level) {
        let (mut mapped, mut young) = (0, 0);
        if entries.len() == Aged::MOST && are_idle::<F>(entries, level) {
            mapped = u64::MAX;
        } else {
            for (n, entry) in entries.iter().enumerate() {
                let (is_leaf, is_young) = leaf::<F>(entry, level);
                mapped |= u64::from(is_leaf) << n;
                young |= u64::from(is_young) << n;
            }
        }
        if self.clear {
            let mut left = young;
            while left != 0 {
                let n = left.trailing_zeros();
                left &= left - 1;
                if !clear::<F>(&entries[n as usize], level) {
                    young &= !(1 << n);
                }
            }
        }
        if mapped != 0 {
            (self.seen)(Aged {
                gfn,
                level,
                mapped,
                young,
            });
        }
    }
}

/// Whether all `entries`, which are of `level`, are leaves that were not used: the most common case.
#[inline(always)]
fn are_idle<F: Format>(entries: &[AtomicU64], level: Level) -> bool {
    entries.iter().fold(true, |all, entry| {
        let (is_leaf, is_young) = leaf::<F>(entry, level);
        all & is_leaf & !is_young
    })
}

/// Returns whether `entry` is a leaf of `level`, and whether that leaf was used. The function has no branch, because
/// branch prediction cannot know which pages the guest uses.
#[inline(always)]
fn leaf<F: Format>(entry: &AtomicU64, level: Level) -> (bool, bool) {
    let bits = entry.load(Relaxed);
    let is_leaf = !F::is_absent(bits) & !is_table::<F>(bits, level);
    (is_leaf, is_leaf & (F::clear_accessed(bits) != bits))
}

/// Whether the entry of a table of `level` refers to a table.
#[inline(always)]
fn is_table<F: Format>(bits: u64, level: Level) -> bool {
    level > Level::PAGE && F::next_table(bits, level).is_some()
}

/// Clears the accessed bit of the leaf of `level` in `entry`, if it is set. Returns whether the bit was set.
fn clear<F: Format>(entry: &AtomicU64, level: Level) -> bool {
    let mut bits = entry.load(Relaxed);
    loop {
        let aged = F::clear_accessed(bits);
        if F::is_absent(bits) || aged == bits || is_table::<F>(bits, level) {
            return false;
        }
        match entry.compare_exchange(bits, aged, Relaxed, Relaxed) {
            Ok(_) => return true,
            Err(now) => bits = now,
        }
    }
}
