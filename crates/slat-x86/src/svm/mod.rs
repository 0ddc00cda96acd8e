//! Nested virtualization by SVM: a guest that is a hypervisor itself (AMD64 volume 2, chapter 15).
//!
//! | file | idea |
//! |---|---|
//! | `instructions` | VMRUN, VMLOAD, VMSAVE, STGI, CLGI, INVLPGA, SKINIT |
//! | `world_switch` | the switch from the hypervisor (L1) to its guest (L2), and back by a #VMEXIT |
//! | `checks` | VMRUN's checks of the guest's state |
//! | `saved` | saves and restores the state of guest mode, for a client |
//!
//! Module `nested` has the state of guest mode and the layout of the control block. Module `intercept` has the events
//! that cause a #VMEXIT.
//!
//! While the guest runs, this CPU keeps the hypervisor's registers itself, not in the host save area, whose format is
//! not defined (15.5.1). This CPU also keeps a copy of the control area: VMRUN reads it once, as a processor may do
//! (15.15), and as KVM does.
//!
//! A #VMEXIT takes place between two instructions. An instruction that is intercepted is abandoned, and the #VMEXIT
//! that is due is recorded. At the next block boundary, the CPU stores the #VMEXIT in the control block. If the store
//! has to wait for memory, the CPU repeats it at the block boundary until it succeeds.
//!
//! Translations of the hypervisor and its guests never mix. The TLB has a *world* for each ASID that CPUID reports, and
//! keeps the ASID's translations until the hypervisor flushes them. All other ASIDs share one world, and their
//! translations are dropped when they begin to run.
//!
//! This CPU does not offer SEV, AVIC, last-branch records, shadow stacks, or the traps after writes to control
//! registers and EFER, which SEV-ES uses.

mod checks;
pub(crate) mod instructions;
mod saved;
mod world_switch;

pub use crate::features::svm as feature;
pub use crate::nested::{ASIDS, Event, EventKind, VMCB_BYTES};
pub use saved::BadVmcb;

use crate::Cpu;
use crate::nested::code;
use crate::nested::vmcb::{VmExit, virtual_interrupt};
use crate::state::{State, control, flags};

/// The bit of VM_CR that disables SVM, so that EFER.SVME cannot be set.
pub const VM_CR_SVMDIS: u64 = 1 << 4;
/// The bit of VM_CR that locks SVMDIS, so that it cannot be changed.
const VM_CR_LOCK: u64 = 1 << 3;
/// The bits of VM_CR that exist.
const VM_CR_KNOWN: u64 = 0x1f;

impl Cpu {
    /// Whether the CPU is in guest mode: it runs a nested guest.
    pub fn is_in_guest_mode(&self) -> bool {
        self.svm.guest
    }

    /// Whether GIF and RFLAGS.IF allow the CPU to accept interrupts. With V_INTR_MASKING, the hypervisor's IF decides,
    /// not the guest's.
    pub fn interrupts_enabled(&self) -> bool {
        let rflags = match self.svm.masks_interrupts() {
            true => self.svm.host.rflags,
            false => self.state.rflags,
        };
        !self.state.events.gif_clear && rflags & flags::IF != 0
    }

    /// Whether an external interrupt causes a #VMEXIT instead of being delivered. If so, the interrupt stays pending.
    pub fn exits_on_interrupt(&self) -> bool {
        self.svm.guest && self.svm.control.intercepts(code::INTR)
    }

    /// Makes a #VMEXIT due for an external interrupt. Call when [`can_take_interrupt`](Self::can_take_interrupt) and
    /// [`exits_on_interrupt`](Self::exits_on_interrupt) return `true`.
    pub fn exit_on_interrupt(&mut self) {
        self.svm.interrupted = true;
        self.slow = true;
    }

    /// If the hypervisor intercepts INIT, makes a #VMEXIT due. Returns whether the hypervisor intercepts INIT.
    pub fn exit_on_init(&mut self) -> bool {
        self.leaves_for(code::INIT)
    }

    /// If the hypervisor intercepts a shutdown, makes a #VMEXIT due. Returns whether the hypervisor intercepts a
    /// shutdown.
    pub fn exit_on_shutdown(&mut self) -> bool {
        self.leaves_for(code::SHUTDOWN)
    }

    /// If the hypervisor intercepts exit code `code`, makes a #VMEXIT due before the next instruction. Returns whether
    /// the hypervisor intercepts the code.
    pub(crate) fn leaves_for(&mut self, code: u64) -> bool {
        let leaves = self.svm.guest && self.svm.control.intercepts(code);
        if leaves {
            let _recorded = self.leave_guest(VmExit {
                code,
                ..VmExit::default()
            });
            self.make_exit_due();
        }
        leaves
    }

    /// Whether a pending NMI causes a #VMEXIT now. Neither a shadow nor blocked NMIs delay such a #VMEXIT.
    pub(crate) fn nmi_leaves_guest(&self) -> bool {
        let events = &self.state.events;
        events.nmis != 0
            && !events.gif_clear
            && self.svm.guest
            && self.svm.control.intercepts(code::NMI)
    }

    /// Whether an NMI is accepted before the next instruction: delivered, or reported by a #VMEXIT.
    pub fn takes_nmi(&self) -> bool {
        self.state.events.takes_nmi() || self.nmi_leaves_guest() || self.takes_virtual_nmi()
    }

    /// Whether the guest's virtual NMI is delivered before the next instruction (15.21.10).
    fn takes_virtual_nmi(&self) -> bool {
        use virtual_interrupt::*;
        self.svm.has_virtual_nmis()
            && self.svm.control.virtual_interrupt() & (NMI | NMI_MASK) == NMI
            && self.takes_virtual_events()
    }

    /// Whether shadows and GIF allow virtual events to be delivered to the guest now. Does not check the masks of the
    /// single events.
    fn takes_virtual_events(&self) -> bool {
        use virtual_interrupt::*;
        let control = self.svm.control.virtual_interrupt();
        let events = &self.state.events;
        self.svm.guest
            && !(events.sti_shadow || events.mov_ss_shadow || events.gif_clear)
            && (control & GIF_ENABLE == 0 || control & GIF != 0)
    }

    /// Call when a pending NMI was delivered, or its delivery has failed. The NMI is then no longer pending.
    pub(crate) fn end_nmi(&mut self) {
        match self.svm.has_virtual_nmis() {
            true => (self.svm.control).set_virtual_interrupt(virtual_interrupt::NMI, 0),
            false => self.state.events.nmis = self.state.events.nmis.saturating_sub(1),
        }
    }

    /// Call when the handler of an NMI begins: blocks further NMIs. `injected` says whether VMRUN has injected the NMI.
    pub(crate) fn block_nmis(&mut self, injected: bool) {
        use virtual_interrupt::NMI_MASK;
        if self.svm.has_virtual_nmis() {
            (self.svm.control).set_virtual_interrupt(NMI_MASK, NMI_MASK);
        } else if !(injected && self.state.events.nmi_blocked) {
            self.state.events.nmi_blocked = true;
            self.svm.nmi_injected = injected;
        }
    }

    /// Call for IRET, which ends the handler of an NMI: NMIs are no longer blocked.
    pub(crate) fn unblock_nmis(&mut self) {
        match self.svm.has_virtual_nmis() {
            true => {
                (self.svm.control).set_virtual_interrupt(virtual_interrupt::NMI_MASK, 0);
                self.slow = true;
            }
            false => self.state.events.nmi_blocked = false,
        }
    }

    /// Whether a pending external interrupt causes a #VMEXIT now. A second call returns `false`.
    pub(crate) fn interrupt_leaves_guest(&mut self) -> bool {
        std::mem::take(&mut self.svm.interrupted)
            && self.exits_on_interrupt()
            && self.interrupts_enabled()
    }

    /// Whether the guest's virtual interrupt is delivered before the next instruction (15.21).
    pub fn takes_virtual_interrupt(&self) -> bool {
        use virtual_interrupt::*;
        let control = self.svm.control.virtual_interrupt();
        self.takes_virtual_events()
            && control & IRQ != 0
            && (control & IGNORE_TPR != 0
                || control >> PRIORITY_SHIFT & 15 > self.svm.virtual_priority())
            && self.state.rflags & flags::IF != 0
    }

    /// Returns the vector of the virtual interrupt.
    pub(crate) fn virtual_vector(&self) -> u8 {
        self.svm.control.virtual_vector()
    }

    pub(crate) fn end_virtual_interrupt(&mut self) {
        (self.svm.control).set_virtual_interrupt(virtual_interrupt::IRQ, 0);
    }

    /// Returns the guest-physical address of the nested guest's control block (VMCB); `None` outside guest mode.
    pub fn vmcb(&self) -> Option<u64> {
        self.svm.guest.then_some(self.svm.vmcb)
    }

    /// Returns the event that VMRUN injects, if it is not delivered yet.
    pub fn injected_event(&self) -> Option<Event> {
        self.svm.injected
    }
}

impl State {
    /// Returns the value of VM_CR after a write of `value`. `None`: the value is invalid, because it has reserved bits,
    /// or sets SVMDIS while EFER.SVME is set. If VM_CR is locked, SVMDIS and LOCK keep their values (15.30.1).
    pub fn written_vm_cr(&self, value: u64) -> Option<u64> {
        let old = self.vm_cr;
        let kept = match old & VM_CR_LOCK {
            0 => 0,
            _ => VM_CR_LOCK | VM_CR_SVMDIS,
        };
        let new = value & !kept | old & kept;
        let disables = new & VM_CR_SVMDIS != 0;
        let enabled = self.efer & control::EFER_SVME != 0;
        (value & !VM_CR_KNOWN == 0 && !(disables && enabled)).then_some(new)
    }
}
