//! The thread that serves one userfaultfd for other processes, and notices when the last copy of it is closed.
//!
//! Another process sends the descriptor of a new channel through its copy of the userfaultfd
//! ([`remote`](super::remote)). Each message of a channel is a request, with the content of pages after it. The reply
//! is the errno, or 0, and the request's structure.

use super::Token;
use super::requests::{COPY, Request};
use crate::real::{Opened, kernel};
use slat_host::process::PerProcess;
use slat_host::registered::{self, Handler};
use slat_kvm::background::Background;
use slat_kvm::notify;
use std::ffi::{CStr, c_int};
use std::sync::{Mutex, PoisonError};

/// The greatest number of bytes of content in one message.
pub(super) const MOST_CONTENT: usize = 64 << 10;

/// A reply: the errno or 0, and the structure.
pub(super) type Reply = [u64; 6];

/// A userfaultfd that this process has made.
pub(super) struct Served {
    token: Token,
    handler: Handler,
    /// slat's end of the pair.
    socket: Mutex<Option<Opened>>,
}

/// The userfaultfds of this process that have copies.
static ALL: PerProcess<Mutex<Vec<&'static Served>>> = PerProcess::new();

fn all() -> std::sync::MutexGuard<'static, Vec<&'static Served>> {
    ALL.get().lock().unwrap_or_else(PoisonError::into_inner)
}

impl Served {
    /// Adds a userfaultfd. It is never freed, because look-ups of its memory may still use it.
    pub(super) fn new(token: Token, socket: Opened) -> &'static Self {
        let served = Box::leak(Box::new(Served {
            token,
            handler: Handler::new(socket.fd()),
            socket: Mutex::new(Some(socket)),
        }));
        all().push(served);
        served
    }

    /// Returns the userfaultfd with this number, if this process has made it.
    pub(super) fn find(token: Token) -> Option<&'static Self> {
        all().iter().find(|served| served.token == token).copied()
    }

    pub(super) fn handler(&'static self) -> &'static Handler {
        &self.handler
    }

    /// Ends all registrations, and removes the userfaultfd.
    pub(super) fn end(&'static self) {
        self.handler.close();
        for range in registered::release_all(&self.handler) {
            notify::around(range.clone(), || registered::unregister(&range));
        }
        all().retain(|served| served.token != self.token);
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        drop(socket.take());
    }

    /// Waits for messages. Returns for slat's end of the pair, and then for each channel, whether there may be one.
    /// `None`: the call has failed.
    fn wait(&self, channels: &[Opened]) -> Option<Vec<bool>> {
        // `accept` waits itself, for its one socket. So a program that serves its own userfaultfd may have a filter
        // that forbids ppoll to the thread that makes the userfaultfd, and so to this thread.
        if channels.is_empty() {
            return Some(vec![true]);
        }
        let sockets = [self.handler.socket].into_iter();
        let sockets = sockets.chain(channels.iter().map(Opened::fd));
        let mut polled: Vec<_> = sockets
            .map(|fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        // SAFETY: the array is live.
        let answer = unsafe {
            let (none, size) = (0usize, 8usize);
            kernel!(
                libc::SYS_ppoll,
                polled.as_mut_ptr(),
                polled.len(),
                none,
                none,
                size
            )
        };
        match answer {
            Ok(_) | Err(libc::EINTR) => Some(polled.iter().map(|one| one.revents != 0).collect()),
            Err(_) => None,
        }
    }

    /// Receives the descriptor of a new channel. `None`: all copies of the userfaultfd are closed.
    fn accept(&self) -> Option<Opened> {
        loop {
            match receive_descriptor(self.handler.socket) {
                Ok(Some(channel)) => return Some(channel),
                Err(libc::EINTR) | Ok(None) => {}
                Err(_) => return None,
            }
        }
    }
}

impl Background for Served {
    const NAME: &'static CStr = c"slat-userfault";
    const WITHOUT: &'static str = "userfaultfd is refused";

    fn run(&'static self) {
        let mut channels: Vec<Opened> = Vec::new();
        let mut message = vec![0u8; size_of::<Request>() + MOST_CONTENT];
        while let Some(ready) = self.wait(&channels) {
            let mut index = 0;
            channels.retain(|channel| {
                index += 1;
                !ready[index] || self.serve(channel, &mut message)
            });
            if ready[0] {
                let Some(channel) = self.accept() else { break };
                // The other process keeps a copy of slat's end, so that its own end stays open when this process ends:
                // the kernel's userfaultfd does not tell of that, either.
                if send_descriptor(channel.fd(), self.handler.socket).is_ok() {
                    channels.push(channel);
                }
            }
        }
        self.end();
    }
}

impl Served {
    /// Serves the next request of a channel. Returns `false` if the other process has closed the channel.
    fn serve(&'static self, channel: &Opened, message: &mut [u8]) -> bool {
        let (start, len) = (message.as_mut_ptr(), message.len());
        // SAFETY: the buffer is live.
        let received = unsafe { kernel!(libc::SYS_recvfrom, channel.fd(), start, len, 0, 0, 0) };
        let received = match received {
            Ok(received) => received as usize,
            Err(errno) => return errno == libc::EINTR,
        };
        let Some(content) = received.checked_sub(size_of::<Request>()) else {
            return false;
        };
        // SAFETY: the message begins with a request, which consists of integers.
        let mut request: Request = unsafe { start.cast::<Request>().read_unaligned() };
        let source = start as usize + size_of::<Request>();
        let is_whole = request.number as u32 != COPY || request.words[2] == content as u64;
        let result = match is_whole {
            true => request.carry_out(&self.handler, source),
            false => Err(libc::EINVAL),
        };
        let mut reply: Reply = [0; 6];
        reply[0] = result.err().unwrap_or(0) as u64;
        reply[1..].copy_from_slice(&request.words);
        let (flags, len) = (libc::MSG_NOSIGNAL, size_of::<Reply>());
        // SAFETY: the reply is live.
        unsafe {
            kernel!(
                libc::SYS_sendto,
                channel.fd(),
                reply.as_ptr(),
                len,
                flags,
                0,
                0
            )
        }
        .is_ok()
    }
}

/// The control message that passes one descriptor.
#[repr(C)]
struct Control {
    header: libc::cmsghdr,
    fd: c_int,
    _rest: c_int,
}

/// Sends one byte and a copy of the descriptor `fd`.
pub(super) fn send_descriptor(socket: c_int, fd: c_int) -> Result<(), i32> {
    let mut control = Control {
        header: libc::cmsghdr {
            cmsg_len: (size_of::<libc::cmsghdr>() + size_of::<c_int>()) as _,
            cmsg_level: libc::SOL_SOCKET,
            cmsg_type: libc::SCM_RIGHTS,
        },
        fd,
        _rest: 0,
    };
    with_message(&mut control, |message| {
        // SAFETY: the message and what it refers to are live.
        unsafe { kernel!(libc::SYS_sendmsg, socket, message, libc::MSG_NOSIGNAL) }.map(drop)
    })
}

/// Receives a descriptor that [`send_descriptor`] has sent. `Ok(None)`: the message has none.
///
/// # Errors
/// `ENOTCONN` if the other end is closed; the kernel's errno.
pub(super) fn receive_descriptor(socket: c_int) -> Result<Option<Opened>, i32> {
    // SAFETY: all-zero is a valid value.
    let mut control: Control = unsafe { std::mem::zeroed() };
    let received = with_message(&mut control, |message| {
        // SAFETY: the message and what it refers to are live.
        unsafe { kernel!(libc::SYS_recvmsg, socket, message, libc::MSG_CMSG_CLOEXEC) }
    })?;
    match received {
        0 => Err(libc::ENOTCONN),
        _ if control.header.cmsg_type != libc::SCM_RIGHTS || control.header.cmsg_len == 0 => {
            Ok(None)
        }
        // SAFETY: the kernel has just opened this descriptor, and no other code owns it.
        _ => Ok(unsafe { Opened::by(Ok(control.fd as isize)) }),
    }
}

/// Calls `call` with a message of one byte and `control`.
fn with_message<T>(control: &mut Control, call: impl FnOnce(*mut libc::msghdr) -> T) -> T {
    let mut byte = 0u8;
    let mut part = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    // SAFETY: all-zero is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = std::ptr::from_mut(control).cast();
    message.msg_controllen = size_of::<Control>() as _;
    call(&raw mut message)
}
