//! Records the VMs that share the memory of the simulated machine, and the contents of its frames.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use slat::{Pfn, VmId};

use crate::host::HostMemory;
use crate::machine::Invalidate;

/// The VMs that share memory, and the contents of their frames.
#[derive(Default)]
pub(crate) struct Sharing {
    pub(crate) vms: Mutex<Vec<Sharer>>,
    contents: Mutex<HashMap<Pfn, u64>>,
}

pub(crate) struct Sharer {
    pub(crate) vm: VmId,
    pub(crate) memory: Arc<HostMemory>,
    /// The function that changes the backing of a page in an invalidation. `None` while a clone is being made.
    pub(crate) invalidate: Option<Invalidate>,
}

impl Sharing {
    pub(crate) fn word(&self, frame: Pfn) -> u64 {
        let contents = self.contents.lock().unwrap();
        contents.get(&frame).copied().unwrap_or(0)
    }

    pub(crate) fn set_word(&self, frame: Pfn, value: u64) {
        self.contents.lock().unwrap().insert(frame, value);
    }

    /// Whether a VM other than `vm` has a frame of `pages`. `memory` is the memory of `vm`.
    pub(crate) fn has_others(&self, vm: VmId, memory: &HostMemory, pages: Range<u64>) -> bool {
        let vms = self.vms.lock().unwrap();
        let mut others = vms.iter().filter(|other| other.vm != vm);
        others.any(|other| {
            let has = |page| memory.get(page).map(|page| page.pfn);
            pages.clone().any(|page| {
                let frame = has(page);
                frame.is_some() && frame == other.memory.get(page).map(|page| page.pfn)
            })
        })
    }
}
