//! The exits that only x86 has, in the types of kvm-ioctls.

use kvm_bindings::*;
use kvm_ioctls::{MsrExitReason, ReadMsrExit, VcpuExit, WriteMsrExit};

/// Returns an exit whose reason not every architecture has. `run` is the client's own, after `KVM_RUN` has succeeded,
/// which has filled in the field of the union that belongs to the reason.
pub(crate) fn exit(run: &mut kvm_run) -> VcpuExit<'_> {
    let reason = run.exit_reason;
    // SAFETY: the bits of every field of the union are valid.
    let eoi = unsafe { run.__bindgen_anon_1.eoi };
    // SAFETY: the bits of every field of the union are valid.
    let msr = unsafe { &mut run.__bindgen_anon_1.msr };
    match reason {
        KVM_EXIT_X86_RDMSR => VcpuExit::X86Rdmsr(ReadMsrExit {
            error: &mut msr.error,
            reason: MsrExitReason::from_bits_truncate(msr.reason),
            index: msr.index,
            data: &mut msr.data,
        }),
        KVM_EXIT_X86_WRMSR => VcpuExit::X86Wrmsr(WriteMsrExit {
            error: &mut msr.error,
            reason: MsrExitReason::from_bits_truncate(msr.reason),
            index: msr.index,
            data: msr.data,
        }),
        KVM_EXIT_IOAPIC_EOI => VcpuExit::IoapicEoi(eoi.vector),
        KVM_EXIT_SET_TPR => VcpuExit::SetTpr,
        KVM_EXIT_TPR_ACCESS => VcpuExit::TprAccess,
        KVM_EXIT_NMI => VcpuExit::Nmi,
        KVM_EXIT_HYPERV => VcpuExit::Hyperv,
        // These are exits of other architectures, and exits for which kvm-ioctls has no name.
        reason => VcpuExit::Unsupported(reason),
    }
}
