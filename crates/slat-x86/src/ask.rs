//! Instructions that end the run because the caller must execute a part of them: hypercalls, and MSR accesses that the
//! machine leaves to its caller. RIP stays at the instruction until the caller passes the result (module `results`).

use crate::Cpu;
use crate::devices::{Question, QuestionKind};
use crate::flow::Break;
use crate::machine::{Exit, MsrFault};
use crate::op::Op;

impl Cpu {
    /// Ends the run at the hypercall `op`, which the caller carries out.
    pub(crate) fn ask_hypercall(&mut self, op: &Op) -> Break {
        self.ask(op, QuestionKind::Hypercall, Exit::Hypercall)
    }

    /// Refuses RDMSR or, with a `value`, WRMSR: raises #GP(0), or ends the run if the machine wants its caller to
    /// handle the access. If `why` is [`MsrFault::Retry`], the instruction starts again instead.
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

    /// Ends the run with `exit`. Records `op`, so that `op` can be finished with the result that the caller passes
    /// later.
    fn ask(&mut self, op: &Op, kind: QuestionKind, exit: Exit) -> Break {
        self.devices.question = Some(Question {
            rip: self.rip_of(op),
            next: self.next_rip(op),
            kind,
            traps: self.traps_of_instruction(),
        });
        self.leave(exit)
    }
}
