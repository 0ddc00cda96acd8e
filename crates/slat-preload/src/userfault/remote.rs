//! Requests on a userfaultfd that another process on slat has made.

use super::requests::{COPY, Request, outcome};
use super::server::{MOST_CONTENT, Reply, receive_descriptor, send_descriptor};
use super::{Token, pair};
use crate::real::{Opened, kernel};
use slat_host::process::PerProcess;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

/// A connection to the process that has made a userfaultfd.
struct Channel {
    token: Token,
    socket: Mutex<Opened>,
    /// A copy of the other process's end of the userfaultfd.
    _end: Opened,
}

/// The connections of this process.
static CHANNELS: PerProcess<Mutex<Vec<Arc<Channel>>>> = PerProcess::new();

/// Returns the connection for the userfaultfd `fd`, made at the first request.
fn channel(fd: c_int, token: Token) -> Result<Arc<Channel>, i32> {
    let mut channels = CHANNELS
        .get()
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = channels.iter().find(|channel| channel.token == token) {
        return Ok(known.clone());
    }
    let [own, others] = pair(libc::SOCK_SEQPACKET)?;
    send_descriptor(fd, others.fd()).map_err(|_| libc::ESRCH)?;
    drop(others);
    let own = own.moved_up();
    let end = loop {
        match receive_descriptor(own.fd()) {
            Ok(Some(end)) => break end,
            Ok(None) | Err(libc::EINTR) => {}
            // The process has ended.
            Err(_) => return Err(libc::ESRCH),
        }
    };
    let channel = Arc::new(Channel {
        token,
        socket: Mutex::new(own),
        _end: end.moved_up(),
    });
    channels.push(channel.clone());
    Ok(channel)
}

/// Forgets the connection to a process that has ended.
fn forget(token: Token) {
    let mut channels = CHANNELS
        .get()
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    channels.retain(|channel| channel.token != token);
}

/// Carries out `request` in the process that has made the userfaultfd `fd`.
///
/// # Errors
/// The request's errno; `ESRCH` if that process has ended.
pub(super) fn carry_out(fd: c_int, token: Token, request: &mut Request) -> Result<(), i32> {
    let channel = channel(fd, token)?;
    let socket = channel
        .socket
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let socket = socket.fd();
    if request.number as u32 != COPY {
        return exchange(socket, token, request, 0);
    }
    let [to, from, len, mode, _] = request.words;
    let mut done = 0;
    let mut failed = None;
    while done < len && failed.is_none() {
        let part = (len - done).min(MOST_CONTENT as u64);
        request.words = [to + done, from + done, part, mode, 0];
        match exchange(socket, token, request, part as usize) {
            Ok(()) => done += part,
            Err(errno) => {
                // After an error with a positive number of bytes, this part was provided up to there.
                done += (request.words[4] as i64).max(0) as u64;
                failed = Some(errno);
            }
        }
    }
    if len == 0 {
        return Err(libc::EINVAL);
    }
    let (copied, result) = outcome(done as usize, failed);
    request.words = [to, from, len, mode, copied];
    result
}

/// Sends a request with `content` bytes at its address of content, and receives the reply.
fn exchange(socket: c_int, token: Token, request: &mut Request, content: usize) -> Result<(), i32> {
    let mut parts = [
        libc::iovec {
            iov_base: std::ptr::from_mut(request).cast(),
            iov_len: size_of::<Request>(),
        },
        libc::iovec {
            iov_base: request.source() as *mut _,
            iov_len: content,
        },
    ];
    let mut reply: Reply = [0; 6];
    let (start, len) = (reply.as_mut_ptr(), size_of::<Reply>());
    // SAFETY: all-zero is a valid value. The kernel checks the memory of the content; all other memory is live.
    let received = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len();
        let message = &raw const message;
        let sent = again(|| kernel!(libc::SYS_sendmsg, socket, message, libc::MSG_NOSIGNAL));
        match sent {
            Err(libc::EFAULT) => return Err(libc::EFAULT),
            Err(_) => Ok(0),
            Ok(_) => again(|| kernel!(libc::SYS_recvfrom, socket, start, len, 0, 0, 0)),
        }
    };
    if received != Ok(len as isize) {
        forget(token);
        return Err(libc::ESRCH);
    }
    request.words.copy_from_slice(&reply[1..]);
    match reply[0] {
        0 => Ok(()),
        errno => Err(errno as i32),
    }
}

/// Makes a call again while signals interrupt it.
fn again(call: impl Fn() -> Result<isize, i32>) -> Result<isize, i32> {
    loop {
        match call() {
            Err(libc::EINTR) => {}
            result => return result,
        }
    }
}
