//! The VMM's side of a dirty ring (KVM's API document, section 8.29).

use std::collections::VecDeque;
use std::sync::Arc;

use slat::{DirtyGfn, DirtyRing};

/// A page in a ring entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyPage {
    /// The number of the page's address space.
    pub space: usize,
    /// The id of the page's slot.
    pub slot: u32,
    /// The number of the page, counted from the slot's start.
    pub page: u64,
}

impl DirtyPage {
    fn new((slot, page): (u32, u64)) -> Self {
        DirtyPage {
            space: (slot >> 16) as usize,
            slot: slot & 0xffff,
            page,
        }
    }
}

/// A reference to the memory of one ring, and the VMM's position in the ring.
pub struct RingClient {
    entries: Arc<[DirtyGfn]>,
    /// The pages of the ring entries that the VMM has seen and that were not reset, oldest first.
    in_use: VecDeque<DirtyPage>,
    /// The index after the last ring entry that the VMM has seen.
    seen: u32,
    /// The index after the last ring entry that the VMM has collected.
    collected: u32,
}

impl RingClient {
    /// The number of entries in a ring.
    pub const LEN: u32 = 128;
    /// The number of ring entries in use at which the vCPU exits (dirty ring full).
    pub(crate) const SOFT_LIMIT: u32 = Self::LEN - DirtyRing::RESERVED;

    /// Makes an empty ring.
    pub fn new() -> Self {
        RingClient {
            entries: (0..Self::LEN).map(|_| DirtyGfn::new()).collect(),
            in_use: VecDeque::new(),
            seen: 0,
            collected: 0,
        }
    }

    /// Returns the engine's object for the ring.
    pub fn ring(&self) -> Arc<DirtyRing> {
        Arc::new(DirtyRing::new(self.entries.clone()).expect("there is memory"))
    }

    fn entry(&self, index: u32) -> &DirtyGfn {
        &self.entries[(index % Self::LEN) as usize]
    }

    /// Returns the next ring entry that this function has not returned yet. Does not collect it.
    pub fn look(&mut self) -> Option<DirtyPage> {
        let page = DirtyPage::new(self.entry(self.seen).page()?);
        self.in_use.push_back(page);
        self.seen += 1;
        Some(page)
    }

    /// Collects the next ring entry. From now on, the engine may reset this entry.
    pub fn collect(&mut self) -> Option<DirtyPage> {
        if self.seen == self.collected {
            self.look()?;
        }
        let page = self.entry(self.collected).collect()?;
        self.collected += 1;
        Some(DirtyPage::new(page))
    }

    /// Records that the engine has reset one more ring entry. Call when that happens.
    pub(crate) fn note_reset(&mut self) {
        self.in_use.pop_front();
    }

    /// Returns the number of ring entries that were seen and not reset.
    pub fn in_use(&self) -> u32 {
        self.in_use.len() as u32
    }

    /// Returns the pages that the engine has not reset. Call when the engine has released the ring.
    pub fn left(&mut self) -> impl Iterator<Item = DirtyPage> {
        self.in_use.drain(..)
    }
}

impl Default for RingClient {
    fn default() -> Self {
        Self::new()
    }
}
