//! The bytes of host memory, and those that were saved of them.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::*};

use slat::{Granule, HostWords, Hpa, Pfn};
use slat_model::HostMemory;

/// The contents of host memory, by page and not by frame: they stay the same when the host moves a page.
pub struct Bytes {
    granule: Granule,
    words: Box<[AtomicU64]>,
}

impl Bytes {
    pub fn new(granule: Granule, pages: u64) -> Self {
        let words = pages * granule.bytes() / 8;
        Bytes {
            granule,
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Returns the number of words of a page.
    pub fn per_page(&self) -> u64 {
        self.granule.bytes() / 8
    }

    fn of_page(&self, page: u64) -> Range<usize> {
        (page * self.per_page()) as usize..((page + 1) * self.per_page()) as usize
    }

    /// Returns the word at `host`.
    pub fn at(&self, host: Hpa) -> &AtomicU64 {
        let (page, _) = HostMemory::identify(Pfn(host.0 >> self.granule.shift()));
        let word = host.0 % self.granule.bytes() / 8;
        &self.words[(page * self.per_page() + word) as usize]
    }

    /// Writes word `index` of `page` before the guest runs.
    pub fn put(&self, page: u64, index: u64, value: u64) {
        self.words[(page * self.per_page() + index) as usize].store(value, SeqCst);
    }

    /// Returns the words of all pages.
    pub fn copy(&self) -> Vec<u64> {
        self.words.iter().map(|word| word.load(Acquire)).collect()
    }
}

impl HostWords for &Bytes {
    type Error = Infallible;

    fn read(&mut self, host: Hpa, size: usize) -> Result<u64, Infallible> {
        assert_eq!(size, 8, "the guest's tables have long entries");
        Ok(self.at(host).load(SeqCst))
    }

    fn compare_exchange(
        &mut self,
        host: Hpa,
        _: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Infallible> {
        let swapped = self.at(host).compare_exchange(old, new, SeqCst, SeqCst);
        Ok(swapped.is_ok())
    }
}

/// What the platform was given of a snapshot.
#[derive(Default)]
pub struct Saved {
    pub words: Vec<u64>,
    /// For each page, whether the platform was given it.
    pub given: Vec<bool>,
    /// The number of pages for which the disk has room.
    room: u64,
    /// Whether a page was given after the disk was full. It is not in `words`.
    pub is_full: bool,
    /// The first page that was given twice.
    pub twice: Option<u64>,
}

impl Saved {
    /// Returns an empty file for a snapshot of `bytes`, on a disk with room for `room` pages.
    pub fn new(bytes: &Bytes, room: u64) -> Self {
        let words = bytes.words.len();
        Saved {
            words: vec![0; words],
            given: vec![false; words / bytes.per_page() as usize],
            room,
            ..Saved::default()
        }
    }

    /// Copies `page`, if there is room.
    pub fn take(&mut self, page: u64, bytes: &Bytes) {
        if std::mem::replace(&mut self.given[page as usize], true) {
            self.twice.get_or_insert(page);
        }
        if self.room == 0 {
            self.is_full = true;
            return;
        }
        self.room -= 1;
        let words = bytes.of_page(page);
        for (to, from) in self.words[words.clone()]
            .iter_mut()
            .zip(&bytes.words[words])
        {
            *to = from.load(Relaxed);
        }
    }

    /// Returns the pages that the platform was given, with their words.
    pub fn pages(&self) -> impl Iterator<Item = (u64, &[u64])> {
        let size = self.words.len() / self.given.len();
        let all = (0..).zip(self.words.chunks(size)).zip(&self.given);
        all.filter_map(|(page, given)| given.then_some(page))
    }
}
