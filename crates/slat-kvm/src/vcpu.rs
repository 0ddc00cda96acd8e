//! One vCPU: its parts, and the calls that read and change its state. Module `run` executes it.

use crate::call::Call;
use crate::engine::EngineVcpu;
use crate::entered::Entered;
use crate::errno::{Error, Result, fail, no_memory};
use crate::ioeventfd::KnownEvents;
use crate::machine::VcpuMachine;
use crate::mmu::uses_pae_paging;
use crate::msr::mce::Reported;
use crate::process::PerProcess;
use crate::run_page::RunPage;
use crate::stats::Exits;
use crate::thread::bits;
use crate::ticker::{self, Alarm, Client};
use crate::vm::VmObject;
use crate::{clock, cpuid, events, fpu, heap, msr, regs, steal_time};
use kvm_bindings::*;
use slat::{Attention, DirtyRing, Shared, VcpuStats};
use slat_irqchip::lapic::{
    BASE_BSP, BASE_ENABLE, DEFAULT_BASE, Effect, Lapic, REGISTERS, Request, reg,
};
use slat_irqchip::message::{DeliveryMode, Message};
use slat_x86::state::{MAX_NMIS, control};
use slat_x86::{Cpu, Exception, Features, vector};
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The part of a vCPU that other threads use while it runs.
pub struct VcpuCommon {
    pub(crate) id: u32,
    pub(crate) attention: Shared<Attention>,
    pub(crate) client: Shared<Client>,
    lapic: Option<Mutex<Lapic>>,
    /// The pending events, as bits: [`NMIS`](Self::NMIS), [`INIT`](Self::INIT), [`SIPI`](Self::SIPI), [`UNHALT`](Self::UNHALT).
    pub(crate) signals: AtomicU32,
    pub(crate) sipi_vector: AtomicU32,
    /// The thread (`pthread_t`) that is in `KVM_RUN`, or 0.
    pub(crate) runner: AtomicUsize,
    pub(crate) exits: Exits,
}

/// All vCPUs of the process, for [`interrupt_thread`].
static ALL: PerProcess<Mutex<Vec<Shared<VcpuCommon>>>> = PerProcess::new();

/// Creates what the vCPUs of a process share.
pub(crate) fn prepare() {
    ALL.get();
    ticker::prepare();
    steal_time::prepare();
}

/// Ends with `EINTR` the `KVM_RUN` that `thread`, a `pthread_t`, is in, if it is in one. Call for a signal that ends system calls
/// and that no handler of the client sees.
pub fn interrupt_thread(thread: usize) {
    let Some(all) = ALL.peek() else {
        return;
    };
    for vcpu in &*all.lock().unwrap_or_else(PoisonError::into_inner) {
        if vcpu.runner.load(Ordering::SeqCst) == thread {
            ticker::raise(&vcpu.attention, bits::SIGNAL);
        }
    }
}

impl Drop for VcpuCommon {
    fn drop(&mut self) {
        self.client.leave();
    }
}

impl VcpuCommon {
    /// Pending NMIs, a bit each: one waits while another one is delivered.
    const NMIS: [u32; MAX_NMIS as usize] = [1, 1 << 4];
    const ALL_NMIS: u32 = Self::NMIS[0] | Self::NMIS[1];
    pub(crate) const INIT: u32 = 2;
    pub(crate) const SIPI: u32 = 4;
    /// Another vCPU ended this vCPU's halt ([`end_halt`](Self::end_halt)).
    pub(crate) const UNHALT: u32 = 8;

    /// The local APIC, when the VM has an interrupt controller.
    pub(crate) fn lapic(&self) -> Option<MutexGuard<'_, Lapic>> {
        Some(
            self.lapic
                .as_ref()?
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner()),
        )
    }

    /// Makes the vCPU look for interrupts; wakes it from a halt or another wait.
    pub(crate) fn notice(&self) {
        ticker::raise(&self.attention, bits::IRQ);
    }

    /// Delivers a message to this vCPU. The end of a level (level-triggered, without assert) is no interrupt.
    pub(crate) fn deliver(&self, message: &Message) -> Request {
        let level_ends = message.level && !message.assert;
        let taken = match message.mode {
            DeliveryMode::Fixed | DeliveryMode::LowestPriority | DeliveryMode::Init
                if level_ends =>
            {
                Request::Refused
            }
            DeliveryMode::Fixed | DeliveryMode::LowestPriority => match self.lapic() {
                Some(mut lapic) => lapic.request(message.vector, message.level),
                None => Request::Refused,
            },
            DeliveryMode::Nmi => self.signal_nmi(),
            DeliveryMode::Init => {
                // INIT cancels an earlier SIPI.
                self.signals.fetch_and(!Self::SIPI, Ordering::SeqCst);
                self.signal(Self::INIT)
            }
            DeliveryMode::StartUp => {
                self.sipi_vector
                    .store(message.vector.into(), Ordering::SeqCst);
                self.signal(Self::SIPI)
            }
            // KVM uses the reserved mode to end a halt.
            DeliveryMode::Reserved => self.signal(Self::UNHALT),
            // There is no system management mode. The 8259 interrupts by its line, not by messages.
            DeliveryMode::Smi | DeliveryMode::ExtInt => Request::Refused,
        };
        if taken == Request::Pending {
            self.notice();
        }
        taken
    }

    /// Sends a non-maskable interrupt.
    pub(crate) fn non_maskable(&self) {
        self.signal_nmi();
        self.notice();
    }

    /// Wakes the vCPU from its halt, or else from its next one (`KVM_HC_KICK_CPU`).
    pub(crate) fn end_halt(&self) {
        if self.signal(Self::UNHALT) == Request::Pending {
            self.notice();
        }
    }

    /// Makes an NMI pending; at most [`MAX_NMIS`] are.
    fn signal_nmi(&self) -> Request {
        let mut bits = Self::NMIS.into_iter();
        match bits.any(|bit| self.signal(bit) == Request::Pending) {
            true => Request::Pending,
            false => Request::Merged,
        }
    }

    /// The number of pending NMIs.
    fn nmis(&self) -> u8 {
        (self.signals.load(Ordering::SeqCst) & Self::ALL_NMIS).count_ones() as u8
    }

    /// Clears the pending NMIs. Returns how many there were.
    pub(crate) fn take_nmis(&self) -> u8 {
        // Every entry into the guest calls this, and usually no NMI is pending.
        if self.nmis() == 0 {
            return 0;
        }
        let signals = self.signals.fetch_and(!Self::ALL_NMIS, Ordering::SeqCst);
        (signals & Self::ALL_NMIS).count_ones() as u8
    }

    fn signal(&self, signal: u32) -> Request {
        match self.signals.fetch_or(signal, Ordering::SeqCst) & signal {
            0 => Request::Pending,
            _ => Request::Merged,
        }
    }
}

/// The access that one `KVM_RUN` began and the next one completes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Unfinished {
    #[default]
    Nothing,
    /// IN reads this many bytes from the port-data page.
    PortIn(usize),
    /// OUT reads nothing; its instruction has to be finished.
    PortOut,
    /// A hypercall reads its result from `kvm_run`.
    Hypercall,
    /// RDMSR or WRMSR reads its result from `kvm_run`.
    Msr,
    /// An MMIO read reads this many bytes from `kvm_run`.
    MmioRead(usize),
}

/// The state that only one thread at a time uses: what KVM's vCPU mutex protects.
pub(crate) struct Inner {
    pub(crate) cpu: Cpu,
    pub(crate) machine: VcpuMachine,
    pub(crate) unfinished: Unfinished,
    pub(crate) mp_state: u32,
    /// The events that the client requested by `KVM_SET_VCPU_EVENTS` and the next run delivers.
    pub(crate) requested: events::Requested,
    /// `KVM_SET_SIGNAL_MASK`.
    pub(crate) signal_mask: Option<u64>,
    pub(crate) has_run: bool,
    /// An interrupt of the client's 8259, injected by `KVM_INTERRUPT`, that the vCPU has not acknowledged. Only where the client
    /// emulates all controllers but the local APICs.
    pub(crate) external: Option<u8>,
    pub(crate) known_events: KnownEvents,
    /// The client's debugger keeps interrupts and NMIs from the guest (`KVM_GUESTDBG_BLOCKIRQ`).
    pub(crate) interrupts_blocked: bool,
}

/// A vCPU that one call has locked.
pub(crate) struct Locked<'a> {
    /// Dropped first: a thread that gets the lock after a panic finds the VM dead.
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
    /// The engine's counters for this vCPU.
    pub(crate) counted: VcpuStats,
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
        if let Some(all) = ALL.peek() {
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            all.retain(|vcpu| !std::ptr::eq(&**vcpu, &*self.common));
        }
    }
}

impl VcpuObject {
    /// Creates a vCPU in its reset state. Without an interrupt controller all vCPUs are runnable; with one, all but the bootstrap
    /// processor wait for INIT and SIPI.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(
        vm: Arc<VmObject>,
        id: u32,
        bootstrap: bool,
        page: RunPage,
        fd: &OwnedFd,
    ) -> Result<Shared<Self>> {
        let cpu = Cpu::try_new().map_err(no_memory)?;
        let mut engine = vm.engine.create_vcpu().map_err(no_memory)?;
        let counted = engine.watch_stats();
        let ring = vm.rings.equip(&mut engine, fd)?;
        let attention = engine.attention().clone();
        let irqchip = vm.has_irqchip();
        let common = Shared::try_new(VcpuCommon {
            id,
            client: Client::register(Alarm::Vcpu(attention.clone()))?,
            attention,
            lapic: irqchip.then(|| {
                let mut lapic = Lapic::new(id, bootstrap, vm.tsc_khz().into());
                if bootstrap && vm.quirks.has(KVM_X86_QUIRK_LINT0_REENABLED) {
                    lapic.accept_external();
                }
                Mutex::new(lapic)
            }),
            signals: AtomicU32::new(0),
            sipi_vector: AtomicU32::new(0),
            runner: AtomicUsize::new(0),
            exits: Exits::default(),
        })
        .map_err(no_memory)?;
        let base = DEFAULT_BASE | BASE_ENABLE | if bootstrap { BASE_BSP } else { 0 };
        let machine = VcpuMachine::new(engine, vm.clone(), common.clone(), base);
        let waiting = irqchip && !bootstrap;
        let vcpu = Shared::try_new(VcpuObject {
            common: common.clone(),
            vm,
            page,
            ring,
            counted,
            inner: Mutex::new(Inner {
                cpu,
                machine,
                unfinished: Unfinished::Nothing,
                mp_state: if waiting {
                    KVM_MP_STATE_UNINITIALIZED
                } else {
                    KVM_MP_STATE_RUNNABLE
                },
                requested: events::Requested::default(),
                signal_mask: None,
                has_run: false,
                external: None,
                known_events: KnownEvents::default(),
                interrupts_blocked: false,
            }),
        })
        .map_err(no_memory)?;
        let mut all = ALL.get().lock().unwrap_or_else(PoisonError::into_inner);
        heap::reserve(&mut all, 1)?;
        all.push(common);
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

    /// `KVM_GET_REGS`.
    ///
    /// # Errors
    /// `EIO` in a forked child, as for every call here.
    pub fn get_regs(&self) -> Result<kvm_regs> {
        Ok(regs::get_regs(&self.lock()?.cpu.state))
    }

    /// `KVM_SET_REGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<()> {
        regs::set_regs(&mut self.lock()?.cpu.state, regs);
        Ok(())
    }

    /// `KVM_GET_SREGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_sregs(&self) -> Result<kvm_sregs> {
        let mut inner = self.lock()?;
        inner.sync_cr8_from_lapic();
        Ok(regs::get_sregs(&inner.cpu.state, inner.machine.apic_base()))
    }

    /// `KVM_SET_SREGS`.
    ///
    /// # Errors
    /// `EINVAL` for impossible combinations.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<()> {
        let mut inner = self.lock()?;
        self.put_sregs(&mut inner, sregs, None)
    }

    /// Sets the registers. With PAE paging and without `pdptes`, reads the PDPTEs from guest memory; those that cannot be read
    /// stay as they are, as in KVM.
    pub(crate) fn put_sregs(
        &self,
        inner: &mut Inner,
        sregs: &kvm_sregs,
        pdptes: Option<[u64; 4]>,
    ) -> Result<()> {
        let mut state = inner.cpu.state.clone();
        regs::set_sregs(&mut state, sregs)?;
        inner
            .machine
            .set_apic_base(sregs.apic_base, false)
            .map_err(|_| Error::new(libc::EINVAL))?;
        inner.cpu.state = state;
        if uses_pae_paging(&inner.cpu.state)
            && let Some(pdptes) = pdptes.or_else(|| inner.machine.read_pdptes(sregs.cr3))
        {
            inner.cpu.state.pdptes = pdptes;
        }
        inner.sync_cr8_to_lapic();
        inner.cpu.flush_tlb();
        Ok(())
    }

    /// `KVM_GET_SREGS2`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_sregs2(&self) -> Result<kvm_sregs2> {
        let inner = self.lock()?;
        Ok(regs::get_sregs2(
            &inner.cpu.state,
            inner.machine.apic_base(),
        ))
    }

    /// `KVM_SET_SREGS2`.
    ///
    /// # Errors
    /// `EINVAL` for impossible combinations and unknown flags.
    pub fn set_sregs2(&self, sregs: &kvm_sregs2) -> Result<()> {
        let (sregs, pdptes) = regs::from_sregs2(sregs)?;
        let mut inner = self.lock()?;
        self.put_sregs(&mut inner, &sregs, pdptes)
    }

    /// `KVM_GET_FPU`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_fpu(&self) -> Result<kvm_fpu> {
        Ok(fpu::get_fpu(&self.lock()?.cpu.state))
    }

    /// `KVM_SET_FPU`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_fpu(&self, fpu: &kvm_fpu) -> Result<()> {
        fpu::set_fpu(&mut self.lock()?.cpu.state, fpu);
        Ok(())
    }

    /// `KVM_GET_XSAVE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_xsave(&self) -> Result<[u8; 4096]> {
        Ok(fpu::get_xsave(&self.lock()?.cpu.state))
    }

    /// `KVM_SET_XSAVE`.
    ///
    /// # Errors
    /// `EINVAL` for state components that the CPU does not have.
    pub fn set_xsave(&self, area: &[u8; 4096]) -> Result<()> {
        fpu::set_xsave(&mut self.lock()?.cpu.state, area)
    }

    /// `KVM_GET_XCRS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_xcrs(&self) -> Result<kvm_xcrs> {
        Ok(regs::get_xcrs(&self.lock()?.cpu.state))
    }

    /// `KVM_SET_XCRS`.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn set_xcrs(&self, xcrs: &kvm_xcrs) -> Result<()> {
        regs::set_xcrs(&mut self.lock()?.cpu.state, xcrs)
    }

    /// `KVM_GET_DEBUGREGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_debugregs(&self) -> Result<kvm_debugregs> {
        Ok(regs::get_debugregs(&self.lock()?.cpu.state))
    }

    /// `KVM_SET_DEBUGREGS`.
    ///
    /// # Errors
    /// `EINVAL` for reserved bits.
    pub fn set_debugregs(&self, debugregs: &kvm_debugregs) -> Result<()> {
        regs::set_debugregs(&mut self.lock()?.cpu.state, debugregs)
    }

    /// `KVM_GET_CPUID2`.
    ///
    /// # Errors
    /// `EIO`, `ENOMEM`.
    pub fn get_cpuid(&self) -> Result<Vec<kvm_cpuid_entry2>> {
        heap::copy_of(&self.lock()?.machine.cpuid)
    }

    /// `KVM_SET_CPUID2`.
    ///
    /// # Errors
    /// `EINVAL` when the vCPU has run and `table` differs from its table.
    pub fn set_cpuid(&self, mut table: Vec<kvm_cpuid_entry2>) -> Result<()> {
        if self.vm.options.halts_inside() {
            // As in KVM: where HLT does not exit, other vCPUs cannot end a halt.
            cpuid::remove_kvm_feature(&mut table, cpuid::KVM_FEATURE_PV_UNHALT);
        }
        let mut inner = self.lock()?;
        if inner.has_run && inner.machine.cpuid != table {
            return fail(libc::EINVAL);
        }
        let features = Features::from_cpuid(|leaf, subleaf| cpuid::lookup(&table, leaf, subleaf));
        inner.machine.physical_bits = features.physical_bits();
        inner.cpu.set_features(features);
        inner.machine.cpuid = table;
        Ok(())
    }

    /// `KVM_GET_MSRS`: reads in order, stops at the first that is unknown, and returns how many were read.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_msrs(&self, entries: &mut [kvm_msr_entry]) -> Result<usize> {
        let mut inner = self.lock()?;
        inner.sync_cr8_to_lapic();
        for (done, entry) in entries.iter_mut().enumerate() {
            match msr::read(&mut inner, entry.index) {
                Ok(value) => entry.data = value,
                Err(_) => return Ok(done),
            }
        }
        Ok(entries.len())
    }

    /// `KVM_SET_MSRS`: the counterpart of [`get_msrs`](Self::get_msrs).
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_msrs(&self, entries: &[kvm_msr_entry]) -> Result<usize> {
        let mut inner = self.lock()?;
        inner.sync_cr8_to_lapic();
        let refused =
            |entry: &kvm_msr_entry| msr::write(&mut inner, entry.index, entry.data).is_err();
        let done = entries.iter().position(refused);
        // One of these MSRs is the task priority of an x2APIC.
        inner.sync_cr8_from_lapic();
        Ok(done.unwrap_or(entries.len()))
    }

    /// `KVM_GET_MP_STATE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_mp_state(&self) -> Result<kvm_mp_state> {
        let mut inner = self.lock()?;
        self.accept_init_sipi(&mut inner);
        let kicked = self.common.signals.load(Ordering::SeqCst) & VcpuCommon::UNHALT != 0;
        let mp_state = match inner.mp_state {
            // Without local APIC there is no other state for clients.
            KVM_MP_STATE_HALTED if kicked || self.common.lapic.is_none() => KVM_MP_STATE_RUNNABLE,
            state => state,
        };
        Ok(kvm_mp_state { mp_state })
    }

    /// `KVM_SET_MP_STATE`.
    ///
    /// # Errors
    /// `EINVAL` for states that x86 does not have, and, without a local APIC, for any but runnable.
    pub fn set_mp_state(&self, state: kvm_mp_state) -> Result<()> {
        let mut inner = self.lock()?;
        match state.mp_state {
            KVM_MP_STATE_RUNNABLE => {}
            KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_HALTED | KVM_MP_STATE_INIT_RECEIVED
                if self.common.lapic.is_some() => {}
            KVM_MP_STATE_SIPI_RECEIVED if self.common.lapic.is_some() => {
                inner.mp_state = KVM_MP_STATE_INIT_RECEIVED;
                self.common
                    .signals
                    .fetch_or(VcpuCommon::SIPI, Ordering::SeqCst);
                return Ok(());
            }
            _ => return fail(libc::EINVAL),
        }
        inner.mp_state = state.mp_state;
        Ok(())
    }

    /// `KVM_GET_VCPU_EVENTS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_vcpu_events(&self) -> Result<kvm_vcpu_events> {
        Ok(self.events(&mut *self.lock()?))
    }

    pub(crate) fn events(&self, inner: &mut Inner) -> kvm_vcpu_events {
        let mut events = events::get(
            &inner.cpu.state,
            self.common.nmis(),
            self.common.sipi_vector.load(Ordering::SeqCst),
        );
        inner.requested.show(&mut events, &self.vm.options);
        events
    }

    /// `KVM_SET_VCPU_EVENTS`.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags and impossible events.
    pub fn set_vcpu_events(&self, events: &kvm_vcpu_events) -> Result<()> {
        self.put_events(&mut *self.lock()?, events)
    }

    pub(crate) fn put_events(&self, inner: &mut Inner, given: &kvm_vcpu_events) -> Result<()> {
        let requested = inner.requested.changed_by(given, &self.vm.options)?;
        let more = events::set(&mut inner.cpu.state, given)?;
        inner.requested = requested;
        if let Some(pending) = more.nmis_pending {
            self.common.take_nmis();
            for _ in 0..pending.min(MAX_NMIS) {
                self.common.signal_nmi();
            }
        }
        if let Some(vector) = more.sipi_vector.filter(|_| self.common.lapic.is_some()) {
            self.common.sipi_vector.store(vector, Ordering::SeqCst);
        }
        Ok(())
    }

    /// `KVM_X86_SETUP_MCE`.
    ///
    /// # Errors
    /// `EINVAL` for capabilities that are not supported.
    pub fn setup_mce(&self, capabilities: u64) -> Result<()> {
        self.lock()?.machine.mce.set_up(capabilities)
    }

    /// `KVM_X86_SET_MCE`: reports an error of the machine to the guest.
    ///
    /// # Errors
    /// `EINVAL` for a bank that does not exist, and for an error that is not valid.
    pub fn set_mce(&self, error: &kvm_x86_mce) -> Result<()> {
        let mut inner = self.lock()?;
        let enabled = inner.cpu.state.cr4 & control::CR4_MCE != 0;
        match inner.machine.mce.report(error, enabled)? {
            Reported::Logged => {}
            Reported::Exception => {
                inner.cpu.state.events.exception = Some(Exception {
                    vector: vector::MC,
                    error: None,
                });
            }
            Reported::Shutdown => inner.requested.triple_fault = true,
        }
        Ok(())
    }

    /// `KVM_GET_LAPIC`.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller.
    pub fn get_lapic(&self) -> Result<kvm_lapic_state> {
        let mut inner = self.lock()?;
        inner.sync_cr8_to_lapic();
        if inner.machine.pv_eoi_offered {
            Entered::enter(&mut *inner).machine.collect_pv_eoi();
        }
        self.vm.inject_signalled();
        match self.common.lapic() {
            Some(lapic) => {
                let mut registers = lapic.save(self.vm.clock.now());
                if lapic.x2apic() && !self.vm.interrupts.has_wide_ids() {
                    // Without KVM_X2APIC_API_USE_32BIT_IDS, the id is where xAPIC mode has it.
                    registers[(reg::ID >> 4) as usize] <<= 24;
                }
                Ok(lapic_state(&registers))
            }
            None => fail(libc::EINVAL),
        }
    }

    /// `KVM_SET_LAPIC`.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller, and for another id than the x2APIC has, where the client uses 32-bit ids.
    pub fn set_lapic(&self, state: &kvm_lapic_state) -> Result<()> {
        let mut inner = self.lock()?;
        let registers = lapic_registers(state);
        match self.common.lapic() {
            Some(lapic)
                if lapic.x2apic()
                    && self.vm.interrupts.has_wide_ids()
                    && registers[(reg::ID >> 4) as usize] != self.common.id =>
            {
                return fail(libc::EINVAL);
            }
            Some(mut lapic) => lapic.restore(&registers, self.vm.clock.now()),
            None => return fail(libc::EINVAL),
        }
        self.vm.apic_addresses_changed();
        inner.sync_cr8_from_lapic();
        inner.machine.carry_out(Effect::Timer);
        Ok(())
    }

    /// `KVM_INTERRUPT`: an interrupt of the client's own interrupt controller.
    ///
    /// # Errors
    /// `EINVAL` for a vector beyond 255, `ENXIO` when the VM has an 8259, `EEXIST` when a vCPU with a local APIC has not taken the
    /// last interrupt.
    pub fn interrupt(&self, vector: u32) -> Result<()> {
        let Ok(vector) = u8::try_from(vector) else {
            return fail(libc::EINVAL);
        };
        let mut inner = self.lock()?;
        if self.common.lapic.is_none() {
            inner.cpu.state.events.interrupt = Some(vector);
            return Ok(());
        }
        if !self.vm.interrupts.is_split() {
            return fail(libc::ENXIO);
        }
        if inner.external.is_some() {
            return fail(libc::EEXIST);
        }
        inner.external = Some(vector);
        Ok(())
    }

    /// `KVM_NMI`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn nmi(&self) -> Result<()> {
        let _call = self.vm.begin()?;
        self.common.non_maskable();
        Ok(())
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
        self.lock()?.machine.set_tsc_khz(khz);
        Ok(())
    }

    /// `KVM_SET_SIGNAL_MASK`: sets the signals blocked during `KVM_RUN`, a bit each; `None`: those of the thread's own mask.
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
        let found = machine.translate_for_client(&cpu.state, address);
        Ok(kvm_translation {
            linear_address: address,
            physical_address: found.unwrap_or(u64::MAX),
            valid: u8::from(found.is_some()),
            writeable: 1,
            usermode: 0,
            pad: [0; 5],
        })
    }

    /// `KVM_ENABLE_CAP` of a vCPU: `KVM_CAP_ENFORCE_PV_FEATURE_CPUID`.
    ///
    /// # Errors
    /// `EINVAL` for any other capability, and for flags.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        let mut inner = self.lock()?;
        if cap.flags != 0 || cap.cap != KVM_CAP_ENFORCE_PV_FEATURE_CPUID {
            return fail(libc::EINVAL);
        }
        inner.machine.enforces_pv_features = cap.args[0] != 0;
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
}

/// Returns the APIC page as bytes, the form of KVM's API.
fn lapic_state(registers: &[u32; REGISTERS]) -> kvm_lapic_state {
    let mut state = kvm_lapic_state::default();
    for (place, value) in state.regs.chunks_exact_mut(16).zip(registers) {
        for (to, from) in place.iter_mut().zip(value.to_le_bytes()) {
            *to = from as _;
        }
    }
    state
}

fn lapic_registers(state: &kvm_lapic_state) -> [u32; REGISTERS] {
    std::array::from_fn(|index| {
        u32::from_le_bytes(std::array::from_fn(|byte| {
            state.regs[index * 16 + byte] as u8
        }))
    })
}

impl Inner {
    /// Copies CR8 to the APIC's task priority. On a processor both are one register; while the vCPU runs, the CPU's copy is current.
    pub(crate) fn sync_cr8_to_lapic(&mut self) {
        if let Some(mut lapic) = self.machine.common.lapic()
            && lapic.cr8() != self.cpu.state.cr8
        {
            lapic.set_cr8(self.cpu.state.cr8);
        }
    }

    /// Copies the APIC's task priority to CR8. Call after that register was written.
    pub(crate) fn sync_cr8_from_lapic(&mut self) {
        if let Some(lapic) = self.machine.common.lapic() {
            self.cpu.state.cr8 = lapic.cr8();
        }
    }
}
