//! One vCPU: its parts, and the calls that read and change its state. Module `run` executes the vCPU. The calls that
//! only one architecture has are in that architecture's folder. File `debug` has the interface for the debugger.

mod debug;

use crate::arch::{Executor, MAX_VCPU_ID, MAX_VCPUS, VcpuMachine, VcpuState};
use crate::call::Call;
use crate::engine::EngineVcpu;
use crate::entered::thread_id;
use crate::errno::{Result, fail, no_memory};
use crate::exit_times::Stopwatch;
use crate::io_devices::Known;
use crate::run_page::{RunPage, ring_offset};
use crate::vcpu_common::VcpuCommon;
use crate::vm::VmObject;
use crate::{coalesced, debugger, messages, publish, report};
use slat::{DirtyRing, Shared};
use std::ffi::c_int;
use std::fmt::Display;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

/// The state of a vCPU that only one thread at a time uses. KVM protects it by the vCPU mutex.
pub(crate) struct Inner {
    pub(crate) cpu: Executor,
    pub(crate) machine: VcpuMachine,
    /// The architecture's state of the vCPU, besides its CPU and its machine.
    pub(crate) arch: VcpuState,
    pub(crate) stopwatch: Stopwatch,
    /// The mask of `KVM_SET_SIGNAL_MASK`.
    pub(crate) signal_mask: Option<u64>,
    pub(crate) has_run: bool,
    pub(crate) known_bus: Known,
}

/// A vCPU that one call has locked.
pub(crate) struct Locked<'a> {
    /// This field is dropped first, before the lock is released. So a thread that gets the lock after a panic finds the
    /// VM dead.
    _call: Call<'a>,
    inner: MutexGuard<'a, Inner>,
}

impl Deref for Locked<'_> {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.inner
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Inner {
        &mut self.inner
    }
}

impl AsMut<EngineVcpu> for Inner {
    fn as_mut(&mut self) -> &mut EngineVcpu {
        self.machine.as_mut()
    }
}

/// A vCPU. The vCPU keeps its VM alive.
pub struct VcpuObject {
    common: Shared<VcpuCommon>,
    pub(crate) vm: Arc<VmObject>,
    pub(crate) page: RunPage,
    /// The dirty ring, if the VM has dirty rings.
    pub(crate) ring: Option<Arc<DirtyRing>>,
    /// The port through which a debugger holds the vCPU.
    port: debugger::Port<Inner>,
    inner: Mutex<Inner>,
}

impl std::fmt::Debug for VcpuObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VcpuObject")
            .field("id", &self.common.id)
            .finish_non_exhaustive()
    }
}

impl Drop for VcpuObject {
    fn drop(&mut self) {
        debugger::end(self);
        publish::vcpu_ends(self.vm.number, &self.common);
        self.common.delist();
        report::vcpu_ends(&self.common.cpu);
    }
}

impl VmObject {
    /// Carries out `KVM_CREATE_VCPU`. Returns the vCPU and the descriptor that maps its `kvm_run`.
    ///
    /// # Errors
    /// `EINVAL` for an id that is too large or too many vCPUs, `EEXIST` for an id in use, `ENOMEM`, `EMFILE`.
    pub fn create_vcpu(self: &Arc<Self>, id: u64) -> Result<(Shared<VcpuObject>, OwnedFd)> {
        let _call = self.begin()?;
        let refuse = |errno, why: &dyn Display| {
            messages::explain(&format_args!("creating vCPU {id}: {why}"));
            fail(errno)
        };
        let known = u32::try_from(id).ok().filter(|id| *id < MAX_VCPU_ID);
        let Some(id) = known.filter(|id| self.allows_vcpu_id(*id)) else {
            return refuse(
                libc::EINVAL,
                &format_args!("ids are below {MAX_VCPU_ID}, or below the VM's KVM_CAP_MAX_VCPU_ID"),
            );
        };
        let mut vcpus = self.vcpus_mut();
        if vcpus.len() >= MAX_VCPUS as usize {
            let why = format_args!("the VM has {MAX_VCPUS} vCPUs, which is the most");
            return refuse(libc::EINVAL, &why);
        }
        let Err(at) = vcpus.place(id) else {
            return refuse(libc::EEXIST, &"the VM has one with this id");
        };
        vcpus.reserve()?;
        let (page, fd) = RunPage::create(id, self.rings.size())?;
        let index = vcpus.len() as u32;
        let vcpu = VcpuObject::new(self.clone(), id, index, page, &fd)?;
        vcpus.insert(at, vcpu.common().clone());
        Ok((vcpu, fd))
    }
}

impl VcpuObject {
    /// Creates a vCPU in its reset state. The VM has `index` other vCPUs.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn new(
        vm: Arc<VmObject>,
        id: u32,
        index: u32,
        page: RunPage,
        fd: &OwnedFd,
    ) -> Result<Shared<Self>> {
        let mut engine = vm.engine.create_vcpu().map_err(no_memory)?;
        let counted = engine.watch_stats();
        let ring = vm.rings.equip(&mut engine, fd)?;
        let shared = vm.shared_of_vcpu(id, index);
        let common = VcpuCommon::new(id, engine.attention().clone(), counted, shared)?;
        let (cpu, machine, arch) = vm.parts_of_vcpu(engine, common.clone())?;
        let mut inner = Inner {
            cpu,
            machine,
            arch,
            stopwatch: Stopwatch::default(),
            signal_mask: None,
            has_run: false,
            known_bus: Known::default(),
        };
        inner.begin_life();
        let vcpu = Shared::try_new(VcpuObject {
            common: common.clone(),
            vm,
            page,
            ring,
            port: debugger::Port::new(common.attention.clone()),
            inner: Mutex::new(inner),
        })
        .map_err(no_memory)?;
        publish::vcpu_begins(vcpu.vm.number, common.clone())?;
        debugger::begin(vcpu.vm.number, &*vcpu)?;
        VcpuCommon::enlist(common)?;
        slat_trace::add_ring();
        Ok(vcpu)
    }

    /// Returns the id that the client gave this vCPU.
    pub fn id(&self) -> u32 {
        self.common.id
    }

    pub(crate) fn common(&self) -> &Shared<VcpuCommon> {
        &self.common
    }

    /// Whether this is a forked child, in which the VM's locks may be held forever.
    pub fn is_foreign(&self) -> bool {
        self.vm.is_foreign()
    }

    /// Begins a call that locks the vCPU. Waits while another thread runs the vCPU.
    pub(crate) fn lock(&self) -> Result<Locked<'_>> {
        let call = self.vm.begin()?;
        let inner = (self.inner.lock()).unwrap_or_else(|poisoned| poisoned.into_inner());
        self.vm.still_alive()?;
        Ok(Locked { _call: call, inner })
    }

    /// Carries out `KVM_SET_SIGNAL_MASK`: sets the signals that are blocked during `KVM_RUN`, one bit for each signal.
    /// `None`: the thread's own mask applies.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_signal_mask(&self, mask: Option<u64>) -> Result<()> {
        self.lock()?.signal_mask = mask;
        Ok(())
    }

    /// Checks whether the client may map `len` bytes from `offset` on of the vCPU's descriptor, with this protection
    /// and these flags.
    ///
    /// # Errors
    /// `EINVAL` for a dirty ring that would be private or executable.
    pub fn check_mapping(
        &self,
        offset: u64,
        len: usize,
        protection: c_int,
        flags: c_int,
    ) -> Result<()> {
        let ring = ring_offset() as u64;
        let ring = ring..ring + self.vm.rings.size() as u64;
        let last = offset.saturating_add(len as u64).saturating_sub(1);
        let private = flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
        if (ring.contains(&offset) || ring.contains(&last))
            && (private || protection & libc::PROT_EXEC != 0)
        {
            return fail(libc::EINVAL);
        }
        Ok(())
    }

    /// Maps the VM's ring of coalesced I/O into the client's mapping, if the mapping includes the ring's page. Also
    /// maps the other pages that the descriptor's file does not have. Call after the client has mapped a part of the
    /// vCPU's descriptor.
    ///
    /// # Errors
    /// The host's error for the mapping.
    ///
    /// # Safety
    /// `address` and `len` are a new mapping of the vCPU's descriptor, from `offset` on.
    pub unsafe fn complete_mapping(&self, address: usize, len: usize, offset: u64) -> Result<()> {
        // SAFETY: the caller keeps this function's contract.
        unsafe { self.page.show(address, len, offset)? };
        let page = coalesced::offset() as u64;
        if (offset..offset.saturating_add(len as u64)).contains(&page) {
            // SAFETY: the page belongs to the mapping that the caller names.
            unsafe {
                self.vm
                    .coalesced
                    .show_at(address + (page - offset) as usize)?;
            }
        }
        Ok(())
    }
}

impl Inner {
    /// Leaves the engine, runs `work`, which may wait, and enters again. Call only inside the engine's reader section.
    pub(crate) fn outside<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        self.as_mut().leave();
        let result = work(self);
        self.as_mut().enter_unguarded(thread_id());
        result
    }
}
