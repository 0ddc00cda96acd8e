//! Tests the model of a TLB with tables whose entries the tests write.

use super::*;
use crate::frames::{Frames, write};
use slat::format::{Entry, Leaf, Npt, Privilege, Stage2};
use slat::{ENTRIES, MemoryType};

/// A root of level 3, with one table of level 2 whose first entry translates frame 0.
struct World {
    frames: Frames,
    tlb: Tlb,
    table: Pfn,
}

const VM: VmId = VmId(7);

fn leaf<F: Format>(page: u64) -> u64 {
    leaf_of::<F>(page, Level::MEGA)
}

fn leaf_of<F: Format>(page: u64, level: Level) -> u64 {
    let leaf = Leaf {
        pfn: Pfn(page),
        write: true,
        execute: true,
        may_write: false,
        may_execute: false,
        accessed: true,
        dirty: true,
        memory: MemoryType::WriteBack,
        privilege: Privilege::USER,
    };
    F::leaf(leaf, level)
}

impl World {
    fn new<F: Format>(first: u64) -> Self {
        let frames = Frames::default();
        let empty = || {
            let frame = frames.alloc();
            (0..ENTRIES).for_each(|i| write(frame, i, 0));
            frame
        };
        let mut upper = empty();
        let tlb = Tlb::default();
        // SAFETY: frames stay memory until `frames` is dropped, and `write` is atomic.
        unsafe { tlb.watch::<F>(VM, &[upper]) };
        for _ in 2..F::TOP.0 {
            let lower = empty();
            write(upper, 0, F::table(lower));
            tlb.reached(upper);
            upper = lower;
        }
        write(upper, 0, first);
        tlb.reached(upper);
        World {
            frames,
            tlb,
            table: upper,
        }
    }

    fn put(&self, bits: u64) {
        self.tlb.reached(self.table);
        write(self.table, 0, bits);
        self.tlb.reached(self.table);
    }

    fn flush(&self, gfns: Range<u64>) {
        self.flush_only(gfns, Stale::ANYTHING);
    }

    fn flush_only(&self, gfns: Range<u64>, stale: Stale) {
        self.tlb
            .flushed(VM, &(Gfn(gfns.start)..Gfn(gfns.end)), stale);
    }
}

#[test]
fn a_flush_of_less_than_everything_leaves_the_rest() {
    type F = Stage2<48>;
    let level = |level| Stale {
        level: Some(level),
        tables: false,
    };
    for (stale, conflicts) in [
        (level(Level::PAGE), 1),
        (level(Level::MEGA), 0),
        (
            Stale {
                level: None,
                tables: false,
            },
            0,
        ),
    ] {
        let world = World::new::<F>(leaf::<F>(512));
        world.put(0);
        world.flush_only(0..512, stale);
        world.put(leaf::<F>(1024));
        assert_eq!(world.tlb.conflicts(), conflicts, "{stale:?}");
    }
}

#[test]
fn another_leaf_conflicts_until_the_old_one_was_flushed() {
    type F = Stage2<48>;
    let world = World::new::<F>(leaf::<F>(512));
    world.put(0);
    world.flush(512..1024);
    world.put(leaf::<F>(512));
    assert_eq!(world.tlb.conflicts(), 0, "the same again, or another range");
    world.put(0);
    world.put(leaf::<F>(1024));
    assert_eq!(world.tlb.conflicts(), 1);
    world.put(0);
    // The flush of one page of a huge leaf drops the whole leaf from the TLBs.
    world.flush(3..4);
    world.put(leaf::<F>(2048));
    assert_eq!(world.tlb.conflicts(), 1);
}

#[test]
fn a_flush_ends_what_was_taken_out_before_it_began() {
    type F = Stage2<48>;
    let world = World::new::<F>(leaf::<F>(512));
    world.put(0);
    let moment = world.tlb.flush_begins();
    world.put(leaf::<F>(512));
    world.put(0);
    (world.tlb).flush_ended(VM, &(Gfn(0)..Gfn(512)), Stale::ANYTHING, moment);
    assert_eq!(world.tlb.ghosts(), 2);
    assert!(
        world
            .tlb
            .check_frames(|first, _| first == Pfn(512))
            .is_err()
    );
    world.put(leaf::<F>(1024));
    assert_eq!(world.tlb.conflicts(), 1);
}

#[test]
fn a_table_conflicts_with_a_leaf_and_is_not_freed_before_a_flush() {
    type F = Stage2<48>;
    let world = World::new::<F>(leaf::<F>(512));
    let lower = world.frames.alloc();
    (0..ENTRIES).for_each(|i| write(lower, i, 0));
    world.put(F::table(lower));
    assert_eq!(world.tlb.conflicts(), 1);
    world.put(0);
    assert!(world.tlb.freed(lower).is_err());
    world.put(F::table(lower));
    world.put(0);
    world.flush(0..1);
    assert_eq!(world.tlb.freed(lower), Ok(()));
}

#[test]
fn what_was_taken_away_is_stale_until_it_was_flushed() {
    let world = World::new::<Npt>(leaf::<Npt>(512));
    assert_eq!(world.tlb.stale(), None);
    world.put(Npt::write_protect(leaf::<Npt>(512)));
    assert!(world.tlb.stale().is_some(), "the right to write");
    world.flush(0..512);
    world.put(0);
    assert!(world.tlb.stale().is_some());
    assert!(world.tlb.check_backing(&(600..601)).is_err());
    assert!(world.tlb.check_gone(0, &(5..6)).is_err());
    assert_eq!(world.tlb.check_backing(&(100..200)), Ok(()));
    world.flush(0..1);
    assert_eq!((world.tlb.stale(), world.tlb.conflicts()), (None, 0));
    assert_eq!(world.tlb.check_backing(&(600..601)), Ok(()));
}

#[test]
fn a_leaf_that_was_split_in_place_is_not_stale() {
    let world = World::new::<Npt>(leaf::<Npt>(512));
    let Entry::Leaf(huge) = Npt::decode(leaf::<Npt>(512), Level::MEGA) else {
        panic!("no leaf")
    };
    let lower = world.frames.alloc();
    for i in 0..ENTRIES {
        let piece = huge.piece(Npt::GRANULE, Level::MEGA, i);
        write(lower, i, Npt::leaf(piece, Level::PAGE));
    }
    world.put(Npt::table(lower));
    assert_eq!((world.tlb.stale(), world.tlb.conflicts()), (None, 0));
    // A page walker may still have cached the huge leaf, which now allows more than the tables.
    world.tlb.reached(lower);
    write(lower, 9, 0);
    assert!(world.tlb.stale().is_some());
    world.flush(9..10);
    assert_eq!(world.tlb.stale(), None);
}

/// An entry below a write-protected table may lose the right to write without a flush, but only after the flush for the
/// table.
#[test]
fn a_table_that_was_write_protected_is_stale_until_it_was_flushed() {
    let world = World::new::<Npt>(0);
    let lower = world.frames.alloc();
    let set = |i, bits| {
        world.tlb.reached(lower);
        write(lower, i, bits);
        world.tlb.reached(lower);
    };
    let page = |page| leaf_of::<Npt>(page, Level::PAGE);
    (0..ENTRIES).for_each(|i| write(lower, i, page(i as u64)));
    let (open, protected) = (Npt::table(lower), Npt::table(lower) & !Npt::TABLE_WRITE);
    world.put(open);
    assert_eq!(world.tlb.stale(), None);
    world.put(protected);
    let leaves = Stale {
        level: None,
        tables: false,
    };
    world.flush_only(0..512, leaves);
    assert!(world.tlb.stale().is_some(), "the table is still cached");
    world.flush(0..512);
    set(0, Npt::write_protect(page(0)));
    assert_eq!(world.tlb.stale(), None, "no walker could write by it");
    world.put(open);
    assert_eq!(world.tlb.stale(), None);
    set(1, Npt::write_protect(page(2)));
    assert!(world.tlb.stale().is_some(), "the table allows writes again");
    world.flush(0..512);
    assert_eq!(world.tlb.stale(), None);
}
