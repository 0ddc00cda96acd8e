//! Exits of Hyper-V's interface: `KVM_EXIT_HYPERV`, and the system events of a guest that has crashed or wants a reset.

use crate::arch::x86_64::hyperv::HypervExit;
use crate::arch::x86_64::machine::hyperv::hypercalls::store_output;
use crate::arch::x86_64::vcpu_state::Unfinished;
use crate::fields::{field, set_field};
use crate::vcpu::{Inner, VcpuObject};
use kvm_bindings::*;
use slat_hyperv::msr::SYNDBG_CONTROL;

/// Reads (`path`) or writes (`set_path`) a field of `hyperv` in `kvm_run`. The struct `hyperv` has a union with a field
/// for each kind of exit.
macro_rules! path {
    ($page:expr, $($path:tt)+) => {
        field!($page, __bindgen_anon_1.hyperv.$($path)+)
    };
}
macro_rules! set_path {
    ($page:expr, $value:expr, $($path:tt)+) => {
        set_field!($page, $value, __bindgen_anon_1.hyperv.$($path)+)
    };
}

impl VcpuObject {
    /// Whether a guest's write to a synthetic MSR has to exit to the client. If so, stores the exit in `kvm_run`.
    pub(crate) fn has_hyperv_exit(&self, inner: &mut Inner) -> bool {
        let Some(exit) = inner.machine.hyperv.exit.take() else {
            return false;
        };
        match exit {
            HypervExit::Crash => self.system_event(KVM_SYSTEM_EVENT_CRASH),
            HypervExit::Reset => self.system_event(KVM_SYSTEM_EVENT_RESET),
            HypervExit::Synic(msr) => {
                let [control, events, messages] = self.common().arch.vp.synic().pages();
                let page = &self.page;
                self.begin_hyperv_exit(KVM_EXIT_HYPERV_SYNIC);
                set_path!(page, msr, u.synic.msr);
                set_path!(page, control, u.synic.control);
                set_path!(page, events, u.synic.evt_page);
                set_path!(page, messages, u.synic.msg_page);
            }
            HypervExit::Debugger(msr) => {
                let debugger = (self.vm.arch.hyperv).with_partition(|partition| partition.debugger);
                let page = &self.page;
                self.begin_hyperv_exit(KVM_EXIT_HYPERV_SYNDBG);
                set_path!(page, msr, u.syndbg.msr);
                set_path!(page, debugger.control, u.syndbg.control);
                set_path!(page, debugger.status, u.syndbg.status);
                set_path!(page, debugger.send_page, u.syndbg.send_page);
                set_path!(page, debugger.receive_page, u.syndbg.recv_page);
                set_path!(page, debugger.pending_page, u.syndbg.pending_page);
                inner.arch.unfinished = Unfinished::HypervDebugger;
            }
        }
        true
    }

    fn begin_hyperv_exit(&self, kind: u32) {
        self.page.set_exit_reason(KVM_EXIT_HYPERV);
        set_path!(self.page, kind, type_);
    }

    fn system_event(&self, kind: u32) {
        self.page.set_exit_reason(KVM_EXIT_SYSTEM_EVENT);
        set_field!(self.page, kind, __bindgen_anon_1.system_event.type_);
        set_field!(self.page, 0, __bindgen_anon_1.system_event.ndata);
    }

    /// Stores the exit for a hypercall that the client carries out.
    pub(crate) fn exit_for_hyperv_call(&self, input: u64, parameters: [u64; 2]) {
        self.begin_hyperv_exit(KVM_EXIT_HYPERV_HCALL);
        set_path!(self.page, input, u.hcall.input);
        set_path!(self.page, parameters, u.hcall.params);
    }

    /// Finishes the hypercall, after the client has carried it out.
    pub(crate) fn complete_hyperv_call(&self, inner: &mut Inner) {
        let output = path!(self.page, u.hcall.result);
        (inner.cpu).complete_hypercall(|state, wide| store_output(state, wide, output));
    }

    /// Reads the status of the synthetic debugger, after the client has served the debugger.
    pub(crate) fn complete_hyperv_debugger(&self) {
        if path!(self.page, u.syndbg.msr) == SYNDBG_CONTROL {
            let status = path!(self.page, u.syndbg.status);
            (self.vm.arch.hyperv).with_partition(|partition| partition.debugger.status = status);
        }
    }
}
