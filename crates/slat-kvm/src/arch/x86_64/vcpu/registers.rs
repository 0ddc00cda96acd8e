//! A vCPU's calls for the state of its CPU: registers, FPU, CPUID, MSRs, and nested guests.

use crate::arch::x86_64::limits::MAX_VCPUS;
use crate::arch::x86_64::machine::msrs;
use crate::arch::x86_64::nested::{self, NestedState};
use crate::arch::x86_64::regs::{self, uses_pae_paging};
use crate::arch::x86_64::{cpuid, fpu, hyperv};
use crate::errno::{Error, Result, fail};
use crate::heap;
use crate::vcpu::{Inner, VcpuObject};
use kvm_bindings::*;
use slat_irqchip::lapic::BASE_BSP;
use slat_x86::Features;
use slat_x86::state::control;
use slat_x86::svm::VMCB_BYTES;

impl VcpuObject {
    /// Carries out `KVM_GET_REGS`.
    ///
    /// # Errors
    /// `EIO` in a forked child. Every call of this file returns this error.
    pub fn get_regs(&self) -> Result<kvm_regs> {
        Ok(regs::get_regs(&self.lock()?.cpu.state))
    }

    /// Carries out `KVM_SET_REGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<()> {
        regs::set_regs(&mut self.lock()?.cpu.state, regs);
        Ok(())
    }

    /// Carries out `KVM_GET_SREGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_sregs(&self) -> Result<kvm_sregs> {
        let mut inner = self.lock()?;
        inner.sync_cr8_from_lapic();
        Ok(regs::get_sregs(&inner.cpu.state, inner.machine.apic_base()))
    }

    /// Carries out `KVM_SET_SREGS`.
    ///
    /// # Errors
    /// `EINVAL` for impossible combinations.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<()> {
        let mut inner = self.lock()?;
        self.put_sregs(&mut inner, sregs, None)
    }

    /// Sets the registers. With PAE paging and without `pdptes`, reads the PDPTEs from guest memory. As in KVM, if the
    /// PDPTEs cannot be read, they do not change.
    pub(crate) fn put_sregs(
        &self,
        inner: &mut Inner,
        sregs: &kvm_sregs,
        pdptes: Option<[u64; 4]>,
    ) -> Result<()> {
        let mut state = inner.cpu.state.clone();
        // If the client has set no CPUID, the registers are not compared with CPUID, as in Linux before 7.3. Some
        // clients set no CPUID and still have 64-bit guests.
        let features = match inner.machine.cpuid.is_empty() {
            true => Features::all(),
            false => *inner.cpu.features(),
        };
        regs::set_sregs(&mut state, sregs, &features)?;
        inner
            .machine
            .set_apic_base(sregs.apic_base, false)
            .map_err(|_| Error::new(libc::EINVAL))?;
        if state.efer & control::EFER_SVME == 0 && inner.cpu.is_in_guest_mode() {
            // As in KVM, clearing EFER.SVME ends guest mode. The new registers are those of the hypervisor, not of the
            // nested guest.
            inner.cpu.drop_guest_mode();
            state = inner.cpu.state.clone();
            regs::set_sregs(&mut state, sregs, &features)?;
        }
        inner.cpu.state = state;
        if uses_pae_paging(&inner.cpu.state)
            && let Some(pdptes) = pdptes.or_else(|| inner.machine.read_pdptes(sregs.cr3))
        {
            inner.cpu.state.pdptes = pdptes;
        }
        inner.follow_svme();
        inner.sync_cr8_to_lapic();
        inner.flush_translations();
        inner.machine.memory_restored = true;
        let is_reset = inner.cpu.state.rip == 0xfff0
            && (sregs.cs.selector, sregs.cs.base) == (0xf000, 0xffff_0000)
            && sregs.cr0 & control::CR0_PE == 0;
        if is_reset && inner.machine.apic_base() & BASE_BSP != 0 {
            // As in KVM, setting the reset state makes the bootstrap processor runnable, because old clients do not
            // call KVM_SET_MP_STATE after a reset.
            inner.arch.mp_state = KVM_MP_STATE_RUNNABLE;
        }
        Ok(())
    }

    /// Carries out `KVM_GET_SREGS2`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_sregs2(&self) -> Result<kvm_sregs2> {
        let inner = self.lock()?;
        Ok(regs::get_sregs2(
            &inner.cpu.state,
            inner.machine.apic_base(),
        ))
    }

    /// Carries out `KVM_SET_SREGS2`.
    ///
    /// # Errors
    /// `EINVAL` for impossible combinations and unknown flags.
    pub fn set_sregs2(&self, sregs: &kvm_sregs2) -> Result<()> {
        let (sregs, pdptes) = regs::from_sregs2(sregs)?;
        let mut inner = self.lock()?;
        self.put_sregs(&mut inner, &sregs, pdptes)
    }

    /// Carries out `KVM_GET_FPU`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_fpu(&self) -> Result<kvm_fpu> {
        Ok(fpu::get_fpu(&self.lock()?.cpu.state))
    }

    /// Carries out `KVM_SET_FPU`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_fpu(&self, fpu: &kvm_fpu) -> Result<()> {
        fpu::set_fpu(&mut self.lock()?.cpu.state, fpu);
        Ok(())
    }

    /// Carries out `KVM_GET_XSAVE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_xsave(&self) -> Result<[u8; 4096]> {
        Ok(fpu::get_xsave(&self.lock()?.cpu.state))
    }

    /// Carries out `KVM_SET_XSAVE`.
    ///
    /// # Errors
    /// `EINVAL` for state components that the CPU does not have.
    pub fn set_xsave(&self, area: &[u8; 4096]) -> Result<()> {
        fpu::set_xsave(&mut self.lock()?.cpu.state, area)
    }

    /// Carries out `KVM_GET_XCRS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_xcrs(&self) -> Result<kvm_xcrs> {
        Ok(regs::get_xcrs(&self.lock()?.cpu.state))
    }

    /// Carries out `KVM_SET_XCRS`.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn set_xcrs(&self, xcrs: &kvm_xcrs) -> Result<()> {
        let Inner { cpu, .. } = &mut *self.lock()?;
        let features = *cpu.features();
        regs::set_xcrs(&mut cpu.state, xcrs, &features)
    }

    /// Carries out `KVM_GET_DEBUGREGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_debugregs(&self) -> Result<kvm_debugregs> {
        Ok(regs::get_debugregs(&self.lock()?.cpu.state))
    }

    /// Carries out `KVM_SET_DEBUGREGS`.
    ///
    /// # Errors
    /// `EINVAL` for reserved bits.
    pub fn set_debugregs(&self, debugregs: &kvm_debugregs) -> Result<()> {
        regs::set_debugregs(&mut self.lock()?.cpu.state, debugregs)
    }

    /// Carries out `KVM_GET_CPUID2`.
    ///
    /// # Errors
    /// `EIO`, `ENOMEM`.
    pub fn get_cpuid(&self) -> Result<Vec<kvm_cpuid_entry2>> {
        let inner = self.lock()?;
        let mut table = heap::copy_of(&inner.machine.cpuid)?;
        inner.show_state(&mut table);
        Ok(table)
    }

    /// Carries out `KVM_SET_CPUID2`.
    ///
    /// # Errors
    /// `EINVAL` if the vCPU has run and `table` differs from the vCPU's table, and for linear addresses of a width that
    /// no CPU has. `EPERM` for AMX's state components, which a process has to request first: slat has no such
    /// components.
    pub fn set_cpuid(&self, mut table: Vec<kvm_cpuid_entry2>) -> Result<()> {
        if self.vm.arch.options.halts_inside() {
            // As in KVM, the feature is removed if HLT does not exit, because another vCPU cannot end such a halt.
            cpuid::remove_kvm_feature(&mut table, cpuid::KVM_FEATURE_PV_UNHALT);
        }
        let mut inner = self.lock()?;
        if inner.has_run {
            let mut old = heap::copy_of(&inner.machine.cpuid)?;
            for table in [&mut old, &mut table] {
                inner.show_state(table);
            }
            return match old == table {
                true => Ok(()),
                false => fail(libc::EINVAL),
            };
        }
        cpuid::check(&table)?;
        inner.adopt_cpuid(table);
        Ok(())
    }

    /// Carries out `KVM_GET_SUPPORTED_HV_CPUID` of a vCPU: returns the leaves of Hyper-V's interface that a client may
    /// give the vCPU.
    ///
    /// # Errors
    /// `EIO`.
    pub fn supported_hv_cpuid(&self) -> Result<[kvm_cpuid_entry2; 10]> {
        let _call = self.vm.begin()?;
        Ok(hyperv::cpuid::supported(
            self.common().has_lapic(),
            MAX_VCPUS,
        ))
    }

    /// Carries out `KVM_GET_MSRS`: reads MSRs in order, and stops at the first unknown MSR. Returns the number of MSRs
    /// that were read.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_msrs(&self, entries: &mut [kvm_msr_entry]) -> Result<usize> {
        let mut inner = self.lock()?;
        inner.sync_cr8_to_lapic();
        for (done, entry) in entries.iter_mut().enumerate() {
            let Inner { cpu, machine, .. } = &mut *inner;
            match msrs::read(&mut cpu.state, machine, entry.index) {
                Ok(value) => entry.data = value,
                Err(_) => return Ok(done),
            }
        }
        Ok(entries.len())
    }

    /// Carries out `KVM_SET_MSRS`: writes MSRs in order, and stops at the first MSR that cannot be written. Returns the
    /// number of MSRs that were written.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_msrs(&self, entries: &[kvm_msr_entry]) -> Result<usize> {
        let mut inner = self.lock()?;
        inner.sync_cr8_to_lapic();
        let Inner { cpu, machine, .. } = &mut *inner;
        let done = entries.iter().position(|entry| {
            msrs::write(&mut cpu.state, machine, entry.index, entry.data).is_err()
        });
        // The task priority of an x2APIC may be among the written MSRs.
        inner.sync_cr8_from_lapic();
        inner.follow_svme();
        Ok(done.unwrap_or(entries.len()))
    }

    /// Carries out `KVM_GET_NESTED_STATE`.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn nested_state(&self) -> Result<NestedState> {
        Ok(nested::get(&self.lock()?.cpu))
    }

    /// Carries out `KVM_SET_NESTED_STATE`. `read_vmcb` reads the page that follows the header.
    ///
    /// # Errors
    /// `EINVAL` for a state that the vCPU cannot be in; the errors of `read_vmcb`.
    pub fn set_nested_state(
        &self,
        header: &[u64; nested::WORDS],
        read_vmcb: impl FnOnce() -> Result<[u8; VMCB_BYTES]>,
    ) -> Result<()> {
        let mut inner = self.lock()?;
        nested::set(&mut inner.cpu, header, read_vmcb)?;
        inner.flush_translations();
        inner.machine.memory_restored = true;
        Ok(())
    }
}

impl Inner {
    /// If EFER.SVME is clear, ends guest mode and sets GIF, because without SVM there is neither guest mode nor a GIF,
    /// as in KVM. Call after a client has set EFER.
    fn follow_svme(&mut self) {
        let set = self.cpu.state.efer;
        if set & control::EFER_SVME == 0 {
            self.cpu.drop_guest_mode();
            let efer = &mut self.cpu.state.efer;
            *efer = set & !control::EFER_LMA | *efer & control::EFER_LMA;
            self.cpu.state.events.gif_clear = false;
        }
    }

    /// Sets those bits in the guest's CPUID leaves that depend on the CPU's state, as the CPUID instruction does.
    fn show_state(&self, table: &mut [kvm_cpuid_entry2]) {
        for entry in table {
            let mut values = [entry.eax, entry.ebx, entry.ecx, entry.edx];
            self.machine.show_apic(entry.function, &mut values);
            (self.cpu).show_state(entry.function, entry.index, &mut values);
            [entry.eax, entry.ebx, entry.ecx, entry.edx] = values;
        }
    }

    /// Gives the guest the CPUID leaves `table`, and restricts the CPU to the features in them.
    pub(crate) fn adopt_cpuid(&mut self, table: Vec<kvm_cpuid_entry2>) {
        let features = Features::from_cpuid(|leaf, subleaf| cpuid::lookup(&table, leaf, subleaf));
        self.machine.physical_bits = features.physical_bits();
        self.cpu.set_features(features);
        self.machine.hyperv.privileges = hyperv::cpuid::privileges(&table);
        self.machine.cpuid = table;
    }
}
