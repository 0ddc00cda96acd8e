//! Reads the headers of an ELF program (System V ABI, "Object Files") without allocating, because a child of `fork`
//! reads them before it executes a program.

use crate::arch::files::MACHINE;
use crate::real::{Opened, kernel};

/// The maximum number of program headers that slat reads. No linker makes more.
const MOST_SEGMENTS: usize = 64;
const HEADER: usize = 64;
const SEGMENT: usize = 56;

/// A program header.
#[derive(Clone, Copy, Debug, Default)]
pub struct Segment {
    /// The type of the segment: `PT_…`.
    pub kind: u32,
    /// The rights of the segment: `PF_…`.
    pub flags: u32,
    /// The segment's offset in the file.
    pub offset: u64,
    /// The segment's address in memory.
    pub address: u64,
    /// The segment's size in the file.
    pub in_file: u64,
    /// The segment's size in memory.
    pub in_memory: u64,
}

/// The headers of an ELF file.
#[derive(Debug)]
pub struct Headers {
    /// Whether the program can be loaded at any address (`ET_DYN`).
    pub is_relocatable: bool,
    /// The program's entry point.
    pub entry: u64,
    /// The offset of the program headers in the file.
    pub offset: u64,
    segments: [Segment; MOST_SEGMENTS],
    count: usize,
}

/// Reads all of `buffer` at `offset`.
pub fn read(file: &Opened, buffer: &mut [u8], offset: u64) -> Option<()> {
    // SAFETY: the buffer is live, and has this length.
    let read = unsafe {
        kernel!(
            libc::SYS_pread64,
            file.fd(),
            buffer.as_mut_ptr(),
            buffer.len(),
            offset
        )
    };
    (read == Ok(buffer.len() as isize)).then_some(())
}

impl Headers {
    /// Reads the headers of a 64-bit program of this architecture. `None`: the file is not such a program.
    pub fn read(file: &Opened) -> Option<Self> {
        const EXECUTABLE: u16 = 2;
        const SHARED: u16 = 3;
        let mut header = [0; HEADER];
        read(file, &mut header, 0)?;
        let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let word =
            |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let kind = half(16);
        // Byte 4 is the class: 2 is 64-bit. Byte 5 is the encoding: 1 is little-endian.
        if !header.starts_with(b"\x7fELF\x02\x01")
            || ![EXECUTABLE, SHARED].contains(&kind)
            || half(18) != MACHINE
            || usize::from(half(54)) != SEGMENT
        {
            return None;
        }
        let count = usize::from(half(56));
        let mut bytes = [0; SEGMENT * MOST_SEGMENTS];
        let bytes = bytes.get_mut(..SEGMENT * count)?;
        read(file, bytes, word(32))?;
        let mut headers = Headers {
            is_relocatable: kind == SHARED,
            entry: word(24),
            offset: word(32),
            segments: [Segment::default(); MOST_SEGMENTS],
            count,
        };
        for (segment, bytes) in headers.segments.iter_mut().zip(bytes.chunks_exact(SEGMENT)) {
            let half =
                |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
            let word =
                |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
            *segment = Segment {
                kind: half(0),
                flags: half(4),
                offset: word(8),
                address: word(16),
                in_file: word(32),
                in_memory: word(40),
            };
        }
        Some(headers)
    }

    /// Returns all program headers.
    pub fn segments(&self) -> &[Segment] {
        &self.segments[..self.count]
    }

    /// Returns the segments to load (`PT_LOAD`). A segment outside the valid addresses makes the file unusable.
    pub fn loaded(&self) -> impl Iterator<Item = &Segment> {
        self.segments()
            .iter()
            .filter(|segment| segment.kind == libc::PT_LOAD && segment.in_memory > 0)
    }

    /// Reads the path of the program's dynamic linker, with its NUL, into `buffer`. `None`: the program
    /// has no dynamic linker.
    pub fn interpreter<'a>(
        &self,
        file: &Opened,
        buffer: &'a mut [u8],
    ) -> Option<&'a std::ffi::CStr> {
        let segment = self
            .segments()
            .iter()
            .find(|segment| segment.kind == libc::PT_INTERP)?;
        let buffer = buffer.get_mut(..segment.in_file as usize)?;
        read(file, buffer, segment.offset)?;
        std::ffi::CStr::from_bytes_until_nul(buffer).ok()
    }
}
