//! The result of a run of compiled code.

/// The result of a run of compiled code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ran {
    /// The number of guest instructions that the compiled code has executed.
    pub(crate) instructions: u64,
    /// Whether the interpreter has to execute the next instruction. If not, compiled code may continue.
    pub(crate) needs_interpreter: bool,
}
