//! One VM: its memory (the engine's VM), its devices, its interrupt controllers and its clock.
//!
//! | file | calls for |
//! |---|---|
//! | `memory` | memslots and private memory |
//! | `dirty` | dirty logs and rings |
//! | `interrupts` | interrupt controllers, lines, messages, irqfds |
//! | `clock` | the VM's clock, and the TSC's frequency |
//! | `caps` | capabilities |
//!
//! A VM knows its vCPUs only as targets of interrupts; [`crate::vcpu`] and all modules that run a vCPU know the VM.

mod caps;
mod clock;
mod dirty;
mod interrupts;
mod memory;
mod userfault;

use crate::arch::clock::VmClock;
use crate::arch::compiler;
use crate::arch::hyperv::Hyperv;
use crate::arch::msr_filter::MsrFilter;
use crate::arch::options::Options;
use crate::arch::quirks::Quirks;
use crate::call::{Call, Life};
use crate::caps::ADDRESS_SPACES;
use crate::coalesced::Coalesced;
use crate::dirty::Rings;
use crate::engine::{EngineVm, TableFormat};
use crate::errno::{Error, Result, fail, no_memory};
use crate::guest_memfd::PrivateMemory;
use crate::io_devices::Bus;
use crate::irq::Interrupts;
use crate::irq::vcpus::{MAX_VCPU_ID, Vcpus};
use crate::policy::{self, Jit};
use crate::vfio::Devices;
use crate::{last_thread, notify, profile, publish, recovery, report, vcpu_common};
use kvm_bindings::*;
use slat::{CreateVmError, MmuKind};
use slat_x86::{CodePages, Compile, Compiler};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, RwLockReadGuard, RwLockWriteGuard};

/// The address space of vCPUs outside system management mode.
pub(crate) const ORDINARY: usize = 0;
/// The address space of vCPUs in system management mode.
pub(crate) const SMM: usize = 1;

/// KVM's lower limit for `KVM_SET_NR_MMU_PAGES`.
const MIN_MMU_PAGES: u64 = 64;

/// A VM. Its vCPUs keep it alive. It lives on after its descriptor is closed.
pub struct VmObject {
    pub(crate) engine: Arc<EngineVm>,
    /// The number of VMs that the process had created before.
    pub(crate) number: u64,
    life: Life,
    /// The pages with decoded code, by which the CPUs tell each other of stores to code.
    pub(crate) code: Arc<CodePages>,
    /// The compiler of the guest's hot code.
    pub(crate) compiler: Option<(Arc<Compiler>, Compile)>,
    pub(crate) clock: VmClock,
    pub(crate) interrupts: Arc<Interrupts>,
    /// The devices that the guest reaches without the client.
    pub(crate) bus: Bus,
    boot_cpu: AtomicU32,
    /// The limit of vCPUs' ids (`KVM_CAP_MAX_VCPU_ID`); 0 means that no limit is set.
    max_vcpu_ids: AtomicU32,
    pub(crate) rings: Rings,
    pub(crate) coalesced: Coalesced,
    /// Whether the VM is of the type `KVM_X86_SW_PROTECTED_VM`, so that its memory can be private.
    protected: bool,
    pub(crate) private: PrivateMemory,
    /// Held while a slot and its bitmap of absent pages change.
    userfault_turn: Mutex<()>,
    pub(crate) devices: Devices,
    pub(crate) quirks: Quirks,
    pub(crate) options: Options,
    pub(crate) hyperv: Hyperv,
}

impl std::fmt::Debug for VmObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmObject")
            .field("vcpus", &self.vcpus().len())
            .finish_non_exhaustive()
    }
}

impl VmObject {
    /// Creates a VM without memory and vCPUs. `protected`: the VM is of the type `KVM_X86_SW_PROTECTED_VM`. `mmu` makes
    /// its tables, and `jit` says which code is compiled. `None`: the environment decides.
    ///
    /// # Errors
    /// `ENOMEM`; `EINVAL` for invalid policies in the environment, and for an MMU that does not exist for the format;
    /// the host's error for setting up the platform.
    pub(crate) fn new(
        protected: bool,
        mmu: Option<MmuKind>,
        jit: Option<Jit>,
    ) -> Result<Arc<Self>> {
        let policies = policy::current()?;
        let platform = slat_host::HostPlatform::new()
            .map_err(|error| Error::new(error.raw_os_error().unwrap_or(libc::EIO)))?;
        let mut config = slat::Config::default().with_spaces(ADDRESS_SPACES as usize);
        config.policy = policy::of_new_vms()?.get();
        config.mmu = mmu.unwrap_or(policies.mmu);
        let format = match mmu {
            Some(mmu) if !policies.format.has(mmu) => TableFormat::of(mmu),
            _ => policies.format,
        };
        config.nested = policies.nested && format.nests(config.mmu);
        if protected && config.mmu == MmuKind::Shadow {
            // KVM without the TDP MMU refuses this, too.
            return fail(libc::EINVAL);
        }
        let engine = EngineVm::new(format, platform, config).map_err(|error| match error {
            CreateVmError::NoSuchMmu { .. } => Error::new(libc::EINVAL),
            _ => no_memory(error),
        })?;
        let code = CodePages::try_new().map_err(no_memory)?;
        let coalesced = Coalesced::new()?;
        last_thread::start();
        let number = publish::vm_begins(&engine)?;
        notify::register(&engine);
        recovery::begin();
        vcpu_common::prepare();
        profile::start();
        Ok(Arc::new(VmObject {
            engine,
            number,
            life: Life::begin(),
            code,
            compiler: compiler::start(jit.unwrap_or(policies.jit)),
            clock: VmClock::new(),
            interrupts: Arc::default(),
            bus: Bus::default(),
            boot_cpu: AtomicU32::new(0),
            max_vcpu_ids: AtomicU32::new(0),
            rings: Rings::default(),
            coalesced,
            protected,
            private: PrivateMemory::default(),
            userfault_turn: Mutex::default(),
            devices: Devices::default(),
            quirks: Quirks::default(),
            options: Options::default(),
            hyperv: Hyperv::default(),
        }))
    }

    /// Begins a call. Call in every public method of the VM and its vCPUs.
    ///
    /// # Errors
    /// The errors are those of [`still_alive`](Self::still_alive).
    pub(crate) fn begin(&self) -> Result<Call<'_>> {
        self.life.call(&self.engine)
    }

    /// Repeats the check of [`begin`](Self::begin). Call after a wait, during which another call may have panicked.
    ///
    /// # Errors
    /// `EIO` in a forked child, and after a call that panicked.
    pub(crate) fn still_alive(&self) -> Result<()> {
        self.life.check()
    }

    /// Makes the VM dead, because its guest cannot continue. After that all calls return `EIO`.
    pub(crate) fn end_life(&self) {
        self.life.end(&self.engine);
    }

    /// Returns the number of address spaces in which a client may create memslots (`KVM_CAP_MULTI_ADDRESS_SPACE`). The
    /// number is 1 if memory can be private.
    pub(crate) fn address_spaces(&self) -> usize {
        match self.protected {
            true => 1,
            false => ADDRESS_SPACES as usize,
        }
    }

    /// Whether this is a forked child. In a child the VM's locks may be held forever, and the VM's threads do not
    /// exist.
    pub fn is_foreign(&self) -> bool {
        self.life.is_foreign()
    }

    /// Whether a vCPU that is created now can have this id. The first vCPU sets the limit.
    pub(crate) fn allows_vcpu_id(&self, id: u32) -> bool {
        let (unset, set) = (Ordering::Relaxed, Ordering::Relaxed);
        let limit = match (self.max_vcpu_ids).compare_exchange(0, MAX_VCPU_ID, unset, set) {
            Ok(_) => MAX_VCPU_ID,
            Err(limit) => limit,
        };
        id < limit
    }

    /// Whether the vCPU with this id is the bootstrap processor.
    pub(crate) fn is_bootstrap(&self, id: u32) -> bool {
        id == self.boot_cpu.load(Ordering::Relaxed)
    }

    pub(crate) fn vcpus(&self) -> RwLockReadGuard<'_, Vcpus> {
        self.interrupts.vcpus.read()
    }

    pub(crate) fn vcpus_mut(&self) -> RwLockWriteGuard<'_, Vcpus> {
        self.interrupts.vcpus.write()
    }

    /// `KVM_SET_TSS_ADDR`: checks the address and has no effect. The address is that of three pages that only VMX
    /// without unrestricted guest needs.
    ///
    /// # Errors
    /// `EINVAL` when the pages would not end below 4 GiB.
    pub fn set_tss_addr(&self, address: u64) -> Result<()> {
        let _call = self.begin()?;
        if address > u64::from(u32::MAX) - 3 * 4096 + 1 {
            return fail(libc::EINVAL);
        }
        Ok(())
    }

    /// `KVM_SET_IDENTITY_MAP_ADDR`: has no effect, like [`set_tss_addr`](Self::set_tss_addr).
    ///
    /// # Errors
    /// `EINVAL` once there are vCPUs.
    pub fn set_identity_map_addr(&self, _address: u64) -> Result<()> {
        let _call = self.begin()?;
        if self.vcpus().is_empty() {
            Ok(())
        } else {
            fail(libc::EINVAL)
        }
    }

    /// `KVM_SET_BOOT_CPU_ID`.
    ///
    /// # Errors
    /// `EBUSY` once there are vCPUs, `EINVAL` for an id beyond the limit. As in KVM, the limit itself is accepted.
    pub fn set_boot_cpu_id(&self, id: u64) -> Result<()> {
        let _call = self.begin()?;
        if !self.vcpus().is_empty() {
            return fail(libc::EBUSY);
        }
        let limit = match self.max_vcpu_ids.load(Ordering::Relaxed) {
            0 => MAX_VCPU_ID,
            limit => limit,
        };
        if id > u64::from(limit) {
            return fail(libc::EINVAL);
        }
        self.boot_cpu.store(id as u32, Ordering::Relaxed);
        Ok(())
    }

    /// `KVM_SET_NR_MMU_PAGES`: limits the number of shadow pages. The TDP MMU has no shadow pages, so the call then has
    /// no effect.
    ///
    /// # Errors
    /// `EINVAL` for less than KVM's minimum.
    pub fn set_nr_mmu_pages(&self, pages: u64) -> Result<()> {
        let _call = self.begin()?;
        if pages < MIN_MMU_PAGES {
            return fail(libc::EINVAL);
        }
        self.engine.set_mmu_pages(pages);
        Ok(())
    }

    /// `KVM_REGISTER_COALESCED_MMIO`: writes to the range go to the ring.
    ///
    /// # Errors
    /// `EINVAL` for a kind that is neither memory nor ports, `ENOSPC` for too many ranges, `ENOMEM`.
    pub fn register_coalesced(&self, zone: &kvm_coalesced_mmio_zone) -> Result<()> {
        let _call = self.begin()?;
        self.bus.add_zone(&self.engine, zone)
    }

    /// `KVM_UNREGISTER_COALESCED_MMIO`: removes every registered range that contains the given one.
    ///
    /// # Errors
    /// `EINVAL` for a kind that is neither memory nor ports, `ENOMEM`.
    pub fn unregister_coalesced(&self, zone: &kvm_coalesced_mmio_zone) -> Result<()> {
        let _call = self.begin()?;
        self.bus.remove_zones(&self.engine, zone)
    }

    /// `KVM_IOEVENTFD`.
    ///
    /// # Errors
    /// For a registration: `EINVAL` for unknown flags, a length other than 0, 1, 2, 4 and 8, a range that wraps around,
    /// and a value to compare without a length; `EEXIST` if one write could match this registration and an earlier one.
    /// For a removal: `ENOENT` if there is no such registration. For both: `EBADF`, `EINVAL` for a descriptor that is
    /// no eventfd, `ENOMEM`, `EMFILE`.
    pub fn ioeventfd(&self, asked: &kvm_ioeventfd) -> Result<()> {
        let _call = self.begin()?;
        self.bus.change_event(&self.engine, asked)
    }

    /// `KVM_HYPERV_EVENTFD`: adds or removes a connection that the guest signals by a hypercall, as an eventfd.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags, an id of more than 24 bits, and a descriptor that is no eventfd; `EEXIST` for adding
    /// an id that is in use, `ENOENT` for removing an id that is not in use; `EBADF`, `EMFILE`, `ENOMEM`.
    pub fn hyperv_eventfd(&self, asked: &kvm_hyperv_eventfd) -> Result<()> {
        let _call = self.begin()?;
        self.hyperv.connections.change(asked)
    }

    /// `KVM_X86_SET_MSR_FILTER`.
    ///
    /// # Errors
    /// `EINVAL` for an invalid filter, `EFAULT` for a bitmap that cannot be read, `ENOMEM`.
    pub fn set_msr_filter(&self, filter: &kvm_msr_filter) -> Result<()> {
        let _call = self.begin()?;
        let filter = MsrFilter::new(filter, crate::user::read_words)?;
        self.options.set_msr_filter(filter);
        Ok(())
    }

    /// Runs `work` if the VM has no vCPUs, and prevents their creation meanwhile. Otherwise fails with `EINVAL`.
    pub(crate) fn before_vcpus(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let vcpus = self.vcpus_mut();
        if vcpus.is_empty() {
            work()
        } else {
            fail(libc::EINVAL)
        }
    }
}

impl Drop for VmObject {
    fn drop(&mut self) {
        if self.is_foreign() {
            return;
        }
        notify::unregister(&self.engine);
        report::vm_ends(&self.engine);
        publish::vm_ends(self.number);
    }
}
