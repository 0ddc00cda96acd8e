//! The tables of a guest with its own paging, in the format of x86's 4-level paging. This module also has the
//! functions by which the engine accesses the tables.
//!
//! Entries of level 3 map the first 4 GiB to themselves, except for the window, which is the third GiB. In the window,
//! entries of level 2 map pages of 2 MiB, except for the first entry, which refers to a table of level 1. Every entry
//! has its accessed and dirty flag.

use core::convert::Infallible;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use slat::guest_walk::{GuestPaging, Mode};
use slat::{ENTRIES, Gpa, HostWords, Hpa, PAGE_SIZE};

use crate::bench::GIB;

/// The address of the slot with the tables.
pub(crate) const TABLES: Gpa = Gpa(0x2000_0000);
/// The number of tables: two roots, each with a table of level 3, and then one table of level 2 and one table of level
/// 1. The tables of level 3 differ in the window.
pub(crate) const PAGES: u64 = 6;
/// The address of the window.
pub(crate) const WINDOW: Gpa = Gpa(2 << 30);

/// An address that no slot contains, and no guest accesses.
pub(crate) const NOWHERE: Gpa = Gpa(0xf800_0000);

/// The flags present, writable, user, accessed and dirty: those of an entry with all rights that is of level 1 or
/// refers to a table.
pub(crate) const USED: u64 = 0x67;
/// The flags of a leaf of a higher level.
pub(crate) const LARGE: u64 = USED | 0x80;

/// Returns the address of table `number` of [`PAGES`].
pub(crate) fn table(number: u64) -> Gpa {
    Gpa(TABLES.0 + number * PAGE_SIZE)
}

/// Returns the root of an address space, 0 or 1. In address space 1, the window is one page of 1 GiB.
pub(crate) fn root(space: u64) -> Gpa {
    table(2 * space)
}

/// The numbers of the window's tables in the first address space.
pub(crate) const LEVEL_2: u64 = 4;
pub(crate) const LEVEL_1: u64 = 5;

/// Writes the tables to `at`, the memory of their slot. The window maps the memory from `data` on. `data` is a multiple
/// of 1 GiB.
pub(crate) fn write(at: Hpa, data: Gpa) {
    let put = |number: u64, index: u64, entry: u64| {
        let word = (at.0 + number * PAGE_SIZE + index * 8) as *mut u64;
        // SAFETY: the word is in the guests' memory, which no guest uses yet.
        unsafe { word.write_volatile(entry) };
    };
    for number in 0..PAGES {
        (0..ENTRIES as u64).for_each(|index| put(number, index, 0));
    }
    for space in 0..2 {
        let level_3 = 2 * space + 1;
        put(2 * space, 0, table(level_3).0 | USED);
        for gib in [0, 1, 3] {
            put(level_3, gib, (gib * GIB) | LARGE);
        }
    }
    put(1, WINDOW.0 / GIB, table(LEVEL_2).0 | USED);
    put(3, WINDOW.0 / GIB, data.0 | LARGE);
    put(LEVEL_2, 0, table(LEVEL_1).0 | USED);
    for index in 1..ENTRIES as u64 {
        put(LEVEL_2, index, (data.0 + (index << 21)) | LARGE);
    }
    for index in 0..ENTRIES as u64 {
        put(LEVEL_1, index, (data.0 + index * PAGE_SIZE) | USED);
    }
}

/// Returns the state of a guest that has loaded `cr3`.
pub(crate) fn paging(cr3: u64, physical_bits: u32) -> GuestPaging {
    GuestPaging {
        cr3,
        mode: Mode::Level4,
        user: false,
        write_protect: true,
        no_execute: true,
        smep: false,
        smap: false,
        pkru: 0,
        pdptes: None,
        physical_bits,
        reserves_table_global: false,
    }
}

/// Accesses memory by its physical addresses.
pub(crate) struct Words;

impl HostWords for Words {
    type Error = Infallible;

    fn read(&mut self, host: Hpa, size: usize) -> Result<u64, Infallible> {
        // SAFETY: the engine asks for memory that backs a slot, which is never freed, by aligned addresses.
        Ok(unsafe {
            match size {
                4 => (*(host.0 as *const AtomicU32)).load(Relaxed).into(),
                _ => (*(host.0 as *const AtomicU64)).load(Relaxed),
            }
        })
    }

    fn compare_exchange(
        &mut self,
        host: Hpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Infallible> {
        // SAFETY: the engine asks for memory that backs a slot, which is never freed, by aligned addresses.
        Ok(unsafe {
            match size {
                4 => (*(host.0 as *const AtomicU32))
                    .compare_exchange(old as u32, new as u32, AcqRel, Relaxed)
                    .is_ok(),
                _ => (*(host.0 as *const AtomicU64))
                    .compare_exchange(old, new, AcqRel, Relaxed)
                    .is_ok(),
            }
        })
    }
}
