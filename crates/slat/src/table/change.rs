//! Implements for a tree the changes that range operations make ([`ByGfn`]).

use alloc::string::String;

use super::detached::tell_zapped;
use super::{
    Aged, At, ByGfn, Collapse, Detached, Flushed, NewTable, Path, Show, Split, Table, Tree, Visit,
    Walk,
};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format, Leaf};
use crate::platform::Platform;
use crate::sync::atomic::{AtomicU64, Ordering::*, overwrite};
use crate::trace::Event;

impl<P: Platform, F: Format> ByGfn for Tree<P, F> {
    type Format = F;

    fn walk(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit) {
        self.walk_on(walk, show, visit);
    }

    fn age(&self, walk: &mut Walk, clear: bool, seen: &mut impl FnMut(Aged)) {
        self.age_unlocked(walk, clear, seen);
    }

    #[inline]
    fn zap(&self, at: &At<'_>) {
        match P::WANTS_ZAPPED {
            true => _ = self.take(at),
            false => {
                at.clear::<F>();
                self.trace_zap(at);
            }
        }
    }

    #[inline]
    fn take(&self, at: &At<'_>) -> u64 {
        let bits = at.take::<F>();
        tell_zapped::<P, F>(&*self.platform, bits, at.level);
        self.trace_zap(at);
        bits
    }

    #[inline]
    fn detach(&self, at: &At<'_>, lower: Pfn, detached: &mut Detached) {
        at.clear::<F>();
        self.trace_zap(at);
        detached.push(&self.table(lower), at.level.below());
    }

    fn split(&self, at: &At<'_>, path: &mut Path<'_>) -> Split {
        if F::BREAK_BEFORE_MAKE {
            at.update::<F>(F::broken);
            self.broke(at.meta);
            return Split::Broken;
        }
        let mut table = NewTable::<P, F>::new(&self.platform, path.frames.take());
        let mut bits = at.bits;
        loop {
            table.fill_below(at.level, bits);
            match table.publish(|frame| at.put_table::<F>(bits, F::table(frame))) {
                Ok(()) => break,
                Err((now, again)) => (bits, table) = (now, again),
            }
        }
        path.split(at.level, F::GRANULE.entries());
        self.platform.trace(Event::SplitHugePage {
            gfn: at.gfn,
            spte: bits,
            level: at.level,
        });
        Split::InPlace
    }

    fn mend(&self, gfn: Gfn, level: Level, path: &mut Path<'_>) -> bool {
        let found = self.find_at(gfn, level);
        if found.level > level {
            return true;
        }
        let is_broken = |now| matches!(now, Entry::Broken(_));
        let bits = self.put_table(&self.table(found.table), level, gfn, path, is_broken);
        !is_broken(F::decode(bits, level))
    }

    fn collapse(&self, at: &At<'_>, lower: Pfn, leaf: Leaf, detached: &mut Detached) -> Collapse {
        let bits = F::leaf(leaf, at.level);
        // The entry is not cleared in between: until the flush, a walker uses either the table or the leaf, and both
        // map the same pages.
        let (bits, collapse) = match F::BREAK_BEFORE_MAKE {
            true => (F::broken(bits), Collapse::Broken),
            false => (bits, Collapse::InPlace),
        };
        at.entry.store(bits, Release);
        at.meta.count_leaves(1);
        if F::BREAK_BEFORE_MAKE {
            self.broke(at.meta);
        }
        detached.push(&self.table(lower), at.level.below());
        collapse
    }

    fn restore(&self, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        let found = self.find_at(gfn, level);
        if found.level > level {
            return true;
        }
        let guard = self.table(found.table).lock();
        // Decode the leaf again: its rights may have changed since it was broken.
        let Entry::Broken(leaf) = F::decode(found.entry.load(Relaxed), level) else {
            return true;
        };
        let may = Self::may_mend(guard.meta, gfn, level, own);
        if may {
            overwrite(found.entry, F::leaf(leaf, level), Release);
        }
        may
    }

    fn protects_tables(&self) -> bool {
        F::TABLE_WRITE != 0
    }

    fn lift(&self, walk: &mut Walk) {
        match self.protects_tables() {
            true => self.lift_unlocked(walk),
            false => walk.stop_at(walk.range().end),
        }
    }

    fn is_nx_table(&self, frame: Pfn) -> bool {
        self.table(frame).meta().nx_split.load(Relaxed)
    }

    fn check(&self) -> Result<(), String> {
        self.roots()
            .try_for_each(|root| self.check_below(root, F::TOP))
    }
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Reports the zap of the entry `at` as an event. Call after the entry was cleared.
    #[inline(always)]
    fn trace_zap(&self, at: &At<'_>) {
        self.platform.trace(Event::SpteZapped {
            gfn: at.gfn,
            old_spte: at.bits,
            level: at.level,
        });
    }

    /// Like [`ByGfn::check`], but only for the table of `level` in frame `frame`, and the tables below it.
    fn check_below(&self, frame: Pfn, level: Level) -> Result<(), String> {
        let table = self.table(frame);
        let guard = table.lock();
        table.check_count::<F>(level)?;
        drop(guard);
        let lower = |entry: &AtomicU64| F::next_table(entry.load(Acquire), level);
        (table.entries().iter())
            .filter_map(lower)
            .try_for_each(|lower| self.check_below(lower, level.below()))
    }
}

impl<P: Platform, G: Format> Table<'_, P, G> {
    /// Checks that the table's metadata contain the correct number of leaves. The table is of `level`, with entries of
    /// `F`, and its lock is held.
    ///
    /// # Errors
    /// A message with both numbers: the count in the metadata, and the number of leaves in the table.
    pub(crate) fn check_count<F: Format>(&self, level: Level) -> Result<(), String> {
        let is_leaf = |entry: &&AtomicU64| {
            let entry = F::decode(entry.load(Acquire), level);
            matches!(entry, Entry::Leaf(_) | Entry::Broken(_))
        };
        let leaves = self.entries().iter().filter(is_leaf).count();
        let counted = usize::from(self.meta().leaves.load(Relaxed));
        match leaves == counted {
            true => Ok(()),
            false => Err(alloc::format!(
                "a table of level {} counts {counted} leaves, but has {leaves}",
                level.0
            )),
        }
    }
}
