//! Calls of a [`VmFd`] for encrypted guests. Each call is refused, as in a KVM without SEV.

use crate::api::VmFd;
use crate::errno::{Result, fail};
use kvm_bindings::{kvm_enc_region, kvm_sev_cmd};

impl VmFd {
    /// Refuses `KVM_MEMORY_ENCRYPT_OP`.
    ///
    /// # Errors
    /// `ENOTTY`: there is no encryption.
    ///
    /// # Safety
    /// No condition is needed, because `op` is not read. The method is unsafe because the method of kvm-ioctls is
    /// unsafe.
    pub unsafe fn encrypt_op<T>(&self, op: *mut T) -> Result<()> {
        let _ = op;
        self.refuse_encryption()
    }

    /// Refuses `KVM_MEMORY_ENCRYPT_OP` with an SEV command.
    ///
    /// # Errors
    /// `ENOTTY`: there is no encryption.
    pub fn encrypt_op_sev(&self, op: &mut kvm_sev_cmd) -> Result<()> {
        // SAFETY: the method has no condition.
        unsafe { self.encrypt_op(op) }
    }

    /// Refuses `KVM_MEMORY_ENCRYPT_REG_REGION`.
    ///
    /// # Errors
    /// `ENOTTY`: there is no encryption.
    pub fn register_enc_memory_region(&self, memory_region: &kvm_enc_region) -> Result<()> {
        let _ = memory_region;
        self.refuse_encryption()
    }

    /// Refuses `KVM_MEMORY_ENCRYPT_UNREG_REGION`.
    ///
    /// # Errors
    /// `ENOTTY`: there is no encryption.
    pub fn unregister_enc_memory_region(&self, memory_region: &kvm_enc_region) -> Result<()> {
        let _ = memory_region;
        self.refuse_encryption()
    }

    fn refuse_encryption(&self) -> Result<()> {
        let _call = self.vm.begin()?;
        fail(libc::ENOTTY)
    }
}
