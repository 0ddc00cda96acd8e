//! Pages with their frames: those that one VM or one layer has.

use alloc::vec::Vec;

use crate::addr::Pfn;
use crate::heap::{OutOfMemory, zeros};

/// Some pages of a memory, each with its frame.
pub(super) struct Delta {
    /// The number of pages of a stretch.
    stretch: u64,
    /// The number of stretches of the memory.
    count: u64,
    /// For each stretch, one more than its index in `stretches`, or 0. Empty if there are no pages.
    index: Vec<u32>,
    stretches: Vec<Stretch>,
    pages: u64,
}

/// The pages of a stretch.
pub(super) enum Stretch {
    /// All pages, in consecutive frames from this one on, which is aligned to the size of a stretch.
    Block(Pfn),
    /// Some pages.
    Pages(Pages),
}

/// Some pages of a stretch, each with its frame.
pub(super) struct Pages {
    /// Bit n is set if page n of the stretch is there.
    has: Vec<u64>,
    /// The frames of these pages, in the order of the pages.
    frames: Vec<Pfn>,
}

impl Pages {
    /// Returns how many pages before page `offset` are there.
    fn rank(&self, offset: u64) -> usize {
        let (word, bit) = (offset as usize / 64, offset % 64);
        let before: u32 = self.has[..word].iter().map(|word| word.count_ones()).sum();
        (before + (self.has[word] & ((1 << bit) - 1)).count_ones()) as usize
    }

    fn has(&self, offset: u64) -> bool {
        self.has[offset as usize / 64] >> (offset % 64) & 1 != 0
    }

    /// Returns the frame of page `offset`. `None`: the page is not there.
    fn find(&self, offset: u64) -> Option<Pfn> {
        self.has(offset).then(|| self.frames[self.rank(offset)])
    }

    /// Adds a page. There is memory for it.
    fn insert(&mut self, offset: u64, frame: Pfn) {
        debug_assert!(!self.has(offset) && self.frames.len() < self.frames.capacity());
        let at = self.rank(offset);
        self.has[offset as usize / 64] |= 1 << (offset % 64);
        self.frames.insert(at, frame);
    }

    /// Adds the pages of `lower` that are not there, and passes the frames of its other pages to `free`. There is
    /// memory for them.
    fn absorb(&mut self, lower: &mut Pages, free: &mut impl FnMut(Pfn, u64)) {
        let mut frames = lower.frames.drain(..);
        for (word, bits) in lower.has.iter_mut().enumerate() {
            while *bits != 0 {
                let offset = word as u64 * 64 + u64::from(bits.trailing_zeros());
                *bits &= *bits - 1;
                let frame = frames.next().expect("a frame for each page");
                match self.has(offset) {
                    true => free(frame, 1),
                    false => self.insert(offset, frame),
                }
            }
        }
    }
}

impl Delta {
    /// Makes a delta without pages, for a memory of `pages` pages with `stretch` pages in a stretch.
    pub(super) fn new(stretch: u64, pages: u64) -> Self {
        Delta {
            stretch,
            count: pages.div_ceil(stretch),
            index: Vec::new(),
            stretches: Vec::new(),
            pages: 0,
        }
    }

    /// Makes a delta without pages, for the same memory.
    pub(super) fn empty(&self) -> Self {
        Delta::new(self.stretch, self.count * self.stretch)
    }

    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the frame of `page`. `None`: the page is not there.
    pub(super) fn find(&self, page: u64) -> Option<Pfn> {
        let offset = self.offset(page);
        match self.stretch(page)? {
            Stretch::Block(first) => Some(first.add(offset)),
            Stretch::Pages(pages) => pages.find(offset),
        }
    }

    /// Returns the number of `page` in its stretch.
    fn offset(&self, page: u64) -> u64 {
        page % self.stretch
    }

    /// Returns the stretch of `page`. `None`: no page of the stretch is there.
    pub(super) fn stretch(&self, page: u64) -> Option<&Stretch> {
        let at = *self.index.get((page / self.stretch) as usize)?;
        let found = self.stretches.get((at as usize).checked_sub(1)?)?;
        // A stretch was prepared for a page for which there was no memory then.
        let is_empty = matches!(found, Stretch::Pages(pages) if pages.frames.is_empty());
        (!is_empty).then_some(found)
    }

    /// Returns the pages of the stretch of `page`. Call after [`Self::prepare`].
    fn pages_of(&mut self, page: u64) -> &mut Pages {
        let at = self.index[(page / self.stretch) as usize] as usize - 1;
        match &mut self.stretches[at] {
            Stretch::Pages(pages) => pages,
            Stretch::Block(_) => panic!("page {page} of a delta is there already"),
        }
    }

    /// Allocates the memory to add `page`.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the delta has the same pages as before.
    pub(super) fn prepare(&mut self, page: u64) -> Result<(), OutOfMemory> {
        if self.index.is_empty() {
            self.index = zeros(self.count as usize)?;
        }
        let at = &mut self.index[(page / self.stretch) as usize];
        if *at == 0 {
            let has = zeros(self.stretch.div_ceil(64) as usize)?;
            self.stretches.try_reserve(1).map_err(|_| OutOfMemory)?;
            self.stretches.push(empty_pages(has));
            *at = self.stretches.len() as u32;
        }
        let frames = &mut self.pages_of(page).frames;
        frames.try_reserve(1).map_err(|_| OutOfMemory)
    }

    /// Adds `page`, which is not there. Call after [`Self::prepare`] for this page.
    pub(super) fn insert(&mut self, page: u64, frame: Pfn) {
        let offset = self.offset(page);
        self.pages_of(page).insert(offset, frame);
        self.pages += 1;
    }

    /// Adds `pages` pages from `page` on, none of which is there, in frames from `first` on.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the delta has the same pages as before.
    pub(super) fn put(&mut self, page: u64, first: Pfn, pages: u64) -> Result<(), OutOfMemory> {
        let (stretch, end) = (self.stretch, page + pages);
        let frame = |at: u64| first.add(at - page);
        let is_block = |at: u64| {
            let is_aligned = at.is_multiple_of(stretch) && frame(at).0.is_multiple_of(stretch);
            is_aligned && at + stretch <= end
        };
        // First allocate, with empty stretches, and then add the pages, which cannot fail.
        let mut at = page;
        while at < end {
            let next = end.min((at / stretch + 1) * stretch);
            assert!(
                self.stretch(at).is_none() || !is_block(at),
                "pages are there already"
            );
            self.prepare(at)?;
            if !is_block(at) {
                let frames = &mut self.pages_of(at).frames;
                frames
                    .try_reserve((next - at) as usize)
                    .map_err(|_| OutOfMemory)?;
            }
            at = next;
        }
        at = page;
        while at < end {
            let next = end.min((at / stretch + 1) * stretch);
            if is_block(at) {
                let index = self.index[(at / stretch) as usize] as usize - 1;
                self.stretches[index] = Stretch::Block(frame(at));
                self.pages += stretch;
            } else {
                (at..next).for_each(|at| self.insert(at, frame(at)));
            }
            at = next;
        }
        Ok(())
    }

    /// Moves the pages of `lower` that are not there to this delta, and passes the frames of its other pages to `free`.
    /// Returns `false` and does nothing if there is no memory, or if pages would be in the middle of a block of `lower`.
    pub(super) fn absorb(&mut self, lower: &mut Delta, mut free: impl FnMut(Pfn, u64)) -> bool {
        let (mine, its) = (self.index.iter(), lower.index.iter());
        let pairs = mine
            .zip(its)
            .filter(|(mine, its)| **mine != 0 && **its != 0);
        for (mine, its) in pairs {
            let its = &lower.stretches[*its as usize - 1];
            match (&mut self.stretches[*mine as usize - 1], its) {
                (Stretch::Pages(_), Stretch::Block(_)) => return false,
                (Stretch::Pages(mine), Stretch::Pages(its)) => {
                    if mine.frames.try_reserve(its.frames.len()).is_err() {
                        return false;
                    }
                }
                (Stretch::Block(_), _) => {}
            }
        }
        if (self.stretches.try_reserve(lower.stretches.len())).is_err() {
            return false;
        }
        for (mine, its) in self.index.iter_mut().zip(&lower.index) {
            let Some(its) = (*its as usize).checked_sub(1) else {
                continue;
            };
            let its = core::mem::replace(&mut lower.stretches[its], empty_pages(Vec::new()));
            match (mine.checked_sub(1), its) {
                (None, its) => {
                    self.stretches.push(its);
                    *mine = self.stretches.len() as u32;
                }
                (Some(at), mut its) => match (&mut self.stretches[at as usize], &mut its) {
                    (Stretch::Pages(mine), Stretch::Pages(its)) => mine.absorb(its, &mut free),
                    _ => its.drain(self.stretch, &mut free),
                },
            }
        }
        self.pages = (self.stretches.iter())
            .map(|some| some.len(self.stretch))
            .sum();
        *lower = lower.empty();
        true
    }

    /// Removes all pages, and passes their frames to `free`, a number of consecutive frames at a time.
    pub(super) fn drain(&mut self, mut free: impl FnMut(Pfn, u64)) {
        for mut stretch in self.stretches.drain(..) {
            stretch.drain(self.stretch, &mut free);
        }
        *self = self.empty();
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let of_pages = |stretch: &Stretch| match stretch {
            Stretch::Block(_) => 0,
            Stretch::Pages(pages) => 8 * (pages.has.capacity() + pages.frames.capacity()),
        };
        let stretches = self.stretches.capacity() * size_of::<Stretch>();
        4 * self.index.capacity() + stretches + self.stretches.iter().map(of_pages).sum::<usize>()
    }
}

impl Stretch {
    /// Returns the number of pages, in a stretch of `size` pages.
    fn len(&self, size: u64) -> u64 {
        match self {
            Stretch::Block(_) => size,
            Stretch::Pages(pages) => pages.frames.len() as u64,
        }
    }

    /// Removes all pages of a stretch of `size` pages, and passes their frames to `free`.
    fn drain(&mut self, size: u64, free: &mut impl FnMut(Pfn, u64)) {
        match core::mem::replace(self, empty_pages(Vec::new())) {
            Stretch::Block(first) => free(first, size),
            Stretch::Pages(pages) => pages.frames.iter().for_each(|frame| free(*frame, 1)),
        }
    }
}

/// Makes a stretch without pages. `has` has a bit for each page, all 0; or none, if no page will be added.
fn empty_pages(has: Vec<u64>) -> Stretch {
    Stretch::Pages(Pages {
        has,
        frames: Vec::new(),
    })
}
