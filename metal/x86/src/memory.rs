//! The functions of a C library that the compiler and the compiled `core` and `alloc` expect. `core` and `alloc` were
//! compiled for unwinding. This program does not unwind, so nothing calls the functions for unwinding.

use core::arch::asm;

/// # Safety
/// - The requirements of C's `memcpy`: `bytes` bytes at `from` may be read, and as many at `to`, which do not overlap
///   them, may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    // SAFETY: the bytes may be read and written, as this function's `# Safety` asks of its caller. The direction flag
    // is clear.
    unsafe {
        asm!("rep movsb", inout("rdi") to => _, inout("rsi") from => _, inout("rcx") bytes => _,
            options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// - The requirements of C's `memmove`: `bytes` bytes at `from` may be read, and as many at `to` may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= bytes {
        // SAFETY: copying upwards overwrites nothing that is still to be read.
        return unsafe { memcpy(to, from, bytes) };
    }
    // SAFETY: the bytes may be read and written, as this function's `# Safety` asks of its caller. The copy goes
    // downwards, because `to` is in the range that is read.
    unsafe {
        asm!("std", "rep movsb", "cld",
            inout("rdi") to.add(bytes).wrapping_sub(1) => _,
            inout("rsi") from.add(bytes).wrapping_sub(1) => _,
            inout("rcx") bytes => _, options(nostack));
    }
    to
}

/// # Safety
/// - The requirements of C's `memset`: `bytes` bytes at `to` may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, bytes: usize) -> *mut u8 {
    // SAFETY: the bytes may be written, as this function's `# Safety` asks of its caller. The direction flag is clear.
    unsafe {
        asm!("rep stosb", inout("rdi") to => _, in("al") byte as u8, inout("rcx") bytes => _,
            options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// - The requirements of C's `memcmp`: `bytes` bytes at `a` and as many at `b` may be read.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, bytes: usize) -> i32 {
    for i in 0..bytes {
        // SAFETY: the bytes may be read, as this function's `# Safety` asks of its caller. The reads are volatile:
        // otherwise the compiler would replace the loop by a call of this function.
        let (a, b) = unsafe { (a.add(i).read_volatile(), b.add(i).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

/// # Safety
/// - The requirements of C's `bcmp`, which are those of [`memcmp`].
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, bytes: usize) -> i32 {
    // SAFETY: the bytes may be read, as this function's `# Safety` asks of its caller.
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
