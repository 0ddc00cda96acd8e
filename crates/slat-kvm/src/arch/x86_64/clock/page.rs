//! The page of the paravirtual clock, and the arithmetic by which guests compute nanoseconds from their TSC and the
//! page's parameters.

use super::host;

/// The number of nanoseconds in a second.
const SECOND: u128 = 1_000_000_000;
/// The page's flag for a clock that is the same on all vCPUs. A guest that sees this flag does not compare readings of
/// several vCPUs (`PVCLOCK_TSC_STABLE_BIT`).
const STABLE: u8 = 1;
/// The page's flag for a guest that was paused (`PVCLOCK_GUEST_STOPPED`).
const PAUSED: u8 = 1 << 1;
/// The offset in the page of the word whose second byte is the flags.
pub(crate) const FLAGS_AT: u64 = 28;

/// Whether the page with this word at [`FLAGS_AT`] says that the guest was paused.
pub(crate) fn is_paused(word: u32) -> bool {
    word >> 8 & u32::from(PAUSED) != 0
}

/// Nanoseconds per cycle, as in the page: `((cycles << shift) * mul) >> 32`. The multiplier has 32 significant bits and
/// is rounded down, so the clock loses up to 1.7 µs per hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scale {
    /// The multiplier (`tsc_to_system_mul`).
    pub(crate) mul: u32,
    /// The number of bits by which cycles are shifted to the left. A negative number shifts cycles to the right.
    pub(crate) shift: i8,
}

impl Scale {
    /// Returns the scale of a TSC that counts `ratio` / 2^32 cycles for each cycle of the host.
    pub(super) fn new(ratio: u64) -> Self {
        // The frequency of the scaled TSC in units of 2^-32 Hz.
        let mut hz = (u128::from(host::tsc_khz()) * 1000 * u128::from(ratio)).max(1);
        let mut shift = 0i8;
        while hz >> 32 > 2 * SECOND {
            hz >>= 1;
            shift -= 1;
        }
        while hz >> 32 <= SECOND {
            hz <<= 1;
            shift += 1;
        }
        let mul = ((SECOND << 64) / hz) as u32;
        Scale { mul, shift }
    }

    /// Returns the nanoseconds in which the TSC counts `cycles`.
    pub(super) fn nanoseconds(&self, cycles: u64) -> u64 {
        let shifted = match self.shift {
            0.. => cycles << self.shift,
            _ => cycles >> -self.shift,
        };
        ((u128::from(shifted) * u128::from(self.mul)) >> 32) as u64
    }
}

/// The parameters by which a vCPU's guest computes the clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameters {
    /// The vCPU's TSC at the moment that the parameters describe.
    pub(crate) tsc: u64,
    /// The VM's clock, in nanoseconds, at the moment at which the vCPU's TSC is `tsc`.
    pub(crate) nanoseconds: u64,
    pub(crate) scale: Scale,
    /// Whether the clock is the same on all vCPUs.
    pub(crate) is_stable: bool,
}

impl Parameters {
    /// Returns parameters of the same clock for a guest that multiplies the TSC itself, instead of the difference
    /// between two TSC values. `tsc` is the guest's present TSC. If the TSC has wrapped to 0 since the moment of these
    /// parameters, the new parameters have the moment of the wrap.
    pub(crate) fn without_wrap(self, tsc: u64) -> Self {
        if self.tsc <= tsc {
            return self;
        }
        let until_zero = self.scale.nanoseconds(self.tsc.wrapping_neg());
        Parameters {
            tsc: 0,
            nanoseconds: self.nanoseconds.wrapping_add(until_zero),
            ..self
        }
    }

    /// Returns the contents of the page. `version` is odd while the page changes; a guest repeats its reading until
    /// `version` is even and has not changed. `paused` says that the guest was paused.
    pub(crate) fn page(&self, version: u32, paused: bool) -> [u8; 32] {
        let mut page = [0; 32];
        page[0..4].copy_from_slice(&version.to_le_bytes());
        page[8..16].copy_from_slice(&self.tsc.to_le_bytes());
        page[16..24].copy_from_slice(&self.nanoseconds.to_le_bytes());
        page[24..28].copy_from_slice(&self.scale.mul.to_le_bytes());
        page[28] = self.scale.shift as u8;
        page[29] = if self.is_stable { STABLE } else { 0 } | if paused { PAUSED } else { 0 };
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::x86_64::clock::host::simulated;

    #[test]
    fn the_scale_turns_cycles_into_nanoseconds() {
        for khz in [10_001, 500_000u32, 1_000_000, 2_300_000, 4_700_000] {
            simulated::set(Some(simulated::Host {
                tsc: 0,
                khz,
                realtime: 0,
                step: 0,
            }));
            for (ratio, hour) in [(1u64 << 32, 3600), (1 << 31, 1800), (3 << 32, 3 * 3600)] {
                let scale = Scale::new(ratio);
                assert!(scale.mul >= 1 << 31);
                let ns = scale.nanoseconds(u64::from(khz) * 1000 * hour);
                let lost = 3_600_000_000_000u64.checked_sub(ns);
                assert!(lost.is_some_and(|lost| lost <= 1700), "{khz} kHz: {lost:?}");
            }
        }
        simulated::set(None);
    }
}
