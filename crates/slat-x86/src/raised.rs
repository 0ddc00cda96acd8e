//! The exception or the exit that an instruction has raised.

use crate::machine::Exit;
use crate::state::Exception;

/// The exception or exit of an instruction that has ended with a [`Break`](crate::flow::Break). Valid only if the
/// `Break` says so.
pub(crate) struct Raised {
    pub(crate) exception: Exception,
    /// The linear address of a page fault.
    pub(crate) address: u64,
    /// Whether the exception is for a non-canonical address. If the access is to the stack segment, the exception is
    /// #SS.
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
