//! The services that a CPU needs from its machine, and the reasons why a run of the CPU ends.

use crate::state::State;
use std::ptr::NonNull;

/// The kind of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads data.
    Read,
    /// Writes data, or reads data that is written next.
    Write,
    /// Fetches instructions.
    Execute,
}

/// The part of the CPU's paging state on which a translation depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paging {
    /// CR0. Only PG and WP are used.
    pub cr0: u64,
    /// CR3: the address of the guest's top-level table.
    pub cr3: u64,
    /// The PDPTEs of PAE paging.
    pub pdptes: [u64; 4],
    /// CR4. Only PAE, PSE, PGE, LA57, SMEP, SMAP and PKE are used.
    pub cr4: u64,
    /// EFER. Only LMA and NXE are used.
    pub efer: u64,
    /// PKRU, which has an effect only if CR4.PKE is set.
    pub pkru: u32,
    /// Whether the access is a user access: CPL is 3, and the access is not an implicit access of the CPU to a system
    /// table.
    pub user: bool,
    /// Whether the access is an explicit supervisor access with RFLAGS.AC set, to which SMAP does not apply.
    pub ac: bool,
    /// `Some` if a nested guest runs with nested paging: its hypervisor's tables, which translate every guest-physical
    /// address.
    pub nested: Option<NestedPaging>,
}

/// Nested paging (AMD64 volume 2, 15.25): the registers of a nested guest's hypervisor on which its tables depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NestedPaging {
    /// nCR3: the address of the top-level table.
    pub cr3: u64,
    /// The hypervisor's CR4. Only PAE, PSE, LA57 and SMEP are used.
    pub cr4: u64,
    /// The hypervisor's EFER. Only LMA and NXE are used.
    pub efer: u64,
}

impl Paging {
    /// The paging state while paging is off: linear addresses are physical addresses.
    pub const OFF: Paging = Paging {
        cr0: 0,
        cr3: 0,
        pdptes: [0; 4],
        cr4: 0,
        efer: 0,
        pkru: 0,
        user: false,
        ac: false,
        nested: None,
    };
}

/// A translation: one 4 KiB page of host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostPage {
    /// The address of the page's first byte in this process.
    pub base: NonNull<u8>,
    /// Whether further reads at this privilege level may use this translation.
    pub read: bool,
    /// Whether further writes at this privilege level may use this translation.
    pub write: bool,
    /// Whether further instruction fetches at this privilege level may use this translation.
    pub execute: bool,
    /// `Some` if each store to the page must be reported to the machine ([`Mmu::stored`]): the guest-physical address
    /// of the page. In this case `write` is false, and every store is translated again.
    ///
    /// When a page becomes tracked, the CPU must drop its translation for writes to the page at once. So if
    /// [`Mmu::translate`] begins to track such a page, it raises `attention` and returns [`Fault::Retry`]. Without the
    /// retry, the CPU would see `attention` only after the rest of the block.
    pub tracked: Option<u64>,
    /// The logarithm of the size of the guest's page, of which this page is a part. INVLPG drops all parts.
    pub bits: u32,
    /// Whether this translation is valid in every address space: CR4.PGE and the G flag of the guest's page-table entry
    /// are set. A load of CR3 keeps the translation.
    pub global: bool,
}

/// The reason why an address has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The guest's tables do not allow the access. The CPU raises #PF with this error code, and the address in CR2.
    Page {
        /// The error code of the #PF.
        error_code: u32,
    },
    /// The tables of [`Paging::nested`] do not allow the access. The CPU makes a #VMEXIT of the nested guest.
    NestedPage {
        /// The value for EXITINFO1, which describes the nested page fault (AMD64 volume 2, 15.25.6).
        error_code: u64,
        /// The guest-physical address of the nested guest.
        gpa: u64,
    },
    /// There is no memory at the address: the device model handles the access.
    Mmio {
        /// The guest-physical address of the byte at the faulting address.
        gpa: u64,
    },
    /// The machine refuses the address: the CPU raises #GP(0). (The CPU itself checks whether addresses are canonical.)
    GeneralProtection,
    /// The CPU abandons the instruction, which has had no effect, checks `attention`, and executes the instruction
    /// again. All translations are invalid.
    Retry,
    /// The page walk has set an accessed or dirty bit in a page with decoded code (see
    /// [`CodePages::stored`](crate::CodePages::stored)). It may be the code of the instruction that needs the
    /// translation. The CPU walks again, executes the instruction as it was fetched, and then fetches the next
    /// instruction anew.
    CodeChanged,
    /// Host memory that backs the page is not accessible. The run ends with [`Exit::BadAddress`].
    BadAddress,
    /// The machine has no memory for the translation. The run ends with [`Exit::OutOfMemory`].
    OutOfMemory,
}

/// The reason why RDMSR or WRMSR is refused. The machine refuses accesses to its MSRs; the CPU refuses accesses to MSRs
/// that the CPU itself holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MsrFault {
    /// The MSR does not exist.
    Unknown,
    /// The MSR exists, but cannot be read, or cannot have this value.
    Invalid,
    /// [`Machine::allows_msr`] forbids the access.
    Forbidden,
    /// The access needs guest memory that is not accessible yet, and has had no effect. The CPU retries the access, and
    /// the run does not end, as for [`Fault::Retry`].
    Retry,
}

/// Which translations the guest has invalidated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestFlush {
    /// The translations of the page at this linear address, under the current PCID: for INVLPG, and for INVPCID of type
    /// 0 with the current PCID (0 if CR4.PCIDE is clear).
    Page(u64),
    /// All translations: for a change of CR0, CR3, CR4 or EFER, and for the other forms of INVPCID. In a nested guest,
    /// only the translations that depend on the guest's own tables.
    All,
    /// All translations of a nested guest, including those that depend on its hypervisor's nested tables: for VMRUN
    /// with a TLB_CONTROL, for VMRUN with another ASID than the last time, and for INVLPGA.
    Nested,
}

/// Translates the addresses that the CPU accesses.
pub trait Mmu {
    /// Returns the host page that backs the page of `gva`: walks the guest's tables (setting accessed and dirty bits),
    /// then the second level (stage 2). The CPU calls this only on misses of its software TLB.
    fn translate(&mut self, gva: u64, access: Access, paging: &Paging) -> Result<HostPage, Fault>;

    /// Returns the host page that backs the page of the guest-physical address `gpa`, for the CPU's access to a
    /// structure whose physical address it has. The default implementation translates the address as a linear address
    /// without paging, so it works only below 4 GiB.
    fn translate_physical(&mut self, gpa: u64, access: Access) -> Result<HostPage, Fault> {
        self.translate(gpa, access, &Paging::OFF)
    }

    /// Returns the host page that backs the page of `gpa`, a physical address of a nested guest. The `nested` tables
    /// translate the address first, which may cause [`Fault::NestedPage`]. Otherwise like
    /// [`translate_physical`](Self::translate_physical).
    fn translate_nested_physical(
        &mut self,
        gpa: u64,
        access: Access,
        nested: &NestedPaging,
    ) -> Result<HostPage, Fault> {
        let paging = Paging {
            nested: Some(*nested),
            ..Paging::OFF
        };
        self.translate(gpa, access, &paging)
    }

    /// Called after a guarded access to a translated page has returned [`Gone`](slat_guard::Gone). `Ok`: the CPU
    /// translates the address again and retries the access.
    fn recheck(&mut self, host: *mut u8, access: Access) -> Result<(), Fault>;

    /// Called after a store of `bytes` bytes at `gpa`, within one page that is [tracked](HostPage::tracked). When this
    /// is called, the bytes are in memory, and the instruction has not translated its next memory operand yet. If the
    /// store is in two pages, both parts are in memory before the first call.
    ///
    /// Also called after a store that failed with [`Gone`](slat_guard::Gone), because some of the bytes may be in
    /// memory.
    ///
    /// Returns whether all translations are invalid now.
    fn stored(&mut self, _gpa: u64, _bytes: usize) -> bool {
        false
    }

    /// Called after the guest has invalidated translations: the instruction has changed the register, and no address
    /// was translated since. The CPU may call this more often than necessary. For example, a task switch calls it
    /// several times.
    ///
    /// A MOV to CR3 that keeps the translations (bit 63 of the operand with CR4.PCIDE) does not call this.
    ///
    /// Returns whether all translations are invalid now.
    fn flush_guest(&mut self, _what: GuestFlush, _paging: &Paging) -> bool {
        false
    }
}

/// The services that a CPU needs from its machine, besides address translation.
pub trait Machine: Mmu {
    /// Returns EAX, EBX, ECX, EDX of CPUID.
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4];
    /// Whether CPUID raises #GP(0) outside CPL 0 (CPUID faulting, Intel SDM volume 3).
    fn cpuid_faults(&mut self) -> bool {
        false
    }
    /// Reads an MSR that the CPU does not hold itself.
    fn rdmsr(&mut self, msr: u32) -> Result<u64, MsrFault>;
    /// Writes an MSR that the CPU does not hold itself.
    fn wrmsr(&mut self, msr: u32, value: u64) -> Result<(), MsrFault>;
    /// Whether the guest may read MSR `msr` or, if `write`, write it. The CPU calls this before every access, even to
    /// an MSR that the CPU itself holds.
    fn allows_msr(&mut self, _msr: u32, _write: bool) -> bool {
        true
    }
    /// Whether the caller of the run handles an access that was refused because of `why`. If so, the run ends with
    /// [`Exit::Msr`]. Otherwise the access raises #GP(0).
    fn answers_msr_outside(&mut self, _why: MsrFault) -> bool {
        false
    }
    /// Returns the guest's time-stamp counter.
    fn tsc(&mut self) -> u64;
    /// Executes VMCALL or VMMCALL of code at privilege level `cpl`. Registers have 64 bits in `long_mode` and 32
    /// otherwise. The arguments are in the registers of `state`, and the results are stored in these registers; nothing
    /// else of `state` changes.
    fn hypercall(&mut self, state: &mut State, cpl: u8, long_mode: bool) -> HypercallOutcome;
    /// Called after the guest has written CR8, the task priority of its local APIC. (WRMSR to the APIC's task-priority
    /// register also changes CR8.)
    fn set_task_priority(&mut self, _cr8: u64) {}
    /// Returns the effect that VMCALL or VMMCALL has in this machine.
    fn hypercall_instruction(&mut self, _which: HypercallInstruction) -> Hypercalls {
        Hypercalls::Executed
    }
    /// Whether MONITOR and MWAIT exist. If they exist, they have no effect; otherwise they raise #UD.
    fn has_monitor(&mut self) -> bool {
        true
    }
}

/// What the machine has done with a hypercall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HypercallOutcome {
    /// The machine has executed the hypercall.
    Done,
    /// The caller of the run has to execute the hypercall: the run ends with [`Exit::Hypercall`].
    Outside,
    /// The CPU raises #UD. No register was changed.
    Undefined,
    /// The CPU executes the instruction anew, as for [`Fault::Retry`]. No register was changed.
    Retry,
}

/// An instruction that makes a hypercall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HypercallInstruction {
    /// Intel's VMCALL.
    Vmcall,
    /// AMD's VMMCALL.
    Vmmcall,
}

impl HypercallInstruction {
    /// Returns the instruction's bytes.
    pub fn bytes(self) -> [u8; 3] {
        match self {
            HypercallInstruction::Vmcall => [0x0f, 0x01, 0xc1],
            HypercallInstruction::Vmmcall => [0x0f, 0x01, 0xd9],
        }
    }
}

/// The effect of an instruction that makes a hypercall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hypercalls {
    /// The CPU executes the instruction.
    Executed,
    /// The CPU overwrites the instruction in memory with this hypercall instruction, which it then executes.
    Patched(HypercallInstruction),
    /// The instruction raises #UD.
    Undefined,
}

/// What happens at a locked access that crosses a cache line, for which a processor locks the bus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BusLocks {
    /// The access is executed like any other access.
    #[default]
    Executed,
    /// The run ends with [`Exit::BusLock`] before the instruction. The next run executes the instruction, if RIP has
    /// not changed. AMD's bus lock threshold behaves in this way.
    ExitBefore,
    /// The run ends with [`Exit::BusLock`] after the instruction. Intel's bus-lock detection behaves in this way.
    ExitAfter,
}

/// The event at which a probe is hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeKind {
    /// The execution of the instruction at the first address.
    Execute,
    /// A write to any of the watched bytes.
    Write,
    /// A read of any of the watched bytes.
    Read,
    /// A read of any of the watched bytes, or a write to any of them.
    Access,
}

/// The reason why a run ended with [`Exit::Probe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeHit {
    /// A code probe is at the next instruction.
    Code,
    /// The last instruction has accessed this linear address, which a data probe of this kind watches.
    Data(ProbeKind, u64),
    /// The CPU has executed one instruction, because the debugger steps it.
    Step,
}

/// The reason why a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// A port access. RIP is still the address of the instruction. The caller must call
    /// [`Cpu::complete_io`](crate::Cpu::complete_io), which finishes the instruction, before the next run. For a write,
    /// the caller passes no data.
    Io {
        /// The number of the I/O port.
        port: u16,
        /// The number of bytes of each unit: 1, 2 or 4.
        size: u8,
        /// Whether the access is an OUT, not an IN.
        write: bool,
        /// The number of units. It is more than 1 only for repeated INS and OUTS, which transfer all units in one page
        /// at once. [`Cpu::output`](crate::Cpu::output) returns the data of a write.
        count: u32,
    },
    /// An access to a guest-physical address without memory. For a read, the caller must provide the data by
    /// [`Cpu::complete_mmio_read`](crate::Cpu::complete_mmio_read) before the next run. A write needs no call.
    Mmio {
        /// The guest-physical address of the access.
        gpa: u64,
        /// The number of bytes that are accessed: 1 to 8.
        len: u8,
        /// Whether the access is a write, not a read.
        write: bool,
        /// The data that a write has written.
        data: [u8; 8],
    },
    /// A hypercall that the machine leaves to the caller. RIP is still the address of the instruction. The caller must
    /// finish it by [`Cpu::complete_hypercall`](crate::Cpu::complete_hypercall) before the next run.
    Hypercall,
    /// A refused access to an MSR that the caller has to handle. RIP is still the address of the instruction. The
    /// caller must finish the access by [`Cpu::complete_msr`](crate::Cpu::complete_msr) before the next run.
    Msr {
        /// The number of the MSR.
        index: u32,
        /// The value that WRMSR writes; `None` for RDMSR.
        value: Option<u64>,
        /// The reason why the access was refused.
        why: MsrFault,
    },
    /// The delivery of an interrupt or exception accessed an address without memory. The delivery has had no effect,
    /// and the next run repeats it.
    Delivery {
        /// The vector of the interrupt or exception.
        vector: u8,
        /// Whether an instruction (INT n, INT3, INTO) raised the event on purpose.
        software: bool,
        /// The guest-physical address of the access.
        gpa: u64,
    },
    /// The guest has executed HLT. RIP is the address after it.
    Hlt,
    /// An SMI is pending. The caller must call [`Cpu::enter_smm`](crate::Cpu::enter_smm) before the next run, which
    /// would otherwise end with this exit again.
    Smi,
    /// RSM in system-management mode. RIP is still the address of the instruction, which
    /// [`Cpu::leave_smm`](crate::Cpu::leave_smm) finishes.
    Rsm,
    /// The guest has caused a triple fault.
    Shutdown,
    /// This CPU does not implement a valid instruction, or cannot handle the situation. RIP is the address of the
    /// instruction.
    Emulation {
        /// The instruction's bytes, as far as they are known.
        bytes: [u8; 15],
        /// The number of the instruction's bytes that are known.
        len: u8,
        /// The feature that is missing, as a text for the log.
        reason: &'static str,
    },
    /// The guest can accept an interrupt now. [`Cpu::interrupt_window`](crate::Cpu) has requested this exit.
    InterruptWindow,
    /// An instruction has locked the bus, or is about to: see [`BusLocks`].
    BusLock,
    /// Events were delivered for longer than [`Cpu::notify_window`](crate::Cpu) without an instruction in between.
    /// The next run continues.
    Notify,
    /// The caller's `attention` word is not zero.
    Attention,
    /// Host memory that backs guest memory is not accessible.
    BadAddress,
    /// The machine had no memory for a translation. The instruction at RIP has had no effect, and the next run executes
    /// it.
    OutOfMemory,
    /// A debug exception that the [`Debugger`](crate::Debugger) claims.
    Debug {
        /// The vector of the exception: 1 (#DB) or 3 (#BP).
        vector: u8,
        /// The value of DR6 that the guest would have seen.
        dr6: u64,
    },
    /// A [`Probe`](crate::Probe) was hit, or a step was executed.
    Probe(ProbeHit),
}
