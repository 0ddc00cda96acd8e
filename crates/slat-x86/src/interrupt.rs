//! Delivery of exceptions and interrupts.
//!
//! A delivery first reads all data and writes the stack frame, and only then changes registers. So the CPU can abandon
//! it at any memory access, and start it again. Pending events are in `state.events`. An exception during the delivery
//! of another exception becomes a double fault. An exception during the delivery of the double fault ends the run with
//! [`Exit::Shutdown`].

use crate::frame::Frame;
use crate::machine::Exit;
use crate::nested::{Event, EventKind, code};
use crate::op::Break;
use crate::segment::Descriptor;
use crate::source::Source;
use crate::state::{Events, Exception, MAX_NMIS, Segment, flags};
use crate::task::Initiator;
use crate::tlb::{SUPERVISOR, USER};
use crate::{Cpu, vector};

/// The numbers of the segment registers GS, FS, DS and ES. An event in virtual-8086 mode pushes them, and loads null
/// selectors.
const DATA_SEGMENTS: [u8; 4] = [5, 4, 3, 0];
/// The contents of a segment register with a null selector.
const NULL: Segment = Segment {
    selector: 0,
    base: 0,
    limit: 0,
    rights: Segment::UNUSABLE,
};

/// Returns the source of an exception that no INT n has raised.
fn source(vector: u8) -> Source {
    match vector {
        vector::DB | vector::BP | vector::OF | vector::DF | vector::MC => Source::External,
        _ => Source::Fault,
    }
}

fn contributory(vector: u8) -> bool {
    matches!(
        vector,
        vector::DE | vector::TS | vector::NP | vector::SS | vector::GP
    )
}

impl Cpu {
    /// Makes an external interrupt pending. It is delivered before the next instruction, even if RFLAGS.IF is clear.
    pub fn inject_interrupt(&mut self, vector: u8) {
        self.state.events.interrupt = Some(vector);
        self.slow = true;
    }

    /// Makes `count` more NMIs pending, to be delivered as soon as NMIs are not blocked. At most [`MAX_NMIS`] can be
    /// pending; while NMIs are blocked, only one.
    pub fn inject_nmis(&mut self, count: u8) {
        let events = &mut self.state.events;
        let limit = if events.nmi_blocked { 1 } else { MAX_NMIS };
        events.nmis = events.nmis.saturating_add(count).min(limit);
        self.slow = true;
    }

    /// Makes an exception pending, to be delivered before the next instruction. The caller has set CR2.
    pub fn inject_exception(&mut self, vector: u8, error: Option<u32>) {
        self.queue_exception(Exception { vector, error }, self.state.cr2);
    }

    /// Whether the guest can accept an external interrupt now. `false` if an SMI or an NMI is taken next, because their
    /// handlers begin with interrupts disabled. Also `false` before an instruction that waits for memory, because the
    /// instruction may change IF or begin a shadow.
    pub fn can_take_interrupt(&self) -> bool {
        let Events {
            exception,
            interrupt,
            sti_shadow,
            mov_ss_shadow,
            debug,
            ..
        } = self.state.events;
        let in_shadow = (sti_shadow || mov_ss_shadow) && !self.exits_on_interrupt();
        self.interrupts_enabled()
            && exception.is_none()
            && interrupt.is_none()
            && debug == 0
            && !in_shadow
            && self.svm.injected().is_none()
            && !self.waits_for_memory()
            && !self.takes_nmi()
            && !self.state.events.takes_smi()
    }

    /// Call after the instruction in the shadow of STI or MOV SS.
    pub(crate) fn end_shadow(&mut self) {
        self.state.events.sti_shadow = false;
        self.state.events.mov_ss_shadow = false;
    }

    /// Delivers pending events, at most one per call. As in KVM, an acknowledged interrupt is delivered before an SMI
    /// or an NMI: if the interrupt were delivered after an NMI, it would interrupt the NMI's handler.
    pub(crate) fn deliver_events(&mut self) -> Option<Exit> {
        let events = self.state.events;
        let rip = self.state.rip;
        if let Some(event) = self.svm.injected() {
            return self.deliver_injected(event);
        }
        if let Some(exception) = events.exception {
            let Exception { vector, error } = exception;
            // A #BP that the debugger passes on to the guest is the trap of the guest's INT3. So the handler of the #BP
            // must return to the instruction after the INT3.
            let rip = match self.watch.int3 {
                Some((start, end)) if vector == vector::BP && start == rip => end,
                _ => rip,
            };
            match self.deliver(vector, error, source(vector), rip) {
                Ok(()) => {
                    self.state.events.exception = None;
                    self.end_shadow();
                }
                Err(Break::Exception | Break::TaskFault) => {
                    return self.exception_in_delivery(exception);
                }
                Err(why) => return self.delivery_broke(why),
            }
        } else if let Some(vector) = events.interrupt {
            self.code.clock.serialize();
            match self.deliver(vector, None, Source::Interrupt, rip) {
                Ok(()) => {
                    self.state.events.interrupt = None;
                    self.end_shadow();
                }
                Err(Break::Exception | Break::TaskFault) => {
                    self.state.events.interrupt = None;
                    self.note_fault();
                }
                Err(why) => return self.delivery_broke(why),
            }
        } else if events.takes_smi() {
            return (!self.leaves_for(code::SMI)).then_some(Exit::Smi);
        } else if self.nmi_leaves_guest() {
            self.leaves_for(code::NMI);
        } else if self.takes_nmi() {
            self.code.clock.serialize();
            match self.deliver(vector::NMI, None, Source::Nmi, rip) {
                Ok(()) => {
                    self.end_nmi();
                    self.block_nmis(false);
                    self.end_shadow();
                }
                Err(Break::Exception | Break::TaskFault) => {
                    self.end_nmi();
                    self.note_fault();
                }
                Err(why) => return self.delivery_broke(why),
            }
        } else if self.interrupt_leaves_guest() {
            self.leaves_for(code::INTR);
        } else if self.takes_virtual_interrupt() && !self.leaves_for(code::VINTR) {
            self.code.clock.serialize();
            match self.deliver(self.virtual_vector(), None, Source::Interrupt, rip) {
                Ok(()) => self.end_virtual_interrupt(),
                Err(Break::Exception | Break::TaskFault) => {
                    self.end_virtual_interrupt();
                    self.note_fault();
                }
                Err(why) => return self.delivery_broke(why),
            }
        }
        None
    }

    /// Delivers the event that VMRUN injects.
    fn deliver_injected(&mut self, event: Event) -> Option<Exit> {
        let source = match event.kind() {
            Some(EventKind::Interrupt) => Source::Interrupt,
            Some(EventKind::Nmi) => Source::Nmi,
            Some(EventKind::Software) => Source::Software,
            _ => source(event.vector()),
        };
        let rip = self.svm.injection_returns_to(event, self.state.rip);
        match self.deliver(event.vector(), event.error(), source, rip) {
            Ok(()) => {
                self.svm.end_injection();
                if source == Source::Nmi {
                    self.block_nmis(true);
                }
                self.end_shadow();
            }
            Err(Break::Exception | Break::TaskFault) => {
                self.svm.end_injection();
                if event.kind() == Some(EventKind::Exception) {
                    return self.exception_in_delivery(event.exception());
                }
                self.note_fault();
            }
            Err(why) => return self.delivery_broke(why),
        }
        None
    }

    fn delivery_broke(&mut self, why: Break) -> Option<Exit> {
        match why {
            Break::Exit => self.raised.exit.take(),
            Break::VmExit => {
                self.make_exit_due();
                None
            }
            _ => None,
        }
    }

    fn note_fault(&mut self) {
        self.raised.noncanonical = false;
        self.queue_exception(self.raised.exception, self.raised.address);
    }

    fn exception_in_delivery(&mut self, first: Exception) -> Option<Exit> {
        let second = self.raised.exception.vector;
        // If the hypervisor intercepts the second exception, the hypervisor gets a #VMEXIT, and there is no shutdown.
        if first.vector == vector::DF && !self.intercepts_exception(second) {
            self.state.events.exception = None;
            self.svm.set_delivering(None);
            return (!self.exit_on_shutdown()).then_some(Exit::Shutdown);
        }
        let double = contributory(first.vector) && contributory(second)
            || first.vector == vector::PF && (second == vector::PF || contributory(second));
        self.note_fault();
        if double && !self.svm.is_exit_due() {
            let double = Exception {
                vector: vector::DF,
                error: Some(0),
            };
            // The double fault replaces both exceptions.
            self.svm.set_delivering(None);
            self.queue_exception(double, 0);
        }
        None
    }

    /// Delivers an event at once. Its handler will return to `return_rip`.
    pub(crate) fn deliver(
        &mut self,
        vector: u8,
        error: Option<u32>,
        source: Source,
        return_rip: u64,
    ) -> Result<(), Break> {
        self.slow = true;
        self.progress.note_delivery(self.counters.instructions);
        // The pushed flags include TF, but the delivery of an event causes no single-step trap.
        self.watch.steps = false;
        (self.svm).set_delivering(Some(Event::new(vector, error, source)));
        let (delivered, hits) = self.collect_hits(|cpu| {
            if cpu.long_mode() {
                cpu.deliver_long(vector, error, source, return_rip)
            } else if cpu.protected() {
                cpu.deliver_protected(vector, error, source, return_rip)
            } else {
                cpu.deliver_real(vector, return_rip)
            }
        });
        if delivered.is_ok() {
            self.svm.set_delivering(None);
            self.trap(hits);
        }
        if let Some(Exit::Mmio { gpa, .. }) = self.raised.exit {
            // A device cannot provide data for the delivery of an event, because the caller has no means to complete
            // such an access.
            self.raised.exit = Some(Exit::Delivery {
                vector,
                software: source.is_software(),
                gpa,
            });
        }
        delivered
    }

    /// Returns the value of RFLAGS that the delivery of an event from `source` pushes.
    fn pushed_flags(&mut self, source: Source) -> u64 {
        self.flags()
            | match source {
                Source::Fault => flags::RF,
                _ => 0,
            }
    }

    /// Reads the gate of a vector, and checks that the event may use it. The gates of the IDT have `bytes` bytes, and
    /// `kinds` are the valid types. Returns the gate's first 8 bytes, and its second 8 bytes or 0.
    ///
    /// # Errors
    /// #GP and #NP, with the vector in the error code.
    fn gate(
        &mut self,
        vector: u8,
        source: Source,
        bytes: u64,
        kinds: &[u8],
    ) -> Result<(Descriptor, u64), Break> {
        let error = Some(u32::from(vector) << 3 | 2 | source.external(self.is_intel()));
        let offset = u64::from(vector) * bytes;
        if offset + bytes - 1 > u64::from(self.state.idtr.limit) {
            return Err(self.raise(vector::GP, error));
        }
        let at = self.state.idtr.base.wrapping_add(offset);
        let (low, high) = self.as_system(|cpu| {
            let low = cpu.load::<u64>(at)?;
            let high = match bytes {
                16 => cpu.load::<u64>(at + 8)?,
                _ => 0,
            };
            Ok((low, high))
        })?;
        let gate = Descriptor(low);
        if !kinds.contains(&gate.kind()) || source.is_software() && gate.dpl() < self.cpl {
            return Err(self.raise(vector::GP, error));
        }
        if !gate.present() {
            return Err(self.raise(vector::NP, error));
        }
        Ok((gate, high))
    }

    fn deliver_long(
        &mut self,
        vector: u8,
        error: Option<u32>,
        source: Source,
        return_rip: u64,
    ) -> Result<(), Break> {
        let external = source.external(self.is_intel());
        let (gate, high) = self.gate(vector, source, 16, &[0xe, 0xf])?;
        let is_interrupt = gate.kind() == 0xe;
        let low = gate.0;
        let target = low & 0xffff | (low >> 48) << 16 | high << 32;
        let selector = gate.gate_selector();
        if selector & !3 == 0 {
            return Err(self.raise(vector::GP, Some(external)));
        }
        let selector_error = Some(u32::from(selector & !3) | external);
        let Some(code) = self.try_descriptor(selector)? else {
            return Err(self.raise(vector::GP, selector_error));
        };
        if !code.is_code() || !code.long() || code.big() || code.dpl() > self.cpl {
            return Err(self.raise(vector::GP, selector_error));
        }
        if !code.present() {
            return Err(self.raise(vector::NP, selector_error));
        }
        if !self.canonical(target) {
            return Err(self.raise(vector::GP, Some(external)));
        }
        let cpl = if code.conforming() {
            self.cpl
        } else {
            code.dpl()
        };
        let ist = low >> 32 & 7;
        let stack = match ist {
            0 if cpl == self.cpl => self.state.gpr[4],
            0 => self.tss_stack(4 + 8 * u64::from(cpl))?,
            _ => self.tss_stack(36 + 8 * (ist - 1))?,
        } & !15;
        let rflags = self.pushed_flags(source);
        let frame = [
            return_rip,
            u64::from(self.state.cs.selector),
            rflags,
            self.state.gpr[4],
            u64::from(self.state.ss.selector),
        ];
        let mut bytes = [0; 48];
        let mut len = 0;
        if let Some(error) = error {
            bytes[..8].copy_from_slice(&u64::from(error).to_le_bytes());
            len = 8;
        }
        for word in frame {
            bytes[len..len + 8].copy_from_slice(&word.to_le_bytes());
            len += 8;
        }
        let rsp = stack.wrapping_sub(len as u64);
        self.push_frame(rsp, &bytes[..len], cpl)?;
        // From here on, no step can fail.
        let mut segment = Descriptor(code.0 | 1 << 40).segment(selector & !3 | u16::from(cpl));
        segment.base = 0;
        self.state.cs = segment;
        if cpl != self.cpl {
            let rights = Segment::UNUSABLE | u32::from(cpl) << 5;
            self.state.ss = Segment {
                selector: u16::from(cpl),
                base: 0,
                limit: 0xffff_ffff,
                rights,
            };
        }
        self.state.gpr[4] = rsp;
        self.state.rip = target;
        self.state.rflags &= !(flags::TF | flags::NT | flags::RF | flags::VM);
        if is_interrupt {
            self.state.rflags &= !flags::IF;
        }
        self.refresh();
        Ok(())
    }

    /// Writes a stack frame. The store has the access rights of privilege level `cpl`.
    fn push_frame(&mut self, rsp: u64, bytes: &[u8], cpl: u8) -> Result<(), Break> {
        let table = self.table;
        self.table = match cpl {
            3 => USER,
            _ if self.cpl == 3 => SUPERVISOR,
            _ => table,
        };
        let result = self.store_bytes(rsp, bytes);
        self.table = table;
        self.stop = false;
        if result == Err(Break::Exception) && std::mem::take(&mut self.raised.noncanonical) {
            self.raised.exception.vector = vector::SS;
        }
        result
    }

    /// Reads a stack pointer from the 64-bit TSS.
    fn tss_stack(&mut self, offset: u64) -> Result<u64, Break> {
        let tr = self.state.tr;
        if offset + 7 > u64::from(tr.limit) {
            return Err(self.raise(vector::TS, Some(u32::from(tr.selector & !3))));
        }
        let rsp = self.as_system(|cpu| cpu.load::<u64>(tr.base.wrapping_add(offset)))?;
        if !self.canonical(rsp) {
            return Err(self.raise(vector::SS, Some(0)));
        }
        Ok(rsp)
    }

    /// Delivers an event in protected mode outside long mode, by an interrupt gate, a trap gate or a task gate.
    fn deliver_protected(
        &mut self,
        vector: u8,
        error: Option<u32>,
        source: Source,
        return_rip: u64,
    ) -> Result<(), Break> {
        let external = source.external(self.is_intel());
        let (gate, _) = self.gate(vector, source, 8, &[5, 6, 7, 0xe, 0xf])?;
        let (wide, is_interrupt) = (gate.kind() & 8 != 0, gate.kind() & 1 == 0);
        if gate.kind() == 5 {
            let flags = self.pushed_flags(source);
            let initiator = Initiator::Event { source, error };
            return self.switch_task(gate.gate_selector(), initiator, return_rip, flags);
        }
        let from_8086 = self.virtual_8086();
        let selector = gate.gate_selector();
        let target = gate.0 & 0xffff | if wide { (gate.0 >> 48) << 16 } else { 0 };
        let selector_error = Some(u32::from(selector & !3) | external);
        let code = match self.try_descriptor(selector)? {
            Some(code) if selector & !3 != 0 && code.is_code() && code.dpl() <= self.cpl => code,
            _ => return Err(self.raise(vector::GP, selector_error)),
        };
        // The handler of an event in virtual-8086 mode must run at privilege level 0.
        if from_8086 && (code.conforming() || code.dpl() != 0) {
            return Err(self.raise(vector::GP, selector_error));
        }
        if !code.present() {
            return Err(self.raise(vector::NP, selector_error));
        }
        let cpl = if code.conforming() {
            self.cpl
        } else {
            code.dpl()
        };
        let size = if wide { 4 } else { 2 };
        let mut frame = Frame::<{ 4 * 10 }>::new();
        if from_8086 {
            for number in DATA_SEGMENTS {
                frame.push(self.segment(number).selector.into(), size);
            }
        }
        let (esp, ss) = if cpl == self.cpl {
            (self.state.gpr[4], self.state.ss)
        } else {
            frame.push(self.state.ss.selector.into(), size);
            frame.push(self.state.gpr[4], size);
            let tss = self.state.tr.base.wrapping_add(4 + 8 * u64::from(cpl));
            let (esp, ss) =
                self.as_system(|cpu| Ok((cpu.load::<u32>(tss)?, cpu.load::<u16>(tss + 4)?)))?;
            let descriptor = self.descriptor(ss, vector::TS)?;
            (u64::from(esp), descriptor.segment(ss))
        };
        frame.push(self.pushed_flags(source), size);
        frame.push(self.state.cs.selector.into(), size);
        frame.push(return_rip, size);
        if let Some(error) = error {
            frame.push(error.into(), size);
        }
        let bytes = frame.bytes();
        let mask = if ss.big() { 0xffff_ffff } else { 0xffff };
        let new = esp.wrapping_sub(bytes.len() as u64) & mask;
        self.push_frame(ss.base.wrapping_add(new) & 0xffff_ffff, bytes, cpl)?;
        self.state.gpr[4] = esp & !mask | new;
        self.state.ss = ss;
        if from_8086 {
            for number in DATA_SEGMENTS {
                *self.segment(number) = NULL;
            }
        }
        self.state.cs = Descriptor(code.0 | 1 << 40).segment(selector & !3 | u16::from(cpl));
        self.state.rip = target;
        self.state.rflags &= !(flags::TF | flags::NT | flags::RF | flags::VM);
        if is_interrupt {
            self.state.rflags &= !flags::IF;
        }
        self.refresh();
        Ok(())
    }

    /// Delivers an event in real mode, by the interrupt vector table.
    fn deliver_real(&mut self, vector: u8, return_rip: u64) -> Result<(), Break> {
        let offset = u64::from(vector) * 4;
        if offset + 3 > u64::from(self.state.idtr.limit) {
            return Err(self.raise(vector::GP, None));
        }
        let at = self.state.idtr.base.wrapping_add(offset);
        let entry = self.load::<u32>(at)?;
        let image = self.flags() as u16;
        let cleared = flags::TF | flags::IF | flags::AC | flags::RF;
        self.enter_8086_handler(entry, image, cleared, return_rip)
    }

    /// Calls a handler of real mode or virtual-8086 mode: pushes RFLAGS as `image`, CS and `return_rip`, clears flags,
    /// and loads CS and RIP from `entry` of the interrupt vector table.
    pub(crate) fn enter_8086_handler(
        &mut self,
        entry: u32,
        image: u16,
        cleared: u64,
        return_rip: u64,
    ) -> Result<(), Break> {
        let sp = (self.state.gpr[4] as u16).wrapping_sub(6);
        let mut bytes = [0; 6];
        bytes[..2].copy_from_slice(&(return_rip as u16).to_le_bytes());
        bytes[2..4].copy_from_slice(&self.state.cs.selector.to_le_bytes());
        bytes[4..].copy_from_slice(&image.to_le_bytes());
        let stack = self.state.ss.base.wrapping_add(sp.into());
        self.push_frame(stack, &bytes, self.cpl)?;
        self.state.gpr[4] = self.state.gpr[4] & !0xffff | u64::from(sp);
        self.state.cs.selector = (entry >> 16) as u16;
        self.state.cs.base = u64::from(entry >> 16) << 4;
        self.state.rip = u64::from(entry & 0xffff);
        self.state.rflags &= !cleared;
        self.refresh();
        Ok(())
    }
}
