//! The allocator of table frames in tests. It detects misuse: a double free, a use after free, and a write after free.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{HashSet, VecDeque};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::*};

use slat::{Entries, Granule, Hpa, Pfn, TableMeta};

use crate::violations::Violations;

/// The word that fills a frame that is not in use. As an EPT entry, the word is a leaf at any level, and maps a frame
/// number that no host page has. So a page walk that reads a freed frame returns a recognizable translation.
pub const POISON: u64 = 0x000d_eadd_eadd_e0b7;

const LIVE: u64 = 0x11fe_11fe;
const FREED: u64 = 0xf4ee_f4ee;

/// The number of bytes of frames that must be freed after a frame before the frame is used again.
const QUARANTINE: u64 = 16 << 20;

/// The number of frames in a block, which is allocated at once: the largest number of tables in a concatenated root.
const BLOCK: u64 = 16;

/// The state of a frame. It is stored [`BLOCK`] pages after the frame's entries.
#[repr(C)]
struct Beside {
    meta: TableMeta,
    state: AtomicU64,
}

/// Returns the memory layout of a block: its frames, and then their states.
fn layout(granule: Granule) -> Layout {
    let bytes = (2 * BLOCK * granule.bytes()) as usize;
    Layout::from_size_align(bytes, bytes).expect("a power of two")
}

/// The allocator of table frames. A frame's number is its address in this process, divided by the granule.
pub struct Frames {
    granule: Granule,
    inner: Mutex<Inner>,
    violations: Violations,
}

impl Default for Frames {
    fn default() -> Self {
        Frames::new(Granule::Kib4)
    }
}

#[derive(Default)]
struct Inner {
    /// The first frame of each block.
    blocks: Vec<u64>,
    /// The frames that were allocated at least once.
    all: HashSet<u64>,
    /// The frames that were never allocated.
    fresh: Vec<Pfn>,
    quarantine: VecDeque<Pfn>,
}

impl Frames {
    /// Makes an allocator of frames of the size `granule`.
    pub fn new(granule: Granule) -> Self {
        Frames {
            granule,
            inner: Mutex::default(),
            violations: Violations::default(),
        }
    }

    /// Allocates a frame full of [`POISON`], with fresh metadata.
    pub fn alloc(&self) -> Pfn {
        let mut inner = self.inner.lock().unwrap();
        let frame = if inner.quarantine.len() as u64 * self.granule.bytes() > QUARANTINE {
            let frame = inner.quarantine.pop_front().unwrap();
            self.check_poison(frame);
            frame
        } else {
            if inner.fresh.is_empty() {
                let block = self.new_block(&mut inner);
                inner.fresh.extend((0..BLOCK).rev().map(|i| block.add(i)));
            }
            inner.fresh.pop().unwrap()
        };
        self.give(&mut inner, frame);
        frame
    }

    /// Allocates `count` contiguous frames. The first frame is aligned to `count` frames.
    pub fn alloc_run(&self, count: u64) -> Pfn {
        assert!(count <= BLOCK && count.is_power_of_two());
        let mut inner = self.inner.lock().unwrap();
        let block = self.new_block(&mut inner);
        (0..count).for_each(|i| self.give(&mut inner, block.add(i)));
        inner.fresh.extend((count..BLOCK).map(|i| block.add(i)));
        block
    }

    /// Frees a frame. If the frame may not be freed, records the misuse.
    pub fn free(&self, frame: Pfn) {
        let mut inner = self.inner.lock().unwrap();
        if !inner.all.contains(&frame.0) {
            self.note(format!("{frame:?} was freed, but never allocated"));
            return;
        }
        if self.state(frame).swap(FREED, SeqCst) != LIVE {
            self.note(format!("{frame:?} was freed twice"));
            return;
        }
        self.poison(frame);
        inner.quarantine.push_back(frame);
    }

    /// Returns the entries of a frame.
    #[inline]
    pub fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        self.check_live(frame);
        self.words(frame).cast()
    }

    /// Returns the metadata of a frame.
    #[inline]
    pub fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        self.check_live(frame);
        // The metadata is the first field of `Beside`.
        self.beside(frame).cast()
    }

    #[inline]
    fn check_live(&self, frame: Pfn) {
        if self.state(frame).load(Relaxed) != LIVE {
            self.note(format!("{frame:?} is used after it was freed"));
        }
    }

    fn check_poison(&self, frame: Pfn) {
        // SAFETY: frames stay allocated until `self` is dropped; entries are only accessed atomically.
        let words = unsafe { self.words(frame).as_ref() };
        if let Some(i) = words.iter().position(|w| w.load(Relaxed) != POISON) {
            self.note(format!(
                "entry {i} of {frame:?} was written after it was freed"
            ));
        }
    }

    fn note(&self, violation: String) {
        self.violations.note(violation);
    }

    /// Returns the first recorded misuse as an error.
    pub fn check(&self) -> Result<(), String> {
        for frame in &self.inner.lock().unwrap().quarantine {
            self.check_poison(*frame);
        }
        self.violations.check()
    }
}

impl Frames {
    fn new_block(&self, inner: &mut Inner) -> Pfn {
        // SAFETY: the layout's size is not 0.
        let memory = unsafe { alloc(layout(self.granule)) };
        assert!(!memory.is_null(), "the test machine is out of memory");
        let block = self.granule.pfn(Hpa(memory as u64));
        inner.blocks.push(block.0);
        (0..BLOCK).for_each(|i| self.poison(block.add(i)));
        block
    }

    fn give(&self, inner: &mut Inner, frame: Pfn) {
        inner.all.insert(frame.0);
        // SAFETY: the frame is not in use, and the page after its block has space for a `Beside`.
        unsafe {
            self.beside(frame).write(Beside {
                meta: TableMeta::new(),
                state: AtomicU64::new(LIVE),
            });
        }
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        let granule = self.granule;
        let inner = self.inner.get_mut().unwrap_or_else(|e| e.into_inner());
        for frame in inner.blocks.drain(..) {
            // SAFETY: `new_block` allocated the memory with this layout, and the engine was dropped.
            unsafe { dealloc(granule.hpa(Pfn(frame)).0 as *mut u8, layout(granule)) };
        }
    }
}

impl Frames {
    #[inline]
    fn words(&self, frame: Pfn) -> NonNull<[AtomicU64]> {
        let first = NonNull::new(self.granule.hpa(frame).0 as *mut AtomicU64);
        let first = first.expect("no frame is at address 0");
        NonNull::slice_from_raw_parts(first, self.granule.entries())
    }

    #[inline]
    fn beside(&self, frame: Pfn) -> NonNull<Beside> {
        let beside = self.granule.hpa(frame.add(BLOCK)).0;
        NonNull::new(beside as *mut _).expect("no frame is at address 0")
    }

    #[inline]
    fn state(&self, frame: Pfn) -> &AtomicU64 {
        // SAFETY: the engine only passes frames that `alloc` returned to it, now or earlier. The frames' memory stays
        // allocated until the platform is dropped. The field `state` is accessed only through shared references.
        unsafe { &(*self.beside(frame).as_ptr()).state }
    }

    fn poison(&self, frame: Pfn) {
        // SAFETY: frames stay allocated until the platform is dropped; entries are only accessed atomically.
        for word in unsafe { self.words(frame).as_ref() } {
            word.store(POISON, Relaxed);
        }
    }
}

/// Changes an entry of a 4 KiB frame, as the engine does.
#[cfg(test)]
pub(crate) fn write(frame: Pfn, index: usize, bits: u64) {
    let words = frame.hpa().0 as *const [AtomicU64; slat::ENTRIES];
    // SAFETY: frames stay allocated until the platform is dropped; entries are only accessed atomically.
    unsafe { &(*words)[index] }.store(bits, Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_free_is_noted() {
        let frames = Frames::default();
        let frame = frames.alloc();
        frames.free(frame);
        assert_eq!(frames.check(), Ok(()));
        frames.free(frame);
        assert!(frames.check().is_err());
    }

    #[test]
    fn use_after_free_is_noted() {
        let frames = Frames::default();
        let frame = frames.alloc();
        frames.free(frame);
        frames.entries(frame);
        assert!(frames.check().is_err());
    }

    #[test]
    fn a_late_write_is_noted() {
        let frames = Frames::default();
        let frame = frames.alloc();
        frames.free(frame);
        write(frame, 3, 0);
        assert!(frames.check().is_err());
    }
}
