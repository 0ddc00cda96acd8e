//! Invalidations of backing memory: KVM's MMU notifiers (`mmu_invalidate_seq`, `mmu_invalidate_in_progress`).
//!
//! # Protocol
//! A fault reads the [`Sequence`] before it looks up slot, attributes and host page. Under the lock of the table into
//! which it installs ([`crate::table`]) it checks whether the results of these look-ups are still current
//! ([`InProgress::holds`]). They are not current in two cases:
//! * An invalidation of a page that backs the leaf is in progress. (The leaf may be huge, and the invalidated page
//!   another one than the faulting page.)
//! * The sequence has been raised since the fault read it. It is raised by a slot change that deletes or moves a slot
//!   or changes its flags, and by a conversion, after publishing the new set and before zapping; by a zap that a client
//!   requests ([`Vm::zap`]); by the beginning of an invalidation, if a memslot uses its range; and by the end of an
//!   invalidation, if a memslot uses its range then or has used it at the beginning.
//!
//! Creating a slot need not raise the sequence: a fault that has found no slot installs no leaf. The end of an
//! invalidation must raise it: otherwise a fault that resolved the page before the backing changed could install the
//! page after the end.
//!
//! An invalidation of memory that no slot uses delays no fault. If a slot that uses the memory is created during the
//! invalidation, faults on this slot find that the invalidation is in progress, and the end of the invalidation finds
//! the slot and raises the sequence.
//!
//! A *leaving* slot is a slot that a change deletes or moves: the published set does not contain it any more, or
//! contains it at other frames, but its old leaves are still in the tables. An invalidation cannot find these leaves
//! through the set. So it waits until the change has raised the sequence and zapped the leaves, and then makes sure
//! that the leaves are flushed from TLBs.
//!
//! The ranges of the invalidations in progress are stored as one hull: a range that contains all of them, as in KVM.
//! The hull is exact as long as no two invalidations are in progress at the same time.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};
use core::ops::Range;

use super::{RangeOp, Space, Vm};
use crate::addr::{Gfn, Hva};
use crate::format::Format;
use crate::platform::{Platform, Stale, WaitFor};
use crate::slots::Place;
use crate::sync::{SpinLock, held, wait_while};
use crate::table::overlap;
use crate::trace::Event;

/// The value of the invalidation sequence (KVM: `mmu_invalidate_seq`) when a fault began its look-ups.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sequence(u64);

impl Sequence {
    /// The bit that says that there is a snapshot ([`super::snapshot`]).
    const SNAPSHOT: u64 = 1;

    #[inline(always)]
    pub(super) fn is_of_snapshot(self) -> bool {
        self.0 & Self::SNAPSHOT != 0
    }
}

/// The invalidation sequence of a VM, and its invalidations in progress.
pub(crate) struct InProgress {
    sequence: AtomicU64,
    /// The number of invalidations in progress, by [`Generation`].
    count: AtomicUsize,
    /// The number of slots that are being deleted or moved and whose old leaves may not be zapped yet.
    leaving: AtomicUsize,
    /// The number of slots that are being moved. A slot is counted from before its leaves' dirty bits are recorded in
    /// its log.
    moving: AtomicUsize,
    /// The number of conversions that have published their attributes and have not flushed yet.
    converting: AtomicUsize,
    /// A range that contains the ranges of all invalidations in progress.
    hull: Hull,
}

/// A range that contains the ranges of all invalidations in progress. It is written under its lock. Faults read it
/// without this lock, because they hold the lock of a table and must not take another lock.
struct Hull {
    start: AtomicU64,
    end: AtomicU64,
    writer: SpinLock<Generation>,
}

impl Hull {
    const NONE: Range<Hva> = Hva(u64::MAX)..Hva(0);

    fn new() -> Self {
        Hull {
            start: AtomicU64::new(Self::NONE.start.0),
            end: AtomicU64::new(Self::NONE.end.0),
            writer: SpinLock::new(Generation::Even),
        }
    }

    /// Returns whether `range` overlaps the hull. Call after finding that an invalidation is in progress.
    ///
    /// The two bounds are not read at once. But while any invalidation is in progress the hull only grows, so both
    /// bounds contain at least the range of the invalidation that the caller has found. If the hull was made empty in
    /// between, that invalidation has ended.
    fn overlaps(&self, range: &Range<Hva>) -> bool {
        self.start.load(SeqCst) < range.end.0 && range.start.0 < self.end.load(SeqCst)
    }

    /// Extends the hull by `range`. The caller holds the lock.
    fn grow(&self, range: &Range<Hva>) {
        let (start, end) = (self.start.load(Relaxed), self.end.load(Relaxed));
        self.start.store(start.min(range.start.0), SeqCst);
        self.end.store(end.max(range.end.0), SeqCst);
    }

    /// Makes the hull empty. The caller holds the lock.
    fn close(&self) {
        self.start.store(Self::NONE.start.0, SeqCst);
        self.end.store(Self::NONE.end.0, SeqCst);
    }
}

/// The invalidations that began before a snapshot, or those that began after it. Each generation is counted in one half
/// of [`InProgress::count`].
#[derive(Clone, Copy)]
pub(super) enum Generation {
    Even,
    Odd,
}

impl Generation {
    const HALF: u32 = usize::BITS / 2;

    fn other(self) -> Self {
        match self {
            Generation::Even => Generation::Odd,
            Generation::Odd => Generation::Even,
        }
    }

    /// Returns the count of one invalidation.
    fn one(self) -> usize {
        match self {
            Generation::Even => 1,
            Generation::Odd => 1 << Self::HALF,
        }
    }

    /// Returns the bits that count the generation.
    fn mask(self) -> usize {
        ((1 << Self::HALF) - 1) * self.one()
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

    /// Returns the invalidation sequence. A fault calls this before its look-ups.
    #[inline]
    pub(crate) fn sequence(&self) -> Sequence {
        Sequence(self.sequence.load(Acquire))
    }

    /// Returns whether a fault may install a leaf backed by `range`: it may if the slot, attributes and host pages that
    /// the fault looked up after reading `sequence` are still current. Call under the lock of the table that receives
    /// the leaf.
    #[inline]
    pub(crate) fn holds(&self, sequence: Sequence, range: &Range<Hva>) -> bool {
        // Check `covers` first: an invalidation of memory that a slot uses raises the sequence before it ends. So if
        // `covers` finds that the invalidation has ended, the load of the sequence sees the raised value.
        !self.covers(range) && self.sequence.load(Acquire) == sequence.0
    }

    /// Returns whether an invalidation of a part of `range` may be in progress.
    #[inline]
    pub(crate) fn covers(&self, range: &Range<Hva>) -> bool {
        // Sequentially consistent, like the beginning of an invalidation and the publication of slots: if an
        // invalidation did not find the slot of this fault at its beginning, the fault sees the invalidation here.
        self.count.load(SeqCst) != 0 && self.hull.overlaps(range)
    }

    /// Raises the invalidation sequence, so that a fault that read the old value installs no leaf.
    pub(crate) fn raise(&self) {
        self.sequence.fetch_add(2 * Sequence::SNAPSHOT, SeqCst);
    }

    /// Raises the invalidation sequence like [`Self::raise`]. If it does not say that there is a snapshot, makes it say
    /// so; otherwise, makes it not say so any more.
    pub(super) fn turn_snapshot(&self) {
        self.sequence.fetch_add(Sequence::SNAPSHOT, SeqCst);
    }

    /// Call before deleting or moving a slot. Drop the guard when the leaves of the old range are zapped and a flush
    /// ticket for the range exists ([`Flushes`](crate::table::Flushes)).
    pub(crate) fn slot_leaves(&self) -> Counted<'_> {
        Counted::new(&self.leaving)
    }

    /// Call when a conversion has published its attributes, before it releases its locks. Drop the guard after the
    /// conversion's flush.
    pub(super) fn converts(&self) -> Counted<'_> {
        Counted::new(&self.converting)
    }

    /// Returns whether CPUs may still use translations that a published conversion forbids.
    pub(super) fn is_converting(&self) -> bool {
        self.converting.load(SeqCst) != 0
    }

    /// Returns whether the tables may contain leaves of a slot that is being deleted or moved, and so is not in the
    /// published set, or not at these frames.
    pub(crate) fn is_slot_leaving(&self) -> bool {
        self.leaving.load(SeqCst) != 0
    }

    /// Call before recording the dirty bits of the leaves of a slot that will move. Until the guard is dropped, no
    /// fault installs leaves of a slot whose log uses dirty bits. Other faults need not wait, because the slot stays in
    /// the published set until it moves.
    pub(crate) fn slot_moves(&self) -> Counted<'_> {
        Counted::new(&self.moving)
    }

    /// Returns whether a slot is being moved ([`InProgress::slot_moves`]).
    pub(crate) fn is_slot_moving(&self) -> bool {
        self.moving.load(SeqCst) != 0
    }

    /// Waits until the old leaves of all slots that are being deleted or moved are zapped. Does not wait until they are
    /// flushed.
    fn wait_for_leaving_slots(&self, wait: impl FnMut(u32)) {
        wait_while(|| self.is_slot_leaving(), wait);
    }

    /// Begins an invalidation of `range`. Returns its generation.
    fn begin(&self, range: &Range<Hva>, wait: impl FnMut(u32)) -> Generation {
        let generation = self.hull.writer.lock(wait);
        self.hull.grow(range);
        self.count.fetch_add(generation.one(), SeqCst);
        *generation
    }

    /// Ends an invalidation of `generation`.
    fn end(&self, generation: Generation, wait: impl FnMut(u32)) {
        let _writer = self.hull.writer.lock(wait);
        if self.count.fetch_sub(generation.one(), SeqCst) == generation.one() {
            self.hull.close();
        }
    }

    /// Makes all invalidations that begin from now on another generation than those that have begun, which must have
    /// ended before the next call. Returns the generation of the latter, for [`Self::wait_for`].
    pub(super) fn next_generation(&self, wait: impl FnMut(u32)) -> Generation {
        let mut generation = self.hull.writer.lock(wait);
        let other = generation.other();
        core::mem::replace(&mut *generation, other)
    }

    /// Waits until all invalidations of `generation` have ended.
    pub(super) fn wait_for(&self, generation: Generation, wait: impl FnMut(u32)) {
        wait_while(|| self.count.load(SeqCst) & generation.mask() != 0, wait);
    }
}

/// A guard that adds one to a counter of an [`InProgress`] until it is dropped.
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

/// An invalidation in progress. Until it is dropped, no vCPU uses a translation to its backing range, and no fault
/// installs one. So the client may change what backs the range.
#[must_use = "the invalidation ends when this is dropped"]
pub struct Invalidation<'a, P: Platform, F: Format> {
    vm: &'a Vm<P, F>,
    range: Range<Hva>,
    generation: Generation,
    /// Whether a memslot used the range at the begin.
    used: bool,
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Begins an invalidation of the backing addresses `range`. When this returns, no CPU uses a translation to these
    /// addresses, and faults on them wait until the returned guard is dropped.
    ///
    /// Do not call this while the calling thread's vCPU is between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
    /// # use slat::{Config, Ept, Vm};
    /// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
    /// let invalidation = vm.invalidate(backing..backing.add_pages(16));
    /// // Nothing of the guest uses these pages: replace them.
    /// drop(invalidation);
    /// # Ok::<(), slat::CreateVmError>(())
    /// ```
    pub fn invalidate(&self, range: Range<Hva>) -> Invalidation<'_, P, F> {
        self.begin_invalidation(range, |_, _| ())
    }

    /// Begins an invalidation like [`Self::invalidate`], but first splits the huge leaves that also map pages outside
    /// `range`, in place, so that these pages stay mapped. (If there is no memory for the tables, the leaf is zapped
    /// whole.) For a host that will map the pages of `range` separately from now on, for example because one of many
    /// pages that VMs share is copied. If the host keeps its huge mapping, use [`Self::invalidate`]: after that, the
    /// next fault installs the huge leaf again, but a split leaf stays split until [`Self::promote`].
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # use slat::{Access, Config, Ept, Gfn, Gpa, Level, Region, Vm};
    /// # let (platform, backing) = (SimPlatform::at_level(512, Level::MEGA), HostMemory::hva(0));
    /// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
    /// # vm.set_memory_region(0, &Region::new(0, Gpa(0), 0x20_0000, backing))?;
    /// vm.create_vcpu()?.hardware_fault(Gpa(0x3000), Access::Write)?;
    /// assert_eq!(vm.stats().pages_2m, 1);
    ///
    /// drop(vm.invalidate_exact(backing.add_pages(3)..backing.add_pages(4)));
    /// assert_eq!((vm.stats().pages_4k, vm.lookup(0, Gfn(3))), (511, None));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn invalidate_exact(&self, range: Range<Hva>) -> Invalidation<'_, P, F> {
        self.begin_invalidation(range, |space, range| self.split_at_edges(space, range))
    }

    /// Begins an invalidation. Calls `prepare` for each address space before it zaps the leaves there.
    fn begin_invalidation(
        &self,
        range: Range<Hva>,
        prepare: impl Fn(&Space<P, F>, &Range<Hva>),
    ) -> Invalidation<'_, P, F> {
        self.platform.trace(Event::UnmapHvaRange(range.clone()));
        let generation = self.in_progress.begin(&range, self.lock_wait());
        let mut used = false;
        for space in &self.spaces {
            prepare(space, &range);
            self.zap_backed_by(space, &range, &mut used);
        }
        self.flush_leaving_slots();
        // The host may change the pages now.
        self.keep_old_pages(range.clone());
        Invalidation {
            vm: self,
            range,
            generation,
            used,
        }
    }

    /// Begins an invalidation of all backing addresses that zaps nothing. Until the returned guard is dropped, no fault
    /// installs a leaf: faults wait. Pages that faults have looked up before are not installed later, either.
    pub(super) fn suspend_faults(&self) -> Invalidation<'_, P, F> {
        let range = Hva(0)..Hva(u64::MAX);
        let generation = self.in_progress.begin(&range, self.lock_wait());
        self.in_progress.raise();
        Invalidation {
            vm: self,
            range,
            generation,
            used: true,
        }
    }

    /// Zaps all leaves of memslots in the guest frames `range` of address space `space`: the next access to each page
    /// faults and looks the page up anew (KVM's `kvm_zap_gfn_range`). For changes by the client that are neither slot
    /// changes nor invalidations. When this returns, no CPU uses an old translation.
    ///
    /// Does nothing if the address space does not exist. Do not call this while the calling thread's vCPU is between
    /// [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    pub fn zap(&self, space: usize, range: Range<Gfn>) {
        let Some(space) = self.spaces.get(space) else {
            return;
        };
        // A fault that has already looked up the page must not install it after the zap.
        self.in_progress.raise();
        let mut op = RangeOp::begin(self, space);
        op.zap_slots(&range);
        op.finish();
        self.flush_leaving_slots();
    }

    /// Zaps all leaves of `space` that `range` backs. If it finds a slot that uses `range`, and `used` is not set yet,
    /// it first raises the sequence and sets `used`.
    fn zap_backed_by(&self, space: &Space<P, F>, range: &Range<Hva>, used: &mut bool) {
        let mut op = RangeOp::begin(self, space);
        let counters = op.counters();
        let found = || {
            if !core::mem::replace(used, true) {
                self.in_progress.raise();
                counters.invalidations.add(1);
            }
        };
        op.walk_backed_by(range, found, |step, slot, _, walk| step.zap(slot, walk));
        op.finish();
    }

    /// Makes sure that no CPU uses a translation of a slot that was deleted or moved before this call. Call after a
    /// walk over the slots of the published set, which misses the leaves of deleted and moved slots.
    pub(super) fn flush_leaving_slots(&self) {
        self.in_progress.wait_for_leaving_slots(self.turn_wait());
        // The leaves are zapped, but the thread that zapped them may not have flushed yet. This thread flushes them
        // itself instead of waiting for that thread, which may have to interrupt the CPU on which this thread runs.
        if let Some(gfns) = self.flushes.due_of_leaving_slots() {
            self.flush_zapped_by_others(gfns);
        }
    }

    /// Call after publishing a slot at `gfns`. Flushes `gfns` if a slot with such frames was deleted or moved before,
    /// and the thread that zapped its leaves has not flushed yet. Otherwise CPUs could still use the old translations
    /// when the call that created the new slot returns.
    pub(super) fn flush_slots_that_left(&self, gfns: &Range<Gfn>) {
        let due = self.flushes.due_of_leaving_slots();
        if due.is_some_and(|due| overlap(&due, gfns)) {
            self.flush_zapped_by_others(gfns.clone());
        }
    }

    /// Flushes `gfns`, of which other threads have zapped leaves and tables of any level.
    fn flush_zapped_by_others(&self, gfns: Range<Gfn>) {
        let ended = self.section().end();
        self.flush(gfns, Stale::ANYTHING, ended.counters());
    }

    /// Returns whether a memslot uses a page of `range` now.
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

    /// Returns a function that waits a short time for a spin lock; call it in each round of waiting.
    pub(crate) fn lock_wait(&self) -> impl FnMut(u32) + '_ {
        |round| self.wait(round, WaitFor::Lock)
    }

    /// Returns a function that waits a short time for a [`crate::sync::FairLock`], or for an operation of its holder;
    /// call it in each round of waiting.
    pub(crate) fn turn_wait(&self) -> impl FnMut(u32) + '_ {
        |round| self.wait(round, WaitFor::Turn)
    }

    /// Returns a function that waits a short time for the reader with the given token; call it in each round of
    /// waiting.
    pub(super) fn reader_wait(&self) -> impl FnMut(u32, usize) + '_ {
        |round, token| self.wait(round, WaitFor::Reader(token))
    }

    /// Waits a short time by [`Platform::wait`]. The caller holds no spin lock.
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
            // A slot that uses the range may have been created during the invalidation, and may be leaving again now.
            // Then the change that deletes or moves it raises the sequence: wait for this.
            vm.in_progress.wait_for_leaving_slots(vm.turn_wait());
        }
        vm.in_progress.end(self.generation, vm.lock_wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One thread installs pages like a fault, with the check under a lock. Another thread begins and ends
    /// invalidations, and checks after each that the entry is empty or contains the new page.
    #[test]
    fn a_look_up_from_before_a_change_never_holds_after_it() {
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
                let generation = in_progress.begin(&range, wait);
                in_progress.raise();
                *entry.lock(wait) = NOTHING;
                let page = host.fetch_add(1, SeqCst) + 1;
                in_progress.raise();
                in_progress.end(generation, wait);
                let entry = *entry.lock(wait);
                if entry != NOTHING && entry != page {
                    // Make the other thread end before this one panics, because the scope waits for that thread.
                    host.store(ROUNDS, SeqCst);
                    panic!("page {entry} was installed, it is {page} now");
                }
            }
        });
    }
}
