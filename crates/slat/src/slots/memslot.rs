//! One memslot.

use core::fmt;
use core::ops::{Deref, Range};
use core::ptr;

use super::{Region, SlotFlags};
use crate::addr::{Gfn, Hva, PAGE_SHIFT, gpa_range};
use crate::dirty_log::DirtyLog;
use crate::heap::{Shared, Uncounted};
use crate::sync::atomic::Watch;

/// One memslot; a change of flags or place makes a new one.
///
/// It is a value that the nodes of the trees hold ([`super::node`]), two to a cache line: who reads one
/// is inside a reader section or holds the writers' lock, and has a reference into a node.
#[repr(C)]
pub(crate) struct Memslot {
    base: Gfn,
    backing: Hva,
    besides: Besides,
    pages: u32,
    id: u16,
    flags: u8,
    /// What of `besides` there is.
    has_private: bool,
    alive: Watch,
}

/// What some slots have; none has both.
#[derive(Clone, Copy)]
union Besides {
    /// Owned by the slot's [`OwnedSlot`], which is dropped when both sets are without it.
    log: Option<Uncounted<DirtyLog>>,
    private: Hva,
}

/// Two to a cache line.
#[cfg(not(loom))]
const _: () = assert!(size_of::<Memslot>() == 32);

// SAFETY: what the pointer leads to is `Send + Sync`; that it lives is argued above.
unsafe impl Send for Memslot {}
// SAFETY: as above.
unsafe impl Sync for Memslot {}

impl Memslot {
    /// The same slot in another node. Not `Clone`: only what is gone before the log may hold it.
    pub(super) fn copy(&self) -> Self {
        Memslot {
            alive: self.alive.clone(),
            ..*self
        }
    }

    /// Nobody else looks at it now.
    pub(super) fn owned(&self) {
        self.alive.owned();
    }

    /// The client's number, below [`crate::MAX_SLOTS`].
    pub(crate) fn id(&self) -> u32 {
        self.id.into()
    }

    pub(crate) fn flags(&self) -> SlotFlags {
        SlotFlags(self.flags.into())
    }

    /// First guest frame.
    pub(crate) fn base(&self) -> Gfn {
        self.base
    }

    /// Length in 4 KiB pages, never 0.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.into()
    }

    /// Backing of the first page.
    pub(crate) fn backing(&self) -> Hva {
        self.backing
    }

    /// Backing of the first page where it is private.
    pub(crate) fn private(&self) -> Option<Hva> {
        if !self.has_private {
            return None;
        }
        // SAFETY: `has_private` tells which of the two was written.
        Some(unsafe { self.besides.private })
    }

    fn uncounted_log(&self) -> Option<Uncounted<DirtyLog>> {
        self.alive.used();
        if self.has_private {
            return None;
        }
        // SAFETY: `has_private` tells which of the two was written.
        unsafe { self.besides.log }
    }

    /// Exists while the slot logs dirty pages.
    pub(crate) fn log(&self) -> Option<&DirtyLog> {
        // SAFETY: the log lives as long as a slot can be seen that leads to it (see `Besides`).
        self.uncounted_log().map(|log| unsafe { log.get() })
    }

    /// Whether that is its log, or it has none if that is none.
    pub(crate) fn logs_to(&self, log: Option<&DirtyLog>) -> bool {
        self.log().map(ptr::from_ref) == log.map(ptr::from_ref)
    }

    /// The log for somebody who will not stay inside.
    pub(crate) fn share_log(&self) -> Option<Shared<DirtyLog>> {
        // SAFETY: as in `log`.
        self.uncounted_log().map(|log| unsafe { log.share() })
    }

    /// The frames it holds.
    pub(crate) fn gfns(&self) -> Range<Gfn> {
        self.alive.used();
        self.base..self.base.add(self.pages())
    }

    /// Whether `gfn` is one of them. One comparison: which side of a slot a frame lies on is anybody's
    /// guess, also for a branch predictor.
    #[inline]
    pub(crate) fn holds(&self, gfn: Gfn) -> bool {
        self.alive.used();
        gfn.0.wrapping_sub(self.base.0) < self.pages()
    }

    /// The part of the slot that `range` stands behind, if its first page is backed by `backing`.
    pub(super) fn gfns_backed_by(&self, range: &Range<Hva>, backing: Hva) -> Range<Gfn> {
        let first = range.start.0.saturating_sub(backing.0) >> PAGE_SHIFT;
        let end = range
            .end
            .0
            .saturating_sub(backing.0)
            .div_ceil(1 << PAGE_SHIFT);
        self.base.add(first.min(self.pages()))..self.base.add(end.min(self.pages()))
    }
}

impl fmt::Debug for Memslot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "memslot {} {:?} backed by {} flags {:#x}",
            self.id,
            gpa_range(&self.gfns()),
            self.backing,
            self.flags
        )
    }
}

/// A memslot with what belongs to it: what the index by id holds, and a change begins with.
pub(crate) struct OwnedSlot {
    slot: Memslot,
    /// Keeps alive what `slot` leads to.
    _log: Option<Shared<DirtyLog>>,
}

impl OwnedSlot {
    /// The slot that `region` asks for, which is as [`super::plan`] allows it, with `log` for its log.
    #[inline]
    pub(crate) fn new(region: &Region, log: Option<Shared<DirtyLog>>) -> Self {
        let fits = "the rules of regions leave no larger one";
        let besides = match region.private {
            Some(private) => Besides { private },
            None => Besides {
                log: log.as_ref().map(Shared::uncounted),
            },
        };
        let has_private = region.private.is_some();
        assert!(
            !has_private || log.is_none(),
            "private memory is not logged"
        );
        OwnedSlot {
            slot: Memslot {
                base: region.gpa.gfn(),
                backing: region.backing,
                besides,
                pages: (region.size >> PAGE_SHIFT).try_into().expect(fits),
                id: region.slot.try_into().expect(fits),
                flags: region.flags.0.try_into().expect(fits),
                has_private,
                alive: Watch::new(),
            },
            _log: log,
        }
    }
}

impl Deref for OwnedSlot {
    type Target = Memslot;
    fn deref(&self) -> &Memslot {
        &self.slot
    }
}
