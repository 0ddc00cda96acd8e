//! SSE to SSE4.2, SSE4a, AES, PCLMULQDQ, SHA and MMX; AVX, AVX2, FMA, F16C, VAES and VPCLMULQDQ in `vex`.
//!
//! The host's CPU executes these instructions itself. `pairs` and `table` have a *stub* for each mnemonic: a function
//! with the same instruction of the host, which `host` calls. The handlers here only fetch operands and store results.
//! Plain moves need no stub.

mod forms;
mod gpr;
mod host;
mod lanes;
#[cfg(feature = "jit")]
mod meaning;
mod mmx;
mod moves;
mod operate;
mod pairs;
#[cfg(feature = "jit")]
mod plain;
mod sse4a;
mod table;
mod vex;

pub use crate::features::has_avx;
pub(crate) use host::HostFlags;
#[cfg(feature = "jit")]
pub(crate) use host::{FLAGS as MXCSR_FLAGS, exchange_mxcsr, runs_on_host};
#[cfg(feature = "jit")]
pub(crate) use {
    meaning::{Each, Elements},
    pairs::meaning,
    plain::{Plain, plain},
};

use crate::op::{Handler, Lower, Op, Row};
use iced_x86::{Code, CpuidFeature, EncodingKind, Instruction};
use slat_process::once::Prepared;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};

/// The instruction sets that this CPU can offer on this host, as bits of CPUID leaves. The VMM may set these bits in
/// the guest's CPUID.
///
/// FPU, MMX, FXSR, SSE and SSE2 are part of every x86-64 host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Bits of CPUID.1:ECX: SSE3, PCLMULQDQ, SSSE3, FMA, SSE4.1, SSE4.2, AES, AVX, F16C.
    pub leaf1_ecx: u32,
    /// Bits of CPUID.1:EDX: FPU, MMX, SSE, SSE2.
    pub leaf1_edx: u32,
    /// Bits of CPUID.7.0:EBX: AVX2, SHA.
    pub leaf7_ebx: u32,
    /// Bits of CPUID.7.0:ECX: VAES, VPCLMULQDQ.
    pub leaf7_ecx: u32,
}

/// Returns the [`Features`] of this host.
pub fn features() -> Features {
    let bit = |feature, n: u32| u32::from(has(feature)) << n;
    Features {
        leaf1_ecx: bit(CpuidFeature::SSE3, 0)
            | bit(CpuidFeature::PCLMULQDQ, 1)
            | bit(CpuidFeature::SSSE3, 9)
            | bit(CpuidFeature::FMA, 12)
            | bit(CpuidFeature::SSE4_1, 19)
            | bit(CpuidFeature::SSE4_2, 20)
            | bit(CpuidFeature::AES, 25)
            | bit(CpuidFeature::AVX, 28)
            | bit(CpuidFeature::F16C, 29),
        leaf1_edx: 1 | 1 << 23 | 1 << 25 | 1 << 26,
        leaf7_ebx: bit(CpuidFeature::AVX2, 5) | bit(CpuidFeature::SHA, 29),
        leaf7_ecx: bit(CpuidFeature::VAES, 9) | bit(CpuidFeature::VPCLMULQDQ, 10),
    }
}

/// Whether this CPU offers an instruction set: it implements the instruction set, and the host has it if that is
/// necessary.
fn has(feature: CpuidFeature) -> bool {
    match feature {
        CpuidFeature::MMX | CpuidFeature::SSE | CpuidFeature::SSE2 | CpuidFeature::SSE4A => true,
        CpuidFeature::SSE3 => is_x86_feature_detected!("sse3"),
        CpuidFeature::SSSE3 => is_x86_feature_detected!("ssse3"),
        CpuidFeature::SSE4_1 => is_x86_feature_detected!("sse4.1"),
        CpuidFeature::SSE4_2 => is_x86_feature_detected!("sse4.2"),
        CpuidFeature::PCLMULQDQ => is_x86_feature_detected!("pclmulqdq"),
        CpuidFeature::AES => is_x86_feature_detected!("aes"),
        CpuidFeature::AVX => has_avx(),
        CpuidFeature::AVX2 => has_avx() && is_x86_feature_detected!("avx2"),
        CpuidFeature::FMA => has_avx() && is_x86_feature_detected!("fma"),
        CpuidFeature::F16C => has_avx() && is_x86_feature_detected!("f16c"),
        CpuidFeature::SHA => is_x86_feature_detected!("sha"),
        CpuidFeature::VAES => has_avx() && is_x86_feature_detected!("vaes"),
        CpuidFeature::VPCLMULQDQ => has_avx() && is_x86_feature_detected!("vpclmulqdq"),
        _ => false,
    }
}

/// The size of the table of iced's instruction codes: their number, rounded up.
const CODES: usize = 8192;

/// The instructions that this CPU offers, one bit for each of iced's instruction codes. An instruction is offered if
/// all instruction sets are offered to which it belongs.
static OFFERED: [AtomicU64; CODES / 64] = [const { AtomicU64::new(0) }; CODES / 64];

/// Finds out which instructions this CPU [offers](is_offered), once per process. Call before any instruction is
/// lowered.
pub(crate) fn detect() {
    static DETECTED: Prepared = Prepared::new();
    let Ok(()) = DETECTED.once::<Infallible>(|| {
        for code in Code::values() {
            let is_known = matches!(code.encoding(), EncodingKind::Legacy | EncodingKind::VEX);
            if is_known && code.cpuid_features().iter().copied().all(has) {
                let number = code as usize;
                OFFERED[number / 64].fetch_or(1 << (number % 64), Ordering::Relaxed);
            }
        }
        Ok(())
    });
}

/// Whether this CPU offers all instruction sets to which a SIMD instruction belongs.
#[inline(always)]
pub(crate) fn is_offered(insn: &Instruction) -> bool {
    let number = insn.code() as usize;
    OFFERED[number / 64].load(Ordering::Relaxed) >> (number % 64) & 1 != 0
}

/// The rows of instructions without a VEX prefix.
pub(crate) const ROWS: [&[Row]; 5] = [
    moves::ROWS,
    gpr::ROWS,
    operate::ROWS,
    sse4a::ROWS,
    mmx::ROWS,
];
/// The rows of instructions with a VEX prefix.
pub(crate) const VEX_ROWS: [&[Row]; 5] = vex::ROWS;

/// Chooses the handler of a SIMD instruction: calls its row's function `lower`, if the instruction [is
/// offered](is_offered). `None`: this CPU does not have the instruction.
#[inline(always)]
pub(crate) fn choose(lower: Lower, insn: &Instruction, op: &mut Op) -> Option<Handler> {
    match insn.encoding() {
        EncodingKind::VEX => vex::set_size(insn, op),
        _ if mmx::is_mmx(insn) => return mmx::lower(insn, op),
        _ => {}
    }
    lower(insn, op)
}
