//! The programs that the client program executes. slat runs in all of them, too. A program that loads libraries gets
//! this library by LD_PRELOAD. In place of a program that loads no libraries, slat starts this library as a program
//! ([`load`](crate::load)).
//!
//! | file | idea |
//! |---|---|
//! | `chain` | the program to which executing a file leads |
//! | `follow` | how a program is started so that slat follows it |
//!
//! Everything here is async-signal-safe and does not allocate by `malloc`: a program may execute another program in a
//! child of `vfork`, or in a child of `fork` whose parent has many threads.

mod chain;
mod follow;

use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::transmute;
use std::sync::OnceLock;

use crate::carry;
use crate::files::interpose;
use crate::looked_up;
use crate::paths::{DescriptorPath, read_link, text};
use crate::real::{Next, Opened, call, kernel, plain};
use chain::{Chain, Reach};
use follow::{Executed, count, follow};

type Words = *const *const c_char;
type Path = [u8; libc::PATH_MAX as usize];

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// The path of this library's file.
static LIBRARY: OnceLock<CString> = OnceLock::new();

/// Sets the path of this library's file. Call if the dynamic linker does not know the path.
pub fn set_library(file: &CStr) {
    let _ = LIBRARY.set(file.to_owned());
}

/// Maps this library's file and the files that the library needs, to keep them for programs in another root directory.
/// Call before the root directory changes. Async-signal-safe.
pub fn keep_files() {
    if let Some(library) = LIBRARY.get() {
        carry::keep(library);
    }
}

/// Determines the path of this library's file. Call when the program starts.
pub fn prepare() {
    carry::prepare();
    // If this library was started as a program, the dynamic linker reports the program's first argument instead of the
    // library's path.
    if !carry::is_program()
        && let Some(object) = looked_up::object_of(prepare as *const _)
        && !object.dli_fname.is_null()
    {
        // SAFETY: the string lives as long as the library.
        set_library(unsafe { CStr::from_ptr(object.dli_fname) });
    }
}

/// Finds a program's path like execvp(3). `None`: the program is not in PATH.
fn find(name: *const c_char, buffer: &mut Path) -> Option<*const c_char> {
    if name.is_null() {
        return None;
    }
    // SAFETY: the string and the environment are the program's, and the C library is about to read both.
    let (name, path) = unsafe {
        let path = libc::getenv(c"PATH".as_ptr());
        let path = match path.is_null() {
            true => c"/bin:/usr/bin",
            false => CStr::from_ptr(path),
        };
        (CStr::from_ptr(name), path)
    };
    if name.to_bytes().contains(&b'/') {
        return Some(name.as_ptr());
    }
    for directory in path.to_bytes().split(|byte| *byte == b':') {
        // An empty entry of PATH is the current directory.
        let directory = if directory.is_empty() {
            b"."
        } else {
            directory
        };
        let parts = [directory, b"/", name.to_bytes_with_nul()];
        let mut len = 0;
        for part in parts {
            buffer.get_mut(len..len + part.len())?.copy_from_slice(part);
            len += part.len();
        }
        let found = buffer.as_ptr();
        // SAFETY: the path ends with 0.
        if unsafe { kernel!(libc::SYS_faccessat, libc::AT_FDCWD, found, libc::X_OK) }.is_ok() {
            return Some(found.cast());
        }
    }
    None
}

type Spawn = unsafe extern "C-unwind" fn(
    *mut libc::pid_t,
    *const c_char,
    *const libc::posix_spawn_file_actions_t,
    *const libc::posix_spawnattr_t,
    Words,
    Words,
) -> c_int;

static NEXT_EXECVPE: Next = Next::new(c"execvpe");
static NEXT_SPAWN: Next = Next::new(c"posix_spawn");
static NEXT_SPAWNP: Next = Next::new(c"posix_spawnp");

/// Implements execve.
///
/// # Safety
/// The conditions are those of execve(2).
pub unsafe fn execute(path: *const c_char, arguments: Words, environment: Words) -> c_int {
    let start = |executed, arguments, environment| {
        // SAFETY: `follow` has derived these arguments from arguments that are valid for execve(2), as this function's
        // contract requires.
        plain(unsafe { replace_program(executed, arguments, environment) })
    };
    // SAFETY: the arguments are valid for execve(2), as this function's contract requires.
    unsafe { follow(path, arguments, environment, false, start) as c_int }
}

/// Makes the kernel execute a file.
///
/// # Safety
/// The conditions are those of execve(2).
unsafe fn replace_program(
    executed: Executed,
    arguments: Words,
    environment: Words,
) -> Result<isize, i32> {
    // SAFETY: the arguments are valid for execve(2), as this function's contract requires. An empty path stands for the
    // descriptor.
    unsafe {
        match executed {
            Executed::Path(path) => kernel!(libc::SYS_execve, path, arguments, environment),
            Executed::Descriptor(fd) => kernel!(
                libc::SYS_execveat,
                fd,
                c"".as_ptr(),
                arguments,
                environment,
                libc::AT_EMPTY_PATH
            ),
            Executed::Nothing => kernel!(libc::SYS_exit_group, 126),
        }
    }
}

/// Returns a path of the file that execveat would execute; the path may be stored in `buffer`. `None`: a flag is
/// unknown, or the path cannot be read or is too long. Then the kernel has to find the file.
fn path_at(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    buffer: &mut Path,
) -> Option<*const c_char> {
    let given = text(path)?.to_bytes();
    let is_empty = given.is_empty();
    if flags & !libc::AT_EMPTY_PATH != 0 || is_empty && flags == 0 {
        return None;
    }
    if given.starts_with(b"/") || directory == libc::AT_FDCWD && !is_empty {
        return Some(path);
    }
    let link = DescriptorPath::new(directory);
    let mut len = read_link(link.as_c_str(), buffer)?.len();
    if !is_empty {
        let rest = [&b"/"[..], given].map(|part| {
            buffer.get_mut(len..len + part.len())?.copy_from_slice(part);
            len += part.len();
            Some(())
        });
        rest.into_iter().collect::<Option<()>>()?;
    }
    *buffer.get_mut(len)? = 0;
    let name = CStr::from_bytes_until_nul(buffer).ok()?;
    if Opened::new(name, libc::O_PATH).is_some() {
        return Some(buffer.as_ptr().cast());
    }
    // The file has no path (a memfd has none), so it is executed by its descriptor. If this library loads the program,
    // the descriptor must be open in this library's process, too.
    let link = match Chain::from(link.as_c_str())?.reach {
        // SAFETY: the call duplicates a descriptor of the program.
        Reach::Loaded => DescriptorPath::new(
            unsafe { kernel!(libc::SYS_fcntl, directory, libc::F_DUPFD, 3) }.ok()? as c_int,
        ),
        _ => link,
    };
    let link = link.as_c_str().to_bytes_with_nul();
    buffer[..link.len()].copy_from_slice(link);
    Some(buffer.as_ptr().cast())
}

/// Implements execveat.
///
/// # Safety
/// The conditions are those of execveat(2).
pub unsafe fn execute_at(
    directory: c_int,
    path: *const c_char,
    arguments: Words,
    environment: Words,
    flags: c_int,
) -> c_int {
    let mut buffer = [0; libc::PATH_MAX as usize];
    let found = path_at(directory, path, flags, &mut buffer);
    let pass = |arguments: Words, environment: Words| {
        // SAFETY: the arguments are valid for execveat(2), as this function's contract requires.
        unsafe {
            call!(
                libc::SYS_execveat,
                directory,
                path,
                arguments,
                environment,
                flags
            )
        }
    };
    let start = |executed, arguments: Words, environment: Words| match executed {
        Executed::Path(runs) if found == Some(runs) => pass(arguments, environment),
        // SAFETY: `follow` has derived these arguments from arguments that are valid for execveat(2), as this
        // function's contract requires.
        _ => plain(unsafe { replace_program(executed, arguments, environment) }),
    };
    let answer = match found {
        // SAFETY: the arguments are valid for execveat(2), as this function's contract requires. `found` ends with 0.
        Some(found) => unsafe { follow(found, arguments, environment, false, start) },
        None => pass(arguments, environment),
    };
    answer as c_int
}

/// Implements execvpe. If slat need not change the call, the C library's function makes the call, because that function
/// also runs scripts without a first line `#!`.
unsafe fn execute_found(name: *const c_char, arguments: Words, environment: Words) -> c_int {
    let mut buffer = [0; libc::PATH_MAX as usize];
    if let Some(path) = find(name, &mut buffer) {
        let changed = |executed, words, variables| {
            let is_path = matches!(executed, Executed::Path(runs) if std::ptr::eq(runs, path));
            // If path and environment are unchanged, the C library makes the call.
            if !is_path || !std::ptr::eq(variables, environment) {
                // SAFETY: `follow` has derived these arguments from the caller's. The call returns
                // only if it has failed.
                let _ = unsafe { replace_program(executed, words, variables) };
            }
        };
        // SAFETY: the arguments are valid for execve(2), as this function's contract requires.
        unsafe { follow(path, arguments, environment, false, changed) };
    }
    let Some(next) = NEXT_EXECVPE.get() else {
        return missing();
    };
    // SAFETY: the C library's function has this signature. The caller's arguments are valid for it.
    unsafe {
        let next: unsafe extern "C-unwind" fn(*const c_char, Words, Words) -> c_int =
            transmute(next);
        next(name, arguments, environment)
    }
}

interpose! {
    /// Replaces execve(2).
    fn execve(path: *const c_char, arguments: Words, environment: Words) -> c_int {
        // SAFETY: the arguments are valid for execve(2), as this function's contract requires.
        unsafe { execute(path, arguments, environment) }
    }

    /// Replaces execv(3).
    fn execv(path: *const c_char, arguments: Words) -> c_int {
        // SAFETY: the arguments are valid for execv(3), as this function's contract requires.
        unsafe { execute(path, arguments, environ) }
    }

    /// Replaces execveat(2).
    fn execveat(
        directory: c_int,
        path: *const c_char,
        arguments: Words,
        environment: Words,
        flags: c_int,
    ) -> c_int {
        // SAFETY: the arguments are valid for execveat(2), as this function's contract requires.
        unsafe { execute_at(directory, path, arguments, environment, flags) }
    }

    /// Replaces fexecve(3).
    fn fexecve(file: c_int, arguments: Words, environment: Words) -> c_int {
        // SAFETY: the arguments are valid for fexecve(3), as this function's contract requires.
        unsafe { execute_at(file, c"".as_ptr(), arguments, environment, libc::AT_EMPTY_PATH) }
    }

    /// Replaces execvp(3).
    fn execvp(name: *const c_char, arguments: Words) -> c_int {
        // SAFETY: the arguments are valid for execvp(3), as this function's contract requires.
        unsafe { execute_found(name, arguments, environ) }
    }

    /// Replaces execvpe(3).
    fn execvpe(name: *const c_char, arguments: Words, environment: Words) -> c_int {
        // SAFETY: the arguments are valid for execvpe(3), as this function's contract requires.
        unsafe { execute_found(name, arguments, environment) }
    }

    /// Replaces posix_spawn(3).
    fn posix_spawn(
        child: *mut libc::pid_t,
        path: *const c_char,
        actions: *const libc::posix_spawn_file_actions_t,
        attributes: *const libc::posix_spawnattr_t,
        arguments: Words,
        environment: Words,
    ) -> c_int {
        // SAFETY: the arguments are valid for posix_spawn(3), as this function's contract requires.
        unsafe { spawn(&NEXT_SPAWN, child, path, actions, attributes, arguments, environment) }
    }

    /// Replaces posix_spawnp(3).
    fn posix_spawnp(
        child: *mut libc::pid_t,
        name: *const c_char,
        actions: *const libc::posix_spawn_file_actions_t,
        attributes: *const libc::posix_spawnattr_t,
        arguments: Words,
        environment: Words,
    ) -> c_int {
        let mut buffer = [0; libc::PATH_MAX as usize];
        // If the program is not in PATH, the C library's function reports that.
        let path = find(name, &mut buffer).unwrap_or(name);
        // SAFETY: the arguments are valid for posix_spawnp(3), as this function's contract requires.
        unsafe { spawn(&NEXT_SPAWNP, child, path, actions, attributes, arguments, environment) }
    }
}

/// Defines a function that takes a path and any number of words, up to a null. The function calls `$inner` with the
/// path and an array of the words.
macro_rules! listed {
    ($(#[$meta:meta])* $name:ident calls $inner:path) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The conditions are those of the C library's function of this name.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() {
            $crate::arch::entries::with_list!($inner)
        }
    };
}

listed! {
    /// Replaces execl(3).
    execl calls execute_listed
}

listed! {
    /// Replaces execlp(3).
    execlp calls find_listed
}

listed! {
    /// Replaces execle(3).
    execle calls execute_listed_in
}

unsafe extern "C-unwind" fn execute_listed(path: *const c_char, words: Words) -> c_int {
    // SAFETY: the path and the words are valid for execve(2), as execl(3) requires.
    unsafe { execute(path, words, environ) }
}

unsafe extern "C-unwind" fn find_listed(name: *const c_char, words: Words) -> c_int {
    // SAFETY: the name and the words are valid for execve(2), as execlp(3) requires.
    unsafe { execute_found(name, words, environ) }
}

/// Implements execle. The environment follows the null after the words.
unsafe extern "C-unwind" fn execute_listed_in(path: *const c_char, words: Words) -> c_int {
    // SAFETY: the path and the words are valid for execve(2), and the environment follows the null, as execle(3)
    // requires.
    unsafe {
        execute(
            path,
            words,
            *words.add(count(words).unwrap_or(0) + 1).cast(),
        )
    }
}

/// Implements posix_spawn, by calling one of the C library's functions for it.
unsafe fn spawn(
    next: &Next,
    child: *mut libc::pid_t,
    path: *const c_char,
    actions: *const libc::posix_spawn_file_actions_t,
    attributes: *const libc::posix_spawnattr_t,
    arguments: Words,
    environment: Words,
) -> c_int {
    let Some(next) = next.get() else {
        return libc::ENOSYS;
    };
    // SAFETY: the C library's function has this signature. The caller's arguments are valid for it.
    unsafe {
        let next = transmute::<usize, Spawn>(next);
        follow(
            path,
            arguments,
            environment,
            true,
            |executed, arguments, environment| {
                // posix_spawn can execute only a path, not a descriptor.
                let link;
                let path = match executed {
                    Executed::Path(path) => path,
                    Executed::Descriptor(fd) => {
                        link = DescriptorPath::new(fd);
                        link.as_c_str().as_ptr()
                    }
                    Executed::Nothing => return libc::EACCES,
                };
                next(child, path, actions, attributes, arguments, environment)
            },
        )
    }
}

/// The result if this C library lacks the function.
fn missing() -> c_int {
    crate::real::set_errno(libc::ENOSYS);
    -1
}
