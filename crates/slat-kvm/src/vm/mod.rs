//! One VM: its memory (the engine's VM), its devices, its interrupt controllers and its clock.
//!
//! | file | calls for |
//! |---|---|
//! | `memory` | memslots and private memory |
//! | `dirty` | dirty logs and rings |
//! | `interrupts` | lines, messages, routes, irqfds |
//! | `caps` | capabilities |
//!
//! A VM knows its vCPUs only as targets of interrupts; [`crate::vcpu`] and all modules that run a vCPU know the VM.

mod caps;
mod dirty;
mod interrupts;
mod memory;
mod userfault;

use crate::arch::{VmState, VmType};
use crate::call::{Call, Life};
use crate::caps::ADDRESS_SPACES;
use crate::coalesced::Coalesced;
use crate::dirty::Rings;
use crate::engine::{EngineVm, TableFormat};
use crate::errno::{Result, fail};
use crate::guest_memfd::PrivateMemory;
use crate::io_devices::Bus;
use crate::irq::Interrupts;
use crate::policy;
use crate::vcpus::Vcpus;
use crate::vfio::Devices;
use crate::words::Jit;
use crate::{arch, last_thread, notify, profile, publish, recovery, report, vcpu_common};
use kvm_bindings::*;
use slat::MmuKind;
use std::sync::{Arc, Mutex, RwLockReadGuard, RwLockWriteGuard};

/// A VM. Its vCPUs keep the VM alive, so the VM lives on after its descriptor is closed.
pub struct VmObject {
    pub(crate) engine: Arc<EngineVm>,
    /// The VM's number: how many VMs the process had created before this VM.
    pub(crate) number: u64,
    pub(crate) life: Life,
    pub(crate) interrupts: Arc<Interrupts>,
    /// The devices that the guest reaches without the client.
    pub(crate) bus: Bus,
    pub(crate) rings: Rings,
    pub(crate) coalesced: Coalesced,
    /// Whether the VM is of a type whose memory can be private.
    protected: bool,
    pub(crate) private: PrivateMemory,
    /// The lock that is held while a slot and its bitmap of absent pages change.
    userfault_turn: Mutex<()>,
    pub(crate) devices: Devices,
    /// The architecture's state of the VM.
    pub(crate) arch: VmState,
}

impl std::fmt::Debug for VmObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmObject")
            .field("vcpus", &self.vcpus().len())
            .finish_non_exhaustive()
    }
}

impl VmObject {
    /// Creates a VM of this type without memory and vCPUs. `mmu` makes its tables; `jit` says which code its
    /// CPUs compile. For each, `None` means that the environment decides.
    ///
    /// # Errors
    /// `ENOMEM`; `EINVAL` for invalid policies in the environment, for an MMU that does not exist for the format, and
    /// for a format whose pages are not as large as those of this process; the host's error for setting up the
    /// platform.
    pub(crate) fn new(
        vm_type: VmType,
        mmu: Option<MmuKind>,
        jit: Option<Jit>,
    ) -> Result<Arc<Self>> {
        let policies = policy::current()?;
        let mut config = slat::Config::default().with_spaces(ADDRESS_SPACES as usize);
        config.policy = policy::of_new_vms()?.get();
        config.mmu = mmu.unwrap_or(policies.mmu);
        let format = match mmu {
            Some(mmu) if !policies.format.has(mmu) => TableFormat::of(mmu),
            _ => policies.format,
        };
        let protected = vm_type.is_protected();
        config.nested = arch::nests(&policies.cpu) && format.nests(config.mmu);
        if protected && config.mmu == MmuKind::Shadow {
            // As in KVM without the TDP MMU, there are no VMs whose memory can be private.
            return fail(libc::EINVAL);
        }
        let engine = EngineVm::new(format, config)?;
        let coalesced = Coalesced::new()?;
        last_thread::start();
        let arch = VmState::new(vm_type, jit.unwrap_or(policies.cpu.jit))?;
        let number = publish::vm_begins(&engine)?;
        notify::register(&engine);
        recovery::begin();
        vcpu_common::prepare();
        profile::start();
        Ok(Arc::new(VmObject {
            engine,
            number,
            life: Life::begin(),
            interrupts: Arc::default(),
            bus: Bus::default(),
            rings: Rings::default(),
            coalesced,
            protected,
            private: PrivateMemory::default(),
            userfault_turn: Mutex::default(),
            devices: Devices::default(),
            arch,
        }))
    }

    /// Begins a call. Call in every public method of the VM and its vCPUs.
    ///
    /// # Errors
    /// `EIO` in a forked child, and after a call that panicked.
    pub(crate) fn begin(&self) -> Result<Call<'_>> {
        self.life.call(&self.engine)
    }

    /// Repeats the check of [`begin`](Self::begin). Call after a wait, because another call may have panicked
    /// meanwhile.
    ///
    /// # Errors
    /// `EIO` in a forked child, and after a call that panicked.
    pub(crate) fn still_alive(&self) -> Result<()> {
        self.life.check()
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

    pub(crate) fn vcpus(&self) -> RwLockReadGuard<'_, Vcpus> {
        self.interrupts.vcpus.read()
    }

    pub(crate) fn vcpus_mut(&self) -> RwLockWriteGuard<'_, Vcpus> {
        self.interrupts.vcpus.write()
    }

    /// Carries out `KVM_REGISTER_COALESCED_MMIO`: writes to the range go to the ring.
    ///
    /// # Errors
    /// `EINVAL` for a kind that is neither memory nor ports, `ENOSPC` for too many ranges, `ENOMEM`.
    pub fn register_coalesced(&self, zone: &kvm_coalesced_mmio_zone) -> Result<()> {
        let _call = self.begin()?;
        self.bus.add_zone(&self.engine, zone)
    }

    /// Carries out `KVM_UNREGISTER_COALESCED_MMIO`: removes every registered range that contains the range of `zone`.
    ///
    /// # Errors
    /// `EINVAL` for a kind that is neither memory nor ports, `ENOMEM`.
    pub fn unregister_coalesced(&self, zone: &kvm_coalesced_mmio_zone) -> Result<()> {
        let _call = self.begin()?;
        self.bus.remove_zones(&self.engine, zone)
    }

    /// Carries out `KVM_IOEVENTFD`.
    ///
    /// # Errors
    /// For a registration: `EINVAL` for unknown flags, a length other than 0, 1, 2, 4 and 8, a range that wraps around,
    /// and a value to compare without a length; `EEXIST` if one write could match this registration and an earlier
    /// registration. For a removal: `ENOENT` if there is no such registration. For both: `EBADF`, `EINVAL` for a
    /// descriptor that is no eventfd, `ENOMEM`, `EMFILE`.
    pub fn ioeventfd(&self, asked: &kvm_ioeventfd) -> Result<()> {
        let _call = self.begin()?;
        self.bus.change_event(&self.engine, asked)
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
