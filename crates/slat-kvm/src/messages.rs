//! Prints slat's messages, on standard error only: the reasons why calls or guests failed.
//!
//! KVM returns an errno for a bad call and an exit for a broken guest, without a reason. With `SLAT_LOG=1`, slat
//! explains refused calls. Without `SLAT_LOG`, slat still reports each instruction that its CPU does not have, once.

use crate::process::PerProcess;
use slat_process::file_size::limited;
use slat_process::once::Computed;
use std::collections::BTreeSet;
use std::fmt::{Display, Write as _};
use std::io;
use std::sync::{Mutex, PoisonError};

/// Whether slat explains refused calls (`SLAT_LOG`).
fn explains() -> bool {
    static EXPLAINS: Computed<bool> = Computed::new();
    *EXPLAINS.get_or_init(|| {
        std::env::var_os("SLAT_LOG").is_some_and(|value| !value.is_empty() && value != "0")
    })
}

/// Prints one line on standard error by one write, so that lines of other threads do not mix with it.
pub fn say(line: std::fmt::Arguments<'_>) {
    print(&format!("slat: {line}\n"));
}

/// Prints text on standard error. Does not use the standard library's `stderr`, whose lock could be held forever in a
/// child that is forked meanwhile.
pub(crate) fn print(text: &str) {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let written = limited(|| {
            // SAFETY: the call gets live bytes and their number.
            let written =
                unsafe { libc::write(libc::STDERR_FILENO, rest.as_ptr().cast(), rest.len()) };
            usize::try_from(written).map_err(|_| io::Error::last_os_error())
        });
        match written {
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // If standard error is closed, the error cannot be reported.
            Err(_) => return,
        }
    }
}

/// With `SLAT_LOG`, prints why a call is refused, or why a guest has stopped.
pub(crate) fn explain(why: &dyn Display) {
    if explains() {
        say(format_args!("{why}"));
    }
}

/// With `SLAT_LOG`, prints that an ioctl is unknown or has failed.
pub(crate) fn refused_ioctl(request: u32, errno: i32) {
    if explains() {
        match crate::abi::name(request) {
            Some(name) => say(format_args!(
                "{name}: {}",
                std::io::Error::from_raw_os_error(errno)
            )),
            None => say(format_args!("ioctl {request:#x} is not supported")),
        }
    }
}

/// Reports an instruction that the CPU cannot execute. Reports the same bytes only once, and at most 64 instructions.
pub(crate) fn cannot_execute(vcpu: u32, rip: u64, bytes: &[u8], reason: &str) {
    static SAID: PerProcess<Mutex<BTreeSet<Vec<u8>>>> = PerProcess::new();
    let mut said = SAID.get().lock().unwrap_or_else(PoisonError::into_inner);
    if said.len() >= 64 || !said.insert(bytes.to_vec()) {
        return;
    }
    let mut hex = String::new();
    for byte in bytes {
        let _ = write!(hex, " {byte:02x}");
    }
    say(format_args!(
        "vCPU {vcpu} at {rip:#x} cannot execute{hex}: {reason}"
    ));
}
