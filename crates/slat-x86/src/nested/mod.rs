//! The state of guest mode: what a CPU stores about a hypervisor in the guest (L1) and its nested guest (L2). See
//! module `svm`.
//!
//! | file | idea |
//! |---|---|
//! | `vmcb` | the layout of the control block (VMCB) |
//! | `event` | events in the format of control block fields |

mod event;
pub(crate) mod vmcb;

pub use event::{Event, EventKind};
pub use vmcb::VMCB_BYTES;

use crate::machine::NestedPaging;
use crate::tlb::WORLDS;
use vmcb::{CONTROL_BYTES, Control, Registers, VmExit, virtual_interrupt};

/// Exit codes (AMD64 volume 2, appendix C). Exit codes below 0xc0 are also bit numbers in the intercept vectors.
pub(crate) mod code {
    pub const CR_READ: u64 = 0;
    pub const CR_WRITE: u64 = 0x10;
    pub const DR_READ: u64 = 0x20;
    pub const DR_WRITE: u64 = 0x30;
    pub const EXCEPTION: u64 = 0x40;
    pub const INTR: u64 = 0x60;
    pub const NMI: u64 = 0x61;
    pub const SMI: u64 = 0x62;
    pub const INIT: u64 = 0x63;
    pub const VINTR: u64 = 0x64;
    pub const CR0_SELECTIVE: u64 = 0x65;
    pub const IDTR_READ: u64 = 0x66;
    pub const GDTR_READ: u64 = 0x67;
    pub const LDTR_READ: u64 = 0x68;
    pub const TR_READ: u64 = 0x69;
    pub const IDTR_WRITE: u64 = 0x6a;
    pub const GDTR_WRITE: u64 = 0x6b;
    pub const LDTR_WRITE: u64 = 0x6c;
    pub const TR_WRITE: u64 = 0x6d;
    pub const RDTSC: u64 = 0x6e;
    pub const RDPMC: u64 = 0x6f;
    pub const PUSHF: u64 = 0x70;
    pub const POPF: u64 = 0x71;
    pub const CPUID: u64 = 0x72;
    pub const RSM: u64 = 0x73;
    pub const IRET: u64 = 0x74;
    pub const SOFTWARE_INTERRUPT: u64 = 0x75;
    pub const INVD: u64 = 0x76;
    pub const PAUSE: u64 = 0x77;
    pub const HLT: u64 = 0x78;
    pub const INVLPG: u64 = 0x79;
    pub const INVLPGA: u64 = 0x7a;
    pub const IO: u64 = 0x7b;
    pub const MSR: u64 = 0x7c;
    pub const TASK_SWITCH: u64 = 0x7d;
    pub const SHUTDOWN: u64 = 0x7f;
    pub const VMRUN: u64 = 0x80;
    pub const VMMCALL: u64 = 0x81;
    pub const VMLOAD: u64 = 0x82;
    pub const VMSAVE: u64 = 0x83;
    pub const STGI: u64 = 0x84;
    pub const CLGI: u64 = 0x85;
    pub const RDTSCP: u64 = 0x87;
    pub const ICEBP: u64 = 0x88;
    pub const WBINVD: u64 = 0x89;
    pub const MONITOR: u64 = 0x8a;
    pub const MWAIT: u64 = 0x8b;
    pub const XSETBV: u64 = 0x8d;
    pub const INVPCID: u64 = 0xa2;
    pub const NPF: u64 = 0x400;
    pub const INVALID: u64 = u64::MAX;
}

/// The number of ASIDs that CPUID reports. KVM reports the same number to its guests.
pub const ASIDS: u32 = 8;

/// Whether the TLB keeps translations for this ASID.
pub(crate) fn keeps(asid: u32) -> bool {
    (1..ASIDS).contains(&asid)
}

/// Returns the world for an ASID: the context of translations in the TLB. World 0 belongs to the hypervisor.
pub(crate) fn world_of(asid: u32) -> usize {
    /// The world of all ASIDs for which the TLB keeps no translations.
    const OTHER: usize = WORLDS - 1;
    match asid {
        0 => 0,
        _ if keeps(asid) => asid as usize,
        _ => OTHER,
    }
}

/// The state of the PAUSE filter.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pauses {
    /// The number of PAUSE instructions that may pass before the next one is intercepted.
    pub(crate) left: u16,
    /// The number of instructions that the CPU had executed at the last PAUSE.
    pub(crate) last: u64,
}

/// The state of guest mode. In this module, "the guest" is the nested guest. Outside guest mode, only `due` is used.
pub(crate) struct Svm {
    /// Whether the CPU runs the nested guest, not its hypervisor.
    pub(crate) guest: bool,
    /// The ASID of the nested guest that ran last.
    pub(crate) last_asid: u32,
    /// For each world, the values of `Cpu::paging_registers` when it ran last.
    registers: [[u64; 4]; WORLDS],
    /// The guest-physical address of the control block (VMCB).
    pub(crate) vmcb: u64,
    /// The control block's control area.
    pub(crate) control: Control,
    /// The hypervisor's registers, while its guest runs.
    pub(crate) host: Registers,
    /// The #VMEXIT that the last [`Break::VmExit`](crate::flow::Break) recorded.
    pub(crate) recorded: VmExit,
    /// A #VMEXIT that will take place before the next instruction.
    pub(crate) due: Option<VmExit>,
    /// The event that VMRUN injects before the guest's first instruction.
    pub(crate) injected: Option<Event>,
    /// Whether NMIs are blocked for the guest because VMRUN has injected one. As in KVM, this does not block NMIs that
    /// are intercepted for the hypervisor.
    pub(crate) nmi_injected: bool,
    /// The event that is being delivered.
    delivering: Option<Event>,
    /// Whether an interrupt is pending that will cause a #VMEXIT.
    pub(crate) interrupted: bool,
    pub(crate) pauses: Pauses,
}

impl Pauses {
    /// Returns the state of the PAUSE filter when a guest begins to run.
    pub(crate) fn new(control: &Control) -> Self {
        Pauses {
            left: control.pause_filter().0,
            last: 0,
        }
    }
}

impl Svm {
    /// Returns the current world of the TLB: 0 for the hypervisor, else the world of its guest's ASID.
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

    /// Records the paging registers of the current world. Call before the CPU leaves the world.
    pub(crate) fn note_registers(&mut self, registers: [u64; 4]) {
        self.registers[self.world()] = registers;
    }

    /// Returns the paging registers that the current world had when it ran last.
    pub(crate) fn noted_registers(&self) -> [u64; 4] {
        self.registers[self.world()]
    }

    /// Records a #VMEXIT. If an event is being delivered, the #VMEXIT reports it in EXITINTINFO.
    pub(crate) fn record(&mut self, exit: VmExit) {
        let int_info = self.delivering.map_or(0, |event| event.0);
        self.recorded = VmExit { int_info, ..exit };
    }

    /// Makes the recorded #VMEXIT take place before the next instruction.
    pub(crate) fn make_due(&mut self) {
        self.due = Some(self.recorded);
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

    /// Ends guest mode because the CPU enters system-management mode. RSM will enter guest mode again.
    pub(crate) fn suspend(&mut self) {
        self.guest = false;
    }

    /// Records the event that is delivered from now on, or `None`. A #VMEXIT during the delivery reports the event in
    /// EXITINTINFO.
    pub(crate) fn set_delivering(&mut self, event: Option<Event>) {
        self.delivering = event;
    }

    /// Returns the event that VMRUN injects and that is not delivered yet.
    pub(crate) fn injected(&self) -> Option<Event> {
        self.injected
    }

    pub(crate) fn end_injection(&mut self) {
        self.injected = None;
    }

    /// Returns the RIP to which the handler of an injected event returns: after the instruction for a software event,
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

    /// Whether V_INTR_MASKING gives the guest its own task priority, and lets the hypervisor's RFLAGS.IF mask physical
    /// interrupts.
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

    /// Returns the tables that translate the guest's guest-physical addresses. `None`: the hypervisor has not enabled
    /// nested paging.
    pub(crate) fn nested_paging(&self) -> Option<NestedPaging> {
        (self.guest && self.control.nested_paging()).then(|| NestedPaging {
            cr3: self.control.nested_cr3(),
            cr4: self.host.cr4,
            efer: self.host.efer,
        })
    }

    /// Returns the guest's nested tables if its VMLOAD and VMSAVE are virtualized, which requires nested paging.
    pub(crate) fn virtual_vmload_tables(&self) -> Option<NestedPaging> {
        self.nested_paging()
            .filter(|_| self.control.virtual_vmload())
    }

    /// Returns the time-stamp counter of the hypervisor or, in guest mode, of its guest. `tsc` is the hypervisor's
    /// counter. A guest's counter is `tsc` times `ratio`, which has 32 fraction bits, plus an offset (15.30.5).
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
    pub(crate) fn has_virtual_gif(&self) -> bool {
        self.guest && self.has(virtual_interrupt::GIF_ENABLE)
    }

    /// Whether the guest has virtual NMIs, which end with the guest's IRET. If so, the hypervisor's NMIs cause a
    /// #VMEXIT.
    pub(crate) fn has_virtual_nmis(&self) -> bool {
        self.guest && self.has(virtual_interrupt::NMI_ENABLE)
    }

    /// Whether the event that is being delivered is an NMI that was pending, not an NMI that VMRUN has injected.
    pub(crate) fn delivers_nmi(&self) -> bool {
        let is_nmi = |event: Event| event.kind() == Some(EventKind::Nmi);
        self.injected.is_none() && self.delivering.is_some_and(is_nmi)
    }
}
