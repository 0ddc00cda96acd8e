//! Snapshots of a running VM: the memory as of one moment, while the guest goes on writing. Before the first write to
//! each page, the platform gets the page with its old content ([`Platform::keep`]). A thread of the client's gives the
//! platform all other pages meanwhile ([`Snapshot::keep_next`]).
//!
//! # The invariant
//! **A page that the platform was not given is writable nowhere**: in no table, and in no TLB. Its content is that of
//! the moment. [`OldPages`] knows which pages were given. It knows them by backing address, so the invariant includes
//! all frames of all address spaces that have the page, also those of memslots that are created later.
//!
//! # The moment
//! [`Vm::begin_snapshot`] goes the way of [`Vm::fork_from`] ([`super::fork`]):
//!
//! 1. The slot writers' locks of all address spaces are taken, and conversions waited for. The memory of the snapshot
//!    is the memory of the slots that are there now, as shared or private as it is.
//! 2. An invalidation of all backing addresses begins, which zaps nothing: no fault installs a leaf or adds a right.
//! 3. Everything is write-protected: with the policy `hierarchical_protect`, from above ([`crate::table`], *protect*),
//!    which takes one entry for each GiB of EPT; else leaf by leaf. Then the flush. All readers are waited for even if
//!    nothing had to be flushed: a vCPU may be writing to a page that was not mapped writable, with a translation that
//!    is *tracked* (its client emulates the write).
//! 4. The moment: no CPU can write to any page. The record of the pages is published, and after it the sequence is
//!    raised and gets the bit that says that there is a snapshot. The invalidation of step 2 ends.
//!
//! # Who makes a page writable
//! *Faults*, and no others. A fault reads the sequence before it looks up anything, and so knows of the snapshot by a
//! load that it makes anyway. If the access is a write, the fault gives the page before it installs the leaf, and
//! chooses a level at which every page of the leaf was given. If not, the leaf does not allow writes. The sequence is
//! compared under the lock of the table, so no leaf gets in that was chosen before the moment, or for another snapshot.
//! (A leaf that was installed below an entry that was then protected from above is not writable; the next push
//! protects it.) Prefetch and prefault make leaves for reads.
//!
//! *Splits*, *mends* and pushes of protection give no page a right that it does not have. *Promotion*, and the end of
//! dirty logging, install leaves with the right to write ([`super::recover`]); they do nothing while there is a
//! snapshot. They read the sequence as faults do. *The end of dirty logging lifts protection* from above; while there
//! is a snapshot it does not. Both hold the slot writers' lock, so the bit does not change meanwhile.
//!
//! A *dirty bit* is set in writable leaves only. Protection preserves these bits, so logs that consist of them lose
//! nothing.
//!
//! # Pages that go away
//! *An invalidation* zaps the leaves of its range. Before it returns, and the host changes the pages, it gives the
//! pages that are left, and waits for those that other threads are giving. An invalidation that began before step 4 may
//! have missed the snapshot, and its host may be changing the pages. So `begin_snapshot` does not return before these
//! invalidations have ended, and a fault on their pages waits, too, before it gives a page. Their pages are in the
//! snapshot with the content that they have when the invalidation ends. (If another invalidation of the same pages, or
//! the deletion of their slot, begins before that, it gives them as they are then.)
//!
//! *A memslot that is deleted, or gets other memory*: the host may reclaim the memory when the change has returned.
//! Before that, the change gives the pages that belong to no part that stays ([`super::departure`]).
//!
//! # The end
//! [`Snapshot::keep_next`] returns 0 when the platform has all pages. When the snapshot is dropped, the pages that are
//! left are taken without being given, and threads that are giving a page are waited for. So `keep` is not called after
//! that. The sequence loses the bit. Protection from above is lifted where no log needs it. Leaves that are
//! write-protected become writable at the next write fault, as after dirty logging.
//!
//! # What it costs
//! Without a snapshot: a test of one bit in a write fault, and in an invalidation. Nothing, where
//! [`Platform::KEEPS_OLD_PAGES`] is false. With one: the first write to each page faults; a huge leaf is split by the
//! first write to a part that was not given. Two bits for each page.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use super::slot_op::SlotOp;
use super::{RangeOp, Sequence, Space, Vm};
use crate::addr::{Gfn, Hva};
use crate::format::{Format, all_gfns};
use crate::heap::{OutOfMemory, Shared};
use crate::old_pages::OldPages;
use crate::platform::Platform;
use crate::slots::{Memslot, PrivateFrames, SlotsChange};
use crate::sync::atomic::{AtomicBool, Ordering::*};
use crate::sync::{SpinLock, wait_while};
use crate::table::Walk;

/// The reason why no snapshot was begun. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The platform keeps no old pages ([`Platform::KEEPS_OLD_PAGES`]).
    Unsupported,
    /// The VM's last snapshot was not dropped yet.
    InProgress,
    /// No memory for the record of the pages. The call can be repeated.
    OutOfMemory,
}

impl From<OutOfMemory> for SnapshotError {
    fn from(_: OutOfMemory) -> Self {
        SnapshotError::OutOfMemory
    }
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SnapshotError::Unsupported => {
                "beginning a snapshot: the platform keeps no old pages; implement Platform::keep"
            }
            SnapshotError::InProgress => {
                "beginning a snapshot: there is one already; drop that first"
            }
            SnapshotError::OutOfMemory => "beginning a snapshot: no memory",
        })
    }
}

impl core::error::Error for SnapshotError {}

/// A VM's memory as it was when [`Vm::begin_snapshot`] returned this. Dropping it ends the snapshot.
///
/// The methods wait for slot changes, flushes and calls of [`Platform::keep`]. Neither call them nor drop this for a
/// vCPU between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
#[must_use = "the snapshot ends when this is dropped"]
pub struct Snapshot<P: Platform, F: Format> {
    vm: Arc<Vm<P, F>>,
    pages: Shared<OldPages>,
}

/// A VM's snapshot in progress, if there is one.
pub(super) struct Saving {
    /// Whether there is a snapshot, or one is beginning or ending.
    busy: AtomicBool,
    /// The record of the pages. It is there as long as the sequence has the bit.
    pages: SpinLock<Option<Shared<OldPages>>>,
}

impl Saving {
    pub(super) fn new() -> Self {
        Saving {
            busy: AtomicBool::new(false),
            pages: SpinLock::new(None),
        }
    }
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Begins a snapshot: the VM's memory, for all its vCPUs, as it is at one moment during this call. The VM runs on.
    /// From then on [`Platform::keep`] is called once for each page, before the page is written to for the first time.
    /// Call [`Snapshot::keep_next`] to give the platform the other pages.
    ///
    /// The snapshot has the memory of all memslots of all address spaces that exist at that moment. A page that several
    /// memslots have is given once.
    ///
    /// Costs a walk over the VM's writable leaves, or, on EPT and NPT, over the entries above them. Meanwhile vCPUs
    /// that fault, and changes of memslots, wait. Then each first write to a page faults, and waits for `keep`. A huge
    /// leaf is split by the first write to it; [`Vm::promote`] does nothing until the snapshot ends.
    ///
    /// Memory that the client writes itself, or a device that it emulates, is not seen: call
    /// [`Vm::keep_old_pages`] before such a write, and let no such write begin during this call.
    ///
    /// Do not call it for a vCPU between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`], nor in an invalidation of
    /// the VM: it waits for the end of those that are in progress.
    ///
    /// # Errors
    /// [`SnapshotError`]; nothing was changed.
    pub fn begin_snapshot(self: &Arc<Self>) -> Result<Snapshot<P, F>, SnapshotError> {
        if !P::KEEPS_OLD_PAGES {
            return Err(SnapshotError::Unsupported);
        }
        if self.saving.busy.swap(true, SeqCst) {
            return Err(SnapshotError::InProgress);
        }
        match self.protect_old_pages() {
            Ok(pages) => Ok(Snapshot {
                vm: self.clone(),
                pages,
            }),
            Err(OutOfMemory) => {
                self.saving.busy.store(false, SeqCst);
                Err(SnapshotError::OutOfMemory)
            }
        }
    }

    /// Steps 1 to 4 of the [module comment](self). Returns the record of the pages.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing was changed.
    fn protect_old_pages(&self) -> Result<Shared<OldPages>, OutOfMemory> {
        let slots = self.stop_changes()?;
        let backing = backing_of(&slots)?;
        let pages = Shared::try_new(OldPages::new(self.id, F::GRANULE, backing)?)?;
        let suspended = self.suspend_faults();
        for space in &self.spaces {
            let mut op = RangeOp::on(self, space, &all_gfns::<F>());
            let from_above = self.policy.hierarchical_protect().is_on();
            op.walk(&mut Walk::new(all_gfns::<F>()), |step, walk| {
                step.protect_everything(walk, from_above);
            });
            op.finish();
        }
        self.readers.synchronize(self.reader_wait());
        *self.saving.pages.lock(self.lock_wait()) = Some(pages.clone());
        self.in_progress.turn_snapshot();
        let before = self.in_progress.next_generation(self.lock_wait());
        drop(suspended);
        drop(slots);
        self.in_progress.wait_for(before, self.turn_wait());
        Ok(pages)
    }

    /// Whether a fault that has read `sequence` must see to it that pages which become writable were given.
    #[inline(always)]
    pub(crate) fn is_saving(&self, sequence: Sequence) -> bool {
        P::KEEPS_OLD_PAGES && sequence.is_of_snapshot()
    }

    /// Returns the record of the pages of the snapshot in progress. `None`: it has ended.
    pub(crate) fn old_pages(&self) -> Option<Shared<OldPages>> {
        self.saving.pages.lock(self.lock_wait()).clone()
    }

    /// Gives the platform those pages of `backing` that belong to the snapshot in progress, and that it was not given
    /// yet. Call before the client writes to this memory itself, or a device that it emulates. Does nothing if there is
    /// no snapshot.
    ///
    /// Do not call it for a vCPU between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    pub fn keep_old_pages(&self, backing: Range<Hva>) {
        if !self.is_saving(self.in_progress.sequence()) {
            return;
        }
        let Some(pages) = self.old_pages() else {
            return;
        };
        pages.give(&backing, &*self.platform);
        wait_while(|| !pages.has(&backing), self.turn_wait());
    }

    /// Like [`Self::keep_old_pages`], for the memory that `slot` had at `gfns`.
    pub(super) fn keep_old_pages_of(&self, slot: &Memslot, gfns: &Range<Gfn>) {
        if gfns.is_empty() {
            return;
        }
        for backing in [Some(slot.backing()), slot.private()].into_iter().flatten() {
            let hva = |gfn: Gfn| F::GRANULE.add_pages(backing, gfn.0 - slot.base().0);
            self.keep_old_pages(hva(gfns.start)..hva(gfns.end));
        }
    }

    /// Gives the right to write back to the entries of `space` that are protected from above, in slots whose logs do
    /// not need that.
    fn lift_protection_of(&self, space: &Space<P, F>) {
        let mut at = Some(Gfn(0));
        while let Some(from) = at.take() {
            let change = space.slots.change(self.turn_wait());
            let mut found = None;
            change.set().in_gfns(&(from..Gfn(u64::MAX)), |slot| {
                found = Some((slot.id(), slot.pages(), slot.gfns().end, slot.share_log()));
                false
            });
            let Some((id, pages, end, log)) = found else {
                return;
            };
            at = Some(end);
            if log.as_ref().is_none_or(|log| !log.kind().protects()) {
                let mut op = SlotOp::begin(self, space, change, id, log);
                op.lift_protection(0..pages);
                op.finish();
            }
        }
    }
}

/// Returns the backing addresses of the memory of all slots: of private frames the private ones.
///
/// # Errors
/// [`OutOfMemory`].
fn backing_of(slots: &[SlotsChange<'_>]) -> Result<Vec<Range<Hva>>, OutOfMemory> {
    let mut all = Vec::new();
    let mut enough = Ok(());
    for set in slots.iter().map(|slots| slots.set()) {
        set.in_gfns(&(Gfn(0)..Gfn(u64::MAX)), |slot| {
            each_backing(slot, &set.private, |backing| {
                enough = enough.and(all.try_reserve(1).map_err(|_| OutOfMemory));
                if enough.is_ok() {
                    all.push(backing);
                }
            });
            enough.is_ok()
        });
    }
    enough.map(|()| all)
}

/// Calls `each` with the addresses that back the frames of `slot`, of which `private` are private.
fn each_backing(slot: &Memslot, private: &PrivateFrames, mut each: impl FnMut(Range<Hva>)) {
    let (gfns, granule) = (slot.gfns(), slot.granule());
    let mut at = gfns.start;
    while at < gfns.end {
        let (is_private, alike) = private.around(at);
        let end = alike.end.min(gfns.end);
        let backing = match is_private {
            true => slot.private(),
            false => Some(slot.backing()),
        };
        if let Some(backing) = backing {
            let hva = |gfn: Gfn| granule.add_pages(backing, gfn.0 - gfns.start.0);
            each(hva(at)..hva(end));
        }
        at = end;
    }
}

impl<P: Platform, F: Format> Snapshot<P, F> {
    /// Gives the platform a run of at most `most` pages that it was not given yet (0 counts as 1). Returns the number of
    /// pages. Returns 0 if the platform has every page of the snapshot: waits for the calls of [`Platform::keep`] that
    /// other threads are making. Several threads may call this at once.
    pub fn keep_next(&self, most: u64) -> u64 {
        let given = self.pages.give_next(most, &*self.vm.platform);
        if given == 0 {
            self.wait_for_others();
        }
        given
    }

    /// Returns the number of pages that the platform was not given yet.
    pub fn pages_left(&self) -> u64 {
        self.pages.left()
    }

    /// Waits until no other thread is giving a page. No page is free.
    fn wait_for_others(&self) {
        wait_while(|| self.pages.left() > 0, self.vm.turn_wait());
    }
}

impl<P: Platform, F: Format> Drop for Snapshot<P, F> {
    fn drop(&mut self) {
        let vm = &*self.vm;
        self.pages.abandon();
        self.wait_for_others();
        vm.in_progress.turn_snapshot();
        *vm.saving.pages.lock(vm.lock_wait()) = None;
        for space in &vm.spaces {
            vm.lift_protection_of(space);
        }
        vm.saving.busy.store(false, SeqCst);
    }
}
