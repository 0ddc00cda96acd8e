//! What one entry means to a page walker. A format is a type without values, so that every walk is
//! compiled for its format; nothing outside these files knows a bit.

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

/// What an entry means, whatever the bits of its architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing: a walker faults.
    Empty,
    /// The next lower table, by the host frame that holds it.
    Table(Pfn),
    /// Guest memory.
    Leaf(Leaf),
    /// No memslot held this frame when the MMIO generation was the one given: a walker faults in a
    /// way that tells so, and the fault needs no slot look-up while the generation stands.
    Mmio {
        /// Low [`Format::MMIO_GENERATION_BITS`] bits of the generation.
        generation: u64,
        /// [`Format::MMIO_NOTE_BITS`] bits for the MMU that made the entry.
        note: u64,
    },
    /// A leaf that is being replaced on a walker that asks for break-before-make: invalid to the
    /// walker, flushed before something else takes its place. A fault on it waits.
    Broken(Leaf),
}

/// A leaf of any level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// First of the [`Granule::pages`] contiguous host frames.
    pub pfn: Pfn,
    /// The guest may write.
    pub write: bool,
    /// The guest may execute.
    pub execute: bool,
    /// Software only: `write` may be given back without asking slot or host again; it was taken
    /// for the dirty log. (KVM: "MMU-writable".)
    pub may_write: bool,
    /// Software only, of a huge leaf: the guest may execute its pieces of level 1. The policy `nx_huge_pages` keeps it
    /// from executing the leaf as a whole.
    pub may_execute: bool,
    /// Used since the bit was last cleared.
    pub accessed: bool,
    /// Written since the bit was last cleared.
    pub dirty: bool,
    /// How the CPU caches the memory.
    pub memory: MemoryType,
    /// Who may use it.
    pub privilege: Privilege,
}

/// Who may use a leaf, and with which protection key. Only x86's own tables have that; second-level leaves are
/// [`Privilege::USER`].
// In a byte: so a leaf is as large as two registers, and faults move many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Privilege(u8);

impl Privilege {
    /// Everyone, with key 0.
    pub const USER: Privilege = Privilege::new(true, 0);

    /// Makes the privilege of a page that a `user` may use, or a supervisor alone, with protection key `key`.
    ///
    /// # Panics
    /// If `key` is above 15.
    pub const fn new(user: bool, key: u8) -> Self {
        assert!(key < 16, "a protection key has 4 bits");
        Privilege((user as u8) << 4 | key)
    }

    /// Whether accesses at user privilege are allowed.
    pub const fn is_user(self) -> bool {
        self.0 >> 4 != 0
    }

    /// Returns the protection key.
    pub const fn key(self) -> u8 {
        self.0 & 15
    }
}

/// How the CPU caches a page. Every format encodes it in its leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryType {
    /// Ordinary memory.
    WriteBack,
    /// A frame buffer passed through to the guest: not cached, and stores may be gathered. EPT has a type for it,
    /// AArch64 Normal Non-cacheable, RISC-V NC (Svpbmt). On x86's own tables and NPT it is entry 1 of the PAT, which
    /// Linux sets so; after a reset that is write-through.
    WriteCombining,
    /// Device registers passed through to the guest.
    Device,
}

impl MemoryType {
    /// Returns the type of memory for which two say how it is cached: the one that caches and reorders less, as AArch64
    /// combines the types of its two stages.
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

/// `bit` if `set`, else no bit: for entries that are put together.
#[inline]
const fn bit(set: bool, bit: u64) -> u64 {
    if set { bit } else { 0 }
}

impl Leaf {
    /// Whether it has the right to `access`.
    #[inline]
    pub fn allows(&self, access: Access) -> bool {
        match access {
            Access::Read => true,
            Access::Write => self.write,
            Access::Execute => self.execute,
        }
    }

    /// Returns the leaf as a shadow of a page for which the guest grants `rights`.
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

    /// Returns the `i`-th of the leaves, one level down, that together mean what this one, of `level` in tables of `granule`,
    /// means: as many as a table has entries. Of level 1 they may be executed if [`may_execute`](Self::may_execute) says so.
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

/// Keeps other crates from implementing [`Format`].
pub(crate) mod sealed {
    /// A format whose bits were checked against the engine (`format::tests`) and against its walker.
    pub trait Sealed {}
}

/// What one kind of page walker understands.
///
/// The trait is sealed. The engine follows what a format says is a table, and a CPU what it says is a leaf,
/// so a format that reads a frame number out of an entry where none was put makes the safe
/// [`Vcpu::translate`](crate::Vcpu::translate) dereference any number. An `unsafe trait` could ask its
/// implementer for as much, but what it would have to ask is how all the constants and functions below
/// hang together in every protocol of the engine (which stores may be plain, which entries a range operation
/// passes over unseen). That is checked here, by tests that go through all entries a format makes and by the
/// walkers of real and emulated machines; so a format for another walker is added here, too, beside these.
///
/// ```compile_fail,E0277
/// use slat::{Access, Ept, Format, Level, Pfn, format::{Entry, Leaf}};
///
/// struct Mine;
///
/// // All there is to a format, and a table wherever an entry is not 0.
/// impl Format for Mine {
///     const NAME: &'static str = "mine";
/// #   const TOP: Level = Ept::TOP;
/// #   const ROOT_TABLES: usize = Ept::ROOT_TABLES;
/// #   const MAX_LEAF: Level = Ept::MAX_LEAF;
/// #   const BREAK_BEFORE_MAKE: bool = Ept::BREAK_BEFORE_MAKE;
/// #   const TABLE: u64 = 0;
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
///     fn decode(bits: u64, _: Level) -> Entry {
///         Entry::Table(Pfn(bits >> 12))
///     }
/// #   fn decode_leaf(bits: u64) -> Leaf { Ept::decode_leaf(bits) }
/// #   fn leaf(leaf: Leaf, level: Level) -> u64 { Ept::leaf(leaf, level) }
/// #   fn mmio(generation: u64, note: u64) -> u64 { Ept::mmio(generation, note) }
/// #   fn is_absent(bits: u64) -> bool { Ept::is_absent(bits) }
/// #   fn ready(access: Access) -> (u64, u64) { Ept::ready(access) }
/// }
/// ```
pub trait Format: sealed::Sealed + Send + Sync + 'static {
    /// KVM's or the manual's name, for people.
    const NAME: &'static str;
    /// The size of a page and of a table, and so how many bits of an address index a table. [`Gfn`] and [`Pfn`] count its pages.
    const GRANULE: Granule = Granule::Kib4;
    /// Level of the entries in the root table.
    const TOP: Level;
    /// Tables of the root, next to each other in memory: more than one where the walker indexes its
    /// first level with more bits than others.
    const ROOT_TABLES: usize;
    /// Largest leaf.
    const MAX_LEAF: Level;
    /// A valid entry that leads elsewhere may only replace a valid one after an invalid one and a
    /// flush.
    const BREAK_BEFORE_MAKE: bool;
    /// What every entry that leads to a table has beside the frame. It limits no right: leaves decide.
    const TABLE: u64;
    /// The bits of an entry that hold a frame, as [`put_frame`](Self::put_frame) says.
    const FRAME: u64;
    /// The bit of a leaf that allows writing.
    const WRITE: u64;
    /// The bit of a leaf that says [`Leaf::may_write`].
    const MAY_WRITE: u64;
    /// The bit of a leaf that says that it was used.
    const ACCESSED: u64;
    /// The bit of a leaf that says that it was written to.
    const DIRTY: u64;
    /// A walker can be told to set accessed and dirty itself; without, dirty logging by D bit is not
    /// to be had.
    const SETS_DIRTY: bool;
    /// Where this walker runs, KVM logs a page that is read before it is written, too: it installs a
    /// writable leaf, so that no second fault is needed. (Its x86 MMU does; on AArch64 and RISC-V a leaf
    /// of a logged slot is writable only after a write.) The default of policy `dirty_log_reads`.
    const LOGS_READS: bool;
    /// Bits of the MMIO generation an entry can hold; 0 where the format caches no MMIO.
    const MMIO_GENERATION_BITS: u32;
    /// Bits of a note that an MMIO entry holds beside it.
    const MMIO_NOTE_BITS: u32;
    /// The tables are also those that an x86 guest makes for itself, of any paging mode, so that they can stand in for
    /// them ([`MmuKind::Shadow`](crate::MmuKind)).
    const SHADOWS: bool;
    /// MMIO entries work on machines with at most this many physical address bits.
    const MMIO_PHYSICAL_BITS: u32;

    /// What `bits`, read from a table of `level`, mean.
    fn decode(bits: u64, level: Level) -> Entry;
    /// What `bits` mean that are known to be a leaf.
    fn decode_leaf(bits: u64) -> Leaf;
    /// The next lower table if `bits`, read from a table of `level`, are what [`Format::table`] made.
    /// It agrees with `decode` for all entries of ours, and exists because every step of a walk asks.
    #[inline]
    fn next_table(bits: u64, level: Level) -> Option<Pfn> {
        let frame = bits.wrapping_sub(Self::TABLE);
        let leads = level > Level::PAGE && frame & !Self::FRAME == 0;
        leads.then_some(Self::take_frame(frame))
    }
    /// A leaf for a table of `level`.
    fn leaf(leaf: Leaf, level: Level) -> u64;
    /// Whether an entry can hold the number of this frame.
    #[inline]
    fn holds(frame: Pfn) -> bool {
        frame <= Self::take_frame(Self::FRAME)
    }
    /// Returns the bits of an entry that hold `frame`. The caller has checked that it [`holds`](Self::holds) that: a platform
    /// promises it of tables, and a fault refuses other pages.
    #[inline]
    fn frame(frame: Pfn) -> u64 {
        debug_assert!(Self::holds(frame), "no entry holds {frame:?}");
        Self::put_frame(frame)
    }
    /// Returns the bits of an entry that hold `frame`, one that [an entry holds](Self::holds): some of [`FRAME`](Self::FRAME).
    #[inline]
    fn put_frame(frame: Pfn) -> u64 {
        frame.0 << Self::GRANULE.shift()
    }
    /// Returns the frame that [`put_frame`](Self::put_frame) made `bits` of. All bits of [`FRAME`](Self::FRAME) are the last one.
    #[inline]
    fn take_frame(bits: u64) -> Pfn {
        Pfn(bits >> Self::GRANULE.shift())
    }
    /// An entry that leads to a table.
    #[inline]
    fn table(frame: Pfn) -> u64 {
        Self::frame(frame) | Self::TABLE
    }
    /// See [`Entry::Mmio`]. `note` has at most [`Format::MMIO_NOTE_BITS`] bits.
    fn mmio(generation: u64, note: u64) -> u64;
    /// See [`Entry::Broken`]; called only where [`Format::BREAK_BEFORE_MAKE`].
    fn broken(bits: u64) -> u64 {
        bits
    }
    /// What an entry becomes when it is taken away: [`Entry::Empty`]. Where
    /// [`Format::BREAK_BEFORE_MAKE`], it names the flush after which something else may be put there;
    /// 0: not known yet.
    #[inline]
    fn cleared(_flush: u64) -> u64 {
        0
    }
    /// The flush that `bits` name, if they are what [`Format::cleared`] made.
    #[inline]
    fn cleared_by(_bits: u64) -> Option<u64> {
        None
    }
    /// Whether `bits` are [`Entry::Empty`] or [`Entry::Mmio`]. Must agree with `decode`; it exists
    /// because range operations ask it for every entry.
    fn is_absent(bits: u64) -> bool;
    /// The same writable leaf write-protected, with [`Leaf::may_write`] set.
    #[inline]
    fn write_protect(bits: u64) -> u64 {
        bits & !Self::WRITE | Self::MAY_WRITE
    }
    /// The leaf as a walker leaves it after using it: accessed, and dirty if it wrote.
    #[inline]
    fn mark(bits: u64, write: bool) -> u64 {
        bits | Self::ACCESSED | if write { Self::DIRTY } else { 0 }
    }
    /// The leaf with the accessed bit clear.
    #[inline]
    fn clear_accessed(bits: u64) -> u64 {
        bits & !Self::ACCESSED
    }
    /// The leaf with the dirty bit clear.
    #[inline]
    fn clear_dirty(bits: u64) -> u64 {
        bits & !Self::DIRTY
    }
    /// Whether hardware has no accessed or dirty bit left to set in this leaf: then a plain store
    /// may replace it, otherwise only an atomic read-modify-write loses nothing.
    #[inline]
    fn is_settled(bits: u64) -> bool {
        bits & Self::ACCESSED != 0 && bits & (Self::WRITE | Self::DIRTY) != Self::WRITE
    }
    /// Whether a leaf allows writing.
    #[inline]
    fn is_writable(bits: u64) -> bool {
        bits & Self::WRITE != 0
    }
    /// Tells leaves that allow `access` and have the bits set that it sets, in one comparison: in
    /// entries that lead to no table, these and only these have all bits of the first set and none of
    /// the second. Such a leaf that allows writing is settled.
    fn ready(access: Access) -> (u64, u64);
}

/// Returns the number of guest frames that one table of the root translates.
pub(crate) const fn root_pages<F: Format>() -> u64 {
    F::GRANULE.pages(F::TOP) * F::GRANULE.entries() as u64
}

/// Returns all guest frames that tables of format `F` can translate.
pub(crate) const fn all_gfns<F: Format>() -> Range<Gfn> {
    Gfn(0)..Gfn(root_pages::<F>() * F::ROOT_TABLES as u64)
}

#[cfg(test)]
pub(crate) mod tests;
