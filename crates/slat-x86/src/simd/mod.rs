//! SSE to SSE4.2, SSE4a, AES, PCLMULQDQ, SHA and MMX; AVX, AVX2, FMA, F16C, VAES and VPCLMULQDQ in `vex`.
//!
//! The host CPU does the work: `pairs` and `table` have for each mnemonic a stub with the same host instruction, and
//! `host` calls it. The handlers here only fetch operands and store results. Plain moves need no stub.

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

use crate::Cpu;
use crate::op::{Flow, Handler, Lower, Op, Row};
use iced_x86::{CpuidFeature, EncodingKind, Instruction};
use std::sync::atomic::{AtomicU32, Ordering};

/// Instruction sets that the host executes, and that the CPU may therefore report in CPUID, as the bits of leaf 1.
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
    let bit = |there: bool, n: u32| u32::from(there) << n;
    Features {
        leaf1_ecx: bit(is_x86_feature_detected!("sse3"), 0)
            | bit(is_x86_feature_detected!("pclmulqdq"), 1)
            | bit(is_x86_feature_detected!("ssse3"), 9)
            | bit(has_avx() && is_x86_feature_detected!("fma"), 12)
            | bit(is_x86_feature_detected!("sse4.1"), 19)
            | bit(is_x86_feature_detected!("sse4.2"), 20)
            | bit(is_x86_feature_detected!("aes"), 25)
            | bit(has_avx(), 28)
            | bit(has_avx() && is_x86_feature_detected!("f16c"), 29),
        leaf1_edx: 1 | 1 << 23 | 1 << 25 | 1 << 26,
        leaf7_ebx: bit(has_avx() && is_x86_feature_detected!("avx2"), 5)
            | bit(is_x86_feature_detected!("sha"), 29),
        leaf7_ecx: bit(has_avx() && is_x86_feature_detected!("vaes"), 9)
            | bit(has_avx() && is_x86_feature_detected!("vpclmulqdq"), 10),
    }
}

/// The instruction sets that this CPU implements.
const SETS: [CpuidFeature; 17] = [
    CpuidFeature::MMX,
    CpuidFeature::SSE,
    CpuidFeature::SSE2,
    CpuidFeature::SSE3,
    CpuidFeature::SSSE3,
    CpuidFeature::SSE4_1,
    CpuidFeature::SSE4_2,
    CpuidFeature::SSE4A,
    CpuidFeature::PCLMULQDQ,
    CpuidFeature::AES,
    CpuidFeature::AVX,
    CpuidFeature::AVX2,
    CpuidFeature::FMA,
    CpuidFeature::F16C,
    CpuidFeature::SHA,
    CpuidFeature::VAES,
    CpuidFeature::VPCLMULQDQ,
];

/// For each feature the bit of its set, by the position in [`SETS`]; 0 for others.
static BITS: [u32; 256] = {
    let mut bits = [0; 256];
    let mut n = 0;
    while n < SETS.len() {
        bits[SETS[n] as usize] = 1 << n;
        n += 1;
    }
    bits
};

/// Returns the bits of the instruction sets that the host has, or that need nothing of the host. They are detected once
/// per process.
#[inline(always)]
fn offered() -> u32 {
    static OFFERED: AtomicU32 = AtomicU32::new(0);
    #[cold]
    fn detect() -> u32 {
        let has = |feature: &CpuidFeature| match feature {
            CpuidFeature::SSE3 => is_x86_feature_detected!("sse3"),
            CpuidFeature::SSSE3 => is_x86_feature_detected!("ssse3"),
            CpuidFeature::SSE4_1 => is_x86_feature_detected!("sse4.1"),
            CpuidFeature::SSE4_2 => is_x86_feature_detected!("sse4.2"),
            CpuidFeature::PCLMULQDQ => is_x86_feature_detected!("pclmulqdq"),
            CpuidFeature::AES => is_x86_feature_detected!("aes"),
            CpuidFeature::AVX => has_avx(),
            CpuidFeature::AVX2 => is_x86_feature_detected!("avx2"),
            CpuidFeature::FMA => is_x86_feature_detected!("fma"),
            CpuidFeature::F16C => is_x86_feature_detected!("f16c"),
            CpuidFeature::SHA => is_x86_feature_detected!("sha"),
            CpuidFeature::VAES => has_avx() && is_x86_feature_detected!("vaes"),
            CpuidFeature::VPCLMULQDQ => has_avx() && is_x86_feature_detected!("vpclmulqdq"),
            _ => true,
        };
        let found = SETS.iter().filter(|feature| has(feature));
        let found = found.fold(0, |all, feature| all | BITS[*feature as usize]);
        // Two threads may detect at once; they find the same.
        OFFERED.store(found, Ordering::Relaxed);
        found
    }
    match OFFERED.load(Ordering::Relaxed) {
        0 => detect(),
        found => found,
    }
}

/// Returns the bits of the instruction sets to which an instruction belongs. `None`: this CPU does not implement one of
/// them.
#[inline(always)]
fn sets_of(insn: &Instruction) -> Option<u32> {
    let features = insn.code().cpuid_features().iter();
    features
        .copied()
        .try_fold(0, |sets, feature| match BITS[usize::from(feature as u8)] {
            0 => None,
            bit => Some(sets | bit),
        })
}

/// Whether the host has the instruction, if this CPU implements its instruction set.
#[cfg(feature = "jit")]
pub(crate) fn is_offered(insn: &Instruction) -> bool {
    sets_of(insn).is_some_and(|sets| sets & !offered() == 0)
}

fn undefined(cpu: &mut Cpu, _: &Op) -> Flow {
    Err(cpu.ud())
}

/// The rows of instructions without VEX.
pub(crate) const ROWS: [&[Row]; 5] = [
    moves::ROWS,
    gpr::ROWS,
    operate::ROWS,
    sse4a::ROWS,
    mmx::ROWS,
];
/// The rows of instructions with VEX.
pub(crate) const VEX_ROWS: [&[Row]; 5] = vex::ROWS;

/// Chooses the handler of a SIMD instruction by its row. Returns `None` if this CPU does not have it.
#[inline(always)]
pub(crate) fn choose(lower: Lower, insn: &Instruction, op: &mut Op) -> Option<Handler> {
    let encoding = insn.encoding();
    if !matches!(encoding, EncodingKind::Legacy | EncodingKind::VEX) {
        return None;
    }
    if sets_of(insn)? & !offered() != 0 {
        return Some(undefined);
    }
    match encoding {
        EncodingKind::VEX => vex::set_size(insn, op),
        _ if mmx::is_mmx(insn) => return mmx::lower(insn, op),
        _ => {}
    }
    lower(insn, op)
}
