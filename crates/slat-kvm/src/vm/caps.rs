//! The capabilities of a VM, and the calls that enable them.

use crate::errno::{Result, fail};
use crate::vm::VmObject;
use crate::{caps, guest_memfd};
use kvm_bindings::*;

impl VmObject {
    /// Carries out `KVM_CHECK_EXTENSION`.
    pub fn check_extension(&self, cap: u64) -> i32 {
        match u32::try_from(cap) {
            Ok(caps::KVM_CAP_GUEST_MEMFD_FLAGS) => guest_memfd::flags(self.protected) as i32,
            Ok(KVM_CAP_MULTI_ADDRESS_SPACE) => self.address_spaces() as i32,
            Ok(KVM_CAP_MEMORY_ATTRIBUTES) => self.known_attributes() as i32,
            _ => (self.arch.extension(cap, &self.engine))
                .unwrap_or_else(|| caps::check(cap, self.engine.mmu())),
        }
    }

    /// Carries out `KVM_ENABLE_CAP` on the VM.
    ///
    /// # Errors
    /// `EINVAL` for capabilities that cannot be enabled, and for bad arguments.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        let _call = self.begin()?;
        if cap.flags != 0 {
            return fail(libc::EINVAL);
        }
        match cap.cap {
            KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 => self.set_manual_dirty_log(cap.args[0]),
            ring @ (KVM_CAP_DIRTY_LOG_RING | KVM_CAP_DIRTY_LOG_RING_ACQ_REL) => {
                match self.check_extension(ring.into()) {
                    0 => fail(libc::EINVAL),
                    _ => self.enable_dirty_rings(cap.args[0]),
                }
            }
            cap_of_arch => self.enable_arch_cap(cap_of_arch, cap.args[0]),
        }
    }
}
