//! Tests a hypervisor's own page-table format: a correct format passes, and a defect in each function is found.

#[path = "own_format/vtd.rs"]
mod vtd;

use std::panic::{AssertUnwindSafe, catch_unwind};

use slat::format::{Entry, Leaf};
use slat::{Access, Format, Level, Pfn};
use slat_model::{Simulated, Subject, Tally, format_promises};
use vtd::SecondStage;

#[test]
fn a_sound_format_passes() {
    format_promises::<SecondStage>();
    let subject = Subject::of::<Simulated, SecondStage>("VT-d second stage");
    let tally = subject.run_seeds(0..16, 8000);
    for usual in Tally::USUAL {
        // A device caches no MMIO.
        assert!(
            tally.of(usual) > 0 || usual.contains("MMIO"),
            "never: {usual}"
        );
    }
}

/// [`SecondStage`] with defect number `DEFECT`.
struct With<const DEFECT: u32>;

impl<const DEFECT: u32> With<DEFECT> {
    fn either<R>(number: u32, wrong: R, right: R) -> R {
        if number == DEFECT { wrong } else { right }
    }
}

/// The bit of a huge leaf.
const HUGE: u64 = 1 << 7;

// SAFETY: this format breaks its promises on purpose. No `Vm` uses it.
unsafe impl<const DEFECT: u32> Format for With<DEFECT> {
    const NAME: &'static str = "wrong";
    const TOP: Level = SecondStage::TOP;
    const ROOT_TABLES: usize = SecondStage::ROOT_TABLES;
    const MAX_LEAF: Level = SecondStage::MAX_LEAF;
    const BREAK_BEFORE_MAKE: bool = SecondStage::BREAK_BEFORE_MAKE;
    const TABLE: u64 = SecondStage::TABLE;
    const FRAME: u64 = SecondStage::FRAME;
    const WRITE: u64 = SecondStage::WRITE;
    const MAY_WRITE: u64 = SecondStage::MAY_WRITE;
    const ACCESSED: u64 = SecondStage::ACCESSED;
    const DIRTY: u64 = SecondStage::DIRTY;
    const SETS_DIRTY: bool = SecondStage::SETS_DIRTY;
    const LOGS_READS: bool = SecondStage::LOGS_READS;
    const MMIO_GENERATION_BITS: u32 = SecondStage::MMIO_GENERATION_BITS;
    const MMIO_NOTE_BITS: u32 = SecondStage::MMIO_NOTE_BITS;
    const MMIO_PHYSICAL_BITS: u32 = SecondStage::MMIO_PHYSICAL_BITS;
    const SHADOWS: bool = SecondStage::SHADOWS;

    fn decode(bits: u64, level: Level) -> Entry {
        let level = Self::either(1, level.max(Level::MEGA), level);
        SecondStage::decode(bits, level)
    }
    fn decode_leaf(bits: u64) -> Leaf {
        let leaf = SecondStage::decode_leaf(bits);
        let may_write = Self::either(2, leaf.write, leaf.may_write);
        Leaf { may_write, ..leaf }
    }
    fn next_table(bits: u64, level: Level) -> Option<Pfn> {
        let seen = Self::either(3, bits & !HUGE, bits);
        let frame = seen.wrapping_sub(Self::TABLE);
        let leads = level > Level::PAGE && frame & !Self::FRAME == 0;
        leads.then_some(Self::take_frame(frame))
    }
    fn leaf(leaf: Leaf, level: Level) -> u64 {
        let bits = SecondStage::leaf(leaf, level);
        Self::either(4, bits & !HUGE, bits)
    }
    fn holds(frame: Pfn) -> bool {
        SecondStage::holds(Pfn(Self::either(5, frame.0 >> 1, frame.0)))
    }
    fn mmio(generation: u64, note: u64) -> u64 {
        SecondStage::mmio(generation, note)
    }
    fn cleared(_: u64) -> u64 {
        // A leaf that is read-only by its bits.
        Self::either(6, 1, 0)
    }
    fn is_absent(bits: u64) -> bool {
        SecondStage::is_absent(Self::either(7, bits & !1, bits))
    }
    fn write_protect(bits: u64) -> u64 {
        let protected = SecondStage::write_protect(bits);
        let kept = Self::either(8, Self::MAY_WRITE, 0);
        Self::either(9, bits, protected & !kept)
    }
    fn mark(bits: u64, write: bool) -> u64 {
        SecondStage::mark(bits, Self::either(10, true, write))
    }
    fn clear_accessed(bits: u64) -> u64 {
        Self::either(11, bits, SecondStage::clear_accessed(bits))
    }
    fn clear_dirty(bits: u64) -> u64 {
        let clean = SecondStage::clear_dirty(bits);
        clean & !Self::either(12, Self::ACCESSED, 0)
    }
    fn is_settled(bits: u64) -> bool {
        SecondStage::is_settled(bits | Self::either(13, Self::DIRTY, 0))
    }
    fn is_writable(bits: u64) -> bool {
        let bit = Self::either(14, Self::MAY_WRITE, Self::WRITE);
        bits & bit != 0
    }
    fn ready(access: Access) -> (u64, u64) {
        let (set, clear) = SecondStage::ready(access);
        (set & !Self::either(15, Self::DIRTY, 0), clear)
    }
}

fn is_found<const DEFECT: u32>() {
    let found = catch_unwind(AssertUnwindSafe(format_promises::<With<DEFECT>>));
    assert_eq!(found.is_err(), DEFECT != 0, "defect {DEFECT}");
}

#[test]
fn a_defect_in_each_function_is_found() {
    is_found::<0>();
    is_found::<1>();
    is_found::<2>();
    is_found::<3>();
    is_found::<4>();
    is_found::<5>();
    is_found::<6>();
    is_found::<7>();
    is_found::<8>();
    is_found::<9>();
    is_found::<10>();
    is_found::<11>();
    is_found::<12>();
    is_found::<13>();
    is_found::<14>();
    is_found::<15>();
}
