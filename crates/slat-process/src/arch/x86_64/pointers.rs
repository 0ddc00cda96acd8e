//! Two thread pointers on one thread: the program's and slat's.
//!
//! A statically linked program brings its own C library. Its thread pointer (the base of FS) is not the one that slat's
//! C library and the standard library need. If such a program is loaded ([`separate`]), each entry from the program
//! into slat sets FS to slat's pointer, and each exit sets the program's pointer again. In between, all of slat's code
//! runs on slat's pointer. The base of GS, which C libraries do not use, points to a struct with both pointers. In
//! other processes there is only one thread pointer, which slat does not change.
//!
//! Entries are the handlers that the kernel calls ([`handler!`](crate::handler!)). Exits are their returns, and
//! [`call_program`](crate::handler::call_program), by which a handler calls a handler of the program.

use std::arch::asm;
use std::cell::Cell;
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the program's thread pointer differs from slat's. Assembly reads it.
pub static SEPARATE: AtomicBool = AtomicBool::new(false);

/// Both thread pointers of a thread, and the ends of slat's stack and of the alternate stack. Assembly finds this
/// struct at the base of GS.
#[repr(C)]
struct Pointers {
    slats: Cell<usize>,
    programs: Cell<usize>,
    /// The lower and upper end of slat's stack ([`stack`](crate::stack)). Both are 0 if there is no such stack.
    stack: [Cell<usize>; 2],
    /// The lower and upper end of the program's alternate stack.
    alternate: [Cell<usize>; 2],
    /// The lowest address of slat's stack that is in use, while a handler runs on the alternate stack.
    used_to: Cell<usize>,
}

/// The offset of the lower end of slat's stack from the base of GS, for assembly.
pub const STACK_LOW: usize = offset_of!(Pointers, stack);
/// The offset of the upper end of slat's stack from the base of GS.
pub const STACK_HIGH: usize = STACK_LOW + size_of::<usize>();
/// The offset of the lower end of the program's alternate stack from the base of GS.
pub const ALTERNATE_LOW: usize = offset_of!(Pointers, alternate);
/// The offset of the upper end of the program's alternate stack from the base of GS.
pub const ALTERNATE_HIGH: usize = ALTERNATE_LOW + size_of::<usize>();

thread_local! {
    // The variable has neither an initialiser nor a destructor, because signal handlers use it.
    static POINTERS: Pointers = const {
        Pointers {
            slats: Cell::new(0),
            programs: Cell::new(0),
            stack: [const { Cell::new(0) }; 2],
            alternate: [const { Cell::new(0) }; 2],
            used_to: Cell::new(0),
        }
    };
}

/// Stores the ends of the stack on which slat's code runs on this thread.
pub(crate) fn set_stack(low: usize, high: usize) {
    POINTERS.with(|pointers| {
        pointers.stack[0].set(low);
        pointers.stack[1].set(high);
    });
}

/// Returns the ends of slat's stack on this thread. Both are 0 if the thread has no such stack.
pub(crate) fn stack_ends() -> (usize, usize) {
    POINTERS.with(|pointers| (pointers.stack[0].get(), pointers.stack[1].get()))
}

/// Records `address` as the lowest address of slat's stack that is in use. Returns the address recorded before.
pub(crate) fn set_used_to(address: usize) -> usize {
    POINTERS.with(|pointers| pointers.used_to.replace(address))
}

/// Returns the lowest address of slat's stack that is in use.
pub(crate) fn used_to() -> usize {
    POINTERS.with(|pointers| pointers.used_to.get())
}

/// Stores the ends of the alternate stack that the program has given this thread.
pub fn set_alternate(stack: &libc::stack_t) {
    let (low, size) = match stack.ss_flags & libc::SS_DISABLE {
        0 => (stack.ss_sp as usize, stack.ss_size),
        _ => (0, 0),
    };
    POINTERS.with(|pointers| {
        pointers.alternate[0].set(low);
        pointers.alternate[1].set(low + size);
    });
}

/// Whether the program's thread pointer differs from slat's.
pub fn are_separate() -> bool {
    SEPARATE.load(Ordering::Relaxed)
}

/// Whether the processor and the kernel let programs change the bases of FS and GS by instructions (`AT_HWCAP2`, bit 1;
/// since Linux 5.9).
pub fn can_be_separate() -> bool {
    const FSGSBASE: u64 = 1 << 1;
    // SAFETY: the call reads the process's auxiliary vector.
    unsafe { libc::getauxval(libc::AT_HWCAP2) & FSGSBASE != 0 }
}

/// Gives this thread a second thread pointer, `programs`, on which the program runs from now on. After the first call,
/// each thread that runs the program needs such a pointer.
///
/// # Safety
/// - [`can_be_separate`] holds.
/// - The thread runs on slat's pointer, and nothing else in the process uses GS.
pub unsafe fn separate(programs: usize) {
    POINTERS.with(|pointers| {
        let slats: usize;
        // SAFETY: the processor and the kernel allow these instructions, the thread runs on slat's pointer, and nothing
        // else uses GS, as this function's `# Safety` requires.
        unsafe {
            asm!("rdfsbase {}", out(reg) slats, options(nomem, nostack));
            pointers.slats.set(slats);
            pointers.programs.set(programs);
            asm!("wrgsbase {}", in(reg) std::ptr::from_ref(pointers), options(nostack));
        }
    });
    SEPARATE.store(true, Ordering::Relaxed);
}

/// Gives a thread of slat's own its own base of GS: a new thread still has the base of GS of the thread that created
/// it. Call after the first call of [`separate`].
///
/// # Safety
/// - The requirements of [`separate`].
pub unsafe fn separate_own() {
    // SAFETY: `separate` has the same requirements as this function.
    unsafe { separate(0) }
}

/// Returns the program's thread pointer on this thread.
pub fn programs() -> usize {
    POINTERS.with(|pointers| pointers.programs.get())
}

/// Changes the program's thread pointer on this thread.
pub fn set_programs(pointer: usize) {
    POINTERS.with(|pointers| pointers.programs.set(pointer));
}

/// Call when this thread does not run the program any more. On this architecture there is nothing to do: the base of GS
/// stays.
pub fn forget() {}

/// Call in a child of fork. On this architecture there is nothing to do: the child inherits the base of GS, at which it
/// has its own copy of the struct.
pub fn after_fork() {}

/// Assembly that sets FS to slat's pointer if RAX, which equals FS, is the program's pointer. Changes RAX and the
/// flags.
#[macro_export]
macro_rules! to_slats_pointer {
    () => {
        "cmp rax, gs:[0]\nje 77f\nmov gs:[8], rax\nmov rax, gs:[0]\nwrfsbase rax\n77:"
    };
}

/// Assembly that sets FS to the program's pointer. Changes RAX.
#[macro_export]
macro_rules! to_programs_pointer {
    () => {
        "mov rax, gs:[8]\nwrfsbase rax"
    };
}
