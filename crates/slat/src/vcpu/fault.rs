//! A fault of a vCPU: brings the tables to where they allow an access. One loop ([`Vcpu::fault`]) does that for all of them:
//!
//! 1. a [`Source`] says what is wanted, a [`Want`]: the guest-physical address of the access, or a walk of the guest's tables
//!    ([`super::guest`]);
//! 2. a [`Plan`] is the leaf that gives it, and what that rests on. Whether a memslot holds the frame, the page that
//!    backs it (resolved holding nothing, outside the reader section), and the largest level that slot, attributes,
//!    alignment, host mapping, dirty log and NX allow ([`super::plan`]);
//! 3. the leaf is installed ([`Fault::install`]), under the lock of one table, if what the plan rests on still holds
//!    ([`crate::vm::InProgress`]);
//! 4. the pages around it are mapped ([`super::prefetch`]).
//!
//! Where nothing could be installed, a [`Retry`] says why. The fault does what that asks for ([`Fault::clear`]), and the loop
//! begins again.

use core::ops::Range;
use core::ptr;

use super::plan::Plan;
use super::translate::{Stop, Translation, translation};
use super::{Parts, Vcpu};
use crate::addr::{Access, Gfn, Gpa, Level};
use crate::format::{Entry, Format};
use crate::platform::{Platform, Stale, WaitFor};
use crate::policy::Prefetch;
use crate::shadow::trail::Target;
use crate::sync::atomic::Ordering::Relaxed;
use crate::table::{ByGfn, Installed, Key, Retry};
use crate::trace::Event;
use crate::vm::{LogKind, RangeOp, RingSlot};

/// What a faulting access asks for.
#[derive(Clone, Copy)]
pub(super) struct Want<'t> {
    /// Where the vCPU's walker looks for it.
    pub(super) target: Target<'t>,
    /// Which guest memory it is.
    pub(super) gpa: Gpa,
    /// The right that it needs.
    pub(super) access: Access,
    /// The access is the guest's own: it counts as a fault, and a write is a store. Otherwise it is one that the MMU makes for
    /// the guest, to read an entry of its tables or to set a flag there.
    pub(super) of_guest: bool,
}

impl Want<'_> {
    #[inline(always)]
    pub(super) fn gfn<F: Format>(&self) -> Gfn {
        F::GRANULE.gfn(self.gpa)
    }
}

/// Where it is found out what an access asks for.
pub(super) trait Source<P: Platform, F: Format> {
    /// What the access gets.
    type Page;
    /// Why it gets nothing.
    type Stop: From<Stop>;

    /// Returns the address that the access names.
    fn address(&self) -> Gpa;

    /// Finds out what is wanted.
    ///
    /// # Errors
    /// The access ends with them, as they are.
    fn resolve(&mut self, vcpu: &mut Vcpu<P, F>) -> Result<Wanted<'_, Self::Page>, Self::Stop>;

    /// Compares the page of `level` on the trail with the guest's table ([`Retry::Unsynced`]). Returns whether what was found
    /// out before is still good.
    fn compare(&mut self, vcpu: &mut Vcpu<P, F>, level: Level) -> bool {
        let _ = (vcpu, level);
        false
    }

    /// Returns what the access gets, now that the tables have `found` for it. `is_new`: a leaf was installed, and what the vCPU
    /// knows is not void.
    fn page(&mut self, vcpu: &mut Vcpu<P, F>, found: Translation, is_new: bool) -> Self::Page;
}

/// What a [`Source`] has found out.
pub(super) enum Wanted<'t, A> {
    /// A leaf is to be installed.
    Leaf(Want<'t>),
    /// The access needs none.
    Page(A),
}

/// A guest-physical address.
pub(super) struct Physical(pub(super) Want<'static>);

impl<P: Platform, F: Format> Source<P, F> for Physical {
    type Page = Translation;
    type Stop = Stop;

    fn address(&self) -> Gpa {
        self.0.gpa
    }

    #[inline(always)]
    fn resolve(&mut self, _: &mut Vcpu<P, F>) -> Result<Wanted<'_, Translation>, Stop> {
        Ok(Wanted::Leaf(self.0))
    }

    #[inline(always)]
    fn page(&mut self, _: &mut Vcpu<P, F>, found: Translation, _: bool) -> Translation {
        found
    }
}

/// Why an attempt has installed nothing that the access could use.
pub(super) enum Halt {
    /// The fault has cleared what was in the way: try again.
    Again,
    /// See [`Retry::Unsynced`].
    Unsynced(Level),
    /// The access ends here.
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

/// An attempt of a fault.
pub(super) struct Fault<'v, P: Platform, F: Format> {
    pub(super) vcpu: &'v mut Vcpu<P, F>,
    pub(super) want: Want<'v>,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Brings the tables to where they allow the access of `source`, and returns what it gets.
    ///
    /// # Errors
    /// Those of `source`. [`Stop::Retry`] if a flush went by meanwhile, whatever else was found out.
    #[cold]
    pub(super) fn fault<S: Source<P, F>>(&mut self, mut source: S) -> Result<S::Page, S::Stop> {
        self.unless_flushed(|vcpu| {
            let missed = vcpu.missed();
            loop {
                if vcpu.prepare().is_err() {
                    let gpa = source.address();
                    return Err(Stop::OutOfMemory { gpa }.into());
                }
                vcpu.make_room();
                let want = match source.resolve(vcpu)? {
                    Wanted::Leaf(want) => want,
                    Wanted::Page(page) => return Ok(page),
                };
                match (Fault { vcpu, want }).attempt() {
                    Ok((found, installed)) => {
                        let is_new = installed == Installed::New;
                        return Ok(source.page(vcpu, found, is_new));
                    }
                    Err(Halt::Stop(stop)) => return Err(stop.into()),
                    Err(Halt::Unsynced(level)) if source.compare(vcpu, level) => {}
                    // What was returned before is void: the access is executed again.
                    Err(_) if vcpu.missed() != missed => return Err(Stop::Retry.into()),
                    Err(_) => {}
                }
            }
        })
    }
}

impl<P: Platform, F: Format> Fault<'_, P, F> {
    /// Counts the fault as `how`, if it is one of the guest.
    pub(super) fn count(&self, how: Outcome) {
        if !self.want.of_guest {
            return;
        }
        let counters = self.vcpu.counters();
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

    #[inline(always)]
    fn attempt(&mut self) -> Result<(Translation, Installed), Halt> {
        let sequence = self.vcpu.vm().in_progress.sequence();
        // The facts stay where they are: to move them with the plan costs a tenth of a fault.
        let slot = self.slot()?;
        let plan = self.plan(&slot, sequence)?;
        if plan.nx_split && !self.vcpu.vm().policy.nx_huge_pages_split().is_on() {
            self.zap_huge();
        }
        self.vcpu.vm().platform.trace(Event::SpteRequested {
            gfn: self.want.gfn::<F>(),
            pfn: plan.leaf.pfn,
            level: plan.level,
        });
        let (installed, split, tracked) = match self.install(&plan) {
            Ok(done) => done,
            Err(retry) => return Err(self.clear(retry, &plan)),
        };
        let fast = plan.fast;
        self.count(match installed {
            _ if tracked => Outcome::Emulated,
            // The split itself has given the right: to execute a small page.
            Installed::Spurious if !split => Outcome::Spurious { fast },
            _ => Outcome::Fixed { fast },
        });
        if fast && self.want.of_guest {
            self.vcpu.vm().platform.trace(Event::FastPageFault {
                gpa: self.want.gpa,
                access: self.want.access,
                new_spte: F::leaf(plan.leaf, plan.level),
                spurious: installed == Installed::Spurious && !split,
            });
        }
        if installed == Installed::New {
            self.vcpu.counters().leaves_of(plan.level).add(1);
            let prefetch = self.vcpu.vm().policy.prefetch();
            let small = plan.level == Level::PAGE && plan.slot.log.is_none();
            // Which pages are beside a small page of the guest's is found in its tables (`Vcpu::prefetch_guest`).
            let trail = self.want.target.trail::<F>();
            let is_known = trail.is_none_or(|trail| trail.leaf_level() > Level::PAGE);
            if small && prefetch != Prefetch::Off && is_known {
                self.prefetch(&plan, prefetch);
            }
        }
        let found = translation::<F>(plan.leaf, plan.level, self.want.gfn::<F>());
        let translation = Translation {
            write: found.write && !tracked,
            tracked,
            ..found
        };
        Ok((translation, installed))
    }

    /// Installs the leaf of `plan`, and notes the write in the slot's dirty log, if what the plan rests on still
    /// holds. The first flag says that a huge leaf was split in place on the path, the second that the page is a table of the
    /// guest's, whose leaf does not allow the write.
    #[inline(always)]
    fn install(&mut self, plan: &Plan<'_>) -> Result<(Installed, bool, bool), Retry> {
        let space = self.vcpu.space_index();
        let Want {
            access, of_guest, ..
        } = self.want;
        let (key, gfn) = (self.want.target.key(), self.want.gfn::<F>());
        let (slot, leaf, level) = (plan.slot, plan.leaf, plan.level);
        let may_walk = self.vcpu.may_walk_from(&self.want.target);
        // Not `on_tables`, whose result would be copied in every fault.
        let Parts {
            vm,
            tables,
            slots,
            ring,
            mut path,
            counters,
        } = self.vcpu.parts();
        path.nx_split = plan.nx_split;
        path.stores = of_guest && access == Access::Write;
        // A set that is new since the sequence was taken may have another slot there, or none.
        let log = match slot.log_at {
            Some(at) => slots
                .find(gfn)
                .and_then(|slot| slot.log())
                .filter(|log| ptr::eq(*log, at)),
            None => None,
        };
        let mut noted = false;
        let hvas = slot.hvas::<F>(gfn, level);
        // NX may have made a table there since the level was chosen; a huge leaf would throw away what
        // another vCPU has just been given. Under the lock this is settled.
        let nx_table = || {
            level > Level::PAGE
                && vm.policy.nx_huge_pages().is_on()
                && may_walk
                // SAFETY: `may_walk`.
                && unsafe { tables.is_nx_split(key) }
        };
        let valid = || {
            vm.in_progress.holds(plan.sequence, &hvas)
                && log.is_some() == slot.log.is_some()
                && !slot.may_move_with_its_dirt(&vm.in_progress)
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
                }
                _ => log.mark(slot.page),
            }
            noted = true;
        };
        let target = &mut self.want.target;
        // SAFETY: a tree's root stays, the shadow MMU looks for its own; and the cursor was restarted when it had to be
        // (`Self::outside`).
        let installed = unsafe { tables.map(target, level, leaf, &mut path, valid, note) };
        counters.path_done(&path);
        counters.dirty_pages.add(noted as u64);
        let (split, tracked) = (path.splits.iter().any(|n| *n > 0), path.tracked);
        if let (Some(trail), Some(root)) = (target.trail::<F>(), path.root) {
            self.vcpu.roots.begin_with(trail.number, root);
        }
        Ok((installed?, split, tracked && access == Access::Write))
    }

    /// Does what `retry` asks for, after an install of `plan`.
    #[cold]
    fn clear(&mut self, retry: Retry, plan: &Plan<'_>) -> Halt {
        match retry {
            Retry::Stale => self.stale(plan.slot, plan.level),
            Retry::MustMend(level) => self.mend(level, plan.nx_split),
            Retry::Conflict(level) => {
                self.zap(level);
                Halt::Again
            }
            Retry::Broken => self.wait_while(|vcpu, key| {
                let section = vcpu.vm().section();
                let tables = vcpu.space().mmu.get(section.inside());
                // SAFETY: only trees break leaves, and their roots stay.
                let found = unsafe { tables.lookup(key) };
                matches!(found.entry::<F>(), Entry::Broken(_))
            }),
            _ => self.clear_path(retry),
        }
    }

    /// Does what `retry` asks for, if that does not depend on what was to be installed: a flush, or what concerns the guest's
    /// tables.
    pub(super) fn clear_path(&mut self, retry: Retry) -> Halt {
        let target = self.want.target;
        match retry {
            Retry::Unsynced(level) => return Halt::Unsynced(level),
            Retry::Unflushed(level) => self.flush(F::GRANULE.block(self.want.gfn::<F>(), level)),
            Retry::Unprotected => {
                let tables = target.trail::<F>().map(|trail| trail.tables());
                tables.into_iter().for_each(|gfns| self.flush(gfns));
            }
            Retry::Replaced(level) => {
                let root = target.trail::<F>().map(|trail| trail.root());
                root.into_iter().for_each(|root| {
                    self.outside(|vcpu| {
                        (vcpu.vm()).zap_entry(vcpu.space(), target.key(), root, level);
                    });
                });
            }
            // The next attempt reads the tables again, and allocates what is missing.
            _ => {}
        }
        Halt::Again
    }

    /// With `nx_huge_pages_split` off: zaps the huge leaf that an execution fault conflicts with.
    fn zap_huge(&mut self) {
        if !self.vcpu.may_walk_from(&self.want.target) {
            return;
        }
        // SAFETY: checked above. The cursor was restarted when it had to be (`Self::outside`).
        let found = unsafe { self.vcpu.tables().find(&mut self.want.target.cursor) };
        if matches!(found.entry::<F>(), Entry::Leaf(_)) && found.level > Level::PAGE {
            self.zap(found.level);
        }
    }

    /// Zaps the region of `level` around the page, by what is known of its slot then: it may log by now, and the
    /// leaves' dirty bits go to its log.
    fn zap(&mut self, level: Level) {
        let gfns = F::GRANULE.block(self.want.gfn::<F>(), level);
        self.outside(|vcpu| {
            let mut op = RangeOp::begin(vcpu.vm(), vcpu.space());
            op.zap_slots(&gfns);
            op.finish();
        });
    }

    /// Flushes `gfns`, and remembers that.
    fn flush(&mut self, gfns: Range<Gfn>) {
        let flushed = self.outside(|vcpu| {
            let counters = vcpu.counters();
            counters.remote_tlb_flush_requests.add(1);
            vcpu.vm().flush(gfns, Stale::ANYTHING, counters)
        });
        self.vcpu.set_flushed(flushed);
    }

    /// Flushes the leaf of `level` that this fault has broken, and installs its pieces.
    fn mend(&mut self, level: Level, nx_split: bool) -> Halt {
        let (key, gfn) = (self.want.target.key(), self.want.gfn::<F>());
        let mut mended = false;
        while !mended {
            self.flush(F::GRANULE.block(gfn, level));
            mended = self.vcpu.on_tables(|_, tables, path| {
                path.nx_split = nx_split;
                tables.mend(gfn, level, path)
            });
        }
        // SAFETY: only trees break leaves, and their roots stay.
        let found = unsafe { self.vcpu.tables().lookup(key) };
        match found.entry::<F>() {
            Entry::Leaf(leaf) if leaf.allows(self.want.access) => {
                // A piece is what was asked for. The access finds it.
                self.count(Outcome::Fixed { fast: false });
                Halt::Stop(Stop::Retry)
            }
            _ => Halt::Again,
        }
    }

    /// Runs `wait` outside the reader section.
    pub(super) fn outside<R>(&mut self, wait: impl FnOnce(&Vcpu<P, F>) -> R) -> R {
        let missed = self.vcpu.missed();
        let answer = self.vcpu.outside(wait);
        if self.vcpu.missed() != missed {
            self.want.target.cursor.restart();
        }
        answer
    }

    /// Waits outside as long as `condition` holds. Ends the access early when the vCPU is wanted elsewhere.
    pub(super) fn wait_while(&mut self, condition: impl Fn(&Vcpu<P, F>, Key) -> bool) -> Halt {
        let key = self.want.target.key();
        if !condition(self.vcpu, key) {
            return Halt::Again;
        }
        let wanted = self.outside(|vcpu| {
            let mut round = 0;
            while condition(vcpu, key) {
                if vcpu.attention().flag().load(Relaxed) != 0 {
                    return true;
                }
                vcpu.vm().wait(round, WaitFor::Invalidation);
                round += 1;
            }
            false
        });
        match wanted {
            true => Halt::Stop(Stop::Retry),
            false => Halt::Again,
        }
    }
}
