//! `KVM_GET_VCPU_EVENTS` and `KVM_SET_VCPU_EVENTS`: events that are about to be delivered to the guest.

use crate::arch::x86_64::options::Options;
use crate::errno::{Result, fail};
use kvm_bindings::*;
use slat_x86::state::MAX_NMIS;
use slat_x86::svm::{Event, EventKind};
use slat_x86::{Cpu, Exception, State, vector};

const FLAGS: u32 = KVM_VCPUEVENT_VALID_NMI_PENDING
    | KVM_VCPUEVENT_VALID_SIPI_VECTOR
    | KVM_VCPUEVENT_VALID_SHADOW
    | KVM_VCPUEVENT_VALID_SMM
    | KVM_VCPUEVENT_VALID_PAYLOAD
    | KVM_VCPUEVENT_VALID_TRIPLE_FAULT;

/// The shadow of STI, in `interrupt.shadow`.
const SHADOW_STI: u8 = 2;
/// The shadow of MOV SS, in `interrupt.shadow`.
const SHADOW_MOV_SS: u8 = 1;

/// Events that the client requests and the next run of the vCPU delivers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requested {
    /// An exception that is pending (`KVM_CAP_EXCEPTION_PAYLOAD`): its payload is not in CR2 or DR6 yet.
    pub(crate) exception: Option<Pending>,
    /// Whether the client requests a triple fault.
    pub(crate) triple_fault: bool,
}

/// A pending exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    exception: Exception,
    /// The address that a page fault stores in CR2, or the bits that a debug exception sets in DR6.
    payload: Option<u64>,
}

impl Requested {
    /// Adds these pending events to the `events` that KVM_GET_VCPU_EVENTS returns for a vCPU.
    pub(crate) fn show(&self, events: &mut kvm_vcpu_events, options: &Options) {
        if let Some(pending) = self.exception {
            show_exception(events, pending.exception);
            events.exception.pending = 1;
            // As in KVM, a client that has not enabled KVM_CAP_EXCEPTION_PAYLOAD sees a pending exception also as
            // injected.
            events.exception.injected = u8::from(!options.exception_payload());
            events.exception_has_payload = u8::from(pending.payload.is_some());
            events.exception_payload = pending.payload.unwrap_or(0);
        }
        if options.exception_payload() {
            events.flags |= KVM_VCPUEVENT_VALID_PAYLOAD;
        }
        if options.triple_fault_event() {
            events.flags |= KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
            events.triple_fault.pending = u8::from(self.triple_fault);
        }
    }

    /// Returns the events that are pending after a client has set `events` (KVM_SET_VCPU_EVENTS).
    ///
    /// # Errors
    /// `EINVAL` for flags of capabilities that the client has not enabled.
    pub(crate) fn changed_by(&self, events: &kvm_vcpu_events, options: &Options) -> Result<Self> {
        let with_payload = events.flags & KVM_VCPUEVENT_VALID_PAYLOAD != 0;
        let with_triple_fault = events.flags & KVM_VCPUEVENT_VALID_TRIPLE_FAULT != 0;
        if with_payload && !options.exception_payload()
            || with_triple_fault && !options.triple_fault_event()
        {
            return fail(libc::EINVAL);
        }
        let pending = with_payload && events.exception.pending != 0;
        let has_payload = events.exception_has_payload != 0;
        Ok(Requested {
            exception: pending.then(|| Pending {
                exception: exception(events),
                payload: has_payload.then_some(events.exception_payload),
            }),
            triple_fault: match with_triple_fault {
                true => events.triple_fault.pending != 0,
                false => self.triple_fault,
            },
        })
    }

    /// Begins to deliver the pending exception: stores its payload in CR2 or DR6, and makes the CPU deliver the
    /// exception through the guest's IDT next.
    pub(crate) fn begin_exception(&mut self, cpu: &mut Cpu) {
        let Some(Pending { exception, payload }) = self.exception.take() else {
            return;
        };
        let state = &mut cpu.state;
        match (exception.vector, payload) {
            (vector::PF, Some(address)) => state.cr2 = address,
            // In the payload, DR6's active-low bits are inverted: a set bit means a clear bit in DR6 (SDM volume 3,
            // 19.2.3).
            (vector::DB, Some(conditions)) => {
                let fixed = state.dr6 & !DR6_TRAPS | DR6_ACTIVE_LOW;
                state.dr6 = (fixed | conditions) ^ conditions & DR6_ACTIVE_LOW;
                state.dr6 &= !DR6_RESERVED_ZERO;
            }
            _ => {}
        }
        cpu.inject_exception(exception.vector, exception.error);
    }
}

/// The bits of DR6 that say which breakpoint was hit.
const DR6_TRAPS: u64 = 15;
/// The active-low bits of DR6, and the bits that are always 1.
const DR6_ACTIVE_LOW: u64 = 0xffff_0ff0;
/// The bit of DR6 that is always 0.
const DR6_RESERVED_ZERO: u64 = 1 << 12;

fn show_exception(events: &mut kvm_vcpu_events, exception: Exception) {
    events.exception.nr = exception.vector;
    events.exception.has_error_code = u8::from(exception.error.is_some());
    events.exception.error_code = exception.error.unwrap_or(0);
}

fn exception(events: &kvm_vcpu_events) -> Exception {
    Exception {
        vector: events.exception.nr,
        error: (events.exception.has_error_code != 0).then_some(events.exception.error_code),
    }
}

/// The events of `KVM_SET_VCPU_EVENTS` that are not part of the CPU's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    /// The number of pending NMIs, if the client sets it.
    pub nmis_pending: Option<u8>,
    /// The vector of the last SIPI, if the client sets it.
    pub sipi_vector: Option<u32>,
    /// Whether an INIT is pending, if the client sets it.
    pub latched_init: Option<bool>,
}

/// Returns the events of a vCPU. `nmis` is the number of pending NMIs that are not in `state` yet.
pub fn get(state: &State, nmis: u8, sipi_vector: u32) -> kvm_vcpu_events {
    let held = &state.events;
    let mut events = kvm_vcpu_events::default();
    if let Some(exception) = held.exception {
        show_exception(&mut events, exception);
        events.exception.injected = 1;
    }
    if let Some(vector) = held.interrupt {
        events.interrupt.injected = 1;
        events.interrupt.nr = vector;
    }
    events.interrupt.shadow = if held.sti_shadow { SHADOW_STI } else { 0 }
        | if held.mov_ss_shadow { SHADOW_MOV_SS } else { 0 };
    events.nmi.pending = held.nmis.saturating_add(nmis).min(MAX_NMIS);
    events.nmi.masked = u8::from(held.nmi_blocked);
    events.sipi_vector = sipi_vector;
    events.smi.smm = held.smm.into();
    events.smi.pending = held.smi.into();
    events.smi.smm_inside_nmi = held.smm_inside_nmi.into();
    events.flags =
        KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW | KVM_VCPUEVENT_VALID_SMM;
    events
}

/// Adds to `events` the `event` that a nested guest's hypervisor has injected by VMRUN and that is not delivered yet.
pub fn show_injected(events: &mut kvm_vcpu_events, event: Event) {
    match event.kind() {
        Some(EventKind::Nmi) => events.nmi.injected = 1,
        Some(EventKind::Exception) => {
            events.exception.injected = 1;
            events.exception.nr = event.vector();
            events.exception.has_error_code = u8::from(event.error().is_some());
            events.exception.error_code = event.error().unwrap_or(0);
        }
        kind => {
            events.interrupt.injected = 1;
            events.interrupt.nr = event.vector();
            events.interrupt.soft = u8::from(kind == Some(EventKind::Software));
        }
    }
}

/// Sets the events that are part of the CPU's state. Returns the other events.
///
/// # Errors
/// `EINVAL` for unknown flags, and exceptions that do not exist.
pub fn set(state: &mut State, events: &kvm_vcpu_events) -> Result<Elsewhere> {
    if events.flags & !FLAGS != 0 {
        return fail(libc::EINVAL);
    }
    const NMI_VECTOR: u8 = 2;
    // Only a client with KVM_CAP_EXCEPTION_PAYLOAD can set a pending exception.
    let pending = events.flags & KVM_VCPUEVENT_VALID_PAYLOAD != 0 && events.exception.pending != 0;
    let injected = events.exception.injected != 0 && !pending;
    if (injected || pending) && (events.exception.nr > 31 || events.exception.nr == NMI_VECTOR) {
        return fail(libc::EINVAL);
    }
    let held = &mut state.events;
    held.exception = injected.then(|| exception(events));
    held.interrupt = (events.interrupt.injected != 0).then_some(events.interrupt.nr);
    if events.flags & KVM_VCPUEVENT_VALID_SHADOW != 0 {
        held.sti_shadow = events.interrupt.shadow & SHADOW_STI != 0;
        held.mov_ss_shadow = events.interrupt.shadow & SHADOW_MOV_SS != 0;
    }
    // An NMI in the CPU's state counts as pending for clients. Without this flag, the call changes no pending NMI.
    let waiting = match events.flags & KVM_VCPUEVENT_VALID_NMI_PENDING {
        0 => held.nmis,
        _ => 0,
    };
    held.nmis = waiting.max((events.nmi.injected != 0).into());
    held.nmi_blocked = events.nmi.masked != 0;
    let with_smm = events.flags & KVM_VCPUEVENT_VALID_SMM != 0;
    if with_smm {
        held.smm = events.smi.smm != 0;
        held.smi = events.smi.pending != 0;
        held.smm_inside_nmi = held.smm && events.smi.smm_inside_nmi != 0;
    }
    Ok(Elsewhere {
        nmis_pending: (events.flags & KVM_VCPUEVENT_VALID_NMI_PENDING != 0)
            .then_some(events.nmi.pending),
        sipi_vector: (events.flags & KVM_VCPUEVENT_VALID_SIPI_VECTOR != 0)
            .then_some(events.sipi_vector),
        latched_init: with_smm.then_some(events.smi.latched_init != 0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_back_as_they_were_set() {
        let mut state = State::reset();
        let mut events = get(&state, 0, 0);
        events.exception.injected = 1;
        events.exception.nr = 13;
        events.exception.has_error_code = 1;
        events.exception.error_code = 8;
        events.interrupt.shadow = SHADOW_STI;
        events.nmi.masked = 1;
        set(&mut state, &events).unwrap();
        assert_eq!(get(&state, 0, 0), events);
    }

    #[test]
    fn an_nmi_that_waits_stays_unless_the_client_says_otherwise() {
        let mut state = State::reset();
        state.events.nmis = 1;
        let mut events = get(&state, 0, 0);
        assert_eq!(events.nmi.pending, 1);
        events.flags = 0;
        set(&mut state, &events).unwrap();
        assert_eq!(state.events.nmis, 1);
        events.flags = KVM_VCPUEVENT_VALID_NMI_PENDING;
        assert_eq!(set(&mut state, &events).unwrap().nmis_pending, Some(1));
        assert_eq!(state.events.nmis, 0);
    }

    #[test]
    fn impossible_events_are_refused() {
        let mut state = State::reset();
        let refused = |change: fn(&mut kvm_vcpu_events)| {
            let mut events = kvm_vcpu_events::default();
            change(&mut events);
            set(&mut state.clone(), &events).unwrap_err().errno() == libc::EINVAL
        };
        assert!(refused(|events| events.flags = 1 << 31));
        assert!(refused(|events| (
            events.exception.injected,
            events.exception.nr
        ) = (1, 2)));
        assert!(refused(|events| (
            events.exception.injected,
            events.exception.nr
        ) = (1, 32)));
        set(&mut state, &kvm_vcpu_events::default()).unwrap();
    }
}
