//! The compiled code of all CPUs, by content: what was compiled once is not compiled again, for another CPU, for
//! another process that runs the same program, or for one that has it at another address.
//!
//! Code found here begins like the block that is asked for, nothing more: who takes it compares all of it with
//! memory first, like all code ([`Cpu::adopt`](crate::Cpu)). Regions that no block has any more are kept, until
//! there is no room for new ones.

use super::region::Kind;
use super::{Region, lock};
use crate::hash::Seeded;
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex};

/// By the hash of what a block is.
type Entries = HashMap<u64, Arc<Region>, Seeded>;

/// Regions by the blocks at which they can be entered: the newest one of each, or a better one of the same code.
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

    /// Returns the hash of a block, given as its kind, place and bytes.
    fn hash(&self, kind: Kind, place: u64, bytes: &[u8]) -> u64 {
        let words = bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        let start = self.hasher.hash_one((kind, place));
        words.fold(start, |hash, word| self.hasher.hash_one((hash, word)))
    }

    /// Remembers a region. It is compiled again for others if there is no memory for that.
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

    /// Returns the region that can be entered at a block, given as its kind, place and bytes.
    pub(super) fn at(&self, kind: Kind, place: u64, bytes: &[u8]) -> Option<Arc<Region>> {
        let hash = self.hash(kind, place, bytes);
        let found = lock(&self.entries).get(&hash).cloned();
        found.filter(|region| region.source.kind == kind)
    }

    /// Forgets all regions. Those that blocks have stay alive.
    pub(super) fn clear(&self) {
        lock(&self.entries).clear();
    }
}
