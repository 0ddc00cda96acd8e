//! Shadow pages beside a tree ([`crate::shadow`]): CPUs store to the guest's nested tables through leaves of the tree,
//! and read through shadow pages of these tables.

use super::faults::replace_page;
use super::guest_tables::{Cpu, DATA, Guest, OTHER, ROOT, TABLE, beside_host, entry, two_cpus};
use super::hvas;
use crate::MmuKind;
use crate::addr::Level;
use crate::vm::Config;

/// Makes a guest like [`Guest::new`], but with nested tables, and host pages of `level`.
fn guest(level: Level, entries: &[(u64, usize, u64)]) -> Guest {
    let config = Config::default().with_mmu(MmuKind::Tdp).with_nested(true);
    Guest::with_config(config, level, entries)
}

/// The guest's tables: a root that refers to a table with an entry for page 0, and another table for the same page. No
/// table is tracked yet.
const TABLES: &[(u64, usize, u64)] = &[(ROOT, 0, TABLE), (TABLE, 0, DATA), (OTHER, 0, OTHER)];

/// The tree has a writable leaf for each table.
const WRITABLE: fn() -> Guest = || guest(Level::PAGE, TABLES);

/// The tree has no leaf for the root of the tables.
const UNMAPPED: fn() -> Guest = || {
    let guest = WRITABLE();
    drop(guest.vm.invalidate(hvas(ROOT..ROOT + 1)));
    guest
};

/// The tree has a huge leaf for the root of the tables and the first other table.
const HUGE: fn() -> Guest = || guest(Level::MEGA, TABLES);

/// Like [`HUGE`], but the tree has no leaf for the root of the tables and the first other table.
const NO_HUGE: fn() -> Guest = || {
    let guest = HUGE();
    drop(guest.vm.invalidate(hvas(ROOT..TABLE + 1)));
    guest
};

/// The fault of one CPU begins to track the root. At the same time the other CPU stores to the root: through a fault,
/// or through a writable translation that it has cached.
#[test]
fn no_store_goes_unnoticed_when_tracking_begins() {
    for prepare in [WRITABLE, UNMAPPED, HUGE, NO_HUGE] {
        two_cpus(
            2,
            prepare,
            |cpu| _ = cpu.read(0),
            |cpu| cpu.store(ROOT, 0, entry(OTHER)),
            |cpu| assert_eq!(cpu.read(0), Some(OTHER)),
        );
    }
}

/// Like [`WRITABLE`], but the table of level 1 has a shadow page, which is synced.
const SHADOWED: fn() -> Guest = || {
    let guest = WRITABLE();
    guest.on_cpu(|cpu| cpu.read(0));
    guest
};

/// A first store has made the shadow page unsynced, and the tree's leaf for the table writable. One CPU's flush
/// write-protects this leaf again, while the other CPU stores.
#[test]
fn no_store_goes_unnoticed_when_a_table_is_compared() {
    two_cpus(
        1,
        || {
            let guest = SHADOWED();
            guest.on_cpu(|cpu| cpu.store(TABLE, 0, entry(DATA)));
            guest
        },
        Cpu::flush,
        |cpu| {
            cpu.store(TABLE, 0, entry(OTHER));
            cpu.flush();
        },
        |cpu| assert_eq!(cpu.read(0), Some(OTHER)),
    );
}

#[test]
fn no_leaf_of_either_is_left_of_a_page_that_is_invalidated() {
    beside_host(
        2,
        || {
            let guest = SHADOWED();
            // Map the page in the tree, too.
            guest.on_cpu(|cpu| cpu.store(DATA, 1, 0));
            guest
        },
        Cpu::read_twice,
        |guest| replace_page(&guest.vm, DATA, 6),
        |cpu| assert_eq!(cpu.read(0), Some(6)),
    );
}
