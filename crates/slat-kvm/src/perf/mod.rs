//! Files that tell perf of compiled code, so that `perf report` names guest code.
//!
//! | file | idea |
//! |---|---|
//! | `map` | perf's map: the names that are good now, by address |
//! | `dump` | jitdump: names and code, by address and time |
//!
//! The name of a region is that of the guest code for which it was compiled: a symbol and an offset, or
//! else the guest address.
//!
//! The files are opened for each region, because descriptors of this process are the client's to close.

mod dump;
mod map;

use crate::messages;
use crate::policy::JitMap;
use crate::symbols;
use slat_process::file_size::{explained, limited};
use slat_process::forks::PerProcess;
use slat_x86::CompiledCode;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Returns the [observer](slat_x86::Compiler::observe) of this process's compiler that writes what `map` asks
/// for. `None`: nothing.
pub(crate) fn observer(map: JitMap) -> Option<fn(&CompiledCode<'_>)> {
    match map {
        JitMap::Off => None,
        JitMap::On => Some(map::add),
        JitMap::Dump => {
            dump::directory();
            Some(dump::add)
        }
    }
}

/// Ends the jitdump, if there is one. Call at the end of the process.
pub fn end() {
    dump::end();
}

/// The contents of a file for one process.
trait Content: Default {
    fn path() -> PathBuf;

    /// Adds code to the file, which it creates the first time.
    fn write(&mut self, code: &CompiledCode<'_>) -> io::Result<()>;
}

#[derive(Default)]
struct Written<T> {
    content: T,
    /// Whether it could not be written, and was given up.
    has_failed: bool,
}

/// Adds code to a file. One that cannot be written is given up, with a message.
fn add<T: Content + Send>(to: &'static PerProcess<Mutex<Written<T>>>, code: &CompiledCode<'_>) {
    let mut written = to.get().lock().unwrap_or_else(PoisonError::into_inner);
    if written.has_failed {
        return;
    }
    if let Err(error) = limited(|| written.content.write(code)) {
        written.has_failed = true;
        messages::say(format_args!(
            "{}: {}: perf will not name guest code",
            T::path().display(),
            explained(&error)
        ));
    }
}

/// Opens a file, or creates it, and removes that of an earlier process with the same id.
fn open(path: &Path, create: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(libc::O_NOFOLLOW);
    if create {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // perf's marker is a mapping that can be read.
        options.read(true).create_new(true).mode(0o600);
    }
    options.open(path)
}

/// Names guest code.
fn name(rip: u64) -> String {
    match symbols::of_guests().and_then(|symbols| symbols.find(rip)) {
        Some((symbol, 0)) => format!("guest:{symbol}"),
        Some((symbol, offset)) => format!("guest:{symbol}+{offset:#x}"),
        None => format!("guest:{rip:#x}"),
    }
}
