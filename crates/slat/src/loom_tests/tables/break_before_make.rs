//! Break-before-make and flushes: no walker may find two conflicting translations of one page, and no entry may be
//! replaced before its flush is done.

use super::*;
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

/// Walks like a hardware walker that caches what it reads until a flush. Checks that it never reads a leaf with another
/// page or another size than the one that it has cached.
fn finds_no_conflict(world: &World<SmallStage2<2>>) {
    let me = world.readers.register().unwrap();
    me.enter(&world.readers, 0);
    let mut cached: Option<(Leaf, Level)> = None;
    for _ in 0..3 {
        if me.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
            cached = None;
            me.quiesce(&world.readers);
        }
        let found = world.lookup(0);
        if let Entry::Leaf(leaf) = found.entry::<SmallStage2<2>>() {
            let now = (leaf, found.level);
            let same = |was: (Leaf, Level)| was.0.pfn == now.0.pfn && was.1 == now.1;
            assert!(cached.is_none_or(same), "{now:?} conflicts with {cached:?}");
            cached = Some(now);
        }
    }
    me.leave();
}

/// Maps gfn 0 to another page by a small leaf.
fn map_another(world: &World<SmallStage2<2>>) {
    let other = Leaf {
        pfn: Pfn(8),
        ..LEAF
    };
    map(world, 0, other);
}

/// Maps a page by a small leaf, like a vCPU, in a reader section. If necessary, first flushes or mends the entry.
fn map(world: &World<SmallStage2<2>>, gfn: u64, leaf: Leaf) {
    let me = world.readers.register().unwrap();
    let mut flushed = Flushed::default();
    loop {
        me.enter(&world.readers, 0);
        let (mapped, _) = world.map_after(&flushed, gfn, Level::PAGE, leaf);
        me.leave();
        match mapped {
            Err(Retry::Unflushed(level)) => flushed = world.flush(gfn, level),
            // The zap by the other thread has not happened yet, so the broken leaf is still there.
            Err(Retry::MustMend(level)) => loop {
                let flushed = world.flush(gfn, level);
                me.enter(&world.readers, 0);
                let (mended, _) = world.with_path(|path| {
                    path.flushed = flushed;
                    world.tree().mend(Gfn(gfn), level, path)
                });
                me.leave();
                if mended {
                    break;
                }
            },
            Err(Retry::Conflict(_)) => world.zap(gfn..gfn + 1),
            Err(Retry::Broken) => loom::thread::yield_now(),
            Ok(_) => break,
            Err(_) => {
                panic!("the check of this install always succeeds")
            }
        }
    }
    world.readers.release(me);
}

fn nothing_conflicts(
    prepare: fn() -> Arc<World<SmallStage2<2>>>,
    change: fn(&World<SmallStage2<2>>),
    map: fn(&World<SmallStage2<2>>),
) {
    model(2, move || {
        let world = prepare();
        let (changing, mapping) = (world.clone(), world.clone());
        let threads = [
            spawn(move || change(&changing)),
            spawn(move || map(&mapping)),
        ];
        finds_no_conflict(&world);
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn a_walker_finds_no_conflict_where_a_huge_leaf_is_zapped_and_a_small_one_mapped() {
    nothing_conflicts(World::with_huge_leaf, |world| world.zap(0..2), map_another);
}

#[test]
fn a_walker_finds_no_conflict_where_a_table_is_zapped_and_another_one_made() {
    nothing_conflicts(with_table, |world| world.zap(0..2), map_another);
}

#[test]
fn a_walker_finds_no_conflict_where_a_table_becomes_a_huge_leaf() {
    nothing_conflicts(with_table, World::collapse, |world| map(world, 1, page(1)));
}

fn with_table() -> Arc<World<SmallStage2<2>>> {
    let world = World::new();
    world.fault(0, page(0));
    world
}

/// Flushes a TLB that caches as much as possible: at each flush it immediately caches the translation that is then in
/// the tables.
fn flush_a_tlb(world: &World<SmallStage2<2>>, cached: &SpinLock<u64>) -> Flushed {
    let number = world.flushes.begin();
    // The TLB drops the old translation and walks again, while its lock is held.
    let mut cached = cached.lock(wait);
    *cached = match world.find(0) {
        Entry::Leaf(leaf) => leaf.pfn.0,
        _ => 0,
    };
    drop(cached);
    Flushes::done(Gfn(0)..Gfn(1), number)
}

/// Runs `other` concurrently with a zap of gfn 0 and with the zap's flush of the TLB. After `other`, and perhaps during
/// the zap, maps another page at gfn 0, by a thread whose own flush is the one that `other` returned.
fn maps_another_during_a_zap(other: fn(&World<SmallStage2<2>>, &SpinLock<u64>) -> Flushed) {
    model(4, move || {
        let world = World::<SmallStage2<2>>::new();
        world.fault(0, page(0));
        let cached = Arc::new(SpinLock::new(page(0).pfn.0));
        let (zapping, tlb) = (world.clone(), cached.clone());
        let thread = spawn(move || {
            let ticket = zapping.flushes.need_flush();
            ticket.covers(&(Gfn(0)..Gfn(1)));
            let mut unflushed = Unflushed::none();
            (zapping.step(&mut unflushed)).zap_unnoted(&mut Walk::unbroken(Gfn(0)..Gfn(1)));
            flush_a_tlb(&zapping, &tlb);
            drop(ticket);
        });
        let flushed = other(&world, &cached);
        let other = Leaf {
            pfn: Pfn(8),
            ..LEAF
        };
        if let Ok(Installed::New) = world.map_after(&flushed, 0, Level::PAGE, other).0 {
            assert_ne!(*cached.lock(wait), page(0).pfn.0, "a conflict");
        }
        thread.join().unwrap();
    });
}

/// A flush by another thread may begin at any moment of a zap. If that flush begins before the entry is cleared, it
/// does not permit an install in the entry.
#[test]
fn a_flush_that_begins_before_a_zap_does_not_complete_it() {
    maps_another_during_a_zap(flush_a_tlb);
}

/// If a thread finds the entry cleared, it also finds the ticket of the zap, or the zap has already flushed.
#[test]
fn a_ticket_exists_from_before_its_zap_until_after_its_flush() {
    maps_another_during_a_zap(|_, _| Flushed::default());
}

/// An operation that finds nothing to zap must flush if another operation has zapped the entry and has not flushed yet.
#[test]
fn an_operation_after_a_zap_flushes_or_finds_it_flushed() {
    model(4, || {
        let world = World::<SmallStage2<2>>::new();
        world.fault(0, page(0));
        let cached = Arc::new(SpinLock::new(page(0).pfn.0));
        let zap = |world: &World<SmallStage2<2>>, cached: &SpinLock<u64>| {
            let ticket = world.flushes.need_flush();
            ticket.covers(&(Gfn(0)..Gfn(1)));
            let mut unflushed = Unflushed::none();
            (world.step(&mut unflushed)).zap_unnoted(&mut Walk::unbroken(Gfn(0)..Gfn(1)));
            if !unflushed.is_empty() || ticket.others_need(Level::MEGA.pages()) {
                flush_a_tlb(world, cached);
            }
            drop(ticket);
            assert_eq!(*cached.lock(wait), 0, "the page is used after the zap");
        };
        let (other, tlb) = (world.clone(), cached.clone());
        let thread = spawn(move || zap(&other, &tlb));
        zap(&world, &cached);
        thread.join().unwrap();
    });
}
