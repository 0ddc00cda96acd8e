//! Memory accesses that survive SIGSEGV, SIGBUS and a kick.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! Guest memory belongs to the program that provides it: the program may unmap it, protect it, truncate the file that
//! backs it or leave its pages to a userfaultfd handler, at any moment and on any thread. A check before an access may
//! no longer be true when the access happens, so the access itself has to be able to fail.
//!
//! Every access here is a few machine instructions (`access`, `sized`, `arch`) whose addresses are stored in an
//! exception table (`table`) next to the address at which the thread continues when the instruction
//! cannot be executed. The signal handlers (`signal`) look the interrupted instruction pointer up
//! in that table. If they find it, they change the instruction pointer and nothing else, and the
//! access returns [`Gone`]. Code that is made at run time has a table of its own (`generated`). If the
//! instruction pointer is in neither, the signal is not slat's and is handed to the action that was
//! set before ([`set_chained`]).
//!
//! The program's own handlers do not run while a thread is in slat's code (`section`).
//!
//! A *kick* ([`kick`]) is a signal to one thread. It interrupts a thread that sleeps in the
//! kernel's page fault handler inside one of these accesses; elsewhere it does nothing.
//!
//! Several copies of this crate in one process (an executable and a preloaded library) have a table
//! each and chain to one another.

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
    after_fork_in_child, forget_kick, install, kick, kick_signal, restorer, set_chained,
    set_kernels, set_restorer, was_kicked,
};
pub use sized::{compare_exchange_sized, load_sized, store_sized};

/// The access did not happen: the host memory is not accessible (SIGSEGV, SIGBUS), or the thread
/// was kicked. Nothing was changed; try again or give up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the host memory is not accessible, or the access was interrupted")
    }
}

impl std::error::Error for Gone {}
