//! The 8254's clock: a twelfth of 14.318 MHz, which is 105 ticks in 88 microseconds.

const TICKS: u128 = 105;
const NANOSECONDS: u128 = 88_000;

/// Returns the number of ticks of the 8254's clock that are complete after `nanoseconds`.
pub(super) fn ticks(nanoseconds: u64) -> u64 {
    (u128::from(nanoseconds) * TICKS / NANOSECONDS) as u64
}

/// Returns the time in nanoseconds after which `ticks` are complete; `u64::MAX` if that is too large.
pub(super) fn nanoseconds(ticks: u128) -> u64 {
    let nanoseconds = ticks.saturating_mul(NANOSECONDS).div_ceil(TICKS);
    u64::try_from(nanoseconds).unwrap_or(u64::MAX)
}
