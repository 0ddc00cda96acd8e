//! KVM's module parameters: the values in `/sys/module/kvm/parameters`, and the effect of writing them.
//!
//! Each process has its own parameters. A write changes all live VMs of the process, and VMs created later.

use crate::engine::EngineVm;
use crate::errno::{Error, Result, fail};
use crate::process::PerProcess;
use crate::{notify, policy, recovery};
use slat::{Hva, MmuKind, Setting, Switch};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The parameters that are policies of the engine. These parameters can be written.
const WRITABLE: &[&str] = &[
    "mmio_caching",
    NX_HUGE_PAGES,
    "nx_huge_pages_recovery_ratio",
    "nx_huge_pages_recovery_period_ms",
    "eager_page_split",
];
/// The parameters that cannot be written, and their values.
const FIXED: &[(&str, &str)] = &[
    ("force_emulation_prefix", "0"),
    ("ignore_msrs", "N"),
    ("report_ignored_msrs", "Y"),
    ("enable_pmu", "N"),
    ("enable_vmware_backdoor", "N"),
    // The virtual interrupt controllers of AMD's and Intel's processors are off.
    ("avic", "N"),
    ("enable_apicv", "N"),
    ("halt_poll_ns", "0"),
    ("min_timer_period_us", "200"),
];
const NX_HUGE_PAGES: &str = "nx_huge_pages";
/// The parameter that says whether guests can have nested guests. In KVM, this parameter belongs to the module for the
/// processor. It cannot be written.
const NESTED: &str = policy::NESTED;
/// The parameter that says which MMU the VMs of this process have. It cannot be written, like KVM's own parameter once
/// KVM is loaded.
const TDP_MMU: &str = "tdp_mmu";

/// VMs that have `KVM_CAP_VM_DISABLE_NX_HUGE_PAGES`.
static WITHOUT_NX: PerProcess<Mutex<Vec<Weak<EngineVm>>>> = PerProcess::new();

/// Returns the static name of a parameter; `None` if it does not exist. Takes no lock and allocates nothing.
pub fn known(name: &[u8]) -> Option<&'static str> {
    let fixed = (FIXED.iter().map(|(name, _)| *name)).chain([TDP_MMU, NESTED]);
    let mut all = WRITABLE.iter().copied().chain(fixed);
    all.find(|known| known.as_bytes() == name)
}

/// Returns the name of a parameter, and its value as the file shows it, without the newline. `None`: the parameter does
/// not exist.
pub fn read(name: &str) -> Option<(&'static str, String)> {
    if let Some((name, value)) = FIXED.iter().find(|(known, _)| *known == name) {
        return Some((name, (*value).to_owned()));
    }
    if name == NESTED {
        // KVM's module for AMD processors shows a number.
        let value = if policy::nested() { "1" } else { "0" };
        return Some((NESTED, value.to_owned()));
    }
    if name == TDP_MMU {
        let has_it = policy::current().is_ok_and(|policies| policies.mmu == MmuKind::Tdp);
        return Some((TDP_MMU, if has_it { "Y" } else { "N" }.to_owned()));
    }
    let name = WRITABLE.iter().find(|known| **known == name)?;
    Some((
        name,
        match policy::value(name)?.as_str() {
            "on" => "Y".to_owned(),
            "off" => "N".to_owned(),
            number => number.to_owned(),
        },
    ))
}

/// Whether the parameter `name` can be written.
pub fn is_writable(name: &str) -> bool {
    WRITABLE.contains(&name)
}

/// Writes a parameter.
///
/// # Errors
/// `EACCES` for a parameter that cannot be written, `EINVAL` for an invalid value.
pub fn write(name: &str, text: &str) -> Result<()> {
    if !is_writable(name) {
        return fail(libc::EACCES);
    }
    let value = match text.trim_end_matches('\n') {
        "force" if name == NX_HUGE_PAGES => "on",
        // The software CPU does not have the erratum that needs the mitigation.
        "auto" | "never" if name == NX_HUGE_PAGES => "off",
        value => value,
    };
    let setting = Setting::parse(name, value).map_err(|_| Error::new(libc::EINVAL))?;
    policy::of_new_vms()?.set(setting);
    for vm in notify::live() {
        if name == NX_HUGE_PAGES && is_without_nx(&vm) {
            continue;
        }
        vm.set_policy(setting);
        if setting == Setting::NxHugePages(Switch::Off) {
            // Unmaps everything. So each page that was split because it was executed is mapped huge again at the
            // guest's next access. (When the policy is set to "on", the engine itself zaps the leaves that must not be
            // executed any more.)
            drop(vm.invalidate(Hva(0)..Hva(1 << 47)));
        }
    }
    recovery::reconsider();
    Ok(())
}

fn is_without_nx(vm: &Arc<EngineVm>) -> bool {
    let without = WITHOUT_NX.get();
    let without = without.lock().unwrap_or_else(PoisonError::into_inner);
    without
        .iter()
        .any(|other| other.as_ptr() == Arc::as_ptr(vm))
}

/// Carries out `KVM_CAP_VM_DISABLE_NX_HUGE_PAGES`, for a VM that has no vCPUs yet.
///
/// # Errors
/// `EPERM` for a thread without CAP_SYS_BOOT. This is KVM's rule, because on affected processors a guest could then
/// crash the host.
pub(crate) fn disable_nx(vm: &Arc<EngineVm>) -> Result<()> {
    if !may_reboot() {
        return fail(libc::EPERM);
    }
    let without = WITHOUT_NX.get();
    let mut without = without.lock().unwrap_or_else(PoisonError::into_inner);
    without.retain(|vm| vm.strong_count() != 0);
    crate::heap::reserve(&mut without, 1)?;
    without.push(Arc::downgrade(vm));
    vm.set_policy(Setting::NxHugePages(Switch::Off));
    Ok(())
}

/// Whether this thread has the capability CAP_SYS_BOOT.
fn may_reboot() -> bool {
    const CAP_SYS_BOOT: u32 = 22;
    /// _LINUX_CAPABILITY_VERSION_3: each set has two words.
    const VERSION: u32 = 0x2008_0522;
    let mut header = [VERSION, 0];
    // The words are the lower halves of the effective, the permitted and the inheritable set, and then their upper
    // halves.
    let mut sets = [0u32; 6];
    // SAFETY: the call gets a live header, and live memory for the sets of the version that the header names.
    let asked = unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()) };
    asked == 0 && sets[0] >> CAP_SYS_BOOT & 1 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let name = "nx_huge_pages_recovery_ratio";
        write(name, "7\n").unwrap();
        assert_eq!(read(name).unwrap(), (name, "7".to_owned()));
        assert_eq!(write(name, "seven").unwrap_err().errno(), libc::EINVAL);
        assert_eq!(write("tdp_mmu", "N").unwrap_err().errno(), libc::EACCES);
        assert_eq!(read("tdp_mmu").unwrap().1, "Y");
        assert!(read("no_such_parameter").is_none());
    }
}
