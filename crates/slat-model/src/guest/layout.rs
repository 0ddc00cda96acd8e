//! The layout of the guest's memory.
//!
//! The first slots contain tables. Any entry of a table may reference any table, including its own, so a table is used
//! at several levels and by several roots. Large pages map the slots that are at 2 MiB, 4 MiB, 6 MiB, 1 GiB and 4 GiB.

use std::ops::Range;

use slat::{Gpa, Region, SlotFlags};

use crate::host::HostMemory;
use crate::rng::Rng;

/// A slot of the guest: its first frame, its number of pages, and its flags.
pub(super) struct Home {
    pub gfn: u64,
    pub pages: u64,
    pub read_only: bool,
}

const fn home(gfn: u64, pages: u64) -> Home {
    Home {
        gfn,
        pages,
        read_only: false,
    }
}

/// The memslots of the guest, by id.
pub(super) const SLOTS: [Home; 9] = [
    home(0, 8),
    home(8, 8),
    home(16, 32),
    Home {
        gfn: 48,
        pages: 8,
        read_only: true,
    },
    home(0x200, 16),
    home(0x400, 16),
    home(0x600, 16),
    home(0x4_0000, 16),
    home(0x10_0000, 16),
];
/// The id of the slot whose pages are not tables.
pub(super) const DATA: usize = 2;
/// The id of the read-only slot. Two of its pages are tables.
pub(super) const READ_ONLY: usize = 3;
/// The id of the slot in the second large page.
pub(super) const HIGH: usize = 4;
/// The number of pages of host memory. Each slot has twice its size in host memory, so that it can be created again
/// with other memory.
pub(super) const HOST_PAGES: u64 = 272;

/// Guest frames that hold mainly tables with entries of one size. They are grouped by the level at which each frame is
/// usually used.
pub(super) struct Tables {
    /// Frames for roots, and for tables two levels above the leaves.
    pub roots: Range<u64>,
    /// Frames for tables that reference the lowest tables, and map large pages.
    pub directories: Range<u64>,
    /// Frames for tables that map 4 KiB pages.
    pub leaves: Range<u64>,
}

impl Tables {
    /// Returns the frames of all these tables.
    pub fn all(&self) -> Range<u64> {
        self.roots.start..self.leaves.end
    }
}

/// Tables with entries of 4 bytes. These tables have two levels, so directories are roots.
pub(super) const TABLES_OF_4: Tables = Tables {
    roots: 0..0,
    directories: 0..3,
    leaves: 3..6,
};
/// Tables with entries of 8 bytes.
pub(super) const TABLES_OF_8: Tables = Tables {
    roots: 6..10,
    directories: 10..13,
    leaves: 13..15,
};
/// The frame with the tables of PAE page-directory-pointer entries.
pub(super) const POINTERS: u64 = 15;
/// The frame at which a moved slot begins.
pub(super) const ELSEWHERE: u64 = 0x70;
/// Two frames that are in no slot.
pub(super) const HOLES: [u64; 2] = [60, 0x300];
/// Physical addresses that large pages map.
pub(super) const LARGE: [u64; 8] = [
    0,
    0,
    0x20_0000,
    0x40_0000,
    0x60_0000,
    0x4000_0000,
    0x4000_0000,
    0x8000_0000,
];

/// The indices in a table whose entries are used.
pub(super) const INDICES: [u64; 5] = [0, 1, 2, 3, 511];
/// The indices of 4-byte entries that are used. At level 1 they reach both halves of a 4 MiB page.
pub(super) const INDICES_OF_4: [u64; 7] = [0, 1, 2, 3, 0x200, 0x205, 1023];
/// The indices of page-directory-pointer entries that are used: four tables of four entries.
const INDICES_OF_POINTERS: [u64; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// Returns a number in `range`.
pub(super) fn in_range(rng: &mut Rng, range: &Range<u64>) -> u64 {
    range.start + rng.below(range.end - range.start)
}

/// Returns the frames of a slot at its usual address.
pub(super) fn frames_of(slot: usize) -> Range<u64> {
    let Home { gfn, pages, .. } = SLOTS[slot];
    gfn..gfn + pages
}

/// Returns the size of the entries that are written to a frame.
pub(super) fn entry_size(frame: u64) -> usize {
    match TABLES_OF_4.all().contains(&frame) {
        true => 4,
        false => 8,
    }
}

/// Returns the indices of the entries that are used in the table in a frame.
pub(super) fn indices_in(frame: u64) -> &'static [u64] {
    match frame {
        POINTERS => &INDICES_OF_POINTERS,
        _ if TABLES_OF_4.all().contains(&frame) => &INDICES_OF_4,
        _ => &INDICES,
    }
}

/// The largest number of address spaces.
pub(super) const SPACES: u64 = 6;
/// The number of virtual addresses in use at one time.
pub(super) const ADDRESSES: usize = 14;

/// Returns the region of a slot at its usual address, whose first host page is at `offset` in the slot's host memory.
pub(super) fn region(slot: usize, offset: u64) -> Region {
    let before: u64 = SLOTS[..slot].iter().map(|home| 2 * home.pages).sum();
    let home = &SLOTS[slot];
    let flags = match home.read_only {
        true => SlotFlags::READONLY,
        false => SlotFlags(0),
    };
    Region::new(
        slot as u32,
        Gpa(home.gfn << 12),
        home.pages << 12,
        HostMemory::hva(before + offset),
    )
    .with_flags(flags)
}
