//! `/dev/kvm` itself: version, capabilities, and creation of VMs.

use crate::arch::{self, VmType};
use crate::errno::Result;
use crate::policy;
use crate::run_page::{memfd, mmap_size, sized_memfd};
use crate::vm::VmObject;
use crate::words::Jit;
use crate::{caps, filters};
use kvm_bindings::KVM_API_VERSION;
use slat::MmuKind;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The size in bytes of the memfd that represents `/dev/kvm`. Other deleted files rarely have this size. So `fstat`
/// usually knows by the size alone that a file is not this memfd, and need not make another system call.
pub const DESCRIPTOR_SIZE: usize = 0x36d;

/// The object that a descriptor of `/dev/kvm` refers to. The object has no state.
#[derive(Debug, Default)]
pub struct System;

impl System {
    /// Creates a descriptor for `/dev/kvm`.
    ///
    /// # Errors
    /// The host's error for making a file.
    pub fn descriptor(close_on_exec: bool) -> Result<OwnedFd> {
        filters::kvm_is_used();
        arch::note_start();
        match sized_memfd(c"kvm", DESCRIPTOR_SIZE, close_on_exec) {
            // The client's RLIMIT_FSIZE forbids this size. The memfd is empty instead, but then `fstat` in another
            // program does not recognise it.
            Err(error) if error.errno() == libc::EFBIG => memfd(c"kvm", 0, close_on_exec),
            made => made,
        }
    }

    /// Carries out `KVM_GET_API_VERSION`.
    pub fn api_version(&self) -> i32 {
        KVM_API_VERSION as i32
    }

    /// Carries out `KVM_CHECK_EXTENSION`.
    pub fn check_extension(&self, cap: u64) -> i32 {
        let mmu = policy::current().map_or(MmuKind::default(), |policies| policies.mmu);
        caps::check(cap, mmu)
    }

    /// Carries out `KVM_GET_VCPU_MMAP_SIZE`.
    pub fn vcpu_mmap_size(&self) -> usize {
        mmap_size()
    }

    /// Carries out `KVM_CREATE_VM`. `mmu` makes the VM's tables; `jit` says which code its CPUs compile. For each,
    /// `None` means that the environment decides.
    ///
    /// # Errors
    /// `EINVAL` for a type that is not supported, for invalid policies in the environment, and for an MMU that does not
    /// make tables of this process's format; `ENOMEM`; the host's error for making a file.
    pub fn create_vm(
        &self,
        vm_type: u64,
        mmu: Option<MmuKind>,
        jit: Option<Jit>,
    ) -> Result<(Arc<VmObject>, OwnedFd)> {
        let vm_type = VmType::of(vm_type)?;
        filters::kvm_is_used();
        let fd = memfd(c"kvm-vm", 0, true)?;
        Ok((VmObject::new(vm_type, mmu, jit)?, fd))
    }
}
