//! Descriptors. The kernel knows each as a memfd; a table says which object of KVM's it refers to.

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

/// Opens KVM. Stands for `open("/dev/kvm", O_RDWR | O_CLOEXEC)`, but needs neither the file nor a right.
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

/// Carries out a request of KVM's on a descriptor. Stands for `ioctl`, whose arguments, results and errno it
/// has. Requests and structs are those of `<linux/kvm.h>`. A request that creates a VM, a vCPU or a device
/// returns its descriptor.
///
/// For a descriptor that is not KVM's this is the C library's `ioctl`.
///
/// # Safety
/// - As for `ioctl`: memory that the request names is valid for what it does. Memory of a memslot stays mapped for as
///   long as the slot, or changes in `slat_around`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    guarded(|| {
        // As in the kernel, the upper half of a request says nothing.
        let ours = descriptors::get(fd)
            .map(|handle| handle.ioctl(request as u32, argument as u64))
            .transpose();
        match ours.map_err(errno)?.flatten() {
            Some(value) => Ok(value as isize),
            // SAFETY: the caller's.
            None => answer(unsafe { libc::ioctl(fd, request, argument) } as isize),
        }
    }) as c_int
}

/// Closes a descriptor. Stands for `close`. An object lives until its last descriptor is closed, and as long as objects
/// that depend on it: a VM as long as its vCPUs.
///
/// KVM's descriptors must not be closed otherwise: the next file with the same number would be taken for KVM's.
///
/// For a descriptor that is not KVM's this is the C library's `close`.
#[unsafe(no_mangle)]
pub extern "C" fn slat_close(fd: c_int) -> c_int {
    guarded(|| {
        // First, because the number may be another file's as soon as it is closed.
        descriptors::remove(fd);
        // SAFETY: closes the client's descriptor, as it wants.
        answer(unsafe { libc::close(fd) } as isize)
    }) as c_int
}

/// Makes another descriptor of the object that `fd` refers to. Stands for `dup`.
///
/// For a descriptor that is not KVM's this is the C library's `dup`.
#[unsafe(no_mangle)]
pub extern "C" fn slat_dup(fd: c_int) -> c_int {
    guarded(|| {
        let handle = descriptors::get(fd);
        // SAFETY: opens a descriptor.
        let new = answer(unsafe { libc::dup(fd) } as isize)?;
        let Some(handle) = handle else {
            return Ok(new);
        };
        if share(new as c_int, handle) {
            return Ok(new);
        }
        // SAFETY: the descriptor opened above, of which nobody knows.
        unsafe { libc::close(new as c_int) };
        Err(libc::EMFILE)
    }) as c_int
}

/// Reads the statistics of a descriptor that `KVM_GET_STATS_FD` has returned. Stands for `pread`, which would
/// read values of earlier.
///
/// For any other descriptor this is the C library's `pread`.
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
        // SAFETY: the caller's.
        answer(unsafe { libc::pread(fd, buffer, size, offset) })
    })
}

/// Allocates or frees pages of a guest_memfd. Stands for `fallocate`.
///
/// For any other descriptor this is the C library's `fallocate`.
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
    // SAFETY: changes the file that the client names.
    answer(unsafe { libc::fallocate(fd, mode, offset, size) } as isize)
}
