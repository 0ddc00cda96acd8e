//! The calls of a VM that only x86 has.
//!
//! | file | calls for |
//! |---|---|
//! | `clock` | the VM's clock, and the TSC's frequency |
//! | `caps` | capabilities |
//! | `interrupts` | interrupt controllers, and the 8254 |

mod caps;
mod clock;
mod interrupts;

use crate::arch::x86_64::limits::MAX_VCPU_ID;
use crate::arch::x86_64::msr_filter::MsrFilter;
use crate::errno::{Result, fail};
use crate::vm::VmObject;
use kvm_bindings::*;
use std::sync::atomic::Ordering;

/// The address space of vCPUs in system management mode.
pub(crate) const SMM: usize = 1;

/// KVM's lower limit for `KVM_SET_NR_MMU_PAGES`.
const MIN_MMU_PAGES: u64 = 64;

impl VmObject {
    /// Whether a vCPU that is created now can have this id. If no limit is set, creating the first vCPU sets it.
    pub(crate) fn allows_vcpu_id(&self, id: u32) -> bool {
        let (unset, set) = (Ordering::Relaxed, Ordering::Relaxed);
        let limit = match (self.arch.max_vcpu_ids).compare_exchange(0, MAX_VCPU_ID, unset, set) {
            Ok(_) => MAX_VCPU_ID,
            Err(limit) => limit,
        };
        id < limit
    }

    /// Whether the vCPU with this id is the bootstrap processor.
    pub(crate) fn is_bootstrap(&self, id: u32) -> bool {
        id == self.arch.boot_cpu.load(Ordering::Relaxed)
    }

    /// Carries out `KVM_SET_TSS_ADDR`: checks the address and has no effect. The address would be that of three pages,
    /// which KVM needs only with VMX on processors without unrestricted guest.
    ///
    /// # Errors
    /// `EINVAL` when the pages would not end below 4 GiB.
    pub fn set_tss_addr(&self, address: u64) -> Result<()> {
        let _call = self.begin()?;
        if address > u64::from(u32::MAX) - 3 * 4096 + 1 {
            return fail(libc::EINVAL);
        }
        Ok(())
    }

    /// Carries out `KVM_SET_IDENTITY_MAP_ADDR`: has no effect, like [`set_tss_addr`](Self::set_tss_addr).
    ///
    /// # Errors
    /// `EINVAL` once there are vCPUs.
    pub fn set_identity_map_addr(&self, _address: u64) -> Result<()> {
        let _call = self.begin()?;
        if self.vcpus().is_empty() {
            Ok(())
        } else {
            fail(libc::EINVAL)
        }
    }

    /// Carries out `KVM_SET_BOOT_CPU_ID`.
    ///
    /// # Errors
    /// `EBUSY` once there are vCPUs, `EINVAL` for an id beyond the limit. As in KVM, the limit itself is accepted.
    pub fn set_boot_cpu_id(&self, id: u64) -> Result<()> {
        let _call = self.begin()?;
        if !self.vcpus().is_empty() {
            return fail(libc::EBUSY);
        }
        let limit = match self.arch.max_vcpu_ids.load(Ordering::Relaxed) {
            0 => MAX_VCPU_ID,
            limit => limit,
        };
        if id > u64::from(limit) {
            return fail(libc::EINVAL);
        }
        self.arch.boot_cpu.store(id as u32, Ordering::Relaxed);
        Ok(())
    }

    /// Carries out `KVM_SET_NR_MMU_PAGES`: limits the number of shadow pages. The TDP MMU has no shadow pages, so the
    /// call then has no effect.
    ///
    /// # Errors
    /// `EINVAL` for less than KVM's minimum.
    pub fn set_nr_mmu_pages(&self, pages: u64) -> Result<()> {
        let _call = self.begin()?;
        if pages < MIN_MMU_PAGES {
            return fail(libc::EINVAL);
        }
        self.engine.set_mmu_pages(pages);
        Ok(())
    }

    /// Carries out `KVM_HYPERV_EVENTFD`: adds or removes a connection. When the guest signals a connection by a
    /// hypercall, the connection's eventfd is signalled.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags, an id of more than 24 bits, and a descriptor that is no eventfd; `EEXIST` for adding
    /// an id that is in use, `ENOENT` for removing an id that is not in use; `EBADF`, `EMFILE`, `ENOMEM`.
    pub fn hyperv_eventfd(&self, asked: &kvm_hyperv_eventfd) -> Result<()> {
        let _call = self.begin()?;
        self.arch.hyperv.connections.change(asked)
    }

    /// Carries out `KVM_X86_SET_MSR_FILTER`.
    ///
    /// # Errors
    /// `EINVAL` for an invalid filter, `EFAULT` for a bitmap that cannot be read, `ENOMEM`.
    pub fn set_msr_filter(&self, filter: &kvm_msr_filter) -> Result<()> {
        let _call = self.begin()?;
        let filter = MsrFilter::new(filter, crate::user::read_words)?;
        self.arch.options.set_msr_filter(filter);
        Ok(())
    }
}
