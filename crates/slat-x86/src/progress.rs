//! The notify window: how long the CPU may deliver events without executing an instruction in between.
//!
//! A guest can keep its CPU from executing any instruction, and so from every moment at which an interrupt could be
//! taken. An example is a breakpoint on the stack of the #DB handler: if the interrupt stack table makes each delivery
//! begin at the same address, each delivery of #DB hits the breakpoint again. Processors report this to the hypervisor
//! by a VM exit (SDM volume 3, "Notify VM Exits").

use crate::Cpu;
use std::time::Instant;

/// The number of deliveries in a row after which the CPU looks at the clock. Ordinary guests have a few at most,
/// and pay nothing more.
const PATIENCE: u32 = 64;

/// What the CPU has done since its last instruction.
#[derive(Default)]
pub(crate) struct Progress {
    /// The number of instructions executed when `deliveries` was 0.
    instructions: u64,
    /// The number of events delivered since then, or lost in their delivery.
    deliveries: u32,
    /// The time of delivery number [`PATIENCE`].
    since: Option<Instant>,
}

impl Cpu {
    /// Call before delivering an event.
    pub(crate) fn note_delivery(&mut self) {
        let instructions = self.counters.instructions;
        if self.progress.instructions != instructions {
            self.progress = Progress {
                instructions,
                ..Progress::default()
            };
        }
        self.progress.deliveries = self.progress.deliveries.saturating_add(1);
    }

    /// Whether the CPU has delivered events for longer than [`Cpu::notify_window`]. If so, begins another window.
    pub(crate) fn exceeds_notify_window(&mut self) -> bool {
        let Some(window) = self.notify_window else {
            return false;
        };
        if self.progress.deliveries < PATIENCE {
            return false;
        }
        let since = self.progress.since.get_or_insert_with(Instant::now);
        let exceeds = since.elapsed() > window;
        if exceeds {
            self.progress.since = None;
        }
        exceeds
    }
}
