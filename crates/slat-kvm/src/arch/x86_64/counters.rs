//! x86's own counters of a vCPU, besides those that every architecture has.

use crate::counters::exits;
use slat_x86::Exit;

exits! {
    /// Exits of the CPU, for any reason.
    exits,
    /// Port accesses.
    io_exits,
    /// MMIO accesses that exit to the client.
    mmio_exits,
    /// The number of `KVM_RUN` calls that a signal ended.
    signal_exits,
    /// Exits because a pending interrupt could be delivered.
    irq_window_exits,
    /// Exits because the client could inject an interrupt.
    request_irq_exits,
    /// Exits because an attention bit was raised. KVM's counter of this name counts host interrupts.
    irq_exits,
    /// Exits because the guest executed HLT.
    halt_exits,
    /// Instructions that KVM itself would emulate: MMIO accesses, and instructions that the CPU does not have.
    insn_emulation,
    /// Instructions that the CPU does not have.
    insn_emulation_fail,
    /// Hypercalls of the guest (VMCALL or VMMCALL).
    hypercalls,
    /// Interrupts of the local APIC or the 8259 that were delivered.
    irq_injections,
    /// NMIs that were delivered.
    nmi_injections,
    /// Times that the vCPU dropped all translations.
    tlb_flush,
    /// Times that the notify window expired.
    notify_window_exits,
}

impl Exits {
    /// Counts an exit of the CPU.
    pub(crate) fn count(&self, exit: &Exit) {
        self.exits.add(1);
        match exit {
            Exit::Attention => self.irq_exits.add(1),
            Exit::InterruptWindow => self.irq_window_exits.add(1),
            Exit::Notify => self.notify_window_exits.add(1),
            Exit::Io { .. } => self.io_exits.add(1),
            Exit::Mmio { .. } => self.insn_emulation.add(1),
            Exit::Hlt => self.halt_exits.add(1),
            Exit::Emulation { .. } => {
                self.insn_emulation.add(1);
                self.insn_emulation_fail.add(1);
            }
            Exit::Smi
            | Exit::Rsm
            | Exit::Hypercall
            | Exit::Delivery { .. }
            | Exit::Msr { .. }
            | Exit::Shutdown
            | Exit::BadAddress
            | Exit::OutOfMemory
            | Exit::BusLock
            | Exit::Debug { .. }
            | Exit::Probe(_) => {}
        }
    }
}

/// The reason of an exit. The times of exits are counted for each reason separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Io,
    Mmio,
    Interrupt,
    Other,
}

impl Reason {
    /// The names of the reasons, in the order of [`Reason`].
    pub(crate) const NAMES: [&str; 4] = ["io", "mmio", "interrupt", "other"];
}

/// Returns the reason of an exit. `None`: the exit is a halt, whose time is counted separately.
pub(crate) fn reason(exit: &Exit) -> Option<Reason> {
    match exit {
        Exit::Io { .. } => Some(Reason::Io),
        Exit::Mmio { .. } => Some(Reason::Mmio),
        Exit::Attention | Exit::InterruptWindow => Some(Reason::Interrupt),
        Exit::Hlt => None,
        _ => Some(Reason::Other),
    }
}

/// KVM's statistics of operations that a vCPU of slat never does: flushing the host's caches, reloading the host's
/// registers, running nested guests, yielding to another vCPU. These statistics are always 0.
pub(crate) const NEVER: &[&str] = &[
    "nmi_window_exits",
    "l1d_flush",
    "host_state_reload",
    "fpu_reload",
    "nested_run",
    "directed_yield_attempted",
    "directed_yield_successful",
    "preemption_reported",
    "preemption_other",
];
/// KVM's statistics of states that a vCPU of slat is never in.
pub(crate) const NEVER_IN: &[&str] = &["guest_mode"];

/// Explains a counter of the CPU to users.
pub(crate) fn meaning(counter: &str) -> &'static str {
    match counter {
        "instructions" => "instructions executed",
        "instructions_compiled" => "  in compiled code",
        "regions" => "regions of compiled code",
        "regions_shared" => "  of them compiled for other vCPUs, or before",
        "blocks" => "basic blocks interpreted, or compiled regions entered",
        "blocks_looked_up" => "  looked up beyond the first table",
        "blocks_decoded" => "  decoded",
        "regions_chained" => "compiled regions entered by others, directly",
        "pages_compared" => "pages of decoded code compared with memory",
        "code_stores" => "stores to pages with decoded code",
        "tlb_misses" => "data translations that the software TLB did not have",
        "stlb_hits" => "translations of data and code that its second level had",
        "flushes_cr3" => "flushes of it by CR3",
        "flushes_pcid" => "  by INVPCID, without global pages",
        "flushes_other" => "  by other registers, or INVPCID",
        "flushes_page" => "  of one page, or a large one",
        "flushes_host" => "  because memory or memslots of the host changed",
        _ => "",
    }
}
