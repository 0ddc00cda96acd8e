//! Maps the program's file into memory, as the kernel's `load_elf_binary` does.

use super::open;
use crate::arch;
use crate::arch::files::ADDRESSES;
use crate::elf::{Headers, Segment};
use crate::real::{Opened, kernel, map_memory};
use std::ffi::{CStr, CString};
use std::ops::Range;

/// Returns the size of a page in bytes.
fn page() -> u64 {
    slat_process::page_size() as u64
}

/// A program that slat has loaded.
#[derive(Debug)]
pub struct Image {
    /// The path of the program's file, without symbolic links.
    pub file: CString,
    /// The address of the program's ELF program headers in memory.
    pub headers: usize,
    /// The number of the program's ELF program headers.
    pub count: usize,
    /// The program's entry point.
    pub entry: usize,
    /// The base address of the program's dynamic linker; 0 if it has none.
    pub interpreter_base: usize,
    /// The address where the process begins: in the program, or in its dynamic linker.
    pub start: usize,
    /// The address at the end of the program's segments.
    pub end: usize,
    /// The address ranges of the code of the program and its dynamic linker. `None`: a part of the code cannot be read.
    pub texts: Option<Vec<Range<usize>>>,
    /// Whether the program needs an executable stack (`PT_GNU_STACK`).
    pub needs_executable_stack: bool,
}

impl Image {
    /// Loads a program and its dynamic linker.
    ///
    /// # Errors
    /// The reason, as the end of a sentence for the user.
    pub fn load(path: &CStr) -> Result<Self, String> {
        let unknown = || format!("is not {}", arch::files::PROGRAM);
        let file = open(path)?;
        let program = Headers::read(&file).ok_or_else(unknown)?;
        let placed = place(&file, &program)?;
        let mut image = Image {
            file: name_of(&file).unwrap_or_else(|| path.to_owned()),
            headers: placed.headers,
            count: program.segments().len(),
            entry: placed.entry,
            interpreter_base: 0,
            start: placed.entry,
            end: placed.end,
            texts: placed.texts,
            needs_executable_stack: (program.segments().iter()).any(|segment| {
                segment.kind == libc::PT_GNU_STACK && segment.flags & libc::PF_X != 0
            }),
        };
        let mut name = [0; libc::PATH_MAX as usize];
        if let Some(name) = program.interpreter(&file, &mut name) {
            let named = |why| format!("its dynamic linker {}: {why}", name.to_string_lossy());
            let file = open(name).map_err(named)?;
            let headers = Headers::read(&file).ok_or_else(|| named(unknown()))?;
            let placed = place(&file, &headers).map_err(named)?;
            image.interpreter_base = placed.base;
            image.start = placed.entry;
            image.texts = (image.texts.zip(placed.texts)).map(|parts| [parts.0, parts.1].concat());
        }
        Ok(image)
    }
}

/// Returns the path of an open file.
fn name_of(file: &Opened) -> Option<CString> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.fd())).ok()?;
    CString::new(link.into_os_string().into_encoded_bytes()).ok()
}

/// A file that is mapped into memory.
struct Placed {
    base: usize,
    entry: usize,
    headers: usize,
    end: usize,
    texts: Option<Vec<Range<usize>>>,
}

/// Returns a random address for a program. The addresses above it are free, so that the program's break can grow.
fn somewhere() -> u64 {
    const LOW: u64 = 0x2000_0000_0000;
    let mut random = 0u64;
    // SAFETY: the call fills in a live word. If the call fails, the word stays 0, which is valid, too.
    let _ = unsafe { kernel!(libc::SYS_getrandom, &raw mut random, size_of::<u64>(), 0) };
    LOW + (random % (1 << 28)) * page()
}

/// Maps the segments of one file.
fn place(file: &Opened, headers: &Headers) -> Result<Placed, String> {
    let unusable = || "has segments beyond all addresses".to_owned();
    let (mut low, mut high) = (u64::MAX, 0);
    for segment in headers.loaded() {
        let end = segment
            .address
            .checked_add(segment.in_memory)
            .filter(|end| *end < ADDRESSES);
        low = low.min(segment.address & !(page() - 1));
        high = high.max(end.ok_or_else(unusable)?.next_multiple_of(page()));
        if segment.in_file > segment.in_memory || (segment.address ^ segment.offset) % page() != 0 {
            return Err("has segments that cannot be mapped".to_owned());
        }
    }
    if low >= high {
        return Err("has no segments to load".to_owned());
    }
    let (at, fixed) = match headers.is_relocatable {
        true => (somewhere(), 0),
        false => (low, libc::MAP_FIXED_NOREPLACE),
    };
    // One mapping reserves all of the file's memory first, so that no other mapping can lie between the segments.
    // SAFETY: the call maps memory at free addresses.
    let start = unsafe {
        map_memory(
            at as usize,
            (high - low) as usize,
            libc::PROT_NONE,
            libc::MAP_NORESERVE | fixed,
        )
    }
    .map_err(|error| {
        let error = std::io::Error::from_raw_os_error(error);
        format!("its addresses, from {low:#x} to {high:#x}, cannot be mapped: {error}")
    })?;
    let base = (start as u64).wrapping_sub(low);
    for segment in headers.loaded() {
        map(file, segment, base)?;
    }
    let begins = |segment: &&Segment| {
        segment.offset <= headers.offset && headers.offset < segment.offset + segment.in_file
    };
    let at = |address: u64| base.wrapping_add(address) as usize;
    let has = |segment: &Segment, flag| segment.flags & flag != 0;
    let executable = || headers.loaded().filter(|segment| has(segment, libc::PF_X));
    let are_readable = executable().all(|segment| has(segment, libc::PF_R));
    let texts =
        executable().map(|segment| at(segment.address)..at(segment.address + segment.in_file));
    Ok(Placed {
        base: base as usize,
        entry: at(headers.entry),
        headers: headers.loaded().find(begins).map_or(0, |segment| {
            at(segment.address + headers.offset - segment.offset)
        }),
        end: at(high),
        texts: are_readable.then(|| texts.collect()),
    })
}

/// Maps one segment into memory that is reserved for it.
fn map(file: &Opened, segment: &Segment, base: u64) -> Result<(), String> {
    let mut access = 0;
    for (flag, right) in [
        (libc::PF_R, libc::PROT_READ),
        (libc::PF_W, libc::PROT_WRITE),
        (libc::PF_X, libc::PROT_EXEC),
    ] {
        if segment.flags & flag != 0 {
            access |= right;
        }
    }
    let start = base.wrapping_add(segment.address);
    let (file_end, end) = (start + segment.in_file, start + segment.in_memory);
    let first = start & !(page() - 1);
    let mut mapped = first;
    let failed = |error| {
        format!(
            "cannot be mapped: {}",
            std::io::Error::from_raw_os_error(error)
        )
    };
    if segment.in_file > 0 {
        mapped = file_end.next_multiple_of(page());
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
        let offset = segment.offset & !(page() - 1);
        // SAFETY: the memory was reserved for the segment, and nothing uses it yet.
        unsafe {
            kernel!(
                libc::SYS_mmap,
                first,
                mapped - first,
                access,
                flags,
                file.fd(),
                offset
            )
        }
        .map_err(failed)?;
        let rest = mapped.min(end) - file_end;
        if rest > 0 && access & libc::PROT_WRITE != 0 {
            // SAFETY: the bytes are the rest of the segment's last page, which is mapped for writing.
            unsafe { std::ptr::write_bytes(file_end as *mut u8, 0, (mapped - file_end) as usize) };
        }
    }
    let end = end.next_multiple_of(page());
    if end > mapped {
        // SAFETY: the memory was reserved for the segment, and nothing uses the memory yet.
        unsafe {
            map_memory(
                mapped as usize,
                (end - mapped) as usize,
                access,
                libc::MAP_FIXED,
            )
        }
        .map_err(failed)?;
    }
    Ok(())
}
