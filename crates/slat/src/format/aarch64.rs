//! AArch64 stage 2, with granules of 4, 16 and 64 KiB.
//!
//! Arm ARM (DDI 0487), "VMSAv8-64 translation table format descriptors" and "Stage 2 memory attributes" (FWB = 0).
//! Before a valid descriptor is replaced by a different valid one, it must be made invalid and the TLB invalidated
//! ("Using break-before-make when updating translation table entries"). A change of only the rights does not need this.
//!
//! # Accessed and dirty
//! If VTCR_EL2.HA is set, hardware sets the access flag; otherwise software does. If hardware also manages the dirty
//! state (FEAT_HAFDBS, VTCR_EL2.HD), two bits of a leaf have another meaning: DBM says that the guest may write, and
//! S2AP\[1\], which the first write sets, says that the guest has written ("Hardware management of the dirty state").
//!
//! # Granules
//! Tables of 16 or 64 KiB have more entries, and the address in a descriptor begins at a higher bit. The rest of a
//! descriptor is the same as with 4 KiB. A block at the level above the page has 32 MiB or 512 MiB. Blocks at the next
//! level, of 64 GiB or 4 TiB, exist only with addresses of 52 bits.
//!
//! # 52 bits
//! With granules of 4 and 16 KiB, tables for more than 48 bits of address have the descriptors of FEAT_LPA2
//! (VTCR_EL2.DS = 1). Bits 49:48 of a descriptor belong to the address, too. Bits 9:8, which otherwise contain the
//! shareability of a leaf, are the two uppermost bits of the address; VTCR_EL2 has one shareability for all leaves.
//! With granules of 64 KiB the descriptors are those of FEAT_LPA: bits 51:48 of the address are in bits 15:12.

use super::{Entry, Format, Leaf, MemoryType, Privilege, bit};
use crate::addr::{Access, Granule, Level, Pfn};

/// Stage 2 tables for `IPA_BITS` (39 to 52) bits of intermediate physical address. If the top level would have at most
/// 16 entries, that many tables of the level below are concatenated instead ("Concatenated translation tables for the
/// initial stage 2 lookup"): there are never more than four levels.
///
/// More than 48 bits require a CPU with FEAT_LPA2 for the granule (ID_AA64MMFR0_EL1.TGran4_2 or TGran16_2 = 3), or with
/// FEAT_LPA for 64 KiB (PARange = 6). Only tables for more than 48 bits can map host memory above 256 TiB.
///
/// With `HARDWARE_DIRTY` the tables require a page walker with VTCR_EL2.HA and HD set: another walker finds every clean
/// leaf write-protected.
///
/// `PAGE_SHIFT` is log2 of the granule: 12, 14 or 16 ([`Stage2Kib16`], [`Stage2Kib64`]). The platform must have the
/// same granule ([`Platform::granule`](crate::Platform::granule)).
pub struct Stage2<
    const IPA_BITS: u32,
    const HARDWARE_DIRTY: bool = false,
    const PAGE_SHIFT: u32 = 12,
>;

/// Stage 2 tables with a granule of 16 KiB.
pub type Stage2Kib16<const IPA_BITS: u32, const HARDWARE_DIRTY: bool = false> =
    Stage2<IPA_BITS, HARDWARE_DIRTY, 14>;
/// Stage 2 tables with a granule of 64 KiB.
pub type Stage2Kib64<const IPA_BITS: u32, const HARDWARE_DIRTY: bool = false> =
    Stage2<IPA_BITS, HARDWARE_DIRTY, 16>;

const VALID: u64 = 1 << 0;
/// Bit 1 of a valid descriptor: table (levels above the page), or page.
const TABLE_OR_PAGE: u64 = 1 << 1;
/// The bits of every descriptor that refers to a table, in addition to the address.
const TABLE: u64 = VALID | TABLE_OR_PAGE;
/// `MemAttr[3:0]`, bits 5:2: 0b1111 is Normal, inner and outer write-back; 0b0101 is Normal, inner and outer
/// Non-cacheable, where stores may be gathered; 0b0001 is Device-nGnRE.
const MEMORY_TYPE: u64 = 0b1111 << 2;
const WRITE_BACK: u64 = 0b1111 << 2;
const NON_CACHEABLE: u64 = 0b0101 << 2;
const DEVICE: u64 = 0b0001 << 2;
/// The bit `S2AP[0]` of a leaf: the page is readable.
const READ: u64 = 1 << 6;
/// `S2AP[1]`: the guest may write. With hardware dirty state: the guest has written.
const WRITE: u64 = 1 << 7;
/// `SH[1:0]`, bits 9:8: 0b11 is inner shareable.
const INNER_SHAREABLE: u64 = 0b11 << 8;
/// The access flag. If it is clear, the first access faults, or with VTCR_EL2.HA hardware sets the flag.
const ACCESSED: u64 = 1 << 10;
/// The layout of a frame's address in an entry: some address bits are in their own positions, others are at lower
/// positions.
struct AddressBits {
    /// The bits that are in their own positions.
    low: u64,
    /// The bits of the entry that contain the moved address bits.
    moved: u64,
    /// The number of positions by which the moved address bits are lower in the entry.
    by: u32,
}
/// Dirty bit modifier: a write to a leaf without `S2AP[1]` sets `S2AP[1]` instead of faulting.
const DBM: u64 = 1 << 51;
/// `XN[1]`, bit 54: the guest may not execute.
const NO_EXECUTE: u64 = 1 << 54;
/// A software bit: [`Leaf::may_write`]. Bits 58:55 of a leaf are for software.
const MAY_WRITE: u64 = 1 << 55;
/// A software bit: the page was written. A software walker or the write fault sets it. With hardware dirty state it is
/// used only in write-protected leaves, where `S2AP[1]` would make the leaf writable.
const DIRTY: u64 = 1 << 56;

/// A software bit: [`Leaf::may_execute`]. In an invalid descriptor the same bit is [`CLEARED`], unless [`BROKEN`] is
/// set.
const MAY_EXECUTE: u64 = 1 << 57;

/// The bits that tell what an invalid descriptor means if neither [`CLEARED`] nor [`BROKEN`] is set. The walker ignores
/// bits 63:1 of an invalid descriptor.
const ANNOTATION: u64 = 0b11 << 2;
const MMIO: u64 = 0b01 << 2;
const MMIO_GENERATION_SHIFT: u32 = 12;
const GENERATION_BITS: u32 = 36;
const MMIO_GENERATION: u64 = ((1 << GENERATION_BITS) - 1) << MMIO_GENERATION_SHIFT;
/// Set in a broken leaf (a leaf that break-before-make has made invalid), and in no other leaf. A broken leaf keeps all
/// other bits except the valid bit.
const BROKEN: u64 = 1 << 58;
/// Marks a zapped entry, which contains the number of the flush that must be done before a valid entry replaces it.
const CLEARED: u64 = 1 << 57;
const FLUSH_SHIFT: u32 = 4;
const FLUSH: u64 = ((1 << 53) - 1) << FLUSH_SHIFT;

impl<const IPA_BITS: u32, const HARDWARE_DIRTY: bool, const PAGE_SHIFT: u32>
    Stage2<IPA_BITS, HARDWARE_DIRTY, PAGE_SHIFT>
{
    const PAGES: Granule = match PAGE_SHIFT {
        12 => Granule::Kib4,
        14 => Granule::Kib16,
        16 => Granule::Kib64,
        _ => panic!("a granule of 4, 16 or 64 KiB: a shift of 12, 14 or 16"),
    };

    /// Number of address bits that index a table.
    const INDEX_BITS: u32 = PAGE_SHIFT - 3;
    /// Number of levels of a lookup: how many tables are on the path to a page.
    const LEVELS: u32 = (IPA_BITS - PAGE_SHIFT - 4).div_ceil(Self::INDEX_BITS);

    /// Whether addresses have more than 48 bits.
    const WIDE: bool = IPA_BITS > 48;
    /// Whether the descriptors are those of FEAT_LPA2.
    const LPA2: bool = Self::WIDE && PAGE_SHIFT < 16;
    /// Number of bits of a physical address in an entry.
    const PA_BITS: u32 = if Self::WIDE { 52 } else { 48 };
    const SHARED: u64 = if Self::LPA2 { 0 } else { INNER_SHAREABLE };

    const ADDRESS: AddressBits = {
        match (Self::WIDE, Self::LPA2) {
            (false, _) => AddressBits {
                low: Self::bits_to(48),
                moved: 0,
                by: 0,
            },
            // Bits 51:50 of the address are bits 9:8 of the entry.
            (true, true) => AddressBits {
                low: Self::bits_to(50),
                moved: 0b11 << 8,
                by: 50 - 8,
            },
            // Bits 51:48 of the address are bits 15:12 of the entry.
            (true, false) => AddressBits {
                low: Self::bits_to(48),
                moved: 0b1111 << 12,
                by: 48 - 12,
            },
        }
    };

    /// Returns the mask of an address's bits from the first bit of the page number up to `end`.
    const fn bits_to(end: u32) -> u64 {
        (1 << end) - (1 << PAGE_SHIFT)
    }

    /// The value of VTCR_EL2.T0SZ for these tables.
    pub const T0SZ: u64 = 64 - IPA_BITS as u64;
    /// VTCR_EL2.SL0: the Arm level at which the lookup starts. With a granule of 4 KiB, values 2 and 1 mean levels 0
    /// and 1. With larger granules, values 3, 2 and 1 mean levels 0, 1 and 2.
    pub const SL0: u64 = Self::LEVELS as u64 - if PAGE_SHIFT == 12 { 2 } else { 1 };

    /// Returns VTCR_EL2 for a walker of these tables. `pa_range` is the CPU's ID_AA64MMFR0_EL1.PARange, which must
    /// allow `IPA_BITS`. Table walks are inner shareable and write-back cached; with FEAT_LPA2 guest memory is inner
    /// shareable, too. VMIDs have 8 bits. The walker sets accessed and dirty bits only with `HARDWARE_DIRTY`.
    pub const fn vtcr(pa_range: u64) -> u64 {
        const RES1: u64 = 1 << 31;
        const WRITE_BACK_WALKS: u64 = 0b01 << 8 | 0b01 << 10;
        const INNER_SHAREABLE_WALKS: u64 = 0b11 << 12;
        const HA: u64 = 1 << 21;
        const HD: u64 = 1 << 22;
        const DS: u64 = 1 << 32;
        let granule = match Self::PAGES {
            Granule::Kib4 => 0b00,
            Granule::Kib16 => 0b10,
            Granule::Kib64 => 0b01,
        };
        // PARange 5 means addresses of 48 bits, and 6 means 52.
        let most = if Self::WIDE { 6 } else { 5 };
        let physical = if pa_range < most { pa_range } else { most };
        let managed = if HARDWARE_DIRTY { HA | HD } else { 0 };
        RES1 | physical << 16
            | granule << 14
            | INNER_SHAREABLE_WALKS
            | WRITE_BACK_WALKS
            | Self::SL0 << 6
            | Self::T0SZ
            | managed
            | if Self::LPA2 { DS } else { 0 }
    }

    /// Returns VTTBR_EL2 for the tables at `root` ([`Vm::root`](crate::Vm::root)).
    ///
    /// # Panics
    /// If the address of `root` has more than 48 bits; if `IPA_BITS` is above 48, more than 52.
    pub const fn vttbr(root: Pfn, vmid: u8) -> u64 {
        const LOW: u64 = (1 << 48) - 1;
        assert!(
            root.0 >> (Self::PA_BITS - PAGE_SHIFT) == 0,
            "VTTBR_EL2 has 48 address bits, for tables of more than 48 bits 52"
        );
        let address = Self::PAGES.hpa(root).0;
        // BADDR has bits 51:48 of the address in its bits 5:2.
        (vmid as u64) << 48 | address & LOW | address >> 48 << 2
    }

    /// Returns the bits that record in a leaf, writable or not, that its page was written.
    const fn written(writable: bool) -> u64 {
        if HARDWARE_DIRTY && writable {
            WRITE
        } else {
            DIRTY
        }
    }

    #[inline]
    fn leaf_of(bits: u64) -> Leaf {
        Leaf {
            pfn: Self::take_frame(bits & Self::FRAME),
            write: bits & Self::WRITE != 0,
            execute: bits & NO_EXECUTE == 0,
            may_write: bits & MAY_WRITE != 0,
            may_execute: bits & MAY_EXECUTE != 0,
            accessed: bits & ACCESSED != 0,
            dirty: bits & (Self::DIRTY | DIRTY) != 0,
            memory: match bits & MEMORY_TYPE {
                WRITE_BACK => MemoryType::WriteBack,
                NON_CACHEABLE => MemoryType::WriteCombining,
                _ => MemoryType::Device,
            },
            privilege: Privilege::USER,
        }
    }
}

// SAFETY: the bits are those of the Arm ARM. `crates/slat/tests/formats.rs` compares the results of the functions with
// the manual; the monitors in `metal` test the tables on page walkers.
unsafe impl<const IPA_BITS: u32, const HARDWARE_DIRTY: bool, const PAGE_SHIFT: u32> Format
    for Stage2<IPA_BITS, HARDWARE_DIRTY, PAGE_SHIFT>
{
    const NAME: &'static str = "aarch64";
    const GRANULE: Granule = Self::PAGES;
    const TOP: Level = {
        assert!(IPA_BITS >= 39 && IPA_BITS <= 52, "39 to 52 bits of IPA");
        Level(Self::LEVELS as u8)
    };
    const ROOT_TABLES: usize = {
        let covered = PAGE_SHIFT + Self::INDEX_BITS * Self::LEVELS;
        if IPA_BITS > covered {
            1 << (IPA_BITS - covered)
        } else {
            1
        }
    };
    const MAX_LEAF: Level = if PAGE_SHIFT == 12 || Self::WIDE {
        Level::GIGA
    } else {
        Level::MEGA
    };
    const BREAK_BEFORE_MAKE: bool = true;
    const TABLE: u64 = TABLE;
    const FRAME: u64 = Self::ADDRESS.low | Self::ADDRESS.moved;
    const WRITE: u64 = if HARDWARE_DIRTY { DBM } else { WRITE };
    const MAY_WRITE: u64 = MAY_WRITE;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = Self::written(true);
    const SETS_DIRTY: bool = HARDWARE_DIRTY;
    const LOGS_READS: bool = false;
    const MMIO_GENERATION_BITS: u32 = GENERATION_BITS;
    const MMIO_NOTE_BITS: u32 = 0;
    const SHADOWS: bool = false;
    const MMIO_PHYSICAL_BITS: u32 = 52;

    #[inline]
    fn decode(bits: u64, level: Level) -> Entry {
        if bits & VALID == 0 {
            return match bits {
                0 => Entry::Empty,
                _ if bits & BROKEN != 0 => Entry::Broken(Self::leaf_of(bits)),
                _ if bits & CLEARED != 0 => Entry::Empty,
                _ => Entry::Mmio {
                    generation: (bits & MMIO_GENERATION) >> MMIO_GENERATION_SHIFT,
                    note: 0,
                },
            };
        }
        if level > Level::PAGE && bits & TABLE_OR_PAGE != 0 {
            Entry::Table(Self::take_frame(bits & Self::FRAME))
        } else {
            Entry::Leaf(Self::leaf_of(bits))
        }
    }

    #[inline]
    fn decode_leaf(bits: u64) -> Leaf {
        Self::leaf_of(bits)
    }

    #[inline]
    fn leaf(leaf: Leaf, level: Level) -> u64 {
        let memory = match leaf.memory {
            MemoryType::WriteBack => WRITE_BACK | Self::SHARED,
            MemoryType::WriteCombining => NON_CACHEABLE,
            MemoryType::Device => DEVICE,
        };
        Self::frame(leaf.pfn)
            | VALID
            | READ
            | memory
            | bit(level == Level::PAGE, TABLE_OR_PAGE)
            | bit(leaf.write, Self::WRITE)
            | bit(!leaf.execute, NO_EXECUTE)
            | bit(leaf.accessed, ACCESSED)
            | bit(leaf.dirty, Self::written(leaf.write))
            | bit(leaf.may_write, MAY_WRITE)
            | bit(leaf.may_execute, MAY_EXECUTE)
    }

    #[inline]
    fn put_frame(frame: Pfn) -> u64 {
        let (address, bits) = (frame.0 << PAGE_SHIFT, Self::ADDRESS);
        match bits.moved {
            0 => address,
            moved => address & bits.low | address >> bits.by & moved,
        }
    }

    #[inline]
    fn take_frame(bits: u64) -> Pfn {
        let AddressBits { low, moved, by } = Self::ADDRESS;
        let address = match moved {
            0 => bits,
            _ => bits & low | (bits & moved) << by,
        };
        Pfn(address >> PAGE_SHIFT)
    }

    #[inline]
    fn mmio(generation: u64, _note: u64) -> u64 {
        (generation << MMIO_GENERATION_SHIFT) & MMIO_GENERATION | MMIO
    }

    #[inline]
    fn broken(bits: u64) -> u64 {
        bits & !VALID | BROKEN
    }

    #[inline]
    fn cleared(flush: u64) -> u64 {
        debug_assert!(
            flush <= FLUSH >> FLUSH_SHIFT,
            "an entry names no such flush"
        );
        flush << FLUSH_SHIFT | CLEARED
    }

    #[inline]
    fn cleared_by(bits: u64) -> Option<u64> {
        let cleared = bits & (VALID | BROKEN | CLEARED) == CLEARED;
        cleared.then_some((bits & FLUSH) >> FLUSH_SHIFT)
    }

    #[inline]
    fn is_absent(bits: u64) -> bool {
        bits & (VALID | BROKEN) == 0
    }

    #[inline]
    fn write_protect(bits: u64) -> u64 {
        let written = HARDWARE_DIRTY && bits & WRITE != 0;
        bits & !(Self::WRITE | WRITE) | MAY_WRITE | if written { DIRTY } else { 0 }
    }

    #[inline]
    fn mark(bits: u64, write: bool) -> u64 {
        let written = Self::written(Self::is_writable(bits));
        bits | ACCESSED | if write { written } else { 0 }
    }

    #[inline]
    fn clear_dirty(bits: u64) -> u64 {
        bits & !(Self::DIRTY | DIRTY)
    }

    #[inline]
    fn ready(access: Access) -> (u64, u64) {
        match access {
            Access::Read => (VALID | ACCESSED, 0),
            Access::Write => (VALID | Self::WRITE | ACCESSED | Self::DIRTY, 0),
            Access::Execute => (VALID | ACCESSED, NO_EXECUTE),
        }
    }
}

const _: () = assert!(ANNOTATION & MMIO == MMIO);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::tests::LEAF;

    type Ipa48 = Stage2<48>;
    type Managed = Stage2<48, true>;
    type Lpa2 = Stage2<52>;
    type Wide16 = Stage2Kib16<52>;
    type Wide64 = Stage2Kib64<52>;

    /// DDI 0487, "VMSAv8-64 Block descriptors" and "Page descriptors", "Stage 2 attribute fields".
    #[test]
    fn leaves_have_the_bits_of_the_manual() {
        let page = Leaf {
            pfn: Pfn(0x12345),
            accessed: true,
            ..LEAF
        };
        assert_eq!(
            Ipa48::leaf(page, Level::PAGE),
            0x1234_5000 | 0b11 | 0b1111 << 2 | 0b11 << 6 | 0b11 << 8 | 1 << 10 | 1 << 54
        );
        let block = Leaf {
            pfn: Pfn(0x200),
            execute: true,
            write: false,
            ..LEAF
        };
        assert_eq!(
            Ipa48::leaf(block, Level::MEGA),
            0x20_0000 | 0b01 | 0b1111 << 2 | 0b01 << 6 | 0b11 << 8
        );
        let device = Leaf {
            pfn: Pfn(1),
            memory: MemoryType::Device,
            ..LEAF
        };
        assert_eq!(
            Ipa48::leaf(device, Level::PAGE),
            0x1000 | 0b11 | 1 << 2 | 0b11 << 6 | 1 << 54
        );
    }

    /// DDI 0487, "Hardware management of the dirty state", stage 2: a "writable-clean" descriptor has DBM without
    /// S2AP[1], a "writable-dirty" one has both, and without DBM a descriptor is writable only if S2AP[1] is set.
    #[test]
    fn hardware_finds_a_writable_leaf_clean_or_dirty() {
        const RIGHTS: u64 = 1 << 51 | 1 << 7;
        let clean = Leaf {
            accessed: true,
            ..LEAF
        };
        let bits = Managed::leaf(clean, Level::PAGE);
        assert_eq!(bits & RIGHTS, 1 << 51);
        assert!(!Managed::is_settled(bits), "hardware may write to it");
        let written = bits | 1 << 7;
        let dirty = Leaf {
            dirty: true,
            ..clean
        };
        assert_eq!(Managed::decode_leaf(written), dirty);
        assert_eq!(Managed::leaf(dirty, Level::PAGE), written);
        assert_eq!(Managed::clear_dirty(written), bits);
        assert_eq!(Managed::write_protect(written) & RIGHTS, 0);
        let read_only = Leaf {
            write: false,
            ..dirty
        };
        assert_eq!(Managed::leaf(read_only, Level::PAGE) & RIGHTS, 0);
    }

    /// DDI 0487, "VMSAv8-64 Table descriptor": in stage 2 a descriptor that refers to a table has no attributes.
    #[test]
    fn a_table_entry_limits_nothing() {
        assert_eq!(Ipa48::table(Pfn(0x77)), 0x77003);
    }

    /// DDI 0487, "Invalid descriptor": bit 0 clear, bits 63:1 ignored.
    #[test]
    fn annotated_entries_are_invalid() {
        assert_eq!(Ipa48::mmio(77, 0) & 1, 0);
        assert_eq!(
            Ipa48::decode(Ipa48::mmio(77, 0), Level::PAGE),
            Entry::Mmio {
                generation: 77,
                note: 0
            }
        );
        assert_eq!(
            Ipa48::decode(Ipa48::mmio(0, 0), Level::PAGE),
            Entry::Mmio {
                generation: 0,
                note: 0
            }
        );
        assert_eq!(Ipa48::cleared(77) & 1, 0);
        assert_eq!(Ipa48::decode(Ipa48::cleared(77), Level::GIGA), Entry::Empty);
        assert_eq!(Ipa48::cleared_by(Ipa48::cleared(77)), Some(77));
        assert_eq!(Ipa48::cleared_by(Ipa48::mmio(u64::MAX, 0)), None);
        let bits = Ipa48::leaf(LEAF, Level::MEGA);
        assert_eq!(Ipa48::cleared_by(bits), None);
        assert_eq!(Ipa48::cleared_by(Ipa48::broken(bits)), None);
        assert_eq!(Ipa48::broken(bits) & 1, 0);
        assert_eq!(
            Ipa48::decode(Ipa48::broken(bits), Level::MEGA),
            Entry::Broken(LEAF)
        );
    }

    /// DDI 0487, "VMSAv8-64 Block descriptors" and "Page descriptors": OA\[51:50\] in bits 9:8 where DS is 1.
    #[test]
    fn a_leaf_of_52_bits_has_the_uppermost_two_where_others_say_who_shares_it() {
        let leaf = |pfn| Lpa2::leaf(Leaf { pfn, ..LEAF }, Level::PAGE);
        let rest = Ipa48::leaf(LEAF, Level::PAGE) & !INNER_SHAREABLE;
        for (frame, bits) in [
            (1, 1 << 12),
            (1 << 37, 1 << 49),
            (1 << 38, 1 << 8),
            (1 << 39, 1 << 9),
        ] {
            assert_eq!(leaf(Pfn(frame)), rest | bits);
            assert_eq!(Lpa2::table(Pfn(frame)), bits | 0b11);
        }
    }

    /// DDI 0487, "VMSAv8-64 Block descriptors" and "Page descriptors", 16 KiB and 64 KiB granules.
    #[test]
    fn a_leaf_of_a_larger_granule_has_fewer_bits_of_address() {
        fn has<F: Format>(address: u64, level: Level, bits: u64) {
            let pfn = Pfn(address >> F::GRANULE.shift());
            let leaf = Leaf { pfn, ..LEAF };
            let kind = if level == Level::PAGE { 0b11 } else { 0b01 };
            let rest = Ipa48::leaf(LEAF, Level::PAGE) & !0b11 & !INNER_SHAREABLE;
            assert_eq!(F::leaf(leaf, level), rest | kind | bits, "{address:#x}");
            assert_eq!(F::decode(F::leaf(leaf, level), level), Entry::Leaf(leaf));
        }
        const SHARED: u64 = INNER_SHAREABLE;
        has::<Stage2Kib16<48>>(0x8000_4000, Level::PAGE, 0x8000_4000 | SHARED);
        has::<Stage2Kib16<48>>(0x8200_0000, Level::MEGA, 0x8200_0000 | SHARED);
        has::<Stage2Kib64<48>>(0x8001_0000, Level::PAGE, 0x8001_0000 | SHARED);
        has::<Stage2Kib64<48>>(0xa000_0000, Level::MEGA, 0xa000_0000 | SHARED);
        // FEAT_LPA2: OA[51:50] in bits 9:8. A block of Arm's level 1 has 64 GiB.
        has::<Wide16>(1 << 49, Level::PAGE, 1 << 49);
        has::<Wide16>(1 << 50 | 1 << 14, Level::PAGE, 1 << 8 | 1 << 14);
        has::<Wide16>(1 << 51 | 1 << 36, Level::GIGA, 1 << 9 | 1 << 36);
        // FEAT_LPA: OA[51:48] in bits 15:12. A block of Arm's level 1 has 4 TiB.
        has::<Wide64>(1 << 47 | 1 << 16, Level::PAGE, 1 << 47 | 1 << 16 | SHARED);
        for bit in 48..52 {
            has::<Wide64>(1 << bit, Level::PAGE, 1 << (bit - 36) | SHARED);
            has::<Wide64>(
                1 << bit | 1 << 42,
                Level::GIGA,
                1 << (bit - 36) | 1 << 42 | SHARED,
            );
        }
        let largest = [
            <Stage2Kib16<48>>::MAX_LEAF,
            Wide16::MAX_LEAF,
            <Stage2Kib64<48>>::MAX_LEAF,
            Wide64::MAX_LEAF,
        ];
        assert_eq!(
            largest,
            [Level::MEGA, Level::GIGA, Level::MEGA, Level::GIGA]
        );
        assert_eq!(Wide64::table(Pfn(1 << 32)), 1 << 12 | 0b11);
    }

    /// DDI 0487, tables "Implications of the effective PA size on concatenation" for 16 KiB and 64
    /// KiB, and VTCR_EL2.SL0.
    #[test]
    fn a_larger_granule_needs_fewer_levels() {
        fn root<F: Format>() -> (u8, usize) {
            (F::TOP.0, F::ROOT_TABLES)
        }
        assert_eq!(root::<Stage2Kib16<40>>(), (2, 16));
        assert_eq!(root::<Stage2Kib16<47>>(), (3, 1));
        assert_eq!(root::<Stage2Kib16<48>>(), (3, 2));
        assert_eq!(root::<Wide16>(), (4, 1));
        assert_eq!(root::<Stage2Kib64<42>>(), (2, 1));
        assert_eq!(root::<Stage2Kib64<46>>(), (2, 16));
        assert_eq!(root::<Stage2Kib64<48>>(), (3, 1));
        assert_eq!(root::<Wide64>(), (3, 1));
        assert_eq!(
            (<Stage2Kib16<40>>::SL0, <Stage2Kib16<48>>::SL0, Wide16::SL0),
            (1, 2, 3)
        );
        assert_eq!(
            (<Stage2Kib64<46>>::SL0, <Stage2Kib64<48>>::SL0, Wide64::SL0),
            (1, 2, 2)
        );
    }

    /// DDI 0487, table "Implications of the effective PA size on concatenation" (4 KiB granule).
    #[test]
    fn roots_are_concatenated_up_to_sixteen_tables() {
        assert_eq!(
            (<Stage2<39>>::TOP, <Stage2<39>>::ROOT_TABLES),
            (Level(3), 1)
        );
        assert_eq!(
            (<Stage2<40>>::TOP, <Stage2<40>>::ROOT_TABLES),
            (Level(3), 2)
        );
        assert_eq!(
            (<Stage2<43>>::TOP, <Stage2<43>>::ROOT_TABLES),
            (Level(3), 16)
        );
        assert_eq!(
            (<Stage2<44>>::TOP, <Stage2<44>>::ROOT_TABLES),
            (Level(4), 1)
        );
        assert_eq!((Ipa48::TOP, Ipa48::ROOT_TABLES), (Level(4), 1));
        assert_eq!((Lpa2::TOP, Lpa2::ROOT_TABLES), (Level(4), 16));
        assert_eq!(
            (<Stage2<49>>::TOP, <Stage2<49>>::ROOT_TABLES),
            (Level(4), 2)
        );
        assert_eq!((Lpa2::T0SZ, Lpa2::SL0), (12, 2));
        assert_eq!((<Stage2<40>>::T0SZ, <Stage2<40>>::SL0), (24, 1));
        assert_eq!((Ipa48::T0SZ, Ipa48::SL0), (16, 2));
    }

    /// DDI 0487, "VTCR_EL2" and "VTTBR_EL2".
    #[test]
    fn a_walker_is_told_of_the_tables_by_two_registers() {
        assert_eq!(Ipa48::vtcr(5), 0x8005_3590);
        assert_eq!(<Stage2<40>>::vtcr(2), 0x8002_3558);
        assert_eq!(Managed::vtcr(6), 0x8065_3590, "HA, HD, 48 bits");
        assert_eq!(Ipa48::vttbr(Pfn(0x12345), 7), 0x0007_0000_1234_5000);
        assert_eq!(<Stage2Kib16<48>>::vtcr(5), 0x8005_b590, "TG0 is 2");
        assert_eq!(<Stage2Kib64<48>>::vtcr(5), 0x8005_7590, "TG0 is 1");
        assert_eq!(Wide16::vtcr(6), 0x1_8006_b5cc, "DS");
        assert_eq!(Wide64::vtcr(6), 0x8006_758c, "52 bits without DS");
        assert_eq!(
            Wide64::vttbr(Pfn(0x5_1234_5678), 7),
            0x0007_1234_5678_0000 | 5 << 2
        );
        assert_eq!(
            Lpa2::vtcr(6),
            0x1_8006_358c,
            "DS, 52 bits of both addresses"
        );
        assert_eq!(
            Lpa2::vttbr(Pfn(0xa1_2345_6700), 7),
            0x0007_1234_5670_0000 | 0xa << 2
        );
    }
}
