//! The type [`VcpuExit`]: the exit that `KVM_RUN` has stored in `kvm_run`.

use crate::arch;
use crate::errno::{Error, Result};
use crate::run_page::RunPage;
use kvm_bindings::*;
use kvm_ioctls::{HypercallExit, VcpuExit};

/// Reads the field of `kvm_run`'s union that belongs to the exit reason.
macro_rules! exit {
    ($page:ident.$field:ident) => {
        // SAFETY: `KVM_RUN` fills in this field for this exit reason, and every bit pattern of the union's fields is
        // valid.
        unsafe { run($page).__bindgen_anon_1.$field }
    };
    (&mut $page:ident.$field:ident) => {
        // SAFETY: `KVM_RUN` fills in this field for this exit reason, and every bit pattern of the union's fields is
        // valid.
        unsafe { &mut run($page).__bindgen_anon_1.$field }
    };
}

/// Converts the exit in `kvm_run` to the type of kvm-ioctls. `page` is the mapping of a vCPU that the caller borrows
/// for `'a`.
pub(super) fn exit(page: &mut RunPage) -> VcpuExit<'_> {
    match run(page).exit_reason {
        KVM_EXIT_UNKNOWN => VcpuExit::Unknown,
        KVM_EXIT_EXCEPTION => VcpuExit::Exception,
        KVM_EXIT_MMIO => {
            let mmio = exit!(&mut page.mmio);
            let data = &mut mmio.data[..mmio.len as usize];
            if mmio.is_write != 0 {
                VcpuExit::MmioWrite(mmio.phys_addr, data)
            } else {
                VcpuExit::MmioRead(mmio.phys_addr, data)
            }
        }
        KVM_EXIT_HYPERCALL => {
            let hypercall = exit!(&mut page.hypercall);
            VcpuExit::Hypercall(HypercallExit {
                nr: hypercall.nr,
                args: hypercall.args,
                ret: &mut hypercall.ret,
                // SAFETY: every bit pattern of both fields of the union is valid.
                longmode: unsafe { hypercall.__bindgen_anon_1.longmode },
            })
        }
        KVM_EXIT_DEBUG => VcpuExit::Debug(exit!(page.debug).arch),
        KVM_EXIT_HLT => VcpuExit::Hlt,
        KVM_EXIT_IRQ_WINDOW_OPEN => VcpuExit::IrqWindowOpen,
        KVM_EXIT_SHUTDOWN => VcpuExit::Shutdown,
        KVM_EXIT_FAIL_ENTRY => {
            let failure = exit!(page.fail_entry);
            VcpuExit::FailEntry(failure.hardware_entry_failure_reason, failure.cpu)
        }
        KVM_EXIT_INTR => VcpuExit::Intr,
        KVM_EXIT_INTERNAL_ERROR => VcpuExit::InternalError,
        KVM_EXIT_SYSTEM_EVENT => {
            let event = exit!(&mut page.system_event);
            // SAFETY: every bit pattern of both fields of the union is valid.
            let data = unsafe { &event.__bindgen_anon_1.data };
            VcpuExit::SystemEvent(event.type_, &data[..event.ndata as usize])
        }
        _ => arch::exit(page),
    }
}

/// Returns the result of a `KVM_RUN` that has failed with `error`: the exit `KVM_EXIT_MEMORY_FAULT` if `kvm_run` has
/// this exit, otherwise `error`. `KVM_RUN` returns no other exit together with an error.
pub(super) fn exit_with(error: Error, page: &mut RunPage) -> Result<VcpuExit<'_>> {
    let faulted = [libc::EFAULT, libc::EHWPOISON].contains(&error.errno());
    if !faulted || run(page).exit_reason != KVM_EXIT_MEMORY_FAULT {
        return Err(error);
    }
    let fault = exit!(page.memory_fault);
    Ok(VcpuExit::MemoryFault {
        flags: fault.flags,
        gpa: fault.gpa,
        size: fault.size,
    })
}

/// Returns the `kvm_run` struct in the client's own mapping.
pub(crate) fn run(page: &mut RunPage) -> &mut kvm_run {
    // SAFETY: the mapping lives as long as the borrow, and every bit pattern of the struct is valid. slat changes the
    // struct only during calls that borrow the vCPU exclusively, as the kernel does with its own `kvm_run`.
    unsafe { &mut *page.ptr() }
}
