//! Tests of the tree, for formats whose page walkers set accessed and dirty bits and for formats whose walkers do not.

use std::sync::atomic::AtomicBool;
use std::thread;

use core::ops::Range;

use super::*;
use crate::format::{
    Entry, Ept, Ept5, Leaf, MemoryType, Npt, Privilege, Stage2, Stage2Kib16, Stage2Kib64, Sv48x4,
    Sv57x4, all_gfns,
};
use crate::platform::VmId;
use crate::policy::SplitWalk;
use crate::sync::atomic::Ordering::*;
use crate::sync::{Guarded, InSection};
use crate::table::heap_platform::Heap;
use crate::vm::range_op::{Step, Unflushed};
use crate::{Level, ZappedLeaf};

/// A tree whose users count as being in one reader section during the whole test.
struct World<F: Format>(Guarded<Tree<Heap, F>>);

type Mapping<'a, F> = &'a World<F>;

fn tree<F: Format>() -> World<F> {
    let flushes = Shared::try_new(Flushes::default()).unwrap();
    let frames = Shared::try_new(TableFrames::new(VmId(0))).unwrap();
    World(Guarded::new(
        Tree::new(Arc::new(Heap::new(F::GRANULE)), frames, flushes).unwrap(),
    ))
}

fn section() -> InSection<'static> {
    // SAFETY: only tests with one thread free tables.
    unsafe { InSection::assume() }
}

impl<F: Format> World<F> {
    fn step<'s>(&'s self, unflushed: &'s mut Unflushed) -> Step<'s, Tree<Heap, F>> {
        Step::new(&self.0, unflushed, section())
    }

    fn lookup(&self, gfn: u64) -> Found<'_> {
        Tree::lookup(self, Gfn(gfn))
    }
}

impl<F: Format> core::ops::Deref for World<F> {
    type Target = Tree<Heap, F>;
    fn deref(&self) -> &Tree<Heap, F> {
        self.0.get(section())
    }
}

/// Makes the record of a flush of the region of `level` around `gfn`. No page walker uses these tables, so there is
/// nothing to flush.
fn flush<F: Format>(tree: Mapping<'_, F>, gfn: u64, level: Level) -> Flushed {
    Flushes::done(F::GRANULE.block(Gfn(gfn), level), tree.flushes.begin())
}

/// Splits the huge leaves of `range`. Returns the number of leaves split, by level.
fn split<F: Format>(tree: Mapping<'_, F>, range: Range<u64>, how: SplitWalk) -> LeafCounts {
    let mut frames = FrameCache::new(tree.frames.clone());
    let mut splits = LeafCounts::default();
    let mut broken = std::vec::Vec::new();
    let mut walk = Walk::unbroken(Gfn(range.start)..Gfn(range.end));
    while !walk.is_done() {
        frames.fill(&*tree.platform, 3).unwrap();
        let mut path = Path::new(&mut frames);
        let mut unflushed = Unflushed::none();
        tree.step(&mut unflushed)
            .split(&mut walk, how, |_, _| true, &mut path, &mut broken);
        while let Some((gfn, level)) = broken.pop() {
            path.flushed = flush(tree, gfn.0, level);
            assert!(tree.mend(gfn, level, &mut path));
        }
        for (sum, splits) in splits.iter_mut().zip(path.splits) {
            *sum += splits;
        }
    }
    frames.release(&*tree.platform);
    splits
}

const LEAF: Leaf = Leaf {
    pfn: Pfn(0),
    write: true,
    execute: true,
    may_write: false,
    may_execute: false,
    accessed: true,
    dirty: true,
    memory: MemoryType::WriteBack,
    privilege: Privilege::USER,
};

/// Maps `gfn`, by a leaf of `level` like `leaf`, to the frame `leaf.pfn` plus `gfn`. Flushes, mends and retries like a
/// fault.
fn map<F: Format>(
    tree: Mapping<'_, F>,
    gfn: u64,
    level: Level,
    leaf: Leaf,
) -> Result<Installed, Retry> {
    let mut frames = FrameCache::new(tree.frames.clone());
    frames.fill(&*tree.platform, FrameCache::FAULT).unwrap();
    let leaf = Leaf {
        pfn: leaf.pfn.add(gfn),
        ..leaf
    };
    let mut flushed = Flushed::default();
    let mapped = loop {
        frames.fill(&*tree.platform, FrameCache::FAULT).unwrap();
        let mut path = Path::new(&mut frames);
        path.flushed = flushed.clone();
        let at = &mut tree.cursor(Gfn(gfn));
        match tree.map(at, level, leaf, &mut path, || true, || {}) {
            Err(Retry::MustMend(level)) => {
                while !tree.mend(Gfn(gfn), level, &mut path) {
                    path.flushed = flush(tree, gfn, level);
                }
            }
            Err(Retry::Unflushed(cleared)) => flushed = flush(tree, gfn, cleared),
            Err(Retry::Broken) => thread::yield_now(),
            mapped => break mapped,
        }
    };
    frames.release(&*tree.platform);
    mapped
}

/// Returns the frame to which `gfn` is mapped.
fn pfn<F: Format>(tree: Mapping<'_, F>, gfn: u64) -> Option<u64> {
    let found = tree.lookup(gfn);
    match found.entry::<F>() {
        Entry::Leaf(leaf) => Some(leaf.pfn.0 + F::GRANULE.page_in(Gfn(gfn), found.level)),
        _ => None,
    }
}

fn zap<F: Format>(tree: Mapping<'_, F>, gfns: Range<u64>) -> Unflushed {
    let mut unflushed = Unflushed::none();
    let mut walk = Walk::unbroken(Gfn(gfns.start)..Gfn(gfns.end));
    tree.step(&mut unflushed).zap_unnoted(&mut walk);
    unflushed
}

fn write_protect<F: Format>(
    tree: Mapping<'_, F>,
    gfns: Range<u64>,
    wanted: impl Fn(Gfn) -> bool,
) -> LeafCounts {
    let mut unflushed = Unflushed::none();
    let mut walk = Walk::unbroken(Gfn(gfns.start)..Gfn(gfns.end));
    tree.step(&mut unflushed)
        .write_protect(&mut walk, |gfn, _| wanted(gfn));
    unflushed.changed
}

fn free<F: Format>(tree: Mapping<'_, F>, unflushed: Unflushed) -> LeafCounts {
    // SAFETY: tests that use this have one thread.
    unsafe {
        unflushed
            .detached
            .free::<_, F>(&*tree.platform, &tree.frames)
    }
    .leaves
}

/// Runs generic tests for formats that differ in who sets dirty bits, in break-before-make, and in the size of roots
/// and pages.
macro_rules! for_formats {
    ($($test:ident)*) => {$(
        mod $test {
            use super::*;
            #[test]
            fn ept() { super::behaviour::$test::<Ept>() }
            #[test]
            fn ept_with_5_levels() { super::behaviour::$test::<Ept5>() }
            #[test]
            fn npt() { super::behaviour::$test::<Npt>() }
            #[test]
            fn stage2() { super::behaviour::$test::<Stage2<48>>() }
            #[test]
            fn stage2_dirty_bits() { super::behaviour::$test::<Stage2<48, true>>() }
            #[test]
            fn stage2_with_52_bits() { super::behaviour::$test::<Stage2<52>>() }
            #[test]
            fn stage2_of_16k() { super::behaviour::$test::<Stage2Kib16<52>>() }
            #[test]
            fn stage2_of_64k() { super::behaviour::$test::<Stage2Kib64<52>>() }
            #[test]
            fn sv48x4() { super::behaviour::$test::<Sv48x4>() }
            #[test]
            fn sv57x4() { super::behaviour::$test::<Sv57x4>() }
        }
    )*};
}

for_formats! {
    a_huge_leaf_on_the_path_is_split_in_place
    a_split_goes_down_to_pages_everywhere_in_its_range_only
    widening_keeps_all_rights
    a_stale_leaf_is_not_installed
    a_detached_table_stays_until_it_is_freed
    a_zap_removes_whole_leaves_and_whole_tables
    a_conflicting_entry_is_zapped_first
    a_cleared_entry_is_replaced_after_its_flush
    a_walk_resumes_where_it_stopped
    the_platform_hears_of_every_zapped_leaf_and_its_marks
    write_protection_remembers_the_right_to_write
}

mod behaviour {
    use super::*;

    pub fn a_huge_leaf_on_the_path_is_split_in_place<F: Format>() {
        let n = F::GRANULE.pages(Level::MEGA);
        let tree = tree::<F>();
        assert!(matches!(
            map(&tree, n * n, Level::GIGA, LEAF),
            Ok(Installed::New)
        ));
        let gfn = n * n + 5 * n + 7;
        assert!(matches!(
            map(&tree, gfn, Level::PAGE, LEAF),
            Ok(Installed::Spurious)
        ));
        let level = |gfn| tree.lookup(gfn).level;
        assert_eq!(level(gfn), Level::PAGE);
        assert_eq!(level(gfn + n - 12), Level::PAGE);
        assert_eq!(level(gfn + n), Level::MEGA);
        for gfn in (n * n..2 * n * n).step_by(97 * n as usize / 512) {
            assert_eq!(pfn(&tree, gfn), Some(gfn));
        }
    }

    pub fn a_split_goes_down_to_pages_everywhere_in_its_range_only<F: Format>() {
        let n = F::GRANULE.pages(Level::MEGA);
        let tree = tree::<F>();
        for base in [0, n, 2 * n, 3 * n] {
            let _ = map(&tree, base, Level::MEGA, LEAF);
        }
        let splits = [
            SplitWalk::Default,
            SplitWalk::Full,
            SplitWalk::SkipLastLevel,
        ]
        .map(|how| split(&tree, n..3 * n, how));
        assert_eq!(splits, [[0, 2, 0], [0; 3], [0; 3]]);
        let level = |gfn| tree.lookup(gfn).level.0;
        assert_eq!([0, n - 1, n, 3 * n - 1, 3 * n].map(level), [2, 2, 1, 1, 2]);
        assert!((0..4 * n).all(|gfn| pfn(&tree, gfn) == Some(gfn)));
    }

    pub fn widening_keeps_all_rights<F: Format>() {
        let tree = tree::<F>();
        let read = Leaf {
            write: false,
            dirty: false,
            ..LEAF
        };
        assert!(matches!(
            map(&tree, 7, Level::PAGE, read),
            Ok(Installed::New)
        ));
        assert!(matches!(
            map(&tree, 7, Level::PAGE, read),
            Ok(Installed::Spurious)
        ));
        assert!(matches!(
            map(&tree, 7, Level::PAGE, LEAF),
            Ok(Installed::Widened)
        ));
        // A new leaf with fewer rights removes no right from the old leaf.
        assert!(matches!(
            map(&tree, 7, Level::PAGE, read),
            Ok(Installed::Spurious)
        ));
        let Entry::Leaf(leaf) = tree.lookup(7).entry::<F>() else {
            panic!("it is not mapped")
        };
        assert!(leaf.write && !leaf.may_write);
    }

    pub fn a_stale_leaf_is_not_installed<F: Format>() {
        let tree = tree::<F>();
        let mut frames = FrameCache::new(tree.frames.clone());
        frames.fill(&*tree.platform, FrameCache::FAULT).unwrap();
        let mut path = Path::new(&mut frames);
        let done = || panic!("`done` was called, but no leaf installed");
        let at = &mut tree.cursor(Gfn(7));
        let mapped = tree.map(at, Level::PAGE, LEAF, &mut path, || false, done);
        assert!(matches!(mapped, Err(Retry::Stale)));
        assert_eq!(pfn(&tree, 7), None);
        let at = &mut tree.cursor(Gfn(0));
        let absent = tree.map_absent(at, Level::PAGE, 8, LEAF, &mut path, || false);
        assert!(absent == Err(Retry::Stale) && pfn(&tree, 0).is_none());
        frames.release(&*tree.platform);
    }

    pub fn a_detached_table_stays_until_it_is_freed<F: Format>() {
        let n = F::GRANULE.pages(Level::MEGA);
        let tree = tree::<F>();
        for gfn in n..2 * n {
            let _ = map(&tree, gfn, Level::PAGE, LEAF);
        }
        let live = tree.platform.live();
        let reached = tree.table(frame_of(&tree, n + 88));
        let unflushed = zap(&tree, n..2 * n);
        assert_eq!(pfn(&tree, n + 88), None);
        // A walker that reached the table before it was detached still finds the leaf in it.
        let bits = reached.entry(88).load(Relaxed);
        assert!(
            matches!(F::decode(bits, Level::PAGE), Entry::Leaf(leaf) if leaf.pfn == Pfn(n + 88))
        );
        assert_eq!(tree.platform.live(), live);
        assert_eq!(free(&tree, unflushed), [n, 0, 0]);
        assert_eq!(tree.platform.live(), live - 1);
    }

    pub fn a_zap_removes_whole_leaves_and_whole_tables<F: Format>() {
        let n = F::GRANULE.pages(Level::MEGA);
        let tree = tree::<F>();
        let _ = map(&tree, 0, Level::MEGA, LEAF);
        for gfn in [n, n + 1, 2 * n - 1, 2 * n] {
            let _ = map(&tree, gfn, Level::PAGE, LEAF);
        }
        let unflushed = zap(&tree, n - 1..n + 1);
        assert_eq!(unflushed.zapped, [1, 1, 0]);
        assert_eq!(free(&tree, unflushed), [0; 3]);
        let mapped = |tree: Mapping<'_, F>| {
            [0, n - 1, n, n + 1, 2 * n - 1, 2 * n].map(|gfn| pfn(tree, gfn).is_some() as u8)
        };
        assert_eq!(mapped(&tree), [0, 0, 0, 1, 1, 1]);
        let unflushed = zap(&tree, 0..2 * n);
        assert!(!unflushed.is_empty());
        assert_eq!(free(&tree, unflushed), [2, 0, 0]);
        assert_eq!(mapped(&tree), [0, 0, 0, 0, 0, 1]);
        assert!(zap(&tree, 0..2 * n).is_empty());
        let everything = zap(&tree, 0..all_gfns::<F>().end.0);
        assert_eq!(free(&tree, everything), [1, 0, 0]);
        assert_eq!(tree.platform.live(), F::ROOT_TABLES);
    }

    pub fn a_conflicting_entry_is_zapped_first<F: Format>() {
        let n = F::GRANULE.pages(Level::MEGA);
        let tree = tree::<F>();
        let other = Leaf {
            pfn: Pfn(1 << 20),
            ..LEAF
        };
        let _ = map(&tree, 7, Level::PAGE, LEAF);
        assert!(matches!(
            map(&tree, 7, Level::PAGE, other),
            Err(Retry::Conflict(_))
        ));
        assert_eq!(pfn(&tree, 7), Some(7));
        let _ = zap(&tree, 7..8);
        assert!(matches!(
            map(&tree, 7, Level::PAGE, other),
            Ok(Installed::New)
        ));
        // A huge leaf cannot replace a table of small leaves: there is a conflict.
        assert!(matches!(
            map(&tree, 0, Level::MEGA, LEAF),
            Err(Retry::Conflict(_))
        ));
        let unflushed = zap(&tree, 0..n);
        assert_eq!(free(&tree, unflushed), [1, 0, 0]);
        assert!(matches!(
            map(&tree, 0, Level::MEGA, LEAF),
            Ok(Installed::New)
        ));
    }

    /// As long as a ticket covers a cleared entry, only a thread that has itself flushed the entry may install a leaf
    /// in it.
    pub fn a_cleared_entry_is_replaced_after_its_flush<F: Format>() {
        let n = F::GRANULE.pages(Level::MEGA);
        let tree = tree::<F>();
        for gfn in [7, 8, n + 88] {
            let _ = map(&tree, gfn, Level::PAGE, LEAF);
        }
        let ticket = tree.flushes.need_flush();
        ticket.covers(&(Gfn(7)..Gfn(8)));
        let _ = zap(&tree, 7..8);
        let mut frames = FrameCache::new(tree.frames.clone());
        frames.fill(&*tree.platform, FrameCache::FAULT).unwrap();
        let mut try_to_map = |gfn: u64, flushed: &Flushed| {
            let mut path = Path::new(&mut frames);
            path.flushed = flushed.clone();
            let at = &mut tree.cursor(Gfn(gfn));
            tree.map(at, Level::PAGE, LEAF, &mut path, || true, || ())
        };
        let nothing = Flushed::default();
        let elsewhere = flush(&tree, 8, Level::PAGE);
        for flushed in [&nothing, &elsewhere] {
            let unflushed = matches!(try_to_map(7, flushed), Err(Retry::Unflushed(_)));
            assert_eq!(unflushed, F::BREAK_BEFORE_MAKE);
            if !unflushed {
                let _ = zap(&tree, 7..8);
            }
        }
        assert!(matches!(
            try_to_map(7, &flush(&tree, 7, Level::PAGE)),
            Ok(Installed::New)
        ));
        // Clear entry 7 again, which names a later flush then, and entry n + 88, which the ticket does not cover.
        let mine = flush(&tree, n + 88, Level::MEGA);
        let _ = (zap(&tree, 7..8), zap(&tree, n + 88..n + 89));
        assert!(matches!(try_to_map(n + 88, &nothing), Ok(Installed::New)));
        let unflushed = matches!(try_to_map(7, &mine), Err(Retry::Unflushed(_)));
        assert_eq!(unflushed, F::BREAK_BEFORE_MAKE);
        drop(ticket);
        assert!(matches!(
            try_to_map(7, &nothing),
            Ok(Installed::New | Installed::Spurious)
        ));
        frames.release(&*tree.platform);
    }

    /// A leaf is reported whether it is zapped alone, with its table, or with the tree.
    pub fn the_platform_hears_of_every_zapped_leaf_and_its_marks<F: Format>() {
        let n = F::GRANULE.pages(Level::MEGA);
        let tree = tree::<F>();
        let platform = tree.platform.clone();
        let told = || std::mem::take(&mut *platform.zapped.lock().unwrap());
        let clean = Leaf {
            write: false,
            accessed: false,
            dirty: false,
            ..LEAF
        };
        for (gfn, level, leaf) in [
            (1, Level::PAGE, clean),
            (2, Level::PAGE, LEAF),
            (n, Level::MEGA, LEAF),
            (2 * n, Level::PAGE, clean),
            (2 * n + 1, Level::PAGE, LEAF),
            (n * n, Level::GIGA, clean),
        ] {
            let _ = map(&tree, gfn, level, leaf);
        }
        let marks = |leaf: ZappedLeaf| (leaf.pfn.0, leaf.level.0, leaf.accessed, leaf.dirty);
        let heard = || told().into_iter().map(marks).collect::<std::vec::Vec<_>>();
        let _ = free(&tree, zap(&tree, 2..3));
        assert_eq!(heard(), [(2, 1, true, true)]);
        let taken = zap(&tree, 2 * n..3 * n);
        assert_eq!(heard(), [], "CPUs may still be in the table");
        let _ = free(&tree, taken);
        assert_eq!(
            heard(),
            [(2 * n, 1, false, false), (2 * n + 1, 1, true, true)]
        );
        let _ = write_protect(&tree, n..2 * n, |_| true);
        let _ = free(&tree, zap(&tree, n + 188..n + 189));
        assert_eq!(heard(), [(n, 2, true, true)]);
        drop(tree);
        assert_eq!(heard(), [(1, 1, false, false), (n * n, 3, false, false)]);
    }

    /// A walk in many small steps has the same effect as a walk in one step.
    pub fn a_walk_resumes_where_it_stopped<F: Format>() {
        let n = F::GRANULE.pages(Level::MEGA);
        let end = 2 * n + 176;
        let small = (30..end).filter(|gfn| gfn % 3 == 0).count() as u64;
        for step in [5, 6, 7, 100, 600] {
            let tree = tree::<F>();
            for gfn in (0..end).step_by(3) {
                let _ = map(&tree, gfn, Level::PAGE, LEAF);
            }
            let _ = map(&tree, 4 * n, Level::MEGA, LEAF);
            let _ = map(&tree, n * n, Level::GIGA, LEAF);
            let mut walk = Walk::new(Gfn(30)..Gfn(2 * n * n));
            let mut unflushed = Unflushed::none();
            let mut steps = 0;
            while !walk.is_done() {
                let (before, mut left) = (walk.entries, step);
                walk.with_budget(&mut left, |walk| {
                    tree.step(&mut unflushed).write_protect(walk, |_, _| true);
                });
                assert!(walk.entries - before <= u64::from(step));
                steps += 1;
            }
            assert_eq!(unflushed.changed, [small, 1, 1], "by {step}");
            assert!(steps > end / u64::from(step));
            let mut walk = Walk::new(Gfn(30)..Gfn(2 * n * n));
            while !walk.is_done() {
                walk.with_budget(&mut { step }, |walk| {
                    tree.step(&mut unflushed).zap_unnoted(walk)
                });
            }
            let whole = free(&tree, unflushed);
            assert!(
                whole[0] >= (n + 16) / 3,
                "tables in the range are detached as a whole: {whole:?}"
            );
            assert_eq!(pfn(&tree, 27), Some(27));
            assert!(
                (30..end)
                    .chain([4 * n + 52, n * n])
                    .all(|gfn| pfn(&tree, gfn).is_none())
            );
        }
    }

    pub fn write_protection_remembers_the_right_to_write<F: Format>() {
        let n = F::GRANULE.pages(Level::MEGA);
        let tree = tree::<F>();
        let readonly = Leaf {
            write: false,
            dirty: false,
            ..LEAF
        };
        let _ = map(&tree, 1, Level::PAGE, readonly);
        let _ = map(&tree, 2, Level::PAGE, LEAF);
        let _ = map(&tree, 3, Level::PAGE, LEAF);
        let _ = map(&tree, n, Level::MEGA, LEAF);
        let changed = write_protect(&tree, 0..n + 1, |gfn| gfn != Gfn(3));
        assert_eq!(changed, [1, 1, 0]);
        let rights = |gfn| match tree.lookup(gfn).entry::<F>() {
            Entry::Leaf(leaf) => (leaf.write, leaf.may_write),
            other => panic!("{other:?}"),
        };
        let expected = [(false, false), (false, true), (true, false), (false, true)];
        assert_eq!([1, 2, 3, n + 488].map(rights), expected);
        assert_eq!(write_protect(&tree, 0..3, |_| true), [0; 3]);
    }
}

/// In these formats an entry stores the uppermost bits of an address apart from the other bits. So the entries of
/// frames on both sides of a boundary, at which these bits change, are not an arithmetic sequence.
#[test]
fn a_run_of_frames_is_mapped_right_or_not_at_all() {
    fn runs<F: Format>(boundary: u64) {
        let tree = tree::<F>();
        let mut frames = FrameCache::new(tree.frames.clone());
        let mut map = |gfn: u64, first: u64| {
            let leaf = Leaf {
                pfn: Pfn(first),
                ..LEAF
            };
            let mut path = Path::new(&mut frames);
            let at = &mut tree.cursor(Gfn(gfn));
            tree.map_absent(at, Level::PAGE, 8, leaf, &mut path, || true)
        };
        assert_eq!(map(0, boundary - 4), Err(Retry::Stale));
        assert_eq!(map(0, boundary - 8), Ok(8));
        assert_eq!(map(8, boundary), Ok(8));
        frames.release(&*tree.platform);
        let mapped = (0..16).map(|gfn| pfn(&tree, gfn));
        assert!(mapped.eq((boundary - 8..boundary + 8).map(Some)));
    }
    runs::<Stage2<52>>(1 << (50 - 12));
    runs::<Stage2Kib16<52>>(1 << (50 - 14));
    runs::<Stage2Kib64<52>>(1 << (48 - 16));
}

/// Returns the level 1 table on the path to `gfn`.
fn frame_of<F: Format>(tree: Mapping<'_, F>, gfn: u64) -> Pfn {
    let mut frame = lookup::root_table::<F>(tree.context(), Gfn(gfn));
    let mut level = F::TOP;
    while level > Level::PAGE {
        let bits = tree
            .table(frame)
            .entry(F::GRANULE.index(Gfn(gfn), level))
            .load(Acquire);
        let Entry::Table(lower) = F::decode(bits, level) else {
            panic!("no table")
        };
        frame = lower;
        level = level.below();
    }
    frame
}

#[test]
fn a_walker_never_sees_a_page_missing_while_its_leaf_is_split() {
    const GFN: u64 = 1 << 18;
    for round in 0..150 {
        let tree = tree::<Ept>();
        let _ = map(&tree, GFN, Level::GIGA, LEAF);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut gfn = GFN;
                while !stop.load(Relaxed) {
                    gfn = GFN + (gfn + 131) % 4096;
                    assert_eq!(pfn(&tree, gfn), Some(gfn), "a page was missing");
                }
            });
            if round % 2 == 0 {
                (0..8).for_each(|i| _ = map(&tree, GFN + i * 512, Level::PAGE, LEAF));
            } else {
                split(&tree, GFN..GFN + 4096, SplitWalk::SkipLastLevel);
            }
            stop.store(true, Relaxed);
        });
    }
}

#[test]
fn no_dirty_bit_is_lost_to_a_concurrent_protection_or_split() {
    let clean = Leaf {
        accessed: false,
        dirty: false,
        ..LEAF
    };
    let set = Ept::leaf(LEAF, Level::PAGE) & !Ept::leaf(clean, Level::PAGE);
    for round in 0..300 {
        let tree = tree::<Ept>();
        let _ = map(&tree, 512, Level::MEGA, clean);
        let _ = map(&tree, 7, Level::PAGE, clean);
        let entries = [7, 512].map(|gfn| {
            let found = tree.lookup(gfn);
            (found.entry, found.level)
        });
        let was_set = [const { AtomicBool::new(false) }; 2];
        thread::scope(|scope| {
            scope.spawn(|| {
                for ((entry, level), was_set) in entries.iter().zip(&was_set) {
                    // Like a hardware walker, read the entry again before setting the bits.
                    let marked = entry.fetch_update(Relaxed, Relaxed, |bits| {
                        matches!(Ept::decode(bits, *level), Entry::Leaf(leaf) if leaf.write)
                            .then_some(bits | set)
                    });
                    was_set.store(marked.is_ok(), Relaxed);
                }
            });
            if round % 2 == 0 {
                write_protect(&tree, 0..8, |_| true);
                let _ = map(&tree, 600, Level::PAGE, clean);
            } else {
                let _ = map(&tree, 600, Level::PAGE, clean);
                write_protect(&tree, 0..8, |_| true);
            }
        });
        for (gfn, was_set) in [7, 600].into_iter().zip(was_set) {
            let Entry::Leaf(leaf) = tree.lookup(gfn).entry::<Ept>() else {
                panic!("it is not mapped")
            };
            assert_eq!(leaf.dirty, was_set.into_inner(), "gfn {gfn}");
            assert_eq!(leaf.accessed, leaf.dirty);
        }
    }
}

/// After a thread has broken a leaf and flushed, the entry may contain another leaf, which was broken after that flush.
#[test]
fn a_leaf_that_was_broken_again_needs_another_flush_before_it_is_mended() {
    type Arm = Stage2<48>;
    let tree = tree::<Arm>();
    let nothing = Flushed::default();
    let mut frames = FrameCache::new(tree.frames.clone());
    let mut break_it = || {
        frames.fill(&*tree.platform, FrameCache::FAULT).unwrap();
        let mut path = Path::new(&mut frames);
        let at = &mut tree.cursor(Gfn(7));
        let mapped = tree.map(at, Level::PAGE, LEAF, &mut path, || true, || {});
        assert!(matches!(mapped, Err(Retry::MustMend(Level::MEGA))));
    };
    let mut frames_to_mend = FrameCache::new(tree.frames.clone());
    let mut mend = |own: &Flushed| {
        frames_to_mend
            .fill(&*tree.platform, FrameCache::FAULT)
            .unwrap();
        let mut path = Path::new(&mut frames_to_mend);
        path.flushed = own.clone();
        tree.mend(Gfn(7), Level::MEGA, &mut path)
    };
    let _ = map(&tree, 0, Level::MEGA, LEAF);
    break_it();
    assert!(!mend(&nothing), "a walker may have cached the leaf");
    let first = flush(&tree, 7, Level::MEGA);
    let _ = zap(&tree, 0..512);
    assert!(mend(&first), "no broken leaf is there");
    let _ = map(&tree, 0, Level::MEGA, LEAF);
    break_it();
    assert!(!mend(&first), "a walker may have cached the second leaf");
    let beside = flush(&tree, 512, Level::MEGA);
    assert!(!mend(&beside), "that flush was of other frames");
    assert!(mend(&flush(&tree, 7, Level::MEGA)));
    assert_eq!(pfn(&tree, 9), Some(9));
    frames.release(&*tree.platform);
    frames_to_mend.release(&*tree.platform);
}
