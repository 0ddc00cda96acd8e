//! How an instruction ends.

/// How an instruction ends, if execution does not simply continue with the next instruction.
///
/// A handler that returns [`Exception`](Break::Exception), [`Retry`](Break::Retry) or [`Exit`](Break::Exit) has changed
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Break {
    /// The instruction is done, and has set `state.rip`.
    Jump,
    /// The instruction is done. The block ends after the instruction, because state on which blocks depend has changed.
    End,
    /// [`Cpu::raise`](crate::Cpu) has recorded a fault. The instruction has had no effect.
    Exception,
    /// [`Cpu::raise`](crate::Cpu) has recorded a fault after a task switch. The fault belongs to the new task, whose
    /// registers are already in `state`.
    TaskFault,
    /// The instruction has had no effect, and will be executed again after the work of a block boundary.
    Retry,
    /// A #VMEXIT of the nested guest is [due](crate::svm), before this instruction, which has had no effect.
    VmExit,
    /// The run ends with the recorded exit. The instruction has had no effect.
    Exit,
    /// The run ends with the recorded exit after this instruction.
    ExitAfter,
}

/// The result of a handler. `Ok`: execution continues with the block's next operation.
pub type Flow = Result<(), Break>;
