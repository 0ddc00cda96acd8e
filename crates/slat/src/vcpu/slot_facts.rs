//! What a fault needs of its slot.

use core::ops::Range;
use core::ptr;

use crate::addr::{Access, Gfn, Hva, Level};
use crate::format::{Format, Leaf};
use crate::platform::HostPage;
use crate::shadow::trail::Trail;
use crate::slots::{Limits, Memslot, PrivateFrames};
use crate::vm::{DirtyLog, LogKind, leaf_of};

/// What a fault needs of its slot. A copy: the slot may be deleted while the backing is resolved.
pub(super) struct SlotFacts {
    pub(super) id: u32,
    /// The slot's frames around the page that are private if the page is, and shared if it is.
    pub(super) gfns: Range<Gfn>,
    /// Backing of the first of these.
    pub(super) hva_base: Hva,
    /// Backing of the page.
    pub(super) hva: Hva,
    /// The page's number in the slot.
    pub(super) page: u64,
    pub(super) private: bool,
    /// The private backing of the slot backs its shared frames, too (KVM: `KVM_MEMSLOT_GMEM_ONLY`).
    pub(super) only_private_backing: bool,
    pub(super) limits: Limits,
    /// How the slot logs.
    pub(super) log: Option<LogKind>,
    /// Which log that is; it is looked up again for the install. (To hold a share of it would be a count that every
    /// vCPU writes in every fault.)
    pub(super) log_at: Option<*const DirtyLog>,
}

impl SlotFacts {
    /// `None`: the frame is private, and the slot has no private backing.
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

    /// Returns what backs a leaf of `level` around `gfn`, the page of these facts; the leaf fits the frames.
    pub(super) fn hvas<F: Format>(&self, gfn: Gfn, level: Level) -> Range<Hva> {
        let start = Hva(self.hva.0 - (F::GRANULE.page_in(gfn, level) << F::GRANULE.shift()));
        start..F::GRANULE.add_pages(start, F::GRANULE.pages(level))
    }

    /// Returns the smallest range around `range` that begins and ends at multiples of `pages`, rounded down to a power
    /// of two, of at most a table's; as far as it is in the slot.
    pub(super) fn around<F: Format>(&self, range: &Range<Gfn>, pages: u64) -> Range<Gfn> {
        let pages = 1 << pages.clamp(1, F::GRANULE.pages(Level::MEGA)).ilog2();
        let (start, end) = (
            range.start.0 & !(pages - 1),
            range.end.0.next_multiple_of(pages),
        );
        self.gfns.start.max(Gfn(start))..self.gfns.end.min(Gfn(end))
    }

    /// Whether leaves of the slot, or those in shadow pages of the guest's tables, must not be writable
    /// before a write was noted.
    pub(super) fn protects(&self, shadowed: bool) -> bool {
        let protects = |log: LogKind| log.protects() || shadowed && log == LogKind::Buffers;
        self.log.is_some_and(protects)
    }

    /// Whether the leaves' dirty bits are the slot's log. A slot that moves takes it along: the bits were noted, or
    /// will be, as pages of where the slot is now, and no leaf may be added meanwhile
    /// ([`InProgress::is_slot_moving`](crate::vm::InProgress)).
    pub(super) fn takes_its_dirt_along(&self) -> bool {
        self.log.is_some_and(|log| !log.protects())
    }

    /// Returns the leaf for the page `host` of the slot and an access, or for one that may follow. `trail`: the way to
    /// it through the guest's tables, which limit its rights.
    pub(super) fn leaf(&self, host: &HostPage, access: Access, trail: Option<&Trail>) -> Leaf {
        let protects = self.protects(trail.is_some());
        let leaf = leaf_of(host, self.limits, protects, access);
        match trail {
            None => leaf,
            Some(trail) => leaf.granted(trail.rights),
        }
    }
}
