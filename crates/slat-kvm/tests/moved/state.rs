//! The state of a vCPU that a client saves and restores by KVM's calls, as for a migration.

use kvm_bindings::nested::KvmNestedStateBuffer;
use kvm_bindings::*;
use slat_kvm::{Kvm, VcpuFd};

pub struct State {
    cpuid: CpuId,
    sregs: kvm_sregs,
    regs: kvm_regs,
    xcrs: kvm_xcrs,
    xsave: kvm_xsave,
    debug: kvm_debugregs,
    msrs: Vec<kvm_msr_entry>,
    events: kvm_vcpu_events,
    mp: kvm_mp_state,
    nested: Box<KvmNestedStateBuffer>,
}

impl State {
    /// Reads the state of a vCPU that does not run.
    pub fn of(kvm: &Kvm, vcpu: &VcpuFd) -> Self {
        let mut nested = Box::new(KvmNestedStateBuffer::empty());
        vcpu.nested_state(&mut nested).unwrap();
        State {
            cpuid: vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).unwrap(),
            sregs: vcpu.get_sregs().unwrap(),
            regs: vcpu.get_regs().unwrap(),
            xcrs: vcpu.get_xcrs().unwrap(),
            xsave: vcpu.get_xsave().unwrap(),
            debug: vcpu.get_debug_regs().unwrap(),
            msrs: msrs(kvm, vcpu),
            events: vcpu.get_vcpu_events().unwrap(),
            mp: vcpu.get_mp_state().unwrap(),
            nested,
        }
    }

    /// Gives the state to a vCPU that has not run.
    pub fn give(&self, vcpu: &VcpuFd) {
        vcpu.set_cpuid2(&self.cpuid).unwrap();
        vcpu.set_sregs(&self.sregs).unwrap();
        vcpu.set_regs(&self.regs).unwrap();
        vcpu.set_xcrs(&self.xcrs).unwrap();
        // SAFETY: KVM_GET_XSAVE has returned the whole struct, for a vCPU with the same features.
        unsafe { vcpu.set_xsave(&self.xsave).unwrap() };
        vcpu.set_debug_regs(&self.debug).unwrap();
        for entry in &self.msrs {
            // Some MSRs cannot be written, so an error is ignored.
            _ = vcpu.set_msrs(&Msrs::from_entries(&[*entry]).unwrap());
        }
        vcpu.set_nested_state(&self.nested).unwrap();
        vcpu.set_vcpu_events(&self.events).unwrap();
        vcpu.set_mp_state(self.mp).unwrap();
    }
}

/// Returns all MSRs that KVM says are to be saved, as far as the vCPU has them.
fn msrs(kvm: &Kvm, vcpu: &VcpuFd) -> Vec<kvm_msr_entry> {
    let indexes = kvm.get_msr_index_list().unwrap();
    let read = |index: &u32| {
        let entry = kvm_msr_entry {
            index: *index,
            ..Default::default()
        };
        let mut one = Msrs::from_entries(&[entry]).unwrap();
        (vcpu.get_msrs(&mut one).unwrap() == 1).then(|| one.as_slice()[0])
    };
    indexes.as_slice().iter().filter_map(read).collect()
}
