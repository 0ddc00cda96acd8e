//! Handles a fault of a vCPU: changes the page tables so that they allow an access.
//!
//! A [`Fault`] is one attempt to do this. It has six steps, which store their results in its fields. Each step may use
//! the results of earlier steps:
//!
//! 1. [`Fault::find_slot`]: the memslot that holds the frame;
//! 2. [`Fault::find_page`]: the host page that backs the frame. The vCPU leaves its reader section to ask the platform
//!    for it;
//! 3. [`Fault::keep_old_page`]: before a write to a page that a snapshot does not have yet;
//! 4. [`Fault::choose_leaf`]: the largest level that slot, attributes, alignment, host mapping, snapshot, dirty log and
//!    NX allow;
//! 5. [`Fault::install`]: stores the leaf under the lock of the table that receives it, if the slot and the host page
//!    are still current at that time ([`crate::vm::InProgress`]);
//! 6. [`Fault::prefetch`]: maps the pages around the page ([`super::prefetch`]).
//!
//! A step returns a [`Next`] if the fault cannot continue with the next step. [`Vcpu::until_allowed`] repeats attempts.
//! If the tables do not accept the leaf, a [`Retry`] gives the reason, and [`Fault::clear`] removes this obstacle.
//!
//! [`Vcpu::fault`] handles a guest-physical address. For a guest-virtual address, each attempt walks the guest's tables
//! to find out which guest-physical page to map ([`super::guest`]).

use core::ops::Range;
use core::ptr;

use super::slot_facts::SlotFacts;
use super::translate::{Stop, Translation, translation};
use super::{Parts, PausedWalk, Vcpu};
use crate::addr::{Access, Gfn, Gpa, Level};
use crate::format::{Entry, Format, Leaf, can_shadow};
use crate::platform::{HostPage, Platform, Stale, WaitFor};
use crate::shadow::trail::{Target, Trail};
use crate::stats::Counters;
use crate::sync::atomic::Ordering::Relaxed;
use crate::table::{ByGfn, Installed, Retry};
use crate::trace::Event;
use crate::vm::{LogKind, RangeOp, RingSlot, Sequence};

/// The reason why a fault does not continue with its next step.
pub(super) enum Next<E = Stop> {
    /// Begin a new attempt: the fault has removed the obstacle.
    Again,
    /// Compare the shadow page of this level on the walk's path with the guest's table that it shadows
    /// ([`Retry::Unsynced`]), and begin a new attempt.
    Compare(Level),
    /// The access ends here.
    Stop(E),
}

impl<E> From<E> for Next<E> {
    fn from(stop: E) -> Self {
        Next::Stop(stop)
    }
}

/// The panic message for a field of a [`Fault`] that no step has filled yet.
pub(super) const FILLED: &str = "an earlier step of the fault has filled it";

/// One attempt to map the page that a vCPU accesses.
pub(super) struct Fault<'v, P: Platform, F: Format> {
    pub(super) vcpu: &'v mut Vcpu<P, F>,
    /// The walk of the VM's tables that found no leaf for the access.
    pub(super) walk: PausedWalk,
    /// The result of the walk of the guest's tables, if the access is to a guest-virtual address.
    trail: Option<&'v Trail>,
    /// The guest-physical address of the access.
    pub(super) gpa: Gpa,
    /// The kind of the access: the leaf must have the right to it.
    pub(super) access: Access,
    /// Whether an instruction of the guest makes the access: then the fault is counted, and a write is a store of the
    /// guest. Otherwise the MMU accesses the guest's tables, to read an entry or to set its accessed or dirty flag.
    pub(super) of_guest: bool,
    /// The VM's invalidation sequence (KVM: `mmu_invalidate_seq`), read before the fault looks up the slot and the
    /// current leaf. The results of these look-ups are current as long as the sequence is unchanged. The walk that
    /// faulted was before the sequence was read: if a slot has moved between the two, the leaf that this walk found may
    /// map another page of the slot.
    pub(super) sequence: Sequence,
    pub(super) slot: Option<SlotFacts>,
    pub(super) page: Option<HostPage>,
    /// Whether the host page was taken from an existing leaf, without asking the host.
    pub(super) fast: bool,
    /// The largest level of a leaf for a write: if there is a snapshot, the snapshot has all pages of that leaf.
    pub(super) largest: Level,
    /// The level of the leaf.
    pub(super) level: Level,
    /// Whether the leaf to install is of level 1 only because of the policy `nx_huge_pages`.
    pub(super) nx_split: bool,
    /// Whether the leaf was installed in an entry that was absent before.
    pub(super) is_new: bool,
    /// Whether the page contains a guest table that is shadowed and tracked: then the leaf is not writable.
    tracked: bool,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Makes the tables allow `access` to `gpa`, and returns the translation. The caller's `walk` has found no entry
    /// that allows the access. For `of_guest` see [`Fault::of_guest`].
    ///
    /// # Errors
    /// [`Stop`]. [`Stop::Retry`] if a TLB flush took place during the call, even if the access is allowed now.
    #[cold]
    pub(super) fn fault(
        &mut self,
        mut walk: PausedWalk,
        gpa: Gpa,
        access: Access,
        of_guest: bool,
    ) -> Result<Translation, Stop> {
        self.until_allowed(gpa, |vcpu| {
            let mut fault = Fault::new(vcpu, walk, None, gpa, access, of_guest);
            let answer = fault.attempt();
            walk = fault.walk;
            answer
        })
    }

    /// Repeats `attempt` until the tables allow the access to `address`. Before each attempt, allocates memory for the
    /// tables that the attempt may make.
    ///
    /// # Errors
    /// The errors of `attempt`; [`Stop::Retry`] if a TLB flush took place during the call, even if the access is
    /// allowed now.
    #[inline(always)]
    pub(super) fn until_allowed<R, E: From<Stop>>(
        &mut self,
        address: Gpa,
        mut attempt: impl FnMut(&mut Self) -> Result<R, Next<E>>,
    ) -> Result<R, E> {
        self.unless_flushed(|vcpu| {
            let missed = vcpu.missed();
            loop {
                vcpu.make_room(address)?;
                match attempt(vcpu) {
                    Ok(found) => return Ok(found),
                    Err(Next::Stop(stop)) => return Err(stop),
                    // The attempt has already compared the page with the guest's table, so begin the next attempt.
                    Err(Next::Compare(_)) => {}
                    // The translations that the CPU remembers are void, so the CPU must drop them and execute the
                    // access again.
                    Err(Next::Again) if vcpu.missed() != missed => return Err(Stop::Retry.into()),
                    Err(Next::Again) => {}
                }
            }
        })
    }
}

impl<'v, P: Platform, F: Format> Fault<'v, P, F> {
    /// Begins an attempt to resolve the fault.
    #[inline(always)]
    pub(super) fn new(
        vcpu: &'v mut Vcpu<P, F>,
        walk: PausedWalk,
        trail: Option<&'v Trail>,
        gpa: Gpa,
        access: Access,
        of_guest: bool,
    ) -> Self {
        Fault {
            sequence: vcpu.vm().in_progress.sequence(),
            vcpu,
            walk,
            trail,
            gpa,
            access,
            of_guest,
            slot: None,
            page: None,
            fast: false,
            largest: F::MAX_LEAF,
            level: Level::PAGE,
            nx_split: false,
            is_new: false,
            tracked: false,
        }
    }

    #[inline(always)]
    pub(super) fn gfn(&self) -> Gfn {
        F::GRANULE.gfn(self.gpa)
    }

    /// Returns the result of the walk of the guest's tables. For a format that cannot shadow guest tables it is always
    /// `None`, so the compiler leaves out code that uses it.
    #[inline(always)]
    pub(super) fn trail(&self) -> Option<&'v Trail> {
        if can_shadow::<F>() { self.trail } else { None }
    }

    /// Returns the counters for a fault of the guest; `None` if the MMU makes the access, not the guest
    /// ([`Self::of_guest`]).
    pub(super) fn counted(&self) -> Option<&Counters> {
        self.of_guest.then(|| self.vcpu.counters())
    }

    /// Does all steps of the fault: maps the page, and returns the translation.
    ///
    /// # Errors
    /// [`Next`].
    #[inline(always)]
    pub(super) fn attempt(&mut self) -> Result<Translation, Next> {
        self.find_slot()?;
        self.find_page()?;
        self.keep_old_page()?;
        let leaf = self.choose_leaf();
        self.install(leaf)?;
        self.prefetch();
        let found = translation::<F>(leaf, self.level, self.gfn());
        Ok(Translation {
            write: found.write && !self.tracked,
            tracked: self.tracked && self.access == Access::Write,
            ..found
        })
    }

    /// Installs `leaf`, and records the write in the slot's dirty log, if the slot and the page that the fault has
    /// found are still current.
    ///
    /// # Errors
    /// [`Next`].
    #[inline(always)]
    fn install(&mut self, leaf: Leaf) -> Result<(), Next> {
        let space = self.vcpu.space_index();
        let (gfn, level, trail) = (self.gfn(), self.level, self.trail());
        let slot = self.slot.as_ref().expect(FILLED);
        // `on_tables` is not used here: returning its result would copy it in every fault.
        let Parts {
            vm,
            tables,
            slots,
            ring,
            cursor,
            mut path,
            counters,
        } = self.vcpu.parts(&self.walk);
        path.nx_split = self.nx_split;
        path.stores = self.of_guest && self.access == Access::Write;
        // `slots` may be a newer set of memslots than the set in which the fault found `slot`. In the newer set another
        // slot, or none, may contain the frame. So look up the log again.
        let log = match slot.log_at {
            Some(at) => {
                counters.slot_lookups.add(1);
                let log = slots.find(gfn).and_then(|slot| slot.log());
                log.filter(|log| ptr::eq(*log, at))
            }
            None => None,
        };
        let mut noted = false;
        let hvas = slot.hvas::<F>(gfn, level);
        // Since this fault chose its level, another vCPU may have made a level 1 table with executable pages for this
        // region (NX huge pages). A huge leaf would replace the table, and the other vCPU would fault again. So `valid`
        // checks for such a table under the lock.
        let nx_table = || {
            level > Level::PAGE
                && vm.policy.nx_huge_pages().is_on()
                && cursor.restarted().is_nx_split()
        };
        let valid = || {
            vm.in_progress.holds(self.sequence, &hvas)
                && log.is_some() == slot.log.is_some()
                && !(slot.takes_its_dirt_along() && vm.in_progress.is_slot_moving())
                && !nx_table()
        };
        let note = || {
            let Some(log) = log.filter(|log| log.kind().learns_from_fault(&leaf)) else {
                return;
            };
            match ring {
                Some(ring) if log.kind() == LogKind::Rings => {
                    let pushed = ring.push(RingSlot::new(space, slot.id), slot.page);
                    vm.platform.trace(pushed);
                    if log.has_bitmap() {
                        log.mark(slot.page);
                    }
                }
                _ => log.mark(slot.page),
            }
            noted = true;
        };
        let mut target = Target::new(cursor, trail);
        let installed = tables.map(&mut target, level, leaf, &mut path, valid, note);
        let reached = target.cursor.reached();
        counters.path_done(&path);
        counters.dirty_pages.add(noted as u64);
        let split = path.splits.iter().any(|n| *n > 0);
        self.tracked = path.tracked;
        if let (Some(trail), Some(root)) = (trail, path.root) {
            self.vcpu.roots.begin_with(trail.number, root);
        }
        self.walk = self.vcpu.pause(reached);
        match installed {
            Ok(installed) => {
                // If this fault has split a huge leaf, it was needed even if no leaf changed after the split: the
                // pieces may be executable, and the huge leaf was not.
                let is_spurious = installed == Installed::Spurious && !split;
                self.installed(leaf, installed == Installed::New, is_spurious);
                Ok(())
            }
            Err(retry) => Err(self.clear(retry)),
        }
    }

    /// Counts and traces the result of an install of `leaf`. `is_spurious` tells that the tables already allowed the
    /// access.
    #[inline(always)]
    fn installed(&mut self, leaf: Leaf, is_new: bool, is_spurious: bool) {
        self.is_new = is_new;
        if is_new {
            self.vcpu.counters().leaves_of(self.level).add(1);
        }
        let Some(counters) = self.counted() else {
            return;
        };
        if self.tracked && self.access == Access::Write {
            // The store is emulated, or reported by `Vcpu::stored`.
            counters.pf_emulate.add(1);
        } else {
            match is_spurious {
                true => counters.pf_spurious.add(1),
                false => counters.pf_fixed.add(1),
            }
            counters.pf_fast.add(self.fast.into());
        }
        if self.fast {
            self.vcpu.vm().platform.trace(Event::FastPageFault {
                gpa: self.gpa,
                access: self.access,
                new_spte: F::leaf(leaf, self.level),
                spurious: is_spurious,
            });
        }
    }

    /// Removes the obstacle that `retry` names, after an install has failed.
    #[cold]
    fn clear(&mut self, retry: Retry) -> Next {
        match retry {
            Retry::Stale => return self.stale(self.level),
            Retry::MustMend(level) => return self.mend(level),
            Retry::Conflict(level) => self.zap(level),
            Retry::Broken => {
                let gfn = self.gfn();
                return self.wait_while(|vcpu| {
                    let section = vcpu.vm().section();
                    let tables = vcpu.space().mmu.get(section.inside());
                    let found = tables.cursor(gfn).find(Level::PAGE);
                    matches!(found.entry::<F>(), Entry::Broken(_))
                });
            }
            _ => return self.clear_path(retry),
        }
        Next::Again
    }

    /// Removes the obstacle that `retry` names, if it has nothing to do with the leaf to install: flushes TLBs, or
    /// updates the shadow pages of the guest's tables.
    pub(super) fn clear_path(&mut self, retry: Retry) -> Next {
        let (key, trail) = (self.walk.key(), self.trail());
        match retry {
            Retry::Unsynced(level) => return Next::Compare(level),
            Retry::Unflushed(level) => self.flush(F::GRANULE.block(self.gfn(), level)),
            Retry::Unprotected => {
                let tables = trail.map(|trail| trail.tables());
                tables.into_iter().for_each(|gfns| self.flush(gfns));
            }
            Retry::Replaced(level) => {
                let root = trail.map(|trail| trail.root());
                root.into_iter().for_each(|root| {
                    (self.vcpu).outside(|vcpu| vcpu.vm().zap_entry(vcpu.space(), key, root, level));
                });
            }
            // `Unprepared` and `Tracked`: nothing to do, because the next attempt allocates missing memory and reads
            // the guest's tables again.
            _ => {}
        }
        Next::Again
    }

    /// With `nx_huge_pages_split` off: zaps the huge leaf that forbids the instruction fetch.
    pub(super) fn zap_huge(&mut self) {
        let found = self.vcpu.look(&mut self.walk);
        let (is_leaf, level) = (matches!(found.entry::<F>(), Entry::Leaf(_)), found.level);
        if is_leaf && level > Level::PAGE {
            self.zap(level);
        }
    }

    /// Zaps all leaves in the region of `level` around the page. If a slot logs dirty pages at the time of the zap, the
    /// dirty bits of its leaves are recorded in its log.
    fn zap(&mut self, level: Level) {
        let gfns = F::GRANULE.block(self.gfn(), level);
        self.vcpu.outside(|vcpu| {
            let mut op = RangeOp::begin(vcpu.vm(), vcpu.space());
            op.zap_slots(&gfns);
            op.finish();
        });
    }

    /// Flushes `gfns` from all TLBs, and stores this flush as the vCPU's last one.
    fn flush(&mut self, gfns: Range<Gfn>) {
        let flushed = self.vcpu.outside(|vcpu| {
            let counters = vcpu.counters();
            counters.remote_tlb_flush_requests.add(1);
            vcpu.vm().flush(gfns, Stale::ANYTHING, counters)
        });
        self.vcpu.set_flushed(flushed);
    }

    /// Completes a break-before-make of this fault, which has made a leaf of `level` invalid: flushes TLBs, and
    /// replaces the invalid entry by a table of smaller leaves.
    fn mend(&mut self, level: Level) -> Next {
        let (gfn, nx_split) = (self.gfn(), self.nx_split);
        let mut mended = false;
        while !mended {
            self.flush(F::GRANULE.block(gfn, level));
            mended = self.vcpu.on_tables(&self.walk, |_, tables, _, path| {
                path.nx_split = nx_split;
                tables.mend(gfn, level, path)
            });
        }
        let found = self.vcpu.tables().cursor(gfn).find(Level::PAGE);
        match found.entry::<F>() {
            Entry::Leaf(leaf) if leaf.allows(self.access) => {
                // One of the smaller leaves allows the access, so the vCPU repeats the access and finds that leaf.
                (self.counted()).inspect(|counters| counters.pf_fixed.add(1));
                Next::Stop(Stop::Retry)
            }
            _ => Next::Again,
        }
    }

    /// Waits outside the reader section while `condition` is true. If a bit of the attention word is set before, ends
    /// the access with [`Stop::Retry`].
    pub(super) fn wait_while(&mut self, condition: impl Fn(&Vcpu<P, F>) -> bool) -> Next {
        if !condition(self.vcpu) {
            return Next::Again;
        }
        let wanted = self.vcpu.outside(|vcpu| {
            let mut round = 0;
            while condition(vcpu) {
                if vcpu.attention().flag().load(Relaxed) != 0 {
                    return true;
                }
                vcpu.vm().wait(round, WaitFor::Invalidation);
                round += 1;
            }
            false
        });
        match wanted {
            true => Next::Stop(Stop::Retry),
            false => Next::Again,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
