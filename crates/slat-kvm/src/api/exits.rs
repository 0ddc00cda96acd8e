//! [`VcpuExit`]: the exit that `KVM_RUN` has stored in `kvm_run`.

use crate::arch;
use crate::errno::{Error, Result};
use crate::run_page::{PAGE, PIO_OFFSET, RunPage};
use kvm_bindings::*;
use kvm_ioctls::{HypercallExit, VcpuExit};

/// Reads the field of `kvm_run`'s union that belongs to the exit reason.
macro_rules! exit {
    ($run:ident.$field:ident) => {
        // SAFETY: `KVM_RUN` fills in this field for this exit reason, and every bit pattern of the union's fields is
        // valid.
        unsafe { $run.__bindgen_anon_1.$field }
    };
    (&mut $run:ident.$field:ident) => {
        // SAFETY: `KVM_RUN` fills in this field for this exit reason, and every bit pattern of the union's fields is
        // valid.
        unsafe { &mut $run.__bindgen_anon_1.$field }
    };
}

/// Returns the exit that the pages describe. `page` is mapped by the vCPU that the caller borrows for `'a`.
pub(super) fn exit(page: &mut RunPage) -> VcpuExit<'_> {
    let start: *mut u8 = page.ptr().cast();
    let run = run(page);
    match run.exit_reason {
        KVM_EXIT_UNKNOWN => VcpuExit::Unknown,
        KVM_EXIT_EXCEPTION => VcpuExit::Exception,
        KVM_EXIT_IO => {
            let io = exit!(run.io);
            let len = usize::from(io.size) * io.count as usize;
            assert!(len <= PAGE);
            // SAFETY: the port-data page is part of the mapping, which lives as long as the borrow of `page`, and `run`
            // is not used any more.
            let data = unsafe { std::slice::from_raw_parts_mut(start.add(PIO_OFFSET), len) };
            if u32::from(io.direction) == KVM_EXIT_IO_IN {
                VcpuExit::IoIn(io.port, data)
            } else {
                VcpuExit::IoOut(io.port, data)
            }
        }
        KVM_EXIT_MMIO => {
            let mmio = exit!(&mut run.mmio);
            let data = &mut mmio.data[..mmio.len as usize];
            if mmio.is_write != 0 {
                VcpuExit::MmioWrite(mmio.phys_addr, data)
            } else {
                VcpuExit::MmioRead(mmio.phys_addr, data)
            }
        }
        KVM_EXIT_HYPERCALL => {
            let hypercall = exit!(&mut run.hypercall);
            VcpuExit::Hypercall(HypercallExit {
                nr: hypercall.nr,
                args: hypercall.args,
                ret: &mut hypercall.ret,
                // SAFETY: every bit pattern of both fields of the union is valid.
                longmode: unsafe { hypercall.__bindgen_anon_1.longmode },
            })
        }
        KVM_EXIT_DEBUG => VcpuExit::Debug(exit!(run.debug).arch),
        KVM_EXIT_HLT => VcpuExit::Hlt,
        KVM_EXIT_IRQ_WINDOW_OPEN => VcpuExit::IrqWindowOpen,
        KVM_EXIT_SHUTDOWN => VcpuExit::Shutdown,
        KVM_EXIT_FAIL_ENTRY => {
            let failure = exit!(run.fail_entry);
            VcpuExit::FailEntry(failure.hardware_entry_failure_reason, failure.cpu)
        }
        KVM_EXIT_INTR => VcpuExit::Intr,
        KVM_EXIT_INTERNAL_ERROR => VcpuExit::InternalError,
        KVM_EXIT_SYSTEM_EVENT => {
            let event = exit!(&mut run.system_event);
            // SAFETY: every bit pattern of both fields of the union is valid.
            let data = unsafe { &event.__bindgen_anon_1.data };
            VcpuExit::SystemEvent(event.type_, &data[..event.ndata as usize])
        }
        _ => arch::exit(run),
    }
}

/// Returns `KVM_EXIT_MEMORY_FAULT`, the only exit that `KVM_RUN` returns with an error. For other errors, returns the
/// error.
pub(super) fn exit_with(error: Error, page: &mut RunPage) -> Result<VcpuExit<'_>> {
    let run = run(page);
    let faulted = [libc::EFAULT, libc::EHWPOISON].contains(&error.errno());
    if !faulted || run.exit_reason != KVM_EXIT_MEMORY_FAULT {
        return Err(error);
    }
    let fault = exit!(run.memory_fault);
    Ok(VcpuExit::MemoryFault {
        flags: fault.flags,
        gpa: fault.gpa,
        size: fault.size,
    })
}

/// Returns the `kvm_run` struct in the client's own mapping.
pub(super) fn run(page: &mut RunPage) -> &mut kvm_run {
    // SAFETY: the mapping lives as long as the borrow, and every bit pattern of the struct is valid. slat changes the
    // struct only during calls that borrow the vCPU exclusively, as the kernel does with its own `kvm_run`.
    unsafe { &mut *page.ptr() }
}
