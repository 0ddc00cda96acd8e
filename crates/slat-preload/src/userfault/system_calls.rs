//! System calls of the program that read or write memory which may be missing. The kernel would end such a call with
//! EFAULT, because the memory is inaccessible. So slat waits for the memory before the call.

use slat_host::registered;

/// The memory that a call accesses: the number of the argument with its address, whose next argument is its size, and
/// whether the kernel writes it.
#[derive(Clone, Copy)]
enum Memory {
    Bytes { written: bool },
    Vector { written: bool },
}

/// Returns the memory that the call `number` accesses. Its address is the second argument, its size the third.
fn memory(number: i64) -> Option<Memory> {
    match number {
        libc::SYS_read | libc::SYS_pread64 | libc::SYS_recvfrom => {
            Some(Memory::Bytes { written: true })
        }
        libc::SYS_write | libc::SYS_pwrite64 | libc::SYS_sendto => {
            Some(Memory::Bytes { written: false })
        }
        libc::SYS_readv | libc::SYS_preadv | libc::SYS_preadv2 => {
            Some(Memory::Vector { written: true })
        }
        libc::SYS_writev | libc::SYS_pwritev | libc::SYS_pwritev2 => {
            Some(Memory::Vector { written: false })
        }
        _ => None,
    }
}

/// Waits until the memory is there that the program's call `number` accesses. `address` and `size` are the call's
/// second and third argument.
pub fn before(number: i64, address: usize, size: usize) {
    if !registered::is_any() {
        return;
    }
    match memory(number) {
        None => {}
        Some(Memory::Bytes { written }) => {
            registered::await_range(address..address.saturating_add(size), written);
        }
        Some(Memory::Vector { written }) => {
            for index in 0..size.min(libc::UIO_MAXIOV as usize) {
                let part = (address as *const u64).wrapping_add(2 * index);
                // SAFETY: guarded loads may be made at any address: a userfaultfd was made, so the handlers are
                // installed.
                let word = |word| unsafe { slat_guard::load(part.wrapping_add(word)) };
                // The kernel will refuse an address that cannot be read.
                let (Ok(start), Ok(len)) = (word(0), word(1)) else {
                    return;
                };
                let (start, end) = (start as usize, start.saturating_add(len) as usize);
                registered::await_range(start..end, written);
            }
        }
    }
}
