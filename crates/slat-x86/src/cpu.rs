//! The CPU: its architectural state, and data that lets it run fast.

use crate::bus_lock::BusLock;
use crate::code::Code;
use crate::code_pages::CodePages;
#[cfg(feature = "jit")]
use crate::compiled::Compiled;
use crate::counters::Counters;
use crate::devices::Devices;
use crate::features::Features;
use crate::fixed::Fixed;
use crate::flow::Break;
use crate::heap::{OutOfMemory, Pages};
use crate::int::Registers;
use crate::lazy::Lazy;
use crate::machine::{BusLocks, Exit, GuestFlush, HypercallOutcome, Machine, Paging};
use crate::mode;
use crate::nested::vmcb::VmExit;
use crate::nested::{Svm, code};
use crate::probe::Probes;
use crate::progress::Progress;
use crate::raised::Raised;
use crate::requests::Requests;
use crate::state::{Exception, Segment, State, control, flags, made_canonical};
use crate::sync::Arc;
use crate::tlb::{PCID_BITS, SUPERVISOR, SUPERVISOR_AC, Tlb, USER, USER_CHECKED, Which};
use crate::watch::Watch;
use std::ptr::NonNull;

/// One software CPU: everything that instructions change. An [`Executor`](crate::Executor) runs the CPU.
///
/// The first fields are those that compiled code uses most, in the order that `jit::window` needs.
#[repr(C)]
pub struct Cpu {
    #[cfg(feature = "jit")]
    pub(crate) compiled: Compiled,
    pub(crate) lazy: Lazy,
    /// The architectural state. It is complete while the CPU does not run.
    pub state: State,
    /// The requests of the run's caller: when the run is to end.
    pub requests: Requests,

    pub(crate) features: Features,
    pub(crate) fixed: Pages<Fixed>,
    /// The index of the TLB table that data accesses use.
    pub(crate) table: usize,
    pub(crate) mode: u8,
    pub(crate) cpl: u8,
    /// Whether the CPU must leave the block after this instruction.
    pub(crate) stop: bool,
    /// Whether there is work at the next block boundary other than finding the next block.
    pub(crate) slow: bool,
    pub(crate) bus_lock: BusLock,
    pub(crate) code: Code,
    pub(crate) devices: Devices,
    pub(crate) watch: Watch,
    pub(crate) probes: Probes,
    pub(crate) progress: Progress,
    pub(crate) raised: Raised,
    pub(crate) counters: Counters,
    pub(crate) svm: Svm,
    machine: Option<NonNull<dyn Machine>>,
    /// CR0, CR3, CR4 and EFER, on which the TLB's contents depend, with the values that they had at the last
    /// comparison.
    pub(crate) paging_registers: [u64; 4],
}

/// The index of CR3 in [`Cpu::paging_registers`].
pub(crate) const CR3: usize = 1;

// SAFETY: the machine pointer is set only during `run`. The snapshots and the TLB belong to this CPU alone. Their host
// addresses are addresses of guest memory, which any thread may access by guarded accesses.
unsafe impl Send for Cpu {}

impl Registers for Cpu {
    #[inline(always)]
    fn gpr(&self) -> &[u64; 16] {
        &self.state.gpr
    }
    #[inline(always)]
    fn gpr_mut(&mut self) -> &mut [u64; 16] {
        &mut self.state.gpr
    }
}

impl Cpu {
    /// Makes a CPU after RESET.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the host has no memory.
    pub(crate) fn try_new(code: Arc<CodePages>) -> Result<Self, OutOfMemory> {
        Ok(Self {
            state: State::reset(),
            requests: Requests::default(),
            features: Features::all(),
            lazy: Lazy::done(),
            fixed: Pages::zeroed()?,
            table: SUPERVISOR,
            mode: 0,
            cpl: 0,
            stop: false,
            slow: true,
            bus_lock: BusLock::default(),
            code: Code::try_new(code)?,
            #[cfg(feature = "jit")]
            compiled: Compiled::new(),
            devices: Devices::default(),
            watch: Watch::default(),
            probes: Probes::default(),
            progress: Progress::default(),
            raised: Raised::nothing(),
            counters: Counters::default(),
            svm: Svm::new(),
            machine: None,
            paging_registers: [0; 4],
        })
    }

    /// Returns the features of the CPU.
    pub fn features(&self) -> &Features {
        &self.features
    }

    /// Restricts the CPU to the features that its CPUID reports. Until this call the CPU has all features.
    pub fn set_features(&mut self, features: Features) {
        self.features = features;
    }

    /// Sets the effect of a locked access that crosses a cache line.
    pub fn set_bus_locks(&mut self, when: BusLocks) {
        self.bus_lock.when = when;
    }

    /// Drops all translations. Call when other host pages may back guest memory.
    pub fn flush_tlb(&mut self) {
        self.counters.flushes_host += 1;
        self.drop_translations();
    }

    /// Drops all translations. The caller has counted the reason for the flush.
    pub(crate) fn drop_translations(&mut self) {
        self.code.clock.flush();
        self.flush_data();
    }

    /// Drops all translations of the current world: of the guest, or of the nested guest (`tlb`).
    pub(crate) fn flush_world(&mut self) {
        self.counters.flushes_other += 1;
        self.code.clock.flush();
        let space = self.space();
        self.tlb().flush_world(space);
    }

    /// Drops all translations for data accesses, but none for code.
    pub(crate) fn flush_data(&mut self) {
        let space = self.space();
        self.tlb().flush(space);
    }

    /// Returns the current PCID. It is 0 if CR4.PCIDE is clear.
    fn pcid(&self) -> u16 {
        match self.state.cr4 & control::CR4_PCIDE != 0 {
            true => (self.state.cr3 & 0xfff) as u16,
            false => 0,
        }
    }

    /// Returns the number that identifies the current address space in the TLB.
    pub(crate) fn space(&self) -> u16 {
        self.space_of(self.pcid())
    }

    /// Returns the number that identifies the address space with `pcid` in the TLB.
    pub(crate) fn space_of(&self, pcid: u16) -> u16 {
        (self.svm.world() as u16) << PCID_BITS | pcid
    }

    /// Returns the counts of the CPU's work so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Drops the translations `which` of the guest's page that contains `lin`, and makes the CPU translate the address
    /// of this page's code again. If the page may be a large one, the CPU translates the addresses of all code again.
    pub(crate) fn flush_page(&mut self, lin: u64, which: Which) {
        self.counters.flushes_page += 1;
        match self.tlb().may_be_large(lin) {
            true => self.code.clock.flush(),
            false => self.outdate_page(lin),
        }
        self.tlb().flush_page(lin, which);
    }

    /// Drops the translation of the 4 KiB page at `lin`.
    pub(crate) fn drop_page(&mut self, lin: u64) {
        self.outdate_page(lin);
        self.tlb().drop_page(lin);
    }

    /// Drops the translations of a PCID, except global ones: INVPCID of type 1.
    pub(crate) fn flush_pcid(&mut self, pcid: u16) {
        self.counters.flushes_pcid += 1;
        let space = self.space_of(pcid);
        match pcid == self.pcid() {
            true => {
                self.code.clock.flush();
                self.tlb().switch(space, false);
            }
            false => self.tlb().forget(space),
        }
    }

    /// Drops the translations of all PCIDs, except global ones: INVPCID of type 3.
    pub(crate) fn flush_spaces(&mut self) {
        self.counters.flushes_pcid += 1;
        self.code.clock.flush();
        let space = self.space();
        self.tlb().flush_spaces(space);
    }

    /// Makes the CPU translate the page's address again before the page's code runs next.
    fn outdate_page(&mut self, lin: u64) {
        if self.code.outdate_page(lin) {
            self.forget_targets();
        }
    }

    /// Call before the CPU executes.
    #[cfg(feature = "jit")]
    pub(crate) fn prepare_compiled(&mut self, attention: &std::sync::atomic::AtomicU32) {
        self.compiled.prepare(&self.fixed.targets, attention);
    }

    /// Makes all targets of compiled code invalid.
    pub(crate) fn forget_targets(&mut self) {
        #[cfg(feature = "jit")]
        self.compiled.forget_targets(&mut self.fixed.targets);
    }

    /// Returns the number of instructions executed so far, including those of the running region.
    #[cfg(feature = "jit")]
    pub(crate) fn instructions(&self) -> u64 {
        let compiled = self.compiled.instructions - self.counters.instructions_compiled;
        self.counters.instructions + compiled
    }

    /// Returns the number of instructions executed so far.
    #[cfg(not(feature = "jit"))]
    pub(crate) fn instructions(&self) -> u64 {
        self.counters.instructions
    }

    /// Makes `machine` the CPU's machine, until [`detach`](Self::detach).
    ///
    /// # Safety
    /// - The caller detaches the machine before the borrow of `machine` ends.
    pub(crate) unsafe fn attach(&mut self, machine: &mut dyn Machine) {
        let pointer = NonNull::from(machine);
        // SAFETY: only the lifetime of the trait object changes. The caller detaches the machine before the borrow
        // ends, as this function's `# Safety` demands.
        self.machine = Some(unsafe {
            std::mem::transmute::<NonNull<dyn Machine + '_>, NonNull<dyn Machine>>(pointer)
        });
    }

    pub(crate) fn detach(&mut self) {
        self.machine = None;
    }

    #[inline(always)]
    pub(crate) fn tlb(&mut self) -> &mut Tlb {
        &mut self.fixed.tlb
    }

    /// Returns the machine. Call only during a run.
    pub(crate) fn machine(&mut self) -> &mut dyn Machine {
        let mut pointer = self.machine.expect("a CPU executes within run");
        // SAFETY: `attach` has set the pointer, which is valid for the duration of the machine's borrow. The result
        // borrows `self` exclusively, so there is only one such reference at a time.
        unsafe { pointer.as_mut() }
    }

    /// Lets the machine execute a hypercall with the CPU's registers.
    pub(crate) fn call_machine(&mut self) -> HypercallOutcome {
        let (cpl, long_mode) = (self.cpl, self.is_64());
        let mut pointer = self.machine.expect("a CPU executes within run");
        // SAFETY: `attach` has set the pointer, and `self` is borrowed exclusively, so there is no other reference to
        // the machine. The state, to which the call gets another reference, is not part of the machine.
        unsafe { pointer.as_mut() }.hypercall(&mut self.state, cpl, long_mode)
    }

    /// Tells the machine that the guest has invalidated translations.
    pub(crate) fn tell_flush(&mut self, what: GuestFlush) {
        let paging = self.paging();
        if self.machine().flush_guest(what, &paging) {
            self.flush_tlb();
        }
    }

    /// Drops all translations. Counts the flush as one with another reason than a load of CR3.
    pub(crate) fn flush_other(&mut self) {
        self.counters.flushes_other += 1;
        self.drop_translations();
    }

    /// Loads CR3. Drops the translations of the new PCID, except global ones; if `keeps`, drops none.
    pub(crate) fn load_cr3(&mut self, cr3: u64, keeps: bool) {
        self.state.cr3 = cr3;
        self.paging_registers[CR3] = cr3;
        self.counters.flushes_cr3 += 1;
        self.code.clock.flush();
        let space = self.space();
        self.tlb().switch(space, keeps);
        if !keeps {
            self.tell_flush(GuestFlush::All);
        }
    }

    /// Records the values of CR0, CR3, CR4 and EFER. [`derive`](Self::derive) compares the registers with these values
    /// to see whether translations must be flushed.
    pub(crate) fn see_registers(&mut self) {
        let state = &self.state;
        self.paging_registers = [state.cr0, state.cr3, state.cr4, state.efer];
    }

    /// Call before switching to another world (guest or nested guest), while the registers of the old world are still
    /// loaded.
    pub(crate) fn leave_world(&mut self) {
        self.svm.note_registers(self.paging_registers);
    }

    /// Selects the TLB table by CPL, RFLAGS.AC and CR0.AM.
    pub(crate) fn update_table(&mut self) {
        self.table = match (self.cpl == 3, self.state.rflags & flags::AC != 0) {
            (true, true) if self.state.cr0 & control::CR0_AM != 0 => USER_CHECKED,
            (true, _) => USER,
            (false, false) => SUPERVISOR,
            (false, true) => SUPERVISOR_AC,
        };
        #[cfg(feature = "jit")]
        {
            self.compiled.table = self.fixed.tlb.table(self.table);
        }
    }

    #[inline(always)]
    pub(crate) fn is_64(&self) -> bool {
        self.mode & mode::BITS == mode::BITS_64
    }

    /// Whether the CPU behaves like an Intel CPU where the vendors differ. In a nested guest the CPU always behaves
    /// like an AMD CPU, because AMD's manual defines SVM: for example, the hypervisor reads EXT in EXITINTINFO.
    pub(crate) fn is_intel(&self) -> bool {
        self.features.is_intel && !self.svm.is_guest()
    }

    pub(crate) fn long_mode(&self) -> bool {
        self.state.efer & control::EFER_LMA != 0
    }

    pub(crate) fn protected(&self) -> bool {
        self.state.cr0 & control::CR0_PE != 0
    }

    /// Whether the CPU is in virtual-8086 mode.
    pub(crate) fn virtual_8086(&self) -> bool {
        self.protected() && self.state.rflags & flags::VM != 0
    }

    /// Whether segment bases are 16 times the selector, as in real mode and virtual-8086 mode.
    pub(crate) fn has_paragraphs(&self) -> bool {
        !self.protected() || self.virtual_8086()
    }

    /// Whether a linear address is canonical. Outside long mode, all linear addresses count as canonical.
    pub(crate) fn canonical(&self, lin: u64) -> bool {
        !self.long_mode() || self.canonical_value(lin)
    }

    /// Whether a value is a canonical address. Some MSRs require a canonical value in every mode.
    pub(crate) fn canonical_value(&self, lin: u64) -> bool {
        made_canonical(self.state.cr4, lin) == lin
    }

    /// Returns the index of the TLB table to fill when an access of the current kind misses.
    #[inline(always)]
    pub(crate) fn filled_table(&self) -> usize {
        match self.table {
            USER_CHECKED => USER,
            table => table,
        }
    }

    /// Returns the paging state for accesses that use the current TLB table.
    pub(crate) fn paging(&self) -> Paging {
        self.paging_for(self.filled_table())
    }

    /// Returns the paging state for accesses that use TLB table `table`.
    pub(crate) fn paging_for(&self, table: usize) -> Paging {
        let State {
            cr0,
            cr3,
            pdptes,
            cr4,
            efer,
            pkru,
            ..
        } = self.state;
        let (user, ac) = (table == USER, table == SUPERVISOR_AC);
        Paging {
            cr0,
            cr3,
            pdptes,
            cr4,
            efer,
            pkru,
            user,
            ac,
            nested: self.svm.nested_paging(),
        }
    }

    /// Returns the paging state for a translation on behalf of a VMM: supervisor mode without SMAP.
    pub fn client_paging(&self) -> Paging {
        self.paging_for(SUPERVISOR_AC)
    }

    /// Records an exception. Use this function as `return Err(cpu.raise(…))`.
    #[cold]
    pub(crate) fn raise(&mut self, vector: u8, error: Option<u32>) -> Break {
        self.raised.exception = Exception { vector, error };
        Break::Exception
    }

    /// Raises #GP(0).
    #[cold]
    pub(crate) fn gp(&mut self) -> Break {
        self.raise(crate::vector::GP, Some(0))
    }

    /// Returns the CPL as of the last run.
    pub fn cpl(&self) -> u8 {
        self.cpl
    }

    /// Raises #UD.
    #[cold]
    pub(crate) fn ud(&mut self) -> Break {
        self.raise(crate::vector::UD, None)
    }

    /// Raises #GP(0) unless CPL is 0.
    pub(crate) fn privileged(&mut self) -> Result<(), Break> {
        if self.cpl == 0 {
            Ok(())
        } else {
            Err(self.gp())
        }
    }

    /// Records a #VMEXIT. Use this function as `return Err(cpu.leave_guest(…))`. If an event is being delivered, the
    /// #VMEXIT reports it in EXITINTINFO.
    #[cold]
    pub(crate) fn leave_guest(&mut self, exit: VmExit) -> Break {
        self.svm.record(exit);
        Break::VmExit
    }

    /// Handles a [`Break::VmExit`]: the recorded #VMEXIT takes place before the next instruction.
    #[cold]
    pub(crate) fn make_exit_due(&mut self) {
        self.svm.make_due();
        self.slow = true;
    }

    /// Records a #VMEXIT for a nested page fault (NPF) at guest-physical address `gpa`.
    pub(crate) fn nested_page_fault(&mut self, error_code: u64, gpa: u64) -> Break {
        self.leave_guest(VmExit {
            code: code::NPF,
            info_1: error_code,
            info_2: gpa,
            ..VmExit::default()
        })
    }

    /// Records an exit from the run that abandons the instruction.
    #[cold]
    pub(crate) fn leave(&mut self, exit: Exit) -> Break {
        self.raised.exit = Some(exit);
        Break::Exit
    }

    /// Records an exit from the run because of something that this CPU does not implement. The instruction's bytes are
    /// added when the run ends.
    #[cold]
    pub(crate) fn unimplemented(&mut self, reason: &'static str) -> Break {
        self.leave(Exit::Emulation {
            bytes: [0; 15],
            len: 0,
            reason,
        })
    }

    /// Returns the linear address of `rip` in the code segment.
    #[inline(always)]
    pub(crate) fn code_address(&self, rip: u64) -> u64 {
        if self.is_64() {
            rip
        } else {
            self.state.cs.base.wrapping_add(rip) & 0xffff_ffff
        }
    }

    /// Returns a segment register by its number: 0 to 5 are ES, CS, SS, DS, FS, GS.
    pub(crate) fn segment(&mut self, number: u8) -> &mut Segment {
        let state = &mut self.state;
        match number {
            0 => &mut state.es,
            1 => &mut state.cs,
            2 => &mut state.ss,
            3 => &mut state.ds,
            4 => &mut state.fs,
            _ => &mut state.gs,
        }
    }
}
