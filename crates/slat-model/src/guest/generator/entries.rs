//! Generates page-table entries. Most entries reference a table of a suitable kind, and most grant rights.

use super::Generator;
use crate::guest::entry::{A, D, G, P, PS, RW, US, XD};
use crate::guest::layout::*;
use crate::guest::registers::PHYSICAL_BITS;

impl Generator {
    /// Returns an address, `offset` bytes after the beginning of the entry at `index`, and the bytes to store there.
    /// They are the end of a new value of this entry, and the beginning of a new value of the next entry.
    pub(super) fn entries(&mut self, frame: u64, index: u64, offset: u64) -> (u64, [u8; 8]) {
        let mut values = [0; 16];
        let size = entry_size(frame);
        for value in values.chunks_exact_mut(size) {
            let entry = match frame {
                POINTERS => self.pointer(),
                _ => self.entry(frame, size),
            };
            value.copy_from_slice(&entry.to_le_bytes()[..size]);
        }
        let operand = std::array::from_fn(|i| values[offset as usize + i]);
        ((frame << 12) + size as u64 * index + offset, operand)
    }

    /// Returns an entry of `size` bytes for the table in a frame.
    fn entry(&mut self, frame: u64, size: usize) -> u64 {
        let rng = &mut self.rng;
        let tables = if size == 4 { TABLES_OF_4 } else { TABLES_OF_8 };
        let is_root = tables.roots.contains(&frame);
        let is_directory = tables.directories.contains(&frame);
        let large = rng.one_in(if is_root { 50 } else { 4 });
        let mut entry = match rng.below(16) {
            // Bit 13 of this entry is bit 32 of the page's address (PSE-36).
            _ if large && size == 4 && rng.one_in(3) => 1 << 13,
            _ if large => rng.pick(&LARGE),
            0..6 if is_root => in_range(rng, &tables.roots) << 12,
            6..14 if is_root => in_range(rng, &tables.directories) << 12,
            0..10 if is_directory => in_range(rng, &tables.leaves) << 12,
            0..6 | 14 => in_range(rng, &tables.all()) << 12,
            6..12 => in_range(rng, &frames_of(DATA)) << 12,
            12 => in_range(rng, &frames_of(READ_ONLY)) << 12,
            13 => in_range(rng, &frames_of(HIGH)) << 12,
            _ if rng.one_in(2) => rng.pick(&HOLES) << 12,
            _ => in_range(rng, &tables.leaves) << 12,
        };
        let mut flag = |bit: u64, of_64: u64| if rng.below(64) < of_64 { bit } else { 0 };
        entry |=
            flag(P, 62) | flag(RW, 56) | flag(US, 56) | flag(A, 30) | flag(D, 24) | flag(G, 16);
        if large {
            entry |= PS;
        }
        if size == 8 {
            entry |= flag(XD, 3);
            entry |= match rng.below(128) {
                0 => 1 << PHYSICAL_BITS,
                1..20 => rng.below(16) << 59,
                _ => 0,
            };
        } else if large {
            entry |= flag(1 << 20, 3);
        }
        entry
    }

    /// Returns a page-directory-pointer entry.
    fn pointer(&mut self) -> u64 {
        let present = if self.rng.one_in(24) { 0 } else { P };
        let reserved = if self.rng.one_in(100) { RW } else { 0 };
        let tables = match self.rng.one_in(4) {
            true => TABLES_OF_8.all(),
            false => TABLES_OF_8.directories,
        };
        in_range(&mut self.rng, &tables) << 12 | present | reserved
    }
}
