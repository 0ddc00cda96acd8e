//! A host that moves pages.

use std::sync::atomic::Ordering::{Relaxed, Release};

use slat::{Hpa, Hva, PAGE_SIZE, Pfn};

use crate::plain_memory::PlainMemory;

/// Moves the page at `backing` to another frame, as a host does that needs large free ranges. Call while `backing` is
/// invalidated. Returns the old frame and the new one.
pub fn relocate(host: &PlainMemory, backing: Hva) -> Option<(Pfn, Pfn)> {
    let old = host.resident(backing)?;
    let new = host.allocate(1)?;
    for offset in (0..PAGE_SIZE).step_by(8) {
        let [from, to] = [old, new].map(|frame| host.word(Hpa(frame.hpa().0 + offset)));
        to.store(from.load(Relaxed), Relaxed);
    }
    host.owner(backing)?.store(new.0, Release);
    host.free(old);
    Some((old, new))
}
