//! The meaning of page-table entries to a page walker. A format is a type parameter without values, so every walk is
//! compiled once for each format. Only the files of this module know the bits of an entry.

mod aarch64;
mod ept;
mod riscv;
mod x86;

pub use aarch64::{Stage2, Stage2Kib16, Stage2Kib64};
pub use ept::{Ept, Ept5, ExtendedPageTables};
pub use riscv::{GStage, Sv39x4, Sv48x4, Sv57x4};
pub use x86::{Npt, Npt5, X86};

use core::ops::Range;

use crate::addr::{Access, Gfn, Granule, Level, Pfn};
use crate::guest_walk::PageRights;

/// The meaning of an entry, in the same terms for every architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// No translation: a walker that reads this entry faults.
    Empty,
    /// A reference to the next lower table, in this host frame.
    Table(Pfn),
    /// A translation to guest memory.
    Leaf(Leaf),
    /// No memslot contained this guest frame in the MMIO generation `generation`. A walker faults on the entry. While
    /// this generation is current, the fault handler knows without a slot look-up that the access is MMIO.
    Mmio {
        /// The lowest [`Format::MMIO_GENERATION_BITS`] bits of the generation in which the entry was made.
        generation: u64,
        /// [`Format::MMIO_NOTE_BITS`] bits that the MMU that made the entry may use.
        note: u64,
    },
    /// A leaf that is being replaced, where the walker requires break-before-make. It is invalid to the walker, and is
    /// flushed from TLBs before the entry gets another valid value. A vCPU that faults on it waits.
    Broken(Leaf),
}

/// A leaf of any level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// First of the [`Granule::pages`] contiguous host frames.
    pub pfn: Pfn,
    /// Whether the guest may write to the page.
    pub write: bool,
    /// Whether the guest may execute the page.
    pub execute: bool,
    /// For software only: the dirty log alone has removed `write` from the leaf. A fault may give the right back
    /// without looking up the memslot and the host page again. (KVM: "MMU-writable".)
    pub may_write: bool,
    /// For software only, in a huge leaf: the guest may execute the 4 KiB pages of the leaf after a split, although the
    /// policy `nx_huge_pages` forbids it to execute the leaf as a whole.
    pub may_execute: bool,
    /// The page was accessed since this flag was last cleared.
    pub accessed: bool,
    /// The page was written since this flag was last cleared.
    pub dirty: bool,
    /// The cache type of the memory.
    pub memory: MemoryType,
    /// Whether user accesses are allowed, and the protection key.
    pub privilege: Privilege,
}

/// Whether accesses at user privilege may use a leaf, and the leaf's protection key. Only x86's own tables have these;
/// a second-level leaf has [`Privilege::USER`].
// Stored in a byte, so that a leaf fits in two registers: faults copy leaves often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Privilege(u8);

impl Privilege {
    /// Allows user and supervisor accesses, with protection key 0.
    pub const USER: Privilege = Privilege::new(true, 0);

    /// Makes the privilege of a leaf with protection key `key` that supervisors may access, and, if `user`, also users.
    #[inline]
    pub const fn new(user: bool, key: u8) -> Self {
        assert!(key < 16, "a protection key has 4 bits");
        Privilege((user as u8) << 4 | key)
    }

    /// Whether accesses at user privilege are allowed.
    #[inline]
    pub const fn is_user(self) -> bool {
        self.0 >> 4 != 0
    }

    /// Returns the protection key.
    #[inline]
    pub const fn key(self) -> u8 {
        self.0 & 15
    }
}

/// The cache type of a page. Every format encodes it in its leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryType {
    /// Ordinary memory, cached write-back.
    WriteBack,
    /// A frame buffer passed through to the guest: not cached, and stores may be gathered. EPT has a type for it;
    /// AArch64 has Normal Non-cacheable, and RISC-V has NC (Svpbmt). In x86's own tables and NPT the leaf selects entry
    /// 1 of the PAT, which Linux sets to write-combining; after a reset that entry is write-through.
    WriteCombining,
    /// Device registers that are passed through to the guest.
    Device,
}

impl MemoryType {
    /// Combines two types that apply to the same memory: returns the one that caches and reorders less. AArch64
    /// combines the types of its two stages in the same way.
    ///
    /// ```
    /// use slat::MemoryType::*;
    /// assert_eq!(WriteBack.combined(WriteCombining), WriteCombining);
    /// assert_eq!(Device.combined(WriteCombining), Device);
    /// ```
    #[must_use]
    #[inline]
    pub const fn combined(self, other: MemoryType) -> MemoryType {
        match (self, other) {
            (MemoryType::Device, _) | (_, MemoryType::Device) => MemoryType::Device,
            (MemoryType::WriteCombining, _) | (_, MemoryType::WriteCombining) => {
                MemoryType::WriteCombining
            }
            (MemoryType::WriteBack, MemoryType::WriteBack) => MemoryType::WriteBack,
        }
    }
}

/// Returns `bit` if `set`, otherwise 0: for building entries.
#[inline]
const fn bit(set: bool, bit: u64) -> u64 {
    if set { bit } else { 0 }
}

impl Entry {
    /// Returns the meaning of this entry at the end of a walk path. If the path `is_protected`
    /// ([`Format::TABLE_WRITE`]), a leaf is not writable.
    #[inline]
    pub(crate) fn below(self, is_protected: bool) -> Entry {
        match self {
            Entry::Leaf(leaf) if is_protected => Entry::Leaf(Leaf {
                write: false,
                may_write: leaf.write || leaf.may_write,
                ..leaf
            }),
            entry => entry,
        }
    }
}

impl Leaf {
    /// Whether the leaf has the right to `access`.
    #[inline]
    pub fn allows(&self, access: Access) -> bool {
        match access {
            Access::Read => true,
            Access::Write => self.write,
            Access::Execute => self.execute,
        }
    }

    /// Returns this leaf, limited to the `rights` that the guest's tables grant, for use in a shadow page.
    #[inline]
    pub(crate) fn granted(self, rights: PageRights) -> Leaf {
        Leaf {
            write: self.write && rights.write,
            may_write: self.may_write && rights.write,
            execute: self.execute && rights.execute,
            dirty: self.dirty && rights.write,
            privilege: Privilege::new(rights.user, rights.key),
            ..self
        }
    }

    /// Returns piece number `i` of this leaf, which is of `level` in tables of `granule`. The pieces are the leaves of
    /// the next lower level that together map what this leaf maps; there are as many as a table has entries. Pieces of
    /// level 1 are executable if [`may_execute`](Self::may_execute) is set.
    #[inline]
    pub fn piece(self, granule: Granule, level: Level, i: usize) -> Leaf {
        let small = level == Level::MEGA;
        Leaf {
            pfn: self.pfn.add(i as u64 * granule.pages(level.below())),
            execute: self.execute || small && self.may_execute,
            may_execute: !small && self.may_execute,
            ..self
        }
    }
}

/// A page-table format: the entries that one kind of page walker understands.
///
/// The engine has the formats of the processors. A hypervisor may implement its own, for an IOMMU's walker, or for a
/// processor that the engine does not know. Of the guarantees below, `slat_model::format_promises` checks those about
/// the functions, and the random operations of the crate `slat_model` test the others. The crate's `tests/own_format`
/// has a complete format: the second-stage tables of Intel's IOMMU.
///
/// # Safety
/// The engine dereferences what a format calls a table, and a CPU uses what the format calls a leaf. So a wrong result
/// may make the safe [`Vcpu::translate`](crate::Vcpu::translate) dereference an arbitrary address, or let a guest write
/// where it must not. An implementor of the trait guarantees the following for each level from [`Level::PAGE`] to
/// [`TOP`](Self::TOP):
///
/// 1. *Entries have one meaning.* `0` is [`Entry::Empty`]. [`decode`](Self::decode) is the inverse of
///    [`leaf`](Self::leaf), [`table`](Self::table), [`mmio`](Self::mmio), [`cleared`](Self::cleared) and
///    [`broken`](Self::broken): given the bits that one of these functions returns, `decode` returns that function's
///    arguments. This is so for every leaf whose frame an entry can [hold](Self::holds). `decode` returns an
///    [`Entry::Table`] only for bits that `table` returns. The bits of a leaf are still a leaf after a walker,
///    [`write_protect`](Self::write_protect), [`mark`](Self::mark), [`clear_accessed`](Self::clear_accessed) or
///    [`clear_dirty`](Self::clear_dirty) has changed it.
/// 2. *The walker agrees.* The walker translates through an entry that `decode` calls a leaf, grants no right that the
///    leaf lacks, and faults on every other entry that ends a walk. An entry that refers to a table limits no right,
///    with one exception: where [`TABLE_WRITE`](Self::TABLE_WRITE) is not 0, a write needs that bit in every such entry
///    on the path. The walker reads all 64 bits of an entry at once. It writes only to a leaf that allows the access,
///    atomically and never after the leaf was replaced: it sets [`ACCESSED`](Self::ACCESSED), and for a write to memory
///    [`DIRTY`](Self::DIRTY). It caches no entry that is not valid. If it must not see one valid entry replaced by
///    another, [`BREAK_BEFORE_MAKE`](Self::BREAK_BEFORE_MAKE) is true. [`PROTECT_FROM`](Self::PROTECT_FROM) says which
///    entries that refer to tables it may cache.
/// 3. *Each change affects one property.* `write_protect` removes `write` from a leaf that has it and sets `may_write`;
///    `mark`, `clear_accessed` and `clear_dirty` change only the accessed and dirty bits that their names say. Nothing
///    else of the leaf changes.
/// 4. *Short cuts agree with `decode`*, for all entries of guarantee 1: [`decode_leaf`](Self::decode_leaf),
///    [`next_table`](Self::next_table), [`is_writable`](Self::is_writable), [`is_settled`](Self::is_settled),
///    [`ready`](Self::ready), and [`is_absent`](Self::is_absent), which is true of `cleared`, `mmio` and `0`, and of no
///    other entry: a [broken](Entry::Broken) leaf is not absent.
/// 5. *Functions are pure*: the same arguments give the same result, and a function panics only for arguments that its
///    documentation excludes.
///
/// The limits of the constants (levels, frames, bits that overlap) are checked when a [`Vm`](crate::Vm) of the format
/// is compiled:
///
/// ```compile_fail,E0080
/// # use slat::format::{Entry, Leaf};
/// # use slat::{Access, Config, Ept, Format, Level, Vm};
/// # use slat_model::SimPlatform;
/// struct TooHigh;
///
/// // SAFETY: no walker uses it.
/// unsafe impl Format for TooHigh {
///     const TOP: Level = Level(6);
/// #   const NAME: &'static str = "too high";
/// #   const ROOT_TABLES: usize = Ept::ROOT_TABLES;
/// #   const MAX_LEAF: Level = Ept::MAX_LEAF;
/// #   const BREAK_BEFORE_MAKE: bool = Ept::BREAK_BEFORE_MAKE;
/// #   const TABLE: u64 = Ept::TABLE;
/// #   const FRAME: u64 = Ept::FRAME;
/// #   const WRITE: u64 = Ept::WRITE;
/// #   const MAY_WRITE: u64 = Ept::MAY_WRITE;
/// #   const ACCESSED: u64 = Ept::ACCESSED;
/// #   const DIRTY: u64 = Ept::DIRTY;
/// #   const SETS_DIRTY: bool = Ept::SETS_DIRTY;
/// #   const LOGS_READS: bool = Ept::LOGS_READS;
/// #   const MMIO_GENERATION_BITS: u32 = Ept::MMIO_GENERATION_BITS;
/// #   const MMIO_NOTE_BITS: u32 = Ept::MMIO_NOTE_BITS;
/// #   const SHADOWS: bool = Ept::SHADOWS;
/// #   const MMIO_PHYSICAL_BITS: u32 = Ept::MMIO_PHYSICAL_BITS;
///     // The rest as in `Ept`.
/// #   fn decode(bits: u64, level: Level) -> Entry { Ept::decode(bits, level) }
/// #   fn decode_leaf(bits: u64) -> Leaf { Ept::decode_leaf(bits) }
/// #   fn leaf(leaf: Leaf, level: Level) -> u64 { Ept::leaf(leaf, level) }
/// #   fn mmio(generation: u64, note: u64) -> u64 { Ept::mmio(generation, note) }
/// #   fn is_absent(bits: u64) -> bool { Ept::is_absent(bits) }
/// #   fn ready(access: Access) -> (u64, u64) { Ept::ready(access) }
/// }
///
/// let vm = Vm::<_, TooHigh>::new(SimPlatform::new(512), Config::default());
/// ```
pub unsafe trait Format: Send + Sync + 'static {
    /// The name in KVM or in the manual, for messages.
    const NAME: &'static str;
    /// The size of a page and of a table. It determines how many bits of an address index a table. [`Gfn`] and [`Pfn`]
    /// count pages of this size.
    const GRANULE: Granule = Granule::Kib4;
    /// The level of the entries in the root table.
    const TOP: Level;
    /// The number of contiguous tables that form the root. It is more than one if the walker indexes the root level
    /// with more address bits than the other levels.
    const ROOT_TABLES: usize;
    /// The highest level at which the format has leaves.
    const MAX_LEAF: Level;
    /// Whether a valid entry must be made invalid, and flushed, before a valid entry with another address replaces it.
    const BREAK_BEFORE_MAKE: bool;
    /// The bits of an entry that refers to a table, apart from the frame. These bits limit no right: the leaves grant
    /// the rights.
    const TABLE: u64;
    /// The bit that allows writing in an entry that refers to a table: a bit of [`TABLE`](Self::TABLE), equal to
    /// [`WRITE`](Self::WRITE). An entry without it is *write-protected*: nothing below it can be written, whatever the
    /// leaves allow. It is 0 if the walker checks the right to write only in the leaf.
    const TABLE_WRITE: u64 = 0;
    /// The highest level at which an entry may be write-protected while entries below it are not. The constant may be
    /// above [`Level::MEGA`] only if a walker that caches an entry also caches the rights of the entry's whole path.
    const PROTECT_FROM: Level = Level::MEGA;
    /// The bits of an entry that contain a frame, encoded by [`put_frame`](Self::put_frame).
    const FRAME: u64;
    /// The bit of a leaf that allows writing.
    const WRITE: u64;
    /// The bit of a leaf that stores [`Leaf::may_write`].
    const MAY_WRITE: u64;
    /// The bit of a leaf that is set when the leaf is used.
    const ACCESSED: u64;
    /// The bit of a leaf that is set when the page is written.
    const DIRTY: u64;
    /// Whether a walker can be configured to set the accessed and dirty bits. If not, the dirty log cannot use dirty
    /// bits.
    const SETS_DIRTY: bool;
    /// Whether KVM, on this architecture, logs a page as dirty already when the guest reads it, because it installs a
    /// writable leaf for the read, so that a later write does not fault. KVM's x86 MMU does this; on AArch64 and RISC-V
    /// a leaf of a logged slot becomes writable only by a write. This is the default of policy `dirty_log_reads`.
    const LOGS_READS: bool;
    /// The number of bits of the MMIO generation that an entry can contain; 0 if the format has no MMIO entries.
    const MMIO_GENERATION_BITS: u32;
    /// The number of bits of a note that an MMIO entry contains in addition to the generation.
    const MMIO_NOTE_BITS: u32;
    /// Whether an x86 CPU without nested paging can walk these tables instead of the tables that its guest makes, in
    /// any paging mode ([`MmuKind::Shadow`](crate::MmuKind)).
    const SHADOWS: bool;
    /// The largest number of physical address bits that a machine may have if MMIO entries are to work on it.
    const MMIO_PHYSICAL_BITS: u32;

    /// Returns the meaning of `bits`, read from a table of `level`.
    fn decode(bits: u64, level: Level) -> Entry;
    /// Returns the leaf with these `bits`. The caller knows that `bits` are a leaf.
    fn decode_leaf(bits: u64) -> Leaf;
    /// Returns the next lower table if `bits`, read from a table of `level`, refer to one, write-protected or not;
    /// otherwise `None`. Agrees with `decode` for all entries that the engine makes, but is faster: every step of a
    /// walk calls it.
    #[inline]
    fn next_table(bits: u64, level: Level) -> Option<Pfn> {
        let frame = (bits | Self::TABLE_WRITE).wrapping_sub(Self::TABLE);
        let leads = level > Level::PAGE && frame & !Self::FRAME == 0;
        leads.then_some(Self::take_frame(frame))
    }
    /// Returns the bits of `leaf` in a table of `level`.
    fn leaf(leaf: Leaf, level: Level) -> u64;
    /// Whether an entry can contain the number of `frame`.
    #[inline]
    fn holds(frame: Pfn) -> bool {
        frame <= Self::take_frame(Self::FRAME)
    }
    /// Returns the bits of an entry that contain `frame`. The caller has checked that an entry [`holds`](Self::holds)
    /// the frame: a platform guarantees that for the frames of tables, and a fault refuses a page whose frame an entry
    /// cannot hold.
    #[inline]
    fn frame(frame: Pfn) -> u64 {
        debug_assert!(Self::holds(frame), "no entry holds {frame:?}");
        Self::put_frame(frame)
    }
    /// Returns the bits of an entry that contain `frame`: a subset of [`FRAME`](Self::FRAME). An entry must be able to
    /// [hold](Self::holds) `frame`.
    #[inline]
    fn put_frame(frame: Pfn) -> u64 {
        frame.0 << Self::GRANULE.shift()
    }
    /// Returns the frame from which [`put_frame`](Self::put_frame) made `bits`. If `bits` are all bits of
    /// [`FRAME`](Self::FRAME), returns the last frame that an entry can contain.
    #[inline]
    fn take_frame(bits: u64) -> Pfn {
        Pfn(bits >> Self::GRANULE.shift())
    }
    /// Returns the bits of an entry that refers to the table in `frame`.
    #[inline]
    fn table(frame: Pfn) -> u64 {
        Self::frame(frame) | Self::TABLE
    }
    /// Whether an entry that refers to a table is write-protected.
    #[inline]
    fn is_protected(table: u64) -> bool {
        !table & Self::TABLE_WRITE != 0
    }
    /// Returns the bits of an [`Entry::Mmio`]. `note` has at most [`Format::MMIO_NOTE_BITS`] bits.
    fn mmio(generation: u64, note: u64) -> u64;
    /// Returns the leaf `bits` as an [`Entry::Broken`]. Called only with [`Format::BREAK_BEFORE_MAKE`].
    fn broken(bits: u64) -> u64 {
        bits
    }
    /// Returns the bits of a zapped entry: [`Entry::Empty`]. With [`Format::BREAK_BEFORE_MAKE`] the bits contain
    /// `_flush`, the number of the flush after which a valid entry may replace this one; 0 means that the number is not
    /// known yet.
    #[inline]
    fn cleared(_flush: u64) -> u64 {
        0
    }
    /// Returns the number of the flush that `bits` contain if [`Format::cleared`] made them, otherwise `None`.
    #[inline]
    fn cleared_by(_bits: u64) -> Option<u64> {
        None
    }
    /// Whether `bits` are [`Entry::Empty`] or [`Entry::Mmio`]. Must agree with `decode`, but is faster: range
    /// operations call it for every entry.
    fn is_absent(bits: u64) -> bool;
    /// Returns the writable leaf `bits` write-protected, with [`Leaf::may_write`] set.
    #[inline]
    fn write_protect(bits: u64) -> u64 {
        bits & !Self::WRITE | Self::MAY_WRITE
    }
    /// Returns the leaf `bits` as a page walker changes it by an access: accessed, and dirty if the access was a write.
    #[inline]
    fn mark(bits: u64, write: bool) -> u64 {
        bits | Self::ACCESSED | if write { Self::DIRTY } else { 0 }
    }
    /// Returns the leaf `bits` with the accessed bit clear.
    #[inline]
    fn clear_accessed(bits: u64) -> u64 {
        bits & !Self::ACCESSED
    }
    /// Returns the leaf `bits` with the dirty bit clear.
    #[inline]
    fn clear_dirty(bits: u64) -> u64 {
        bits & !Self::DIRTY
    }
    /// Whether hardware can set no further accessed or dirty bit in the leaf `bits`. If so, a plain store may replace
    /// the leaf. If not, replace the leaf by an atomic read-modify-write, so that no bit that hardware sets is lost.
    #[inline]
    fn is_settled(bits: u64) -> bool {
        bits & Self::ACCESSED != 0 && bits & (Self::WRITE | Self::DIRTY) != Self::WRITE
    }
    /// Whether the leaf `bits` allows writing.
    #[inline]
    fn is_writable(bits: u64) -> bool {
        bits & Self::WRITE != 0
    }
    /// Returns two masks that find the leaves that need no change for `access`: leaves that allow it, and in which the
    /// accessed and dirty bits that it would set are already set. Among the entries that do not refer to a table,
    /// exactly these leaves have all bits of the first mask set and no bit of the second. A leaf found for
    /// [`Access::Write`] is [settled](Self::is_settled).
    fn ready(access: Access) -> (u64, u64);
}

/// Returns the number of guest frames that one of the root's tables translates.
pub(crate) const fn root_pages<F: Format>() -> u64 {
    F::GRANULE.pages(F::TOP) * F::GRANULE.entries() as u64
}

/// Returns whether tables of format `F` can shadow the tables that an x86 guest makes for itself or, as a hypervisor,
/// for its own guests. Three conditions are needed: pages have 4 KiB, like the guest's; the root is one table, so that
/// a walk may begin at a single table of a lower level; and an entry may be replaced without break-before-make.
pub(crate) const fn can_shadow<F: Format>() -> bool {
    matches!(F::GRANULE, Granule::Kib4) && !F::BREAK_BEFORE_MAKE && F::ROOT_TABLES == 1
}

/// Returns all guest frames that tables of format `F` can translate.
pub(crate) const fn all_gfns<F: Format>() -> Range<Gfn> {
    Gfn(0)..Gfn(root_pages::<F>() * F::ROOT_TABLES as u64)
}

/// Checks the engine's requirements on a format's constants. Call in a `const` block, so that a violation fails the
/// build.
pub(crate) const fn check_limits<F: Format>() {
    let (flags, leaf) = (
        F::WRITE | F::MAY_WRITE | F::ACCESSED | F::DIRTY,
        F::MAX_LEAF.0,
    );
    assert!(F::TOP.0 >= 2 && F::TOP.0 <= 5, "2 to 5 levels");
    assert!(
        leaf >= 1 && leaf <= 3 && leaf <= F::TOP.0,
        "leaves are of levels 1 to 3"
    );
    assert!(
        F::ROOT_TABLES.is_power_of_two() && F::ROOT_TABLES <= 16,
        "1 to 16 tables in the root"
    );
    assert!(
        all_gfns::<F>().end.0 <= 1 << 48,
        "guest frames have 48 bits"
    );
    assert!(
        F::FRAME != 0 && F::FRAME & (flags | F::TABLE) == 0,
        "frames and flags overlap"
    );
    assert!(
        F::TABLE_WRITE == 0 || F::TABLE_WRITE == F::WRITE && F::TABLE & F::WRITE != 0,
        "tables are protected by the bit of leaves"
    );
    assert!(
        !F::SHADOWS || matches!(F::GRANULE, Granule::Kib4),
        "x86's tables have 4 KiB"
    );
    assert!(
        F::WRITE.is_power_of_two() && F::MAY_WRITE.is_power_of_two(),
        "a right is one bit"
    );
    assert!(
        F::MMIO_GENERATION_BITS < 64 && F::MMIO_NOTE_BITS < 64,
        "an entry has 64 bits"
    );
}

#[cfg(test)]
pub(crate) mod tests;
