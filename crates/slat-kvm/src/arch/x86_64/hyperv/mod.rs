//! The state of Hyper-V's interface, for a VM and its vCPUs. The rules are in `slat-hyperv`, and the operations of a
//! vCPU are in `machine::hyperv`.
//!
//! | file | idea |
//! |---|---|
//! | `connections` | connections: eventfds that the guest signals by a hypercall (`KVM_HYPERV_EVENTFD`) |
//! | `vp` | the part of a virtual processor that other threads use: its index, and its SynIC |
//! | `vcpu` | the part that only the vCPU's own thread uses |
//! | `cpuid` | the CPUID leaves in KVM's struct |
//!
//! # Locks
//! Each lock of this folder is held for a few instructions, and never while guest memory is accessed, because an access
//! may wait for other vCPUs.

mod connections;
pub(crate) mod cpuid;
mod vcpu;
mod vp;

pub(crate) use connections::Connections;
pub(crate) use vcpu::{HypervExit, VcpuHyperv};
pub(crate) use vp::VirtualProcessor;

use slat_hyperv::partition::{DuePage, PageOutcome, Partition};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// A VM's state of Hyper-V's interface.
#[derive(Debug, Default)]
pub(crate) struct Hyperv {
    partition: Mutex<Partition>,
    /// Whether the page of the reference clock has to be written. Stored under the partition's lock, before the
    /// attention word of the vCPU that has to write the page is raised. While it is false, vCPUs do not take that lock.
    is_page_due: AtomicBool,
    pub(crate) connections: Connections,
}

impl Hyperv {
    /// Locks the registers that all vCPUs share, and runs `work` on them.
    pub(crate) fn with_partition<R>(&self, work: impl FnOnce(&mut Partition) -> R) -> R {
        let mut partition = (self.partition.lock()).unwrap_or_else(PoisonError::into_inner);
        let result = work(&mut partition);
        (self.is_page_due).store(partition.is_page_due(), Ordering::Relaxed);
        result
    }

    /// Makes a vCPU write the guest's reference TSC page again, if the guest has such a page. Call after the VM's clock
    /// or a vCPU's TSC was set. Then raise [`RETRY`](crate::thread::bits::RETRY) for a vCPU: it writes the page before
    /// it executes guest code.
    pub(crate) fn clock_changed(&self) {
        self.with_partition(Partition::clock_changed);
    }

    /// Begins to write the page of the reference clock (Hyper-V's reference TSC page). `None`: the page need not be
    /// written.
    pub(crate) fn begin_page(&self) -> Option<DuePage> {
        if !self.is_page_due.load(Ordering::Relaxed) {
            return None;
        }
        self.with_partition(Partition::begin_page)
    }

    /// Ends the write that [`begin_page`](Self::begin_page) began. `outcome` is the result of the write.
    pub(crate) fn end_page(&self, due: DuePage, outcome: PageOutcome) {
        self.with_partition(|partition| partition.end_page(due, outcome));
    }
}
