//! The platform under random operations, each result compared with a plain model.

use std::ops::Range;
use std::sync::Arc;

use slat::{Ept, HostPage, Hva, PAGE_SIZE};
use slat_model::{HostChange, Machine, Subject, Tlb};

use crate::plain_memory::{PlainMemory, page};
use crate::relocate::relocate;

const TABLES: usize = 1024;

struct Rig(Arc<PlainMemory>, u64);

fn backing(page: u64) -> Hva {
    Hva(page * PAGE_SIZE)
}

impl Machine for Rig {
    type Platform = PlainMemory;
    // No hardware walks its tables.
    const REPORTS_FLUSHES: bool = false;

    fn new(pages: u64, _: Arc<Tlb>) -> Self {
        let pages = pages.min(4096);
        let host = PlainMemory::new(pages as usize + TABLES, pages as usize);
        Rig(Arc::new(host), pages)
    }

    fn platform(&self) -> &Arc<PlainMemory> {
        &self.0
    }

    fn backing(&self) -> Hva {
        backing(0)
    }

    fn pages(&self) -> u64 {
        self.1
    }

    fn page(&self, number: u64) -> Option<HostPage> {
        self.0.make_resident(backing(number)).ok().map(page)
    }

    fn change(&self, pages: &Range<u64>, change: HostChange) {
        if let HostChange::Remap { .. } = change {
            for number in pages.clone() {
                relocate(&self.0, backing(number));
            }
        }
    }
}

#[test]
fn it_keeps_the_engines_contract() {
    Subject::of::<Rig, Ept>("plain memory").run_seeds(0..5, 1_000);
}
