//! The client's eventfds, as irqfds and ioeventfds use them.
//!
//! slat keeps a descriptor of its own for each, as KVM keeps a reference: the client may close its number. Two numbers are the same
//! eventfd if the kernel says the same id for both (`/proc/self/fdinfo`), so that a client can name it by another number later.

use crate::errno::{Error, Result, fail, last};
use std::ffi::CStr;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// One eventfd.
#[derive(Debug)]
pub(crate) struct EventFd {
    fd: OwnedFd,
    id: u64,
}

/// The first number for slat's own descriptors: out of the way of programs that use theirs by number.
const FIRST_OWN: i32 = 512;

impl EventFd {
    /// The eventfd that the client's descriptor `fd` refers to.
    ///
    /// # Errors
    /// `EBADF` when `fd` is not open, `EINVAL` when it refers to something else, `EMFILE`.
    pub(crate) fn take(fd: i32) -> Result<Self> {
        let own = duplicate(fd)?;
        match id(own.as_raw_fd()) {
            Some(id) => Ok(EventFd { fd: own, id }),
            None => fail(libc::EINVAL),
        }
    }

    /// Whether both are the same eventfd.
    pub(crate) fn is(&self, other: &EventFd) -> bool {
        self.id == other.id
    }

    /// Adds 1 to the counter. One that is full stays as it is: whoever polls it is woken anyway.
    pub(crate) fn signal(&self) {
        let one = 1u64.to_ne_bytes();
        let mut room = libc::pollfd {
            fd: self.fd.as_raw_fd(),
            events: libc::POLLOUT,
            revents: 0,
        };
        // SAFETY: plain calls on buffers of the sizes given. A counter that is full would make a blocking descriptor wait for a
        // reader, so it is asked first; only its last unit can be lost to a race, and KVM's own signal never waits either.
        unsafe {
            if libc::poll(&mut room, 1, 0) == 1 && room.revents & libc::POLLOUT != 0 {
                libc::write(self.fd.as_raw_fd(), one.as_ptr().cast(), one.len());
            }
        }
    }

    /// Takes the whole counter. Returns whether it was not zero. Never waits.
    pub(crate) fn drain(&self) -> bool {
        let mut count = 0u64;
        let into = libc::iovec {
            iov_base: (&raw mut count).cast(),
            iov_len: size_of_val(&count),
        };
        // SAFETY: a read of 8 bytes into `count`.
        let read = unsafe { libc::preadv2(self.fd.as_raw_fd(), &into, 1, -1, libc::RWF_NOWAIT) };
        read == size_of_val(&count) as isize && count != 0
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn duplicate(fd: i32) -> Result<OwnedFd> {
    let mut own = -1;
    for first in [FIRST_OWN, 0] {
        // SAFETY: a plain call; the answer is a new descriptor or an error.
        own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, first) };
        // A limit below the first number is EINVAL.
        if own >= 0 || last().errno() == libc::EBADF {
            break;
        }
    }
    if own < 0 {
        return Err(Error::last());
    }
    // SAFETY: new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}

/// The number that the kernel knows the eventfd by. `None` when it is none.
fn id(fd: RawFd) -> Option<u64> {
    // Without the heap, which may be empty.
    let mut path = [0; 40];
    write!(&mut path[..], "/proc/self/fdinfo/{fd}").ok()?;
    let path = CStr::from_bytes_until_nul(&path).ok()?;
    // SAFETY: a path that ends with 0; the answer is a new descriptor or an error.
    let file = unsafe {
        let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        (file >= 0).then(|| OwnedFd::from_raw_fd(file))?
    };
    let mut text = [0; 512];
    // SAFETY: the buffer and its length.
    let read = unsafe { libc::read(file.as_raw_fd(), text.as_mut_ptr().cast(), text.len()) };
    let text = std::str::from_utf8(text.get(..usize::try_from(read).ok()?)?).ok()?;
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

    fn eventfd(flags: i32) -> OwnedFd {
        // SAFETY: a plain call.
        let fd = unsafe { libc::eventfd(0, flags) };
        assert!(fd >= 0);
        // SAFETY: new.
        unsafe { OwnedFd::from_raw_fd(fd) }
    }

    #[test]
    fn two_numbers_of_one_eventfd_are_the_same() {
        let (one, other) = (eventfd(0), eventfd(0));
        let again = duplicate(one.as_raw_fd()).unwrap();
        let taken = EventFd::take(one.as_raw_fd()).unwrap();
        assert!(taken.is(&EventFd::take(again.as_raw_fd()).unwrap()));
        assert!(!taken.is(&EventFd::take(other.as_raw_fd()).unwrap()));
    }

    #[test]
    fn nothing_else_is_an_eventfd() {
        assert_eq!(EventFd::take(-1).unwrap_err().errno(), libc::EBADF);
        let file = std::fs::File::open("/dev/null").unwrap();
        let error = EventFd::take(file.as_raw_fd()).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
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
        // SAFETY: 8 bytes of a live array.
        let written = unsafe { libc::write(fd.as_raw_fd(), most.as_ptr().cast(), most.len()) };
        assert_eq!(written, 8);
        event.signal();
        assert!(event.drain());
    }
}
