//! MMIO and port accesses, whose data the device model provides; and hypercalls and MSR accesses
//! that the caller handles.
//!
//! *MMIO reads*: the CPU abandons the instruction with nothing changed and ends the run. The caller provides the data.
//! Then the CPU executes the instruction, as it was decoded, again from its start: a read at a linear address whose
//! data is known returns that data, and is not translated again.
//!
//! *MMIO writes*: the instruction queues the writes and completes; each fragment of the queue ends a run.
//!
//! *Ports*, *hypercalls* and *MSRs*: RIP stays at the instruction until the access is completed.
//!
//! [`complete`](crate::complete) finishes such an instruction before anything else is executed.

use crate::Cpu;
use crate::heap::Zeroed;
use crate::machine::{Access, Exit, MsrFault};
use crate::op::{Break, LONGEST_INSTRUCTION, Op};
use crate::state::{Exception, State, flags};
use crate::vector;

/// The most bytes that one port exit moves. (A repeated string instruction moves many units at once.)
pub const PORT_BYTES: usize = 4096;
/// The most MMIO accesses of an instruction, rounded up: XSAVE reads and writes 72 fragments.
const MOST_FRAGMENTS: usize = 96;

#[derive(Clone, Copy, Debug)]
struct Fragment {
    /// The linear address. 0 for a write: the queue does not need it.
    lin: u64,
    gpa: u64,
    len: u8,
    data: [u8; 8],
}

/// The MMIO reads or writes of one instruction, in order.
pub(crate) struct Fragments {
    all: [Fragment; MOST_FRAGMENTS],
    /// Number of fragments that are done.
    first: usize,
    /// Number of all fragments.
    end: usize,
}

// SAFETY: integers.
unsafe impl Zeroed for Fragments {}

impl Fragments {
    fn waiting(&self) -> &[Fragment] {
        &self.all[self.first..self.end]
    }

    /// Appends a fragment. Returns `false` if there are too many.
    fn push(&mut self, fragment: Fragment) -> bool {
        let free = self.all.get_mut(self.end);
        let pushed = free.map(|free| *free = fragment).is_some();
        self.end += usize::from(pushed);
        pushed
    }

    /// Removes and returns the next fragment.
    fn pop(&mut self) -> Option<Fragment> {
        let next = *self.waiting().first()?;
        self.first += 1;
        if self.first == self.end {
            self.clear();
        }
        Some(next)
    }

    fn clear(&mut self) {
        (self.first, self.end) = (0, 0);
    }
}

/// The data that a string input read.
pub(crate) struct Input {
    bytes: [u8; PORT_BYTES],
    /// Number of bytes that are stored.
    stored: usize,
    len: usize,
}

// SAFETY: integers.
unsafe impl Zeroed for Input {}

impl Input {
    fn set(&mut self, data: &[u8]) {
        self.len = data.len().min(PORT_BYTES);
        self.stored = 0;
        self.bytes[..self.len].copy_from_slice(&data[..self.len]);
    }

    /// Returns the bytes that are not stored yet, in reading order.
    fn left(&self) -> &[u8] {
        &self.bytes[self.stored..self.len]
    }
}

/// The data that an output writes.
pub(crate) struct Output {
    bytes: [u8; PORT_BYTES],
    len: usize,
}

// SAFETY: integers.
unsafe impl Zeroed for Output {}

impl Output {
    /// Returns memory for the next `len` bytes of output.
    pub(crate) fn start(&mut self, len: usize) -> &mut [u8] {
        self.len = len;
        &mut self.bytes[..len]
    }
}

/// An instruction that waits for the data of MMIO reads, as it was decoded.
///
/// The instruction is executed again from this copy, not fetched again: the client may have patched it meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct Reader {
    pub(crate) op: Op,
    /// RIP of the instruction.
    pub(crate) rip: u64,
    pub(crate) bytes: [u8; LONGEST_INSTRUCTION],
}

impl Reader {
    /// Returns the instruction's bytes.
    pub(crate) fn code(&self) -> &[u8] {
        let len = self.bytes.len().min(self.op.len.into());
        &self.bytes[..len]
    }
}

/// The accesses in progress. Their data is in [`crate::fixed::Fixed`].
#[derive(Default)]
pub(crate) struct Devices {
    /// Number of reads for which the current execution has used data.
    taken: usize,
    /// The read that ended the last run.
    asked: Option<Fragment>,
    /// The instruction that makes the reads.
    pub(crate) reader: Option<Reader>,
    pub(crate) port: Option<Port>,
    /// The instruction that ended the last run and needs a result of the caller.
    question: Option<Question>,
    /// The device that an access of compiled code is to. The interpreter then executes the instruction and uses
    /// this address, so that the machine translates only once. Valid only if the instruction is executed next: a
    /// memslot may be added later.
    #[cfg(feature = "jit")]
    pub(crate) met: Option<Met>,
}

/// An access to a device.
#[cfg(feature = "jit")]
#[derive(Clone, Copy)]
pub(crate) struct Met {
    pub(crate) lin: u64,
    pub(crate) access: Access,
    pub(crate) gpa: u64,
}

/// An instruction whose result the caller puts into registers.
#[derive(Clone, Copy, Debug)]
struct Question {
    /// RIP of the instruction, and of the next one.
    rip: u64,
    next: u64,
    kind: QuestionKind,
    /// DR6 bits of the debug traps that follow the instruction.
    traps: u64,
}

/// The destination of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QuestionKind {
    /// RAX.
    Hypercall,
    /// EDX:EAX.
    Rdmsr,
    /// There is no destination.
    Wrmsr,
}

/// A port access that has to be completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port {
    /// RIP of the instruction, and of the next one.
    pub(crate) rip: u64,
    pub(crate) next: u64,
    pub(crate) size: u8,
    /// Units that the exit moves.
    pub(crate) count: u32,
    pub(crate) kind: PortKind,
    /// DR6 bits of the debug traps that follow the access.
    pub(crate) traps: u64,
    /// The data of a string input was provided. The CPU stores the data when it runs again.
    pub(crate) answered: bool,
}

/// How a port access is completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortKind {
    In,
    Out,
    /// INS or OUTS: the address size in bytes, and whether the instruction repeats.
    Ins {
        address_size: u8,
        rep: bool,
    },
    Outs {
        address_size: u8,
        rep: bool,
    },
}

impl Cpu {
    /// Removes and returns the guest-physical address of the device, if compiled code has met one by this access.
    #[cfg(feature = "jit")]
    #[inline]
    pub(crate) fn take_met(&mut self, lin: u64, access: Access) -> Option<u64> {
        (self.devices.met)
            .take_if(|met| (met.lin, met.access) == (lin, access))
            .map(|met| met.gpa)
    }

    /// Without a compiler, no device is remembered.
    #[cfg(not(feature = "jit"))]
    #[inline]
    pub(crate) fn take_met(&mut self, _: u64, _: Access) -> Option<u64> {
        None
    }

    /// Provides the data of the MMIO read that ended the last run.
    pub fn complete_mmio_read(&mut self, data: &[u8]) {
        if let Some(mut read) = self.devices.asked.take() {
            let len = data.len().min(usize::from(read.len));
            read.data[..len].copy_from_slice(&data[..len]);
            self.fixed.answers.push(read);
            self.slow = true;
        }
    }

    /// Whether there is data for reads of the instruction at RIP.
    pub(crate) fn has_answers(&self) -> bool {
        !self.fixed.answers.waiting().is_empty()
    }

    /// Call when the instruction at RIP starts: its reads use the data from the beginning.
    pub(crate) fn rewind_answers(&mut self) {
        self.devices.taken = 0;
    }

    /// Call when the instruction is done (or ended in an exception): drops the data.
    pub(crate) fn drop_answers(&mut self) {
        self.fixed.answers.clear();
        self.devices.taken = 0;
        self.devices.reader = None;
    }

    /// Returns the guest-physical address of the read at `lin` whose data is known, and which the current
    /// execution has not made yet.
    pub(crate) fn answered_at(&self, lin: u64) -> Option<u64> {
        let mut left = self.fixed.answers.waiting().iter().skip(self.devices.taken);
        left.find(|answer| answer.lin == lin)
            .map(|answer| answer.gpa)
    }

    pub(crate) fn mmio_read(&mut self, lin: u64, gpa: u64, buffer: &mut [u8]) -> Result<(), Break> {
        let len = buffer.len();
        let answers = &mut self.fixed.answers;
        if let Some(answer) = answers.waiting().get(self.devices.taken)
            && answer.lin == lin
            && usize::from(answer.len) == len
        {
            buffer.copy_from_slice(&answer.data[..len]);
            self.devices.taken += 1;
            return Ok(());
        }
        // Later data belongs to another instruction.
        answers.end = self.devices.taken;
        if answers.end == MOST_FRAGMENTS {
            return Err(self.unimplemented("an instruction with very many MMIO reads"));
        }
        let read = Fragment {
            lin,
            gpa,
            len: len as u8,
            data: [0; 8],
        };
        self.devices.asked = Some(read);
        Err(self.leave(Exit::Mmio {
            gpa,
            len: read.len,
            write: false,
            data: read.data,
        }))
    }

    pub(crate) fn mmio_write(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), Break> {
        let mut write = Fragment {
            lin: 0,
            gpa,
            len: bytes.len() as u8,
            data: [0; 8],
        };
        write.data[..bytes.len()].copy_from_slice(bytes);
        if !self.fixed.writes.push(write) {
            return Err(self.unimplemented("an instruction with very many MMIO writes"));
        }
        self.stop = true;
        self.slow = true;
        Ok(())
    }

    /// Whether there are queued writes.
    pub(crate) fn has_writes(&self) -> bool {
        !self.fixed.writes.waiting().is_empty()
    }

    /// Removes the next queued write. Returns it as an exit.
    pub(crate) fn next_mmio_write(&mut self) -> Option<Exit> {
        let Fragment { gpa, len, data, .. } = self.fixed.writes.pop()?;
        Some(Exit::Mmio {
            gpa,
            len,
            write: true,
            data,
        })
    }

    /// Drops an access of an earlier run that the caller did not complete; its instruction makes the access again. Also
    /// drops an access whose instruction is not at RIP any more.
    pub(crate) fn forget_question(&mut self) {
        let rip = self.state.rip;
        let Devices {
            reader,
            asked,
            port,
            ..
        } = &mut self.devices;
        port.take_if(|port| !port.answered || port.rip != rip);
        if asked.take().is_some() || reader.is_some_and(|reader| reader.rip != rip) {
            self.drop_answers();
        }
    }

    /// Ends the run with the hypercall `op`.
    pub(crate) fn ask_hypercall(&mut self, op: &Op) -> Break {
        self.ask(op, QuestionKind::Hypercall, Exit::Hypercall)
    }

    /// Refuses RDMSR or, with a `value`, WRMSR: raises #GP(0), or ends the run if the machine wants its caller to
    /// handle the access. An access that was only interrupted starts again.
    pub(crate) fn refuse_msr(
        &mut self,
        op: &Op,
        index: u32,
        value: Option<u64>,
        why: MsrFault,
    ) -> Break {
        if why == MsrFault::Retry {
            return Break::Retry;
        }
        if !self.machine().answers_msr_outside(why) {
            return self.gp();
        }
        let kind = match value {
            None => QuestionKind::Rdmsr,
            Some(_) => QuestionKind::Wrmsr,
        };
        self.ask(op, kind, Exit::Msr { index, value, why })
    }

    /// Ends the run with `exit`. The caller's result will finish `op`.
    fn ask(&mut self, op: &Op, kind: QuestionKind, exit: Exit) -> Break {
        self.devices.question = Some(Question {
            rip: self.rip_of(op),
            next: self.next_rip(op),
            kind,
            traps: self.traps_of_instruction(),
        });
        self.leave(exit)
    }

    /// Removes the instruction that ended the last run. Returns it if it needs a result of one of these kinds, and
    /// RIP still points at it.
    fn take_question(&mut self, kinds: &[QuestionKind]) -> Option<Question> {
        let question = self.devices.question.take()?;
        (question.rip == self.state.rip && kinds.contains(&question.kind)).then_some(question)
    }

    /// Finishes the hypercall that ended the last run: `store` stores its results in the registers. Its second argument
    /// tells whether they have 64 bits.
    ///
    /// RIP moves to the next instruction. If RIP was changed meanwhile, this does nothing.
    pub fn complete_hypercall(&mut self, store: impl FnOnce(&mut State, bool)) {
        let Some(question) = self.take_question(&[QuestionKind::Hypercall]) else {
            return;
        };
        let long_mode = self.is_64();
        store(&mut self.state, long_mode);
        self.question_done(&question);
    }

    /// Call after the caller's result was stored: finishes the instruction.
    fn question_done(&mut self, question: &Question) {
        self.state.rip = question.next;
        self.state.rflags &= !flags::RF;
        self.end_shadow();
        self.trap_completed(question.traps);
    }

    /// Finishes the MSR access that ended the last run. `answer` is the value that RDMSR reads; WRMSR ignores it.
    /// `None` raises #GP(0).
    ///
    /// RIP moves to the next instruction unless it was changed meanwhile.
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

    /// Returns the data of the output that ended the last run: all units of [`Exit::Io`].
    pub fn output(&self) -> &[u8] {
        let output = &self.fixed.output;
        &output.bytes[..output.len]
    }

    /// Finishes the port access that ended the last run: `data` is what IN read.
    ///
    /// RIP moves to the next instruction unless it was changed meanwhile, as in KVM.
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

    /// Whether there is data of a string input to be stored.
    pub(crate) fn has_input(&self) -> bool {
        self.devices.port.is_some_and(|port| port.answered)
    }

    /// Call when the port access, or this part of a repeated one, is done.
    fn port_done(&mut self, port: &Port) {
        self.end_shadow();
        if self.state.rip == port.next {
            self.state.rflags &= !flags::RF;
        }
        self.trap_completed(port.traps);
    }

    /// Stores the data that a string input read. The address was translated for writing before the exit. If the count
    /// became smaller meanwhile, the rest of the data is dropped; if it became larger, the instruction is executed
    /// again for the missing units.
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

    /// Counts `done` units of a string access. Moves RIP after the last one.
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
}
