//! 64-bit Arm.

use std::arch::asm;

/// Returns the virtual counter of the generic timer. One count is longer than a processor cycle: usually 1 to 40 ns.
#[inline(always)]
pub(crate) fn cycles() -> u64 {
    let cycles: u64;
    // SAFETY: the instruction reads a register. Linux lets programs read it, as its vDSO does.
    unsafe {
        asm!("mrs {}, cntvct_el0", out(reg) cycles, options(nostack, nomem, preserves_flags))
    };
    cycles
}

/// Calls the macro `$points` with the tracepoints that only arm64 has, and with those of every architecture.
macro_rules! with_own_points {
    ($points:ident: $($common:tt)*) => {
        $points! {
            /// A vCPU enters the guest.
            kvm kvm_entry: Entry { vcpu_pc: u64 }
            /// A vCPU has left the guest. `ret` and `esr_ec` have the values of [`arm_exit`](crate::arm_exit).
            kvm kvm_exit: Exit { ret: i32, esr_ec: u32, vcpu_pc: u64 }
            /// The guest has executed WFI, or WFE or YIELD.
            kvm kvm_wfx_arm64: Wfx { vcpu_pc: u64, is_wfe: u8 }
            /// The guest calls the firmware by HVC with this immediate. `r0` is the function.
            kvm kvm_hvc_arm64: Hvc { vcpu_pc: u64, r0: u64, imm: u64 }
            $($common)*
        }
    };
}

pub(crate) use with_own_points;
