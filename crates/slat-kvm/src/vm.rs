//! One VM: its memory (the engine's VM), its vCPUs, its interrupt controllers and its clock.

use crate::call::Life;
use crate::coalesced::Coalesced;
use crate::device::Devices;
use crate::dirty::Rings;
use crate::engine::EngineVm;
use crate::errno::{Error, Result, fail, no_memory};
use crate::guest_memfd::PrivateMemory;
use crate::ioeventfd::IoEvents;
use crate::irq::Interrupts;
use crate::irq::vcpus::Vcpus;
use crate::msr_filter::MsrFilter;
use crate::options::Options;
use crate::quirks::Quirks;
use crate::run_page::RunPage;
use crate::thread::bits;
use crate::vcpu::VcpuObject;
use crate::{caps, clock, notify, parameters, policy, recovery, report, vcpu};
use kvm_bindings::*;
use slat::{Gpa, Hva, Region, Shared, SlotFlags};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// KVM's lower limit for `KVM_SET_NR_MMU_PAGES`.
const MIN_MMU_PAGES: u64 = 64;

/// A VM. Its vCPUs keep it alive; it outlives its descriptor.
pub struct VmObject {
    pub(crate) engine: Arc<EngineVm>,
    pub(crate) life: Life,
    pub(crate) clock: clock::VmClock,
    vcpus: RwLock<Vcpus>,
    pub(crate) interrupts: Interrupts,
    pub(crate) ioevents: IoEvents,
    boot_cpu: AtomicU32,
    max_vcpu_ids: AtomicU32,
    pub(crate) rings: Rings,
    pub(crate) coalesced: Coalesced,
    /// Whether the VM is of the type `KVM_X86_SW_PROTECTED_VM`: its memory can be private.
    protected: bool,
    pub(crate) private: PrivateMemory,
    pub(crate) devices: Devices,
    pub(crate) quirks: Quirks,
    pub(crate) options: Options,
    /// The hypercalls that the client completes, a bit each.
    hypercall_exits: AtomicU64,
}

impl std::fmt::Debug for VmObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmObject")
            .field("vcpus", &self.vcpus().len())
            .finish_non_exhaustive()
    }
}

impl VmObject {
    /// Creates a VM without memory and vCPUs. `protected`: of the type `KVM_X86_SW_PROTECTED_VM`.
    ///
    /// # Errors
    /// `ENOMEM`; `EINVAL` for invalid policies in the environment; what the host returns for setting up its platform.
    pub(crate) fn new(protected: bool) -> Result<Arc<Self>> {
        let policies = policy::current()?;
        let platform = slat_host::HostPlatform::new()
            .map_err(|error| Error::new(error.raw_os_error().unwrap_or(libc::EIO)))?;
        let engine =
            EngineVm::new(policies.format, platform, slat::Config::default()).map_err(no_memory)?;
        parameters::apply(&engine)?;
        notify::register(&engine);
        recovery::begin();
        vcpu::prepare();
        Ok(Arc::new(VmObject {
            engine,
            life: Life::begin(),
            clock: clock::VmClock::new(),
            vcpus: RwLock::default(),
            interrupts: Interrupts::default(),
            ioevents: IoEvents::default(),
            boot_cpu: AtomicU32::new(0),
            max_vcpu_ids: AtomicU32::new(caps::MAX_VCPU_ID),
            rings: Rings::default(),
            coalesced: Coalesced::new()?,
            protected,
            private: PrivateMemory::default(),
            devices: Devices::default(),
            quirks: Quirks::default(),
            options: Options::default(),
            hypercall_exits: AtomicU64::new(0),
        }))
    }

    pub(crate) fn vcpus(&self) -> RwLockReadGuard<'_, Vcpus> {
        (self.vcpus.read()).unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn vcpus_mut(&self) -> RwLockWriteGuard<'_, Vcpus> {
        (self.vcpus.write()).unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether memory of this VM can be private.
    pub(crate) fn is_protected(&self) -> bool {
        self.protected
    }

    /// Whether the client completes the hypercall `nr`.
    pub(crate) fn is_answered_by_client(&self, nr: u32) -> bool {
        self.hypercall_exits.load(Ordering::Relaxed) >> nr & 1 != 0
    }

    /// `KVM_CHECK_EXTENSION`.
    pub fn check_extension(&self, cap: u64) -> i32 {
        match u32::try_from(cap) {
            Ok(KVM_CAP_GUEST_MEMFD) => self.protected.into(),
            Ok(KVM_CAP_MEMORY_ATTRIBUTES) => self.known_attributes() as i32,
            _ => caps::check(cap),
        }
    }

    /// `KVM_SET_USER_MEMORY_REGION`.
    ///
    /// # Errors
    /// KVM's: `EINVAL` for bad arguments, `EEXIST` for an overlap, `ENOMEM`.
    pub fn set_user_memory_region(&self, region: &kvm_userspace_memory_region) -> Result<()> {
        if region.flags & KVM_MEM_GUEST_MEMFD != 0 {
            return fail(libc::EINVAL);
        }
        self.set_user_memory_region2(&kvm_userspace_memory_region2 {
            slot: region.slot,
            flags: region.flags,
            guest_phys_addr: region.guest_phys_addr,
            memory_size: region.memory_size,
            userspace_addr: region.userspace_addr,
            ..Default::default()
        })
    }

    /// `KVM_SET_USER_MEMORY_REGION2`.
    ///
    /// # Errors
    /// As for [`set_user_memory_region`](Self::set_user_memory_region). For `KVM_MEM_GUEST_MEMFD`, `EINVAL` in a VM whose memory
    /// cannot be private, with any other flag, for a slot that exists already, for a descriptor that is no guest_memfd of this
    /// VM, and for a part of a guest_memfd that another slot uses; `EBADF` for a closed descriptor.
    pub fn set_user_memory_region2(&self, region: &kvm_userspace_memory_region2) -> Result<()> {
        let _call = self.begin()?;
        let mut known = KVM_MEM_LOG_DIRTY_PAGES | KVM_MEM_READONLY;
        if self.protected {
            known |= KVM_MEM_GUEST_MEMFD;
        }
        let wants_private = region.flags & KVM_MEM_GUEST_MEMFD != 0;
        let flags = region.flags & !KVM_MEM_GUEST_MEMFD;
        if region.flags & !known != 0 || wants_private && flags != 0 {
            return fail(libc::EINVAL);
        }
        let size = region.memory_size;
        let len = usize::try_from(size).map_err(|_| Error::new(libc::EINVAL))?;
        if !crate::user::in_user_space(region.userspace_addr, len) {
            return fail(libc::EINVAL);
        }
        let private = match wants_private && size != 0 {
            true => {
                let (fd, offset) = (region.guest_memfd, region.guest_memfd_offset);
                Some(self.private.part(fd, offset, size)?)
            }
            false => None,
        };
        // Only creating or deleting a slot changes bindings.
        let bindings =
            (private.is_some() || self.protected && size == 0).then(|| self.private.bindings());
        let (memory, private) = private.unzip();
        // Now, because the seccomp filter of a vCPU's thread may forbid the system call later.
        let start = region.userspace_addr as usize;
        slat_host::mappings::learn(start..start + len);
        let engine_region = Region {
            slot: region.slot & 0xffff,
            flags: SlotFlags(flags),
            gpa: Gpa(region.guest_phys_addr),
            size,
            backing: Hva(region.userspace_addr),
            private,
        };
        self.engine
            .set_memory_region((region.slot >> 16) as usize, &engine_region)
            .map_err(|error| {
                report::refused_region(&error);
                Error::new(error.errno())
            })?;
        if let Some(mut bindings) = bindings {
            bindings.set(region.slot, memory);
        }
        Ok(())
    }

    /// `KVM_CREATE_VCPU`. Returns the vCPU and the descriptor that maps its `kvm_run`.
    ///
    /// # Errors
    /// `EINVAL` for an id or a number beyond the limits, `EEXIST` for an id in use, `ENOMEM`, `EMFILE`.
    pub fn create_vcpu(self: &Arc<Self>, id: u64) -> Result<(Shared<VcpuObject>, OwnedFd)> {
        let _call = self.begin()?;
        let id = u32::try_from(id).map_err(|_| Error::new(libc::EINVAL))?;
        if id >= self.max_vcpu_ids.load(Ordering::Relaxed) {
            return fail(libc::EINVAL);
        }
        let mut vcpus = self.vcpus_mut();
        if vcpus.len() >= caps::MAX_VCPUS as usize {
            return fail(libc::EINVAL);
        }
        let Err(at) = vcpus.place(id) else {
            return fail(libc::EEXIST);
        };
        vcpus.reserve()?;
        let (page, fd) = RunPage::create(id, self.rings.size())?;
        let bootstrap = id == self.boot_cpu.load(Ordering::Relaxed);
        let vcpu = VcpuObject::new(self.clone(), id, bootstrap, page, &fd)?;
        vcpus.insert(at, vcpu.common().clone());
        Ok((vcpu, fd))
    }

    /// `KVM_SET_TSC_KHZ`: sets the frequency of vCPUs created from now on; 0 is the host's.
    ///
    /// # Errors
    /// `EINVAL` for a frequency beyond KVM's own limits.
    pub fn set_tsc_khz(&self, khz: u32) -> Result<()> {
        let _call = self.begin()?;
        self.clock.set_tsc_khz(clock::frequency(khz)?);
        Ok(())
    }

    /// `KVM_GET_TSC_KHZ`.
    pub fn tsc_khz(&self) -> u32 {
        self.clock.tsc_khz()
    }

    /// `KVM_GET_CLOCK`.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn get_clock(&self) -> Result<kvm_clock_data> {
        let _call = self.begin()?;
        let now = self.clock.read();
        Ok(kvm_clock_data {
            clock: now.clock,
            flags: caps::CLOCK_FLAGS,
            realtime: now.realtime,
            host_tsc: now.host_tsc,
            ..Default::default()
        })
    }

    /// `KVM_SET_CLOCK`. With `KVM_CLOCK_REALTIME`, adds the time that has passed since `data.realtime`.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags.
    pub fn set_clock(&self, data: &kvm_clock_data) -> Result<()> {
        let _call = self.begin()?;
        if data.flags & !caps::CLOCK_FLAGS != 0 {
            return fail(libc::EINVAL);
        }
        let since = match data.flags & KVM_CLOCK_REALTIME {
            0 => 0,
            // A `data.realtime` in the future does not set the clock back.
            _ => clock::realtime().saturating_sub(data.realtime),
        };
        self.clock.set_kvmclock(data.clock.wrapping_add(since));
        self.engine
            .visit_attention(&mut |attention| attention.raise(bits::RETRY));
        Ok(())
    }

    /// `KVM_SET_TSS_ADDR`: the address of three pages that only VMX without unrestricted guest needs. Checks it; has no effect.
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
    /// `EINVAL` for an id beyond the limit, `EBUSY` once there are vCPUs.
    pub fn set_boot_cpu_id(&self, id: u64) -> Result<()> {
        let _call = self.begin()?;
        if id >= u64::from(self.max_vcpu_ids.load(Ordering::Relaxed)) {
            return fail(libc::EINVAL);
        }
        if !self.vcpus().is_empty() {
            return fail(libc::EBUSY);
        }
        self.boot_cpu.store(id as u32, Ordering::Relaxed);
        Ok(())
    }

    /// `KVM_SET_NR_MMU_PAGES`: a limit of KVM's shadow pages, which slat does not have. Checks it; has no effect.
    ///
    /// # Errors
    /// `EINVAL` for less than KVM's minimum.
    pub fn set_nr_mmu_pages(&self, pages: u64) -> Result<()> {
        let _call = self.begin()?;
        if pages < MIN_MMU_PAGES {
            fail(libc::EINVAL)
        } else {
            Ok(())
        }
    }

    /// `KVM_ENABLE_CAP` on the VM.
    ///
    /// # Errors
    /// `EINVAL` for capabilities that cannot be enabled, and for bad arguments.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        let _call = self.begin()?;
        if cap.flags != 0 {
            return fail(libc::EINVAL);
        }
        if let Some(result) = self.options.enable(cap.cap, cap.args[0]) {
            return result;
        }
        match cap.cap {
            // The older capability ignores unknown quirks.
            KVM_CAP_DISABLE_QUIRKS => self
                .quirks
                .disable(cap.args[0] & u64::from(crate::quirks::SUPPORTED)),
            KVM_CAP_DISABLE_QUIRKS2 => self.quirks.disable(cap.args[0]),
            KVM_CAP_MAX_VCPU_ID => self.limit_vcpu_ids(cap.args[0]),
            KVM_CAP_VM_DISABLE_NX_HUGE_PAGES if cap.args[0] == 0 => {
                self.before_vcpus(|| parameters::disable_nx(&self.engine))
            }
            KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 => self.set_manual_dirty_log(cap.args[0]),
            KVM_CAP_DIRTY_LOG_RING | KVM_CAP_DIRTY_LOG_RING_ACQ_REL => {
                self.enable_dirty_rings(cap.args[0])
            }
            KVM_CAP_SPLIT_IRQCHIP => self.split_irqchip(cap.args[0]),
            KVM_CAP_X2APIC_API => self.enable_x2apic_api(cap.args[0]),
            KVM_CAP_EXIT_HYPERCALL if cap.args[0] & !u64::from(caps::HYPERCALL_EXITS) == 0 => {
                self.hypercall_exits.store(cap.args[0], Ordering::Relaxed);
                Ok(())
            }
            _ => fail(libc::EINVAL),
        }
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

    /// Runs `work` if the VM has no vCPUs, and keeps them from being created meanwhile; else fails with `EINVAL`.
    pub(crate) fn before_vcpus(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let vcpus = self.vcpus_mut();
        if vcpus.is_empty() {
            work()
        } else {
            fail(libc::EINVAL)
        }
    }

    /// Carries out `KVM_CAP_MAX_VCPU_ID`: allowed once, before there are vCPUs, and not below the bootstrap processor's id.
    fn limit_vcpu_ids(&self, limit: u64) -> Result<()> {
        let limit = u32::try_from(limit).map_err(|_| Error::new(libc::EINVAL))?;
        let vcpus = self.vcpus_mut();
        let now = self.max_vcpu_ids.load(Ordering::Relaxed);
        if limit == 0
            || limit > caps::MAX_VCPU_ID
            || limit < self.boot_cpu.load(Ordering::Relaxed)
            || now != limit && now != caps::MAX_VCPU_ID
            || !vcpus.is_empty()
        {
            return fail(libc::EINVAL);
        }
        self.max_vcpu_ids.store(limit, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for VmObject {
    fn drop(&mut self) {
        if self.is_foreign() {
            return;
        }
        notify::unregister(&self.engine);
        report::vm_ends(&self.engine);
    }
}
