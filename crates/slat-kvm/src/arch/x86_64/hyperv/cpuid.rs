//! Hyper-V's CPUID leaves (`KVM_GET_SUPPORTED_HV_CPUID`), and the rights that a guest's leaves give it.

use kvm_bindings::kvm_cpuid_entry2;
use slat_host::procfs;
use slat_hyperv::cpuid::{Machine, Privileges, supported as leaves};
use slat_process::once::Computed;

/// Whether the host's cores can have more than one thread. If so, the guest cannot know whether vCPUs share a core.
fn host_shares_cores() -> bool {
    static SHARES: Computed<bool> = Computed::new();
    *SHARES.get_or_init(|| {
        let mut text = [0; 32];
        let control = procfs::read_small(c"/sys/devices/system/cpu/smt/control", &mut text);
        !matches!(control.trim(), "forceoff" | "notsupported")
    })
}

/// Returns the leaves that a client may give to a guest. The VM has at most `max_vps` vCPUs. `has_apic` says whether
/// the vCPUs have local APICs.
pub(crate) fn supported(has_apic: bool, max_vps: u32) -> [kvm_cpuid_entry2; 10] {
    let machine = Machine {
        has_apic,
        shares_cores: host_shares_cores(),
        max_vps,
    };
    leaves(machine).map(|leaf| {
        let [eax, ebx, ecx, edx] = leaf.registers;
        kvm_cpuid_entry2 {
            function: leaf.function,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    })
}

/// Returns the rights in Hyper-V's interface of a guest that has the CPUID leaves `table`. `None`: the guest has no
/// Hyper-V interface.
pub(crate) fn privileges(table: &[kvm_cpuid_entry2]) -> Option<Privileges> {
    Privileges::from_cpuid(|function| {
        let entry = table.iter().find(|entry| entry.function == function)?;
        Some([entry.eax, entry.ebx, entry.ecx, entry.edx])
    })
}
