//! The client's side of a dirty ring: KVM's API document, 8.29.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use slat::{DirtyGfn, DirtyRing};

const DIRTY: u32 = 1 << 0;
const RESET: u32 = 1 << 1;

/// `struct kvm_dirty_gfn`.
#[repr(C)]
struct Entry {
    flags: AtomicU32,
    slot: AtomicU32,
    offset: AtomicU64,
}

/// A page that a ring names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyPage {
    /// Address space.
    pub space: usize,
    /// Id of the slot.
    pub slot: u32,
    /// Page, counted from the slot's start.
    pub page: u64,
}

/// The memory of one ring, and how far the client is in it.
pub struct RingClient {
    entries: Box<[Entry]>,
    /// Behind the last entry that was looked at.
    seen: u32,
    /// Behind the last entry that was collected.
    collected: u32,
    /// How many the engine has reset.
    reset: u32,
}

impl RingClient {
    /// Entries in a ring.
    pub const LEN: u32 = 128;
    /// So many entries in use stop the vCPU.
    pub const SOFT_LIMIT: u32 = Self::LEN - DirtyRing::RESERVED;

    /// An empty ring.
    pub fn new() -> Self {
        let entries = (0..Self::LEN).map(|_| Entry {
            flags: AtomicU32::new(0),
            slot: AtomicU32::new(0),
            offset: AtomicU64::new(0),
        });
        RingClient {
            entries: entries.collect(),
            seen: 0,
            collected: 0,
            reset: 0,
        }
    }

    /// The engine's side of it, whose atomics are a model checker's own under `cfg(loom)`: not there.
    ///
    /// # Safety
    /// - this client outlives the answer.
    pub unsafe fn ring(&self) -> DirtyRing {
        assert_eq!(size_of::<Entry>(), size_of::<DirtyGfn>());
        let entries = NonNull::from(&*self.entries).cast::<DirtyGfn>();
        // SAFETY: the memory has `LEN` entries of the same layout, all atomics, and stays where it is
        // until the client goes (caller's promise).
        unsafe { DirtyRing::new(entries, Self::LEN) }
    }

    fn entry(&self, index: u32) -> &Entry {
        &self.entries[(index % Self::LEN) as usize]
    }

    fn dirty(&self, index: u32) -> Option<DirtyPage> {
        let entry = self.entry(index);
        (entry.flags.load(Acquire) == DIRTY).then(|| {
            let slot = entry.slot.load(Relaxed);
            DirtyPage {
                space: (slot >> 16) as usize,
                slot: slot & 0xffff,
                page: entry.offset.load(Relaxed),
            }
        })
    }

    /// The next entry that was not looked at yet. It stays to be collected.
    pub fn look(&mut self) -> Option<DirtyPage> {
        let page = self.dirty(self.seen)?;
        self.seen += 1;
        Some(page)
    }

    /// Takes the next entry: the engine may reset it from now on.
    pub fn collect(&mut self) -> Option<DirtyPage> {
        let page = self.dirty(self.collected)?;
        self.entry(self.collected)
            .flags
            .store(DIRTY | RESET, Release);
        self.collected += 1;
        self.seen = self.seen.max(self.collected);
        Some(page)
    }

    /// The engine has reset one more entry.
    pub fn note_reset(&mut self) {
        self.reset += 1;
    }

    /// Entries that were looked at and not reset.
    pub fn in_use(&self) -> u32 {
        self.seen - self.reset
    }
}

impl Default for RingClient {
    fn default() -> Self {
        Self::new()
    }
}
