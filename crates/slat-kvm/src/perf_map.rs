//! perf's map of compiled code, `/tmp/perf-PID.map`: so that `perf report` names guest code.
//!
//! Its form is that of Linux's tools/perf/Documentation/jit-interface.txt: a line for each region, with its address and its size in
//! hexadecimal digits, and its name, which goes up to the end of the line. The name is that of the guest code for which the region was
//! compiled: a symbol and an offset, or else the guest address.
//!
//! perf reads the file when it reports, and the lines have no times: of two for the same address it may take either. The memory of a
//! region that is used no more is soon used again, so the line of the old region is overwritten: the newest one wins.
//!
//! The file is opened for each line, because descriptors of this process are the client's to close.

use crate::process::PerProcess;
use crate::symbols;
use slat_x86::CompiledCode;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// The map of a process.
#[derive(Default)]
struct Map {
    /// The lines that are good, by the addresses of their regions.
    lines: BTreeMap<usize, Line>,
    /// The bytes of the file; 0 before it exists.
    bytes: u64,
    /// Whether it could not be written, and was given up.
    has_failed: bool,
}

/// Where a line of the file is.
struct Line {
    /// The end of its region.
    end: usize,
    /// Its offset in the file.
    offset: u64,
    /// Its bytes.
    len: usize,
}

static MAP: PerProcess<Mutex<Map>> = PerProcess::new();

fn path() -> PathBuf {
    PathBuf::from(format!("/tmp/perf-{}.map", std::process::id()))
}

/// Opens the map, or creates it, and removes that of an earlier process with the same id.
fn open(create: bool) -> io::Result<File> {
    let path = path();
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(libc::O_NOFOLLOW);
    if create {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        options.create_new(true).mode(0o600);
    }
    options.open(path)
}

/// Returns a line for no address, as long as another one.
fn overwritten(len: usize) -> String {
    format!("{:<1$}\n", "0 0 reused", len - 1)
}

impl Map {
    /// Writes a line for the region at `start..end`, over those of regions that were there.
    fn write(&mut self, start: usize, end: usize, line: &str) -> io::Result<()> {
        let file = open(self.bytes == 0)?;
        let ends_before = self.lines.range(..start).next_back();
        let first = match ends_before {
            Some((first, before)) if before.end > start => *first,
            _ => start,
        };
        let reused: Vec<_> = self.lines.range(first..end).map(|(at, _)| *at).collect();
        for at in reused {
            if let Some(old) = self.lines.remove(&at) {
                file.write_all_at(overwritten(old.len).as_bytes(), old.offset)?;
            }
        }
        file.write_all_at(line.as_bytes(), self.bytes)?;
        let (offset, len) = (self.bytes, line.len());
        self.lines.insert(start, Line { end, offset, len });
        self.bytes += len as u64;
        Ok(())
    }
}

/// Names guest code.
fn name(rip: u64) -> String {
    match symbols::of_guests().and_then(|symbols| symbols.find(rip)) {
        Some((symbol, 0)) => format!("guest:{symbol}"),
        Some((symbol, offset)) => format!("guest:{symbol}+{offset:#x}"),
        None => format!("guest:{rip:#x}"),
    }
}

/// Adds compiled code to the map: the [observer](slat_x86::Compiler::observe) of this process's compiler. A map that cannot be written is
/// given up, with a message.
pub(crate) fn add(code: &CompiledCode) {
    let mut map = MAP.get().lock().unwrap_or_else(PoisonError::into_inner);
    if map.has_failed {
        return;
    }
    let line = format!("{:x} {:x} {}\n", code.address, code.len, name(code.rip));
    if let Err(error) = map.write(code.address, code.address + code.len, &line) {
        map.has_failed = true;
        let path = path();
        eprintln!(
            "slat: {}: {error}: perf will not name guest code",
            path.display()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_line_of_an_address_is_the_only_one() {
        let mut map = Map::default();
        let mut add = |start: usize, end: usize, name: &str| {
            let line = format!("{start:x} {:x} {name}\n", end - start);
            map.write(start, end, &line).unwrap();
        };
        add(0x1000, 0x3000, "first");
        add(0x3000, 0x4000, "second");
        add(0x5000, 0x6000, "third");
        // The end of the first and the second.
        add(0x2000, 0x3800, "fourth");
        add(0x1800, 0x2000, "fifth");
        add(0x4000, 0x5000, "sixth");
        let content = std::fs::read_to_string(path()).unwrap();
        std::fs::remove_file(path()).unwrap();
        let lines: Vec<_> = content.lines().map(str::trim_end).collect();
        let expected = [
            "0 0 reused",
            "0 0 reused",
            "5000 1000 third",
            "2000 1800 fourth",
            "1800 800 fifth",
            "4000 1000 sixth",
        ];
        assert_eq!(lines, expected);
    }
}
