//! The memory of a guest that has page tables of its own, for tests of the shadow MMU.
#![allow(dead_code, reason = "not every file of tests needs all of it")]

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;

use slat::guest_walk::{GuestPaging, Mode};
use slat::{HostWords, Hpa, PAGE_SIZE};
use slat_model::HostMemory;

/// The flags of an entry: present, writable, user, accessed, dirty.
pub const USED: u64 = 0x67;
/// The bit by which an entry above level 1 is a leaf.
pub const HUGE: u64 = 0x80;

/// Returns the state of a user program's accesses in 4-level paging.
pub fn paging(cr3: u64) -> GuestPaging {
    GuestPaging {
        cr3,
        mode: Mode::Level4,
        user: true,
        write_protect: true,
        no_execute: true,
        smep: false,
        smap: false,
        pkru: 0,
        pdptes: None,
        physical_bits: 40,
        reserves_table_global: false,
    }
}

/// The contents of host memory, by page and not by frame: they stay the same when the host moves a page.
pub struct Memory(Vec<AtomicU64>);

impl Memory {
    pub fn new(pages: u64) -> Self {
        Memory((0..pages * 512).map(|_| AtomicU64::new(0)).collect())
    }

    fn word(&self, host: Hpa) -> &AtomicU64 {
        let (page, _) = HostMemory::identify(host.pfn());
        &self.0[(page * 512 + host.0 % PAGE_SIZE / 8) as usize]
    }

    /// Stores a word at `host`.
    pub fn store(&self, host: Hpa, value: u64) {
        self.word(host).store(value, SeqCst);
    }

    /// Writes entry `index` of the table in page `table`, without a report to the MMU.
    pub fn put(&self, table: u64, index: u64, entry: u64) {
        self.0[(table * 512 + index) as usize].store(entry, SeqCst);
    }

    /// Makes the first entry of each of `tables` refer to the next one.
    pub fn link(&self, tables: &[u64]) {
        for pair in tables.windows(2) {
            self.put(pair[0], 0, pair[1] << 12 | USED);
        }
    }

    /// Makes the entries of the level 1 table in page `table` map the pages from `data` on, with `flags`.
    pub fn map(&self, table: u64, data: u64, flags: u64) {
        (0..512).for_each(|page| self.put(table, page, (data + page) << 12 | flags));
    }

    /// Returns entry `index` of the table in page `table`.
    pub fn entry(&self, table: u64, index: u64) -> u64 {
        self.0[(table * 512 + index) as usize].load(SeqCst)
    }

    pub fn words(&self) -> Words<'_> {
        Words {
            memory: self,
            dawdles: false,
        }
    }
}

/// The access of a CPU to [`Memory`].
#[derive(Clone, Copy)]
pub struct Words<'m> {
    pub memory: &'m Memory,
    /// Whether the CPU lets other threads run after each read of an entry, before the walk uses the entry.
    pub dawdles: bool,
}

impl HostWords for Words<'_> {
    type Error = Infallible;

    fn read(&mut self, host: Hpa, size: usize) -> Result<u64, Infallible> {
        let word = self.memory.word(Hpa(host.0 & !7)).load(SeqCst);
        if self.dawdles {
            thread::yield_now();
        }
        Ok(match size {
            4 => word >> (host.0 % 8 * 8) & 0xffff_ffff,
            _ => word,
        })
    }

    fn compare_exchange(
        &mut self,
        host: Hpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Infallible> {
        assert_eq!(size, 8, "flags of short entries are set before");
        let swapped = (self.memory.word(host)).compare_exchange(old, new, SeqCst, SeqCst);
        Ok(swapped.is_ok())
    }
}
