//! Descriptors of KVM's objects. Each is a real file descriptor, of a memfd; a table in this library maps it to its KVM
//! object.

use crate::{Answer, answer, guarded};
use libc::{off_t, ssize_t};
use slat_kvm::Error;
use slat_kvm::descriptors::{self, adopt, share};
use slat_kvm::ioctl::Object;
use slat_kvm::policy;
use slat_kvm::system::System;
use std::ffi::{c_int, c_ulong, c_void};

fn errno(error: Error) -> i32 {
    error.errno()
}

/// Opens KVM. Replaces `open("/dev/kvm", O_RDWR | O_CLOEXEC)`, but needs neither the file nor the right to open it.
///
/// Returns a descriptor; or -1 with errno `EINVAL` if the environment sets policies that do not exist, `EMFILE`,
/// `ENFILE` or `ENOMEM`.
#[unsafe(no_mangle)]
pub extern "C" fn slat_open() -> c_int {
    guarded(|| {
        policy::current().map_err(errno)?;
        let fd = System::descriptor(true).map_err(errno)?;
        Ok(adopt(fd, Object::system()).map_err(errno)? as isize)
    }) as c_int
}

/// Carries out a KVM request on a descriptor. Replaces `ioctl`, and has the same arguments, results and errno. Requests
/// and structs are those of `<linux/kvm.h>`. A request that creates a VM, a vCPU or a device returns its descriptor.
///
/// For a descriptor that is not KVM's, this calls the C library's `ioctl`.
///
/// # Safety
/// - As for `ioctl`, the memory that the request names is valid for the request. Memory of a memslot stays mapped as
///   long as the slot exists, or is changed in `slat_around`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    guarded(|| {
        // As in the kernel, only the lower 32 bits of a request count.
        let ours = descriptors::get(fd)
            .map(|handle| handle.ioctl(request as u32, argument as u64))
            .transpose();
        match ours.map_err(errno)?.flatten() {
            Some(value) => Ok(value as isize),
            // SAFETY: the memory that the request names is valid for the request, as this function's `# Safety` asks of
            // its caller.
            None => answer(unsafe { libc::ioctl(fd, request, argument) } as isize),
        }
    }) as c_int
}

/// Closes a descriptor. Replaces `close`. An object lives until its last descriptor is closed, and at least as long as
/// the objects that depend on it: a VM lives as long as its vCPUs.
///
/// Close KVM's descriptors only by this function. Otherwise the next file that gets the same number would be taken for
/// KVM's.
///
/// For a descriptor that is not KVM's, this calls the C library's `close`.
#[unsafe(no_mangle)]
pub extern "C" fn slat_close(fd: c_int) -> c_int {
    guarded(|| {
        // Remove the descriptor first, because its number may belong to another file as soon as it is closed.
        descriptors::remove(fd);
        // SAFETY: the call closes a descriptor that the client has asked to close.
        answer(unsafe { libc::close(fd) } as isize)
    }) as c_int
}

/// Makes another descriptor of the object that `fd` refers to. Replaces `dup`.
///
/// For a descriptor that is not KVM's, this calls the C library's `dup`.
#[unsafe(no_mangle)]
pub extern "C" fn slat_dup(fd: c_int) -> c_int {
    guarded(|| {
        let handle = descriptors::get(fd);
        // SAFETY: the call only makes a new descriptor.
        let new = answer(unsafe { libc::dup(fd) } as isize)?;
        let Some(handle) = handle else {
            return Ok(new);
        };
        if share(new as c_int, handle) {
            return Ok(new);
        }
        // SAFETY: `dup` has just opened this descriptor, and no other code knows it.
        unsafe { libc::close(new as c_int) };
        Err(libc::EMFILE)
    }) as c_int
}

/// Reads the statistics of a descriptor that `KVM_GET_STATS_FD` has returned. Replaces `pread`, which would read old
/// values.
///
/// For any other descriptor, this calls the C library's `pread`.
///
/// # Safety
/// - `size` bytes at `buffer` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_pread(
    fd: c_int,
    buffer: *mut c_void,
    size: usize,
    offset: off_t,
) -> ssize_t {
    guarded(|| {
        if let Some(handle) = descriptors::get(fd)
            && let Object::Stats(stats) = handle.object()
        {
            stats.refresh();
        }
        // SAFETY: `size` bytes at `buffer` may be written, as this function's `# Safety` asks of its caller.
        answer(unsafe { libc::pread(fd, buffer, size, offset) })
    })
}

/// Allocates or frees pages of a guest_memfd. Replaces `fallocate`.
///
/// For any other descriptor, this calls the C library's `fallocate`.
#[unsafe(no_mangle)]
pub extern "C" fn slat_fallocate(fd: c_int, mode: c_int, offset: off_t, size: off_t) -> c_int {
    guarded(|| allocate(fd, mode, offset, size)) as c_int
}

fn allocate(fd: c_int, mode: c_int, offset: i64, size: i64) -> Answer {
    if let Some(handle) = descriptors::get(fd)
        && let Object::GuestMemfd(guest_memfd) = handle.object()
    {
        guest_memfd.fallocate(mode, offset, size).map_err(errno)?;
        return Ok(0);
    }
    // SAFETY: the call takes no pointer, and only changes the file that the client has named.
    answer(unsafe { libc::fallocate(fd, mode, offset, size) } as isize)
}
