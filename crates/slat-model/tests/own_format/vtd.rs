// Second-stage tables of Intel's IOMMU, as a hypervisor would add them for a device that it passes through.
//
// Intel Virtualization Technology for Directed I/O, revision 4.1, 9.8 "Second-Stage Paging Entries": tables "Format for
// SS-PML4E", "SS-PDPE", "SS-PDPE: 1-GByte Page", "SS-PDE", "SS-PDE: 2-MByte Page", "SS-PTE". Accessed and dirty flags
// are enabled (SSADE of the PASID-table entry); a device executes nothing, so X is not enforced.

use slat::format::{Entry, Format, Leaf, Privilege};
use slat::{Access, Level, MemoryType};

/// Four levels: 48 bits of address, AGAW 2.
pub struct SecondStage;

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const EXECUTE: u64 = 1 << 2;
/// Bit 7, PS: a leaf in a table of level 2 or 3; ignored at level 1.
const HUGE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;
/// Bit 11, SNP: the device's accesses snoop the CPUs' caches.
const SNOOP: u64 = 1 << 11;
const FRAME: u64 = 0x000f_ffff_ffff_f000;
/// Bits 61:52 are ignored by hardware.
const MAY_WRITE: u64 = 1 << 52;
const MAY_EXECUTE: u64 = 1 << 53;
const WRITE_COMBINING: u64 = 1 << 54;

/// An entry that refers to a table. SNP is reserved in such an entry.
const TABLE: u64 = READ | WRITE | EXECUTE | ACCESSED;

// SAFETY: the bits are those of the manual. The IOMMU sets accessed and dirty bits of leaves atomically (3.6.2
// "Accessed and Dirty Flags"; those of tables are set from the start), caches no entry that is not present (6.1
// "Caching Mode" is for emulated ones), and lets present entries be replaced before the invalidation (6.5.2).
// `format_promises` checks the functions.
unsafe impl Format for SecondStage {
    const NAME: &'static str = "VT-d second stage";
    const TOP: Level = Level(4);
    const ROOT_TABLES: usize = 1;
    const MAX_LEAF: Level = Level::GIGA;
    const BREAK_BEFORE_MAKE: bool = false;
    const TABLE: u64 = TABLE;
    const FRAME: u64 = FRAME;
    const WRITE: u64 = WRITE;
    const MAY_WRITE: u64 = MAY_WRITE;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = DIRTY;
    const SETS_DIRTY: bool = true;
    const LOGS_READS: bool = true;
    // The IOMMU reports a fault and aborts the access, so no code would read an MMIO entry.
    const MMIO_GENERATION_BITS: u32 = 0;
    const MMIO_NOTE_BITS: u32 = 0;
    const MMIO_PHYSICAL_BITS: u32 = 52;
    const SHADOWS: bool = false;

    fn decode(bits: u64, level: Level) -> Entry {
        match bits & (READ | WRITE) {
            0 => Entry::Empty,
            _ if level > Level::PAGE && bits & HUGE == 0 => {
                Entry::Table(Self::take_frame(bits & FRAME))
            }
            _ => Entry::Leaf(Self::decode_leaf(bits)),
        }
    }

    fn decode_leaf(bits: u64) -> Leaf {
        Leaf {
            pfn: Self::take_frame(bits & FRAME),
            write: bits & WRITE != 0,
            execute: bits & EXECUTE != 0,
            may_write: bits & MAY_WRITE != 0,
            may_execute: bits & MAY_EXECUTE != 0,
            accessed: bits & ACCESSED != 0,
            dirty: bits & DIRTY != 0,
            memory: match bits & (SNOOP | WRITE_COMBINING) {
                SNOOP => MemoryType::WriteBack,
                WRITE_COMBINING => MemoryType::WriteCombining,
                _ => MemoryType::Device,
            },
            privilege: Privilege::USER,
        }
    }

    fn leaf(leaf: Leaf, level: Level) -> u64 {
        let bit = |set: bool, bit: u64| if set { bit } else { 0 };
        Self::frame(leaf.pfn)
            | READ
            | bit(leaf.write, WRITE)
            | bit(leaf.execute, EXECUTE)
            | bit(leaf.may_write, MAY_WRITE)
            | bit(leaf.may_execute, MAY_EXECUTE)
            | bit(leaf.accessed, ACCESSED)
            | bit(leaf.dirty, DIRTY)
            | bit(leaf.memory == MemoryType::WriteBack, SNOOP)
            | bit(leaf.memory == MemoryType::WriteCombining, WRITE_COMBINING)
            | bit(level > Level::PAGE, HUGE)
    }

    fn mmio(_generation: u64, _note: u64) -> u64 {
        0
    }

    fn is_absent(bits: u64) -> bool {
        bits & (READ | WRITE) == 0
    }

    fn ready(access: Access) -> (u64, u64) {
        match access {
            Access::Read => (READ | ACCESSED, 0),
            Access::Write => (READ | WRITE | ACCESSED | DIRTY, 0),
            Access::Execute => (READ | EXECUTE | ACCESSED, 0),
        }
    }
}
