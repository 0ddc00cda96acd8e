//! A tree without a VM: installs, splits and zaps, concurrent with each other and with walkers.

mod aging;
mod break_before_make;

use std::ops::Range;
use std::sync::Arc;

use super::{Machine, Small, SmallStage2, model, spawn, wait};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format, Leaf, MemoryType, Privilege};
use crate::heap::Shared;
use crate::platform::VmId;
use crate::policy::SplitWalk;
use crate::sync::atomic::{AtomicU64, Ordering::*};
use crate::sync::quiesce::Readers;
use crate::sync::{Guarded, InSection};
use crate::table::{
    ByGfn, Flushed, Flushes, Found, FrameCache, Installed, Path, Retry, TableFrames, Tree, Walk,
};
use crate::vm::range_op::{Collapsing, Step, Unflushed};

/// A tree, usually of two levels, with four pages. Each pair of pages can be one huge leaf.
struct World<F: Format> {
    machine: Arc<Machine>,
    tables: Guarded<Tree<Machine, F>>,
    readers: Readers,
    frames: Shared<TableFrames>,
    flushes: Shared<Flushes>,
}

const LEAF: Leaf = Leaf {
    pfn: Pfn(4),
    write: true,
    execute: true,
    may_write: false,
    may_execute: false,
    accessed: true,
    dirty: false,
    memory: MemoryType::WriteBack,
    privilege: Privilege::USER,
};

/// Returns the small leaf for page `n` of the two pages that `LEAF` maps as a huge leaf.
fn page(n: u64) -> Leaf {
    Leaf {
        pfn: LEAF.pfn.add(n),
        ..LEAF
    }
}

/// Returns a token of a reader section without a reader: the tests free tables only after all readers have passed.
fn section() -> InSection<'static> {
    // SAFETY: the tables' memory stays allocated, and loom reports a use of a freed table.
    unsafe { InSection::assume() }
}

impl<F: Format> World<F> {
    fn new() -> Arc<Self> {
        let machine = Machine::new(Level::PAGE);
        let flushes = Shared::try_new(Flushes::default()).unwrap();
        let frames = Shared::try_new(TableFrames::new(VmId(0))).unwrap();
        let tree = Tree::new(machine.clone(), frames.clone(), flushes.clone());
        Arc::new(World {
            tables: Guarded::new(tree.unwrap()),
            frames,
            flushes,
            readers: Readers::new(),
            machine,
        })
    }

    fn with_huge_leaf() -> Arc<Self> {
        let world = Self::new();
        assert!(matches!(
            world.map(0, Level::MEGA, LEAF).0,
            Ok(Installed::New)
        ));
        world
    }

    fn tree(&self) -> &Tree<Machine, F> {
        self.tables.get(section())
    }

    fn step<'s>(&'s self, unflushed: &'s mut Unflushed) -> Step<'s, Tree<Machine, F>> {
        Step::new(&self.tables, unflushed, section())
    }

    fn lookup(&self, gfn: u64) -> Found<'_> {
        let tree = self.tree();
        tree.lookup(Gfn(gfn))
    }

    /// Makes one attempt to install `leaf`, like a fault. Also returns the number of leaves that were split.
    fn map(&self, gfn: u64, level: Level, leaf: Leaf) -> (Result<Installed, Retry>, u64) {
        self.map_after(&Flushed::default(), gfn, level, leaf)
    }

    /// Like [`Self::map`], but for a thread whose own last flush is `flushed`.
    fn map_after(
        &self,
        flushed: &Flushed,
        gfn: u64,
        level: Level,
        leaf: Leaf,
    ) -> (Result<Installed, Retry>, u64) {
        self.with_path(|path| {
            path.flushed = flushed.clone();
            let tree = self.tree();
            let at = &mut tree.cursor(Gfn(gfn));
            tree.map(at, level, leaf, path, || true, || ())
        })
    }

    /// Maps pages 0 and 1 with one call of `map_absent`.
    fn map_run(&self, valid: impl Fn() -> bool) {
        self.with_path(|path| {
            let mut cursor = self.tree().cursor(Gfn(0));
            _ = (self.tree()).map_absent(&mut cursor, Level::PAGE, 2, page(0), path, valid);
        });
    }

    /// Makes attempts until the leaf is installed, like a vCPU. Returns the number of leaves split.
    fn fault(&self, gfn: u64, leaf: Leaf) -> u64 {
        let mut splits = 0;
        let mut flushed = Flushed::default();
        loop {
            let (mapped, split) = self.map_after(&flushed, gfn, Level::PAGE, leaf);
            splits += split;
            match mapped {
                Ok(_) => return splits,
                Err(Retry::MustMend(level)) => splits += self.mend(gfn, level),
                Err(Retry::Unflushed(level)) => flushed = self.flush(gfn, level),
                Err(Retry::Broken) => loom::thread::yield_now(),
                Err(_) => {
                    panic!("these tests map no other leaf there")
                }
            }
        }
    }

    /// Flushes and mends until the broken leaf of `level` at `gfn` is mended. Returns the number of leaves split.
    fn mend(&self, gfn: u64, level: Level) -> u64 {
        loop {
            let flushed = self.flush(gfn, level);
            let (mended, split) = self.with_path(|path| {
                path.flushed = flushed;
                self.tree().mend(Gfn(gfn), level, path)
            });
            if mended {
                return split;
            }
        }
    }

    /// Flushes like [`crate::Vm`], but without hardware: the walkers of these tests cache nothing.
    fn flush(&self, gfn: u64, level: Level) -> Flushed {
        let number = self.flushes.begin();
        self.readers.synchronize(|round, _| wait(round));
        Flushes::done(Gfn(gfn).block(level), number)
    }

    /// Zaps `gfns`, flushes and frees, like a range operation of one step.
    fn zap(&self, gfns: Range<u64>) {
        let gfns = Gfn(gfns.start)..Gfn(gfns.end);
        let ticket = self.flushes.need_flush();
        ticket.covers(&gfns);
        let me = self.readers.register().unwrap();
        me.enter(&self.readers, 0);
        let mut unflushed = Unflushed::none();
        self.step(&mut unflushed)
            .zap_unnoted(&mut Walk::unbroken(gfns));
        me.leave();
        self.flushes.begin();
        self.readers.synchronize(|round, _| wait(round));
        drop(ticket);
        // SAFETY: all readers have passed since the tables were detached.
        unsafe {
            unflushed
                .detached
                .free::<_, F>(&*self.machine, &self.frames)
        };
        self.readers.release(me);
    }

    /// Replaces the table for the first pair of pages by `LEAF`, flushes and frees, like the end of dirty logging.
    fn collapse(&self) {
        let gfns = Gfn(0)..Gfn(2);
        let ticket = self.flushes.need_flush();
        ticket.covers(&gfns);
        let me = self.readers.register().unwrap();
        me.enter(&self.readers, 0);
        let (mut unflushed, mut broken) = (Unflushed::none(), false);
        self.step(&mut unflushed).collapse(
            &mut Walk::unbroken(gfns),
            |_, _, _| Collapsing::To(LEAF),
            |_, _| broken = true,
        );
        me.leave();
        loop {
            let flushed = self.flush(0, Level::MEGA);
            me.enter(&self.readers, 0);
            let done = !broken || self.tree().restore(Gfn(0), Level::MEGA, &flushed);
            me.leave();
            if done {
                break;
            }
        }
        drop(ticket);
        // SAFETY: all readers have passed since the table was detached.
        unsafe {
            unflushed
                .detached
                .free::<_, F>(&*self.machine, &self.frames)
        };
        self.readers.release(me);
    }

    fn with_path<R>(&self, with: impl FnOnce(&mut Path<'_>) -> R) -> (R, u64) {
        let mut frames = FrameCache::new(self.frames.clone());
        frames.fill(&*self.machine, 1).unwrap();
        let mut path = Path::new(&mut frames);
        let result = with(&mut path);
        let splits = path.splits.iter().sum();
        frames.release(&*self.machine);
        (result, splits)
    }

    fn find(&self, gfn: u64) -> Entry {
        let found = self.lookup(gfn);
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

/// Runs two operations concurrently. After both have ended, runs `after`.
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
fn two_faults_that_need_the_same_table_add_one() {
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
fn two_faults_that_need_the_same_tables_of_two_levels_add_one_of_each() {
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
        let tree = world.tree();
        let at = &mut tree.cursor(Gfn(gfn));
        tree.map(at, Level::PAGE, page(gfn), path, || true, || ())
    };
    assert!(matches!(map(path), Ok(Installed::New)));
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
    let mut frames = FrameCache::new(world.frames.clone());
    let mut broken = std::vec::Vec::new();
    let mut walk = Walk::unbroken(Gfn(0)..Gfn(4));
    while !walk.is_done() {
        frames.fill(&*world.machine, 2).unwrap();
        let mut path = Path::new(&mut frames);
        let how = SplitWalk::Default;
        let mut unflushed = Unflushed::none();
        (world.step(&mut unflushed)).split(&mut walk, how, |_, _| true, &mut path, &mut broken);
        for (gfn, level) in broken.drain(..) {
            world.mend(gfn.0, level);
        }
    }
    frames.release(&*world.machine);
}

#[test]
fn pages_stay_mapped_while_their_table_becomes_a_huge_leaf() {
    two::<Small<2>>(
        3,
        || {
            let world = World::new();
            world.fault(1, page(1));
            world
        },
        World::collapse,
        |world| {
            let me = world.readers.register().unwrap();
            for _ in 0..2 {
                me.enter(&world.readers, 0);
                assert_eq!(world.leaf(1), page(1));
                me.leave();
            }
            world.readers.release(me);
        },
        |world| {
            assert_eq!((world.leaf(0), world.leaf(1)), (page(0), page(1)));
            assert_eq!(world.machine.live_frames(), 1);
        },
    );
}

#[test]
fn nothing_is_left_of_a_table_that_is_zapped_while_it_becomes_a_huge_leaf() {
    fn zapped<F: Format>() {
        two::<F>(
            3,
            || {
                let world = World::new();
                world.fault(0, page(0));
                world
            },
            World::collapse,
            |world| world.zap(0..2),
            |world| {
                assert_eq!(world.find(0), Entry::Empty);
                assert_eq!(world.machine.live_frames(), 1);
            },
        );
    }
    zapped::<Small<2>>();
    zapped::<SmallStage2<2>>();
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

/// Checks that a dirty bit that a walker sets during `change` is not lost, because the walker may have written to the
/// page.
fn no_mark_is_lost(change: fn(&World<Small<2>>)) {
    no_mark_is_lost_in(World::with_huge_leaf, change);
}

fn no_mark_is_lost_in(prepare: fn() -> Arc<World<Small<2>>>, change: fn(&World<Small<2>>)) {
    model(3, move || {
        let world = prepare();
        let other = world.clone();
        let walker = spawn(move || {
            let found = other.lookup(1);
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

/// Checks that a leaf stays write-protected if a walker sets its dirty bit at the same time. (The bit may be lost.)
fn write_protection_stays(prepare: fn() -> Arc<World<Small<2>>>) {
    model(3, move || {
        let world = prepare();
        let other = world.clone();
        let walker = spawn(move || {
            other.lookup(1).mark::<Small<2>>(true);
        });
        let mut unflushed = Unflushed::none();
        let mut walk = Walk::unbroken(Gfn(0)..Gfn(4));
        (world.step(&mut unflushed)).write_protect(&mut walk, |_, _| true);
        assert_ne!(unflushed.changed, [0; 3]);
        walker.join().unwrap();
        for gfn in [0, 1] {
            let leaf = world.leaf(gfn);
            assert!(!leaf.write && leaf.may_write, "{leaf:?}");
        }
    });
}

#[test]
fn write_protection_of_a_huge_leaf_stays_despite_a_mark() {
    write_protection_stays(World::with_huge_leaf);
}

#[test]
fn write_protection_of_a_run_of_pages_stays_despite_a_mark() {
    write_protection_stays(|| {
        let world = World::new();
        world.fault(0, page(0));
        world.fault(1, page(1));
        world
    });
}

#[test]
fn no_dirty_mark_is_lost_by_ageing() {
    no_mark_is_lost(|world| {
        world
            .step(&mut Unflushed::none())
            .age(&mut Walk::unbroken(Gfn(0)..Gfn(4)), true, |_| {})
    });
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
            Ok(Installed::Spurious)
        ));
    });
}

#[test]
fn a_zap_during_a_fault_frees_only_tables_that_no_walker_reaches() {
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

/// Runs `install` concurrently with a change that first makes the check of `install` fail, and then zaps. Afterwards
/// nothing may be installed. `install` gets the check as an argument, and makes it under the lock.
fn nothing_is_installed_after_a_zap(install: fn(&World<Small<2>>, &dyn Fn() -> bool)) {
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
        // Zap only one page: to zap all pages of the table would detach it.
        world.zap(0..1);
        thread.join().unwrap();
        assert_eq!(world.find(0), Entry::Empty);
    });
}

#[test]
fn no_leaf_is_installed_after_a_zap() {
    nothing_is_installed_after_a_zap(|world, valid| {
        world.with_path(|path| {
            let tree = world.tree();
            let at = &mut tree.cursor(Gfn(0));
            _ = tree.map(at, Level::PAGE, page(0), path, valid, || ());
        });
    });
}

#[test]
fn no_run_of_leaves_is_installed_after_a_zap() {
    nothing_is_installed_after_a_zap(|world, valid| {
        world.map_run(valid);
    });
}

#[test]
fn a_walker_that_reaches_a_run_of_leaves_finds_it_whole() {
    two::<Small<2>>(
        3,
        World::new,
        |world| world.map_run(|| true),
        |world| {
            let found = (world.find(0), world.find(1));
            assert!(found.0 == Entry::Empty || found.0 == Entry::Leaf(page(0)));
            assert!(found.1 == Entry::Leaf(page(1)) || found.0 == Entry::Empty);
        },
        |world| assert_eq!(world.leaf(1), page(1)),
    );
}

#[test]
fn a_run_of_leaves_and_a_fault_add_one_table() {
    two::<Small<2>>(
        3,
        World::new,
        |world| world.map_run(|| true),
        |world| _ = world.fault(1, page(1)),
        |world| {
            assert_eq!((world.leaf(0), world.leaf(1)), (page(0), page(1)));
            assert_eq!(world.machine.live_frames(), 2);
        },
    );
}
