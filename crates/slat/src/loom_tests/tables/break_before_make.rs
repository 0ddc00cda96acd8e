//! Break-before-make and flushes: no walker meets two translations of one page, and no entry is replaced before
//! its flush is done.

use super::*;
use crate::loom_tests::SmallStage2;
use crate::sync::SpinLock;
use crate::sync::quiesce::Attention;

#[test]
fn break_before_make_is_mended_once_and_loses_no_page() {
    two::<SmallStage2<2>>(
        3,
        World::with_huge_leaf,
        |world| _ = world.fault(0, page(0)),
        |world| _ = world.fault(1, page(1)),
        |world| {
            assert_eq!((world.leaf(0), world.leaf(1)), (page(0), page(1)));
            assert_eq!(world.machine.live_frames(), 2);
        },
    );
}

#[test]
fn a_walker_finds_a_leaf_before_it_is_broken_and_after_it_is_mended() {
    two::<SmallStage2<2>>(
        3,
        World::with_huge_leaf,
        |world| _ = world.fault(0, page(0)),
        |world| {
            for _ in 0..3 {
                let found = world.find(1);
                let broken = matches!(found, Entry::Broken(_));
                assert!(broken || found == Entry::Leaf(page(1)), "{found:?}");
            }
        },
        |world| assert_eq!(world.leaf(1), page(1)),
    );
}

/// What a hardware walker does that caches what it finds, and forgets it when it is asked to: it never finds
/// another page, or another size, than what it has cached.
fn meets_no_conflict(world: &World<SmallStage2<2>>) {
    let me = world.readers.register().unwrap();
    me.enter(&world.readers, 0);
    let mut cached: Option<(Leaf, Level)> = None;
    for _ in 0..3 {
        if me.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
            cached = None;
            me.quiesce(&world.readers);
        }
        let found = world.tree.lookup(Gfn(0));
        if let Entry::Leaf(leaf) = found.entry::<SmallStage2<2>>() {
            let now = (leaf, found.level);
            let same = |was: (Leaf, Level)| was.0.pfn == now.0.pfn && was.1 == now.1;
            assert!(cached.is_none_or(same), "{now:?} conflicts with {cached:?}");
            cached = Some(now);
        }
    }
    me.leave();
}

/// Maps gfn 0 to another page, by a leaf of its own; flushes what it meets.
fn map_another(world: &World<SmallStage2<2>>) {
    let other = Leaf {
        pfn: Pfn(8),
        ..LEAF
    };
    let me = world.readers.register().unwrap();
    let mut flushed = Flushed::default();
    loop {
        me.enter(&world.readers, 0);
        let (mapped, _) = world.map_after(&flushed, 0, Level::PAGE, other);
        me.leave();
        match mapped {
            Mapped::Unflushed(level) => flushed = world.flush(0, level),
            // The zap has not come yet.
            Mapped::MustMend(level) => loop {
                let flushed = world.flush(0, level);
                me.enter(&world.readers, 0);
                let (mended, _) = world.with_path(|path| {
                    path.flushed = flushed;
                    world.tree.mend(Gfn(0), level, path)
                });
                me.leave();
                if mended {
                    break;
                }
            },
            Mapped::InTheWay => world.zap(0..1),
            Mapped::Broken => loom::thread::yield_now(),
            Mapped::New | Mapped::Widened | Mapped::Spurious => break,
            Mapped::Stale => panic!("nobody has asked for that"),
        }
    }
    world.readers.release(me);
}

fn nothing_conflicts(prepare: fn() -> Arc<World<SmallStage2<2>>>) {
    model(2, move || {
        let world = prepare();
        let (zapping, mapping) = (world.clone(), world.clone());
        let threads = [
            spawn(move || zapping.zap(0..2)),
            spawn(move || map_another(&mapping)),
        ];
        meets_no_conflict(&world);
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn a_walker_meets_no_conflict_where_a_huge_leaf_is_zapped_and_a_small_one_mapped() {
    nothing_conflicts(World::with_huge_leaf);
}

#[test]
fn a_walker_meets_no_conflict_where_a_table_is_zapped_and_another_one_made() {
    nothing_conflicts(|| {
        let world = World::new();
        world.fault(0, page(0));
        world
    });
}

/// A TLB that always holds what it may: after a flush, what the tables say at that moment.
fn flush_a_tlb(world: &World<SmallStage2<2>>, cached: &SpinLock<u64>) -> Flushed {
    let number = world.flushes.begin();
    // It forgets and walks again at one moment.
    let mut cached = cached.lock(wait);
    *cached = match world.find(0) {
        Entry::Leaf(leaf) => leaf.pfn.0,
        _ => 0,
    };
    drop(cached);
    Flushes::done(Gfn(0)..Gfn(1), number)
}

/// Runs `other` beside a zap of gfn 0 with its flush of the TLB, and maps another page there then, knowing of
/// the flush that `other` has done.
fn maps_another_beside_a_zap(other: fn(&World<SmallStage2<2>>, &SpinLock<u64>) -> Flushed) {
    model(4, move || {
        let world = World::<SmallStage2<2>>::new();
        world.fault(0, page(0));
        let cached = Arc::new(SpinLock::new(page(0).pfn.0));
        let (zapping, tlb) = (world.clone(), cached.clone());
        let thread = spawn(move || {
            let debt = zapping.flushes.owe();
            debt.covers(&(Gfn(0)..Gfn(1)));
            let mut zapped = Zapped::nothing();
            (zapping.tree).zap(&mut Walk::unbroken(Gfn(0)..Gfn(1)), &mut zapped);
            flush_a_tlb(&zapping, &tlb);
            drop(debt);
        });
        let flushed = other(&world, &cached);
        let other = Leaf {
            pfn: Pfn(8),
            ..LEAF
        };
        if let Mapped::New = world.map_after(&flushed, 0, Level::PAGE, other).0 {
            assert_ne!(*cached.lock(wait), page(0).pfn.0, "a conflict");
        }
        thread.join().unwrap();
    });
}

/// A flush of somebody else may come at any moment of a zap: if it begins before the entry was taken away, it
/// does not allow anything to be put there.
#[test]
fn a_flush_that_begins_before_a_zap_does_not_complete_it() {
    maps_another_beside_a_zap(flush_a_tlb);
}

/// Who finds the entry taken away finds its debtor, too, until that has flushed.
#[test]
fn a_debtor_is_there_from_before_its_zap_until_after_its_flush() {
    maps_another_beside_a_zap(|_, _| Flushed::default());
}

/// An operation that finds nothing to take away needs a flush if another one has taken it away and has not flushed
/// it yet.
#[test]
fn who_comes_behind_a_zap_flushes_or_finds_it_flushed() {
    model(4, || {
        let world = World::<SmallStage2<2>>::new();
        world.fault(0, page(0));
        let cached = Arc::new(SpinLock::new(page(0).pfn.0));
        let zap = |world: &World<SmallStage2<2>>, cached: &SpinLock<u64>| {
            let debt = world.flushes.owe();
            debt.covers(&(Gfn(0)..Gfn(1)));
            let mut zapped = Zapped::nothing();
            (world.tree).zap(&mut Walk::unbroken(Gfn(0)..Gfn(1)), &mut zapped);
            if !zapped.is_empty() || debt.others_owe(Level::MEGA) {
                flush_a_tlb(world, cached);
            }
            drop(debt);
            assert_eq!(*cached.lock(wait), 0, "it is used after the zap");
        };
        let (other, tlb) = (world.clone(), cached.clone());
        let thread = spawn(move || zap(&other, &tlb));
        zap(&world, &cached);
        thread.join().unwrap();
    });
}
