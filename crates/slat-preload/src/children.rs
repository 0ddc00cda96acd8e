//! Programs that the program executes: slat follows them all. One that loads libraries gets this one by LD_PRELOAD; for one that loads
//! none, this library is started in its place ([`load`]).
//!
//! Everything here is async-signal-safe and allocates nothing by `malloc`: a program may execute another one in a child of `vfork`, or in
//! a child of `fork` that has had many threads.

use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::transmute;
use std::ptr::null;
use std::sync::OnceLock;

use crate::files::interpose;
use crate::load::{self, elf::Headers};
use crate::real::{Next, Opened, kernel, plain};

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// This library's file.
static LIBRARY: OnceLock<CString> = OnceLock::new();

/// Sets this library's file, where the dynamic linker does not know it.
pub fn set_library(file: &CStr) {
    let _ = LIBRARY.set(file.to_owned());
}

/// Looks for this library's file. Call at the program's start.
pub fn prepare() {
    // SAFETY: all-zero is a valid `Dl_info`, which the call fills in with a string that lives as long as the library.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let known = libc::dladdr(prepare as *const _, &mut info) != 0 && !info.dli_fname.is_null();
        // Started as a program, this library has the name of its first argument there.
        let is_program =
            libc::getauxval(libc::AT_ENTRY) as usize == load::slat_begin as *const () as usize;
        if known && !is_program {
            set_library(CStr::from_ptr(info.dli_fname));
        }
    }
}

/// How a program comes to slat.
enum Reach {
    /// By LD_PRELOAD, or not at all: a program that slat has no way to follow.
    Preloaded,
    /// By this library, which loads it.
    Loaded,
    /// As its interpreter does, which is at this path and gets this word before the script's path, if the word is not empty.
    Script,
}

/// The first line of a script: its interpreter and one word, each with a NUL.
struct Line {
    bytes: [u8; Self::LEN],
    /// Where the word begins; 0: there is none.
    word: usize,
}

impl Line {
    /// As much as the kernel reads (`include/uapi/linux/binfmts.h`, `BINPRM_BUF_SIZE`).
    const LEN: usize = 256;

    /// Reads the line of a script. `None`: the file is none.
    fn read(file: &Opened) -> Option<Self> {
        let mut bytes = [0; Self::LEN];
        // SAFETY: a live buffer of this length.
        unsafe {
            kernel!(
                libc::SYS_pread64,
                file.fd(),
                bytes.as_mut_ptr(),
                Self::LEN - 1,
                0
            )
        }
        .ok()?;
        let rest = bytes.strip_prefix(b"#!")?;
        let line = &rest[..rest.iter().position(|byte| *byte == b'\n')?];
        let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
        let start = line.iter().position(|byte| !is_blank(byte))?;
        let name = &line[start..];
        let name_len = name.iter().position(is_blank).unwrap_or(name.len());
        let rest = &name[name_len..];
        let word = rest
            .iter()
            .position(|byte| !is_blank(byte))
            .map(|at| &rest[at..]);
        let word = word
            .map(|word| word.trim_ascii_end())
            .filter(|word| !word.is_empty());
        let mut line = Line {
            bytes: [0; Self::LEN],
            word: 0,
        };
        line.bytes[..name_len].copy_from_slice(&name[..name_len]);
        if let Some(word) = word {
            line.word = name_len + 1;
            line.bytes[line.word..line.word + word.len()].copy_from_slice(word);
        }
        Some(line)
    }

    fn interpreter(&self) -> *const c_char {
        self.bytes.as_ptr().cast()
    }

    fn word(&self) -> Option<*const c_char> {
        (self.word > 0).then(|| self.bytes[self.word..].as_ptr().cast())
    }
}

/// Whether the file contains `text`.
fn contains(file: &Opened, text: &[u8]) -> bool {
    // SAFETY: plain calls. The mapping is private and read here only; a file that shrinks meanwhile is none that can be
    // executed.
    unsafe {
        let Ok(len @ 1..) = kernel!(libc::SYS_lseek, file.fd(), 0, libc::SEEK_END) else {
            return false;
        };
        let (access, flags) = (libc::PROT_READ, libc::MAP_PRIVATE);
        let Ok(start) = kernel!(libc::SYS_mmap, 0, len, access, flags, file.fd(), 0) else {
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

/// Whether this library can be started: not where the program has another root, or sees a part of the file system alone. Then a program that
/// names `/dev/kvm`, which will find the machine's own, or none, is told of in one line.
fn can_load(library: &CStr, program: &CStr, file: &Opened) -> bool {
    // SAFETY: a path that ends with 0.
    let found = unsafe {
        kernel!(
            libc::SYS_faccessat,
            libc::AT_FDCWD,
            library.as_ptr(),
            libc::X_OK
        )
    };
    if found.is_err() && contains(file, b"/dev/kvm") {
        let parts = [
            &b"slat: "[..],
            program.to_bytes(),
            b" loads no libraries, and slat's library, which would load it, cannot be started here (",
            library.to_bytes(),
            b"): at /dev/kvm it finds the machine's own KVM, or none\n",
        ];
        let parts = parts.map(|part| libc::iovec {
            iov_base: part.as_ptr().cast_mut().cast(),
            iov_len: part.len(),
        });
        // One call, so that lines of other processes do not mix with it.
        // SAFETY: live buffers, which the call reads.
        let _ = unsafe { kernel!(libc::SYS_writev, 2, parts.as_ptr(), parts.len()) };
    }
    found.is_ok()
}

/// Finds out how slat reaches the program in a file.
fn reach(file: &Opened) -> Reach {
    // One that gains rights does so only by itself.
    // SAFETY: all-zero is a valid `stat`, which the call fills in.
    let mode = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        match kernel!(libc::SYS_fstat, file.fd(), &raw mut stat) {
            Ok(_) => stat.st_mode,
            Err(_) => 0,
        }
    };
    if mode & (libc::S_ISUID | libc::S_ISGID) != 0 {
        return Reach::Preloaded;
    }
    let Some(headers) = Headers::read(file) else {
        return Reach::Script;
    };
    let mut name = [0; libc::PATH_MAX as usize];
    let is_loaded = match headers.interpreter(file, &mut name) {
        // Another C library's. (A shared library that is executed names none, either: the dynamic linker itself is one.)
        Some(interpreter) => {
            let mut parts = interpreter.to_bytes().rsplit(|byte| *byte == b'/');
            parts
                .next()
                .is_some_and(|name| name.starts_with(b"ld-musl"))
        }
        None => headers.loaded().next().is_some(),
    };
    match is_loaded {
        true => Reach::Loaded,
        false => Reach::Preloaded,
    }
}

/// Whether a path's last component is that of a dynamic linker, which is static, and loads what is to be preloaded into the program that
/// it is given.
fn is_linker(path: &CStr) -> bool {
    let name = path.to_bytes().rsplit(|byte| *byte == b'/').next();
    name.is_some_and(|name| name.starts_with(b"ld-linux") || name.starts_with(b"ld.so"))
}

type Words = *const *const c_char;

/// Returns the number of words before the null.
unsafe fn count(words: Words) -> usize {
    let mut count = 0;
    // SAFETY: the caller gives an array that ends with null, or none.
    unsafe {
        while !words.is_null() && !(*words.add(count)).is_null() {
            count += 1;
        }
    }
    count
}

/// Memory for the words that a program is started with.
struct Scratch {
    start: *mut u8,
    len: usize,
    used: usize,
}

impl Scratch {
    fn new(len: usize) -> Option<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory.
        let start =
            unsafe { kernel!(libc::SYS_mmap, 0, len, access, flags, usize::MAX, 0) }.ok()?;
        Some(Scratch {
            start: start as *mut u8,
            len,
            used: 0,
        })
    }

    /// Joins strings to one with a NUL. There is room for it.
    fn join(&mut self, parts: &[&[u8]]) -> *const c_char {
        // SAFETY: within the memory, as is asserted.
        unsafe {
            let begin = self.start.add(self.used);
            for part in parts.iter().chain([&&b"\0"[..]]) {
                assert!(self.used + part.len() <= self.len);
                std::ptr::copy_nonoverlapping(part.as_ptr(), self.start.add(self.used), part.len());
                self.used += part.len();
            }
            begin.cast()
        }
    }

    /// Puts words one after another, with a null at the end. There is room for them.
    fn list(&mut self, words: impl Iterator<Item = *const c_char>) -> Words {
        self.used = self.used.next_multiple_of(size_of::<usize>());
        // SAFETY: within the memory, as is asserted.
        unsafe {
            let begin = self.start.add(self.used).cast::<*const c_char>();
            for word in words.chain([null()]) {
                assert!(self.used + size_of::<usize>() <= self.len);
                self.start
                    .add(self.used)
                    .cast::<*const c_char>()
                    .write(word);
                self.used += size_of::<usize>();
            }
            begin
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: this value's memory.
        let _ = unsafe { kernel!(libc::SYS_munmap, self.start, self.len) };
    }
}

/// Returns a variable's value in an environment.
unsafe fn variable<'a>(environment: Words, name: &CStr) -> Option<&'a [u8]> {
    // SAFETY: the caller's array of strings.
    unsafe {
        (0..count(environment)).find_map(|index| {
            let text = CStr::from_ptr(*environment.add(index)).to_bytes();
            text.strip_prefix(name.to_bytes())?.strip_prefix(b"=")
        })
    }
}

/// Starts the program at `path` by `start`, which gets the path, the arguments and the environment by which slat follows it.
///
/// # Safety
/// - What execve(2) asks for: strings, and arrays of them that end with null.
unsafe fn follow<T>(
    path: *const c_char,
    arguments: Words,
    environment: Words,
    start: impl FnOnce(*const c_char, Words, Words) -> T,
) -> T {
    const PRELOAD: &CStr = c"LD_PRELOAD";
    if path.is_null() || arguments.is_null() {
        return start(path, arguments, environment);
    }
    // SAFETY: the caller's promise.
    let given = unsafe { CStr::from_ptr(path) };
    let own = load::own_path(path);
    let program = own.unwrap_or(given);
    let Some(library) = LIBRARY.get() else {
        return start(path, arguments, environment);
    };
    let file = match is_linker(program) {
        true => None,
        false => Opened::new(program, libc::O_RDONLY),
    };
    let Some(file) = file else {
        return start(program.as_ptr(), arguments, environment);
    };
    let line;
    let mut runs = program.as_ptr();
    let mut is_script = None;
    let loads = match reach(&file) {
        Reach::Loaded => true,
        Reach::Preloaded => false,
        Reach::Script => match Line::read(&file) {
            Some(read) => {
                line = read;
                // SAFETY: a string with its NUL.
                let interpreter = unsafe { CStr::from_ptr(line.interpreter()) };
                let file = Opened::new(interpreter, libc::O_RDONLY);
                let loads = file.is_some_and(|file| matches!(reach(&file), Reach::Loaded));
                if loads {
                    runs = line.interpreter();
                    is_script = Some(&line);
                }
                loads
            }
            None => false,
        },
    };
    if loads && !can_load(library, program, &file) {
        return start(program.as_ptr(), arguments, environment);
    }
    drop(file);
    // A program that loads libraries has LD_PRELOAD from its parent, unless slat has loaded that one.
    // SAFETY: the caller's promise.
    let preload = unsafe { variable(environment, PRELOAD) };
    let has_library = preload.is_some_and(|value| {
        let mut names = value.split(|byte| matches!(byte, b':' | b' '));
        names.any(|name| name == library.to_bytes())
    });
    if !loads && (!load::is_loaded() || has_library) {
        return start(program.as_ptr(), arguments, environment);
    }
    // SAFETY: as above.
    let (words, variables) = unsafe { (count(arguments), count(environment)) };
    // SAFETY: as above; `runs` is a string.
    let runs_bytes = unsafe { CStr::from_ptr(runs) }.to_bytes();
    let bytes = (words + variables + 8) * size_of::<usize>()
        + preload.map_or(0, <[u8]>::len)
        + library.count_bytes()
        + runs_bytes.len()
        + 256;
    let Some(mut scratch) = Scratch::new(bytes) else {
        return start(program.as_ptr(), arguments, environment);
    };
    let added = match loads {
        true => scratch.join(&[load::PROGRAM.to_bytes(), b"=", runs_bytes]),
        false => match preload {
            Some(others) => {
                scratch.join(&[PRELOAD.to_bytes(), b"=", library.to_bytes(), b":", others])
            }
            None => scratch.join(&[PRELOAD.to_bytes(), b"=", library.to_bytes()]),
        },
    };
    let is_replaced = |word: *const c_char| {
        // SAFETY: a string of the environment.
        let text = unsafe { CStr::from_ptr(word) }.to_bytes();
        let is = |name: &CStr| {
            text.strip_prefix(name.to_bytes())
                .is_some_and(|rest| rest.starts_with(b"="))
        };
        is(PRELOAD) || is(load::PROGRAM)
    };
    // SAFETY: the arrays' words.
    let kept = (0..variables).map(|index| unsafe { *environment.add(index) });
    let environment = scratch.list(kept.filter(|word| !is_replaced(*word)).chain([added]));
    let arguments = match is_script {
        // What the kernel does: the interpreter, its word, the script's path, and the script's arguments.
        Some(line) => {
            // SAFETY: as above.
            let rest = (1..words).map(|index| unsafe { *arguments.add(index) });
            let first = [Some(line.interpreter()), line.word(), Some(path)];
            scratch.list(first.into_iter().flatten().chain(rest))
        }
        None => arguments,
    };
    let runs = if loads {
        library.as_ptr()
    } else {
        program.as_ptr()
    };
    start(runs, arguments, environment)
}

/// Finds a program's path as execvp(3) does. `None`: there is none in PATH.
fn find(name: *const c_char, buffer: &mut [u8; libc::PATH_MAX as usize]) -> Option<*const c_char> {
    if name.is_null() {
        return None;
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
        return Some(name.as_ptr());
    }
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
            buffer.get_mut(len..len + part.len())?.copy_from_slice(part);
            len += part.len();
        }
        let found = buffer.as_ptr();
        // SAFETY: a path that ends with 0.
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

/// Does execve. Returns what the kernel returns.
///
/// # Safety
/// As for the system call.
pub unsafe fn become_program(path: *const c_char, arguments: Words, environment: Words) -> isize {
    let become_it = |path, arguments, environment| {
        // SAFETY: the caller's promise, and what `follow` has made of it.
        unsafe { kernel!(libc::SYS_execve, path, arguments, environment) }
    };
    // SAFETY: the caller's promise.
    let answer = unsafe { follow(path, arguments, environment, become_it) };
    answer.unwrap_or_else(crate::dispatch::error)
}

/// execve(2), as the C library returns.
///
/// # Safety
/// As for the system call.
pub unsafe fn execute(path: *const c_char, arguments: Words, environment: Words) -> c_int {
    // SAFETY: the caller's promise.
    plain(crate::real::result(unsafe {
        become_program(path, arguments, environment)
    })) as c_int
}

/// Does execvpe: by the C library's function, which knows what to do with what is no program, if slat has no need to change the call.
unsafe fn execute_found(name: *const c_char, arguments: Words, environment: Words) -> c_int {
    let mut buffer = [0; libc::PATH_MAX as usize];
    if let Some(path) = find(name, &mut buffer) {
        let loads = |runs: *const c_char, arguments, environment| match std::ptr::eq(runs, path) {
            true => false,
            // SAFETY: what `follow` has made of the caller's promise. It returns only if it has failed.
            false => unsafe { kernel!(libc::SYS_execve, runs, arguments, environment) }.is_err(),
        };
        // SAFETY: the caller's promise.
        unsafe { follow(path, arguments, environment, loads) };
    }
    let Some(next) = NEXT_EXECVPE.get() else {
        return missing();
    };
    // SAFETY: the C library's function of this name; the caller's promise.
    unsafe {
        let next: unsafe extern "C-unwind" fn(*const c_char, Words, Words) -> c_int =
            transmute(next);
        next(name, arguments, environment)
    }
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
        // SAFETY: the caller's promise.
        unsafe { execute_found(name, arguments, environ) }
    }

    /// execvpe(3).
    fn execvpe(name: *const c_char, arguments: Words, environment: Words) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { execute_found(name, arguments, environment) }
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
        // SAFETY: the caller's promise.
        unsafe { spawn(&NEXT_SPAWN, child, path, actions, attributes, arguments, environment) }
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
        let mut buffer = [0; libc::PATH_MAX as usize];
        // What is not in PATH the C library reports.
        let path = find(name, &mut buffer).unwrap_or(name);
        // SAFETY: the caller's promise.
        unsafe { spawn(&NEXT_SPAWNP, child, path, actions, attributes, arguments, environment) }
    }
}

/// Defines a function that takes a path and any number of words up to a null, and calls `$inner` with the path and the array of the words.
///
/// The first five words are in registers, the others on the stack (System V ABI, AMD64 supplement, "Parameter Passing"). With the registers
/// pushed between those and the return address, which moves down for as long, all of them are an array.
macro_rules! listed {
    ($(#[$meta:meta])* $name:ident calls $inner:path) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// As for the C library's function of this name.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() {
            std::arch::naked_asm!(
                "pop rax",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "push rax",
                "call {inner}",
                "pop rcx",
                "add rsp, 40",
                "push rcx",
                "ret",
                inner = sym $inner,
            )
        }
    };
}

listed! {
    /// execl(3).
    execl calls execute_listed
}

listed! {
    /// execlp(3).
    execlp calls find_listed
}

listed! {
    /// execle(3).
    execle calls execute_listed_in
}

unsafe extern "C-unwind" fn execute_listed(path: *const c_char, words: Words) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { execute(path, words, environ) }
}

unsafe extern "C-unwind" fn find_listed(name: *const c_char, words: Words) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { execute_found(name, words, environ) }
}

/// The environment follows the words' null.
unsafe extern "C-unwind" fn execute_listed_in(path: *const c_char, words: Words) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { execute(path, words, *words.add(count(words) + 1).cast()) }
}

/// Does posix_spawn by one of the C library's functions.
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
    // SAFETY: the C library's function of this name; the caller's promise.
    unsafe {
        let next = transmute::<usize, Spawn>(next);
        follow(
            path,
            arguments,
            environment,
            |path, arguments, environment| {
                next(child, path, actions, attributes, arguments, environment)
            },
        )
    }
}

/// What a function returns that the C library does not have.
fn missing() -> c_int {
    crate::real::set_errno(libc::ENOSYS);
    -1
}
