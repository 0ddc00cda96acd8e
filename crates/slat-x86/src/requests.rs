//! The caller's requests: the events at which a run is to end.

use crate::watch::Debugger;
use std::time::Duration;

/// The events at which a run ends because the caller has requested an exit for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Whether the run ends with [`Exit::InterruptWindow`](crate::Exit::InterruptWindow) when the guest could take an
    /// interrupt.
    pub interrupt_window: bool,
    /// Whether the run ends with [`Exit::InterruptWindow`](crate::Exit::InterruptWindow) when GIF becomes set.
    pub gif_window: bool,
    /// If events are delivered for longer than this time without an instruction in between, the run ends with
    /// [`Exit::Notify`](crate::Exit::Notify).
    pub notify_window: Option<Duration>,
    /// Which debug exceptions end the run with [`Exit::Debug`](crate::Exit::Debug) instead of being delivered to the
    /// guest.
    pub debugger: Debugger,
}
