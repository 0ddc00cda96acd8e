//! What a fault is to install: slot, host page, level and rights, with what these rest on.

use core::ops::Range;
use core::ptr;

use super::Vcpu;
use super::fault::{Fault, Halt, Outcome, Want};
use super::translate::Stop;
use crate::addr::{Access, Gfn, Hva, Level};
use crate::format::{Entry, Format, Leaf};
use crate::platform::{HostPage, Platform, Request, ResolveError};
use crate::shadow::trail::Trail;
use crate::slots::{Limits, Memslot, PrivateFrames};
use crate::sync::held;
use crate::trace::Event;
use crate::vm::{DirtyLog, InProgress, LogKind, Sequence, is_executable, leaf_of};

/// What a fault installs. It holds as long as its sequence does.
pub(super) struct Plan<'s> {
    pub(super) slot: &'s SlotFacts,
    /// Its frame is that of the first page of the leaf.
    pub(super) leaf: Leaf,
    pub(super) level: Level,
    /// The leaf is small because of the policy `nx_huge_pages` alone.
    pub(super) nx_split: bool,
    /// Neither slot nor host were asked for the page: the tables knew it.
    pub(super) fast: bool,
    pub(super) sequence: Sequence,
}

/// What a fault needs of its slot. A copy: the slot may be deleted while the backing is resolved.
pub(super) struct SlotFacts {
    pub(super) id: u32,
    /// The slot's frames around the page that are private if the page is, and shared if it is.
    pub(super) gfns: Range<Gfn>,
    /// Backing of the first of these.
    pub(super) hva_base: Hva,
    /// Backing of the page.
    hva: Hva,
    /// The page's number in the slot.
    pub(super) page: u64,
    private: bool,
    /// The private backing of the slot backs its shared frames, too (KVM: `KVM_MEMSLOT_GMEM_ONLY`).
    only_private_backing: bool,
    limits: Limits,
    /// How the slot logs.
    pub(super) log: Option<LogKind>,
    /// Which log that is; it is looked up again for the install. (To hold a share of it would be a count that every
    /// vCPU writes in every fault.)
    pub(super) log_at: Option<*const DirtyLog>,
}

impl SlotFacts {
    /// `None`: the frame is private, and the slot has no private backing.
    pub(super) fn of<F: Format>(slot: &Memslot, gfn: Gfn, private: &PrivateFrames) -> Option<Self> {
        let (private, alike) = private.around(gfn);
        let backing = if private {
            slot.private()?
        } else {
            slot.backing()
        };
        let gfns = slot.gfns();
        let gfns = gfns.start.max(alike.start)..gfns.end.min(alike.end);
        let page = |gfn: Gfn| gfn.0 - slot.base().0;
        Some(SlotFacts {
            id: slot.id(),
            hva_base: F::GRANULE.add_pages(backing, page(gfns.start)),
            gfns,
            hva: F::GRANULE.add_pages(backing, page(gfn)),
            page: page(gfn),
            private,
            only_private_backing: slot.private() == Some(slot.backing()),
            limits: slot.limits(),
            log: slot.log().map(|log| log.kind()),
            log_at: slot.log().map(ptr::from_ref),
        })
    }

    /// Returns what backs a leaf of `level` around `gfn`, the page of these facts; the leaf fits the frames.
    pub(super) fn hvas<F: Format>(&self, gfn: Gfn, level: Level) -> Range<Hva> {
        let start = Hva(self.hva.0 - (F::GRANULE.page_in(gfn, level) << F::GRANULE.shift()));
        start..F::GRANULE.add_pages(start, F::GRANULE.pages(level))
    }

    /// Returns the smallest range around `range` that begins and ends at multiples of `pages`, rounded down to a power of two, of at
    /// most a table's; as far as it is in the slot.
    pub(super) fn around<F: Format>(&self, range: &Range<Gfn>, pages: u64) -> Range<Gfn> {
        let pages = 1 << pages.clamp(1, F::GRANULE.pages(Level::MEGA)).ilog2();
        let (start, end) = (
            range.start.0 & !(pages - 1),
            range.end.0.next_multiple_of(pages),
        );
        self.gfns.start.max(Gfn(start))..self.gfns.end.min(Gfn(end))
    }

    /// Whether leaves of the slot, or those in shadow pages of the guest's tables, must not be writable before a write was noted.
    fn protects(&self, shadowed: bool) -> bool {
        let protects = |log: LogKind| log.protects() || shadowed && log == LogKind::Buffers;
        self.log.is_some_and(protects)
    }

    /// Whether the slot may be about to move, and its leaves' dirty bits are its log, which it takes along: they
    /// were noted, or will be, as pages of where it is now, and no leaf may be added to them.
    pub(super) fn may_move_with_its_dirt(&self, in_progress: &InProgress) -> bool {
        self.log.is_some_and(|log| !log.protects()) && in_progress.is_slot_moving()
    }

    /// Returns the leaf for the page `host` of the slot and an access, or for one that may follow. `trail`: the way to it through the
    /// guest's tables, which limit its rights.
    pub(super) fn leaf(&self, host: &HostPage, access: Access, trail: Option<&Trail>) -> Leaf {
        let protects = self.protects(trail.is_some());
        let leaf = leaf_of(host, self.limits, protects, access);
        match trail {
            None => leaf,
            Some(trail) => leaf.granted(trail.rights),
        }
    }
}

impl<P: Platform, F: Format> Fault<'_, P, F> {
    /// Finds out what to install for the access, in `slot`. `sequence` was taken before the slot, and the leaf that is
    /// there, were looked at: a move may have put another page of the same slot there since the walk that faulted.
    #[inline(always)]
    pub(super) fn plan<'s>(
        &mut self,
        slot: &'s SlotFacts,
        sequence: Sequence,
    ) -> Result<Plan<'s>, Halt> {
        // The leaf that is there may map another page: the guest's tables may have changed since.
        let known = match self.want.target.trail::<F>() {
            None => self.known_page(),
            Some(_) => None,
        };
        let host = match known {
            Some(host) => host,
            None => self.host_page(slot, sequence)?,
        };
        let (level, nx_split) = self.level(slot, &host);
        let trail = self.want.target.trail::<F>();
        let leaf = slot.leaf(&host, self.logged_access(slot), trail);
        Ok(Plan {
            slot,
            leaf: self.vcpu.vm().leaf_at(leaf, level),
            level,
            nx_split,
            fast: known.is_some(),
            sequence,
        })
    }

    /// Finds the slot that holds the page, and refuses an access that the slot does not allow. If there is no slot,
    /// installs an MMIO entry: the next access needs no look-up.
    #[inline(always)]
    pub(super) fn slot(&mut self) -> Result<SlotFacts, Halt> {
        let Want { gpa, access, .. } = self.want;
        let gfn = self.want.gfn::<F>();
        let (set, slot) = self.vcpu.find_slot(gfn);
        let slot = match slot {
            Some(slot) => SlotFacts::of::<F>(slot, gfn, &set.private),
            None if set.private.around(gfn).0 => None,
            None => {
                let generation = set.generation;
                return Err(self.no_slot(generation));
            }
        };
        let Some(slot) = slot else {
            return Err(Halt::Stop(Stop::MemoryFault {
                gpa,
                access,
                private: true,
                absent: false,
            }));
        };
        let allowed = slot.limits.rights.allow(access);
        match access {
            // KVM answers a write to a read-only slot as MMIO, too.
            Access::Write if !allowed => Err(self.mmio()),
            Access::Write if self.is_log_full(&slot) => Err(Halt::Stop(Stop::DirtyRingFull)),
            // No client can emulate a fetch as it can a load.
            Access::Execute if !allowed => Err(Halt::Stop(Stop::NoExecute { gpa })),
            _ => Ok(slot),
        }
    }

    /// Ends an access to no slot, in the slot set of `generation`.
    fn no_slot(&mut self, generation: u64) -> Halt {
        if self.vcpu.vm().caches_mmio() {
            let target = &mut self.want.target;
            // SAFETY: as for the install of a leaf (`Fault::install`).
            let mapped = (self.vcpu)
                .on_tables(|_, tables, path| unsafe { tables.map_mmio(target, generation, path) });
            match mapped {
                Ok(true) => {
                    self.vcpu.counters().pf_mmio_spte_created.add(1);
                    let gfn = self.want.gfn::<F>();
                    (self.vcpu.vm().platform).trace(Event::MarkMmioSpte { gfn, generation });
                }
                Ok(false) => {}
                Err(retry) => return self.clear_path(retry),
            }
        }
        self.mmio()
    }

    /// Ends an access that the client emulates.
    fn mmio(&mut self) -> Halt {
        let gpa = self.want.gpa;
        self.count(Outcome::Emulated);
        Halt::Stop(Stop::Mmio { gpa })
    }

    /// Whether a write to `slot` goes to a ring that has no space for it.
    fn is_log_full(&self, slot: &SlotFacts) -> bool {
        let to_ring = slot.log == Some(LogKind::Rings);
        to_ring && self.vcpu.ring().is_none_or(|ring| ring.is_soft_full())
    }

    /// Returns the access that the leaf is made for. A read that is logged (policy `dirty_log_reads`) maps the page
    /// as a write does, so that the log names it and the write that follows needs no fault. If the ring is
    /// full it is mapped for reading, and the write that follows stops.
    fn logged_access(&self, slot: &SlotFacts) -> Access {
        let logged = slot.log.is_some() && self.vcpu.vm().policy.logs_reads::<F>();
        match logged && !self.is_log_full(slot) {
            true => Access::Write,
            false => self.want.access,
        }
    }

    /// Returns the page of a leaf that is write-protected for the dirty log only: neither slot nor host needs to be
    /// asked.
    #[inline(always)]
    fn known_page(&mut self) -> Option<HostPage> {
        // While a slot moves onto part of itself, its old leaves are still there: what is known of this
        // frame may be the page next to it.
        if self.want.access != Access::Write || self.vcpu.vm().in_progress.is_slot_leaving() {
            return None;
        }
        // SAFETY: without a trail the walk begins with a root that stays. The cursor was restarted when it had to be
        // (`Self::outside`).
        let found = unsafe { self.vcpu.tables().find(&mut self.want.target.cursor) };
        match found.entry::<F>() {
            Entry::Leaf(leaf) if leaf.may_write => Some(HostPage {
                pfn: leaf
                    .pfn
                    .add(F::GRANULE.page_in(self.want.gfn::<F>(), found.level)),
                level: found.level,
                writable: true,
                execute: leaf.execute || leaf.may_execute,
                memory: leaf.memory,
            }),
            _ => None,
        }
    }

    /// Asks the host for the page.
    #[inline(always)]
    fn host_page(&mut self, slot: &SlotFacts, sequence: Sequence) -> Result<HostPage, Halt> {
        let Want { gpa, access, .. } = self.want;
        let hva = slot.hva;
        let gfn = self.want.gfn::<F>();
        let error = match self.outside(|vcpu| vcpu.resolve(slot.id, gfn, hva, access)) {
            Ok(host) => return Ok(host),
            Err(ResolveError::Interrupted) => return Err(Halt::Stop(Stop::Retry)),
            Err(error) => error,
        };
        let hvas = slot.hvas::<F>(self.want.gfn::<F>(), Level::PAGE);
        if !self.vcpu.vm().in_progress.holds(sequence, &hvas) {
            // The slot may have been deleted, or its memory come back, or be about to.
            return Err(self.stale(slot, Level::PAGE));
        }
        let private = slot.private;
        let absent = error == ResolveError::Absent;
        Err(Halt::Stop(
            match absent || private || slot.only_private_backing {
                true => Stop::MemoryFault {
                    gpa,
                    access,
                    private,
                    absent,
                },
                false => Stop::BadAddress { gpa, hva, error },
            },
        ))
    }

    /// Returns the level of the leaf. The flag says that NX alone keeps it from being larger.
    #[inline(always)]
    fn level(&self, slot: &SlotFacts, host: &HostPage) -> (Level, bool) {
        if slot.log.is_some() {
            return (Level::PAGE, false);
        }
        let Want { target, access, .. } = self.want;
        let is_nx_split =
            // SAFETY: the walk may be made.
            || self.vcpu.may_walk_from(&target) && unsafe { self.vcpu.tables().is_nx_split(target.key()) };
        let vm = self.vcpu.vm();
        let (gfn, trail) = (self.want.gfn::<F>(), self.want.target.trail::<F>());
        let largest = trail.map_or(host.level, |trail| trail.leaf_level().min(host.level));
        let mut level = vm.fitting_level(&slot.gfns, gfn, host.pfn, largest);
        if level > Level::PAGE {
            level = self.vcpu.tables().mappable_level(gfn, level);
        }
        let nx = level > Level::PAGE
            && vm.policy.nx_huge_pages().is_on()
            && (access == Access::Execute || is_nx_split());
        match nx {
            true => (Level::PAGE, true),
            false => (level, false),
        }
    }

    /// Call when what was found out about `slot` holds no more: waits for an invalidation of what backs a leaf of
    /// `level`, or for the move of the slot, to end, if that was it.
    pub(super) fn stale(&mut self, slot: &SlotFacts, level: Level) -> Halt {
        self.vcpu.counters().pf_retried.add(1);
        let hvas = slot.hvas::<F>(self.want.gfn::<F>(), level);
        self.wait_while(|vcpu, _| {
            let in_progress = &vcpu.vm().in_progress;
            in_progress.covers(&hvas) || slot.may_move_with_its_dirt(in_progress)
        })
    }
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Asks the platform for the page of `gfn` in `slot`, which is at `hva`. Call outside the reader section.
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
