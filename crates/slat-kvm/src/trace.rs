//! Tracepoints of entries, exits and devices. Also begins the recording for which `slat run --trace` asks by
//! `SLAT_TRACE`, `SLAT_TRACE_EVENTS` and `SLAT_TRACE_BUFFER`. [`slat_host::HostPlatform`] makes the tracepoints of the
//! memory system.

use crate::errno::Error;
use crate::messages;
use kvm_bindings::KVM_EXIT_UNKNOWN;
use slat_process::file_size::explained;
use slat_trace::{
    Buffer, Entry, Mmio, Pio, Selection, UserspaceExit, begin as record, exit as reason, mmio,
    point,
};
use slat_x86::{Exit, State};
use std::path::Path;

/// Begins to record, if the environment asks for it. A failure is reported, and then nothing is recorded.
pub(crate) fn begin() {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let Some(path) = variable("SLAT_TRACE") else {
        return;
    };
    let text = |name| variable(name).map(|value| value.to_string_lossy().into_owned());
    let selected = text("SLAT_TRACE_EVENTS").map_or(Ok(Selection::ALL), |list| list.parse());
    let buffer = text("SLAT_TRACE_BUFFER").map_or(Ok(Buffer::default()), |size| size.parse());
    let begun = selected.and_then(|selected| {
        record(Path::new(&path), selected, buffer?).map_err(|error| explained(&error))
    });
    if let Err(error) = begun {
        messages::say(format_args!("no trace in {}: {error}", path.display()));
    }
}

/// Stores the time, by which the times of all records are computed. Call at the end of the process.
pub fn end() {
    slat_trace::mark_time();
}

/// The vCPU enters the guest.
#[inline]
pub(crate) fn enters(vcpu_id: u32, state: &State) {
    point(|| Entry {
        vcpu_id,
        rip: state.rip,
    });
}

/// The vCPU has left the guest.
#[inline]
pub(crate) fn left(vcpu_id: u32, state: &State, exit: &Exit) {
    point(|| {
        let exception = |vector: u8| 1 << 31 | 3 << 8 | u32::from(vector);
        let (exit_reason, info1, intr_info) = match *exit {
            Exit::Attention => (reason::EXTERNAL_INTERRUPT, 0, 0),
            Exit::InterruptWindow => (reason::INTERRUPT_WINDOW, 0, 0),
            Exit::Notify => (reason::NOTIFY, 0, 0),
            Exit::Io {
                port, size, write, ..
            } => {
                // Intel's SDM, volume 3, table 29-5.
                let qualification =
                    u64::from(port) << 16 | u64::from(!write) << 3 | (u64::from(size) - 1);
                (reason::IO_INSTRUCTION, qualification, 0)
            }
            Exit::Mmio { .. } | Exit::Delivery { .. } => (reason::EPT_MISCONFIG, 0, 0),
            Exit::Hlt => (reason::HLT, 0, 0),
            Exit::Emulation { .. } => (reason::EXCEPTION_NMI, 0, exception(slat_x86::vector::UD)),
            Exit::Debug { vector, .. } => (reason::EXCEPTION_NMI, 0, exception(vector)),
            Exit::Probe(_) => (reason::EXCEPTION_NMI, 0, exception(slat_x86::vector::DB)),
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

/// `KVM_RUN` returns.
pub(crate) fn returns(exit_reason: u32, result: &Result<(), Error>) {
    point(|| UserspaceExit {
        reason: match result {
            Ok(()) => exit_reason,
            Err(_) => KVM_EXIT_UNKNOWN,
        },
        errno: result.as_ref().map_or_else(|error| -error.errno(), |()| 0),
    });
}

/// The guest writes to a device at `gpa`.
#[inline]
pub(crate) fn mmio_write(gpa: u64, data: &[u8]) {
    mmio_access(mmio::WRITE, gpa, data);
}

/// The guest reads `data` from a device at `gpa`.
#[inline]
pub(crate) fn mmio_read(gpa: u64, data: &[u8]) {
    mmio_access(mmio::READ, gpa, data);
}

/// The guest reads `len` bytes from a device at `gpa`, which the client has to provide.
#[inline]
pub(crate) fn mmio_asked(gpa: u64, len: u8) {
    mmio_access(mmio::READ_UNSATISFIED, gpa, &[0; 8][..len.into()]);
}

#[inline]
fn mmio_access(kind: u32, gpa: u64, data: &[u8]) {
    point(|| Mmio {
        r#type: kind,
        len: data.len() as u32,
        gpa,
        val: number(data),
    });
}

/// The guest writes `data` to a port, or reads it, in units of `size` bytes.
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

fn number(data: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..data.len()].copy_from_slice(data);
    u64::from_le_bytes(bytes)
}
