//! The connection to GDB: a TCP port, a Unix socket, or this process's standard input and output.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::str::FromStr;

use gdbstub::conn;

/// The address at which GDB connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// ADDRESS:PORT
    Tcp(String),
    /// A path. It contains a slash.
    Unix(PathBuf),
    /// Standard input and output, because GDB has started this process: `target remote | slat gdb`.
    Standard,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "-" {
            return Ok(Address::Standard);
        }
        if text.contains('/') {
            return Ok(Address::Unix(text.into()));
        }
        let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
        if port.parse::<u16>().is_err() {
            return Err("give PORT, ADDRESS:PORT, a path with a slash, or -".to_owned());
        }
        // Without a host, the address is 127.0.0.1.
        let host = if host.is_empty() { "127.0.0.1" } else { host };
        Ok(Address::Tcp(format!("{host}:{port}")))
    }
}

/// A socket, or standard input, on which this process waits for GDB.
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
    Standard,
}

impl Listener {
    /// Opens the socket and begins to listen.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn open(address: &Address) -> Result<Self, String> {
        let opened = match address {
            Address::Tcp(address) => TcpListener::bind(address).map(Listener::Tcp),
            Address::Unix(path) => UnixListener::bind(path).and_then(|listener| {
                fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
                Ok(Listener::Unix(listener, path.clone()))
            }),
            Address::Standard => Ok(Listener::Standard),
        };
        opened.map_err(|error| {
            let name = match address {
                Address::Tcp(address) => address.clone(),
                Address::Unix(path) => path.display().to_string(),
                Address::Standard => String::new(),
            };
            let remedy = match error.kind() {
                ErrorKind::AddrInUse => "it is in use: name another one by --listen",
                _ => "name another one by --listen",
            };
            format!("cannot listen at {name}: {error}; {remedy}")
        })
    }

    /// Returns the address as an argument for GDB's `target remote`.
    pub fn address(&self) -> String {
        match self {
            Listener::Tcp(listener) => match listener.local_addr() {
                Ok(address) if address.ip().is_loopback() => format!(":{}", address.port()),
                Ok(address) => address.to_string(),
                Err(_) => String::new(),
            },
            Listener::Unix(_, path) => path.display().to_string(),
            Listener::Standard => "| slat gdb PID --listen -".to_owned(),
        }
    }

    /// Waits until GDB connects. A second GDB cannot connect later.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn accept(self) -> Result<Connection, String> {
        let stream = match &self {
            Listener::Tcp(listener) => listener.accept().and_then(|(stream, _)| both(stream)),
            Listener::Unix(listener, _) => listener.accept().map(|(stream, _)| stream.into()),
            Listener::Standard => {
                // SAFETY: the descriptors are this process's standard input and output, which no other code here
                // uses. SIGINT is ignored, because a Ctrl-C in GDB's terminal is for GDB.
                return Ok(unsafe {
                    libc::signal(libc::SIGINT, libc::SIG_IGN);
                    Connection::new(
                        OwnedFd::from_raw_fd(libc::STDIN_FILENO),
                        OwnedFd::from_raw_fd(libc::STDOUT_FILENO),
                    )
                });
            }
        };
        let stream: io::Result<OwnedFd> = stream;
        let pair = stream.and_then(|stream| Ok((stream.try_clone()?, stream)));
        let (input, output) = pair.map_err(|error| format!("gdb could not connect: {error}"))?;
        Ok(Connection::new(input, output))
    }
}

/// Turns off the delay of small packets (TCP_NODELAY). Returns the stream's descriptor.
fn both(stream: TcpStream) -> io::Result<OwnedFd> {
    stream.set_nodelay(true)?;
    Ok(stream.into())
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            let _ = fs::remove_file(path);
        }
    }
}

/// The connection to GDB.
pub struct Connection {
    input: File,
    output: File,
    /// The bytes that GDB has sent and that were not returned yet, in reverse order.
    read: Vec<u8>,
    /// The bytes that the next flush sends to GDB.
    unwritten: Vec<u8>,
}

impl Connection {
    fn new(input: OwnedFd, output: OwnedFd) -> Self {
        Connection {
            input: input.into(),
            output: output.into(),
            read: Vec::new(),
            unwritten: Vec::new(),
        }
    }

    /// Returns the descriptor on which to wait for GDB's next byte. `None`: a byte was already received.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.read.is_empty().then(|| self.input.as_raw_fd())
    }

    /// Drops all received packets except the last one. If GDB gets no reply to its first packet within two seconds, it
    /// sends the packet again. A second reply would then look like the reply to GDB's next packet.
    ///
    /// # Errors
    /// An error says that the connection was closed.
    pub fn keep_last_packet(&mut self) -> io::Result<()> {
        loop {
            let [readable] = wait([Some(self.input.as_raw_fd())], 0)?;
            if !readable {
                break;
            }
            let older = std::mem::take(&mut self.read);
            self.fill()?;
            self.read.extend(older);
        }
        if let Some(last) = self.read.iter().position(|byte| *byte == b'$') {
            self.read.truncate(last + 1);
        }
        Ok(())
    }

    fn fill(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        let len = self.input.read(&mut bytes)?;
        if len == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.read.extend(bytes[..len].iter().rev());
        Ok(())
    }
}

impl conn::Connection for Connection {
    type Error = io::Error;

    fn write(&mut self, byte: u8) -> io::Result<()> {
        self.unwritten.push(byte);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let written = self.output.write_all(&self.unwritten);
        self.unwritten.clear();
        written
    }
}

impl conn::ConnectionExt for Connection {
    fn read(&mut self) -> io::Result<u8> {
        if self.read.is_empty() {
            self.fill()?;
        }
        self.read.pop().ok_or(ErrorKind::UnexpectedEof.into())
    }

    fn peek(&mut self) -> io::Result<Option<u8>> {
        if let Some(descriptor) = self.descriptor() {
            let [readable] = wait([Some(descriptor)], 0)?;
            if readable {
                self.fill()?;
            }
        }
        Ok(self.read.last().copied())
    }
}

/// Waits until one of the descriptors can be read. Waits for at most `milliseconds`, or forever if `milliseconds` is
/// negative. Returns which descriptors can be read. A `None` in place of a descriptor counts as readable.
pub fn wait<const N: usize>(
    descriptors: [Option<RawFd>; N],
    milliseconds: i32,
) -> io::Result<[bool; N]> {
    if descriptors.contains(&None) {
        return Ok(descriptors.map(|descriptor| descriptor.is_none()));
    }
    let mut polled = descriptors.map(|descriptor| libc::pollfd {
        fd: descriptor.unwrap_or(-1),
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: the array has this length.
    let found = unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, milliseconds) };
    match found {
        -1 => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok([false; N]),
            error => Err(error),
        },
        _ => Ok(polled.map(|it| it.revents != 0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_ports_paths_or_standard_input() {
        let tcp = |text: &str| Ok(Address::Tcp(text.to_owned()));
        assert_eq!("1234".parse(), tcp("127.0.0.1:1234"));
        assert_eq!(":0".parse(), tcp("127.0.0.1:0"));
        assert_eq!("[::1]:5".parse(), tcp("[::1]:5"));
        assert_eq!("./a".parse(), Ok(Address::Unix("./a".into())));
        assert_eq!("-".parse(), Ok(Address::Standard));
        for text in ["", "a", "1:b", "70000"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
