//! The type [`VcpuFd`]: a client's descriptor of a vCPU.

use super::descriptors::Descriptor;
use super::{StatsFd, exits};
use crate::errno::{Result, fail};
use crate::run_page::{RunPage, mmap_size};
use crate::vcpu::VcpuObject;
use kvm_bindings::*;
use kvm_ioctls::VcpuExit;
use slat::Shared;
use std::os::fd::{AsRawFd, RawFd};

/// A vCPU; replaces `kvm_ioctls::VcpuFd`.
#[derive(Debug)]
pub struct VcpuFd {
    pub(crate) vcpu: Shared<VcpuObject>,
    fd: Descriptor,
    /// The client's own mapping of the pages that the vCPU shares with the client: `kvm_run` and the pages after it.
    pub(crate) run: RunPage,
    /// Whether the client may read the ring of coalesced I/O.
    reads_coalesced: bool,
}

impl VcpuFd {
    pub(super) fn new(vcpu: Shared<VcpuObject>, fd: Descriptor) -> Result<Self> {
        let run = RunPage::map(fd.fd())?;
        // SAFETY: `map` has just created the mapping.
        unsafe { vcpu.complete_mapping(run.address(), mmap_size(), 0)? };
        Ok(VcpuFd {
            vcpu,
            fd,
            run,
            reads_coalesced: false,
        })
    }

    /// Carries out `KVM_GET_MP_STATE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_mp_state(&self) -> Result<kvm_mp_state> {
        self.vcpu.get_mp_state()
    }

    /// Carries out `KVM_SET_MP_STATE`.
    ///
    /// # Errors
    /// `EINVAL` for a state that the architecture does not have.
    pub fn set_mp_state(&self, mp_state: kvm_mp_state) -> Result<()> {
        self.vcpu.set_mp_state(mp_state)
    }

    /// Carries out `KVM_GET_VCPU_EVENTS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_vcpu_events(&self) -> Result<kvm_vcpu_events> {
        self.vcpu.get_vcpu_events()
    }

    /// Carries out `KVM_SET_VCPU_EVENTS`.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags and impossible events.
    pub fn set_vcpu_events(&self, vcpu_events: &kvm_vcpu_events) -> Result<()> {
        self.vcpu.set_vcpu_events(vcpu_events)
    }

    /// Carries out `KVM_SET_SIGNAL_MASK`, which kvm-ioctls does not have.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_signal_mask(&self, mask: Option<u64>) -> Result<()> {
        self.vcpu.set_signal_mask(mask)
    }

    /// Carries out `KVM_PRE_FAULT_MEMORY`, which kvm-ioctls does not have: maps a range of guest memory before the
    /// guest uses it. Sets `range` to the part that is not mapped yet.
    ///
    /// # Errors
    /// `EINVAL` for flags, and for a range that is empty or not of whole pages. If no page was mapped, also: `ENOENT`
    /// without a memory slot, `EINTR` for a signal, `EFAULT` if the memory that backs the slot is unmapped or a private
    /// page has no private memory, `ENOMEM`.
    pub fn pre_fault_memory(&self, range: &mut kvm_pre_fault_memory) -> Result<()> {
        self.vcpu.pre_fault(range)
    }

    /// Carries out `KVM_GET_STATS_FD` of the vCPU, which kvm-ioctls does not have.
    ///
    /// # Errors
    /// The host's error for making a file.
    pub fn get_stats_fd(&self) -> Result<StatsFd> {
        Ok(StatsFd::new(VcpuObject::stats(&self.vcpu)?))
    }

    /// Makes the ring of coalesced I/O readable by [`coalesced_mmio_read`](Self::coalesced_mmio_read).
    ///
    /// # Errors
    /// No error can happen.
    pub fn map_coalesced_mmio_ring(&mut self) -> Result<()> {
        self.reads_coalesced = true;
        Ok(())
    }

    /// Removes the oldest write from the ring of coalesced I/O, which the vCPUs of a VM share.
    /// `None`: the ring is empty.
    ///
    /// # Errors
    /// `EIO` before [`map_coalesced_mmio_ring`](Self::map_coalesced_mmio_ring).
    pub fn coalesced_mmio_read(&mut self) -> Result<Option<kvm_coalesced_mmio>> {
        match self.reads_coalesced {
            true => Ok(self.vcpu.vm.coalesced.next()),
            false => fail(libc::EIO),
        }
    }

    /// Carries out `KVM_RUN`.
    ///
    /// # Errors
    /// `EINTR` for `immediate_exit` or a signal, `EFAULT` when the memory that backs guest memory is unmapped, `EINVAL`
    /// for bad values in `kvm_run`, `EAGAIN` after waiting for INIT and SIPI.
    pub fn run(&mut self) -> Result<VcpuExit<'_>> {
        match self.vcpu.run() {
            Ok(()) => Ok(exits::exit(&mut self.run)),
            Err(error) => exits::exit_with(error, &mut self.run),
        }
    }

    /// Carries out `KVM_SET_GUEST_DEBUG`.
    ///
    /// # Errors
    /// `EBUSY` if the call asks to inject an exception and another exception is pending.
    pub fn set_guest_debug(&self, debug: &kvm_guest_debug) -> Result<()> {
        self.vcpu.set_guest_debug(debug)
    }

    /// Returns the `kvm_run` struct, which the client shares with the vCPU.
    pub fn get_kvm_run(&mut self) -> &mut kvm_run {
        exits::run(&mut self.run)
    }

    /// Sets `immediate_exit` in `kvm_run`. If `val` is 1, `KVM_RUN` returns at once.
    pub fn set_kvm_immediate_exit(&mut self, val: u8) {
        self.get_kvm_run().immediate_exit = val;
    }
}

impl AsRawFd for VcpuFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
