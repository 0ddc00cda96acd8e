//! Finds the pages that the guest writes repeatedly while dirty logging is on. Such writes keep a live migration from
//! completing.

use std::collections::BTreeMap;

/// Adjacent page frames whose writes faulted only because dirty logging had write-protected their leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first guest frame of the range.
    pub gfn: u64,
    /// The number of guest frames in the range.
    pub pages: u64,
    /// The number of faults on all these frames.
    pub faults: u64,
}

/// Returns the ranges with the most faults, at most `top`. `written` has the number of faults for each frame.
pub fn hottest(written: &BTreeMap<u64, u64>, top: usize) -> Vec<Range> {
    let mut ranges: Vec<Range> = Vec::new();
    for (&gfn, &faults) in written {
        match ranges.last_mut() {
            Some(last) if gfn - last.gfn == last.pages => {
                last.pages += 1;
                last.faults += faults;
            }
            _ => ranges.push(Range {
                gfn,
                pages: 1,
                faults,
            }),
        }
    }
    ranges.sort_by_key(|range| (std::cmp::Reverse(range.faults), range.gfn));
    ranges.truncate(top);
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_frames_are_one_range_and_the_most_written_comes_first() {
        let written = BTreeMap::from([(3, 1), (4, 2), (6, 9), (u64::MAX, 1)]);
        let range = |gfn, pages, faults| Range { gfn, pages, faults };
        let all = [range(6, 1, 9), range(3, 2, 3), range(u64::MAX, 1, 1)];
        assert_eq!(hottest(&written, 10), all);
        assert_eq!(hottest(&written, 1), all[..1]);
    }
}
