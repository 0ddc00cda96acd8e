//! One vCPU: its parts, and the calls that read and change its state. Module `run` executes the vCPU.
//!
//! | file | calls for |
//! |---|---|
//! | `registers` | the state of the CPU |
//! | `debug` | the debugger, which the client does not notice |
//! | `one_reg` | registers by id |
//! | `interrupts` | interrupts, exceptions and the local APIC |
//! | `vapic` | the task priority in guest memory |

mod debug;
mod interrupts;
mod one_reg;
mod registers;
mod vapic;

use crate::arch;
use crate::arch::machine::VcpuMachine;
use crate::arch::{MAX_VCPU_ID, MAX_VCPUS};
use crate::arch::{clock, events};
use crate::call::Call;
use crate::engine::EngineVcpu;
use crate::entered::thread_id;
use crate::errno::{Result, fail, no_memory};
use crate::exit_times::Stopwatch;
use crate::io_devices::Known;
use crate::run_page::{RING_OFFSET, RunPage};
use crate::vcpu_common::VcpuCommon;
use crate::vm::VmObject;
use crate::{coalesced, debugger, messages, publish, report};
use kvm_bindings::*;
use slat::{DirtyRing, Shared};
use slat_irqchip::lapic::{BASE_BSP, BASE_ENABLE, DEFAULT_BASE, Lapic};
use slat_x86::Executor;
use std::ffi::c_int;
use std::fmt::Display;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

/// The access that one `KVM_RUN` began and the next `KVM_RUN` completes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Unfinished {
    #[default]
    Nothing,
    /// IN reads this many bytes from the port-data page.
    PortIn(usize),
    /// OUT reads nothing, but its instruction has to be finished.
    PortOut,
    /// One of KVM's hypercalls reads its result from `kvm_run`.
    Hypercall,
    /// One of Hyper-V's hypercalls reads its output from `kvm_run`.
    HypervCall,
    /// Hyper-V's debugger reads its status from `kvm_run`.
    HypervDebugger,
    /// RDMSR or WRMSR reads its result from `kvm_run`.
    Msr,
    /// An MMIO read reads this many bytes from `kvm_run`.
    MmioRead(usize),
}

/// The state that only one thread at a time uses: the state that KVM's vCPU mutex protects.
pub(crate) struct Inner {
    pub(crate) cpu: Executor,
    pub(crate) machine: VcpuMachine,
    pub(crate) unfinished: Unfinished,
    pub(crate) stopwatch: Stopwatch,
    pub(crate) mp_state: u32,
    /// The events that the client requested by `KVM_SET_VCPU_EVENTS` and the next run delivers.
    pub(crate) requested: events::Requested,
    /// The mask of `KVM_SET_SIGNAL_MASK`.
    pub(crate) signal_mask: Option<u64>,
    pub(crate) has_run: bool,
    /// An interrupt of the client's 8259, which the client injected by `KVM_INTERRUPT` and the vCPU has not
    /// acknowledged. Used only if the client emulates all controllers except the local APICs.
    pub(crate) external: Option<u8>,
    pub(crate) known_bus: Known,
    /// Whether the client's debugger keeps interrupts and NMIs from the guest (`KVM_GUESTDBG_BLOCKIRQ`).
    pub(crate) interrupts_blocked: bool,
}

/// A vCPU that one call has locked.
pub(crate) struct Locked<'a> {
    /// This field is dropped first, so that a thread that gets the lock after a panic finds the VM dead.
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
        &mut self.machine.engine
    }
}

/// A vCPU. It keeps its VM alive.
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
    /// `KVM_CREATE_VCPU`. Returns the vCPU and the descriptor that maps its `kvm_run`.
    ///
    /// # Errors
    /// `EINVAL` for an id or a number beyond the limits, `EEXIST` for an id in use, `ENOMEM`, `EMFILE`.
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
    /// Creates a vCPU in its reset state. The VM has `index` other vCPUs. Without an interrupt controller all vCPUs are
    /// runnable. With an interrupt controller, all vCPUs except the bootstrap processor wait for INIT and SIPI.
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
        let bootstrap = vm.is_bootstrap(id);
        let mut cpu = Executor::try_new(vm.arch.code.clone()).map_err(no_memory)?;
        // KVM's new vCPUs have the x87 state that FNINIT makes, not the processor's after RESET.
        cpu.state.initialize_x87();
        if let Some((compiler, compile)) = &vm.arch.compiler {
            (cpu.set_compiler(compiler.clone(), *compile)).map_err(no_memory)?;
        }
        let mut engine = vm.engine.create_vcpu().map_err(no_memory)?;
        let counted = engine.watch_stats();
        let ring = vm.rings.equip(&mut engine, fd)?;
        let irqchip = vm.has_irqchip();
        let lapic = irqchip.then(|| {
            let mut lapic = Lapic::new(id, bootstrap, vm.tsc_khz().into());
            lapic.set_bus_cycle(vm.arch.options.apic_bus_cycle_ns());
            if bootstrap && vm.arch.quirks.has(KVM_X86_QUIRK_LINT0_REENABLED) {
                lapic.accept_external();
            }
            lapic
        });
        let common = VcpuCommon::new(
            id,
            engine.attention().clone(),
            counted,
            arch::VcpuShared::new(index, lapic),
        )?;
        let base = DEFAULT_BASE | BASE_ENABLE | if bootstrap { BASE_BSP } else { 0 };
        let machine = VcpuMachine::new(engine, vm.clone(), common.clone(), base)?;
        let waiting = irqchip && !bootstrap;
        let mut inner = Inner {
            cpu,
            machine,
            unfinished: Unfinished::Nothing,
            stopwatch: Stopwatch::default(),
            mp_state: if waiting {
                KVM_MP_STATE_UNINITIALIZED
            } else {
                KVM_MP_STATE_RUNNABLE
            },
            requested: events::Requested::default(),
            signal_mask: None,
            has_run: false,
            external: None,
            known_bus: Known::default(),
            interrupts_blocked: false,
        };
        // As in KVM, a guest has a feature only if the client sets it in CPUID.
        inner.adopt_cpuid(Vec::new());
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

    /// The id that the client gave this vCPU.
    pub fn id(&self) -> u32 {
        self.common.id
    }

    pub(crate) fn common(&self) -> &Shared<VcpuCommon> {
        &self.common
    }

    /// Whether this is a forked child: see [`VmObject::is_foreign`].
    pub fn is_foreign(&self) -> bool {
        self.vm.is_foreign()
    }

    /// Begins a call that locks the vCPU. Waits while another thread runs it.
    pub(crate) fn lock(&self) -> Result<Locked<'_>> {
        let call = self.vm.begin()?;
        let inner = (self.inner.lock()).unwrap_or_else(|poisoned| poisoned.into_inner());
        self.vm.still_alive()?;
        Ok(Locked { _call: call, inner })
    }

    /// `KVM_GET_TSC_KHZ`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn tsc_khz(&self) -> Result<u32> {
        Ok(self.lock()?.machine.tsc.khz())
    }

    /// `KVM_SET_TSC_KHZ`; 0 is the host's frequency.
    ///
    /// # Errors
    /// `EINVAL` for a frequency beyond KVM's own limits.
    pub fn set_tsc_khz(&self, khz: u32) -> Result<()> {
        let khz = clock::frequency(khz)?;
        self.lock()?.machine.change_tsc(clock::TscChange::Khz(khz));
        Ok(())
    }

    /// `KVM_SET_SIGNAL_MASK`: sets the signals that are blocked during `KVM_RUN`, a bit each. `None`: the thread's own
    /// mask applies.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_signal_mask(&self, mask: Option<u64>) -> Result<()> {
        self.lock()?.signal_mask = mask;
        Ok(())
    }

    /// `KVM_TRANSLATE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn translate(&self, address: u64) -> Result<kvm_translation> {
        let mut inner = self.lock()?;
        let Inner { cpu, machine, .. } = &mut *inner;
        let found = machine.translate_for_client(cpu, address);
        Ok(kvm_translation {
            linear_address: address,
            physical_address: found.unwrap_or(u64::MAX),
            valid: u8::from(found.is_some()),
            writeable: 1,
            usermode: 0,
            pad: [0; 5],
        })
    }

    /// `KVM_ENABLE_CAP` of a vCPU: `KVM_CAP_ENFORCE_PV_FEATURE_CPUID`, `KVM_CAP_HYPERV_SYNIC`, `KVM_CAP_HYPERV_SYNIC2`
    /// and `KVM_CAP_HYPERV_ENFORCE_CPUID`.
    ///
    /// # Errors
    /// `EINVAL` for any other capability, for flags and bad arguments, and for a SynIC without a local APIC.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        let mut inner = self.lock()?;
        if cap.flags != 0 {
            return fail(libc::EINVAL);
        }
        let [argument, ..] = cap.args;
        match cap.cap {
            KVM_CAP_ENFORCE_PV_FEATURE_CPUID => {
                inner.machine.enforces_pv_features = argument != 0;
            }
            KVM_CAP_HYPERV_ENFORCE_CPUID => inner.machine.hyperv.enforces_cpuid = argument != 0,
            KVM_CAP_HYPERV_SYNIC2 if argument != 0 => return fail(libc::EINVAL),
            KVM_CAP_HYPERV_SYNIC | KVM_CAP_HYPERV_SYNIC2 if self.common.has_lapic() => {
                (self.common.arch.vp).activate_synic(cap.cap == KVM_CAP_HYPERV_SYNIC);
            }
            _ => return fail(libc::EINVAL),
        }
        Ok(())
    }

    /// `KVM_KVMCLOCK_CTRL`: tells the guest that it was paused.
    ///
    /// # Errors
    /// `EINVAL` when the guest does not use the clock.
    pub fn kvmclock_ctrl(&self) -> Result<()> {
        let mut inner = self.lock()?;
        if inner.machine.mark_guest_paused() {
            Ok(())
        } else {
            fail(libc::EINVAL)
        }
    }

    /// Checks whether the client may map this part of the vCPU's descriptor with this protection and these flags.
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
        let ring = RING_OFFSET as u64;
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
        let page = coalesced::OFFSET as u64;
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
    /// Whether a part of the last exit's instruction is left, or the client has not seen the instruction's effect.
    pub(crate) fn is_unfinished(&self) -> bool {
        let machine = &self.machine;
        self.cpu.is_unfinished() || machine.ioapic_eoi.is_some() || machine.hyperv.exit.is_some()
    }

    /// Drops all translations: the CPU's, and those that the CPU's machine keeps.
    pub(crate) fn flush_translations(&mut self) {
        self.cpu.flush_tlb();
        self.machine.pages.flush();
    }

    /// Leaves the engine, runs `work`, which may wait, and enters again. Call with an entered vCPU.
    pub(crate) fn outside<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        self.machine.engine.leave();
        let result = work(self);
        self.machine.engine.enter_unguarded(thread_id());
        result
    }

    /// Copies CR8 to the APIC's task priority. On a processor both are one register. While the vCPU runs, the CPU's
    /// copy is current.
    pub(crate) fn sync_cr8_to_lapic(&mut self) {
        if let Some(mut lapic) = self.machine.common.lapic()
            && lapic.cr8() != self.cpu.state.cr8
        {
            lapic.set_cr8(self.cpu.state.cr8);
        }
    }

    /// Copies the APIC's task priority to CR8. Call after the APIC's register was written.
    pub(crate) fn sync_cr8_from_lapic(&mut self) {
        if let Some(lapic) = self.machine.common.lapic() {
            self.cpu.state.cr8 = lapic.cr8();
        }
    }
}
