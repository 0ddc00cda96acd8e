//! State that the translation of a path keeps in values instead of in the CPU: flags, vector registers, segments, and
//! the last access.

use crate::sem;
use cranelift_codegen::ir::Value;

/// The operation that has set the arithmetic flags. Operands and result have the type of the operation's size. Truth
/// values are 0 or 1 in 8 bits.
pub(super) type Flags = sem::Flags<Value, Value, Carry>;

/// CF, for an instruction that does not change it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Carry {
    /// CF is in the CPU's record.
    Recorded,
    /// CF is this value: 0 or 1 in 8 bits.
    Is(Value),
}

/// A segment that was found to be plain: usable, and not expand-down.
#[derive(Clone, Copy)]
pub(super) struct PlainSegment {
    pub(super) base: Value,
    pub(super) limit: Value,
}

/// The values of the vector registers in a block: 16 lower halves, then 16 upper ones. All values are `I8X16`.
#[derive(Clone, Default)]
pub(super) struct Vectors {
    pub(super) known: [Option<Value>; 32],
    /// The halves that are not written back yet, one bit for each half.
    pub(super) changed: u32,
    /// The registers with floating-point results that no instruction has used yet, one bit for each register.
    pub(super) computed: u32,
}

/// The right that an access needs for its page. The right to store includes the right to load.
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

/// The last access. `None` after anything that may change the TLB. The access was at `distance` bytes from the linear
/// address `lin`, which is `distance` bytes from the host address `host`. Later accesses nearby have the same `lin` and
/// `host`. So they need not compute a host address, and both values keep their registers.
#[derive(Clone, Copy)]
pub(super) struct LastAccess {
    pub(super) lin: Value,
    pub(super) host: Value,
    pub(super) distance: i64,
    pub(super) bytes: i64,
    pub(super) kind: Kind,
}
