//! arm64's state of a VM, and of the part of a vCPU that other threads use.

use crate::arch::aarch64::policy::CpuChoice;
use crate::engine::TableFormat;
use crate::errno::{Result, fail};
use crate::policy::{self, Policies};
use kvm_bindings::{KVM_VM_TYPE_ARM_IPA_SIZE_MASK, kvm_userspace_memory_region2};

/// The number of bits of an IPA (a guest-physical address) if the client does not set it: KVM's `KVM_PHYS_SHIFT`.
const DEFAULT_IPA_BITS: u32 = 40;
/// The least number of bits: the smallest PARange of a processor.
const LEAST_IPA_BITS: u32 = 32;

/// Returns the most bits that an IPA can have: as many as the tables of this process translate.
pub(crate) fn ipa_limit() -> u32 {
    let format = policy::current().map_or_else(|_| TableFormat::default(), |now| now.format);
    match format {
        TableFormat::Aarch64Lpa2 => 52,
        TableFormat::Aarch64 | TableFormat::Aarch64Kib16 | TableFormat::Aarch64Kib64 => 48,
    }
}

/// The type of a VM, which a client gives to `KVM_CREATE_VM`: the number of bits of an IPA (api.rst 4.2).
#[derive(Clone, Copy, Debug)]
pub(crate) struct VmType {
    ipa_bits: u32,
}

impl VmType {
    /// Returns the type that has this number. 0 means 40 bits.
    ///
    /// # Errors
    /// `EINVAL` for a number of bits below 32 or above `KVM_CAP_ARM_VM_IPA_SIZE`, and for other bits of the number: VMs
    /// whose memory the host cannot access do not exist.
    pub(crate) fn of(number: u64) -> Result<Self> {
        if number & !u64::from(KVM_VM_TYPE_ARM_IPA_SIZE_MASK) != 0 {
            return fail(libc::EINVAL);
        }
        match number as u32 {
            0 => Ok(VmType {
                ipa_bits: DEFAULT_IPA_BITS,
            }),
            ipa_bits if (LEAST_IPA_BITS..=ipa_limit()).contains(&ipa_bits) => {
                Ok(VmType { ipa_bits })
            }
            _ => fail(libc::EINVAL),
        }
    }

    /// Whether memory can be private in VMs of this type.
    pub(crate) fn is_protected(self) -> bool {
        false
    }
}

/// arm64's state of a VM.
pub(crate) struct VmState {
    ipa_bits: u32,
}

impl VmState {
    /// Creates the state of a new VM.
    ///
    /// # Errors
    /// No error can happen.
    pub(crate) fn new(vm_type: VmType, _: &Policies, _: CpuChoice) -> Result<Self> {
        Ok(VmState {
            ipa_bits: vm_type.ipa_bits,
        })
    }

    /// Returns the value of a capability that the VM's client has set. `None`: the capability has the same value for
    /// all VMs.
    pub(crate) fn extension(&self, _cap: u64) -> Option<i32> {
        None
    }

    /// Checks what the architecture asks of a memslot. `has_private`: the slot has private memory besides the memory that
    /// the client shares with the guest.
    ///
    /// # Errors
    /// KVM's: `EFAULT` for a memslot beyond the guest's last IPA, `EINVAL` for private memory, which no VM has.
    pub(crate) fn check_slot(
        &self,
        region: &kvm_userspace_memory_region2,
        has_private: bool,
    ) -> Result<()> {
        let end = region.guest_phys_addr.saturating_add(region.memory_size);
        match () {
            () if end > 1 << self.ipa_bits => fail(libc::EFAULT),
            () if has_private => fail(libc::EINVAL),
            () => Ok(()),
        }
    }
}

/// arm64's state of a vCPU that other threads use: none.
pub(crate) struct VcpuShared;
