//! The data that compiled code reaches by its pinned register, and the values that it returns
//! ([`entry`](crate::entry)).

/// The least number that is an address of code.
pub const LEAST_CODE: u64 = 16;

/// The value that [`enter`](crate::enter) returns if a guarded access of compiled code has failed, at
/// [`Frame::failed`].
pub const FAILED: u64 = LEAST_CODE - 1;

/// The structure to which the pinned register points. The client's own fields may follow it.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Frame {
    /// The stack pointer of [`enter`](crate::enter).
    pub(crate) stack: u64,
    /// The address of the access instruction that has failed.
    pub failed: u64,
}
