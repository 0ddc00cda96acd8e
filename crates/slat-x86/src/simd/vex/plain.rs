//! The part of [`simd::plain`](mod@crate::simd::plain) for VEX-encoded instructions.

use super::operate::{Found, find};
use super::table;
use crate::simd::Plain;
use crate::simd::forms::Kind;
use iced_x86::{CpuidFeature, Instruction, Mnemonic as M, OpKind};

/// Returns the plain form of a VEX-encoded instruction, as [`simd::plain`](mod@crate::simd::plain) does for the legacy
/// encoding.
pub(in crate::simd) fn plain(insn: &Instruction, wide: bool) -> Option<Plain> {
    use M::*;
    let mnemonic = insn.mnemonic();
    let immediate = insn.op_kind(insn.op_count().checked_sub(1)?) == OpKind::Immediate8;
    let Found {
        kind,
        stub,
        by_constant,
        sources,
    } = find(insn, false)?;
    let is_float = match kind {
        Kind::Int => false,
        Kind::Float(_) => true,
        _ => return None,
    };
    // Whether the upper half of the result is computed like the lower half: from the upper halves of the sources, with
    // the same bits of the immediate.
    let is_uniform = table::is_by_halves(mnemonic)
        && !(immediate
            && matches!(
                mnemonic,
                Vpermilpd | Vshufpd | Vblendps | Vblendpd | Vpblendd | Vmpsadbw
            ));
    if wide && !is_uniform {
        return None;
    }
    let accumulates = insn.code().cpuid_features().contains(&CpuidFeature::FMA);
    Some(Plain {
        stub: stub as usize,
        has_immediate: immediate && !by_constant,
        first: usize::from(!accumulates),
        last: sources as usize,
        reads_xmm0: false,
        shifts_by_immediate: by_constant,
        is_float,
        is_aligned: false,
    })
}
