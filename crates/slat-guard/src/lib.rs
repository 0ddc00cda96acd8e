//! Memory accesses that survive SIGSEGV, SIGBUS and a kick.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! Guest memory belongs to the program that provides it (the VMM): at any moment and on any thread, the program may
//! unmap it, protect it, truncate the file that backs it, or leave its pages to a userfaultfd handler. The result of a
//! check before an access may no longer be true when the access happens, so the access itself must be able to fail.
//!
//! Every guarded access consists of a few machine instructions (`access`, `sized`, `arch`). An exception table
//! (`table`) contains, for each, its address and the address at which the thread continues if it faults. The signal
//! handlers (`signal`) search this table for the interrupted instruction pointer. If they find it, they change only the
//! instruction pointer, and the access returns [`Gone`]. Code that is generated at run time has its own table
//! (`generated`). If the instruction pointer is in neither table, the signal is not slat's, and is passed to the action
//! that was set before ([`set_chained`]).
//!
//! The program's own handlers do not run while a thread is in slat's code (`section`).
//!
//! A *kick* ([`kick`]) is a signal to one thread. If the thread is in a guarded access, also if it sleeps in the
//! kernel's page fault handler, the access ends and returns [`Gone`]. Otherwise a kick does nothing.
//!
//! One process may contain several copies of this crate (in an executable and in a preloaded library). Each has its own
//! table, and passes signals that are not its own to the other.

#[cfg(not(target_os = "linux"))]
compile_error!("slat-guard supports Linux only");

mod access;
mod arch;
mod bulk;
mod generated;
mod queue;
mod section;
mod signal;
mod sized;
mod sync;
mod table;

pub use access::{Word, compare_exchange, fetch_add, fetch_and, fetch_or, load, store, swap};
pub use bulk::{copy, copy_in, copy_out, fill, fill_elements, matches};
pub use generated::set_generated;
pub use section::{Section, blockable, change_mask, defer, never_block, on_deferral};
pub use signal::{
    after_fork_in_child, forget_kick, install, kick, kick_signal, on_fault, restorer, set_chained,
    set_kernels, set_restorer, was_kicked,
};
pub use sized::{compare_exchange_sized, load_sized, store_sized};

/// The guarded access was not made, and changed nothing: the host memory is not accessible (SIGSEGV, SIGBUS), or the
/// thread was kicked. Try again or give up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the host memory is not accessible, or the access was interrupted")
    }
}

impl std::error::Error for Gone {}
