//! Instruction-set extensions that the software CPU has beyond the x86-64 baseline, as CPUID bits.
//!
//! The CPU executes SIMD instructions by the host's own, so those are there only where the host has them.

use slat_x86::simd::features;

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
    let integer = bits(&[(true, 13), (true, 17), (true, 22), (true, 23), (true, 30)]);
    integer | features().leaf1_ecx
}

/// Leaf 7 EBX: FSGSBASE TSC_ADJUST BMI1 SMEP BMI2 ERMS INVPCID RDSEED ADX SMAP CLFLUSHOPT CLWB, SHA as on the host.
pub fn leaf7_ebx() -> u32 {
    let integer = bits(&[
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
    ]);
    integer | features().leaf7_ebx
}

/// Leaf 7 ECX: UMIP RDPID.
pub fn leaf7_ecx() -> u32 {
    bits(&[(true, 2), (true, 22)])
}

/// Leaf 0x8000_0001 ECX: LAHF LZCNT PREFETCHW.
pub fn ext1_ecx() -> u32 {
    bits(&[(true, 0), (true, 5), (true, 8)])
}
