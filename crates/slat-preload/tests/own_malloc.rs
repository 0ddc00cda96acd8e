//! Tests a program whose `malloc` holds a lock while it gets memory by `mmap`, as in jemalloc, tcmalloc and mimalloc.
//! slat must not call `malloc` from that `mmap`.
//!
//! This program's `malloc` is defined below. The C library and the preloaded library use it, too.
#![cfg(target_arch = "x86_64")]

mod common;

use common::on_slat;
use std::alloc::Layout;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

on_slat! {
    a_program_starts
    threads_make_and_drop_vms
    huge_pages_are_seen_that_were_wanted_before_the_vm
}

/// A lock for which a thread waits for ever if the thread itself holds the lock.
struct Lock(AtomicBool);

impl Lock {
    fn with<T>(&self, work: impl FnOnce() -> T) -> T {
        while self.0.swap(true, Ordering::Acquire) {
            std::hint::spin_loop();
        }
        let result = work();
        self.0.store(false, Ordering::Release);
        result
    }
}

static LOCK: Lock = Lock(AtomicBool::new(false));
/// The unused rest of the current chunk.
static FREE: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);

const CHUNK: usize = 1 << 20;
/// Blocks of this size or more are mapped and unmapped separately.
const LARGE: usize = 64 << 10;
/// The number of bytes before each block. These bytes hold the length of the block's own mapping, or 0, and the
/// block's size.
const HEADER: usize = 32;

fn map(len: usize) -> usize {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the call makes a new mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    start as usize
}

fn block(align: usize, size: usize) -> *mut c_void {
    LOCK.with(|| {
        let need = size + align + HEADER;
        let (start, mapped) = if need >= LARGE {
            let len = need.next_multiple_of(4096);
            let start = map(len);
            // SAFETY: the mapping belongs to this allocator and is still unused.
            unsafe { libc::madvise(start as *mut c_void, len, libc::MADV_DONTNEED) };
            (start, len)
        } else {
            if END.load(Ordering::Relaxed) - FREE.load(Ordering::Relaxed) < need {
                let chunk = map(CHUNK);
                FREE.store(chunk, Ordering::Relaxed);
                END.store(chunk + CHUNK, Ordering::Relaxed);
            }
            (
                FREE.fetch_add(need.next_multiple_of(16), Ordering::Relaxed),
                0,
            )
        };
        let block = (start + HEADER).next_multiple_of(align.max(16));
        // SAFETY: the header is inside the memory that was just taken.
        unsafe {
            ((block - 16) as *mut usize).write(size);
            ((block - 24) as *mut usize).write(mapped);
            ((block - 32) as *mut usize).write(start);
        }
        block as *mut c_void
    })
}

/// The C library's allocation functions, as this program implements them.
///
/// # Safety
/// The conditions are those of the C library's functions.
mod malloc {
    use super::*;

    #[unsafe(no_mangle)]
    extern "C" fn malloc(size: usize) -> *mut c_void {
        block(16, size)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn free(start: *mut c_void) {
        if start.is_null() {
            return;
        }
        let start = start as usize;
        // SAFETY: the header is in front of the block, which belongs to this allocator.
        let (mapping, mapped) = unsafe {
            (
                ((start - 32) as *mut usize).read(),
                ((start - 24) as *mut usize).read(),
            )
        };
        if mapped != 0 {
            // SAFETY: the block has this mapping of its own.
            LOCK.with(|| unsafe { libc::munmap(mapping as *mut c_void, mapped) });
        }
    }

    #[unsafe(no_mangle)]
    extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
        let new = block(16, count * size);
        // SAFETY: the block has `count * size` bytes.
        unsafe { new.cast::<u8>().write_bytes(0, count * size) };
        new
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn realloc(old: *mut c_void, size: usize) -> *mut c_void {
        let new = block(16, size);
        if !old.is_null() {
            // SAFETY: both blocks belong to this allocator.
            unsafe {
                let len = ((old as usize - 16) as *mut usize).read().min(size);
                new.copy_from_nonoverlapping(old, len);
                free(old);
            }
        }
        new
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn posix_memalign(to: *mut *mut c_void, align: usize, size: usize) -> i32 {
        // SAFETY: `to` is valid, as posix_memalign(3) asks of its caller.
        unsafe { to.write(block(align, size)) };
        0
    }

    #[unsafe(no_mangle)]
    extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
        block(align, size)
    }

    #[unsafe(no_mangle)]
    extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
        block(align, size)
    }
}

mod client {
    use super::*;
    use crate::common::guest::*;
    use kvm_ioctls::VcpuExit;

    /// Checks that the program uses the allocator that this file defines.
    fn uses_malloc_of_its_own() {
        let block = Box::new(1u8);
        let address = &raw const *block as usize;
        assert!(
            (END.load(Ordering::Relaxed) - CHUNK..END.load(Ordering::Relaxed)).contains(&address)
        );
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_program_starts() {
        uses_malloc_of_its_own();
    }

    #[test]
    #[ignore = "runs under the library"]
    fn threads_make_and_drop_vms() {
        uses_malloc_of_its_own();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..50 {
                        let (vm, mut vcpu, _) = guest(OUT);
                        for size in [100, LARGE, 10 * LARGE] {
                            assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, _)));
                            let filled = vec![round as u8; size];
                            assert_eq!(filled[size - 1], round as u8);
                        }
                        drop((vm, vcpu));
                    }
                });
            }
        });
    }

    #[test]
    #[ignore = "runs under the library"]
    fn huge_pages_are_seen_that_were_wanted_before_the_vm() {
        const HUGE: usize = 2 << 20;
        let mode = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        if mode.unwrap_or_default().contains("[never]") {
            return;
        }
        let memory = (super::map(2 * HUGE)).next_multiple_of(HUGE) as *mut u8;
        // SAFETY: the mapping belongs to this test.
        assert_eq!(0, unsafe {
            libc::madvise(memory.cast(), HUGE, libc::MADV_HUGEPAGE)
        });
        let (vm, mut vcpu) = guest_in(memory, HUGE, OUT);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, _)));
        assert_eq!(statistic(&vm, "pages_2m"), 1);
    }

    #[test]
    fn layouts_are_kept() {
        let layout = Layout::from_size_align(100, 4096).unwrap();
        // SAFETY: the block is freed with its layout.
        unsafe {
            let block = std::alloc::alloc(layout);
            assert_eq!(block as usize % 4096, 0);
            std::alloc::dealloc(block, layout);
        }
    }
}
