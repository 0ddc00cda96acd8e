//! Determines whether a path leads to a special file, however the path is spelled. Special files are `/dev/kvm`, KVM's
//! module parameters, and the links in `/proc/self/fd` of KVM's descriptors.
//!
//! Every call of the program with a path runs this code. So the code first looks at the last component: that name is
//! nearly always not special, and then the directory need not be looked up. The code does not allocate or take a lock,
//! because a signal handler may open files. The only exception is the program's first use of KVM.
//!
//! A path may be a bad pointer, or end in an unmapped page. Then the path is not special, and the kernel returns
//! `EFAULT`.
//!
//! In a program that does not use KVM, this code makes no additional system call ([`serve`]), unless the path ends in a
//! special name and its directory has an unusual spelling.

use crate::arch::calls;
use crate::real::{Opened, errno, kernel, raw, set_errno};
use crate::table;
use slat_host::procfs;
use slat_kvm::thread::Section;
use std::ffi::{CStr, c_char, c_int};
use std::io::Write;

/// Major and minor number of `/dev/kvm`.
pub const DEVICE: (u32, u32) = (10, 232);
/// The longest path that the kernel accepts, with its NUL.
const PATH_MAX: usize = 4096;
/// The maximum length of a module parameter's name, rounded up.
const NAME_MAX: usize = 40;
const WORD: usize = size_of::<u64>();
const PAGE: usize = 4096;

/// The special file that a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// `/dev/kvm`.
    Device,
    /// A module parameter of this name.
    Parameter(&'static str),
    /// The link in `/proc/self/fd` of one of KVM's descriptors.
    Descriptor(c_int),
    /// The device or a parameter, followed by a slash (the kernel returns ENOTDIR).
    Slash,
}

/// The directories that contain special files.
#[derive(PartialEq, Eq)]
enum Place {
    Devices,
    Parameters,
    Descriptors,
}

/// The arguments by which a system call names a file.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// The directory from which the call resolves the path.
    pub directory: c_int,
    /// The path's string.
    pub text: *const c_char,
    /// The `RESOLVE_…` flags of openat2; 0 for all other calls.
    pub resolve: u64,
}

/// Makes a system call on a path: by `ours` if the path is special, otherwise by `kernels`. Both return values and set
/// errno like the C library. If `ours` returns `None`, this function calls `kernels`, too.
///
/// Before the program's first use of KVM, this function calls `kernels` first, because the result shows whether the
/// path can be read. The result may also show that the path is not special (`excludes`); then the directory is not
/// looked up. If the path is special, `undo` reverses the kernel's call before `ours` makes the call.
pub fn serve(
    path: Path,
    kernels: impl Fn() -> isize,
    excludes: impl Fn(isize) -> bool,
    undo: impl FnOnce(isize),
    ours: impl FnOnce(Special) -> Option<isize>,
) -> isize {
    if Section::is_entered() {
        return kernels();
    }
    if crate::is_prepared() {
        let special = special(path.directory, path.text, path.resolve);
        return special.and_then(ours).unwrap_or_else(kernels);
    }
    let before = errno();
    let answer = kernels();
    let after = errno();
    if answer < 0 && may_be_unread(after) {
        return answer;
    }
    let Some(special) = special_in(path, Memory::Read, || !excludes(answer)) else {
        return answer;
    };
    undo(answer);
    set_errno(before);
    ours(special).unwrap_or_else(kernels)
}

/// Whether `errno` is an error that the kernel may return before it has read the path to its end. For a special path,
/// slat returns the same errors.
pub fn may_be_unread(errno: c_int) -> bool {
    [
        libc::EFAULT,
        libc::EINVAL,
        libc::ENAMETOOLONG,
        libc::ENOSYS,
        libc::ENOMEM,
        libc::EBADF,
    ]
    .contains(&errno)
}

/// Whether the memory of a path is known to be readable.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    /// It is not known whether the memory is readable.
    Unknown,
    /// The kernel has just read the memory.
    Read,
}

/// Returns the special file that `path` names for a call that resolves it from `directory`. `None`: the path is not
/// special. `resolve` has the `RESOLVE_…` flags of openat2; it is 0 for all other calls.
pub fn special(directory: c_int, path: *const c_char, resolve: u64) -> Option<Special> {
    let path = Path {
        directory,
        text: path,
        resolve,
    };
    special_in(path, Memory::Unknown, || true)
}

/// Returns the special file that `path` names for a call that resolves it from `directory`, like [`special`]. The
/// caller ensures that `path` is not null and can be read.
pub fn special_readable(directory: c_int, path: *const c_char) -> Option<Special> {
    let path = Path {
        directory,
        text: path,
        resolve: 0,
    };
    special_in(path, Memory::Read, || true)
}

/// Implements [`special`]. If the kernel must look up the directory, calls `may_ask` first, and asks the kernel only if
/// `may_ask` returns true.
fn special_in(path: Path, memory: Memory, may_ask: impl Fn() -> bool) -> Option<Special> {
    let last = Last::of(path.text, memory)?;
    let special = last.meaning()?;
    // A path in slat's own call is never special.
    if Section::is_entered() {
        return None;
    }
    let place = match special {
        Special::Device | Special::Slash => Place::Devices,
        Special::Parameter(_) => Place::Parameters,
        Special::Descriptor(_) => Place::Descriptors,
    };
    let is_node =
        || (special, last.slash) == (Special::Device, false) && may_ask() && is_device(path);
    if leads_to(path, memory, last.start, &may_ask) != Some(place) && !is_node() {
        return None;
    }
    // The program uses KVM, so slat installs its signal handlers now. From now on, memory accesses are guarded.
    if !crate::is_prepared() {
        let _section = Section::enter();
        // If `prepare` fails for lack of memory, opening the device returns that error.
        let _ = crate::prepare();
    }
    match (last.slash, special) {
        (false, special) => Some(special),
        // A descriptor's link is not a directory. The kernel returns the error.
        (true, Special::Descriptor(_)) => None,
        (true, _) => Some(Special::Slash),
    }
}

/// Whether `path` is empty or null. If the call's flags allow an empty path, the call then concerns its descriptor.
pub fn is_empty(path: *const c_char) -> bool {
    let mut empty = true;
    path.is_null() || (each_byte(path, Memory::Unknown, 1, |_| empty = false).is_some() && empty)
}

/// The last component of a path.
struct Last {
    name: [u8; NAME_MAX],
    /// The length of the name. It may exceed the size of the array `name`, which then holds only a part.
    len: usize,
    /// The number of bytes of the path before the name.
    start: usize,
    /// Whether slashes follow the name.
    slash: bool,
}

impl Last {
    fn of(path: *const c_char, memory: Memory) -> Option<Self> {
        let mut last = Last {
            name: [0; NAME_MAX],
            len: 0,
            start: 0,
            slash: true,
        };
        let mut index = 0;
        each_byte(path, memory, PATH_MAX, |byte| {
            if byte == b'/' {
                last.slash = true;
            } else {
                if last.slash {
                    (last.slash, last.start, last.len) = (false, index, 0);
                }
                if let Some(next) = last.name.get_mut(last.len) {
                    *next = byte;
                }
                last.len += 1;
            }
            index += 1;
        })?;
        Some(last)
    }

    /// Returns the special file with this name. A path with this name as its last component leads to the file only if
    /// the path's directory is the right directory.
    fn meaning(&self) -> Option<Special> {
        match self.name.get(..self.len)? {
            b"kvm" => Some(Special::Device),
            [b'0'..=b'9', ..] => number(&self.name[..self.len])
                .filter(|fd| table::is_ours(*fd))
                .map(Special::Descriptor),
            name => slat_kvm::parameters::known(name).map(Special::Parameter),
        }
    }
}

fn number(digits: &[u8]) -> Option<c_int> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Returns the special directory to which the first `len` bytes of `path` lead. Recognises plain spellings without the
/// kernel, because `/sys/module/kvm` may not exist. For other spellings asks the kernel, if `may_ask` returns true.
#[inline(never)]
fn leads_to(
    path: Path,
    memory: Memory,
    len: usize,
    may_ask: impl FnOnce() -> bool,
) -> Option<Place> {
    let Path {
        directory, resolve, ..
    } = path;
    let mut text = [0; PATH_MAX];
    let mut copied = 0;
    let mut copy = |byte| {
        if copied < len {
            text[copied] = byte;
            copied += 1;
        }
    };
    each_byte(path.text, memory, PATH_MAX, &mut copy)?;
    if copied < len {
        return None;
    }
    if resolve == 0
        && text[0] == b'/'
        && let Some(place) = Place::at(&text[..len])
    {
        return Some(place);
    }
    if !may_ask() {
        return None;
    }
    let mut link = [0; 64];
    let found = match (len, directory) {
        (0, libc::AT_FDCWD) => read_link(c"/proc/self/cwd", &mut link),
        (0, directory) => read_link(DescriptorPath::new(directory).as_c_str(), &mut link),
        _ => {
            let directory = open_directory(directory, &text, resolve)?;
            read_link(DescriptorPath::new(directory.fd()).as_c_str(), &mut link)
        }
    };
    Place::at(found?)
}

/// Whether a path leads to a node with KVM's device number, which a jailer may have made or bind-mounted for its
/// program.
pub fn is_device(path: Path) -> bool {
    // SAFETY: all-zero is a valid `stat`, which the call fills in; if `path` is a bad pointer, the call returns an
    // error.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let (directory, text) = (path.directory, path.text);
        path.resolve == 0
            && kernel!(libc::SYS_newfstatat, directory, text, &raw mut stat, 0).is_ok()
            && is_kvms(&stat)
    }
}

/// Whether a file is a device with KVM's device number.
pub fn is_kvms(stat: &libc::stat) -> bool {
    let (major, minor) = DEVICE;
    stat.st_mode & libc::S_IFMT == libc::S_IFCHR && stat.st_rdev == libc::makedev(major, minor)
}

/// Opens a directory, resolving `path` as the kernel does for the program's call.
fn open_directory(directory: c_int, path: &[u8; PATH_MAX], resolve: u64) -> Option<Opened> {
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let how = [flags as u64, 0, resolve];
    // SAFETY: `path` ends with NUL, because the directory's path is shorter. `how` is a live `open_how`. Either call
    // opens a descriptor.
    unsafe {
        Opened::by(match resolve {
            0 => kernel!(libc::SYS_openat, directory, path.as_ptr(), flags),
            _ => kernel!(
                libc::SYS_openat2,
                directory,
                path.as_ptr(),
                how.as_ptr(),
                size_of_val(&how)
            ),
        })
    }
}

impl Place {
    /// Returns the directory that an absolute path without symbolic links names. `None` for other paths.
    fn at(path: &[u8]) -> Option<Self> {
        const DEPTH: usize = 5;
        let mut parts: [&[u8]; DEPTH] = [b""; DEPTH];
        let mut count = 0;
        for part in path.split(|byte| *byte == b'/') {
            if !matches!(part, b"" | b".") {
                *parts.get_mut(count)? = part;
                count += 1;
            }
        }
        match &parts[..count] {
            [b"dev"] => Some(Place::Devices),
            [
                b"sys",
                b"module",
                b"kvm" | b"kvm_intel" | b"kvm_amd",
                b"parameters",
            ] => Some(Place::Parameters),
            [b"proc", process, b"fd"] | [b"proc", process, b"task", _, b"fd"]
                if is_this_process(process) =>
            {
                Some(Place::Descriptors)
            }
            _ => None,
        }
    }
}

/// Whether `name`, the name of a directory in `/proc`, is that of this process.
fn is_this_process(name: &[u8]) -> bool {
    matches!(name, b"self" | b"thread-self") || number(name) == Some(slat_host::process::owner())
}

/// The path of a descriptor's link in `/proc`.
pub struct DescriptorPath([u8; 32]);

impl DescriptorPath {
    /// Makes the path of the link of `fd` in this process.
    pub fn new(fd: c_int) -> Self {
        let mut path = [0; 32];
        write!(&mut path[..31], "/proc/self/fd/{fd}").expect("the longest number fits");
        DescriptorPath(path)
    }

    /// Returns the path, NUL-terminated.
    pub fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).expect("the last byte is 0")
    }
}

/// Reads a symbolic link. `None`: there is no such link, or its text is longer than `buffer`.
pub fn read_link<'a>(link: &CStr, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let to = buffer.as_mut_ptr() as usize;
    let (directory, link) = procfs::reached_by(link);
    let link = link.as_ptr() as usize;
    let arguments = [directory as usize, link, to, buffer.len(), 0, 0];
    let (number, arguments) = calls::older(libc::SYS_readlinkat, arguments);
    // SAFETY: the path ends with NUL, and the buffer is live.
    let len = unsafe { raw(number, arguments) };
    usize::try_from(len)
        .ok()
        .filter(|len| *len < buffer.len())
        .map(|len| &buffer[..len])
}

/// Calls `each` for each byte of a C string before the NUL, but for at most `max` bytes. `None`: the string cannot be
/// read, or it has `PATH_MAX` bytes without a NUL.
fn each_byte(text: *const c_char, memory: Memory, max: usize, each: impl FnMut(u8)) -> Option<()> {
    (walk(text, memory, max, each)? < PATH_MAX).then_some(())
}

/// Whether a path is spelled exactly as `name`. The kernel has just read the path.
pub fn is_spelled(text: *const c_char, name: &[u8]) -> bool {
    let (mut count, mut is_equal) = (0, true);
    let mut compare = |byte| {
        is_equal &= name.get(count) == Some(&byte);
        count += 1;
    };
    each_byte(text, Memory::Read, PATH_MAX, &mut compare).is_some()
        && is_equal
        && count == name.len()
}

/// Returns the client's C string. `None`: the string cannot be read.
pub fn text<'a>(string: *const c_char) -> Option<&'a CStr> {
    walk(string, Memory::Unknown, usize::MAX, |_| {})?;
    // SAFETY: `walk` has just read the string up to its NUL. The client does not change a call's arguments during the
    // call.
    Some(unsafe { CStr::from_ptr(string) })
}

/// Calls `each` for each byte of a C string before the NUL, but for at most `max` bytes. Returns the number of these
/// bytes, which may be more than `PATH_MAX`, unlike in [`each_byte`]. `None`: the string cannot be read.
fn walk(
    text: *const c_char,
    memory: Memory,
    max: usize,
    mut each: impl FnMut(u8),
) -> Option<usize> {
    let mut address = text as usize;
    let mut readable = None;
    let mut count = 0;
    loop {
        if memory == Memory::Read {
            readable = Some(address / PAGE);
        }
        let bytes = word_at(address & !(WORD - 1), &mut readable)?.to_le_bytes();
        for &byte in &bytes[address % WORD..] {
            if byte == 0 || count == max {
                return Some(count);
            }
            each(byte);
            count += 1;
        }
        address = (address & !(WORD - 1)).wrapping_add(WORD);
    }
}

/// Returns an aligned word of the client's memory. `None`: the word cannot be read. If slat's signal handlers are
/// installed, the load is guarded. Before that, because a program that never uses KVM must keep its own handlers, slat
/// asks the kernel once for each page whether the page can be read. `readable` is the last page for which the kernel
/// has said yes.
pub fn word_at(address: usize, readable: &mut Option<usize>) -> Option<u64> {
    if crate::is_prepared() {
        // SAFETY: a guarded load may be made at any address.
        return unsafe { slat_guard::load(address as *const u64) }.ok();
    }
    if *readable != Some(address / PAGE) {
        // The kernel copies the signal set before it looks at the first argument, which is invalid. So the call returns
        // EFAULT if the word cannot be read, and EINVAL if the word can be read. For a null pointer the call succeeds,
        // because the pointer then refers to no set.
        // SAFETY: the call changes nothing.
        let answer = unsafe {
            raw(
                libc::SYS_rt_sigprocmask,
                [usize::MAX, address, 0, WORD, 0, 0],
            )
        };
        if answer != -(libc::EINVAL as isize) {
            return None;
        }
        *readable = Some(address / PAGE);
    }
    // SAFETY: the address is aligned, and its page was readable a moment ago. The word holds part of a C string, as the
    // function requires that the client has called.
    Some(unsafe { (address as *const u64).read_volatile() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;

    fn at(directory: c_int, path: &str) -> Option<Special> {
        let path = CString::new(path).unwrap();
        special(directory, path.as_ptr(), 0)
    }

    #[test]
    fn a_null_path_is_empty() {
        slat_guard::install().unwrap();
        assert!(is_empty(std::ptr::null()) && is_empty(c"".as_ptr()));
        assert!(!is_empty(c"/dev/kvm".as_ptr()));
    }

    #[test]
    fn the_device_is_found_by_any_spelling() {
        for path in [
            "/dev/kvm",
            "//dev///kvm",
            "/dev/./kvm",
            "/./dev/kvm",
            "/dev/../dev/kvm",
            "/proc/self/root/dev/kvm",
        ] {
            assert_eq!(at(libc::AT_FDCWD, path), Some(Special::Device), "{path}");
            // For an absolute path, the directory (here a bad descriptor) does not matter.
            assert_eq!(at(-7, path), Some(Special::Device), "{path}");
        }
        assert_eq!(at(libc::AT_FDCWD, "/dev/kvm/"), Some(Special::Slash));
        for path in [
            "",
            "/",
            "kvm",
            "/kvm",
            "/dev/",
            "/dev/kvm/.",
            "/dev/kvm/kvm",
            "/dev/kvm2",
            "/dev/kv",
            "/tmp/dev/kvm",
            "dev/kvm",
            "/dev/null/kvm",
            "/no/such/kvm",
        ] {
            assert_eq!(at(libc::AT_FDCWD, path), None, "{path}");
        }
    }

    #[test]
    fn the_device_is_found_from_its_directory() {
        use std::os::fd::AsRawFd;
        let dev = std::fs::File::open("/dev").unwrap();
        let root = std::fs::File::open("/").unwrap();
        let (dev, root) = (dev.as_raw_fd(), root.as_raw_fd());
        assert_eq!(at(dev, "kvm"), Some(Special::Device));
        assert_eq!(at(dev, "./kvm"), Some(Special::Device));
        assert_eq!(at(dev, "../dev//kvm"), Some(Special::Device));
        assert_eq!(at(root, "dev/kvm"), Some(Special::Device));
        assert_eq!(at(root, "kvm"), None);
    }

    #[test]
    fn parameters_are_found_where_there_is_no_such_directory() {
        for module in ["kvm", "kvm_intel", "kvm_amd"] {
            let path = format!("/sys/module//{module}/./parameters/halt_poll_ns");
            assert_eq!(
                at(libc::AT_FDCWD, &path),
                Some(Special::Parameter("halt_poll_ns"))
            );
        }
        for path in [
            "/sys/module/kvm/parameters/no_such_parameter",
            "/sys/module/kvm_riscv/parameters/halt_poll_ns",
            "/sys/module/kvm/parameters/x/halt_poll_ns",
        ] {
            assert_eq!(at(libc::AT_FDCWD, path), None, "{path}");
        }
    }

    #[test]
    fn a_path_ends_where_its_memory_ends() {
        // SAFETY: the calls map two new pages, and make the second one unreadable.
        let end = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let start = libc::mmap(std::ptr::null_mut(), 2 * PAGE, rights, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            let end = start.cast::<u8>().add(PAGE);
            assert_eq!(libc::mprotect(end.cast(), PAGE, libc::PROT_NONE), 0);
            end
        };
        let path = b"/dev/kvm\0";
        for cut in 0..path.len() {
            // SAFETY: the bytes are at the end of the first page.
            let start = unsafe {
                let start = end.sub(path.len() - cut);
                start.copy_from_nonoverlapping(path.as_ptr(), path.len() - cut);
                start
            };
            let found = special(libc::AT_FDCWD, start.cast(), 0);
            assert_eq!(found, (cut == 0).then_some(Special::Device), "{cut} cut");
        }
        for address in [0usize, 1, 8, usize::MAX, usize::MAX - 7, 1 << 63] {
            assert_eq!(special(libc::AT_FDCWD, address as *const _, 0), None);
        }
    }

    #[test]
    fn a_path_without_an_end_is_the_kernels() {
        let mut path = vec![b'/'; 2 * PATH_MAX];
        path.extend(b"dev/kvm\0");
        assert_eq!(special(libc::AT_FDCWD, path.as_ptr().cast(), 0), None);
        let short = &path[PATH_MAX + 10..];
        assert_eq!(
            special(libc::AT_FDCWD, short.as_ptr().cast(), 0),
            Some(Special::Device)
        );
    }
}
