//! Hierarchical write protection: one entry that refers to a table write-protects everything below it.
//!
//! With EPT and NPT the guest may write only if *every* entry on the walker's path allows it ([`Format::TABLE_WRITE`]).
//! So the start of dirty logging need not remove the right to write from each leaf. Instead it removes the right from
//! the highest entries that cover only frames of the memslot and are at most of level [`Format::PROTECT_FROM`]. For 64
//! GiB of EPT these are 64 entries, however small the leaves are. The first write below such an entry faults, and the
//! fault *pushes* the protection down one table at a time: it protects the 512 entries of the table to which the entry
//! refers, and then gives the right to write back to the entry.
//!
//! An entry without the right is *write-protected*. Leaves below it may contain the right to write, but it has no
//! effect, and look-ups return them as write-protected ([`Found::entry`](super::Found::entry),
//! [`At::decode`](super::At)). Dirty logs can ignore these leaves, too: no page below the entry is written before a
//! push, and after the push each leaf is itself protected.
//!
//! # Who changes what
//! * *Protect* removes the right to write from an entry, like all changes under the lock of the table that contains the
//!   entry. The operation has a flush ticket and flushes. Until then a TLB may still allow writes, and a
//!   paging-structure cache may contain the old entry.
//! * *Push* works under the lock of the table **below** the entry: the table to which the entry refers. The holder of
//!   this lock reads the entry again. If the entry is protected, the holder protects the entries of the table below,
//!   and then gives the entry its right back by a compare-exchange. So while one thread holds the lock, no other thread
//!   gives the entry its right, and no leaf in the table below changes. Without the lock, two pushes could overlap, and
//!   a leaf could be made writable between them. The second push would remove the right from this leaf without a flush,
//!   although a TLB may cache it.
//! * *Lift*, when dirty logging has ended, gives the right back like a push, but does not protect the entries below,
//!   which have kept their rights from before the logging.
//! * All other changes that replace the entry (zap, collapse) are made under the lock of the table that contains it. If
//!   such a change comes first, the compare-exchange of a push or a lift fails; if it comes later, it overwrites their
//!   result. The old bits cannot be stored again in between, because the table below, to which they refer, is not freed
//!   before the pushing thread's reader section ends.
//!
//! # Why a push needs no flush, and no write is lost
//! * *A push changes nothing for walkers.* Before the push, the entry forbids writes; after it, each entry of the table
//!   below does. A TLB can have a leaf below as writable only from before the entry was protected, and then the flush
//!   of the protection is still due. An operation that finds leaves already protected, and relies on this, flushes the
//!   frames that other operations' tickets cover ([`super::flushes`]).
//! * *A push that protects entries which refer to tables* removes a right that no walker could use, because the entry
//!   above did not grant it. This needs no flush if walkers cache the combined rights of a path, as Intel documents for
//!   EPT. AMD does not document this: a walker might cache each entry separately, and combine the old, writable entry
//!   with the new, writable entry above it. So with NPT only entries of level 2 are protected, below which there are
//!   only leaves. For a leaf, a TLB always caches the combined rights of the whole path.
//! * *A leaf that is made writable below a protected entry*, by a fault that walked the path before the entry was
//!   protected, is harmless: the entry forbids writes through it, and the next push protects the leaf. A fault that
//!   finds its path protected pushes before it installs.
//! * *A harvest* removes marks from the dirty log, and then protects their pages. If it finds an entry protected, or
//!   protects it, it does so by a read-modify-write of the entry, and a push is also a read-modify-write of the same
//!   word. If the push is first, the harvest finds that the entry has the right, and continues to the leaves, under the
//!   lock of their table, as without hierarchical protection. If the push is later, it *happens after* the harvest has
//!   removed the marks, and so do the fault's install of the leaf and its mark in the log. With a plain load, the fault
//!   could miss that the mark was removed, while the harvest misses that the right was given back.
//! * *To give a right back* needs no flush, like adding a right to a leaf. A CPU that has cached the protected entry
//!   faults once more, needlessly. That fault drops the CPU's cached entries for the address (Intel SDM 3C, "Operations
//!   that Invalidate Cached Mappings", for EPT violations; AMD64 APM 2, "TLB Management", for page faults), so the next
//!   access walks the tables.
//!
//! # What the protection costs later
//! Before the written page is made writable, the fault of the first write to each 2 MiB protects a table of 512 leaves,
//! and that of the first write to each GiB also protects a table of 512 entries. Without hierarchical protection this
//! work would be done for every table when logging starts; with it, only for tables below which the guest writes.
//!
//! Hierarchical protection is for trees of second-level formats with [`Format::TABLE_WRITE`], for logs that work by
//! write protection, and for snapshots. Dirty bits cannot be cleared from above. The MMUs of shadow pages find leaves by their own lists,
//! and protect each leaf.

use core::ops::Range;

use super::walk::Stopped;
use super::{At, Cursor, Table, TableGuard, Tree, Walk};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::atomic::{AtomicU64, Ordering::*, overwrite};

/// The state in which a [push](self) finds an entry.
enum Below<'t> {
    /// The entry is protected, and stays so, unless it is replaced, as long as the lock of the table below is held.
    /// Contains the guard of this lock, and the entry's bits.
    Protected(TableGuard<'t>, u64),
    /// Another thread has given the right to write back to the entry, or replaced it.
    Free,
}

impl At<'_> {
    /// Write-protects everything below the entry, which refers to a table. Returns `false` if the entry was already
    /// write-protected. The caller must flush.
    pub(crate) fn protect_below<F: Format>(&self) -> bool {
        if F::is_protected(self.bits) {
            // A push may give the right back at the same time. Use a read-modify-write even if it changes nothing: see
            // "A harvest" in the module comment.
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
    /// Pushes write protection down from all entries on the path of `cursor` above its table of level `to`, or, if the
    /// path ends earlier, above its last table. Afterwards `cursor` continues in that table.
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

    /// Pushes write protection from `entry`, of `level`, into the table `below`, to which `entry` referred when it was
    /// read.
    fn push(&self, entry: &AtomicU64, below: &Table<'_, P, F>, level: Level) {
        if let Below::Protected(_guard, bits) = lock_below::<P, F>(entry, below, level) {
            for lower in below.entries() {
                protect::<F>(lower, level.below());
            }
            allow_writes::<F>(entry, bits);
        }
    }

    /// Gives the right to write back to entries that refer to tables and cover only frames of the range of `walk`. Does
    /// not change the entries below them. Continues `walk`, and stops when its budget is used up.
    pub(super) fn lift_unlocked(&self, walk: &mut Walk) {
        let range = walk.range();
        self.each_root(walk, |walk, root, gfns| {
            self.lift_in(walk, &range, root, F::TOP, gfns)
        });
    }

    /// Like [`Self::lift_unlocked`], but only for the entries for `gfns` in the table of `level` in frame `frame`, and
    /// in the tables below it. `range` is the range of `walk`.
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

/// Takes the lock of the table `below`, to which `entry`, of `level`, referred when it was read, and reads the entry
/// again.
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

/// Gives the right to write to `entry`, unless it was replaced since `bits` were read.
fn allow_writes<F: Format>(entry: &AtomicU64, bits: u64) {
    // The exchange fails if the entry was replaced. `Release`: a thread that sees the right also sees the entries below
    // protected.
    let _ = entry.compare_exchange(bits, bits | F::TABLE_WRITE, AcqRel, Relaxed);
}

/// Write-protects the leaf `entry`, or the table to which `entry` refers. The entry is in a table of `level` whose lock
/// is held. Loses no bit that a walker sets at the same time.
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
