//! What a run of compiled code has done.

/// What has to be done after a run of compiled code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "jit"),
    expect(dead_code, reason = "without a compiler, no compiled code runs")
)]
pub(crate) enum Then {
    /// Whatever is at the program counter: there may be compiled code.
    #[default]
    Continue,
    /// The interpreter has to execute the next instruction.
    Interpret,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ran {
    /// The number of executed instructions.
    pub(crate) instructions: u64,
    pub(crate) then: Then,
}
