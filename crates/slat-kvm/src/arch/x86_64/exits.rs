//! The exits that only x86 has, in the types of kvm-ioctls.

use crate::arch::x86_64::port_data::PIO_OFFSET;
use crate::run_page::RunPage;
use kvm_bindings::*;
use kvm_ioctls::{MsrExitReason, ReadMsrExit, VcpuExit, WriteMsrExit};

/// Returns the exit in `page` if its reason is x86's own. Call only after `KVM_RUN` has succeeded, and so has filled in
/// the field of the union that belongs to the exit reason.
pub(crate) fn exit(page: &mut RunPage) -> VcpuExit<'_> {
    // SAFETY: the mapping lives as long as the borrow, and every bit pattern of the struct is valid. slat changes the
    // struct only during calls that borrow the vCPU exclusively.
    let run = unsafe { &mut *page.ptr() };
    // SAFETY: every bit pattern of the union's fields is valid.
    let (io, eoi) = unsafe { (run.__bindgen_anon_1.io, run.__bindgen_anon_1.eoi) };
    // SAFETY: every bit pattern of the union's fields is valid.
    let msr = unsafe { &mut run.__bindgen_anon_1.msr };
    match run.exit_reason {
        KVM_EXIT_IO => {
            debug_assert_eq!(io.data_offset, PIO_OFFSET as u64);
            let data = page.port_data_mut(usize::from(io.size) * io.count as usize);
            if u32::from(io.direction) == KVM_EXIT_IO_IN {
                VcpuExit::IoIn(io.port, data)
            } else {
                VcpuExit::IoOut(io.port, data)
            }
        }
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
