//! The software TLB: host addresses of guest pages, in two levels.
//!
//! The first level is direct-mapped, and has translations of the current address space and global translations.
//! Compiled code looks translations up in it without a call. The first level is small, and each change of address space
//! drops its translations, except global ones. The second level (`stlb`) is larger, and keeps translations of several
//! address spaces (PCIDs). So a miss of the first level costs little if the second level has the page.
//!
//! The following events drop translations (SDM volume 3, "Invalidation of TLBs and Paging-Structure Caches"):
//!
//! | event | first level | second level |
//! |---|---|---|
//! | MOV to CR3 | all but global pages | those of the new PCID but global pages; none if bit 63 is set |
//! | INVLPG, a page fault | the page | the page, of the current PCID and global |
//! | INVPCID type 0, 1 | for the current PCID: the page; all but global pages | those of the PCID but global pages |
//! | INVPCID type 3 | all but global pages | all but global pages |
//! | INVPCID type 2, changes of CR0, CR4, EFER, PKRU; host pages change | all | all |
//! | change of world (hypervisor, its guest) | all | as TLB_CONTROL says; if CR0, CR4, EFER changed, its own |
//! | INVLPGA for another ASID | nothing | all of that ASID |
//!
//! Code fetches use only the second level. They are rare, because blocks keep their host page until the next flush
//! (`snapshot`).
//!
//! The first level has one table for each kind of data access: supervisor accesses; user accesses; supervisor accesses
//! with RFLAGS.AC set (SMAP); and user accesses with alignment checks, whose table is always empty. Each entry has a
//! tag for reads and a tag for writes. The page of an access's first byte selects the entry. The access hits if the
//! entry has the tag of the page of its *last* byte. So one comparison also detects an access that crosses into the
//! next page.
//!
//! If a page has decoded code (`code_pages`), its entry has a third tag instead of the tag for writes. A store to the
//! page then misses, but the slow path finds the translation in the entry, and records the store.

mod stlb;

use crate::heap::Zeroed;
use crate::machine::{Access, HostPage};
use stlb::Stlb;
pub(crate) use stlb::{PCID_BITS, WORLDS, Which};

/// The number of entries in each table.
pub(crate) const ENTRIES: usize = 1024;
const TABLES: usize = 4;

/// The index of the first entry of the table for supervisor accesses.
pub(crate) const SUPERVISOR: usize = 0;
/// The index of the first entry of the table for user accesses.
pub(crate) const USER: usize = ENTRIES;
/// The index of the first entry of the table for supervisor accesses with RFLAGS.AC set.
pub(crate) const SUPERVISOR_AC: usize = 2 * ENTRIES;
/// The index of the first entry of the table for user accesses whose alignment is checked. This table is always empty:
/// see `mem::alignment`.
pub(crate) const USER_CHECKED: usize = 3 * ENTRIES;

/// The tag of an empty entry. No page has it: a page's tag is the address of its last byte. So a TLB of zeroes is
/// empty.
const EMPTY: u64 = 0;

/// Returns the tag of the page of `lin`.
#[inline(always)]
fn tag(lin: u64) -> u64 {
    lin | 0xfff
}

#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(crate) struct Entry {
    read: u64,
    write: u64,
    /// The host address of the page minus the page's linear address.
    addend: u64,
    /// A page address and two flags. If the page holds decoded code and may be written, the flag [`CODE`] is set, and
    /// the address is the page's. The other flag is [`GLOBAL`].
    note: u64,
}

/// A flag in `note`: the page may be written, but each store must be recorded.
const CODE: u64 = 1 << 0;
/// The flag in an entry's `note`: the translation is global.
const GLOBAL: u64 = 1 << 1;

/// The logarithm of the size of an entry in bytes.
#[cfg(feature = "jit")]
pub(crate) const ENTRY_BITS: u32 = size_of::<Entry>().trailing_zeros();
/// The offsets of an entry's fields.
#[cfg(feature = "jit")]
pub(crate) const READ: usize = std::mem::offset_of!(Entry, read);
#[cfg(feature = "jit")]
pub(crate) const WRITE: usize = std::mem::offset_of!(Entry, write);
#[cfg(feature = "jit")]
pub(crate) const ADDEND: usize = std::mem::offset_of!(Entry, addend);

impl Entry {
    fn clear(&mut self) {
        self.read = EMPTY;
        self.write = EMPTY;
        self.note = EMPTY;
    }

    fn is_global(&self) -> bool {
        self.note & GLOBAL != 0
    }

    /// Returns the host address of the page. Call only for an entry that has a tag for writes.
    fn host(&self) -> usize {
        // The page's linear address is known from the tag for writes. The tag is not empty when this is called.
        self.addend.wrapping_add(self.write & !0xfff) as usize
    }
}

/// A Bloom filter, with one hash, of the numbers of regions (2 MiB or 1 GiB) that have had entries since the last
/// flush.
struct Filter([u64; Filter::BITS / 64]);

impl Filter {
    const BITS: usize = 4096;

    fn place(number: u64) -> (usize, u64) {
        let bit = (number ^ number >> 12) as usize % Self::BITS;
        (bit / 64, 1 << (bit % 64))
    }

    fn add(&mut self, number: u64) {
        let (word, bit) = Self::place(number);
        self.0[word] |= bit;
    }

    fn may_have(&self, number: u64) -> bool {
        let (word, bit) = Self::place(number);
        self.0[word] & bit != 0
    }

    fn clear(&mut self) {
        self.0.fill(0);
    }
}

/// The number of address bits within a large page of 2 MiB, the smallest one. (A page of 4 MiB counts as two.)
const LARGE_BITS: u32 = 21;
/// The number of address bits within a page of 1 GiB.
const HUGE_BITS: u32 = 30;

pub(crate) struct Tlb {
    entries: [Entry; TABLES * ENTRIES],
    /// The indices of the entries that were filled since the last flush, or that the last flush has kept: a flush
    /// visits only these entries.
    filled: [u16; 1024],
    fills: usize,
    second: Stlb,
    /// Whether the page of any entry is part of a large page of the guest.
    large_filled: bool,
    /// The regions of 2 MiB in which an entry's page is part of a large page of the guest. The next field has such
    /// regions of 1 GiB.
    large: Filter,
    huge: Filter,
}

// SAFETY: the type consists of integers and `bool`s, for which zeroes are a valid value.
unsafe impl Zeroed for Tlb {}

impl Tlb {
    #[inline(always)]
    fn index(table: usize, lin: u64) -> usize {
        // The mask at the end lets the compiler see that the index is within the array.
        (table | (lin >> 12) as usize & (ENTRIES - 1)) & (TABLES * ENTRIES - 1)
    }

    /// Returns the first entry of a table.
    #[cfg(feature = "jit")]
    pub(crate) fn table(&self, table: usize) -> *const Entry {
        &raw const self.entries[table]
    }

    /// Returns the host address of `size` bytes at `lin` if they may be read and are in one page.
    #[inline(always)]
    pub(crate) fn read(&self, table: usize, lin: u64, size: u64) -> Option<*mut u8> {
        let entry = &self.entries[Self::index(table, lin)];
        (entry.read == tag(lin.wrapping_add(size - 1)))
            .then(|| entry.addend.wrapping_add(lin) as *mut u8)
    }

    /// Returns the host address of `size` bytes at `lin` if they may be written and are in one page.
    #[inline(always)]
    pub(crate) fn write(&self, table: usize, lin: u64, size: u64) -> Option<*mut u8> {
        let entry = &self.entries[Self::index(table, lin)];
        (entry.write == tag(lin.wrapping_add(size - 1)))
            .then(|| entry.addend.wrapping_add(lin) as *mut u8)
    }

    /// Returns the host address of the byte at `lin` if the page may be written, but stores must be recorded because it
    /// held decoded code when its entry was made.
    pub(crate) fn write_code(&self, table: usize, lin: u64) -> Option<*mut u8> {
        let entry = &self.entries[Self::index(table, lin)];
        (entry.note & !GLOBAL == lin & !0xfff | CODE)
            .then(|| entry.addend.wrapping_add(lin) as *mut u8)
    }

    /// Returns the translation of the page of `lin` in the second level. `None`: the second level has no translation of
    /// the page that allows `access`.
    #[inline(always)]
    pub(crate) fn second(&self, table: usize, lin: u64, access: Access) -> Option<HostPage> {
        self.second.find((table / ENTRIES) as u64, lin, access)
    }

    /// Enters a translation into the second level. The machine has just made it for `access`.
    pub(crate) fn enter(&mut self, table: usize, lin: u64, page: &HostPage, access: Access) {
        self.note_size(lin, page.bits);
        self.second
            .enter((table / ENTRIES) as u64, lin, page, access);
    }

    /// Enters a translation of the page of `lin` into the first level. `code` says whether the page holds decoded code.
    #[inline(always)]
    pub(crate) fn fill(&mut self, table: usize, lin: u64, page: &HostPage, code: bool) {
        let index = Self::index(table, lin);
        let tag_if = |allowed| if allowed { tag(lin) } else { EMPTY };
        let code_page = match page.write && code {
            true => lin & !0xfff | CODE,
            false => 0,
        };
        self.entries[index] = Entry {
            read: tag_if(page.read),
            write: tag_if(page.write && !code),
            addend: (page.base.as_ptr() as u64).wrapping_sub(lin & !0xfff),
            note: code_page | if page.global { GLOBAL } else { 0 },
        };
        if self.fills < self.filled.len() {
            self.filled[self.fills] = index as u16;
        }
        self.fills += 1;
    }

    /// Records that the page of `lin`, which has an entry now, is part of a page of the guest with 2^`bits` bytes.
    #[inline]
    fn note_size(&mut self, lin: u64, bits: u32) {
        if bits >= LARGE_BITS {
            self.note_large(lin, bits);
        }
    }

    #[cold]
    fn note_large(&mut self, lin: u64, bits: u32) {
        self.large_filled = true;
        match bits {
            LARGE_BITS => self.large.add(lin >> LARGE_BITS),
            HUGE_BITS.. => self.huge.add(lin >> HUGE_BITS),
            // The guest's page has 4 MiB.
            _ => {
                self.large.add(lin >> LARGE_BITS & !1);
                self.large.add(lin >> LARGE_BITS | 1);
            }
        }
    }

    /// Whether the page of `lin` may be part of a large page of the guest. If so, the page's other parts must be
    /// dropped, too.
    pub(crate) fn may_be_large(&self, lin: u64) -> bool {
        self.large_filled
            && (self.large.may_have(lin >> LARGE_BITS) || self.huge.may_have(lin >> HUGE_BITS))
    }

    /// Drops the translations of the page of `lin` that belong to the current space or are global.
    pub(crate) fn drop_page(&mut self, lin: u64) {
        self.drop_first(lin);
        self.second.flush_page(lin, Which::CurrentAndGlobal);
    }

    /// Drops translations of the page of `lin` or, if it is part of a large page of the guest, of that page.
    pub(crate) fn flush_page(&mut self, lin: u64, which: Which) {
        if self.may_be_large(lin) {
            self.flush_first();
            self.second.flush_large(lin);
        } else {
            self.drop_first(lin);
            self.second.flush_page(lin, which);
        }
    }

    fn drop_first(&mut self, lin: u64) {
        for table in [SUPERVISOR, USER, SUPERVISOR_AC] {
            self.entries[Self::index(table, lin)].clear();
        }
    }

    /// Makes space `name` the current space. It must belong to the current world. If `keeps`, its earlier translations
    /// stay valid.
    pub(crate) fn switch(&mut self, name: u16, keeps: bool) {
        self.drop_filled(|entry| !entry.is_global());
        self.second.switch(name, keeps);
    }

    /// Makes space `name` the current space. It must belong to another world than the current space. Its earlier
    /// translations stay valid.
    pub(crate) fn enter_world(&mut self, name: u16) {
        self.flush_first();
        self.second.enter_world(name);
    }

    /// Drops the translations of the current world, and makes space `name` the current space.
    pub(crate) fn flush_world(&mut self, name: u16) {
        self.flush_first();
        self.second.flush_world(name);
    }

    /// Drops the translations of a world that is not the current world.
    pub(crate) fn forget_world(&mut self, world: usize) {
        self.second.forget_world(world);
    }

    /// Drops the translations of space `name`, except global ones. It must not be the current space.
    pub(crate) fn forget(&mut self, name: u16) {
        self.second.forget(name);
    }

    /// Drops all translations except global ones, and makes space `name` the current space.
    pub(crate) fn flush_spaces(&mut self, name: u16) {
        self.drop_filled(|entry| !entry.is_global());
        self.second.flush_spaces(name);
    }

    /// Drops all translations of all worlds, and makes space `name` the current space.
    pub(crate) fn flush(&mut self, name: u16) {
        self.flush_first();
        self.second.flush(name);
        if std::mem::take(&mut self.large_filled) {
            self.large.clear();
            self.huge.clear();
        }
    }

    fn flush_first(&mut self) {
        self.drop_filled(|_| true);
    }

    /// Drops the entries of the first level for which `drops` returns `true`.
    #[inline]
    fn drop_filled(&mut self, drops: impl Fn(&Entry) -> bool) {
        let fills = std::mem::take(&mut self.fills);
        let visit = |this: &mut Self, index: u16| {
            let entry = &mut this.entries[usize::from(index)];
            if drops(entry) {
                entry.clear();
            } else {
                if this.fills < this.filled.len() {
                    this.filled[this.fills] = index;
                }
                this.fills += 1;
            }
        };
        if fills <= self.filled.len() {
            // The indices of the entries that are kept move to the beginning of the list.
            for k in 0..fills {
                visit(self, self.filled[k]);
            }
        } else {
            (0..self.entries.len() as u16).for_each(|index| visit(self, index));
        }
    }

    /// From now on, each store to a host page for which `has_code` returns `true` must be recorded, so the store must
    /// miss the TLB.
    pub(crate) fn look_at_writes(&mut self, mut has_code: impl FnMut(usize) -> bool) {
        self.visit_filled(|entry| {
            if entry.write != EMPTY && has_code(entry.host()) {
                entry.note |= entry.write & !0xfff | CODE;
                entry.write = EMPTY;
            }
        });
    }

    /// Call when the page of `lin` no longer holds decoded code. The next store to the page is translated again, so
    /// that it can get an ordinary tag for writes.
    pub(crate) fn forget_code(&mut self, table: usize, lin: u64) {
        self.entries[Self::index(table, lin)].note &= GLOBAL;
    }

    /// Calls `visit` with all entries that were filled since the last flush, and possibly with others.
    fn visit_filled(&mut self, mut visit: impl FnMut(&mut Entry)) {
        if self.fills <= self.filled.len() {
            for &index in &self.filled[..self.fills] {
                visit(&mut self.entries[usize::from(index)]);
            }
        } else {
            self.entries.iter_mut().for_each(visit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::Pages;

    #[test]
    fn parts_of_large_pages_are_known_until_the_next_flush() {
        let mut tlb = Pages::<Tlb>::zeroed().unwrap();
        tlb.note_size(0x1000, 12);
        assert!(!tlb.may_be_large(0x1000));
        tlb.note_size(0x20_3000, 21);
        assert!(tlb.may_be_large(0x3f_ffff) && !tlb.may_be_large(0x40_0000));
        tlb.note_size(0xc0_3000, 22);
        assert!(tlb.may_be_large(0xc0_0000) && tlb.may_be_large(0xff_ffff));
        tlb.note_size(0x8000_0000, 30);
        assert!(tlb.may_be_large(0xbfff_f000) && !tlb.may_be_large(0xc000_0000));
        tlb.flush(0);
        assert!(!tlb.may_be_large(0x20_3000) && !tlb.may_be_large(0x8000_0000));
    }

    #[test]
    fn a_flush_forgets_however_much_was_entered() {
        for pages in [1, 1000, 5000u64] {
            let mut tlb = Pages::<Tlb>::zeroed().unwrap();
            for page in 0..pages {
                tlb.fill(USER, page << 12, &page_of(false), false);
            }
            assert!(tlb.read(USER, (pages - 1) << 12, 8).is_some());
            tlb.flush(0);
            assert!((0..pages).all(|page| tlb.read(USER, page << 12, 8).is_none()));
        }
    }

    fn page_of(global: bool) -> HostPage {
        HostPage {
            base: std::ptr::NonNull::dangling(),
            read: true,
            write: true,
            execute: true,
            tracked: None,
            bits: 12,
            global,
        }
    }

    #[test]
    fn a_switch_keeps_global_pages_however_much_was_entered() {
        for pages in [1, 500, 5000u64] {
            let mut tlb = Pages::<Tlb>::zeroed().unwrap();
            for page in 0..pages {
                tlb.fill(USER, page << 12, &page_of(false), false);
                tlb.fill(SUPERVISOR, page << 12, &page_of(true), page % 2 == 0);
            }
            for pcid in 0..3 {
                tlb.switch(pcid, true);
                let known = pages.saturating_sub(ENTRIES as u64)..pages;
                assert!((0..pages).all(|page| tlb.read(USER, page << 12, 8).is_none()));
                for page in known {
                    assert!(tlb.read(SUPERVISOR, page << 12, 8).is_some());
                    let with_look = tlb.write_code(SUPERVISOR, page << 12).is_some();
                    assert_eq!(with_look, page % 2 == 0);
                }
            }
            tlb.look_at_writes(|_| true);
            assert!((0..pages).all(|page| tlb.write(SUPERVISOR, page << 12, 8).is_none()));
            tlb.flush_spaces(0);
            assert!(tlb.read(SUPERVISOR, (pages - 1) << 12, 8).is_some());
            tlb.flush(0);
            assert!((0..pages).all(|page| tlb.read(SUPERVISOR, page << 12, 8).is_none()));
        }
    }
}
