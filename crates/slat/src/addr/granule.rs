//! The granule of a format's tables: the size of a page, and also of a table.
//!
//! *Granule* is Arm's word. A table is one page and an entry has 8 bytes, so the granule decides how many bits of an
//! address index a table. The granule is a constant of each [`Format`](crate::Format), so the compiler evaluates the
//! functions of this module. These functions are `inline` because the crate that chooses the format compiles them.

use core::ops::Range;

use super::{Gfn, Gpa, Hpa, Hva, Level, Pfn};

/// The bytes of a page, and of a table, in one format.
///
/// Frame numbers ([`Gfn`], [`Pfn`]) and all other page counts are in pages of the granule of the VM's format. Most
/// tables have 4 KiB; for these there are short forms, like [`Gpa::gfn`] and [`Level::pages`].
///
/// ```
/// use slat::{Gfn, Gpa, Granule, Level};
/// assert_eq!(Granule::Kib4.pages(Level(2)), 512); // of 4 KiB: 2 MiB
/// assert_eq!(Granule::Kib64.pages(Level(2)), 8192); // of 64 KiB: 512 MiB
/// assert_eq!(Granule::Kib16.gfn(Gpa(0x1_0000)), Gfn(4));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Granule {
    /// 4 KiB, on every architecture.
    Kib4,
    /// 16 KiB, on AArch64.
    Kib16,
    /// 64 KiB, on AArch64.
    Kib64,
}

impl Granule {
    /// Returns log2 of the bytes of a page.
    #[inline(always)]
    pub const fn shift(self) -> u32 {
        12 + 2 * self as u32
    }

    /// Returns the bytes of a page, and of a table.
    #[inline(always)]
    pub const fn bytes(self) -> u64 {
        1 << self.shift()
    }

    /// Returns log2 of the number of entries in a table. Tables are smaller in builds for the model checker loom.
    #[inline(always)]
    pub(crate) const fn index_bits(self) -> u32 {
        if cfg!(loom) { 1 } else { self.shift() - 3 }
    }

    /// Returns the number of entries in a table.
    #[inline(always)]
    pub const fn entries(self) -> usize {
        1 << self.index_bits()
    }

    /// Returns log2 of the number of pages that one entry of `level` covers.
    #[inline(always)]
    const fn pages_shift(self, level: Level) -> u32 {
        self.index_bits() * (level.0 as u32 - 1)
    }

    /// Returns the number of pages that one entry of `level` covers.
    #[inline(always)]
    pub const fn pages(self, level: Level) -> u64 {
        1 << self.pages_shift(level)
    }

    /// Returns the index, in a table of `level`, of the entry on the path to `gfn`.
    #[inline(always)]
    pub const fn index(self, gfn: Gfn, level: Level) -> usize {
        (gfn.0 >> self.pages_shift(level)) as usize & (self.entries() - 1)
    }

    /// Returns the first of the frames that one entry of `level` covers around `gfn`.
    #[inline(always)]
    pub const fn align_down(self, gfn: Gfn, level: Level) -> Gfn {
        Gfn(gfn.0 & !(self.pages(level) - 1))
    }

    /// Returns the frames that one entry of `level` covers around `gfn`.
    #[inline(always)]
    pub const fn block(self, gfn: Gfn, level: Level) -> Range<Gfn> {
        let start = self.align_down(gfn, level);
        start..start.add(self.pages(level))
    }

    /// Returns the index of `gfn` among the frames that one entry of `level` covers.
    #[inline(always)]
    pub(crate) const fn page_in(self, gfn: Gfn, level: Level) -> u64 {
        gfn.0 & (self.pages(level) - 1)
    }

    /// Returns the frame that contains `gpa`.
    #[inline(always)]
    pub const fn gfn(self, gpa: Gpa) -> Gfn {
        Gfn(gpa.0 >> self.shift())
    }

    /// Returns the address of the first byte of `gfn`.
    #[inline(always)]
    pub const fn gpa(self, gfn: Gfn) -> Gpa {
        Gpa(gfn.0 << self.shift())
    }

    /// Returns the addresses of `gfns`.
    #[inline(always)]
    pub(crate) const fn gpas(self, gfns: &Range<Gfn>) -> Range<Gpa> {
        self.gpa(gfns.start)..self.gpa(gfns.end)
    }

    /// Returns the frame that contains `hpa`.
    #[inline(always)]
    pub const fn pfn(self, hpa: Hpa) -> Pfn {
        Pfn(hpa.0 >> self.shift())
    }

    /// Returns the address of the first byte of `pfn`.
    #[inline(always)]
    pub const fn hpa(self, pfn: Pfn) -> Hpa {
        Hpa(pfn.0 << self.shift())
    }

    /// Returns the address `pages` pages after `hva`.
    #[inline(always)]
    pub const fn add_pages(self, hva: Hva, pages: u64) -> Hva {
        Hva(hva.0 + (pages << self.shift()))
    }

    /// Returns the number of whole pages from `from` to `to`, which is at or above `from`.
    #[inline(always)]
    pub const fn pages_between(self, from: Hva, to: Hva) -> u64 {
        (to.0 - from.0) >> self.shift()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Granule::*;
    use super::*;

    #[test]
    fn a_level_covers_what_a_table_of_the_level_below_does() {
        for (granule, bytes, entries) in [
            (Kib4, 4096, 512),
            (Kib16, 16384, 2048),
            (Kib64, 65536_u64, 8192_usize),
        ] {
            assert_eq!((granule.bytes(), granule.entries()), (bytes, entries));
            assert_eq!(granule.bytes(), 8 * entries as u64);
            assert_eq!(granule.pages(Level::PAGE), 1);
            for level in (1..=3).map(Level) {
                let above = granule.pages(Level(level.0 + 1));
                assert_eq!(above, granule.pages(level) * entries as u64);
                assert_eq!(granule.index(Gfn(above - 1), level), entries - 1);
                assert_eq!(granule.index(Gfn(above), Level(level.0 + 1)), 1);
            }
        }
    }

    #[test]
    fn a_block_is_what_one_entry_covers() {
        for (granule, pages) in [(Kib4, 512), (Kib16, 2048), (Kib64, 8192)] {
            let at = |page: u64| Gfn(page * pages);
            let block = |gfn| granule.block(gfn, Level::MEGA);
            assert_eq!(block(at(3)), at(3)..at(4));
            assert_eq!(block(Gfn(at(4).0 - 1)), at(3)..at(4));
            assert_eq!(granule.block(Gfn(5), Level::PAGE), Gfn(5)..Gfn(6));
        }
    }

    #[test]
    fn addresses_count_bytes_and_frames_count_pages() {
        for granule in [Kib4, Kib16, Kib64] {
            let last = Gpa(5 * granule.bytes() - 1);
            assert_eq!(granule.gfn(last), Gfn(4));
            assert_eq!(granule.gpa(Gfn(5)), Gpa(last.0 + 1));
            assert_eq!(granule.pfn(granule.hpa(Pfn(7))), Pfn(7));
            let hva = granule.add_pages(Hva(1 << 20), 3);
            assert_eq!(granule.pages_between(Hva(1 << 20), hva), 3);
        }
    }
}
