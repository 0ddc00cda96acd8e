//! State that the translation of a path keeps in values instead of in the CPU: flags, vector registers, segments, and
//! the last access.

use crate::sem;
use cranelift_codegen::ir::Value;

/// The operation that has set the arithmetic flags. Its operands and result have the operation's type; truth values are
/// 0 or 1 in 8 bits.
pub(super) type Flags = sem::Flags<Value, Value, Carry>;

/// The carry flag that an instruction leaves unchanged.
#[derive(Clone, Copy, Debug)]
pub(super) enum Carry {
    /// The carry flag of the CPU's record.
    Recorded,
    /// The carry is this value: 0 or 1 in 8 bits.
    Is(Value),
}

/// A segment that was found plain.
#[derive(Clone, Copy)]
pub(super) struct PlainSegment {
    pub(super) base: Value,
    pub(super) limit: Value,
}

/// The values of the vector registers in a block: 16 lower halves, then 16 upper ones. All values are `I8X16`.
#[derive(Clone, Default)]
pub(super) struct Vectors {
    pub(super) known: [Option<Value>; 32],
    /// The halves that were not written back: a bit for each half.
    pub(super) changed: u32,
    /// The registers that contain floating-point results which nothing has used yet: a bit for each register.
    pub(super) computed: u32,
}

/// The right to its page that an access needs. The right to store includes the right to load.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Load,
    Store,
}

/// The host memory of an access: `offset` bytes from a host address.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) host: Value,
    pub(super) offset: i32,
}

/// The last access, as long as nothing has happened that may change the TLB. The access was made `distance` bytes from
/// the linear address `lin`, and `distance` bytes from the host address `host`. Further accesses near it share its
/// `lin` and `host`. So no further access computes a host address, and both values keep their registers.
#[derive(Clone, Copy)]
pub(super) struct LastAccess {
    pub(super) lin: Value,
    pub(super) host: Value,
    pub(super) distance: i64,
    pub(super) bytes: i64,
    pub(super) kind: Kind,
}
