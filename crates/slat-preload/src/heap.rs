//! slat's own heap, which is separate from the program's.
//!
//! The program's `malloc` may be any allocator, and may call `mmap`, which slat replaces, while it holds its locks. If
//! slat then called `malloc`, slat would wait for these locks forever. So slat never allocates by `malloc`. Small
//! blocks come from slat's own heap (the crate dlmalloc), and each large block is a mapping. Small and large blocks get
//! their pages from the kernel without the C library.
//!
//! A thread locks the heap only in a [`Section`], so no signal handler of the program runs on a thread that holds the
//! lock. A thread that forks holds the lock over the fork ([`before_fork`]), so a child never inherits a half-changed
//! heap.
//!
//! # Lack of memory
//! If an allocation fails and the code cannot report that, Rust ends the process. For such allocations slat keeps a
//! reserve. The reserve is many times larger than all blocks of one KVM call, except blocks whose size the client
//! determines. If the reserve is used up and cannot be restored, a call is refused with `ENOMEM` before it begins
//! ([`is_ready`]).

use crate::program_break;
use dlmalloc::{Allocator, Dlmalloc};
use slat_guard::Section;
use slat_process::calls::{self, Call};
use slat_process::once::keep_forks_out;
use slat_process::page_size;
use std::alloc::{GlobalAlloc, Layout};
use std::cell::{Cell, UnsafeCell};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Blocks of this size or more are separate mappings.
const LARGE: usize = 128 << 10;
/// The size of the reserve in bytes. The reserve is memory for allocations by code that cannot report a failure.
const RESERVE: usize = 96 << 10;

/// The kernel, from which the heap gets its pages.
struct Pages;

fn map(len: usize) -> *mut u8 {
    let rights = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
    // SAFETY: the kernel chooses the address of the new mapping.
    let start = unsafe { calls::make(Call::Map, [0, len, rights, flags, usize::MAX, 0]) };
    start.map_or(null_mut(), |start| start as *mut u8)
}

/// Unmaps `len` bytes. Returns whether they are unmapped.
///
/// # Safety
/// - The bytes were mapped by [`map`] and are not used any more.
unsafe fn unmap(start: *mut u8, len: usize) -> bool {
    // SAFETY: the bytes were mapped by [`map`] and are not used any more, as this function's contract requires.
    unsafe { calls::make(Call::Unmap, [start as usize, len, 0, 0, 0, 0]).is_ok() }
}

/// Changes the length of a mapping. Returns the mapping's address, or null if the length cannot be changed.
///
/// # Safety
/// - The conditions are those of [`unmap`]. If null is returned, the bytes stay mapped and usable.
unsafe fn remap(start: *mut u8, old: usize, new: usize, may_move: bool) -> *mut u8 {
    let flags = if may_move {
        libc::MREMAP_MAYMOVE as usize
    } else {
        0
    };
    // SAFETY: the bytes were mapped by [`map`], as this function's contract requires.
    let moved = unsafe { calls::make(Call::Remap, [start as usize, old, new, flags, 0, 0]) };
    moved.map_or(null_mut(), |moved| moved as *mut u8)
}

// SAFETY: `alloc` returns new mappings of the size it reports, zeroed; the other methods change mappings only as their
// return values say.
unsafe impl Allocator for Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        (map(size), size, 0)
    }

    fn remap(&self, start: *mut u8, old: usize, new: usize, may_move: bool) -> *mut u8 {
        // SAFETY: `start` is a segment of this heap, as the trait's contract requires.
        unsafe { remap(start, old, new, may_move) }
    }

    fn free_part(&self, start: *mut u8, old: usize, new: usize) -> bool {
        // SAFETY: the segment belongs to this heap, as the trait's contract requires, and its end is not used any more.
        unsafe { unmap(start.wrapping_add(new), old - new) }
    }

    fn free(&self, start: *mut u8, size: usize) -> bool {
        // SAFETY: the segment belongs to this heap, as the trait's contract requires, and is not used any more.
        unsafe { unmap(start, size) }
    }

    fn can_release_part(&self, _flags: u32) -> bool {
        true
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        page_size()
    }
}

struct State {
    small: Dlmalloc<Pages>,
    /// A block that is freed when the heap has no other memory (see the module's documentation). Null if the reserve is
    /// used up, or was never made.
    reserve: *mut u8,
}

// SAFETY: the reserve is a block of the heap in `small`.
unsafe impl Send for State {}

impl State {
    fn allocate(&mut self, layout: Layout, zeroed: bool) -> *mut u8 {
        let (size, align) = (layout.size(), layout.align());
        let mut attempt = || {
            // SAFETY: a layout's size is not 0 here, and its alignment is a power of two.
            unsafe {
                match zeroed {
                    true => self.small.calloc(size, align),
                    false => self.small.malloc(size, align),
                }
            }
        };
        let block = attempt();
        if !block.is_null() || self.reserve.is_null() {
            return block;
        }
        let reserve = std::mem::replace(&mut self.reserve, null_mut());
        IS_WHOLE.store(false, Ordering::Relaxed);
        // SAFETY: `refill` has made the reserve with this size and alignment.
        unsafe { self.small.free(reserve, RESERVE, page_size()) };
        self.allocate(layout, zeroed)
    }

    /// Makes the reserve if it does not exist. Returns whether the reserve exists now.
    fn refill(&mut self) -> bool {
        if self.reserve.is_null() {
            // SAFETY: the size is not 0, and the alignment is a power of two.
            self.reserve = unsafe { self.small.malloc(RESERVE, page_size()) };
        }
        let is_whole = !self.reserve.is_null();
        IS_WHOLE.store(is_whole, Ordering::Relaxed);
        is_whole
    }
}

/// Whether no allocation has used the heap's reserve yet.
static IS_WHOLE: AtomicBool = AtomicBool::new(false);

static STATE: Mutex<State> = Mutex::new(State {
    small: Dlmalloc::new_with_allocator(Pages),
    reserve: null_mut(),
});

thread_local! {
    /// The depth of forks on this thread; a signal handler may fork during a fork. Above zero, the thread holds the
    /// heap's lock.
    static FORKS: Cell<u32> = const { Cell::new(0) };
}

/// The locks that a forking thread holds: the heap's lock, and the locks that the thread has locked before the heap.
struct Locks {
    state: MutexGuard<'static, State>,
    _program_break: MutexGuard<'static, program_break::Break>,
    _first_uses: MutexGuard<'static, ()>,
}

struct Held(UnsafeCell<Option<Locks>>);

// SAFETY: only a thread that holds the locks and has raised `FORKS` accesses the cell. In a child, that is the only
// thread, a copy of the forking thread.
unsafe impl Sync for Held {}

static HELD: Held = Held(UnsafeCell::new(None));

fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    let _section = Section::enter();
    if FORKS.get() != 0 {
        // SAFETY: this thread holds the lock, and `work` does not use the heap again.
        let held = unsafe { &mut *HELD.0.get() };
        if let Some(locks) = held {
            return work(&mut locks.state);
        }
    }
    work(
        &mut STATE
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner()),
    )
}

/// Fills the reserve if it is not full. Returns whether it is full, so that a KVM call may begin. If the reserve was
/// full, the call costs one load.
pub fn is_ready() -> bool {
    IS_WHOLE.load(Ordering::Relaxed) || with(State::refill)
}

/// Locks the heap. Call before a fork, on the thread that forks.
pub fn before_fork() {
    let _section = Section::enter();
    FORKS.set(FORKS.get() + 1);
    if FORKS.get() > 1 {
        return;
    }
    // The heap is locked last, because a thread that holds another of these locks may allocate.
    let _first_uses = keep_forks_out();
    let _program_break = program_break::lock_break();
    let locks = Locks {
        _first_uses,
        _program_break,
        state: STATE
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner()),
    };
    // SAFETY: this thread alone holds the lock, and runs no signal handlers until it has stored the locks.
    unsafe { *HELD.0.get() = Some(locks) };
}

/// Unlocks the heap. Call after a fork in the parent and in the child, on the thread that called [`before_fork`].
pub fn after_fork() {
    let _section = Section::enter();
    FORKS.set(FORKS.get() - 1);
    if FORKS.get() == 0 {
        // SAFETY: this thread holds the lock. In a child, this thread is the copy of the thread that holds the lock.
        drop(unsafe { (*HELD.0.get()).take() });
    }
}

/// The heap as Rust's global allocator.
pub struct Heap;

fn is_large(layout: Layout) -> bool {
    layout.size() >= LARGE && layout.align() <= page_size()
}

fn pages(len: usize) -> usize {
    len.next_multiple_of(page_size())
}

// SAFETY: the layout alone decides whether a block is a mapping or comes from dlmalloc's heap, which is locked.
// Rounding a length does not overflow, because a layout's length is at most `isize::MAX`.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_large(layout) {
            return map(pages(layout.size()));
        }
        with(|state| state.allocate(layout, false))
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_large(layout) {
            return map(pages(layout.size()));
        }
        with(|state| state.allocate(layout, true))
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: `block` has this layout and is not used any more, as the trait's contract requires.
        unsafe {
            if is_large(layout) {
                unmap(block, pages(layout.size()));
            } else {
                with(|state| state.small.free(block, layout.size(), layout.align()));
            }
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the size is not 0 and fits into a layout, as the trait's contract requires.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: `block` has this layout, as the trait's contract requires.
        unsafe {
            if is_large(layout) && is_large(new) {
                return remap(block, pages(layout.size()), pages(size), true);
            }
            let moved = self.alloc(new);
            if !moved.is_null() {
                let len = layout.size().min(size);
                std::ptr::copy_nonoverlapping(block, moved, len);
                self.dealloc(block, layout);
            }
            moved
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fills blocks of many sizes and alignments, grows and shrinks them, and checks that they keep their contents.
    #[test]
    fn blocks_keep_their_contents() {
        let mut blocks: Vec<(*mut u8, Layout, u8)> = Vec::new();
        let mut random = 1u64;
        let mut next = |limit: u64| {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (random >> 33) % limit
        };
        let heap = Heap;
        for round in 0..4000 {
            // SAFETY: each block comes from this heap, and is used with its own layout.
            unsafe {
                match next(3) {
                    0 if blocks.len() < 200 => {
                        let size = 1 << next(20) | 1;
                        let layout = Layout::from_size_align(size, 1 << next(14)).unwrap();
                        let block = heap.alloc_zeroed(layout);
                        assert_eq!(block as usize % layout.align(), 0);
                        assert!(
                            std::slice::from_raw_parts(block, size)
                                .iter()
                                .all(|b| *b == 0)
                        );
                        block.write_bytes(round as u8, size);
                        blocks.push((block, layout, round as u8));
                    }
                    1 if !blocks.is_empty() => {
                        let index = next(blocks.len() as u64) as usize;
                        let (block, layout, value) = blocks[index];
                        let size = 1 << next(20) | 1;
                        let moved = heap.realloc(block, layout, size);
                        let kept = std::slice::from_raw_parts(moved, size.min(layout.size()));
                        assert!(kept.iter().all(|byte| *byte == value));
                        moved.write_bytes(value, size);
                        let layout = Layout::from_size_align(size, layout.align()).unwrap();
                        blocks[index] = (moved, layout, value);
                    }
                    _ if !blocks.is_empty() => {
                        let index = next(blocks.len() as u64) as usize;
                        let (block, layout, value) = blocks.swap_remove(index);
                        let held = std::slice::from_raw_parts(block, layout.size());
                        assert!(held.iter().all(|byte| *byte == value));
                        heap.dealloc(block, layout);
                    }
                    _ => {}
                }
            }
        }
        for (block, layout, _) in blocks {
            // SAFETY: each block comes from this heap, and is freed with its own layout.
            unsafe { heap.dealloc(block, layout) };
        }
    }

    #[test]
    fn a_child_can_allocate_while_other_threads_do() {
        let stop = std::sync::atomic::AtomicBool::new(false);
        let layout = Layout::from_size_align(1000, 8).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    // SAFETY: the block is freed with the layout with which it was allocated.
                    unsafe { Heap.dealloc(Heap.alloc(layout), layout) };
                }
            });
            for _ in 0..200 {
                // SAFETY: the child only allocates and ends. No other thread held the heap's lock over the fork.
                unsafe {
                    let child = crate::forks::around(|| {
                        libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0)
                    });
                    if child == 0 {
                        libc::alarm(10);
                        Heap.dealloc(Heap.alloc(layout), layout);
                        libc::_exit(0);
                    }
                    let mut status = -1;
                    libc::waitpid(child as libc::pid_t, &mut status, 0);
                    assert_eq!(status, 0);
                }
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }

    /// Tests a fork by a signal handler that interrupts a fork on the same thread.
    #[test]
    fn a_fork_inside_a_fork_waits_for_nothing() {
        let layout = Layout::from_size_align(1000, 8).unwrap();
        // SAFETY: the child inherits the heap's lock, allocates, and ends.
        unsafe {
            let child =
                crate::forks::around(|| libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0));
            if child == 0 {
                libc::alarm(10);
                before_fork();
                before_fork();
                after_fork();
                Heap.dealloc(Heap.alloc(layout), layout);
                after_fork();
                Heap.dealloc(Heap.alloc(layout), layout);
                libc::_exit(0);
            }
            let mut status = -1;
            libc::waitpid(child as libc::pid_t, &mut status, 0);
            assert_eq!(status, 0);
        }
    }
}
