//! The steps of a fault that decide what to install: the slot, the host page, the level and the leaf.

use super::Vcpu;
use super::fault::{FILLED, Fault, Next};
use super::slot_facts::SlotFacts;
use super::translate::Stop;
use crate::addr::{Access, Gfn, Hva, Level};
use crate::format::{Entry, Format, Leaf};
use crate::platform::{HostPage, Platform, Request, ResolveError};
use crate::shadow::trail::Target;
use crate::sync::held;
use crate::table::Reached;
use crate::trace::Event;
use crate::vm::{LogKind, is_executable};

impl<P: Platform, F: Format> Fault<'_, P, F> {
    /// Finds the memslot that contains the page, and ends an access that the slot does not allow. If there is no slot,
    /// installs an MMIO entry, so that the next access needs no slot look-up.
    ///
    /// # Errors
    /// [`Next`].
    #[inline(always)]
    pub(super) fn find_slot(&mut self) -> Result<(), Next> {
        let (gpa, access, gfn) = (self.gpa, self.access, self.gfn());
        let no_private_memory = Next::Stop(Stop::MemoryFault {
            gpa,
            access,
            private: true,
            absent: false,
        });
        let (set, slot) = self.vcpu.find_slot(gfn);
        let Some(slot) = slot else {
            let (private, generation) = (set.private.around(gfn).0, set.generation);
            return Err(match private {
                true => no_private_memory,
                false => self.no_slot(generation),
            });
        };
        let Some(slot) = SlotFacts::of::<F>(slot, gfn, &set.private) else {
            return Err(no_private_memory);
        };
        let slot = &*self.slot.insert(slot);
        let allowed = slot.limits.rights.allow(access);
        match access {
            // KVM reports a write to a read-only slot as MMIO, like an access to no slot.
            Access::Write if !allowed => Err(self.mmio()),
            Access::Write if is_log_full(self.vcpu, slot) => Err(Next::Stop(Stop::DirtyRingFull)),
            // A VMM can emulate a load, but not a fetch.
            Access::Execute if !allowed => Err(Next::Stop(Stop::NoExecute { gpa })),
            _ => Ok(()),
        }
    }

    /// Ends an access to a frame that no slot contains, in the slot set with the generation `generation`. Tries to
    /// install an MMIO entry.
    fn no_slot(&mut self, generation: u64) -> Next {
        if self.vcpu.vm().caches_mmio() {
            let trail = self.trail();
            let mapped = self.vcpu.on_tables(&self.walk, |_, tables, cursor, path| {
                tables.map_mmio(&mut Target::new(cursor, trail), generation, path)
            });
            match mapped {
                Ok(true) => {
                    self.vcpu.counters().pf_mmio_spte_created.add(1);
                    let gfn = self.gfn();
                    (self.vcpu.vm().platform).trace(Event::MarkMmioSpte { gfn, generation });
                }
                Ok(false) => {}
                Err(retry) => return self.clear_path(retry),
            }
        }
        self.mmio()
    }

    /// Ends an access that the client must emulate as MMIO.
    fn mmio(&self) -> Next {
        (self.counted()).inspect(|counters| counters.pf_emulate.add(1));
        Next::Stop(Stop::Mmio { gpa: self.gpa })
    }

    /// Finds the host page. If the walk ends at a leaf that only the dirty log has write-protected, the leaf tells the
    /// host page. Otherwise asks the platform.
    ///
    /// # Errors
    /// [`Next`].
    #[inline(always)]
    pub(super) fn find_page(&mut self) -> Result<(), Next> {
        // An existing leaf must not be used in two cases. A shadow leaf may map another page if the guest's tables have
        // changed. And while a slot moves to a range that overlaps its old range, its old leaves still exist, and map
        // other pages of the slot.
        let may_be_known = self.access == Access::Write
            && self.trail().is_none()
            && !self.vcpu.vm().in_progress.is_slot_leaving();
        if may_be_known && self.protected_page().is_some() {
            // The walk may have reached the leaf's table before `sequence` was read, and the move of a slot may have
            // detached the table before that, too. So walk from the root again: a leaf that this walk finds belongs to
            // the slot.
            self.walk = self.vcpu.pause(Reached::nothing::<F>(self.walk.key()));
            if let Some(page) = self.protected_page() {
                (self.fast, self.page) = (true, Some(page));
                return Ok(());
            }
        }
        let (gpa, access, gfn) = (self.gpa, self.access, self.gfn());
        let slot = self.slot.as_ref().expect(FILLED);
        let (id, hva) = (slot.id, slot.hva);
        let error = match (self.vcpu).outside(|vcpu| vcpu.resolve(id, gfn, hva, access)) {
            Ok(page) => {
                self.page = Some(page);
                return Ok(());
            }
            Err(error) => error,
        };
        let slot = self.slot.as_ref().expect(FILLED);
        let (private, absent) = (slot.private, error == ResolveError::Absent);
        let hvas = slot.hvas::<F>(gfn, Level::PAGE);
        Err(match error {
            ResolveError::Interrupted => Next::Stop(Stop::Retry),
            // The error may be due to a change meanwhile: the slot was deleted, or an invalidation of its memory has
            // begun, and may have ended.
            _ if !self.vcpu.vm().in_progress.holds(self.sequence, &hvas) => self.stale(Level::PAGE),
            _ if absent || private || slot.only_private_backing => Next::Stop(Stop::MemoryFault {
                gpa,
                access,
                private,
                absent,
            }),
            _ => Next::Stop(Stop::BadAddress { gpa, hva, error }),
        })
    }

    /// Returns the host page of the leaf at which the walk now ends, if only the dirty log has write-protected the
    /// leaf. Otherwise `None`.
    #[inline]
    fn protected_page(&mut self) -> Option<HostPage> {
        let gfn = self.gfn();
        let found = self.vcpu.look(&mut self.walk);
        match found.entry::<F>() {
            Entry::Leaf(leaf) if leaf.may_write => Some(HostPage {
                pfn: leaf.pfn.add(F::GRANULE.page_in(gfn, found.level)),
                level: found.level,
                writable: true,
                execute: leaf.execute || leaf.may_execute,
                memory: leaf.memory,
            }),
            _ => None,
        }
    }

    /// Before a write to a page that a snapshot does not have yet, gives the platform the page ([`crate::vm`],
    /// *snapshot*).
    ///
    /// # Errors
    /// [`Next`].
    #[inline(always)]
    pub(super) fn keep_old_page(&mut self) -> Result<(), Next> {
        match self.access == Access::Write && self.vcpu.vm().is_saving(self.sequence) {
            true => self.give_old_page(),
            false => Ok(()),
        }
    }

    /// Gives the platform the page, if the snapshot in progress does not have it yet, and finds the largest leaf all of
    /// whose pages the snapshot has.
    ///
    /// # Errors
    /// [`Next`].
    #[cold]
    fn give_old_page(&mut self) -> Result<(), Next> {
        let gfn = self.gfn();
        let (slot, page) = (self.slot.as_ref().expect(FILLED), self.page.expect(FILLED));
        let vm = self.vcpu.vm();
        // `None`: the snapshot has ended, and with it the sequence.
        let old = vm.old_pages().ok_or(Next::Again)?;
        let hvas = slot.hvas::<F>(gfn, Level::PAGE);
        let mut level = page.level.min(F::MAX_LEAF);
        while level > Level::PAGE {
            let block = F::GRANULE.block(gfn, level);
            let inside = slot.gfns.start <= block.start && block.end <= slot.gfns.end;
            if inside && old.has(&slot.hvas::<F>(gfn, level)) {
                break;
            }
            level = level.below();
        }
        if level == Level::PAGE && !old.has(&hvas) {
            if vm.in_progress.covers(&hvas) {
                // The host may be changing the page: the invalidation may have begun before the snapshot.
                return Err(self.stale(Level::PAGE));
            }
            (self.vcpu).outside(|vcpu| old.give(&hvas, &*vcpu.vm().platform));
            if !old.has(&hvas) {
                return Err(self.wait_while(|_| !old.has(&hvas)));
            }
        }
        self.largest = level;
        Ok(())
    }

    /// Chooses the level of the leaf, and returns the leaf. A read that is logged (policy `dirty_log_reads`) maps the
    /// page like a write, so that the log contains the page and the write that follows needs no fault. If the ring is
    /// full, the page is mapped for reading only; a write to it then stops with
    /// [`Stop::DirtyRingFull`].
    #[inline(always)]
    pub(super) fn choose_leaf(&mut self) -> Leaf {
        let (gfn, trail) = (self.gfn(), self.trail());
        let (slot, page) = (self.slot.as_ref().expect(FILLED), self.page.expect(FILLED));
        let vm = self.vcpu.vm();
        if slot.log.is_none() {
            let largest = page.level.min(self.largest);
            let largest = trail.map_or(largest, |trail| trail.leaf_level().min(largest));
            self.level = vm.fitting_level(&slot.gfns, gfn, page.pfn, largest);
            if self.level > Level::PAGE {
                self.level = self.vcpu.tables().mappable_level(gfn, self.level);
            }
            self.nx_split = self.level > Level::PAGE
                && vm.policy.nx_huge_pages().is_on()
                && (self.access == Access::Execute || self.vcpu.is_nx_split(&mut self.walk));
            if self.nx_split {
                self.level = Level::PAGE;
            }
        }
        let logs_read =
            slot.log.is_some() && vm.policy.logs_reads::<F>() && !is_log_full(self.vcpu, slot);
        let is_saving = vm.is_saving(self.sequence);
        let access = match logs_read && !is_saving {
            true => Access::Write,
            false => self.access,
        };
        let leaf = slot.leaf(&page, access, trail, is_saving);
        let leaf = vm.leaf_at(leaf, self.level);
        if self.nx_split && !vm.policy.nx_huge_pages_split().is_on() {
            self.zap_huge();
        }
        let level = self.level;
        (self.vcpu.vm().platform).trace(Event::SpteRequested {
            gfn,
            pfn: leaf.pfn,
            level,
        });
        leaf
    }

    /// Call if the slot or the page that the fault has found may be out of date. If an invalidation of the memory that
    /// backs the leaf of `level` is in progress, or a move that adds no leaf to the slot meanwhile, waits for its end.
    #[cold]
    pub(super) fn stale(&mut self, level: Level) -> Next {
        self.vcpu.counters().pf_retried.add(1);
        let slot = self.slot.as_ref().expect(FILLED);
        let hvas = slot.hvas::<F>(self.gfn(), level);
        let takes_its_dirt_along = slot.takes_its_dirt_along();
        self.wait_while(|vcpu| {
            let in_progress = &vcpu.vm().in_progress;
            in_progress.covers(&hvas) || takes_its_dirt_along && in_progress.is_slot_moving()
        })
    }
}

/// Returns whether a write to `slot` must be pushed to the vCPU's dirty ring, and there is no ring or no space in it.
fn is_log_full<P: Platform, F: Format>(vcpu: &Vcpu<P, F>, slot: &SlotFacts) -> bool {
    let to_ring = slot.log == Some(LogKind::Rings);
    to_ring && vcpu.ring().is_none_or(|ring| ring.is_soft_full())
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Asks the platform for the page of `gfn` in `slot`, which `hva` backs. Call outside the reader section.
    pub(super) fn resolve(
        &self,
        slot: u32,
        gfn: Gfn,
        hva: Hva,
        access: Access,
    ) -> Result<HostPage, ResolveError> {
        held::assert_none("to resolve a page");
        let host = self.vm().platform.resolve(&Request {
            vm: self.vm().id,
            space: self.space_index(),
            slot,
            gfn,
            backing: hva,
            access,
        })?;
        let allowed = match access {
            Access::Read => true,
            Access::Write => host.writable,
            Access::Execute => is_executable(&host),
        };
        match allowed && F::holds(host.pfn) {
            true => Ok(host),
            false => Err(ResolveError::BadAddress),
        }
    }
}
