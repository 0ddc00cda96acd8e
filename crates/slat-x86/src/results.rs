//! The caller's methods to pass the results of port accesses, hypercalls and MSR accesses.

use crate::Cpu;
use crate::devices::{Devices, Port, PortKind, Question, QuestionKind};
use crate::flow::Break;
use crate::state::{Exception, State, flags};
use crate::vector;

impl Cpu {
    /// Removes the record of the instruction that ended the last run. Returns the record if its kind is one of `kinds`
    /// and the instruction is still at RIP.
    fn take_question(&mut self, kinds: &[QuestionKind]) -> Option<Question> {
        let question = self.devices.question.take()?;
        (question.rip == self.state.rip && kinds.contains(&question.kind)).then_some(question)
    }

    /// Finishes the hypercall that ended the last run: calls `store`, which stores the hypercall's results in the
    /// registers. The second argument of `store` says whether the registers have 64 bits.
    ///
    /// RIP moves to the next instruction. If the caller has changed RIP meanwhile, this function does nothing.
    pub fn complete_hypercall(&mut self, store: impl FnOnce(&mut State, bool)) {
        let Some(question) = self.take_question(&[QuestionKind::Hypercall]) else {
            return;
        };
        let long_mode = self.is_64();
        store(&mut self.state, long_mode);
        self.question_done(&question);
    }

    /// Finishes the instruction: moves RIP, and takes its traps. Call after the result was stored.
    fn question_done(&mut self, question: &Question) {
        self.state.rip = question.next;
        self.state.rflags &= !flags::RF;
        self.end_shadow();
        self.trap_completed(question.traps);
    }

    /// Finishes the MSR access that ended the last run. `answer` is the value that RDMSR reads (WRMSR ignores the
    /// value); `None` raises #GP(0).
    ///
    /// RIP moves to the next instruction, unless the caller has changed it meanwhile.
    pub fn complete_msr(&mut self, answer: Option<u64>) {
        let kinds = [QuestionKind::Rdmsr, QuestionKind::Wrmsr];
        let Some(question) = self.take_question(&kinds) else {
            return;
        };
        let Some(value) = answer else {
            let refused = Exception {
                vector: vector::GP,
                error: Some(0),
            };
            return self.queue_exception(refused, 0);
        };
        if question.kind == QuestionKind::Rdmsr {
            self.state.gpr[0] = value & 0xffff_ffff;
            self.state.gpr[2] = value >> 32;
        }
        self.question_done(&question);
    }

    /// Returns the data of the port output that ended the last run: all units of [`Exit::Io`](crate::Exit::Io).
    pub fn output(&self) -> &[u8] {
        let output = &self.fixed.output;
        &output.bytes[..output.len]
    }

    /// Finishes the port access that ended the last run. `data` is what IN or INS has read.
    ///
    /// RIP moves to the next instruction, unless the caller has changed it meanwhile, as in KVM.
    pub fn complete_io(&mut self, data: &[u8]) {
        let Some(mut port) = self.devices.port.take() else {
            return;
        };
        if self.state.rip != port.rip {
            return;
        }
        let mut word = [0; 4];
        let len = data.len().min(4);
        word[..len].copy_from_slice(&data[..len]);
        let word = u32::from_le_bytes(word);
        match port.kind {
            PortKind::In => {
                let rax = &mut self.state.gpr[0];
                *rax = match port.size {
                    1 => *rax & !0xff | u64::from(word & 0xff),
                    2 => *rax & !0xffff | u64::from(word & 0xffff),
                    _ => u64::from(word),
                };
                self.state.rip = port.next;
            }
            PortKind::Out => self.state.rip = port.next,
            PortKind::Outs { address_size, rep } => {
                for _ in 0..port.count {
                    self.advance_string(6, address_size, port.size);
                }
                self.finish_string(&port, address_size, rep, port.count);
            }
            PortKind::Ins { .. } => {
                port.answered = true;
                self.devices.port = Some(port);
                self.fixed.input.set(data);
                self.slow = true;
                return;
            }
        }
        self.port_done(&port);
    }

    /// Call when a port access, or a part of a repeated port access, is done. Records its traps.
    fn port_done(&mut self, port: &Port) {
        self.end_shadow();
        if self.state.rip == port.next {
            self.state.rflags &= !flags::RF;
        }
        self.trap_completed(port.traps);
    }

    /// Stores the data that a string input has read. The address was translated for writing before the exit. If the
    /// caller has lowered the count in RCX meanwhile, drops the rest of the data. If it has raised the count, the
    /// instruction is executed again for the missing units.
    pub(crate) fn finish_ins(&mut self) -> Result<(), Break> {
        let Some(mut port @ Port { answered: true, .. }) = self.devices.port else {
            return Ok(());
        };
        let PortKind::Ins { address_size, rep } = port.kind else {
            return Ok(());
        };
        let size = usize::from(port.size);
        while self.state.rip == port.rip && self.fixed.input.left().len() >= size {
            let mut element = [0; 4];
            element[..size].copy_from_slice(&self.fixed.input.left()[..size]);
            let lin = self.string_address(0, 7, address_size, port.size.into())?;
            let (stored, hits) = self.collect_hits(|cpu| cpu.store_bytes(lin, &element[..size]));
            stored?;
            port.traps |= hits;
            self.fixed.input.stored += size;
            self.advance_string(7, address_size, port.size);
            self.finish_string(&port, address_size, rep, 1);
        }
        self.devices.port = None;
        self.port_done(&port);
        Ok(())
    }

    /// Subtracts `done` units from the count of a string access. After the last unit, sets RIP to the next instruction.
    fn finish_string(&mut self, port: &Port, address_size: u8, rep: bool, done: u32) {
        if rep {
            let left = self.string_count(address_size).saturating_sub(done.into());
            self.set_string_register(1, address_size, left);
            if left != 0 {
                self.state.rflags |= flags::RF;
                self.slow = true;
                return;
            }
        }
        self.state.rip = port.next;
    }

    /// Drops a port access of an earlier run if the caller did not complete it, or if its instruction is no longer at
    /// RIP. Drops an MMIO read, too, if the caller has not provided its data; returns whether there was one.
    pub(crate) fn forget_question(&mut self) -> bool {
        let rip = self.state.rip;
        let Devices { asked, port, .. } = &mut self.devices;
        port.take_if(|port| !port.answered || port.rip != rip);
        asked.take().is_some()
    }
}
