//! Hierarchical write protection: one entry that refers to a table write-protects all that is below it.
//!
//! A walker of EPT or NPT may write only if *every* entry on its path allows that ([`Format::TABLE_WRITE`]). So a dirty
//! log that begins need not take the right to write from each leaf: it takes it from the highest entries that lie
//! wholly in the memslot, of [`Format::PROTECT_FROM`] at most. For 64 GiB of EPT these are 64 entries, however small
//! the leaves. The first write below such an entry faults, and *pushes* the protection down one table at a time: it
//! protects the 512 entries of the table below, and then gives the entry its right back.
//!
//! An entry without the right is *write-protected*. Below it leaves may say what they like: what they allow counts for
//! nothing, and look-ups return them as write-protected ([`Found::entry`](super::Found::entry),
//! [`At::decode`](super::At)). They are also no log's concern: no page below is written before a push, and after it
//! each leaf is protected by itself.
//!
//! # Who changes what
//! * *Protect.* Under the lock of the table that contains the entry, as all changes are. The operation has a ticket and
//!   flushes: until then a TLB may still allow the writes, and a paging-structure cache may hold the entry as it was.
//! * *Push.* Under the lock of the table **below** the entry. The holder reads the entry again: if it is protected, he
//!   protects what is in the table, and exchanges the entry. So while he holds the lock nobody gives the entry its
//!   right, and no leaf in the table changes: two pushes do not overlap with a leaf that is made writable between them.
//!   The second would take its right from that leaf, which a TLB may hold, without a flush.
//! * *Lift*, when a log has ended: likewise, but what is below keeps its rights, those from before the log.
//! * Everything else that replaces the entry (zap, collapse) stores another one, under the lock of its own table. The
//!   exchange of a push or a lift then fails, or what it has put there is replaced. The same bits do not come back
//!   meanwhile: the table is not freed before the pushing thread's reader section ends.
//!
//! # Why it needs no flush, and nothing is lost
//! * *A push changes nothing for walkers.* Before it, the entry keeps them from writing; after it, each entry of the
//!   table does. A TLB may hold a leaf below as writable only if it has read it before the entry was protected, and
//!   then the flush of that is due: any operation that relies on leaves it finds protected flushes what others' tickets
//!   cover ([`super::flushes`]).
//! * *A push that protects entries which refer to tables* takes a right from them that no walker has used, since the
//!   entry above did not grant it. That needs no flush if walkers cache the rights of a path together, as Intel says of
//!   EPT. AMD says nothing of the kind: a walker might cache each entry by itself, and combine an old one with the new
//!   one above it. So with NPT only entries of level 2 are protected, below which are leaves alone; what a TLB holds of
//!   a leaf are the rights of its whole path.
//! * *A leaf that is made writable below a protected entry* (its fault has found the path before it was protected)
//!   does no harm: the entry keeps it from use, and the next push protects it. A fault that finds its path protected
//!   pushes before it installs.
//! * *A harvest* takes bits of the log, and then protects their pages. It protects an entry again, or passes over one
//!   that is protected, by a read-modify-write of the entry. A push is an exchange of the same word. If it comes first,
//!   the harvest finds the right there, and goes on to the leaves, under the lock of their table, as without all this.
//!   If it comes later, it *happens after* the harvest has taken the bits, and so do the install that follows, and the
//!   mark in the log. A plain load would not do: the fault could miss that the bit was taken, and the harvest that the
//!   right was given back.
//! * *A right that is given back* needs no flush, as when a leaf is widened. A CPU that has cached the protected entry
//!   faults once more, for nothing; the fault drops what the CPU has cached for the address (Intel SDM 3C, "Operations
//!   that Invalidate Cached Mappings", for EPT violations; AMD64 APM 2, "TLB Management", for page faults), so the next
//!   try uses the tables.
//!
//! # What it costs later
//! The first write to each 2 MiB protects a table of 512 leaves (and that to each GiB one of 512 entries), before its
//! page is made writable. That is the work which the log would have done for every table at its beginning; now it is
//! done only for tables that are written to.
//!
//! It is for trees of second-level formats that have [`Format::TABLE_WRITE`], and for logs that work by write
//! protection. Dirty bits cannot be cleared from above. The MMUs of shadow pages find leaves by their own
//! lists, and protect each.

use core::ops::Range;

use super::walk::Stopped;
use super::{At, Cursor, Table, TableGuard, Tree, Walk};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::atomic::{AtomicU64, Ordering::*, overwrite};

/// What a [push](self) has found.
enum Below<'t> {
    /// The entry was protected, and is as long as the lock of the table below, which is held, unless it is replaced.
    Protected(TableGuard<'t>, u64),
    /// Another thread has given the right back, or replaced the entry.
    Free,
}

impl At<'_> {
    /// Write-protects all that is below the entry, which refers to a table. Returns whether it was not
    /// before. The caller flushes.
    pub(crate) fn protect_below<F: Format>(&self) -> bool {
        if F::is_protected(self.bits) {
            // A push may give the right back meanwhile. An exchange, also if nothing changes: see above, on harvests.
            return !F::is_protected(self.entry.fetch_and(!F::TABLE_WRITE, AcqRel));
        }
        overwrite(self.entry, self.bits & !F::TABLE_WRITE, Release);
        true
    }

    /// Returns whether the entry, which refers to a table, is write-protected.
    pub(crate) fn is_protected<F: Format>(&self) -> bool {
        // An exchange, as above.
        F::is_protected(self.bits) && F::is_protected(self.entry.fetch_or(0, AcqRel))
    }
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Pushes write protection down from all entries above the table of level `to` on the path of `cursor`, as far as
    /// there is a path. `cursor` goes on with the table that this has come to.
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

    /// Gives entries that lie wholly in the range of `walk`, and refer to tables, the right to write back, without
    /// protecting what is below them. Continues `walk`, and stops when its budget is used up.
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
    // Fails if it was replaced. `Release`: whoever finds the right finds what is below protected.
    let _ = entry.compare_exchange(bits, bits | F::TABLE_WRITE, AcqRel, Relaxed);
}

/// Write-protects what `entry` of a table of `level`, whose lock is held, refers to. Loses no bit that a walker
/// sets at the same time.
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
