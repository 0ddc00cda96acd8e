//! The counters that a vCPU has besides those of every architecture.

use crate::arch::aarch64::cpu::Exit;
use crate::counters::exits;

exits! {
    /// Exits of the CPU, for any reason.
    exits,
    /// WFE instructions that made the vCPU wait.
    wfe_exit_stat,
    /// WFI instructions that made the vCPU wait.
    wfi_exit_stat,
    /// Accesses to addresses without memory that exit to the client.
    mmio_exit_user,
    /// Accesses to addresses without memory that do not exit to the client.
    mmio_exit_kernel,
    /// Hypercalls (HVC) that the guest has made.
    hvc_exit_stat,
    /// The number of `KVM_RUN` calls that a signal ended.
    signal_exits,
    /// Times that the vCPU dropped all translations.
    tlb_flush,
}

impl Exits {
    /// Counts an exit of the CPU.
    pub(crate) fn count(&self, _: &Exit) {
        self.exits.add(1);
    }
}

/// The reason of an exit. The times of exits are counted for each reason separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Mmio,
    Interrupt,
    Other,
}

impl Reason {
    /// The names of the reasons, in the order of [`Reason`].
    pub(crate) const NAMES: [&str; 3] = ["mmio", "interrupt", "other"];
}

/// Returns the reason of an exit. `None`: the exit is a halt, whose time is counted separately.
pub(crate) fn reason(exit: &Exit) -> Option<Reason> {
    Some(match exit {
        Exit::Wfi => return None,
        Exit::Attention => Reason::Interrupt,
        Exit::Mmio { .. } => Reason::Mmio,
        _ => Reason::Other,
    })
}

/// KVM's statistics of operations that a vCPU of slat never does. On arm64 there are none.
pub(crate) const NEVER: &[&str] = &[];
/// KVM's statistics of states in which a vCPU of slat never is. On arm64 there are none.
pub(crate) const NEVER_IN: &[&str] = &[];

/// Explains a counter of the CPU to users.
pub(crate) fn meaning(counter: &str) -> &'static str {
    match counter {
        "instructions_compiled" => "instructions that compiled code has executed",
        _ => "batches of instructions that the processor has executed",
    }
}
