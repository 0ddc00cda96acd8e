//! Implements opening files by path, and checking access to them. slat serves `/dev/kvm` and KVM's module parameters
//! itself.

use crate::device::{self, How, Opening};
use crate::environment;
use crate::guarded::guarded;
use crate::paths::{self, Path, Special};
use crate::real::{Next, call, call_as_library, errno, kernel, set_errno};
use slat_kvm::thread::Section;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Defines an exported C function that runs with slat's own flags and floating point
/// ([`caller`](slat_process::caller)). In the unit tests of this crate, these functions do not replace the C library's
/// functions.
///
/// A signal handler of the program that slat has deferred runs at the end of such a function, and may unwind by
/// `pthread_exit`.
macro_rules! interpose {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => {
        $crate::files::interpose_with_callers_floats! {
            $($(#[$meta])* fn $name($($argument: $type),*) -> $result { slat_process::caller::with_own_floats(|| $body) })*
        }
    };
}
pub(crate) use interpose;

/// Defines a function like [`interpose`], but for a function of the C library that creates a thread: the new thread
/// begins with its creator's floating-point state.
macro_rules! interpose_with_callers_floats {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => {
        $(
            #[allow(non_snake_case, reason = "the C library's name")]
            mod $name {
                use super::*;

                pub(super) unsafe extern "C-unwind" fn inner($($argument: $type),*) -> $result $body
            }

            $(#[$meta])*
            ///
            /// # Safety
            /// The conditions are those of the C library's function of this name.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            #[unsafe(naked)]
            pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $result {
                slat_process::enter_function!($name::inner)
            }
        )*
    };
}
pub(crate) use interpose_with_callers_floats;

/// Opens the special file to which a path leads. `None`: the path leads to a descriptor that the kernel has to open
/// itself ([`device::open_again`]).
fn open_special(special: Special, opening: Opening) -> Option<isize> {
    let answer = match special {
        Special::Device => guarded(|| device::open(opening)),
        Special::Parameter(name) => guarded(|| device::open_parameter(name, opening)),
        Special::Slash => guarded(|| Err(libc::ENOTDIR)),
        Special::Descriptor(fd) => {
            let mut kernels = false;
            let answer = guarded(|| match device::open_again(fd, opening) {
                Some(answer) => answer,
                None => {
                    kernels = true;
                    Ok(0)
                }
            });
            if kernels {
                return None;
            }
            answer
        }
    };
    Some(answer)
}

/// Returns the file that `slat run` has written to replace `/proc/cpuinfo`, if the kernel has just opened
/// `/proc/cpuinfo` for reading by `path`. Only this spelling is recognised, because recognising other spellings would
/// need system calls in programs that do not use KVM.
///
/// The caller then closes the descriptor, and opens the returned file in the same way. A seccomp filter that lets the
/// program open and close files allows these two calls; it may forbid all others.
fn instead_of_processors(path: *const c_char, opening: Opening) -> Option<&'static CStr> {
    let flags = opening.how().flags as c_int;
    let harmless = libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_NOFOLLOW;
    let file = environment::processors()?;
    (flags & !harmless == 0 && paths::is_spelled(path, b"/proc/cpuinfo")).then_some(file)
}

/// Closes the descriptor that the kernel has opened for the path of a special file. The descriptor refers to the host's
/// file, or to a new file if the host has no such file. This function removes a new file.
fn undo_opening(path: Path, opening: Opening, opened: isize) {
    if opened < 0 {
        return;
    }
    // SAFETY: all-zero is a valid `stat`, which the kernel fills in. The kernel has already read the caller's path. The
    // program does not know the descriptor yet.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if opening.creates()
            && kernel!(libc::SYS_fstat, opened, &raw mut stat).is_ok()
            && stat.st_mode & libc::S_IFMT == libc::S_IFREG
            && stat.st_size == 0
        {
            let _ = kernel!(libc::SYS_unlinkat, path.directory, path.text, 0);
        }
        let _ = kernel!(libc::SYS_close, opened);
    }
}

/// Opens a path. Serves special files (KVM's files, and the file that replaces `/proc/cpuinfo`) itself, and calls
/// `kernels` for all others.
fn open_path(
    directory: c_int,
    text: *const c_char,
    opening: Opening,
    kernels: impl Fn() -> isize,
) -> isize {
    let path = Path {
        directory,
        text,
        resolve: opening.how().resolve,
    };
    let opened = paths::serve(
        path,
        &kernels,
        // A directory is not a special file.
        |answer| answer >= 0 && opening.wants_directory(),
        |opened| undo_opening(path, opening, opened),
        |special| open_special(special, opening),
    );
    // ENODEV: the machine has no KVM. The path may be a device node with KVM's number, but with another name.
    if opened < 0 && errno() == libc::ENODEV && paths::is_device(path) {
        return guarded(|| device::open(opening));
    }
    if opened < 0 {
        // Programs that do not find the device make the system call, which slat serves. Some give up if they find a
        // device that they may not open.
        if [libc::EACCES, libc::EPERM].contains(&errno())
            && paths::is_spelled(text, b"/dev/userfaultfd")
        {
            set_errno(libc::ENOENT);
        }
        return opened;
    }
    let Some(file) = instead_of_processors(text, opening) else {
        return opened;
    };
    // SAFETY: the program does not know the descriptor yet, and the path ends with 0.
    let shown = unsafe {
        let (here, flags) = (libc::AT_FDCWD, opening.how().flags);
        let _ = kernel!(libc::SYS_close, opened);
        kernel!(libc::SYS_openat, here, file.as_ptr(), flags)
    };
    shown.unwrap_or_else(|_| kernels())
}

/// Opens `path` from `directory`. Serves special files itself, and calls `kernels` for others.
///
/// # Safety
/// The conditions are those of openat(2).
pub unsafe fn open_at(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
    kernels: impl Fn() -> isize,
) -> isize {
    // Without a flag that creates a file, the caller has passed no mode.
    let creates = flags & (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) != 0;
    let opening = Opening::open(flags, if creates { mode } else { 0 });
    open_path(directory, path, opening, kernels)
}

/// Implements openat for a function of the C library.
///
/// # Safety
/// The conditions are those of openat(2).
unsafe fn open_by_name(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the arguments are valid for openat(2), as this function's contract requires.
    unsafe {
        open_at(directory, path, flags, mode, || {
            call!(libc::SYS_openat, directory, path, flags, mode)
        }) as c_int
    }
}

/// Implements creat.
///
/// # Safety
/// The conditions are those of creat(2).
pub unsafe fn create(path: *const c_char, mode: c_uint) -> c_int {
    let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
    // SAFETY: the arguments are valid for creat(2), as this function's contract requires.
    unsafe {
        open_at(libc::AT_FDCWD, path, flags, mode, || {
            let (flags, mode) = (flags as usize, mode as usize);
            let arguments = [libc::AT_FDCWD as usize, path as usize, flags, mode, 0, 0];
            call_as_library(libc::SYS_openat, arguments)
        }) as c_int
    }
}

/// Implements openat2(2). The C library has no function of this name.
///
/// # Safety
/// The conditions are those of openat2(2). If memory cannot be accessed, the call returns an error.
pub unsafe fn open_at_2(
    directory: c_int,
    path: *const c_char,
    how: *const How,
    size: usize,
) -> isize {
    // SAFETY: the arguments are valid for openat2(2), as this function's contract requires.
    let kernels = || unsafe { call!(libc::SYS_openat2, directory, path, how, size) };
    // If the struct has another size, the program was written for a kernel whose flags slat may not know.
    if size != size_of::<How>() {
        return kernels();
    }
    if !crate::is_prepared() {
        let answer = kernels();
        if answer < 0 && paths::may_be_unread(errno()) {
            return answer;
        }
        // SAFETY: the kernel has just read the struct.
        let how = unsafe { how.read_unaligned() };
        let first = Cell::new(Some(answer));
        let kernels = || first.take().unwrap_or_else(kernels);
        return open_path(directory, path, Opening::Open2(how), kernels);
    }
    match how_at(directory, path, how) {
        Some(how) => open_path(directory, path, Opening::Open2(how), kernels),
        None => kernels(),
    }
}

/// Returns a copy of the program's arguments of openat2, if the path leads to a special file when `directory` is the
/// directory or the root. `None`: the path does not lead to a special file, the memory cannot be read, or there is an
/// unknown `RESOLVE_` flag.
fn how_at(directory: c_int, path: *const c_char, how: *const How) -> Option<How> {
    /// All flags from RESOLVE_NO_XDEV to RESOLVE_CACHED.
    const RESOLVE_KNOWN: u64 = 0x3f;
    paths::special(directory, path, 0)
        .or_else(|| paths::special(directory, path, libc::RESOLVE_IN_ROOT))?;
    let mut words = [0; size_of::<How>()];
    // SAFETY: the copy is guarded, and its destination is a live buffer. `special` has found a special file, so the
    // handlers are installed.
    unsafe { slat_guard::copy_in(&mut words, how.cast()) }.ok()?;
    // SAFETY: `How` consists of three integers, and has the size of the array.
    let how: How = unsafe { std::mem::transmute(words) };
    (how.resolve & !RESOLVE_KNOWN == 0).then_some(how)
}

/// Implements faccessat and all equivalent calls.
///
/// # Safety
/// The conditions are those of faccessat(2).
pub unsafe fn access_at(
    directory: c_int,
    path: *const c_char,
    mode: c_int,
    kernels: impl Fn() -> isize,
) -> isize {
    const MODES: c_int = libc::R_OK | libc::W_OK | libc::X_OK;
    let ours = |special| {
        let writable = match special {
            // The kernel reports an invalid mode before it reads the path, so the kernel serves this call.
            _ if mode & !MODES != 0 => return None,
            Special::Device => Ok(true),
            Special::Parameter(name) => Ok(slat_kvm::parameters::is_writable(name)),
            Special::Slash => Err(libc::ENOTDIR),
            Special::Descriptor(_) => return None,
        };
        Some(guarded(|| match writable? {
            writable if mode & libc::X_OK != 0 || mode & libc::W_OK != 0 && !writable => {
                Err(libc::EACCES)
            }
            _ => Ok(0),
        }))
    };
    let path = Path {
        directory,
        text: path,
        resolve: 0,
    };
    paths::serve(path, kernels, |_| false, |_| {}, ours)
}

static NEXT_EUIDACCESS: Next = Next::new(c"euidaccess");

/// Implements euidaccess. For other files, calls the C library's function, because the right system call depends on the
/// user.
unsafe fn access_as_effective(path: *const c_char, mode: c_int) -> c_int {
    let kernels = || {
        let Some(function) = NEXT_EUIDACCESS.get() else {
            set_errno(libc::ENOSYS);
            return -1;
        };
        type Access = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
        // SAFETY: `function` is the C library's function, which has this signature. The caller's arguments are valid
        // for it.
        unsafe { std::mem::transmute::<usize, Access>(function)(path, mode) as isize }
    };
    // SAFETY: the arguments are valid for euidaccess(3), as this function's contract requires.
    unsafe { access_at(libc::AT_FDCWD, path, mode, kernels) as c_int }
}

static NEXT_FACCESSAT: Next = Next::new(c"faccessat");

/// Implements faccessat. For other files, calls the C library's function, because the right system call depends on the
/// C library's version.
unsafe fn access_by_name(
    directory: c_int,
    path: *const c_char,
    mode: c_int,
    flags: c_int,
) -> c_int {
    let kernels = || match NEXT_FACCESSAT.get() {
        Some(function) if !Section::is_entered() => {
            type Access = unsafe extern "C" fn(c_int, *const c_char, c_int, c_int) -> c_int;
            // SAFETY: `function` is the C library's function, which has this signature. The caller's arguments are
            // valid for it.
            unsafe {
                std::mem::transmute::<usize, Access>(function)(directory, path, mode, flags)
                    as isize
            }
        }
        // SAFETY: the arguments are valid for faccessat(2), as this function's contract requires.
        _ => unsafe { call!(libc::SYS_faccessat2, directory, path, mode, flags) },
    };
    // SAFETY: the arguments are valid for faccessat(2), as this function's contract requires.
    unsafe { access_at(directory, path, mode, kernels) as c_int }
}

/// Looks up the C library's functions in advance, so that a signal handler never has to look them up.
pub fn prepare() {
    let all = [
        &NEXT_FOPEN,
        &NEXT_FOPEN64,
        &NEXT_EUIDACCESS,
        &NEXT_FACCESSAT,
    ];
    for next in all {
        next.get();
    }
}

static NEXT_FOPEN: Next = Next::new(c"fopen");
static NEXT_FOPEN64: Next = Next::new(c"fopen64");

/// Converts the mode argument of fopen(3) to the flags of open(2).
fn flags_of(mode: &[u8]) -> c_int {
    let has = |letter| mode.contains(&letter);
    let access = match (has(b'+'), mode.first()) {
        (true, _) => libc::O_RDWR,
        (false, Some(b'r')) => libc::O_RDONLY,
        (false, _) => libc::O_WRONLY,
    };
    let create = match mode.first() {
        Some(b'w') => libc::O_CREAT | libc::O_TRUNC,
        Some(b'a') => libc::O_CREAT | libc::O_APPEND,
        _ => 0,
    };
    let exclusive = if has(b'x') { libc::O_EXCL } else { 0 };
    let close_on_exec = if has(b'e') { libc::O_CLOEXEC } else { 0 };
    access | create | exclusive | close_on_exec
}

unsafe fn open_stream(next: &Next, path: *const c_char, mode: *const c_char) -> *mut c_void {
    // SAFETY: the mode is a C string, as fopen(3) requires.
    let opening = || Opening::open(flags_of(unsafe { CStr::from_ptr(mode) }.to_bytes()), 0o666);
    let kernels = || {
        let Some(function) = next.get() else {
            set_errno(libc::ENOSYS);
            return -1;
        };
        type Fopen = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut c_void;
        // SAFETY: `function` is the C library's function, which has this signature. The caller's arguments are valid
        // for it.
        let fopen = |path| unsafe { std::mem::transmute::<usize, Fopen>(function)(path, mode) };
        let mut stream = fopen(path);
        if !stream.is_null()
            && let Some(file) = instead_of_processors(path, opening())
        {
            // SAFETY: the stream was just opened.
            unsafe { libc::fclose(stream.cast()) };
            stream = fopen(file.as_ptr());
            if stream.is_null() {
                stream = fopen(path);
            }
        }
        match stream as isize {
            0 => -1,
            stream => stream,
        }
    };
    let given = Path {
        directory: libc::AT_FDCWD,
        text: path,
        resolve: 0,
    };
    let undo = |stream: isize| {
        if stream != -1 {
            let stream = stream as *mut libc::FILE;
            // SAFETY: the stream was just opened. `undo_opening` closes a copy of the stream's descriptor.
            unsafe {
                let copy = kernel!(
                    libc::SYS_fcntl,
                    libc::fileno(stream),
                    libc::F_DUPFD_CLOEXEC,
                    0
                );
                libc::fclose(stream);
                undo_opening(given, opening(), copy.unwrap_or(-1));
            }
        }
    };
    let ours = |special| {
        let opening = opening();
        // A stream (`FILE`) writes to its file without slat's `write`, so a write to a parameter through a stream would
        // not work.
        if opening.writes() && matches!(special, Special::Parameter(_)) {
            set_errno(libc::EACCES);
            return Some(-1);
        }
        let fd = open_special(special, opening)?;
        if fd < 0 {
            return Some(-1);
        }
        // SAFETY: slat owns the descriptor, and the stream takes it over.
        match unsafe { libc::fdopen(fd as c_int, mode) } as isize {
            0 => Some(-1),
            stream => Some(stream),
        }
    };
    match paths::serve(given, kernels, |_| false, undo, ours) {
        -1 => std::ptr::null_mut(),
        stream => stream as *mut c_void,
    }
}

interpose! {
    /// Replaces open(2).
    fn open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        // SAFETY: the arguments are valid for open(2), as this function's contract requires. Without O_CREAT, the mode
        // is not read.
        unsafe { open_by_name(libc::AT_FDCWD, path, flags, mode) }
    }

    /// Replaces creat(2).
    fn creat(path: *const c_char, mode: c_uint) -> c_int {
        // SAFETY: the arguments are valid for creat(2), as this function's contract requires.
        unsafe { create(path, mode) }
    }

    /// Replaces creat64, which is creat(2) for large files.
    fn creat64(path: *const c_char, mode: c_uint) -> c_int {
        // SAFETY: the arguments are valid for creat(2), as this function's contract requires.
        unsafe { create(path, mode) }
    }

    /// Replaces open64, which is open(2) for large files. On 64-bit architectures, the two are the same.
    fn open64(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        // SAFETY: the arguments are valid for open(2), as this function's contract requires.
        unsafe { open_by_name(libc::AT_FDCWD, path, flags, mode) }
    }

    /// Replaces openat(2).
    fn openat(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        // SAFETY: the arguments are valid for openat(2), as this function's contract requires.
        unsafe { open_by_name(directory, path, flags, mode) }
    }

    /// Replaces openat64, which is openat(2) for large files.
    fn openat64(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        // SAFETY: the arguments are valid for openat(2), as this function's contract requires.
        unsafe { open_by_name(directory, path, flags, mode) }
    }

    /// Replaces `__open_2`, which programs compiled with _FORTIFY_SOURCE call for open(2).
    fn __open_2(path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for open(2), as this function's contract requires.
        unsafe { open_by_name(libc::AT_FDCWD, path, flags, 0) }
    }

    /// Replaces `__open64_2`, which programs compiled with _FORTIFY_SOURCE call for open64.
    fn __open64_2(path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for open(2), as this function's contract requires.
        unsafe { open_by_name(libc::AT_FDCWD, path, flags, 0) }
    }

    /// Replaces `__openat_2`, which programs compiled with _FORTIFY_SOURCE call for openat(2).
    fn __openat_2(directory: c_int, path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for openat(2), as this function's contract requires.
        unsafe { open_by_name(directory, path, flags, 0) }
    }

    /// Replaces `__openat64_2`, which programs compiled with _FORTIFY_SOURCE call for openat64.
    fn __openat64_2(directory: c_int, path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for openat(2), as this function's contract requires.
        unsafe { open_by_name(directory, path, flags, 0) }
    }

    /// Replaces access(2).
    fn access(path: *const c_char, mode: c_int) -> c_int {
        // SAFETY: the arguments are valid for access(2), as this function's contract requires.
        unsafe {
            access_at(libc::AT_FDCWD, path, mode, || {
                let arguments = [libc::AT_FDCWD as usize, path as usize, mode as usize, 0, 0, 0];
                call_as_library(libc::SYS_faccessat, arguments)
            }) as c_int
        }
    }

    /// Replaces euidaccess(3).
    fn euidaccess(path: *const c_char, mode: c_int) -> c_int {
        // SAFETY: the arguments are valid for euidaccess(3), as this function's contract requires.
        unsafe { access_as_effective(path, mode) }
    }

    /// Replaces eaccess(3).
    fn eaccess(path: *const c_char, mode: c_int) -> c_int {
        // SAFETY: the arguments are valid for eaccess(3), as this function's contract requires.
        unsafe { access_as_effective(path, mode) }
    }

    /// Replaces faccessat(2).
    fn faccessat(directory: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for faccessat(2), as this function's contract requires.
        unsafe { access_by_name(directory, path, mode, flags) }
    }

    /// Replaces fopen(3).
    fn fopen(path: *const c_char, mode: *const c_char) -> *mut c_void {
        // SAFETY: the arguments are valid for fopen(3), as this function's contract requires.
        unsafe { open_stream(&NEXT_FOPEN, path, mode) }
    }

    /// Replaces fopen64, which is fopen(3) for large files.
    fn fopen64(path: *const c_char, mode: *const c_char) -> *mut c_void {
        // SAFETY: the arguments are valid for fopen(3), as this function's contract requires.
        unsafe { open_stream(&NEXT_FOPEN64, path, mode) }
    }
}
