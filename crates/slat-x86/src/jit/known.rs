//! A table of all compiled code of a process, found by the guest code for which it was compiled. Code that was compiled
//! once is not compiled again for another CPU, for another guest process that runs the same program, or for a guest
//! process that maps the program at another address.
//!
//! For a region that is found here, only the hash of the requested block is known to match. The caller compares all of
//! the region's code with memory before using it (`Executor::adopt`). Regions that no block uses any more stay in the
//! table until new regions need the memory.

use crate::hash::Seeded;
use crate::region::{Kind, Region};
use slat_jit::lock;
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex};

/// Regions by the hash of one of their blocks: of its kind, place and bytes.
type Entries = HashMap<u64, Arc<Region>, Seeded>;

/// The regions, found by the blocks at which they can be entered. For each block, the table has the newest region, or
/// an older region of a better tier.
pub(super) struct Known {
    entries: Mutex<Entries>,
    hasher: Seeded,
}

impl Known {
    pub(super) fn new() -> Self {
        Self {
            entries: Mutex::new(HashMap::with_hasher(Seeded::new())),
            hasher: Seeded::new(),
        }
    }

    /// Returns the hash of a block with this kind, place and these bytes.
    fn hash(&self, kind: Kind, place: u64, bytes: &[u8]) -> u64 {
        let words = bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        let start = self.hasher.hash_one((kind, place));
        words.fold(start, |hash, word| self.hasher.hash_one((hash, word)))
    }

    /// Adds a region. If there is no memory for its entries, other CPUs will compile the same code again.
    pub(super) fn add(&self, region: &Arc<Region>) {
        let mut entries = lock(&self.entries);
        if entries.try_reserve(region.source.blocks.len()).is_err() {
            return;
        }
        for (_, block) in region.entered() {
            let hash = self.hash(region.source.kind, block.0, &block.1);
            let is_better = |known: &Arc<Region>| {
                known.tier > region.tier && known.source.blocks.contains(block)
            };
            if !entries.get(&hash).is_some_and(is_better) {
                entries.insert(hash, region.clone());
            }
        }
    }

    /// Returns the region that can probably be entered at a block with this kind, place and these bytes.
    pub(super) fn at(&self, kind: Kind, place: u64, bytes: &[u8]) -> Option<Arc<Region>> {
        let hash = self.hash(kind, place, bytes);
        let found = lock(&self.entries).get(&hash).cloned();
        found.filter(|region| region.source.kind == kind)
    }

    /// Removes all regions. A region to which a block refers stays alive.
    pub(super) fn clear(&self) {
        lock(&self.entries).clear();
    }
}
