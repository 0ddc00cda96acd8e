//! arm64's state of a vCPU, besides its CPU and its machine.

use crate::arch::aarch64::cpu::Refusal;
use slat_a64::Stage2;

/// The access that one `KVM_RUN` began and the next `KVM_RUN` completes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Unfinished {
    #[default]
    Nothing,
    /// An MMIO read: the next run reads this many bytes from `kvm_run`.
    MmioRead(usize),
    /// An MMIO write: the next run reads no data, but finishes the instruction.
    MmioWrite,
}

/// arm64's state of a vCPU that only one thread at a time uses.
pub(crate) struct VcpuState {
    /// The features of `KVM_ARM_VCPU_INIT`. `None`: the client has not initialised the vCPU.
    pub(crate) features: Option<u32>,
    pub(crate) unfinished: Unfinished,
    /// The last access to a device that was reported to the client.
    pub(crate) device_access: Option<Stage2<Refusal>>,
}

impl Default for VcpuState {
    fn default() -> Self {
        VcpuState {
            features: None,
            unfinished: Unfinished::Nothing,
            device_access: None,
        }
    }
}
