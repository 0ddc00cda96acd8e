//! The attributes that `stat` and `readlink` return for KVM's files and descriptors.
//!
//! slat's descriptors refer to memfds, but the client sees the files that KVM's descriptors refer to: `/dev/kvm` is a
//! character device, most others are anonymous inodes. KVM does not determine some values (device and inode numbers,
//! times). For these values slat asks the kernel about a file of the same kind.

use crate::arch::calls;
use crate::paths::{DEVICE, Special};
use crate::real::{Opened, kernel, raw};
use crate::table;
use slat_kvm::ioctl::Object;
use slat_kvm::thread::Section;
use std::ffi::{CStr, c_int};

/// The inode number that slat shows for files that the host lacks. The kernel counts its inode numbers upwards, and
/// does not reach such a large number.
const INODE: libc::ino_t = 0x6b76_6d00;
/// The size that sysfs reports for every file.
pub const SYSFS_SIZE: libc::off_t = 4096;

/// The kind of file that the client sees at a descriptor or path of KVM.
#[derive(Clone, Copy, Debug)]
pub enum Look {
    /// `/dev/kvm`.
    Device,
    /// A VM, a vCPU, statistics, or a device.
    Anonymous,
    /// A guest_memfd, with its descriptor and its size in bytes.
    GuestMemfd(c_int, u64),
    /// A module parameter.
    Parameter(&'static str),
}

impl Look {
    /// Returns the kind of file that the client sees at `fd`. `None`: `fd` does not refer to a KVM object.
    pub fn of_descriptor(fd: c_int) -> Option<Self> {
        let _section = Section::enter();
        Some(match table::get(fd)?.object() {
            Object::System(_) | Object::DevicePath => Look::Device,
            Object::Vm(_) | Object::Vcpu(_) | Object::Stats(_) | Object::Device(_) => {
                Look::Anonymous
            }
            Object::GuestMemfd(guest_memfd) => Look::GuestMemfd(fd, guest_memfd.size()),
            Object::Parameter(name) => Look::Parameter(name),
        })
    }

    /// Returns the kind of file at a special path. `None`: the path names a descriptor that has been closed since.
    ///
    /// # Errors
    /// `ENOTDIR`: slashes follow the name of a file.
    pub fn of_path(special: Special) -> Option<Result<Self, i32>> {
        match special {
            Special::Device => Some(Ok(Look::Device)),
            Special::Parameter(name) => Some(Ok(Look::Parameter(name))),
            Special::Descriptor(fd) => Self::of_descriptor(fd).map(Ok),
            Special::Slash => Some(Err(libc::ENOTDIR)),
        }
    }

    /// Returns the `stat` that the client sees.
    pub fn stat(self) -> libc::stat {
        let mut stat = match self {
            Look::Device => device(),
            Look::Anonymous => anonymous_inode(),
            Look::GuestMemfd(fd, _) => stat_descriptor(fd),
            Look::Parameter(_) => stat_path(c"/sys").map(unlike),
        }
        .unwrap_or(unknown());
        stat.st_nlink = 1;
        match self {
            Look::Device => {
                stat.st_mode = libc::S_IFCHR | 0o666;
                stat.st_rdev = libc::makedev(DEVICE.0, DEVICE.1);
            }
            Look::Anonymous => stat.st_mode = 0o600,
            Look::GuestMemfd(_, size) => {
                stat.st_mode = libc::S_IFREG | 0o600;
                // A memfd's own values differ: its blocks may be larger, it counts its blocks, and if the client must
                // not see the memory, it is empty.
                (stat.st_blksize, stat.st_blocks) = (4096, 0);
                stat.st_size = size as libc::off_t;
            }
            Look::Parameter(name) => {
                let writable = slat_kvm::parameters::is_writable(name);
                stat.st_mode = libc::S_IFREG | if writable { 0o644 } else { 0o444 };
                stat.st_size = SYSFS_SIZE;
            }
        }
        stat
    }

    /// Returns the `statx` that the client sees, with the same values as [`Look::stat`].
    pub fn statx(self) -> libc::statx {
        let stat = self.stat();
        // SAFETY: all-zero is a valid `statx`.
        let mut x: libc::statx = unsafe { std::mem::zeroed() };
        let time = |seconds, nanoseconds: i64| {
            // SAFETY: all-zero is a valid time.
            let mut time: libc::statx_timestamp = unsafe { std::mem::zeroed() };
            (time.tv_sec, time.tv_nsec) = (seconds, nanoseconds as u32);
            time
        };
        x.stx_mask = libc::STATX_BASIC_STATS;
        x.stx_blksize = stat.st_blksize as u32;
        x.stx_nlink = link_count(stat.st_nlink);
        (x.stx_uid, x.stx_gid) = (stat.st_uid, stat.st_gid);
        x.stx_mode = stat.st_mode as u16;
        x.stx_ino = stat.st_ino;
        x.stx_size = stat.st_size as u64;
        x.stx_blocks = stat.st_blocks as u64;
        x.stx_atime = time(stat.st_atime, stat.st_atime_nsec);
        x.stx_mtime = time(stat.st_mtime, stat.st_mtime_nsec);
        x.stx_ctime = time(stat.st_ctime, stat.st_ctime_nsec);
        x.stx_rdev_major = libc::major(stat.st_rdev);
        x.stx_rdev_minor = libc::minor(stat.st_rdev);
        x.stx_dev_major = libc::major(stat.st_dev);
        x.stx_dev_minor = libc::minor(stat.st_dev);
        x
    }
}

/// Converts the link count of a `stat`, whose type depends on the architecture, to the link count of a `statx`.
pub fn link_count(links: impl TryInto<u32>) -> u32 {
    links.try_into().unwrap_or(u32::MAX)
}

/// Describes an empty file with one link, for a host that lacks even a similar file.
fn unknown() -> libc::stat {
    // SAFETY: all-zero is a valid `stat`.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    stat.st_nlink = 1;
    stat.st_blksize = 4096;
    stat
}

/// Returns the `stat` of the host's `/dev/kvm`, or of another device in `/dev`.
fn device() -> Option<libc::stat> {
    let is_device = |stat: &libc::stat| stat.st_mode & libc::S_IFMT == libc::S_IFCHR;
    stat_path(c"/dev/kvm")
        .filter(is_device)
        .or_else(|| stat_path(c"/dev/null").map(unlike))
}

/// Changes the inode number in the `stat` of a similar file, so that the two files differ.
fn unlike(mut stat: libc::stat) -> libc::stat {
    stat.st_ino = INODE;
    stat
}

/// Returns the attributes of an anonymous inode from the kernel. All anonymous inodes are the same inode.
fn anonymous_inode() -> Option<libc::stat> {
    // SAFETY: the call opens a descriptor.
    let opened = unsafe { Opened::by(kernel!(libc::SYS_epoll_create1, libc::EPOLL_CLOEXEC)) };
    stat_descriptor(opened?.fd())
}

fn stat_path(path: &CStr) -> Option<libc::stat> {
    let mut stat = unknown();
    // SAFETY: the path ends with NUL, and the call fills in a live struct.
    let answer = unsafe {
        let to = &raw mut stat as usize;
        let here = libc::AT_FDCWD as usize;
        let arguments = [here, path.as_ptr() as usize, to, 0, 0, 0];
        let (number, arguments) = calls::older(libc::SYS_newfstatat, arguments);
        raw(number, arguments)
    };
    (answer == 0).then_some(stat)
}

fn stat_descriptor(fd: c_int) -> Option<libc::stat> {
    let mut stat = unknown();
    // SAFETY: the call fills in a live struct.
    let answer = unsafe {
        let to = &raw mut stat as usize;
        raw(libc::SYS_fstat, [fd as usize, to, 0, 0, 0, 0])
    };
    (answer == 0).then_some(stat)
}
