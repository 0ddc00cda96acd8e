//! Describes to the compiler the instructions whose operands and results are vectors. Compiled code calls the stubs of
//! these instructions itself, without the interpreter.

use super::forms::Kind;
use super::{table, vex};
use iced_x86::{EncodingKind, Instruction, OpKind};

/// How to call the stub of an instruction whose operands and result are vectors.
pub(crate) struct Plain {
    /// The address of the stub for 128 bits.
    pub(crate) stub: usize,
    /// Whether the stub takes the immediate, which is in the operation's `aux`.
    pub(crate) has_immediate: bool,
    /// The number of the first operand that the stub reads; `last` is the number of the last operand. Operand `k` is
    /// passed in register `k`.
    pub(crate) first: usize,
    pub(crate) last: usize,
    /// Whether the register after the last operand must hold the guest's XMM0.
    pub(crate) reads_xmm0: bool,
    /// Whether the register after the last operand must hold the immediate.
    pub(crate) shifts_by_immediate: bool,
    /// Whether the stub computes floating point, which uses MXCSR.
    pub(crate) is_float: bool,
    /// Whether a memory operand must be aligned.
    pub(crate) is_aligned: bool,
}

/// Returns how to call the stub of `insn`, which the host must have. If `wide`, the compiler will call the stub once
/// for each 128-bit half. `None`: an operand or the result is not a vector, or a half of the result depends on both
/// halves of an operand.
pub(crate) fn plain(insn: &Instruction, wide: bool) -> Option<Plain> {
    match insn.encoding() == EncodingKind::VEX {
        true => vex::plain(insn, wide),
        false => legacy(insn),
    }
}

fn legacy(insn: &Instruction) -> Option<Plain> {
    let mnemonic = insn.mnemonic();
    let by_immediate = insn.op1_kind() == OpKind::Immediate8;
    let (kind, stub) = match by_immediate {
        true => (Kind::Int, table::shift(mnemonic)?),
        false => table::xmm(mnemonic)?,
    };
    if !matches!(kind, Kind::Int | Kind::Float(_) | Kind::ImplicitXmm0) {
        return None;
    }
    Some(Plain {
        stub: stub as usize,
        has_immediate: insn.op_kind(insn.op_count() - 1) == OpKind::Immediate8,
        first: 0,
        last: if by_immediate { 0 } else { 1 },
        reads_xmm0: kind == Kind::ImplicitXmm0,
        shifts_by_immediate: false,
        is_float: matches!(kind, Kind::Float(_)),
        is_aligned: true,
    })
}
