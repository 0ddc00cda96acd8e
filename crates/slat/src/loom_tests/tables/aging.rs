//! Aging, which takes no lock, concurrent with operations that change the same entries under the lock of
//! their table.

use super::*;

impl<F: Format> World<F> {
    /// Clears the accessed bits of all pages, in a reader section. Returns the number of leaves that had the bit set.
    fn age(&self) -> u64 {
        let me = self.readers.register().unwrap();
        me.enter(&self.readers, 0);
        let mut walk = Walk::unbroken(Gfn(0)..Gfn(4));
        let mut young = 0;
        self.step(&mut Unflushed::none())
            .age(&mut walk, true, |aged| {
                young += u64::from(aged.young.count_ones())
            });
        me.leave();
        self.readers.release(me);
        young
    }

    fn with_small_leaves() -> Arc<Self> {
        let world = Self::new();
        world.fault(0, page(0));
        world.fault(1, page(1));
        world
    }
}

/// Returns `leaf` without its accessed bit.
fn unmarked(leaf: Leaf) -> Leaf {
    Leaf {
        accessed: false,
        ..leaf
    }
}

/// Checks that pages 0 and 1 are mapped as at the beginning.
fn all_is_mapped<F: Format>(world: &World<F>) {
    for n in [0, 1] {
        assert_eq!(unmarked(world.leaf(n)), unmarked(page(n)));
    }
}

/// An entry that is cleared during aging stays cleared, and names its flush. Its table is not freed before the aging
/// walk has ended its section.
fn nothing_comes_back<F: Format>() {
    let nothing = |world: &World<F>| {
        assert_eq!(world.find(0), Entry::Empty);
        let named = F::cleared_by(world.lookup(0).bits);
        assert_eq!(named.is_some_and(|flush| flush > 0), F::BREAK_BEFORE_MAKE);
    };
    let zap_page: fn(&World<F>) = |world| world.zap(0..1);
    let zap_all: fn(&World<F>) = |world| world.zap(0..4);
    for prepare in [World::with_small_leaves, World::with_huge_leaf] {
        for zap in [zap_page, zap_all] {
            two(2, prepare, |world| _ = world.age(), zap, nothing);
        }
    }
}

#[test]
fn nothing_comes_back_that_is_zapped_beside_aging() {
    nothing_comes_back::<Small<2>>();
}

#[test]
fn a_cleared_entry_keeps_the_flush_that_it_names_beside_aging() {
    nothing_comes_back::<SmallStage2<2>>();
}

#[test]
fn a_leaf_that_is_split_beside_aging_stays_mapped() {
    let split: fn(&World<Small<2>>) = |world| _ = world.fault(0, page(0));
    for change in [split, split_all] {
        two(
            2,
            World::with_huge_leaf,
            |world| _ = world.age(),
            change,
            all_is_mapped,
        );
    }
}

#[test]
fn a_table_that_becomes_a_huge_leaf_beside_aging_stays_mapped() {
    two(
        2,
        World::<Small<2>>::with_small_leaves,
        |world| _ = world.age(),
        World::collapse,
        all_is_mapped,
    );
    two(
        2,
        World::<SmallStage2<2>>::with_small_leaves,
        |world| _ = world.age(),
        World::collapse,
        all_is_mapped,
    );
}

#[test]
fn a_leaf_that_gets_more_rights_beside_aging_has_them() {
    let read_only = Leaf {
        write: false,
        ..page(0)
    };
    model(2, move || {
        let world = World::<Small<2>>::new();
        world.fault(0, read_only);
        let other = world.clone();
        let aging = spawn(move || other.age());
        world.fault(0, page(0));
        aging.join().unwrap();
        assert!(world.leaf(0).write);
    });
}

#[test]
fn two_threads_that_age_count_a_leaf_once() {
    model(3, || {
        let world = World::<Small<2>>::with_huge_leaf();
        let other = world.clone();
        let aging = spawn(move || other.age());
        let young = world.age() + aging.join().unwrap();
        assert_eq!(young, 1);
        assert!(!world.leaf(0).accessed);
    });
}
