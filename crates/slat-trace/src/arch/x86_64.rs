//! x86-64.

use std::arch::x86_64::_rdtsc;

/// Returns the processor's time-stamp counter, in cycles.
#[inline(always)]
pub(crate) fn cycles() -> u64 {
    // SAFETY: the instruction works unless the process has disabled it (PR_SET_TSC); then even the process's vDSO
    // cannot tell the time.
    unsafe { _rdtsc() }
}

/// Calls the macro `$points` with the tracepoints that only x86-64 has, and with those of every architecture.
macro_rules! with_own_points {
    ($points:ident: $($common:tt)*) => {
        $points! {
            /// A vCPU enters the guest.
            kvm kvm_entry: Entry { vcpu_id: u32, rip: u64 }
            /// A vCPU has left the guest. `exit_reason` is an exit reason of VMX (`isa` 1) on any host processor: see
            /// [`exit`](crate::exit). For an access to ports, `info1` is VMX's exit qualification. For EXCEPTION_NMI,
            /// `intr_info` describes the exception.
            kvm kvm_exit: Exit { exit_reason: u32, guest_rip: u64, isa: u32, info1: u64, intr_info: u32, vcpu_id: u32 }
            /// A vCPU accesses an I/O port. `rw` is 1 for a write. `val` is the first of the `count` values.
            kvm kvm_pio: Pio { rw: u32, port: u32, size: u32, count: u32, val: u32 }
            /// An interrupt is injected.
            kvm kvm_inj_virq: InjVirq { vector: u32, soft: u8, reinjected: u8 }
            /// A message-signalled interrupt is sent.
            kvm kvm_msi_set_irq: MsiSetIrq { address: u64, data: u64 }
            /// The guest has ended (EOI) the interrupt of a controller's pin. `irqchip` is 0 or 1 for the two 8259, 2
            /// for the I/O APIC.
            kvm kvm_ack_irq: AckIrq { irqchip: u32, pin: u32 }
            /// The guest has ended (EOI) an interrupt of its local APIC.
            kvm kvm_eoi: Eoi { apicid: u32, vector: i32 }
            $($common)*
        }
    };
}

pub(crate) use with_own_points;
