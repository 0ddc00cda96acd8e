//! The fault pipeline, step by step:
//!
//! 1. an MMIO entry of the current generation answers MMIO, with no look-up ([`Vcpu::translate`]);
//! 2. a leaf that is write-protected only for the dirty log is fixed in place;
//! 3. the slot by gfn; none: an MMIO entry is installed. A write to a read-only slot is MMIO, too.
//!    Whether the frame is private tells which of the slot's backings is meant;
//! 4. the backing is resolved, holding nothing, outside the reader section;
//! 5. the level: the largest that slot, attributes, alignment, host mapping, dirty log and NX allow;
//! 6. the install, under the lock of one table, if what was known still holds
//!    ([`crate::vm::invalidate`]); otherwise from the beginning. A huge leaf in the way is split in
//!    place;
//! 7. the pages around it ([`crate::vm::prefetch`]).

use crate::sync::atomic::Ordering::Relaxed;
use core::fmt;
use core::ops::Range;
use core::ptr;

use super::{DirtyLog, InProgress, LogKind, RangeOp, Sequence};
use crate::addr::{Access, Gfn, Gpa, Hpa, Hva, Level, PAGE_SHIFT};
use crate::format::{Entry, Format, Leaf};
use crate::platform::{HostPage, MemoryType, Platform, ResolveError, Stale, WaitFor};
use crate::slots::{Memslot, PrivateFrames, SlotFlags};
use crate::sync::held;
use crate::table::{Mapped, OutOfMemory};
use crate::vcpu::{Parts, Vcpu};

/// A page of guest memory as the second level translates it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// First byte of the 4 KiB host page.
    pub host: Hpa,
    /// Level of the leaf it came from.
    pub level: Level,
    /// Writes need no further fault, nor a dirty bit set.
    pub write: bool,
    /// Fetches need no further fault.
    pub execute: bool,
}

/// Why an access has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// No memslot holds the page, or it is a write to a read-only one: the client emulates it.
    Mmio {
        /// The address that was accessed.
        gpa: Gpa,
    },
    /// The vCPU was outside while something was flushed, or is wanted elsewhere. Every translation
    /// it remembers is void: drop them, call [`Vcpu::quiesce`], look at the attention word, and
    /// execute again.
    Retry,
    /// The memslot's backing cannot be had: KVM_RUN answers EFAULT.
    BadAddress {
        /// The address that was accessed.
        gpa: Gpa,
        /// What backs its page.
        hva: Hva,
        /// What the platform said.
        error: ResolveError,
    },
    /// The vCPU's dirty ring is full up to its reserve: the client collects, resets, and comes again.
    /// Nothing was changed.
    DirtyRingFull,
    /// The page is private, and no private memory can be had for it: there is no memslot, or it has no
    /// private backing, or that is gone. KVM_EXIT_MEMORY_FAULT; never answered as MMIO.
    MemoryFault {
        /// The address that was accessed.
        gpa: Gpa,
        /// How.
        access: Access,
    },
    /// No memory for a page table. Nothing was changed.
    OutOfMemory {
        /// The address that was accessed.
        gpa: Gpa,
    },
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stop::Mmio { gpa } => write!(f, "guest access to {gpa}: no memslot, emulate it"),
            Stop::Retry => f.write_str("guest access interrupted: quiesce and execute again"),
            Stop::BadAddress { gpa, hva, error } => write!(
                f,
                "guest access to {gpa} (backed by {hva}): {error}; map it, or delete the memslot"
            ),
            Stop::MemoryFault { gpa, .. } => write!(
                f,
                "guest access to {gpa}: it is private and has no private memory; share it, or give the memslot some"
            ),
            Stop::DirtyRingFull => f.write_str("guest write: the dirty ring is full, reset it"),
            Stop::OutOfMemory { gpa } => write!(f, "guest access to {gpa}: {OutOfMemory}"),
        }
    }
}

impl core::error::Error for Stop {}

/// What the fault needs of its slot. A copy: the slot may go while the backing is resolved.
pub(super) struct SlotFacts {
    id: u32,
    /// Its frames around the one in question that are private if that is, shared if that is.
    pub(super) gfns: Range<Gfn>,
    /// Backing of the first of these.
    pub(super) hva_base: Hva,
    /// Backing of the page in question.
    hva: Hva,
    /// Its number in the slot.
    page: u64,
    private: bool,
    flags: SlotFlags,
    /// How it logs.
    log: Option<LogKind>,
    /// Which log that is; it is looked up again for the install. (To hold a share of it would be a count that every
    /// vCPU writes in every fault.)
    log_at: Option<*const DirtyLog>,
}

impl SlotFacts {
    /// `None`: the frame is private, and the slot has no private backing.
    pub(super) fn of(slot: &Memslot, gfn: Gfn, private: &PrivateFrames) -> Option<Self> {
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
            hva_base: backing.add_pages(page(gfns.start)),
            gfns,
            hva: backing.add_pages(page(gfn)),
            page: page(gfn),
            private,
            flags: slot.flags(),
            log: slot.log().map(|log| log.kind()),
            log_at: slot.log().map(ptr::from_ref),
        })
    }

    /// What backs a leaf of `level` around `gfn`, the page of these facts; the leaf fits the frames.
    fn hvas(&self, gfn: Gfn, level: Level) -> Range<Hva> {
        let start = Hva(self.hva.0 - ((gfn.0 - gfn.align_down(level).0) << PAGE_SHIFT));
        start..start.add_pages(level.pages())
    }

    /// Whether its leaves must not be writable before a write was noted.
    fn protects(&self) -> bool {
        self.log.is_some_and(LogKind::protects)
    }

    /// Whether the slot may be about to move, and its leaves' dirty bits are its log, which it takes along: they
    /// were noted, or will be, as pages of where it is now, and no leaf may be added to them.
    fn may_move_with_its_dirt(&self, in_progress: &InProgress) -> bool {
        self.log == Some(LogKind::DirtyBits) && in_progress.is_slot_moving()
    }
}

/// What one attempt came to.
enum Attempt {
    Done(Translation, Outcome),
    /// This fault has put the pieces of a split leaf in its place. One is what was asked for: the access
    /// finds it.
    Mended,
    /// Something changed meanwhile.
    Again,
    Stop(Stop),
}

/// How a fault ended, as KVM counts it.
#[derive(Clone, Copy)]
pub(super) enum Outcome {
    /// It installed a leaf or widened one; `fast`: neither slot nor host were asked.
    Fixed { fast: bool },
    /// The leaf allowed the access already.
    Spurious { fast: bool },
    /// The client emulates the access.
    Emulated,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// The host page behind `gpa` for `access`: the walk, and the fault if the walk finds nothing
    /// that allows it. The answer may be used until [`Vcpu::quiesce`] or [`Vcpu::leave`].
    ///
    /// # Errors
    /// [`Stop`]. After [`Stop::Retry`] all earlier answers are void.
    ///
    /// # Panics
    /// If the vCPU was not entered.
    #[inline(always)]
    pub fn translate(&mut self, gpa: Gpa, access: Access) -> Result<Translation, Stop> {
        let gfn = gpa.gfn();
        if let Some(leaf) = self.cached_leaf(gpa, access) {
            return Ok(translation(leaf, Level::PAGE, gfn));
        }
        // Twice the same: the compiler knows the level of the first, which is the common one.
        match self.walk(gpa) {
            Some(Ok(found)) => {
                if let Some(leaf) = found.ready::<F>(access) {
                    let table = found.table;
                    // SAFETY: the walk has found the leaf in this table just now.
                    unsafe { self.remember(gpa, table) };
                    return Ok(translation(leaf, Level::PAGE, gfn));
                }
            }
            Some(Err(found)) => {
                if let Some(leaf) = found.ready::<F>(access) {
                    return Ok(translation(leaf, found.level, gfn));
                }
            }
            None => {}
        }
        self.translate_slowly(gpa, access)
    }

    /// [`Vcpu::translate`] where there is more to do than to look.
    #[cold]
    #[inline(never)]
    fn translate_slowly(&mut self, gpa: Gpa, access: Access) -> Result<Translation, Stop> {
        assert!(self.is_entered(), "Vcpu::translate outside enter/leave");
        if !self.may_walk(gpa) {
            self.count_fault(Outcome::Emulated);
            return Err(Stop::Mmio { gpa });
        }
        // A fault may install another page elsewhere than in the table that is cached.
        self.forget(gpa);
        if let Some(answer) = self.translate_mapped(gpa, access) {
            return answer;
        }
        self.counters().pf_taken.add(1);
        let (answer, outcome) = self.fault(gpa, access);
        outcome.into_iter().for_each(|how| self.count_fault(how));
        answer
    }

    /// Maps the page at `gpa` for reading, if it is not mapped. It is no fault of the guest, and not counted
    /// as one. Errors as [`Vcpu::translate`].
    pub(super) fn prefault_page(&mut self, gpa: Gpa) -> Result<Translation, Stop> {
        assert!(self.is_entered(), "Vcpu::prefault outside enter/leave");
        if !self.may_walk(gpa) {
            return Err(Stop::Mmio { gpa });
        }
        match self.translate_mapped(gpa, Access::Read) {
            Some(answer) => answer,
            None => self.fault(gpa, Access::Read).0,
        }
    }

    fn count_fault(&self, how: Outcome) {
        let counters = self.counters();
        match how {
            Outcome::Fixed { fast } => {
                counters.pf_fixed.add(1);
                counters.pf_fast.add(fast.into());
            }
            Outcome::Spurious { fast } => {
                counters.pf_spurious.add(1);
                counters.pf_fast.add(fast.into());
            }
            Outcome::Emulated => counters.pf_emulate.add(1),
        }
    }

    /// What the tables say of an access to `gpa`, as far as they reach. `None`: they do not allow it.
    fn translate_mapped(&mut self, gpa: Gpa, access: Access) -> Option<Result<Translation, Stop>> {
        let gfn = gpa.gfn();
        loop {
            let found = self.tree().lookup(gfn);
            return match found.entry::<F>() {
                Entry::Leaf(leaf) if leaf.allows(access) => {
                    let write = access == Access::Write;
                    if !found.mark::<F>(write) {
                        continue;
                    }
                    let leaf = Leaf {
                        dirty: leaf.dirty || write,
                        ..leaf
                    };
                    Some(Ok(translation(leaf, found.level, gfn)))
                }
                Entry::Mmio { generation } if self.is_current(generation) => {
                    self.counters().mmio_cached.add(1);
                    Some(Err(Stop::Mmio { gpa }))
                }
                _ => None,
            };
        }
    }

    /// A hardware CPU has left the guest because its second-level walk did not allow `access` to
    /// `gpa`: brings the tables to where it does. `Ok`: run the guest again, which executes the instruction
    /// again, and faults again if there was more to it. That it was somebody else's MMIO entry that the
    /// walker reported (a reserved bit, a misconfiguration) makes no difference here: the entry tells.
    ///
    /// The vCPU is inside for the time of this call alone. It needs nothing else of [`Vcpu::enter`]
    /// and [`Vcpu::quiesce`], because its translations are in a TLB, which [`Platform::flush`] reaches.
    ///
    /// Two things are the caller's, because they differ from CPU to CPU, and are needed before the guest
    /// runs again: that its walker sees the stores (AArch64: DSB ISHST; RISC-V: a fence; x86: nothing), and,
    /// where a CPU may keep the entry that faulted (AArch64 and RISC-V, after a fault on rights; RISC-V,
    /// after any), that it forgets it. No other CPU has to.
    ///
    /// # Errors
    /// [`Stop`], but for [`Stop::Retry`].
    ///
    /// # Panics
    /// If the vCPU was entered.
    pub fn hardware_fault(&mut self, gpa: Gpa, access: Access) -> Result<(), Stop> {
        assert!(
            !self.is_entered(),
            "Vcpu::hardware_fault inside enter/leave"
        );
        self.enter(0);
        self.quiesce();
        let answer = self.translate(gpa, access);
        self.leave();
        match answer {
            Ok(_) | Err(Stop::Retry) => Ok(()),
            Err(stop) => Err(stop),
        }
    }

    /// An access through an answer of [`Vcpu::translate`] found the host page at `hva` gone: asks the
    /// platform again, outside, for as long as that takes. `Ok`: try the access again.
    ///
    /// # Errors
    /// [`Stop::BadAddress`] if the page cannot be had, [`Stop::Retry`] as in `translate`.
    pub fn revalidate(&mut self, gpa: Gpa, hva: Hva, access: Access) -> Result<(), Stop> {
        let mut slept = false;
        match self.resolve(hva, access, &mut slept) {
            Err(error) if error != ResolveError::Interrupted => {
                Err(Stop::BadAddress { gpa, hva, error })
            }
            Ok(_) if !slept => Ok(()),
            _ => Err(Stop::Retry),
        }
    }

    /// Whether an MMIO entry with these generation bits still tells the truth.
    fn is_current(&self, generation: u64) -> bool {
        let mask = (1u64 << F::MMIO_GENERATION_BITS) - 1;
        self.vm().caches_mmio() && self.slots().generation & mask == generation
    }

    /// Brings the tables to where they allow `access`. Returns also how, if it came to an end.
    #[cold]
    fn fault(&mut self, gpa: Gpa, access: Access) -> (Result<Translation, Stop>, Option<Outcome>) {
        let mut slept = false;
        let (answer, outcome) = loop {
            if self.fill_frames().is_err() {
                return (Err(Stop::OutOfMemory { gpa }), None);
            }
            break match self.attempt(gpa, access, &mut slept) {
                Attempt::Again if !slept => continue,
                Attempt::Again => (Err(Stop::Retry), None),
                Attempt::Done(translation, how) => (Ok(translation), Some(how)),
                Attempt::Mended => (Err(Stop::Retry), Some(Outcome::Fixed { fast: false })),
                Attempt::Stop(stop @ Stop::Mmio { .. }) => (Err(stop), Some(Outcome::Emulated)),
                Attempt::Stop(stop) => (Err(stop), None),
            };
        };
        // It slept through a flush: what it returned to its CPU before is void, whatever the answer is
        // this time.
        (if slept { Err(Stop::Retry) } else { answer }, outcome)
    }

    fn attempt(&mut self, gpa: Gpa, access: Access, slept: &mut bool) -> Attempt {
        let gfn = gpa.gfn();
        // Everything it goes by is looked at after the sequence was taken, the leaf, too: a move may
        // have put another page of the same slot there since the walk that faulted.
        let sequence = self.vm().in_progress.sequence();
        let (set, slot) = self.find_slot(gfn);
        let slot = match slot {
            Some(slot) => SlotFacts::of(slot, gfn, &set.private),
            None if set.private.around(gfn).0 => None,
            None => {
                let generation = set.generation;
                return Attempt::Stop(self.no_slot(gpa, generation));
            }
        };
        let Some(slot) = slot else {
            return Attempt::Stop(Stop::MemoryFault { gpa, access });
        };
        if access == Access::Write {
            if slot.flags.has(SlotFlags::READONLY) {
                return Attempt::Stop(Stop::Mmio { gpa });
            }
            if self.is_log_full(&slot) {
                return Attempt::Stop(Stop::DirtyRingFull);
            }
        }
        let known = self.known_page(gfn, access);
        let host = match known {
            Some(host) => host,
            None => match self.resolve(slot.hva, access, slept) {
                Ok(host) => host,
                Err(ResolveError::Interrupted) => return Attempt::Stop(Stop::Retry),
                Err(error) if self.holds(sequence, &slot.hvas(gfn, Level::PAGE)) => {
                    let hva = slot.hva;
                    return Attempt::Stop(match slot.private {
                        true => Stop::MemoryFault { gpa, access },
                        false => Stop::BadAddress { gpa, hva, error },
                    });
                }
                // The slot may have gone, or its memory come back, or be about to.
                Err(_) => return self.stale(&slot, &slot.hvas(gfn, Level::PAGE), slept),
            },
        };
        let (level, nx_split) = self.level(gfn, &slot, &host, access);
        if nx_split && !self.vm().policy.nx_splits_in_place() {
            self.zap_huge(gfn, slept);
        }
        let leaf = leaf_for(&slot, &host, self.logged_access(&slot, access));
        let leaf = Leaf {
            pfn: leaf.pfn.align_down(level),
            execute: leaf.execute && (level == Level::PAGE || !self.vm().policy.huge_is_nx()),
            ..leaf
        };
        let (mapped, split) = self.install(gfn, level, leaf, &slot, sequence, nx_split);
        let fast = known.is_some();
        let how = match mapped {
            Mapped::New => {
                self.counters().leaves_added(level);
                if level == Level::PAGE && slot.log.is_none() {
                    self.prefetch(gfn, &slot, sequence);
                }
                Outcome::Fixed { fast: false }
            }
            Mapped::Widened => Outcome::Fixed { fast },
            // The split itself has given the right: to execute a small page.
            Mapped::Spurious if split => Outcome::Fixed { fast },
            Mapped::Spurious => Outcome::Spurious { fast },
            Mapped::Stale => return self.stale(&slot, &slot.hvas(gfn, level), slept),
            Mapped::InTheWay => {
                self.zap_as_vcpu(gfn, level, slept);
                return Attempt::Again;
            }
            Mapped::MustMend(above) => {
                let mut mended = false;
                while !mended {
                    self.flush_as_vcpu(gfn, above, slept);
                    mended = self.on_tables(|_, tree, path| {
                        path.nx_split = nx_split;
                        tree.mend(gfn, above, path)
                    });
                }
                return self.mended(gfn, access);
            }
            Mapped::Unflushed(above) => {
                self.flush_as_vcpu(gfn, above, slept);
                return Attempt::Again;
            }
            Mapped::Broken => return self.wait_for_mend(gfn, slept),
        };
        Attempt::Done(translation(leaf, level, gfn), how)
    }

    /// Whether a write to the slot goes to a ring that has no room for it.
    fn is_log_full(&self, slot: &SlotFacts) -> bool {
        let to_ring = slot.log == Some(LogKind::Rings);
        to_ring && self.ring().is_none_or(|ring| ring.is_soft_full())
    }

    /// What the leaf is made for. A read that is logged (policy `dirty_log_reads`) maps the page as a
    /// write does, so that the log names it and the write that follows needs no fault. If the ring is
    /// full it is mapped for reading, and the write that follows stops.
    fn logged_access(&self, slot: &SlotFacts, access: Access) -> Access {
        let logged = slot.log.is_some() && self.vm().policy.logs_reads::<F>();
        match logged && !self.is_log_full(slot) {
            true => Access::Write,
            false => access,
        }
    }

    /// Step 2: the page behind a leaf that lost its right to write to the dirty log only.
    fn known_page(&self, gfn: Gfn, access: Access) -> Option<HostPage> {
        // While a slot moves onto part of itself, its old leaves are still there: what is known of this
        // frame may be the page next to it.
        if self.vm().in_progress.is_slot_leaving() {
            return None;
        }
        let found = self.tree().lookup(gfn);
        match found.entry::<F>() {
            Entry::Leaf(leaf) if access == Access::Write && leaf.may_write => Some(HostPage {
                pfn: leaf.pfn.add(gfn.0 & (found.level.pages() - 1)),
                level: found.level,
                writable: true,
                memory: leaf.memory,
            }),
            _ => None,
        }
    }

    /// Step 5. The flag says that NX alone keeps the leaf from being larger.
    fn level(&self, gfn: Gfn, slot: &SlotFacts, host: &HostPage, access: Access) -> (Level, bool) {
        if slot.log.is_some() {
            return (Level::PAGE, false);
        }
        let level = self
            .vm()
            .fitting_level(&slot.gfns, gfn, host.pfn, host.level);
        let nx = level > Level::PAGE
            && self.vm().policy.huge_is_nx()
            && (access == Access::Execute || self.tree().is_nx_split(gfn));
        if nx {
            (Level::PAGE, true)
        } else {
            (level, false)
        }
    }

    /// Step 3, when the slot set of `generation` holds nothing there.
    fn no_slot(&mut self, gpa: Gpa, generation: u64) -> Stop {
        if self.vm().caches_mmio() {
            let made = self.on_tables(|_, tree, path| tree.map_mmio(gpa.gfn(), generation, path));
            self.counters().pf_mmio_spte_created.add(made as u64);
        }
        Stop::Mmio { gpa }
    }

    /// Step 4.
    fn resolve(
        &mut self,
        hva: Hva,
        access: Access,
        slept: &mut bool,
    ) -> Result<HostPage, ResolveError> {
        let host = self.outside(slept, |vcpu| {
            held::assert_none("to resolve a page");
            vcpu.vm().platform.resolve(hva, access)
        })?;
        let allowed = match access {
            Access::Read => true,
            Access::Write => host.writable,
            Access::Execute => is_executable(&host),
        };
        if allowed {
            Ok(host)
        } else {
            Err(ResolveError::BadAddress)
        }
    }

    /// Step 6. The flag says that a huge leaf was split in place on the way.
    fn install(
        &mut self,
        gfn: Gfn,
        level: Level,
        leaf: Leaf,
        slot: &SlotFacts,
        sequence: Sequence,
        nx_split: bool,
    ) -> (Mapped, bool) {
        let space = self.space_index();
        // Not `on_tables`, whose answer would be copied in every fault.
        let Parts {
            vm,
            tree,
            slots,
            ring,
            mut path,
            counters,
        } = self.parts();
        path.nx_split = nx_split;
        // A set that is new since the sequence was taken may have another slot there, or none.
        let log = match slot.log_at {
            Some(at) => slots
                .find(gfn)
                .and_then(|slot| slot.log())
                .filter(|log| ptr::eq(*log, at)),
            None => None,
        };
        let mut noted = false;
        let hvas = slot.hvas(gfn, level);
        // NX may have made a table there since the level was chosen; a huge leaf would throw away what
        // another vCPU has just been given. Under the lock this is settled.
        let nx_table = || level > Level::PAGE && vm.policy.huge_is_nx() && tree.is_nx_split(gfn);
        let valid = || {
            vm.in_progress.holds(sequence, &hvas)
                && log.is_some() == slot.log.is_some()
                && !slot.may_move_with_its_dirt(&vm.in_progress)
                && !nx_table()
        };
        let note = || {
            let Some(log) = log.filter(|log| leaf.write && log.kind().protects()) else {
                return;
            };
            match ring {
                Some(ring) if log.kind() == LogKind::Rings => {
                    ring.push((space as u32) << 16 | slot.id, slot.page);
                }
                _ => log.mark(slot.page),
            }
            noted = true;
        };
        let mapped = tree.map(gfn.align_down(level), level, leaf, &mut path, valid, note);
        counters.path_done(&path);
        counters.dirty_pages.add(noted as u64);
        (mapped, path.splits.iter().any(|n| *n > 0))
    }

    /// What it knew did not hold: waits for an invalidation of its page, or the move of its slot, to end,
    /// if that was it.
    fn stale(&mut self, slot: &SlotFacts, hvas: &Range<Hva>, slept: &mut bool) -> Attempt {
        self.counters().pf_retried.add(1);
        self.wait_while(slept, |vcpu| {
            let vm = vcpu.vm();
            vm.in_progress.covers(hvas) || slot.may_move_with_its_dirt(&vm.in_progress)
        })
    }

    fn holds(&self, sequence: Sequence, hvas: &Range<Hva>) -> bool {
        self.vm().in_progress.holds(sequence, hvas)
    }

    /// This fault has put the pieces of a split leaf in its place: they may be what was asked for.
    fn mended(&self, gfn: Gfn, access: Access) -> Attempt {
        match self.tree().lookup(gfn).entry::<F>() {
            Entry::Leaf(leaf) if leaf.allows(access) => Attempt::Mended,
            _ => Attempt::Again,
        }
    }

    /// Somebody is replacing a leaf on the way.
    fn wait_for_mend(&mut self, gfn: Gfn, slept: &mut bool) -> Attempt {
        self.wait_while(slept, |vcpu| {
            let section = vcpu.vm().section();
            let tree = vcpu.space().tree.get(section.inside());
            matches!(tree.lookup(gfn).entry::<F>(), Entry::Broken(_))
        })
    }

    /// Waits outside, and comes out early when it is wanted elsewhere.
    fn wait_while(&mut self, slept: &mut bool, condition: impl Fn(&Self) -> bool) -> Attempt {
        if !condition(self) {
            return Attempt::Again;
        }
        let wanted = self.outside(slept, |vcpu| {
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
        if wanted {
            Attempt::Stop(Stop::Retry)
        } else {
            Attempt::Again
        }
    }

    /// With `nx_huge_pages_split` off: what stands in the way of an execution fault goes as a whole.
    fn zap_huge(&mut self, gfn: Gfn, slept: &mut bool) {
        let found = self.tree().lookup(gfn);
        if !matches!(found.entry::<F>(), Entry::Leaf(_)) || found.level == Level::PAGE {
            return;
        }
        self.zap_as_vcpu(gfn, found.level, slept);
    }

    /// Zaps the region of `level` around `gfn`, by what is known of its slot then: it may log by now, and the
    /// leaves' dirty bits go to its log.
    fn zap_as_vcpu(&mut self, gfn: Gfn, level: Level, slept: &mut bool) {
        self.outside(slept, |vcpu| {
            let mut op = RangeOp::begin(vcpu.vm(), vcpu.space());
            op.zap_slots(&gfn.block(level));
            op.finish();
        });
    }

    /// Flushes the region of `level` around `gfn`, and remembers that.
    fn flush_as_vcpu(&mut self, gfn: Gfn, level: Level, slept: &mut bool) {
        let flushed = self.outside(slept, |vcpu| {
            let counters = vcpu.counters();
            counters.remote_tlb_flush_requests.add(1);
            vcpu.vm().flush(gfn.block(level), Stale::ANYTHING, counters)
        });
        self.set_flushed(flushed);
    }
}

#[inline]
fn translation(leaf: Leaf, level: Level, gfn: Gfn) -> Translation {
    let pfn = leaf.pfn.add(gfn.0 & (level.pages() - 1));
    Translation {
        host: pfn.hpa(),
        level,
        write: leaf.write && leaf.dirty,
        execute: leaf.execute,
    }
}

fn is_executable(host: &HostPage) -> bool {
    host.memory == MemoryType::WriteBack
}

/// The leaf for one page and an access, or for one that may follow; rights and marks as KVM starts them.
pub(super) fn leaf_for(slot: &SlotFacts, host: &HostPage, access: Access) -> Leaf {
    let allowed = host.writable && !slot.flags.has(SlotFlags::READONLY);
    // Where the log works by write protection, only a write makes a page writable.
    let write = allowed && (!slot.protects() || access == Access::Write);
    Leaf {
        pfn: host.pfn,
        write,
        execute: is_executable(host),
        may_write: allowed && !write,
        accessed: true,
        dirty: write && access == Access::Write,
        memory: host.memory,
    }
}
