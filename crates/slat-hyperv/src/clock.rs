//! The reference clock of a partition, in units of 100 ns, and the page by which a guest computes it from its TSC
//! (`HV_REFERENCE_TSC_PAGE`).
//!
//! A guest computes `(tsc * scale >> 64) + offset`, and reads the page's sequence before and after the computation.
//! Sequence 0 tells the guest to read the MSR instead. So the sequence is set to 0 while the page changes.

/// The length of one unit of the reference clock in nanoseconds.
pub const UNIT: u64 = 100;
/// The number of bytes of the reference TSC page that have a meaning.
pub const PAGE_BYTES: usize = 24;
/// The sequence that, in an old version of the interface, tells guests to read the MSR.
const OLD_INVALID: u32 = u32::MAX;

/// The contents of the reference TSC page, by which the guest computes the reference clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TscPage {
    /// The sequence changes with the contents; it is 0 while the page is invalid.
    pub sequence: u32,
    /// The units of the reference clock in one cycle of the TSC, times 2^64.
    pub scale: u64,
    /// The number that the guest adds to the scaled TSC, modulo 2^64.
    pub offset: u64,
}

impl TscPage {
    /// Returns the parameters with which a guest's clock shows `nanoseconds` when the guest's TSC is `tsc`. After that
    /// moment the guest's clock advances like the machine's, by `((cycles << shift) * mul) >> 32` nanoseconds. The
    /// returned sequence is 0. `None`: the TSC is too slow for the page.
    pub fn new(mul: u32, shift: i8, tsc: u64, nanoseconds: u64) -> Option<Self> {
        let left = u32::try_from(32 + i32::from(shift)).ok()?;
        let scaled_up = u128::from(mul).checked_mul(1u128.checked_shl(left)?)?;
        let scale = u64::try_from(scaled_up / u128::from(UNIT)).ok()?;
        Some(TscPage {
            sequence: 0,
            scale,
            offset: (nanoseconds / UNIT).wrapping_sub(scaled(tsc, scale)),
        })
    }

    /// Returns the value of the reference clock at the moment when the TSC has the value `tsc`.
    pub fn time(&self, tsc: u64) -> u64 {
        scaled(tsc, self.scale).wrapping_add(self.offset)
    }

    /// Returns the sequence for new contents of a page whose old contents have the sequence `before`.
    pub fn next_sequence(before: u32) -> u32 {
        match before.wrapping_add(1) {
            0 | OLD_INVALID => 1,
            next => next,
        }
    }

    /// Returns the bytes of the page, as guests read it.
    pub fn to_bytes(self) -> [u8; PAGE_BYTES] {
        let mut bytes = [0; PAGE_BYTES];
        bytes[0..4].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.scale.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }

    /// Decodes the first three words of a reference TSC page in guest memory.
    pub fn from_words([sequence, scale, offset]: [u64; 3]) -> Self {
        TscPage {
            sequence: sequence as u32,
            scale,
            offset,
        }
    }
}

fn scaled(tsc: u64, scale: u64) -> u64 {
    ((u128::from(tsc) * u128::from(scale)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_turns_cycles_into_units() {
        for (mul, shift) in [(1 << 31, 1), (0xd156_a1c5, -1), (0xd9db_ed5a, -2)] {
            let page = TscPage::new(mul, shift, 5_000, 7_000).unwrap();
            assert_eq!(page.time(5_000), 70);
            let cycles = 3600 * 2_445_443_000u64;
            let nanoseconds = (u128::from(cycles) * u128::from(mul)) >> (32 - i32::from(shift));
            let units = nanoseconds as u64 / UNIT;
            assert!(page.time(5_000 + cycles).abs_diff(70 + units) <= 2);
        }
    }

    #[test]
    fn a_clock_may_be_behind_its_tsc() {
        let page = TscPage::new(1 << 31, 1, u64::MAX / 2, 0).unwrap();
        assert_eq!(page.time(u64::MAX / 2), 0);
        assert_eq!(page.time(u64::MAX / 2 + 1_000_000).abs_diff(10_000) / 2, 0);
    }

    #[test]
    fn a_slow_tsc_has_no_page() {
        // A TSC of 1 kHz, then a TSC of 10 MHz, then a TSC of slightly more than 10 MHz.
        assert_eq!(TscPage::new(0xf424_0000, 20, 0, 0), None);
        assert_eq!(TscPage::new(0xc800_0000, 7, 0, 0), None);
        assert!(TscPage::new(0xc7ff_0000, 7, 0, 0).is_some());
        assert_eq!(TscPage::new(1 << 31, -33, 0, 0), None);
        assert_eq!(TscPage::new(1 << 31, 127, 0, 0), None);
    }

    #[test]
    fn no_valid_sequence_is_zero_or_all_ones() {
        assert_eq!(TscPage::next_sequence(0), 1);
        assert_eq!(TscPage::next_sequence(7), 8);
        assert_eq!(TscPage::next_sequence(u32::MAX - 1), 1);
        assert_eq!(TscPage::next_sequence(u32::MAX), 1);
    }

    #[test]
    fn a_page_is_read_as_it_was_written() {
        let page = TscPage {
            sequence: 3,
            scale: 1 << 50,
            offset: u64::MAX - 9,
        };
        let bytes = page.to_bytes();
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(TscPage::from_words([word(0), word(8), word(16)]), page);
    }
}
