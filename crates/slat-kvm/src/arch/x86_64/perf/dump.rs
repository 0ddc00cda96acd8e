//! perf's jitdump, `jit-PID.dump`: names and code of all regions, with the times at which they were compiled.
//!
//! The format is that of Linux's tools/perf/Documentation/jitdump-specification.txt: a header, and records. The times
//! are those of `perf record -k 1`. This process maps the file once, executable. `perf record` sees this mapping, the
//! marker, and so learns of the file. Later `perf inject --jit` reads the file, and writes the code of each region to
//! an ELF file next to it. If the memory of a region is used again, a new record describes the new region from the
//! record's time on. So each sample gets the name that was valid when the sample was taken.

use super::{Content, Written, name, open};
use crate::arch::x86_64::clock::monotonic;
use crate::process::PerProcess;
use slat_process::calls::{Call, make};
use slat_process::file_size::limited;
use slat_process::once::Computed;
use slat_x86::CompiledCode;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{self, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// "JiTD". A reader with another byte order sees the bytes reversed.
const MAGIC: u32 = 0x4a69_5444;
const VERSION: u32 = 1;
const HEADER_BYTES: u32 = 40;
const EM_X86_64: u32 = 62;
/// The ids of records.
const CODE_LOAD: u32 = 0;
const CODE_CLOSE: u32 = 3;
/// The number of bytes of a record's id, size and time.
const PREFIX_BYTES: usize = 16;

/// The jitdump of a process.
#[derive(Default)]
struct Dump {
    /// The size of the file in bytes; 0 until the file exists.
    bytes: u64,
    /// The number of compiled regions that the file describes.
    regions: u64,
}

static DUMP: PerProcess<Mutex<Written<Dump>>> = PerProcess::new();

fn header(now: u64) -> Vec<u8> {
    let pid = std::process::id();
    let words = [MAGIC, VERSION, HEADER_BYTES, EM_X86_64, 0, pid];
    let (words, flags) = (words.map(u32::to_ne_bytes), 0u64);
    [
        words.as_flattened(),
        &now.to_ne_bytes(),
        &flags.to_ne_bytes(),
    ]
    .concat()
}

/// Returns a jitdump record that consists of `parts`.
fn record(id: u32, now: u64, parts: &[&[u8]]) -> Vec<u8> {
    let size = PREFIX_BYTES + parts.iter().map(|part| part.len()).sum::<usize>();
    let words = [id, size as u32].map(u32::to_ne_bytes);
    [&[words.as_flattened(), &now.to_ne_bytes()], parts]
        .concat()
        .concat()
}

/// Returns the record of a new region, which is number `index` in the file.
fn load(now: u64, index: u64, name: &str, code: &[u8]) -> Vec<u8> {
    let address = code.as_ptr() as u64;
    let threads = [std::process::id(), slat_process::thread_id() as u32].map(u32::to_ne_bytes);
    let numbers = [address, address, code.len() as u64, index].map(u64::to_ne_bytes);
    let parts = [
        threads.as_flattened(),
        numbers.as_flattened(),
        name.as_bytes(),
        b"\0",
        code,
    ];
    record(CODE_LOAD, now, &parts)
}

/// Returns the directory of the dump. As for other programs that write jitdumps, the environment variable `JITDUMPDIR`
/// names the directory. Make the first call before the client changes its working directory.
pub(super) fn directory() -> &'static Path {
    static DIRECTORY: Computed<PathBuf> = Computed::new();
    DIRECTORY.get_or_init(|| {
        let chosen = std::env::var_os("JITDUMPDIR").filter(|path| !path.is_empty());
        chosen.map_or_else(
            || "/tmp".into(),
            |chosen| path::absolute(&chosen).unwrap_or_else(|_| chosen.into()),
        )
    })
}

/// Maps the file until the process ends. By this mapping, perf learns of the file.
fn mark(file: &File) -> io::Result<()> {
    let rights = libc::PROT_READ | libc::PROT_EXEC;
    let start = std::ptr::null_mut();
    // SAFETY: the call makes a new mapping at an address of the host's choice. The mapping is not used.
    let marker = unsafe { libc::mmap(start, 1, rights, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
    match marker {
        libc::MAP_FAILED => {
            let error = io::Error::last_os_error();
            Err(io::Error::other(format!(
                "perf's marker cannot be mapped ({error}); is its directory mounted with noexec? (JITDUMPDIR names another)"
            )))
        }
        _ => Ok(()),
    }
}

impl Content for Dump {
    fn path() -> PathBuf {
        directory().join(format!("jit-{}.dump", std::process::id()))
    }

    fn write(&mut self, code: &CompiledCode<'_>) -> io::Result<()> {
        let file = open(&Self::path(), self.bytes == 0)?;
        let now = monotonic();
        let mut bytes = Vec::new();
        if self.bytes == 0 {
            mark(&file)?;
            bytes = header(now);
        }
        bytes.extend(load(now, self.regions, &name(code.rip), code.code));
        file.write_all_at(&bytes, self.bytes)?;
        self.bytes += bytes.len() as u64;
        self.regions += 1;
        Ok(())
    }
}

/// Adds compiled code to the dump.
pub(super) fn add(code: &CompiledCode<'_>) {
    super::add(&DUMP, code);
}

/// Adds the record that ends the dump. This runs on the client's thread, so a seccomp filter may forbid the system
/// calls. Failures are ignored, because perf does not need the record.
pub(super) fn end() {
    let Some(dump) = DUMP.peek() else {
        return;
    };
    let mut dump = dump.lock().unwrap_or_else(PoisonError::into_inner);
    if dump.has_failed {
        return;
    }
    let Ok(path) = CString::new(Dump::path().into_os_string().as_bytes()) else {
        return;
    };
    let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let (at, path) = (libc::AT_FDCWD as usize, path.as_ptr() as usize);
    let record = record(CODE_CLOSE, monotonic(), &[]);
    // SAFETY: the path ends with NUL, the written bytes are live, and only this function has the descriptor.
    unsafe {
        let Ok(file) = make(Call::Open, [at, path, flags as usize, 0, 0, 0]) else {
            return;
        };
        let (start, len) = (record.as_ptr() as usize, record.len());
        let _ = limited(|| {
            make(Call::Write, [file as usize, start, len, 0, 0, 0])
                .map_err(io::Error::from_raw_os_error)
        });
        let _ = make(Call::Close, [file as usize, 0, 0, 0, 0, 0]);
    }
    // The process is ending, so regions that are compiled from now on need no record.
    dump.has_failed = true;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(bytes: &[u8], at: usize) -> u64 {
        u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn records_are_as_long_as_they_say() {
        let begin = header(7);
        assert_eq!(begin.len(), HEADER_BYTES as usize);
        assert_eq!((&begin[..4], number(&begin, 24)), (&b"DTiJ"[..], 7));
        let code = [0x90, 0xc3];
        let region = load(8, 5, "name", &code);
        assert_eq!(
            number(&region, 0),
            (region.len() as u64) << 32 | u64::from(CODE_LOAD)
        );
        let numbers = [8, 24, 32, 40, 48].map(|at| number(&region, at));
        let address = code.as_ptr() as u64;
        assert_eq!(numbers, [8, address, address, 2, 5]);
        assert_eq!(region[56..], *b"name\0\x90\xc3");
        assert_eq!(record(CODE_CLOSE, 9, &[]).len(), PREFIX_BYTES);
    }
}
