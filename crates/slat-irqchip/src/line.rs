//! Interrupt lines that several sources share, and the outcome of a change of a line.

/// The effect of a change of an interrupt line at one controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The line is high, but no interrupt is delivered: the line is masked, or the previous interrupt of its level has
    /// not ended (EOI) yet.
    Ignored,
    /// The line is high, but its earlier interrupt is still pending: the guest sees one interrupt for both.
    Coalesced,
    /// The line is high, and this many CPUs have a new interrupt pending. 0: no local APIC has accepted the message.
    Delivered(usize),
    /// The line is low, which is no interrupt.
    Lowered,
}

impl Outcome {
    /// Returns the number by which `KVM_IRQ_LINE_STATUS` reports this outcome. KVM reports 1 for a lowered line.
    pub fn status(self) -> i32 {
        match self {
            Outcome::Ignored => -1,
            Outcome::Coalesced => 0,
            Outcome::Delivered(cpus) => i32::try_from(cpus).unwrap_or(i32::MAX),
            Outcome::Lowered => 1,
        }
    }
}

/// The input lines of a controller. A line is high while at least one of its sources holds it high.
#[derive(Clone, Debug)]
pub(crate) struct Lines<const N: usize> {
    /// For each line, the sources that hold the line high, one bit for each source.
    held: [u64; N],
}

impl<const N: usize> Lines<N> {
    pub(crate) const fn new() -> Self {
        Lines { held: [0; N] }
    }

    /// Makes `source` (modulo 64) hold `line` high, or stop holding it high. Returns whether the line is high
    /// afterwards.
    pub(crate) fn set(&mut self, line: usize, source: u8, level: bool) -> bool {
        let bit = 1 << (source & 63);
        match level {
            true => self.held[line] |= bit,
            false => self.held[line] &= !bit,
        }
        self.held[line] != 0
    }

    /// Makes all `sources` release `line`. Returns whether the line fell. A line that had no source has not fallen:
    /// after a restore such a line may be high.
    pub(crate) fn lower(&mut self, line: usize, sources: u64) -> bool {
        let was_held = self.held[line] & sources != 0;
        self.held[line] &= !sources;
        was_held && self.held[line] == 0
    }
}
