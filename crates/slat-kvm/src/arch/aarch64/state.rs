//! arm64's state of a VM, and of the part of a vCPU that other threads use.

use crate::arch::aarch64::eager_split;
use crate::arch::aarch64::invalidated::Invalidated;
use crate::arch::aarch64::limits::MAX_VCPUS;
use crate::arch::aarch64::settings::Settings;
use crate::arch::aarch64::timer::Offsets;
use crate::compiler;
use crate::engine::{EngineVm, TableFormat};
use crate::errno::{Result, fail};
use crate::policy;
use crate::words::Jit;
use kvm_bindings::{
    KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, KVM_CAP_MAX_VCPUS, KVM_CAP_MSI_DEVID,
    KVM_VM_TYPE_ARM_IPA_SIZE_MASK, kvm_userspace_memory_region2,
};
use slat_a64::{Compile, Compiler};
use slat_gic::gic::{Model, V2_VCPUS, V3_VCPUS};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The number of bits of an IPA (a guest-physical address) if the client does not set it: KVM's `KVM_PHYS_SHIFT`.
const DEFAULT_IPA_BITS: u32 = 40;
/// The least number of bits of an IPA: the smallest PARange of a processor.
const LEAST_IPA_BITS: u32 = 32;

/// Returns the most bits that an IPA can have: as many as the tables of this process translate.
pub(crate) fn ipa_limit() -> u32 {
    let format = policy::current().map_or_else(|_| TableFormat::default(), |now| now.format);
    match format {
        TableFormat::Aarch64Lpa2 => 52,
        TableFormat::Aarch64 | TableFormat::Aarch64Kib16 | TableFormat::Aarch64Kib64 => 48,
    }
}

/// PSCI 1.3: the version of PSCI that a new VM's guest sees. The major version is in the upper half.
pub(crate) const PSCI_1_3: u64 = 0x1_0003;

/// The type of a VM, which a client gives to `KVM_CREATE_VM`: the number of bits of an IPA (api.rst 4.2).
#[derive(Clone, Copy, Debug)]
pub(crate) struct VmType {
    ipa_bits: u32,
}

impl VmType {
    /// Returns the type that has this number. 0 means 40 bits.
    ///
    /// # Errors
    /// `EINVAL` for a number of bits below 32 or above `KVM_CAP_ARM_VM_IPA_SIZE`, and for other bits of the number:
    /// slat has no protected VMs, whose memory the host cannot access.
    pub(crate) fn of(number: u64) -> Result<Self> {
        if number & !u64::from(KVM_VM_TYPE_ARM_IPA_SIZE_MASK) != 0 {
            return fail(libc::EINVAL);
        }
        match number as u32 {
            0 => Ok(VmType {
                ipa_bits: DEFAULT_IPA_BITS,
            }),
            ipa_bits if (LEAST_IPA_BITS..=ipa_limit()).contains(&ipa_bits) => {
                Ok(VmType { ipa_bits })
            }
            _ => fail(libc::EINVAL),
        }
    }

    /// Whether memory can be private in VMs of this type. Always `false` on arm64.
    pub(crate) fn is_protected(self) -> bool {
        false
    }
}

/// arm64's state of a VM.
pub(crate) struct VmState {
    /// The compiler of the guest's hot code, and the rule that says which code is compiled. `None`: no code is
    /// compiled.
    pub(crate) compiler: Option<(Arc<Compiler>, Compile)>,
    ipa_bits: u32,
    /// Whether the client wants to see accesses to devices that the processor's syndrome does not describe.
    reports_nisv: AtomicBool,
    /// The offsets of the guest's counters.
    pub(crate) counter_offsets: Offsets,
    /// The version of PSCI that the guest sees.
    psci_version: AtomicU64,
    /// Whether the guest may ask for the VM to be suspended.
    can_suspend: AtomicBool,
    settings: Mutex<Settings>,
    /// Whether the VM has an ITS, so that messages need the ids of their devices.
    needs_device_ids: AtomicBool,
    /// The number of vCPUs that the VM can have.
    most_vcpus: AtomicU32,
}

impl VmState {
    /// Creates the state of a new VM.
    ///
    /// # Errors
    /// No error can happen.
    pub(crate) fn new(vm_type: VmType, jit: Jit) -> Result<Self> {
        Ok(VmState {
            compiler: compiler::start(jit),
            ipa_bits: vm_type.ipa_bits,
            reports_nisv: AtomicBool::new(false),
            counter_offsets: Offsets::default(),
            psci_version: AtomicU64::new(PSCI_1_3),
            can_suspend: AtomicBool::new(false),
            settings: Mutex::default(),
            needs_device_ids: AtomicBool::new(false),
            most_vcpus: AtomicU32::new(MAX_VCPUS),
        })
    }

    /// Locks and returns the settings that the client has chosen.
    pub(crate) fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the version of PSCI that the guest sees.
    pub(crate) fn psci_version(&self) -> u64 {
        self.psci_version.load(Ordering::Relaxed)
    }

    /// Sets the version of PSCI that the guest sees, on all vCPUs.
    pub(crate) fn set_psci_version(&self, version: u64) {
        self.psci_version.store(version, Ordering::Relaxed);
    }

    /// Enables `KVM_CAP_ARM_SYSTEM_SUSPEND`.
    pub(crate) fn allow_suspend(&self) {
        self.can_suspend.store(true, Ordering::Relaxed);
    }

    /// Whether `KVM_CAP_ARM_SYSTEM_SUSPEND` is enabled.
    pub(crate) fn can_suspend(&self) -> bool {
        self.can_suspend.load(Ordering::Relaxed)
    }

    /// Returns the number of bits of a guest-physical address.
    pub(crate) fn ipa_bits(&self) -> u32 {
        self.ipa_bits
    }

    /// Enables `KVM_CAP_ARM_NISV_TO_USER`.
    pub(crate) fn report_nisv(&self) {
        self.reports_nisv.store(true, Ordering::Relaxed);
    }

    /// Whether `KVM_CAP_ARM_NISV_TO_USER` is enabled.
    pub(crate) fn reports_nisv(&self) -> bool {
        self.reports_nisv.load(Ordering::Relaxed)
    }

    /// Returns the value of a capability that the VM's client has set. `None`: the capability has the same value for
    /// all VMs.
    pub(crate) fn extension(&self, cap: u64, engine: &EngineVm) -> Option<i32> {
        match u32::try_from(cap) {
            Ok(KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE) => Some(eager_split::chunk(engine) as i32),
            Ok(KVM_CAP_MSI_DEVID) => Some(self.needs_device_ids.load(Ordering::Relaxed).into()),
            Ok(KVM_CAP_MAX_VCPUS) => Some(self.most_vcpus.load(Ordering::Relaxed) as i32),
            _ => None,
        }
    }

    /// Makes the ids of devices necessary in messages. Call when the VM gets an ITS.
    pub(crate) fn need_device_ids(&self) {
        self.needs_device_ids.store(true, Ordering::Relaxed);
    }

    /// Limits the number of vCPUs to those that a GIC of this model supports. Call when the VM gets a GIC.
    pub(crate) fn limit_vcpus(&self, model: Model) {
        let most = most_vcpus(model) as u32;
        self.most_vcpus.store(most, Ordering::Relaxed);
    }

    /// Checks what the architecture asks of a memslot. `has_private`: the slot has private memory besides the memory
    /// that the client shares with the guest.
    ///
    /// # Errors
    /// KVM's: `EFAULT` for a memslot beyond the guest's last IPA, `EINVAL` for private memory, which no VM has.
    pub(crate) fn check_slot(
        &self,
        region: &kvm_userspace_memory_region2,
        has_private: bool,
    ) -> Result<()> {
        let end = region.guest_phys_addr.saturating_add(region.memory_size);
        match () {
            () if end > 1 << self.ipa_bits => fail(libc::EFAULT),
            () if has_private => fail(libc::EINVAL),
            () => Ok(()),
        }
    }
}

/// Returns the number of vCPUs that a VM with this GIC can have.
pub(crate) fn most_vcpus(model: Model) -> usize {
    match model {
        Model::V2 => V2_VCPUS,
        Model::V3 => V3_VCPUS,
    }
}

/// The registers with which a vCPU begins to execute after another vCPU has started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Start {
    /// The address of the first instruction.
    pub(crate) pc: u64,
    /// The value that X0 gets (PSCI's context id).
    pub(crate) context: u64,
}

/// The power state of a vCPU, which says whether the vCPU executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Power {
    On,
    Off,
    /// The client has suspended the vCPU. It stays suspended until an interrupt is pending.
    Suspended,
    /// Another vCPU has started this vCPU, but the thread of this vCPU has not reset it yet.
    Starting(Start),
}

/// arm64's state of a vCPU that other threads use.
pub(crate) struct VcpuShared {
    /// MPIDR_EL1.
    mpidr: AtomicU64,
    /// The number of vCPUs that were created before this vCPU. It is the vCPU's index in the GIC.
    pub(crate) index: usize,
    /// Whether the vCPU has begun to run.
    has_run: AtomicBool,
    power: Mutex<Power>,
    /// The interrupt lines of the processor that are asserted, as [`LINE_IRQ`] and [`LINE_FIQ`]. The GIC sets them, or
    /// without GIC the client.
    pub(crate) lines: AtomicU32,
    pub(crate) invalidated: Invalidated,
}

/// The line of IRQs.
pub(crate) const LINE_IRQ: u32 = 1 << 0;
/// The line of FIQs.
pub(crate) const LINE_FIQ: u32 = 1 << 1;

/// MPIDR_EL1: the bit that is always 1, and the fields of the affinity.
const MPIDR_ONE: u64 = 1 << 31;
const AFFINITY: u64 = 0xff_00ff_ffff;

impl VcpuShared {
    /// Creates the state of a new vCPU. The affinity is computed from the id as in KVM: Aff0 counts to 16, so 16 vCPUs
    /// have the same Aff1.
    pub(crate) fn new(id: u32, index: usize) -> Self {
        let id = u64::from(id);
        VcpuShared {
            mpidr: AtomicU64::new(
                MPIDR_ONE | id & 15 | (id >> 4 & 0xff) << 8 | (id >> 12 & 0xff) << 16,
            ),
            index,
            has_run: AtomicBool::new(false),
            power: Mutex::new(Power::On),
            lines: AtomicU32::new(0),
            invalidated: Invalidated::default(),
        }
    }

    /// Whether the vCPU has begun to run.
    pub(crate) fn has_run(&self) -> bool {
        self.has_run.load(Ordering::Relaxed)
    }

    /// Records that the vCPU has begun to run. Call before it runs.
    pub(crate) fn begin_to_run(&self) {
        self.has_run.store(true, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Power> {
        self.power.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns MPIDR_EL1.
    pub(crate) fn mpidr(&self) -> u64 {
        self.mpidr.load(Ordering::Relaxed)
    }

    /// Sets MPIDR_EL1 for the client.
    pub(crate) fn set_mpidr(&self, value: u64) {
        self.mpidr.store(value, Ordering::Relaxed);
    }

    /// Returns the affinity fields of MPIDR_EL1, by which software names the vCPU.
    pub(crate) fn affinity(&self) -> u64 {
        self.mpidr() & AFFINITY
    }

    /// Returns the power state, which says whether the vCPU executes.
    pub(crate) fn power(&self) -> Power {
        *self.lock()
    }

    /// Whether the vCPU executes, or will as soon as its thread runs.
    pub(crate) fn is_on(&self) -> bool {
        self.power() != Power::Off
    }

    /// Sets the power state, which says whether the vCPU executes.
    pub(crate) fn set_power(&self, power: Power) {
        *self.lock() = power;
    }

    /// Starts the vCPU if it is off. Returns its power state before the call.
    pub(crate) fn start(&self, start: Start) -> Power {
        let mut power = self.lock();
        let before = *power;
        if before == Power::Off {
            *power = Power::Starting(start);
        }
        before
    }

    /// If another vCPU has started this vCPU, sets its state to on, and returns where it begins to execute. Otherwise
    /// returns `None`.
    pub(crate) fn take_start(&self) -> Option<Start> {
        let mut power = self.lock();
        match *power {
            Power::Starting(start) => {
                *power = Power::On;
                Some(start)
            }
            Power::On | Power::Off | Power::Suspended => None,
        }
    }
}
