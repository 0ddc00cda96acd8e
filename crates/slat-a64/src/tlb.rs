//! The software TLB: pages that loads, stores and fetches can access without a walk.
//!
//! An entry maps a 4 KiB page of virtual addresses to the page's address in the machine's memory. Each accessor (EL0,
//! EL1, EL1 with PAN) has a table of its own, so that an entry has the final rights. Pages whose data accesses need a
//! check each time get no entry for data: Device memory, to which accesses must be aligned, and all memory while
//! SCTLR_EL1.A is set, or while there are watchpoints or probes.
//!
//! The TLB has translations of the current address space (ASID), and global ones. Its interface is like that of
//! slat-x86's first-level TLB. A second level, which keeps the translations of other address spaces, could be added in
//! [`Tlb::switch`] and [`Tlb::drop_page`].

use crate::abort::Right;
use crate::stage1::Accessor;
use alloc::vec::Vec;

/// The logarithm of the number of entries in a table.
const INDEX_BITS: u32 = 12;
/// The number of entries in a table, and the number of tables: for EL0, for EL1, and for EL1 with PAN.
const ENTRIES: usize = 1 << INDEX_BITS;
const TABLES: usize = 3;

/// The logarithm of the size in bytes of an entry's page.
pub(crate) const PAGE_BITS: u32 = 12;
const OFFSET: u64 = (1 << PAGE_BITS) - 1;
/// The address bits that TLBI compares: all but the tag.
const COMPARED: u64 = (1 << 56) - 1;

/// The tag of an empty entry, which no page has: the tag of a page is the address of its last byte, which is never 0.
const EMPTY: u64 = 0;

/// An entry, in the layout that compiled code reads.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(crate) struct Entry {
    /// For reads, writes and fetches: the page's tag if this access is allowed, else [`EMPTY`].
    tags: [u64; 3],
    /// The page's address in the machine's memory minus its virtual address.
    addend: u64,
}

/// The properties of an entry by which invalidations select it.
#[derive(Clone, Copy)]
struct Origin {
    /// The page's virtual address, for TLBI.
    page: u64,
    /// The logarithm of the size in bytes of the range that the descriptor maps. The page is a part of that range.
    bits: u32,
    is_global: bool,
}

impl Entry {
    const NONE: Entry = Entry {
        tags: [EMPTY; 3],
        addend: 0,
    };

    fn is_used(&self) -> bool {
        self.tags != [EMPTY; 3]
    }
}

/// A page, to be entered into the TLB.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Page {
    /// The address of the page's first byte in the machine's memory.
    pub(crate) base: u64,
    /// Which accesses (reads, writes, fetches) this translation allows.
    pub(crate) rights: [bool; 3],
    /// The logarithm of the size in bytes of the range that the descriptor maps.
    pub(crate) bits: u32,
    /// The translation is valid in all address spaces.
    pub(crate) is_global: bool,
}

pub(crate) struct Tlb {
    entries: Vec<Entry>,
    /// For each entry, the properties by which invalidations select it.
    origins: Vec<Origin>,
    /// The indices of the entries in use. A flush clears only these entries, so a flush takes no longer than filling
    /// the entries has taken.
    filled: Vec<u16>,
    /// Whether a page that is part of a larger one was entered since the last full flush.
    has_large: bool,
    /// The number (ASID) of the current address space.
    space: u16,
}

fn table(accessor: Accessor) -> usize {
    match accessor {
        Accessor::El0 => 0,
        Accessor::El1 => ENTRIES,
        Accessor::El1WithPan => 2 * ENTRIES,
    }
}

#[inline(always)]
fn index(accessor: Accessor, address: u64) -> usize {
    table(accessor) | (address >> PAGE_BITS) as usize & (ENTRIES - 1)
}

impl Tlb {
    pub(crate) fn new() -> Self {
        Self {
            entries: alloc::vec![Entry::NONE; TABLES * ENTRIES],
            origins: alloc::vec![Origin { page: 0, bits: PAGE_BITS, is_global: false }; TABLES * ENTRIES],
            filled: Vec::new(),
            has_large: false,
            space: 0,
        }
    }

    /// Returns the address of `bytes` bytes in the machine's memory, if they are in one page whose entry allows the
    /// access.
    #[inline(always)]
    pub(crate) fn find(
        &self,
        accessor: Accessor,
        right: Right,
        address: u64,
        bytes: u64,
    ) -> Option<u64> {
        let entry = &self.entries[index(accessor, address)];
        let tag = address.wrapping_add(bytes - 1) | OFFSET;
        (entry.tags[right as usize] == tag).then(|| entry.addend.wrapping_add(address))
    }

    /// Enters the page that contains an address.
    pub(crate) fn fill(&mut self, accessor: Accessor, address: u64, page: &Page) {
        let index = index(accessor, address);
        let entry = &mut self.entries[index];
        if !entry.is_used() {
            self.filled.push(index as u16);
        }
        let start = address & !OFFSET;
        *entry = Entry {
            tags: page
                .rights
                .map(|has| if has { address | OFFSET } else { EMPTY }),
            addend: page.base.wrapping_sub(start),
        };
        self.origins[index] = Origin {
            page: start,
            bits: page.bits,
            is_global: page.is_global,
        };
        if !entry.is_used() {
            self.filled.retain(|filled| usize::from(*filled) != index);
        }
        self.has_large |= page.bits > PAGE_BITS;
    }

    /// Drops the entries for which `drops` returns `true`.
    fn drop_if(&mut self, drops: impl Fn(&Origin) -> bool) {
        let (entries, origins) = (&mut self.entries, &self.origins);
        self.filled.retain(|index| {
            let index = usize::from(*index);
            let drops = drops(&origins[index]);
            if drops {
                entries[index] = Entry::NONE;
            }
            !drops
        });
    }

    /// Drops all translations.
    pub(crate) fn flush(&mut self) {
        self.drop_if(|_| true);
        self.has_large = false;
    }

    /// Makes an address space the current one. Keeps global translations, and drops all others if the address space
    /// differs. Returns whether the address space differs from the current one.
    pub(crate) fn switch(&mut self, space: u16) -> bool {
        let is_new = space != self.space;
        if is_new {
            self.space = space;
            self.drop_if(|origin| !origin.is_global);
        }
        is_new
    }

    /// Drops the translations of an address space, but not the global ones.
    pub(crate) fn forget(&mut self, space: u16) {
        if space == self.space {
            self.drop_if(|origin| !origin.is_global);
        }
    }

    /// Drops the translations of the page that contains an address, and of all other pages that the same descriptor
    /// maps. Drops global translations and the translations of `space`; if `space` is `None`, the translations of all
    /// address spaces.
    pub(crate) fn drop_page(&mut self, address: u64, space: Option<u16>) {
        let is_current = space.is_none_or(|space| space == self.space);
        let drops = |origin: &Origin| {
            (origin.page ^ address) & COMPARED & (!0 << origin.bits) == 0
                && (is_current || origin.is_global)
        };
        if self.has_large {
            return self.drop_if(drops);
        }
        for accessor in [Accessor::El0, Accessor::El1, Accessor::El1WithPan] {
            let index = index(accessor, address);
            let entry = &mut self.entries[index];
            if entry.is_used() && drops(&self.origins[index]) {
                *entry = Entry::NONE;
                self.filled.retain(|filled| usize::from(*filled) != index);
            }
        }
    }
}

/// Numbers with which compiled code finds an entry: the logarithm of an entry's size, the mask of an index, and offsets
/// in an entry.
#[cfg(feature = "jit")]
mod layout {
    use super::*;

    pub(crate) const ENTRY_BITS: u32 = size_of::<Entry>().trailing_zeros();
    pub(crate) const INDEX_MASK: i64 = ENTRIES as i64 - 1;
    pub(crate) const ADDEND_OFFSET: usize = core::mem::offset_of!(Entry, addend);

    /// Returns the offset, within an entry, of the tag for a right.
    pub(crate) fn tag_offset(right: Right) -> usize {
        core::mem::offset_of!(Entry, tags) + 8 * right as usize
    }

    /// Returns the offset in bytes of an accessor's table from the first entry.
    pub(crate) fn table_offset(accessor: Accessor) -> usize {
        table(accessor) << ENTRY_BITS
    }

    impl Tlb {
        /// Returns the address of the first entry. The entries never move.
        pub(crate) fn first(&self) -> *const Entry {
            self.entries.as_ptr()
        }
    }
}
#[cfg(feature = "jit")]
pub(crate) use layout::*;

#[cfg(test)]
mod tests {
    use super::*;

    fn page(bits: u32, is_global: bool) -> Page {
        Page {
            base: 0x7000,
            rights: [true, false, true],
            bits,
            is_global,
        }
    }

    fn knows(tlb: &Tlb, address: u64) -> bool {
        tlb.find(Accessor::El1, Right::Read, address, 8).is_some()
    }

    #[test]
    fn an_entry_has_its_rights_alone_and_ends_with_its_page() {
        let mut tlb = Tlb::new();
        tlb.fill(Accessor::El1, 0x5123, &page(12, false));
        let find = |accessor, right, address, bytes| tlb.find(accessor, right, address, bytes);
        assert_eq!(find(Accessor::El1, Right::Read, 0x5ff8, 8), Some(0x7ff8));
        assert_eq!(find(Accessor::El1, Right::Read, 0x5ff9, 8), None);
        assert_eq!(find(Accessor::El1, Right::Execute, 0x5000, 4), Some(0x7000));
        assert_eq!(find(Accessor::El1, Right::Write, 0x5000, 4), None);
        assert_eq!(find(Accessor::El0, Right::Read, 0x5000, 4), None);
        assert_eq!(find(Accessor::El1WithPan, Right::Read, 0x5000, 4), None);
    }

    #[test]
    fn a_switch_keeps_what_is_global_and_a_flush_nothing() {
        for pages in [1, 500, 5000u64] {
            let mut tlb = Tlb::new();
            let known = pages.saturating_sub(ENTRIES as u64)..pages;
            for n in 0..pages {
                tlb.fill(Accessor::El1, n << 12, &page(12, n % 2 == 0));
            }
            assert!(known.clone().all(|n| knows(&tlb, n << 12)));
            tlb.switch(0);
            tlb.forget(3);
            assert!(known.clone().all(|n| knows(&tlb, n << 12)));
            tlb.switch(3);
            assert!(known.clone().all(|n| knows(&tlb, n << 12) == (n % 2 == 0)));
            tlb.flush();
            assert!(known.clone().all(|n| !knows(&tlb, n << 12)));
            assert!(tlb.filled.is_empty());
        }
    }

    #[test]
    fn a_page_goes_with_the_other_parts_of_its_block() {
        let mut tlb = Tlb::new();
        for n in 0..8 {
            tlb.fill(Accessor::El1, n << 12, &page(14, n < 4));
        }
        tlb.fill(Accessor::El1, 8 << 12, &page(12, false));
        // TLBI of ASID 9 drops no translation of the current ASID, but drops global translations.
        tlb.drop_page(6 << 12, Some(9));
        assert!((0..9).all(|n| knows(&tlb, n << 12)));
        tlb.drop_page(1 << 12, Some(9));
        assert!((0..9).all(|n| knows(&tlb, n << 12) == (n >= 4)));
        tlb.drop_page(5 << 12, None);
        assert!((0..9).all(|n| knows(&tlb, n << 12) == (n == 8)));
        tlb.drop_page(8 << 12, Some(0));
        assert!(!knows(&tlb, 8 << 12) && tlb.filled.is_empty());
    }
}
