//! Addresses and levels as types: a [`Gfn`] cannot be passed where a [`Pfn`] is meant.
//!
//! An address whose type ends in `pa` or `va` counts bytes. A frame number counts pages of the format's [`Granule`],
//! whose methods convert between the two. The methods of this module that take no granule are short forms for
//! [`Granule::Kib4`]: for x86's own tables, and for callers whose pages have 4 KiB. Code that is generic over formats
//! does not use these short forms.

use core::fmt;
use core::ops::Range;

mod granule;

pub use granule::Granule;

/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = Granule::Kib4.shift();
/// Bytes in a page of 4 KiB ([`Granule::Kib4`]).
pub const PAGE_SIZE: u64 = Granule::Kib4.bytes();

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// Guest-physical address, in bytes.
    Gpa
}
address! {
    /// Guest-virtual address, in bytes.
    Gva
}
address! {
    /// Address of the memory that backs memslots, in bytes: in a userspace port, a host-virtual address. A hypervisor
    /// without such addresses uses any linear numbering of its memory.
    Hva
}
address! {
    /// Host-physical address, in bytes: the address in a leaf. In the userspace port it equals the hva.
    Hpa
}
address! {
    /// Number of a page in the guest's physical address space, in pages of the format's [`Granule`].
    Gfn
}
address! {
    /// Number of a page in the host's physical address space, in pages of the format's [`Granule`].
    Pfn
}

impl Gpa {
    /// Returns the 4 KiB frame that contains this address.
    #[inline(always)]
    pub const fn gfn(self) -> Gfn {
        Granule::Kib4.gfn(self)
    }

    /// Returns the offset in the address's 4 KiB page.
    pub const fn offset(self) -> u64 {
        self.0 % PAGE_SIZE
    }
}

impl Gfn {
    /// Returns the address of the frame's first byte. The frame must be a frame of 4 KiB.
    #[inline]
    pub const fn gpa(self) -> Gpa {
        Granule::Kib4.gpa(self)
    }

    /// Returns the frame `pages` frames after this one.
    pub const fn add(self, pages: u64) -> Gfn {
        Gfn(self.0 + pages)
    }

    /// Returns the first of the frames that one entry of `level` covers, in tables of 4 KiB, around this frame.
    #[inline]
    pub const fn align_down(self, level: Level) -> Gfn {
        Granule::Kib4.align_down(self, level)
    }

    /// Returns the frames that one entry of `level` covers, in tables of 4 KiB, around this frame.
    #[inline]
    pub const fn block(self, level: Level) -> Range<Gfn> {
        Granule::Kib4.block(self, level)
    }
}

impl Hpa {
    /// Returns the 4 KiB frame that contains this address.
    #[inline]
    pub const fn pfn(self) -> Pfn {
        Granule::Kib4.pfn(self)
    }
}

impl Pfn {
    /// Returns the address of the frame's first byte. The frame must be a frame of 4 KiB.
    #[inline]
    pub const fn hpa(self) -> Hpa {
        Granule::Kib4.hpa(self)
    }

    /// Returns the frame `pages` frames after this one.
    pub const fn add(self, pages: u64) -> Pfn {
        Pfn(self.0 + pages)
    }

    /// Returns the first of the frames that a leaf of `level` maps, in tables of 4 KiB, if it maps this frame.
    #[inline]
    pub const fn align_down(self, level: Level) -> Pfn {
        Pfn(self.0 & !(level.pages() - 1))
    }
}

impl Hva {
    /// Returns the address `pages` pages of 4 KiB after this one.
    #[inline]
    pub const fn add_pages(self, pages: u64) -> Hva {
        Granule::Kib4.add_pages(self, pages)
    }
}

/// The level of a page-table entry, counted from the page up. With tables of 4 KiB, level 1 maps 4 KiB, level 2 maps 2
/// MiB, and level 3 maps 1 GiB. For other granules see [`Granule::pages`]. (Arm numbers the levels from the root down:
/// Arm's level 3 is level 1 here.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(pub u8);

impl Level {
    /// The level of a page: 4 KiB, or the size of the granule.
    pub const PAGE: Level = Level(1);
    /// Level 2: an entry maps 2 MiB with tables of 4 KiB, 32 MiB with 16 KiB, 512 MiB with 64 KiB.
    pub const MEGA: Level = Level(2);
    /// Level 3: an entry maps 1 GiB with tables of 4 KiB, 64 GiB with 16 KiB, 4 TiB with 64 KiB.
    pub const GIGA: Level = Level(3);

    /// Returns the number of pages of 4 KiB that one entry of this level covers, in tables of 4 KiB.
    #[inline]
    pub const fn pages(self) -> u64 {
        Granule::Kib4.pages(self)
    }

    /// Returns the index, in a 4 KiB table of this level, of the entry on the path to `gfn`.
    #[inline]
    pub const fn index(self, gfn: Gfn) -> usize {
        Granule::Kib4.index(gfn, self)
    }

    /// Returns the next level towards the root.
    #[inline]
    pub(crate) const fn above(self) -> Level {
        Level(self.0 + 1)
    }

    /// Returns the next level towards the page.
    #[inline]
    pub const fn below(self) -> Level {
        Level(self.0 - 1)
    }
}

/// Number of a page in the addresses that a page walker translates. For a second-level walker it is a guest frame. For
/// the walker of a shadow table it is the number of a virtual page of 4 KiB.
#[derive(Clone, Copy)]
pub(crate) struct PageIndex(u64);

impl PageIndex {
    /// Returns the page of a guest-virtual address.
    pub(crate) fn of_gva(gva: u64) -> Self {
        PageIndex(gva >> PAGE_SHIFT)
    }

    /// Returns the index, in a shadow table of `level`, of the entry on the path to the page.
    #[inline(always)]
    pub(crate) fn at(self, level: Level) -> usize {
        level.index(Gfn(self.0))
    }

    /// Returns the page that entry `index` translates, in the shadow table of level 1 that translates this page.
    pub(crate) fn with_entry(self, index: usize) -> Self {
        PageIndex(self.0 & !(Level::MEGA.pages() - 1) | index as u64)
    }

    /// Returns the frame with the same number.
    #[inline(always)]
    pub(crate) fn as_gfn(self) -> Gfn {
        Gfn(self.0)
    }

    /// Returns the page `pages` pages after this one.
    pub(crate) fn add(self, pages: u64) -> Self {
        PageIndex(self.0.wrapping_add(pages))
    }

    /// Returns the page `pages` pages before this one.
    pub(crate) fn before(self, pages: u64) -> Self {
        PageIndex(self.0.wrapping_sub(pages))
    }
}

impl From<Gfn> for PageIndex {
    #[inline(always)]
    fn from(gfn: Gfn) -> Self {
        PageIndex(gfn.0)
    }
}

/// The kind of a guest's access to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Data read.
    Read,
    /// Data write (a read-modify-write is a write).
    Write,
    /// Instruction fetch.
    Execute,
}

/// The rights of a guest to memory, in addition to the right to read.
///
/// ```
/// use slat::{Access, Rights};
/// let rom = Rights::READ.with_execute(true);
/// assert!(rom.allow(Access::Execute) && !rom.allow(Access::Write));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rights {
    /// The guest may write.
    pub write: bool,
    /// The guest may execute.
    pub execute: bool,
}

impl Rights {
    /// Only the right to read.
    pub const READ: Rights = Rights {
        write: false,
        execute: false,
    };
    /// Every right.
    pub const ALL: Rights = Rights {
        write: true,
        execute: true,
    };

    /// Returns these rights with the right to write, or without.
    #[must_use]
    pub const fn with_write(self, write: bool) -> Self {
        Rights { write, ..self }
    }

    /// Returns these rights with the right to execute, or without.
    #[must_use]
    pub const fn with_execute(self, execute: bool) -> Self {
        Rights { execute, ..self }
    }

    /// Whether these rights allow `access`.
    #[inline]
    pub const fn allow(self, access: Access) -> bool {
        match access {
            Access::Read => true,
            Access::Write => self.write,
            Access::Execute => self.execute,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_covers_512_of_the_level_below() {
        assert_eq!(Level::PAGE.pages(), 1);
        assert_eq!(Level::MEGA.pages(), 512);
        assert_eq!(Level::GIGA.pages(), 512 * 512);
        assert_eq!(Level(4).index(Gfn(1 << 27)), 1);
        assert_eq!(Level::PAGE.index(Gfn(0x1ff)), 511);
    }

    #[test]
    fn a_block_is_what_one_entry_covers() {
        assert_eq!(Gfn(0x3ff).block(Level::PAGE), Gfn(0x3ff)..Gfn(0x400));
        assert_eq!(Gfn(0x3ff).block(Level::MEGA), Gfn(0x200)..Gfn(0x400));
        assert_eq!(Gfn(0x200).block(Level::MEGA), Gfn(0x200)..Gfn(0x400));
    }
}
