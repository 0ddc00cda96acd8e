//! `KVM_SET_GUEST_DEBUG` and `KVM_EXIT_DEBUG`, by which the client debugs the guest.

use crate::fields::set_field;
use crate::run_page::RunPage;
use kvm_bindings::*;
use slat_a64::{BREAKPOINTS, Debug, Debugger, WATCHPOINTS};

/// The controls that a client can set: the value of `KVM_CAP_SET_GUEST_DEBUG2`.
pub(crate) const CONTROLS: u32 =
    KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP | KVM_GUESTDBG_USE_SW_BP | KVM_GUESTDBG_USE_HW;

/// Converts a request to the debugger settings of the processor. `None`: the request switches debugging off.
///
/// As in KVM, the guest's BRK exits to the client whenever debugging is on, even without `KVM_GUESTDBG_USE_SW_BP`.
pub(crate) fn debugger(debug: &kvm_guest_debug) -> Option<Debugger> {
    let has = |bit| debug.control & bit != 0;
    if !has(KVM_GUESTDBG_ENABLE) {
        return None;
    }
    let registers = match has(KVM_GUESTDBG_USE_HW) {
        true => debug.arch,
        false => kvm_guest_debug_arch::default(),
    };
    let kvm_guest_debug_arch {
        dbg_bvr,
        dbg_bcr,
        dbg_wvr,
        dbg_wcr,
    } = registers;
    Some(Debugger::new(
        has(KVM_GUESTDBG_SINGLESTEP),
        std::array::from_fn::<_, BREAKPOINTS, _>(|n| [dbg_bvr[n], dbg_bcr[n]]),
        std::array::from_fn::<_, WATCHPOINTS, _>(|n| [dbg_wvr[n], dbg_wcr[n]]),
    ))
}

/// Stores `KVM_EXIT_DEBUG` in `kvm_run`.
pub(crate) fn exit(page: &RunPage, debug: &Debug) {
    page.set_exit_reason(KVM_EXIT_DEBUG);
    let arch = kvm_debug_exit_arch {
        hsr: debug.esr(),
        hsr_high: 0,
        far: debug.address.unwrap_or(0),
    };
    set_field!(page, arch, __bindgen_anon_1.debug.arch);
}
