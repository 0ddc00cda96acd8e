//! Two thread pointers on one thread: the program's and slat's.
//!
//! A statically linked program brings its own C library. Its thread pointer (TPIDR_EL0) is not the one that slat's C
//! library and the standard library need. If such a program is loaded ([`separate`]), each entry from the program into
//! slat sets the register to slat's pointer, and each exit sets the program's pointer again. In between, all of slat's
//! code runs on slat's pointer. In other processes there is only one thread pointer, which slat does not change.
//!
//! A program writes the register by an instruction that slat does not see, and the processor has no second register in
//! which slat could keep an address (X18 belongs to compiled code, TPIDRRO_EL0 to the kernel). So an entry asks the
//! kernel for the thread's id, and finds the thread in a table by that id.
//!
//! Entries are the handlers that the kernel calls ([`handler!`](crate::handler!)), and call sites that were rewritten.
//! Exits are their returns, and [`call_program`](crate::handler::call_program), by which a handler calls a handler of
//! the program.

use super::gate::{GATE, call_at};
use std::arch::{asm, naked_asm};
use std::cell::Cell;
use std::mem::offset_of;
use std::ptr::null;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// Whether the program's thread pointer differs from slat's. Assembly reads it.
pub static SEPARATE: AtomicBool = AtomicBool::new(false);

/// The data about a thread that an entry into slat needs. Only the thread itself reads or writes its [`Thread`], except
/// for the id, which all threads read.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Thread {
    /// The thread's id in the kernel, or [`FREE`], or [`LEFT`].
    id: AtomicU32,
    /// slat's thread pointer. 0 if the thread has only one thread pointer.
    slats: AtomicUsize,
    /// The program's thread pointer, while slat's code runs.
    programs: AtomicUsize,
    /// The lower and upper end of slat's stack ([`stack`](crate::stack)). 0 if there is no such stack.
    stack: [AtomicUsize; 2],
    /// The lower and upper end of the program's alternate stack.
    alternate: [AtomicUsize; 2],
    /// The lowest address of slat's stack that is in use, while a handler runs on the alternate stack.
    used_to: AtomicUsize,
}

/// The offset of slat's pointer in a [`Thread`], for assembly.
pub const SLATS: usize = offset_of!(Thread, slats);
/// The offset of the program's pointer in a [`Thread`].
pub const PROGRAMS: usize = offset_of!(Thread, programs);
/// The offset of the lower end of slat's stack in a [`Thread`]. The upper end follows the lower end.
pub const STACK: usize = offset_of!(Thread, stack);
/// The offset of the lower end of the program's alternate stack in a [`Thread`]. The upper end follows the lower end.
pub const ALTERNATE: usize = offset_of!(Thread, alternate);
/// The offset of `used_to` in a [`Thread`].
pub const USED_TO: usize = offset_of!(Thread, used_to);

/// The `id` of a table entry that no thread has ever claimed.
const FREE: u32 = 0;
/// The `id` of a table entry whose thread has called [`forget`]. A search of the table continues after such an entry.
const LEFT: u32 = u32::MAX;

/// The number of entries of the table of threads. A power of two. The table is larger than the number of threads of a
/// process, so that every search reaches a free entry and ends.
const COUNT: usize = 1 << 15;
/// The base-2 logarithm of an entry's size.
const SHIFT: u32 = size_of::<Thread>().trailing_zeros();
const _: () = assert!(size_of::<Thread>() == 1 << SHIFT && COUNT.is_power_of_two());

/// The table of threads. The entry of a new thread is the first free entry at or after the index `id` modulo [`COUNT`].
static THREADS: [Thread; COUNT] = [const {
    Thread {
        id: AtomicU32::new(FREE),
        slats: AtomicUsize::new(0),
        programs: AtomicUsize::new(0),
        stack: [const { AtomicUsize::new(0) }; 2],
        alternate: [const { AtomicUsize::new(0) }; 2],
        used_to: AtomicUsize::new(0),
    }
}; COUNT];

thread_local! {
    // The variable has neither an initialiser nor a destructor, because signal handlers use it.
    /// A pointer to this thread's entry in the table, or null.
    static OWN: Cell<*const Thread> = const { Cell::new(null()) };
}

/// Returns this thread's entry, if it has one.
fn own() -> Option<&'static Thread> {
    // SAFETY: the pointer is null, or refers to an element of a static.
    unsafe { OWN.get().as_ref() }
}

/// Returns this thread's id from the kernel. In a child of fork, the id that the C library has stored may not be right
/// yet.
fn id() -> u32 {
    // SAFETY: the gate refers to instructions that make a system call and return, and this call has no arguments.
    unsafe { call_at(GATE.load(Ordering::Relaxed), libc::SYS_gettid, [0; 6]) as u32 }
}

/// Claims an entry for the thread with this id.
///
/// # Panics
/// All entries are in use.
fn claim(id: u32) -> &'static Thread {
    for step in 0..COUNT - 1 {
        let entry = &THREADS[(id as usize + step) % COUNT];
        // An entry that already has this id belongs to a dead thread, whose id the kernel has given to this thread.
        for unused in [FREE, LEFT, id] {
            let claimed =
                (entry.id).compare_exchange(unused, id, Ordering::Relaxed, Ordering::Relaxed);
            if claimed.is_ok() {
                return entry;
            }
        }
    }
    panic!("more than {COUNT} threads");
}

/// Returns this thread's entry. The first call claims an entry. The thread must call [`forget`] before it ends.
fn own_or_new() -> &'static Thread {
    own().unwrap_or_else(|| {
        let entry = claim(id());
        for word in [&entry.slats, &entry.programs, &entry.used_to] {
            word.store(0, Ordering::Relaxed);
        }
        for word in entry.stack.iter().chain(&entry.alternate) {
            word.store(0, Ordering::Relaxed);
        }
        OWN.set(entry);
        entry
    })
}

/// Gives up this thread's entry, because the kernel may soon give its id to another thread. Call with all signals
/// blocked, when the thread does not run the program any more.
pub fn forget() {
    if let Some(own) = own() {
        OWN.set(null());
        own.id.store(LEFT, Ordering::Relaxed);
    }
}

/// Makes the table right for a child of fork: the child's thread has another id than the parent's thread, and the
/// parent's other threads do not exist in the child. Call in the child before a signal arrives.
pub fn after_fork() {
    let Some(parents) = own() else {
        return;
    };
    let id = id();
    let child = claim(id);
    let words = |thread: &'static Thread| {
        let single = [&thread.slats, &thread.programs, &thread.used_to];
        single
            .into_iter()
            .chain(&thread.stack)
            .chain(&thread.alternate)
    };
    for (to, from) in words(child).zip(words(parents)) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    OWN.set(child);
    for entry in &THREADS {
        let other = entry.id.load(Ordering::Relaxed);
        if other != FREE && other != id {
            entry.id.store(LEFT, Ordering::Relaxed);
        }
    }
}

/// Stores the ends of the stack on which slat's code runs on this thread. Both are 0 if the thread has no such stack
/// any more.
pub(crate) fn set_stack(low: usize, high: usize) {
    let own = own_or_new();
    own.stack[0].store(low, Ordering::Relaxed);
    own.stack[1].store(high, Ordering::Relaxed);
    if high == 0 {
        forget();
    }
}

/// Returns the ends of slat's stack on this thread. Both are 0 if the thread has no such stack.
pub(crate) fn stack_ends() -> (usize, usize) {
    own().map_or((0, 0), |own| {
        let [low, high] = &own.stack;
        (low.load(Ordering::Relaxed), high.load(Ordering::Relaxed))
    })
}

/// Records `address` as the lowest address of slat's stack that is in use. Returns the address recorded before.
pub(crate) fn set_used_to(address: usize) -> usize {
    own().map_or(0, |own| own.used_to.swap(address, Ordering::Relaxed))
}

/// Returns the lowest address of slat's stack that is in use.
pub(crate) fn used_to() -> usize {
    own().map_or(0, |own| own.used_to.load(Ordering::Relaxed))
}

/// Stores the ends of the alternate stack that the program has given this thread.
pub fn set_alternate(stack: &libc::stack_t) {
    let (low, size) = match stack.ss_flags & libc::SS_DISABLE {
        0 => (stack.ss_sp as usize, stack.ss_size),
        _ => (0, 0),
    };
    if let Some(own) = own() {
        own.alternate[0].store(low, Ordering::Relaxed);
        own.alternate[1].store(low + size, Ordering::Relaxed);
    }
}

/// Whether the program's thread pointer differs from slat's.
pub fn are_separate() -> bool {
    SEPARATE.load(Ordering::Relaxed)
}

/// Whether a program can run with its own thread pointer. On this architecture, always true.
pub fn can_be_separate() -> bool {
    true
}

/// Gives this thread a second thread pointer, `programs`, on which the program runs from now on. After the first call,
/// all threads that run the program need such a pointer.
///
/// # Safety
/// - The thread runs on slat's pointer.
pub unsafe fn separate(programs: usize) {
    let slats: usize;
    // SAFETY: the instruction reads a register.
    unsafe { asm!("mrs {}, tpidr_el0", out(reg) slats, options(nomem, nostack, preserves_flags)) };
    let own = own_or_new();
    own.programs.store(programs, Ordering::Relaxed);
    own.slats.store(slats, Ordering::Relaxed);
    SEPARATE.store(true, Ordering::Relaxed);
}

/// Prepares a thread of slat's own. Call after the first call of [`separate`]. On this architecture there is nothing to
/// do, because an entry into slat does not change the thread pointer of a thread that is not in the table.
///
/// # Safety
/// - The thread runs on slat's pointer.
pub unsafe fn separate_own() {}

/// Returns the program's thread pointer on this thread.
pub fn programs() -> usize {
    own().map_or(0, |own| own.programs.load(Ordering::Relaxed))
}

/// Changes the program's thread pointer on this thread.
pub fn set_programs(pointer: usize) {
    if let Some(own) = own() {
        own.programs.store(pointer, Ordering::Relaxed);
    }
}

/// Returns, in X0, this thread's [`Thread`], or 0. May be called on either thread pointer. Changes X8 to X11, X17, X30
/// and the condition flags. Changes no other register, because an entry calls this function before it has saved more
/// registers.
#[unsafe(naked)]
pub extern "C" fn find() -> *const Thread {
    naked_asm!(
        "mov x17, x30",
        "mov x8, {gettid}",
        "adrp x9, {gate}",
        "ldr x9, [x9, :lo12:{gate}]",
        "blr x9",
        "mov x30, x17",
        "adrp x8, {threads}",
        "add x8, x8, :lo12:{threads}",
        "and x9, x0, {last}",
        "2:",
        "add x10, x8, x9, lsl {shift}",
        "ldr w11, [x10]",
        "cmp w11, w0",
        "b.eq 3f",
        "cbz w11, 4f",
        "add x9, x9, 1",
        "and x9, x9, {last}",
        "b 2b",
        "3:",
        "mov x0, x10",
        "ret",
        "4:",
        "mov x0, xzr",
        "ret",
        gettid = const libc::SYS_gettid,
        gate = sym GATE,
        threads = sym THREADS,
        last = const COUNT - 1,
        shift = const SHIFT,
    )
}

/// Sets the thread pointer to slat's, and stores the program's. Returns the thread pointer before the call, which may
/// be either. On a thread that runs only slat's code, and so has no entry, does not change the thread pointer.
///
/// # Safety
/// - The caller expects slat's pointer afterwards.
#[unsafe(naked)]
pub unsafe extern "C" fn enter() -> usize {
    naked_asm!(
        "stp x29, x30, [sp, -16]!",
        "mov x29, sp",
        "bl {find}",
        "mrs x9, tpidr_el0",
        "cbz x0, 2f",
        "ldr x10, [x0, {slats}]",
        "cbz x10, 2f",
        "cmp x9, x10",
        "b.eq 2f",
        "str x9, [x0, {programs}]",
        "msr tpidr_el0, x10",
        "2:",
        "mov x0, x9",
        "ldp x29, x30, [sp], 16",
        "ret",
        find = sym find,
        slats = const SLATS,
        programs = const PROGRAMS,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pointer() -> usize {
        let pointer: usize;
        // SAFETY: the instruction reads a register.
        unsafe { asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nomem, nostack)) };
        pointer
    }

    /// Sets the thread pointer to `programs`, and calls [`enter`] and [`find`]. Returns the result of `enter`, the
    /// pointer that `enter` has set, and the result of a `find` on the program's pointer. Before the return, sets
    /// slat's pointer again.
    fn entered(programs: usize) -> [usize; 3] {
        let (before, during, found): (usize, usize, usize);
        // SAFETY: only these two functions run on the program's thread pointer.
        unsafe {
            asm!(
                "mrs x22, tpidr_el0",
                "msr tpidr_el0, {programs}",
                "bl {find}",
                "mov x20, x0",
                "bl {enter}",
                "mrs x21, tpidr_el0",
                "msr tpidr_el0, x22",
                programs = in(reg) programs,
                find = sym find,
                enter = sym enter,
                out("x0") before,
                out("x20") found,
                out("x21") during,
                out("x22") _,
                clobber_abi("C"),
            );
        }
        [before, during, found]
    }

    #[test]
    fn an_entry_finds_slats_pointer_by_the_threads_id() {
        // On a thread without a `Thread`, `enter` does not change the pointer.
        let slats = pointer();
        assert_eq!(entered(0x1000), [0x1000, 0x1000, 0]);
        assert_eq!(programs(), 0);
        let entry = std::ptr::from_ref(own_or_new()) as usize;
        own_or_new().slats.store(slats, Ordering::Relaxed);
        set_programs(0x2000);
        assert_eq!(programs(), 0x2000);
        // `enter` stores a pointer that the program has changed since the last entry.
        assert_eq!(entered(0x3000), [0x3000, slats, entry]);
        assert_eq!(programs(), 0x3000);
        // `enter` on slat's pointer changes nothing.
        assert_eq!(entered(slats), [slats, slats, entry]);
        assert_eq!(programs(), 0x3000);
        forget();
        assert_eq!(entered(0x1000), [0x1000, 0x1000, 0]);
    }

    #[test]
    fn threads_have_entries_of_their_own_and_leave_them() {
        let threads: Vec<_> = (0..8)
            .map(|number| {
                std::thread::spawn(move || {
                    for _ in 0..50 {
                        let slats = pointer();
                        own_or_new().slats.store(slats, Ordering::Relaxed);
                        let programs = 0x1_0000 + number;
                        assert_eq!(entered(programs)[..2], [programs, slats]);
                        assert_eq!(super::programs(), programs);
                        forget();
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_child_is_found_by_its_own_id() {
        set_stack(0x1000, 0x9000);
        set_programs(0x4000);
        // SAFETY: the child ends without calling the C library.
        unsafe {
            let child = super::super::calls::fork();
            if child == 0 {
                after_fork();
                let [_, _, found] = entered(0x4000);
                let is_own = found == OWN.get() as usize && found != 0;
                let is_same = stack_ends() == (0x1000, 0x9000) && programs() == 0x4000;
                libc::_exit(i32::from(!is_own || !is_same));
            }
            let mut status = -1;
            libc::waitpid(child, &mut status, 0);
            assert_eq!(status, 0);
        }
        set_stack(0, 0);
    }
}
