//! System management mode: entry by an SMI, and return by RSM.

use crate::arch::x86_64::limits::ORDINARY;
use crate::arch::x86_64::machine::VcpuMachine;
use crate::arch::x86_64::msr::index::SMI_COUNT;
use crate::arch::x86_64::vm::SMM;
use crate::errno::{Result, fail};
use crate::run::Next;
use crate::vcpu::{Inner, VcpuObject};
use kvm_bindings::KVM_EXIT_SHUTDOWN;
use slat_x86::svm::VMCB_BYTES;
use slat_x86::{Cpu, SMRAM_BYTES, SMRAM_OFFSET, SmramMap, interrupted_vmcb};

impl VcpuObject {
    /// Makes the CPU accept the SMI that another thread has sent.
    pub(crate) fn accept_smi(&self, inner: &mut Inner) {
        if self.common().take_smi() {
            inner.cpu.inject_smi();
        }
    }

    /// Enters system management mode. If a signal or a full dirty ring interrupts the store to SMRAM,
    /// the SMI stays pending.
    ///
    /// # Errors
    /// `EIO` if there is no SMRAM. The interrupted state is then lost, so the VM is dead, as in KVM.
    pub(crate) fn enter_smm(&self, inner: &mut Inner) -> Result<Next> {
        let Inner { cpu, machine, .. } = inner;
        let smram = cpu.smram(machine.smram_map());
        // As in KVM, a nested guest's hypervisor state is saved at the address that the hypervisor has set for it.
        let is_kept = !cpu.is_in_guest_mode()
            || machine.write_smram(cpu.state.vm_hsave_pa, &cpu.saved_vmcb());
        machine.use_space(SMM);
        if is_kept && machine.write_smram(cpu.state.smbase.wrapping_add(SMRAM_OFFSET), &smram) {
            cpu.enter_smm();
            machine.store(SMI_COUNT, machine.msr(SMI_COUNT).wrapping_add(1));
        } else {
            machine.use_space(ORDINARY);
            if !machine.is_called_out() {
                self.vm.life.end(&self.vm.engine);
                return fail(libc::EIO);
            }
        }
        machine.follow_client();
        Ok(Next::Again)
    }

    /// Leaves system management mode. If a signal interrupts a read of memory, RSM is executed again. If the saved
    /// state is invalid, the CPU shuts down.
    pub(crate) fn leave_smm(&self, inner: &mut Inner) -> Next {
        let Inner { cpu, machine, .. } = inner;
        let mut smram = [0; SMRAM_BYTES];
        let from = cpu.state.smbase.wrapping_add(SMRAM_OFFSET);
        let is_read = machine.read_smram(from, &mut smram);
        machine.use_space(ORDINARY);
        let map = machine.smram_map();
        let has_left = is_read
            && (cpu.leave_smm(map, &smram, |cr3| machine.pdptes(cr3))).is_ok()
            && reenter_guest(cpu, machine, map, &smram);
        if !has_left {
            machine.use_space(SMM);
        }
        machine.follow_client();
        if !has_left && !machine.is_called_out() {
            self.page.set_exit_reason(KVM_EXIT_SHUTDOWN);
            return Next::Return;
        }
        Next::Again
    }
}

/// Enters guest mode again if the SMI has interrupted a nested guest. Returns `false` if the nested guest's state is
/// lost.
fn reenter_guest(
    cpu: &mut Cpu,
    machine: &mut VcpuMachine,
    map: SmramMap,
    smram: &[u8; SMRAM_BYTES],
) -> bool {
    let Some(vmcb) = interrupted_vmcb(map, smram) else {
        return true;
    };
    let mut page = [0; VMCB_BYTES];
    machine.read_smram(cpu.state.vm_hsave_pa, &mut page)
        && cpu.restore_guest_mode(vmcb, &page).is_ok()
}

impl Inner {
    /// Makes the machine use the address space that belongs to the CPU's mode. Call after a client has changed the
    /// mode.
    pub(crate) fn follow_smm(&mut self) {
        let changes = self.machine.use_space(match self.cpu.state.events.smm {
            true => SMM,
            false => ORDINARY,
        });
        if changes {
            self.cpu.flush_tlb();
        }
    }
}
