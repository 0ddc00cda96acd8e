//! The part of a vCPU that other threads use while the vCPU runs: its counters, and the architecture's part.

use crate::arch::{Counters, Exits, VcpuShared};
use crate::counters::CpuCounts;
use crate::errno::{Result, no_memory};
use crate::exit_times::ExitTimes;
use crate::process::PerProcess;
use crate::thread::bits;
use crate::ticker::{self, Alarm, Client};
use crate::{heap, steal_time};
use slat::{Attention, Shared, VcpuStats};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The part of a vCPU that other threads use while the vCPU runs.
pub(crate) struct VcpuCommon {
    pub(crate) id: u32,
    pub(crate) attention: Attention,
    pub(crate) client: Shared<Client>,
    /// The thread (`pthread_t`) that is in `KVM_RUN`, or 0. Accesses need no order, because no other data depends on
    /// this word.
    pub(crate) runner: AtomicUsize,
    pub(crate) exits: Exits,
    pub(crate) times: ExitTimes,
    pub(crate) cpu: CpuCounts,
    /// The engine's counters for this vCPU.
    pub(crate) counted: VcpuStats,
    /// The architecture's data of the vCPU that other threads use.
    pub(crate) arch: VcpuShared,
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

/// If `thread`, a `pthread_t`, is in `KVM_RUN`, makes that `KVM_RUN` return `EINTR`. Call for a signal that would end
/// system calls but runs no handler of the client.
pub fn interrupt_thread(thread: usize) {
    let Some(vcpus) = ALL.peek() else {
        return;
    };
    for vcpu in &*all(vcpus) {
        if vcpu.runner.load(Ordering::Relaxed) == thread {
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
    /// Creates the common part of a vCPU.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(
        id: u32,
        attention: Attention,
        counted: VcpuStats,
        arch: VcpuShared,
    ) -> Result<Shared<Self>> {
        Shared::try_new(VcpuCommon {
            id,
            client: Client::register(Alarm::Vcpu(attention.clone()))?,
            attention,
            runner: AtomicUsize::new(0),
            exits: Exits::default(),
            times: ExitTimes::default(),
            cpu: CpuCounts::default(),
            counted,
            arch,
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

    /// Removes the vCPU from the list to which [`enlist`](Self::enlist) added it.
    pub(crate) fn delist(&self) {
        if let Some(vcpus) = ALL.peek() {
            all(vcpus).retain(|vcpu| !std::ptr::eq(&**vcpu, self));
        }
    }

    /// Makes the vCPU check for interrupts. If the vCPU waits in a halt or elsewhere, wakes it.
    pub(crate) fn notice(&self) {
        ticker::raise(&self.attention, bits::IRQ);
    }
}
