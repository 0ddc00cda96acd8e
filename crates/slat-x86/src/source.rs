//! The sources of events: interrupts, exceptions and instructions.

/// The cause of an interrupt or exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// An external interrupt.
    Interrupt,
    /// A non-maskable interrupt.
    Nmi,
    /// An exception that is a trap or an abort.
    External,
    /// An exception that is a fault. RF is set in the flags that are pushed (SDM volume 3, "Instruction-Breakpoint
    /// Exception Condition").
    Fault,
    /// INT3 or INTO. The DPL of the gate is checked.
    SoftwareException,
    /// INT n. The DPL of the gate is checked.
    Software,
}

impl Source {
    /// Returns the EXT bit for the error code of a fault during the delivery of this event. Intel's CPUs set EXT for
    /// all events that no instruction raised on purpose (SDM volume 3, "Error Code"). AMD's CPUs set EXT for interrupts
    /// (AMD64 volume 2, 8.4.1).
    pub(crate) fn external(self, is_intel: bool) -> u32 {
        u32::from(match is_intel {
            true => !self.is_software(),
            false => matches!(self, Source::Interrupt | Source::Nmi),
        })
    }

    /// Whether an instruction raised the event on purpose (INT n, INT3, INTO).
    pub(crate) fn is_software(self) -> bool {
        matches!(self, Source::Software | Source::SoftwareException)
    }
}
