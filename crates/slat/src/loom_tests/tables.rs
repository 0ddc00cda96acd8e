//! The tree alone: installs, splits and zaps against each other and against walkers.

mod break_before_make;

use std::ops::Range;
use std::sync::Arc;

use super::{Machine, Small, model, spawn, wait};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format, Leaf};
use crate::heap::Shared;
use crate::platform::MemoryType;
use crate::sync::atomic::{AtomicU64, Ordering::*};
use crate::sync::quiesce::Readers;
use crate::table::{
    Flushed, Flushes, FrameCache, Mapped, Path, SplitWalk, Tree, Walk, Zapped, room_for_broken,
};

/// Two levels: four pages, of which each pair can be one leaf.
struct World<F: Format> {
    machine: Arc<Machine>,
    tree: Tree<Machine, F>,
    readers: Readers,
    flushes: Shared<Flushes>,
}

const LEAF: Leaf = Leaf {
    pfn: Pfn(4),
    write: true,
    execute: true,
    may_write: false,
    accessed: true,
    dirty: false,
    memory: MemoryType::WriteBack,
};

/// Page `n` of the pair that `LEAF` maps when it is huge.
fn page(n: u64) -> Leaf {
    Leaf {
        pfn: LEAF.pfn.add(n),
        ..LEAF
    }
}

impl<F: Format> World<F> {
    fn new() -> Arc<Self> {
        let machine = Machine::new(Level::PAGE);
        let flushes = Shared::try_new(Flushes::default()).unwrap();
        Arc::new(World {
            tree: Tree::new(machine.clone(), flushes.clone()).unwrap(),
            flushes,
            readers: Readers::new(),
            machine,
        })
    }

    fn with_huge_leaf() -> Arc<Self> {
        let world = Self::new();
        assert!(matches!(world.map(0, Level::MEGA, LEAF).0, Mapped::New));
        world
    }

    /// One attempt of a fault; the second answer is how many leaves it has split.
    fn map(&self, gfn: u64, level: Level, leaf: Leaf) -> (Mapped, u64) {
        self.map_after(&Flushed::default(), gfn, level, leaf)
    }

    /// The same by somebody who has done the flush `flushed`.
    fn map_after(&self, flushed: &Flushed, gfn: u64, level: Level, leaf: Leaf) -> (Mapped, u64) {
        self.with_path(|path| {
            path.flushed = flushed.clone();
            self.tree.map(Gfn(gfn), level, leaf, path, || true, || ())
        })
    }

    /// A whole fault.
    fn fault(&self, gfn: u64, leaf: Leaf) -> u64 {
        let mut splits = 0;
        let mut flushed = Flushed::default();
        loop {
            let (mapped, split) = self.map_after(&flushed, gfn, Level::PAGE, leaf);
            splits += split;
            match mapped {
                Mapped::New | Mapped::Widened | Mapped::Spurious => return splits,
                Mapped::MustMend(level) => splits += self.mend(gfn, level),
                Mapped::Unflushed(level) => flushed = self.flush(gfn, level),
                Mapped::Broken => loom::thread::yield_now(),
                Mapped::InTheWay | Mapped::Stale => panic!("nobody has asked for that"),
            }
        }
    }

    /// Flushes and mends until the leaf of `level` at `gfn` is mended. How many it has split.
    fn mend(&self, gfn: u64, level: Level) -> u64 {
        loop {
            let flushed = self.flush(gfn, level);
            let (mended, split) = self.with_path(|path| {
                path.flushed = flushed;
                self.tree.mend(Gfn(gfn), level, path)
            });
            if mended {
                return split;
            }
        }
    }

    /// As [`crate::Vm`] flushes; these walkers remember nothing.
    fn flush(&self, gfn: u64, level: Level) -> Flushed {
        let number = self.flushes.begin();
        self.readers.synchronize(|round, _| wait(round));
        Flushes::done(Gfn(gfn).block(level), number)
    }

    /// Takes `gfns` away and flushes, as an operation does in one step.
    fn zap(&self, gfns: Range<u64>) {
        let gfns = Gfn(gfns.start)..Gfn(gfns.end);
        let debt = self.flushes.owe();
        debt.covers(&gfns);
        let me = self.readers.register().unwrap();
        me.enter(&self.readers, 0);
        let mut zapped = Zapped::nothing();
        self.tree.zap(&mut Walk::unbroken(gfns), &mut zapped);
        me.leave();
        self.flushes.begin();
        self.readers.synchronize(|round, _| wait(round));
        drop(debt);
        // SAFETY: everybody has passed since.
        unsafe { self.tree.free(zapped.detached) };
        self.readers.release(me);
    }

    fn with_path<R>(&self, with: impl FnOnce(&mut Path<'_>) -> R) -> (R, u64) {
        let mut frames = FrameCache::default();
        frames.fill(&*self.machine, 1).unwrap();
        let mut path = Path::new(&mut frames);
        let result = with(&mut path);
        let splits = path.splits.iter().sum();
        frames.release(&*self.machine);
        (result, splits)
    }

    fn find(&self, gfn: u64) -> Entry {
        let found = self.tree.lookup(Gfn(gfn));
        match found.entry::<F>() {
            Entry::Leaf(leaf) if found.level > Level::PAGE => Entry::Leaf(Leaf {
                pfn: leaf.pfn.add(gfn & (found.level.pages() - 1)),
                ..leaf
            }),
            entry => entry,
        }
    }

    fn leaf(&self, gfn: u64) -> Leaf {
        match self.find(gfn) {
            Entry::Leaf(leaf) => leaf,
            other => panic!("{other:?} at gfn {gfn}"),
        }
    }
}

/// Runs the two beside each other, then `after`.
fn two<F: Format>(
    preemptions: usize,
    prepare: fn() -> Arc<World<F>>,
    first: fn(&World<F>),
    second: fn(&World<F>),
    after: fn(&World<F>),
) {
    model(preemptions, move || {
        let world = prepare();
        let other = world.clone();
        let thread = spawn(move || first(&other));
        second(&world);
        thread.join().unwrap();
        after(&world);
    });
}

#[test]
fn a_walker_that_reaches_a_new_table_finds_it_whole() {
    two::<Small<2>>(
        3,
        World::new,
        |world| assert_eq!(world.fault(0, page(0)), 0),
        |world| {
            assert_eq!(world.find(1), Entry::Empty);
            let found = world.find(0);
            assert!(found == Entry::Empty || found == Entry::Leaf(page(0)));
        },
        |world| assert_eq!(world.leaf(0), page(0)),
    );
}

#[test]
fn two_faults_that_miss_the_same_table_make_one() {
    two::<Small<2>>(
        3,
        World::new,
        |world| assert_eq!(world.fault(0, page(0)), 0),
        |world| assert_eq!(world.fault(1, page(1)), 0),
        |world| {
            assert_eq!(world.leaf(0), page(0));
            assert_eq!(world.leaf(1), page(1));
            assert_eq!(world.machine.live_frames(), 2, "the root and one table");
        },
    );
}

#[test]
fn two_faults_that_miss_the_same_tables_of_two_levels_make_one_of_each() {
    two::<Small<3>>(
        2,
        World::new,
        |world| _ = world.with_path(|path| map_deep(world, 0, path)),
        |world| _ = world.with_path(|path| map_deep(world, 1, path)),
        |world| {
            assert_eq!(world.leaf(0), page(0));
            assert_eq!(world.leaf(1), page(1));
            assert_eq!(world.machine.live_frames(), 3, "one of each level");
        },
    );
}

fn map_deep(world: &World<Small<3>>, gfn: u64, path: &mut Path<'_>) {
    path.frames.fill(&*world.machine, 2).unwrap();
    let map = |path| {
        world
            .tree
            .map(Gfn(gfn), Level::PAGE, page(gfn), path, || true, || ())
    };
    assert!(matches!(map(path), Mapped::New));
}

#[test]
fn two_faults_on_one_page_give_it_the_rights_of_both() {
    two::<Small<2>>(
        3,
        World::new,
        |world| {
            let reader = Leaf {
                write: false,
                may_write: true,
                ..page(0)
            };
            world.fault(0, reader);
        },
        |world| {
            let fetcher = Leaf {
                dirty: true,
                ..page(0)
            };
            world.fault(0, fetcher);
        },
        |world| {
            let leaf = world.leaf(0);
            assert!(leaf.write && leaf.dirty && !leaf.may_write, "{leaf:?}");
        },
    );
}

#[test]
fn neighbours_stay_mapped_while_a_fault_splits_their_leaf() {
    two::<Small<2>>(
        4,
        World::with_huge_leaf,
        |world| assert_eq!(world.fault(0, page(0)), 1),
        |world| {
            for gfn in [1, 0, 1] {
                assert_eq!(world.leaf(gfn), page(gfn));
            }
        },
        |world| assert_eq!(world.leaf(1), page(1)),
    );
}

#[test]
fn neighbours_stay_mapped_while_a_range_is_split() {
    two::<Small<2>>(
        4,
        World::with_huge_leaf,
        split_all,
        |world| {
            for gfn in [1, 0, 1] {
                assert_eq!(world.leaf(gfn), page(gfn));
            }
        },
        |world| assert_eq!(world.leaf(1), page(1)),
    );
}

fn split_all<F: Format>(world: &World<F>) {
    let mut frames = FrameCache::default();
    let mut broken = room_for_broken::<F>().unwrap();
    let mut walk = Walk::unbroken(Gfn(0)..Gfn(4));
    while !walk.is_done() {
        frames.fill(&*world.machine, 2).unwrap();
        let mut path = Path::new(&mut frames);
        let how = SplitWalk::SkipWithoutHuge;
        (world.tree).split(&mut walk, how, |_, _| true, &mut path, &mut broken);
        for (gfn, level) in broken.drain(..) {
            world.mend(gfn.0, level);
        }
    }
    frames.release(&*world.machine);
}

#[test]
fn one_leaf_is_split_once_by_two_faults() {
    two::<Small<2>>(
        3,
        World::with_huge_leaf,
        |world| _ = world.fault(0, page(0)),
        |world| _ = world.fault(1, page(1)),
        |world| {
            assert_eq!(world.machine.live_frames(), 2);
            assert_eq!((world.leaf(0), world.leaf(1)), (page(0), page(1)));
        },
    );
}

#[test]
fn one_leaf_is_split_once_by_a_fault_and_a_range_operation() {
    two::<Small<2>>(
        3,
        World::with_huge_leaf,
        |world| _ = world.fault(0, page(0)),
        split_all,
        |world| {
            assert_eq!(world.machine.live_frames(), 2);
            assert_eq!((world.leaf(0), world.leaf(1)), (page(0), page(1)));
        },
    );
}

/// A walker that was allowed to mark the leaf dirty has written: the mark must be found afterwards.
fn no_mark_is_lost(change: fn(&World<Small<2>>)) {
    no_mark_is_lost_in(World::with_huge_leaf, change);
}

fn no_mark_is_lost_in(prepare: fn() -> Arc<World<Small<2>>>, change: fn(&World<Small<2>>)) {
    model(3, move || {
        let world = prepare();
        let other = world.clone();
        let walker = spawn(move || {
            let found = other.tree.lookup(Gfn(1));
            matches!(found.entry::<Small<2>>(), Entry::Leaf(leaf) if leaf.write)
                && found.mark::<Small<2>>(true)
        });
        change(&world);
        let marked = walker.join().unwrap();
        assert!(!marked || world.leaf(1).dirty);
    });
}

#[test]
fn no_dirty_mark_is_lost_by_a_fault_that_splits() {
    no_mark_is_lost(|world| _ = world.fault(0, page(0)));
}

#[test]
fn no_dirty_mark_is_lost_by_a_range_that_is_split() {
    no_mark_is_lost(split_all);
}

/// The walker's mark may be lost, the protection may not.
fn write_protection_stays(prepare: fn() -> Arc<World<Small<2>>>) {
    model(3, move || {
        let world = prepare();
        let other = world.clone();
        let walker = spawn(move || {
            other.tree.lookup(Gfn(1)).mark::<Small<2>>(true);
        });
        let mut changed = [0; 3];
        let mut walk = Walk::unbroken(Gfn(0)..Gfn(4));
        (world.tree).write_protect(&mut walk, |_, _| true, &mut changed);
        assert_ne!(changed, [0; 3]);
        walker.join().unwrap();
        for gfn in [0, 1] {
            let leaf = world.leaf(gfn);
            assert!(!leaf.write && leaf.may_write, "{leaf:?}");
        }
    });
}

#[test]
fn write_protection_of_a_huge_leaf_stays_beside_a_mark() {
    write_protection_stays(World::with_huge_leaf);
}

#[test]
fn write_protection_of_a_run_of_pages_stays_beside_a_mark() {
    write_protection_stays(|| {
        let world = World::new();
        world.fault(0, page(0));
        world.fault(1, page(1));
        world
    });
}

#[test]
fn no_dirty_mark_is_lost_by_ageing() {
    no_mark_is_lost(|world| _ = world.tree.age(&mut Walk::unbroken(Gfn(0)..Gfn(4)), true));
}

#[test]
fn no_dirty_mark_is_lost_by_a_fault_that_widens() {
    no_mark_is_lost(|world| {
        let read_only = Leaf {
            write: false,
            ..LEAF
        };
        assert!(matches!(
            world.map(0, Level::MEGA, read_only).0,
            Mapped::Spurious
        ));
    });
}

#[test]
fn a_zap_beside_a_fault_frees_only_what_nobody_reaches() {
    two::<Small<2>>(
        3,
        || {
            let world = World::new();
            world.fault(1, page(1));
            world
        },
        |world| {
            let me = world.readers.register().unwrap();
            me.enter(&world.readers, 0);
            world.fault(0, page(0));
            me.leave();
        },
        |world| {
            world.zap(0..2);
        },
        |world| {
            assert_eq!(world.find(1), Entry::Empty);
            let left = world.find(0);
            assert!(left == Entry::Empty || left == Entry::Leaf(page(0)));
            assert!(world.machine.live_frames() <= 2);
        },
    );
}

/// `install` is told what it must ask under the lock: whether what it knows still holds.
fn nothing_is_installed_behind_a_zap(install: fn(&World<Small<2>>, &dyn Fn() -> bool)) {
    model(3, move || {
        let world = World::<Small<2>>::new();
        let stale = Arc::new(AtomicU64::new(0));
        let (mine, seen) = (world.clone(), stale.clone());
        let thread = spawn(move || {
            let me = mine.readers.register().unwrap();
            me.enter(&mine.readers, 0);
            install(&mine, &|| seen.load(Relaxed) == 0);
            me.leave();
        });
        stale.store(1, Relaxed);
        // Not all of the table: it is not taken out as a whole.
        world.zap(0..1);
        thread.join().unwrap();
        assert_eq!(world.find(0), Entry::Empty);
    });
}

#[test]
fn no_leaf_is_installed_behind_a_zap() {
    nothing_is_installed_behind_a_zap(|world, valid| {
        world.with_path(|path| {
            _ = world
                .tree
                .map(Gfn(0), Level::PAGE, page(0), path, valid, || ());
        });
    });
}

#[test]
fn no_run_of_leaves_is_installed_behind_a_zap() {
    nothing_is_installed_behind_a_zap(|world, valid| {
        world.with_path(|path| world.tree.map_absent(Gfn(0), 2, page(0), path, valid));
    });
}

#[test]
fn a_walker_that_reaches_a_run_of_leaves_finds_it_whole() {
    two::<Small<2>>(
        3,
        World::new,
        |world| {
            _ = world.with_path(|path| world.tree.map_absent(Gfn(0), 2, page(0), path, || true))
        },
        |world| {
            let found = (world.find(0), world.find(1));
            assert!(found.0 == Entry::Empty || found.0 == Entry::Leaf(page(0)));
            assert!(found.1 == Entry::Leaf(page(1)) || found.0 == Entry::Empty);
        },
        |world| assert_eq!(world.leaf(1), page(1)),
    );
}

#[test]
fn a_run_of_leaves_and_a_fault_make_one_table() {
    two::<Small<2>>(
        3,
        World::new,
        |world| {
            _ = world.with_path(|path| world.tree.map_absent(Gfn(0), 2, page(0), path, || true))
        },
        |world| _ = world.fault(1, page(1)),
        |world| {
            assert_eq!((world.leaf(0), world.leaf(1)), (page(0), page(1)));
            assert_eq!(world.machine.live_frames(), 2);
        },
    );
}
