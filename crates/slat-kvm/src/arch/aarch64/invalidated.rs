//! What other vCPUs have invalidated, and a vCPU has to drop before it executes again.

use slat_a64::Invalidation;
use std::sync::{Mutex, PoisonError};

/// More invalidations than these become one of everything.
const MOST: usize = 16;

/// The invalidations that wait for a vCPU. The thread that adds one then raises the vCPU's attention bit.
#[derive(Debug, Default)]
pub(crate) struct Invalidated(Mutex<Few>);

/// A few invalidations, in their order, or everything.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "each vCPU has one, which is there for its larger variant"
)]
pub(crate) enum Few {
    These([Invalidation; MOST], usize),
    Everything,
}

impl Default for Few {
    fn default() -> Self {
        Few::These([Invalidation::All; MOST], 0)
    }
}

impl Few {
    /// Returns the invalidations.
    pub(crate) fn as_slice(&self) -> &[Invalidation] {
        match self {
            Few::These(list, count) => &list[..*count],
            Few::Everything => &[Invalidation::All, Invalidation::Code],
        }
    }

    fn add(&mut self, invalidation: Invalidation) {
        if self.as_slice().contains(&invalidation) {
            return;
        }
        match self {
            Few::These(list, count) if *count < MOST => {
                list[*count] = invalidation;
                *count += 1;
            }
            _ => *self = Few::Everything,
        }
    }
}

impl Invalidated {
    /// Adds an invalidation.
    pub(crate) fn add(&self, invalidation: Invalidation) {
        let mut few = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        few.add(invalidation);
    }

    /// Takes all invalidations. The vCPU has taken its attention bit before.
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
