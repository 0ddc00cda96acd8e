//! The state that the translation of a path keeps in Cranelift values, not in the CPU: flags, vector registers,
//! segments, and the last access.

use crate::sem;
use cranelift_codegen::ir::Value;

/// The operation that has set the arithmetic flags. Operands and result have the operand size of this operation. Truth
/// values have 8 bits, and are 0 or 1.
pub(super) type Flags = sem::Flags<Value, Value, Carry>;

/// CF, in the flags of an instruction that does not change it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Carry {
    /// CF is the one that the CPU holds.
    InCpu,
    /// CF is this value: 8 bits that are 0 or 1.
    Is(Value),
}

/// A segment that was found to be plain: usable, and not expanding down.
#[derive(Clone, Copy)]
pub(super) struct PlainSegment {
    pub(super) base: Value,
    pub(super) limit: Value,
}

/// The values of vector registers: first 16 lower halves, then 16 upper halves. All values are `I8X16`.
#[derive(Clone, Default)]
pub(super) struct Vectors {
    pub(super) known: [Option<Value>; 32],
    /// The halves of vector registers that must be written back to the CPU: one bit for each half.
    pub(super) changed: u32,
    /// The registers with floating-point results that no instruction has used yet: one bit for each register.
    pub(super) computed: u32,
}

/// The right that an access needs. The right to store includes the right to load.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Load,
    Store,
}

/// The host memory of an access: `offset` bytes after a host address.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) host: Value,
    pub(super) offset: i32,
}

/// The last access. Forgotten after everything that may change the TLB. The access was `distance` bytes after linear
/// address `lin`, and `distance` bytes after host address `host`. Later accesses to the same page keep `lin` and
/// `host`, so no new host address is computed, and both values stay in their registers.
#[derive(Clone, Copy)]
pub(super) struct LastAccess {
    pub(super) lin: Value,
    pub(super) host: Value,
    pub(super) distance: i64,
    pub(super) bytes: i64,
    pub(super) kind: Kind,
}
