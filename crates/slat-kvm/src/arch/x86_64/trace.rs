//! Tracepoints of entries, exits and ports.

use crate::trace::number;
use slat_trace::{Entry, Pio, exit as reason, point};
use slat_x86::{Exit, State, vector};

/// Traces that the vCPU enters the guest.
#[inline]
pub(crate) fn enters(vcpu_id: u32, state: &State) {
    point(|| Entry {
        vcpu_id,
        rip: state.rip,
    });
}

/// Traces that the vCPU has left the guest. A trace has one exit for each entry. So if there is no `exit`, records the
/// exit `Attention`.
#[inline]
pub(crate) fn left(vcpu_id: u32, state: &State, exit: Option<&Exit>) {
    point(|| {
        let exit = exit.unwrap_or(&Exit::Attention);
        let exception = |vector: u8| 1 << 31 | 3 << 8 | u32::from(vector);
        let (exit_reason, info1, intr_info) = match *exit {
            Exit::Attention => (reason::EXTERNAL_INTERRUPT, 0, 0),
            Exit::InterruptWindow => (reason::INTERRUPT_WINDOW, 0, 0),
            Exit::Notify => (reason::NOTIFY, 0, 0),
            Exit::Io {
                port, size, write, ..
            } => {
                // The format of this word is that of the exit qualification (Intel's SDM, volume 3, table 29-5).
                let qualification =
                    u64::from(port) << 16 | u64::from(!write) << 3 | (u64::from(size) - 1);
                (reason::IO_INSTRUCTION, qualification, 0)
            }
            Exit::Mmio { .. } | Exit::Delivery { .. } => (reason::EPT_MISCONFIG, 0, 0),
            Exit::Hlt => (reason::HLT, 0, 0),
            Exit::Emulation { .. } => (reason::EXCEPTION_NMI, 0, exception(vector::UD)),
            Exit::Debug { vector, .. } => (reason::EXCEPTION_NMI, 0, exception(vector)),
            Exit::Probe(_) => (reason::EXCEPTION_NMI, 0, exception(vector::DB)),
            Exit::Smi => (reason::OTHER_SMI, 0, 0),
            Exit::Rsm => (reason::RSM, 0, 0),
            Exit::Hypercall => (reason::VMCALL, 0, 0),
            Exit::Msr { value: None, .. } => (reason::MSR_READ, 0, 0),
            Exit::Msr { .. } => (reason::MSR_WRITE, 0, 0),
            Exit::Shutdown => (reason::TRIPLE_FAULT, 0, 0),
            Exit::BadAddress | Exit::OutOfMemory => (reason::EPT_VIOLATION, 0, 0),
            Exit::BusLock => (reason::BUS_LOCK, 0, 0),
        };
        slat_trace::Exit {
            exit_reason,
            guest_rip: state.rip,
            isa: 1,
            info1,
            intr_info,
            vcpu_id,
        }
    });
}

/// Traces that the guest writes `data` to a port, or reads `data` from a port, in units of `size` bytes.
#[inline]
pub(crate) fn port(write: bool, port: u16, size: usize, data: &[u8]) {
    point(|| Pio {
        rw: write.into(),
        port: port.into(),
        size: size as u32,
        count: (data.len() / size) as u32,
        val: number(&data[..size]) as u32,
    });
}
