//! Instruction-set extensions that the software CPU has beyond the x86-64 baseline, as CPUID bits.
//!
//! The CPU executes SIMD instructions by the host's own instructions, so guests have only the extensions of the host.

use slat_x86::simd::features;

fn bits(features: &[(bool, u32)]) -> u32 {
    features
        .iter()
        .filter(|(there, _)| *there)
        .fold(0, |bits, (_, bit)| bits | 1 << bit)
}

/// Returns leaf 1 ECX: SSE3 to SSE4.2, PCLMULQDQ, AES, AVX, FMA, F16C as on the host; CMPXCHG16B PCID MOVBE POPCNT
/// XSAVE RDRAND.
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

/// Returns leaf 7 EBX: FSGSBASE TSC_ADJUST BMI1 SMEP BMI2 ERMS INVPCID RDSEED ADX SMAP CLFLUSHOPT CLWB, AVX2 and SHA as
/// on the host.
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

/// Returns leaf 7 ECX: UMIP RDPID CLDEMOTE, PKU if `protection_keys`; VAES and VPCLMULQDQ as on the host.
pub fn leaf7_ecx(protection_keys: bool) -> u32 {
    let own = bits(&[(true, 2), (protection_keys, 3), (true, 22), (true, 25)]);
    own | features().leaf7_ecx
}

/// Returns leaf 7 EDX: FSRM MD_CLEAR SERIALIZE SPEC_CTRL STIBP FLUSH_L1D ARCH_CAPABILITIES SSBD.
pub fn leaf7_edx() -> u32 {
    bits(&[
        (true, 4),
        (true, 10),
        (true, 14),
        (true, 26),
        (true, 27),
        (true, 28),
        (true, 29),
        (true, 31),
    ])
}

/// Returns leaf 7.1 EAX: FZRM FSRS.
pub fn leaf7_1_eax() -> u32 {
    bits(&[(true, 10), (true, 11)])
}

/// Returns leaf 0xd.1 EAX: XSAVEOPT XSAVEC, XGETBV of XINUSE, XSAVES.
pub fn leaf_d1_eax() -> u32 {
    bits(&[(true, 0), (true, 1), (true, 2), (true, 3)])
}

/// Returns leaf 0x8000_0008 EBX. Its bits are these:
///
/// - WBNOINVD;
/// - IBPB, IBRS, STIBP and SSBD, and the bits that say that IBRS protects its own mode and that IBPB flushes return
///   predictions; guests need none of them;
/// - no speculative store bypass and no branch type confusion, because the software CPU does not speculate;
/// - if `amd`: CLZERO, XSAVEERPTR (the x87 pointers are always saved) and VIRT_SSBD.
pub fn ext8_ebx(amd: bool) -> u32 {
    bits(&[
        (amd, 0),
        (amd, 2),
        (true, 9),
        (true, 12),
        (true, 14),
        (true, 15),
        (true, 19),
        (true, 24),
        (amd, 25),
        (true, 26),
        (true, 29),
        (true, 30),
    ])
}

/// Returns leaf 0x8000_0021 EAX: LFENCE serializes; IBRS is automatic; the CPU has no speculative return stack overflow
/// (SRSO_NO and SRSO_USER_KERNEL_NO).
pub fn ext21_eax() -> u32 {
    bits(&[(true, 2), (true, 8), (true, 29), (true, 30)])
}

/// Returns leaf 0x8000_0021 ECX: the CPU has no transient scheduler attacks (TSA_SQ_NO, TSA_L1_NO and TSA_FILL_NO).
pub fn ext21_ecx() -> u32 {
    bits(&[(true, 1), (true, 2), (true, 7)])
}

/// AMD's bits of leaf 0x8000_0001 EDX: the MMX instructions that are part of SSE, and FFXSR.
pub const AMD_EXT1_EDX: u32 = 1 << 22 | 1 << 25;

/// The value of IA32_ARCH_CAPABILITIES (SDM volume 4). IBRS_ALL says that IBRS, once it is set, protects all modes. The
/// other bits name vulnerabilities that the CPU does not have, because it does not speculate: RDCL SKIP_L1DFL_VMENTRY
/// SSB MDS PSCHANGE_MC TAA SBDR_SSDP FBSDP PSDP BHI PBRSB GDS RFDS ITS.
pub const ARCH_CAPABILITIES: u64 = 1
    | 1 << 1
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
    | 1 << 27
    | 1 << 62;

/// Returns leaf 0x8000_0001 ECX: LAHF LZCNT PREFETCHW. If `amd`, also CMP_LEGACY (for clients that report several
/// cores), LOCK MOV CR0, SSE4A, MISALIGNSSE and OSVW.
pub fn ext1_ecx(amd: bool) -> u32 {
    bits(&[
        (true, 0),
        (amd, 1),
        (amd, 4),
        (true, 5),
        (amd, 6),
        (amd, 7),
        (true, 8),
        (amd, 9),
    ])
}

#[cfg(test)]
mod tests {
    use crate::arch::x86_64::cpuid::{is_amd, lookup, supported};

    /// Checks that the CPU has the features of VMMs' CPU models, for models of the offered vendor on any host. A
    /// feature is a leaf, a subleaf, a register and bits.
    #[test]
    fn the_cpu_has_what_models_of_its_vendor_have() {
        let table = supported().unwrap();
        let mut expected = vec![
            // The following bits, one group per line, are VME; MD_CLEAR SPEC_CTRL STIBP FLUSH_L1D ARCH_CAPABILITIES
            // SSBD; UMIP; XSAVEOPT XSAVEC XGETBV1 XSAVES.
            (1, 0, 3, 1 << 1),
            (7, 0, 3, 1 << 10 | 0b10_1111 << 26),
            (7, 0, 2, 1 << 2),
            (0xd, 1, 0, 15),
            // The following bits are IBPB IBRS STIBP SSBD.
            (0x8000_0008, 0, 1, 1 << 12 | 1 << 14 | 1 << 15 | 1 << 24),
        ];
        if is_amd() {
            // The following bits, one group per line, are MMXEXT FXSR_OPT; CR8_LEGACY SSE4A MISALIGNSSE OSVW; CLZERO
            // XSAVEERPTR; AUTOIBRS.
            expected.extend([
                (0x8000_0001, 0, 3, 1 << 22 | 1 << 25),
                (0x8000_0001, 0, 2, 1 << 4 | 1 << 6 | 1 << 7 | 1 << 9),
                (0x8000_0008, 0, 1, 1 | 1 << 2),
                (0x8000_0021, 0, 0, 1 << 8),
            ]);
        }
        for (leaf, subleaf, register, bits) in expected {
            let told = lookup(&table, leaf, subleaf)[register];
            assert_eq!(told & bits, bits, "leaf {leaf:#x}, register {register}");
        }
        let vaes = u32::from(is_x86_feature_detected!("vaes")) << 9;
        assert_eq!(lookup(&table, 7, 0)[2] & 1 << 9, vaes);
    }
}
