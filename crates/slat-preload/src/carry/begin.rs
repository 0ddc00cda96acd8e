//! The entry point of the library's copy, which runs as a program in another root directory. The kernel maps only the
//! copy. The code here maps the dynamic linker, and opens the C library for it.
//!
//! Until [`finish`] this library is not linked. [`slat_carried`] relocates only the pointers in the library's data that
//! point to the library itself. Pointers to functions of the C library are not valid, and there are no thread-local
//! variables. So code that runs before [`finish`] must not call memcpy, memset or strlen. This has two consequences.
//! The code reads memory by volatile reads, because the compiler would turn a loop over bytes into a call. And the code
//! must be compiled with a little optimization (`profile.dev` in the workspace's Cargo.toml), because without
//! optimization the compiler calls memset for an array of six words.
//!
//! The dynamic linker opens libraries by paths that do not exist in the other root. So its system calls are dispatched
//! to [`serve`] (by Syscall User Dispatch, which a loaded program needs anyway). Calls that open slat's files get the
//! memfds; all other calls are made unchanged.

use super::{FILES, LIBRARY, LINKER, NAMES, base, entry};
use crate::arch::calls;
use crate::arch::carried::{finish, relocate, restore};
use crate::arch::frame::Frame;
use crate::user_dispatch::{OFF, ON, SET_DISPATCH};
use slat_process::gate;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The size of the kernel's signal set, in bytes.
const SET_BYTES: usize = 8;
/// `SA_RESTORER` of `arch/x86/include/uapi/asm/signal.h`. It has the same value on Arm.
const SA_RESTORER: usize = 0x0400_0000;

/// The action for SIGSYS before [`begin`] changed it, as the kernel's `struct sigaction`.
static ACTION: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];
/// The signal mask of the process before [`begin`] changed it.
static MASK: AtomicU64 = AtomicU64::new(0);

/// Makes a system call by an instruction in this library, for the library's start. Syscall User Dispatch does not
/// dispatch calls made by this library's text.
fn system_call(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: each caller says what its call changes.
    unsafe { gate::call_own(number, arguments) }
}

/// Calls [`system_call`] with fewer than six arguments.
macro_rules! call {
    ($number:expr $(, $argument:expr)*) => {{
        let mut arguments = [0usize; 6];
        let mut _next = 0;
        $(arguments[_next] = $argument as usize; _next += 1;)*
        system_call($number, arguments)
    }};
}

/// Prints `why` and ends the process. Longer messages can be printed only after slat has started.
fn fail(why: &'static str) -> ! {
    call!(
        libc::SYS_write,
        libc::STDERR_FILENO,
        why.as_ptr(),
        why.len()
    );
    loop {
        call!(libc::SYS_exit_group, 126);
    }
}

/// Reads a value at `address`.
///
/// # Safety
/// - The memory at `address` is mapped and holds a `T`.
unsafe fn get<T: Copy>(address: usize) -> T {
    // SAFETY: the memory is mapped and holds a `T`, as this function's contract requires. ELF aligns its fields.
    unsafe { (address as *const T).read_volatile() }
}

/// Returns the address of the value of `kind` in the auxiliary vector, or 0.
///
/// # Safety
/// - `sp` is the stack pointer with which the kernel has begun the process.
unsafe fn auxiliary(sp: usize, kind: u64) -> usize {
    // SAFETY: `sp` is the stack pointer with which the kernel began the process, as this function's contract requires.
    // The arguments and the variables end with 0, the vector with `AT_NULL`.
    unsafe {
        let mut entry = sp + 8 * (get::<usize>(sp) + 2);
        while get::<usize>(entry) != 0 {
            entry += 8;
        }
        entry += 8;
        while get::<u64>(entry) != libc::AT_NULL {
            if get::<u64>(entry) == kind {
                return entry + 8;
            }
            entry += 16;
        }
        0
    }
}

/// Sets a value of the auxiliary vector.
///
/// # Safety
/// The conditions are those of [`auxiliary`]. The value is correct for this process.
unsafe fn set_auxiliary(sp: usize, kind: u64, value: usize) {
    // SAFETY: `sp` is the stack pointer with which the kernel began the process, as this function's contract requires.
    // This process may change the vector.
    unsafe {
        let entry = auxiliary(sp, kind);
        if entry != 0 {
            (entry as *mut usize).write_volatile(value);
        }
    }
}

/// The address of a program header in memory.
#[derive(Clone, Copy)]
struct Header(usize);

impl Header {
    /// Returns header `index` of the ELF file that is mapped at `file`.
    ///
    /// # Safety
    /// - The ELF file is mapped at `file`, and has a header `index`.
    unsafe fn of(file: usize, index: usize) -> Self {
        // SAFETY: the file is mapped and has the header, as this function's contract requires. The field `e_phoff` is
        // at offset 32.
        Header(unsafe { file + get::<usize>(file + 32) + 56 * index })
    }

    /// Returns the number of headers: `e_phnum`.
    ///
    /// # Safety
    /// The conditions are those of [`Header::of`].
    unsafe fn count(file: usize) -> usize {
        // SAFETY: the file is mapped, as this function's contract requires.
        usize::from(unsafe { get::<u16>(file + 56) })
    }

    /// Whether the segment is loaded (`PT_LOAD`), and has all of `flags`.
    fn is_loaded_with(self, flags: u32) -> bool {
        // SAFETY: the address is that of a program header.
        unsafe { get::<u32>(self.0) == libc::PT_LOAD && get::<u32>(self.0 + 4) & flags == flags }
    }

    /// Returns one of the header's 64-bit words. The words are, by `index`: offset, address, physical address, length
    /// in the file, length in memory.
    fn word(self, index: usize) -> usize {
        // SAFETY: the address is that of a program header.
        unsafe { get(self.0 + 8 + 8 * index) }
    }
}

/// Maps memory or a file. Ends the process if that fails.
fn map(at: usize, len: usize, access: c_int, flags: c_int, fd: c_int, offset: usize) -> usize {
    let start = call!(libc::SYS_mmap, at, len, access, flags, fd, offset);
    if start < 0 {
        fail("slat: there is no memory for slat's library\n");
    }
    start as usize
}

/// Maps the segments of the dynamic linker as the kernel does, in pages of `page` bytes, and returns their base
/// address. `fd` is the linker's file. The file must also be mapped as a whole at `file`, where this function reads its
/// headers.
///
/// # Safety
/// - The file is a dynamic linker.
unsafe fn place(fd: c_int, file: usize, page: usize) -> usize {
    // SAFETY: the file is a dynamic linker, as this function's contract requires, so its headers are valid. No mapping
    // replaces another.
    unsafe {
        let mut high = 0;
        let mut index = 0;
        while index < Header::count(file) {
            let header = Header::of(file, index);
            if header.is_loaded_with(0) {
                high = header.word(1) + header.word(4);
            }
            index += 1;
        }
        let private = libc::MAP_PRIVATE;
        let base = map(
            0,
            high,
            libc::PROT_NONE,
            private | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        index = 0;
        while index < Header::count(file) {
            let header = Header::of(file, index);
            index += 1;
            if !header.is_loaded_with(0) {
                continue;
            }
            let right = |flag, right| match header.is_loaded_with(flag) {
                true => right,
                false => 0,
            };
            let access = right(libc::PF_R, libc::PROT_READ)
                | right(libc::PF_W, libc::PROT_WRITE)
                | right(libc::PF_X, libc::PROT_EXEC);
            let start = base + header.word(1);
            let (file_end, end) = (start + header.word(3), start + header.word(4));
            let (first, mapped) = (start & !(page - 1), (file_end + page - 1) & !(page - 1));
            let flags = private | libc::MAP_FIXED;
            map(
                first,
                mapped - first,
                access,
                flags,
                fd,
                header.word(0) & !(page - 1),
            );
            if access & libc::PROT_WRITE != 0 {
                let mut at = file_end;
                while at < mapped {
                    (at as *mut u8).write_volatile(0);
                    at += 1;
                }
            }
            if end > mapped {
                map(
                    mapped,
                    end - mapped,
                    access,
                    flags | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                );
            }
        }
        base
    }
}

/// Prepares this process for the dynamic linker. Returns the linker's entry point.
///
/// # Safety
/// - `sp` is the stack pointer with which the kernel has begun this process.
unsafe extern "C" fn begin(sp: usize) -> usize {
    let mut index = 0;
    while index < FILES.len() {
        // SAFETY: the index is within the array.
        let file = unsafe { FILES.get_unchecked(index) };
        let fd = file.fd.load(Ordering::Relaxed);
        if fd >= 0 {
            let len = file.len.load(Ordering::Relaxed);
            let start = map(0, len, libc::PROT_READ, libc::MAP_PRIVATE, fd, 0);
            file.start.store(start, Ordering::Release);
        }
        index += 1;
    }
    let (linker, library) = (&FILES[LINKER], base());
    // SAFETY: `sp` is the stack pointer with which the kernel began the process, as this function's contract requires.
    // The kernel always stores `AT_PAGESZ`.
    let page = unsafe { get::<usize>(auxiliary(sp, libc::AT_PAGESZ)) };
    // SAFETY: the file is a dynamic linker, and is mapped at `file`. The entry point is at offset 24 of its header.
    let (at, entry) = unsafe {
        let file = linker.start.load(Ordering::Relaxed);
        let at = place(linker.fd.load(Ordering::Relaxed), file, page);
        (at, at + get::<usize>(file + 24))
    };
    // The library and the dynamic linker are not opened again. Closing their two descriptors leaves descriptors for the
    // dynamic linker, because the process may be allowed only a few.
    let own = FILES[LIBRARY].fd.swap(-1, Ordering::Relaxed);
    call!(libc::SYS_close, own);
    call!(libc::SYS_close, linker.fd.swap(-1, Ordering::Relaxed));
    let (mut start, mut len) = (0, 0);
    index = 0;
    // SAFETY: the headers are this library's and are mapped with it, and no other code uses them yet.
    unsafe {
        call!(
            libc::SYS_mprotect,
            library,
            page,
            libc::PROT_READ | libc::PROT_WRITE
        );
        while index < Header::count(library) {
            let header = Header::of(library, index);
            if header.is_loaded_with(libc::PF_X) {
                (start, len) = (library + header.word(1), header.word(4));
            }
            // The dynamic linker asserts that the program names a dynamic linker.
            if get::<u32>(header.0) == libc::PT_NULL {
                (header.0 as *mut u32).write_volatile(libc::PT_INTERP);
            }
            index += 1;
        }
        call!(libc::SYS_mprotect, library, page, libc::PROT_READ);
    }
    let flags = libc::SA_SIGINFO as usize | SA_RESTORER;
    let action = [
        serve as *const () as usize,
        flags,
        restore as *const () as usize,
        0,
    ];
    let set = 1u64 << (libc::SIGSYS - 1);
    let (to, before) = (&raw const ACTION, &raw const MASK);
    call!(
        libc::SYS_rt_sigaction,
        libc::SIGSYS,
        &raw const action,
        to,
        SET_BYTES
    );
    call!(
        libc::SYS_rt_sigprocmask,
        libc::SIG_UNBLOCK,
        &raw const set,
        before,
        SET_BYTES
    );
    if call!(libc::SYS_prctl, SET_DISPATCH, ON, start, len, 0) != 0 {
        fail(
            "slat: in another root this kernel cannot start slat's library: it has no Syscall User Dispatch (Linux 5.11)\n",
        );
    }
    // SAFETY: `sp` is the stack pointer with which the kernel began the process, as this function's contract requires.
    // The linker is mapped at `at`, and jumps to `finish` in the end.
    unsafe {
        set_auxiliary(sp, libc::AT_BASE, at);
        set_auxiliary(sp, libc::AT_ENTRY, finish as *const () as usize);
    }
    entry
}

/// Returns the memfd of the file whose name is the last component of `path`, or -1.
///
/// # Safety
/// - The path ends with 0.
unsafe fn memfd_of(path: usize) -> c_int {
    // SAFETY: the path ends with 0, as this function's contract requires. The names end with 0.
    unsafe {
        let (mut last, mut at) = (path, path);
        loop {
            match get::<u8>(at) {
                0 => break,
                b'/' => last = at + 1,
                _ => {}
            }
            at += 1;
        }
        let mut index = LINKER;
        while index < NAMES.len() {
            let name = NAMES.get_unchecked(index).as_ptr() as usize;
            let mut len = 0;
            while get::<u8>(name + len) == get::<u8>(last + len) {
                if get::<u8>(name + len) == 0 {
                    return FILES.get_unchecked(index).fd.load(Ordering::Relaxed);
                }
                len += 1;
            }
            index += 1;
        }
        -1
    }
}

/// Serves a system call of the dynamic linker, or of the C library while the library starts. The kernel calls this
/// function for SIGSYS.
unsafe extern "C" fn serve(_signal: c_int, _information: usize, context: *mut Frame) {
    // SAFETY: `context` is the kernel's structure. The path belongs to the linker and ends with 0.
    unsafe {
        let (number, arguments) = (*context).call();
        let path = match calls::newer(number, arguments) {
            (libc::SYS_openat | libc::SYS_faccessat, [_, path, ..]) => path,
            _ => 0,
        };
        let fd = if path != 0 { memfd_of(path) } else { -1 };
        // The linker must not find any other file: the settings for dynamic linking in the other root are for that
        // root's libraries.
        let answer = match path {
            0 => system_call(number, arguments),
            _ if fd < 0 => -(libc::ENOENT as isize),
            _ => call!(libc::SYS_dup, fd),
        };
        (*context).set_result(answer);
    }
}

/// Ends the dispatch of the dynamic linker's calls, which [`begin`] has switched on. Returns the library's entry point.
///
/// # Safety
/// The conditions are those of [`begin`].
unsafe extern "C" fn end(sp: usize) -> usize {
    call!(libc::SYS_prctl, SET_DISPATCH, OFF, 0, 0, 0);
    call!(
        libc::SYS_rt_sigaction,
        libc::SIGSYS,
        &raw const ACTION,
        0,
        SET_BYTES
    );
    call!(
        libc::SYS_rt_sigprocmask,
        libc::SIG_SETMASK,
        &raw const MASK,
        0,
        SET_BYTES
    );
    for file in &FILES {
        let fd = file.fd.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            call!(libc::SYS_close, fd);
        }
    }
    let entry = entry();
    // SAFETY: `sp` is the stack pointer with which the kernel began the process, as this function's contract requires.
    unsafe { set_auxiliary(sp, libc::AT_ENTRY, entry) };
    entry
}

/// The code to which the dynamic linker jumps after it has linked this library. Calls [`end`], and jumps to the
/// library's entry point. The library then starts as it does if the kernel itself has loaded the dynamic linker.
#[unsafe(naked)]
unsafe extern "C" fn finish() -> ! {
    finish!(end)
}

/// The entry point of the library's copy. Adds the library's address to the library's pointers to itself, which are the
/// first `DT_RELACOUNT` entries of `DT_RELA`. The dynamic linker later stores the same values again.
///
/// # Safety
/// - The kernel calls this function.
#[unsafe(naked)]
pub unsafe extern "C" fn slat_carried() -> ! {
    relocate!(super::__ehdr_start, begin)
}
