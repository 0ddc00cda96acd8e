//! What compiled code reaches and returns ([`entry`](crate::entry)).

/// The least number that is an address of code.
pub const LEAST_CODE: u64 = 16;

/// What [`enter`](crate::enter) returns if a guarded access of compiled code has failed, at [`Frame::failed`].
pub const FAILED: u64 = LEAST_CODE - 1;

/// What the pinned register points to. The client's own fields may follow.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Frame {
    /// The stack pointer of [`enter`](crate::enter).
    pub(crate) stack: u64,
    /// The address of the access instruction that has failed.
    pub failed: u64,
}
