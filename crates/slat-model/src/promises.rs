//! Checks those promises of a page-table format ([`slat::Format`], section "Safety") that concern its functions.

use slat::format::{Entry, Leaf, Privilege};
use slat::{Access, Format, Level, MemoryType, Pfn};

const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::Execute];
const MEMORY: [MemoryType; 3] = [
    MemoryType::WriteBack,
    MemoryType::WriteCombining,
    MemoryType::Device,
];

/// Checks the entries that format `F` makes. These are leaves of every level, with every set of flags and with frames
/// that use every bit; also entries that refer to tables, MMIO entries, broken entries and cleared entries. Whether the
/// hardware walker interprets these entries in the same way, only the hardware can show.
///
/// # Panics
/// If `F` breaks one of the promises of [`Format`]. The message has the promise's number, and the entry.
pub fn format_promises<F: Format>() {
    let frames = frames::<F>();
    for level in (1..=F::MAX_LEAF.0).map(Level) {
        for privilege in privileges::<F>() {
            let pfn = Pfn(3 * F::GRANULE.pages(F::MAX_LEAF));
            for leaf in flags().map(|leaf| Leaf {
                pfn,
                privilege,
                ..leaf
            }) {
                leaf_means_what_it_was_made_of::<F>(leaf, level);
                changes_change_one_thing::<F>(leaf, level);
            }
        }
        let starts = frames
            .iter()
            .map(|pfn| pfn.0 & !(F::GRANULE.pages(level) - 1));
        for pfn in starts.map(Pfn) {
            leaf_means_what_it_was_made_of::<F>(Leaf { pfn, ..BARE }, level);
        }
    }
    for level in (1..=F::TOP.0).map(Level) {
        absent_entries_mean_nothing_else::<F>(level);
        if level > Level::PAGE {
            tables_are_followed::<F>(&frames, level);
        }
    }
    let last = F::take_frame(F::FRAME);
    let holds = (F::holds(last), F::holds(last.add(1)));
    same::<F, _>(1, "the last frame that FRAME holds", holds, (true, false));
}

/// A leaf without flags.
const BARE: Leaf = Leaf {
    pfn: Pfn(0),
    write: false,
    execute: false,
    may_write: false,
    may_execute: false,
    accessed: false,
    dirty: false,
    memory: MemoryType::WriteBack,
    privilege: Privilege::USER,
};

/// Returns a leaf with each set of flags.
fn flags() -> impl Iterator<Item = Leaf> {
    MEMORY.into_iter().flat_map(|memory| {
        (0..1u32 << 6).map(move |set| {
            let is = |flag: u32| set >> flag & 1 != 0;
            Leaf {
                write: is(0),
                execute: is(1),
                may_write: is(2),
                may_execute: is(3),
                accessed: is(4),
                dirty: is(5),
                memory,
                ..BARE
            }
        })
    })
}

/// Returns the privilege of a leaf that all users may use. If the tables can shadow a guest's tables, also returns
/// other privileges, which together have every bit of a protection key set.
fn privileges<F: Format>() -> impl Iterator<Item = Privilege> {
    let others = [(false, 0), (true, 15), (false, 9), (true, 6)];
    let others = others.map(|(user, key)| Privilege::new(user, key));
    [Privilege::USER]
        .into_iter()
        .chain(others.into_iter().filter(|_| F::SHADOWS))
}

/// Returns frames that together use every bit of a frame number: each bit alone, and all bits.
fn frames<F: Format>() -> Vec<Pfn> {
    let bits = (0..u64::BITS).map(|bit| Pfn(1 << bit));
    let all = F::take_frame(F::FRAME);
    bits.filter(|pfn| F::holds(*pfn)).chain([all]).collect()
}

fn leaf_means_what_it_was_made_of<F: Format>(leaf: Leaf, level: Level) {
    let bits = F::leaf(leaf, level);
    let of = &format_args!("{leaf:?} of {level:?}, {bits:#x}");
    same::<F, _>(1, of, F::decode(bits, level), Entry::Leaf(leaf));
    same::<F, _>(4, of, F::decode_leaf(bits), leaf);
    same::<F, _>(4, of, F::next_table(bits, level), None);
    same::<F, _>(4, of, F::is_absent(bits), false);
    same::<F, _>(4, of, F::is_writable(bits), leaf.write);
    for access in ACCESSES {
        let marked = leaf.accessed && (leaf.dirty || access != Access::Write);
        let ready = leaf.allows(access) && marked;
        same::<F, _>(4, of, is_ready::<F>(bits, access), ready);
    }
    let settled = leaf.accessed && (leaf.dirty || !leaf.write);
    same::<F, _>(4, of, F::is_settled(bits), settled);
    if F::BREAK_BEFORE_MAKE {
        let broken = F::broken(bits);
        let of = &format_args!("{leaf:?} of {level:?}, broken: {broken:#x}");
        same::<F, _>(1, of, F::decode(broken, level), Entry::Broken(leaf));
        same::<F, _>(4, of, F::next_table(broken, level), None);
        same::<F, _>(4, of, F::is_absent(broken), false);
        for access in ACCESSES {
            same::<F, _>(4, of, is_ready::<F>(broken, access), false);
        }
    }
}

fn changes_change_one_thing<F: Format>(leaf: Leaf, level: Level) {
    let bits = F::leaf(leaf, level);
    let becomes = |what: &str, bits: u64, changed: Leaf| {
        let of = &format_args!("{leaf:?} of {level:?}, {what}: {bits:#x}");
        same::<F, _>(3, of, F::decode(bits, level), Entry::Leaf(changed));
    };
    if leaf.write {
        let protected = Leaf {
            write: false,
            may_write: true,
            ..leaf
        };
        becomes("write-protected", F::write_protect(bits), protected);
    }
    for write in [false, true] {
        let marked = Leaf {
            accessed: true,
            dirty: leaf.dirty || write,
            ..leaf
        };
        becomes("marked", F::mark(bits, write), marked);
    }
    let idle = Leaf {
        accessed: false,
        ..leaf
    };
    becomes("accessed cleared", F::clear_accessed(bits), idle);
    let clean = Leaf {
        dirty: false,
        ..leaf
    };
    becomes("dirty cleared", F::clear_dirty(bits), clean);
}

fn absent_entries_mean_nothing_else<F: Format>(level: Level) {
    let absent = |bits: u64, means: Entry| {
        let of = &format_args!("{means:?} in a table of {level:?}, {bits:#x}");
        same::<F, _>(1, of, F::decode(bits, level), means);
        same::<F, _>(4, of, F::is_absent(bits), true);
        same::<F, _>(4, of, F::next_table(bits, level), None);
        for access in ACCESSES {
            same::<F, _>(4, of, is_ready::<F>(bits, access), false);
        }
    };
    absent(0, Entry::Empty);
    for flush in [0, 1, 0x5555_5555] {
        let bits = F::cleared(flush);
        absent(bits, Entry::Empty);
        if let Some(named) = F::cleared_by(bits) {
            same::<F, _>(1, "the flush of a cleared entry", named, flush);
        }
    }
    if F::MMIO_GENERATION_BITS > 0 {
        let all = u64::MAX >> (64 - F::MMIO_GENERATION_BITS);
        let notes = (1u64 << F::MMIO_NOTE_BITS) - 1;
        for (generation, note) in [
            (0, 0),
            (1 & all, notes),
            (all, 0),
            (all, notes),
            (5 & all, notes & 6),
        ] {
            absent(F::mmio(generation, note), Entry::Mmio { generation, note });
        }
        let (wrapped, note) = (F::mmio(all.wrapping_add(1), notes), notes);
        absent(
            wrapped,
            Entry::Mmio {
                generation: 0,
                note,
            },
        );
    }
}

fn tables_are_followed<F: Format>(frames: &[Pfn], level: Level) {
    for pfn in frames {
        let bits = F::table(*pfn);
        let of = &format_args!("the table {pfn:?} in a table of {level:?}, {bits:#x}");
        same::<F, _>(1, of, F::decode(bits, level), Entry::Table(*pfn));
        same::<F, _>(4, of, F::next_table(bits, level), Some(*pfn));
        same::<F, _>(4, of, F::is_absent(bits), false);
        same::<F, _>(1, of, F::is_protected(bits), false);
        if F::TABLE_WRITE != 0 {
            let bits = bits & !F::TABLE_WRITE;
            let of = &format_args!("the table {pfn:?} of {level:?}, write-protected, {bits:#x}");
            same::<F, _>(1, of, F::decode(bits, level), Entry::Table(*pfn));
            same::<F, _>(4, of, F::next_table(bits, level), Some(*pfn));
            same::<F, _>(4, of, F::is_absent(bits), false);
            same::<F, _>(4, of, F::is_protected(bits), true);
        }
    }
}

fn is_ready<F: Format>(bits: u64, access: Access) -> bool {
    let (set, clear) = F::ready(access);
    bits & (set | clear) == set
}

#[track_caller]
fn same<F: Format, T: PartialEq + std::fmt::Debug>(
    promise: u32,
    of: &(impl std::fmt::Display + ?Sized),
    is: T,
    promised: T,
) {
    assert!(
        is == promised,
        "format {}, promise {promise}: {of}: it is {is:?}, and must be {promised:?}",
        F::NAME
    );
}
