//! One memslot.

use core::fmt;
use core::ops::{Deref, Range};
use core::ptr;

use super::{Region, SlotFlags};
use crate::addr::{Gfn, Hva, PAGE_SHIFT, gpa_range};
use crate::dirty_log::DirtyLog;
use crate::heap::{Shared, Uncounted};
use crate::sync::atomic::Watch;

/// One memslot; a change of flags or address makes a new one.
///
/// It is a value that the leaves of the indexes hold ([`super::index`]), two to a cache line. Pointers there to slots on the heap
/// would make a look-up among 32,764 slots take 260 ns instead of 80. A reader of one is in a reader section or holds the
/// writers' lock, and has a reference into a leaf.
#[repr(C)]
pub(crate) struct Memslot {
    base: Gfn,
    backing: Hva,
    extra: Extra,
    pages: u32,
    id: u16,
    flags: u8,
    /// Which field of `extra` was written.
    has_private: bool,
    alive: Watch,
}

/// What some slots have; none has both.
#[derive(Clone, Copy)]
union Extra {
    /// Owned by the slot's [`OwnedSlot`], which is dropped when neither set has the slot any more.
    log: Option<Uncounted<DirtyLog>>,
    private: Hva,
}

/// Two to a cache line.
#[cfg(not(loom))]
const _: () = assert!(size_of::<Memslot>() == 32);

// SAFETY: what the pointer refers to is `Send + Sync`; that it lives is argued above.
unsafe impl Send for Memslot {}
// SAFETY: as above.
unsafe impl Sync for Memslot {}

impl Memslot {
    /// Copies the slot without owning its log. Not `Clone`: no copy may outlive the log.
    pub(super) fn copy(&self) -> Self {
        Memslot {
            alive: self.alive.clone(),
            ..*self
        }
    }

    /// For loom: the caller is the only one that uses the slot.
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
        // SAFETY: `has_private` tells which field was written.
        Some(unsafe { self.extra.private })
    }

    fn uncounted_log(&self) -> Option<Uncounted<DirtyLog>> {
        self.alive.used();
        if self.has_private {
            return None;
        }
        // SAFETY: `has_private` tells which field was written.
        unsafe { self.extra.log }
    }

    /// Exists while the slot logs dirty pages.
    pub(crate) fn log(&self) -> Option<&DirtyLog> {
        // SAFETY: the log lives as long as a set has a slot that refers to it (see `Extra`).
        self.uncounted_log().map(|log| unsafe { log.get() })
    }

    /// Whether `log` is its log; for `None`, whether it has none.
    pub(crate) fn logs_to(&self, log: Option<&DirtyLog>) -> bool {
        self.log().map(ptr::from_ref) == log.map(ptr::from_ref)
    }

    /// Returns the log for a caller that leaves its reader section.
    pub(crate) fn share_log(&self) -> Option<Shared<DirtyLog>> {
        // SAFETY: as in `log`.
        self.uncounted_log().map(|log| unsafe { log.share() })
    }

    /// The frames it holds.
    pub(crate) fn gfns(&self) -> Range<Gfn> {
        self.alive.used();
        self.base..self.base.add(self.pages())
    }

    /// Whether it holds `gfn`. One comparison: no branch predictor knows on which side of a slot a frame lies.
    #[inline]
    pub(crate) fn holds(&self, gfn: Gfn) -> bool {
        self.alive.used();
        gfn.0.wrapping_sub(self.base.0) < self.pages()
    }

    /// Returns the frames that `range` backs, if `backing` backs the first page.
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

/// A memslot with what belongs to it, as the index by id holds it. It is dropped when neither set has the slot any more.
pub(crate) struct OwnedSlot {
    slot: Memslot,
    /// Keeps alive what `slot` refers to.
    _log: Option<Shared<DirtyLog>>,
}

impl OwnedSlot {
    /// Makes the slot that `region` asks for, as [`super::plan`] allows it, with `log` for its log.
    #[inline]
    pub(crate) fn new(region: &Region, log: Option<Shared<DirtyLog>>) -> Self {
        let fits = "the rules of regions leave no larger one";
        let extra = match region.private {
            Some(private) => Extra { private },
            None => Extra {
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
                extra,
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
