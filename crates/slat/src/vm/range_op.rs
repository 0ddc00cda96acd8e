//! What every operation on a range of tables has in common: a reader section to walk in, the flush it
//! needs ([`Flushes`](crate::table::Flushes)), and the tables to free after that.

use core::mem::{replace, take};
use core::ops::Range;

use super::{Section, Space, Vm};
use crate::addr::Gfn;
use crate::format::Format;
use crate::platform::Platform;
use crate::stats::Counters;
use crate::sync::{InSection, held};
use crate::table::{FrameCache, Freed, Path, Tree, Zapped};

/// One range operation: walk the tree inside it, note what was changed, and [`finish`](Self::finish).
#[must_use = "a range operation is finished with the flush it owes"]
pub(crate) struct RangeOp<'a, P: Platform, F: Format> {
    vm: &'a Vm<P, F>,
    pub(super) space: &'a Space<P, F>,
    section: Section<'a>,
    zapped: Zapped,
    changed: bool,
}

/// What a zap needs of its operation, while that is in one section.
pub(crate) struct Zapping<'o, P: Platform, F: Format> {
    pub(super) tree: &'o Tree<P, F>,
    pub(super) zapped: &'o mut Zapped,
}

impl<'a, P: Platform, F: Format> RangeOp<'a, P, F> {
    pub(super) fn begin(vm: &'a Vm<P, F>, space: &'a Space<P, F>) -> Self {
        vm.flushes.begin_zapping();
        RangeOp {
            vm,
            space,
            section: vm.section(),
            zapped: Zapped::nothing(),
            changed: false,
        }
    }

    pub(super) fn vm(&self) -> &'a Vm<P, F> {
        self.vm
    }

    pub(super) fn counters(&self) -> &'a Counters {
        self.section.counters()
    }

    #[inline(always)]
    pub(super) fn inside(&self) -> InSection<'_> {
        self.section.inside()
    }

    /// The tree of its address space, until the section ends.
    pub(super) fn tree(&self) -> &Tree<P, F> {
        self.space.tree.get(self.inside())
    }

    /// What the operation may zap with, and the proof that it lasts.
    pub(super) fn zapping(&mut self) -> (InSection<'_>, Zapping<'_, P, F>) {
        let inside = self.section.inside();
        let zapping = Zapping {
            tree: self.space.tree.get(inside),
            zapped: &mut self.zapped,
        };
        (inside, zapping)
    }

    /// Leaves lost a right or a mark that a TLB may hold, if `changed`.
    pub(super) fn changed(&mut self, changed: bool) {
        self.changed |= changed;
    }

    /// Zaps the part of every slot, as they are now, that lies in `range`.
    pub(super) fn zap_slots(&mut self, range: &Range<Gfn>) {
        let slots = &self.space.slots;
        let (inside, mut zapping) = self.zapping();
        slots.current(inside).in_gfns(range, |slot| {
            let gfns = slot.gfns();
            zapping.zap(slot, gfns.start.max(range.start)..gfns.end.min(range.end));
        });
    }

    /// Hands over what was taken away since the last time, with a ticket for its flush if it was
    /// anything.
    fn need_flush(&mut self) -> Zapped {
        let mut zapped = replace(&mut self.zapped, Zapped::nothing());
        let has_none = !zapped.is_empty() && zapped.tickets.is_empty();
        if take(&mut self.changed) || has_none {
            zapped.tickets.add(self.vm.flushes.need());
        }
        zapped
    }

    /// Flushes `range` if anybody owes it, and goes on. Others who wait for this thread pass.
    pub(super) fn flush(&mut self, range: Range<Gfn>) {
        let zapped = self.need_flush();
        let (vm, space) = (self.vm, self.space);
        self.section
            .outside(|counters| vm.flush(space, range, zapped, counters));
    }

    /// Between two batches of splits: flushes what was broken in `range`, where the format asks for that. A
    /// split in place needs no flush: then only those pass who wait for this thread.
    pub(super) fn flush_broken(&mut self, range: Range<Gfn>) {
        if F::BREAK_BEFORE_MAKE {
            self.flush(range);
        } else {
            self.pass();
        }
    }

    /// Lets those pass who wait for this thread. What was taken away stays to be flushed.
    pub(super) fn pass(&mut self) {
        self.section.outside(|_| ());
    }

    /// Ends the operation: when this returns, no CPU uses what was taken away from `range` before the
    /// call, by whomever. `None`: nothing there can have been of interest.
    pub(super) fn finish(mut self, range: Option<Range<Gfn>>) {
        let zapped = self.need_flush();
        self.vm.flushes.end_zapping();
        let (vm, space) = (self.vm, self.space);
        self.section.end(|counters| {
            if let Some(range) = range {
                vm.flush(space, range, zapped, counters);
            }
        });
    }
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Runs `then` on its way through the tables: it takes new ones from `frames`, and
    /// `counters` count what it has split.
    #[inline]
    pub(crate) fn with_path<R>(
        &self,
        frames: &mut FrameCache,
        counters: &Counters,
        then: impl FnOnce(&mut Path<'_>) -> R,
    ) -> R {
        let mut path = Path::new(frames);
        let result = then(&mut path);
        counters.path_done(&path);
        result
    }

    /// Makes sure that no CPU uses a translation that was taken away before this call, by whomever,
    /// and frees what `zapped` holds. The caller is outside every reader section, and has drawn a ticket for
    /// what it has taken away itself, from `range`; `zapped` has those of which it knows.
    pub(crate) fn flush(
        &self,
        space: &Space<P, F>,
        range: Range<Gfn>,
        zapped: Zapped,
        counters: &Counters,
    ) {
        counters.remote_tlb_flush_requests.add(1);
        let (last, complete) = self.flushes.account();
        if complete && zapped.is_empty() {
            return;
        }
        // First the software side: after it no late fault can still add a leaf to a detached table.
        // Then the hardware: it forgets what it may have walked there. Then nobody can reach them.
        self.readers.synchronize(self.reader_wait());
        let range = if self.flushes.is_only(last, zapped.tickets) {
            range
        } else {
            Gfn(0)..Gfn(Tree::<P, F>::capacity())
        };
        held::assert_none("to flush");
        self.platform.flush(self.id, range);
        self.flushes.complete(last);
        counters.remote_tlb_flush.add(1);
        let mut gone = Freed {
            leaves: zapped.leaves,
            nx_splits: 0,
        };
        // SAFETY: to free tables takes no section.
        let tree = unsafe { space.tree.unguarded() };
        // SAFETY: all readers have passed since the tables were detached, and hardware is flushed.
        gone += unsafe { tree.free(zapped.detached) };
        counters.gone(&gone);
    }
}
