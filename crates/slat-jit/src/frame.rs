//! The data that compiled code finds by the host's pinned register, and the values that compiled code returns
//! ([`entry`](crate::entry)).

/// The least return value of compiled code that is an address of code. Smaller values are numbers.
pub const LEAST_CODE: u64 = 16;

/// The value that [`enter`](crate::enter) returns if a guarded access of compiled code has failed, at
/// [`Frame::failed`].
pub const FAILED: u64 = LEAST_CODE - 1;

/// The structure to which the host's pinned register points. The client's own fields may follow it in memory.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Frame {
    /// The stack pointer at the beginning of [`enter`](crate::enter).
    pub(crate) stack: u64,
    /// The address of the access instruction that has failed, if [`enter`](crate::enter) returns [`FAILED`].
    pub failed: u64,
}
