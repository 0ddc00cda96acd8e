//! The part of Hyper-V's interface that only the thread that runs the vCPU uses.

use slat_hyperv::cpuid::Privileges;
use slat_hyperv::stimer::Timers;

/// An exit that the client must see before the guest continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HypervExit {
    /// Exit to the client, because the guest has written that it has crashed.
    Crash,
    /// The guest asks for a reset of the machine.
    Reset,
    /// The guest has written this MSR of its SynIC.
    Synic(u32),
    /// The guest's debugger has written this MSR.
    Debugger(u32),
}

/// A vCPU's part of Hyper-V's interface.
#[derive(Debug, Default)]
pub(crate) struct VcpuHyperv {
    /// The privileges that the guest's CPUID grants. `None`: the guest's CPUID does not have Hyper-V's interface.
    pub(crate) privileges: Option<Privileges>,
    /// Whether the guest may use only the features that its CPUID allows (`KVM_CAP_HYPERV_ENFORCE_CPUID`).
    pub(crate) enforces_cpuid: bool,
    pub(crate) timers: Timers,
    /// The value of VP_ASSIST_PAGE.
    pub(crate) assist_page: u64,
    /// The number that is added to the thread's run time, in units of 100 ns, modulo 2^64. The sum is the guest's
    /// VP_RUNTIME.
    pub(crate) runtime_offset: u64,
    /// The exit that the client must see before the guest continues.
    pub(crate) exit: Option<HypervExit>,
}
