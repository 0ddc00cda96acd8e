//! AArch64 stage 2, 4 KiB granule.
//!
//! Arm ARM (DDI 0487), "VMSAv8-64 translation table format descriptors" and "Stage 2 memory
//! attributes" (FWB = 0). A valid descriptor is changed into a different valid one only by way of an
//! invalid one and a TLB invalidation ("Using break-before-make when updating translation table
//! entries"); a change of rights alone needs none.
//!
//! # Accessed and dirty
//! Hardware sets the access flag where VTCR_EL2.HA tells it to, software elsewhere. Where hardware is
//! to manage the dirty state, too (FEAT_HAFDBS, VTCR_EL2.HD), the bits of a leaf mean something else:
//! DBM says that the guest may write, and S2AP\[1\], which is then set by the first write, that it
//! did ("Hardware management of the dirty state").
//!
//! # 52 bits
//! Tables for more than 48 bits of address have the descriptors of FEAT_LPA2 (VTCR_EL2.DS = 1): bits 49:48 are of the address,
//! too, and the bits that say elsewhere who shares a leaf are its uppermost two. VTCR_EL2 says that of all leaves.

use super::{Entry, Format, Leaf, MemoryType, Privilege, bit};
use crate::addr::{Access, Level, PAGE_SHIFT, Pfn};

/// Stage 2 tables for `IPA_BITS` (39 to 52) bits of intermediate physical address. Where the upper
/// level would have at most 16 entries, that many tables of the level below are concatenated
/// ("Concatenated translation tables for the initial stage 2 lookup"): there are never more than four levels.
///
/// More than 48 bits are for CPUs with FEAT_LPA2 for this granule (ID_AA64MMFR0_EL1.TGran4_2 = 3), and only those tables lead to
/// host memory above 256 TiB.
///
/// With `HARDWARE_DIRTY` the tables are for walkers with VTCR_EL2.HA and HD set, and such a walker
/// needs them: another one finds every clean leaf write-protected.
pub struct Stage2<const IPA_BITS: u32, const HARDWARE_DIRTY: bool = false>;

const VALID: u64 = 1 << 0;
/// Bit 1 of a valid descriptor: table (levels above the page), or page.
const TABLE_OR_PAGE: u64 = 1 << 1;
/// What every descriptor of a table has beside the address.
const TABLE: u64 = VALID | TABLE_OR_PAGE;
/// MemAttr[3:0], bits 5:2: 0b1111 is Normal, inner and outer write-back; 0b0101 Normal, inner and outer
/// Non-cacheable, which gathers stores; 0b0001 Device-nGnRE.
const MEMORY_TYPE: u64 = 0b1111 << 2;
const WRITE_BACK: u64 = 0b1111 << 2;
const NON_CACHEABLE: u64 = 0b0101 << 2;
const DEVICE: u64 = 0b0001 << 2;
/// S2AP[0]: readable.
const READ: u64 = 1 << 6;
/// S2AP[1]: writable; with hardware dirty state, written to.
const WRITE: u64 = 1 << 7;
/// SH[1:0], bits 9:8: 0b11 is inner shareable.
const INNER_SHAREABLE: u64 = 0b11 << 8;
/// The access flag. Clear: the first access faults (or hardware sets it, with VTCR_EL2.HA).
const ACCESSED: u64 = 1 << 10;
/// The bits of a leaf, and of VTTBR_EL2, for an address of 48 bits.
const FRAME_48: u64 = 0x0000_ffff_ffff_f000;
/// With FEAT_LPA2: 49:12 of the address in the same bits, and 51:50 in bits 9:8.
const FRAME_52: u64 = 0x0003_ffff_ffff_f000 | UPPERMOST;
const UPPERMOST: u64 = 0b11 << 8;
/// From bits 9:8 of an entry to bits 39:38 of a frame number.
const UPPERMOST_SHIFT: u32 = 30;
/// Dirty bit modifier: a write to a leaf without S2AP[1] sets that instead of faulting.
const DBM: u64 = 1 << 51;
/// XN[1], bit 54.
const NO_EXECUTE: u64 = 1 << 54;
/// Bits 58:55 of a leaf are for software.
const MAY_WRITE: u64 = 1 << 55;
/// Dirty, as seen by a software walker or set at the write fault. With hardware dirty state it is for
/// leaves that are write-protected, in which S2AP[1] would make them writable.
const DIRTY: u64 = 1 << 56;

/// In an invalid descriptor this bit is [`CLEARED`], which a broken leaf is told from by [`BROKEN`].
const MAY_EXECUTE: u64 = 1 << 57;

/// An invalid descriptor is ignored from bit 1 on. Bits 3:2 tell what it is, if neither bit 57 nor 58 does.
const ANNOTATION: u64 = 0b11 << 2;
const MMIO: u64 = 0b01 << 2;
const MMIO_GENERATION_SHIFT: u32 = 12;
const GENERATION_BITS: u32 = 36;
const MMIO_GENERATION: u64 = ((1 << GENERATION_BITS) - 1) << MMIO_GENERATION_SHIFT;
/// A broken leaf keeps all its bits but the valid one, and has this one, which leaves have not.
const BROKEN: u64 = 1 << 58;
/// What was taken away leaves this, with the number of a flush.
const CLEARED: u64 = 1 << 57;
const FLUSH_SHIFT: u32 = 4;
const FLUSH: u64 = ((1 << 53) - 1) << FLUSH_SHIFT;

impl<const IPA_BITS: u32, const HARDWARE_DIRTY: bool> Stage2<IPA_BITS, HARDWARE_DIRTY> {
    /// Levels at which a lookup starts: the number of tables on the way to a page.
    const LEVELS: u32 = (IPA_BITS - 12 - 4).div_ceil(9);

    /// The descriptors are those of FEAT_LPA2.
    const LPA2: bool = IPA_BITS > 48;
    /// The largest address of a table or a page has so many bits.
    const PA_BITS: u32 = if Self::LPA2 { 52 } else { 48 };
    const SHARED: u64 = if Self::LPA2 { 0 } else { INNER_SHAREABLE };

    /// VTCR_EL2.T0SZ.
    pub const T0SZ: u64 = 64 - IPA_BITS as u64;
    /// VTCR_EL2.SL0 for the 4 KiB granule: 2 starts at the Arm level 0, 1 at level 1.
    pub const SL0: u64 = Self::LEVELS as u64 - 2;

    /// VTCR_EL2 for a walker of these tables on a CPU with this ID_AA64MMFR0_EL1.PARange (which allows
    /// `IPA_BITS`): walks, and with FEAT_LPA2 the memory, are inner shareable, walks write-back cached, VMIDs have 8 bits, and accessed and
    /// dirty are set with `HARDWARE_DIRTY` only.
    pub const fn vtcr(pa_range: u64) -> u64 {
        const RES1: u64 = 1 << 31;
        const WRITE_BACK_WALKS: u64 = 0b01 << 8 | 0b01 << 10;
        const INNER_SHAREABLE_WALKS: u64 = 0b11 << 12;
        const HA: u64 = 1 << 21;
        const HD: u64 = 1 << 22;
        const DS: u64 = 1 << 32;
        // 5 is 48 bits, 6 is 52.
        let (most, lpa2) = if Self::LPA2 { (6, DS) } else { (5, 0) };
        let physical = if pa_range < most { pa_range } else { most };
        let managed = if HARDWARE_DIRTY { HA | HD } else { 0 };
        RES1 | physical << 16
            | INNER_SHAREABLE_WALKS
            | WRITE_BACK_WALKS
            | Self::SL0 << 6
            | Self::T0SZ
            | managed
            | lpa2
    }

    /// VTTBR_EL2 for the tables at `root` ([`Vm::root`](crate::Vm::root)).
    ///
    /// # Panics
    /// If the address of `root` has more than 48 bits, or with FEAT_LPA2 more than 52.
    pub const fn vttbr(root: Pfn, vmid: u8) -> u64 {
        assert!(
            root.0 >> (Self::PA_BITS - PAGE_SHIFT) == 0,
            "VTTBR_EL2 has 48 address bits, with FEAT_LPA2 52"
        );
        let address = root.hpa().0;
        // BADDR has bits 51:48 of the address in its bits 5:2.
        (vmid as u64) << 48 | address & FRAME_48 | address >> 48 << 2
    }

    /// What says of a leaf that it was written to.
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

// SAFETY: the bits are those of the Arm ARM. `crates/slat/tests/formats.rs` checks what functions can show; monitors in `metal` ask the walkers.
unsafe impl<const IPA_BITS: u32, const HARDWARE_DIRTY: bool> Format
    for Stage2<IPA_BITS, HARDWARE_DIRTY>
{
    const NAME: &'static str = "aarch64";
    const TOP: Level = {
        assert!(IPA_BITS >= 39 && IPA_BITS <= 52, "39 to 52 bits of IPA");
        Level(Self::LEVELS as u8)
    };
    const ROOT_TABLES: usize = {
        let covered = 12 + 9 * Self::LEVELS;
        if IPA_BITS > covered {
            1 << (IPA_BITS - covered)
        } else {
            1
        }
    };
    const MAX_LEAF: Level = Level::GIGA;
    const BREAK_BEFORE_MAKE: bool = true;
    const TABLE: u64 = TABLE;
    const FRAME: u64 = if Self::LPA2 { FRAME_52 } else { FRAME_48 };
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
        let bits = frame.0 << PAGE_SHIFT;
        match Self::LPA2 {
            true => bits & FRAME_52 | frame.0 >> UPPERMOST_SHIFT & UPPERMOST,
            false => bits,
        }
    }

    #[inline]
    fn take_frame(bits: u64) -> Pfn {
        let low = bits >> PAGE_SHIFT;
        match Self::LPA2 {
            true => Pfn(low | (bits & UPPERMOST) << UPPERMOST_SHIFT),
            false => Pfn(low),
        }
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

    /// DDI 0487, "Hardware management of the dirty state", stage 2: "writable-clean" is DBM without
    /// S2AP[1], "writable-dirty" both, and a descriptor without DBM is as writable as S2AP[1] says.
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

    /// DDI 0487, "VMSAv8-64 Table descriptor": stage 2 has no attributes there.
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
