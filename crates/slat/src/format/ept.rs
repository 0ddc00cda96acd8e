//! Intel's extended page tables.
//!
//! Intel SDM volume 3C, "The Extended Page Table Mechanism (EPT)": tables "Format of an EPT Paging-Structure Entry that
//! Maps a 1-GByte/2-MByte/4-KByte Page" and "... that References ...". Accessed and dirty flags are enabled (EPTP bit
//! 6). Mode-based execute control is not enabled.

use super::{Entry, Format, Leaf, MemoryType, Privilege, bit};
use crate::addr::{Access, Level, Pfn};

/// Extended page tables with `LEVELS` (4 or 5) levels.
pub struct ExtendedPageTables<const LEVELS: u8>;

/// Four-level EPT: 48 bits of guest-physical address.
pub type Ept = ExtendedPageTables<4>;
/// Five-level EPT: 57 bits of guest-physical address.
pub type Ept5 = ExtendedPageTables<5>;

impl<const LEVELS: u8> ExtendedPageTables<LEVELS> {
    /// Returns the EPT pointer, a VMCS field, for the tables at `root` ([`crate::Vm::root`]): write-back, a walk of
    /// `LEVELS` levels, accessed and dirty flags (SDM 3C, table "Format of Extended-Page-Table Pointer"). The CPU must
    /// support all three (IA32_VMX_EPT_VPID_CAP bit 14; bit 6 for four levels or bit 7 for five; bit 21) and leaves of
    /// 2 MiB and 1 GiB (bits 16 and 17).
    ///
    /// # Panics
    /// If the address of `root` has more than 52 bits.
    pub const fn eptp(root: Pfn) -> u64 {
        const WRITE_BACK: u64 = 6;
        const ACCESSED_DIRTY: u64 = 1 << 6;
        assert!(root.0 >> 40 == 0, "EPTP has 52 address bits");
        let walk_length = (LEVELS as u64 - 1) << 3;
        root.hpa().0 | WRITE_BACK | walk_length | ACCESSED_DIRTY
    }
}

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const EXECUTE: u64 = 1 << 2;
const RIGHTS: u64 = READ | WRITE | EXECUTE;
/// Bits 5:3 of a leaf: the memory type, coded as in the MTRRs (UC 0, WC 1, WB 6).
const MEMORY_TYPE: u64 = 7 << 3;
const UNCACHED: u64 = 0;
const WRITE_COMBINING: u64 = 1 << 3;
const WRITE_BACK: u64 = 6 << 3;
/// Bit 7: at levels 2 and 3 the entry is a leaf; ignored at level 1.
const HUGE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;
const FRAME: u64 = 0x000f_ffff_ffff_f000;
/// The bits of every entry that refers to a table, in addition to the frame. Accessed is set from the start, so that
/// hardware never writes the entry.
const TABLE: u64 = RIGHTS | ACCESSED;
/// A software bit: [`Leaf::may_write`]. Hardware ignores bits 56:52 of a leaf.
const MAY_WRITE: u64 = 1 << 52;
const MAY_EXECUTE: u64 = 1 << 53;

/// An entry that is writable and executable but not readable is an *EPT misconfiguration* (SDM, "EPT
/// Misconfigurations"). An access through it causes a VM exit with its own exit reason, which no ordinary fault has.
const MISCONFIGURED: u64 = WRITE | EXECUTE;
/// An MMIO entry has the misconfigured rights in bits 2:0, and its note and generation in all bits from this bit on,
/// which hardware then does not check. A note consists of a guest frame of 40 bits, and three rights.
const MMIO_SHIFT: u32 = RIGHTS.count_ones();
const NOTE_BITS: u32 = 43;
const GENERATION_BITS: u32 = 18;
const _: () = assert!(MMIO_SHIFT + NOTE_BITS + GENERATION_BITS == 64);

// SAFETY: the bits are those of the SDM. `crates/slat/tests/formats.rs` compares the results of the functions with the
// manual; the monitors in `metal` test the tables on page walkers.
unsafe impl<const LEVELS: u8> Format for ExtendedPageTables<LEVELS> {
    const NAME: &'static str = "ept";
    const TOP: Level = {
        assert!(LEVELS == 4 || LEVELS == 5, "4 or 5 levels");
        Level(LEVELS)
    };
    const ROOT_TABLES: usize = 1;
    const MAX_LEAF: Level = Level::GIGA;
    const BREAK_BEFORE_MAKE: bool = false;
    const TABLE: u64 = TABLE;
    const TABLE_WRITE: u64 = WRITE;
    // SDM 3C, "Information That May Be Cached": a paging-structure cache entry combines the access privileges of all
    // entries on its path.
    const PROTECT_FROM: Level = Self::TOP;
    const FRAME: u64 = FRAME;
    const WRITE: u64 = WRITE;
    const MAY_WRITE: u64 = MAY_WRITE;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = DIRTY;
    const SETS_DIRTY: bool = true;
    const LOGS_READS: bool = true;
    const MMIO_GENERATION_BITS: u32 = GENERATION_BITS;
    const MMIO_NOTE_BITS: u32 = NOTE_BITS;
    const SHADOWS: bool = false;
    const MMIO_PHYSICAL_BITS: u32 = 52;

    #[inline]
    fn decode(bits: u64, level: Level) -> Entry {
        let pfn = Self::take_frame(bits & FRAME);
        match bits & RIGHTS {
            0 => Entry::Empty,
            MISCONFIGURED => Entry::Mmio {
                generation: bits >> (MMIO_SHIFT + NOTE_BITS),
                note: bits >> MMIO_SHIFT & ((1 << NOTE_BITS) - 1),
            },
            _ if level > Level::PAGE && bits & HUGE == 0 => Entry::Table(pfn),
            _ => Entry::Leaf(Self::decode_leaf(bits)),
        }
    }

    #[inline]
    fn decode_leaf(bits: u64) -> Leaf {
        Leaf {
            pfn: Self::take_frame(bits & FRAME),
            write: bits & WRITE != 0,
            execute: bits & EXECUTE != 0,
            may_write: bits & MAY_WRITE != 0,
            may_execute: bits & MAY_EXECUTE != 0,
            accessed: bits & ACCESSED != 0,
            dirty: bits & DIRTY != 0,
            memory: match bits & MEMORY_TYPE {
                WRITE_BACK => MemoryType::WriteBack,
                WRITE_COMBINING => MemoryType::WriteCombining,
                _ => MemoryType::Device,
            },
            privilege: Privilege::USER,
        }
    }

    #[inline]
    fn leaf(leaf: Leaf, level: Level) -> u64 {
        let memory = match leaf.memory {
            MemoryType::WriteBack => WRITE_BACK,
            MemoryType::WriteCombining => WRITE_COMBINING,
            MemoryType::Device => UNCACHED,
        };
        Self::frame(leaf.pfn)
            | READ
            | memory
            | bit(leaf.write, WRITE)
            | bit(leaf.execute, EXECUTE)
            | bit(level > Level::PAGE, HUGE)
            | bit(leaf.accessed, ACCESSED)
            | bit(leaf.dirty, DIRTY)
            | bit(leaf.may_write, MAY_WRITE)
            | bit(leaf.may_execute, MAY_EXECUTE)
    }

    #[inline]
    fn mmio(generation: u64, note: u64) -> u64 {
        debug_assert_eq!(note >> NOTE_BITS, 0, "the note has more bits");
        (note | generation << NOTE_BITS) << MMIO_SHIFT | MISCONFIGURED
    }

    #[inline]
    fn is_absent(bits: u64) -> bool {
        bits & READ == 0
    }

    #[inline]
    fn ready(access: Access) -> (u64, u64) {
        match access {
            Access::Read => (READ | ACCESSED, 0),
            Access::Write => (READ | WRITE | ACCESSED | DIRTY, 0),
            Access::Execute => (READ | EXECUTE | ACCESSED, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAF: Leaf = Leaf {
        pfn: Pfn(0x12345),
        ..crate::format::tests::LEAF
    };

    /// SDM 3C table 29-7 (level 1), 29-5 (level 2), 29-3 (level 3).
    #[test]
    fn leaves_have_the_bits_of_the_manual() {
        assert_eq!(Ept::leaf(LEAF, Level::PAGE), 0x1234_5000 | 0b011 | 6 << 3);
        let huge = Leaf {
            pfn: Pfn(0x200),
            execute: true,
            accessed: true,
            dirty: true,
            ..LEAF
        };
        assert_eq!(
            Ept::leaf(huge, Level::MEGA),
            0x20_0000 | 0b111 | 6 << 3 | 1 << 7 | 1 << 8 | 1 << 9
        );
        let device = Leaf {
            memory: MemoryType::Device,
            write: false,
            ..LEAF
        };
        assert_eq!(Ept::leaf(device, Level::PAGE), 0x1234_5000 | 0b001);
        let frame_buffer = Leaf {
            memory: MemoryType::WriteCombining,
            ..LEAF
        };
        let bits = Ept::leaf(frame_buffer, Level::PAGE);
        assert_eq!(bits, 0x1234_5000 | 0b011 | 1 << 3);
    }

    /// SDM 3C, "Format of Extended-Page-Table Pointer": bits 2:0 are the memory type, bits 5:3 the number of levels
    /// minus 1, bit 6 enables accessed and dirty flags.
    #[test]
    fn the_pointer_says_what_the_format_rests_on() {
        assert_eq!(Ept::eptp(Pfn(0x77)), 0x77000 | 6 | 3 << 3 | 1 << 6);
        assert_eq!(Ept5::eptp(Pfn(0x77)), 0x77000 | 6 | 4 << 3 | 1 << 6);
    }

    /// SDM 3C table 29-2: bits 7:3 of an entry that references a table are reserved.
    #[test]
    fn a_table_entry_limits_nothing() {
        assert_eq!(Ept::table(Pfn(0x77)), 0x77000 | 1 << 8 | 0b111);
        assert_eq!(Ept::decode(0x77107, Level(2)), Entry::Table(Pfn(0x77)));
    }

    /// SDM 3C, "EPT Violations": a write needs bit 1 of every entry that translates the address.
    #[test]
    fn a_table_entry_without_bit_1_is_write_protected() {
        assert_eq!(Ept::decode(0x77105, Level(2)), Entry::Table(Pfn(0x77)));
        assert!(Ept::is_protected(0x77105) && !Ept::is_protected(0x77107));
    }

    /// SDM 3C, "EPT Misconfigurations": bit 0 clear while bit 1 is set.
    #[test]
    fn an_mmio_entry_is_a_misconfiguration() {
        for (generation, note) in [(5, 0), ((1 << 18) - 1, 0), (0, (1 << 43) - 1), (7, 9)] {
            let bits = Ept::mmio(generation, note);
            assert_eq!(bits & 0b111, 0b110);
            assert!(Ept::is_absent(bits));
            let entry = Ept::decode(bits, Level(1));
            assert_eq!(entry, Entry::Mmio { generation, note });
        }
        // An MMIO entry contains only the low bits of the generation.
        assert_eq!(Ept::mmio(u64::MAX, 0), Ept::mmio((1 << 18) - 1, 0));
    }

    #[test]
    fn an_entry_is_settled_when_hardware_has_no_bit_left_to_set() {
        let settled = |write, accessed, dirty| {
            let leaf = Leaf {
                write,
                accessed,
                dirty,
                ..LEAF
            };
            Ept::is_settled(Ept::leaf(leaf, Level::PAGE))
        };
        assert!(settled(true, true, true));
        assert!(settled(false, true, false));
        assert!(!settled(true, true, false));
        assert!(!settled(false, false, false));
    }
}
