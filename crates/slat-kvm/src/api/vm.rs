//! The type [`VmFd`]: a client's descriptor of a VM.

use super::descriptors::Descriptor;
use super::{StatsFd, VcpuFd};
use crate::engine::EngineVm;
use crate::errno::{Result, fail};
use crate::ioctl::Object;
use crate::log_reader::LogReader;
use crate::vm::VmObject;
use kvm_bindings::*;
use kvm_ioctls::{Cap, IoEventAddress};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// A VM; replaces `kvm_ioctls::VmFd`.
#[derive(Debug)]
pub struct VmFd {
    pub(crate) vm: Arc<VmObject>,
    fd: Descriptor,
    run_size: usize,
}

impl VmFd {
    pub(super) fn new(vm: Arc<VmObject>, fd: Descriptor, run_size: usize) -> Self {
        VmFd { vm, fd, run_size }
    }

    /// Creates, moves, changes or deletes a memory slot.
    ///
    /// # Errors
    /// KVM's: `EINVAL` for bad arguments, `EEXIST` for an overlap, `ENOMEM`.
    ///
    /// # Safety
    /// From now on until the slot is deleted, the guest reads and writes the memory at `userspace_addr`. No code in
    /// this process may rely on the memory's contents in a way that a concurrent write would break.
    pub unsafe fn set_user_memory_region(
        &self,
        user_memory_region: kvm_userspace_memory_region,
    ) -> Result<()> {
        self.vm.set_user_memory_region(&user_memory_region)
    }

    /// Creates, changes or deletes a memslot like [`set_user_memory_region`](Self::set_user_memory_region), but takes
    /// the larger struct, which can also name private memory ([`create_guest_memfd`](Self::create_guest_memfd)).
    ///
    /// # Errors
    /// The errors are those of [`set_user_memory_region`](Self::set_user_memory_region).
    ///
    /// # Safety
    /// From now on until the slot is deleted, the guest reads and writes the memory at `userspace_addr`. No code in
    /// this process may rely on the memory's contents in a way that a concurrent write would break.
    pub unsafe fn set_user_memory_region2(
        &self,
        user_memory_region2: kvm_userspace_memory_region2,
    ) -> Result<()> {
        self.vm.set_user_memory_region2(&user_memory_region2)
    }

    /// Carries out `KVM_SET_MEMORY_ATTRIBUTES`: makes memory private, or shared again.
    ///
    /// # Errors
    /// `EINVAL` for flags, attributes that a VM of this type does not have, and a bad range; `ENOMEM`.
    pub fn set_memory_attributes(&self, attr: kvm_memory_attributes) -> Result<()> {
        self.vm.set_memory_attributes(&attr)
    }

    /// Carries out `KVM_GET_DIRTY_LOG`: returns a bit for each page of the slot, which is set if the page was written
    /// since the last call.
    ///
    /// # Errors
    /// `EINVAL` for a bad slot, `ENOENT` for a slot that is not logged, `ENXIO` with dirty rings.
    pub fn get_dirty_log(&self, slot: u32, _memory_size: usize) -> Result<Vec<u64>> {
        self.vm.dirty_log(slot, |_| Ok(()))
    }

    /// Carries out `KVM_CLEAR_DIRTY_LOG`, which kvm-ioctls does not have. Clears pages in the log; their next write is
    /// logged again. The call covers the `pages` pages from page `first` of the slot on, and clears those whose bit is
    /// set in `bitmap`. Bit 0 of `bitmap` is page `first`.
    ///
    /// # Errors
    /// `EINVAL` for a bad slot, a range that is not in multiples of 64 pages, or a bitmap that is too short; `ENOENT`
    /// for a slot that is not logged; `ENXIO` with dirty rings.
    pub fn clear_dirty_log(&self, slot: u32, first: u64, pages: u32, bitmap: &[u64]) -> Result<()> {
        self.vm.clear_dirty_log(slot, first, pages, |words| {
            bitmap.get(..words).map_or_else(|| fail(libc::EINVAL), Ok)
        })
    }

    /// Marks in the dirty log the pages that the VMM itself has written. These are the pages of the `len` bytes from
    /// guest-physical address `start` on, in address space `space` (0 except for system management mode). Call after
    /// the write. Pages without a logged slot are skipped. KVM's API has no such call, so with KVM a VMM needs a second
    /// log; `slat-vm-memory` makes this call after each write.
    ///
    /// # Errors
    /// `EINVAL` for an address space that the VM does not have, and for bytes beyond the last address;
    /// `ENXIO` with dirty rings.
    pub fn mark_dirty(&self, space: usize, start: u64, len: u64) -> Result<()> {
        self.vm.mark_dirty(space, start, len)
    }

    /// Whether the page of guest-physical `address` in address space `space` is marked in a dirty log now. Unlike
    /// [`get_dirty_log`](Self::get_dirty_log), clears nothing. `false` for pages without a logged slot, and with dirty
    /// rings.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn is_marked_dirty(&self, space: usize, address: u64) -> Result<bool> {
        self.vm.is_marked_dirty(space, address)
    }

    /// Makes a reader of all dirty logs of the VM, with epochs of its own. kvm-ioctls has no such method. A program that
    /// uses the system-call interface creates a device instead (`docs/run.md`, "Several readers of the dirty log").
    ///
    /// # Errors
    /// `ENOMEM`; `EIO` in a forked child.
    pub fn log_reader(&self) -> Result<LogReader> {
        LogReader::new(&self.vm)
    }

    /// Carries out `KVM_RESET_DIRTY_RINGS`, which kvm-ioctls does not have. Returns how many ring entries were reset.
    ///
    /// # Errors
    /// `EINVAL` without rings.
    pub fn reset_dirty_rings(&self) -> Result<u32> {
        Ok(self.vm.reset_dirty_rings()? as u32)
    }

    /// Carries out `KVM_REGISTER_COALESCED_MMIO`: writes to the range go into a ring.
    ///
    /// # Errors
    /// `ENOSPC` for too many ranges.
    pub fn register_coalesced_mmio(&self, addr: IoEventAddress, size: u32) -> Result<()> {
        self.vm.register_coalesced(&zone(addr, size))
    }

    /// Carries out `KVM_UNREGISTER_COALESCED_MMIO`.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn unregister_coalesced_mmio(&self, addr: IoEventAddress, size: u32) -> Result<()> {
        self.vm.unregister_coalesced(&zone(addr, size))
    }

    /// Carries out `KVM_GET_STATS_FD` of the VM, which kvm-ioctls does not have.
    ///
    /// # Errors
    /// The host's error for making a file.
    pub fn get_stats_fd(&self) -> Result<StatsFd> {
        Ok(StatsFd::new(self.vm.stats()?))
    }

    /// Returns the engine's VM, with its policies, its counters and its audit. KVM has no counterpart.
    #[doc(hidden)]
    pub fn engine(&self) -> &Arc<EngineVm> {
        &self.vm.engine
    }

    /// Carries out `KVM_CREATE_VCPU`.
    ///
    /// # Errors
    /// `EINVAL` beyond the limits, `EEXIST` for an id in use, `ENOMEM`, the host's error for opening a descriptor.
    pub fn create_vcpu(&self, id: u64) -> Result<VcpuFd> {
        let (vcpu, fd) = self.vm.create_vcpu(id)?;
        let fd = Descriptor::new(fd, Object::Vcpu(vcpu.clone()))?;
        VcpuFd::new(vcpu, fd)
    }

    /// Makes a `VcpuFd` of a duplicate of a vCPU's descriptor, while the vCPU has another `VcpuFd`.
    ///
    /// # Errors
    /// `EBADF` for a closed descriptor, `ENOTTY` for a descriptor that is no vCPU's; `fd` then stays open.
    ///
    /// # Safety
    /// Nothing else owns `fd`.
    pub unsafe fn create_vcpu_from_rawfd(&self, fd: RawFd) -> Result<VcpuFd> {
        let vcpu = |object: &Object| match object {
            Object::Vcpu(vcpu) => Some(vcpu.clone()),
            _ => None,
        };
        // SAFETY: the caller keeps this function's contract.
        let (vcpu, fd) = unsafe { Descriptor::adopt(fd, vcpu)? };
        VcpuFd::new(vcpu, fd)
    }

    /// Carries out `KVM_ENABLE_CAP`.
    ///
    /// # Errors
    /// `EINVAL` for capabilities that cannot be enabled, and for bad arguments.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        self.vm.enable_cap(cap)
    }

    /// Returns the number of bytes of the memory that a vCPU shares with the client.
    pub fn run_size(&self) -> usize {
        self.run_size
    }

    /// Carries out `KVM_CHECK_EXTENSION` for the capability whose number is `c`.
    pub fn check_extension_raw(&self, c: std::os::raw::c_ulong) -> i32 {
        self.vm.check_extension(c)
    }

    /// Carries out `KVM_CHECK_EXTENSION`.
    pub fn check_extension_int(&self, c: Cap) -> i32 {
        self.check_extension_raw(c as std::os::raw::c_ulong)
    }

    /// Whether the VM has the capability `c`.
    pub fn check_extension(&self, c: Cap) -> bool {
        self.check_extension_int(c) > 0
    }
}

fn zone(addr: IoEventAddress, size: u32) -> kvm_coalesced_mmio_zone {
    let (addr, pio) = match addr {
        IoEventAddress::Pio(port) => (port, 1),
        IoEventAddress::Mmio(address) => (address, 0),
    };
    let mut zone = kvm_coalesced_mmio_zone {
        addr,
        size,
        ..Default::default()
    };
    zone.__bindgen_anon_1.pio = pio;
    zone
}

impl AsRawFd for VmFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
