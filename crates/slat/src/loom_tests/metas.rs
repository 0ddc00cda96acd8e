//! The map of metadata ([`crate::MetaMap`]), to which two threads add frames at the same time.

use std::sync::Arc;

use super::{model, spawn};
use crate::MetaMap;
use crate::addr::Pfn;
use crate::sync::atomic::Ordering::Relaxed;

#[test]
fn two_threads_that_prepare_neighbours_find_one_another() {
    for frames in [[0, 0], [0, 1], [0, 2], [0, 7]] {
        model(3, move || {
            let map = Arc::new(MetaMap::new());
            let mine = map.clone();
            let other = spawn(move || {
                mine.prepare(Pfn(frames[1])).unwrap();
                // If `get` finds metadata, they must already be initialized.
                if let Some(first) = mine.get(Pfn(frames[0])) {
                    // SAFETY: the map owns the metadata, and the map still exists.
                    assert_eq!(unsafe { first.as_ref() }.leaves.load(Relaxed), 0);
                }
                mine.get(Pfn(frames[1])).unwrap().as_ptr() as usize
            });
            map.prepare(Pfn(frames[0])).unwrap();
            let first = map.get(Pfn(frames[0])).unwrap().as_ptr() as usize;
            let second = other.join().unwrap();
            assert_eq!(map.get(Pfn(frames[0])).unwrap().as_ptr() as usize, first);
            assert_eq!(map.get(Pfn(frames[1])).unwrap().as_ptr() as usize, second);
            assert_eq!(first == second, frames[0] == frames[1]);
        });
    }
}
