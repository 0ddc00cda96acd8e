//! The part of a vCPU that other threads use while the vCPU runs: its local APIC, the signals to it, its counters.

use crate::arch::hyperv::VirtualProcessor;
use crate::arch::{Counters, Exits};
use crate::counters::CpuCounts;
use crate::errno::{Result, no_memory};
use crate::exit_times::ExitTimes;
use crate::process::PerProcess;
use crate::thread::bits;
use crate::ticker::{self, Alarm, Client};
use crate::{heap, steal_time};
use slat::{Attention, Shared, VcpuStats};
use slat_irqchip::lapic::{Lapic, Request};
use slat_irqchip::message::{DeliveryMode, Destination, Message};
use slat_x86::state::MAX_NMIS;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The part of a vCPU that other threads use while the vCPU runs.
pub(crate) struct VcpuCommon {
    pub(crate) id: u32,
    pub(crate) attention: Attention,
    pub(crate) client: Shared<Client>,
    lapic: Option<Mutex<Lapic>>,
    /// The pending events, as bits: [`NMIS`](Self::NMIS), [`INIT`](Self::INIT), [`SIPI`](Self::SIPI),
    /// [`UNHALT`](Self::UNHALT), [`SMI`](Self::SMI).
    pub(crate) signals: AtomicU32,
    pub(crate) sipi_vector: AtomicU32,
    /// The thread (`pthread_t`) that is in `KVM_RUN`, or 0.
    pub(crate) runner: AtomicUsize,
    pub(crate) exits: Exits,
    pub(crate) times: ExitTimes,
    pub(crate) cpu: CpuCounts,
    /// The engine's counters for this vCPU.
    pub(crate) counted: VcpuStats,
    /// The vCPU as a virtual processor of Hyper-V's interface.
    pub(crate) vp: VirtualProcessor,
}

/// All vCPUs of the process, for [`interrupt_thread`].
static ALL: PerProcess<Mutex<Vec<Shared<VcpuCommon>>>> = PerProcess::new();

/// Creates the objects that the vCPUs of a process share.
pub(crate) fn prepare() {
    ALL.get();
    ticker::prepare();
    steal_time::prepare();
}

fn all(all: &Mutex<Vec<Shared<VcpuCommon>>>) -> MutexGuard<'_, Vec<Shared<VcpuCommon>>> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

/// If `thread`, a `pthread_t`, is in `KVM_RUN`, makes that `KVM_RUN` return `EINTR`. Call for a signal that ends system
/// calls and that no handler of the client sees.
pub fn interrupt_thread(thread: usize) {
    let Some(vcpus) = ALL.peek() else {
        return;
    };
    for vcpu in &*all(vcpus) {
        if vcpu.runner.load(Ordering::SeqCst) == thread {
            ticker::raise(&vcpu.attention, bits::SIGNAL);
        }
    }
}

/// Adds to `sum` the counters of all CPUs of the process that exist now.
pub(crate) fn add_cpu_counters(sum: &mut [u64; Counters::COUNT]) {
    if let Some(vcpus) = ALL.peek() {
        for vcpu in &*all(vcpus) {
            vcpu.cpu.add_to(sum);
        }
    }
}

impl Drop for VcpuCommon {
    fn drop(&mut self) {
        self.client.leave();
    }
}

impl VcpuCommon {
    /// Pending NMIs, a bit each: one NMI can wait while another NMI is delivered.
    const NMIS: [u32; MAX_NMIS as usize] = [1, 1 << 4];
    const ALL_NMIS: u32 = Self::NMIS[0] | Self::NMIS[1];
    pub(crate) const INIT: u32 = 2;
    pub(crate) const SIPI: u32 = 4;
    /// Another vCPU ended this vCPU's halt ([`end_halt`](Self::end_halt)).
    pub(crate) const UNHALT: u32 = 8;
    /// A system management interrupt.
    pub(crate) const SMI: u32 = 1 << 5;

    /// Creates the common part of a vCPU. The VM has had `index` vCPUs before it.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(
        id: u32,
        index: u32,
        attention: Attention,
        counted: VcpuStats,
        lapic: Option<Lapic>,
    ) -> Result<Shared<Self>> {
        Shared::try_new(VcpuCommon {
            id,
            client: Client::register(Alarm::Vcpu(attention.clone()))?,
            attention,
            lapic: lapic.map(Mutex::new),
            signals: AtomicU32::new(0),
            sipi_vector: AtomicU32::new(0),
            runner: AtomicUsize::new(0),
            exits: Exits::default(),
            times: ExitTimes::default(),
            cpu: CpuCounts::default(),
            counted,
            vp: VirtualProcessor::new(index),
        })
        .map_err(no_memory)
    }

    /// Lets [`interrupt_thread`] find the vCPU.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn enlist(this: Shared<Self>) -> Result<()> {
        let mut all = all(ALL.get());
        heap::reserve(&mut all, 1)?;
        all.push(this);
        Ok(())
    }

    /// Removes the vCPU from the list of [`enlist`](Self::enlist).
    pub(crate) fn delist(&self) {
        if let Some(vcpus) = ALL.peek() {
            all(vcpus).retain(|vcpu| !std::ptr::eq(&**vcpu, self));
        }
    }

    /// Whether the vCPU has a local APIC.
    pub(crate) fn has_lapic(&self) -> bool {
        self.lapic.is_some()
    }

    /// The local APIC, if the VM has an interrupt controller.
    pub(crate) fn lapic(&self) -> Option<MutexGuard<'_, Lapic>> {
        Some(
            self.lapic
                .as_ref()?
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner()),
        )
    }

    /// Makes the vCPU look for interrupts. Wakes the vCPU from a halt or another wait.
    pub(crate) fn notice(&self) {
        ticker::raise(&self.attention, bits::IRQ);
    }

    /// Delivers a message to this vCPU. A message that ends a level (level-triggered, without assert) is no interrupt.
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
            DeliveryMode::Smi => self.signal(Self::SMI),
            // The 8259 interrupts by its INTR line, not by messages.
            DeliveryMode::ExtInt => Request::Refused,
        };
        if taken == Request::Pending {
            self.notice();
        }
        taken
    }

    /// Requests an edge-triggered interrupt of this vCPU.
    pub(crate) fn request(&self, vector: u8) -> Request {
        self.deliver(&Message {
            vector,
            mode: DeliveryMode::Fixed,
            level: false,
            assert: true,
            destination: Destination::Physical(self.id),
        })
    }

    /// Sends a non-maskable interrupt.
    pub(crate) fn non_maskable(&self) {
        self.signal_nmi();
        self.notice();
    }

    /// Sends a system management interrupt.
    pub(crate) fn system_management(&self) {
        self.signal(Self::SMI);
        self.notice();
    }

    /// Clears the pending system management interrupt. Returns whether there was one.
    pub(crate) fn take_smi(&self) -> bool {
        // Every entry into the guest calls this, and usually no SMI is pending.
        self.signals.load(Ordering::SeqCst) & Self::SMI != 0
            && self.signals.fetch_and(!Self::SMI, Ordering::SeqCst) & Self::SMI != 0
    }

    /// Ends the vCPU's halt (`KVM_HC_KICK_CPU`). If the vCPU is not halted, ends its next halt.
    pub(crate) fn end_halt(&self) {
        if self.signal(Self::UNHALT) == Request::Pending {
            self.notice();
        }
    }

    /// Makes an NMI pending. At most [`MAX_NMIS`] NMIs are pending.
    pub(crate) fn signal_nmi(&self) -> Request {
        let mut bits = Self::NMIS.into_iter();
        match bits.any(|bit| self.signal(bit) == Request::Pending) {
            true => Request::Pending,
            false => Request::Merged,
        }
    }

    /// The number of pending NMIs.
    pub(crate) fn nmis(&self) -> u8 {
        Self::nmis_in(self.signals.load(Ordering::SeqCst))
    }

    /// Clears the pending NMIs. Returns their number.
    pub(crate) fn take_nmis(&self) -> u8 {
        // Every entry into the guest calls this, and usually no NMI is pending.
        match self.nmis() {
            0 => 0,
            _ => Self::nmis_in(self.signals.fetch_and(!Self::ALL_NMIS, Ordering::SeqCst)),
        }
    }

    fn nmis_in(signals: u32) -> u8 {
        (signals & Self::ALL_NMIS).count_ones() as u8
    }

    fn signal(&self, signal: u32) -> Request {
        match self.signals.fetch_or(signal, Ordering::SeqCst) & signal {
            0 => Request::Pending,
            _ => Request::Merged,
        }
    }
}
