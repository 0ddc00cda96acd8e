//! Instruction-set extensions that the software CPU has beyond the x86-64 baseline, as CPUID bits.
//!
//! The CPU executes SIMD instructions by the host's own, so guests have only those that the host has.

use slat_x86::simd::features;

fn bits(features: &[(bool, u32)]) -> u32 {
    features
        .iter()
        .filter(|(there, _)| *there)
        .fold(0, |bits, (_, bit)| bits | 1 << bit)
}

/// Leaf 1 ECX: SSE3 to SSE4.2, PCLMULQDQ, AES, AVX, FMA, F16C as on the host; CMPXCHG16B PCID MOVBE POPCNT XSAVE RDRAND.
pub fn leaf1_ecx() -> u32 {
    let integer = bits(&[
        (true, 13),
        (true, 17),
        (true, 22),
        (true, 23),
        (true, 26),
        (true, 30),
    ]);
    integer | features().leaf1_ecx
}

/// Leaf 7 EBX: FSGSBASE TSC_ADJUST BMI1 SMEP BMI2 ERMS INVPCID RDSEED ADX SMAP CLFLUSHOPT CLWB, AVX2 and SHA as on the host.
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

/// Leaf 7 ECX: UMIP RDPID CLDEMOTE, and PKU if `protection_keys`.
pub fn leaf7_ecx(protection_keys: bool) -> u32 {
    bits(&[(true, 2), (protection_keys, 3), (true, 22), (true, 25)])
}

/// Leaf 7 EDX: FSRM SERIALIZE ARCH_CAPABILITIES.
pub fn leaf7_edx() -> u32 {
    bits(&[(true, 4), (true, 14), (true, 29)])
}

/// Leaf 7.1 EAX: FZRM FSRS.
pub fn leaf7_1_eax() -> u32 {
    bits(&[(true, 10), (true, 11)])
}

/// Leaf 0xd.1 EAX: XSAVEOPT XSAVEC, XGETBV of XINUSE.
pub fn leaf_d1_eax() -> u32 {
    bits(&[(true, 0), (true, 1), (true, 2)])
}

/// Leaf 0x8000_0008 EBX: WBNOINVD, and no speculative store bypass and branch type confusion, because the CPU does not speculate.
pub fn ext8_ebx() -> u32 {
    bits(&[(true, 9), (true, 26), (true, 29)])
}

/// Leaf 0x8000_0021 EAX: LFENCE serializes; no speculative return stack overflow.
pub fn ext21_eax() -> u32 {
    bits(&[(true, 2), (true, 29)])
}

/// IA32_ARCH_CAPABILITIES (SDM volume 4): the vulnerabilities that the CPU does not have, because it does not speculate:
/// RDCL SKIP_L1DFL_VMENTRY SSB MDS PSCHANGE_MC TAA SBDR_SSDP FBSDP PSDP BHI PBRSB GDS RFDS.
pub const ARCH_CAPABILITIES: u64 = 1
    | 1 << 3
    | 1 << 4
    | 1 << 5
    | 1 << 6
    | 1 << 8
    | 1 << 13
    | 1 << 14
    | 1 << 15
    | 1 << 20
    | 1 << 24
    | 1 << 26
    | 1 << 27;

/// Leaf 0x8000_0001 ECX: LAHF LZCNT PREFETCHW.
pub fn ext1_ecx() -> u32 {
    bits(&[(true, 0), (true, 5), (true, 8)])
}
