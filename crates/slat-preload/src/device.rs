//! Opens `/dev/kvm` and KVM's module parameters for the program.

use crate::arch::calls::O_LARGEFILE;
use slat_host::procfs;
use slat_kvm::ioctl::Object;
use slat_kvm::system::System;
use slat_process::file_size::limited;
use std::ffi::{c_int, c_uint};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};

use crate::paths::DescriptorPath;
use crate::real::raw;
use crate::table;

/// The arguments of the open(2) or openat2(2) with which a client opens a file. openat2(2) refuses unknown flags.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct How {
    /// The flags `O_…` with which the file is opened.
    pub flags: u64,
    /// The mode of a file that the call creates.
    pub mode: u64,
    /// The flags `RESOLVE_…` of openat2(2).
    pub resolve: u64,
}

/// The call with which a client opens a file.
#[derive(Clone, Copy, Debug)]
pub enum Opening {
    /// The client opens the file by open(2) or a similar function.
    Open(How),
    /// The client opens the file by openat2(2).
    Open2(How),
}

impl Opening {
    /// Makes an `Opening` with the arguments of open(2).
    pub fn open(flags: c_int, mode: c_uint) -> Self {
        Opening::Open(How {
            flags: u64::from(flags as u32),
            mode: mode.into(),
            resolve: 0,
        })
    }

    /// Returns the arguments of the call that opens the file: flags and mode.
    pub fn how(self) -> How {
        let (Opening::Open(how) | Opening::Open2(how)) = self;
        how
    }

    fn has(self, flag: c_int) -> bool {
        self.how().flags & flag as u64 == flag as u64
    }

    /// Whether the call opens only directories (`O_DIRECTORY`).
    pub fn wants_directory(self) -> bool {
        self.has(libc::O_DIRECTORY)
    }

    /// Whether the call creates a file that does not exist.
    pub fn creates(self) -> bool {
        self.has(libc::O_CREAT)
    }

    /// Whether the opened file can be written to.
    pub fn writes(self) -> bool {
        self.how().flags & libc::O_ACCMODE as u64 != 0
    }

    /// Opens the file that `fd` refers to once more, with the client's arguments. Does not create or truncate the file,
    /// and does not open a directory. Returns the kernel's error for arguments that are invalid for a device.
    fn again(self, fd: &OwnedFd) -> Result<OwnedFd, i32> {
        let how = self.how();
        // The path in `/proc` is a symbolic link, so `O_NOFOLLOW` would fail. `O_TRUNC` would truncate the file.
        let flags = how.flags & !((libc::O_NOFOLLOW | libc::O_TRUNC) as u64);
        let path = DescriptorPath::new(fd.as_raw_fd());
        let (begin, path) = procfs::reached_by(path.as_c_str());
        let (begin, path) = (begin as usize, path.as_ptr() as usize);
        // SAFETY: the path ends with NUL, and the struct is live.
        let opened = unsafe {
            match self {
                Opening::Open(_) => {
                    let arguments = [begin, path, flags as usize, how.mode as usize, 0, 0];
                    raw(libc::SYS_openat, arguments)
                }
                Opening::Open2(_) => {
                    let how = How {
                        flags,
                        resolve: 0,
                        ..how
                    };
                    let how = &raw const how as usize;
                    raw(
                        libc::SYS_openat2,
                        [begin, path, how, size_of::<How>(), 0, 0],
                    )
                }
            }
        };
        if opened < 0 {
            return Err(-opened as i32);
        }
        // SAFETY: the kernel has just opened this descriptor, and no other code owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(opened as c_int) })
    }
}

/// Opens `/dev/kvm`. Returns the descriptor.
///
/// # Errors
/// The errno that the kernel returns for opening a device with these arguments; `EINVAL` if the policies in the
/// environment are invalid.
pub fn open(opening: Opening) -> Result<isize, i32> {
    crate::prepare()?;
    slat_kvm::policy::current().map_err(|error| error.errno())?;
    let fd = System::descriptor(opening.has(libc::O_CLOEXEC)).map_err(|error| error.errno())?;
    // The memfd is already open for reading and writing, as clients nearly always ask.
    let usual = (libc::O_RDWR | libc::O_CLOEXEC | O_LARGEFILE) as u64;
    let fd = match opening {
        Opening::Open(how) if how.flags & !usual == 0 && how.flags & libc::O_RDWR as u64 != 0 => fd,
        _ => opening.again(&fd)?,
    };
    match opening.has(libc::O_PATH) {
        true => adopt(fd, Object::DevicePath),
        false => adopt(fd, Object::system()),
    }
}

/// Opens a module parameter.
///
/// # Errors
/// `EACCES` for writing a read-only parameter; otherwise the kernel's errno for opening a file with these arguments.
pub fn open_parameter(name: &'static str, opening: Opening) -> Result<isize, i32> {
    let writes = opening.writes();
    if writes && !slat_kvm::parameters::is_writable(name) {
        return Err(libc::EACCES);
    }
    let (name, text) = slat_kvm::parameters::read(name).ok_or(libc::ENOENT)?;
    let fd = slat_kvm::run_page::unsealed_memfd(c"kvm-parameter", true)
        .map_err(|error| error.errno())?;
    let mut file = std::fs::File::from(fd);
    limited(|| file.write_all((text + "\n").as_bytes()))
        .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
    let fd = opening.again(&file.into())?;
    if writes {
        return adopt(fd, Object::Parameter(name));
    }
    Ok(fd.into_raw_fd() as isize)
}

/// Opens the KVM file of the descriptor `fd`, whose link in `/proc` the client opens. `None`: `fd` is not KVM's, or the
/// kernel's own result for such an open is right; so the kernel has to open the file.
pub fn open_again(fd: c_int, opening: Opening) -> Option<Result<isize, i32>> {
    let link = opening.has(libc::O_NOFOLLOW);
    match table::get(fd)?.object() {
        Object::System(_) | Object::DevicePath if !link => Some(open(opening)),
        Object::System(_) | Object::DevicePath | Object::Parameter(_) => None,
        // Files of the other KVM objects cannot be opened again (ENXIO). If the client opens one as a directory, or
        // asks to create it, the kernel returns the right error.
        _ if link || opening.has(libc::O_PATH) => None,
        _ if opening.has(libc::O_DIRECTORY) || opening.has(libc::O_CREAT | libc::O_EXCL) => None,
        _ => Some(Err(libc::ENXIO)),
    }
}

/// Writes `text` to the open parameter `name`. The client has written `text` in one call.
///
/// # Errors
/// `EINVAL` for a value that the parameter does not accept.
pub fn write_parameter(name: &str, text: &[u8]) -> Result<isize, i32> {
    let text = std::str::from_utf8(text).map_err(|_| libc::EINVAL)?;
    slat_kvm::parameters::write(name, text).map_err(|error| error.errno())?;
    Ok(text.len() as isize)
}

fn adopt(fd: OwnedFd, object: Object) -> Result<isize, i32> {
    match table::adopt(fd, object) {
        Ok(fd) => Ok(fd as isize),
        Err(error) => Err(error.errno()),
    }
}
