//! Backing memory that changes under the guest: KVM's MMU notifiers.
//!
//! # Protocol
//! A fault takes a [`Sequence`] before it looks at slots or host, and asks whether it still holds
//! under the lock of the table into which it installs ([`crate::table`]). It does not when
//!
//! * an invalidation is in progress over a page behind the leaf (a huge leaf may reach into a range
//!   that its page lies outside of), or
//! * the sequence has been raised since. It is raised by a change of slots or attributes, after the new
//!   set was published and before the zap; and at the begin and at the end of an invalidation whose range
//!   some memslot uses at that moment (at the end: or used at the begin).
//!
//! The end must raise it, too: a fault may have resolved the page before it changed, and install
//! after the end. An invalidation of memory that no slot uses disturbs no fault: a fault on a slot
//! created meanwhile is caught by the range while it is in progress, and at the end the slot is seen.
//! A slot that is being deleted or moved is not in the set any more, but still in the tables: an
//! invalidation waits until that change has raised the sequence and zapped, and then makes sure that
//! its flush is done.
//!
//! Ranges in progress are kept as one hull, as in KVM: exact as long as they do not overlap in time.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};
use core::ops::Range;

use super::{RangeOp, Space, Vm};
use crate::addr::{Gfn, Hva};
use crate::format::Format;
use crate::platform::{Platform, Stale, WaitFor};
use crate::slots::Place;
use crate::sync::{SpinLock, held};
use crate::table::overlap;

/// What a fault knew when it began.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sequence(u64);

/// The sequence and the invalidations in progress.
pub(crate) struct InProgress {
    sequence: AtomicU64,
    count: AtomicUsize,
    /// Slots that are in the set no more, but may still be in the tables.
    leaving: AtomicUsize,
    /// Slots whose dirty bits are being noted before they move.
    moving: AtomicUsize,
    /// Conversions that have published their attributes and not flushed yet.
    converting: AtomicUsize,
    hull: Hull,
}

/// From where to where the ranges in progress reach. It is written under the lock, and read without: faults
/// ask under the lock of a table, under which nobody waits for another lock.
struct Hull {
    start: AtomicU64,
    end: AtomicU64,
    writer: SpinLock<()>,
}

impl Hull {
    const NONE: Range<Hva> = Hva(u64::MAX)..Hva(0);

    fn new() -> Self {
        Hull {
            start: AtomicU64::new(Self::NONE.start.0),
            end: AtomicU64::new(Self::NONE.end.0),
            writer: SpinLock::new(()),
        }
    }

    /// It grows as long as an invalidation is in progress, so both bounds are at least as far out as when the
    /// asker found that one is. Or the hull was closed in between: then that invalidation is over.
    fn overlaps(&self, range: &Range<Hva>) -> bool {
        self.start.load(SeqCst) < range.end.0 && range.start.0 < self.end.load(SeqCst)
    }

    /// Under the lock.
    fn grow(&self, range: &Range<Hva>) {
        let (start, end) = (self.start.load(Relaxed), self.end.load(Relaxed));
        self.start.store(start.min(range.start.0), SeqCst);
        self.end.store(end.max(range.end.0), SeqCst);
    }

    /// Under the lock.
    fn close(&self) {
        self.start.store(Self::NONE.start.0, SeqCst);
        self.end.store(Self::NONE.end.0, SeqCst);
    }
}

impl InProgress {
    pub(crate) fn new() -> Self {
        InProgress {
            sequence: AtomicU64::new(0),
            count: AtomicUsize::new(0),
            leaving: AtomicUsize::new(0),
            moving: AtomicUsize::new(0),
            converting: AtomicUsize::new(0),
            hull: Hull::new(),
        }
    }

    #[inline]
    pub(crate) fn sequence(&self) -> Sequence {
        Sequence(self.sequence.load(Acquire))
    }

    /// Whether what was learnt about the backing `range` since `sequence` was taken still holds.
    #[inline]
    pub(crate) fn holds(&self, sequence: Sequence, range: &Range<Hva>) -> bool {
        // In this order: an invalidation raises the sequence before it ends, so whoever finds that none
        // is in progress sees what the last one did to the sequence.
        !self.covers(range) && self.sequence.load(Acquire) == sequence.0
    }

    /// Whether an invalidation is in progress over part of `range`.
    #[inline]
    pub(crate) fn covers(&self, range: &Range<Hva>) -> bool {
        // Sequentially consistent, as the begin and the publication of slots are: a begin that does not
        // find the slot of this fault is seen here.
        self.count.load(SeqCst) != 0 && self.hull.overlaps(range)
    }

    pub(crate) fn raise(&self) {
        self.sequence.fetch_add(1, SeqCst);
    }

    /// Before a slot is taken out of the published set, or moved. The answer is dropped when nothing
    /// from where it was is in the tables, and its flush is owed.
    pub(crate) fn slot_leaves(&self) -> Counted<'_> {
        Counted::new(&self.leaving)
    }

    /// Call when a conversion has published its attributes, before its locks are released. Drop the guard after its
    /// flush.
    pub(super) fn converts(&self) -> Counted<'_> {
        Counted::new(&self.converting)
    }

    /// Whether CPUs may still use what a published conversion forbids.
    pub(super) fn is_converting(&self) -> bool {
        self.converting.load(SeqCst) != 0
    }

    /// Whether leaves may stand in the tables that the set as it is now does not explain.
    pub(crate) fn is_slot_leaving(&self) -> bool {
        self.leaving.load(SeqCst) != 0
    }

    /// Before the dirty bits of a slot that is to move are noted: until the answer is dropped no fault installs
    /// leaves of a slot that logs by dirty bits. The slot is in the set until it moves, so nobody else waits.
    pub(crate) fn slot_moves(&self) -> Counted<'_> {
        Counted::new(&self.moving)
    }

    /// See [`InProgress::slot_moves`].
    pub(crate) fn is_slot_moving(&self) -> bool {
        self.moving.load(SeqCst) != 0
    }

    /// Waits until no slot is leaving. The wait is for a walk, not for a flush.
    fn wait_for_leaving_slots(&self, mut wait: impl FnMut(u32)) {
        let mut round = 0;
        while self.is_slot_leaving() {
            wait(round);
            round += 1;
        }
    }

    fn begin(&self, range: &Range<Hva>, wait: impl FnMut(u32)) {
        let _writer = self.hull.writer.lock(wait);
        self.hull.grow(range);
        self.count.fetch_add(1, SeqCst);
    }

    fn end(&self, wait: impl FnMut(u32)) {
        let _writer = self.hull.writer.lock(wait);
        if self.count.fetch_sub(1, SeqCst) == 1 {
            self.hull.close();
        }
    }
}

/// One that is counted until it is dropped.
pub(crate) struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, SeqCst);
        Counted(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// An invalidation in progress: between its begin and its drop no vCPU can use, or come to use, a
/// translation to the range, and the backing may be changed.
#[must_use = "the invalidation ends when this is dropped"]
pub struct Invalidation<'a, P: Platform, F: Format> {
    vm: &'a Vm<P, F>,
    range: Range<Hva>,
    /// A memslot used the range at the begin.
    used: bool,
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Begins an invalidation of the backing addresses `range`: when this returns, no CPU holds a
    /// translation to them, and faults on them wait until the answer is dropped.
    ///
    /// The caller is no vCPU inside [`crate::Vcpu::enter`]/[`crate::Vcpu::leave`].
    pub fn invalidate(&self, range: Range<Hva>) -> Invalidation<'_, P, F> {
        self.in_progress.begin(&range, self.lock_wait());
        let mut used = false;
        for space in &self.spaces {
            self.zap_backed_by(space, &range, &mut used);
        }
        self.flush_leaving_slots();
        Invalidation {
            vm: self,
            range,
            used,
        }
    }

    /// Takes every translation of the memslots' pages in `range` away; the next access to each faults,
    /// and finds what is there then. For a client that knows by itself that pages have to be looked at
    /// again, whatever slot and host say (in KVM: `kvm_zap_gfn_range`).
    ///
    /// When this returns no CPU uses one of the old translations. The caller is no vCPU inside
    /// [`crate::Vcpu::enter`]/[`crate::Vcpu::leave`]. Nothing happens if the space does not exist.
    pub fn zap(&self, space: usize, range: Range<Gfn>) {
        let Some(space) = self.spaces.get(space) else {
            return;
        };
        // A fault that asked before this would install one more.
        self.in_progress.raise();
        let mut op = RangeOp::begin(self, space);
        op.zap_slots(&range);
        op.finish();
        self.flush_leaving_slots();
    }

    /// Raises the sequence at the first slot that uses a page of `range`, and zaps what is mapped of it.
    fn zap_backed_by(&self, space: &Space<P, F>, range: &Range<Hva>, used: &mut bool) {
        let mut op = RangeOp::begin(self, space);
        let counters = op.counters();
        let found = || {
            if !core::mem::replace(used, true) {
                self.in_progress.raise();
                counters.invalidations.add(1);
            }
        };
        op.walk_backed_by(range, found, |tree, slot, walk, op| {
            op.zap(tree, slot, walk)
        });
        op.finish();
    }

    /// Makes sure that no CPU uses what belonged to slots that have left the set by now: who goes by the slots
    /// there are does not find it any more.
    pub(super) fn flush_leaving_slots(&self) {
        self.in_progress.wait_for_leaving_slots(self.turn_wait());
        // They are zapped. Who has zapped them may not have flushed yet, and is not waited for: it may be
        // interrupting CPUs, and this be one of them.
        if let Some(gfns) = self.flushes.due_of_leaving() {
            self.flush_zapped_by_others(gfns);
        }
    }

    /// Call after a slot was published at `gfns`. Another slot may have left them, and the operation that zapped
    /// it not have flushed yet: that operation waits for nobody, but the caller may rely on the new slot.
    pub(super) fn flush_slots_that_left(&self, gfns: &Range<Gfn>) {
        let due = self.flushes.due_of_leaving();
        if due.is_some_and(|due| overlap(&due, gfns)) {
            self.flush_zapped_by_others(gfns.clone());
        }
    }

    /// Flushes `gfns`. Others have zapped there, and nothing is known of what.
    fn flush_zapped_by_others(&self, gfns: Range<Gfn>) {
        let mut section = self.section();
        self.flush(gfns, Stale::ANYTHING, section.end());
    }

    /// Whether a slot uses a page of `range` now.
    fn is_used(&self, range: &Range<Hva>) -> bool {
        let section = self.section();
        let mut used = false;
        for space in &self.spaces {
            let slots = space.slots.current(section.inside());
            slots.backed_by(range, Place::FIRST, |_, _, _| {
                used = true;
                false
            });
        }
        used
    }

    /// For a spin lock.
    pub(crate) fn lock_wait(&self) -> impl FnMut(u32) + '_ {
        |round| self.wait(round, WaitFor::Lock)
    }

    /// For a [`crate::sync::FairLock`], or for what its holder does.
    pub(crate) fn turn_wait(&self) -> impl FnMut(u32) + '_ {
        |round| self.wait(round, WaitFor::Turn)
    }

    pub(super) fn reader_wait(&self) -> impl FnMut(u32, usize) + '_ {
        |round, token| self.wait(round, WaitFor::Reader(token))
    }

    pub(crate) fn wait(&self, round: u32, what: WaitFor) {
        held::assert_none("to wait");
        self.platform.wait(round, what);
    }
}

impl<P: Platform, F: Format> Drop for Invalidation<'_, P, F> {
    fn drop(&mut self) {
        let vm = self.vm;
        if self.used || vm.is_used(&self.range) {
            vm.in_progress.raise();
        } else {
            // A slot may have come and be leaving again: then its change raises the sequence.
            vm.in_progress.wait_for_leaving_slots(vm.turn_wait());
        }
        vm.in_progress.end(vm.lock_wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fault asks whether what it knows still holds while an invalidation begins or ends: what it
    /// installs, under a table's lock, is never older than the last change.
    #[test]
    fn what_was_learnt_before_a_change_never_holds_after_it() {
        const ROUNDS: u64 = 200_000;
        const NOTHING: u64 = u64::MAX;
        let wait = |_| std::hint::spin_loop();
        let range = Hva(0)..Hva(1 << 12);
        let in_progress = InProgress::new();
        let host = AtomicU64::new(0);
        let entry = SpinLock::new(NOTHING);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while host.load(SeqCst) < ROUNDS {
                    let sequence = in_progress.sequence();
                    let page = host.load(SeqCst);
                    let mut entry = entry.lock(wait);
                    if in_progress.holds(sequence, &range) {
                        *entry = page;
                    }
                }
            });
            for _ in 0..ROUNDS {
                in_progress.begin(&range, wait);
                in_progress.raise();
                *entry.lock(wait) = NOTHING;
                let page = host.fetch_add(1, SeqCst) + 1;
                in_progress.raise();
                in_progress.end(wait);
                let entry = *entry.lock(wait);
                if entry != NOTHING && entry != page {
                    // The other thread has to end before this one may panic.
                    host.store(ROUNDS, SeqCst);
                    panic!("page {entry} was installed, it is {page} now");
                }
            }
        });
    }
}
