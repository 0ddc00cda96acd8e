//! Files that describe compiled code to perf, so that `perf report` names guest code.
//!
//! | file | idea |
//! |---|---|
//! | `map` | perf's map: the names that are valid now, by address |
//! | `dump` | jitdump: names and code, by address and time |
//!
//! A region is named after the guest code for which it was compiled: by a symbol and an offset, or by the guest address
//! if there is no symbol.
//!
//! A file is opened each time that a region is added, because the client may close any descriptor of this process.

mod dump;
mod map;

use crate::arch::x86_64::policy::JitMap;
use crate::messages;
use crate::symbols;
use slat_process::file_size::{explained, limited};
use slat_process::forks::PerProcess;
use slat_x86::CompiledCode;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Returns the [observer](slat_x86::Compiler::observe) for this process's compiler. It writes the file that the policy
/// `map` chooses. `None`: the policy asks for no file.
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

/// Ends the jitdump, if the process writes a jitdump. Call at the end of the process.
pub fn end() {
    dump::end();
}

/// The contents of a perf file, for one process.
trait Content: Default {
    fn path() -> PathBuf;

    /// Adds code to the file. The first call creates the file.
    fn write(&mut self, code: &CompiledCode<'_>) -> io::Result<()>;
}

#[derive(Default)]
struct Written<T> {
    content: T,
    /// Whether a write has failed. After that the file is not written any more.
    has_failed: bool,
}

/// Adds code to a file. If the file cannot be written, prints a message, and writes nothing to the file any more.
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

/// Opens or creates a file. When creating it, removes the file of an earlier process with the same id.
fn open(path: &Path, create: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(libc::O_NOFOLLOW);
    if create {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // The file is also opened for reading, because perf's marker is a mapping that can be read.
        options.read(true).create_new(true).mode(0o600);
    }
    options.open(path)
}

/// Returns the name of the guest code at `rip`.
fn name(rip: u64) -> String {
    match symbols::of_guests().and_then(|symbols| symbols.find(rip)) {
        Some((symbol, 0)) => format!("guest:{symbol}"),
        Some((symbol, offset)) => format!("guest:{symbol}+{offset:#x}"),
        None => format!("guest:{rip:#x}"),
    }
}
