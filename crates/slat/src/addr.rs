//! Addresses and levels as types: a [`Gfn`] cannot be passed where a [`Pfn`] is meant.
//!
//! An address ending in `pa`/`va` counts bytes, a frame number counts 4 KiB pages.

use core::fmt;
use core::ops::Range;

/// log2 of the page size of level 1.
pub const PAGE_SHIFT: u32 = 12;
/// Bytes in a page of level 1.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;

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
    /// Address in the space that backs memslots, in bytes: a host-virtual address in a userspace
    /// port. A hypervisor without such addresses uses any linear numbering of its memory.
    Hva
}
address! {
    /// Host-physical address, in bytes: what a leaf holds. In the userspace port it *is* the hva.
    Hpa
}
address! {
    /// Number of a 4 KiB frame in the guest's physical address space.
    Gfn
}
address! {
    /// Number of a 4 KiB frame in the host's physical address space.
    Pfn
}

impl Gpa {
    /// The frame that holds this address.
    pub const fn gfn(self) -> Gfn {
        Gfn(self.0 >> PAGE_SHIFT)
    }

    /// Offset inside its 4 KiB page.
    pub const fn offset(self) -> u64 {
        self.0 % PAGE_SIZE
    }
}

impl Gfn {
    /// Address of the first byte.
    pub const fn gpa(self) -> Gpa {
        Gpa(self.0 << PAGE_SHIFT)
    }

    /// The frame `pages` further up.
    pub const fn add(self, pages: u64) -> Gfn {
        Gfn(self.0 + pages)
    }

    /// First frame of the region that one entry of `level` covers around this frame.
    pub const fn align_down(self, level: Level) -> Gfn {
        Gfn(self.0 & !(level.pages() - 1))
    }

    /// The frames that one entry of `level` covers around this frame.
    pub const fn block(self, level: Level) -> Range<Gfn> {
        let start = self.align_down(level);
        start..start.add(level.pages())
    }
}

impl Hpa {
    /// The frame that holds this address.
    pub const fn pfn(self) -> Pfn {
        Pfn(self.0 >> PAGE_SHIFT)
    }
}

impl Pfn {
    /// Address of the first byte.
    pub const fn hpa(self) -> Hpa {
        Hpa(self.0 << PAGE_SHIFT)
    }

    /// The frame `pages` further up.
    pub const fn add(self, pages: u64) -> Pfn {
        Pfn(self.0 + pages)
    }

    /// First frame of the naturally aligned region of `level` around this frame.
    pub const fn align_down(self, level: Level) -> Pfn {
        Pfn(self.0 & !(level.pages() - 1))
    }
}

impl Hva {
    /// The address `pages` pages further up.
    pub const fn add_pages(self, pages: u64) -> Hva {
        Hva(self.0 + (pages << PAGE_SHIFT))
    }
}

/// Height of an entry above the page: level 1 maps 4 KiB, 2 maps 2 MiB, 3 maps 1 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(pub u8);

impl Level {
    /// 4 KiB.
    pub const PAGE: Level = Level(1);
    /// 2 MiB.
    pub const MEGA: Level = Level(2);
    /// 1 GiB.
    pub const GIGA: Level = Level(3);

    /// log2 of the entries of a table. A model checker can only afford small ones.
    pub(crate) const INDEX_BITS: u32 = if cfg!(loom) { 1 } else { 9 };

    /// 4 KiB pages that one entry of this level covers.
    pub const fn pages(self) -> u64 {
        1 << (Self::INDEX_BITS * (self.0 as u32 - 1))
    }

    /// Index, in a table of this level, of the entry on the way to `gfn`.
    pub const fn index(self, gfn: Gfn) -> usize {
        ((gfn.0 >> (Self::INDEX_BITS * (self.0 as u32 - 1))) & ((1 << Self::INDEX_BITS) - 1))
            as usize
    }

    /// The next level towards the page.
    pub const fn below(self) -> Level {
        Level(self.0 - 1)
    }
}

/// Number of a 4 KiB page in the addresses that a walker translates: a guest frame for a second-level walker, a virtual
/// page for that of a shadow table.
#[derive(Clone, Copy)]
pub(crate) struct PageIndex(u64);

impl PageIndex {
    /// Returns the page of a guest-virtual address.
    pub(crate) fn of_gva(gva: u64) -> Self {
        PageIndex(gva >> PAGE_SHIFT)
    }

    /// Returns the index, in a table of `level`, of the entry on the path to the page.
    #[inline(always)]
    pub(crate) fn at(self, level: Level) -> usize {
        level.index(Gfn(self.0))
    }

    /// Returns the page that entry `index` of the same table of level 1 translates.
    pub(crate) fn with_entry(self, index: usize) -> Self {
        PageIndex(self.0 & !(Level::MEGA.pages() - 1) | index as u64)
    }

    /// Returns the frame with the same number.
    #[inline(always)]
    pub(crate) fn as_gfn(self) -> Gfn {
        Gfn(self.0)
    }

    /// Returns the page `pages` further up.
    pub(crate) fn add(self, pages: u64) -> Self {
        PageIndex(self.0.wrapping_add(pages))
    }

    /// Returns the page `pages` further down.
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

/// The frames `range` covers, as a half-open range of guest-physical addresses for messages.
pub(crate) fn gpa_range(range: &Range<Gfn>) -> Range<Gpa> {
    range.start.gpa()..range.end.gpa()
}

/// What a guest does with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Data read.
    Read,
    /// Data write (a read-modify-write is a write).
    Write,
    /// Instruction fetch.
    Execute,
}

/// What a guest may do with memory beside reading it.
///
/// ```
/// use slat::{Access, Rights};
/// let rom = Rights::READ.with_execute(true);
/// assert!(rom.allow(Access::Execute) && !rom.allow(Access::Write));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rights {
    /// It may write.
    pub write: bool,
    /// It may execute.
    pub execute: bool,
}

impl Rights {
    /// Reading alone.
    pub const READ: Rights = Rights {
        write: false,
        execute: false,
    };
    /// Every right.
    pub const ALL: Rights = Rights {
        write: true,
        execute: true,
    };

    /// The same rights, with that to write or without.
    #[must_use]
    pub const fn with_write(self, write: bool) -> Self {
        Rights { write, ..self }
    }

    /// The same rights, with that to execute or without.
    #[must_use]
    pub const fn with_execute(self, execute: bool) -> Self {
        Rights { execute, ..self }
    }

    /// Whether they allow `access`.
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
