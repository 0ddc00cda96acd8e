//! `KVM_X86_SET_MSR_FILTER`: the MSRs that a guest may access.

use crate::errno::{Result, fail};
use crate::heap;
use kvm_bindings::*;

/// Consecutive MSRs, with one bit for each MSR. A set bit allows the access.
#[derive(Debug)]
struct Range {
    /// The kinds of access that the range decides: `KVM_MSR_FILTER_READ`, `KVM_MSR_FILTER_WRITE`.
    accesses: u32,
    base: u32,
    count: u32,
    bitmap: Vec<u64>,
}

/// The filter of a VM. The default allows everything.
#[derive(Debug, Default)]
pub(crate) struct MsrFilter {
    denies_others: bool,
    ranges: Vec<Range>,
}

/// The number of words of the largest bitmap.
const MOST_WORDS: u32 = KVM_MSR_FILTER_MAX_BITMAP_SIZE / 8;
/// The MSRs of the x2APIC. No filter denies access to them.
const X2APIC: std::ops::RangeInclusive<u32> = 0x800..=0x8ff;

impl MsrFilter {
    /// Checks and copies a client's filter; `read` copies words from the client's memory.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags, a range without flags or with too many MSRs, and a filter that denies by default and
    /// has no range; the errors of `read`; `ENOMEM`.
    pub(crate) fn new(
        given: &kvm_msr_filter,
        read: impl Fn(u64, usize) -> Result<Vec<u64>>,
    ) -> Result<Self> {
        let denies_others = given.flags & KVM_MSR_FILTER_DEFAULT_DENY != 0;
        let used = || given.ranges.iter().filter(|range| range.nmsrs != 0);
        if given.flags & !KVM_MSR_FILTER_VALID_MASK != 0 || denies_others && used().next().is_none()
        {
            return fail(libc::EINVAL);
        }
        let mut ranges = heap::with_room(given.ranges.len())?;
        for range in used() {
            let words = range.nmsrs.div_ceil(64);
            let (0..=MOST_WORDS, 1..=KVM_MSR_FILTER_RANGE_VALID_MASK) = (words, range.flags) else {
                return fail(libc::EINVAL);
            };
            ranges.push(Range {
                accesses: range.flags,
                base: range.base,
                count: range.nmsrs,
                bitmap: read(range.bitmap as u64, words as usize)?,
            });
        }
        Ok(MsrFilter {
            denies_others,
            ranges,
        })
    }

    /// Whether this filter has no range and allows by default.
    pub(crate) fn allows_all(&self) -> bool {
        !self.denies_others && self.ranges.is_empty()
    }

    /// Whether the guest may access `msr`. The first range that covers `msr` and this kind of access decides.
    pub(crate) fn allows(&self, msr: u32, write: bool) -> bool {
        if X2APIC.contains(&msr) {
            return true;
        }
        let access = match write {
            true => KVM_MSR_FILTER_WRITE,
            false => KVM_MSR_FILTER_READ,
        };
        for range in &self.ranges {
            if range.accesses & access != 0
                && let Some(bit) = msr.checked_sub(range.base).filter(|bit| *bit < range.count)
            {
                return range.bitmap[(bit / 64) as usize] >> (bit % 64) & 1 != 0;
            }
        }
        !self.denies_others
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(flags: u32, ranges: &[(u32, u32, u32, u8)]) -> Result<MsrFilter> {
        let mut given = kvm_msr_filter {
            flags,
            ..Default::default()
        };
        for (to, (flags, base, nmsrs, bits)) in given.ranges.iter_mut().zip(ranges) {
            (to.flags, to.base, to.nmsrs) = (*flags, *base, *nmsrs);
            to.bitmap = std::ptr::without_provenance_mut(usize::from(*bits));
        }
        // In this test, the address of a bitmap is a number, and every word of the bitmap has this number as its
        // contents.
        MsrFilter::new(&given, |address, words| Ok(vec![address; words]))
    }

    #[test]
    fn the_first_range_decides() {
        let (read, write) = (KVM_MSR_FILTER_READ, KVM_MSR_FILTER_WRITE);
        let filter = filter(
            KVM_MSR_FILTER_DEFAULT_DENY,
            &[(read, 0x10, 4, 0b0101), (read | write, 0x10, 8, 0xf0)],
        )
        .unwrap();
        let read: Vec<bool> = (0xf..0x19).map(|msr| filter.allows(msr, false)).collect();
        let expected = [0, 1, 0, 1, 0, 1, 1, 1, 1, 0].map(|bit| bit != 0);
        assert_eq!(read, expected);
        assert!(!filter.allows(0x10, true));
        assert!(filter.allows(0x14, true));
        assert!(filter.allows(0x830, true), "an x2APIC register");
    }

    #[test]
    fn filters_that_make_no_sense_are_refused() {
        let refused = |flags, ranges: &[_]| {
            filter(flags, ranges).is_err_and(|error| error.errno() == libc::EINVAL)
        };
        assert!(refused(2, &[(1, 0, 1, 0)]));
        assert!(refused(KVM_MSR_FILTER_DEFAULT_DENY, &[]));
        assert!(refused(0, &[(0, 0, 1, 0)]));
        assert!(refused(0, &[(4, 0, 1, 0)]));
        let most = KVM_MSR_FILTER_MAX_BITMAP_SIZE * 8;
        assert!(refused(0, &[(1, 0, most + 1, 0)]));
        assert!(refused(0, &[(1, 0, u32::MAX, 0)]));
        assert!(!refused(0, &[(1, 0, most, 0)]));
        assert!(filter(0, &[]).unwrap().allows_all());
        // The end of the range is beyond the last MSR.
        assert!(
            !filter(0, &[(1, u32::MAX, 8, 0)])
                .unwrap()
                .allows(u32::MAX, false)
        );
    }
}
