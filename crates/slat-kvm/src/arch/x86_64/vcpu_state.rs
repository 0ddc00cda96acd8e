//! x86's state of a vCPU, besides its CPU and its machine.

use crate::arch::x86_64::events::Requested;

/// The access that one `KVM_RUN` has begun and the next `KVM_RUN` completes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Unfinished {
    #[default]
    Nothing,
    /// IN: the next run reads this many bytes from the port-data page.
    PortIn(usize),
    /// OUT: the next run reads no data, but finishes the instruction.
    PortOut,
    /// One of KVM's hypercalls: the next run reads its result from `kvm_run`.
    Hypercall,
    /// One of Hyper-V's hypercalls: the next run reads its output from `kvm_run`.
    HypervCall,
    /// An access to Hyper-V's synthetic debugger: the next run reads the debugger's status from `kvm_run`.
    HypervDebugger,
    /// RDMSR or WRMSR: the next run reads its result from `kvm_run`.
    Msr,
    /// An MMIO read: the next run reads this many bytes from `kvm_run`.
    MmioRead(usize),
}

/// x86's state of a vCPU that only one thread at a time uses.
pub(crate) struct VcpuState {
    pub(crate) unfinished: Unfinished,
    pub(crate) mp_state: u32,
    /// The events that the client requested by `KVM_SET_VCPU_EVENTS` and the next run delivers.
    pub(crate) requested: Requested,
    /// An interrupt of the client's 8259, which the client has injected by `KVM_INTERRUPT` and the vCPU has not
    /// acknowledged yet. Used only if the client emulates all controllers except the local APICs.
    pub(crate) external: Option<u8>,
    /// Whether the client's debugger blocks interrupts and NMIs of the guest (`KVM_GUESTDBG_BLOCKIRQ`).
    pub(crate) interrupts_blocked: bool,
}

impl VcpuState {
    /// Creates the state of a new vCPU. `mp_state` is its state for `KVM_GET_MP_STATE`.
    pub(crate) fn new(mp_state: u32) -> Self {
        VcpuState {
            unfinished: Unfinished::Nothing,
            mp_state,
            requested: Requested::default(),
            external: None,
            interrupts_blocked: false,
        }
    }
}
