//! Which of a node's keys a page can lie behind, without a search.
//!
//! The span of the keys' pages is cut into steps of one size, and for each step it is known how many keys
//! lie before it. Keys that come and go are counted in and out; where they lie is only surveyed again
//! when one comes that no step reaches, with steps of at least twice the size then.

/// As many as four cache lines have room for, with the rest of a node's header.
const STEPS: usize = 238;
/// Keys that a search compares, all of them: no branch predictor guesses where it ends.
pub(super) const NEAR: usize = 4;

#[derive(Clone)]
pub(super) struct Steps {
    /// No key's page is below it.
    first: u64,
    /// log2 of the pages of a step.
    shift: u8,
    /// A step may have more than [`NEAR`] keys.
    crowded: bool,
    /// How many keys lie before each step.
    before: [u8; STEPS],
}

/// Where the keys are that a page can lie behind.
pub(super) enum Near {
    /// Behind none.
    None,
    /// So many keys are below, and not more than [`NEAR`] are to be compared.
    From(usize),
    /// Anywhere.
    Crowd,
}

impl Steps {
    /// No keys.
    pub(super) const NONE: Steps = Steps {
        first: 0,
        shift: 0,
        crowded: false,
        before: [0; STEPS],
    };

    /// Of the keys at these pages, which ascend.
    pub(super) fn survey(&mut self, pages: impl ExactSizeIterator<Item = u64> + Clone) {
        let len = pages.len();
        let mut ends = pages.clone();
        let first = ends.next().unwrap_or(0);
        let last = ends.last().unwrap_or(first);
        self.first = first;
        self.shift = 0;
        while (last - first) >> self.shift >= STEPS as u64 {
            self.shift += 1;
        }
        self.crowded = false;
        let (mut steps, mut first_in_step) = (0, 0);
        for (i, page) in pages.enumerate() {
            let step = ((page - first) >> self.shift) as usize;
            if steps <= step {
                first_in_step = i;
                self.before[steps..=step].fill(i as u8);
                steps = step + 1;
            }
            self.crowded |= i - first_in_step >= NEAR;
        }
        self.before[steps..].fill(len as u8);
    }

    fn step(&self, page: u64) -> Option<usize> {
        let step = page.checked_sub(self.first)? >> self.shift;
        (step < STEPS as u64).then_some(step as usize)
    }

    /// Counts in a key at `page`, with which there are `len`. `false`: no step reaches there, and the keys are
    /// to be surveyed again.
    #[must_use]
    pub(super) fn comes(&mut self, page: u64, len: usize) -> bool {
        let Some(step) = self.step(page) else {
            return false;
        };
        self.before[step + 1..].iter_mut().for_each(|n| *n += 1);
        let end = self.before.get(step + 1).map_or(len, |n| usize::from(*n));
        self.crowded |= end - usize::from(self.before[step]) > NEAR;
        true
    }

    /// Counts out a key at `page` that was counted. A crowd stays one, for all that is known here.
    pub(super) fn goes(&mut self, page: u64) {
        let step = self.step(page).expect("the key was counted");
        self.before[step + 1..].iter_mut().for_each(|n| *n -= 1);
    }

    pub(super) fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// This is what a look-up does, again and again.
    #[inline(always)]
    pub(super) fn near(&self, page: u64) -> Near {
        let Some(distance) = page.checked_sub(self.first) else {
            return Near::None;
        };
        if self.crowded {
            return Near::Crowd;
        }
        let step = (distance >> self.shift).min(STEPS as u64 - 1);
        Near::From(self.before[step as usize].into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Keys come and go; a search that goes by the steps finds what one through all keys finds.
    #[test]
    fn a_page_lies_behind_the_keys_that_the_steps_lead_to() {
        let mut seed = 7u64;
        let mut random = |below: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        let mut steps = Steps::NONE;
        let mut keys: Vec<u64> = Vec::new();
        steps.survey(keys.iter().copied());
        let (mut surveys, mut crowds) = (0, 0);
        for round in 0..60_000u32 {
            let span = 1 << (4 + round / 2000);
            let full = keys.len() >= 200 || !keys.is_empty() && round % 4000 > 3000;
            if full || !keys.is_empty() && random(3) == 0 {
                let gone = keys.remove(random(keys.len() as u64) as usize);
                if steps.is_crowded() {
                    steps.survey(keys.iter().copied());
                } else {
                    steps.goes(gone);
                }
            } else {
                let page = random(span);
                let Err(at) = keys.binary_search(&page) else {
                    continue;
                };
                keys.insert(at, page);
                if !steps.comes(page, keys.len()) {
                    steps.survey(keys.iter().copied());
                    surveys += 1;
                }
            }
            for page in [random(span), random(2 * span)] {
                let rank = keys.partition_point(|key| *key <= page);
                match steps.near(page) {
                    Near::None => assert_eq!(rank, 0),
                    Near::Crowd => crowds += 1,
                    Near::From(below) => assert!((below..=below + NEAR).contains(&rank)),
                }
            }
        }
        assert!((20..6000).contains(&surveys), "{surveys} surveys");
        assert!(crowds < 60_000, "{crowds} searches without steps");
    }
}
