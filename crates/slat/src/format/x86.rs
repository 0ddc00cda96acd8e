//! x86 page tables: those of long mode, and those of AMD's nested paging, which have the same entries.
//!
//! AMD64 APM volume 2, "Long-Mode Page Translation" (entry formats) and "Nested Paging"; Intel SDM volume 3A, "4-Level
//! Paging and 5-Level Paging". An entry's bits PAT, PCD and PWT are an index of the PAT register, which contains the
//! memory types. Index 0 is write-back and index 3 uncached, as after reset; index 1 (PWT alone) is write-combining, as
//! Linux sets it.

use super::{Entry, Format, Leaf, MemoryType, Privilege, bit};
use crate::addr::{Access, Level};

/// x86-64 tables with `LEVELS` (4 or 5) levels. Entries that refer to tables limit no right; only leaves do.
///
/// Tables that are not `NESTED` have five levels, and can also shadow the tables of a guest
/// ([`MmuKind::Shadow`](crate::MmuKind)). For a guest that uses fewer levels, the walk begins at a table of a lower
/// level.
pub struct X86<const LEVELS: u8, const NESTED: bool = false>;

/// AMD nested page tables: four levels of the same entries. The nested walk treats every guest access
/// as a user access (APM 2, "Nested Paging: Permission Checks").
///
/// Load nCR3 with the address of the root ([`crate::Vm::root`]). The walk depends on the host's registers: EFER.NXE and
/// CR4.PAE must be set, and CR4.LA57 must be clear.
pub type Npt = X86<4, true>;
/// AMD's nested page tables like [`Npt`], but with five levels, which translate 57 bits of guest-physical address: for
/// a host with CR4.LA57 set.
pub type Npt5 = X86<5, true>;

const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const WRITE_THROUGH: u64 = 1 << 3;
const CACHE_DISABLE: u64 = 1 << 4;
const UNCACHED: u64 = WRITE_THROUGH | CACHE_DISABLE;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
/// Bit 7: at levels 2 and 3 the entry is a leaf; at level 1 the bit belongs to the PAT index.
const HUGE: u64 = 1 << 7;
/// Bits 50:12, the frame. Bit 51 distinguishes an MMIO entry from a leaf ([`RESERVED`]), so no frame may use it.
const FRAME: u64 = 0x0007_ffff_ffff_f000;
/// The bits of every entry that refers to a table, in addition to the frame. Accessed is set from the start, so that
/// hardware never writes the entry.
const TABLE: u64 = PRESENT | WRITE | USER | ACCESSED;
/// A software bit: [`Leaf::may_write`]. Bits 11:9 and 58:52 are available to software.
const MAY_WRITE: u64 = 1 << 9;
const MAY_EXECUTE: u64 = 1 << 10;
const NO_EXECUTE: u64 = 1 << 63;

/// Bit 51, which marks an MMIO entry: an address bit that is reserved on a machine with less than 52 physical address
/// bits. A present entry with bit 51 set faults with the RSVD bit in the error code, which no ordinary fault has.
const RESERVED: u64 = 1 << 51;
/// An MMIO entry contains a note and a generation, as one number: its lowest `MMIO_LOW` bits are bits 50:2 of the
/// entry, and the others begin at bit 52. Bit 1 is clear, because no MMIO entry allows writing. A note consists of a
/// guest frame of 40 bits, and three rights.
const MMIO_LOW: u32 = 49;
const MMIO_LOW_SHIFT: u32 = 2;
const MMIO_HIGH_SHIFT: u32 = 52;
const NOTE_BITS: u32 = 43;
const GENERATION_BITS: u32 = 18;
const _: () = assert!(NOTE_BITS + GENERATION_BITS == MMIO_LOW + 64 - MMIO_HIGH_SHIFT);
/// Bits 62:59 of a leaf: its protection key.
const KEY_SHIFT: u32 = 59;

// SAFETY: the bits are those of the processor's manuals (named above). `crates/slat/tests/formats.rs` compares the
// results of the functions with the manuals; the monitors in `metal` test the tables on page walkers.
unsafe impl<const LEVELS: u8, const NESTED: bool> Format for X86<LEVELS, NESTED> {
    const NAME: &'static str = if NESTED { "npt" } else { "x86-la57" };
    const TOP: Level = {
        assert!(
            LEVELS == 5 || LEVELS == 4 && NESTED,
            "4 or 5 levels, those of shadow tables 5"
        );
        Level(LEVELS)
    };
    const ROOT_TABLES: usize = 1;
    const MAX_LEAF: Level = Level::GIGA;
    const BREAK_BEFORE_MAKE: bool = false;
    const TABLE: u64 = TABLE;
    // If the tables shadow a guest's own, an entry that refers to a table does not limit the right to write: the leaves
    // have the rights that the guest's tables grant.
    const TABLE_WRITE: u64 = if NESTED { WRITE } else { 0 };
    const FRAME: u64 = FRAME;
    const WRITE: u64 = WRITE;
    const MAY_WRITE: u64 = MAY_WRITE;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = DIRTY;
    const SETS_DIRTY: bool = true;
    const LOGS_READS: bool = true;
    const MMIO_GENERATION_BITS: u32 = GENERATION_BITS;
    const MMIO_NOTE_BITS: u32 = NOTE_BITS;
    const SHADOWS: bool = !NESTED;
    const MMIO_PHYSICAL_BITS: u32 = 51;

    #[inline]
    fn decode(bits: u64, level: Level) -> Entry {
        decode(bits, level)
    }

    #[inline]
    fn decode_leaf(bits: u64) -> Leaf {
        decode_leaf(bits)
    }

    #[inline]
    fn leaf(leaf: Leaf, level: Level) -> u64 {
        encode(leaf, level)
    }

    #[inline]
    fn mmio(generation: u64, note: u64) -> u64 {
        debug_assert_eq!(note >> NOTE_BITS, 0, "the note has more bits");
        let both = note | generation << NOTE_BITS;
        let low = both & ((1 << MMIO_LOW) - 1);
        let high = both >> MMIO_LOW;
        low << MMIO_LOW_SHIFT | high << MMIO_HIGH_SHIFT | RESERVED | PRESENT
    }

    #[inline]
    fn is_absent(bits: u64) -> bool {
        bits & (PRESENT | RESERVED) != PRESENT
    }

    #[inline]
    fn ready(access: Access) -> (u64, u64) {
        match access {
            Access::Read => (PRESENT | ACCESSED, RESERVED),
            // The second mask need not exclude MMIO entries here: no MMIO entry has WRITE.
            Access::Write => (PRESENT | WRITE | ACCESSED | DIRTY, 0),
            Access::Execute => (PRESENT | ACCESSED, RESERVED | NO_EXECUTE),
        }
    }
}

#[inline]
fn decode(bits: u64, level: Level) -> Entry {
    let pfn = Npt::take_frame(bits & FRAME);
    match bits & (PRESENT | RESERVED) {
        PRESENT if level > Level::PAGE && bits & HUGE == 0 => Entry::Table(pfn),
        PRESENT => Entry::Leaf(decode_leaf(bits)),
        0 => Entry::Empty,
        _ => decode_mmio(bits),
    }
}

fn decode_mmio(bits: u64) -> Entry {
    let low = bits >> MMIO_LOW_SHIFT & ((1 << MMIO_LOW) - 1);
    let high = bits >> MMIO_HIGH_SHIFT;
    let both = low | high << MMIO_LOW;
    Entry::Mmio {
        generation: both >> NOTE_BITS & ((1 << GENERATION_BITS) - 1),
        note: both & ((1 << NOTE_BITS) - 1),
    }
}

#[inline]
fn decode_leaf(bits: u64) -> Leaf {
    Leaf {
        pfn: Npt::take_frame(bits & FRAME),
        write: bits & WRITE != 0,
        execute: bits & NO_EXECUTE == 0,
        may_write: bits & MAY_WRITE != 0,
        may_execute: bits & MAY_EXECUTE != 0,
        accessed: bits & ACCESSED != 0,
        dirty: bits & DIRTY != 0,
        memory: match bits & UNCACHED {
            0 => MemoryType::WriteBack,
            WRITE_THROUGH => MemoryType::WriteCombining,
            _ => MemoryType::Device,
        },
        privilege: Privilege::new(bits & USER != 0, (bits >> KEY_SHIFT & 15) as u8),
    }
}

#[inline]
fn encode(leaf: Leaf, level: Level) -> u64 {
    let memory = match leaf.memory {
        MemoryType::WriteBack => 0,
        MemoryType::WriteCombining => WRITE_THROUGH,
        MemoryType::Device => UNCACHED,
    };
    Npt::frame(leaf.pfn)
        | memory
        | PRESENT
        | bit(leaf.privilege.is_user(), USER)
        | u64::from(leaf.privilege.key()) << KEY_SHIFT
        | bit(leaf.write, WRITE)
        | bit(!leaf.execute, NO_EXECUTE)
        | bit(level > Level::PAGE, HUGE)
        | bit(leaf.accessed, ACCESSED)
        | bit(leaf.dirty, DIRTY)
        | bit(leaf.may_write, MAY_WRITE)
        | bit(leaf.may_execute, MAY_EXECUTE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Pfn;
    use crate::format::tests::LEAF;

    /// APM 2, figures "4-Kbyte PTE", "2-Mbyte PDE", "1-Gbyte PDPE" (long mode).
    #[test]
    fn leaves_have_the_bits_of_the_manual() {
        let page = Leaf {
            pfn: Pfn(0x12345),
            ..LEAF
        };
        assert_eq!(
            Npt::leaf(page, Level::PAGE),
            0x1234_5000 | 0b111 | 1 << 63,
            "present, writable, user, no-execute"
        );
        let huge = Leaf {
            pfn: Pfn(0x200),
            execute: true,
            accessed: true,
            dirty: true,
            ..LEAF
        };
        assert_eq!(
            Npt::leaf(huge, Level::MEGA),
            0x20_0000 | 0b111 | 1 << 5 | 1 << 6 | 1 << 7
        );
        let device = Leaf {
            pfn: Pfn(1),
            memory: MemoryType::Device,
            write: false,
            execute: true,
            ..LEAF
        };
        assert_eq!(
            Npt::leaf(device, Level::PAGE),
            0x1000 | 0b11101,
            "PCD and PWT: PAT index 3"
        );
    }

    /// APM 2, "Page-Translation-Table Entry Fields": bit 7 of a PML4E must be zero.
    #[test]
    fn a_table_entry_limits_nothing() {
        assert_eq!(Npt::table(Pfn(0x77)), 0x77000 | 0b10_0111);
        assert_eq!(X86::<5>::table(Pfn(0x77)), 0x77000 | 0b10_0111);
    }

    /// APM 2, "Page-Protection Checks": a page is writable only if the R/W bit is set at every level.
    #[test]
    fn a_table_entry_without_bit_1_is_write_protected() {
        assert_eq!(Npt::decode(0x77025, Level(2)), Entry::Table(Pfn(0x77)));
        assert!(Npt::is_protected(0x77025) && !Npt::is_protected(0x77027));
    }

    /// APM 2, "Page-Fault Error Code": RSV is set if a reserved bit is set in a present entry.
    #[test]
    fn an_mmio_entry_is_present_with_a_reserved_bit() {
        let bits = Npt::mmio(9, 0);
        assert_eq!(bits & (1 | 1 << 51), 1 | 1 << 51);
        assert_eq!(
            Npt::decode(bits, Level::PAGE),
            Entry::Mmio {
                generation: 9,
                note: 0
            }
        );
    }
}
