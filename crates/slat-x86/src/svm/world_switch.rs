//! The switch from the hypervisor to its guest, and back.
//!
//! In both directions, the CPU first reads and writes guest memory, and only then changes registers. So it can abandon
//! the switch at any memory access, and start it again.

use crate::Cpu;
use crate::machine::{Exit, GuestFlush};
use crate::nested::vmcb::{
    CONTROL_BYTES, Control, G_PAT, Registers, SAVE_BYTES, SAVE_OFFSET, Save, VmExit,
    virtual_interrupt,
};
use crate::nested::{Event, Pauses, code, keeps};
use crate::op::{Break, Op};
use crate::state::{control::*, flags};
use crate::watch::DR6_BS;

impl Cpu {
    /// Reads the control area and the save area of the control block at `vmcb`. `None`: the control block is not in
    /// memory.
    pub(super) fn read_vmcb(&mut self, vmcb: u64) -> Result<Option<(Control, Save)>, Break> {
        let (mut control, mut save) = ([0; CONTROL_BYTES], [0; SAVE_BYTES]);
        let is_memory = self.read_physical(vmcb, &mut control)?
            && self.read_physical(vmcb + SAVE_OFFSET as u64, &mut save)?;
        Ok(is_memory.then(|| (Control::new(control), Save(save))))
    }

    /// Executes VMRUN with the control block at `vmcb`, which is in memory. Enters the guest or, if VMRUN fails, stores
    /// the reason in the control block.
    pub(super) fn enter_guest(
        &mut self,
        op: &Op,
        vmcb: u64,
        (control, save): (Control, Save),
    ) -> Result<Break, Break> {
        let guest = Registers::read(&save).canonicalized();
        let is_runnable = self.is_runnable(&guest, &control) && self.has_msr_map(&control)?;
        let pdptes = match is_runnable {
            true => self.guest_pdptes(&guest, &control)?,
            false => None,
        };
        let next = self.next_rip(op);
        let Some(pdptes) = pdptes else {
            let mut control = control;
            let exit = VmExit {
                code: code::INVALID,
                ..VmExit::default()
            };
            let shadow = control.interrupt_shadow();
            control.put_exit(&exit, shadow);
            self.write_physical(vmcb, &[(Control::EXIT, control.bytes())])?;
            self.state.events.gif_clear = true;
            self.slow = true;
            return Ok(Break::End);
        };
        self.flags();
        let mut host = Registers::of(&self.state, 0);
        host.rip = next;
        self.leave_world();
        self.svm.vmcb = vmcb;
        self.svm.host = host;
        self.svm.control = control;
        self.svm.guest = true;
        self.state.pdptes = pdptes;
        self.load_world(&guest);
        self.flush_for_guest();
        if self.svm.control.nested_paging() {
            self.state.pat = guest.pat;
        }
        let control = &mut self.svm.control;
        self.svm.pauses = Pauses::new(control);
        let event = control.event();
        control.take_event();
        self.svm.nmi_injected = false;
        self.svm.injected = event.is_valid().then_some(event);
        let events = &mut self.state.events;
        events.sti_shadow = control.interrupt_shadow();
        events.mov_ss_shadow = false;
        events.gif_clear = false;
        events.debug = 0;
        // RFLAGS now belongs to the guest, so its TF causes no single-step trap of VMRUN.
        self.watch.steps = false;
        Ok(Break::Jump)
    }

    /// Whether the MSR permission map is in memory, or is not used. Without the map, VMRUN fails, as in KVM; a
    /// processor notices only at the first access to an MSR.
    fn has_msr_map(&mut self, control: &Control) -> Result<bool, Break> {
        if !control.intercepts(code::MSR) {
            return Ok(true);
        }
        let mut byte = [0];
        let at = control.msr_map();
        Ok(self.read_physical(at, &mut byte)? && self.read_physical(at + 0x1000, &mut byte)?)
    }

    /// Returns the PDPTEs of a guest that VMRUN enters. If the guest has PAE paging without nested paging, reads them
    /// from memory; with nested paging, each page walk reads them (15.25.10). `None`: the PDPTEs are not in memory, or
    /// a PDPTE has reserved bits set.
    fn guest_pdptes(
        &mut self,
        guest: &Registers,
        control: &Control,
    ) -> Result<Option<[u64; 4]>, Break> {
        match guest.pae_paging() && !control.nested_paging() {
            true => self.pdptes_if_valid(guest.cr3),
            false => Ok(Some([0; 4])),
        }
    }

    /// Reads PDPTEs. `None`: the PDPTEs are not in memory, or a PDPTE is not valid.
    fn pdptes_if_valid(&mut self, cr3: u64) -> Result<Option<[u64; 4]>, Break> {
        match self.read_pdptes(cr3) {
            Ok(pdptes) => Ok(Some(pdptes)),
            Err(Break::Exception) => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// Loads the registers of the world that begins to run. The TLB may still have translations of this world.
    fn load_world(&mut self, registers: &Registers) {
        registers.load(&mut self.state);
        self.adopt_flags();
        self.enter_world();
        self.code.clock.serialize();
        self.slow = true;
    }

    /// Drops the translations that TLB_CONTROL selects, as VMRUN does (15.16.2). The machine does not distinguish
    /// ASIDs. It caches nested translations of the last ASID only.
    fn flush_for_guest(&mut self) {
        const NOTHING: u8 = 0;
        const ALL: u8 = 1;
        let asid = self.svm.control.asid();
        let last = std::mem::replace(&mut self.svm.last_asid, asid);
        match self.svm.control.tlb_control() {
            NOTHING if keeps(asid) && asid == last => return,
            NOTHING if keeps(asid) => {}
            ALL => self.flush_other(),
            // `flush_world` also drops global translations, which not all of these cases require.
            _ => self.flush_world(),
        }
        self.tell_flush(GuestFlush::Nested);
    }

    /// Carries out the #VMEXIT that is due. If the control block is not in memory, the hypervisor's state is lost, and
    /// this function returns an exit that ends the run. If the access to memory has to be repeated, the #VMEXIT stays
    /// due.
    pub(crate) fn exit_guest(&mut self) -> Option<Exit> {
        match self.try_exit_guest() {
            Ok(()) => None,
            Err(Break::Exit) => self.raised.exit.take(),
            // The #VMEXIT stays due, and will be tried again.
            Err(_) => None,
        }
    }

    fn try_exit_guest(&mut self) -> Result<(), Break> {
        let Some(mut exit) = self.svm.due else {
            return Ok(());
        };
        if !self.svm.guest {
            self.svm.due = None;
            return Ok(());
        }
        if exit.int_info == 0 {
            exit.int_info = self.pending_event().map_or(0, |event| event.0);
        }
        let host = self.svm.host;
        let pdptes = match host.pae_paging() {
            true => self.pdptes_if_valid(host.cr3)?,
            false => Some([0; 4]),
        };
        let is_stored = self.store_exit(&exit)?;
        // From here on, no step can fail.
        self.end_guest(pdptes.unwrap_or_default());
        match is_stored && pdptes.is_some() {
            true => Ok(()),
            false => Err(self.leave(Exit::Shutdown)),
        }
    }

    /// Returns the event that was to be delivered to the guest next. The #VMEXIT reports it to the hypervisor instead.
    fn pending_event(&self) -> Option<Event> {
        use crate::source::Source;
        let events = &self.state.events;
        (self.svm.injected)
            .or(events
                .exception
                .map(|exception| Event::new(exception.vector, exception.error, Source::Fault)))
            .or(events
                .interrupt
                .map(|vector| Event::new(vector, None, Source::Interrupt)))
    }

    /// Stores the guest's registers and `exit` in the control block. Returns `false` if the control block is not in
    /// memory.
    fn store_exit(&mut self, exit: &VmExit) -> Result<bool, Break> {
        self.flags();
        let mut save = Save([0; SAVE_BYTES]);
        Registers::of(&self.state, self.cpl).write(&mut save);
        let events = &self.state.events;
        let shadow = events.sti_shadow || events.mov_ss_shadow;
        self.svm.control.put_exit(exit, shadow);
        if self.svm.has_virtual_nmis() && self.svm.delivers_nmi() {
            // EXITINTINFO reports the NMI, so it is no longer pending in this CPU.
            self.end_nmi();
        }
        let control = *self.svm.control.bytes();
        let at = self.svm.vmcb;
        let [interrupts, event, next_rip] = Control::STORED;
        let parts = [
            (interrupts, control.as_slice()),
            (event, control.as_slice()),
            (next_rip, control.as_slice()),
        ];
        if !self.write_physical(at, &parts)? {
            return Ok(false);
        }
        let at = at + SAVE_OFFSET as u64;
        let parts = Save::STORED.map(|range| (range, save.0.as_slice()));
        Ok(self.write_physical(at, &parts)?
            && (!self.svm.control.nested_paging()
                || self.write_physical(at, &[(G_PAT, save.0.as_slice())])?))
    }

    /// Leaves guest mode: loads the hypervisor's registers into the CPU.
    pub(super) fn end_guest(&mut self, pdptes: [u64; 4]) {
        self.leave_world();
        let mut host = self.svm.host;
        if self.svm.control.nested_paging() {
            self.state.pat = host.pat;
        }
        if self.svm.delivers_nmi() {
            self.end_nmi();
        }
        self.state.events.nmi_blocked &= !std::mem::take(&mut self.svm.nmi_injected);
        self.svm.guest = false;
        self.svm.due = None;
        self.svm.injected = None;
        self.svm.set_delivering(None);
        self.svm.interrupted = false;
        let events = &mut self.state.events;
        events.exception = None;
        events.interrupt = None;
        events.debug = 0;
        events.sti_shadow = false;
        events.mov_ss_shadow = false;
        events.gif_clear = true;
        self.watch.steps = false;
        // Section 15.6: protected mode is enabled, and all breakpoints are disabled. CR2 and DR6 keep the guest's
        // values.
        host.cr0 |= CR0_PE;
        host.rflags &= !flags::VM;
        host.dr7 = 0x400;
        (host.cr2, host.dr6) = (self.state.cr2, self.state.dr6);
        self.state.pdptes = pdptes;
        self.load_world(&host);
        // VMRUN is complete now. If the hypervisor has set TF, a single-step trap follows VMRUN.
        if host.rflags & flags::TF != 0 {
            self.trap(DR6_BS);
        }
    }
}

/// The bit that STGI and CLGI change in a guest with a virtual GIF.
pub(super) const VIRTUAL_GIF: u64 = virtual_interrupt::GIF;
