//! The options that a client sets for a VM by `KVM_ENABLE_CAP`, except those that have a module of their own.

use crate::arch::x86_64::cpuid::is_amd;
use crate::arch::x86_64::msr_filter::MsrFilter;
use crate::errno::{Result, fail};
use kvm_bindings::*;
use slat_x86::BusLocks;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The value that `KVM_CHECK_EXTENSION` returns for `KVM_CAP_X86_DISABLE_EXITS`. The exit for PAUSE is always disabled:
/// PAUSE never ends `KVM_RUN`.
pub(crate) const DISABLED_EXITS: u32 = KVM_X86_DISABLE_EXITS_HLT | KVM_X86_DISABLE_EXITS_PAUSE;
/// All exits that a client may name, including those that slat does not offer to disable.
const KNOWN_EXITS: u64 =
    (DISABLED_EXITS | KVM_X86_DISABLE_EXITS_MWAIT | KVM_X86_DISABLE_EXITS_CSTATE) as u64;

/// KVM_HC_MAP_GPA_RANGE: the guest asks for memory to be private, or shared. The call exits to the client, if the
/// client has enabled this exit.
pub(crate) const MAP_GPA_RANGE: u32 = 12;
/// The hypercalls that a client can complete itself: the value of `KVM_CAP_EXIT_HYPERCALL`.
pub(crate) const HYPERCALL_EXITS: u32 = 1 << MAP_GPA_RANGE;

/// The value that `KVM_CHECK_EXTENSION` returns for `KVM_CAP_X86_BUS_LOCK_EXIT`: the modes of the detection.
pub(crate) const BUS_LOCK_MODES: u32 = KVM_BUS_LOCK_DETECTION_OFF | KVM_BUS_LOCK_DETECTION_EXIT;

/// The flags of `KVM_CAP_X86_NOTIFY_VMEXIT`, in the lower half of its argument.
pub(crate) const NOTIFY_FLAGS: u32 = KVM_X86_NOTIFY_VMEXIT_ENABLED | KVM_X86_NOTIFY_VMEXIT_USER;

/// The default length, in nanoseconds, of a cycle of the local APICs' bus. The bus then runs at 1 GHz.
pub(crate) const APIC_BUS_CYCLE_NS: u64 = 1;

/// The options of a VM.
#[derive(Debug)]
pub(crate) struct Options {
    /// `KVM_CAP_EXCEPTION_PAYLOAD`: a client distinguishes exceptions that are pending from those being delivered.
    exception_payload: AtomicBool,
    /// `KVM_CAP_X86_TRIPLE_FAULT_EVENT`: the client sees a pending triple fault as an event.
    triple_fault_event: AtomicBool,
    /// `KVM_CAP_EXIT_ON_EMULATION_FAILURE`: an instruction that slat does not have ends `KVM_RUN`, even in user mode.
    exit_on_emulation_failure: AtomicBool,
    /// `KVM_CAP_X86_DISABLE_EXITS` with `KVM_X86_DISABLE_EXITS_HLT`: halts do not end `KVM_RUN`.
    halts_inside: AtomicBool,
    /// `KVM_CAP_MSR_PLATFORM_INFO`: the guest can read the MSR PLATFORM_INFO.
    guest_reads_platform_info: AtomicBool,
    /// `KVM_CAP_X86_USER_SPACE_MSR`: the reasons for which a refused access exits to the client, one bit for each
    /// reason.
    user_space_msrs: AtomicU32,
    /// `KVM_CAP_EXIT_HYPERCALL`: the hypercalls that the client completes, one bit for each hypercall.
    hypercall_exits: AtomicU32,
    /// `KVM_CAP_X86_BUS_LOCK_EXIT`: a bus lock of the guest ends `KVM_RUN`.
    bus_locks_exit: AtomicBool,
    /// `KVM_CAP_X86_NOTIFY_VMEXIT`: the window in cycles of the TSC (upper half), and flags. 0 means no window.
    notify_vmexit: AtomicU64,
    /// `KVM_CAP_X86_APIC_BUS_CYCLES_NS`: the nanoseconds of a cycle of the local APICs' bus.
    apic_bus_cycle_ns: AtomicU64,
    /// Whether `KVM_X86_SET_MSR_FILTER` has set a filter. If not, MSR accesses do not acquire the filter's lock.
    has_msr_filter: AtomicBool,
    msr_filter: RwLock<MsrFilter>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            exception_payload: AtomicBool::default(),
            triple_fault_event: AtomicBool::default(),
            exit_on_emulation_failure: AtomicBool::default(),
            halts_inside: AtomicBool::default(),
            guest_reads_platform_info: AtomicBool::new(true),
            user_space_msrs: AtomicU32::default(),
            hypercall_exits: AtomicU32::default(),
            bus_locks_exit: AtomicBool::default(),
            notify_vmexit: AtomicU64::default(),
            apic_bus_cycle_ns: AtomicU64::new(APIC_BUS_CYCLE_NS),
            has_msr_filter: AtomicBool::default(),
            msr_filter: RwLock::default(),
        }
    }
}

impl Options {
    /// Sets the option of a capability. `None`: `cap` has no option in [`Options`].
    pub(crate) fn enable(&self, cap: u32, argument: u64) -> Option<Result<()>> {
        let switch = match cap {
            KVM_CAP_EXCEPTION_PAYLOAD => &self.exception_payload,
            KVM_CAP_X86_TRIPLE_FAULT_EVENT => &self.triple_fault_event,
            KVM_CAP_MSR_PLATFORM_INFO => &self.guest_reads_platform_info,
            KVM_CAP_EXIT_ON_EMULATION_FAILURE if argument & !1 != 0 => {
                return Some(fail(libc::EINVAL));
            }
            KVM_CAP_EXIT_ON_EMULATION_FAILURE => &self.exit_on_emulation_failure,
            KVM_CAP_X86_USER_SPACE_MSR => {
                if argument & !u64::from(KVM_MSR_EXIT_REASON_VALID_MASK) != 0 {
                    return Some(fail(libc::EINVAL));
                }
                self.user_space_msrs
                    .store(argument as u32, Ordering::Relaxed);
                return Some(Ok(()));
            }
            KVM_CAP_X86_BUS_LOCK_EXIT => {
                if argument & !u64::from(BUS_LOCK_MODES) != 0
                    || argument == u64::from(BUS_LOCK_MODES)
                {
                    return Some(fail(libc::EINVAL));
                }
                // As in KVM, no later call disables this exit.
                if argument & u64::from(KVM_BUS_LOCK_DETECTION_EXIT) != 0 {
                    self.bus_locks_exit.store(true, Ordering::Relaxed);
                }
                return Some(Ok(()));
            }
            KVM_CAP_EXIT_HYPERCALL => {
                if argument & !u64::from(HYPERCALL_EXITS) != 0 {
                    return Some(fail(libc::EINVAL));
                }
                self.hypercall_exits
                    .store(argument as u32, Ordering::Relaxed);
                return Some(Ok(()));
            }
            _ => return None,
        };
        switch.store(argument != 0, Ordering::Relaxed);
        Some(Ok(()))
    }

    /// Carries out `KVM_CAP_X86_DISABLE_EXITS`. As in KVM, no later call enables the exits again. Exits that slat does
    /// not offer to disable are ignored.
    ///
    /// # Errors
    /// `EINVAL` for unknown exits.
    pub(crate) fn disable_exits(&self, exits: u64) -> Result<()> {
        if exits & !KNOWN_EXITS != 0 {
            return fail(libc::EINVAL);
        }
        if exits & u64::from(KVM_X86_DISABLE_EXITS_HLT) != 0 {
            self.halts_inside.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    pub(crate) fn exception_payload(&self) -> bool {
        self.exception_payload.load(Ordering::Relaxed)
    }

    pub(crate) fn triple_fault_event(&self) -> bool {
        self.triple_fault_event.load(Ordering::Relaxed)
    }

    pub(crate) fn exit_on_emulation_failure(&self) -> bool {
        self.exit_on_emulation_failure.load(Ordering::Relaxed)
    }

    pub(crate) fn halts_inside(&self) -> bool {
        self.halts_inside.load(Ordering::Relaxed)
    }

    /// Returns how a bus lock of the guest is handled. If bus locks cause an exit, the exit is after the instruction
    /// with Intel's CPU model, and before the instruction with AMD's.
    pub(crate) fn bus_locks(&self) -> BusLocks {
        match self.bus_locks_exit.load(Ordering::Relaxed) {
            false => BusLocks::Executed,
            true if is_amd() => BusLocks::ExitBefore,
            true => BusLocks::ExitAfter,
        }
    }

    /// Returns the notify window in cycles of the TSC, if the client has asked for a notify window.
    pub(crate) fn notify_window(&self) -> Option<u64> {
        let asked = self.notify_vmexit.load(Ordering::Relaxed);
        (asked & u64::from(KVM_X86_NOTIFY_VMEXIT_ENABLED) != 0).then_some(asked >> 32)
    }

    /// Whether the client wants an exit when the window has expired.
    pub(crate) fn notifies_client(&self) -> bool {
        let asked = self.notify_vmexit.load(Ordering::Relaxed);
        asked & u64::from(KVM_X86_NOTIFY_VMEXIT_USER) != 0
    }

    pub(crate) fn set_notify_vmexit(&self, asked: u64) {
        self.notify_vmexit.store(asked, Ordering::Relaxed);
    }

    pub(crate) fn apic_bus_cycle_ns(&self) -> u64 {
        self.apic_bus_cycle_ns.load(Ordering::Relaxed)
    }

    pub(crate) fn set_apic_bus_cycle_ns(&self, nanoseconds: u64) {
        (self.apic_bus_cycle_ns).store(nanoseconds, Ordering::Relaxed);
    }

    pub(crate) fn guest_reads_platform_info(&self) -> bool {
        self.guest_reads_platform_info.load(Ordering::Relaxed)
    }

    /// Whether MSR accesses that are refused for `reason`, one of `KVM_MSR_EXIT_REASON_*`, exit to the client.
    pub(crate) fn answers_msrs(&self, reason: u32) -> bool {
        self.user_space_msrs.load(Ordering::Relaxed) & reason != 0
    }

    /// Whether the client completes the hypercall `nr`.
    pub(crate) fn answers_hypercall(&self, nr: u32) -> bool {
        self.hypercall_exits.load(Ordering::Relaxed) >> nr & 1 != 0
    }

    /// Whether the guest may access an MSR.
    pub(crate) fn allows_msr(&self, msr: u32, write: bool) -> bool {
        if !self.has_msr_filter.load(Ordering::Relaxed) {
            return true;
        }
        let filter = self.msr_filter.read();
        filter
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .allows(msr, write)
    }

    /// Replaces the MSR filter.
    pub(crate) fn set_msr_filter(&self, filter: MsrFilter) {
        let mut held = (self.msr_filter.write()).unwrap_or_else(|poisoned| poisoned.into_inner());
        self.has_msr_filter
            .store(!filter.allows_all(), Ordering::Relaxed);
        *held = filter;
    }
}
