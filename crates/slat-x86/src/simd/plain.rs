//! The instructions from vectors to a vector, for the compiler: it passes the operands to the stub itself.

use super::forms::Kind;
use super::{table, vex};
use iced_x86::{EncodingKind, Instruction, OpKind};

/// How a stub executes an instruction from vectors to a vector.
pub(crate) struct Plain {
    /// The stub's address, for 128 bits.
    pub(crate) stub: usize,
    /// Whether it wants the immediate, which the operation has in `aux`.
    pub(crate) has_immediate: bool,
    /// Operand `k` is in register `k`, for these.
    pub(crate) first: usize,
    pub(crate) last: usize,
    /// Whether the register after them has the guest's XMM0.
    pub(crate) reads_xmm0: bool,
    /// Whether the register after them has the immediate.
    pub(crate) shifts_by_immediate: bool,
    /// Whether it computes under MXCSR.
    pub(crate) is_float: bool,
    /// Whether an operand in memory has to be aligned.
    pub(crate) is_aligned: bool,
}

/// Returns how a stub executes an instruction which the host has, one half of 128 bits at a time if it is `wide`;
/// `None` if it is no instruction from vectors to a vector, or its halves depend on each other.
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
