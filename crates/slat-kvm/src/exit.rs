//! Stores exits in `kvm_run`: the exits of every architecture that have more than one or two fields.

use crate::fields::set_field;
use crate::run_page::RunPage;
use kvm_bindings::*;
use slat::{Gpa, Stop};
use slat_host::page_size;

/// A fault of an access to guest memory, which only the client can resolve.
#[derive(Clone, Copy)]
pub(crate) struct MemoryFault {
    pub(crate) gpa: Gpa,
    /// Whether the page is private (`KVM_MEMORY_ATTRIBUTE_PRIVATE`).
    pub(crate) private: bool,
    /// Whether the page is absent: the client has not provided it yet.
    pub(crate) absent: bool,
}

/// `KVM_MEMORY_EXIT_FLAG_USERFAULT` of the posted patch series (version 3).
pub(crate) const KVM_MEMORY_EXIT_FLAG_USERFAULT: u64 = 1 << 4;

impl MemoryFault {
    /// Returns the memory fault that has stopped an access. `None`: the access was stopped for another reason.
    pub(crate) fn of(stop: &Stop) -> Option<Self> {
        match *stop {
            Stop::MemoryFault {
                gpa,
                private,
                absent,
                ..
            } => Some(MemoryFault {
                gpa,
                private,
                absent,
            }),
            _ => None,
        }
    }
}

/// Stores `KVM_EXIT_MEMORY_FAULT`, which `KVM_RUN` returns with `EFAULT`.
pub(crate) fn memory_fault(page: &RunPage, fault: MemoryFault) {
    page.set_exit_reason(KVM_EXIT_MEMORY_FAULT);
    let flag = |set, flag| if set { flag } else { 0 };
    let flags = flag(fault.private, KVM_MEMORY_EXIT_FLAG_PRIVATE.into())
        | flag(fault.absent, KVM_MEMORY_EXIT_FLAG_USERFAULT);
    set_field!(page, flags, __bindgen_anon_1.memory_fault.flags);
    let start = fault.gpa.0 & !(page_size() as u64 - 1);
    set_field!(page, start, __bindgen_anon_1.memory_fault.gpa);
    set_field!(page, page_size() as u64, __bindgen_anon_1.memory_fault.size);
}
