//! The ways in which an instruction ends.

/// How an instruction ended, if the next instruction does not simply follow.
///
/// A handler that returns [`Exception`](Break::Exception), [`Retry`](Break::Retry) or [`Exit`](Break::Exit) has changed
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Break {
    /// The instruction is done, and has set `state.rip`.
    Jump,
    /// The instruction is done. The block ends before the next instruction, because something that blocks depend on has
    /// changed.
    End,
    /// [`Cpu::raise`](crate::Cpu) has recorded a fault. The instruction has changed nothing.
    Exception,
    /// [`Cpu::raise`](crate::Cpu) has recorded a fault after a task switch. The fault belongs to the new task, whose
    /// registers are in `state`.
    TaskFault,
    /// The instruction has changed nothing, and starts again at the block boundary.
    Retry,
    /// A nested guest leaves before the instruction, which has changed nothing. A #VMEXIT is [due](crate::svm).
    VmExit,
    /// The run ends with the recorded exit; the instruction has changed nothing.
    Exit,
    /// The run ends with the recorded exit after this instruction.
    ExitAfter,
}

/// A handler's result: `Ok` continues with the next operation of the block.
pub type Flow = Result<(), Break>;
