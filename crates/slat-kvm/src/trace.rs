//! Tracepoints of calls and devices. This module also begins the recording that `slat run --trace` requests by
//! `SLAT_TRACE`, `SLAT_TRACE_EVENTS` and `SLAT_TRACE_BUFFER`. The tracepoints of the memory system are in
//! [`slat_host::HostPlatform`].

use crate::errno::Error;
use crate::messages;
use kvm_bindings::KVM_EXIT_UNKNOWN;
use slat_process::file_size::explained;
use slat_trace::{Buffer, Mmio, Selection, UserspaceExit, begin as record, mmio, point};
use std::path::Path;

/// Begins to record, if the environment asks for it. If recording cannot begin, prints a message.
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

/// Stores the time in the trace. A reader needs it to convert the times of all records. Call at the end of the process.
pub fn end() {
    slat_trace::mark_time();
}

/// Traces that `KVM_RUN` returns.
pub(crate) fn returns(exit_reason: u32, result: &Result<(), Error>) {
    point(|| UserspaceExit {
        reason: match result {
            Ok(()) => exit_reason,
            Err(_) => KVM_EXIT_UNKNOWN,
        },
        errno: result.as_ref().map_or_else(|error| -error.errno(), |()| 0),
    });
}

/// Traces that the guest writes to a device at `gpa`.
#[inline]
pub(crate) fn mmio_write(gpa: u64, data: &[u8]) {
    mmio_access(mmio::WRITE, gpa, data);
}

/// Traces that the guest reads `data` from a device at `gpa`.
#[inline]
pub(crate) fn mmio_read(gpa: u64, data: &[u8]) {
    mmio_access(mmio::READ, gpa, data);
}

/// Traces that the guest reads `len` bytes from a device at `gpa`. The client has to provide the bytes.
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

/// Returns the number whose little-endian bytes are `data`.
pub(crate) fn number(data: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..data.len()].copy_from_slice(data);
    u64::from_le_bytes(bytes)
}
