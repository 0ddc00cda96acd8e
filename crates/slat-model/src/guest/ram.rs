//! The machine under a guest MMU: the engine's platform, and the contents of guest memory.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use slat::{Hpa, PAGE_SIZE};

use crate::clones::Simulated;
use crate::host::HostMemory;
use crate::machine::Machine;
use crate::platform::SimPlatform;
use crate::watched::Watched;

/// The number of 8-byte words in a page.
pub(super) const WORDS: u64 = PAGE_SIZE / 8;

/// A simulated machine whose host memory has contents.
#[derive(Clone)]
pub struct GuestMachine {
    /// The platform, for [`slat::Vm::new`].
    pub platform: Arc<SimPlatform>,
    /// The contents of host memory.
    pub ram: Arc<GuestRam>,
}

impl fmt::Debug for GuestMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GuestMachine")
    }
}

impl GuestMachine {
    pub(super) fn new(pages: u64) -> Self {
        let machine = Simulated::new(pages, Arc::default());
        GuestMachine {
            platform: Watched::of(&machine, Arc::default()),
            ram: Arc::new(GuestRam {
                words: (0..pages * WORDS).map(|_| AtomicU64::new(0)).collect(),
                changes: Mutex::default(),
                sim: Arc::new(machine),
            }),
        }
    }
}

/// A word that the MMU under test has changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// The number of the page in host memory.
    pub page: u64,
    /// The number of the word in the page.
    pub word: u64,
    pub old: u64,
    pub new: u64,
}

/// The contents of host memory. The MMU under test reads guest page-table entries from this memory, and sets their
/// accessed and dirty flags. It must not write anything else.
///
/// If a page gets a new frame ([`GuestMmu::invalidate`](super::GuestMmu::invalidate)), the new frame has the same
/// contents.
pub struct GuestRam {
    words: Box<[AtomicU64]>,
    /// The changes by [`GuestRam::compare_exchange`] since the last [`GuestRam::take_changes`].
    changes: Mutex<Vec<Change>>,
    sim: Arc<Simulated>,
}

impl GuestRam {
    /// Reads the page-table entry of `size` (4 or 8) bytes at `host`, a multiple of `size`.
    ///
    /// # Panics
    /// If the host has given the page another frame.
    pub fn read(&self, host: Hpa, size: usize) -> u64 {
        let (page, word, shift) = self.locate(host, size, false);
        entry_in(self.word(page, word), shift, size)
    }

    /// Atomically replaces the page-table entry of `size` (4 or 8) bytes at `host` by `new` if it still is `old`.
    /// Returns whether the entry was replaced.
    ///
    /// # Panics
    /// If the host has given the page another frame, or if the frame is read-only.
    pub fn compare_exchange(&self, host: Hpa, size: usize, old: u64, new: u64) -> bool {
        let (page, word, shift) = self.locate(host, size, true);
        let mask = u64::MAX >> (64 - 8 * size);
        let at = self.at(page, word);
        let update = at.fetch_update(Relaxed, Relaxed, |now| {
            (entry_in(now, shift, size) == old).then_some(now & !(mask << shift) | new << shift)
        });
        let Ok(was) = update else { return false };
        let change = Change {
            page,
            word,
            old: was,
            new: was & !(mask << shift) | new << shift,
        };
        self.lock().push(change);
        true
    }

    /// Returns the number of the page that contains an entry, the number of the word in the page, and the entry's first
    /// bit in the word.
    fn locate(&self, host: Hpa, size: usize, write: bool) -> (u64, u64, u64) {
        assert!(
            host.0.is_multiple_of(size as u64),
            "an entry of {size} bytes at {host}"
        );
        let (page, _) = HostMemory::identify(host.pfn());
        let today = self.sim.page(page);
        let usable = today.is_some_and(|now| now.pfn == host.pfn() && (now.writable || !write));
        assert!(
            usable,
            "the MMU accesses {host}, host page {page:#x} is {today:?}"
        );
        (page, host.0 % PAGE_SIZE / 8, 8 * (host.0 % 8))
    }

    fn at(&self, page: u64, word: u64) -> &AtomicU64 {
        &self.words[(page * WORDS + word) as usize]
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Change>> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn word(&self, page: u64, word: u64) -> u64 {
        self.at(page, word).load(Relaxed)
    }

    pub(super) fn set_word(&self, page: u64, word: u64, value: u64) {
        self.at(page, word).store(value, Relaxed);
    }

    /// Returns the changes that the MMU has made since the last call.
    pub(super) fn take_changes(&self) -> Vec<Change> {
        std::mem::take(&mut *self.lock())
    }

    pub(super) fn sim(&self) -> &Arc<Simulated> {
        &self.sim
    }
}

/// Returns the entry of `size` bytes in `word`. `shift` is its first bit.
pub(super) fn entry_in(word: u64, shift: u64, size: usize) -> u64 {
    word >> shift & u64::MAX >> (64 - 8 * size)
}
