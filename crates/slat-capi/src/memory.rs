//! Mappings of KVM's descriptors, and changes of the mappings that back guest memory.

use crate::{Answer, answer, guarded};
use libc::off_t;
use slat_host::mappings;
use slat_kvm::{descriptors, notify};
use std::ffi::{c_int, c_void};
use std::ops::Range;

const PAGE: usize = 4096;

/// Returns the address range of the whole pages that contain the `size` bytes at `start`.
fn pages(start: *const c_void, size: usize) -> Result<Range<usize>, i32> {
    let end = (start.addr().checked_add(size)).and_then(|end| end.checked_next_multiple_of(PAGE));
    Ok(start.addr() & !(PAGE - 1)..end.ok_or(libc::EINVAL)?)
}

/// Runs `change`, which replaces or removes the mappings in `range`, during an invalidation of this range in all VMs.
/// Then reports that the mappings in the range that `change` returns are new.
fn replace(
    range: Range<usize>,
    change: impl FnOnce() -> Result<(isize, Range<usize>), i32>,
) -> Answer {
    notify::around(range, || {
        let (value, changed) = change()?;
        mappings::changed(changed);
        Ok(value)
    })
}

/// Maps memory. Replaces `mmap`. A vCPU's descriptor can be mapped: it has `struct kvm_run` and the pages after it
/// (`KVM_GET_VCPU_MMAP_SIZE` bytes), and its dirty ring. With `MAP_FIXED`, no vCPU uses the earlier mappings of the
/// range when this returns.
///
/// Returns the address; or `MAP_FAILED` and errno.
///
/// # Safety
/// - As for `mmap`: with `MAP_FIXED`, only guests use the memory that was mapped there before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_mmap(
    address: *mut c_void,
    size: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let address = guarded(|| {
        let handle = match flags & libc::MAP_ANONYMOUS {
            0 => descriptors::get(fd),
            _ => None,
        };
        if let Some(handle) = &handle {
            (handle
                .object()
                .check_mapping(offset as u64, size, protection, flags))
            .map_err(|error| error.errno())?;
        }
        let replaced = match flags & libc::MAP_FIXED {
            0 => 0..0,
            _ => pages(address, size)?,
        };
        replace(replaced, || {
            // SAFETY: the mapping may be made, and only guests use memory that it replaces, as this function's
            // `# Safety` asks of its caller.
            let new = unsafe { libc::mmap(address, size, protection, flags, fd, offset) };
            let value = answer(new.addr().cast_signed())?;
            if let Some(handle) = &handle {
                // SAFETY: `mmap` has just made this mapping.
                unsafe {
                    handle
                        .object()
                        .complete_mapping(new.addr(), size, offset as u64)
                };
            }
            Ok((value, pages(new, size)?))
        })
    });
    std::ptr::with_exposed_provenance_mut(address.cast_unsigned())
}

/// Unmaps memory. Replaces `munmap`. No vCPU uses the memory when this returns. If a guest accesses it later, `KVM_RUN`
/// fails with `EFAULT`.
///
/// # Safety
/// - As for `munmap`: only guests use the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_munmap(address: *mut c_void, size: usize) -> c_int {
    guarded(|| {
        let range = pages(address, size)?;
        replace(range.clone(), || {
            // SAFETY: only guests use the memory, as this function's `# Safety` asks of its caller.
            let value = answer(unsafe { libc::munmap(address, size) } as isize)?;
            Ok((value, range))
        })
    }) as c_int
}

/// Calls `change(context)`, which changes mappings of guest memory within `size` bytes at `start`: by `mprotect`,
/// `madvise`, `mremap`, `fallocate`, or another call that this library does not replace. Before that, every VM drops
/// its translations of the range, and makes no new ones until `change` has returned, like the kernel's MMU notifiers.
/// So no vCPU reads or writes the memory meanwhile, and `change` may move its content.
///
/// Without this call, vCPUs continue to use the properties of the old mapping, until an access fails.
///
/// `change` must not wait for a vCPU's thread, nor leave by `longjmp` or an exception. Returns the result of `change`,
/// with its errno; or -1 with errno `EINVAL`, without calling `change`, if the range goes beyond the end of the
/// addresses.
///
/// # Safety
/// - `change` may be called with `context` on this thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_around(
    start: *mut c_void,
    size: usize,
    change: extern "C-unwind" fn(context: *mut c_void) -> c_int,
    context: *mut c_void,
) -> c_int {
    let mut left = None;
    let value = guarded(|| {
        let range = pages(start, size)?;
        Ok(notify::around(range.clone(), || {
            let value = change(context);
            left = std::io::Error::last_os_error().raw_os_error();
            // `change` may have given advice about huge pages (madvise).
            mappings::advice_passed_by();
            mappings::changed(range);
            value
        }) as isize)
    });
    if let Some(errno) = left {
        // SAFETY: the errno belongs to this thread.
        unsafe { *libc::__errno_location() = errno };
    }
    value as c_int
}
