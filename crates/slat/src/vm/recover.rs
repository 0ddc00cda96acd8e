//! Replaces tables by huge leaves when dirty logging of a slot ends (KVM: `kvm_mmu_recover_huge_pages`), or when
//! [`promote`](super::promote) finds that huge leaves are possible.
//!
//! While a slot logs, its memory is mapped by 4 KiB leaves. When logging ends, each table that one huge leaf can
//! replace is replaced by that leaf. Each page stays mapped to the same frame throughout, so the guest takes no fault
//! for it, neither during the change nor after it. On formats with break-before-make, the entry is invalid until the
//! flush, and a vCPU that faults on it waits for that time ([`crate::table`], *Collapses*).
//!
//! The leaf is the leaf that a write fault would install: it depends on slot, host page, level and policies. No lock is
//! held while the host is asked, so the host's reply may be out of date when it is used. Like a fault, the operation
//! reads the [`Sequence`](super::Sequence) first, and compares it under the lock of the table into which it installs:
//! it installs no leaf for a page that was invalidated since. In that case the table is zapped, and the next fault asks
//! the host again.
//!
//! The leaf maps all pages that the table maps, and perhaps more. It starts accessed and dirty, as after a write, so no
//! dirty bit is lost. When the table is freed, the platform is told the bits that walkers had set in the old leaves
//! until the flush ([`Platform::zapped`]).
//!
//! A table stays if it maps a guest table that is shadowed, because a fault would not install a huge leaf for such a
//! region, either ([`crate::shadow`]).
//!
//! Level 1 tables that exist only because of `nx_huge_pages` stay: a fetch has made them, and the next fetch would make
//! them again. NX recovery zaps them ([`super::nx`]). The MMUs of shadow pages cannot replace a table by a leaf in
//! place: they zap the table, as KVM does.

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
    /// The address that backs the first page that the table maps.
    backing: Hva,
    /// The leaf that can replace the table, if the host has mapped memory of this size.
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

/// What a call of [`SlotOp::recover_some`] has done.
pub(super) struct Recovered {
    /// The page of the slot at which to continue.
    pub(super) next: u64,
    /// The number of tables about which the host was asked.
    pub(super) tables: usize,
    /// The number of tables that were replaced (or zapped, in an MMU of shadow pages).
    pub(super) leaves: u64,
}

impl<P: Platform, F: Format> SlotOp<'_, P, F> {
    /// Replaces the tables of the slot, whose dirty logging has ended, by huge leaves where these are possible.
    pub(super) fn recover_huge_pages(&mut self) {
        let mut at = 0;
        while let Some(some) = self.recover_some(at, SOME) {
            at = some.next;
        }
    }

    /// Makes one step of [`Self::recover_huge_pages`]: replaces up to `most` (at least 2) tables, beginning at page
    /// `at` of the slot. `None`: the slot has no page `at`, or the slot was deleted or has another log
    /// ([`Self::slot`]).
    pub(super) fn recover_some(&mut self, at: u64, most: usize) -> Option<Recovered> {
        let (vm, space) = (self.vm, self.op.space);
        // Read the sequence first, before the slot, its attributes, the host's reply and the policies.
        let sequence = vm.in_progress.sequence();
        if vm.is_saving(sequence) {
            // The leaf would allow writes to pages that a snapshot does not have yet.
            return None;
        }
        let tracking_begun = self.op.tracking_begun();
        let slot = self.slot()?;
        let (base, pages, limits) = (slot.base(), slot.pages(), slot.limits());
        let (gfns, backing) = (slot.gfns(), slot.backing());
        if at >= pages {
            return None;
        }
        let mut found = [Candidate::NONE; SOME];
        // At least 2: two tables of different levels may begin at the same page, and only after both does the walk get
        // to another page.
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
    /// Returns the huge leaf that can replace `table`, in a slot with the frames `gfns` and the limits `limits`. Asks
    /// the host how it maps the first page now. `None`: the host's page is too small, or the first page is not
    /// resident.
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
