//! Independent readers of the dirty logs. For example, a migration, a backup and the client's own use of KVM's bitmap
//! or rings can run at the same time, and each sees every written page.
//!
//! A [`LogReader`] gets the written pages in [`Epoch`]s: an epoch contains every page that was written since the
//! reader's previous epoch began (the first epoch: since the reader was made). [`Epoch::commit`] ends an epoch whose
//! pages were handled. If an epoch is ended by [`Epoch::abort`], or dropped, its pages are in the next epoch, too.
//!
//! # How
//! A write is recorded once, in the log of its slot. [`LogReader::begin`] harvests that log like [`Vm::get_dirty_log`],
//! and passes the pages to all other readers, of which the client's bitmap is one (`dirty_log/readers.rs`). The pages
//! are write-protected once for all readers: by then the writes before are passed to every reader, and the next write
//! to each page will be recorded. A reset of the client's dirty rings protects pages without harvesting the log, so
//! marked pages may be protected. This is allowed. The opposite must not be: a page that is writable, but neither
//! marked in the log nor dirty.
//!
//! # Which slots
//! While there is a reader, each slot without private memory logs, whether the client has set
//! [`SlotFlags::LOG_DIRTY_PAGES`](crate::SlotFlags) or not. That flag only decides whether the client may read KVM's
//! bitmap, or gets entries in its rings. A new reader first adds itself to the list of readers, and then visits the
//! slots, each under the slot writers' lock. Every slot change, under the same lock, makes the slot log for all readers
//! on the list. So when the new reader visits a slot, either the slot logs for it already, or the reader makes it log.
//!
//! # When slots change
//! An epoch contains all frames whose contents may differ from those at the reader's last epoch. So:
//! * *A new slot* is wholly dirty, and so are frames of [`Vm::set_memory_regions`] that get other memory.
//! * *A slot that moves* is wholly dirty, because its new frames had other contents before. (In the client's bitmap,
//!   which is by pages of the slot, not by frames, the marks stay as in KVM.)
//! * *A part that stays* when slots are split or merged keeps its marks for each reader, both pending marks and those
//!   of the current epoch.
//! * *A slot that is deleted* is in no epoch any more: there is no memory to copy.

use core::iter::FusedIterator;
use core::mem;
use core::ops::Range;

use super::slot_op::SlotOp;
use super::{DirtyLog, LogKind, Space, Vm};
use crate::addr::{Gfn, Hva};
use crate::dirty_log::{ReaderId, next_run};
use crate::format::Format;
use crate::heap::{OutOfMemory, Shared};
use crate::platform::Platform;
use crate::slots::{Edit, Memslot, SlotFlags, SlotsChange};
use crate::sync::atomic::Ordering::*;
use alloc::sync::Arc;
use alloc::vec::Vec;

/// The list of the [`LogReader`]s of a VM: the readers of its dirty logs, besides the client.
pub(super) struct ReaderList {
    pub(super) ids: Vec<ReaderId>,
    /// The id of the reader that was made last.
    last: ReaderId,
}

impl ReaderList {
    pub(super) const fn new() -> Self {
        ReaderList {
            ids: Vec::new(),
            last: ReaderId::CLIENT,
        }
    }
}

/// A reader of all dirty logs of a VM, with its own epochs ([`Vm::log_reader`]). It keeps the VM alive. When the last
/// reader is dropped, memslots that log only for readers stop logging.
///
/// The methods wait for slot changes and flushes, like [`Vm::get_dirty_log`]. Neither call them nor drop the reader
/// while the calling thread's vCPU is between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
pub struct LogReader<P: Platform, F: Format> {
    vm: Arc<Vm<P, F>>,
    id: ReaderId,
    epochs: u64,
    /// Whether an epoch was left open ([`Epoch::leave_open`]).
    is_open: bool,
}

/// The pages that were written before [`LogReader::begin`] and are in no earlier committed epoch of the reader.
#[must_use = "dropping an epoch aborts it"]
pub struct Epoch<'r, P: Platform, F: Format> {
    reader: &'r mut LogReader<P, F>,
    end: EpochEnd,
}

/// How an [`Epoch`] ends when it is dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EpochEnd {
    Commit,
    Abort,
    /// It does not end ([`Epoch::leave_open`]).
    Open,
}

/// A run of written pages ([`Epoch::dirty_ranges`]).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirtyRange {
    /// The number of the address space.
    pub space: usize,
    /// The memslot's id.
    pub slot: u32,
    /// The guest frames, all of that memslot.
    pub gfns: Range<Gfn>,
    /// The backing address of the first page.
    pub backing: Hva,
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Makes a reader of the dirty logs. Its first epoch begins with the writes after this call.
    ///
    /// While there is a reader, every memslot logs, except those with private memory. As with
    /// [`SlotFlags::LOG_DIRTY_PAGES`](crate::SlotFlags), the memory is mapped by 4 KiB leaves, and the first write to
    /// each page after a harvest faults. The policies of dirty logs apply. For the guest, several readers cost no more
    /// than one. Each reader needs two bits of memory for each page.
    ///
    /// A clone ([`Vm::fork_from`]) has no readers.
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
    /// # use slat::{Access, Config, Ept, Gfn, Gpa, Region, Vm};
    /// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
    /// # vm.set_memory_region(0, &Region::new(7, Gpa(0), 0x20_0000, backing))?;
    /// # let mut vcpu = vm.create_vcpu()?;
    /// let (mut backup, mut migration) = (vm.log_reader()?, vm.log_reader()?);
    /// for page in [3, 4, 6, 9] {
    ///     vcpu.hardware_fault(Gpa(page << 12), Access::Write)?;
    /// }
    ///
    /// // Runs of dirty pages. Two runs with only one clean page between them count as one.
    /// let epoch = backup.begin();
    /// let ranges: Vec<_> = epoch.dirty_ranges(2, u64::MAX).map(|range| range.gfns).collect();
    /// assert_eq!(ranges, [Gfn(3)..Gfn(7), Gfn(9)..Gfn(10)]);
    /// epoch.commit();
    ///
    /// // The other reader has its own epochs. Its first epoch is aborted, so its pages are in its next epoch, too.
    /// migration.begin().abort();
    /// vcpu.hardware_fault(Gpa(0), Access::Write)?;
    /// assert_eq!(backup.begin().pages(), 1);
    /// assert_eq!(migration.begin().pages(), 5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`OutOfMemory`]: there is no memory for the bitmaps of all memslots, or to change a memslot. The call made no
    /// reader.
    pub fn log_reader(self: &Arc<Self>) -> Result<LogReader<P, F>, OutOfMemory> {
        let mut list = self.log_readers.lock(self.turn_wait());
        list.ids.try_reserve(1).map_err(|_| OutOfMemory)?;
        let id = list.last.next();
        list.last = id;
        list.ids.push(id);
        self.log_mode.readers.store(true, SeqCst);
        drop(list);
        // If there is no memory, dropping the reader removes it from the logs.
        let reader = LogReader {
            vm: self.clone(),
            id,
            epochs: 0,
            is_open: false,
        };
        for space in &self.spaces {
            self.add_log_reader(space, id)?;
        }
        // Discard the earlier writes: they are not in the reader's first epoch.
        reader.harvest();
        reader.end_epoch(false);
        Ok(reader)
    }

    /// Makes the slots of `space` log for the reader `id`.
    ///
    /// # Errors
    /// [`OutOfMemory`]; some slots may already log for the reader.
    fn add_log_reader(&self, space: &Space<P, F>, id: ReaderId) -> Result<(), OutOfMemory> {
        self.each_slot(space, |slot| match slot.log() {
            _ if slot.private().is_some() => Ok(false),
            Some(log) if log.has_bitmap() => log.add_reader(id, false).map(|()| false),
            _ => Ok(true),
        })
    }

    /// Removes the reader `id` from the list, and from the logs of all slots.
    fn remove_log_reader(&self, id: ReaderId) {
        let mut list = self.log_readers.lock(self.turn_wait());
        list.ids.retain(|other| *other != id);
        self.log_mode.readers.store(!list.ids.is_empty(), SeqCst);
        drop(list);
        for space in &self.spaces {
            // Ignore the error: if there is no memory to change a slot, the slot logs until its flags are next changed.
            let _ = self.each_slot(space, |slot| {
                let Some(log) = slot.log() else {
                    return Ok(false);
                };
                log.remove_reader(id);
                let is_clients = slot.flags().has(SlotFlags::LOG_DIRTY_PAGES);
                Ok(!is_clients && !self.log_mode.readers.load(SeqCst))
            });
        }
    }

    /// Calls `visit` for each slot of `space`, in the order of gfn, under the slot writers' lock. If it returns `true`,
    /// replaces the slot by a slot that differs only in its log: the new slot logs if the client's flag or a reader on
    /// the list requires it.
    ///
    /// # Errors
    /// The errors of `visit`, and [`OutOfMemory`].
    fn each_slot(
        &self,
        space: &Space<P, F>,
        mut visit: impl FnMut(&Memslot) -> Result<bool, OutOfMemory>,
    ) -> Result<(), OutOfMemory> {
        let mut at = Gfn(0);
        loop {
            let change = space.slots.change(self.turn_wait());
            let Some(slot) = change.first_from(at) else {
                return Ok(());
            };
            at = slot.gfns().end;
            if !visit(slot)? {
                continue;
            }
            let (id, region) = (slot.id(), slot.region());
            let new = self.slot(&region, &change).map_err(|_| OutOfMemory)?;
            if !new.logs_to(slot.log()) {
                let edit = Edit { id, new: Some(new) };
                let done = self.commit(space, change, &mut [edit]);
                done.map_err(|_| OutOfMemory)?;
            }
        }
    }
}

impl SlotsChange<'_> {
    /// Returns the first slot that has a frame at or after `gfn`.
    fn first_from(&self, gfn: Gfn) -> Option<&Memslot> {
        let mut id = None;
        self.set().in_gfns(&(gfn..Gfn(u64::MAX)), |slot| {
            id = Some(slot.id());
            false
        });
        self.by_id(id?).map(|slot| &**slot)
    }
}

impl<P: Platform, F: Format> LogReader<P, F> {
    /// Begins an epoch: harvests the logs of all memslots, and protects the marked pages, so that the next write to
    /// each page is in a later epoch.
    ///
    /// Every write before the call is in this epoch or in an earlier committed epoch. Every write after the call is in
    /// a later epoch. (If another vCPU is still in the fault that has made a page writable, its write is in the next
    /// epoch.) The cost is that of [`Vm::get_dirty_log`] for each memslot: a read of two words for 64 pages that were
    /// not written, and the protection of each page that was written.
    ///
    /// An epoch that was left open is aborted first.
    pub fn begin(&mut self) -> Epoch<'_, P, F> {
        drop(self.open_epoch());
        self.harvest();
        self.epochs += 1;
        Epoch {
            reader: self,
            end: EpochEnd::Abort,
        }
    }

    /// Returns the epoch that was left open by [`Epoch::leave_open`]. `None`: there is none.
    pub fn open_epoch(&mut self) -> Option<Epoch<'_, P, F>> {
        mem::take(&mut self.is_open).then(|| Epoch {
            reader: self,
            end: EpochEnd::Abort,
        })
    }

    /// Adds to the reader's epoch the pages marked in all logs, and the pages that are pending because other readers
    /// have harvested them.
    fn harvest(&self) {
        let vm = &*self.vm;
        if vm.has_walker_buffers() {
            vm.drain_walkers();
        }
        for space in &vm.spaces {
            let mut at = Gfn(0);
            while let Some((id, log, end)) = vm.next_logged(space, at) {
                let turn = log.turn.lock(vm.turn_wait());
                let change = space.slots.change(vm.turn_wait());
                let op = SlotOp::begin(vm, space, change, id, Some(log.clone()));
                // If the slot got another log or moved meanwhile, do not advance `at`: look up again which slot is at
                // these frames.
                if op.harvest_for(&log, self.id) {
                    at = end;
                }
                drop(turn);
            }
        }
    }

    fn end_epoch(&self, aborted: bool) {
        for space in &self.vm.spaces {
            let done = self.vm.each_slot(space, |slot| {
                let marks = slot.log().and_then(|log| log.reader(self.id));
                marks.inspect(|marks| marks.end_epoch(aborted));
                Ok(false)
            });
            debug_assert_eq!(done, Ok(()));
        }
    }
}

impl<P: Platform, F: Format> Drop for LogReader<P, F> {
    fn drop(&mut self) {
        self.vm.remove_log_reader(self.id);
    }
}

impl<P: Platform, F: Format> Epoch<'_, P, F> {
    /// Returns the number of the epoch. The reader's first epoch is 1. After an aborted epoch the next one has the next
    /// number.
    pub fn number(&self) -> u64 {
        self.reader.epochs
    }

    /// Returns the number of dirty pages, which takes as long as [`Self::dirty_ranges`].
    pub fn pages(&self) -> u64 {
        let ranges = self.dirty_ranges(0, u64::MAX);
        ranges
            .map(|range| range.gfns.end.0 - range.gfns.start.0)
            .sum()
    }

    /// Returns the dirty pages as runs, in the order of address space and gfn. Runs with fewer than `min_gap` clean
    /// pages between them count as one run. No run has more than `max` pages (0 counts as 1), and each run is in one
    /// memslot.
    ///
    /// Each step of the iterator uses the memslots that exist then: pages of deleted slots are left out, and pages of a
    /// moved slot are reported at their new frames. Reads one word for 64 clean pages.
    pub fn dirty_ranges(
        &self,
        min_gap: u64,
        max: u64,
    ) -> impl FusedIterator<Item = DirtyRange> + use<'_, P, F> {
        self.dirty_ranges_from(0, Gfn(0), min_gap, max)
    }

    /// Like [`Self::dirty_ranges`], but begins with frame `gfn` of address space `space`.
    pub fn dirty_ranges_from(
        &self,
        space: usize,
        gfn: Gfn,
        min_gap: u64,
        max: u64,
    ) -> impl FusedIterator<Item = DirtyRange> + use<'_, P, F> {
        Ranges {
            vm: &self.reader.vm,
            id: self.reader.id,
            space,
            at: gfn,
            min_gap,
            max: max.max(1),
        }
    }

    /// Ends the epoch: its pages were handled, and are in no later epoch unless they are written again.
    pub fn commit(mut self) {
        self.end = EpochEnd::Commit;
    }

    /// Ends the epoch as if it were dropped: its pages are in the reader's next epoch, too.
    pub fn abort(self) {}

    /// Keeps the epoch for [`LogReader::open_epoch`], for a program that cannot hold the borrow of the reader until the
    /// end of the epoch.
    pub fn leave_open(mut self) {
        self.end = EpochEnd::Open;
    }
}

impl<P: Platform, F: Format> Drop for Epoch<'_, P, F> {
    fn drop(&mut self) {
        match self.end {
            EpochEnd::Open => self.reader.is_open = true,
            end => self.reader.end_epoch(end == EpochEnd::Abort),
        }
    }
}

/// The iterator of [`Epoch::dirty_ranges`].
struct Ranges<'e, P: Platform, F: Format> {
    vm: &'e Vm<P, F>,
    id: ReaderId,
    space: usize,
    /// The frame at which the next step continues.
    at: Gfn,
    min_gap: u64,
    max: u64,
}

impl<P: Platform, F: Format> Iterator for Ranges<'_, P, F> {
    type Item = DirtyRange;

    fn next(&mut self) -> Option<DirtyRange> {
        while let Some(space) = self.vm.spaces.get(self.space) {
            let change = space.slots.change(self.vm.turn_wait());
            let Some(slot) = change.first_from(self.at) else {
                (self.space, self.at) = (self.space + 1, Gfn(0));
                continue;
            };
            let base = slot.base();
            let from = self.at.max(base).0 - base.0;
            let run = (slot.log().and_then(|log| log.reader(self.id)))
                .and_then(|it| next_run(it.epoch(), from..slot.pages(), self.min_gap, self.max));
            let Some(run) = run else {
                self.at = slot.gfns().end;
                continue;
            };
            self.at = base.add(run.end);
            return Some(DirtyRange {
                space: self.space,
                slot: slot.id(),
                backing: F::GRANULE.add_pages(slot.backing(), run.start),
                gfns: base.add(run.start)..self.at,
            });
        }
        None
    }
}

impl<P: Platform, F: Format> FusedIterator for Ranges<'_, P, F> {}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Finds the first slot that has a frame at or after `gfn` and a log with a bitmap. Returns its id, its log, and
    /// the frame after its last frame.
    fn next_logged(
        &self,
        space: &Space<P, F>,
        mut gfn: Gfn,
    ) -> Option<(u32, Shared<DirtyLog>, Gfn)> {
        let change = space.slots.change(self.turn_wait());
        loop {
            let slot = change.first_from(gfn)?;
            gfn = slot.gfns().end;
            if let Some(log) = slot.share_log().filter(|log| log.has_bitmap()) {
                return Some((slot.id(), log, gfn));
            }
        }
    }
}

impl<P: Platform, F: Format> SlotOp<'_, P, F> {
    /// Harvests `log`, the log of the operation's slot, for the reader `id`, and ends the operation. Returns whether
    /// the slot had this log and its frames until the end.
    fn harvest_for(mut self, log: &DirtyLog, id: ReaderId) -> bool {
        let Some((pages, base)) = self.slot().map(|slot| (slot.pages(), slot.base())) else {
            return false;
        };
        let Some(marks) = log.reader(id) else {
            return true;
        };
        if log.kind() == LogKind::DirtyBits {
            self.harvest_dirty_bits(log, pages);
        }
        let mut harvested = 0;
        let mut full = 0..0;
        for index in 0..log.bits.len() {
            let valid = super::dirty::valid_bits(pages, index);
            let taken = log.take_for(index, id) & valid;
            marks.begin(index, taken);
            self.look();
            if log.kind() != LogKind::DirtyBits {
                self.protect_word(&mut full, index as u64, taken, valid);
            }
            harvested |= taken;
        }
        self.protect_words(full);
        let stayed = self.slot().is_some_and(|slot| slot.base() == base);
        if harvested != 0 {
            self.finish();
        }
        stayed
    }
}
