//! Tables of CPUID leaves and lists of MSRs in the client's memory.

use super::{Answer, DONE, give};
use crate::errno::{Result, fail};
use crate::heap;
use crate::user;
use kvm_bindings::{kvm_cpuid_entry, kvm_cpuid_entry2, kvm_msr_entry};

/// The greatest number of entries of a CPUID table, as in KVM.
const MAX_CPUID_ENTRIES: u32 = 256;
/// The number of MSRs from which on `KVM_GET_MSRS` and `KVM_SET_MSRS` fail, as in KVM.
const MAX_MSRS: u32 = 256;
/// The offset of the entries in `kvm_cpuid2` and `kvm_msrs`: after the count and a padding word.
pub(super) const ENTRIES: u64 = 8;
/// The offset of the indices in `kvm_msr_list`.
const INDICES: u64 = 4;

/// Writes a CPUID table to the client's `kvm_cpuid2` at `address`. The struct's count says how many entries fit.
pub(super) fn give_cpuid(address: u64, table: &[kvm_cpuid_entry2]) -> Answer {
    let room = user::read::<u32>(address)?;
    let count = table.len() as u32;
    if room < count {
        return fail(libc::E2BIG);
    }
    user::write_slice(address + ENTRIES, table)?;
    give(address, &count)
}

pub(super) fn take_cpuid(address: u64) -> Result<Vec<kvm_cpuid_entry2>> {
    let count = user::read::<u32>(address)?;
    if count > MAX_CPUID_ENTRIES {
        return fail(libc::E2BIG);
    }
    user::read_vec(address + ENTRIES, count as usize)
}

/// Reads a CPUID table whose leaves have no subleaves (`KVM_SET_CPUID`).
pub(super) fn take_old_cpuid(address: u64) -> Result<Vec<kvm_cpuid_entry2>> {
    let count = user::read::<u32>(address)?;
    if count > MAX_CPUID_ENTRIES {
        return fail(libc::E2BIG);
    }
    let old = user::read_vec::<kvm_cpuid_entry>(address + ENTRIES, count as usize)?;
    let mut entries = heap::with_room(old.len())?;
    entries.extend(old.iter().map(|entry| kvm_cpuid_entry2 {
        function: entry.function,
        eax: entry.eax,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx,
        ..Default::default()
    }));
    Ok(entries)
}

/// Writes a list of MSR numbers to the client's `kvm_msr_list`. Writes the count even if the call fails with `E2BIG`,
/// so that the client can call again with enough memory.
pub(super) fn give_msr_list(address: u64, list: &[u32]) -> Answer {
    let room = user::read::<u32>(address)?;
    user::write(address, &(list.len() as u32))?;
    if room < list.len() as u32 {
        return fail(libc::E2BIG);
    }
    user::write_slice(address + INDICES, list)?;
    DONE
}

pub(super) fn take_msrs(address: u64) -> Result<Vec<kvm_msr_entry>> {
    let count = user::read::<u32>(address)?;
    if count >= MAX_MSRS {
        return fail(libc::E2BIG);
    }
    user::read_vec(address + ENTRIES, count as usize)
}
