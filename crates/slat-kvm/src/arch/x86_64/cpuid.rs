//! `KVM_GET_SUPPORTED_CPUID`: the features that the software CPU implements.
//!
//! The policy `cpu` chooses the vendor. Guests use the vendor to choose between VMCALL and VMMCALL, and between
//! variants of SYSENTER and SYSCALL. The default is the host's vendor, because clients compare this vendor with the
//! vendor that their own CPUID instruction returns. The features are always those of the software CPU.

use crate::arch::x86_64::cpu_features;
use crate::arch::x86_64::cpu_policies;
use crate::arch::x86_64::policy::Processor;
use crate::errno::{Result, fail};
use crate::heap;
use kvm_bindings::*;
use slat_process::once::Computed;
use slat_x86::state::xcr0;
use slat_x86::{HypercallInstruction, svm};
use std::arch::x86_64::{__cpuid_count, CpuidResult};

/// Leaf 1 ECX: SSE3.
pub(crate) const LEAF1_ECX_SSE3: u32 = 1;
/// Leaf 1 EDX: the local APIC.
pub(crate) const LEAF1_EDX_APIC: u32 = 1 << 9;
/// Leaf 1 ECX: x2APIC mode.
pub(crate) const LEAF1_ECX_X2APIC: u32 = 1 << 21;
/// Leaf 1 ECX: MONITOR and MWAIT.
pub(crate) const LEAF1_ECX_MWAIT: u32 = 1 << 3;
/// Leaf 7 ECX: protection keys.
const LEAF7_ECX_PKU: u32 = 1 << 3;
/// Leaf 7 EDX: IA32_ARCH_CAPABILITIES exists.
pub(crate) const LEAF7_EDX_ARCH_CAPABILITIES: u32 = 1 << 29;
/// Leaf 0x8000_0001 EDX: long mode.
pub(crate) const EXTENDED_EDX_LONG_MODE: u32 = 1 << 29;
/// The leaf of power management.
pub(crate) const POWER_LEAF: u32 = 0x8000_0007;
/// [`POWER_LEAF`] EDX: the TSC is invariant.
pub(crate) const POWER_EDX_INVARIANT_TSC: u32 = 1 << 8;
/// Leaf 0xd.1 EAX: XSAVES, XRSTORS and IA32_XSS.
pub(crate) const LEAF_D1_EAX_XSAVES: u32 = 1 << 3;
/// Leaf 0x8000_0001 ECX: OS-visible workarounds.
pub(crate) const EXT1_ECX_OSVW: u32 = 1 << 9;
/// Leaf 0x8000_0001 ECX: the number of SVM's bit.
const EXT1_ECX_SVM: u32 = 2;
/// The leaf of SVM: revision, number of ASIDs, features.
const SVM_LEAF: u32 = 0x8000_000a;

/// Guest-physical address bits.
pub const PHYS_BITS: u32 = 48;
/// Guest-virtual address bits.
pub const VIRT_BITS: u32 = 48;
/// Returns the bits of KVM's paravirtual features: the stable clock; IPIs, wake-ups and EOIs without the APIC;
/// asynchronous page faults; and steal time, if the host counts it.
fn kvm_features() -> u32 {
    let steal_time = u32::from(crate::steal_time::is_available());
    1 << KVM_FEATURE_CLOCKSOURCE
        | 1 << KVM_FEATURE_NOP_IO_DELAY
        | 1 << KVM_FEATURE_CLOCKSOURCE2
        | steal_time << KVM_FEATURE_STEAL_TIME
        | 1 << KVM_FEATURE_PV_EOI
        | 1 << KVM_FEATURE_PV_UNHALT
        | 1 << KVM_FEATURE_PV_SEND_IPI
        | 1 << KVM_FEATURE_ASYNC_PF
        | 1 << KVM_FEATURE_ASYNC_PF_VMEXIT
        | 1 << KVM_FEATURE_ASYNC_PF_INT
        | 1 << KVM_FEATURE_CLOCKSOURCE_STABLE
}

/// The first leaf of a hypervisor. The leaves of further hypervisors begin at multiples of 0x100 after this leaf.
const HYPERVISOR_LEAF: u32 = 0x4000_0000;
/// EBX, ECX and EDX of KVM's first leaf.
const KVM_SIGNATURE: [u32; 3] = [
    u32::from_le_bytes(*b"KVMK"),
    u32::from_le_bytes(*b"VMKV"),
    u32::from_le_bytes(*b"M\0\0\0"),
];
pub(crate) const KVM_FEATURE_CLOCKSOURCE: u32 = 0;
const KVM_FEATURE_NOP_IO_DELAY: u32 = 1;
pub(crate) const KVM_FEATURE_CLOCKSOURCE2: u32 = 3;
pub(crate) const KVM_FEATURE_ASYNC_PF: u32 = 4;
pub(crate) const KVM_FEATURE_STEAL_TIME: u32 = 5;
pub(crate) const KVM_FEATURE_PV_EOI: u32 = 6;
pub(crate) const KVM_FEATURE_PV_UNHALT: u32 = 7;
pub(crate) const KVM_FEATURE_ASYNC_PF_VMEXIT: u32 = 10;
pub(crate) const KVM_FEATURE_PV_SEND_IPI: u32 = 11;
pub(crate) const KVM_FEATURE_PV_SCHED_YIELD: u32 = 13;
pub(crate) const KVM_FEATURE_ASYNC_PF_INT: u32 = 14;
const KVM_FEATURE_CLOCKSOURCE_STABLE: u32 = 24;

/// The feature bits of the CPUID leaves, by register.
mod feature {
    /// Leaf 1 EDX: FPU VME DE PSE TSC MSR PAE MCE CX8 APIC SEP MTRR PGE MCA CMOV PAT PSE36 CLFSH MMX FXSR SSE SSE2.
    pub const LEAF1_EDX: u32 = 1
        | 1 << 1
        | 1 << 2
        | 1 << 3
        | 1 << 4
        | 1 << 5
        | 1 << 6
        | 1 << 7
        | 1 << 8
        | 1 << 9
        | 1 << 11
        | 1 << 12
        | 1 << 13
        | 1 << 14
        | 1 << 15
        | 1 << 16
        | 1 << 17
        | 1 << 19
        | 1 << 23
        | 1 << 24
        | 1 << 25
        | 1 << 26;
    pub const LEAF1_ECX_HYPERVISOR: u32 = 1 << 31;
    /// Leaf 0x8000_0001 EDX: SYSCALL NX PDPE1GB RDTSCP LM.
    pub const EXT1_EDX: u32 = 1 << 11 | 1 << 20 | 1 << 26 | 1 << 27 | 1 << 29;
    /// Leaf 1 EDX: the caches snoop the CPU's own accesses. Only Intel's CPUs have the bit.
    pub const LEAF1_EDX_SELF_SNOOP: u32 = 1 << 27;
    /// The bits of leaf 1 EDX that AMD's CPUs repeat in EDX of leaf 0x8000_0001.
    pub const EXT1_EDX_AMD_COPY: u32 = 0x0183_f3ff;
}

fn entry(function: u32, index: Option<u32>, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function,
        index: index.unwrap_or(0),
        flags: if index.is_some() {
            KVM_CPUID_FLAG_SIGNIFCANT_INDEX
        } else {
            0
        },
        eax,
        ebx,
        ecx,
        edx,
        padding: [0; 3],
    }
}

/// Reads a leaf of the host's own CPUID. If the host has no such leaf, all registers are 0.
pub fn host_leaf(leaf: u32, index: u32) -> CpuidResult {
    // `__cpuid_count` is unsafe only in Rust before 1.93.
    #[allow(unused_unsafe)]
    // SAFETY: every x86-64 CPU has the instruction.
    let read = |leaf, index| unsafe { __cpuid_count(leaf, index) };
    // The first leaf of a range returns the number of the range's last leaf in EAX.
    if read(leaf & 0xf000_0000, 0).eax < leaf {
        return CpuidResult {
            eax: 0,
            ebx: 0,
            ecx: 0,
            edx: 0,
        };
    }
    read(leaf, index)
}

/// The identity that the software CPU reports. The vendor determines leaves, MSRs and rules ([`is_amd`]).
#[derive(Clone, Copy)]
struct Identity {
    /// EBX, EDX and ECX of leaf 0, which hold the vendor's name in this order.
    vendor: [u32; 3],
    /// EAX of leaf 1: family, model and stepping.
    signature: u32,
}

impl Identity {
    /// Whether the processor is AMD's or Hygon's.
    fn is_amd(self) -> bool {
        matches!(&self.vendor[0].to_le_bytes(), b"Auth" | b"Hygo")
    }
}

const fn identity_of(vendor: &[u8; 12], signature: u32) -> Identity {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *vendor;
    Identity {
        vendor: [
            u32::from_le_bytes([a, b, c, d]),
            u32::from_le_bytes([e, f, g, h]),
            u32::from_le_bytes([i, j, k, l]),
        ],
        signature,
    }
}

/// A third-generation EPYC: family 25, model 1, stepping 1. Like the software CPU it has no AVX-512.
const AMD: Identity = identity_of(b"AuthenticAMD", 0x00a0_0f11);
/// A Xeon 6 with efficient cores ("Sierra Forest"): family 6, model 175, stepping 3. Like the software CPU it has no
/// AVX-512.
const INTEL: Identity = identity_of(b"GenuineIntel", 0x000a_06f3);

/// Returns the processor that the policy `cpu` chooses.
fn identity() -> Identity {
    static IDENTITY: Computed<Identity> = Computed::new();
    *IDENTITY.get_or_init(|| match cpu_policies::current().processor {
        Processor::Host => {
            let host = host_leaf(0, 0);
            Identity {
                vendor: [host.ebx, host.edx, host.ecx],
                signature: host_leaf(1, 0).eax,
            }
        }
        Processor::Amd => AMD,
        Processor::Intel => INTEL,
    })
}

/// Whether the policy `cpu` offers guests a processor of AMD or Hygon. Where KVM's two vendor modules differ, slat
/// behaves like the module of the offered vendor.
pub fn is_amd() -> bool {
    identity().is_amd()
}

/// Returns the hypercall instruction of the processor that guests are offered.
pub(crate) fn native_hypercall() -> HypercallInstruction {
    match is_amd() {
        true => HypercallInstruction::Vmmcall,
        false => HypercallInstruction::Vmcall,
    }
}

/// The greatest number of caches that leaf 4 describes.
const MAX_CACHES: u32 = 6;

/// Appends leaf 4: the host's caches. AMD's CPUs do not have the leaf.
fn push_caches(entries: &mut Vec<kvm_cpuid_entry2>, amd: bool) {
    let caches = if amd { 0 } else { MAX_CACHES - 1 };
    for index in 0..MAX_CACHES {
        let values = match index < caches {
            true => {
                let cache = host_leaf(4, index);
                [cache.eax, cache.ebx, cache.ecx, cache.edx]
            }
            false => [0; 4],
        };
        entries.push(entry(4, Some(index), values));
        // An entry with the cache type 0 ends the list.
        if values[0] & 31 == 0 {
            break;
        }
    }
}

/// Returns leaf 0x8000_0005 or 0x8000_0006: the host's caches. The host's TLBs are left out, because the software CPU
/// does not use them.
fn host_caches(leaf: u32) -> kvm_cpuid_entry2 {
    let host = host_leaf(leaf, 0);
    entry(leaf, None, [0, 0, host.ecx, host.edx])
}

/// The number of bytes of an XSAVE area with x87 and SSE: the legacy region and the header.
const XSAVE_LEGACY_BYTES: u32 = 576;
/// The number of bytes of PKRU in an XSAVE area.
const PKRU_BYTES: u32 = 8;
/// The number of bytes of the upper halves of the YMM registers in an XSAVE area, after the header.
const AVX_BYTES: u32 = 256;

/// Returns the offset of PKRU in the standard format of an XSAVE area. `None`: the host has no protection keys. The
/// software CPU could offer protection keys on any host. But QEMU takes the offset from the host's CPUID. If the host
/// has no keys, QEMU gives its guest the offset 0.
pub fn pkru_offset() -> Option<usize> {
    static OFFSET: Computed<Option<usize>> = Computed::new();
    *OFFSET.get_or_init(|| {
        let has_keys = host_leaf(7, 0).ecx & LEAF7_ECX_PKU != 0;
        let host = has_keys.then(|| host_leaf(0xd, xcr0::PKRU.trailing_zeros()))?;
        let at = host.ebx as usize;
        let after_avx = (XSAVE_LEGACY_BYTES + AVX_BYTES) as usize;
        let fits = (after_avx..=4088).contains(&at) && at.is_multiple_of(8);
        (host.eax == PKRU_BYTES && fits).then_some(at)
    })
}

/// Returns the offset of the upper halves of the YMM registers in an XSAVE area, if the host has AVX.
pub fn avx_offset() -> Option<usize> {
    slat_x86::simd::has_avx().then_some(XSAVE_LEGACY_BYTES as usize)
}

/// Returns the state components that a guest can use, as bits of XCR0.
pub fn supported_xcr0() -> u64 {
    let optional = [(avx_offset(), xcr0::AVX), (pkru_offset(), xcr0::PKRU)];
    let missing = optional.iter().filter(|(offset, _)| offset.is_none());
    missing.fold(xcr0::ALL, |all, (_, component)| all & !component)
}

/// Returns the parts of an XSAVE area after the header, in the standard format: component, bytes and offset of each.
fn xsave_components() -> impl Iterator<Item = (u64, u32, u32)> {
    let optional = [
        (xcr0::AVX, AVX_BYTES, avx_offset()),
        (xcr0::PKRU, PKRU_BYTES, pkru_offset()),
    ];
    (optional.into_iter())
        .filter_map(|(component, bytes, at)| at.map(|at| (component, bytes, at as u32)))
}

/// Returns `KVM_GET_EMULATED_CPUID`'s leaves: the features that KVM emulates if the host's CPU does not have them,
/// MOVBE and RDPID. The software CPU has both.
pub fn emulated() -> [kvm_cpuid_entry2; 3] {
    const MOVBE: u32 = 1 << 22;
    const RDPID: u32 = 1 << 22;
    [
        entry(0, None, [7, 0, 0, 0]),
        entry(1, None, [0, 0, cpu_features::leaf1_ecx() & MOVBE, 0]),
        entry(
            7,
            Some(0),
            [0, 0, cpu_features::leaf7_ecx(false) & RDPID, 0],
        ),
    ]
}

/// An upper bound of the number of leaves in [`supported`].
const MAX_LEAVES: usize = 96;
/// AMD's leaf of caches: each subleaf describes one cache.
const AMD_CACHES_LEAF: u32 = 0x8000_001d;

/// Adds the empty leaves up to the last leaf of each range, and sorts all leaves. KVM lists empty leaves, too: VMMs
/// fill in their contents, such as the APIC id in leaf 0x8000_001e.
fn complete(entries: &mut Vec<kvm_cpuid_entry2>) {
    for first in [0, 0x8000_0000] {
        let has = |entries: &[kvm_cpuid_entry2], leaf| entries.iter().any(|e| e.function == leaf);
        let last = entries.iter().find(|entry| entry.function == first);
        let last = last.map_or(first, |entry| entry.eax);
        for leaf in first..=last {
            if !has(entries, leaf) {
                let subleaf = (leaf == AMD_CACHES_LEAF).then_some(0);
                entries.push(entry(leaf, subleaf, [0; 4]));
            }
        }
    }
    // The sort is unstable because a stable sort needs a buffer of 4 KiB on the stack. That buffer would overwrite
    // memory far below the stack pointer, on which one client relies (`conformance/programs/below.c`).
    entries.sort_unstable_by_key(|entry| (entry.function, entry.index));
}

/// Returns all leaves that a client may give its guest, in order.
///
/// # Errors
/// `ENOMEM`.
pub fn supported() -> Result<Vec<kvm_cpuid_entry2>> {
    supported_by(identity())
}

/// Returns the leaves of one processor.
fn supported_by(identity: Identity) -> Result<Vec<kvm_cpuid_entry2>> {
    let Identity {
        vendor: [ebx, edx, ecx],
        signature,
    } = identity;
    let amd = identity.is_amd();
    let nested = cpu_policies::current().nested;
    // Leaf 1 does not have the TSC-deadline bit, because that timer belongs to the local APIC, which the client may
    // emulate. KVM_CAP_TSC_DEADLINE_TIMER reports the timer of slat's own local APIC.
    let leaf1_ecx = LEAF1_ECX_X2APIC | feature::LEAF1_ECX_HYPERVISOR | cpu_features::leaf1_ecx();
    let ext1_edx = feature::EXT1_EDX
        | if amd {
            feature::LEAF1_EDX & feature::EXT1_EDX_AMD_COPY | cpu_features::AMD_EXT1_EDX
        } else {
            0
        };
    let leaf1_edx = match amd {
        true => feature::LEAF1_EDX,
        false => feature::LEAF1_EDX | feature::LEAF1_EDX_SELF_SNOOP,
    };
    let mut entries = heap::with_room(MAX_LEAVES)?;
    entries.extend([
        entry(0, None, [0xd, ebx, ecx, edx]),
        // CLFLUSH lines have 64 bytes, which this leaf shows as 8 units of 8 bytes. The client fills in the APIC id.
        entry(1, None, [signature, 8 << 8, leaf1_ecx, leaf1_edx]),
        entry(2, None, [1, 0, 0, 0]),
    ]);
    push_caches(&mut entries, amd);
    entries.extend([
        entry(6, None, [4, 0, 0, 0]),
        entry(
            7,
            Some(0),
            [
                1,
                cpu_features::leaf7_ebx(),
                cpu_features::leaf7_ecx(pkru_offset().is_some()),
                cpu_features::leaf7_edx(),
            ],
        ),
        // Leaf 0xa: the CPU has no performance-monitoring counters.
        entry(0xa, None, [0; 4]),
        entry(7, Some(1), [cpu_features::leaf7_1_eax(), 0, 0, 0]),
        entry(0xb, Some(0), [0; 4]),
        entry(
            0xd,
            Some(0),
            [
                supported_xcr0() as u32,
                XSAVE_LEGACY_BYTES,
                (xsave_components().map(|(_, bytes, at)| at + bytes).max())
                    .unwrap_or(XSAVE_LEGACY_BYTES),
                0,
            ],
        ),
        entry(
            0xd,
            Some(1),
            [cpu_features::leaf_d1_eax(), XSAVE_LEGACY_BYTES, 0, 0],
        ),
    ]);
    entries.extend(xsave_components().map(|(component, bytes, at)| {
        entry(0xd, Some(component.trailing_zeros()), [bytes, at, 0, 0])
    }));
    let [kvm_ebx, kvm_ecx, kvm_edx] = KVM_SIGNATURE;
    entries.extend([
        entry(
            HYPERVISOR_LEAF,
            None,
            [HYPERVISOR_LEAF + 1, kvm_ebx, kvm_ecx, kvm_edx],
        ),
        entry(HYPERVISOR_LEAF + 1, None, [kvm_features(), 0, 0, 0]),
        entry(
            0x8000_0000,
            None,
            [
                match (amd, nested) {
                    (true, _) => 0x8000_0021,
                    (false, true) => SVM_LEAF,
                    (false, false) => 0x8000_0008,
                },
                if amd { ebx } else { 0 },
                if amd { ecx } else { 0 },
                if amd { edx } else { 0 },
            ],
        ),
        entry(
            0x8000_0001,
            None,
            [
                if amd { signature } else { 0 },
                0,
                cpu_features::ext1_ecx(amd) | u32::from(nested) << EXT1_ECX_SVM,
                ext1_edx,
            ],
        ),
    ]);
    // The brand string is in three leaves, each of which has 16 characters.
    let mut brand = [0u8; 48];
    let text = b"slat software CPU";
    brand[..text.len()].copy_from_slice(text);
    for (part, bytes) in brand.chunks_exact(16).enumerate() {
        let word =
            |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        entries.push(entry(
            0x8000_0002 + part as u32,
            None,
            [word(0), word(4), word(8), word(12)],
        ));
    }
    entries.extend([
        host_caches(0x8000_0005),
        host_caches(0x8000_0006),
        entry(POWER_LEAF, None, [0, 0, 0, POWER_EDX_INVARIANT_TSC]),
        entry(
            0x8000_0008,
            None,
            [
                PHYS_BITS | VIRT_BITS << 8,
                cpu_features::ext8_ebx(amd),
                0,
                0,
            ],
        ),
    ]);
    if nested {
        entries.push(entry(SVM_LEAF, None, [1, svm::ASIDS, 0, svm::feature::ALL]));
    }
    if amd {
        entries.push(entry(
            0x8000_0021,
            None,
            [cpu_features::ext21_eax(), 0, cpu_features::ext21_ecx(), 0],
        ));
    }
    complete(&mut entries);
    debug_assert!(entries.len() <= MAX_LEAVES);
    Ok(entries)
}

/// Returns the number of the leaf whose EAX holds the bits of KVM's paravirtual features. Leaves of another hypervisor
/// interface may come before KVM's leaves. `None`: the guest does not see KVM.
fn kvm_features_leaf(table: &[kvm_cpuid_entry2]) -> Option<u32> {
    let is_first = |entry: &&kvm_cpuid_entry2| {
        entry.function & 0xffff_00ff == HYPERVISOR_LEAF
            && [entry.ebx, entry.ecx, entry.edx] == KVM_SIGNATURE
    };
    Some(table.iter().find(is_first)?.function + 1)
}

/// Returns the bits of KVM's paravirtual features in a client's table.
pub(crate) fn kvm_features_in(table: &[kvm_cpuid_entry2]) -> u32 {
    kvm_features_leaf(table).map_or(0, |leaf| lookup(table, leaf, 0)[0])
}

/// Checks a client's table as KVM does.
///
/// # Errors
/// `EINVAL` if the width of linear addresses is not 48, 57 or 0 (0: the leaf does not give the width). `EPERM` for
/// AMX's tile data, a state component that a process has to request first.
pub(crate) fn check(table: &[kvm_cpuid_entry2]) -> Result<()> {
    const TILE_DATA: u32 = 1 << 18;
    let find = |function| {
        let mut entries = table.iter();
        entries.find(|entry| entry.function == function && entry.index == 0)
    };
    let width = find(0x8000_0008).map_or(0, |entry| entry.eax >> 8 & 0xff);
    if !matches!(width, 0 | 48 | 57) {
        return fail(libc::EINVAL);
    }
    match find(0xd) {
        Some(entry) if entry.eax & TILE_DATA != 0 => fail(libc::EPERM),
        _ => Ok(()),
    }
}

/// Removes one of KVM's paravirtual features from a client's table.
pub(crate) fn remove_kvm_feature(table: &mut [kvm_cpuid_entry2], bit: u32) {
    let leaf = kvm_features_leaf(table);
    for entry in table
        .iter_mut()
        .filter(|entry| Some(entry.function) == leaf)
    {
        entry.eax &= !(1 << bit);
    }
}

/// Returns the values of the guest's CPUID instruction from the client's table, with the vendor's rule for leaves
/// beyond the last leaf. The caller adds the bits that depend on the CPU's state.
pub fn lookup(table: &[kvm_cpuid_entry2], leaf: u32, subleaf: u32) -> [u32; 4] {
    let matches = |entry: &&kvm_cpuid_entry2, leaf: u32| {
        entry.function == leaf
            && (entry.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX == 0 || entry.index == subleaf)
    };
    let values = |entry: &kvm_cpuid_entry2| [entry.eax, entry.ebx, entry.ecx, entry.edx];
    if let Some(entry) = table.iter().find(|entry| matches(entry, leaf)) {
        return values(entry);
    }
    // Beyond the last leaf of a range, an Intel CPU repeats the last basic leaf, while an AMD CPU returns zero. Both
    // return zero for an unknown leaf within the range.
    let limit = |class: u32| {
        table
            .iter()
            .find(|entry| entry.function == class)
            .map(|entry| entry.eax)
    };
    let intel = table
        .iter()
        .any(|entry| entry.function == 0 && entry.ebx == u32::from_le_bytes(*b"Genu"));
    let class = if (0x4000_0000..0x8000_0000).contains(&leaf) {
        leaf & 0xffff_ff00
    } else {
        leaf & 0x8000_0000
    };
    match (limit(class), limit(0)) {
        (class_limit, Some(basic)) if intel && class_limit.is_none_or(|limit| leaf > limit) => {
            table
                .iter()
                .find(|entry| matches(entry, basic))
                .map_or([0; 4], values)
        }
        _ => [0; 4],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_long_mode_and_address_widths() {
        let table = supported().unwrap();
        assert_ne!(lookup(&table, 0x8000_0001, 0)[3] & 1 << 29, 0);
        assert_eq!(lookup(&table, 0x8000_0008, 0)[0], 48 | 48 << 8);
        assert_eq!(
            lookup(&table, 0x4000_0000, 0)[1],
            u32::from_le_bytes(*b"KVMK")
        );
    }

    #[test]
    fn a_processor_of_each_vendor_is_not_vulnerable() {
        for (identity, vendor, family, model) in [
            (AMD, b"AuthenticAMD", 25, 1),
            (INTEL, b"GenuineIntel", 6, 175),
        ] {
            let table = supported_by(identity).unwrap();
            let [_, ebx, ecx, edx] = lookup(&table, 0, 0);
            let told: Vec<_> = [ebx, edx, ecx]
                .into_iter()
                .flat_map(u32::to_le_bytes)
                .collect();
            assert_eq!(told, vendor);
            let eax = lookup(&table, 1, 0)[0];
            assert_eq!((eax >> 8 & 15) + (eax >> 20 & 0xff), family);
            assert_eq!(eax >> 4 & 15 | eax >> 12 & 0xf0, model);
            assert_ne!(lookup(&table, 7, 0)[3] & LEAF7_EDX_ARCH_CAPABILITIES, 0);
            if identity.is_amd() {
                // The bits that are checked are, by leaf, SSB_NO and BTC_NO; SRSO_NO and SRSO_USER_KERNEL_NO;
                // TSA_SQ_NO, TSA_L1_NO and TSA_FILL_NO.
                let ext8 = lookup(&table, 0x8000_0008, 0)[1];
                assert_eq!(ext8 >> 26 & 0b1001, 0b1001);
                let ext21 = lookup(&table, 0x8000_0021, 0);
                assert_eq!((ext21[0] >> 29 & 3, ext21[2]), (3, 0b1000_0110));
            }
        }
    }

    #[test]
    fn linear_addresses_of_a_table_have_48_or_57_bits() {
        for width in 0..=255 {
            let entry = kvm_cpuid_entry2 {
                function: 0x8000_0008,
                eax: width << 8 | 52,
                ..Default::default()
            };
            assert_eq!(check(&[entry]).is_ok(), [0, 48, 57].contains(&width));
        }
        assert!(check(&[]).is_ok());
    }

    #[test]
    fn the_cpu_has_what_is_promised() {
        let table = supported().unwrap();
        let features = slat_x86::Features::from_cpuid(|leaf, sub| lookup(&table, leaf, sub));
        assert_eq!(features.physical_bits(), PHYS_BITS);
        let [components, _, size, _] = lookup(&table, 0xd, 0);
        let keys = lookup(&table, 7, 0)[2] & LEAF7_ECX_PKU != 0;
        let avx = lookup(&table, 1, 0)[2] & 1 << 28 != 0;
        let mut expected = (3, XSAVE_LEGACY_BYTES);
        for (component, has) in [(2, avx), (9, keys)] {
            let [bytes, offset, ..] = lookup(&table, 0xd, component);
            assert_eq!(bytes != 0, has, "component {component}");
            if has {
                expected = (expected.0 | 1u32 << component, offset + bytes);
            }
        }
        assert_eq!((components, size), expected);
        assert_eq!(lookup(&table, 7, 0)[2] & 1 << 4, 0, "OSPKE is the guest's");
    }

    #[test]
    fn every_leaf_is_listed_once_and_in_order() {
        let table = supported().unwrap();
        let key = |entry: &kvm_cpuid_entry2| (entry.function, entry.index);
        assert!(table.windows(2).all(|pair| key(&pair[0]) < key(&pair[1])));
        for first in [0, HYPERVISOR_LEAF, 0x8000_0000] {
            let last = lookup(&table, first, 0)[0];
            assert!((first + 1..first + 0x40).contains(&last), "{last:#x}");
            for leaf in first..=last {
                assert!(table.iter().any(|e| e.function == leaf), "leaf {leaf:#x}");
            }
        }
    }

    #[test]
    fn avx_is_promised_as_far_as_the_host_has_it() {
        let table = supported().unwrap();
        let avx = is_x86_feature_detected!("avx");
        for (leaf, register, bit, has) in [
            (1, 2, 28, avx),
            (1, 2, 12, avx && is_x86_feature_detected!("fma")),
            (1, 2, 29, avx && is_x86_feature_detected!("f16c")),
            (7, 1, 5, avx && is_x86_feature_detected!("avx2")),
            (7, 1, 16, false),
        ] {
            let told = lookup(&table, leaf, 0)[register] >> bit & 1 != 0;
            assert_eq!(told, has, "leaf {leaf}, bit {bit}");
        }
    }

    #[test]
    fn the_levels_of_x86_64_are_complete() {
        // The test checks the bits of the integer instructions in x86-64-v3: MOVBE, XSAVE (which sets OSXSAVE), BMI1,
        // BMI2, LZCNT.
        let table = supported().unwrap();
        let has =
            |leaf, register: usize, bit: u32| lookup(&table, leaf, 0)[register] >> bit & 1 != 0;
        assert!(has(1, 2, 22) && has(1, 2, 26));
        assert!(has(7, 1, 3) && has(7, 1, 8));
        assert!(has(0x8000_0001, 2, 5));
    }
}
