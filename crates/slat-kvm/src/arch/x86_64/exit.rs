//! Stores x86's exits in `kvm_run`, if they have more than one or two fields.

use crate::arch::x86_64::cpuid::is_amd;
use crate::fields::set_field;
use crate::run_page::RunPage;
use kvm_bindings::*;
use slat_x86::vector;

/// A hypercall that the client carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientCall {
    /// One of KVM's hypercalls: `KVM_EXIT_HYPERCALL`.
    Kvm {
        /// The hypercall's number.
        nr: u64,
        /// The hypercall's arguments.
        args: [u64; 4],
        /// Whether the hypercall uses all 64 bits of the registers.
        long_mode: bool,
    },
    /// One of Hyper-V's hypercalls: `KVM_EXIT_HYPERV`.
    Hyperv {
        /// The hypercall's input value.
        input: u64,
        /// The values of the two registers that hold the call's parameters.
        parameters: [u64; 2],
    },
}

/// Stores `KVM_EXIT_HYPERCALL`; the client returns the result in `ret`.
pub(crate) fn hypercall(page: &RunPage, nr: u64, [a, b, c, _]: [u64; 4], long_mode: bool) {
    page.set_exit_reason(KVM_EXIT_HYPERCALL);
    set_field!(page, nr, __bindgen_anon_1.hypercall.nr);
    set_field!(page, [a, b, c, 0, 0, 0], __bindgen_anon_1.hypercall.args);
    set_field!(page, 0, __bindgen_anon_1.hypercall.ret);
    // KVM_EXIT_HYPERCALL_LONG_MODE is bit 0.
    let flags = long_mode.into();
    set_field!(
        page,
        flags,
        __bindgen_anon_1.hypercall.__bindgen_anon_1.flags
    );
}

/// Stores `KVM_EXIT_X86_RDMSR`, or `KVM_EXIT_X86_WRMSR` if there is a `value`. The client returns the result in `error`
/// and `data`.
pub(crate) fn msr(page: &RunPage, index: u32, value: Option<u64>, reason: u32) {
    page.set_exit_reason(match value {
        None => KVM_EXIT_X86_RDMSR,
        Some(_) => KVM_EXIT_X86_WRMSR,
    });
    set_field!(page, 0, __bindgen_anon_1.msr.error);
    set_field!(page, [0; 7], __bindgen_anon_1.msr.pad);
    set_field!(page, reason, __bindgen_anon_1.msr.reason);
    set_field!(page, index, __bindgen_anon_1.msr.index);
    set_field!(page, value.unwrap_or(0), __bindgen_anon_1.msr.data);
}

/// Stores `KVM_INTERNAL_ERROR_DELIVERY_EV`: the delivery of an event accessed an address without memory. The words are
/// those that KVM stores: the event and the exit reason, in the format of VMX or SVM; the address; and the number of
/// the host's processor.
pub(crate) fn delivery(page: &RunPage, vector: u8, software: bool, gpa: u64) {
    const EPT_MISCONFIGURATION: u64 = 49;
    const NESTED_PAGE_FAULT: u64 = 0x400;
    const VALID: u64 = 1 << 31;
    let kind = match vector {
        _ if software => 4,
        vector::NMI => 2,
        0..32 => 3,
        _ => 0,
    };
    let reason = match is_amd() {
        true => NESTED_PAGE_FAULT,
        false => EPT_MISCONFIGURATION,
    };
    // SAFETY: the call takes no pointer.
    let processor = unsafe { libc::sched_getcpu() };
    let words = [
        VALID | kind << 8 | u64::from(vector),
        reason,
        0,
        gpa,
        processor as u64,
    ];
    let mut data = [0; 16];
    data[..words.len()].copy_from_slice(&words);
    page.set_exit_reason(KVM_EXIT_INTERNAL_ERROR);
    set_field!(
        page,
        KVM_INTERNAL_ERROR_DELIVERY_EV,
        __bindgen_anon_1.internal.suberror
    );
    set_field!(page, words.len() as u32, __bindgen_anon_1.internal.ndata);
    set_field!(page, data, __bindgen_anon_1.internal.data);
}

/// Stores `KVM_INTERNAL_ERROR_EMULATION` with the instruction's bytes, in KVM's layout.
pub(crate) fn emulation_failure(page: &RunPage, bytes: [u8; 15], len: u8) {
    /// The number of words of the exit's data. The first three words are flags and instruction bytes. The other five
    /// words are exit reason and information.
    const WORDS: u32 = 8;
    page.set_exit_reason(KVM_EXIT_INTERNAL_ERROR);
    set_field!(
        page,
        KVM_INTERNAL_ERROR_EMULATION,
        __bindgen_anon_1.emulation_failure.suberror
    );
    set_field!(page, WORDS, __bindgen_anon_1.emulation_failure.ndata);
    let with_bytes = u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES);
    set_field!(
        page,
        if len == 0 { 0 } else { with_bytes },
        __bindgen_anon_1.emulation_failure.flags
    );
    // As in KVM, bytes that are not known are shown as NOPs.
    let mut shown = [0x90; 15];
    shown[..len.into()].copy_from_slice(&bytes[..len.into()]);
    set_field!(
        page,
        len,
        __bindgen_anon_1
            .emulation_failure
            .__bindgen_anon_1
            .__bindgen_anon_1
            .insn_size
    );
    set_field!(
        page,
        shown,
        __bindgen_anon_1
            .emulation_failure
            .__bindgen_anon_1
            .__bindgen_anon_1
            .insn_bytes
    );
}
