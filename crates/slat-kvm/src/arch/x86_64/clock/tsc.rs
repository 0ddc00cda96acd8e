//! The TSC of a vCPU.

use super::host;
use crate::errno::{Result, fail};
use std::time::Duration;

/// The TSC of a vCPU: the host's, scaled, plus an offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tsc {
    /// The frequency that the client asked for.
    khz: u32,
    /// Cycles of this TSC per cycle of the host's TSC, in units of 2^-32.
    ratio: u64,
    /// The number that is added to the scaled cycles of the host.
    offset: u64,
}

/// The ratio of a TSC that counts as fast as the host's TSC.
pub(super) const SAME: u64 = 1 << 32;
/// As in KVM, the TSC is not scaled if its frequency differs from the host's by at most this many millionths. Two
/// measurements on the same machine may differ by as much.
const TOLERANCE_PPM: u64 = 250;
/// The lowest frequency that is refused.
const TOO_MANY_KHZ: u32 = 1 << 31;

/// Returns the frequency for which a client's `KVM_SET_TSC_KHZ` asks. 0 asks for the host's frequency.
///
/// # Errors
/// `EINVAL` for a frequency of 2^31 kHz or more.
pub(crate) fn frequency(khz: u32) -> Result<u32> {
    match khz {
        0 => Ok(host::tsc_khz()),
        TOO_MANY_KHZ.. => fail(libc::EINVAL),
        khz => Ok(khz),
    }
}

/// Returns the cycles of a TSC of `khz` per cycle of the host's TSC, in units of 2^-32.
fn ratio(khz: u32) -> u64 {
    let (khz, host) = (u64::from(khz), u64::from(host::tsc_khz()));
    match khz.abs_diff(host) * 1_000_000 <= host * TOLERANCE_PPM {
        true => SAME,
        false => (khz << 32) / host,
    }
}

/// Scales cycles of the host.
pub(super) fn scaled(host: u64, ratio: u64) -> u64 {
    ((u128::from(host) * u128::from(ratio)) >> 32) as u64
}

impl Tsc {
    /// Creates a TSC of this frequency with the offset 0.
    pub(super) fn new(khz: u32) -> Self {
        Tsc {
            khz,
            ratio: ratio(khz),
            offset: 0,
        }
    }

    /// Returns the guest's TSC when the host's TSC is `host`.
    pub(crate) fn at(&self, host: u64) -> u64 {
        scaled(host, self.ratio).wrapping_add(self.offset)
    }

    /// Returns the guest's TSC now. The host's TSC is read after all loads before this call. So if the guest has loaded
    /// a TSC value that another vCPU has read and stored, this call does not return an earlier TSC.
    pub(crate) fn now(&self) -> u64 {
        self.at(host::ordered_tsc())
    }

    /// Adds `change` to the TSC.
    pub(crate) fn shift(&mut self, change: u64) {
        self.offset = self.offset.wrapping_add(change);
    }

    /// Returns the frequency that the client asked for.
    pub(crate) fn khz(&self) -> u32 {
        self.khz
    }

    /// Returns the frequency at which the TSC counts: the host's frequency, if the client's frequency differs from it
    /// by no more than the tolerance.
    pub(crate) fn actual_khz(&self) -> u32 {
        match self.ratio {
            SAME => host::tsc_khz(),
            _ => self.khz,
        }
    }

    /// Returns the cycles of this TSC per cycle of the host's TSC, in units of 2^-32.
    pub(super) fn ratio(&self) -> u64 {
        self.ratio
    }

    /// Whether `self` and `other` are equal at every moment.
    pub(super) fn is_same(&self, other: &Tsc) -> bool {
        (self.ratio, self.offset) == (other.ratio, other.offset)
    }

    /// Returns the time in which the TSC counts `cycles`.
    pub(crate) fn duration(&self, cycles: u64) -> Duration {
        let nanoseconds = u128::from(cycles) * 1_000_000 / u128::from(self.khz.max(1));
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    /// Changes the frequency at the moment when the host's TSC is `host`. The guest's TSC continues from its value at
    /// that moment.
    pub(super) fn set_khz(&mut self, khz: u32, host: u64) {
        let before = self.at(host);
        (self.khz, self.ratio) = (khz, ratio(khz));
        self.shift(before.wrapping_sub(self.at(host)));
    }

    /// Returns the value of `KVM_VCPU_TSC_OFFSET`: the difference between the TSC and the scaled TSC of the host.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    pub(super) fn set_offset(&mut self, offset: u64) {
        self.offset = offset;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tsc_of_another_frequency_is_scaled() {
        let host = host::tsc_khz();
        let mut tsc = Tsc::new(host / 2);
        let second = 1000 * u64::from(host);
        let steps = |tsc: &Tsc| tsc.at(second * 101).wrapping_sub(tsc.at(second * 100));
        assert!(steps(&tsc).abs_diff(second / 2) < 1000);
        let before = tsc.at(second);
        tsc.set_khz(3 * (host / 4), second);
        assert_eq!(tsc.at(second), before);
        assert!(steps(&tsc).abs_diff(3 * (second / 4)) < 10_000);
        // This frequency differs from the host's by as much as another measurement of the host's frequency could.
        tsc.set_khz(host + host / 5000, second);
        assert_eq!(steps(&tsc), second);
        assert_eq!(tsc.khz(), host + host / 5000);
        assert_eq!(tsc.actual_khz(), host);
    }
}
