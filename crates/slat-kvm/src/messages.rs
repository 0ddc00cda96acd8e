//! Prints slat's messages, on standard error only: the reasons why calls or guests failed.
//!
//! KVM returns an errno for a bad call and an exit for a broken guest, without a reason. With `SLAT_LOG=1`, slat
//! explains refused calls. Without `SLAT_LOG`, slat still reports each instruction that its CPU does not have, once.

use slat_process::file_size::limited;
use slat_process::once::Computed;
use std::fmt::Display;
use std::io;

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
