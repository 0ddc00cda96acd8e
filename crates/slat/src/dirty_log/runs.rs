//! Runs of set bits in a bitmap.

use crate::sync::atomic::{AtomicU64, Ordering::*};
use core::ops::Range;

/// Returns the first run of set bits of `bits` in `range`. Runs with fewer than `min_gap` clear bits between them count
/// as one run. The result has at most `most` bits; `most` is not 0.
pub(crate) fn next_run(
    bits: &[AtomicU64],
    range: Range<u64>,
    min_gap: u64,
    most: u64,
) -> Option<Range<u64>> {
    let start = find(bits, range.clone(), 0)?;
    let limit = range.end.min(start.saturating_add(most));
    let mut end = start;
    loop {
        end = find(bits, end..limit, u64::MAX).unwrap_or(limit);
        let gap = end..limit.min(end.saturating_add(min_gap));
        match find(bits, gap, 0) {
            Some(next) => end = next,
            None => return Some(start..end),
        }
    }
}

/// Returns the first set bit in `range` if `flip` is 0, or the first clear bit if `flip` is all ones.
fn find(bits: &[AtomicU64], range: Range<u64>, flip: u64) -> Option<u64> {
    if range.is_empty() {
        return None;
    }
    let first = range.start as usize / 64;
    let words = &bits[first..range.end.div_ceil(64) as usize];
    let mut mask = u64::MAX << (range.start % 64);
    for (index, word) in (first as u64..).zip(words) {
        let found = (word.load(Relaxed) ^ flip) & mask;
        if found != 0 {
            let at = index * 64 + u64::from(found.trailing_zeros());
            return Some(at).filter(|at| *at < range.end);
        }
        mask = u64::MAX;
    }
    None
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    /// Returns the runs of `set` in 0..`len`. Examines bit by bit.
    fn expected(set: &[u64], len: u64, min_gap: u64, most: u64) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for bit in set.iter().copied().filter(|bit| *bit < len) {
            match runs.last_mut() {
                Some(run) if bit - run.end < min_gap.max(1) && bit - run.start < most => {
                    run.end = bit + 1;
                }
                _ => runs.push(bit..bit + 1),
            }
        }
        runs
    }

    #[test]
    fn runs_are_joined_over_small_gaps_and_are_no_longer_than_wanted() {
        const LEN: u64 = 230;
        let sets: [fn(u64) -> bool; 7] = [
            |_| false,
            |_| true,
            |bit| bit.is_multiple_of(3),
            |bit| bit % 64 < 2 || bit % 64 == 63,
            |bit| (60..140).contains(&bit),
            |bit| bit == LEN - 1,
            |bit| bit.is_multiple_of(7) || bit % 11 < 4,
        ];
        for is_set in sets {
            // Bits after the range are set, too: `next_run` must ignore them.
            let set: Vec<u64> = (0..256).filter(|bit| *bit >= LEN || is_set(*bit)).collect();
            let word = |index| {
                (set.iter().filter(|bit| **bit / 64 == index))
                    .map(|bit| 1 << (bit % 64))
                    .sum()
            };
            let bits: Vec<_> = (0..4).map(|index| AtomicU64::new(word(index))).collect();
            for (min_gap, most) in [
                (0, u64::MAX),
                (1, 5),
                (2, u64::MAX),
                (3, 64),
                (100, 1),
                (60, 70),
            ] {
                let mut runs = Vec::new();
                let mut at = 0;
                while let Some(run) = next_run(&bits, at..LEN, min_gap, most) {
                    at = run.end;
                    runs.push(run);
                }
                assert_eq!(
                    runs,
                    expected(&set, LEN, min_gap, most),
                    "{min_gap}, {most}"
                );
            }
        }
    }
}
