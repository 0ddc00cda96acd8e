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
use crate::paths::{DescriptorPath, read_link};
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

/// How slat reaches a program.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// By LD_PRELOAD.
    Preloaded,
    /// By this library, which loads it.
    Loaded,
    /// Not at all: a 32-bit program, one that gains rights, or what is no program. What there is in the environment stays.
    Not,
}

/// The first line of a script: its interpreter and one word, each with a NUL.
#[derive(Clone, Copy)]
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
        let end = rest.iter().position(|byte| matches!(byte, b'\n' | 0));
        let line = &rest[..end.unwrap_or(rest.len())];
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

    fn interpreter(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
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
fn can_load(library: &CStr, program: &CStr) -> bool {
    // SAFETY: a path that ends with 0.
    let found = unsafe {
        kernel!(
            libc::SYS_faccessat,
            libc::AT_FDCWD,
            library.as_ptr(),
            libc::X_OK
        )
    };
    let names_device =
        || Opened::new(program, libc::O_RDONLY).is_some_and(|file| contains(&file, b"/dev/kvm"));
    if found.is_err() && names_device() {
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

/// Whether executing a file may give the process other rights: it does so only by itself.
fn gains_rights(file: &Opened) -> bool {
    // SAFETY: all-zero is a valid `stat`, which the call fills in.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let known = kernel!(libc::SYS_fstat, file.fd(), &raw mut stat).is_ok();
        known && stat.st_mode & (libc::S_ISUID | libc::S_ISGID) != 0
    }
}

/// Finds out how slat reaches a program, which is no script.
fn reach(file: &Opened) -> Reach {
    let Some(headers) = Headers::read(file) else {
        return Reach::Not;
    };
    if gains_rights(file) {
        return Reach::Not;
    }
    let mut name = [0; libc::PATH_MAX as usize];
    let is_loaded = match headers.interpreter(file, &mut name) {
        // Another C library's.
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

/// What executing a file leads to: through the interpreters of scripts, each of which may be a script, to a program.
struct Chain {
    lines: [Line; Self::LONGEST],
    len: usize,
    reach: Reach,
}

impl Chain {
    /// As many as the kernel follows (`fs/exec.c`).
    const LONGEST: usize = 5;

    /// Follows it from a file. `None`: a file cannot be opened, or is none that can be executed.
    fn from(program: &CStr) -> Option<Self> {
        const NONE: Line = Line {
            bytes: [0; Line::LEN],
            word: 0,
        };
        let mut chain = Chain {
            lines: [NONE; Self::LONGEST],
            len: 0,
            reach: Reach::Not,
        };
        loop {
            let file = Opened::new(chain.program(program), libc::O_RDONLY)?;
            match Line::read(&file) {
                Some(line) => {
                    *chain.lines.get_mut(chain.len)? = line;
                    chain.len += 1;
                }
                None => {
                    chain.reach = reach(&file);
                    return Some(chain);
                }
            }
        }
    }

    fn lines(&self) -> &[Line] {
        &self.lines[..self.len]
    }

    /// Returns the program that runs in the end; `given` is what is executed.
    fn program<'a>(&'a self, given: &'a CStr) -> &'a CStr {
        self.lines().last().map_or(given, Line::interpreter)
    }

    /// Returns the words that take the place of the first argument, if what is executed, at `path`, is a script: as the kernel does, each
    /// interpreter, its word, and in the end the script's path.
    fn words(&self, path: *const c_char) -> impl Iterator<Item = *const c_char> {
        let each = self.lines().iter().rev();
        let words = each.flat_map(|line| [Some(line.interpreter().as_ptr()), line.word()]);
        words.flatten().chain([path])
    }
}

/// Whether a path's last component is that of a dynamic linker, which is static, and loads what is to be preloaded into the program that
/// it is given.
fn is_linker(path: &CStr) -> bool {
    let name = path.to_bytes().rsplit(|byte| *byte == b'/').next();
    name.is_some_and(|name| name.starts_with(b"ld-linux") || name.starts_with(b"ld.so"))
}

type Words = *const *const c_char;
type Path = [u8; libc::PATH_MAX as usize];

/// Returns a string of the program's with its NUL. `None`: it cannot be read. (Before slat's handlers are installed, nobody is told.)
fn text<'a>(string: *const c_char) -> Option<&'a CStr> {
    let mut len = 0;
    loop {
        // SAFETY: a guarded load.
        match unsafe { slat_guard::load(string.cast::<u8>().wrapping_add(len)) }.ok()? {
            0 => break,
            _ => len += 1,
        }
    }
    // SAFETY: it has just been read to its NUL, and the program leaves its arguments alone during the call.
    Some(unsafe { CStr::from_ptr(string) })
}

/// Returns the number of words before the null, all of which are strings that can be read. `None`: not all of them can.
fn count(words: Words) -> Option<usize> {
    let mut count = 0;
    while !words.is_null() {
        // SAFETY: a guarded load.
        let word = unsafe { slat_guard::load(words.wrapping_add(count).cast::<u64>()) }.ok()?;
        if word == 0 {
            break;
        }
        text(word as *const c_char)?;
        count += 1;
    }
    Some(count)
}

/// Memory for the words that a program is started with: the caller's, or mapped where that does not suffice. (What a child of `vfork` maps
/// stays mapped in its parent.)
struct Scratch {
    start: *mut u8,
    len: usize,
    used: usize,
    is_mapped: bool,
}

/// Room for the words of nearly all programs.
type Room = [usize; 1024];

impl Scratch {
    fn new(room: &mut Room, len: usize) -> Option<Self> {
        if len <= size_of_val(room) {
            return Some(Scratch {
                start: room.as_mut_ptr().cast(),
                len,
                used: 0,
                is_mapped: false,
            });
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory.
        let start =
            unsafe { kernel!(libc::SYS_mmap, 0, len, access, flags, usize::MAX, 0) }.ok()?;
        Some(Scratch {
            start: start as *mut u8,
            len,
            used: 0,
            is_mapped: true,
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
        if self.is_mapped {
            // SAFETY: this value's memory.
            let _ = unsafe { kernel!(libc::SYS_munmap, self.start, self.len) };
        }
    }
}

/// Starts the program at `path` by `start`, which gets the path, the arguments and the environment by which slat follows it.
///
/// # Safety
/// - What execve(2) asks for: strings, and arrays of them that end with null. What cannot be read is the kernel's to refuse.
unsafe fn follow<T>(
    path: *const c_char,
    arguments: Words,
    environment: Words,
    start: impl FnOnce(*const c_char, Words, Words) -> T,
) -> T {
    const PRELOAD: &CStr = c"LD_PRELOAD";
    let read = || Some((text(path)?, count(arguments)?, count(environment)?));
    let (Some((given, words, variables)), Some(library)) = (read(), LIBRARY.get()) else {
        return start(path, arguments, environment);
    };
    let program = load::own_path(path).unwrap_or(given);
    let chain = match is_linker(program) {
        true => None,
        false => Chain::from(program),
    };
    let Some(chain) = chain else {
        return start(program.as_ptr(), arguments, environment);
    };
    let runs = chain.program(program);
    let loads = chain.reach == Reach::Loaded && can_load(library, runs);
    // SAFETY: `count` has read the strings.
    let variable = |index| unsafe { CStr::from_ptr(*environment.add(index)) };
    let value = |text: &'static CStr, index: usize| {
        let rest = variable(index).to_bytes().strip_prefix(text.to_bytes())?;
        rest.strip_prefix(b"=")
    };
    let preload = (0..variables).find_map(|index| value(PRELOAD, index));
    let has_library = preload.is_some_and(|value| {
        let mut names = value.split(|byte| matches!(byte, b':' | b' '));
        // Another slat's library serves as well.
        names.any(|name| {
            let file = name.rsplit(|byte| *byte == b'/').next();
            file.is_some_and(|file| file.starts_with(b"libslat_preload"))
        })
    });
    if !loads && (chain.reach != Reach::Preloaded || has_library) {
        return start(program.as_ptr(), arguments, environment);
    }
    let bytes = (words + variables + 2 * Chain::LONGEST + 8) * size_of::<usize>()
        + preload.map_or(0, <[u8]>::len)
        + library.count_bytes()
        + runs.count_bytes()
        + 256;
    let mut room = [0; size_of::<Room>() / size_of::<usize>()];
    let Some(mut scratch) = Scratch::new(&mut room, bytes) else {
        return start(program.as_ptr(), arguments, environment);
    };
    let added = match (loads, preload) {
        (true, _) => scratch.join(&[load::PROGRAM.to_bytes(), b"=", runs.to_bytes()]),
        (false, Some(others)) => {
            scratch.join(&[PRELOAD.to_bytes(), b"=", library.to_bytes(), b":", others])
        }
        (false, None) => scratch.join(&[PRELOAD.to_bytes(), b"=", library.to_bytes()]),
    };
    let kept = (0..variables)
        .filter(|index| value(PRELOAD, *index).is_none() && value(load::PROGRAM, *index).is_none())
        .map(|index| variable(index).as_ptr());
    let environment = scratch.list(kept.chain([added]));
    if !loads {
        return start(program.as_ptr(), arguments, environment);
    }
    // SAFETY: `count` has read the words.
    let rest = (1..words).map(|index| unsafe { *arguments.add(index) });
    let arguments = match (chain.len, words) {
        // The kernel gives an empty name to a program that is started without one.
        (0, 0) => scratch.list([c"".as_ptr()].into_iter()),
        (0, _) => arguments,
        _ => scratch.list(chain.words(path).chain(rest)),
    };
    start(library.as_ptr(), arguments, environment)
}

/// Finds a program's path as execvp(3) does. `None`: there is none in PATH.
fn find(name: *const c_char, buffer: &mut Path) -> Option<*const c_char> {
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

/// Finds a path to what execveat executes, in `buffer` if it is not the given one. `None`: the kernel has to find it.
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
    // A file without a name, as a memfd: the descriptor is the way to it, also for this library, in whose process it has to be open.
    let link = match Chain::from(link.as_c_str())?.reach {
        // SAFETY: a descriptor of the program's is duplicated.
        Reach::Loaded => DescriptorPath::new(
            unsafe { kernel!(libc::SYS_fcntl, directory, libc::F_DUPFD, 3) }.ok()? as c_int,
        ),
        _ => link,
    };
    let link = link.as_c_str().to_bytes_with_nul();
    buffer[..link.len()].copy_from_slice(link);
    Some(buffer.as_ptr().cast())
}

/// Does execveat. Returns what the kernel returns.
///
/// # Safety
/// As for the system call.
pub unsafe fn become_program_at(
    directory: c_int,
    path: *const c_char,
    arguments: Words,
    environment: Words,
    flags: c_int,
) -> isize {
    let mut buffer = [0; libc::PATH_MAX as usize];
    let found = path_at(directory, path, flags, &mut buffer);
    let start = |runs: *const c_char, arguments: Words, environment: Words| {
        // SAFETY: the caller's promise, and what `follow` has made of it.
        unsafe {
            match found.is_none_or(|found| std::ptr::eq(runs, found)) {
                true => kernel!(
                    libc::SYS_execveat,
                    directory,
                    path,
                    arguments,
                    environment,
                    flags
                ),
                false => kernel!(libc::SYS_execve, runs, arguments, environment),
            }
        }
    };
    let answer = match found {
        // SAFETY: the caller's promise; the path that was found ends with 0.
        Some(found) => unsafe { follow(found, arguments, environment, start) },
        None => start(path, arguments, environment),
    };
    answer.unwrap_or_else(crate::dispatch::error)
}

/// execveat(2), as the C library returns.
///
/// # Safety
/// As for the system call.
pub unsafe fn execute_at(
    directory: c_int,
    path: *const c_char,
    arguments: Words,
    environment: Words,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let answer = unsafe { become_program_at(directory, path, arguments, environment, flags) };
    plain(crate::real::result(answer)) as c_int
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
        let changed = |runs: *const c_char, words, variables| {
            // Unchanged, it is the C library's to do.
            if !std::ptr::eq(runs, path) || !std::ptr::eq(variables, environment) {
                // SAFETY: what `follow` has made of the caller's promise. It returns only if it has failed.
                let _ = unsafe { kernel!(libc::SYS_execve, runs, words, variables) };
            }
        };
        // SAFETY: the caller's promise.
        unsafe { follow(path, arguments, environment, changed) };
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

    /// execveat(2).
    fn execveat(
        directory: c_int,
        path: *const c_char,
        arguments: Words,
        environment: Words,
        flags: c_int,
    ) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { execute_at(directory, path, arguments, environment, flags) }
    }

    /// fexecve(3).
    fn fexecve(file: c_int, arguments: Words, environment: Words) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { execute_at(file, c"".as_ptr(), arguments, environment, libc::AT_EMPTY_PATH) }
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
    unsafe {
        execute(
            path,
            words,
            *words.add(count(words).unwrap_or(0) + 1).cast(),
        )
    }
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
