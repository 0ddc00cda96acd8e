//! The CPU: architectural state plus what makes running it fast.

use crate::block::Block;
use crate::blocks::Blocks;
use crate::clock::Clock;
use crate::code_pages::{CodePages, Member};
use crate::counters::Counters;
use crate::debug::{Debugger, Watch};
use crate::decoder;
use crate::features::{Features, has_avx};
use crate::fixed::Fixed;
use crate::flags::Lazy;
use crate::heap::{OutOfMemory, Pages};
use crate::int::{Int, Registers};
use crate::machine::{BusLocks, Exit, GuestFlush, HypercallOutcome, Machine, Paging};
use crate::mmio::Devices;
use crate::once::Once;
use crate::op::{Break, Op};
use crate::probe::Probes;
use crate::progress::Progress;
use crate::state::{Exception, Segment, State, control, flags, xcr0};
use crate::svm::Svm;
use crate::sync::Arc;
use crate::tlb::{PCID_BITS, SUPERVISOR, SUPERVISOR_AC, Tlb, USER, USER_CHECKED, Which};
use std::ptr::NonNull;
use std::time::Duration;

pub(crate) mod mode;

/// See [`Cpu::code_page`].
pub(crate) const ANY_PAGE: usize = 1;

/// One software CPU. It allocates all memory that it needs to run when it is made; see [`Cpu::try_new`].
///
/// Its first fields are those that compiled code uses most: `jit::window` says in which order.
#[repr(C)]
pub struct Cpu {
    #[cfg(feature = "jit")]
    pub(crate) compiled: crate::jit::Compiled,
    pub(crate) lazy: Lazy,
    /// The architectural state, complete while the CPU does not run.
    pub state: State,
    /// End the run with [`Exit::InterruptWindow`] when the guest could take an interrupt.
    pub interrupt_window: bool,
    /// End the run with [`Exit::InterruptWindow`] when GIF is set: something of the caller's waits for GIF.
    pub gif_window: bool,
    /// What happens at a locked access that crosses a cache line.
    pub bus_locks: BusLocks,
    /// End the run with [`Exit::Notify`] when events have been delivered for longer than this without an
    /// instruction in between.
    pub notify_window: Option<Duration>,
    /// Debug exceptions that end the run with [`Exit::Debug`] instead of being delivered to the guest.
    pub debugger: Debugger,

    pub(crate) features: Features,
    pub(crate) fixed: Pages<Fixed>,
    /// The table of the TLB that data accesses use.
    pub(crate) table: usize,
    pub(crate) mode: u8,
    pub(crate) cpl: u8,
    /// Leave the block after this instruction.
    pub(crate) stop: bool,
    /// Work is pending for the block boundary.
    pub(crate) slow: bool,
    /// An instruction was abandoned because its page walk set a bit in a page of decoded code: see
    /// [`Cpu::finish_fetched`].
    pub(crate) walk_changed_code: bool,
    /// The last instruction has locked the bus, which ends the run.
    pub(crate) bus_locked: bool,
    /// The next bus lock does not end the run, because it has already ended the last one.
    pub(crate) bus_lock_passes: bool,
    /// RIP of the instruction that ended the last run because it would lock the bus.
    pub(crate) bus_lock_rip: Option<u64>,
    /// The host page of the running block; [`ANY_PAGE`] in compiled code, where blocks of other pages may follow.
    pub(crate) code_page: usize,
    /// RIP at the start of the running block.
    pub(crate) block_rip: u64,
    /// Tells when decoded code has to be checked again.
    pub(crate) clock: Clock,
    pub(crate) code: Member,
    pub(crate) blocks: Blocks,
    pub(crate) once: Once,
    /// The block that was executed last, if it is alive.
    pub(crate) last: Option<NonNull<Block>>,
    pub(crate) devices: Devices,
    pub(crate) watch: Watch,
    pub(crate) probes: Probes,
    pub(crate) progress: Progress,
    pub(crate) fault: Exception,
    pub(crate) fault_address: u64,
    pub(crate) fault_noncanonical: bool,
    pub(crate) exit: Option<Exit>,
    pub(crate) counters: Counters,
    pub(crate) svm: Svm,
    machine: Option<NonNull<dyn Machine>>,
    /// The registers that the TLB's content depends on, as last seen.
    paging_registers: [u64; 4],
}

/// Returns the canonical address with the low 48 bits of `address`, or the low 57 bits with CR4.LA57.
pub(crate) fn made_canonical(cr4: u64, address: u64) -> u64 {
    let shift = match cr4 & control::CR4_LA57 {
        0 => 16,
        _ => 7,
    };
    ((address << shift) as i64 >> shift) as u64
}

/// Index of CR3 in `Cpu::paging_registers`.
const CR3: usize = 1;

/// Whether a change of CR0, CR3, CR4 and EFER invalidates translations, or changes what they depend on. A change of TS,
/// which each task switch makes, does not.
fn invalidates(before: &[u64; 4], now: &[u64; 4]) -> bool {
    use control::*;
    let paging = [
        CR0_PG | CR0_WP,
        u64::MAX,
        CR4_PSE | CR4_PAE | CR4_PGE | CR4_LA57 | CR4_PCIDE | CR4_SMEP | CR4_SMAP | CR4_PKE,
        EFER_LMA | EFER_NXE,
    ];
    (before.iter().zip(now).zip(paging)).any(|((before, now), bits)| (before ^ now) & bits != 0)
}

// SAFETY: the machine pointer is set during `run` only, and the blocks and the TLB belong to this CPU alone; their host
// addresses are guest memory, which any thread may access through guarded accesses.
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
    /// Makes a CPU after RESET, with all memory that running needs: half a MiB, most of which the host provides at
    /// first use. The blocks of decoded code need more, up to [`CODE_BYTES`](crate::CODE_BYTES).
    ///
    /// The first CPU of a process also builds the tables of the instruction decoder. The CPUs that share memory share
    /// `code`, by which they tell each other of stores to code.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the host has no memory.
    pub fn try_new(code: Arc<CodePages>) -> Result<Self, OutOfMemory> {
        decoder::build_tables()?;
        Ok(Self {
            state: State::reset(),
            interrupt_window: false,
            gif_window: false,
            bus_locks: BusLocks::default(),
            notify_window: None,
            debugger: Debugger::default(),
            features: Features::all(),
            lazy: Lazy::done(),
            fixed: Pages::zeroed()?,
            table: SUPERVISOR,
            mode: 0,
            cpl: 0,
            stop: false,
            slow: true,
            walk_changed_code: false,
            bus_locked: false,
            bus_lock_passes: false,
            bus_lock_rip: None,
            code_page: usize::MAX,
            block_rip: 0,
            clock: Clock::new(),
            code: Member::try_new(code)?,
            #[cfg(feature = "jit")]
            compiled: crate::jit::Compiled::new(),
            blocks: Blocks::try_new()?,
            once: Once::new(),
            last: None,
            devices: Devices::default(),
            watch: Watch::default(),
            probes: Probes::default(),
            progress: Progress::default(),
            fault: Exception {
                vector: 0,
                error: None,
            },
            fault_address: 0,
            fault_noncanonical: false,
            exit: None,
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

    /// Restricts the CPU to the features of its CPUID. Until this call the CPU has all features.
    pub fn set_features(&mut self, features: Features) {
        self.features = features;
    }

    /// Drops all translations, because other host pages may back guest memory now.
    pub fn flush_tlb(&mut self) {
        self.counters.flushes_host += 1;
        self.drop_translations();
    }

    /// Drops all translations. The caller has counted the reason.
    pub(crate) fn drop_translations(&mut self) {
        self.clock.flush();
        self.flush_data();
    }

    /// Drops all translations of the current world.
    pub(crate) fn flush_world(&mut self) {
        self.counters.flushes_other += 1;
        self.clock.flush();
        let space = self.space();
        self.tlb().flush_world(space);
    }

    /// Drops all translations for data accesses; blocks keep theirs. For a change that concerns data accesses alone.
    pub(crate) fn flush_data(&mut self) {
        let space = self.space();
        self.tlb().flush(space);
    }

    /// Returns the current PCID: 0 without CR4.PCIDE.
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

    /// Returns what the CPU has done so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Drops translations of one page, or of a whole large page. Blocks keep their translations unless the page has
    /// had code, or is large.
    pub(crate) fn flush_page(&mut self, lin: u64, which: Which) {
        self.counters.flushes_page += 1;
        match self.tlb().may_be_large(lin) {
            true => self.clock.flush(),
            false => self.outdate_page(lin),
        }
        self.tlb().flush_page(lin, which);
    }

    /// Drops the translation of one page of 4 KiB.
    pub(crate) fn drop_page(&mut self, lin: u64) {
        self.outdate_page(lin);
        self.tlb().drop_page(lin);
    }

    /// Drops the translations of a PCID but the global ones: INVPCID of type 1.
    pub(crate) fn flush_pcid(&mut self, pcid: u16) {
        self.counters.flushes_pcid += 1;
        let space = self.space_of(pcid);
        match pcid == self.pcid() {
            true => {
                self.clock.flush();
                self.tlb().switch(space, false);
            }
            false => self.tlb().forget(space),
        }
    }

    /// Drops all translations but the global ones: INVPCID of type 3.
    pub(crate) fn flush_spaces(&mut self) {
        self.counters.flushes_pcid += 1;
        self.clock.flush();
        let space = self.space();
        self.tlb().flush_spaces(space);
    }

    /// Whether blocks are compiled before they run for the first time: never without a compiler.
    #[cfg(not(feature = "jit"))]
    pub(crate) fn compiles_at_once(&self) -> bool {
        false
    }

    /// There is no compiled code to forget.
    #[cfg(not(feature = "jit"))]
    pub(crate) fn forget_targets(&mut self) {}

    /// Returns the number of instructions so far.
    #[cfg(not(feature = "jit"))]
    pub(crate) fn instructions(&self) -> u64 {
        self.counters.instructions
    }

    /// Runs `f` with `machine` as the CPU's machine.
    pub(crate) fn with_machine<T>(
        &mut self,
        machine: &mut dyn Machine,
        f: impl FnOnce(&mut Self) -> T,
    ) -> T {
        /// Clears the pointer also when `f` panics.
        struct Reset<'a>(&'a mut Cpu);
        impl Drop for Reset<'_> {
            fn drop(&mut self) {
                self.0.machine = None;
            }
        }
        let pointer = NonNull::from(machine);
        // SAFETY: only the lifetime bound of the trait object changes. The pointer is cleared before
        // `machine`'s borrow ends.
        self.machine = Some(unsafe {
            std::mem::transmute::<NonNull<dyn Machine + '_>, NonNull<dyn Machine>>(pointer)
        });
        let reset = Reset(self);
        f(reset.0)
    }

    #[inline(always)]
    pub(crate) fn tlb(&mut self) -> &mut Tlb {
        &mut self.fixed.tlb
    }

    /// Returns the machine. Call only while running.
    pub(crate) fn machine(&mut self) -> &mut dyn Machine {
        let mut pointer = self.machine.expect("a CPU executes within run");
        // SAFETY: set by `with_machine` for the duration of its borrow; the result borrows `self`, so
        // there is one such reference at a time.
        unsafe { pointer.as_mut() }
    }

    /// Has the machine execute a hypercall with the CPU's registers.
    pub(crate) fn call_machine(&mut self) -> HypercallOutcome {
        let (cpl, long_mode) = (self.cpl, self.is_64());
        let mut pointer = self.machine.expect("a CPU executes within run");
        // SAFETY: as in `machine`; the state is no part of the machine.
        unsafe { pointer.as_mut() }.hypercall(&mut self.state, cpl, long_mode)
    }

    /// Call after an instruction has changed the state: does [`derive`](Self::derive), and tells the machine if the
    /// guest has invalidated translations.
    pub(crate) fn refresh(&mut self) {
        if self.derive() {
            self.tell_flush(GuestFlush::All);
        }
    }

    /// Tells the machine that the guest has invalidated translations.
    pub(crate) fn tell_flush(&mut self, what: GuestFlush) {
        let paging = self.paging();
        if self.machine().flush_guest(what, &paging) {
            self.flush_tlb();
        }
    }

    /// Drops all translations, for another reason than a change of CR3.
    pub(crate) fn flush_other(&mut self) {
        self.counters.flushes_other += 1;
        self.drop_translations();
    }

    /// Loads CR3. Drops the translations of the new PCID, except the global ones. With `keeps` it drops none.
    pub(crate) fn load_cr3(&mut self, cr3: u64, keeps: bool) {
        self.state.cr3 = cr3;
        self.paging_registers[CR3] = cr3;
        self.counters.flushes_cr3 += 1;
        self.clock.flush();
        let space = self.space();
        self.tlb().switch(space, keeps);
        if !keeps {
            self.tell_flush(GuestFlush::All);
        }
    }

    /// Call after the client or an instruction has changed the state: derives mode, CPL and TLB table, and flushes
    /// translations that depend on changed registers. Returns whether it flushed them.
    pub(crate) fn derive(&mut self) -> bool {
        let state = &self.state;
        let long = state.efer & control::EFER_LMA != 0;
        let bits = match (long && state.cs.long(), state.cs.big()) {
            (true, _) => mode::BITS_64,
            (false, true) if self.is_flat() => mode::FLAT_32,
            (false, true) => mode::BITS_32,
            (false, false) => mode::BITS_16,
        };
        let mut mode = bits;
        if state.cr0 & control::CR0_EM != 0 || state.cr4 & control::CR4_OSFXSR == 0 {
            mode |= mode::NO_SSE;
        }
        if state.cr0 & control::CR0_EM != 0 {
            mode |= mode::NO_X87;
        }
        if state.cr0 & control::CR0_TS != 0 {
            mode |= mode::TASK_SWITCHED;
        }
        const AVX: u64 = xcr0::SSE | xcr0::AVX;
        if state.cr4 & control::CR4_OSXSAVE == 0 || state.xcr0 & AVX != AVX || !has_avx() {
            mode |= mode::NO_AVX;
        }
        if self.has_paragraphs() {
            mode |= mode::NO_AVX | mode::NO_VEX;
        }
        self.cpl = match (
            state.cr0 & control::CR0_PE != 0,
            state.rflags & flags::VM != 0,
        ) {
            (false, _) => 0,
            (true, true) => 3,
            (true, false) => state.ss.dpl(),
        };
        if self.cpl == 3 {
            mode |= mode::USER;
        }
        self.mode = mode;
        self.clock.enter(self.cpl == 3);
        self.update_table();
        let before = self.paging_registers;
        self.see_registers();
        let flushes = invalidates(&before, &self.paging_registers);
        if flushes {
            self.flush_other();
        }
        self.update_watch();
        self.slow = true;
        flushes
    }

    /// Notes the registers whose changes flush translations: from here on [`derive`](Self::derive) looks
    /// for changes of these.
    fn see_registers(&mut self) {
        let state = &self.state;
        self.paging_registers = [state.cr0, state.cr3, state.cr4, state.efer];
    }

    /// Call before another world becomes the current one and its registers are loaded.
    pub(crate) fn leave_world(&mut self) {
        self.svm.note_registers(self.paging_registers);
    }

    /// Call after the registers of another world were loaded. Keeps the translations of that world, unless its
    /// hypervisor has changed registers on which they depend: a processor's TLB holds the flags of page-table entries,
    /// but this TLB holds the rights that follow from flags and registers.
    pub(crate) fn enter_world(&mut self) {
        let mut before = self.svm.noted_registers();
        self.see_registers();
        // A changed CR3 drops nothing here: as on a processor, the hypervisor has to ask for a flush.
        before[CR3] = self.paging_registers[CR3];
        let is_outdated = invalidates(&before, &self.paging_registers);
        self.derive();
        self.clock.flush();
        let space = self.space();
        match is_outdated {
            true => self.tlb().flush_world(space),
            false => self.tlb().enter_world(space),
        }
    }

    /// Chooses the TLB table for CPL, RFLAGS.AC and CR0.AM.
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

    /// Whether offsets in ES, CS, SS and DS are linear addresses outside 64-bit mode.
    fn is_flat(&self) -> bool {
        let state = &self.state;
        let is_flat = |segment: &Segment| {
            let expands_down = segment.rights & 0x1c == 0x14;
            segment.base == 0 && segment.limit == u32::MAX && segment.usable() && !expands_down
        };
        let segments = [&state.es, &state.cs, &state.ss, &state.ds];
        self.protected()
            && !self.virtual_8086()
            && state.ss.big()
            && segments.into_iter().all(is_flat)
    }

    /// Call after an instruction has loaded ES or DS.
    pub(crate) fn data_segment_loaded(&mut self) {
        let was_flat = self.mode & mode::BITS == mode::FLAT_32;
        if !self.is_64() && self.is_flat() != was_flat {
            self.refresh();
        }
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

    /// Whether a selector is a paragraph number: in real mode and in virtual-8086 mode.
    pub(crate) fn has_paragraphs(&self) -> bool {
        !self.protected() || self.virtual_8086()
    }

    /// Whether a linear address is canonical. Outside long mode all are.
    pub(crate) fn canonical(&self, lin: u64) -> bool {
        !self.long_mode() || self.canonical_value(lin)
    }

    /// Whether a value is canonical, which some MSRs demand in every mode.
    pub(crate) fn canonical_value(&self, lin: u64) -> bool {
        made_canonical(self.state.cr4, lin) == lin
    }

    /// Returns the paging state for an access through the current TLB table.
    pub(crate) fn paging(&self) -> Paging {
        self.paging_for(self.filled_table())
    }

    /// Returns the paging state for an access through a TLB table.
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

    /// Returns the paging state for a translation that a client asks for: a supervisor's, to which SMAP does not apply.
    pub fn client_paging(&self) -> Paging {
        self.paging_for(SUPERVISOR_AC)
    }

    /// Records an exception: `return Err(cpu.raise(…))`.
    #[cold]
    pub(crate) fn raise(&mut self, vector: u8, error: Option<u32>) -> Break {
        self.fault = Exception { vector, error };
        Break::Exception
    }

    /// Raises #GP(0).
    #[cold]
    pub(crate) fn gp(&mut self) -> Break {
        self.raise(crate::vector::GP, Some(0))
    }

    /// Returns the privilege level, as of the last run.
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

    /// Records an exit that abandons the instruction.
    #[cold]
    pub(crate) fn leave(&mut self, exit: Exit) -> Break {
        self.exit = Some(exit);
        Break::Exit
    }

    /// Records an exit for something that this CPU does not implement. The end of the run fills in the bytes.
    #[cold]
    pub(crate) fn unimplemented(&mut self, reason: &'static str) -> Break {
        self.leave(Exit::Emulation {
            bytes: [0; 15],
            len: 0,
            reason,
        })
    }

    /// Returns RIP after `op`.
    #[inline(always)]
    pub(crate) fn next_rip(&self, op: &Op) -> u64 {
        let next = self
            .block_rip
            .wrapping_add(u64::from(op.offset))
            .wrapping_add(u64::from(op.len));
        if self.is_64() {
            next
        } else {
            next & 0xffff_ffff
        }
    }

    /// Returns RIP of `op`.
    pub(crate) fn rip_of(&self, op: &Op) -> u64 {
        self.block_rip.wrapping_add(u64::from(op.offset))
    }

    /// Returns a segment register by number: ES CS SS DS FS GS.
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

    /// Reads operand `k`, a register or memory.
    #[inline(always)]
    pub(crate) fn operand<T: Int>(&mut self, op: &Op, k: usize) -> Result<T, Break> {
        match op.r[k] {
            crate::op::MEM => self.load_mem(op),
            r => Ok(T::get(self, r)),
        }
    }

    /// Writes operand `k`. Call last among all steps of an instruction that can fail.
    #[inline(always)]
    pub(crate) fn set_operand<T: Int>(&mut self, op: &Op, k: usize, v: T) -> Result<(), Break> {
        match op.r[k] {
            crate::op::MEM => self.store_mem(op, v),
            r => {
                T::set(self, r, v);
                Ok(())
            }
        }
    }
}
