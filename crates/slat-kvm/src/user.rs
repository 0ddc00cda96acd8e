//! Copies from and to the client's memory: a bad pointer is `EFAULT`, never a crash.
//!
//! The ioctl dispatch gets raw addresses. Only plain data is copied: structs of integers in which every bit pattern is
//! valid, which [`Plain`] promises.

use crate::arch::USER_END;
use crate::errno::{Result, fail};
use crate::heap;
use kvm_bindings::*;

/// The greatest number of bytes that one guarded access copies. No architecture has smaller pages.
const PART: usize = 4096;

/// Data that may be copied byte by byte from and to a client.
///
/// # Safety
/// Every bit pattern is a valid value, and the type holds no pointers that Rust follows.
pub unsafe trait Plain: Copy {}

/// Declares that types are plain data.
macro_rules! plain {
    ($($type:ty),* $(,)?) => {
        // SAFETY: the types are C structs of integers, and arrays and unions of such structs, so all bit patterns are
        // valid.
        $(unsafe impl $crate::user::Plain for $type {})*
    };
}
pub(crate) use plain;

plain!(
    u8,
    u32,
    u64,
    kvm_clear_dirty_log,
    kvm_coalesced_mmio_zone,
    kvm_create_device,
    kvm_create_guest_memfd,
    kvm_device_attr,
    kvm_guest_debug,
    kvm_dirty_log,
    kvm_enable_cap,
    kvm_ioeventfd,
    kvm_irq_routing_entry,
    kvm_irqfd,
    kvm_irq_level,
    kvm_memory_attributes,
    kvm_mp_state,
    kvm_msi,
    kvm_one_reg,
    kvm_pre_fault_memory,
    kvm_userspace_memory_region,
    kvm_userspace_memory_region2,
    kvm_vcpu_events,
);

// SAFETY: the elements of the array are plain data, so every bit pattern of the array is valid.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Reads a `T` at `address`.
///
/// # Errors
/// `EFAULT` when the memory cannot be read.
pub fn read<T: Plain>(address: u64) -> Result<T> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: the slice has exactly the bytes of `value`, which are initialised (zeroed).
    let bytes =
        unsafe { std::slice::from_raw_parts_mut(value.as_mut_ptr().cast(), size_of::<T>()) };
    read_bytes(address, bytes)?;
    // SAFETY: `T` is `Plain`, so every bit pattern is a valid value.
    Ok(unsafe { value.assume_init() })
}

/// Reads `count` values from `address` on.
///
/// # Errors
/// `EFAULT` when the memory cannot be read, `ENOMEM`.
pub fn read_vec<T: Plain>(address: u64, count: usize) -> Result<Vec<T>> {
    let step = size_of::<T>() as u64;
    let mut values = heap::with_room(count)?;
    for i in 0..count as u64 {
        values.push(read(address.wrapping_add(i * step))?);
    }
    Ok(values)
}

/// Reads `count` words from `address` on. Unlike [`read_vec`], copies many words at a time.
///
/// # Errors
/// `EFAULT` when the memory cannot be read, `ENOMEM`.
pub fn read_words(address: u64, count: usize) -> Result<Vec<u64>> {
    let mut words = heap::zeroes(count)?;
    // SAFETY: the slice has exactly the bytes of a live vector of integers, for which every bit pattern is valid.
    let bytes = unsafe {
        std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), count * size_of::<u64>())
    };
    read_bytes(address, bytes)?;
    Ok(words)
}

/// Checks that `len` bytes from `address` on can be written, without changing them.
///
/// # Errors
/// `EFAULT` when one of the bytes cannot be written.
pub fn check_writable(address: u64, len: usize) -> Result<()> {
    if !in_user_space(address, len) {
        return fail(libc::EFAULT);
    }
    let mut at = address;
    while at < address + len as u64 {
        // SAFETY: the access is guarded. It is an atomic addition of 0, which does not change the byte, even if another
        // thread writes at the same time.
        accessed(|| unsafe { slat_guard::fetch_add(at as *mut u8, 0).map(drop) })?;
        at = (at / PART as u64 + 1) * PART as u64;
    }
    Ok(())
}

/// Writes `value` to `address`.
///
/// # Errors
/// `EFAULT` when the memory cannot be written.
pub fn write<T: Plain>(address: u64, value: &T) -> Result<()> {
    write_slice(address, std::slice::from_ref(value))
}

/// Writes `values` from `address` on.
///
/// # Errors
/// `EFAULT` when the memory cannot be written.
pub fn write_slice<T: Plain>(address: u64, values: &[T]) -> Result<()> {
    // SAFETY: the slice has exactly the bytes of a live slice of `Plain` data, which has no unnamed padding (the C
    // structs name their padding).
    let bytes =
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
    if !in_user_space(address, bytes.len()) {
        return fail(libc::EFAULT);
    }
    let to = address as *mut u8;
    for (index, chunk) in bytes.chunks(PART).enumerate() {
        // SAFETY: the copy is guarded. The client chooses the memory that is overwritten, as with the kernel's copy.
        accessed(|| unsafe { slat_guard::copy_out(to.wrapping_add(index * PART), chunk) })?;
    }
    Ok(())
}

/// Fills `bytes` with the memory from `address` on.
///
/// # Errors
/// `EFAULT` when the memory cannot be read.
pub fn read_bytes(address: u64, bytes: &mut [u8]) -> Result<()> {
    if !in_user_space(address, bytes.len()) {
        return fail(libc::EFAULT);
    }
    let from = address as *const u8;
    for (index, chunk) in bytes.chunks_mut(PART).enumerate() {
        // SAFETY: the copy is guarded, and goes into a live slice.
        accessed(|| unsafe { slat_guard::copy_in(chunk, from.wrapping_add(index * PART)) })?;
    }
    Ok(())
}

/// Repeats a guarded access until it succeeds, or fails for a reason other than a kick. Such a failure means that the
/// client's memory is not mapped. A kick says nothing about the memory: it may be meant for a vCPU that this thread ran
/// earlier, or is about to leave.
///
/// Accesses are short (at most [`PART`] bytes), so an access has the time to succeed between two kicks.
fn accessed<E>(mut access: impl FnMut() -> std::result::Result<(), E>) -> Result<()> {
    loop {
        match access() {
            Ok(()) => return Ok(()),
            Err(_) if slat_guard::was_kicked() => {}
            Err(_) => return fail(libc::EFAULT),
        }
    }
}

/// Whether the range ends at or below the first address that user space can never have. (On x86, a fault at a
/// non-canonical address does not report the address. So such addresses are refused before the access.)
pub fn in_user_space(address: u64, len: usize) -> bool {
    address
        .checked_add(len as u64)
        .is_some_and(|end| end <= USER_END)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_in_and_out() {
        let mut there = 7u64;
        let address = &raw mut there as u64;
        assert_eq!(read::<u64>(address).unwrap(), 7);
        write(address, &9u64).unwrap();
        assert_eq!(there, 9);
    }

    #[test]
    fn a_kick_that_comes_late_is_not_a_bad_pointer() {
        slat_guard::install().unwrap();
        // SAFETY: the call takes no pointer.
        let reader = unsafe { libc::syscall(libc::SYS_gettid) } as libc::pid_t;
        let mut there = vec![0u8; 1 << 20];
        let address = there.as_mut_ptr() as u64;
        let done = std::sync::atomic::AtomicBool::new(false);
        let failed = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    slat_guard::kick(reader);
                    std::thread::sleep(std::time::Duration::from_micros(100));
                }
            });
            let mut copy = vec![1u8; 1 << 20];
            let failed = (0..500).find_map(|_| {
                let read = read_bytes(address, &mut copy).err();
                read.or(write_slice(address, &copy).err())
                    .or(check_writable(address, copy.len()).err())
            });
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            failed
        });
        assert_eq!(failed.map(|error| error.errno()), None);
    }

    #[test]
    fn a_bad_pointer_is_efault() {
        for address in [0, 1, 0xdead_beef_0000_0000, u64::MAX - 3] {
            assert_eq!(read::<u64>(address).unwrap_err().errno(), libc::EFAULT);
            assert_eq!(write(address, &1u64).unwrap_err().errno(), libc::EFAULT);
        }
    }
}
