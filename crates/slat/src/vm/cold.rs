//! Finds guest memory that was not used for some time, and so may be reclaimed.
//!
//! An accessed bit says whether a page was used since the last pass. A [`ColdMap`] stores how many passes ago each page
//! was used, in a byte for each page, like the generations of Linux's multi-generational LRU, but for one guest. The
//! caller owns the map, so a VM whose memory is not reclaimed has none.
//!
//! A pass has two halves. First the walk reads and clears the accessed bits, which in a tree of tables needs no lock
//! (`table/age.rs`). In the map, it marks the pages that are mapped and the pages that were used. Marks are only added,
//! so if several leaves map a page, one used leaf is enough to mark the page as used. Then all bytes of the map, which
//! only this thread accesses, are converted from marks to ages, many at a time.
//!
//! A huge leaf marks blocks of 512 pages instead of pages: a leaf of 2 MiB costs one byte. When a pass finds the first
//! small leaf in a block, each page of the block gets its own age, which starts as the block's age. When all pages of a
//! block are equal again, the block has one age again.

use alloc::vec::Vec;
use core::ops::Range;
use core::slice;

use super::Vm;
use crate::addr::{Granule, Hva, Level};
use crate::format::Format;
use crate::heap::{OutOfMemory, zeros};
use crate::platform::Platform;
use crate::table::Aged;

/// The number of pages of a block. With any granule, a leaf above level 1 maps a multiple of this number.
const BLOCK: usize = Granule::Kib4.pages(Level::MEGA) as usize;

// The bits of a byte in the map. The map has a byte for each block, and a byte for each page. Between two passes, a
// page's byte contains only `AGE`, and a block's byte contains `AGE` and `PAGES`.

/// The bits that contain the age plus one. 0: no leaf maps the page or block.
const AGE: u8 = 0x1f;
/// The bit that is set if each page of the block has its own age, in the page's byte. Otherwise all its pages have the
/// block's age.
const PAGES: u8 = 1 << 5;
/// The bit that is set if the current pass has found a leaf that maps the page or block.
const SEEN: u8 = 1 << 6;
/// The bit that is set if the current pass has found such a leaf that was used.
const YOUNG: u8 = 1 << 7;
const MARKS: u8 = SEEN | YOUNG;

/// For each page of some backing memory, the number of passes since the page was last used: the state that
/// [`Vm::cold_ranges`] keeps between two calls. It takes a byte for each page.
#[derive(Debug)]
pub struct ColdMap {
    granule: Granule,
    backing: Range<Hva>,
    /// The backing address of the first block.
    origin: Hva,
    /// A byte for each block, which is used if only huge leaves map the block. Blocks are aligned by backing address.
    blocks: Vec<u8>,
    /// A byte for each page of the blocks, which is used if small leaves map pages of the block.
    pages: Vec<u8>,
}

/// Memory that the guest has not used for some passes ([`Vm::cold_ranges`]).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ColdRange {
    /// The backing addresses of the range.
    pub hvas: Range<Hva>,
    /// The number of consecutive passes, up to the last one, that have found no page of the range used; at most
    /// [`ColdMap::MOST_PASSES`].
    pub passes: u8,
    /// Whether huge leaves map the range: then all pages that one leaf maps share one accessed bit.
    pub huge: bool,
}

impl ColdMap {
    /// The largest number of passes that a map counts.
    pub const MOST_PASSES: u8 = AGE - 1;

    /// Makes a map for `backing`, shared or private backing of memory slots, rounded out to pages of 4 KiB. `backing`
    /// may be a part of a slot's backing, or that of several slots.
    ///
    /// # Errors
    /// [`OutOfMemory`]: there is no memory for the map.
    pub fn new(backing: Range<Hva>) -> Result<Self, OutOfMemory> {
        Self::with_granule(backing, Granule::Kib4)
    }

    /// Makes a map like [`new`](Self::new), but for a VM with tables of `granule`.
    ///
    /// # Errors
    /// [`OutOfMemory`]: there is no memory for the map.
    pub fn with_granule(backing: Range<Hva>, granule: Granule) -> Result<Self, OutOfMemory> {
        let page = granule.bytes();
        let block = BLOCK as u64 * page;
        let backing = Hva(backing.start.0 / page * page)..Hva(backing.end.0.next_multiple_of(page));
        let origin = Hva(backing.start.0 / block * block);
        let count = (backing.end.0.saturating_sub(origin.0)).div_ceil(block);
        let count = usize::try_from(count).map_err(|_| OutOfMemory)?;
        Ok(ColdMap {
            granule,
            blocks: zeros(count)?,
            pages: zeros(count.checked_mul(BLOCK).ok_or(OutOfMemory)?)?,
            backing,
            origin,
        })
    }

    /// Returns the number of consecutive passes, up to the last one, that have found the page at `backing` unused.
    /// `None`: the page is not mapped, or not in the map.
    pub fn passes(&self, backing: Hva) -> Option<u8> {
        let is_there = self.backing.contains(&backing);
        is_there.then(|| self.age(self.index(backing)))?
    }

    /// Returns the largest ranges that were not used in the last `passes` passes, in the order of address. If `passes`
    /// is 0, returns all mapped memory. Does not make a pass.
    pub fn ranges(&self, passes: u8) -> impl Iterator<Item = ColdRange> + use<'_> {
        Ranges {
            map: self,
            passes,
            at: self.index(self.backing.start),
        }
    }

    fn index(&self, backing: Hva) -> usize {
        self.granule.pages_between(self.origin, backing) as usize
    }

    fn hva(&self, index: usize) -> Hva {
        self.granule.add_pages(self.origin, index as u64)
    }

    /// Returns the age of page `index`, in passes. `None`: no leaf maps the page.
    #[inline]
    fn age(&self, index: usize) -> Option<u8> {
        let block = self.blocks[index / BLOCK];
        let byte = if block & PAGES == 0 {
            block
        } else {
            self.pages[index]
        };
        (byte & AGE).checked_sub(1)
    }

    /// Marks the pages that `aged` maps. `backing` backs the first frame of `aged`; for a huge leaf, it may be below
    /// the map's first address.
    fn mark(&mut self, backing: Hva, aged: Aged) {
        if aged.level > Level::PAGE {
            self.mark_huge(backing, aged.level, aged.young != 0);
            return;
        }
        let mut index = self.index(backing);
        let (mut mapped, mut young) = (aged.mapped, aged.young);
        while mapped != 0 {
            // The number of pages up to the end of the block.
            let here = (BLOCK - index % BLOCK).min(Aged::MOST);
            self.blocks[index / BLOCK] |= PAGES;
            let pages = &mut self.pages[index..index + here];
            if (mapped, young) == (u64::MAX, 0) {
                // Fast path for the usual case, since most memory is idle: all 64 pages are mapped, and the guest has
                // used none.
                pages.iter_mut().for_each(|page| *page |= SEEN);
            } else {
                for (n, page) in pages.iter_mut().enumerate() {
                    *page |= (mapped >> n & 1) as u8 * SEEN;
                    *page |= (young >> n & 1) as u8 * YOUNG;
                }
            }
            (mapped, young) = (shifted(mapped, here), shifted(young, here));
            index += here;
        }
    }

    /// Marks the pages that a huge leaf of `level` maps.
    fn mark_huge(&mut self, backing: Hva, level: Level, young: bool) {
        let marks = SEEN | if young { YOUNG } else { 0 };
        // A huge leaf of a slot that has just been deleted or moved may have a first address below 0: calculate with
        // signed numbers.
        let first = backing.0.wrapping_sub(self.origin.0) as i64 >> self.granule.shift();
        let end = first + self.granule.pages(level) as i64;
        let range = [self.backing.start, self.backing.end].map(|hva| self.index(hva) as i64);
        let mut at = first.max(range[0]) as usize;
        let end = end.min(range[1]).max(0) as usize;
        while at < end {
            let block = at / BLOCK;
            let next = end.min((block + 1) * BLOCK);
            if next - at == BLOCK {
                self.blocks[block] |= marks;
            } else {
                self.blocks[block] |= PAGES;
                let part = &mut self.pages[at..next];
                part.iter_mut().for_each(|page| *page |= marks);
            }
            at = next;
        }
    }

    /// Ends a pass over the leaves: converts the marks that the pass has made to ages.
    fn end_pass(&mut self) {
        let blocks = self.blocks.iter_mut();
        for (block, pages) in blocks.zip(self.pages.chunks_exact_mut(BLOCK)) {
            let (old, marks) = (*block & AGE, *block & MARKS);
            let had_pages = *block & PAGES;
            *block = aged(*block, 0);
            if had_pages == 0 {
                continue;
            }
            let mut small = 0;
            for page in pages.iter_mut() {
                small |= *page & SEEN;
                *page = aged(*page | marks, old);
            }
            // If this pass found no small leaf, and found no huge leaf or a used one, the ages of all pages are equal.
            match small == 0 && marks != SEEN {
                true => pages.fill(0),
                false => *block |= PAGES,
            }
        }
    }
}

/// Returns the value of a byte after a pass. `inherited` is the age of the page's block, which counts if the page's
/// byte has no age.
#[inline(always)]
fn aged(byte: u8, inherited: u8) -> u8 {
    let own = byte & AGE;
    let old = if own == 0 { inherited } else { own };
    let idle = (old + 1).min(AGE);
    let mapped = if byte & YOUNG == 0 { idle } else { 1 };
    if byte & SEEN == 0 { 0 } else { mapped }
}

/// Returns `mask` shifted right by `bits`, which may be 64: then returns 0.
fn shifted(mask: u64, bits: usize) -> u64 {
    mask.checked_shr(bits as u32).unwrap_or(0)
}

/// Iterates over the cold ranges of a map.
struct Ranges<'m> {
    map: &'m ColdMap,
    passes: u8,
    /// The index of the next page to check.
    at: usize,
}

impl Ranges<'_> {
    /// Returns the end of a run of pages, in one block and beginning at `at`, that are all cold, or all not cold. If
    /// they are cold, also returns the least age of them, and whether huge leaves map them.
    fn piece(&self, at: usize) -> (usize, Option<(u8, bool)>) {
        let block = self.map.blocks[at / BLOCK];
        let end = (at / BLOCK + 1) * BLOCK;
        let is_cold = |byte: &u8| *byte > self.passes;
        let (bytes, next) = if block & PAGES == 0 {
            (slice::from_ref(&block), end)
        } else {
            let pages = &self.map.pages[at..end];
            let first = is_cold(&pages[0]);
            let count = pages.iter().position(|page| is_cold(page) != first);
            let count = count.unwrap_or(pages.len());
            (&pages[..count], at + count)
        };
        let least = bytes.iter().map(|byte| byte & AGE).min().unwrap_or(0);
        let cold = is_cold(&least).then(|| (least - 1, block & AGE != 0));
        (next, cold)
    }
}

impl Iterator for Ranges<'_> {
    type Item = ColdRange;

    fn next(&mut self) -> Option<ColdRange> {
        let end = self.map.index(self.map.backing.end);
        let mut found: Option<(usize, u8, bool)> = None;
        while self.at < end {
            let (next, cold) = self.piece(self.at);
            found = match (found, cold) {
                (None, None) => None,
                (None, Some((age, huge))) => Some((self.at, age, huge)),
                (Some((start, least, huge)), Some((age, alike))) if huge == alike => {
                    Some((start, least.min(age), huge))
                }
                (Some(_), _) => break,
            };
            self.at = next.min(end);
        }
        found.map(|(start, passes, huge)| ColdRange {
            hvas: self.map.hva(start)..self.map.hva(self.at),
            passes,
            huge,
        })
    }
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Makes a pass over the memory of `map`. Returns the largest ranges that the guest has not used in the last
    /// `passes` passes, including this pass, in the order of address. If `passes` is 0, returns all mapped memory.
    ///
    /// Memory that no leaf maps is in no range. A page counts as used in the pass in which it gets its first leaf, or a
    /// new leaf after a zap. (Between the zap, which [`Platform::zapped`] reports, and the new leaf, the guest has not
    /// used the page.) If several slots or address spaces map a page, one use through any of them counts. For private
    /// frames, the map is of their private backing.
    ///
    /// The pass clears accessed bits. So if two maps cover the same memory, or [`Vm::age`] is called for it, each does
    /// not see the uses whose bits the other has cleared. A huge leaf has one accessed bit, and a pass clears it even
    /// if the map covers only a part of the leaf's pages.
    ///
    /// Does not flush TLBs. So a page that the guest uses through a TLB entry may look unused until a CPU walks the
    /// tables for it again: cold pages may be in use. This is harmless, because a host that reclaims a page calls
    /// [`Vm::invalidate`], which flushes, and the next use faults. If guests seldom reload their TLBs, choose `passes`
    /// above 1.
    ///
    /// # Panics
    /// If `map` was made for another granule than that of the format.
    ///
    /// With EPT a pass takes 1.9 ns for each 4 KiB leaf that was not used, 7 ns for each that was used, and 9 ns for
    /// each leaf of 2 MiB. A used leaf takes longer because its bit is cleared by a locked instruction. Faults do not
    /// wait for a pass, except with the MMUs of shadow pages, whose lock the pass holds during each step.
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
    /// # use slat::{Access, ColdMap, Config, Ept, Gpa, Region, Vm};
    /// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
    /// vm.set_memory_region(0, &Region::new(0, Gpa(0), 0x20_0000, backing))?;
    /// let mut map = ColdMap::new(backing..backing.add_pages(512))?;
    /// vm.create_vcpu()?.hardware_fault(Gpa(0x3000), Access::Write)?;
    /// assert_eq!(map.passes(backing.add_pages(3)), None);
    ///
    /// // The page was used before the first pass, and not between the first and the second pass.
    /// vm.cold_ranges(&mut map, 1).for_each(drop);
    /// assert_eq!(map.passes(backing.add_pages(3)), Some(0));
    /// let cold: Vec<_> = vm.cold_ranges(&mut map, 1).collect();
    /// assert!(cold[0].hvas.contains(&backing.add_pages(3)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn cold_ranges<'m>(
        &self,
        map: &'m mut ColdMap,
        passes: u8,
    ) -> impl Iterator<Item = ColdRange> + use<'m, P, F> {
        assert_eq!(map.granule, F::GRANULE, "the granule of a cold map");
        self.each_leaf(map.backing.clone(), true, |hva, aged| map.mark(hva, aged));
        map.end_pass();
        map.ranges(passes)
    }
}
