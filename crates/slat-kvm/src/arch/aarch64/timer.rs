//! The timers of a vCPU (DDI 0487, D11): the virtual timer and the physical one.
//!
//! The counter of each timer is the host's counter minus an offset that the client can set. The virtual counter and the
//! physical one of a new VM are equal; as in KVM, a client that sets one of them does not set the other. A client can
//! also set one offset for both (`KVM_ARM_SET_COUNTER_OFFSET`); then they stay equal, because writes of the counters
//! have no effect any more. Without an interrupt controller the output of a timer is a bit of `kvm_run`
//! (`KVM_CAP_ARM_USER_IRQ`), and ends a WFI.

use crate::arch::aarch64::clock::{frequency, ticks};
use slat_a64::SystemName;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const CNTFRQ: SystemName = SystemName::new(3, 3, 14, 0, 0);
const CNTPCT: SystemName = SystemName::new(3, 3, 14, 0, 1);
const CNTVCT: SystemName = SystemName::new(3, 3, 14, 0, 2);

/// The bits of CNTx_CTL: the timer is enabled; the timer's output is masked; the timer's condition is met.
const ENABLE: u64 = 1 << 0;
const MASK: u64 = 1 << 1;
const STATUS: u64 = 1 << 2;

/// A timer's registers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timer {
    control: u64,
    compare: u64,
}

/// One of the two timers of EL1, or its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Virtual,
    Physical,
}

/// A register of a timer.
#[derive(Clone, Copy)]
enum Field {
    Value,
    Control,
    Compare,
}

/// The differences between the host's counter and the guest's counters. All vCPUs of a VM have the same differences, so
/// that their counters agree.
#[derive(Clone, Debug, Default)]
pub(crate) struct Offsets(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// The offset of each counter, indexed by [`Which`].
    offsets: [AtomicU64; 2],
    /// Whether the client has set one offset for both counters.
    is_for_both: AtomicBool,
}

impl Offsets {
    fn get(&self) -> [u64; 2] {
        self.0.offsets.each_ref().map(|offset| offset.load(Relaxed))
    }

    /// Sets the offset of both counters. From now on, [`Timers::set_counter`] changes nothing.
    pub(crate) fn set_both(&self, offset: u64) {
        self.0.is_for_both.store(true, Relaxed);
        for counter in &self.0.offsets {
            counter.store(offset, Relaxed);
        }
    }
}

/// The timers of a vCPU.
#[derive(Debug)]
pub(crate) struct Timers {
    timers: [Timer; 2],
    offsets: Offsets,
    /// The offsets at the time of the last call of [`Timers::deadline`].
    known: [u64; 2],
}

/// Returns the register of a timer that has this name.
fn register(name: SystemName) -> Option<(Which, Field)> {
    let [3, 3, 14, crm, op2] = name.parts() else {
        return None;
    };
    let which = match crm {
        2 => Which::Physical,
        3 => Which::Virtual,
        _ => return None,
    };
    let field = match op2 {
        0 => Field::Value,
        1 => Field::Control,
        2 => Field::Compare,
        _ => return None,
    };
    Some((which, field))
}

impl Timers {
    /// Creates the timers of a vCPU whose VM has these offsets.
    pub(crate) fn new(offsets: Offsets) -> Self {
        Timers {
            timers: [Timer::default(); 2],
            known: offsets.get(),
            offsets,
        }
    }

    /// Resets the registers. The counters continue to count.
    pub(crate) fn reset(&mut self) {
        self.timers = [Timer::default(); 2];
    }

    /// Returns a counter of the guest.
    pub(crate) fn counter(&self, which: Which) -> u64 {
        ticks().wrapping_sub(self.offsets.0.offsets[which as usize].load(Relaxed))
    }

    /// Sets a counter of the guest on all vCPUs, unless the client has set one offset for both counters.
    pub(crate) fn set_counter(&mut self, which: Which, value: u64) {
        let shared = &self.offsets.0;
        if !shared.is_for_both.load(Relaxed) {
            shared.offsets[which as usize].store(ticks().wrapping_sub(value), Relaxed);
        }
    }

    /// Whether the client has set a counter, by any vCPU, after the last call of [`deadline`](Self::deadline).
    pub(crate) fn are_shifted(&self) -> bool {
        self.known != self.offsets.get()
    }

    fn timer(&self, which: Which) -> &Timer {
        &self.timers[which as usize]
    }

    fn is_met(&self, which: Which) -> bool {
        let timer = self.timer(which);
        timer.control & ENABLE != 0 && self.counter(which) >= timer.compare
    }

    /// Whether the output of a timer is asserted.
    pub(crate) fn output(&self, which: Which) -> bool {
        self.is_met(which) && self.timer(which).control & MASK == 0
    }

    /// Returns the earliest time at which an output that is not asserted now will be asserted. `None`: never.
    pub(crate) fn deadline(&mut self) -> Option<Instant> {
        self.known = self.offsets.get();
        let waits = |which: &Which| {
            let (timer, now) = (self.timer(*which), self.counter(*which));
            let counts = timer.control & (ENABLE | MASK) == ENABLE;
            (counts && timer.compare > now).then(|| timer.compare - now)
        };
        let least = [Which::Virtual, Which::Physical]
            .iter()
            .filter_map(waits)
            .min()?;
        // If the time is beyond the range of the host's clock, the timer never expires.
        let nanoseconds = u128::from(least) * 1_000_000_000 / u128::from(frequency());
        let wait = Duration::from_nanos(u64::try_from(nanoseconds).ok()?);
        Instant::now().checked_add(wait)
    }

    /// Reads a register of the timers. The processor has checked the rights of EL0. `None`: `name` is no register of
    /// the timers, or the register cannot be read.
    pub(crate) fn read(&self, name: SystemName) -> Option<u64> {
        Some(match (name, register(name)) {
            (CNTFRQ, _) => frequency(),
            (CNTPCT, _) => self.counter(Which::Physical),
            (CNTVCT, _) => self.counter(Which::Virtual),
            (_, Some((which, field))) => {
                let timer = self.timer(which);
                match field {
                    // TVAL is the difference as a signed number of 32 bits.
                    Field::Value => timer.compare.wrapping_sub(self.counter(which)) as u32 as u64,
                    Field::Control if self.is_met(which) => timer.control | STATUS,
                    Field::Control => timer.control,
                    Field::Compare => timer.compare,
                }
            }
            _ => return None,
        })
    }

    /// Writes a register of the timers. The processor has checked the rights of EL0. `None`: `name` is no register of
    /// the timers, or the register cannot be written.
    pub(crate) fn write(&mut self, name: SystemName, value: u64) -> Option<()> {
        let (which, field) = register(name)?;
        let counter = self.counter(which);
        let timer = &mut self.timers[which as usize];
        match field {
            Field::Value => timer.compare = counter.wrapping_add(value as i32 as i64 as u64),
            Field::Control => timer.control = value & (ENABLE | MASK),
            Field::Compare => timer.compare = value,
        }
        Some(())
    }
}

/// Returns the name that the API uses for the register `name` of a timer or a counter. Other names are returned
/// unchanged. The API's names of CVAL and CNT of the virtual timer are exchanged (api.rst 4.68).
pub(crate) fn api_name(name: SystemName) -> SystemName {
    const API_COMPARE: SystemName = SystemName::new(3, 3, 14, 0, 2);
    const API_COUNTER: SystemName = SystemName::new(3, 3, 14, 3, 2);
    const CNTV_CVAL: SystemName = API_COUNTER;
    match name {
        API_COMPARE => CNTV_CVAL,
        API_COUNTER => CNTVCT,
        _ => name,
    }
}

/// The registers of the timers in `KVM_GET_REG_LIST`, by the API's names: CTL, CNT and CVAL of both timers.
pub(crate) const API_REGISTERS: [SystemName; 6] = [
    SystemName::new(3, 3, 14, 3, 1),
    SystemName::new(3, 3, 14, 3, 2),
    SystemName::new(3, 3, 14, 0, 2),
    SystemName::new(3, 3, 14, 2, 1),
    SystemName::new(3, 3, 14, 0, 1),
    SystemName::new(3, 3, 14, 2, 2),
];

/// Returns the counter that has this name, which a client sets and a guest only reads.
pub(crate) fn counter_of(name: SystemName) -> Option<Which> {
    match name {
        CNTPCT => Some(Which::Physical),
        CNTVCT => Some(Which::Virtual),
        _ => None,
    }
}
