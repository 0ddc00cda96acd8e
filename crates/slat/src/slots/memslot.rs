//! One memslot.

use core::fmt;
use core::ops::{Deref, Range};
use core::ptr;

use super::{Region, SlotFlags};
use crate::addr::{Gfn, Granule, Hva, Rights};
use crate::dirty_log::DirtyLog;
use crate::format::MemoryType;
use crate::heap::{Shared, Uncounted};
use crate::sync::atomic::Watch;

/// One memslot. It is immutable: a change of the flags or the address makes a new `Memslot`.
///
/// A slot is stored by value in the leaves of the indexes ([`super::index`]), two to a cache line. If the leaves had
/// pointers to slots on the heap, a look-up among 32,764 slots would take 260 ns instead of 80 ns. A thread that uses a
/// reference into a leaf is in a reader section or holds the writers' lock.
#[repr(C)]
pub(crate) struct Memslot {
    base: Gfn,
    backing: Hva,
    extra: Extra,
    pages: u32,
    id: u16,
    traits: Traits,
    /// Whether `extra` contains `private`; if not, it contains `log`.
    has_private: bool,
    alive: Watch,
}

/// A field that only some slots have. A slot with private backing never has a log.
#[derive(Clone, Copy)]
union Extra {
    /// The slot's dirty log. Its owner is the slot's [`OwnedSlot`], which is dropped when neither slot set contains the
    /// slot any more.
    log: Option<Uncounted<DirtyLog>>,
    private: Hva,
}

/// Flags, rights, memory type and granule of a slot, packed in a byte.
#[derive(Clone, Copy)]
struct Traits(u8);

impl Traits {
    /// The bits of [`SlotFlags`].
    const FLAGS: u8 = 3;
    const NO_WRITE: u8 = 1 << 2;
    const NO_EXECUTE: u8 = 1 << 3;
    const WRITE_COMBINING: u8 = 1 << 4;
    const DEVICE: u8 = 1 << 5;
    const GRANULE_SHIFT: u32 = 6;

    /// Makes the traits of `region`, whose flags are valid, in tables of `granule`.
    fn of(region: &Region, granule: Granule) -> Self {
        let bit = |set: bool, bit| if set { bit } else { 0 };
        let memory = match region.memory {
            MemoryType::WriteBack => 0,
            MemoryType::WriteCombining => Self::WRITE_COMBINING,
            MemoryType::Device => Self::DEVICE,
        };
        let flags = region.flags.0 as u8 & Self::FLAGS;
        let write = bit(!region.rights.write, Self::NO_WRITE);
        let granule = (granule as u8) << Self::GRANULE_SHIFT;
        Traits(flags | write | bit(!region.rights.execute, Self::NO_EXECUTE) | memory | granule)
    }

    #[inline]
    fn granule(self) -> Granule {
        match self.0 >> Self::GRANULE_SHIFT {
            0 => Granule::Kib4,
            1 => Granule::Kib16,
            _ => Granule::Kib64,
        }
    }

    fn has(self, bit: u8) -> bool {
        self.0 & bit != 0
    }
}

/// Limits that a slot sets for the leaves that map it, even if the host allows more.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The most rights that a leaf for the slot may have.
    pub(crate) rights: Rights,
    /// The cache type of the memory, unless the host's type for the page allows less caching.
    pub(crate) memory: MemoryType,
}

/// The alignment puts two slots on a cache line.
#[cfg(not(loom))]
const _: () = assert!(size_of::<Memslot>() == 32);

// SAFETY: the log to which the slot points is `Send + Sync`, and lives long enough (see [`Extra`]).
unsafe impl Send for Memslot {}
// SAFETY: the log to which the slot points is `Send + Sync`, and lives long enough (see [`Extra`]).
unsafe impl Sync for Memslot {}

impl Memslot {
    /// Copies the slot without owning its log. Not `Clone`: no copy may outlive the log.
    pub(super) fn copy(&self) -> Self {
        Memslot {
            alive: self.alive.clone(),
            ..*self
        }
    }

    /// Tells loom that no other thread uses the slot.
    pub(super) fn owned(&self) {
        self.alive.owned();
    }

    /// Returns the slot's id, given by the client, which is below [`crate::MAX_SLOTS`].
    pub(crate) fn id(&self) -> u32 {
        self.id.into()
    }

    pub(crate) fn flags(&self) -> SlotFlags {
        SlotFlags((self.traits.0 & Traits::FLAGS).into())
    }

    /// Returns the rights in the slot's [`Region`].
    pub(crate) fn rights(&self) -> Rights {
        Rights {
            write: !self.traits.has(Traits::NO_WRITE),
            execute: !self.traits.has(Traits::NO_EXECUTE),
        }
    }

    /// Returns the memory type in the slot's [`Region`].
    pub(crate) fn memory(&self) -> MemoryType {
        if self.traits.has(Traits::DEVICE) {
            MemoryType::Device
        } else if self.traits.has(Traits::WRITE_COMBINING) {
            MemoryType::WriteCombining
        } else {
            MemoryType::WriteBack
        }
    }

    /// Returns the limits of the slot's leaves, which combine its rights, its read-only flag and its memory type.
    #[inline]
    pub(crate) fn limits(&self) -> Limits {
        let (rights, memory) = (self.rights(), self.memory());
        Limits {
            rights: Rights {
                write: rights.write && !self.flags().has(SlotFlags::READONLY),
                execute: rights.execute && memory == MemoryType::WriteBack,
            },
            memory,
        }
    }

    /// Returns the first guest frame.
    pub(crate) fn base(&self) -> Gfn {
        self.base
    }

    /// Returns the granule of the tables that map the slot, which is the size of its pages.
    #[inline]
    pub(crate) fn granule(&self) -> Granule {
        self.traits.granule()
    }

    /// Returns the length in pages, which is never 0.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.into()
    }

    /// Returns the length in bytes.
    pub(super) fn size(&self) -> u64 {
        self.pages() << self.granule().shift()
    }

    /// Returns the address that backs the first page.
    pub(crate) fn backing(&self) -> Hva {
        self.backing
    }

    /// Returns the address of the private backing of the first page. `None`: the slot has no private backing.
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

    /// Returns the slot's log, which exists while the slot logs dirty pages.
    pub(crate) fn log(&self) -> Option<&DirtyLog> {
        // SAFETY: the log lives as long as a set has a slot that refers to it (see `Extra`).
        self.uncounted_log().map(|log| unsafe { log.get() })
    }

    /// Whether the slot's log is `log`. If `log` is `None`, whether the slot has no log.
    pub(crate) fn logs_to(&self, log: Option<&DirtyLog>) -> bool {
        self.log().map(ptr::from_ref) == log.map(ptr::from_ref)
    }

    /// Returns the log as one more owner, for a caller that uses the log after its reader section.
    pub(crate) fn share_log(&self) -> Option<Shared<DirtyLog>> {
        // SAFETY: the log lives as long as a set has a slot that refers to it (see `Extra`).
        self.uncounted_log().map(|log| unsafe { log.share() })
    }

    /// Returns the frames of the slot.
    pub(crate) fn gfns(&self) -> Range<Gfn> {
        self.alive.used();
        self.base..self.base.add(self.pages())
    }

    /// Whether the slot contains `gfn`. Uses one comparison instead of two, because branch prediction cannot predict on
    /// which side of a slot a frame is.
    #[inline]
    pub(crate) fn holds(&self, gfn: Gfn) -> bool {
        self.alive.used();
        gfn.0.wrapping_sub(self.base.0) < self.pages()
    }

    /// Returns a region that describes this slot.
    pub(crate) fn region(&self) -> Region {
        Region {
            slot: self.id(),
            flags: self.flags(),
            gpa: self.granule().gpa(self.base),
            size: self.size(),
            backing: self.backing,
            private: self.private(),
            rights: self.rights(),
            memory: self.memory(),
        }
    }

    /// Whether the slot has the size and the backing of `region`.
    pub(crate) fn has_pages_of(&self, region: &Region) -> bool {
        let private = (self.private(), region.private);
        (self.backing, self.pages()) == (region.backing, region.pages(self.granule()))
            && private.0 == private.1
    }

    /// Whether the slot is as `region` describes.
    pub(crate) fn is(&self, region: &Region) -> bool {
        let limits = (region.flags, region.rights, region.memory);
        self.base == self.granule().gfn(region.gpa)
            && self.has_pages_of(region)
            && (self.flags(), self.rights(), self.memory()) == limits
    }

    /// Whether each frame that the slot and `other` have in common is backed by the same page in both. `false` if
    /// either slot has private backing.
    pub(crate) fn backs_alike(&self, other: &Memslot) -> bool {
        let origin = |slot: &Memslot| slot.backing.0.wrapping_sub(slot.granule().gpa(slot.base).0);
        let shared_only = !self.has_private && !other.has_private;
        shared_only && origin(self) == origin(other)
    }

    /// Returns the frames that both slots contain.
    pub(crate) fn common(&self, other: &Memslot) -> Range<Gfn> {
        let (mine, others) = (self.gfns(), other.gfns());
        mine.start.max(others.start)..mine.end.min(others.end)
    }

    /// Returns the addresses that back `gfns`, frames of the slot, as shared memory.
    pub(crate) fn hvas(&self, gfns: &Range<Gfn>) -> Range<Hva> {
        let hva = |gfn: Gfn| self.granule().add_pages(self.backing, gfn.0 - self.base.0);
        hva(gfns.start)..hva(gfns.end)
    }

    /// Returns the slot's frames that `range` backs. `backing` is the address that backs the slot's first page.
    pub(super) fn gfns_backed_by(&self, range: &Range<Hva>, backing: Hva) -> Range<Gfn> {
        let bytes = self.granule().bytes();
        let first = range.start.0.saturating_sub(backing.0) / bytes;
        let end = range.end.0.saturating_sub(backing.0).div_ceil(bytes);
        self.base.add(first.min(self.pages()))..self.base.add(end.min(self.pages()))
    }
}

impl fmt::Debug for Memslot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "memslot {} {:?} backed by {} flags {:#x} {:?} {:?}",
            self.id,
            self.granule().gpas(&self.gfns()),
            self.backing,
            self.flags().0,
            self.rights(),
            self.memory()
        )
    }
}

/// A memslot and the log that it owns, as stored in the writer's table by id. The `OwnedSlot` is dropped when neither
/// slot set contains the slot any more.
pub(crate) struct OwnedSlot {
    slot: Memslot,
    /// An owner of the log to which `slot` refers, so that the log exists as long as `slot`.
    _log: Option<Shared<DirtyLog>>,
}

impl OwnedSlot {
    /// Makes the slot that `region` describes, for tables of `granule`, with the log `log`. [`super::plan`] has allowed
    /// it.
    #[inline]
    pub(crate) fn new(region: &Region, granule: Granule, log: Option<Shared<DirtyLog>>) -> Self {
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
                base: granule.gfn(region.gpa),
                backing: region.backing,
                extra,
                pages: region.pages(granule).try_into().expect(fits),
                id: region.slot.try_into().expect(fits),
                traits: Traits::of(region, granule),
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
