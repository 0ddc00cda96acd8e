//! Replaces tables by huge leaves when dirty logging of a slot ends (KVM: `kvm_mmu_recover_huge_pages`), or when
//! [`promote`](super::promote) finds that huge leaves are possible.
//!
//! While a slot logs, its memory is mapped by 4 KiB leaves. When logging ends, each table whose frames one huge leaf
//! may map is replaced by that leaf. Each page stays mapped to the same frame throughout, so the guest takes no fault
//! for it, neither during the change nor after it. On formats with break-before-make, the leaf is not valid until the
//! flush, and a fault waits that long ([`crate::table`], *Collapses*).
//!
//! The leaf is the one that a write fault would install: slot, host page, level and policies decide. No lock is held
//! while the host is asked, so its result may be out of date. Like a fault, the operation reads the
//! [`Sequence`](super::Sequence) first, and compares it under the lock of the table into which it installs: it
//! installs no leaf for a page that an invalidation has zapped meanwhile. In that case the table is zapped, and the
//! next fault asks the host again.
//!
//! The leaf maps all pages that the table maps. It may map more, and starts accessed and dirty, as the first write
//! would make it: no dirty bit is lost. When the table is freed, the platform is told the bits that walkers have set
//! in the old leaves up to the flush ([`Platform::zapped`]).
//!
//! A table that maps a shadowed table of the guest stays, because a fault installs no huge leaf there
//! ([`crate::shadow`]).
//!
//! Tables of level 1 that exist because of NX stay: a fetch has made them, and another fetch would make them again. NX
//! recovery zaps them at its own pace ([`super::nx`]). The MMUs of shadow pages cannot replace a table by a leaf in
//! place: there the table is zapped, as in KVM.

use core::ops::Range;

use super::range_op::Collapsing;
use super::slot_op::SlotOp;
use super::{Vm, leaf_of};
use crate::addr::{Access, Gfn, Granule, Hva, Level};
use crate::format::{Format, Leaf};
use crate::platform::Platform;
use crate::slots::{Limits, PrivateFrames};
use crate::sync::held;
use crate::table::{FrameCache, Next, Walk};

/// A table that one huge leaf may replace.
#[derive(Clone, Copy)]
struct Candidate {
    gfn: Gfn,
    level: Level,
    /// The address that backs the first page.
    backing: Hva,
    /// The leaf, if the host has memory for one.
    leaf: Option<Leaf>,
}

impl Candidate {
    const NONE: Candidate = Candidate {
        gfn: Gfn(0),
        level: Level::PAGE,
        backing: Hva(0),
        leaf: None,
    };

    /// Returns the addresses that back the pages of the table.
    fn hvas(&self, granule: Granule) -> Range<Hva> {
        self.backing..granule.add_pages(self.backing, granule.pages(self.level))
    }
}

/// The number of tables that are replaced between two flushes, on formats that need a flush for each table.
const SOME: usize = FrameCache::BATCH;

/// The result of [`SlotOp::recover_some`].
pub(super) struct Recovered {
    /// The page of the slot to continue with.
    pub(super) next: u64,
    /// The number of tables for which the host was asked.
    pub(super) tables: usize,
    /// The number of replaced tables; in an MMU of shadow pages, of zapped tables.
    pub(super) leaves: u64,
}

impl<P: Platform, F: Format> SlotOp<'_, P, F> {
    /// Replaces the tables of the slot, whose dirty logging has ended, by the huge leaves that fit.
    pub(super) fn recover_huge_pages(&mut self) {
        let mut at = 0;
        while let Some(some) = self.recover_some(at, SOME) {
            at = some.next;
        }
    }

    /// Makes one step of [`Self::recover_huge_pages`]: replaces up to `most` tables, beginning at page `at` of the
    /// slot. A `most` below 2 counts as 2. `None`: the slot ends at or before that page, or the operation has to end
    /// ([`Self::slot`]).
    pub(super) fn recover_some(&mut self, at: u64, most: usize) -> Option<Recovered> {
        let (vm, space) = (self.vm, self.op.space);
        // Read the sequence before the slot, its attributes, the host and the policies.
        let sequence = vm.in_progress.sequence();
        let tracking_begun = self.op.tracking_begun();
        let slot = self.slot()?;
        let (base, pages, limits) = (slot.base(), slot.pages(), slot.limits());
        let (gfns, backing) = (slot.gfns(), slot.backing());
        if at >= pages {
            return None;
        }
        let mut found = [Candidate::NONE; SOME];
        // Two tables, of different levels, may begin at the same page. Only after both of them is there another page at
        // which to continue.
        let allowed = &mut found[..most.clamp(2, SOME)];
        let mut count = 0;
        let mut walk = Walk::new(base.add(at)..base.add(pages));
        self.op.covers(&walk.range());
        self.op.once(&mut walk, |step, walk| {
            let private = &space.slots.current(step.section()).private;
            step.visit_tables(walk, |at, _| {
                if !is_shared(private, &F::GRANULE.block(at.gfn, at.level)) {
                    return Next::Descend;
                }
                let Some(candidate) = allowed.get_mut(count) else {
                    return Next::Stop;
                };
                *candidate = Candidate {
                    gfn: at.gfn,
                    level: at.level,
                    backing: F::GRANULE.add_pages(backing, at.gfn.0 - base.0),
                    leaf: None,
                };
                count += 1;
                Next::Descend
            });
        });
        let next = walk.at().0 - base.0;
        let found = &mut found[..count];
        let mut leaves = 0;
        self.pass_by(|| {
            for candidate in &mut *found {
                candidate.leaf = vm.huge_leaf(&gfns, limits, candidate);
            }
        });
        for table in &mut *found {
            table.leaf = table
                .leaf
                .filter(|_| self.op.may_map(table.gfn, table.level));
        }
        let end = found
            .iter()
            .map(|table| F::GRANULE.block(table.gfn, table.level).end);
        if let (Some(first), Some(end)) = (found.first(), end.max()) {
            let mut broken = [(Gfn(0), Level::PAGE); SOME];
            let mut count = 0;
            self.walk(first.gfn.0 - base.0..end.0 - base.0, |step, _, walk| {
                let mmu = space.mmu.get(step.section());
                let holds = |table: &Candidate| {
                    vm.in_progress.holds(sequence, &table.hvas(F::GRANULE))
                        && mmu.tracking_begun() == tracking_begun
                };
                let mut wanted = |gfn, level, because_of_nx: bool| {
                    let named = |table: &&Candidate| (table.gfn, table.level) == (gfn, level);
                    let table = found.iter().find(named);
                    match table.and_then(|table| Some((table, table.leaf?))) {
                        None => Collapsing::Keep,
                        Some(_) if because_of_nx && vm.policy.nx_huge_pages().is_on() => {
                            Collapsing::Keep
                        }
                        Some((table, leaf)) if holds(table) => {
                            leaves += 1;
                            Collapsing::To(leaf)
                        }
                        Some(_) => Collapsing::Zap,
                    }
                };
                step.collapse(walk, &mut wanted, |gfn, level| {
                    broken[count] = (gfn, level);
                    count += 1;
                });
            });
            self.op.restore(&broken[..count]);
        }
        Some(Recovered {
            next,
            tables: count,
            leaves,
        })
    }
}

/// Whether none of `gfns` is private.
fn is_shared(private: &PrivateFrames, gfns: &Range<Gfn>) -> bool {
    let (is_private, alike) = private.around(gfns.start);
    !is_private && gfns.end <= alike.end
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Returns the leaf for `table`, in a slot of the frames `gfns` with `limits`, for the page that the host maps
    /// now. `None`: the host's page is too small, or the first page is not resident.
    fn huge_leaf(&self, gfns: &Range<Gfn>, limits: Limits, table: &Candidate) -> Option<Leaf> {
        let mut leaf = None;
        held::assert_none("to ask the host");
        let first = table.backing..F::GRANULE.add_pages(table.backing, 1);
        self.platform.resolve_resident(self.id, first, &mut |run| {
            let host = &run.first;
            if self.fitting_level(gfns, table.gfn, host.pfn, host.level) >= table.level {
                let small = leaf_of(host, limits, false, Access::Write);
                leaf = Some(self.leaf_at(small, table.level));
            }
        });
        leaf
    }
}
