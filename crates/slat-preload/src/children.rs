//! Programs that the program executes: slat follows those that load it. A static one does not, and would find the machine's own
//! `/dev/kvm` without a word. So if its file names that device, one line says it.
//!
//! Everything here is async-signal-safe and allocates nothing: a program may execute another one in a child of `vfork`, or in a
//! child of `fork` that has had many threads. (`execl` and its kin, which take any number of arguments, are not replaced.)

use std::ffi::{CStr, c_char, c_int};
use std::mem::transmute;

use crate::files::interpose;
use crate::real::{Next, Opened, call, kernel};

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// Reads all of `buffer` at `offset`.
fn read(file: &Opened, buffer: &mut [u8], offset: u64) -> Option<()> {
    // SAFETY: a live buffer of this length.
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

/// Whether the file contains `text`.
fn contains(file: &Opened, text: &[u8]) -> bool {
    // SAFETY: plain calls. The mapping is private and read here only; a file that shrinks meanwhile is none that can be
    // executed.
    unsafe {
        let Ok(len @ 1..) = kernel!(libc::SYS_lseek, file.fd(), 0, libc::SEEK_END) else {
            return false;
        };
        let Ok(start) = kernel!(
            libc::SYS_mmap,
            0,
            len,
            libc::PROT_READ,
            libc::MAP_PRIVATE,
            file.fd(),
            0
        ) else {
            return false;
        };
        let found = libc::memmem(
            start as *const _,
            len as usize,
            text.as_ptr().cast(),
            text.len(),
        );
        let _ = kernel!(libc::SYS_munmap, start, len);
        !found.is_null()
    }
}

/// Whether the file is a 64-bit ELF program that asks for no interpreter (ELF specification, "Program Header"): nothing is preloaded into it.
fn is_static(file: &Opened) -> bool {
    const HEADER: usize = 64;
    const SEGMENT: usize = 56;
    const MOST_SEGMENTS: usize = 64;
    let mut header = [0; HEADER];
    if read(file, &mut header, 0).is_none() || !header.starts_with(b"\x7fELF\x02") {
        return false;
    }
    let half = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let segments_at = u64::from_le_bytes(header[32..40].try_into().expect("eight bytes"));
    let (size, count) = (half(54), half(56).min(MOST_SEGMENTS));
    let mut segments = [0; SEGMENT * MOST_SEGMENTS];
    let segments = &mut segments[..SEGMENT * count];
    if size != SEGMENT || read(file, segments, segments_at).is_none() {
        return false;
    }
    let kinds = segments
        .chunks_exact(SEGMENT)
        .map(|s| u32::from_le_bytes([s[0], s[1], s[2], s[3]]));
    let mut has_code = false;
    for kind in kinds {
        if kind == libc::PT_INTERP {
            return false;
        }
        has_code |= kind == libc::PT_LOAD;
    }
    has_code
}

/// Says so if slat does not reach the program at `path`.
fn look_at(path: *const c_char) {
    if path.is_null() {
        return;
    }
    // SAFETY: the program's path, which the kernel is about to read.
    let path = unsafe { CStr::from_ptr(path) };
    // The dynamic linker itself is static, and loads what is to be preloaded into the program that it is given.
    let name = path.to_bytes().rsplit(|byte| *byte == b'/').next();
    if name.is_some_and(|name| name.starts_with(b"ld")) {
        return;
    }
    let Some(file) = Opened::new(path, libc::O_RDONLY) else {
        return;
    };
    if is_static(&file) && contains(&file, b"/dev/kvm") {
        let parts = [
            &b"slat: "[..],
            path.to_bytes(),
            b" is statically linked, so slat does not reach it: at /dev/kvm it finds the machine's own KVM, or none; link it dynamically\n",
        ];
        let parts = parts.map(|part| libc::iovec {
            iov_base: part.as_ptr().cast_mut().cast(),
            iov_len: part.len(),
        });
        // One call, so that lines of other processes do not mix with it.
        // SAFETY: live buffers, which the call reads.
        let _ = unsafe { kernel!(libc::SYS_writev, 2, parts.as_ptr(), parts.len()) };
    }
}

/// Like [`look_at`], for a name that the C library looks for in PATH (execvp(3)).
fn look_for(name: *const c_char) {
    if name.is_null() {
        return;
    }
    // SAFETY: the program's string, which the C library is about to read; and so is the environment.
    let (name, path) = unsafe {
        let path = libc::getenv(c"PATH".as_ptr());
        let path = match path.is_null() {
            true => c"/bin:/usr/bin",
            false => CStr::from_ptr(path),
        };
        (CStr::from_ptr(name), path)
    };
    if name.to_bytes().contains(&b'/') {
        return look_at(name.as_ptr());
    }
    let mut buffer = [0u8; libc::PATH_MAX as usize];
    for directory in path.to_bytes().split(|byte| *byte == b':') {
        // An empty one is the current directory.
        let directory = if directory.is_empty() {
            b"."
        } else {
            directory
        };
        let parts = [directory, b"/", name.to_bytes_with_nul()];
        let mut len = 0;
        for part in parts {
            let Some(room) = buffer.get_mut(len..len + part.len()) else {
                return;
            };
            room.copy_from_slice(part);
            len += part.len();
        }
        let found = buffer.as_ptr();
        // SAFETY: a path that ends with 0.
        if unsafe { kernel!(libc::SYS_faccessat, libc::AT_FDCWD, found, libc::X_OK) }.is_ok() {
            return look_at(found.cast());
        }
    }
}

type Words = *const *const c_char;
type Spawn = unsafe extern "C-unwind" fn(
    *mut libc::pid_t,
    *const c_char,
    *const libc::posix_spawn_file_actions_t,
    *const libc::posix_spawnattr_t,
    Words,
    Words,
) -> c_int;

static NEXT_EXECVP: Next = Next::new(c"execvp");
static NEXT_EXECVPE: Next = Next::new(c"execvpe");
static NEXT_SPAWN: Next = Next::new(c"posix_spawn");
static NEXT_SPAWNP: Next = Next::new(c"posix_spawnp");

/// execve(2).
///
/// # Safety
/// As for the system call.
pub unsafe fn execute(path: *const c_char, arguments: Words, environment: Words) -> c_int {
    look_at(path);
    // SAFETY: the caller's promise.
    unsafe { call!(libc::SYS_execve, path, arguments, environment) as c_int }
}

interpose! {
    /// execve(2).
    fn execve(path: *const c_char, arguments: Words, environment: Words) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { execute(path, arguments, environment) }
    }

    /// execv(3).
    fn execv(path: *const c_char, arguments: Words) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { execute(path, arguments, environ) }
    }

    /// execvp(3).
    fn execvp(name: *const c_char, arguments: Words) -> c_int {
        look_for(name);
        let Some(next) = NEXT_EXECVP.get() else {
            return missing();
        };
        // SAFETY: the C library's function of this name; the caller's promise.
        unsafe {
            let next: unsafe extern "C-unwind" fn(*const c_char, Words) -> c_int = transmute(next);
            next(name, arguments)
        }
    }

    /// execvpe(3).
    fn execvpe(name: *const c_char, arguments: Words, environment: Words) -> c_int {
        look_for(name);
        let Some(next) = NEXT_EXECVPE.get() else {
            return missing();
        };
        // SAFETY: the C library's function of this name; the caller's promise.
        unsafe {
            let next: unsafe extern "C-unwind" fn(*const c_char, Words, Words) -> c_int = transmute(next);
            next(name, arguments, environment)
        }
    }

    /// posix_spawn(3).
    fn posix_spawn(
        child: *mut libc::pid_t,
        path: *const c_char,
        actions: *const libc::posix_spawn_file_actions_t,
        attributes: *const libc::posix_spawnattr_t,
        arguments: Words,
        environment: Words,
    ) -> c_int {
        look_at(path);
        let Some(next) = NEXT_SPAWN.get() else {
            return libc::ENOSYS;
        };
        // SAFETY: the C library's function of this name; the caller's promise.
        unsafe { transmute::<usize, Spawn>(next)(child, path, actions, attributes, arguments, environment) }
    }

    /// posix_spawnp(3).
    fn posix_spawnp(
        child: *mut libc::pid_t,
        name: *const c_char,
        actions: *const libc::posix_spawn_file_actions_t,
        attributes: *const libc::posix_spawnattr_t,
        arguments: Words,
        environment: Words,
    ) -> c_int {
        look_for(name);
        let Some(next) = NEXT_SPAWNP.get() else {
            return libc::ENOSYS;
        };
        // SAFETY: the C library's function of this name; the caller's promise.
        unsafe { transmute::<usize, Spawn>(next)(child, name, actions, attributes, arguments, environment) }
    }
}

/// What a function returns that the C library does not have.
fn missing() -> c_int {
    crate::real::set_errno(libc::ENOSYS);
    -1
}
