//! The host memory that backs memslots, as a table with one word per page.
//!
//! Every remapping of a page gives it a new *version*. The page's frame number consists of the page number and the
//! version. So the frame number in a translation shows which page the translation maps, and whether it is current or
//! older than the last remapping.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

use slat::{Granule, HostPage, Hva, Level, MemoryType, Pfn};

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const KIND_SHIFT: u32 = 2;
const KIND: u64 = 3 << KIND_SHIFT;
const LEVEL_SHIFT: u32 = 4;
const LEVEL: u64 = 3 << LEVEL_SHIFT;
/// The flag of a page that is not `PRESENT` now, but will become present.
const AWAITED: u64 = 1 << 6;
/// The flag of a `PRESENT` page whose frame another VM may use, too ([`HostMemory::share`]).
const SHARED: u64 = 1 << 7;
const VERSION_SHIFT: u32 = 16;

/// The number of low bits of a frame number that hold the page number; the version is in the bits above. These bits
/// suffice for 8 GiB of host memory with pages of 4 KiB.
const PAGE_BITS: u32 = 21;

/// The kind of memory that the host has mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Ordinary memory.
    Ordinary,
    /// Ordinary memory that the guest must not execute.
    NotExecutable,
    /// A frame buffer, which is mapped write-combining.
    WriteCombining,
    /// Device registers.
    Device,
}

impl PageKind {
    /// All kinds, in the order of their numbers in a word.
    pub const ALL: [PageKind; 4] = [
        PageKind::Ordinary,
        PageKind::NotExecutable,
        PageKind::WriteCombining,
        PageKind::Device,
    ];

    fn memory(self) -> MemoryType {
        match self {
            PageKind::Ordinary | PageKind::NotExecutable => MemoryType::WriteBack,
            PageKind::WriteCombining => MemoryType::WriteCombining,
            PageKind::Device => MemoryType::Device,
        }
    }
}

/// A change of the host mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostChange {
    /// The host's mapping of the pages does not change.
    Nothing,
    /// The host maps new memory at this level, as far as the range is aligned to the level.
    Remap {
        /// The level of the new mapping.
        level: Level,
        /// Whether the memory can be written.
        writable: bool,
        /// The kind of the new memory.
        kind: PageKind,
    },
    /// The host unmaps the pages.
    Punch,
    /// The host makes the pages absent until a later operation makes them present ([`slat::ResolveError::Absent`]).
    Await,
    /// The host changes the rights of the memory, which stays mapped.
    Protect {
        /// Whether the memory can be written from now on.
        writable: bool,
    },
}

/// The simulated host memory. It begins at [`HostMemory::BASE`].
pub struct HostMemory {
    granule: Granule,
    pages: Box<[AtomicU64]>,
    /// The version of the next remapping. All memories that share frames share this counter.
    next_version: Arc<AtomicU64>,
}

impl HostMemory {
    /// The first address of host memory. The address is a multiple of every page size.
    pub const BASE: Hva = Hva(1 << 40);

    /// Makes host memory of `pages` pages of 4 KiB. All pages are present, writable, and mapped by single pages.
    pub fn new(pages: u64) -> Self {
        Self::with_granule(Granule::Kib4, pages)
    }

    /// Makes host memory like [`new`](Self::new), but with pages of `granule`.
    pub fn with_granule(granule: Granule, pages: u64) -> Self {
        assert!(pages <= 1 << PAGE_BITS);
        let word = PRESENT | WRITABLE | 1 << LEVEL_SHIFT;
        HostMemory {
            granule,
            pages: (0..pages).map(|_| AtomicU64::new(word)).collect(),
            next_version: Arc::new(AtomicU64::new(1)),
        }
    }

    /// Returns the size of the memory's pages.
    pub fn granule(&self) -> Granule {
        self.granule
    }

    /// Returns the number of different versions: frame numbers of 48-bit physical addresses have this many values above
    /// the page number.
    fn versions(&self) -> u64 {
        1 << (48 - self.granule.shift() - PAGE_BITS)
    }

    /// Returns the number of pages.
    pub fn len(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Whether the memory has no page.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Returns the address of page `page`, if pages have 4 KiB.
    pub fn hva(page: u64) -> Hva {
        Self::BASE.add_pages(page)
    }

    /// Returns the addresses of `pages`, if pages have 4 KiB.
    pub fn hvas(pages: &Range<u64>) -> Range<Hva> {
        Self::hva(pages.start)..Self::hva(pages.end)
    }

    /// Returns the number of the page that contains an address. `None`: the address is not in this memory.
    pub fn page(&self, hva: Hva) -> Option<u64> {
        let page = hva.0.checked_sub(Self::BASE.0)? >> self.granule.shift();
        (page < self.len()).then_some(page)
    }

    /// Returns the page number and the version in a frame number.
    pub fn identify(pfn: Pfn) -> (u64, u64) {
        (pfn.0 & ((1 << PAGE_BITS) - 1), pfn.0 >> PAGE_BITS)
    }

    fn word(&self, page: u64) -> &AtomicU64 {
        &self.pages[page as usize]
    }

    /// Returns the mapping of `page`. `None`: the page is not mapped.
    pub fn get(&self, page: u64) -> Option<HostPage> {
        let word = self.word(page).load(SeqCst);
        let kind = PageKind::ALL[((word & KIND) >> KIND_SHIFT) as usize];
        let pfn = Pfn(page | word >> VERSION_SHIFT << PAGE_BITS);
        let level = Level(((word & LEVEL) >> LEVEL_SHIFT) as u8);
        (word & PRESENT != 0).then(|| {
            HostPage::new(pfn, level)
                .with_writable(word & WRITABLE != 0)
                .with_execute(kind != PageKind::NotExecutable)
                .with_memory(kind.memory())
        })
    }

    /// Returns a page like [`HostMemory::get`], but with no right to write if the page may be shared.
    pub(crate) fn usable(&self, page: u64) -> Option<HostPage> {
        let found = self.get(page)?;
        Some(found.with_writable(found.writable && !self.is_shared(page)))
    }

    /// Whether `page` is not present yet.
    pub fn is_absent(&self, page: u64) -> bool {
        self.word(page).load(SeqCst) & (PRESENT | AWAITED) == AWAITED
    }

    /// Changes the mapping of `pages`. Huge mappings that reach beyond the range are split. So a page outside the range
    /// keeps its memory, but its level may change.
    pub fn change(&self, pages: &Range<u64>, change: HostChange) {
        if change == HostChange::Nothing {
            return;
        }
        self.cut(pages.start);
        self.cut(pages.end);
        let version = self.new_version();
        for page in pages.clone() {
            let word = self.word(page);
            let now = word.load(SeqCst);
            let new = match change {
                HostChange::Nothing => now,
                HostChange::Punch => now & !(PRESENT | SHARED | AWAITED),
                HostChange::Await => now & !(PRESENT | SHARED) | AWAITED,
                HostChange::Protect { writable } => {
                    now & !WRITABLE | if writable { WRITABLE } else { 0 }
                }
                HostChange::Remap {
                    level,
                    writable,
                    kind,
                } => {
                    let level = self.fitting(pages, page, level);
                    PRESENT
                        | if writable { WRITABLE } else { 0 }
                        | (kind as u64) << KIND_SHIFT
                        | (level.0 as u64) << LEVEL_SHIFT
                        | version << VERSION_SHIFT
                }
            };
            word.store(new, SeqCst);
        }
    }

    fn new_version(&self) -> u64 {
        self.next_version.fetch_add(1, Relaxed) % self.versions()
    }

    /// Makes another host memory with the same frames. From now on, the two memories share these frames.
    pub(crate) fn share(&self) -> Self {
        let share = |word: &AtomicU64| {
            let now = word.load(SeqCst);
            let shared = if now & PRESENT != 0 { SHARED } else { 0 };
            word.store(now | shared, SeqCst);
            AtomicU64::new(now | shared)
        };
        HostMemory {
            granule: self.granule,
            pages: self.pages.iter().map(share).collect(),
            next_version: self.next_version.clone(),
        }
    }

    /// Whether another VM may use a frame of `page`, or of the huge page that contains it.
    pub(crate) fn is_shared(&self, page: u64) -> bool {
        self.word(page).load(SeqCst) & SHARED != 0
    }

    /// Records that no other VM uses a frame of `pages` any more. `pages` consists of whole huge pages.
    pub(crate) fn end_sharing(&self, pages: Range<u64>) {
        for page in pages {
            self.word(page).fetch_and(!SHARED, SeqCst);
        }
    }

    /// Splits the huge page that contains `page`, and makes `page` not shared.
    pub(crate) fn separate(&self, page: u64) {
        self.cut(page);
        self.cut(page + 1);
        self.end_sharing(page..page + 1);
    }

    /// Gives `page` its own frame. Returns the frame.
    pub(crate) fn replace(&self, page: u64) -> Pfn {
        self.separate(page);
        let low = (1 << VERSION_SHIFT) - 1;
        let now = self.word(page).load(SeqCst) & low;
        let word = now | self.new_version() << VERSION_SHIFT;
        self.word(page).store(word, SeqCst);
        self.get(page).expect("it is present").pfn
    }

    /// Splits the huge mapping that crosses the boundary before page `at`, if there is one.
    fn cut(&self, at: u64) {
        for level in [Level::GIGA, Level::MEGA] {
            let size = self.granule.pages(level);
            if at.is_multiple_of(size) {
                continue;
            }
            let start = at & !(size - 1);
            for page in start..(start + size).min(self.len()) {
                let word = self.word(page);
                let now = word.load(SeqCst);
                if (now & LEVEL) >> LEVEL_SHIFT >= level.0 as u64 {
                    let below = (level.below().0 as u64) << LEVEL_SHIFT;
                    word.store(now & !LEVEL | below, SeqCst);
                }
            }
        }
    }

    /// Returns the highest level, at most `level`, whose aligned region around `page` lies within `pages`.
    fn fitting(&self, pages: &Range<u64>, page: u64, mut level: Level) -> Level {
        while level > Level::PAGE {
            let size = self.granule.pages(level);
            let start = page & !(size - 1);
            if pages.start <= start && start + size <= pages.end {
                break;
            }
            level = level.below();
        }
        level
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_splits_what_crosses_it_and_nothing_else() {
        let host = HostMemory::new(1 << 19);
        let huge = HostChange::Remap {
            level: Level::GIGA,
            writable: true,
            kind: PageKind::Ordinary,
        };
        host.change(&(0..1 << 19), huge);
        assert_eq!(host.get(700).unwrap().level, Level::GIGA);
        let before = host.get(513).unwrap().pfn;
        host.change(&(600..601), HostChange::Punch);
        assert_eq!(host.get(600), None);
        let beside = host.get(513).unwrap();
        assert_eq!((beside.level, beside.pfn), (Level::PAGE, before));
        assert_eq!(host.get(100).unwrap().level, Level::MEGA);
        assert_eq!(host.get(1 << 18).unwrap().level, Level::GIGA);
    }

    #[test]
    fn a_frame_number_tells_its_page_and_version() {
        let host = HostMemory::new(64);
        let old = host.get(7).unwrap().pfn;
        let remap = HostChange::Remap {
            level: Level::PAGE,
            writable: true,
            kind: PageKind::Ordinary,
        };
        host.change(&(7..8), remap);
        let new = host.get(7).unwrap().pfn;
        assert_ne!(old, new);
        assert_eq!(HostMemory::identify(old), (7, 0));
        assert_eq!(HostMemory::identify(new), (7, 1));
    }
}
