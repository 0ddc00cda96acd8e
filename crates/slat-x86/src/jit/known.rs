//! The compiled code of all CPUs, by address: what one CPU has had compiled, the others need not.
//!
//! Regions belong to the blocks they are attached to, here they are only remembered. Code found here is that of a block's key,
//! nothing more: who takes it compares it with memory first, like all code ([`Cpu::adopt`](crate::Cpu)).

use super::{Region, lock};
use crate::block::Key;
use crate::hash::Seeded;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

type Entries = HashMap<Key, Weak<Region>, Seeded>;

/// Regions by the blocks at which they can be entered: the newest one of each, or a better one of the same code.
pub(super) struct Known(Mutex<Entries>);

impl Known {
    pub(super) fn new() -> Self {
        Known(Mutex::new(HashMap::with_hasher(Seeded::new())))
    }

    /// Remembers a region. It is compiled again for others if there is no memory for that.
    pub(super) fn add(&self, region: &Arc<Region>) {
        let mut entries = lock(&self.0);
        let blocks = region.entered().count();
        if entries.capacity() - entries.len() < blocks {
            entries.retain(|_, known| known.strong_count() > 0);
            // Room for twice as many, so that this is rare.
            let more = entries.len() + blocks;
            if entries.try_reserve(more).is_err() {
                return;
            }
        }
        for (_, block) in region.entered() {
            let entry = entries.entry(region.source.key(block.0));
            let entry = entry.or_default();
            let is_better = |known: Arc<Region>| {
                known.tier > region.tier && known.source.blocks.contains(block)
            };
            if !entry.upgrade().is_some_and(is_better) {
                *entry = Arc::downgrade(region);
            }
        }
    }

    /// Returns the region that can be entered at a block with this key.
    pub(super) fn at(&self, key: &Key) -> Option<Arc<Region>> {
        lock(&self.0).get(key)?.upgrade()
    }
}
