//! System management mode: entry by an SMI, and return by RSM.

use super::Next;
use crate::errno::{Result, fail};
use crate::msr::index::SMI_COUNT;
use crate::vcpu::{Inner, VcpuObject};
use crate::vm::{ORDINARY, SMM};
use kvm_bindings::KVM_EXIT_SHUTDOWN;
use slat_x86::{SMRAM_BYTES, SMRAM_OFFSET};

impl VcpuObject {
    /// Gives the CPU the SMI that another thread has sent.
    pub(crate) fn accept_smi(&self, inner: &mut Inner) {
        if self.common().take_smi() {
            inner.cpu.inject_smi();
        }
    }

    /// Enters system management mode. If a signal or a full dirty ring interrupts the store to SMRAM, the SMI stays pending.
    ///
    /// # Errors
    /// `EIO` if there is no SMRAM: the interrupted state is lost, so the VM is dead, as in KVM.
    pub(super) fn enter_smm(&self, inner: &mut Inner) -> Result<Next> {
        let Inner { cpu, machine, .. } = inner;
        let smram = cpu.state.smram(machine.smram_map());
        machine.use_space(SMM);
        if machine.write_smram(cpu.state.smbase.wrapping_add(SMRAM_OFFSET), &smram) {
            cpu.enter_smm();
            machine.store(SMI_COUNT, machine.msr(SMI_COUNT).wrapping_add(1));
        } else {
            machine.use_space(ORDINARY);
            if !machine.is_called_out() {
                self.vm.end_life();
                return fail(libc::EIO);
            }
        }
        machine.follow_client();
        Ok(Next::Again)
    }

    /// Leaves system management mode. If a signal interrupts a read of memory, RSM is executed again. A saved state that no CPU can be
    /// in shuts the CPU down.
    pub(super) fn leave_smm(&self, inner: &mut Inner) -> Next {
        let Inner { cpu, machine, .. } = inner;
        let mut smram = [0; SMRAM_BYTES];
        let from = cpu.state.smbase.wrapping_add(SMRAM_OFFSET);
        let is_read = machine.read_smram(from, &mut smram);
        machine.use_space(ORDINARY);
        let map = machine.smram_map();
        let has_left = is_read && (cpu.leave_smm(map, &smram, |cr3| machine.pdptes(cr3))).is_ok();
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

impl Inner {
    /// Has the machine use the address space of the mode that the CPU is in. Call after a client has set the mode.
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
