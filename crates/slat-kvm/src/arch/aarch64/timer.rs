//! The timers of a vCPU (DDI 0487, D11): the virtual timer and the physical one, which count the same here.
//!
//! Both count the host's counter, minus an offset that the client can set. Without an interrupt controller the output of
//! a timer is a bit of `kvm_run` (`KVM_CAP_ARM_USER_IRQ`), and ends a WFI.

use crate::arch::aarch64::clock::{frequency, ticks};
use slat_a64::SystemName;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const CNTFRQ: SystemName = SystemName::new(3, 3, 14, 0, 0);
const CNTPCT: SystemName = SystemName::new(3, 3, 14, 0, 1);
const CNTVCT: SystemName = SystemName::new(3, 3, 14, 0, 2);

/// CNTx_CTL: the timer is enabled; its output is masked; the condition is met.
const ENABLE: u64 = 1 << 0;
const MASK: u64 = 1 << 1;
const STATUS: u64 = 1 << 2;

/// A timer's registers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timer {
    control: u64,
    compare: u64,
}

/// Which timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Virtual,
    Physical,
}

/// The place of a register among those of its timer.
#[derive(Clone, Copy)]
enum Field {
    Value,
    Control,
    Compare,
}

/// The difference between the host's counter and the guest's. All vCPUs of a VM have one, so that their counters agree.
#[derive(Clone, Debug, Default)]
pub(crate) struct Offset(Arc<AtomicU64>);

/// The timers of a vCPU.
#[derive(Debug)]
pub(crate) struct Timers {
    timers: [Timer; 2],
    offset: Offset,
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
    /// Creates the timers of a vCPU whose VM has this offset.
    pub(crate) fn new(offset: Offset) -> Self {
        Timers {
            timers: [Timer::default(); 2],
            offset,
        }
    }

    /// Resets the registers. The counter goes on.
    pub(crate) fn reset(&mut self) {
        *self = Timers::new(self.offset.clone());
    }

    /// Returns the guest's counter.
    pub(crate) fn counter(&self) -> u64 {
        ticks().wrapping_sub(self.offset.0.load(Relaxed))
    }

    /// Sets the guest's counter, that of all vCPUs.
    pub(crate) fn set_counter(&mut self, value: u64) {
        self.offset.0.store(ticks().wrapping_sub(value), Relaxed);
    }

    fn timer(&self, which: Which) -> &Timer {
        &self.timers[which as usize]
    }

    fn is_met(&self, which: Which) -> bool {
        let timer = self.timer(which);
        timer.control & ENABLE != 0 && self.counter() >= timer.compare
    }

    /// Whether the output of a timer is asserted.
    pub(crate) fn output(&self, which: Which) -> bool {
        self.is_met(which) && self.timer(which).control & MASK == 0
    }

    /// Returns the time at which an output that is not asserted now will be asserted.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let now = self.counter();
        let waits = |which: &Which| {
            let timer = self.timer(*which);
            let counts = timer.control & (ENABLE | MASK) == ENABLE;
            (counts && timer.compare > now).then(|| timer.compare - now)
        };
        let least = [Which::Virtual, Which::Physical]
            .iter()
            .filter_map(waits)
            .min()?;
        // A time beyond the host's clock is never.
        let nanoseconds = u128::from(least) * 1_000_000_000 / u128::from(frequency());
        let wait = Duration::from_nanos(u64::try_from(nanoseconds).ok()?);
        Instant::now().checked_add(wait)
    }

    /// Reads a register of the timers. The processor has checked the rights of EL0. `None`: the register is none of the
    /// timers', or cannot be read.
    pub(crate) fn read(&self, name: SystemName) -> Option<u64> {
        Some(match (name, register(name)) {
            (CNTFRQ, _) => frequency(),
            (CNTPCT | CNTVCT, _) => self.counter(),
            (_, Some((which, field))) => {
                let timer = self.timer(which);
                match field {
                    // A signed difference of 32 bits.
                    Field::Value => timer.compare.wrapping_sub(self.counter()) as u32 as u64,
                    Field::Control if self.is_met(which) => timer.control | STATUS,
                    Field::Control => timer.control,
                    Field::Compare => timer.compare,
                }
            }
            _ => return None,
        })
    }

    /// Writes a register of the timers. The processor has checked the rights of EL0. `None`: the register is none of the
    /// timers', or cannot be written.
    pub(crate) fn write(&mut self, name: SystemName, value: u64) -> Option<()> {
        let (which, field) = register(name)?;
        let counter = self.counter();
        let timer = &mut self.timers[which as usize];
        match field {
            Field::Value => timer.compare = counter.wrapping_add(value as i32 as i64 as u64),
            Field::Control => timer.control = value & (ENABLE | MASK),
            Field::Compare => timer.compare = value,
        }
        Some(())
    }
}

/// Returns the register by which the API names the counter or a timer's register, if `name` is one. The API's names of
/// CVAL and CNT of the virtual timer are exchanged (api.rst 4.68).
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

/// Whether this is a counter, which a client sets and a guest only reads.
pub(crate) fn is_counter(name: SystemName) -> bool {
    matches!(name, CNTPCT | CNTVCT)
}
