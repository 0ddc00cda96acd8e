//! The caller's requests to end a run.

use crate::watch::Debugger;
use std::time::Duration;

/// The events that end a run because the caller has asked for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Whether to end the run with [`Exit::InterruptWindow`](crate::Exit::InterruptWindow) when the guest could take an
    /// interrupt.
    pub interrupt_window: bool,
    /// Whether to end the run with [`Exit::InterruptWindow`](crate::Exit::InterruptWindow) when GIF becomes set.
    pub gif_window: bool,
    /// The time for which events may be delivered without an instruction in between. After that the run ends with
    /// [`Exit::Notify`](crate::Exit::Notify).
    pub notify_window: Option<Duration>,
    /// The debug exceptions that end the run with [`Exit::Debug`](crate::Exit::Debug), and are not delivered to the
    /// guest.
    pub debugger: Debugger,
}
