//! The functions of a C library that the compiler, and the compiled `core` and `alloc`, expect. Those were compiled for
//! unwinding; this program does not unwind, so nothing calls its functions.

use core::arch::asm;

/// # Safety
/// - C's `memcpy`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    // SAFETY: the caller's promise; the direction flag is clear.
    unsafe {
        asm!("rep movsb", inout("rdi") to => _, inout("rsi") from => _, inout("rcx") bytes => _,
            options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// - C's `memmove`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= bytes {
        // SAFETY: copying upwards overwrites nothing that is still to be read.
        return unsafe { memcpy(to, from, bytes) };
    }
    // SAFETY: the caller's promise. The copy goes downwards, because `to` is in the range that is read.
    unsafe {
        asm!("std", "rep movsb", "cld",
            inout("rdi") to.add(bytes).wrapping_sub(1) => _,
            inout("rsi") from.add(bytes).wrapping_sub(1) => _,
            inout("rcx") bytes => _, options(nostack));
    }
    to
}

/// # Safety
/// - C's `memset`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, bytes: usize) -> *mut u8 {
    // SAFETY: the caller's promise; the direction flag is clear.
    unsafe {
        asm!("rep stosb", inout("rdi") to => _, in("al") byte as u8, inout("rcx") bytes => _,
            options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// - C's `memcmp`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, bytes: usize) -> i32 {
    for i in 0..bytes {
        // SAFETY: the caller's promise. Volatile, or the compiler replaces this by a call of itself.
        let (a, b) = unsafe { (a.add(i).read_volatile(), b.add(i).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

/// # Safety
/// - C's `bcmp`.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, bytes: usize) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { memcmp(a, b, bytes) }
}

#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() -> ! {
    unreachable!("nothing unwinds")
}

#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    unreachable!("nothing unwinds")
}
