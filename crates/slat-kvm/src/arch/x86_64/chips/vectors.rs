//! Sets of interrupt vectors.

use std::sync::atomic::{AtomicU64, Ordering};

/// A set of vectors. The owner of the set changes the set under a lock. Other threads read the set without a lock.
#[derive(Debug, Default)]
pub(crate) struct Vectors([AtomicU64; 4]);

impl Vectors {
    pub(crate) fn store(&self, vectors: [u64; 4]) {
        for (word, value) in self.0.iter().zip(vectors) {
            word.store(value, Ordering::SeqCst);
        }
    }

    pub(crate) fn insert(&self, vector: u8) {
        if !self.contains(vector) {
            let word = &self.0[usize::from(vector >> 6)];
            word.fetch_or(1 << (vector & 63), Ordering::SeqCst);
        }
    }

    pub(crate) fn contains(&self, vector: u8) -> bool {
        let word = &self.0[usize::from(vector >> 6)];
        word.load(Ordering::SeqCst) >> (vector & 63) & 1 != 0
    }
}
