//! Which of a node's keys a page can lie behind, without a search.
//!
//! The span of the keys' pages is cut into steps of one size, and for each step it is known how many keys
//! lie before it. Keys that come and go are counted in and out. They are surveyed again when one comes
//! that no step reaches, or when steps turn out to be too large: they are as large as seems good for so
//! many keys, so that slots added one after the other find steps that reach so far.

/// As many as four cache lines have room for, with the rest of a node's header.
const STEPS: usize = 237;
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
    /// The last step that has or had a key.
    last: u8,
    /// How many keys lie before each step up to the last.
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
        last: 0,
        before: [0; STEPS],
    };

    /// Of the keys at these pages, which ascend.
    pub(super) fn survey(&mut self, pages: impl ExactSizeIterator<Item = u64> + Clone) {
        let mut ends = pages.clone();
        let first = ends.next().unwrap_or(0);
        let span = ends.last().unwrap_or(first) - first;
        let reach = |shift: &u8| span >> shift < STEPS as u64;
        let finest = (0..).find(reach).expect("some shift leaves nothing");
        // Two steps for a key, if there are so many.
        let good = (span / (2 * pages.len() as u64).max(1)).checked_ilog2();
        let good = good.map_or(0, |log| log as u8).max(finest);
        self.cut(first, good, pages.clone());
        if self.crowded && finest < good {
            self.cut(first, finest, pages);
        }
    }

    fn cut(&mut self, first: u64, shift: u8, pages: impl Iterator<Item = u64>) {
        (self.first, self.shift, self.crowded) = (first, shift, false);
        (self.last, self.before[0]) = (0, 0);
        let mut first_in_step = 0;
        for (i, page) in pages.enumerate() {
            let step = ((page - first) >> shift) as usize;
            if usize::from(self.last) < step {
                first_in_step = i;
                self.reach(step, i);
            }
            self.crowded |= i - first_in_step >= NEAR;
        }
    }

    /// Makes `step` the last one; all keys, `len` of them, lie before it.
    fn reach(&mut self, step: usize, len: usize) {
        self.before[usize::from(self.last) + 1..=step].fill(len as u8);
        self.last = step as u8;
    }

    /// Whether the keys lie in half of the steps.
    fn could_be_finer(&self) -> bool {
        self.shift > 0 && usize::from(self.last) < STEPS / 2
    }

    fn step(&self, page: u64) -> Option<usize> {
        let step = page.checked_sub(self.first)? >> self.shift;
        (step < STEPS as u64).then_some(step as usize)
    }

    /// Counts in a key at `page`, with which there are `len`. `false`: the keys are to be surveyed again.
    #[must_use]
    pub(super) fn comes(&mut self, page: u64, len: usize) -> bool {
        let Some(step) = self.step(page) else {
            return false;
        };
        let last = usize::from(self.last);
        if last < step {
            self.reach(step, len - 1);
        } else {
            self.before[step + 1..=last]
                .iter_mut()
                .for_each(|n| *n += 1);
        }
        self.is_good(step, len)
    }

    /// Counts out a key at `page` that was counted. A crowd stays one, for all that is known here.
    pub(super) fn goes(&mut self, page: u64) {
        let step = self.step(page).expect("the key was counted");
        let last = usize::from(self.last);
        self.before[step + 1..=last]
            .iter_mut()
            .for_each(|n| *n -= 1);
    }

    /// A key goes from one page to another, past no other one; there are `len`. `false`: the keys are to be
    /// surveyed again.
    #[must_use]
    pub(super) fn moves(&mut self, from: u64, to: u64, len: usize) -> bool {
        self.goes(from);
        self.comes(to, len)
    }

    /// Whether a search does well where a key has come, or as well as it can.
    fn is_good(&mut self, step: usize, len: usize) -> bool {
        let end = match step == self.last.into() {
            true => len,
            false => self.before[step + 1].into(),
        };
        self.crowded |= end - usize::from(self.before[step]) > NEAR;
        !(self.crowded && self.could_be_finer())
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
        // Behind the last step that has keys a page lies behind those.
        let step = (distance >> self.shift).min(self.last.into());
        Near::From(self.before[step as usize].into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots::tests::Rng;
    use std::vec::Vec;

    /// Keys come and go; a search that goes by the steps finds what one through all keys finds.
    #[test]
    fn a_page_lies_behind_the_keys_that_the_steps_lead_to() {
        let mut rng = Rng(7);
        let mut random = |below: u64| rng.below(below);
        let mut steps = Steps::NONE;
        let mut keys: Vec<u64> = Vec::new();
        steps.survey(keys.iter().copied());
        let (mut surveys, mut crowds) = (0, 0);
        for round in 0..60_000u32 {
            let span = 1 << (4 + round / 2000);
            if !keys.is_empty() && round % 3 == 0 {
                // To somewhere between its neighbours.
                let at = random(keys.len() as u64) as usize;
                let below = at.checked_sub(1).map_or(0, |before| keys[before] + 1);
                let above = keys
                    .get(at + 1)
                    .map_or(span.max(keys[at] + 1), |next| *next);
                let to = below + random(above - below);
                let from = core::mem::replace(&mut keys[at], to);
                if !steps.moves(from, to, keys.len()) {
                    steps.survey(keys.iter().copied());
                }
                continue;
            }
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
