//! Changes memslots: publishes the new slot set, raises the invalidation sequence, zaps leaves, flushes TLBs, and
//! returns. As after an invalidation, a fault that has found a slot in the old set cannot install its leaf any more
//! ([`super::invalidate`]).
//!
//! A call changes one slot or several ([`Vm::set_memory_regions`]). Every call is converted to a list of [`Edit`]s,
//! which [`Vm::commit`] makes.
//!
//! # Several slots at once
//! A *part that stays* is a range of frames that an old and a new slot have in common, and that the same pages back in
//! both. These properties must hold:
//!
//! * *vCPUs see the memory map from before or from after the change.* All edits are made in the inactive set, and one
//!   store publishes that set ([`crate::slots`]). The new set has a new generation, so no older MMIO entry is valid.
//! * *A frame that stays is not zapped.* A frame keeps its leaf if an old and a new slot both contain it, with the same
//!   backing page and the same limits ([`super::departure`]). The old leaf is the leaf that a fault would install now,
//!   or has fewer rights. Leaves do not refer to slots, so nothing in the tables need change. Only a huge leaf that
//!   crosses an edge of such a part must change: it is split in place ([`super::edge`]), with tables that were
//!   allocated before the change. All other leaves of an old slot are zapped.
//! * *An invalidation misses no leaf.* An invalidation walks over the slots in the order of backing address, in steps,
//!   and continues after the last slot that it saw. New slots may have other positions in this order, so the
//!   invalidation could miss a part that stays. Therefore, after publishing the new set, the change zaps each part
//!   whose backing is being invalidated. The publication and the beginning of an invalidation are sequentially
//!   consistent: if the change does not find an invalidation, that invalidation begins later and sees only the new set.
//!   Until the zap is done, the old slots count as leaving ([`super::departure`]), and the invalidation waits for this.
//! * *No write is lost.* The new slot of a part may have another log. When no reader uses the old set any more, no
//!   thread marks pages in the old log, and the marks of the part are copied to the new log. After that, a leaf may
//!   still be writable although its page is not marked: a harvest of the old log has removed the mark, and cannot
//!   protect the page any more because the slot was replaced. So the change protects all pages without a mark (with
//!   rings, all pages, because ring entries name pages by slot; with walkers' buffers, it clears their dirty bits).
//!   Until then no thread harvests the new logs: their `turn` locks are taken before the logs are published. If dirty
//!   bits are the log, they stay in the leaves. If the new log is of another kind, the part's leaves are zapped, and
//!   their dirty bits are recorded.
//! * *Logging begins or ends* for all pages of a part, as when one slot changes its flags.

use alloc::vec::Vec;

use super::departure::{Departure, LogWork};
use super::{DirtyLog, LogKind, RangeOp, Space, Vm};
use crate::dirty_log::ReaderId;
use crate::format::{Format, all_gfns};
use crate::heap::{OutOfMemory, Shared};
use crate::platform::Platform;
use crate::slots::{
    Batch, Change, Edit, OwnedSlot, Region, RegionError, SlotFlags, SlotsChange, check, plan,
};
use crate::sync::atomic::Ordering::*;
use crate::table::Walk;

impl<P: Platform, F: Format> Vm<P, F> {
    /// Creates or moves a memslot of address space `space`, or changes its flags: KVM_SET_USER_MEMORY_REGION, with its
    /// rules and errors. But size 0 is an error: to delete a slot, use [`Self::remove_memory_region`]. When this
    /// returns, no CPU uses a translation of the old state.
    ///
    /// Do not call this while the calling thread's vCPU is between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    ///
    /// # Errors
    /// [`RegionError`]; nothing was changed. For size 0, returns [`RegionError::Empty`] without waiting for other slot
    /// changes.
    pub fn set_memory_region(&self, space: usize, region: &Region) -> Result<(), RegionError> {
        let space = (self.spaces.get(space)).ok_or(RegionError::NoSuchSpace(space))?;
        let checked = check(region, F::GRANULE)?;
        self.drain_before(region);
        let change = space.slots.change(self.turn_wait());
        let id = region.slot;
        if !plan(&change, checked, all_gfns::<F>().end.0)? {
            // The slot already is as requested. But the thread that started the slot's log may not have protected all
            // its pages yet: wait for it.
            self.wait_for_begin(change, id);
            return Ok(());
        }
        let new = Some(self.slot(region, &change)?);
        self.commit(space, change, &mut [Edit { id, new }])?;
        self.flush_slots_that_left(&region.gfns(F::GRANULE));
        Ok(())
    }

    /// Deletes memslot `slot` of address space `space`, and its dirty log: KVM_SET_USER_MEMORY_REGION with size 0. When
    /// this returns no CPU uses the slot's memory, and the host may reclaim it. If a fault is in
    /// [`resolve`](crate::Platform::resolve) at that time, it does not install the page that `resolve` returns.
    ///
    /// Do not call this while the calling thread's vCPU is between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    ///
    /// # Errors
    /// [`RegionError::NoSuchSpace`], [`RegionError::NothingToDelete`], [`RegionError::OutOfMemory`]; nothing was
    /// changed.
    pub fn remove_memory_region(&self, space: usize, slot: u32) -> Result<(), RegionError> {
        let space = (self.spaces.get(space)).ok_or(RegionError::NoSuchSpace(space))?;
        let change = space.slots.change(self.turn_wait());
        if change.by_id(slot).is_none() {
            return Err(RegionError::NothingToDelete(slot));
        }
        let (id, new) = (slot, None);
        self.commit(space, change, &mut [Edit { id, new }])
    }

    /// Changes several memslots of address space `space` atomically: for example, splits a slot, merges two, removes a
    /// piece from the middle of a slot, or swaps two slots. A vCPU sees either the memory map before the change or the
    /// one after it. A frame that has memory both before and after has memory throughout. Each [`Change`] contains the
    /// final state of its slot; the order of the changes does not matter.
    ///
    /// A frame stays mapped if the same page backs it before and after, with the same rights (including
    /// [`SlotFlags::READONLY`]) and memory type: its leaf is not zapped, and the guest takes no fault for it. So to
    /// remove 2 MiB from a slot of 4 GiB costs only a zap of 2 MiB, and the splits of the huge leaves at the two edges.
    /// Three kinds of frames do not stay mapped: frames whose backing is being invalidated at the time; frames of slots
    /// with private backing; and frames of a huge leaf at an edge that cannot be split. (A huge leaf cannot be split if
    /// the limit of shadow pages is reached, or if faults install it again during the change.)
    ///
    /// If a page stays, and its old and its new slot both log, its mark in the dirty log stays, too. Ring entries that
    /// were pushed before the change name pages by the old slots. If another thread harvests the log of a slot during a
    /// call that shrinks or deletes the slot, that harvest still returns the marks that it has removed.
    ///
    /// When this returns, no CPU uses a translation of the old state. Do not call this while the calling thread's vCPU
    /// is between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # let (platform, backing) = (SimPlatform::new(1024), HostMemory::hva(0));
    /// # use slat::{Access, Change, Config, Ept, Gfn, Gpa, Region, Vm};
    /// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
    /// // 4 MiB of memory at 0.
    /// let all = Region::new(0, Gpa(0), 0x40_0000, backing);
    /// vm.set_memory_region(0, &all)?;
    /// let mut vcpu = vm.create_vcpu()?;
    /// vcpu.hardware_fault(Gpa(0x20_0000), Access::Write)?;
    ///
    /// // The page at 1 MiB now belongs to a device: no memslot contains it.
    /// let upper = Region::new(1, Gpa(0x10_1000), 0x2f_f000, backing.add_pages(0x101));
    /// let changes = [Change::Set(all.with_size(0x10_0000)), Change::Set(upper)];
    /// vm.set_memory_regions(0, &changes)?;
    /// assert!(vm.lookup(0, Gfn(0x200)).is_some(), "it stayed mapped");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`RegionError`]; nothing was changed. [`RegionError::NamedTwice`] if two changes name the same slot.
    pub fn set_memory_regions(&self, space: usize, changes: &[Change]) -> Result<(), RegionError> {
        let space = (self.spaces.get(space)).ok_or(RegionError::NoSuchSpace(space))?;
        let batch = Batch::check(changes, F::GRANULE)?;
        let mut edits = Vec::new();
        (edits.try_reserve_exact(changes.len())).map_err(|_| OutOfMemory)?;
        for this in changes {
            if let Change::Set(region) = this {
                self.drain_before(region);
            }
        }
        let change = space.slots.change(self.turn_wait());
        batch.plan(&change, all_gfns::<F>().end.0)?;
        for this in changes {
            let id = this.slot();
            let new = match this {
                Change::Set(region) if change.by_id(id).is_some_and(|old| old.is(region)) => {
                    continue;
                }
                Change::Set(region) => Some(self.slot(region, &change)?),
                Change::Remove(_) => None,
            };
            edits.push(Edit { id, new });
        }
        match edits.is_empty() {
            true => drop(change),
            false => self.commit(space, change, &mut edits)?,
        }
        for this in changes {
            if let Change::Set(region) = this {
                self.flush_slots_that_left(&region.gfns(F::GRANULE));
                // As in [`Vm::set_memory_region`]: this call need not change the slot, but another thread may not have
                // protected all its pages yet.
                self.wait_for_begin(space.slots.change(self.turn_wait()), region.slot);
            }
        }
        Ok(())
    }

    /// Makes `edits`, which were checked and are not empty. When this returns, no CPU uses a translation of the old
    /// state.
    ///
    /// # Errors
    /// [`RegionError::OutOfMemory`]; nothing was changed.
    pub(super) fn commit(
        &self,
        space: &Space<P, F>,
        mut change: SlotsChange<'_>,
        edits: &mut [Edit],
    ) -> Result<(), RegionError> {
        change.catch_up(&self.readers, self.reader_wait());
        self.forget_old_mmio(space, &change);
        if edits.iter().all(|edit| change.by_id(edit.id).is_none()) {
            let pages_before = change.pages();
            change.replace(edits, &self.readers)?;
            self.budget.memory_changed(pages_before, change.pages());
            return Ok(());
        }
        let logs = new_logs(&change, edits)?;
        let mut turns = Vec::new();
        (turns.try_reserve_exact(logs.len())).map_err(|_| OutOfMemory)?;
        // Taking these locks does not wait, because no other thread can find these logs yet.
        turns.extend(logs.iter().map(|log| log.turn.lock(self.turn_wait())));
        let mut work = Vec::new();
        (work.try_reserve_exact(most_log_work(&change, edits))).map_err(|_| OutOfMemory)?;
        let mut departure = Departure::begin(self, space, change, edits)?;
        let replaced = departure.replace(edits, &mut work);
        departure.end();
        replaced?;
        for LogWork {
            id,
            log,
            pages,
            what,
        } in work
        {
            let change = space.slots.change(self.turn_wait());
            match log {
                Some(log) => self.begin_logging(space, change, id, &log, pages, what),
                None => self.end_logging(space, change, id),
            }
        }
        Ok(())
    }

    /// Checks `region` as [`Vm::set_memory_region`] does, and changes nothing.
    ///
    /// # Errors
    /// The errors of [`Vm::set_memory_region`], but never [`RegionError::OutOfMemory`].
    pub fn check_memory_region(&self, space: usize, region: &Region) -> Result<(), RegionError> {
        let space = (self.spaces.get(space)).ok_or(RegionError::NoSuchSpace(space))?;
        let checked = check(region, F::GRANULE)?;
        let change = space.slots.change(self.turn_wait());
        plan(&change, checked, all_gfns::<F>().end.0).map(|_| ())
    }

    /// Call before publishing a set, with the slot writers' lock held. An MMIO entry stores only the low bits of the
    /// slot set's generation. If these bits wrap around in the new set, zaps all MMIO entries, because old entries
    /// would become valid again. Faults may install further MMIO entries during the call: these have the generation
    /// before the wrap, whose low bits recur last.
    pub(super) fn forget_old_mmio(&self, space: &Space<P, F>, change: &SlotsChange<'_>) {
        let wraps = (change.set().generation + 1) & ((1 << F::MMIO_GENERATION_BITS) - 1) == 0;
        if F::MMIO_GENERATION_BITS > 0 && wraps {
            let mut op = RangeOp::begin(self, space);
            op.walk(&mut Walk::new(all_gfns::<F>()), |step, walk| {
                step.zap_mmio(walk);
            });
        }
    }

    /// Makes the slot that `region` describes. If the existing slot has a log and the new slot logs, the new slot keeps
    /// that log, whose marks the client has not got yet. (In KVM, too, a moved slot keeps its bitmap.)
    pub(super) fn slot(
        &self,
        region: &Region,
        change: &SlotsChange<'_>,
    ) -> Result<OwnedSlot, RegionError> {
        let is_clients = region.flags.has(SlotFlags::LOG_DIRTY_PAGES);
        let has_readers = self.log_mode.readers.load(SeqCst);
        let is_logged = is_clients || has_readers && region.private.is_none();
        if !is_logged {
            return Ok(OwnedSlot::new(region, F::GRANULE, None));
        }
        let old = change
            .by_id(region.slot)
            .filter(|old| old.has_pages_of(region));
        let moves = old.is_none_or(|old| old.base() != F::GRANULE.gfn(region.gpa));
        let kept = old.and_then(|old| self.kept_log(old, is_clients));
        let is_new = kept.is_none();
        let log = match kept {
            Some(log) => log,
            None => Shared::try_new(self.new_log(region.pages(F::GRANULE), is_clients)?)?,
        };
        if has_readers {
            self.keep_for_readers(&log, moves)?;
        }
        let slot = OwnedSlot::new(region, F::GRANULE, Some(log.clone()));
        if is_new && (log.initially_set || has_readers) {
            // Unmark the pages for which an existing slot has a log: their marks will be copied from that log.
            change.set().in_gfns(&slot.gfns(), |old| {
                if old.log().is_some() && old.backs_alike(&slot) {
                    log.unmark(&slot.gfns(), &slot.common(old));
                }
                true
            });
        }
        Ok(slot)
    }
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Returns the log of `old` if a slot with the same pages that replaces `old` can keep it. `is_clients` tells that
    /// the client will read the log. If the client has not read it before, its bitmap begins with this call.
    fn kept_log(&self, old: &OwnedSlot, is_clients: bool) -> Option<Shared<DirtyLog>> {
        let log = old.share_log()?;
        let was_clients = old.flags().has(SlotFlags::LOG_DIRTY_PAGES);
        let has_rings = log.kind() == LogKind::Rings;
        let serves_client = match (was_clients, is_clients) {
            (true, true) => true,
            (false, true) => has_rings == self.log_mode.rings.load(SeqCst),
            (_, false) => !has_rings,
        };
        if !serves_client || self.log_mode.readers.load(SeqCst) && !log.has_bitmap() {
            return None;
        }
        if let (false, true, Some(client)) = (was_clients, is_clients, log.reader(ReaderId::CLIENT))
        {
            client.fill_pending(self.log_mode.initially_set.load(SeqCst));
        }
        Some(log)
    }

    /// Makes `log` keep marks for all readers ([`super::log_reader`]). If `moves`, the slot moves or is new, and all
    /// its pages become pending for the readers.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    fn keep_for_readers(&self, log: &DirtyLog, moves: bool) -> Result<(), OutOfMemory> {
        let list = self.log_readers.lock(self.turn_wait());
        (list.ids.iter()).try_for_each(|id| log.add_reader(*id, false))?;
        if moves {
            log.mark_for_readers();
        }
        Ok(())
    }
}

/// Returns the logs that `edits` add to slots.
///
/// # Errors
/// [`OutOfMemory`].
fn new_logs(
    change: &SlotsChange<'_>,
    edits: &[Edit],
) -> Result<Vec<Shared<DirtyLog>>, OutOfMemory> {
    let logs = edits.iter().filter_map(|edit| {
        let new = edit.new.as_deref().filter(|new| new.log().is_some())?;
        let had = change
            .by_id(edit.id)
            .is_some_and(|old| new.logs_to(old.log()));
        if had { None } else { new.share_log() }
    });
    let mut all = Vec::new();
    (all.try_reserve_exact(logs.clone().count())).map_err(|_| OutOfMemory)?;
    all.extend(logs);
    Ok(all)
}

/// Returns an upper bound of the number of [`LogWork`]s that `edits` cause: one for each part that an old and a new
/// slot have in common, and there are at most as many parts as old and new slots. Returns 0 if no slot gets another
/// log.
fn most_log_work(change: &SlotsChange<'_>, edits: &[Edit]) -> usize {
    let other_log = |edit: &Edit| {
        let (old, new) = (change.by_id(edit.id), edit.new.as_deref());
        let log = old.and_then(|old| old.log());
        match new {
            Some(new) => !new.logs_to(log),
            None => log.is_some(),
        }
    };
    let parts = edits.iter().any(|edit| edit.new.is_some()) && edits.iter().any(other_log);
    if parts { 2 * edits.len() } else { 0 }
}
