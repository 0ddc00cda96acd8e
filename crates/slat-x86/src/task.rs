//! Hardware task switches (SDM volume 3, "Task Management").
//!
//! A switch has a commit point. A fault before the commit point is raised in the old task, and the switch has had no
//! effect. A fault after the commit point is raised in the new task, before its first instruction
//! ([`Break::TaskFault`]). If the switch is abandoned for another reason (a retry, an exit), all of it is done again.
//! So the steps that can be abandoned come first:
//!
//! 1. In the old task's address space: check both TSSs, and check that the writes of step 3 will succeed.
//! 2. In the new task's address space: load the segment registers and push the error code. This step uses a copy of the
//!    CPU's state.
//! 3. In the old task's address space again: write the TSSs and their descriptors, last of all the busy flag of the new
//!    task. If the switch is done again, these writes are repeated, which does no harm.
//! 4. Copy the new state to the CPU.

use crate::op::{Break, Flow};
use crate::segment::{Descriptor, system_segment};
use crate::source::Source;
use crate::state::{Exception, Segment, State, control, flags};
use crate::tss::{Format, Image, Registers};
use crate::watch::DR6_BT;
use crate::{Cpu, vector};

/// The flags of RFLAGS that a switch loads from the TSS.
const LOADED_FLAGS: u64 = flags::ARITHMETIC
    | flags::TF
    | flags::IF
    | flags::DF
    | flags::IOPL
    | flags::NT
    | flags::RF
    | flags::VM
    | flags::AC
    | flags::VIF
    | flags::VIP
    | flags::ID;
/// The bits L0 to L3 and LE of DR7. Every task switch clears them.
const DR7_LOCAL: u64 = 0x155;
/// The busy bit in the access byte of a TSS descriptor.
const BUSY: u8 = 2;

/// The cause of a task switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Initiator {
    /// A far JMP.
    Jump,
    /// A far CALL.
    Call,
    /// IRET with NT set.
    Return,
    /// An exception, an interrupt or INT n.
    Event {
        /// The cause of the event.
        source: Source,
        /// The error code that is pushed on the new task's stack.
        error: Option<u32>,
    },
}

impl Initiator {
    /// Whether the new task is nested in the old task: the new task gets a link to the old task, and the old task stays
    /// busy.
    fn nests(self) -> bool {
        matches!(self, Initiator::Call | Initiator::Event { .. })
    }

    /// Returns EXITINFO2 for a switch that the hypervisor intercepts (AMD64 volume 2, 15.14.1): bits for IRET, for a
    /// jump, and for an error code.
    fn exit_info(self) -> u64 {
        match self {
            Initiator::Call => 0,
            Initiator::Return => 1 << 36,
            Initiator::Jump => 1 << 38,
            Initiator::Event { error, .. } => error.map_or(0, |error| 1 << 44 | u64::from(error)),
        }
    }

    /// Returns the EXT bit for error codes of faults during the switch.
    fn external(self, is_intel: bool) -> u32 {
        match self {
            Initiator::Event { source, .. } => source.external(is_intel),
            _ => 0,
        }
    }
}

/// The task that a switch will enter.
struct Task {
    /// The segment that TR will have after the switch.
    segment: Segment,
    format: Format,
    image: Image,
    /// The PDPTEs at the task's CR3, if the switch loads them for PAE paging.
    pdptes: Option<[u64; 4]>,
}

impl Cpu {
    /// Executes a far JMP or CALL to a TSS or a task gate. Returns [`Break::Jump`] on success.
    pub(crate) fn far_to_task(
        &mut self,
        descriptor: Descriptor,
        selector: u16,
        initiator: Initiator,
        next_rip: u64,
    ) -> Break {
        let error = Some(u32::from(selector & !3));
        if descriptor.dpl() < self.cpl.max((selector & 3) as u8) {
            return self.raise(vector::GP, error);
        }
        let tss = match Format::of_kind(descriptor.kind()) {
            Some(_) => selector,
            None if !descriptor.present() => return self.raise(vector::NP, error),
            None => descriptor.gate_selector(),
        };
        self.switch_by_instruction(tss, initiator, next_rip)
    }

    /// Executes IRET with NT set: returns to the task that the link field of the current TSS selects. Returns
    /// [`Break::Jump`] on success.
    pub(crate) fn return_to_task(&mut self, next_rip: u64) -> Break {
        let link = self.state.tr.base;
        match self.as_system(|cpu| cpu.load::<u16>(link)) {
            Ok(tss) => self.switch_by_instruction(tss, Initiator::Return, next_rip),
            Err(why) => why,
        }
    }

    fn switch_by_instruction(&mut self, tss: u16, initiator: Initiator, next_rip: u64) -> Break {
        let flags = self.flags();
        match self.switch_task(tss, initiator, next_rip, flags) {
            Ok(()) => {
                // The guest's single step belongs to the old task, and is saved as TF in its TSS. The single step of a
                // debugger outside the guest stays.
                self.watch.steps = self.requests.debugger.single_step;
                Break::Jump
            }
            Err(why) => why,
        }
    }

    /// Switches to the task of TSS selector `tss`. In the old task, `return_rip` and `flags` are saved.
    pub(crate) fn switch_task(
        &mut self,
        tss: u16,
        initiator: Initiator,
        return_rip: u64,
        flags: u64,
    ) -> Flow {
        self.intercept_task_switch(tss, initiator.exit_info(), return_rip)?;
        let task = self.find_task(tss, initiator)?;
        let saved = self.registers(return_rip, flags, initiator);
        self.check_writes(&task, initiator)?;

        let old = self.state.clone();
        let entered = match self.enter(&task, initiator) {
            Ok(()) => Ok(()),
            Err(Break::Exception) => Err(Break::TaskFault),
            Err(why) => {
                self.state = old;
                self.refresh();
                return Err(why);
            }
        };
        let new = std::mem::replace(&mut self.state, old);
        self.refresh();
        self.write_tasks(&task, &saved, initiator)?;
        self.state = new;
        self.refresh();
        if entered.is_ok() && task.image.trap {
            self.trap(DR6_BT);
        }
        entered
    }

    /// Finds the TSS of the new task, checks it, and reads it.
    fn find_task(&mut self, tss: u16, initiator: Initiator) -> Result<Task, Break> {
        let error = Some(u32::from(tss & !3) | initiator.external(self.is_intel()));
        let returns = initiator == Initiator::Return;
        let invalid = if returns { vector::TS } else { vector::GP };
        let in_gdt = tss & 4 == 0;
        let descriptor = match self.try_descriptor(tss)? {
            Some(descriptor) if in_gdt => descriptor,
            _ => return Err(self.raise(invalid, error)),
        };
        let format = match Format::of_kind(descriptor.kind()) {
            Some((format, busy)) if busy == returns => format,
            _ => return Err(self.raise(invalid, error)),
        };
        if !descriptor.present() {
            return Err(self.raise(vector::NP, error));
        }
        let mut segment = descriptor.segment(tss);
        segment.rights |= u32::from(BUSY);
        if (segment.limit as usize) < format.bytes() - 1 {
            return Err(self.raise(vector::TS, error));
        }
        let mut bytes = [0; 104];
        let bytes = &mut bytes[..format.bytes()];
        self.as_system(|cpu| cpu.load_memory(segment.base, bytes, "a TSS in MMIO"))?;
        let mut image = Image::decode(bytes, format);
        if self.state.cr0 & control::CR0_PG == 0 {
            image.cr3 = None;
        }
        // A task switch that changes CR3 also loads the PDPTEs (SDM volume 3, "PDPTE Registers").
        let pdptes = match image.cr3.map(u64::from) {
            Some(cr3) if self.pae_paging() && cr3 != self.state.cr3 => Some(self.load_pdptes(cr3)?),
            _ => None,
        };
        Ok(Task {
            segment,
            format,
            image,
            pdptes,
        })
    }

    /// Returns the registers to save in the old task's TSS.
    fn registers(&self, return_rip: u64, flags: u64, initiator: Initiator) -> Registers {
        let State {
            gpr,
            es,
            cs,
            ss,
            ds,
            fs,
            gs,
            ..
        } = &self.state;
        let flags = match initiator {
            Initiator::Return => flags & !flags::NT,
            _ => flags,
        };
        Registers {
            eip: return_rip as u32,
            eflags: flags as u32,
            general: std::array::from_fn(|n| gpr[n] as u32),
            selectors: [es, cs, ss, ds, fs, gs].map(|segment| segment.selector),
        }
    }

    /// Returns the format of the current task's TSS, and the linear address of the registers in it.
    fn current_tss(&self) -> (Format, u64) {
        let tr = &self.state.tr;
        let format = match tr.kind() & 8 {
            0 => Format::Bits16,
            _ => Format::Bits32,
        };
        let at = tr.base.wrapping_add(format.registers() as u64);
        (format, at & 0xffff_ffff)
    }

    /// Checks, before the commit point, that the writes of [`write_tasks`](Self::write_tasks) will succeed. If not,
    /// raises the fault.
    fn check_writes(&mut self, task: &Task, initiator: Initiator) -> Flow {
        let tr = self.state.tr;
        let (format, registers) = self.current_tss();
        let len = format.register_bytes();
        if (tr.limit as usize) < format.registers() + len - 1 {
            let error = u32::from(tr.selector & !3) | initiator.external(self.is_intel());
            return Err(self.raise(vector::TS, Some(error)));
        }
        self.as_system(|cpu| {
            cpu.probe_write(registers, len)?;
            if initiator.nests() {
                cpu.probe_write(task.segment.base, 2)?;
            }
            Ok(())
        })?;
        if !initiator.nests() {
            self.probe_descriptor(tr.selector)?;
        }
        if initiator != Initiator::Return {
            self.probe_descriptor(task.segment.selector)?;
        }
        Ok(())
    }

    /// Saves the registers of the old task in its TSS, links the new task to it, and changes the busy bits.
    fn write_tasks(&mut self, task: &Task, saved: &Registers, initiator: Initiator) -> Flow {
        let old = self.state.tr.selector;
        let (format, registers) = self.current_tss();
        self.as_system(|cpu| {
            let bytes = saved.encode(format);
            cpu.store_bytes(registers, &bytes[..format.register_bytes()])?;
            if initiator.nests() {
                cpu.store::<u16>(task.segment.base, old)?;
            }
            Ok(())
        })?;
        if !initiator.nests() {
            self.change_descriptor(old, |access| access & !BUSY)?;
        }
        if initiator == Initiator::Return {
            return Ok(());
        }
        let new = task.segment.selector;
        match self.change_descriptor(new, |access| access | BUSY)? {
            // Another CPU has entered the task since this CPU found it not busy.
            Some(access) if access & BUSY != 0 => {
                let error = u32::from(new & !3) | initiator.external(self.is_intel());
                Err(self.raise(vector::GP, Some(error)))
            }
            _ => Ok(()),
        }
    }

    /// Loads the new task into the CPU's state. If this raises a fault in the new task, the state is already the state
    /// of the new task, and segments that were not loaded are unusable.
    fn enter(&mut self, task: &Task, initiator: Initiator) -> Flow {
        let Image { registers, ldt, .. } = task.image;
        let nested = if initiator.nests() { flags::NT } else { 0 };
        let rflags = u64::from(registers.eflags) & LOADED_FLAGS | flags::ALWAYS | nested;
        let virtual_8086 = rflags & flags::VM != 0;
        let state = &mut self.state;
        if let Some(cr3) = task.image.cr3 {
            state.cr3 = cr3.into();
        }
        state.pdptes = task.pdptes.unwrap_or(state.pdptes);
        state.cr0 |= control::CR0_TS;
        state.dr7 &= !DR7_LOCAL;
        state.tr = task.segment;
        state.rip = registers.eip.into();
        state.rflags = rflags;
        self.adopt_flags();
        if initiator == Initiator::Return {
            self.unblock_nmis();
        }
        let state = &mut self.state;
        for (to, from) in state.gpr.iter_mut().zip(registers.general) {
            *to = from.into();
        }
        let cpl = u32::from(registers.selectors[1] & 3);
        state.ldtr = unusable(ldt, 0);
        for (number, selector) in (0..).zip(registers.selectors) {
            *self.segment(number) = match virtual_8086 {
                true => Segment::real(selector, 0xf3),
                false => unusable(selector, cpl),
            };
        }
        self.refresh();

        let external = initiator.external(self.is_intel());
        let loaded = self.load_ldt(ldt);
        self.as_task_fault(loaded, external)?;
        if !virtual_8086 {
            let loaded = self.load_segments(registers.selectors);
            self.as_task_fault(loaded, external)?;
        }
        if let Initiator::Event {
            error: Some(error), ..
        } = initiator
        {
            let pushed = match task.format {
                Format::Bits16 => self.push(error as u16),
                Format::Bits32 => self.push(error),
            };
            self.as_task_fault(pushed, external)?;
        }
        match self.state.rip > u64::from(self.state.cs.limit) {
            true => Err(self.raise(vector::GP, Some(external))),
            false => Ok(()),
        }
    }

    fn load_ldt(&mut self, selector: u16) -> Flow {
        if selector & !3 != 0 {
            let loaded = system_segment(self, selector, 2);
            // A task switch raises #TS, not #NP, even for an LDT that is not present.
            if loaded == Err(Break::Exception) && self.raised.exception.vector == vector::NP {
                self.raised.exception.vector = vector::TS;
            }
            self.state.ldtr = loaded?;
        }
        Ok(())
    }

    /// Loads CS, SS, DS, ES, FS and GS. The CPL becomes the RPL of CS.
    fn load_segments(&mut self, selectors: [u16; 6]) -> Flow {
        let cs = self.code_descriptor(selectors[1], self.cpl, true)?;
        self.state.cs = cs;
        for number in [2, 3, 0, 4, 5] {
            self.load_segment(number, selectors[usize::from(number)])?;
        }
        self.refresh();
        Ok(())
    }

    /// Converts an exception of a segment check to the exception that the check raises in a task switch: #GP becomes
    /// #TS, and the error code gets the EXT bit.
    fn as_task_fault(&mut self, checked: Flow, external: u32) -> Flow {
        let Exception { vector, error } = &mut self.raised.exception;
        if checked == Err(Break::Exception) {
            if *vector == vector::GP {
                *vector = vector::TS;
            }
            if *vector != vector::PF {
                *error = error.map(|error| error | external);
            }
        }
        checked
    }
}

/// Returns a segment register that has this selector but is unusable.
fn unusable(selector: u16, dpl: u32) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: 0,
        rights: Segment::UNUSABLE | dpl << 5,
    }
}
