//! Hierarchical write protection: one entry that refers to a table write-protects everything below it.
//!
//! A walker of EPT or NPT may write only if *every* entry on its path allows that ([`Format::TABLE_WRITE`]). So the
//! start of dirty logging need not remove the right to write from each leaf. Instead it removes the right from the
//! highest entries that cover only frames of the memslot, of level [`Format::PROTECT_FROM`] at most. For 64 GiB of EPT
//! these are 64 entries, however small the leaves are. The first write below such an entry faults, and *pushes* the
//! protection down one table at a time: it protects the 512 entries of the table below, and then gives the entry its
//! right back.
//!
//! An entry without the right is *write-protected*. Leaves below it may contain the right to write, but it has no
//! effect, and look-ups return them as write-protected ([`Found::entry`](super::Found::entry),
//! [`At::decode`](super::At)). Logs can ignore them, too: no page below is written before a push, and after the push
//! each leaf is protected by itself.
//!
//! # Who changes what
//! * *Protect.* Changes the entry under the lock of the table that contains it, like all changes. The operation has a
//!   ticket and flushes. Until then a TLB may still allow the writes, and a paging-structure cache may contain the old
//!   entry.
//! * *Push.* Works under the lock of the table **below** the entry. The holder reads the entry again. If the entry is
//!   protected, the holder protects the entries of the table, and then exchanges the entry. So while one thread holds
//!   the lock, no other gives the entry its right, and no leaf in the table changes. Without the lock, two pushes could
//!   overlap, and a leaf could be made writable between them. The second push would remove the right from that leaf,
//!   which a TLB may cache, without a flush.
//! * *Lift*, when dirty logging has ended: works like a push, but the entries below keep their rights from before the
//!   logging.
//! * All other changes that replace the entry (zap, collapse) store another entry, under the lock of its own table.
//!   Then the exchange of a push or a lift fails, or its result is replaced. The same bits cannot be stored again
//!   meanwhile: the table is not freed before the pushing thread's reader section ends.
//!
//! # Why it needs no flush, and nothing is lost
//! * *A push changes nothing for walkers.* Before the push, the entry keeps walkers from writing; after it, each entry
//!   of the table does. A TLB may cache a leaf below as writable only if it has read the leaf before the entry was
//!   protected, and then the flush of that is due. Any operation that relies on leaves that it finds protected flushes
//!   the frames that other operations' tickets cover ([`super::flushes`]).
//! * *A push that protects entries which refer to tables* removes a right from them that no walker has used, because
//!   the entry above did not grant it. That needs no flush if walkers cache the rights of a path together, as Intel
//!   documents for EPT. AMD documents nothing like that: a walker might cache each entry separately, and combine an old
//!   entry with the new entry above it. So with NPT only entries of level 2 are protected, which have only leaves
//!   below. For a leaf, a TLB caches the rights of the whole path.
//! * *A leaf that is made writable below a protected entry* (its fault found the path before it was protected) does no
//!   harm: the entry keeps it from being written, and the next push protects it. A fault that finds its path protected
//!   pushes before it installs.
//! * *A harvest* takes bits of the log, and then protects their pages. It protects an entry again, or skips an entry
//!   that is protected, by a read-modify-write of the entry. A push is an exchange of the same word. If the push comes
//!   first, the harvest finds the right in the entry, and continues to the leaves, under the lock of their table, as
//!   without hierarchical protection. If the push comes later, it *happens after* the harvest has taken the bits. So do
//!   the following install, and the mark in the log. A plain load would not suffice: the fault could miss that the bit
//!   was taken, and the harvest could miss that the right was given back.
//! * *A right that is given back* needs no flush, like a right that is added to a leaf. A CPU that has cached the
//!   protected entry faults once more, in vain. That fault drops the CPU's cached entries for the address (Intel SDM
//!   3C, "Operations that Invalidate Cached Mappings", for EPT violations; AMD64 APM 2, "TLB Management", for page
//!   faults), so the next try uses the tables.
//!
//! # What it costs later
//! The first write to each 2 MiB protects a table of 512 leaves, and the first write to each GiB protects a table of
//! 512 entries, before its page is made writable. Otherwise the log would have done this work for every table at its
//! beginning; now it is done only for tables that are written to.
//!
//! Hierarchical protection is for trees of second-level formats with [`Format::TABLE_WRITE`], and for logs that work by
//! write protection. Dirty bits cannot be cleared from above. The MMUs of shadow pages find leaves by their own lists,
//! and protect each leaf.

use core::ops::Range;

use super::walk::Stopped;
use super::{At, Cursor, Table, TableGuard, Tree, Walk};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::atomic::{AtomicU64, Ordering::*, overwrite};

/// The state that a [push](self) has found.
enum Below<'t> {
    /// The entry was protected. It stays so, unless it is replaced, while the lock of the table below is held.
    Protected(TableGuard<'t>, u64),
    /// Another thread has given the right back, or replaced the entry.
    Free,
}

impl At<'_> {
    /// Write-protects everything below the entry, which refers to a table. Returns whether it was not write-protected
    /// before. The caller flushes.
    pub(crate) fn protect_below<F: Format>(&self) -> bool {
        if F::is_protected(self.bits) {
            // A push may give the right back meanwhile. Use an exchange even if nothing changes: see "A harvest" in the
            // module comment.
            return !F::is_protected(self.entry.fetch_and(!F::TABLE_WRITE, AcqRel));
        }
        overwrite(self.entry, self.bits & !F::TABLE_WRITE, Release);
        true
    }

    /// Returns whether the entry, which refers to a table, is write-protected.
    pub(crate) fn is_protected<F: Format>(&self) -> bool {
        // Use a read-modify-write, not a load: see "A harvest" in the module comment.
        F::is_protected(self.bits) && F::is_protected(self.entry.fetch_or(0, AcqRel))
    }
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Pushes write protection down from all entries above the table of level `to` on the path of `cursor`, as far as
    /// the path reaches. Afterwards `cursor` is at the last table reached.
    #[cold]
    pub(super) fn push_down(&self, cursor: &mut Cursor<'_, P, F>, to: Level) {
        let gfn = cursor.key().gfn();
        let mut table = self.table(super::lookup::root_table::<F>(self.context(), gfn));
        let mut level = F::TOP;
        while level > to {
            let entry = table.entry(F::GRANULE.index(gfn, level));
            let bits = entry.load(Acquire);
            let Some(lower) = F::next_table(bits, level) else {
                break;
            };
            table = self.table(lower);
            if F::is_protected(bits) {
                self.push(entry, &table, level);
            }
            level = level.below();
        }
        cursor.go_on_in(table.frame, level);
    }

    /// Pushes write protection from `entry`, of `level`, into the table `below`, to which it referred.
    fn push(&self, entry: &AtomicU64, below: &Table<'_, P, F>, level: Level) {
        if let Below::Protected(_guard, bits) = lock_below::<P, F>(entry, below, level) {
            for lower in below.entries() {
                protect::<F>(lower, level.below());
            }
            allow_writes::<F>(entry, bits);
        }
    }

    /// Gives the right to write back to entries that refer to tables and cover only frames of `walk`. Does not change
    /// the entries below them. Continues `walk`, and stops when its budget is used up.
    pub(super) fn lift_unlocked(&self, walk: &mut Walk) {
        let range = walk.range();
        self.each_root(walk, |walk, root, gfns| {
            self.lift_in(walk, &range, root, F::TOP, gfns)
        });
    }

    /// Lifts protection of entries for `gfns` in the table of `level` in `frame`, and in the tables below it.
    fn lift_in(
        &self,
        walk: &mut Walk,
        range: &Range<Gfn>,
        frame: Pfn,
        level: Level,
        gfns: Range<Gfn>,
    ) -> Result<(), Stopped> {
        let mut gfn = F::GRANULE.align_down(gfns.start, level);
        while gfn < gfns.end {
            let next = gfn.add(F::GRANULE.pages(level));
            let part = gfns.start.max(gfn)..gfns.end.min(next);
            if walk.is_spent() {
                return Err(Stopped { at: part.start });
            }
            walk.visits();
            let entry = self.table(frame).entry(F::GRANULE.index(gfn, level));
            let bits = entry.load(Acquire);
            if let Some(lower) = F::next_table(bits, level) {
                let is_inside = range.start <= gfn && next <= range.end;
                let below = self.table(lower);
                if is_inside
                    && F::is_protected(bits)
                    && let Below::Protected(_guard, bits) = lock_below::<P, F>(entry, &below, level)
                {
                    allow_writes::<F>(entry, bits);
                }
                if level > Level::MEGA {
                    self.lift_in(walk, range, lower, level.below(), part)?;
                }
            }
            gfn = next;
        }
        Ok(())
    }
}

/// Takes the lock of the table `below`, to which `entry`, of `level`, referred, and reads the entry again.
fn lock_below<'t, P: Platform, F: Format>(
    entry: &AtomicU64,
    below: &Table<'t, P, F>,
    level: Level,
) -> Below<'t> {
    let guard = below.lock();
    let bits = entry.load(Acquire);
    match F::is_protected(bits) && F::next_table(bits, level) == Some(below.frame) {
        true => Below::Protected(guard, bits),
        false => Below::Free,
    }
}

/// Gives `entry`, which has `bits` unless it was replaced, the right to write.
fn allow_writes<F: Format>(entry: &AtomicU64, bits: u64) {
    // Fails if the entry was replaced. `Release`: a thread that finds the right also finds the entries below protected.
    let _ = entry.compare_exchange(bits, bits | F::TABLE_WRITE, AcqRel, Relaxed);
}

/// Write-protects the page or table to which `entry` refers, in a table of `level` whose lock is held. Loses no bit
/// that a walker sets at the same time.
#[inline]
fn protect<F: Format>(entry: &AtomicU64, level: Level) {
    let bits = entry.load(Relaxed);
    if F::is_absent(bits) {
        return;
    }
    if F::next_table(bits, level).is_some() {
        entry.fetch_and(!F::TABLE_WRITE, AcqRel);
    } else if F::is_writable(bits) {
        match F::is_settled(bits) {
            true => overwrite(entry, F::write_protect(bits), Relaxed),
            false => {
                let _ = entry.fetch_update(Relaxed, Relaxed, |bits| Some(F::write_protect(bits)));
            }
        }
    }
}
