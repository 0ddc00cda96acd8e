//! Nested virtualization by SVM: a guest that is a hypervisor itself (AMD64 volume 2, chapter 15).
//!
//! | file | idea |
//! |---|---|
//! | `instructions` | VMRUN, VMLOAD, VMSAVE, STGI, CLGI, INVLPGA, SKINIT |
//! | `world_switch` | from the hypervisor (L1) to its guest (L2), and back: #VMEXIT |
//! | `checks` | the states that VMRUN refuses |
//! | `vmcb` | the layout of the control block |
//! | `intercept` | what makes the guest leave: one function for each kind |
//! | `event` | events as the control block has them |
//! | `saved` | the state of a CPU in guest mode, for a client that saves and restores it |
//!
//! What the hypervisor had in its registers stays in this CPU, not in the host save area, whose content is the
//! processor's own affair (15.5.1). So does the control area, which VMRUN reads once: a processor may do so
//! (15.15), and KVM does.
//!
//! A #VMEXIT takes place between two instructions. An intercept abandons its instruction and records what is due; the
//! boundary then stores it in the control block, which may have to wait for memory, and starts again until it is done.
//!
//! Translations of the two worlds never mix: the TLB has a name for each ASID that CPUID offers, and keeps what belongs
//! to it until the hypervisor has it flushed. Those of other ASIDs share a name, and nothing is kept.
//!
//! Not offered: SEV, AVIC, last-branch records, shadow stacks, and the traps after writes of control registers and
//! EFER, which serve SEV-ES.

mod checks;
mod event;
pub(crate) mod instructions;
pub(crate) mod intercept;
mod saved;
mod vmcb;
mod world_switch;

pub use event::{Event, EventKind};
pub use saved::BadVmcb;
pub use vmcb::VMCB_BYTES;

use crate::Cpu;
use crate::machine::NestedPaging;
use crate::state::{State, control, flags};
use crate::tlb::WORLDS;
use intercept::code;
use vmcb::{CONTROL_BYTES, Control, Registers, VmExit, virtual_interrupt};

/// EDX of CPUID leaf 0x8000_000a: the features of SVM that this CPU has.
pub mod feature {
    /// Nested paging.
    pub const NESTED_PAGING: u32 = 1 << 0;
    /// A #VMEXIT stores the address of the next instruction.
    pub const NEXT_RIP: u32 = 1 << 3;
    /// The guest's time-stamp counter can run at another rate.
    pub const TSC_RATIO: u32 = 1 << 4;
    /// TLB_CONTROL can flush one ASID.
    pub const FLUSH_BY_ASID: u32 = 1 << 6;
    /// A #VMEXIT tells more of the instruction: the general register of MOV CR, the address of
    /// INVLPG, the vector of INT.
    pub const DECODE_ASSISTS: u32 = 1 << 7;
    /// PAUSE is intercepted after a number of times.
    pub const PAUSE_FILTER: u32 = 1 << 10;
    /// These have to be close together.
    pub const PAUSE_THRESHOLD: u32 = 1 << 12;
    /// A guest with nested paging can have VMLOAD and VMSAVE with addresses of its own.
    pub const VIRTUAL_VMLOAD: u32 = 1 << 15;
    /// A guest can have a GIF of its own.
    pub const VIRTUAL_GIF: u32 = 1 << 16;
    /// A guest can have NMIs of its own.
    pub const VIRTUAL_NMI: u32 = 1 << 25;
    /// All of them.
    pub const ALL: u32 = NESTED_PAGING
        | NEXT_RIP
        | TSC_RATIO
        | FLUSH_BY_ASID
        | DECODE_ASSISTS
        | PAUSE_FILTER
        | PAUSE_THRESHOLD
        | VIRTUAL_VMLOAD
        | VIRTUAL_GIF
        | VIRTUAL_NMI;
}

/// The number of ASIDs that CPUID tells: KVM's number for its guests.
pub const ASIDS: u32 = 8;

/// Whether the TLB keeps translations for this ASID.
fn keeps(asid: u32) -> bool {
    (1..ASIDS).contains(&asid)
}

/// Returns the world of the TLB for an ASID; 0 is that of the hypervisor itself.
fn world_of(asid: u32) -> usize {
    /// Of all for which it keeps nothing.
    const OTHER: usize = WORLDS - 1;
    match asid {
        0 => 0,
        _ if keeps(asid) => asid as usize,
        _ => OTHER,
    }
}

/// VM_CR: SVM is disabled, EFER.SVME cannot be set.
pub const VM_CR_SVMDIS: u64 = 1 << 4;
/// VM_CR: SVMDIS cannot be changed.
const VM_CR_LOCK: u64 = 1 << 3;
/// VM_CR: the bits that exist.
const VM_CR_KNOWN: u64 = 0x1f;

/// What the pause filter has counted.
#[derive(Clone, Copy, Debug, Default)]
struct Pauses {
    /// PAUSE instructions that may pass.
    left: u16,
    /// Number of instructions at the last one.
    last: u64,
}

/// The state of guest mode. It means something only in guest mode, but for what is due.
pub(crate) struct Svm {
    /// The CPU runs a guest of the hypervisor's.
    guest: bool,
    /// The ASID of the guest that ran last.
    last_asid: u32,
    /// The paging registers of each world when it ran last: [`Cpu::paging_registers`].
    registers: [[u64; 4]; WORLDS],
    /// The guest-physical address of the control block.
    vmcb: u64,
    /// The control area.
    control: Control,
    /// The hypervisor's registers.
    host: Registers,
    /// The #VMEXIT of the last [`Break::VmExit`](crate::op::Break).
    recorded: VmExit,
    /// A #VMEXIT that takes place before the next instruction.
    due: Option<VmExit>,
    /// The event that VMRUN injects before the first instruction.
    injected: Option<Event>,
    /// NMIs are blocked because VMRUN has injected one: the hypervisor's are not, as in KVM.
    nmi_injected: bool,
    /// The event whose delivery is in progress.
    delivering: Option<Event>,
    /// An interrupt is pending that makes the guest leave.
    interrupted: bool,
    pauses: Pauses,
}

impl Pauses {
    /// What a guest begins with.
    fn new(control: &Control) -> Self {
        Pauses {
            left: control.pause_filter().0,
            last: 0,
        }
    }
}

impl Svm {
    /// Returns the world of the TLB in which the CPU is.
    pub(crate) fn world(&self) -> usize {
        match self.guest {
            true => world_of(self.control.asid()),
            false => 0,
        }
    }

    pub(crate) fn new() -> Self {
        Svm {
            guest: false,
            last_asid: 0,
            registers: [[0; 4]; WORLDS],
            vmcb: 0,
            control: Control::new([0; CONTROL_BYTES]),
            host: Registers::default(),
            recorded: VmExit::default(),
            due: None,
            injected: None,
            nmi_injected: false,
            delivering: None,
            interrupted: false,
            pauses: Pauses::default(),
        }
    }

    /// Notes the paging registers of the current world, which is about to be left.
    pub(crate) fn note_registers(&mut self, registers: [u64; 4]) {
        self.registers[self.world()] = registers;
    }

    /// Returns the paging registers that the current world had when it ran last.
    pub(crate) fn noted_registers(&self) -> [u64; 4] {
        self.registers[self.world()]
    }

    /// Whether the CPU is in guest mode.
    #[inline(always)]
    pub(crate) fn is_guest(&self) -> bool {
        self.guest
    }

    /// Whether a #VMEXIT takes place before the next instruction.
    pub(crate) fn is_exit_due(&self) -> bool {
        self.due.is_some()
    }

    /// Leaves guest mode for system management mode: RSM enters it again.
    pub(crate) fn suspend(&mut self) {
        self.guest = false;
    }

    /// Notes which event is delivered from now on, or that none is: EXITINTINFO of a #VMEXIT.
    pub(crate) fn set_delivering(&mut self, event: Option<Event>) {
        self.delivering = event;
    }

    /// Returns the event to inject.
    pub(crate) fn injected(&self) -> Option<Event> {
        self.injected
    }

    pub(crate) fn end_injection(&mut self) {
        self.injected = None;
    }

    /// Returns RIP for the handler of an injected event to return to: after the instruction of a software event, at
    /// `rip` otherwise (15.20).
    pub(crate) fn injection_returns_to(&self, event: Event, rip: u64) -> u64 {
        let is_software = match event.kind() {
            Some(EventKind::Software) => true,
            Some(EventKind::Exception) => {
                matches!(event.vector(), crate::vector::BP | crate::vector::OF)
            }
            _ => false,
        };
        match is_software {
            true => self.control.next_rip(),
            false => rip,
        }
    }

    /// Whether the guest has its own task priority and its interrupts are masked by the hypervisor's
    /// RFLAGS.IF (V_INTR_MASKING).
    pub(crate) fn masks_interrupts(&self) -> bool {
        self.guest && self.has(virtual_interrupt::MASKING)
    }

    fn has(&self, bit: u64) -> bool {
        self.control.virtual_interrupt() & bit != 0
    }

    /// Returns the guest's virtual task priority.
    pub(crate) fn virtual_priority(&self) -> u64 {
        self.control.virtual_interrupt() & virtual_interrupt::TPR & 15
    }

    pub(crate) fn set_virtual_priority(&mut self, cr8: u64) {
        (self.control).set_virtual_interrupt(virtual_interrupt::TPR, cr8);
    }

    /// Returns the tables that the guest's guest-physical addresses go through: the hypervisor's, if it has
    /// enabled nested paging.
    pub(crate) fn nested_paging(&self) -> Option<NestedPaging> {
        (self.guest && self.control.nested_paging()).then(|| NestedPaging {
            cr3: self.control.nested_cr3(),
            cr4: self.host.cr4,
            efer: self.host.efer,
        })
    }

    /// Returns the nested tables of a guest whose VMLOAD and VMSAVE are virtualized: they are with nested paging only.
    pub(crate) fn virtual_vmload_tables(&self) -> Option<NestedPaging> {
        self.nested_paging()
            .filter(|_| self.control.virtual_vmload())
    }

    /// Returns the time-stamp counter where the hypervisor's is `tsc`: of its guest `ratio` times that, with 32 bits of
    /// fraction, and an offset (15.30.5).
    pub(crate) fn tsc(&self, tsc: u64, ratio: u64) -> u64 {
        match self.guest {
            true => {
                let scaled = (u128::from(tsc) * u128::from(ratio)) >> 32;
                (scaled as u64).wrapping_add(self.control.tsc_offset())
            }
            false => tsc,
        }
    }

    /// Whether the guest's STGI and CLGI change its own GIF.
    fn has_virtual_gif(&self) -> bool {
        self.guest && self.has(virtual_interrupt::GIF_ENABLE)
    }

    /// Whether NMIs that are delivered to the guest, and IRET, are its own. Those of the hypervisor make it leave then.
    fn has_virtual_nmis(&self) -> bool {
        self.guest && self.has(virtual_interrupt::NMI_ENABLE)
    }
}

impl Cpu {
    /// Whether the CPU is in guest mode: it runs a guest of a hypervisor that is its guest.
    pub fn is_in_guest_mode(&self) -> bool {
        self.svm.guest
    }

    /// Whether the CPU does what Intel's do where the vendors' differ. A guest of SVM runs on AMD's, whose manual
    /// defines SVM, whatever vendor its CPUID tells: its hypervisor reads EXT in EXITINFO1, for example.
    pub(crate) fn is_intel(&self) -> bool {
        self.features.is_intel && !self.svm.guest
    }

    /// Whether the CPU takes interrupts, as far as GIF and RFLAGS.IF say so: the hypervisor's IF if its
    /// guest has a virtual one.
    pub fn interrupts_enabled(&self) -> bool {
        let rflags = match self.svm.masks_interrupts() {
            true => self.svm.host.rflags,
            false => self.state.rflags,
        };
        !self.state.events.gif_clear && rflags & flags::IF != 0
    }

    /// Whether an external interrupt makes the guest leave, instead of being delivered: it stays pending.
    pub fn exits_on_interrupt(&self) -> bool {
        self.svm.guest && self.svm.control.intercepts(code::INTR)
    }

    /// Has the guest leave for an external interrupt. Call when [`can_take_interrupt`](Self::can_take_interrupt) and
    /// [`exits_on_interrupt`](Self::exits_on_interrupt).
    pub fn exit_on_interrupt(&mut self) {
        self.svm.interrupted = true;
        self.slow = true;
    }

    /// Has the guest leave for an INIT, if that is intercepted. Returns whether it is.
    pub fn exit_on_init(&mut self) -> bool {
        self.leaves_for(code::INIT)
    }

    /// Has the guest leave for a shutdown, if that is intercepted. Returns whether it is.
    pub fn exit_on_shutdown(&mut self) -> bool {
        self.leaves_for(code::SHUTDOWN)
    }

    /// Has the guest leave with exit code `code` before the next instruction, if that is intercepted.
    /// Returns whether it is.
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

    /// Whether an NMI makes the guest leave now. Neither the blocking of NMIs nor a shadow delays that.
    pub(crate) fn nmi_leaves_guest(&self) -> bool {
        let events = &self.state.events;
        events.nmis != 0
            && !events.gif_clear
            && self.svm.guest
            && self.svm.control.intercepts(code::NMI)
    }

    /// Whether an NMI is taken before the next instruction: delivered, or by a #VMEXIT.
    pub fn takes_nmi(&self) -> bool {
        self.state.events.takes_nmi() || self.nmi_leaves_guest() || self.takes_virtual_nmi()
    }

    /// Whether the guest's virtual NMI is taken before the next instruction (15.21.10).
    fn takes_virtual_nmi(&self) -> bool {
        use virtual_interrupt::*;
        self.svm.has_virtual_nmis()
            && self.svm.control.virtual_interrupt() & (NMI | NMI_MASK) == NMI
            && self.takes_virtual_events()
    }

    /// Whether nothing but masks of their own delays the guest's virtual events.
    fn takes_virtual_events(&self) -> bool {
        use virtual_interrupt::*;
        let control = self.svm.control.virtual_interrupt();
        let events = &self.state.events;
        self.svm.guest
            && !(events.sti_shadow || events.mov_ss_shadow || events.gif_clear)
            && (control & GIF_ENABLE == 0 || control & GIF != 0)
    }

    /// Call when an NMI that was pending is delivered, or has failed to be.
    pub(crate) fn end_nmi(&mut self) {
        match self.svm.has_virtual_nmis() {
            true => (self.svm.control).set_virtual_interrupt(virtual_interrupt::NMI, 0),
            false => self.state.events.nmis = self.state.events.nmis.saturating_sub(1),
        }
    }

    /// Call when the handler of an NMI begins, of one that VMRUN has `injected` or another one.
    pub(crate) fn block_nmis(&mut self, injected: bool) {
        use virtual_interrupt::NMI_MASK;
        if self.svm.has_virtual_nmis() {
            (self.svm.control).set_virtual_interrupt(NMI_MASK, NMI_MASK);
        } else if !(injected && self.state.events.nmi_blocked) {
            self.state.events.nmi_blocked = true;
            self.svm.nmi_injected = injected;
        }
    }

    /// Call for IRET: the handler of an NMI ends.
    pub(crate) fn unblock_nmis(&mut self) {
        match self.svm.has_virtual_nmis() {
            true => {
                (self.svm.control).set_virtual_interrupt(virtual_interrupt::NMI_MASK, 0);
                self.slow = true;
            }
            false => self.state.events.nmi_blocked = false,
        }
    }

    /// Whether an external interrupt makes the guest leave now.
    pub(crate) fn interrupt_leaves_guest(&mut self) -> bool {
        std::mem::take(&mut self.svm.interrupted)
            && self.exits_on_interrupt()
            && self.interrupts_enabled()
    }

    /// Whether the guest's virtual interrupt is taken before the next instruction (15.21).
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

    /// Returns the guest-physical address of the control block in guest mode.
    pub fn vmcb(&self) -> Option<u64> {
        self.svm.guest.then_some(self.svm.vmcb)
    }

    /// Returns the event that VMRUN injects and that is not delivered yet.
    pub fn injected_event(&self) -> Option<Event> {
        self.svm.injected
    }
}

impl State {
    /// Returns VM_CR after a write of `value`, or `None` for one that it cannot have: reserved bits, and SVMDIS while
    /// EFER.SVME is set. SVMDIS and LOCK stay if it is locked (15.30.1).
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
