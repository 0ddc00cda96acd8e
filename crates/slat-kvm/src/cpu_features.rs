//! Instruction-set extensions that the software CPU has beyond the x86-64 baseline, as CPUID bits.
//!
//! The CPU executes SIMD instructions by the host's own, so those are there only where the host has them.

use std::arch::is_x86_feature_detected;

fn bits(features: &[(bool, u32)]) -> u32 {
    features
        .iter()
        .filter(|(there, _)| *there)
        .fold(0, |bits, (_, bit)| bits | 1 << bit)
}

/// Leaf 1 ECX: SSE3 to SSE4.2, PCLMULQDQ, AES as on the host; CMPXCHG16B PCID MOVBE POPCNT RDRAND.
///
/// XSAVE is implemented but not claimed: programs take it for a sign of AVX.
pub fn leaf1_ecx() -> u32 {
    bits(&[
        (is_x86_feature_detected!("sse3"), 0),
        (is_x86_feature_detected!("pclmulqdq"), 1),
        (is_x86_feature_detected!("ssse3"), 9),
        (true, 13),
        (true, 17),
        (is_x86_feature_detected!("sse4.1"), 19),
        (is_x86_feature_detected!("sse4.2"), 20),
        (true, 22),
        (true, 23),
        (is_x86_feature_detected!("aes"), 25),
        (true, 30),
    ])
}

/// Leaf 7 EBX: FSGSBASE TSC_ADJUST BMI1 SMEP BMI2 ERMS INVPCID RDSEED ADX SMAP CLFLUSHOPT CLWB, SHA as on the host.
pub fn leaf7_ebx() -> u32 {
    bits(&[
        (true, 0),
        (true, 1),
        (true, 3),
        (true, 7),
        (true, 8),
        (true, 9),
        (true, 10),
        (true, 18),
        (true, 19),
        (true, 20),
        (true, 23),
        (true, 24),
        (is_x86_feature_detected!("sha"), 29),
    ])
}

/// Leaf 7 ECX: UMIP RDPID.
pub fn leaf7_ecx() -> u32 {
    bits(&[(true, 2), (true, 22)])
}

/// Leaf 0x8000_0001 ECX: LAHF LZCNT PREFETCHW.
pub fn ext1_ecx() -> u32 {
    bits(&[(true, 0), (true, 5), (true, 8)])
}
