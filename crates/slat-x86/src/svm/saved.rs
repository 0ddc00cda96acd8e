//! Saves and restores the state of guest mode, for a VMM: KVM_GET_NESTED_STATE and KVM_SET_NESTED_STATE.
//!
//! The format is KVM's (API document, 4.114): the address of the control block, and a page with the layout of a control
//! block. The page's control area is that of the running nested guest. The page's save area has the registers of the
//! *hypervisor*. The nested guest's registers are the registers of the CPU.

use super::checks;
use crate::Cpu;
use crate::nested::Pauses;
use crate::nested::vmcb::{
    CONTROL_BYTES, Control, Registers, SAVE_BYTES, SAVE_OFFSET, Save, VMCB_BYTES,
};
use crate::state::{control::*, flags};

/// The error for a control block that no CPU with these features can have in guest mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadVmcb;

impl Cpu {
    /// Returns the page with the state of guest mode.
    pub fn saved_vmcb(&self) -> [u8; VMCB_BYTES] {
        let mut page = [0; VMCB_BYTES];
        let mut control = self.svm.control.clone();
        if self.svm.injected.is_none() {
            // slat does not read nRIP. But in KVM a nested guest continues at the value of this field, which the
            // processor has stored at an exit.
            control.set_next_rip(self.state.rip);
        }
        page[..CONTROL_BYTES].copy_from_slice(control.bytes());
        let mut save = Save([0; SAVE_BYTES]);
        self.svm.host.write(&mut save);
        page[SAVE_OFFSET..SAVE_OFFSET + SAVE_BYTES].copy_from_slice(&save.0);
        page
    }

    /// Enters guest mode, with a page that [`saved_vmcb`](Self::saved_vmcb) has returned. `address` is the address of
    /// the control block. The nested guest's registers are those of the CPU.
    ///
    /// # Errors
    /// [`BadVmcb`], as in KVM, in three cases: VMRUN refuses the control area; the hypervisor's registers cannot have
    /// been saved by VMRUN, because they are not in protected mode, or have EFER.LMA without LME; the nested guest's
    /// CR0.NW is set and CR0.CD is clear. (KVM also requires paging.) After an error, nothing has changed.
    pub fn restore_guest_mode(
        &mut self,
        address: u64,
        page: &[u8; VMCB_BYTES],
    ) -> Result<(), BadVmcb> {
        let mut control = [0; CONTROL_BYTES];
        control.copy_from_slice(&page[..CONTROL_BYTES]);
        let control = Control::new(control);
        let mut save = Save([0; SAVE_BYTES]);
        save.0
            .copy_from_slice(&page[SAVE_OFFSET..SAVE_OFFSET + SAVE_BYTES]);
        let host = Registers::read(&save);
        let caches = self.state.cr0 & (CR0_CD | CR0_NW);
        let fits = host.cr0 & CR0_PE != 0
            && host.efer & (EFER_LMA | EFER_LME) != EFER_LMA
            && host.rflags & flags::VM == 0
            && caches != CR0_NW
            && checks::are_registers_valid(&host, &self.features)
            && self.is_control_valid(&control, host.cr0);
        if !fits {
            return Err(BadVmcb);
        }
        self.svm.pauses = Pauses::new(&control);
        self.svm.guest = true;
        self.svm.vmcb = address;
        self.svm.last_asid = control.asid();
        self.svm.control = control;
        self.svm.host = Registers { cpl: 0, ..host };
        self.svm.due = None;
        self.svm.injected = None;
        self.flush_tlb();
        Ok(())
    }

    /// Leaves guest mode without a #VMEXIT, as KVM does when a VMM resets a CPU or removes SVM. The CPU gets the
    /// hypervisor's registers, except for the general registers. Does nothing outside guest mode.
    pub fn drop_guest_mode(&mut self) {
        if self.svm.guest {
            self.svm.guest = false;
            self.svm.due = None;
            self.svm.injected = None;
            let general = self.state.gpr;
            let host = self.svm.host;
            host.load(&mut self.state);
            self.state.gpr = general;
            if self.svm.control.nested_paging() {
                self.state.pat = host.pat;
            }
            self.flush_tlb();
        }
    }
}
