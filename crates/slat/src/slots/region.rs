//! The requests that change memslots, and KVM's checks of them: the rules of KVM_SET_USER_MEMORY_REGION
//! (Documentation/virt/kvm/api.rst, 4.35), with an error for each rule.

use core::fmt;
use core::ops::{BitOr, Range};

use super::SlotsChange;
use super::index::PAGES;
use crate::addr::{Gfn, Gpa, Granule, Hva, PAGE_SHIFT, Rights};
use crate::format::MemoryType;
use crate::heap::OutOfMemory;

/// The number of slot ids per address space (KVM_USER_MEM_SLOTS on x86).
pub const MAX_SLOTS: u32 = 32764;

/// Flags of a memslot, with KVM's values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotFlags(pub u32);

impl SlotFlags {
    /// KVM_MEM_LOG_DIRTY_PAGES.
    pub const LOG_DIRTY_PAGES: SlotFlags = SlotFlags(1 << 0);
    /// KVM_MEM_READONLY: guest writes exit as MMIO.
    pub const READONLY: SlotFlags = SlotFlags(1 << 1);
    const VALID: u32 = Self::LOG_DIRTY_PAGES.0 | Self::READONLY.0;

    /// Whether all of `flags` are set.
    pub const fn has(self, flags: SlotFlags) -> bool {
        self.0 & flags.0 == flags.0
    }
}

impl BitOr for SlotFlags {
    type Output = SlotFlags;
    fn bitor(self, other: SlotFlags) -> SlotFlags {
        SlotFlags(self.0 | other.0)
    }
}

/// The arguments of KVM_SET_USER_MEMORY_REGION2, to create a slot, move it, or change its flags. (To delete a slot, use
/// [`crate::Vm::remove_memory_region`].)
///
/// ```
/// use slat::{Gpa, Hva, MemoryType, Region, Rights, SlotFlags};
/// let region = Region::new(0, Gpa(0x10_0000), 0x4000, Hva(0x7f00_0000_0000))
///     .with_flags(SlotFlags::LOG_DIRTY_PAGES);
/// assert_eq!(region.private, None);
/// // A frame buffer.
/// let frame_buffer = region
///     .with_rights(Rights::ALL.with_execute(false))
///     .with_memory(MemoryType::WriteCombining);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Region {
    /// The VMM's id for the slot.
    pub slot: u32,
    /// The flags ([`SlotFlags`]).
    pub flags: SlotFlags,
    /// The first guest-physical address.
    pub gpa: Gpa,
    /// The size in bytes, not 0.
    pub size: u64,
    /// The backing address of the first byte. All backing addresses must be below 2^60 - 4096.
    pub backing: Hva,
    /// The backing address of the first byte for private frames ([`crate::Vm::set_memory_attributes`]):
    /// KVM_MEM_GUEST_MEMFD. `None`: the guest cannot access private memory in the slot. The address may be equal to
    /// `backing`; then the same memory backs shared and private frames (KVM: a guest_memfd with GUEST_MEMFD_FLAG_MMAP).
    pub private: Option<Hva>,
    /// The most rights that the guest gets to the slot's memory, even if the host allows more. Without the right to
    /// write, the guest's writes exit as MMIO, as with [`SlotFlags::READONLY`]. Without the right to execute, an
    /// instruction fetch ends with [`Stop::NoExecute`](crate::Stop::NoExecute). KVM's regions have every right.
    pub rights: Rights,
    /// The cache type of the guest's memory, unless the host's type for a page allows less caching
    /// ([`MemoryType::combined`]). The guest can execute only write-back memory. KVM's regions are write-back.
    pub memory: MemoryType,
}

impl Region {
    /// Returns a region of `size` bytes at `gpa`, backed from `backing` on. The memory is shared, has all rights and
    /// the host's memory type, and is not logged.
    pub fn new(slot: u32, gpa: Gpa, size: u64, backing: Hva) -> Self {
        Region {
            slot,
            flags: SlotFlags::default(),
            gpa,
            size,
            backing,
            private: None,
            rights: Rights::ALL,
            memory: MemoryType::WriteBack,
        }
    }

    /// Returns this region with `flags`.
    #[must_use]
    pub fn with_flags(self, flags: SlotFlags) -> Self {
        Region { flags, ..self }
    }

    /// Returns a copy of this region that begins at `gpa`. A VMM that sets the copy for an existing memslot moves the
    /// memslot.
    #[must_use]
    pub fn with_gpa(self, gpa: Gpa) -> Self {
        Region { gpa, ..self }
    }

    /// Returns this region with `size` bytes.
    #[must_use]
    pub fn with_size(self, size: u64) -> Self {
        Region { size, ..self }
    }

    /// Returns this region with `backing` as the backing address of its first byte.
    #[must_use]
    pub fn with_backing(self, backing: Hva) -> Self {
        Region { backing, ..self }
    }

    /// Returns this region with `private` as the private backing address of its first byte.
    #[must_use]
    pub fn with_private(self, private: impl Into<Option<Hva>>) -> Self {
        let private = private.into();
        Region { private, ..self }
    }

    /// Returns this region with at most the rights `rights`: with `Rights::READ`, the guest may neither write to the
    /// memory nor execute it.
    #[must_use]
    pub fn with_rights(self, rights: Rights) -> Self {
        Region { rights, ..self }
    }

    /// Returns the region's length in pages of `granule`.
    pub(crate) fn pages(&self, granule: Granule) -> u64 {
        self.size >> granule.shift()
    }

    /// Returns the frames of the region, which must have been checked.
    pub(crate) fn gfns(&self, granule: Granule) -> Range<Gfn> {
        let start = granule.gfn(self.gpa);
        start..start.add(self.pages(granule))
    }

    /// Returns this region with memory of type `memory`.
    #[must_use]
    pub fn with_memory(self, memory: MemoryType) -> Self {
        Region { memory, ..self }
    }
}

/// The reason why a [`Region`] was refused. The failed call changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionError {
    /// The address space does not exist.
    NoSuchSpace(usize),
    /// The id is not below [`MAX_SLOTS`].
    SlotTooHigh(u32),
    /// The flags have bits that are not defined.
    BadFlags(u32),
    /// An address or the size is not a multiple of the page size.
    Misaligned(Region, Granule),
    /// Address plus size wraps around, or the backing ends above 2^60 - 4096.
    TooHigh(Region),
    /// The region reaches beyond the addresses that the page tables translate.
    BeyondTables(Region),
    /// The region has more pages than a slot may have, or the slots together would have too many pages.
    TooLarge(Region),
    /// The size of this slot is 0. All checks that KVM makes earlier have succeeded. In KVM, size 0 deletes the slot.
    /// Here only [`crate::Vm::remove_memory_region`] deletes, so that a size that is accidentally 0 deletes no memory.
    /// A client that implements KVM's call should call `remove_memory_region` when it gets this error.
    Empty(u32),
    /// The slot to delete does not exist.
    NothingToDelete(u32),
    /// The request changes the size, backing, read-only flag, rights or memory type of an existing slot. To change one
    /// of these, delete the slot first, which unmaps all its pages.
    Resized(u32),
    /// A slot with private backing can neither log dirty pages nor be read-only.
    PrivateWithFlags(SlotFlags),
    /// A slot with private backing can only be created and deleted.
    PrivateChanged(u32),
    /// Another slot uses part of the private backing.
    PrivateTaken {
        /// The requested region.
        region: Region,
        /// The slot that uses part of the private backing.
        by: u32,
    },
    /// Another slot contains part of the range.
    Overlap {
        /// The requested region.
        region: Region,
        /// The slot that contains part of the range.
        with: u32,
    },
    /// Several changes of [`crate::Vm::set_memory_regions`] name this slot.
    NamedTwice(u32),
    /// There was no memory. The call changed nothing; the caller may repeat it.
    OutOfMemory,
}

impl RegionError {
    /// Returns the errno that KVM returns (positive, with Linux's numbers).
    pub fn errno(&self) -> i32 {
        const ENOMEM: i32 = 12;
        const EEXIST: i32 = 17;
        const EINVAL: i32 = 22;
        match self {
            RegionError::Overlap { .. } | RegionError::PrivateTaken { .. } => EEXIST,
            RegionError::OutOfMemory => ENOMEM,
            _ => EINVAL,
        }
    }
}

impl From<OutOfMemory> for RegionError {
    fn from(_: OutOfMemory) -> Self {
        RegionError::OutOfMemory
    }
}

impl fmt::Display for RegionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |f: &mut fmt::Formatter<'_>, r: &Region| {
            write!(
                f,
                "setting memslot {} (gpa {}, size {:#x}, backing {}): ",
                r.slot, r.gpa, r.size, r.backing
            )
        };
        match self {
            RegionError::NoSuchSpace(space) => {
                write!(f, "setting a memslot: there is no address space {space}")
            }
            RegionError::SlotTooHigh(slot) => {
                write!(f, "setting memslot {slot}: ids end at {}", MAX_SLOTS - 1)
            }
            RegionError::BadFlags(flags) => write!(
                f,
                "setting a memslot: flags {flags:#x} hold unknown bits; known are {:#x}",
                SlotFlags::VALID
            ),
            RegionError::Misaligned(r, granule) => {
                at(f, r)?;
                let page = granule.bytes();
                write!(f, "gpa, size and backing must be multiples of {page:#x}")
            }
            RegionError::TooHigh(r) => {
                at(f, r)?;
                f.write_str(
                    "an address wraps around, or the backing reaches beyond 0xffffffffffff000",
                )
            }
            RegionError::BeyondTables(r) => {
                at(f, r)?;
                f.write_str("it reaches beyond what the page tables can translate")
            }
            RegionError::TooLarge(r) => {
                at(f, r)?;
                f.write_str("too many pages; use several slots of less than 2^31 pages")
            }
            RegionError::Empty(slot) => {
                write!(
                    f,
                    "setting memslot {slot}: its size is 0; remove_memory_region deletes it"
                )
            }
            RegionError::NothingToDelete(slot) => {
                write!(f, "deleting memslot {slot}: it does not exist")
            }
            RegionError::Resized(slot) => write!(
                f,
                "changing memslot {slot}: size, backing, rights and memory type cannot change; delete it first"
            ),
            RegionError::PrivateWithFlags(flags) => write!(
                f,
                "setting a memslot with private backing: it takes no flags, not {:#x}",
                flags.0
            ),
            RegionError::PrivateChanged(slot) => write!(
                f,
                "changing memslot {slot}: a slot with private backing cannot change; delete it first"
            ),
            RegionError::PrivateTaken { region, by } => {
                at(f, region)?;
                write!(
                    f,
                    "memslot {by} has part of its private backing; delete it first"
                )
            }
            RegionError::Overlap { region, with } => {
                at(f, region)?;
                write!(
                    f,
                    "memslot {with} holds part of that range; delete or move it first"
                )
            }
            RegionError::NamedTwice(slot) => write!(
                f,
                "changing several memslots: two changes name memslot {slot}; name it once, as it is to be in the end"
            ),
            RegionError::OutOfMemory => write!(f, "setting a memslot: {OutOfMemory}"),
        }
    }
}

impl core::error::Error for RegionError {}

/// The largest number of pages in one slot (KVM_MEM_MAX_NR_PAGES).
const MAX_PAGES: u64 = (1 << 31) - 1;
/// Backing addresses are below this: in the index by backing address, a page number has no more bits.
const BACKING_END: u64 = PAGES << PAGE_SHIFT;

/// A region that was checked for tables of a granule, but not against the existing slots.
#[derive(Clone, Copy)]
pub(crate) struct Checked<'a>(&'a Region, Granule);

/// Checks `region`, for tables of `granule`, against the rules for which the existing slots need not be known. The
/// caller holds no lock.
///
/// # Errors
/// [`RegionError`].
#[inline]
pub(crate) fn check(region: &Region, granule: Granule) -> Result<Checked<'_>, RegionError> {
    let Region {
        slot: id,
        flags,
        gpa,
        size,
        backing,
        private,
        ..
    } = *region;
    if flags.0 & !SlotFlags::VALID != 0 {
        return Err(RegionError::BadFlags(flags.0));
    }
    if flags.0 != 0 && private.is_some() {
        return Err(RegionError::PrivateWithFlags(flags));
    }
    let last_backing = private.map_or(backing, |private| private.max(backing));
    let addresses = size | gpa.0 | backing.0 | private.map_or(0, |private| private.0);
    if addresses % granule.bytes() != 0 {
        return Err(RegionError::Misaligned(*region, granule));
    }
    if id >= MAX_SLOTS {
        return Err(RegionError::SlotTooHigh(id));
    }
    let ends = (gpa.0.checked_add(size), last_backing.0.checked_add(size));
    let (Some(_), Some(backing_end)) = ends else {
        return Err(RegionError::TooHigh(*region));
    };
    if region.pages(granule) > MAX_PAGES {
        return Err(RegionError::TooLarge(*region));
    }
    if size == 0 {
        return Err(RegionError::Empty(id));
    }
    if backing_end > BACKING_END {
        return Err(RegionError::TooHigh(*region));
    }
    Ok(Checked(region, granule))
}

/// Checks `region` against the existing slots. Returns whether it changes anything; `false`: the slot already is as
/// `region` says. `capacity` is the number of frames that the tables translate.
///
/// # Errors
/// [`RegionError`].
#[inline]
pub(crate) fn plan(
    slots: &SlotsChange<'_>,
    Checked(region, granule): Checked<'_>,
    capacity: u64,
) -> Result<bool, RegionError> {
    let id = region.slot;
    if let Some(old) = slots.by_id(id) {
        if old.private().is_some() || region.private.is_some() {
            return Err(RegionError::PrivateChanged(id));
        }
        let readonly = |flags: SlotFlags| flags.has(SlotFlags::READONLY);
        let same_limits = readonly(old.flags()) == readonly(region.flags)
            && (old.rights(), old.memory()) == (region.rights, region.memory);
        if !old.has_pages_of(region) || !same_limits {
            return Err(RegionError::Resized(id));
        }
        if old.base() == granule.gfn(region.gpa) {
            return Ok(old.flags() != region.flags);
        }
    }
    place(slots, (region, granule), capacity, |other| other == id)?;
    Ok(true)
}

/// Checks that `region`, in tables of `granule`, overlaps no existing slot. Ignores slots for which `leaves` returns
/// `true`, because the same change moves or deletes them.
///
/// # Errors
/// [`RegionError`].
#[inline]
pub(super) fn place(
    slots: &SlotsChange<'_>,
    (region, granule): (&Region, Granule),
    capacity: u64,
    leaves: impl Fn(u32) -> bool,
) -> Result<(), RegionError> {
    let gfns = region.gfns(granule);
    let region = *region;
    if let Some(with) = slots.set().overlap(&gfns, &leaves) {
        return Err(RegionError::Overlap { region, with });
    }
    // Check this last, like KVM, which calls its architecture-specific check after all generic checks.
    if gfns.end.0 > capacity.min(PAGES) {
        return Err(RegionError::BeyondTables(region));
    }
    let taken = |private| slots.set().private_overlap(private, region.size, &leaves);
    match region.private.and_then(taken) {
        Some(by) => Err(RegionError::PrivateTaken { region, by }),
        None => Ok(()),
    }
}
