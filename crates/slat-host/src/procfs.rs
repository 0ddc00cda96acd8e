//! Asks the kernel for this process's mappings: by PROCMAP_QUERY on `/proc/self/maps` (since Linux 6.11,
//! `include/uapi/linux/fs.h`), or from the text of `/proc/self/smaps`.
//!
//! The files stay open while there are VMs: a real `KVM_RUN` needs no free file descriptor, so slat's must not need
//! one, either. The descriptors have high numbers, above those of the program's own files. If a program closes all
//! descriptors, it also closes these ([`closed`]), and slat opens the files again when it needs them.

use std::cell::Cell;
use std::ffi::CStr;
use std::io::{self, BufRead, BufReader, Read};
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicI32, Ordering::*};
use std::sync::{Mutex, PoisonError};

use slat_process::calls::{self, Call, PROCMAP_QUERY};
use slat_process::page_size;

use crate::process::{self, PerProcess};

/// One mapping, with the properties that the kernel reports.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) range: Range<usize>,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    pub(crate) anonymous: bool,
    /// The size in bytes of the pages that back the mapping: more than [`page_size`] only for hugetlb.
    pub(crate) page_size: u64,
}

/// Error: the kernel does not tell this process's mappings, because the files cannot be read (the root directory has no
/// `/proc`).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Untold;

/// Returns the mapping that contains `address`. `None`: nothing is mapped at `address`.
pub(crate) fn mapping_at(address: usize) -> Result<Option<Raw>, Untold> {
    match query(address) {
        Ok(found) => Ok(found),
        Err(_) => from_smaps(address),
    }
}

/// Closes a descriptor that slat has opened, and that the program has not closed.
fn close_own(fd: i32) {
    // SAFETY: the call takes no pointer, and slat has opened the descriptor.
    let _ = unsafe { calls::make(Call::Close, [fd as usize, 0, 0, 0, 0, 0]) };
}

/// A descriptor of the directory `/proc`, for a process whose root directory may have no `/proc`. -1: there is no such
/// descriptor, and the path `/proc` is used.
static DIRECTORY: AtomicI32 = AtomicI32::new(-1);

thread_local! {
    // The descriptor of `/proc` that a `vfork` child of this thread has opened, and the child's process id. (The child
    // shares this memory with its parent, but the parent does not have the descriptor.) The variable has neither an
    // initialiser nor a destructor that runs, because handlers read it.
    static CHILDS: Cell<(i32, i32)> = const { Cell::new((-1, 0)) };
}

/// Sets the descriptor of `/proc` for this process only: for a `vfork` child, in `CHILDS`.
fn set_here(fd: i32) {
    let me = slat_process::myself().0;
    match me == process::owner() {
        true => DIRECTORY.store(fd, Relaxed),
        false => CHILDS.set((fd, me)),
    }
}

/// Opens the directory `/proc`, for this process and the programs that it executes. Call before the process changes its
/// root directory. Async-signal-safe.
pub fn keep_directory() {
    if directory().is_some() {
        return;
    }
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    let path = c"/proc".as_ptr() as usize;
    let arguments = [libc::AT_FDCWD as usize, path, flags as usize, 0, 0, 0];
    // SAFETY: the path ends with 0.
    let opened = unsafe { calls::raw(libc::SYS_openat, arguments) };
    if opened >= 0 {
        set_here(moved_up_over_exec(opened as i32));
    }
}

/// Stores the descriptor of `/proc` that this program has inherited from the program that executed it.
pub fn set_directory(fd: i32) {
    DIRECTORY.store(fd, Relaxed);
}

/// Returns the descriptor of `/proc`, if there is one. Async-signal-safe.
pub fn directory() -> Option<i32> {
    let (fd, child) = CHILDS.get();
    if fd != -1 {
        if slat_process::myself().0 == child {
            return Some(fd);
        }
        // The id is not this process's, so this is the parent again: its `vfork` child has ended or has executed a
        // program.
        CHILDS.set((-1, 0));
    }
    let fd = DIRECTORY.load(Relaxed);
    (fd != -1).then_some(fd)
}

/// Call before the program gives the number `fd` to another file. If `fd` is the descriptor of `/proc`, moves the
/// descriptor to another number. Async-signal-safe.
pub fn replaced(fd: i32) {
    if directory() == Some(fd) {
        let arguments = [
            fd as usize,
            libc::F_DUPFD as usize,
            fd as usize + 1,
            0,
            0,
            0,
        ];
        // SAFETY: the call takes no pointer, and slat has opened the descriptor.
        let new = unsafe { calls::raw(libc::SYS_fcntl, arguments) };
        set_here(new.max(-1) as i32);
    }
}

/// Moves a descriptor above those of the program, as far as the process's limit allows. Returns its number. The
/// descriptor stays open on exec.
fn moved_up_over_exec(fd: i32) -> i32 {
    moved_up_by(libc::F_DUPFD, fd)
}

/// Moves a descriptor above those of the program, as far as the process's limit allows. Returns its number. The
/// descriptor is closed on exec.
pub fn moved_up(fd: i32) -> i32 {
    moved_up_by(libc::F_DUPFD_CLOEXEC, fd)
}

fn moved_up_by(command: i32, fd: i32) -> i32 {
    let mut lowest = ProcFile::LOWEST;
    while lowest > fd {
        let arguments = [fd as usize, command as usize, lowest as usize, 0, 0, 0];
        // SAFETY: the calls only concern a descriptor of our own.
        unsafe {
            let high = calls::raw(libc::SYS_fcntl, arguments);
            if high >= 0 {
                calls::raw(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]);
                return high as i32;
            }
        }
        lowest /= 2;
    }
    fd
}

/// Returns a directory's descriptor and a path relative to it, to open the file `path` below `/proc`. Without a
/// descriptor of `/proc`, these are `AT_FDCWD` and `path` itself.
pub fn reached_by(path: &CStr) -> (i32, &CStr) {
    let rest = path.to_bytes_with_nul().strip_prefix(b"/proc/");
    let rest = rest.and_then(|rest| CStr::from_bytes_with_nul(rest).ok());
    match (directory(), rest) {
        (Some(fd), Some(rest)) => (fd, rest),
        _ => (libc::AT_FDCWD, path),
    }
}

/// Opens a file for reading, and for writing if `flags` say so.
fn open_file(path: &CStr, flags: i32) -> Result<i32, i32> {
    let (begin, path) = reached_by(path);
    let flags = (flags | libc::O_CLOEXEC) as usize;
    let arguments = [begin as usize, path.as_ptr() as usize, flags, 0, 0, 0];
    // SAFETY: the path ends with 0.
    unsafe { calls::make(Call::Open, arguments) }.map(|fd| fd as i32)
}

/// Reads from the file at `offset`. Returns the number of bytes read.
fn read_at(fd: i32, buffer: &mut [u8], offset: u64) -> Result<usize, i32> {
    let (start, len) = (buffer.as_mut_ptr() as usize, buffer.len());
    let arguments = [fd as usize, start, len, offset as usize, 0, 0];
    // SAFETY: the buffer has this length.
    unsafe { calls::make(Call::Read, arguments) }.map(|read| read as usize)
}

/// Reads the beginning of a small file into `text`, as much as fits, and returns it. Returns an empty text if the file
/// cannot be read.
pub fn read_small<'a>(path: &CStr, text: &'a mut [u8]) -> &'a str {
    let mut len = 0;
    if let Ok(fd) = open_file(path, libc::O_RDONLY) {
        len = read_at(fd, text, 0).unwrap_or(0);
        close_own(fd);
    }
    std::str::from_utf8(&text[..len]).unwrap_or_default()
}

/// Opens the files that [`mapping_at`] needs, as long as there are free descriptors.
pub(crate) fn open() {
    if query(&raw const FILES as usize).is_err() {
        let _ = FILES.get().smaps.descriptor();
    }
}

/// Closes the files that [`open`] has opened. Call while no thread looks up a mapping.
pub(crate) fn close() {
    if let Some(files) = FILES.peek() {
        for file in files.all() {
            let fd = file.fd.swap(ProcFile::NONE, AcqRel);
            if fd != ProcFile::NONE {
                close_own(fd);
            }
        }
    }
}

/// Whether `fd` is the descriptor of a file that slat has opened for this purpose. Async-signal-safe.
pub fn holds(fd: i32) -> bool {
    FILES.peek().is_some_and(|files| {
        (files.all().iter()).any(|file| fd != ProcFile::NONE && file.fd.load(Relaxed) == fd)
    })
}

/// Call before the program closes the descriptor `fd`, or gives its number to another file. Async-signal-safe.
pub fn closed(fd: i32) {
    if let Some(files) = FILES.peek() {
        for file in files.all() {
            file.forget(fd);
        }
    }
}

/// Call before the program closes all descriptors from `first` to `last`. For one descriptor, see [`closed`].
pub fn closed_within(first: u32, last: u32) {
    if let Some(files) = FILES.peek() {
        for file in files.all() {
            let fd = file.fd.load(Relaxed);
            if (first..=last).contains(&(fd as u32)) {
                file.forget(fd);
            }
        }
    }
}

/// The files of `/proc` that this process has opened to look up its mappings, and to write registered memory. A file of
/// `/proc/self` shows the process that opened it, so a forked child opens its own.
static FILES: PerProcess<Files> = PerProcess::new();

#[derive(Debug)]
struct Files {
    maps: ProcFile,
    smaps: ProcFile,
    /// The process's memory, which can be written whatever its protection is, as long as it is private.
    memory: ProcFile,
    /// The lock of the one thread that reads `smaps`. Between two reads at successive offsets, the kernel remembers the
    /// address that it has reached. A read at any other offset makes the kernel count bytes from the beginning of the
    /// text, which may have changed meanwhile.
    reads_smaps: Mutex<()>,
}

impl Default for Files {
    fn default() -> Self {
        Files {
            maps: ProcFile::new(c"/proc/self/maps", libc::O_RDONLY),
            smaps: ProcFile::new(c"/proc/self/smaps", libc::O_RDONLY),
            memory: ProcFile::new(c"/proc/self/mem", libc::O_RDWR),
            reads_smaps: Mutex::new(()),
        }
    }
}

impl Files {
    fn all(&self) -> [&ProcFile; 3] {
        [&self.maps, &self.smaps, &self.memory]
    }
}

/// A file that is opened at its first use.
#[derive(Debug)]
struct ProcFile {
    path: &'static CStr,
    /// `O_RDONLY` or `O_RDWR`.
    flags: i32,
    fd: AtomicI32,
}

impl ProcFile {
    /// The value of a descriptor variable if there is no descriptor.
    const NONE: i32 = -1;
    /// The lowest number for the descriptor, if the process's limit allows it.
    const LOWEST: i32 = 512;

    const fn new(path: &'static CStr, flags: i32) -> Self {
        ProcFile {
            path,
            flags,
            fd: AtomicI32::new(Self::NONE),
        }
    }

    /// Returns the file's descriptor, and opens the file if necessary. The descriptor is slat's as long as the program
    /// does not close descriptors that it did not open. If the program closes it, at any time, a call on this
    /// descriptor fails or reads another file. That does no harm: slat's calls on it (a query that no other file knows,
    /// and reading at an offset) change nothing. Only calls on [`Files::memory`] write, so slat has to see each close
    /// of that descriptor ([`closed`]).
    fn descriptor(&self) -> Result<i32, i32> {
        let known = self.fd.load(Acquire);
        if known != Self::NONE {
            return Ok(known);
        }
        let low = open_file(self.path, self.flags)?;
        let command = libc::F_DUPFD_CLOEXEC as usize;
        let arguments = [low as usize, command, Self::LOWEST as usize, 0, 0, 0];
        // SAFETY: the call takes no pointer, and slat has opened the descriptor.
        let high = unsafe { calls::make(Call::Duplicate, arguments) };
        let own = high.map_or(low, |high| high as i32);
        if own != low {
            close_own(low);
        }
        let set = (self.fd).compare_exchange(Self::NONE, own, AcqRel, Acquire);
        Ok(set.map_or_else(
            |faster| {
                close_own(own);
                faster
            },
            |_| own,
        ))
    }

    /// Forgets the file's descriptor if it is `fd`.
    fn forget(&self, fd: i32) {
        let _ = (self.fd).compare_exchange(fd, Self::NONE, AcqRel, Relaxed);
    }

    /// Calls `use_it` with the file's descriptor. If the descriptor turns out to be closed, opens the file again and
    /// calls `use_it` again.
    fn with<T>(&self, mut use_it: impl FnMut(i32) -> Result<T, i32>) -> Result<T, i32> {
        let fd = self.descriptor()?;
        match use_it(fd) {
            Err(libc::EBADF) => self.forget(fd),
            result => return result,
        }
        use_it(self.descriptor()?)
    }
}

/// Writes `len` bytes from the address `from` to the address `to` of this process, which may be protected. The memory
/// at `to` is private. Returns the number of bytes written, and the errno if these are not all.
pub(crate) fn write_memory(from: usize, len: usize, to: usize) -> (usize, Option<i32>) {
    let mut done = 0;
    while done < len {
        let written = FILES.get().memory.with(|memory| {
            let arguments = [memory as usize, from + done, len - done, to + done, 0, 0];
            // SAFETY: the kernel checks the memory at `from`. The caller may write the memory at `to`.
            unsafe { calls::make(Call::WriteAt, arguments) }
        });
        match written {
            Ok(0) => return (done, Some(libc::EFAULT)),
            Ok(written) => done += written as usize,
            Err(errno) => return (done, Some(errno)),
        }
    }
    (done, None)
}

/// Whether [`write_memory`] works on this system: it writes a byte to a protected page of slat's own.
pub fn can_write_memory() -> bool {
    let size = page_size();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the mapping is new, and is unmapped before anything else knows it.
    unsafe {
        let page = libc::mmap(std::ptr::null_mut(), size, libc::PROT_NONE, flags, -1, 0);
        if page == libc::MAP_FAILED {
            return false;
        }
        let written = write_memory(&raw const FILES as usize, 1, page as usize);
        libc::munmap(page, size);
        written == (1, None)
    }
}

/// Calls `found` for each run of pages of `range`, which is private anonymous memory: with the number of pages, and
/// whether they have content, in memory or on a swap device.
///
/// # Errors
/// Those of `found`, and those of reading `/proc/self/pagemap`.
pub(crate) fn each_content(
    range: &Range<usize>,
    found: &mut dyn FnMut(usize, bool) -> Result<(), i32>,
) -> Result<(), i32> {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const CHUNK: usize = 1024;
    let fd = open_file(c"/proc/self/pagemap", libc::O_RDONLY)?;
    let mut bytes = [0u8; 8 * CHUNK];
    let mut page = range.start / page_size();
    let end = range.end / page_size();
    let mut run = (0, false);
    let mut read = || {
        while page < end {
            let wanted = 8 * (end - page).min(CHUNK);
            let got = read_at(fd, &mut bytes[..wanted], 8 * page as u64)? / 8;
            if got == 0 {
                return Err(libc::EIO);
            }
            for entry in bytes[..8 * got].chunks_exact(8) {
                let entry = u64::from_le_bytes(entry.try_into().unwrap_or_default());
                let has_content = entry & (PRESENT | SWAPPED) != 0;
                if has_content != run.1 && run.0 != 0 {
                    found(run.0, run.1)?;
                    run.0 = 0;
                }
                run = (run.0 + 1, has_content);
            }
            page += got;
        }
        match run.0 {
            0 => Ok(()),
            count => found(count, run.1),
        }
    };
    let result = read();
    close_own(fd);
    result
}

#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

// The number of the request contains the size of its struct.
const _: () = assert!(PROCMAP_QUERY >> 16 & 0x3fff == size_of::<Query>());

/// Asks the kernel by PROCMAP_QUERY. `Ok(None)`: nothing is mapped at `address`. `Err`: an errno; the kernel does not
/// know the request, or the file cannot be opened.
fn query(address: usize) -> Result<Option<Raw>, i32> {
    const READABLE: u64 = 1;
    const WRITABLE: u64 = 2;
    const SHARED: u64 = 8;
    let mut query = Query {
        size: size_of::<Query>() as u64,
        query_addr: address as u64,
        ..Query::default()
    };
    let answer = FILES.get().maps.with(|maps| {
        let query = &raw mut query as usize;
        let arguments = [maps as usize, PROCMAP_QUERY, query, 0, 0, 0];
        // SAFETY: the request reads and writes exactly this structure, as it asks for no name and no build id.
        match unsafe { calls::make(Call::QueryMapping, arguments) } {
            Err(libc::ENOENT) => Ok(false),
            answer => answer.map(|_| true),
        }
    })?;
    Ok(answer.then_some(Raw {
        range: query.vma_start as usize..query.vma_end as usize,
        readable: query.vma_flags & READABLE != 0,
        writable: query.vma_flags & WRITABLE != 0,
        anonymous: query.inode == 0 && query.vma_flags & SHARED == 0,
        page_size: query.vma_page_size,
    }))
}

/// Like [`query`], but reads `/proc/self/smaps`.
fn from_smaps(address: usize) -> Result<Option<Raw>, Untold> {
    let mut found = Err(Untold);
    each_mapping(&mut |raw, _| {
        if raw.range.end <= address {
            found = Ok(None);
            return ControlFlow::Continue(());
        }
        found = Ok(raw.range.contains(&address).then_some(raw));
        ControlFlow::Break(())
    });
    found
}

/// Calls `visit` for each mapping of this process, in ascending order. Passes the mapping and its `VmFlags` (flags of
/// two letters, separated by spaces: `Documentation/filesystems/proc.rst`). Even if mappings are made or removed
/// meanwhile, no other mapping is left out.
pub(crate) fn each_mapping(visit: &mut dyn FnMut(Raw, &str) -> ControlFlow<()>) {
    let mut mapping = None;
    let files = FILES.get();
    each_line(&files.smaps, Some(&files.reads_smaps), &mut |line| {
        if let Some(header) = header(line) {
            mapping = Some(header.raw());
        } else if let Some(size) = line.strip_prefix("KernelPageSize:") {
            let kib = size.trim().trim_end_matches("kB").trim().parse::<u64>();
            if let (Some(raw), Ok(kib)) = (&mut mapping, kib) {
                raw.page_size = kib << 10;
            }
        } else if let Some(flags) = line.strip_prefix("VmFlags:")
            && let Some(raw) = mapping.take()
        {
            return visit(raw, flags);
        }
        ControlFlow::Continue(())
    });
}

/// Calls `visit` for each mapping of a file in this process, in ascending order. Passes its addresses, and the file's
/// device (major, minor) and inode.
pub fn each_mapped_file(visit: &mut dyn FnMut(Range<usize>, (u32, u32), u64)) {
    each_line(&FILES.get().maps, None, &mut |line| {
        if let Some(header) = header(line)
            && header.is_file()
        {
            visit(header.range, header.device, header.inode);
        }
        ControlFlow::Continue(())
    });
}

/// Calls `visit` for each line of a file, until a read fails. Holds the lock `reader`, if given, except while it
/// allocates: the program's allocator may map memory, and so call slat again.
fn each_line(
    file: &ProcFile,
    reader: Option<&Mutex<()>>,
    visit: &mut dyn FnMut(&str) -> ControlFlow<()>,
) {
    /// The size of the buffer, which is longer than any line: a path has at most 4096 bytes (PATH_MAX).
    const LINE: usize = 4096 + 256;
    let mut line = String::with_capacity(LINE);
    let mut text = BufReader::new(Text { file, offset: 0 });
    let _reader = reader.map(|reader| reader.lock().unwrap_or_else(PoisonError::into_inner));
    while let Ok(1..) = text.read_line(&mut line)
        && visit(&line).is_continue()
    {
        line.clear();
    }
}

/// A file that is read from an offset on.
struct Text<'a> {
    file: &'a ProcFile,
    offset: u64,
}

impl Read for Text<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let offset = self.offset;
        let len = (self.file)
            .with(|file| read_at(file, buffer, offset))
            .map_err(io::Error::from_raw_os_error)?;
        self.offset += len as u64;
        Ok(len)
    }
}

/// The first line of a mapping in the file: `start-end rwxp offset major:minor inode name`.
struct Header {
    range: Range<usize>,
    /// `rwxp`, with a dash for each right that the mapping lacks.
    rights: [u8; 4],
    device: (u32, u32),
    inode: u64,
}

impl Header {
    /// Whether this is a mapping of a file. The inode alone does not tell: a System V segment has its id as inode, and
    /// the first id is 0. But only for anonymous memory both the inode and the device are 0.
    fn is_file(&self) -> bool {
        self.inode != 0 || self.device != (0, 0)
    }

    fn raw(&self) -> Raw {
        Raw {
            range: self.range.clone(),
            readable: self.rights[0] == b'r',
            writable: self.rights[1] == b'w',
            anonymous: !self.is_file() && self.rights[3] == b'p',
            page_size: page_size() as u64,
        }
    }
}

fn header(line: &str) -> Option<Header> {
    let hex = |digits| usize::from_str_radix(digits, 16).ok();
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?.as_bytes().try_into().ok()?;
    let (major, minor) = words.nth(1)?.split_once(':')?;
    Some(Header {
        range: hex(start)?..hex(end)?,
        rights,
        device: (hex(major)? as u32, hex(minor)? as u32),
        inode: words.next()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn the_kernel_and_smaps_agree() {
        let here = Box::new(0u64);
        let address = &raw const *here as usize;
        let smaps = from_smaps(address).unwrap().unwrap();
        assert!(smaps.range.contains(&address) && smaps.readable && smaps.writable);
        if let Ok(Some(query)) = query(address) {
            assert_eq!(query.range, smaps.range);
            assert_eq!(query.page_size, smaps.page_size);
            assert_eq!(query.anonymous, smaps.anonymous);
        }
        assert!(matches!(from_smaps(0x1000), Ok(None)));
        assert!(matches!(from_smaps(usize::MAX), Ok(None)));
    }

    #[test]
    fn a_mapping_is_found_while_others_come_and_go_and_are_asked_for() {
        const ROUNDS: usize = 300;
        /// The number of other mappings, so large that the kernel cannot describe all in one read.
        const OTHERS: usize = 40;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let map = |bytes, rights| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: the call makes a new anonymous mapping at an address of the kernel's choice.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, flags, -1, 0) };
            assert_ne!(start, libc::MAP_FAILED);
            start as usize
        };
        // Keep an inaccessible page on each side of the page `asked`, so that its mapping stays separate from later
        // ones, which the kernel places directly below earlier ones.
        let page = page_size();
        let asked = map(3 * page, libc::PROT_NONE) + page;
        // SAFETY: the page is a part of the mapping made above.
        assert_eq!(unsafe { libc::mprotect(asked as *mut _, page, rights) }, 0);
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Relaxed) {
                    // Give neighbouring mappings different rights, so that the kernel does not merge them.
                    let others = std::array::from_fn::<_, OTHERS, _>(|n| {
                        map(page, [libc::PROT_READ, rights][n % 2])
                    });
                    for other in others {
                        // SAFETY: the page was mapped above, and is not used.
                        unsafe { libc::munmap(other as *mut _, page) };
                    }
                }
            });
            let ask = || {
                for _ in 0..ROUNDS {
                    let found = from_smaps(asked).unwrap();
                    let found = found.map(|raw| (raw.range, raw.writable));
                    assert_eq!(found, Some((asked..asked + page, true)));
                }
            };
            let asking = [scope.spawn(ask), scope.spawn(ask)];
            let ended = asking.map(|thread| thread.join().is_ok());
            is_done.store(true, Relaxed);
            assert_eq!(ended, [true, true]);
        });
    }

    #[test]
    fn the_first_segment_of_a_machine_is_a_file() {
        let is_file = |line| header(line).unwrap().is_file();
        assert!(is_file(
            "7f00-8f00 rw-s 00000000 00:01 0      /SYSV00000000 (deleted)"
        ));
        assert!(is_file(
            "7f00-8f00 r-xp 00001000 08:02 173521   /usr/bin/dbus"
        ));
        assert!(!is_file("7f00-8f00 rw-p 00000000 00:00 0      [heap]"));
    }

    #[test]
    fn a_closed_descriptor_is_opened_again() {
        let address = &raw const FILES as usize;
        for file in [&FILES.get().maps, &FILES.get().smaps] {
            let fd = file.descriptor().unwrap();
            // SAFETY: the call closes slat's descriptor, like a program that closes all descriptors.
            assert_eq!(unsafe { libc::close(fd) }, 0);
            assert!(matches!(mapping_at(address), Ok(Some(_))));
            assert!(matches!(from_smaps(address), Ok(Some(_))));
        }
    }
}
