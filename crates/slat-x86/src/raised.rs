//! The exception or the exit that an instruction has raised.

use crate::machine::Exit;
use crate::state::Exception;

/// The exception or exit that an instruction has raised. Valid only if the instruction has ended with a
/// [`Break`](crate::flow::Break) that says so.
pub(crate) struct Raised {
    pub(crate) exception: Exception,
    /// The linear address, if the exception is a page fault.
    pub(crate) address: u64,
    /// Whether a non-canonical address has caused the exception. The exception is #SS if the access is to the stack
    /// segment.
    pub(crate) noncanonical: bool,
    pub(crate) exit: Option<Exit>,
}

impl Raised {
    pub(crate) const fn nothing() -> Self {
        Self {
            exception: Exception {
                vector: 0,
                error: None,
            },
            address: 0,
            noncanonical: false,
            exit: None,
        }
    }
}
