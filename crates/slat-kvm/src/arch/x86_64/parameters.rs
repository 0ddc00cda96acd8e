//! The parameters of KVM's modules for x86, and the effect of writing them.

use crate::arch::x86_64::cpu_policies;
use crate::arch::x86_64::limits::USER_END;
use crate::arch::x86_64::policy::NESTED;
use crate::engine::EngineVm;
use crate::errno::{Error, Result, fail};
use crate::process::PerProcess;
use crate::{notify, policy, recovery};
use slat::{Hva, MmuKind, Setting, Switch};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The parameters that are policies of the engine. These parameters can be written.
pub(crate) const WRITABLE: &[&str] = &[
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
    // The processors' virtual interrupt controllers, AMD's AVIC and Intel's APICv, are off.
    ("avic", "N"),
    ("enable_apicv", "N"),
    ("halt_poll_ns", "0"),
    ("min_timer_period_us", "200"),
];
const NX_HUGE_PAGES: &str = "nx_huge_pages";
/// The parameter that says which MMU the VMs of this process have. This parameter cannot be written, as in KVM once the
/// module is loaded.
const TDP_MMU: &str = "tdp_mmu";

/// VMs that have `KVM_CAP_VM_DISABLE_NX_HUGE_PAGES`.
static WITHOUT_NX: PerProcess<Mutex<Vec<Weak<EngineVm>>>> = PerProcess::new();

/// Returns the names of all parameters.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    let fixed = FIXED.iter().map(|(name, _)| *name);
    let all = WRITABLE.iter().copied().chain(fixed);
    // `nested` says whether guests can have nested guests. In KVM, `nested` is a parameter of the processor's module.
    // Neither `tdp_mmu` nor `nested` can be written.
    all.chain([TDP_MMU, NESTED])
}

/// Returns the value of a parameter, as the file shows it, without the newline. `None`: the process has no valid
/// policies.
pub(crate) fn value(name: &str) -> Option<String> {
    if let Some((_, value)) = FIXED.iter().find(|(known, _)| *known == name) {
        return Some((*value).to_owned());
    }
    let yes_or_no = |is_set| if is_set { "Y" } else { "N" }.to_owned();
    match name {
        // KVM's module for AMD processors shows 1 or 0, not Y or N.
        NESTED => Some(u8::from(cpu_policies::current().nested).to_string()),
        TDP_MMU => {
            let has_it = policy::current().is_ok_and(|policies| policies.mmu == MmuKind::Tdp);
            Some(yes_or_no(has_it))
        }
        _ => match policy::value(name)?.as_str() {
            "on" => Some(yes_or_no(true)),
            "off" => Some(yes_or_no(false)),
            number => Some(number.to_owned()),
        },
    }
}

/// Writes a parameter of [`WRITABLE`].
///
/// # Errors
/// `EINVAL` for an invalid value.
pub(crate) fn write(name: &str, text: &str) -> Result<()> {
    let value = match text {
        "force" if name == NX_HUGE_PAGES => "on",
        // The software CPU does not have the erratum that this parameter mitigates.
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
            // Zaps all memory. So each page that was split because the guest executed code in it is mapped huge again
            // at the next access. (When the policy is set to "on", the engine itself zaps the leaves that are no longer
            // allowed to be executable.)
            drop(vm.invalidate(Hva(0)..Hva(USER_END)));
        }
    }
    reconsider_recovery();
    Ok(())
}

/// Restarts the period of recovery, and starts its thread if recovery is enabled now. Call after a parameter has
/// changed.
fn reconsider_recovery() {
    recovery::begin();
    if let Some(recovery) = recovery::RECOVERY.peek() {
        *recovery.lock() += 1;
        recovery.changed.notify_one();
    }
}

fn is_without_nx(vm: &Arc<EngineVm>) -> bool {
    let without = WITHOUT_NX.get();
    let without = without.lock().unwrap_or_else(PoisonError::into_inner);
    without
        .iter()
        .any(|other| other.as_ptr() == Arc::as_ptr(vm))
}

/// Carries out `KVM_CAP_VM_DISABLE_NX_HUGE_PAGES`, for a VM that has no vCPUs.
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
    use crate::parameters::{read, write};

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
