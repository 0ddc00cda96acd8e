//! perf's map of compiled code, `/tmp/perf-PID.map`.
//!
//! The format is that of Linux's tools/perf/Documentation/jit-interface.txt. Each region has a line: its address and
//! size in hexadecimal digits, and its name, which extends to the end of the line.
//!
//! perf reads the file when it reports, and the lines have no times. If two lines have the same address, perf may use
//! the older line or the newer line. When a region is freed, its memory is soon used again. So the line of the freed
//! region is overwritten, and only the newest line remains.

use super::{Content, Written, name, open};
use crate::process::PerProcess;
use slat_x86::CompiledCode;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Mutex;

/// perf's map of a process.
#[derive(Default)]
struct Map {
    /// The valid lines, by the addresses of their regions.
    lines: BTreeMap<usize, Line>,
    /// The size of the file in bytes; 0 until the file exists.
    bytes: u64,
}

/// The position of a line in the file.
struct Line {
    /// The address after the last byte of the region that the line describes.
    end: usize,
    /// The line's offset in the file.
    offset: u64,
    /// The line's length in bytes.
    len: usize,
}

static MAP: PerProcess<Mutex<Written<Map>>> = PerProcess::new();

/// Returns a line that describes no address and has the length `len`, to overwrite a line.
fn overwritten(len: usize) -> String {
    format!("{:<1$}\n", "0 0 reused", len - 1)
}

impl Map {
    /// Writes a line for the region at `start..end`. Overwrites the lines of earlier regions at these addresses.
    fn write_line(&mut self, start: usize, end: usize, line: &str) -> io::Result<()> {
        let file = open(&Self::path(), self.bytes == 0)?;
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

impl Content for Map {
    fn path() -> PathBuf {
        PathBuf::from(format!("/tmp/perf-{}.map", std::process::id()))
    }

    fn write(&mut self, code: &CompiledCode<'_>) -> io::Result<()> {
        let place = code.code.as_ptr_range();
        let (start, end) = (place.start as usize, place.end as usize);
        let line = format!("{start:x} {:x} {}\n", code.code.len(), name(code.rip));
        self.write_line(start, end, &line)
    }
}

/// Adds compiled code to the map.
pub(super) fn add(code: &CompiledCode<'_>) {
    super::add(&MAP, code);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_line_of_an_address_is_the_only_one() {
        let mut map = Map::default();
        let mut add = |start: usize, end: usize, name: &str| {
            let line = format!("{start:x} {:x} {name}\n", end - start);
            map.write_line(start, end, &line).unwrap();
        };
        add(0x1000, 0x3000, "first");
        add(0x3000, 0x4000, "second");
        add(0x5000, 0x6000, "third");
        // The fourth region overlaps the end of the first region and the beginning of the second region.
        add(0x2000, 0x3800, "fourth");
        add(0x1800, 0x2000, "fifth");
        add(0x4000, 0x5000, "sixth");
        let content = std::fs::read_to_string(Map::path()).unwrap();
        std::fs::remove_file(Map::path()).unwrap();
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
