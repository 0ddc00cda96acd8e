//! `/dev/kvm` and KVM's module parameters, for programs that open files.

use slat_kvm::ioctl::Object;
use slat_kvm::system::System;
use std::ffi::{CStr, c_char, c_int};
use std::io::{Seek, Write};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use crate::table;

/// What a path means to slat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Special {
    /// `/dev/kvm`.
    Device,
    /// A module parameter: its name and its text.
    Parameter(&'static str, String),
}

/// What the path means, if anything. The path may be null or end anywhere in bad memory; then the kernel shall say so.
pub fn special(path: *const c_char) -> Option<Special> {
    const DEVICE: &[u8] = b"/dev/kvm\0";
    const PARAMETERS: &[&str] = &[
        "/sys/module/kvm/parameters/",
        "/sys/module/kvm_intel/parameters/",
        "/sys/module/kvm_amd/parameters/",
    ];
    const SYS: &[u8] = b"/sys/modu";
    // Nearly every path is done with after a few bytes. One after the other: it may end before a page that is not there.
    let (mut device, mut sys) = (true, true);
    for index in 0..DEVICE.len() {
        let byte = byte_at(path.cast::<u8>().wrapping_add(index))?;
        device &= byte == DEVICE[index];
        sys &= byte == SYS[index];
        if !device && !sys {
            return None;
        }
    }
    // From here on the guarded accesses are wanted: whoever asks for KVM gets the handlers.
    crate::prepare().ok()?;
    if device {
        return Some(Special::Device);
    }
    // SAFETY: readable so far; a C string by the caller's contract.
    let path = unsafe { CStr::from_ptr(path) }.to_str().ok()?;
    let name = PARAMETERS
        .iter()
        .find_map(|start| path.strip_prefix(start))?;
    let (name, value) = slat_kvm::parameters::read(name)?;
    Some(Special::Parameter(name, value + "\n"))
}

/// One byte of the client's, if it can be read. Guarded where the handlers are in place already; before that, the kernel is
/// asked: a program that never comes near KVM shall keep its handlers to itself.
fn byte_at(address: *const u8) -> Option<u8> {
    if crate::is_prepared() {
        // SAFETY: a guarded load may be made at any address.
        return unsafe { slat_guard::load(address) }.ok();
    }
    // The kernel copies the signal set in before it looks at the first argument, which is none that exists: EFAULT if the
    // eight aligned bytes around this one cannot be read, EINVAL if they can (and
    // success for the null pointer, which is no set).
    let start = (address as usize) & !7;
    // SAFETY: a call that changes nothing.
    let answer =
        unsafe { crate::real::raw(libc::SYS_rt_sigprocmask, [usize::MAX, start, 0, 8, 0, 0]) };
    if answer != -(libc::EINVAL as isize) {
        return None;
    }
    // SAFETY: readable a moment ago, and a C string by the contract of the function that was called.
    Some(unsafe { address.read_volatile() })
}

/// Opens what a path means. Returns the descriptor.
pub fn open(special: &Special, flags: c_int) -> Result<isize, i32> {
    let close_on_exec = flags & libc::O_CLOEXEC != 0;
    match special {
        Special::Device => {
            crate::prepare()?;
            slat_kvm::policy::current().map_err(|error| error.errno())?;
            let fd = System::descriptor(close_on_exec).map_err(|error| error.errno())?;
            adopt(fd, Object::system())
        }
        Special::Parameter(name, text) => {
            let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
            if writes && !slat_kvm::parameters::is_writable(name) {
                return Err(libc::EACCES);
            }
            let fd = slat_kvm::run_page::unsealed_memfd("kvm-parameter\0", close_on_exec)
                .map_err(|error| error.errno())?;
            let mut file = std::fs::File::from(fd);
            file.write_all(text.as_bytes())
                .and_then(|()| file.rewind())
                .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
            if writes {
                return adopt(file.into(), Object::Parameter(name));
            }
            Ok(file.into_raw_fd() as isize)
        }
    }
}

/// A write of `len` bytes to a parameter that was opened for it.
pub fn write_parameter(name: &str, from: *const u8, len: usize) -> Result<isize, i32> {
    /// As much as such a file takes.
    const PAGE: usize = 4096;
    let mut text = vec![0; len.min(PAGE)];
    // SAFETY: a guarded copy into a live buffer.
    unsafe { slat_guard::copy_in(&mut text, from) }.map_err(|_| libc::EFAULT)?;
    let text = std::str::from_utf8(&text).map_err(|_| libc::EINVAL)?;
    let _inside = slat_kvm::thread::Inside::enter();
    slat_kvm::parameters::write(name, text).map_err(|error| error.errno())?;
    Ok(text.len() as isize)
}

/// Puts an object and its descriptor together.
pub fn adopt(fd: OwnedFd, object: Object) -> Result<isize, i32> {
    let fd = fd.into_raw_fd();
    if table::insert(fd, object) {
        return Ok(fd as isize);
    }
    // SAFETY: ours, from `into_raw_fd`.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Err(libc::EMFILE)
}

/// What `stat` says of `/dev/kvm`.
pub fn stat() -> libc::stat {
    // SAFETY: all-zero is a valid `stat`.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    stat.st_mode = libc::S_IFCHR | 0o666;
    stat.st_nlink = 1;
    stat.st_rdev = libc::makedev(10, 232);
    stat.st_blksize = 4096;
    stat
}
