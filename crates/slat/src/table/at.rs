//! A page-table entry that a walk visits, and the operations on the entry, which are the same for every MMU.

use core::ops::Range;

use super::clear::Cleared;
use super::{Detached, Path, Split};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format};
use crate::frame::TableMeta;
use crate::sync::atomic::{AtomicU64, Ordering::*, overwrite};

/// A visited entry. The walk holds the lock of the table that contains it.
pub(crate) struct At<'t> {
    pub(crate) entry: &'t AtomicU64,
    pub(crate) meta: &'t TableMeta,
    pub(crate) kept: Kept<'t>,
    /// The entry's bits when the visit began. Since then page walkers may have set accessed and dirty bits.
    pub(crate) bits: u64,
    /// The first frame that the entry covers, which may be before the walk's range.
    pub(crate) gfn: Gfn,
    pub(crate) level: Level,
    /// Whether an entry on the path to the table was write-protected ([`super::protect`]) when the walk passed it.
    pub(crate) below_protected: bool,
}

/// How the MMU keeps track of the entries of a table.
#[derive(Clone, Copy)]
pub(crate) enum Kept<'t> {
    /// In a tree: records the entries of the table that the walk has cleared.
    Cleared(&'t Cleared),
    /// In an MMU of shadow pages: entries are in lists.
    Listed(&'t dyn Listed),
}

/// The operations of an MMU of shadow pages, which keeps entries in lists, on the entry that is visited. The MMU's lock
/// is held.
pub(crate) trait Listed {
    /// Implements [`At::is_shadowed`].
    fn is_shadowed(&self) -> bool;
    /// Removes the leaf or MMIO entry from its list. Call after clearing the entry.
    fn unlist(&self);
    /// Implements [`ByGfn::detach`](super::ByGfn::detach).
    fn detach(&self, lower: Pfn, detached: &mut Detached);
    /// Implements [`ByGfn::split`](super::ByGfn::split).
    fn split(&self, at: &At<'_>, path: &mut Path<'_>) -> Split;
}

impl At<'_> {
    /// Decodes [`bits`](Self::bits). If an entry on the path to the table is write-protected, returns a leaf without
    /// the right to write.
    #[inline]
    pub(crate) fn decode<F: Format>(&self) -> Entry {
        F::decode(self.bits, self.level).below(self.below_protected)
    }

    /// Returns whether the entry is in a tree; if not, it is in a shadow page.
    pub(crate) fn is_in_tree(&self) -> bool {
        matches!(self.kept, Kept::Cleared(_))
    }

    /// Returns whether the entry is in a shadow page of a guest table. Then walkers do not translate guest frames by
    /// it, and so do not know the frame.
    pub(crate) fn is_shadowed(&self) -> bool {
        match self.kept {
            Kept::Cleared(_) => false,
            Kept::Listed(listed) => listed.is_shadowed(),
        }
    }

    /// Returns whether `range` contains all frames that the entry covers.
    pub(crate) fn is_inside<F: Format>(&self, range: &Range<Gfn>) -> bool {
        range.start <= self.gfn && self.gfn.0 + F::GRANULE.pages(self.level) <= range.end.0
    }

    /// Clears the entry, which is a leaf or refers to a table.
    pub(crate) fn clear<F: Format>(&self) {
        overwrite(self.entry, F::cleared(0), Release);
        self.cleared::<F>();
    }

    /// Clears the entry, which is a leaf, and returns its bits, including those that hardware has set until then.
    pub(crate) fn take<F: Format>(&self) -> u64 {
        let bits = self.entry.swap(F::cleared(0), AcqRel);
        self.cleared::<F>();
        bits
    }

    /// Updates what the MMU knows of the table's entries. Call after clearing the entry.
    fn cleared<F: Format>(&self) {
        match self.kept {
            Kept::Cleared(cleared) if F::BREAK_BEFORE_MAKE => {
                cleared.add(F::GRANULE.index(self.gfn, self.level));
            }
            Kept::Cleared(_) => {}
            Kept::Listed(listed) => listed.unlist(),
        }
        self.leaf_removed::<F>();
    }

    /// Reduces the table's count of leaves by one if the entry was a leaf (and did not refer to a table). Call after
    /// clearing or replacing the entry.
    fn leaf_removed<F: Format>(&self) {
        if F::next_table(self.bits, self.level).is_none() {
            self.meta.count_leaves(-1);
        }
    }

    /// Replaces the huge leaf `old` by the entry `table`. `Err`: a walker has set a bit in the leaf since `old` was
    /// read; contains the entry's new bits.
    ///
    /// Uses `Release`, so that a walker that sees the new table also sees its entries.
    pub(crate) fn put_table<F: Format>(&self, old: u64, table: u64) -> Result<(), u64> {
        self.entry
            .compare_exchange(old, table, Release, Relaxed)
            .map(|_| self.leaf_removed::<F>())
    }

    /// Clears the entry, which is an MMIO entry. No flush is needed, because no TLB caches an MMIO entry.
    pub(crate) fn clear_mmio(&self) {
        self.put(0);
        if let Kept::Listed(listed) = self.kept {
            listed.unlist();
        }
    }

    /// Overwrites the entry with `bits`. Accessed and dirty bits that a walker sets at the same time may be lost.
    pub(crate) fn put(&self, bits: u64) {
        overwrite(self.entry, bits, Relaxed);
    }

    /// Applies `change` to the leaf in the entry. No dirty bit that a walker sets at the same time is lost. An accessed
    /// bit that aging clears at the same time, without the lock ([`super::age`]), may be set again.
    pub(crate) fn update<F: Format>(&self, change: impl Fn(u64) -> u64) {
        if F::is_settled(self.bits) {
            overwrite(self.entry, change(self.bits), Relaxed);
        } else {
            let _ = self
                .entry
                .fetch_update(Relaxed, Relaxed, |bits| Some(change(bits)));
        }
    }
}
