//! The features of the guest's CPU beyond the baseline: those that its CPUID reports and this CPU implements.
//!
//! Control bits of an absent feature are reserved, and its instructions raise #UD, wherever hardware under KVM does the
//! same.

use crate::state::{MXCSR_MASK, MXCSR_MM, control, xcr0};

/// The features of SVM that this CPU has, as bits of EDX of CPUID leaf 0x8000_000a.
pub mod svm {
    /// Nested paging (NP).
    pub const NESTED_PAGING: u32 = 1 << 0;
    /// A #VMEXIT stores the address of the next instruction (nRIP).
    pub const NEXT_RIP: u32 = 1 << 3;
    /// A nested guest's time-stamp counter can run at another rate.
    pub const TSC_RATIO: u32 = 1 << 4;
    /// TLB_CONTROL can flush the translations of one ASID.
    pub const FLUSH_BY_ASID: u32 = 1 << 6;
    /// A #VMEXIT reports details of the instruction, such as the general register of MOV CR, the address of INVLPG, or
    /// the vector of INT.
    pub const DECODE_ASSISTS: u32 = 1 << 7;
    /// PAUSE is intercepted only after a given number of PAUSE instructions.
    pub const PAUSE_FILTER: u32 = 1 << 10;
    /// The PAUSE filter counts only PAUSE instructions that are close together.
    pub const PAUSE_THRESHOLD: u32 = 1 << 12;
    /// In a nested guest with nested paging, VMLOAD and VMSAVE can run without a #VMEXIT. They then take guest-physical
    /// addresses of the nested guest.
    pub const VIRTUAL_VMLOAD: u32 = 1 << 15;
    /// A nested guest can have its own global interrupt flag (GIF).
    pub const VIRTUAL_GIF: u32 = 1 << 16;
    /// A nested guest can have its own NMI mask.
    pub const VIRTUAL_NMI: u32 = 1 << 25;
    /// All features of nested virtualization that this CPU implements.
    pub const ALL: u32 = NESTED_PAGING
        | NEXT_RIP
        | TSC_RATIO
        | FLUSH_BY_ASID
        | DECODE_ASSISTS
        | PAUSE_FILTER
        | PAUSE_THRESHOLD
        | VIRTUAL_VMLOAD
        | VIRTUAL_GIF
        | VIRTUAL_NMI;
}

/// The features of a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The bits of CR4 that can be set.
    pub(crate) cr4: u64,
    /// The bits of EFER that can be set.
    pub(crate) efer: u64,
    /// The bits of XCR0 that can be set.
    pub(crate) xcr0: u64,
    /// The offset of PKRU in an XSAVE area of standard format.
    pub(crate) pkru_offset: usize,
    pub(crate) invpcid: bool,
    pub(crate) rdtscp: bool,
    pub(crate) rdpid: bool,
    pub(crate) rdrand: bool,
    pub(crate) rdseed: bool,
    pub(crate) xsaveopt: bool,
    pub(crate) xsavec: bool,
    pub(crate) xsaves: bool,
    pub(crate) clzero: bool,
    pub(crate) sse4a: bool,
    /// Whether LOCK MOV CR0 means MOV CR8.
    pub(crate) cr8_legacy: bool,
    /// The bits of MXCSR that can be set.
    pub(crate) mxcsr: u32,
    /// Whether CPUID reports Intel as the vendor. [`Cpu::is_intel`](crate::Cpu::is_intel) tells whether the CPU behaves
    /// like an Intel CPU.
    pub(crate) is_intel: bool,
    /// The features of SVM: the bits of module [`svm`].
    pub(crate) svm: u32,
    /// The number of bits of a guest-physical address.
    pub(crate) physical_bits: u32,
}

/// The offset of PKRU if CPUID reports no offset. It is the offset on Intel's CPUs.
pub const PKRU_OFFSET: usize = 0xa80;
/// The greatest number of bits of a guest-physical address.
pub const PHYSICAL_BITS: u32 = 52;
/// The number of bits of a guest-physical address if CPUID reports no number (SDM volume 2, CPUID leaf 0x8000_0008).
const PHYSICAL_BITS_UNTOLD: u32 = 36;

/// The bits of CR4 that every CPU has: VME PVI TSD DE PSE PAE MCE PGE PCE OSFXSR OSXMMEXCPT.
const CR4_BASELINE: u64 = 0x7ff;
/// The bits of CR4 that depend on features, and where CPUID reports each feature: leaf, register, bit.
const CR4_FEATURES: [(u64, u32, usize, u32); 8] = [
    (control::CR4_UMIP, 7, ECX, 2),
    (control::CR4_LA57, 7, ECX, 16),
    (control::CR4_FSGSBASE, 7, EBX, 0),
    (control::CR4_PCIDE, 1, ECX, 17),
    (control::CR4_OSXSAVE, 1, ECX, 26),
    (control::CR4_SMEP, 7, EBX, 7),
    (control::CR4_SMAP, 7, EBX, 20),
    (control::CR4_PKE, 7, ECX, 3),
];
/// The bit of EFER that every CPU has: SCE.
const EFER_BASELINE: u64 = control::EFER_SCE;
/// The bits of EFER that depend on features, and where CPUID reports each feature: leaf, register, bit.
const EFER_FEATURES: [(u64, u32, usize, u32); 5] = [
    (control::EFER_NXE, 0x8000_0001, EDX, 20),
    (control::EFER_SVME, 0x8000_0001, ECX, 2),
    (control::EFER_FFXSR, 0x8000_0001, EDX, 25),
    (control::EFER_LME | control::EFER_LMA, 0x8000_0001, EDX, 29),
    (control::EFER_AIBRSE, 0x8000_0021, EAX, 8),
];

const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;

/// Returns the state components (bits of XCR0) that this CPU can have on this host. Without the AVX component, AVX
/// instructions raise #UD.
fn components() -> u64 {
    match has_avx() {
        true => xcr0::ALL,
        false => xcr0::ALL & !xcr0::AVX,
    }
}

/// Whether the host's CPU has AVX and the host's system saves YMM registers. If not, the guest has neither AVX nor YMM
/// registers.
pub fn has_avx() -> bool {
    is_x86_feature_detected!("avx")
}

impl Features {
    /// Returns all features that this CPU implements.
    pub fn all() -> Self {
        let cr4 = (CR4_FEATURES.iter()).fold(CR4_BASELINE, |all, (bit, ..)| all | bit);
        let efer = EFER_FEATURES
            .iter()
            .fold(EFER_BASELINE, |all, (bits, ..)| all | bits);
        Features {
            cr4,
            efer,
            xcr0: components(),
            pkru_offset: PKRU_OFFSET,
            invpcid: true,
            rdtscp: true,
            rdpid: true,
            rdrand: true,
            rdseed: true,
            xsaveopt: true,
            xsavec: true,
            xsaves: true,
            clzero: true,
            sse4a: true,
            cr8_legacy: true,
            mxcsr: MXCSR_MASK | MXCSR_MM,
            is_intel: false,
            svm: svm::ALL,
            physical_bits: 48,
        }
    }

    /// Returns the features that a guest finds in its CPUID. `cpuid` returns EAX, EBX, ECX and EDX for a leaf and a
    /// subleaf.
    pub fn from_cpuid(cpuid: impl Fn(u32, u32) -> [u32; 4]) -> Self {
        let has = |leaf, register: usize, bit| cpuid(leaf, 0)[register] >> bit & 1 != 0;
        let cr4 = (CR4_FEATURES.iter())
            .filter(|(_, leaf, register, bit)| has(*leaf, *register, *bit))
            .fold(CR4_BASELINE, |all, (bit, ..)| all | bit);
        let efer = (EFER_FEATURES.iter())
            .filter(|(_, leaf, register, bit)| has(*leaf, *register, *bit))
            .fold(EFER_BASELINE, |all, (bits, ..)| all | bits);
        let [xcr0_low, _, _, xcr0_high] = cpuid(0xd, 0);
        let told = u64::from(xcr0_low) | u64::from(xcr0_high) << 32;
        let pkru_offset = cpuid(0xd, xcr0::PKRU.trailing_zeros())[EBX] as usize;
        let vendor = cpuid(0, 0)[EBX].to_le_bytes();
        let physical_bits = match cpuid(0x8000_0000, 0)[EAX] >= 0x8000_0008 {
            true => cpuid(0x8000_0008, 0)[EAX] & 0xff,
            false => PHYSICAL_BITS_UNTOLD,
        };
        Features {
            cr4,
            efer,
            xcr0: told & components() | xcr0::X87,
            // Use the VMM's offset only if it is aligned, after the header, and below a limit that no known CPU
            // reaches.
            pkru_offset: match pkru_offset.is_multiple_of(8) && (576..8192).contains(&pkru_offset) {
                true => pkru_offset,
                false => PKRU_OFFSET,
            },
            invpcid: has(7, EBX, 10),
            rdtscp: has(0x8000_0001, EDX, 27),
            rdpid: has(7, ECX, 22),
            rdrand: has(1, ECX, 30),
            rdseed: has(7, EBX, 18),
            xsaveopt: cpuid(0xd, 1)[EAX] & 1 != 0,
            xsavec: cpuid(0xd, 1)[EAX] & 2 != 0,
            xsaves: cpuid(0xd, 1)[EAX] & 8 != 0,
            clzero: has(0x8000_0008, EBX, 0),
            sse4a: has(0x8000_0001, ECX, 6),
            cr8_legacy: has(0x8000_0001, ECX, 4),
            mxcsr: match has(0x8000_0001, ECX, 7) {
                true => MXCSR_MASK | MXCSR_MM,
                false => MXCSR_MASK,
            },
            is_intel: &vendor == b"Genu",
            svm: cpuid(0x8000_000a, 0)[EDX] & svm::ALL,
            physical_bits: physical_bits.clamp(32, PHYSICAL_BITS),
        }
    }

    /// Returns the bits of CR4 that can be set.
    pub fn cr4(&self) -> u64 {
        self.cr4
    }

    /// Returns the bits of EFER that can be set.
    pub fn efer(&self) -> u64 {
        self.efer
    }

    /// Returns the bits of XCR0 that can be set.
    pub fn xcr0(&self) -> u64 {
        self.xcr0
    }

    /// Whether the MSR TSC_AUX exists. RDTSCP and RDPID read it.
    pub fn has_tsc_aux(&self) -> bool {
        self.rdtscp || self.rdpid
    }

    /// Whether the CPU has SVM's MSR TSC_RATIO.
    pub(crate) fn has_tsc_ratio(&self) -> bool {
        self.has_svm() && self.svm & svm::TSC_RATIO != 0
    }

    /// Whether the CPU has SVM.
    pub fn has_svm(&self) -> bool {
        self.efer & control::EFER_SVME != 0
    }

    /// Returns the number of bits of a guest-physical address.
    pub fn physical_bits(&self) -> u32 {
        self.physical_bits
    }

    /// Whether these PDPTEs of PAE paging are valid: no present entry has a reserved bit set.
    pub(crate) fn valid_pdptes(&self, entries: &[u64; 4]) -> bool {
        let reserved = self.beyond_physical() | 0x1e6;
        entries
            .iter()
            .all(|entry| entry & 1 == 0 || entry & reserved == 0)
    }

    /// Returns a mask of the bits that a guest-physical address cannot have.
    pub(crate) fn beyond_physical(&self) -> u64 {
        !((1 << self.physical_bits) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_feature_that_cpuid_does_not_tell_has_no_control_bits() {
        let none = Features::from_cpuid(|_, _| [0; 4]);
        assert_eq!((none.cr4, none.efer, none.xcr0), (CR4_BASELINE, 1, 1));
        assert_eq!((none.physical_bits, none.pkru_offset), (36, PKRU_OFFSET));
        let all = Features::from_cpuid(|leaf, subleaf| match (leaf, subleaf) {
            (0, _) => [0xd, u32::from_le_bytes(*b"Auth"), 0, 0],
            (0x8000_0000, _) => [0x8000_0008, 0, 0, 0],
            (0x8000_0008, _) => [0x3030, 1, 0, 0],
            (0xd, 9) => [8, PKRU_OFFSET as u32, 0, 0],
            _ => [!0; 4],
        });
        assert_eq!(all, Features::all());
    }
}
