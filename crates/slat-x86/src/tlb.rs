//! The software TLB: host addresses of guest pages, direct-mapped.
//!
//! One table per way in which a data access can be made: as supervisor, as user, as supervisor with
//! RFLAGS.AC set (SMAP). Each entry has a tag for reads and one for writes; an access hits when the page
//! of its *last* byte is the tag at the index of its first byte, so that one comparison also tells an
//! access that crosses into the next page.

use crate::heap::Zeroed;
use std::ptr::NonNull;

/// Entries per table.
pub(crate) const ENTRIES: usize = 1024;
const TABLES: usize = 4;

/// Index of the first entry of the table for supervisor accesses.
pub(crate) const SUPERVISOR: usize = 0;
/// … for user accesses.
pub(crate) const USER: usize = ENTRIES;
/// … for supervisor accesses with RFLAGS.AC set.
pub(crate) const SUPERVISOR_AC: usize = 2 * ENTRIES;

/// A page's tag is the address of its last byte; this is the tag of none. So a TLB of zeroes is empty.
const EMPTY: u64 = 0;

/// The tag of the page of `lin`.
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
}

/// An entry of the instruction side, which is looked at once per block and page.
#[derive(Clone, Copy)]
struct CodeEntry {
    tag: u64,
    host: *mut u8,
}

pub(crate) struct Tlb {
    entries: [Entry; TABLES * ENTRIES],
    code: [CodeEntry; 2 * CODE_ENTRIES],
    /// Entries filled since the last flush, for cheap flushes of a TLB that is hardly used.
    filled: [u16; 64],
    fills: usize,
    /// Some of `code` was filled since the last flush.
    code_filled: bool,
}

const CODE_ENTRIES: usize = 256;

// SAFETY: the host addresses are guest memory, which any thread may access through guarded accesses.
unsafe impl Send for Tlb {}

// SAFETY: integers and pointers.
unsafe impl Zeroed for Tlb {}

impl Tlb {
    #[inline(always)]
    fn slot(table: usize, lin: u64) -> usize {
        // The mask tells the compiler that the index is in range.
        (table | (lin >> 12) as usize & (ENTRIES - 1)) & (TABLES * ENTRIES - 1)
    }

    /// The host address of `size` bytes at `lin` if they may be read and lie in one page.
    #[inline(always)]
    pub(crate) fn read(&self, table: usize, lin: u64, size: u64) -> Option<*mut u8> {
        let entry = &self.entries[Self::slot(table, lin)];
        (entry.read == tag(lin.wrapping_add(size - 1)))
            .then(|| entry.addend.wrapping_add(lin) as *mut u8)
    }

    /// The host address of `size` bytes at `lin` if they may be written and lie in one page.
    #[inline(always)]
    pub(crate) fn write(&self, table: usize, lin: u64, size: u64) -> Option<*mut u8> {
        let entry = &self.entries[Self::slot(table, lin)];
        (entry.write == tag(lin.wrapping_add(size - 1)))
            .then(|| entry.addend.wrapping_add(lin) as *mut u8)
    }

    /// Takes in a translation of the page of `lin`.
    pub(crate) fn fill(
        &mut self,
        table: usize,
        lin: u64,
        host: NonNull<u8>,
        read: bool,
        write: bool,
    ) {
        let slot = Self::slot(table, lin);
        let tag_if = |allowed| if allowed { tag(lin) } else { EMPTY };
        let addend = (host.as_ptr() as u64).wrapping_sub(lin & !0xfff);
        self.entries[slot] = Entry {
            read: tag_if(read),
            write: tag_if(write),
            addend,
        };
        if self.fills < self.filled.len() {
            self.filled[self.fills] = slot as u16;
        }
        self.fills += 1;
    }

    /// The host page from which the code at `lin` may be fetched.
    #[inline(always)]
    pub(crate) fn code(&self, user: bool, lin: u64) -> Option<*mut u8> {
        let entry = &self.code[Self::code_slot(user, lin)];
        (entry.tag == tag(lin)).then_some(entry.host)
    }

    pub(crate) fn fill_code(&mut self, user: bool, lin: u64, host: *mut u8) {
        self.code[Self::code_slot(user, lin)] = CodeEntry {
            tag: tag(lin),
            host,
        };
        self.code_filled = true;
    }

    #[inline(always)]
    fn code_slot(user: bool, lin: u64) -> usize {
        usize::from(user) * CODE_ENTRIES + ((lin >> 12) as usize & (CODE_ENTRIES - 1))
    }

    /// Forgets one page.
    pub(crate) fn flush_page(&mut self, lin: u64) {
        for table in [SUPERVISOR, USER, SUPERVISOR_AC] {
            let entry = &mut self.entries[Self::slot(table, lin)];
            entry.read = EMPTY;
            entry.write = EMPTY;
        }
        for user in [false, true] {
            self.code[Self::code_slot(user, lin)].tag = EMPTY;
        }
    }

    /// Forgets everything.
    pub(crate) fn flush(&mut self) {
        self.flush_data();
        if std::mem::take(&mut self.code_filled) {
            for entry in &mut self.code {
                entry.tag = EMPTY;
            }
        }
    }

    /// Forgets what data accesses use.
    pub(crate) fn flush_data(&mut self) {
        if self.fills <= self.filled.len() {
            for &slot in &self.filled[..self.fills] {
                let entry = &mut self.entries[usize::from(slot)];
                entry.read = EMPTY;
                entry.write = EMPTY;
            }
        } else {
            for entry in &mut self.entries {
                entry.read = EMPTY;
                entry.write = EMPTY;
            }
        }
        self.fills = 0;
    }
}
