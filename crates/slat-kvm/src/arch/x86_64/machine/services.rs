//! The services of the machine that the CPU calls while it executes instructions.

use crate::arch::x86_64::machine::{VcpuMachine, msrs};
use crate::arch::x86_64::{cpuid, msr};
use kvm_bindings::{KVM_X86_QUIRK_FIX_HYPERCALL_INSN, KVM_X86_QUIRK_MWAIT_NEVER_UD_FAULTS};
use slat_irqchip::lapic::BASE_ENABLE;
use slat_x86::{HypercallInstruction, HypercallOutcome, Hypercalls, Machine, MsrFault, State};

impl VcpuMachine {
    /// Clears the APIC bit in the `values` of a CPUID leaf, if APIC_BASE disables the APIC.
    pub(crate) fn show_apic(&self, leaf: u32, values: &mut [u32; 4]) {
        if leaf == 1 && self.apic_base() & BASE_ENABLE == 0 {
            values[3] &= !cpuid::LEAF1_EDX_APIC;
        }
    }
}

impl Machine for VcpuMachine {
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        let mut values = cpuid::lookup(&self.cpuid, leaf, subleaf);
        self.show_apic(leaf, &mut values);
        if leaf == cpuid::POWER_LEAF && self.hides_invariant_tsc() {
            values[3] &= !cpuid::POWER_EDX_INVARIANT_TSC;
        }
        values
    }

    fn cpuid_faults(&mut self) -> bool {
        msrs::cpuid_faults(self)
    }

    fn allows_msr(&mut self, msr: u32, write: bool) -> bool {
        self.vm.arch.options.allows_msr(msr, write)
    }

    fn answers_msr_outside(&mut self, why: MsrFault) -> bool {
        self.vm.arch.options.answers_msrs(msr::exit_reason(why))
    }

    fn rdmsr(&mut self, msr: u32) -> std::result::Result<u64, MsrFault> {
        msrs::read_machine(self, msr, true)
    }

    fn wrmsr(&mut self, msr: u32, value: u64) -> std::result::Result<(), MsrFault> {
        msrs::write_machine(self, msr, value, true)
    }

    fn tsc(&mut self) -> u64 {
        self.guest_tsc()
    }

    fn set_task_priority(&mut self, cr8: u64) {
        if let Some(mut lapic) = self.common.lapic() {
            lapic.set_cr8(cr8);
        }
        self.task_priority_changed();
    }

    fn hypercall(&mut self, state: &mut State, cpl: u8, long_mode: bool) -> HypercallOutcome {
        self.common.exits.hypercalls.add(1);
        #[cfg(test)]
        assert_ne!(state.gpr[0], tests::HYPERCALL_PANICS, "on purpose");
        match self.uses_hyperv_calls() {
            true => self.hyperv_call(state, cpl, long_mode),
            false => self.kvm_call(state, cpl, long_mode),
        }
    }

    fn hypercall_instruction(&mut self, which: HypercallInstruction) -> Hypercalls {
        let native = cpuid::native_hypercall();
        match which == native {
            true => Hypercalls::Executed,
            false if self.vm.arch.quirks.has(KVM_X86_QUIRK_FIX_HYPERCALL_INSN) => {
                Hypercalls::Patched(native)
            }
            false => Hypercalls::Undefined,
        }
    }

    fn has_monitor(&mut self) -> bool {
        self.vm.arch.quirks.has(KVM_X86_QUIRK_MWAIT_NEVER_UD_FAULTS)
            || cpuid::lookup(&self.cpuid, 1, 0)[2] & cpuid::LEAF1_ECX_MWAIT != 0
    }
}

#[cfg(test)]
mod tests {
    use crate::abi::*;
    use crate::system::System;
    use kvm_bindings::kvm_userspace_memory_region;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc;
    use std::time::Duration;

    /// The number of a hypercall that panics, for tests. No other instruction of a guest can panic.
    pub(super) const HYPERCALL_PANICS: u64 = 0x51a7_51a7;

    /// A vCPU's thread panics while the guest runs. Then the vCPU must leave the engine, so that flushes do not wait
    /// for it, and the VM must be dead.
    #[test]
    fn a_panic_inside_the_guest_leaves_nobody_waiting() {
        let (vm, _fd) = System.create_vm(0, None, Default::default()).unwrap();
        let mut memory = vec![0u8; 0x3000];
        let page = memory.as_ptr().align_offset(4096);
        // mov eax, HYPERCALL_PANICS; vmcall
        let code = [0x66, 0xb8, 0xa7, 0x51, 0xa7, 0x51, 0x0f, 0x01, 0xc1];
        memory[page..page + code.len()].copy_from_slice(&code);
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: 0x2000,
            userspace_addr: memory.as_ptr() as u64 + page as u64,
        };
        vm.set_user_memory_region(&region).unwrap();
        let (vcpu, _vcpu_fd) = vm.create_vcpu(0).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        regs.rip = 0;
        vcpu.set_regs(&regs).unwrap();
        assert!(catch_unwind(AssertUnwindSafe(|| vcpu.run())).is_err());

        let (done, results) = mpsc::channel();
        let object = vm.clone();
        std::thread::spawn(move || {
            // These changes would wait forever if the vCPU had not left the engine.
            let address = region.userspace_addr as usize;
            crate::notify::around(address..address + 0x2000, || {});
            let deleted = kvm_userspace_memory_region {
                memory_size: 0,
                ..region
            };
            done.send(object.set_user_memory_region(&deleted))
        });
        let result = results.recv_timeout(Duration::from_secs(20));
        let error = result.expect("a slot change hangs").unwrap_err();
        assert_eq!(error.errno(), libc::EIO);
        assert_eq!(vcpu.run().unwrap_err().errno(), libc::EIO);
        assert_eq!(vcpu.get_regs().unwrap_err().errno(), libc::EIO);
        let stats = crate::ioctl::Object::Vm(vm).ioctl(KVM_GET_STATS_FD, 0);
        assert_eq!(stats.unwrap_err().errno(), libc::EIO);
    }
}
