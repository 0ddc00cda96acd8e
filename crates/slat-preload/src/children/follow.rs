//! Starts a program so that slat follows it: with LD_PRELOAD, or with this library in place of the program.

use super::chain::{Chain, Reach, is_linker};
use super::{LIBRARY, Words};
use crate::arch::files::LINKER;
use crate::paths::{DescriptorPath, text, word_at};
use crate::real::{Opened, kernel, map_memory};
use crate::{carry, environment, loaded};
use std::ffi::{CStr, c_char, c_int};
use std::ptr::null;

/// Whether the file contains `text`.
fn contains(file: &Opened, text: &[u8]) -> bool {
    // SAFETY: the mapping is private, and is only read here. A file that shrinks meanwhile cannot be executed.
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

/// The way in which the caller names the file that is executed.
#[derive(Clone, Copy)]
pub enum Executed {
    /// The file at a path.
    Path(*const c_char),
    /// A file given by its descriptor, by execveat(2) with `AT_EMPTY_PATH`.
    Descriptor(c_int),
    /// No file: slat refuses the program, and has printed a message. A process that would become the program ends with
    /// status 126.
    Nothing,
}

/// Whether a file exists at its path. In a process with another root directory, or with only part of the file system,
/// this library's path does not exist.
fn is_there(file: &CStr) -> bool {
    // SAFETY: the path ends with 0.
    let found = unsafe {
        kernel!(
            libc::SYS_faccessat,
            libc::AT_FDCWD,
            file.as_ptr(),
            libc::X_OK
        )
    };
    found.is_ok()
}

/// Whether slat refuses to start a program that slat cannot follow. slat refuses a program that contains the text
/// `/dev/kvm`, because without slat it would use the machine's own KVM or find none; slat then prints one line. Other
/// programs run without slat. `lacks_proc` says that slat cannot follow the program because `/proc` is missing.
fn refuses(library: &CStr, program: &CStr, lacks_proc: bool) -> bool {
    let file = Opened::new(program, libc::O_RDONLY);
    if !file.is_some_and(|file| contains(&file, b"/dev/kvm")) {
        return false;
    }
    let parts = match carry::is_kept() {
        true if lacks_proc => [
            &b"slat: "[..],
            program.to_bytes(),
            b" names /dev/kvm, and slat cannot follow it into this root: posix_spawn needs /proc for that; mount it here, too\n",
            b"",
            b"",
        ],
        true => [
            &b"slat: "[..],
            program.to_bytes(),
            b" names /dev/kvm, and slat cannot follow it into this root: its own libraries do not fit RLIMIT_FSIZE, ",
            b"RLIMIT_NOFILE or memory; raise the limit\n",
            b"",
        ],
        false => [
            b"slat: ",
            program.to_bytes(),
            b" names /dev/kvm, and slat's library (",
            library.to_bytes(),
            b") cannot be seen here; mount its directory and the host's C library here, too\n",
        ],
    };
    let parts = parts.map(|part| libc::iovec {
        iov_base: part.as_ptr().cast_mut().cast(),
        iov_len: part.len(),
    });
    // One call writes the whole message, so that lines of other processes do not mix with it.
    // SAFETY: the buffers are live, and the call only reads them.
    let _ = unsafe { kernel!(libc::SYS_writev, 2, parts.as_ptr(), parts.len()) };
    true
}

/// Returns the number of words before the null. `None`: a word cannot be read.
pub fn count(words: Words) -> Option<usize> {
    let mut readable = None;
    let mut count = 0;
    while !words.is_null() {
        match word_at(words.wrapping_add(count) as usize, &mut readable)? {
            0 => break,
            word => text(word as *const c_char)?,
        };
        count += 1;
    }
    Some(count)
}

/// Memory for the words with which a program is started: memory on the caller's stack, or a new mapping if that memory
/// does not suffice. A mapping that a child of `vfork` makes remains in the parent.
struct Scratch {
    start: *mut u8,
    len: usize,
    used: usize,
    is_mapped: bool,
}

/// A buffer that suffices for the words of nearly all programs.
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
        // SAFETY: the call maps new memory.
        let start = unsafe { map_memory(0, len, access, 0) }.ok()?;
        Some(Scratch {
            start: start as *mut u8,
            len,
            used: 0,
            is_mapped: true,
        })
    }

    /// Joins strings to one string that ends with a NUL. The memory must have space for the result.
    fn join(&mut self, parts: &[&[u8]]) -> *const c_char {
        // SAFETY: the bytes are within the memory, as is asserted.
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

    /// Stores words one after another, with a null at the end. The memory must have space for them.
    fn list(&mut self, words: impl Iterator<Item = *const c_char>) -> Words {
        self.used = self.used.next_multiple_of(size_of::<usize>());
        // SAFETY: the bytes are within the memory, as is asserted.
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
            // SAFETY: the memory belongs to this value.
            let _ = unsafe { kernel!(libc::SYS_munmap, self.start, self.len) };
        }
    }
}

/// Starts the program at `path` by calling `start` with the file, the arguments and the environment that make
/// slat follow the program.
///
/// If this library's file cannot be seen, slat executes this library's memfd ([`carry`]). slat does so even for a
/// program that loads libraries, because that program could not load this library. If `start` can only execute paths
/// (`by_path`), executing a memfd needs `/proc`.
///
/// # Safety
/// - The arguments are as execve(2) demands: strings, and arrays of them that end with null. If they cannot be read,
///   the kernel refuses them.
pub unsafe fn follow<T>(
    path: *const c_char,
    arguments: Words,
    environment: Words,
    by_path: bool,
    start: impl FnOnce(Executed, Words, Words) -> T,
) -> T {
    const PRELOAD: &CStr = c"LD_PRELOAD";
    let read = || Some((text(path)?, count(arguments)?, count(environment)?));
    let (Some((given, words, variables)), Some(library)) = (read(), LIBRARY.get()) else {
        return start(Executed::Path(path), arguments, environment);
    };
    let program = loaded::own_path(path).unwrap_or(given);
    let chain = match is_linker(program) {
        true => None,
        false => Chain::from(program),
    };
    let Some(chain) = chain else {
        return start(Executed::Path(program.as_ptr()), arguments, environment);
    };
    let runs = chain.program(program);
    let has_files = || is_there(library) && (chain.reach == Reach::Preloaded || is_there(LINKER));
    let is_elsewhere = carry::is_kept() && chain.reach != Reach::Not && !has_files();
    let made = is_elsewhere.then(carry::make).flatten();
    let lacks_proc = by_path
        && made.as_ref().is_some_and(|memfds| {
            let link = DescriptorPath::new(memfds.program());
            !is_there(link.as_c_str())
        });
    let carried = made.filter(|_| !lacks_proc);
    let loads = match chain.reach {
        Reach::Not => false,
        _ if carried.is_some() => true,
        Reach::Loaded => is_there(library),
        Reach::Preloaded => false,
    };
    // A jailer clears the environment, but the new program must keep slat's settings.
    let settings = carried.is_some().then(environment::settings);
    let is_lost = is_elsewhere && carried.is_none() || chain.reach == Reach::Loaded && !loads;
    if is_lost && refuses(library, runs, lacks_proc) {
        return start(Executed::Nothing, arguments, environment);
    }
    // SAFETY: `count` has read the strings.
    let variable = |index| unsafe { CStr::from_ptr(*environment.add(index)) };
    let value = |text: &'static CStr, index: usize| {
        let rest = variable(index).to_bytes().strip_prefix(text.to_bytes())?;
        rest.strip_prefix(b"=")
    };
    let preload = (0..variables).find_map(|index| value(PRELOAD, index));
    let has_library = preload.is_some_and(|value| {
        let mut names = value.split(|byte| matches!(byte, b':' | b' '));
        // A library of another version of slat serves as well, so this library is not added.
        names.any(|name| {
            let file = name.rsplit(|byte| *byte == b'/').next();
            file.is_some_and(|file| file.starts_with(b"libslat_preload"))
        })
    });
    if !loads && (chain.reach != Reach::Preloaded || has_library || is_lost) {
        return start(Executed::Path(program.as_ptr()), arguments, environment);
    }
    let bytes = (words + variables + environment::MOST_SETTINGS + 2 * Chain::LONGEST + 8)
        * size_of::<usize>()
        + preload.map_or(0, <[u8]>::len)
        + library.count_bytes()
        + runs.count_bytes()
        + 256;
    let mut room = [0; size_of::<Room>() / size_of::<usize>()];
    let Some(mut scratch) = Scratch::new(&mut room, bytes) else {
        return start(Executed::Path(program.as_ptr()), arguments, environment);
    };
    let added = match (loads, preload) {
        (true, _) => scratch.join(&[loaded::PROGRAM.to_bytes(), b"=", runs.to_bytes()]),
        (false, Some(others)) => {
            scratch.join(&[PRELOAD.to_bytes(), b"=", library.to_bytes(), b":", others])
        }
        (false, None) => scratch.join(&[PRELOAD.to_bytes(), b"=", library.to_bytes()]),
    };
    let kept = (0..variables)
        .filter(|index| {
            value(PRELOAD, *index).is_none() && value(loaded::PROGRAM, *index).is_none()
        })
        .map(|index| variable(index).as_ptr());
    let is_missing = |setting: &&CStr| {
        let name = setting
            .to_bytes()
            .split_inclusive(|byte| *byte == b'=')
            .next();
        !name.is_some_and(|name| {
            (0..variables).any(|index| variable(index).to_bytes().starts_with(name))
        })
    };
    let settings = settings.into_iter().flatten();
    let settings = settings.filter(is_missing).map(CStr::as_ptr);
    let environment = scratch.list(kept.chain(settings).chain([added]));
    if !loads {
        return start(Executed::Path(program.as_ptr()), arguments, environment);
    }
    // SAFETY: `count` has read the words.
    let rest = (1..words).map(|index| unsafe { *arguments.add(index) });
    let arguments = match (chain.has_scripts(), words) {
        // The kernel gives an empty name to a program that is started without a name.
        (false, 0) => scratch.list([c"".as_ptr()].into_iter()),
        (false, _) => arguments,
        _ => scratch.list(chain.words(path).chain(rest)),
    };
    let executed = match &carried {
        Some(memfds) => Executed::Descriptor(memfds.program()),
        None => Executed::Path(library.as_ptr()),
    };
    start(executed, arguments, environment)
}
