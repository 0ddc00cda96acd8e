//! The part of the KVM API that the experiments use. Traits describe it, for slat in this process and for a real
//! `/dev/kvm`.
//!
//! slat-kvm's types and methods have the names that they have in kvm-ioctls. So one macro implements the traits for
//! both.

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KvmIrqRouting, kvm_irq_routing_entry, kvm_regs, kvm_sregs,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VcpuExit};
use slat::MmuKind;
use slat_kvm::engine::EngineVm;
use vmm_sys_util::eventfd::EventFd;

pub use crate::Failure;
use crate::compared::REAL_KVM;

/// A KVM: slat, or a real one.
pub trait Api: Sized {
    /// The name of the variant on this KVM in measurements.
    const NAME: &'static str;
    /// The type of this KVM's VMs.
    type Vm: VmApi;

    /// Opens the KVM.
    ///
    /// # Errors
    /// The errors of opening `/dev/kvm`.
    fn open() -> Result<Self, Failure>;

    /// Creates a VM without memory.
    ///
    /// # Errors
    /// KVM's errors.
    fn create_vm(&self) -> Result<Self::Vm, Failure>;

    /// Creates a vCPU whose CPUID reports all features that this KVM supports.
    ///
    /// # Errors
    /// KVM's errors.
    fn create_vcpu(&self, vm: &Self::Vm, id: u64) -> Result<<Self::Vm as VmApi>::Vcpu, Failure>;
}

/// A VM.
pub trait VmApi: Send + Sync {
    /// The type of this VM's vCPUs.
    type Vcpu: VcpuApi;

    /// Calls `KVM_SET_USER_MEMORY_REGION`.
    ///
    /// # Errors
    /// KVM's errors.
    ///
    /// The memory that backs the memslot must outlive the memslot. The guest may write to that memory at any time, so
    /// this process must not rely on values in it.
    unsafe fn set_region(&self, region: kvm_userspace_memory_region) -> Result<(), Failure>;

    /// Calls `KVM_CREATE_IRQCHIP`.
    ///
    /// # Errors
    /// KVM's errors.
    fn create_irqchip(&self) -> Result<(), Failure>;

    /// Calls `KVM_SET_GSI_ROUTING` with the route `route`, and `KVM_IRQFD` with `event`. From then on, each signal of
    /// `event` raises the interrupt of that route.
    ///
    /// # Errors
    /// KVM's errors.
    fn route_irqfd(&self, event: &EventFd, route: kvm_irq_routing_entry) -> Result<(), Failure>;

    /// Calls `KVM_IOEVENTFD`. From then on, each guest write to `gpa` signals `event`.
    ///
    /// # Errors
    /// KVM's errors.
    fn set_ioeventfd(&self, event: &EventFd, gpa: u64) -> Result<(), Failure>;

    /// Returns slat's engine, for its counters and policies. `None`: the KVM is a real one, not slat.
    fn engine(&self) -> Option<&EngineVm>;
}

/// A vCPU.
pub trait VcpuApi: Send {
    /// Calls `KVM_GET_SREGS`.
    ///
    /// # Errors
    /// KVM's errors.
    fn sregs(&self) -> Result<kvm_sregs, Failure>;

    /// Calls `KVM_SET_SREGS`.
    ///
    /// # Errors
    /// KVM's errors.
    fn set_sregs(&self, sregs: &kvm_sregs) -> Result<(), Failure>;

    /// Calls `KVM_GET_REGS`.
    ///
    /// # Errors
    /// KVM's errors.
    fn regs(&self) -> Result<kvm_regs, Failure>;

    /// Calls `KVM_SET_REGS`.
    ///
    /// # Errors
    /// KVM's errors.
    fn set_regs(&self, regs: &kvm_regs) -> Result<(), Failure>;

    /// Calls `KVM_GET_TSC_KHZ`.
    ///
    /// # Errors
    /// KVM's errors.
    fn tsc_khz(&self) -> Result<u32, Failure>;

    /// Calls `KVM_RUN`.
    ///
    /// # Errors
    /// KVM's errors.
    fn run(&mut self) -> Result<VcpuExit<'_>, Failure>;
}

macro_rules! api {
    ($name:ident, $backend:ident, $variant:expr, open $open:block, engine($vm:ident) $engine:expr) => {
        #[doc = concat!("KVM as `", stringify!($backend), "` has it.")]
        pub struct $name($backend::Kvm);

        impl Api for $name {
            const NAME: &'static str = $variant;
            type Vm = $backend::VmFd;

            fn open() -> Result<Self, Failure> {
                $open
                Ok($name($backend::Kvm::new()?))
            }

            fn create_vm(&self) -> Result<Self::Vm, Failure> {
                Ok(self.0.create_vm()?)
            }

            fn create_vcpu(&self, vm: &Self::Vm, id: u64) -> Result<$backend::VcpuFd, Failure> {
                let vcpu = vm.create_vcpu(id)?;
                vcpu.set_cpuid2(&self.0.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
                Ok(vcpu)
            }
        }

        impl VmApi for $backend::VmFd {
            type Vcpu = $backend::VcpuFd;

            unsafe fn set_region(
                &self,
                region: kvm_userspace_memory_region,
            ) -> Result<(), Failure> {
                // SAFETY: the called method has the same safety conditions as this one, and the caller fulfils them.
                unsafe { self.set_user_memory_region(region) }
                    .map_err(|e| format!("memslot {}: {e}", region.slot))?;
                Ok(())
            }

            fn create_irqchip(&self) -> Result<(), Failure> {
                Ok(self.create_irq_chip()?)
            }

            fn route_irqfd(
                &self,
                event: &EventFd,
                route: kvm_irq_routing_entry,
            ) -> Result<(), Failure> {
                self.set_gsi_routing(&KvmIrqRouting::from_entries(&[route])?)?;
                Ok(self.register_irqfd(event, route.gsi)?)
            }

            fn set_ioeventfd(&self, event: &EventFd, gpa: u64) -> Result<(), Failure> {
                let address = IoEventAddress::Mmio(gpa);
                Ok(self.register_ioevent(event, &address, NoDatamatch)?)
            }

            fn engine(&self) -> Option<&EngineVm> {
                let $vm = self;
                $engine
            }
        }

        impl VcpuApi for $backend::VcpuFd {
            fn sregs(&self) -> Result<kvm_sregs, Failure> {
                Ok(self.get_sregs()?)
            }

            fn set_sregs(&self, sregs: &kvm_sregs) -> Result<(), Failure> {
                Ok($backend::VcpuFd::set_sregs(self, sregs)?)
            }

            fn regs(&self) -> Result<kvm_regs, Failure> {
                Ok(self.get_regs()?)
            }

            fn set_regs(&self, regs: &kvm_regs) -> Result<(), Failure> {
                Ok($backend::VcpuFd::set_regs(self, regs)?)
            }

            fn tsc_khz(&self) -> Result<u32, Failure> {
                Ok(self.get_tsc_khz()?)
            }

            fn run(&mut self) -> Result<VcpuExit<'_>, Failure> {
                Ok($backend::VcpuFd::run(self)?)
            }
        }
    };
}

api!(
    Slat, slat_kvm, "slat",
    // The experiments install no signal handler, so slat need not check for signals on vCPU threads.
    open { slat_kvm::watch_signals(); },
    engine(vm) Some(vm.engine())
);
impl Slat {
    /// Returns this KVM with the setting that `mmu` makes the tables of its VMs.
    #[must_use]
    pub fn with_mmu(self, mmu: MmuKind) -> Self {
        Slat(self.0.with_mmu(mmu))
    }
}

api!(
    RealKvm, kvm_ioctls, REAL_KVM,
    open {},
    engine(_vm) None
);
