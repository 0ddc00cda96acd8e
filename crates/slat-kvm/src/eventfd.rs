//! The client's eventfds, as irqfds and ioeventfds use them.
//!
//! slat keeps its own descriptor for each eventfd, as KVM keeps a reference, because the client may close its own
//! descriptor. Two descriptors refer to the same eventfd if the kernel shows the same id for both
//! (`/proc/self/fdinfo`). So a client can name the same eventfd by another descriptor later.

use crate::errno::{Error, Result, fail};
use crate::process::PerProcess;
use slat_host::procfs;
use slat_process::calls::{self, Call};
use std::ffi::CStr;
use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, PoisonError};

/// An eventfd of the client, by a descriptor that only slat uses.
#[derive(Debug)]
pub(crate) struct EventFd {
    fd: Own,
    id: u64,
    /// Whether writes never wait, because the client has set `O_NONBLOCK`.
    never_blocks: bool,
}

/// A descriptor that only slat uses.
#[derive(Debug)]
struct Own(RawFd);

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: only this value owns the descriptor, and the value is being dropped.
        let _ = unsafe { calls::make(Call::Close, [self.0 as usize, 0, 0, 0, 0, 0]) };
    }
}

/// The lowest number for slat's own descriptors. This number is above the numbers that programs choose for their own
/// descriptors.
const FIRST_OWN: i32 = 512;

/// The lock that a thread holds while [`id`] has a file open, and while [`EventFd::take`] duplicates a client's
/// descriptor.
static READING: PerProcess<Mutex<()>> = PerProcess::new();

/// Creates the lock that all eventfds of a process share.
pub(crate) fn prepare() {
    READING.get();
}

impl EventFd {
    /// Opens the eventfd that the client's descriptor `fd` refers to.
    ///
    /// # Errors
    /// `EBADF` when `fd` is closed, or opened with `O_PATH`; `EINVAL` when `fd` refers to something else; `EMFILE`.
    pub(crate) fn take(fd: i32) -> Result<Self> {
        // Another thread may have a file open in [`id`]. If the client has closed `fd`, that file may have the number
        // of `fd`. The lock prevents this call from duplicating that file instead of the client's eventfd.
        let _reading = (READING.get().lock()).unwrap_or_else(PoisonError::into_inner);
        let own = duplicate(fd)?;
        let arguments = [own.0 as usize, libc::F_GETFL as usize, 0, 0, 0, 0];
        // SAFETY: the call takes no pointer.
        let flags = unsafe { calls::make(Call::Flags, arguments) };
        let has = |flag: i32| flags.is_ok_and(|flags| flags as i32 & flag != 0);
        match id(own.0) {
            Some(id) => Ok(EventFd {
                fd: own,
                id,
                never_blocks: has(libc::O_NONBLOCK),
            }),
            // A descriptor with O_PATH only names a file: system calls that use the file return EBADF.
            None if has(libc::O_PATH) => fail(libc::EBADF),
            None => fail(libc::EINVAL),
        }
    }

    /// Whether both values refer to the same eventfd.
    pub(crate) fn is(&self, other: &EventFd) -> bool {
        self.id == other.id
    }

    /// Adds 1 to the counter. A full counter does not change: it already wakes the threads that poll the eventfd.
    pub(crate) fn signal(&self) {
        // A write to a full counter waits for a reader unless the descriptor has O_NONBLOCK. KVM's own signal never
        // waits, so this code checks first whether the counter is full. The write can still wait if another thread
        // fills the counter between the check and the write.
        if self.never_blocks || self.has_room() {
            let one = 1u64.to_ne_bytes();
            let (start, len) = (one.as_ptr() as usize, one.len());
            // SAFETY: the call gets a live buffer and the buffer's length.
            let _ = unsafe { calls::make(Call::Write, [self.fd.0 as usize, start, len, 0, 0, 0]) };
        }
    }

    /// Whether the counter is not full.
    fn has_room(&self) -> bool {
        let mut room = libc::pollfd {
            fd: self.fd.0,
            events: libc::POLLOUT,
            revents: 0,
        };
        calls::is_ready(&mut room) == Some(true) && room.revents & libc::POLLOUT != 0
    }

    /// Resets the counter to zero. Returns whether it was not zero. Never waits.
    pub(crate) fn drain(&self) -> bool {
        let mut count = 0u64;
        let mut into = libc::iovec {
            iov_base: (&raw mut count).cast(),
            iov_len: size_of_val(&count),
        };
        let into = &raw mut into as usize;
        // An offset of -1 makes `preadv2` read at the file's own position, like `read`.
        let (low, high) = (usize::MAX, 0);
        let arguments = [
            self.fd.0 as usize,
            into,
            1,
            low,
            high,
            libc::RWF_NOWAIT as usize,
        ];
        // SAFETY: the call reads into a buffer on the stack, whose length it gets.
        let read = unsafe { calls::make(Call::ReadNow, arguments) };
        match read {
            Err(libc::ENOSYS) => self.drain_ready(),
            read => read == Ok(size_of_val(&count) as isize) && count != 0,
        }
    }

    /// Resets the counter like [`drain`](Self::drain), but polls the descriptor first, and then reads it. The read may
    /// wait if the client reads the counter at the same time. Call on hosts without `preadv2`: qemu-user, where no
    /// seccomp filter forbids these calls.
    fn drain_ready(&self) -> bool {
        let mut ready = libc::pollfd {
            fd: self.fd.0,
            events: libc::POLLIN,
            revents: 0,
        };
        let mut count = 0u64;
        let (to, len) = (&raw mut count as usize, size_of_val(&count));
        calls::is_ready(&mut ready) == Some(true)
            // SAFETY: the call reads into a variable on the stack, whose length it gets.
            && unsafe { calls::raw(libc::SYS_read, [self.fd.0 as usize, to, len, 0, 0, 0]) } == len as isize
            && count != 0
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.0
    }
}

fn duplicate(fd: i32) -> Result<Own> {
    let command = libc::F_DUPFD_CLOEXEC as usize;
    let above = |first: i32| {
        let arguments = [fd as usize, command, first as usize, 0, 0, 0];
        // SAFETY: the call takes no pointer, and returns a new descriptor or an error.
        unsafe { calls::make(Call::Duplicate, arguments) }
    };
    let own = match above(FIRST_OWN) {
        // The client's limit of descriptors is below FIRST_OWN, or all numbers from FIRST_OWN on are in use.
        Err(libc::EINVAL | libc::EMFILE) => above(0),
        own => own,
    };
    own.map(|own| Own(own as RawFd)).map_err(Error::new)
}

/// Returns the kernel's id of the eventfd that `fd` refers to. `None`: `fd` refers to no eventfd.
fn id(fd: RawFd) -> Option<u64> {
    // The path is on the stack, because the heap may be exhausted.
    let mut path = [0; 40];
    write!(&mut path[..], "/proc/self/fdinfo/{fd}").ok()?;
    let mut text = [0; 512];
    let text = procfs::read_small(CStr::from_bytes_until_nul(&path).ok()?, &mut text);
    (text
        .lines()
        .find_map(|line| line.strip_prefix("eventfd-id:")))?
    .trim()
    .parse()
    .ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{FromRawFd, OwnedFd};

    fn eventfd(flags: i32) -> OwnedFd {
        // SAFETY: the call takes no pointer.
        let fd = unsafe { libc::eventfd(0, flags) };
        assert!(fd >= 0);
        // SAFETY: the descriptor is new, and nothing else owns it.
        unsafe { OwnedFd::from_raw_fd(fd) }
    }

    #[test]
    fn two_numbers_of_one_eventfd_are_the_same() {
        let (one, other) = (eventfd(0), eventfd(0));
        let again = duplicate(one.as_raw_fd()).unwrap();
        let taken = EventFd::take(one.as_raw_fd()).unwrap();
        assert!(taken.is(&EventFd::take(again.0).unwrap()));
        assert!(!taken.is(&EventFd::take(other.as_raw_fd()).unwrap()));
    }

    #[test]
    fn nothing_else_is_an_eventfd() {
        assert_eq!(EventFd::take(-1).unwrap_err().errno(), libc::EBADF);
        let file = std::fs::File::open("/dev/null").unwrap();
        let error = EventFd::take(file.as_raw_fd()).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
        // The standard library's `custom_flags` drops O_PATH where the C library is musl.
        // SAFETY: the path ends with NUL.
        let path = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_PATH) };
        assert!(path >= 0);
        // SAFETY: the descriptor has just been opened, and nothing else owns it.
        let path = unsafe { OwnedFd::from_raw_fd(path) };
        let error = EventFd::take(path.as_raw_fd()).unwrap_err();
        assert_eq!(error.errno(), libc::EBADF);
    }

    #[test]
    fn a_full_counter_and_an_empty_one_make_nobody_wait() {
        let fd = eventfd(0);
        let event = EventFd::take(fd.as_raw_fd()).unwrap();
        assert!(!event.drain());
        event.signal();
        event.signal();
        assert!(event.drain());
        assert!(!event.drain());
        let most = (u64::MAX - 1).to_ne_bytes();
        // SAFETY: the call gets a live array and the array's length.
        let written = unsafe { libc::write(fd.as_raw_fd(), most.as_ptr().cast(), most.len()) };
        assert_eq!(written, 8);
        event.signal();
        assert!(event.drain());
    }
}
