//! What the translation of a path keeps in values instead of in the CPU: flags, vector registers, segments, and the
//! last access.

use crate::sem;
use cranelift_codegen::ir::Value;

/// What set the arithmetic flags. Operands and results have the operation's type; truth values are 0 or 1 in 8 bits.
pub(super) type Flags = sem::Flags<Value, Value, Carry>;

/// The carry flag that an instruction leaves unchanged.
#[derive(Clone, Copy, Debug)]
pub(super) enum Carry {
    /// The carry flag of the CPU's record.
    Recorded,
    /// 0 or 1 in 8 bits.
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
    /// The halves that are not written back, as bits.
    pub(super) changed: u32,
    /// The registers that floating point has computed and nothing has used since, as bits.
    pub(super) computed: u32,
}

/// The right that an access needs to its page. A page that may be stored to may be loaded from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Load,
    Store,
}

/// Where an access is made: `offset` bytes from a host address.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) host: Value,
    pub(super) offset: i32,
}

/// The last access, if nothing that may have changed the TLB has happened since. The access was made `distance` bytes
/// from the address `lin`, and as many bytes from `host`. A row of accesses shares the first one's `lin` and `host`: so
/// no further access computes a host address, and both values keep their registers.
#[derive(Clone, Copy)]
pub(super) struct LastAccess {
    pub(super) lin: Value,
    pub(super) host: Value,
    pub(super) distance: i64,
    pub(super) bytes: i64,
    pub(super) kind: Kind,
}
