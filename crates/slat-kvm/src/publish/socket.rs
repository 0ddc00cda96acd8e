//! A directory that only the user can enter, and the socket in this directory.
//!
//! This module makes system calls directly, not through the C library. The preload library would treat calls of the C
//! library's functions as the program's. But the descriptors here belong to this thread's own table, and may have the
//! same numbers as the program's. This module does not use the heap. So if memory is exhausted, the process is not
//! published, but does not end.

use crate::background::leave_descriptors;
use slat_process::calls::{self, raw};
use std::ffi::{CStr, OsStr, OsString};
use std::fmt;
use std::io::Write as _;
use std::mem::size_of;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// The name of the directory below the user's runtime directory. The directory is not called `slat`, because `slat run`
/// may keep its library in a directory of that name, which all users may read.
const SUBDIRECTORY: &str = "slat-stat";

/// The longest time that the thread waits for a reader: for the reader's request, and for each part of the answer to be
/// received.
const PATIENCE: libc::timeval = libc::timeval {
    tv_sec: 2,
    tv_usec: 0,
};

/// Returns the directories in which processes of `user` may have their sockets, best first. `runtime` is the value of
/// `XDG_RUNTIME_DIR`. A process uses the first directory that it can make. A reader searches those directories that
/// belong to the user and that no other user can enter.
pub fn directories(runtime: Option<&OsStr>, user: u32) -> impl Iterator<Item = PathBuf> {
    (0..CANDIDATES)
        .filter_map(move |index| candidate(index, runtime, user))
        .map(|path| OsString::from_vec(path.as_c_str().to_bytes().to_vec()).into())
}

const CANDIDATES: usize = 3;

/// Returns the directory number `index`. `None`: there is no such directory, or its path is too long.
fn candidate(index: usize, runtime: Option<&OsStr>, user: u32) -> Option<Path> {
    match index {
        0 => {
            let runtime = runtime.filter(|path| path.as_bytes().starts_with(b"/"))?;
            Path::new(&[runtime.as_bytes(), b"/", SUBDIRECTORY.as_bytes()])
        }
        1 => Path::format(format_args!("/run/user/{user}/{SUBDIRECTORY}")),
        _ => Path::format(format_args!("/tmp/slat-stat-{user}")),
    }
}

/// A path that ends with NUL, in memory outside the heap.
#[derive(Clone)]
pub(super) struct Path([u8; Self::ROOM]);

impl Path {
    const ROOM: usize = 512;

    fn new(parts: &[&[u8]]) -> Option<Self> {
        let mut path = [0; Self::ROOM];
        let mut rest = &mut path[..Self::ROOM - 1];
        parts
            .iter()
            .try_for_each(|part| rest.write_all(part))
            .ok()?;
        Some(Path(path))
    }

    fn format(arguments: fmt::Arguments<'_>) -> Option<Self> {
        let mut path = [0; Self::ROOM];
        let mut rest = &mut path[..Self::ROOM - 1];
        rest.write_fmt(arguments).ok()?;
        Some(Path(path))
    }

    fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).expect("the last byte is never written")
    }

    fn pointer(&self) -> usize {
        self.0.as_ptr() as usize
    }

    /// Removes the file, if it exists.
    pub(super) fn remove(&self) {
        // If this fails, the next reader removes the file.
        let _ = calls::remove(self.as_c_str());
    }
}

/// A descriptor in this thread's own table.
pub(super) struct Own(usize);

impl Own {
    /// Makes a system call that returns a descriptor. `None`: the call failed.
    ///
    /// # Safety
    /// The conditions are those of the call itself, which opens a descriptor.
    unsafe fn open(number: i64, arguments: [usize; 6]) -> Option<Self> {
        // SAFETY: the caller keeps this function's contract.
        let fd = unsafe { raw(number, arguments) };
        usize::try_from(fd).ok().map(Own)
    }

    /// Sends bytes. Returns whether all bytes were sent.
    pub(super) fn send(&self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let (start, len) = (bytes.as_ptr() as usize, bytes.len());
            let flags = libc::MSG_NOSIGNAL as usize;
            // SAFETY: the call gets live bytes and their number.
            let sent = unsafe { raw(libc::SYS_sendto, [self.0, start, len, flags, 0, 0]) };
            match usize::try_from(sent) {
                Ok(sent) if sent > 0 => bytes = &bytes[sent..],
                _ => return false,
            }
        }
        true
    }

    /// Receives the first bytes of the reader's request. The result is empty if no byte arrived in time.
    pub(super) fn receive<'a>(&self, to: &'a mut [u8]) -> &'a [u8] {
        let (start, len) = (to.as_mut_ptr() as usize, to.len());
        // SAFETY: the call gets a live buffer and the buffer's length.
        let received = unsafe { raw(libc::SYS_recvfrom, [self.0, start, len, 0, 0, 0]) };
        &to[..usize::try_from(received).unwrap_or(0)]
    }

    /// Receives the reader's next bytes, and returns their number. The number is 0 if no bytes arrived in time, or if
    /// `waits` is false and no bytes are available. `None`: the reader has closed the socket, or `to` has no space for
    /// more bytes.
    pub(super) fn receive_more(&self, to: &mut [u8], waits: bool) -> Option<usize> {
        let (start, len) = (to.as_mut_ptr() as usize, to.len());
        let flags = if waits { 0 } else { libc::MSG_DONTWAIT } as usize;
        // SAFETY: the call gets a live buffer and the buffer's length.
        let received = unsafe { raw(libc::SYS_recvfrom, [self.0, start, len, flags, 0, 0]) };
        let nothing = [libc::EAGAIN, libc::EINTR].map(|error| -error as isize);
        match usize::try_from(received) {
            Err(_) if nothing.contains(&received) => Some(0),
            received => received.ok().filter(|received| *received != 0),
        }
    }

    fn set_patience(&self) {
        let patience = PATIENCE;
        for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            let value = &raw const patience as usize;
            let level = libc::SOL_SOCKET as usize;
            let len = size_of::<libc::timeval>();
            // SAFETY: the call reads a live value, and gets the size of the value. If the call fails, the wait has no
            // time limit.
            unsafe {
                raw(
                    libc::SYS_setsockopt,
                    [self.0, level, option as usize, value, len, 0],
                )
            };
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: the descriptor is in this thread's own table, and only this value uses it.
        unsafe { raw(libc::SYS_close, [self.0, 0, 0, 0, 0, 0]) };
    }
}

/// A socket to which readers connect.
pub(super) struct Listener {
    socket: Own,
    path: Path,
}

impl Listener {
    /// Gives this thread its own descriptor table, and opens the socket in the first directory that works. `None`: no
    /// directory works, so the process is not published.
    pub(super) fn open(runtime: Option<&OsStr>) -> Option<Self> {
        if !leave_descriptors() {
            return None;
        }
        // SAFETY: the call has no arguments.
        let user = unsafe { raw(libc::SYS_geteuid, [0; 6]) } as u32;
        (0..CANDIDATES).find_map(|index| {
            let directory = candidate(index, runtime, user)?;
            Self::open_in(&directory, user)
        })
    }

    fn open_in(directory: &Path, user: u32) -> Option<Self> {
        let at = libc::AT_FDCWD as usize;
        // SAFETY: the path ends with NUL. The call fails if the directory exists already; its owner and mode are
        // checked below.
        unsafe { raw(libc::SYS_mkdirat, [at, directory.pointer(), 0o700, 0, 0, 0]) };
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: the path ends with NUL.
        let opened = unsafe {
            Own::open(
                libc::SYS_openat,
                [at, directory.pointer(), flags as usize, 0, 0, 0],
            )?
        };
        // SAFETY: the struct has only numbers, for which zeroes are valid.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        let to = &raw mut stat as usize;
        // SAFETY: the call writes only to the struct.
        let failed = unsafe { raw(libc::SYS_fstat, [opened.0, to, 0, 0, 0, 0]) } != 0;
        if failed || stat.st_uid != user || stat.st_mode & 0o077 != 0 {
            return None;
        }
        let family = libc::AF_UNIX as usize;
        let kind = (libc::SOCK_STREAM | libc::SOCK_CLOEXEC) as usize;
        // SAFETY: the arguments are plain numbers.
        let socket = unsafe { Own::open(libc::SYS_socket, [family, kind, 0, 0, 0, 0])? };
        // Processes in other PID namespaces may have the same id, and a process keeps its id when it executes another
        // program. So the socket's name also contains the time.
        let process = std::process::id();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_nanos() as u64);
        let name = Path::format(format_args!("{process}-{now:x}"))?;
        let name = name.as_c_str().to_bytes();
        let directory = directory.as_c_str().to_bytes();
        // Until the process listens, its socket looks like the socket of a dead process. So its first name begins with
        // a dot, and readers skip such names.
        let hidden = Path::new(&[directory, b"/.", name])?;
        let path = Path::new(&[directory, b"/", name])?;
        remove_dead(&opened, now);
        // SAFETY: the call takes no pointer. The mode is that of the file that `bind` makes.
        unsafe { raw(libc::SYS_fchmod, [socket.0, 0o600, 0, 0, 0, 0]) };
        let (address, len) = address(&opened, &[b".", name])?;
        let address = &raw const address as usize;
        // SAFETY: `bind` gets a live address and its length, `listen` takes no pointer, and both paths of `renameat`
        // end with NUL.
        let done = unsafe {
            raw(libc::SYS_bind, [socket.0, address, len, 0, 0, 0]) == 0
                && raw(libc::SYS_listen, [socket.0, 16, 0, 0, 0, 0]) == 0
                && raw(
                    libc::SYS_renameat,
                    [at, hidden.pointer(), at, path.pointer(), 0, 0],
                ) == 0
        };
        if !done {
            hidden.remove();
        }
        done.then_some(Listener { socket, path })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for a reader. Only the user and root can enter the directory. `None`: the socket is broken.
    pub(super) fn accept(&self) -> Option<Own> {
        let flags = libc::SOCK_CLOEXEC as usize;
        loop {
            // SAFETY: with a null pointer for the reader's address, the call writes to no memory of this process.
            let asked = unsafe { raw(libc::SYS_accept4, [self.socket.0, 0, 0, flags, 0, 0]) };
            match asked {
                0.. => {
                    let asked = Own(asked as usize);
                    asked.set_patience();
                    return Some(asked);
                }
                error if -error == libc::EBADF as isize => return None,
                error if -error == libc::EINVAL as isize => return None,
                // The reader has already closed its socket, or the host is out of memory or descriptors. Waits a moment
                // before the next attempt.
                _ => std::thread::sleep(std::time::Duration::from_millis(10)),
            }
        }
    }
}

/// Removes the sockets in `directory` at which no process listens any more. Their processes were killed, ended by
/// `_exit`, or executed another program. Readers also remove such sockets, but there may never be a reader.
fn remove_dead(directory: &Own, now: u64) {
    /// The bytes of a `linux_dirent64` before its name.
    const HEAD: usize = 19;
    let mut buffer = [0u8; 8 << 10];
    loop {
        let (start, len) = (buffer.as_mut_ptr() as usize, buffer.len());
        // SAFETY: the call gets a live buffer and the buffer's length.
        let filled = unsafe { raw(libc::SYS_getdents64, [directory.0, start, len, 0, 0, 0]) };
        let Ok(filled @ 1..) = usize::try_from(filled) else {
            return;
        };
        let mut rest = &buffer[..filled];
        while rest.len() > HEAD {
            let (entry, others) =
                rest.split_at(usize::from(u16::from_ne_bytes([rest[16], rest[17]])));
            rest = others;
            if entry[18] == libc::DT_SOCK
                && let Ok(name) = CStr::from_bytes_until_nul(&entry[HEAD..])
                && may_be_dead(name, now)
                && is_dead(directory, name) == Some(true)
            {
                // SAFETY: the name ends with NUL.
                unsafe {
                    raw(
                        libc::SYS_unlinkat,
                        [directory.0, name.as_ptr() as usize, 0, 0, 0, 0],
                    )
                };
            }
        }
    }
}

/// Whether, by the name of a socket, its process may be dead. A hidden socket may be new, and about to get its final
/// name. So a hidden socket counts as dead only when it is older than a minute.
fn may_be_dead(name: &CStr, now: u64) -> bool {
    const MOMENT: u64 = 60_000_000_000;
    let Some(hidden) = name.to_bytes().strip_prefix(b".") else {
        return true;
    };
    let text = std::str::from_utf8(hidden).unwrap_or_default();
    let made = text.split_once('-');
    let made = made.and_then(|(_, made)| u64::from_str_radix(made, 16).ok());
    made.is_some_and(|made| now.saturating_sub(made) > MOMENT)
}

/// Whether no process listens at the socket `name` any more. `None`: the test itself failed. This test does not disturb
/// a process that listens. The test connects a datagram socket, which the kernel refuses. If a process listens, the
/// error is not ECONNREFUSED.
fn is_dead(directory: &Own, name: &CStr) -> Option<bool> {
    let kind = (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as usize;
    // SAFETY: the arguments are plain numbers.
    let socket =
        unsafe { Own::open(libc::SYS_socket, [libc::AF_UNIX as usize, kind, 0, 0, 0, 0])? };
    let (address, len) = address(directory, &[name.to_bytes()])?;
    let address = &raw const address as usize;
    // SAFETY: the address is live, and has that length.
    let answer = unsafe { raw(libc::SYS_connect, [socket.0, address, len, 0, 0, 0]) };
    Some(answer == -libc::ECONNREFUSED as isize)
}

/// Returns the address of the socket in a directory whose name has these parts. The address names the directory by its
/// descriptor, because the path in an address has at most 107 bytes.
fn address(directory: &Own, name: &[&[u8]]) -> Option<(libc::sockaddr_un, usize)> {
    // SAFETY: the struct has only numbers, for which zeroes are valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let mut text = [0u8; 107];
    let mut rest = &mut text[..];
    write!(rest, "/proc/thread-self/fd/{}/", directory.0).ok()?;
    name.iter().try_for_each(|part| rest.write_all(part)).ok()?;
    for (to, from) in address.sun_path.iter_mut().zip(text) {
        *to = from as libc::c_char;
    }
    Some((address, size_of::<libc::sockaddr_un>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_made_and_removed_under_its_final_name() {
        // SAFETY: the call takes no pointer and cannot fail.
        let user = unsafe { libc::geteuid() };
        let directory = std::env::temp_dir().join(format!("slat-socket-{}", std::process::id()));
        let path = Path::new(&[directory.as_os_str().as_bytes()]).unwrap();
        let listener = Listener::open_in(&path, user).expect("the socket is made");
        let names = || -> Vec<_> {
            let entries = std::fs::read_dir(&directory).unwrap();
            entries.map(|entry| entry.unwrap().file_name()).collect()
        };
        let [name] = &names()[..] else {
            panic!("{:?}", names())
        };
        assert!(
            listener
                .path
                .as_c_str()
                .to_bytes()
                .ends_with(name.as_bytes())
        );
        listener.path.remove();
        assert!(names().is_empty(), "{:?}", names());
        std::fs::remove_dir(&directory).unwrap();
    }
}
