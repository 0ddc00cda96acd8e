//! Nested virtualization by SVM: a guest that is a hypervisor itself (AMD64 volume 2, chapter 15).
//!
//! | file | idea |
//! |---|---|
//! | `instructions` | VMRUN, VMLOAD, VMSAVE, STGI, CLGI, INVLPGA, SKINIT |
//! | `world_switch` | from the hypervisor (L1) to its guest (L2), and back: #VMEXIT |
//! | `checks` | the states that VMRUN refuses |
//! | `vmcb` | the layout of the control block |
//! | `intercept` | what makes the guest leave: one function for each kind |
//! | `event` | events in the form of control block fields |
//! | `saved` | the state of a CPU in guest mode, for a client that saves and restores it |
//!
//! The hypervisor's registers stay in this CPU, not in the host save area, because the format of that area belongs to
//! the processor (15.5.1). The control area stays in this CPU, too: VMRUN reads it once. A processor may do so
//! (15.15), and KVM does.
//!
//! A #VMEXIT takes place between two instructions. An intercept abandons its instruction and records which #VMEXIT is
//! due. The block boundary then stores the #VMEXIT in the control block. It may have to wait for memory, and repeats
//! the store until it succeeds.
//!
//! Translations of the hypervisor and its guests never mix. The TLB has a name for each ASID that CPUID offers, and
//! keeps the ASID's translations until the hypervisor has them flushed. All other ASIDs share a name, and their
//! translations are not kept.
//!
//! Not offered: SEV, AVIC, last-branch records, shadow stacks, and the traps after writes of control registers and
//! EFER, which SEV-ES uses.

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
    /// A #VMEXIT reports details of the instruction: the general register of MOV CR, the address of
    /// INVLPG, the vector of INT.
    pub const DECODE_ASSISTS: u32 = 1 << 7;
    /// PAUSE is intercepted only after a number of times.
    pub const PAUSE_FILTER: u32 = 1 << 10;
    /// The filter counts only PAUSEs that are close together.
    pub const PAUSE_THRESHOLD: u32 = 1 << 12;
    /// In a guest with nested paging, VMLOAD and VMSAVE can take guest-physical addresses of the guest.
    pub const VIRTUAL_VMLOAD: u32 = 1 << 15;
    /// A guest can have a GIF of its own.
    pub const VIRTUAL_GIF: u32 = 1 << 16;
    /// A guest can have NMIs of its own.
    pub const VIRTUAL_NMI: u32 = 1 << 25;
    /// All features.
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

/// The number of ASIDs that CPUID reports: the same as KVM reports to its guests.
pub const ASIDS: u32 = 8;

/// Whether the TLB keeps translations for this ASID.
fn keeps(asid: u32) -> bool {
    (1..ASIDS).contains(&asid)
}

/// Returns the TLB's world for an ASID. World 0 is the hypervisor's.
fn world_of(asid: u32) -> usize {
    /// The world of all ASIDs for which the TLB keeps nothing.
    const OTHER: usize = WORLDS - 1;
    match asid {
        0 => 0,
        _ if keeps(asid) => asid as usize,
        _ => OTHER,
    }
}

/// A bit of VM_CR: SVM is disabled, so EFER.SVME cannot be set.
pub const VM_CR_SVMDIS: u64 = 1 << 4;
/// VM_CR: SVMDIS cannot be changed.
const VM_CR_LOCK: u64 = 1 << 3;
/// VM_CR: the bits that exist.
const VM_CR_KNOWN: u64 = 0x1f;

/// The state of the pause filter.
#[derive(Clone, Copy, Debug, Default)]
struct Pauses {
    /// The number of PAUSE instructions that may still pass.
    left: u16,
    /// The number of instructions at the last PAUSE.
    last: u64,
}

/// The state of guest mode. Outside guest mode only `due` has a meaning.
pub(crate) struct Svm {
    /// The CPU runs a guest of the hypervisor's.
    guest: bool,
    /// The ASID of the guest that ran last.
    last_asid: u32,
    /// The paging registers with which each world ran last: [`Cpu::paging_registers`].
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
    /// NMIs are blocked because VMRUN has injected one. The hypervisor's NMIs are not blocked, as in KVM.
    nmi_injected: bool,
    /// The event whose delivery is in progress.
    delivering: Option<Event>,
    /// An interrupt is pending that will make the guest leave.
    interrupted: bool,
    pauses: Pauses,
}

impl Pauses {
    /// The state of the filter when a guest begins.
    fn new(control: &Control) -> Self {
        Pauses {
            left: control.pause_filter().0,
            last: 0,
        }
    }
}

impl Svm {
    /// Returns the TLB's current world.
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

    /// Stores the paging registers of the current world, before the CPU leaves the world.
    pub(crate) fn note_registers(&mut self, registers: [u64; 4]) {
        self.registers[self.world()] = registers;
    }

    /// Returns the paging registers with which the current world ran last.
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

    /// Leaves guest mode for system management mode. RSM enters guest mode again.
    pub(crate) fn suspend(&mut self) {
        self.guest = false;
    }

    /// Stores which event is being delivered from now on, if any. A #VMEXIT reports it in EXITINTINFO.
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

    /// Returns RIP to which the handler of an injected event returns: after the instruction for a software event,
    /// otherwise `rip` (15.20).
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

    /// Whether the guest has a task priority of its own, and the hypervisor's RFLAGS.IF masks physical
    /// interrupts (V_INTR_MASKING).
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

    /// Returns the hypervisor's tables that translate guest-physical addresses of its guest, if it has
    /// enabled nested paging.
    pub(crate) fn nested_paging(&self) -> Option<NestedPaging> {
        (self.guest && self.control.nested_paging()).then(|| NestedPaging {
            cr3: self.control.nested_cr3(),
            cr4: self.host.cr4,
            efer: self.host.efer,
        })
    }

    /// Returns the nested tables of a guest whose VMLOAD and VMSAVE are virtualized, which needs nested paging.
    pub(crate) fn virtual_vmload_tables(&self) -> Option<NestedPaging> {
        self.nested_paging()
            .filter(|_| self.control.virtual_vmload())
    }

    /// Returns the time-stamp counter, given the hypervisor's counter `tsc`. A guest's counter is `tsc` times `ratio`,
    /// which has 32 bits of fraction, plus an offset (15.30.5).
    pub(crate) fn tsc(&self, tsc: u64, ratio: u64) -> u64 {
        match self.guest {
            true => {
                let scaled = (u128::from(tsc) * u128::from(ratio)) >> 32;
                (scaled as u64).wrapping_add(self.control.tsc_offset())
            }
            false => tsc,
        }
    }

    /// Whether STGI and CLGI of the guest change a virtual GIF.
    fn has_virtual_gif(&self) -> bool {
        self.guest && self.has(virtual_interrupt::GIF_ENABLE)
    }

    /// Whether the guest has virtual NMIs, which IRET ends. Then the hypervisor's NMIs make the guest leave.
    fn has_virtual_nmis(&self) -> bool {
        self.guest && self.has(virtual_interrupt::NMI_ENABLE)
    }
}

impl Cpu {
    /// Whether the CPU is in guest mode: whether it runs a nested guest.
    pub fn is_in_guest_mode(&self) -> bool {
        self.svm.guest
    }

    /// Whether the CPU behaves like Intel's where the vendors differ. A nested guest runs on a CPU of AMD's,
    /// whatever vendor its CPUID reports, because AMD's manual defines SVM: for example, its hypervisor
    /// reads EXT in EXITINTINFO.
    pub(crate) fn is_intel(&self) -> bool {
        self.features.is_intel && !self.svm.guest
    }

    /// Whether GIF and RFLAGS.IF allow the CPU to take interrupts. If the guest's IF is virtual, the
    /// hypervisor's IF counts.
    pub fn interrupts_enabled(&self) -> bool {
        let rflags = match self.svm.masks_interrupts() {
            true => self.svm.host.rflags,
            false => self.state.rflags,
        };
        !self.state.events.gif_clear && rflags & flags::IF != 0
    }

    /// Whether an external interrupt makes the guest leave instead of being delivered. The
    /// interrupt then stays pending.
    pub fn exits_on_interrupt(&self) -> bool {
        self.svm.guest && self.svm.control.intercepts(code::INTR)
    }

    /// Makes the guest leave for an external interrupt. Call when [`can_take_interrupt`](Self::can_take_interrupt) and
    /// [`exits_on_interrupt`](Self::exits_on_interrupt) return `true`.
    pub fn exit_on_interrupt(&mut self) {
        self.svm.interrupted = true;
        self.slow = true;
    }

    /// Makes the guest leave for an INIT, if the hypervisor intercepts it. Returns whether it does.
    pub fn exit_on_init(&mut self) -> bool {
        self.leaves_for(code::INIT)
    }

    /// Makes the guest leave for a shutdown, if the hypervisor intercepts it. Returns whether it does.
    pub fn exit_on_shutdown(&mut self) -> bool {
        self.leaves_for(code::SHUTDOWN)
    }

    /// Makes the guest leave with exit code `code` before the next instruction, if the hypervisor intercepts it.
    /// Returns whether it does.
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

    /// Whether an NMI makes the guest leave now. Neither a shadow nor the blocking of NMIs delays this.
    pub(crate) fn nmi_leaves_guest(&self) -> bool {
        let events = &self.state.events;
        events.nmis != 0
            && !events.gif_clear
            && self.svm.guest
            && self.svm.control.intercepts(code::NMI)
    }

    /// Whether an NMI is taken before the next instruction: delivered, or reported by a #VMEXIT.
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

    /// Whether the guest's virtual events can be taken now, except for their own masks.
    fn takes_virtual_events(&self) -> bool {
        use virtual_interrupt::*;
        let control = self.svm.control.virtual_interrupt();
        let events = &self.state.events;
        self.svm.guest
            && !(events.sti_shadow || events.mov_ss_shadow || events.gif_clear)
            && (control & GIF_ENABLE == 0 || control & GIF != 0)
    }

    /// Call when a pending NMI has been delivered, or its delivery has failed.
    pub(crate) fn end_nmi(&mut self) {
        match self.svm.has_virtual_nmis() {
            true => (self.svm.control).set_virtual_interrupt(virtual_interrupt::NMI, 0),
            false => self.state.events.nmis = self.state.events.nmis.saturating_sub(1),
        }
    }

    /// Call when the handler of an NMI begins. `injected`: VMRUN has injected the NMI.
    pub(crate) fn block_nmis(&mut self, injected: bool) {
        use virtual_interrupt::NMI_MASK;
        if self.svm.has_virtual_nmis() {
            (self.svm.control).set_virtual_interrupt(NMI_MASK, NMI_MASK);
        } else if !(injected && self.state.events.nmi_blocked) {
            self.state.events.nmi_blocked = true;
            self.svm.nmi_injected = injected;
        }
    }

    /// Call for IRET, which ends the handler of an NMI.
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

    /// Returns the guest-physical address of the control block; `None` outside guest mode.
    pub fn vmcb(&self) -> Option<u64> {
        self.svm.guest.then_some(self.svm.vmcb)
    }

    /// Returns the event that VMRUN injects, if it is not delivered yet.
    pub fn injected_event(&self) -> Option<Event> {
        self.svm.injected
    }
}

impl State {
    /// Returns VM_CR after a write of `value`. `None` if the value is invalid: it has reserved bits, or SVMDIS while
    /// EFER.SVME is set. If VM_CR is locked, SVMDIS and LOCK do not change (15.30.1).
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
