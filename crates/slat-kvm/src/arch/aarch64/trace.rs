//! Tracepoints of entries and exits, with the fields of KVM for arm64.

use crate::arch::aarch64::cpu::{Exit, ProbeHit, State};
use slat_trace::arm_exit as reason;
use slat_trace::{Entry, Hvc, Wfx, point};

/// Traces that the vCPU enters the guest.
#[inline]
pub(crate) fn enters(_vcpu_id: u32, state: &State) {
    point(|| Entry { vcpu_pc: state.pc });
}

/// Traces that the vCPU has left the guest. A trace has an exit for each entry, so if there was no exit, `Attention` is
/// recorded.
#[inline]
pub(crate) fn left(_vcpu_id: u32, state: &State, exit: Option<&Exit>) {
    point(|| {
        let class = class(exit.unwrap_or(&Exit::Attention));
        slat_trace::Exit {
            ret: class.map_or(reason::IRQ, |_| reason::TRAP),
            esr_ec: class.unwrap_or(0),
            vcpu_pc: state.pc,
        }
    });
}

/// Returns the class of the exception that KVM would see for an exit. `None`: KVM would see an interrupt of the host.
fn class(exit: &Exit) -> Option<u32> {
    Some(match exit {
        Exit::Attention => return None,
        Exit::Wfi | Exit::Yield => reason::WFX,
        Exit::Hvc(_) => reason::HVC,
        Exit::Smc(_) => reason::SMC,
        Exit::Mmio { fault, .. } if fault.is_fetch => reason::FETCH_ABORT,
        Exit::Mmio { .. } | Exit::BadAddress | Exit::OutOfMemory => reason::DATA_ABORT,
        Exit::Invalidated(_) => reason::SYSTEM,
        Exit::Debug(debug) => debug.class(),
        Exit::Probe(ProbeHit::Code) => reason::BREAKPOINT,
        Exit::Probe(ProbeHit::Data(..)) => reason::WATCHPOINT,
        Exit::Probe(ProbeHit::Step) => reason::STEP,
    })
}

/// Traces that the guest waits: for an event (WFE) if `is_wfe`, otherwise for an interrupt (WFI).
#[inline]
pub(crate) fn waits(state: &State, is_wfe: bool) {
    point(|| Wfx {
        vcpu_pc: state.pc,
        is_wfe: is_wfe.into(),
    });
}

/// Traces that the guest calls the firmware by HVC.
#[inline]
pub(crate) fn calls(state: &State, immediate: u16) {
    point(|| Hvc {
        vcpu_pc: state.pc,
        r0: state.x[0],
        imm: immediate.into(),
    });
}
