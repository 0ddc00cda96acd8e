//! A copy of the facts about a memslot that a fault needs.

use core::ops::Range;
use core::ptr;

use crate::addr::{Access, Gfn, Hva, Level};
use crate::format::{Format, Leaf};
use crate::platform::HostPage;
use crate::shadow::trail::Trail;
use crate::slots::{Limits, Memslot, PrivateFrames};
use crate::vm::{DirtyLog, LogKind, leaf_of};

/// The facts about the memslot of a fault's page that the fault needs. They are copied because the slot may be deleted
/// while the platform resolves the backing.
pub(super) struct SlotFacts {
    pub(super) id: u32,
    /// The largest range of the slot's frames around the page that are all private or all shared, like the page.
    pub(super) gfns: Range<Gfn>,
    /// The backing address of the first frame of `gfns`.
    pub(super) hva_base: Hva,
    /// The backing address of the page.
    pub(super) hva: Hva,
    /// The page's number in the slot.
    pub(super) page: u64,
    pub(super) private: bool,
    /// Whether the private backing of the slot also backs its shared frames (KVM: `KVM_MEMSLOT_GMEM_ONLY`).
    pub(super) only_private_backing: bool,
    pub(super) limits: Limits,
    /// The kind of the slot's dirty log, if it has one.
    pub(super) log: Option<LogKind>,
    /// The address of the log, only to compare it: the install looks up the log again. (To own the log, every fault
    /// would have to write the log's reference count, which all vCPUs share.)
    pub(super) log_at: Option<*const DirtyLog>,
}

impl SlotFacts {
    /// Returns the facts about `slot` for its frame `gfn`. `None`: the frame is private, and the slot has no private
    /// backing.
    #[inline(always)]
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

    /// Returns the addresses that back a leaf of `level` that maps `gfn`, the page of these facts. The leaf is within
    /// `self.gfns`.
    pub(super) fn hvas<F: Format>(&self, gfn: Gfn, level: Level) -> Range<Hva> {
        let start = Hva(self.hva.0 - (F::GRANULE.page_in(gfn, level) << F::GRANULE.shift()));
        start..F::GRANULE.add_pages(start, F::GRANULE.pages(level))
    }

    /// Extends `range` on both sides to multiples of the largest power of two that is at most `pages` and at most the
    /// number of pages of a table. Returns the part of that range that is in `self.gfns`.
    pub(super) fn around<F: Format>(&self, range: &Range<Gfn>, pages: u64) -> Range<Gfn> {
        let pages = 1 << pages.clamp(1, F::GRANULE.pages(Level::MEGA)).ilog2();
        let (start, end) = (
            range.start.0 & !(pages - 1),
            range.end.0.next_multiple_of(pages),
        );
        self.gfns.start.max(Gfn(start))..self.gfns.end.min(Gfn(end))
    }

    /// Whether a leaf of the slot (if `shadowed`, a leaf in a shadow page of a guest table) must be write-protected
    /// until a write was recorded.
    pub(super) fn protects(&self, shadowed: bool) -> bool {
        let protects = |log: LogKind| log.protects() || shadowed && log == LogKind::Buffers;
        self.log.is_some_and(protects)
    }

    /// Whether the dirty bits of the slot's leaves are part of its log. When such a slot moves, the dirty bits of its
    /// old leaves are recorded in the log, and during the move no leaf may be added
    /// ([`InProgress::is_slot_moving`](crate::vm::InProgress)).
    pub(super) fn takes_its_dirt_along(&self) -> bool {
        self.log.is_some_and(|log| !log.protects())
    }

    /// Returns the leaf for the page `host` of the slot, for an access now or later. `trail`: the path to the leaf
    /// through the guest's tables, which limit its rights. `is_saving`: there is a snapshot, so only a write makes a
    /// page writable.
    #[inline(always)]
    pub(super) fn leaf(
        &self,
        host: &HostPage,
        access: Access,
        trail: Option<&Trail>,
        is_saving: bool,
    ) -> Leaf {
        let protects = is_saving || self.protects(trail.is_some());
        let leaf = leaf_of(host, self.limits, protects, access);
        match trail {
            None => leaf,
            Some(trail) => leaf.granted(trail.rights),
        }
    }
}
