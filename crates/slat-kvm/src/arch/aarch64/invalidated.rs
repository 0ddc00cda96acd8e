//! The invalidations by other vCPUs that a vCPU has to carry out before it executes again.

use slat_a64::Invalidation;
use std::sync::{Mutex, PoisonError};

/// The greatest number of separate invalidations. If there are more, one invalidation of everything replaces them.
const MOST: usize = 16;

/// The invalidations that a vCPU has to carry out. A thread adds an invalidation first, and then raises the vCPU's
/// attention bit.
#[derive(Debug, Default)]
pub(crate) struct Invalidated(Mutex<Few>);

/// Invalidations, in the order in which they were added. If there are more than [`MOST`], [`Few::EVERYTHING`] replaces
/// them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Few {
    list: [Invalidation; MOST],
    count: usize,
}

impl Default for Few {
    fn default() -> Self {
        Few {
            list: [Invalidation::All; MOST],
            count: 0,
        }
    }
}

impl Few {
    const EVERYTHING: [Invalidation; 2] = [Invalidation::All, Invalidation::Code];

    /// Returns the invalidations that were added.
    pub(crate) fn as_slice(&self) -> &[Invalidation] {
        &self.list[..self.count]
    }

    fn add(&mut self, invalidation: Invalidation) {
        if self.as_slice().contains(&invalidation) {
            return;
        }
        if self.count == MOST {
            self.count = Self::EVERYTHING.len();
            self.list[..self.count].copy_from_slice(&Self::EVERYTHING);
            return;
        }
        self.list[self.count] = invalidation;
        self.count += 1;
    }
}

impl Invalidated {
    /// Adds an invalidation.
    pub(crate) fn add(&self, invalidation: Invalidation) {
        let mut few = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        few.add(invalidation);
    }

    /// Removes and returns all invalidations. Call after clearing the vCPU's attention bit.
    pub(crate) fn take(&self) -> Few {
        let mut few = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut few)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_a_few_are_everything() {
        let invalidated = Invalidated::default();
        assert!(invalidated.take().as_slice().is_empty());
        let line = |n: usize| Invalidation::CodeLine(64 * n as u64);
        for n in (0..MOST).chain(0..MOST) {
            invalidated.add(line(n));
        }
        let all: Vec<_> = (0..MOST).map(line).collect();
        assert_eq!(invalidated.take().as_slice(), all);
        for n in 0..=MOST {
            invalidated.add(line(n));
        }
        let everything = [Invalidation::All, Invalidation::Code];
        assert_eq!(invalidated.take().as_slice(), everything);
        assert!(invalidated.take().as_slice().is_empty());
    }
}
