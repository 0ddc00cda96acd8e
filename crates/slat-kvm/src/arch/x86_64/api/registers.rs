//! Calls of a [`VcpuFd`] that read and set registers and other state.

use crate::api::VcpuFd;
use crate::arch::x86_64::nested;
use crate::errno::{Result, fail, no_memory};
use kvm_bindings::*;
use kvm_ioctls::KvmNestedStateBuffer;
use slat_x86::svm::VMCB_BYTES;
use std::num::NonZeroUsize;
use std::ptr;

/// The page that follows the header in nested state.
type NestedVmcb = [u8; VMCB_BYTES];
/// The header at the beginning of nested state, in words.
type NestedHeader = [u64; nested::WORDS];

impl VcpuFd {
    /// Carries out `KVM_GET_REGS`.
    ///
    /// # Errors
    /// `EIO` in a forked child. Every call of this file returns this error.
    pub fn get_regs(&self) -> Result<kvm_regs> {
        self.vcpu.get_regs()
    }

    /// Carries out `KVM_SET_REGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<()> {
        self.vcpu.set_regs(regs)
    }

    /// Carries out `KVM_GET_SREGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_sregs(&self) -> Result<kvm_sregs> {
        self.vcpu.get_sregs()
    }

    /// Carries out `KVM_SET_SREGS`.
    ///
    /// # Errors
    /// `EINVAL` for a combination of values that no CPU can have.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<()> {
        self.vcpu.set_sregs(sregs)
    }

    /// Carries out `KVM_GET_FPU`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_fpu(&self) -> Result<kvm_fpu> {
        self.vcpu.get_fpu()
    }

    /// Carries out `KVM_SET_FPU`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_fpu(&self, fpu: &kvm_fpu) -> Result<()> {
        self.vcpu.set_fpu(fpu)
    }

    /// Carries out `KVM_SET_CPUID2`.
    ///
    /// # Errors
    /// `EINVAL` for a change after the first run.
    pub fn set_cpuid2(&self, cpuid: &CpuId) -> Result<()> {
        self.vcpu.set_cpuid(crate::heap::copy_of(cpuid.as_slice())?)
    }

    /// Carries out `KVM_GET_CPUID2`.
    ///
    /// # Errors
    /// `E2BIG` when the table has more than `num_entries` entries, `ENOMEM` for `num_entries` above
    /// `KVM_MAX_CPUID_ENTRIES`.
    pub fn get_cpuid2(&self, num_entries: usize) -> Result<CpuId> {
        if num_entries > KVM_MAX_CPUID_ENTRIES {
            return fail(libc::ENOMEM);
        }
        let table = self.vcpu.get_cpuid()?;
        if num_entries < table.len() {
            return fail(libc::E2BIG);
        }
        CpuId::from_entries(&table).map_err(no_memory)
    }

    /// Carries out `KVM_GET_LAPIC`.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller.
    pub fn get_lapic(&self) -> Result<kvm_lapic_state> {
        self.vcpu.get_lapic()
    }

    /// Carries out `KVM_SET_LAPIC`.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller. If the client uses 32-bit ids, also `EINVAL` for an id that is not the
    /// x2APIC's.
    pub fn set_lapic(&self, klapic: &kvm_lapic_state) -> Result<()> {
        self.vcpu.set_lapic(klapic)
    }

    /// Carries out `KVM_GET_MSRS`. Returns how many MSRs were read.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_msrs(&self, msrs: &mut Msrs) -> Result<usize> {
        self.vcpu.get_msrs(msrs.as_mut_slice())
    }

    /// Carries out `KVM_SET_MSRS`. Returns how many MSRs were written.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_msrs(&self, msrs: &Msrs) -> Result<usize> {
        self.vcpu.set_msrs(msrs.as_slice())
    }

    /// Carries out `KVM_GET_XSAVE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_xsave(&self) -> Result<kvm_xsave> {
        let mut xsave = kvm_xsave::default();
        self.fill(&mut xsave)?;
        Ok(xsave)
    }

    /// Carries out `KVM_GET_XSAVE2`. Every area has the size of `kvm_xsave`, which `KVM_CAP_XSAVE2` returns, so the
    /// rest of `xsave` is not changed.
    ///
    /// # Errors
    /// `EIO`.
    ///
    /// # Safety
    /// No condition is needed, because slat's area has a fixed size. The method is unsafe because the method of
    /// kvm-ioctls is unsafe.
    pub unsafe fn get_xsave2(&self, xsave: &mut Xsave) -> Result<()> {
        // SAFETY: the length of the flexible array is not changed.
        self.fill(unsafe { &mut xsave.as_mut_fam_struct().xsave })
    }

    fn fill(&self, xsave: &mut kvm_xsave) -> Result<()> {
        let area = self.vcpu.get_xsave()?;
        for (word, bytes) in xsave.region.iter_mut().zip(area.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok(())
    }

    /// Carries out `KVM_SET_XSAVE`.
    ///
    /// # Errors
    /// `EINVAL` for state components that the CPU does not have.
    ///
    /// # Safety
    /// No condition is needed, because slat's area has a fixed size. The method is unsafe because the method of
    /// kvm-ioctls is unsafe.
    pub unsafe fn set_xsave(&self, xsave: &kvm_xsave) -> Result<()> {
        let mut area = [0; 4096];
        for (bytes, word) in area.chunks_exact_mut(4).zip(&xsave.region) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        self.vcpu.set_xsave(&area)
    }

    /// Sets the extended state like [`set_xsave`](Self::set_xsave), but takes the type that
    /// [`get_xsave2`](Self::get_xsave2) fills.
    ///
    /// # Errors
    /// `EINVAL` for state components that the CPU does not have.
    ///
    /// # Safety
    /// No condition is needed, because slat's area has a fixed size. The method is unsafe because the method of
    /// kvm-ioctls is unsafe.
    pub unsafe fn set_xsave2(&self, xsave: &Xsave) -> Result<()> {
        // SAFETY: the caller keeps this function's contract.
        unsafe { self.set_xsave(&xsave.as_fam_struct_ref().xsave) }
    }

    /// Carries out `KVM_GET_XCRS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_xcrs(&self) -> Result<kvm_xcrs> {
        self.vcpu.get_xcrs()
    }

    /// Carries out `KVM_SET_XCRS`.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn set_xcrs(&self, xcrs: &kvm_xcrs) -> Result<()> {
        self.vcpu.set_xcrs(xcrs)
    }

    /// Carries out `KVM_GET_DEBUGREGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_debug_regs(&self) -> Result<kvm_debugregs> {
        self.vcpu.get_debugregs()
    }

    /// Carries out `KVM_SET_DEBUGREGS`.
    ///
    /// # Errors
    /// `EINVAL` for reserved bits.
    pub fn set_debug_regs(&self, debug_regs: &kvm_debugregs) -> Result<()> {
        self.vcpu.set_debugregs(debug_regs)
    }

    /// Carries out `KVM_GET_NESTED_STATE`. Returns the size of the state in bytes. `None`: the guest runs no nested
    /// guest, and the state is only the header.
    ///
    /// # Errors
    /// `E2BIG` if `buffer.size` is less than the size of the state.
    pub fn nested_state(&self, buffer: &mut KvmNestedStateBuffer) -> Result<Option<NonZeroUsize>> {
        let state = self.vcpu.nested_state()?;
        if buffer.size < state.size() {
            buffer.size = state.size();
            return fail(libc::E2BIG);
        }
        let header = ptr::from_mut(buffer).cast::<NestedHeader>();
        // SAFETY: the buffer begins with the header, in which all bit patterns are valid.
        unsafe { header.write_unaligned(*state.words()) };
        let Some(vmcb) = state.vmcb() else {
            return Ok(None);
        };
        // SAFETY: the buffer has a page after the header, in which all bit patterns are valid.
        unsafe { header.add(1).cast::<NestedVmcb>().write_unaligned(*vmcb) };
        Ok(NonZeroUsize::new(state.size() as usize))
    }

    /// Carries out `KVM_SET_NESTED_STATE`.
    ///
    /// # Errors
    /// `EINVAL` for a state that the vCPU cannot be in.
    pub fn set_nested_state(&self, state: &KvmNestedStateBuffer) -> Result<()> {
        let header = ptr::from_ref(state).cast::<NestedHeader>();
        // SAFETY: the buffer begins with the header, which is plain data without padding.
        let words = unsafe { header.read_unaligned() };
        // SAFETY: the buffer has a page of plain data after the header.
        let vmcb = || Ok(unsafe { header.add(1).cast::<NestedVmcb>().read_unaligned() });
        self.vcpu.set_nested_state(&words, vmcb)
    }

    /// Carries out `KVM_GET_ONE_REG`. Returns the number of bytes of the register.
    ///
    /// # Errors
    /// `EINVAL` for an id that names no register of this vCPU, and for `data` that is too short. On x86 the registers
    /// are MSRs, of 8 bytes.
    pub fn get_one_reg(&self, reg_id: u64, data: &mut [u8]) -> Result<usize> {
        let value = self.vcpu.get_one_reg(reg_id)?.to_le_bytes();
        match data.get_mut(..value.len()) {
            None => fail(libc::EINVAL),
            Some(to) => {
                to.copy_from_slice(&value);
                Ok(value.len())
            }
        }
    }

    /// Carries out `KVM_SET_ONE_REG`. Returns the number of bytes of the register.
    ///
    /// # Errors
    /// The errors are those of [`get_one_reg`](Self::get_one_reg); `EINVAL` for a value that the register cannot hold.
    pub fn set_one_reg(&self, reg_id: u64, data: &[u8]) -> Result<usize> {
        let Some((value, _)) = data.split_first_chunk() else {
            return fail(libc::EINVAL);
        };
        (self.vcpu).set_one_reg(reg_id, || Ok(u64::from_le_bytes(*value)))?;
        Ok(value.len())
    }
}
