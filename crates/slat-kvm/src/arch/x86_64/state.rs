//! x86's state of a VM, and of the part of a vCPU that other threads use.

use crate::arch::x86_64::clock::VmClock;
use crate::arch::x86_64::hyperv::{Hyperv, VirtualProcessor};
use crate::arch::x86_64::options::Options;
use crate::arch::x86_64::quirks::Quirks;
use crate::compiler;
use crate::engine::EngineVm;
use crate::errno::{Result, fail, no_memory};
use crate::words::Jit;
use kvm_bindings::*;
use slat_irqchip::lapic::Lapic;
use slat_x86::{CodePages, Compile, Compiler};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};

/// The type of a VM: the argument of `KVM_CREATE_VM`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct VmType {
    is_protected: bool,
}

impl VmType {
    /// Returns the type that has this number.
    ///
    /// # Errors
    /// `EINVAL` for a type that is not supported.
    pub(crate) fn of(number: u64) -> Result<Self> {
        match u32::try_from(number) {
            Ok(KVM_X86_DEFAULT_VM) => Ok(VmType {
                is_protected: false,
            }),
            Ok(KVM_X86_SW_PROTECTED_VM) => Ok(VmType { is_protected: true }),
            _ => fail(libc::EINVAL),
        }
    }

    /// Whether memory can be private in VMs of this type.
    pub(crate) fn is_protected(self) -> bool {
        self.is_protected
    }
}

/// x86's state of a VM.
pub(crate) struct VmState {
    /// The guest's pages that hold decoded code. CPUs use them to learn of each other's stores to code.
    pub(crate) code: Arc<CodePages>,
    /// The compiler of the guest's hot code, and the rule that says which code is compiled. `None`: no code is
    /// compiled.
    pub(crate) compiler: Option<(Arc<Compiler>, Compile)>,
    pub(crate) clock: VmClock,
    pub(crate) boot_cpu: AtomicU32,
    /// The limit of vCPUs' ids (`KVM_CAP_MAX_VCPU_ID`); 0 means that no limit is set.
    pub(crate) max_vcpu_ids: AtomicU32,
    pub(crate) quirks: Quirks,
    pub(crate) options: Options,
    pub(crate) hyperv: Hyperv,
}

impl VmState {
    /// Creates the state of a new VM.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(_: VmType, jit: Jit) -> Result<Self> {
        Ok(VmState {
            code: CodePages::try_new().map_err(no_memory)?,
            compiler: compiler::start(jit),
            clock: VmClock::new(),
            boot_cpu: AtomicU32::new(0),
            max_vcpu_ids: AtomicU32::new(0),
            quirks: Quirks::default(),
            options: Options::default(),
            hyperv: Hyperv::default(),
        })
    }

    /// Accepts every memslot: the engine's tables are the only limit.
    pub(crate) fn check_slot(
        &self,
        _: &kvm_userspace_memory_region2,
        _has_private: bool,
    ) -> Result<()> {
        Ok(())
    }

    /// Returns the value of a capability that the VM's client has set. `None`: the capability has the same value for
    /// all VMs.
    pub(crate) fn extension(&self, cap: u64, _: &EngineVm) -> Option<i32> {
        match u32::try_from(cap) {
            // As in KVM, the result is only the lower 32 bits of the VM's value.
            Ok(KVM_CAP_X86_APIC_BUS_CYCLES_NS) => Some(self.options.apic_bus_cycle_ns() as i32),
            _ => None,
        }
    }
}

/// x86's state of a vCPU that other threads use.
pub(crate) struct VcpuShared {
    pub(crate) lapic: Option<Mutex<Lapic>>,
    /// The pending events, as bits: `VcpuCommon::NMIS`, `INIT`, `SIPI`, `UNHALT`, `SMI`.
    pub(crate) signals: AtomicU32,
    pub(crate) sipi_vector: AtomicU32,
    /// The vCPU as a virtual processor of Hyper-V's interface.
    pub(crate) vp: VirtualProcessor,
}

impl VcpuShared {
    /// Creates the state of a new vCPU. `index` is the number of vCPUs that the VM has had before.
    pub(crate) fn new(index: u32, lapic: Option<Lapic>) -> Self {
        VcpuShared {
            lapic: lapic.map(Mutex::new),
            signals: AtomicU32::new(0),
            sipi_vector: AtomicU32::new(0),
            vp: VirtualProcessor::new(index),
        }
    }
}
