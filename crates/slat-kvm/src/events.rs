//! `KVM_GET_VCPU_EVENTS` and `KVM_SET_VCPU_EVENTS`: what is about to be delivered to the guest.

use crate::errno::{Result, fail};
use kvm_bindings::*;
use slat_x86::{Exception, State};

const FLAGS: u32 = KVM_VCPUEVENT_VALID_NMI_PENDING
    | KVM_VCPUEVENT_VALID_SIPI_VECTOR
    | KVM_VCPUEVENT_VALID_SHADOW
    | KVM_VCPUEVENT_VALID_SMM
    | KVM_VCPUEVENT_VALID_PAYLOAD
    | KVM_VCPUEVENT_VALID_TRIPLE_FAULT;

/// The shadow of STI, in `interrupt.shadow`.
const SHADOW_STI: u8 = 2;
/// The shadow of MOV SS.
const SHADOW_MOV_SS: u8 = 1;

/// What does not stand in the CPU's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    /// Whether an NMI waits, if the client says so.
    pub nmi_pending: Option<bool>,
    /// The vector of the last SIPI, if the client says so.
    pub sipi_vector: Option<u32>,
}

/// The events of a vCPU.
pub fn get(state: &State, nmi_pending: bool, sipi_vector: u32) -> kvm_vcpu_events {
    let held = &state.events;
    let mut events = kvm_vcpu_events::default();
    if let Some(exception) = held.exception {
        events.exception.injected = 1;
        events.exception.nr = exception.vector;
        events.exception.has_error_code = u8::from(exception.error.is_some());
        events.exception.error_code = exception.error.unwrap_or(0);
    }
    if let Some(vector) = held.interrupt {
        events.interrupt.injected = 1;
        events.interrupt.nr = vector;
    }
    events.interrupt.shadow = if held.sti_shadow { SHADOW_STI } else { 0 }
        | if held.mov_ss_shadow { SHADOW_MOV_SS } else { 0 };
    events.nmi.pending = u8::from(held.nmi || nmi_pending);
    events.nmi.masked = u8::from(held.nmi_blocked);
    events.sipi_vector = sipi_vector;
    events.flags =
        KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW | KVM_VCPUEVENT_VALID_SMM;
    events
}

/// Takes the events into the CPU's state.
///
/// # Errors
/// `EINVAL` for unknown flags, exceptions that do not exist, and system management mode, which the CPU does not have.
pub fn set(state: &mut State, events: &kvm_vcpu_events) -> Result<Elsewhere> {
    if events.flags & !FLAGS != 0 {
        return fail(libc::EINVAL);
    }
    // Payloads and triple faults are reported by nobody here, and their capabilities are not claimed.
    if events.flags & (KVM_VCPUEVENT_VALID_PAYLOAD | KVM_VCPUEVENT_VALID_TRIPLE_FAULT) != 0 {
        return fail(libc::EINVAL);
    }
    const NMI_VECTOR: u8 = 2;
    if (events.exception.injected | events.exception.pending) != 0
        && (events.exception.nr > 31 || events.exception.nr == NMI_VECTOR)
    {
        return fail(libc::EINVAL);
    }
    let smm = &events.smi;
    if events.flags & KVM_VCPUEVENT_VALID_SMM != 0
        && (smm.smm | smm.pending | smm.smm_inside_nmi) != 0
    {
        return fail(libc::EINVAL);
    }
    let held = &mut state.events;
    held.exception = (events.exception.injected != 0).then(|| Exception {
        vector: events.exception.nr,
        error: (events.exception.has_error_code != 0).then_some(events.exception.error_code),
    });
    held.interrupt = (events.interrupt.injected != 0).then_some(events.interrupt.nr);
    if events.flags & KVM_VCPUEVENT_VALID_SHADOW != 0 {
        held.sti_shadow = events.interrupt.shadow & SHADOW_STI != 0;
        held.mov_ss_shadow = events.interrupt.shadow & SHADOW_MOV_SS != 0;
    }
    held.nmi = events.nmi.injected != 0;
    held.nmi_blocked = events.nmi.masked != 0;
    Ok(Elsewhere {
        nmi_pending: (events.flags & KVM_VCPUEVENT_VALID_NMI_PENDING != 0)
            .then_some(events.nmi.pending != 0),
        sipi_vector: (events.flags & KVM_VCPUEVENT_VALID_SIPI_VECTOR != 0)
            .then_some(events.sipi_vector),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_back_as_they_were_set() {
        let mut state = State::reset();
        let mut events = get(&state, false, 0);
        events.exception.injected = 1;
        events.exception.nr = 13;
        events.exception.has_error_code = 1;
        events.exception.error_code = 8;
        events.interrupt.shadow = SHADOW_STI;
        events.nmi.masked = 1;
        set(&mut state, &events).unwrap();
        assert_eq!(get(&state, false, 0), events);
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
