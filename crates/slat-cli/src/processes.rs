//! Finds the user's processes that run VMs on slat, and sends them questions ([`slat_kvm::publish`]).

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The maximum time to wait for a reply. A process that is stopped does not reply.
const PATIENCE: Duration = Duration::from_secs(2);

/// The message when no process with a VM is found.
pub const NOBODY: &str = "No VM runs on slat. Start one: slat run -- PROGRAM\n";

/// A process with VMs on slat, and its reply to a question.
pub struct Process<A> {
    /// The process's id.
    pub pid: i32,
    /// The first word of the process's command line, without directories.
    pub command: String,
    /// The time at which the process was asked.
    pub at: Instant,
    /// The process's reply, or the reason why there is none.
    pub answer: Result<A, String>,
}

/// Returns the effective user number of this process.
pub fn user() -> u32 {
    // SAFETY: the call has no arguments, and cannot fail.
    unsafe { libc::geteuid() }
}

/// Opens a directory of sockets, but only if it belongs to the user and no other user has access to it.
fn open(path: &Path) -> Option<File> {
    let directory = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(path)
        .ok()?;
    let found = directory.metadata().ok()?;
    (found.st_uid() == user() && found.st_mode() & 0o077 == 0).then_some(directory)
}

/// A question to a process, and the function that parses the reply.
pub struct Question<A> {
    /// The text that is sent to a process.
    pub words: String,
    /// Parses the lines of the reply between the first line and the last one. Returns `None` if a line does not have
    /// the expected form.
    pub read: fn(&[&str]) -> Option<A>,
}

impl<A> Question<A> {
    /// Parses a reply.
    ///
    /// # Errors
    /// The end of a sentence about the process: its slat has another version, or its reply is incomplete.
    pub fn parse(&self, text: &str) -> Result<A, String> {
        let lines: Vec<_> = text.lines().collect();
        let version = format!("slat {}", slat_kvm::publish::VERSION);
        if lines.first() != Some(&version.as_str()) {
            return Err("runs on another version of slat".to_owned());
        }
        let answer = match lines[1..] {
            // The last line must be `end`: without this check, a truncated line could look like a shorter valid line.
            [ref lines @ .., "end"] if text.ends_with('\n') => (self.read)(lines),
            _ => None,
        };
        answer.ok_or("has given only a part of an answer".to_owned())
    }
}

/// Asks all processes of the user, or only the process `wanted`. The results are ordered by process id.
pub fn ask<A>(question: &Question<A>, wanted: Option<i32>) -> Vec<Process<A>> {
    let asked = each(wanted, |pid, stream| ask_one(question, pid, stream));
    asked.into_iter().map(|(_, process)| process).collect()
}

/// Connects to a process of the user. Returns `None` if the process has no VM on slat, or belongs to another user.
pub fn connect(pid: i32) -> Option<UnixStream> {
    let (_, stream) = each(Some(pid), |_, stream| stream).pop()?;
    Some(stream)
}

/// Connects to each process of the user, or only to the process `wanted`, and calls `visit` with the connection.
/// Removes the sockets of processes that have ended. The results are ordered by process id.
fn each<T>(wanted: Option<i32>, mut visit: impl FnMut(i32, UnixStream) -> T) -> Vec<(i32, T)> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR");
    let directories: BTreeSet<PathBuf> =
        slat_kvm::publish::directories(runtime.as_deref(), user()).collect();
    let mut visited = Vec::new();
    for directory in directories.iter().filter_map(|path| open(path)) {
        // A path through the descriptor always leads to the directory that was checked, even if the directory's own
        // path now leads elsewhere. The path is also short enough for the address of a socket, which holds at most
        // 107 bytes.
        let path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
        let Ok(entries) = fs::read_dir(&path) else {
            continue;
        };
        let names: Vec<OsString> = entries.flatten().map(|entry| entry.file_name()).collect();
        for name in names {
            if name.as_encoded_bytes().first() != Some(&b'.') {
                let found = open_one(&path.join(name), wanted);
                visited.extend(found.map(|(pid, stream)| (pid, visit(pid, stream))));
            }
        }
    }
    visited.sort_by_key(|(pid, _)| *pid);
    // The same runtime directory may be named twice, so a process may be found twice.
    visited.dedup_by_key(|(pid, _)| *pid);
    visited
}

/// Connects to the process that listens at this socket. `None`: no process listens, or the process is not `wanted`.
fn open_one(socket: &Path, wanted: Option<i32>) -> Option<(i32, UnixStream)> {
    let stream = match UnixStream::connect(socket) {
        Ok(stream) => stream,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            // The process has ended or has executed another program, so no process will ever listen at this socket
            // again.
            let _ = fs::remove_file(socket);
            return None;
        }
        Err(_) => return None,
    };
    let pid = listener(&stream)?;
    wanted
        .is_none_or(|wanted| wanted == pid)
        .then_some((pid, stream))
}

/// Sends a question to a process, and reads the reply.
fn ask_one<A>(question: &Question<A>, pid: i32, mut stream: UnixStream) -> Process<A> {
    let answer = (|| {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(format!("{}\n", question.words).as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })();
    let answer = match answer {
        Ok(text) => question.parse(&text),
        Err(error) => Err(unanswered(&error)),
    };
    Process {
        pid,
        command: command(pid),
        at: Instant::now(),
        answer,
    }
}

fn unanswered(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            "does not answer; it may be stopped".to_owned()
        }
        _ => format!("does not answer: {error}"),
    }
}

/// Returns the id of the process that listens at the other end of `stream`, from the kernel. `None`: that process is in
/// another PID namespace.
fn listener(stream: &UnixStream) -> Option<i32> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the struct has this length, and the socket is live.
    let failed = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &mut len,
        )
    };
    (failed == 0 && peer.pid > 0).then_some(peer.pid)
}

fn command(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
    let name = first.rsplit(|byte| *byte == b'/').next();
    // The program chose this name itself. It is shown on a terminal, so control characters are removed.
    String::from_utf8_lossy(name.unwrap_or_default())
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// Returns a sentence that explains why `pid` is not among the user's processes with VMs.
pub fn why_not(pid: i32) -> String {
    let Ok(found) = fs::metadata(format!("/proc/{pid}")) else {
        return format!("there is no process {pid}");
    };
    if found.st_uid() != user() {
        return format!(
            "process {pid} belongs to another user (id {}): slat shows only your own",
            found.st_uid()
        );
    }
    format!(
        "process {pid} has no VM on slat: it was not started by `slat run`, or has created none"
    )
}
