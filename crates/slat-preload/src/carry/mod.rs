//! Copies of slat's own files, for programs that are executed in another root directory, in which these files do not
//! exist.
//!
//! A jailer (`chroot`, `pivot_root`) executes a program in a root that has neither this library, nor the dynamic linker
//! and the C library that this library needs. Before the execution, the jailer closes all descriptors and clears the
//! environment. So slat maps the files before the root changes ([`keep`]): a mapping holds a file as long as the
//! process and its forked children live, even after the file is unmounted or closed. When a program is executed, slat
//! writes the files to memfds ([`make`]), which execveat(2) can execute without a path. slat reads its process's
//! mappings from `/proc`, which the root may not have. So slat also passes a descriptor of `/proc` on.
//!
//! The kernel finds a program's dynamic linker by the path in the program's `PT_INTERP`. The library's copy has no
//! `PT_INTERP`, because that path does not exist in the other root. Instead the copy has another entry point: [`begin`]
//! maps the dynamic linker itself, and serves the calls by which the dynamic linker opens the C library.
//!
//! | file | idea |
//! |---|---|
//! | `begin` | the entry point of the library's copy as a program |

pub mod begin;

use crate::arch::carried::is_possible;
use crate::arch::files;
use crate::elf::Headers;
use crate::real::{Opened, kernel};
use slat_host::procfs;
use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering};

/// The number of files that slat keeps for its copies.
const COUNT: usize = 6;
/// The index of this library among the files.
const LIBRARY: usize = 0;
/// The index of the dynamic linker among the files.
const LINKER: usize = 1;

/// The names by which the dynamic linker looks for the libraries that this library needs, each with a NUL. The last two
/// are parts of newer C libraries. This library itself has no name here, because no other library needs it.
static NAMES: [[u8; 24]; COUNT] = [
    name(c""),
    name(files::LINKER),
    name(c"libc.so.6"),
    name(c"libgcc_s.so.1"),
    name(c"libpthread.so.0"),
    name(c"libdl.so.2"),
];

/// Returns the name of the file at `path`, without its directory. Only the bytes up to the first NUL matter.
const fn name(path: &CStr) -> [u8; 24] {
    let path = path.to_bytes_with_nul();
    let mut start = path.len();
    while start > 0 && path[start - 1] != b'/' {
        start -= 1;
    }
    let (_, file) = path.split_at(start);
    let mut name = [0; 24];
    name.split_at_mut(file.len()).0.copy_from_slice(file);
    name
}

/// A file that slat keeps for its copies. In a copy of the library, the data ([`FILES`]) holds the descriptors of the
/// other files.
#[repr(C)]
#[derive(Debug)]
struct KeptFile {
    /// The descriptor of the file's memfd, in a program that has just been started from a copy; otherwise -1.
    fd: AtomicI32,
    /// The address at which the file is mapped; 0 if it is not.
    start: AtomicUsize,
    /// The size of the file in bytes.
    len: AtomicUsize,
}

impl KeptFile {
    /// Makes the entry of a file that is not mapped, with the descriptor and the length of its memfd.
    const fn new(fd: c_int, len: usize) -> Self {
        KeptFile {
            fd: AtomicI32::new(fd),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(len),
        }
    }

    /// Maps the file at `path`, unless it is mapped already. Threads that call this at the same time map the same file.
    fn keep(&self, path: &CStr) -> Option<()> {
        if self.start.load(Ordering::Acquire) != 0 {
            return Some(());
        }
        let file = Opened::new(path, libc::O_RDONLY)?;
        // SAFETY: the calls take no pointers, and no other code knows the new mapping yet.
        let (start, len) = unsafe {
            let len = kernel!(libc::SYS_lseek, file.fd(), 0, libc::SEEK_END).ok()?;
            let (access, flags) = (libc::PROT_READ, libc::MAP_PRIVATE);
            let start = kernel!(libc::SYS_mmap, 0, len, access, flags, file.fd(), 0).ok()?;
            (start as usize, len as usize)
        };
        self.len.store(len, Ordering::Relaxed);
        self.start.store(start, Ordering::Release);
        Some(())
    }
}

/// The descriptor of `/proc` that was passed to the library's copy. The initial value is not 0, so that the variable is
/// in the library's file, where slat changes it.
static PROC: AtomicI32 = AtomicI32::new(-1);

/// The kept files, by index. The initial values are not 0, so that the variable is in the library's file, where slat
/// changes it.
static FILES: [KeptFile; COUNT] = [const { KeptFile::new(-1, 0) }; COUNT];

/// The paths from which the dynamic linker has loaded the files, as pointers to the dynamic linker's strings, or null.
static PATHS: [AtomicPtr<libc::c_char>; COUNT] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];

/// The entry point of this library as a program, as an offset from [`base`]. In the library's file, the variable holds
/// [`IN_HEADER`]. In a copy, whose ELF header has another entry point, the variable holds the entry point of the
/// original file.
static ENTRY: AtomicUsize = AtomicUsize::new(IN_HEADER);
/// The value of [`ENTRY`] that stands for the entry point in the ELF header.
const IN_HEADER: usize = usize::MAX;
/// Offset of the entry point in an ELF header.
const ENTRY_POINT: usize = 24;

unsafe extern "C" {
    /// The beginning of this library's file in memory. The static linker defines it.
    static __ehdr_start: u8;
}

/// Returns the address at which address 0 of this library's file is mapped.
fn base() -> usize {
    &raw const __ehdr_start as usize
}

/// Returns the address of this library's entry point as a program.
fn entry() -> usize {
    base()
        + match ENTRY.load(Ordering::Relaxed) {
            // SAFETY: the address is that of this library's ELF header.
            IN_HEADER => unsafe { ((base() + ENTRY_POINT) as *const usize).read() },
            entry => entry,
        }
}

/// Whether the kernel has started this library as a program. Call before another program is loaded.
pub fn is_program() -> bool {
    /// The program headers follow the ELF header, in the first page.
    const PAGE: usize = 4096;
    // SAFETY: reads the process's auxiliary vector.
    let headers = unsafe { libc::getauxval(libc::AT_PHDR) } as usize;
    (base()..base() + PAGE).contains(&headers)
}

/// Determines the paths of the libraries that this library needs. Call when the program starts. Makes no system call.
pub fn prepare() {
    unsafe extern "C" fn each(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        _data: *mut c_void,
    ) -> c_int {
        // SAFETY: `info` is the linker's description of an object, whose name lives as long as the description.
        let name = unsafe { (*info).dlpi_name };
        if !name.is_null() {
            // SAFETY: the name is a string that ends with 0, and lives as long as the description.
            let path = unsafe { CStr::from_ptr(name) }.to_bytes_with_nul();
            let last = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
            let known = NAMES.iter().position(|name| name.starts_with(last));
            if let Some(index @ LINKER..) = known {
                PATHS[index].store(name.cast_mut(), Ordering::Relaxed);
            }
        }
        0
    }
    // SAFETY: `each` has this signature, and needs no data.
    unsafe { libc::dl_iterate_phdr(Some(each), std::ptr::null_mut()) };
}

/// Whether slat has kept the files, because this process may change its root directory.
pub fn is_kept() -> bool {
    FILES[LIBRARY].start.load(Ordering::Acquire) != 0
}

/// Takes over the descriptor of `/proc` that was passed to this program. Call when a program starts that [`begin`] has
/// begun.
pub fn take_directory() {
    let fd = PROC.load(Ordering::Relaxed);
    if fd != -1 {
        procfs::set_directory(fd);
    }
}

/// Maps slat's files, to keep them. `library` is the path of this library's file. Call before the root directory
/// changes. Async-signal-safe.
pub fn keep(library: &CStr) {
    procfs::keep_directory();
    if is_kept() || !is_possible() {
        return;
    }
    for (file, path) in FILES.iter().zip(&PATHS).skip(LINKER) {
        let path = path.load(Ordering::Relaxed);
        // SAFETY: the string belongs to the dynamic linker, ends with 0, and lives as long as the object. This library
        // needs the object.
        if !path.is_null() && file.keep(unsafe { CStr::from_ptr(path) }).is_none() {
            return;
        }
    }
    // This library's file is kept last, because [`is_kept`] checks only this file.
    FILES[LIBRARY].keep(library);
}

/// The memfds of the files, as long as they are open in this process.
#[derive(Debug)]
pub struct Memfds([Option<Opened>; COUNT]);

impl Memfds {
    /// Returns the program to execute.
    pub fn program(&self) -> c_int {
        self.0[LIBRARY].as_ref().map_or(-1, Opened::fd)
    }
}

/// Makes memfds of the kept files. The descriptors stay open over exec; [`begin`] closes them. `None`: the files are
/// not kept, or memory, descriptors or the limit of file sizes do not suffice. Async-signal-safe.
pub fn make() -> Option<Memfds> {
    if !is_kept() {
        return None;
    }
    let mut made = Memfds([const { None }; COUNT]);
    for (file, memfd) in FILES.iter().zip(&mut made.0) {
        let (start, len) = (
            file.start.load(Ordering::Acquire),
            file.len.load(Ordering::Relaxed),
        );
        if start != 0 {
            *memfd = Some(copy(start, len)?);
        }
    }
    change_library(&made)?;
    Some(made)
}

/// Makes a memfd with a copy of the `len` bytes at `start`.
fn copy(start: usize, len: usize) -> Option<Opened> {
    let memfd = Opened::memfd(c"slat", Opened::EXECUTED)?;
    // SAFETY: the file is mapped in this process.
    unsafe { memfd.write_from(start, len, 0)? };
    Some(memfd)
}

/// Changes the library's copy: the copy names no dynamic linker, begins at [`begin::slat_carried`], and has the
/// descriptors of the other files.
fn change_library(made: &Memfds) -> Option<()> {
    /// The size of an ELF program header in bytes.
    const HEADER_LEN: usize = 56;
    let file = made.0[LIBRARY].as_ref()?;
    let headers = Headers::read(file)?;
    let carried = begin::slat_carried as *const () as usize;
    let base = base();
    file.write_at(&(carried - base).to_le_bytes(), ENTRY_POINT)?;
    for (index, segment) in headers.segments().iter().enumerate() {
        if segment.kind == libc::PT_INTERP {
            let offset = headers.offset as usize + index * HEADER_LEN;
            file.write_at(&libc::PT_NULL.to_le_bytes(), offset)?;
        }
    }
    let put_static = |at: usize, value: *const c_void, len: usize| {
        let address = at - base;
        let data = headers.loaded().find(|segment| {
            let start = segment.address as usize;
            (start..start + segment.in_file as usize).contains(&address)
        })?;
        let offset = address - data.address as usize + data.offset as usize;
        // SAFETY: the value is live, and has that size.
        unsafe { file.write_from(value as usize, len, offset) }
    };
    let proc = procfs::directory().unwrap_or(-1);
    if proc != -1 {
        // SAFETY: the call takes no pointer. The call is needed because the program may have marked all descriptors to
        // be closed on exec.
        let _ = unsafe { kernel!(libc::SYS_fcntl, proc, libc::F_SETFD, 0) };
    }
    put_static(
        &raw const PROC as usize,
        (&raw const proc).cast(),
        size_of_val(&proc),
    )?;
    let own_entry = entry() - base;
    put_static(
        &raw const ENTRY as usize,
        (&raw const own_entry).cast(),
        size_of_val(&own_entry),
    )?;
    let files: [KeptFile; COUNT] = std::array::from_fn(|index| {
        let fd = made.0[index].as_ref().map_or(-1, Opened::fd);
        KeptFile::new(fd, FILES[index].len.load(Ordering::Relaxed))
    });
    put_static(
        &raw const FILES as usize,
        (&raw const files).cast(),
        size_of_val(&files),
    )
}
