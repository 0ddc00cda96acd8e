//! A fault of a vCPU: brings the tables to where they allow an access. Its stages are values:
//!
//! 1. [`Want`]: what the access asks for;
//! 2. [`Plan`]: the leaf that gives it, and what that rests on. Whether a memslot holds the frame, the page that
//!    backs it (resolved holding nothing, outside the reader section), and the largest level that slot, attributes,
//!    alignment, host mapping, dirty log and NX allow ([`super::plan`]);
//! 3. the install ([`Fault::install`]), under the lock of one table, if what the plan rests on still holds
//!    ([`crate::vm::InProgress`]). If it does not, or something conflicts, the fault begins again;
//! 4. the pages around it ([`super::prefetch`]).

use core::ops::Range;
use core::ptr;

use super::plan::Plan;
use super::translate::{Stop, Translation, translation};
use super::{Parts, Vcpu};
use crate::addr::{Access, Gfn, Gpa, Level};
use crate::format::{Entry, Format};
use crate::platform::{Platform, Stale, WaitFor};
use crate::policy::Prefetch;
use crate::sync::atomic::Ordering::Relaxed;
use crate::table::{ByGfn, ByIndex, Key, Mapped, Root, Target};
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
    /// A write is a store of the guest's, and not a flag that is set for it in one of its tables.
    pub(super) stores: bool,
}

impl Want<'_> {
    pub(super) fn gfn(&self) -> Gfn {
        self.gpa.gfn()
    }
}

/// Why an attempt has installed nothing that the access could use.
pub(super) enum Detour {
    /// Something changed meanwhile: try again.
    Again,
    /// The attempt has installed the pieces of a split leaf. One allows the access, which finds it.
    Mended,
    /// The page of this level has to be compared with the guest's table, then go on.
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

/// A fault in progress.
pub(super) struct Fault<'v, P: Platform, F: Format> {
    pub(super) vcpu: &'v mut Vcpu<P, F>,
    pub(super) want: Want<'v>,
    /// A flush went by while the vCPU waited outside its section: what it returned to its CPU before is void.
    pub(super) slept: bool,
    /// The root of the tables on the trail, if an install has reached them.
    pub(super) root: Option<Root>,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Brings the tables to where they allow what `want` asks for. Returns also how, if it came to an end.
    #[cold]
    pub(super) fn fault(&mut self, want: Want<'_>) -> (Result<Translation, Stop>, Option<Outcome>) {
        Fault::new(self, want).run()
    }
}

impl<'v, P: Platform, F: Format> Fault<'v, P, F> {
    pub(super) fn new(vcpu: &'v mut Vcpu<P, F>, want: Want<'v>) -> Self {
        Fault {
            vcpu,
            want,
            slept: false,
            root: None,
        }
    }

    #[inline(always)]
    fn run(mut self) -> (Result<Translation, Stop>, Option<Outcome>) {
        let gpa = self.want.gpa;
        let (result, outcome) = loop {
            if self.vcpu.prepare().is_err() {
                return (Err(Stop::OutOfMemory { gpa }), None);
            }
            self.vcpu.make_room(&mut self.slept);
            break match self.attempt() {
                Ok((translation, how)) => (Ok(translation), Some(how)),
                Err(Detour::Again) if !self.slept => continue,
                // Without a trail no page is compared.
                Err(Detour::Again | Detour::Unsynced(_)) => (Err(Stop::Retry), None),
                Err(Detour::Mended) => (Err(Stop::Retry), Some(Outcome::Fixed { fast: false })),
                Err(Detour::Stop(stop @ Stop::Mmio { .. })) => (Err(stop), Some(Outcome::Emulated)),
                Err(Detour::Stop(stop)) => (Err(stop), None),
            };
        };
        match self.slept {
            true => (Err(Stop::Retry), outcome),
            false => (result, outcome),
        }
    }

    #[inline(always)]
    pub(super) fn attempt(&mut self) -> Result<(Translation, Outcome), Detour> {
        let sequence = self.vcpu.vm().in_progress.sequence();
        // The facts stay where they are: to move them with the plan costs a tenth of a fault.
        let slot = self.slot()?;
        let plan = self.plan(&slot, sequence)?;
        if plan.nx_split && !self.vcpu.vm().policy.nx_huge_pages_split().is_on() {
            self.zap_huge();
        }
        let (mapped, split, tracked) = self.install(&plan);
        let fast = plan.fast;
        let how = match mapped {
            Mapped::New => {
                self.vcpu.counters().leaves_of(plan.level).add(1);
                let prefetch = self.vcpu.vm().policy.prefetch();
                let small = plan.level == Level::PAGE && plan.slot.log.is_none();
                // What is beside a small page of the guest's, only its tables know (`Vcpu::prefetch_guest`).
                let trail = self.want.target.trail::<F>();
                let is_known = trail.is_none_or(|trail| trail.leaf_level() > Level::PAGE);
                if small && prefetch != Prefetch::Off && is_known {
                    self.prefetch(&plan, prefetch);
                }
                Outcome::Fixed { fast: false }
            }
            Mapped::Widened => Outcome::Fixed { fast },
            // The split itself has given the right: to execute a small page.
            Mapped::Spurious if split => Outcome::Fixed { fast },
            Mapped::Spurious => Outcome::Spurious { fast },
            other => return Err(self.not_installed(other, &plan)),
        };
        let found = translation(plan.leaf, plan.level, self.want.gfn());
        let translation = Translation {
            write: found.write && !tracked,
            tracked,
            ..found
        };
        Ok((translation, how))
    }

    /// Installs the leaf of `plan`, and notes the write in the slot's dirty log, if what the plan rests on still
    /// holds. The first flag says that a huge leaf was split in place on the path, the second that the page is a table of the
    /// guest's, whose leaf does not allow the write.
    #[inline(always)]
    fn install(&mut self, plan: &Plan<'_>) -> (Mapped, bool, bool) {
        let space = self.vcpu.space_index();
        let Want {
            target,
            access,
            stores,
            ..
        } = self.want;
        let gfn = self.want.gfn();
        let (slot, leaf, level) = (plan.slot, plan.leaf, plan.level);
        let may_walk = self.vcpu.may_walk_from(target);
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
        path.stores = stores && access == Access::Write;
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
        let nx_table = || {
            level > Level::PAGE
                && vm.policy.nx_huge_pages().is_on()
                && may_walk
                && tables.is_nx_split(target.key)
        };
        let valid = || {
            vm.in_progress.holds(plan.sequence, &hvas)
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
                    ring.push(RingSlot::new(space, slot.id), slot.page);
                }
                _ => log.mark(slot.page),
            }
            noted = true;
        };
        let mapped = tables.map(target, level, leaf, &mut path, valid, note);
        counters.path_done(&path);
        counters.dirty_pages.add(noted as u64);
        let (split, tracked) = (path.splits.iter().any(|n| *n > 0), path.tracked);
        if F::SHADOWS {
            self.root = path.root;
        }
        (mapped, split, tracked && access == Access::Write)
    }

    /// Does what has to be done before the next attempt, after an install that ended as `mapped`.
    #[cold]
    fn not_installed(&mut self, mapped: Mapped, plan: &Plan<'_>) -> Detour {
        let mapped = match self.followed(mapped) {
            Ok(detour) => return detour,
            Err(mapped) => mapped,
        };
        match mapped {
            Mapped::Conflict => {
                self.zap(plan.level);
                Detour::Again
            }
            Mapped::MustMend(level) => self.mend(level, plan.nx_split),
            Mapped::Broken => self.wait_while(|vcpu, key| {
                let section = vcpu.vm().section();
                let tables = vcpu.space().mmu.get(section.inside());
                matches!(tables.lookup(key).entry::<F>(), Entry::Broken(_))
            }),
            Mapped::Stale => self.stale(plan.slot, plan.level),
            // What is missing is allocated before the next attempt.
            _ => Detour::Again,
        }
    }

    /// Does what has to be done before the next attempt, if that does not depend on what was to be installed: a flush, or what
    /// the guest's tables ask for. `Err`: it does.
    pub(super) fn followed(&mut self, mapped: Mapped) -> Result<Detour, Mapped> {
        match mapped {
            Mapped::Unflushed(level) => self.flush(self.want.gfn().block(level)),
            Mapped::Unprotected => {
                let tables = self.want.target.trail::<F>().map(|trail| trail.tables());
                tables.into_iter().for_each(|gfns| self.flush(gfns));
            }
            Mapped::Tracked | Mapped::Unprepared => {}
            Mapped::Unsynced(level) => return Ok(Detour::Unsynced(level)),
            Mapped::Replaced(level) => {
                let target = self.want.target;
                let key = target.key;
                if let Some(root) = target.trail::<F>().map(|trail| trail.root()) {
                    self.outside(|vcpu| vcpu.vm().zap_entry(vcpu.space(), key, root, level));
                }
            }
            other => return Err(other),
        }
        Ok(Detour::Again)
    }

    /// With `nx_huge_pages_split` off: zaps the huge leaf that an execution fault conflicts with.
    fn zap_huge(&mut self) {
        if !self.vcpu.may_walk_from(self.want.target) {
            return;
        }
        let found = self.vcpu.tables().lookup(self.want.target.key);
        if matches!(found.entry::<F>(), Entry::Leaf(_)) && found.level > Level::PAGE {
            self.zap(found.level);
        }
    }

    /// Zaps the region of `level` around the page, by what is known of its slot then: it may log by now, and the
    /// leaves' dirty bits go to its log.
    fn zap(&mut self, level: Level) {
        let gfns = self.want.gfn().block(level);
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
    fn mend(&mut self, level: Level, nx_split: bool) -> Detour {
        let Want { target, access, .. } = self.want;
        let key = target.key;
        let gfn = self.want.gfn();
        let mut mended = false;
        while !mended {
            self.flush(gfn.block(level));
            mended = self.vcpu.on_tables(|_, tables, path| {
                path.nx_split = nx_split;
                tables.mend(gfn, level, path)
            });
        }
        // A piece may be what was asked for.
        match self.vcpu.tables().lookup(key).entry::<F>() {
            Entry::Leaf(leaf) if leaf.allows(access) => Detour::Mended,
            _ => Detour::Again,
        }
    }

    /// Runs `wait` outside the reader section.
    pub(super) fn outside<R>(&mut self, wait: impl FnOnce(&Vcpu<P, F>) -> R) -> R {
        self.vcpu.outside(&mut self.slept, wait)
    }

    /// Waits outside as long as `condition` holds. Ends the access early when the vCPU is wanted elsewhere.
    pub(super) fn wait_while(&mut self, condition: impl Fn(&Vcpu<P, F>, Key) -> bool) -> Detour {
        let key = self.want.target.key;
        if !condition(self.vcpu, key) {
            return Detour::Again;
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
            true => Detour::Stop(Stop::Retry),
            false => Detour::Again,
        }
    }
}
