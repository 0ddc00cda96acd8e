//! `KVM_SET_GUEST_DEBUG` and `KVM_EXIT_DEBUG`, by which the client debugs the guest.

use crate::fields::set_field;
use crate::run_page::RunPage;
use kvm_bindings::*;
use slat_x86::{Breakpoints, Cpu, Debugger};

/// The controls that a client can set: the value of `KVM_CAP_SET_GUEST_DEBUG2`.
pub(crate) const CONTROLS: u32 = KVM_GUESTDBG_ENABLE
    | KVM_GUESTDBG_SINGLESTEP
    | KVM_GUESTDBG_USE_SW_BP
    | KVM_GUESTDBG_USE_HW_BP
    | KVM_GUESTDBG_INJECT_DB
    | KVM_GUESTDBG_INJECT_BP
    | KVM_GUESTDBG_BLOCKIRQ;

/// Returns the CPU's debugger settings for the client's request. Without `KVM_GUESTDBG_ENABLE` all settings are off.
pub(crate) fn debugger(debug: &kvm_guest_debug) -> Debugger {
    let has = |bit| {
        let bits = KVM_GUESTDBG_ENABLE | bit;
        debug.control & bits == bits
    };
    let [a, b, c, d, .., control] = debug.arch.debugreg;
    Debugger {
        single_step: has(KVM_GUESTDBG_SINGLESTEP),
        software_breakpoints: has(KVM_GUESTDBG_USE_SW_BP),
        breakpoints: has(KVM_GUESTDBG_USE_HW_BP).then_some(Breakpoints {
            addresses: [a, b, c, d],
            control,
        }),
    }
}

/// Stores `KVM_EXIT_DEBUG` in `kvm_run`.
pub(crate) fn exit(page: &RunPage, cpu: &Cpu, vector: u8, dr6: u64) {
    page.set_exit_reason(KVM_EXIT_DEBUG);
    let control = (cpu.requests.debugger.breakpoints).map_or(cpu.state.dr7, |own| own.control);
    let arch = kvm_debug_exit_arch {
        exception: vector.into(),
        pad: 0,
        pc: cpu.linear_rip(),
        dr6,
        dr7: control,
    };
    set_field!(page, arch, __bindgen_anon_1.debug.arch);
}
