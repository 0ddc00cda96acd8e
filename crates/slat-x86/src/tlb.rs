//! The software TLB: host addresses of guest pages, direct-mapped.
//!
//! One table per kind of data access: as supervisor, as user, as supervisor with RFLAGS.AC set (SMAP). Each entry has a tag for
//! reads and one for writes; an access hits if the tag at the index of its first byte's page is that of its *last* byte's page,
//! so that one comparison also finds an access that crosses into the next page.
//!
//! A page with decoded code (`code_pages`) has a third tag instead of that for writes: stores to it need no translation, but a
//! look.

use crate::heap::Zeroed;
use std::ptr::NonNull;

/// Entries per table.
pub(crate) const ENTRIES: usize = 1024;
const TABLES: usize = 4;

/// Index of the first entry of the table for supervisor accesses.
pub(crate) const SUPERVISOR: usize = 0;
/// Index of the first entry of the table for user accesses.
pub(crate) const USER: usize = ENTRIES;
/// Index of the first entry of the table for supervisor accesses with RFLAGS.AC set.
pub(crate) const SUPERVISOR_AC: usize = 2 * ENTRIES;

/// The tag of no page: a page's tag is the address of its last byte. So a TLB of zeroes is empty.
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
    /// Host address of the page minus its linear address.
    addend: u64,
    /// The tag for writes, of a page that holds decoded code.
    write_code: u64,
}

/// How far the address of an entry is shifted from its index.
#[cfg(feature = "jit")]
pub(crate) const ENTRY_BITS: u32 = size_of::<Entry>().trailing_zeros();
/// Offsets of fields in an entry.
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
        self.write_code = EMPTY;
    }

    /// Returns the host address of the page.
    fn host(&self) -> usize {
        // Only an entry whose tag for writes is not empty is asked.
        self.addend.wrapping_add(self.write & !0xfff) as usize
    }
}

/// A translation for instruction fetches, which is looked up once per block and page.
#[derive(Clone, Copy)]
struct CodeEntry {
    tag: u64,
    host: *mut u8,
}

/// One-hash Bloom filter of region numbers that were entered since the last flush.
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

/// Address bits within the smallest large page: 2 MiB. (A page of 4 MiB counts as two.)
const LARGE_BITS: u32 = 21;
/// Address bits within a page of 1 GiB.
const HUGE_BITS: u32 = 30;

pub(crate) struct Tlb {
    entries: [Entry; TABLES * ENTRIES],
    code: [CodeEntry; 2 * CODE_ENTRIES],
    /// Indices of entries filled since the last flush, so that a flush costs no more than the fills.
    filled: [u16; 1024],
    fills: usize,
    /// Whether any entry of `code` was filled since the last flush.
    code_filled: bool,
    /// Whether any entered page is part of a larger page of the guest's.
    large_filled: bool,
    /// Regions of 2 MiB, and of 1 GiB, with an entered page that is part of a larger one.
    large: Filter,
    huge: Filter,
}

const CODE_ENTRIES: usize = 256;

// SAFETY: the host addresses are guest memory, which any thread may access through guarded accesses.
unsafe impl Send for Tlb {}

// SAFETY: integers and pointers.
unsafe impl Zeroed for Tlb {}

impl Tlb {
    #[inline(always)]
    fn index(table: usize, lin: u64) -> usize {
        // The mask tells the compiler that the index is in range.
        (table | (lin >> 12) as usize & (ENTRIES - 1)) & (TABLES * ENTRIES - 1)
    }

    /// Returns the first entry of a table.
    #[cfg(feature = "jit")]
    pub(crate) fn table(&self, table: usize) -> *const Entry {
        &raw const self.entries[table]
    }

    /// Returns the host address of `size` bytes at `lin` if they may be read and lie in one page.
    #[inline(always)]
    pub(crate) fn read(&self, table: usize, lin: u64, size: u64) -> Option<*mut u8> {
        let entry = &self.entries[Self::index(table, lin)];
        (entry.read == tag(lin.wrapping_add(size - 1)))
            .then(|| entry.addend.wrapping_add(lin) as *mut u8)
    }

    /// Returns the host address of `size` bytes at `lin` if they may be written and lie in one page.
    #[inline(always)]
    pub(crate) fn write(&self, table: usize, lin: u64, size: u64) -> Option<*mut u8> {
        let entry = &self.entries[Self::index(table, lin)];
        (entry.write == tag(lin.wrapping_add(size - 1)))
            .then(|| entry.addend.wrapping_add(lin) as *mut u8)
    }

    /// Returns the host address of the byte at `lin` if it may be written, in a page that held decoded code when it was entered.
    pub(crate) fn write_code(&self, table: usize, lin: u64) -> Option<*mut u8> {
        let entry = &self.entries[Self::index(table, lin)];
        (entry.write_code == tag(lin)).then(|| entry.addend.wrapping_add(lin) as *mut u8)
    }

    /// Enters a translation of the page of `lin`, which holds decoded code or not.
    pub(crate) fn fill(
        &mut self,
        table: usize,
        lin: u64,
        host: NonNull<u8>,
        read: bool,
        write: bool,
        code: bool,
    ) {
        let index = Self::index(table, lin);
        let tag_if = |allowed| if allowed { tag(lin) } else { EMPTY };
        let addend = (host.as_ptr() as u64).wrapping_sub(lin & !0xfff);
        self.entries[index] = Entry {
            read: tag_if(read),
            write: tag_if(write && !code),
            addend,
            write_code: tag_if(write && code),
        };
        if self.fills < self.filled.len() {
            self.filled[self.fills] = index as u16;
        }
        self.fills += 1;
    }

    /// Records that the page of `lin`, which was entered, is part of a page of the guest's with 2^`bits` bytes.
    #[inline]
    pub(crate) fn note_size(&mut self, lin: u64, bits: u32) {
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
            // 4 MiB.
            _ => {
                self.large.add(lin >> LARGE_BITS & !1);
                self.large.add(lin >> LARGE_BITS | 1);
            }
        }
    }

    /// Whether the page of `lin` may be part of a larger one: then the other parts have to be dropped with it.
    pub(crate) fn may_be_large(&self, lin: u64) -> bool {
        self.large_filled
            && (self.large.may_have(lin >> LARGE_BITS) || self.huge.may_have(lin >> HUGE_BITS))
    }

    /// Returns the host page from which the code at `lin` may be fetched.
    #[inline(always)]
    pub(crate) fn code(&self, user: bool, lin: u64) -> Option<*mut u8> {
        let entry = &self.code[Self::code_index(user, lin)];
        (entry.tag == tag(lin)).then_some(entry.host)
    }

    pub(crate) fn fill_code(&mut self, user: bool, lin: u64, host: *mut u8) {
        self.code[Self::code_index(user, lin)] = CodeEntry {
            tag: tag(lin),
            host,
        };
        self.code_filled = true;
    }

    #[inline(always)]
    fn code_index(user: bool, lin: u64) -> usize {
        usize::from(user) * CODE_ENTRIES + ((lin >> 12) as usize & (CODE_ENTRIES - 1))
    }

    /// Drops one page.
    pub(crate) fn flush_page(&mut self, lin: u64) {
        for table in [SUPERVISOR, USER, SUPERVISOR_AC] {
            self.entries[Self::index(table, lin)].clear();
        }
        for user in [false, true] {
            self.code[Self::code_index(user, lin)].tag = EMPTY;
        }
    }

    /// Drops everything.
    pub(crate) fn flush(&mut self) {
        self.flush_data();
        if std::mem::take(&mut self.code_filled) {
            for entry in &mut self.code {
                entry.tag = EMPTY;
            }
        }
        if std::mem::take(&mut self.large_filled) {
            self.large.clear();
            self.huge.clear();
        }
    }

    /// Drops the entries for data accesses.
    pub(crate) fn flush_data(&mut self) {
        self.visit_filled(Entry::clear);
        self.fills = 0;
    }

    /// Makes writes to the host pages for which `has_code` holds, of which it gets the addresses, need a look.
    pub(crate) fn look_at_writes(&mut self, mut has_code: impl FnMut(usize) -> bool) {
        self.visit_filled(|entry| {
            if entry.write != EMPTY && has_code(entry.host()) {
                entry.write_code = std::mem::replace(&mut entry.write, EMPTY);
            }
        });
    }

    /// Has the next write to the page of `lin`, which holds decoded code no more, translated anew.
    pub(crate) fn forget_code(&mut self, table: usize, lin: u64) {
        self.entries[Self::index(table, lin)].write_code = EMPTY;
    }

    /// Calls `visit` with all entries filled since the last flush, and maybe others.
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
        tlb.flush();
        assert!(!tlb.may_be_large(0x20_3000) && !tlb.may_be_large(0x8000_0000));
    }

    #[test]
    fn a_flush_forgets_however_much_was_entered() {
        let host = NonNull::dangling();
        for pages in [1, 1000, 5000u64] {
            let mut tlb = Pages::<Tlb>::zeroed().unwrap();
            for page in 0..pages {
                tlb.fill(USER, page << 12, host, true, true, false);
            }
            assert!(tlb.read(USER, (pages - 1) << 12, 8).is_some());
            tlb.flush();
            assert!((0..pages).all(|page| tlb.read(USER, page << 12, 8).is_none()));
        }
    }
}
