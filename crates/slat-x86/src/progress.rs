//! The notify window: how long the CPU may deliver events without executing an instruction in between.
//!
//! A guest can make its CPU deliver events forever, without executing an instruction or accepting an interrupt. An
//! example is a data breakpoint on the stack of the #DB handler: if the interrupt stack table makes each delivery push
//! at the same address, each delivery of #DB hits the breakpoint again. Processors report this to the hypervisor by a
//! VM exit (SDM volume 3, "Notify VM Exits").

use std::time::{Duration, Instant};

/// The number of consecutive deliveries after which the CPU reads the clock. Ordinary guests have only a few
/// consecutive deliveries, so the CPU never reads the clock for them.
const PATIENCE: u32 = 64;

/// The events that were delivered since the CPU's last instruction.
#[derive(Default)]
pub(crate) struct Progress {
    /// The number of instructions that the CPU had executed when `deliveries` was last reset to 0.
    instructions: u64,
    /// The number of events that were delivered, or whose delivery has failed, since `deliveries` was last reset.
    deliveries: u32,
    /// The time of delivery number [`PATIENCE`].
    since: Option<Instant>,
}

impl Progress {
    /// Call before delivering an event. `instructions` is the number of instructions that the CPU has executed so far.
    pub(crate) fn note_delivery(&mut self, instructions: u64) {
        if self.instructions != instructions {
            *self = Progress {
                instructions,
                ..Progress::default()
            };
        }
        self.deliveries = self.deliveries.saturating_add(1);
    }

    /// Whether events have been delivered for longer than `window` without an instruction in between. If so, begins
    /// another window.
    pub(crate) fn exceeds(&mut self, window: Duration) -> bool {
        if self.deliveries < PATIENCE {
            return false;
        }
        let since = self.since.get_or_insert_with(Instant::now);
        let exceeds = since.elapsed() > window;
        if exceeds {
            self.since = None;
        }
        exceeds
    }
}
