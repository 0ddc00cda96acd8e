//! The MSRs that control speculation: SPEC_CTRL, PRED_CMD, FLUSH_CMD and AMD's VIRT_SPEC_CTRL. The CPU never
//! speculates, so these MSRs need no effect. They only store the written value, after KVM's checks.

use crate::arch::x86_64::cpuid;
use crate::arch::x86_64::machine::VcpuMachine;
use crate::arch::x86_64::msr::index::*;
use slat_x86::MsrFault;

/// SPEC_CTRL: IBRS, STIBP, SSBD, PSFD.
const SPEC_CTRL_BITS: u64 = 1 | 1 << 1 | SSBD | 1 << 7;
const SSBD: u64 = 1 << 2;
/// PRED_CMD: IBPB.
const IBPB: u64 = 1;
/// FLUSH_CMD: L1D_FLUSH.
const L1D_FLUSH: u64 = 1;

/// A feature bit of the guest's CPUID: leaf, register, bit.
type Feature = (u32, usize, u32);

const SPEC_CTRL_FEATURE: Feature = (7, 3, 26);
const FLUSH_L1D: Feature = (7, 3, 28);
const AMD_IBPB: Feature = (0x8000_0008, 1, 12);
const AMD_IBRS: Feature = (0x8000_0008, 1, 14);
const AMD_STIBP: Feature = (0x8000_0008, 1, 15);
const AMD_SSBD: Feature = (0x8000_0008, 1, 24);
const AMD_VIRT_SSBD: Feature = (0x8000_0008, 1, 25);

/// Whether an access is allowed. A guest needs one of `features`. A client's access is always allowed.
fn may_access(machine: &VcpuMachine, by_guest: bool, features: &[Feature]) -> bool {
    let has = |&(leaf, register, bit): &Feature| {
        cpuid::lookup(&machine.cpuid, leaf, 0)[register] >> bit & 1 != 0
    };
    !by_guest || features.iter().any(has)
}

/// Returns the features of the MSR `index`, and the bits of the MSR that can be set. A guest that has any of the
/// features may access the MSR. `None`: `index` is no MSR that controls speculation.
fn rules(index: u32) -> Option<(&'static [Feature], u64)> {
    Some(match index {
        SPEC_CTRL => (
            &[SPEC_CTRL_FEATURE, AMD_STIBP, AMD_IBRS, AMD_SSBD],
            SPEC_CTRL_BITS,
        ),
        PRED_CMD => (&[SPEC_CTRL_FEATURE, AMD_IBPB], IBPB),
        FLUSH_CMD => (&[FLUSH_L1D], L1D_FLUSH),
        AMD_VIRT_SPEC_CTRL => (&[AMD_VIRT_SSBD], SSBD),
        _ => return None,
    })
}

/// Reads an MSR that controls speculation. `None`: `index` is no such MSR, or the MSR is write-only.
pub(crate) fn read(
    machine: &VcpuMachine,
    index: u32,
    by_guest: bool,
) -> Option<Result<u64, MsrFault>> {
    if matches!(index, PRED_CMD | FLUSH_CMD) {
        return None;
    }
    let (features, _) = rules(index)?;
    Some(match may_access(machine, by_guest, features) {
        true => Ok(machine.msr(index)),
        false => Err(MsrFault::Invalid),
    })
}

/// Writes an MSR that controls speculation. `None`: `index` is no such MSR.
pub(crate) fn write(
    machine: &mut VcpuMachine,
    index: u32,
    value: u64,
    by_guest: bool,
) -> Option<Result<(), MsrFault>> {
    let (features, bits) = rules(index)?;
    if value & !bits != 0 || !may_access(machine, by_guest, features) {
        return Some(Err(MsrFault::Invalid));
    }
    if !matches!(index, PRED_CMD | FLUSH_CMD) {
        machine.store(index, value);
    }
    Some(Ok(()))
}
