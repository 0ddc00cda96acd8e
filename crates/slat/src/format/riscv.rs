//! RISC-V G-stage tables.
//!
//! The RISC-V Instruction Set Manual, Volume II, "Hypervisor Extension": Sv39x4, Sv48x4 and Sv57x4 are Sv39, Sv48 and
//! Sv57 with a root of four tables (16 KiB, aligned); G-stage accesses are made as if in U-mode, so every leaf has U
//! set. The entry bits are defined in chapter "Sv39", the memory types in "Svpbmt".

use super::{Entry, Format, Leaf, MemoryType, Privilege, bit};
use crate::addr::{Access, Level, Pfn};

/// G-stage tables with `LEVELS` levels: 3 is Sv39x4, 4 is Sv48x4, 5 is Sv57x4.
pub struct GStage<const LEVELS: u8>;

/// Sv39x4: 41 bits of guest-physical address.
pub type Sv39x4 = GStage<3>;
/// Sv48x4: 50 bits of guest-physical address.
pub type Sv48x4 = GStage<4>;
/// Sv57x4: 59 bits of guest-physical address.
pub type Sv57x4 = GStage<5>;

const VALID: u64 = 1 << 0;
const READ: u64 = 1 << 1;
const WRITE: u64 = 1 << 2;
const EXECUTE: u64 = 1 << 3;
const RIGHTS: u64 = READ | WRITE | EXECUTE;
const USER: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;
/// A software bit: [`Leaf::may_write`]. RSW, bits 9:8, is for software.
const MAY_WRITE: u64 = 1 << 8;
const MAY_EXECUTE: u64 = 1 << 9;
/// The bits of every entry that refers to a table, in addition to the frame.
const TABLE: u64 = VALID;
const FRAME_SHIFT: u32 = 10;
const FRAME: u64 = ((1 << 44) - 1) << FRAME_SHIFT;
/// Svpbmt, bits 62:61: 0 leaves the type to the PMAs (memory is write-back), 1 is NC (not cached, weakly ordered), 2 is
/// IO (device memory).
const PBMT: u64 = 3 << 61;
const NOT_CACHED: u64 = 1 << 61;
const IO: u64 = 2 << 61;

/// Marks an MMIO entry, in which V is clear: then all other bits are for software.
const MMIO: u64 = 1 << 1;
const GENERATION_BITS: u32 = 44;

impl<const LEVELS: u8> GStage<LEVELS> {
    /// Returns hgatp for the tables at `root` ([`Vm::root`](crate::Vm::root)). `vmid` has up to 14 bits; a CPU may
    /// support fewer.
    ///
    /// # Panics
    /// If `vmid` has more than 14 bits, or `root` more than 44.
    pub const fn hgatp(root: Pfn, vmid: u16) -> u64 {
        assert!(vmid >> 14 == 0, "a VMID has at most 14 bits");
        assert!(root.0 >> 44 == 0, "hgatp has 44 bits of a frame number");
        let mode = LEVELS as u64 + 5;
        mode << 60 | (vmid as u64) << 44 | root.0
    }
}

// SAFETY: the bits are those of the privileged architecture. `crates/slat/tests/formats.rs` compares the results of the
// functions with the manual; the monitors in `metal` test the tables on page walkers.
unsafe impl<const LEVELS: u8> Format for GStage<LEVELS> {
    const NAME: &'static str = "riscv";
    const TOP: Level = {
        assert!(LEVELS >= 3 && LEVELS <= 5, "3 to 5 levels");
        Level(LEVELS)
    };
    const ROOT_TABLES: usize = 4;
    const MAX_LEAF: Level = Level::GIGA;
    const BREAK_BEFORE_MAKE: bool = false;
    const TABLE: u64 = TABLE;
    const FRAME: u64 = FRAME;
    const WRITE: u64 = WRITE;
    const MAY_WRITE: u64 = MAY_WRITE;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = DIRTY;
    const SETS_DIRTY: bool = true;
    const LOGS_READS: bool = false;
    const MMIO_GENERATION_BITS: u32 = GENERATION_BITS;
    const MMIO_NOTE_BITS: u32 = 0;
    const SHADOWS: bool = false;
    const MMIO_PHYSICAL_BITS: u32 = 56;

    #[inline]
    fn decode(bits: u64, level: Level) -> Entry {
        let pfn = Self::take_frame(bits & FRAME);
        if bits & VALID == 0 {
            return match bits & MMIO {
                0 => Entry::Empty,
                _ => Entry::Mmio {
                    generation: pfn.0,
                    note: 0,
                },
            };
        }
        if level > Level::PAGE && bits & RIGHTS == 0 {
            return Entry::Table(pfn);
        }
        Entry::Leaf(Self::decode_leaf(bits))
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
            memory: match bits & PBMT {
                IO => MemoryType::Device,
                NOT_CACHED => MemoryType::WriteCombining,
                _ => MemoryType::WriteBack,
            },
            privilege: Privilege::USER,
        }
    }

    #[inline]
    fn leaf(leaf: Leaf, _level: Level) -> u64 {
        let memory = match leaf.memory {
            MemoryType::WriteBack => 0,
            MemoryType::WriteCombining => NOT_CACHED,
            MemoryType::Device => IO,
        };
        Self::frame(leaf.pfn)
            | memory
            | VALID
            | READ
            | USER
            | bit(leaf.write, WRITE)
            | bit(leaf.execute, EXECUTE)
            | bit(leaf.accessed, ACCESSED)
            | bit(leaf.dirty, DIRTY)
            | bit(leaf.may_write, MAY_WRITE)
            | bit(leaf.may_execute, MAY_EXECUTE)
    }

    #[inline]
    fn put_frame(frame: Pfn) -> u64 {
        frame.0 << FRAME_SHIFT
    }

    #[inline]
    fn take_frame(bits: u64) -> Pfn {
        Pfn(bits >> FRAME_SHIFT)
    }

    #[inline]
    fn mmio(generation: u64, _note: u64) -> u64 {
        generation << FRAME_SHIFT & FRAME | MMIO
    }

    #[inline]
    fn is_absent(bits: u64) -> bool {
        bits & VALID == 0
    }

    #[inline]
    fn ready(access: Access) -> (u64, u64) {
        match access {
            Access::Read => (VALID | ACCESSED, 0),
            Access::Write => (VALID | WRITE | ACCESSED | DIRTY, 0),
            Access::Execute => (VALID | EXECUTE | ACCESSED, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::tests::LEAF;

    /// Volume II, figure "Sv39 page table entry"; "G-stage address translation": U must be 1.
    #[test]
    fn leaves_have_the_bits_of_the_manual() {
        let page = Leaf {
            pfn: Pfn(0x12345),
            accessed: true,
            dirty: true,
            ..LEAF
        };
        assert_eq!(Sv39x4::leaf(page, Level::PAGE), 0x12345 << 10 | 0b1101_0111);
        let huge = Leaf {
            pfn: Pfn(0x200),
            execute: true,
            write: false,
            ..LEAF
        };
        assert_eq!(Sv39x4::leaf(huge, Level::MEGA), 0x200 << 10 | 0b1_1011);
        let device = Leaf {
            pfn: Pfn(1),
            memory: MemoryType::Device,
            ..LEAF
        };
        assert_eq!(
            Sv39x4::leaf(device, Level::PAGE),
            2 << 61 | 1 << 10 | 0b1_0111,
            "PBMT IO"
        );
    }

    /// Volume II, "Sv32 algorithm": an entry with R, W and X clear points to the next level, and its bits A, D and U
    /// are reserved.
    #[test]
    fn a_table_entry_limits_nothing() {
        assert_eq!(Sv48x4::table(Pfn(0x77)), 0x77 << 10 | 1);
    }

    #[test]
    fn an_mmio_entry_is_invalid() {
        assert_eq!(Sv39x4::mmio(3, 0) & 1, 0);
        assert_eq!(
            Sv39x4::decode(Sv39x4::mmio(3, 0), Level::PAGE),
            Entry::Mmio {
                generation: 3,
                note: 0
            }
        );
    }

    /// RISC-V volume II, "Hypervisor Guest Address Translation and Protection Register": mode 8 is Sv39x4, 9 is Sv48x4,
    /// 10 is Sv57x4.
    #[test]
    fn a_walker_is_told_of_the_tables_by_one_register() {
        assert_eq!(Sv39x4::hgatp(Pfn(0x80204), 3), 0x8000_3000_0008_0204);
        assert_eq!(Sv48x4::hgatp(Pfn(0x80204), 0), 0x9000_0000_0008_0204);
        assert_eq!(Sv57x4::hgatp(Pfn(0x80204), 1), 0xa000_1000_0008_0204);
    }

    /// RISC-V volume II, "G-stage": the index into the root table has two more bits than other indices.
    #[test]
    fn the_root_has_four_tables() {
        assert_eq!((Sv39x4::TOP, Sv39x4::ROOT_TABLES), (Level(3), 4));
        assert_eq!((Sv48x4::TOP, Sv48x4::ROOT_TABLES), (Level(4), 4));
        assert_eq!((Sv57x4::TOP, Sv57x4::ROOT_TABLES), (Level(5), 4));
    }
}
