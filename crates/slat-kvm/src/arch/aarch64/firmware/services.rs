//! The services of a hypervisor: random numbers (DEN 0098), stolen time (DEN 0057), and KVM's own (hypercalls.rst,
//! ptp_kvm.rst). A client can hide each service from its guest.

use crate::arch::aarch64::firmware::NOT_SUPPORTED;
use crate::arch::aarch64::machine::VcpuMachine;
use crate::arch::aarch64::settings::{
    FEATURES, HOST_CLOCK, HYPERVISOR, RANDOM_NUMBERS, STANDARD, STOLEN_TIME, VENDOR, VENDOR_64,
};
use crate::arch::aarch64::timer::Which;
use slat_process::calls::{self, Call};
use std::time::SystemTime;

const RANDOM_VERSION: u32 = 0x8400_0050;
const RANDOM_FEATURES: u32 = 0x8400_0051;
const RANDOM_UUID: u32 = 0x8400_0052;
const RANDOM_32: u32 = 0x8400_0053;
const RANDOM_64: u32 = 0xc400_0053;
pub(super) const STOLEN_TIME_FEATURES: u32 = 0xc500_0020;
const STOLEN_TIME_ADDRESS: u32 = 0xc500_0021;
const VENDOR_FEATURES: u32 = 0x8600_0000;
const VENDOR_CLOCK: u32 = 0x8600_0001;
const VENDOR_UID: u32 = 0x8600_ff01;

/// Version 1.0 of the interface for random numbers.
const RANDOM_1_0: u64 = 0x1_0000;
const INVALID_PARAMETERS: u64 = -2i64 as u64;
const NO_ENTROPY: u64 = -3i64 as u64;
/// Identifies slat's source of random numbers: a UUID, in words with the lowest byte first.
const RANDOM_SOURCE: [u64; 4] = [0x5f6e_7ac2, 0x4a4b_9d10, 0x8e11_b6a3, 0x3c9d_02f5];
/// The identifier of KVM. A guest that finds this identifier looks for KVM's own services.
const KVM_UID: [u64; 4] = [0xb66f_b428, 0xe911_c52e, 0x564b_caa9, 0x743a_004d];

/// The guest's argument that chooses the counter to return with the host's clock: the virtual counter or the physical
/// counter.
const VIRTUAL_COUNTER: u64 = 0;
const PHYSICAL_COUNTER: u64 = 1;
/// The number of readings of the host's clock. Each is made between two readings of the counter, and the reading with
/// the shortest time between these two is used.
const CLOCK_READINGS: usize = 3;

/// Returns the service to which a function belongs: the index of a register of services, and the service's bit in this
/// register.
fn service(function: u32) -> Option<(usize, u64)> {
    Some(match function {
        RANDOM_VERSION | RANDOM_FEATURES | RANDOM_UUID | RANDOM_32 | RANDOM_64 => {
            (STANDARD, RANDOM_NUMBERS)
        }
        STOLEN_TIME_FEATURES | STOLEN_TIME_ADDRESS => (HYPERVISOR, STOLEN_TIME),
        VENDOR_FEATURES | VENDOR_UID => (VENDOR, FEATURES),
        VENDOR_CLOCK => (VENDOR, HOST_CLOCK),
        _ => return None,
    })
}

/// Carries out a call, with the values of X0 to X3. Returns the new values. `None`: slat's firmware does not have the
/// service. Call inside the engine's reader section.
pub(super) fn call(machine: &mut VcpuMachine, [function, a, _, _]: [u64; 4]) -> Option<[u64; 4]> {
    let function = function as u32;
    let (register, bit) = service(function)?;
    if !machine.settings().has_service(register, bit) {
        return None;
    }
    let value = |value| [value, 0, 0, 0];
    Some(match function {
        RANDOM_VERSION => value(RANDOM_1_0),
        RANDOM_FEATURES => match service(a as u32) {
            Some((STANDARD, RANDOM_NUMBERS)) => value(0),
            _ => value(NOT_SUPPORTED),
        },
        RANDOM_UUID => RANDOM_SOURCE,
        RANDOM_32 => random(a, 32),
        RANDOM_64 => random(a, 64),
        STOLEN_TIME_FEATURES => match (service(a as u32), machine.stolen_time()) {
            (Some((HYPERVISOR, STOLEN_TIME)), Some(_)) => value(0),
            _ => value(NOT_SUPPORTED),
        },
        STOLEN_TIME_ADDRESS => value(machine.start_stolen_time().unwrap_or(NOT_SUPPORTED)),
        VENDOR_FEATURES => {
            let settings = machine.settings();
            let list = |register| settings.services(register).unwrap_or(0);
            [list(VENDOR), 0, list(VENDOR_64), 0]
        }
        VENDOR_UID => KVM_UID,
        _ => host_clock(machine, a),
    })
}

/// Returns the values of X0 to X3: the result, and `bits` random bits. Each of X1 to X3 has `width` of the bits, and X3
/// has the lowest bits.
fn random(bits: u64, width: u32) -> [u64; 4] {
    let bits = bits as u32;
    if bits > 3 * width {
        return [INVALID_PARAMETERS, 0, 0, 0];
    }
    let mut bytes = [0u8; 24];
    let arguments = [
        bytes.as_mut_ptr() as usize,
        bytes.len(),
        libc::GRND_NONBLOCK as usize,
        0,
        0,
        0,
    ];
    // SAFETY: the call writes this array, which lives until the call returns.
    let got = unsafe { calls::make(Call::Random, arguments) };
    if got != Ok(bytes.len() as isize) {
        return [NO_ENTROPY, 0, 0, 0];
    }
    // Register `n` holds the random bits from `n * width` on. `n` is 0 for X3, which has the lowest bits.
    let register = |n: u32| {
        let count = bits.saturating_sub(n * width).min(width);
        let word = u64::from_le_bytes(std::array::from_fn(|i| bytes[8 * n as usize + i]));
        word & u64::MAX.checked_shr(64 - count).unwrap_or(0)
    };
    [0, register(2), register(1), register(0)]
}

/// Returns the host's clock in nanoseconds since 1970, and the guest's counter at the same time. Each is two values:
/// the upper 32 bits, then the lower 32 bits.
fn host_clock(machine: &VcpuMachine, counter: u64) -> [u64; 4] {
    let which = match counter {
        VIRTUAL_COUNTER => Which::Virtual,
        PHYSICAL_COUNTER => Which::Physical,
        _ => return [NOT_SUPPORTED, 0, 0, 0],
    };
    let reading = || {
        let before = machine.timers.counter(which);
        let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let after = machine.timers.counter(which);
        let nanoseconds = clock.map_or(0, |clock| clock.as_nanos() as u64);
        (after.wrapping_sub(before), nanoseconds, before)
    };
    let best = (0..CLOCK_READINGS).map(|_| reading()).min();
    let (apart, nanoseconds, before) = best.unwrap_or_default();
    let cycles = before.wrapping_add(apart / 2);
    let halves = |word: u64| [word >> 32, word & u64::from(u32::MAX)];
    let ([a, b], [c, d]) = (halves(nanoseconds), halves(cycles));
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_bits_are_as_many_as_asked() {
        assert_eq!(random(97, 32), [INVALID_PARAMETERS, 0, 0, 0]);
        assert_eq!(random(0, 64), [0; 4]);
        for bits in 1..=192 {
            let mut seen = [0; 3];
            for _ in 0..40 {
                let [result, high, middle, low] = random(bits, 64);
                assert_eq!(result, 0);
                for (seen, word) in seen.iter_mut().zip([low, middle, high]) {
                    *seen |= word;
                }
            }
            let ones: u32 = seen.iter().map(|word| word.count_ones()).sum();
            assert_eq!(u64::from(ones), bits);
        }
        let [_, high, middle, low] = random(96, 32);
        assert_eq!((high | middle | low) >> 32, 0);
    }
}
