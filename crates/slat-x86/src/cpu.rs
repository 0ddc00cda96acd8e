//! The CPU: architectural state plus what makes running it fast.

use crate::blocks::Blocks;
use crate::debug::{Debugger, Watch};
use crate::decode;
use crate::features::Features;
use crate::fixed::Fixed;
use crate::flags::Lazy;
use crate::heap::{OutOfMemory, Pages};
use crate::int::Int;
use crate::machine::{Exit, Machine, Paging};
use crate::mmio::Devices;
use crate::op::{Break, Op};
use crate::state::{Exception, Segment, State, control, flags};
use crate::tlb::{SUPERVISOR, SUPERVISOR_AC, Tlb, USER};
use std::ptr::NonNull;

/// What decoding depends on besides the bytes.
pub(crate) mod mode {
    /// Default operand and address size: 0, 1, 2 for 16, 32, 64 bits.
    pub const BITS: u8 = 3;
    /// SSE instructions are #UD (CR0.EM, or CR4.OSFXSR is clear).
    pub const NO_SSE: u8 = 1 << 2;
    /// x87 instructions are #NM (CR0.EM).
    pub const NO_X87: u8 = 1 << 3;
    /// x87 and SSE instructions are #NM (CR0.TS).
    pub const TASK_SWITCHED: u8 = 1 << 4;
    /// CPL 3: what a supervisor may execute is found under another key.
    pub const USER: u8 = 1 << 5;
}

/// One software CPU. It has all memory that it needs to run from the beginning; see [`Cpu::try_new`].
pub struct Cpu {
    /// The architectural state; what is here is all there is while the CPU does not run.
    pub state: State,
    /// End the run with [`Exit::InterruptWindow`] when the guest could take an interrupt.
    pub interrupt_window: bool,
    /// Debug exceptions that end the run with [`Exit::Debug`] in place of going to the guest.
    pub debugger: Debugger,

    pub(crate) features: Features,
    pub(crate) lazy: Lazy,
    pub(crate) fixed: Pages<Fixed>,
    /// Which table of the TLB data accesses use.
    pub(crate) table: usize,
    pub(crate) mode: u8,
    pub(crate) cpl: u8,
    /// Leave the block after this instruction.
    pub(crate) stop: bool,
    /// Something waits to be looked at at the block boundary.
    pub(crate) slow: bool,
    /// The host page of the running block.
    pub(crate) code_page: usize,
    /// RIP at the start of the running block.
    pub(crate) block_rip: u64,
    /// Counts flushes: a block whose number is another has to translate its page again.
    pub(crate) generation: u64,
    pub(crate) blocks: Blocks,
    pub(crate) devices: Devices,
    pub(crate) watch: Watch,
    pub(crate) fault: Exception,
    pub(crate) fault_address: u64,
    pub(crate) fault_noncanonical: bool,
    pub(crate) exit: Option<Exit>,
    /// Instructions executed, for the tests and the benchmark.
    pub(crate) instructions: u64,
    machine: Option<NonNull<dyn Machine>>,
    /// What the TLB's content depends on, as of the last look.
    seen: [u64; 4],
}

// SAFETY: the machine pointer is set during `run` only, and the blocks and the TLB belong to this CPU
// alone; their host addresses are guest memory, reached through guarded accesses from any thread.
unsafe impl Send for Cpu {}

impl Cpu {
    /// A CPU after RESET, with all memory that running needs: 190 KiB, most of which the host provides when it is used
    /// first. The blocks of decoded code come on top, up to [`CODE_BYTES`](crate::CODE_BYTES).
    ///
    /// The first CPU of a process also builds the tables of the instruction decoder.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new() -> Result<Self, OutOfMemory> {
        decode::build_tables()?;
        Ok(Self {
            state: State::reset(),
            interrupt_window: false,
            debugger: Debugger::default(),
            features: Features::all(),
            lazy: Lazy::done(),
            fixed: Pages::zeroed()?,
            table: SUPERVISOR,
            mode: 0,
            cpl: 0,
            stop: false,
            slow: true,
            code_page: usize::MAX,
            block_rip: 0,
            generation: 1,
            blocks: Blocks::try_new()?,
            devices: Devices::default(),
            watch: Watch::default(),
            fault: Exception {
                vector: 0,
                error: None,
            },
            fault_address: 0,
            fault_noncanonical: false,
            exit: None,
            instructions: 0,
            machine: None,
            seen: [0; 4],
        })
    }

    /// Restricts the CPU to what its CPUID tells. It has all features before.
    pub fn set_features(&mut self, features: Features) {
        self.features = features;
    }

    /// Forgets all translations: the host pages behind guest memory may be others now.
    pub fn flush_tlb(&mut self) {
        self.generation += 1;
        self.tlb().flush();
    }

    /// Instructions executed so far.
    pub fn instructions(&self) -> u64 {
        self.instructions
    }

    /// Forgets the translation of one page, all of it if it is large. Blocks stay translated unless it has had code.
    pub(crate) fn flush_page(&mut self, lin: u64) {
        if self.tlb().may_be_large(lin) {
            self.flush_tlb();
            return;
        }
        if self.tlb().may_have_code(lin) {
            self.generation += 1;
        }
        self.tlb().flush_page(lin);
    }

    /// The CPU's machine is there while `f` runs.
    pub(crate) fn with_machine<T>(
        &mut self,
        machine: &mut dyn Machine,
        f: impl FnOnce(&mut Self) -> T,
    ) -> T {
        /// Takes the pointer away also when `f` panics.
        struct Reset<'a>(&'a mut Cpu);
        impl Drop for Reset<'_> {
            fn drop(&mut self) {
                self.0.machine = None;
            }
        }
        let pointer = NonNull::from(machine);
        // SAFETY: only the lifetime bound of the trait object changes. The pointer is taken away
        // before `machine`'s borrow ends.
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

    /// The machine. Only while running.
    pub(crate) fn machine(&mut self) -> &mut dyn Machine {
        let mut pointer = self.machine.expect("a CPU executes within run");
        // SAFETY: set by `with_machine` for the duration of its borrow; the result borrows `self`, so
        // there is one such reference at a time.
        unsafe { pointer.as_mut() }
    }

    /// Takes over the state as the client left it, or as an instruction changed it: derives mode, CPL
    /// and TLB table, and flushes translations that hang on changed registers.
    pub(crate) fn refresh(&mut self) {
        let state = &self.state;
        let long = state.efer & control::EFER_LMA != 0;
        let bits = match (long && state.cs.long(), state.cs.big()) {
            (true, _) => 2,
            (false, big) => u8::from(big),
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
        self.update_table();
        let state = &self.state;
        let seen = [state.cr0, state.cr3, state.cr4, state.efer];
        if seen != self.seen {
            self.seen = seen;
            self.flush_tlb();
        }
        self.update_watch();
        self.slow = true;
    }

    /// Chooses the TLB table for CPL and RFLAGS.AC.
    pub(crate) fn update_table(&mut self) {
        self.table = match (self.cpl == 3, self.state.rflags & flags::AC != 0) {
            (true, _) => USER,
            (false, false) => SUPERVISOR,
            (false, true) => SUPERVISOR_AC,
        };
    }

    #[inline(always)]
    pub(crate) fn is_64(&self) -> bool {
        self.mode & mode::BITS == 2
    }

    pub(crate) fn long_mode(&self) -> bool {
        self.state.efer & control::EFER_LMA != 0
    }

    pub(crate) fn protected(&self) -> bool {
        self.state.cr0 & control::CR0_PE != 0
    }

    /// A task of virtual-8086 mode runs.
    pub(crate) fn virtual_8086(&self) -> bool {
        self.protected() && self.state.rflags & flags::VM != 0
    }

    /// Whether a selector is a paragraph number: in real mode and in virtual-8086 mode.
    pub(crate) fn has_paragraphs(&self) -> bool {
        !self.protected() || self.virtual_8086()
    }

    /// #GP(0) in virtual-8086 mode unless IOPL is 3 (SDM volume 3, "Sensitive Instructions").
    pub(crate) fn sensitive(&mut self) -> Result<(), Break> {
        match self.virtual_8086() && self.state.rflags & flags::IOPL != flags::IOPL {
            true => Err(self.gp()),
            false => Ok(()),
        }
    }

    /// Whether a linear address is canonical. Outside long mode every one is.
    pub(crate) fn canonical(&self, lin: u64) -> bool {
        !self.long_mode() || self.canonical_value(lin)
    }

    /// Whether a value is canonical, which some MSRs want in every mode.
    pub(crate) fn canonical_value(&self, lin: u64) -> bool {
        let shift = if self.state.cr4 & control::CR4_LA57 != 0 {
            7
        } else {
            16
        };
        ((lin << shift) as i64 >> shift) as u64 == lin
    }

    /// The paging state for an access through the present TLB table.
    pub(crate) fn paging(&self) -> Paging {
        let State {
            cr0,
            cr3,
            pdptes,
            cr4,
            efer,
            pkru,
            ..
        } = self.state;
        let (user, ac) = (self.table == USER, self.table == SUPERVISOR_AC);
        Paging {
            cr0,
            cr3,
            pdptes,
            cr4,
            efer,
            pkru,
            user,
            ac,
        }
    }

    /// Notes an exception: `return Err(cpu.raise(…))`.
    #[cold]
    pub(crate) fn raise(&mut self, vector: u8, error: Option<u32>) -> Break {
        self.fault = Exception { vector, error };
        Break::Exception
    }

    /// #GP(0).
    #[cold]
    pub(crate) fn gp(&mut self) -> Break {
        self.raise(crate::vector::GP, Some(0))
    }

    /// The privilege level, as of the last run.
    pub fn cpl(&self) -> u8 {
        self.cpl
    }

    /// #UD.
    #[cold]
    pub(crate) fn ud(&mut self) -> Break {
        self.raise(crate::vector::UD, None)
    }

    /// #GP(0) unless CPL is 0.
    pub(crate) fn privileged(&mut self) -> Result<(), Break> {
        if self.cpl == 0 {
            Ok(())
        } else {
            Err(self.gp())
        }
    }

    /// Notes an exit that abandons the instruction.
    #[cold]
    pub(crate) fn leave(&mut self, exit: Exit) -> Break {
        self.exit = Some(exit);
        Break::Exit
    }

    /// Notes an exit for something that this CPU does not do. The bytes are filled in on the way out.
    #[cold]
    pub(crate) fn unimplemented(&mut self, reason: &'static str) -> Break {
        self.leave(Exit::Emulation {
            bytes: [0; 15],
            len: 0,
            reason,
        })
    }

    /// RIP behind `op`.
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

    /// RIP of `op`.
    pub(crate) fn rip_of(&self, op: &Op) -> u64 {
        self.block_rip.wrapping_add(u64::from(op.offset))
    }

    /// Segment register by number: ES CS SS DS FS GS.
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

    /// Operand 0, 1, … as register or memory.
    #[inline(always)]
    pub(crate) fn operand<T: Int>(&mut self, op: &Op, k: usize) -> Result<T, Break> {
        match op.r[k] {
            crate::op::MEM => self.load_mem(op),
            r => Ok(T::get(self, r)),
        }
    }

    /// Writes operand `k`. The last thing an instruction does that can fail.
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
