//! The state of a VM with one vCPU, beside its memory: what KVM's calls return, and take.

use super::Result;
use kvm_bindings::{
    CpuId, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    KVM_MAX_CPUID_ENTRIES, Msrs, kvm_clock_data, kvm_debugregs, kvm_irqchip, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
    kvm_xsave,
};
use slat_kvm::{Kvm, VcpuFd, VmFd};

/// Everything, in the order in which it is set.
pub struct State {
    clock: kvm_clock_data,
    irqchips: Vec<kvm_irqchip>,
    pit: kvm_pit_state2,
    cpuid: CpuId,
    sregs: kvm_sregs,
    regs: kvm_regs,
    xcrs: kvm_xcrs,
    xsave: kvm_xsave,
    debug: kvm_debugregs,
    lapic: kvm_lapic_state,
    msrs: Msrs,
    events: kvm_vcpu_events,
    mp: kvm_mp_state,
}

impl State {
    /// Takes the state of a guest that has stopped.
    pub fn of(vm: &VmFd, vcpu: &VcpuFd) -> Result<Self> {
        let chips = [
            KVM_IRQCHIP_PIC_MASTER,
            KVM_IRQCHIP_PIC_SLAVE,
            KVM_IRQCHIP_IOAPIC,
        ];
        let irqchips = chips.map(|chip_id| {
            let mut chip = kvm_irqchip {
                chip_id,
                ..Default::default()
            };
            vm.get_irqchip(&mut chip).map(|()| chip)
        });
        Ok(State {
            clock: vm.get_clock()?,
            irqchips: irqchips
                .into_iter()
                .collect::<std::result::Result<_, _>>()?,
            pit: vm.get_pit2()?,
            cpuid: vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES)?,
            sregs: vcpu.get_sregs()?,
            regs: vcpu.get_regs()?,
            xcrs: vcpu.get_xcrs()?,
            xsave: vcpu.get_xsave()?,
            debug: vcpu.get_debug_regs()?,
            lapic: vcpu.get_lapic()?,
            msrs: msrs(vcpu)?,
            events: vcpu.get_vcpu_events()?,
            mp: vcpu.get_mp_state()?,
        })
    }

    /// Gives the state to a new VM, whose vCPU has not run.
    pub fn give(&self, vm: &VmFd, vcpu: &VcpuFd) -> Result<()> {
        // The clock continues from the saved value, without the host's time that has passed since.
        let clock = kvm_clock_data {
            flags: 0,
            ..self.clock
        };
        vm.set_clock(&clock)?;
        self.irqchips
            .iter()
            .try_for_each(|chip| vm.set_irqchip(chip))?;
        vm.set_pit2(&self.pit)?;
        vcpu.set_cpuid2(&self.cpuid)?;
        vcpu.set_sregs(&self.sregs)?;
        vcpu.set_regs(&self.regs)?;
        vcpu.set_xcrs(&self.xcrs)?;
        // SAFETY: a whole struct of KVM_GET_XSAVE, of a vCPU with the same features.
        unsafe { vcpu.set_xsave(&self.xsave)? };
        vcpu.set_debug_regs(&self.debug)?;
        vcpu.set_lapic(&self.lapic)?;
        let set = vcpu.set_msrs(&self.msrs)?;
        if set != self.msrs.as_slice().len() {
            let refused = self.msrs.as_slice()[set].index;
            return Err(format!("KVM_SET_MSRS refuses {refused:#x}").into());
        }
        vcpu.set_vcpu_events(&self.events)?;
        vcpu.set_mp_state(self.mp)?;
        Ok(())
    }
}

/// Returns all MSRs that KVM says are to be saved.
fn msrs(vcpu: &VcpuFd) -> Result<Msrs> {
    let indexes = Kvm::new()?.get_msr_index_list()?;
    let mut found = Vec::new();
    for index in indexes.as_slice() {
        let entry = kvm_msr_entry {
            index: *index,
            ..Default::default()
        };
        let mut one = Msrs::from_entries(&[entry])?;
        // An MSR that the vCPU's CPUID does not offer does not exist.
        if vcpu.get_msrs(&mut one)? == 1 {
            found.extend_from_slice(one.as_slice());
        }
    }
    Ok(Msrs::from_entries(&found)?)
}
