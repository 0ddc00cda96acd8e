//! [`VcpuFd`].

use super::StatsFd;
use crate::errno::{Result, fail, no_memory};
use crate::run_page::{MMAP_SIZE, PAGE, PIO_OFFSET, RunPage};
use crate::vcpu::VcpuObject;
use kvm_bindings::*;
use kvm_ioctls::{HypercallExit, MsrExitReason, ReadMsrExit, SyncReg, VcpuExit, WriteMsrExit};
use slat::Shared;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// A vCPU; in place of `kvm_ioctls::VcpuFd`.
#[derive(Debug)]
pub struct VcpuFd {
    vcpu: Shared<VcpuObject>,
    fd: OwnedFd,
    /// The client's own mapping of the shared pages.
    run: RunPage,
}

impl VcpuFd {
    pub(super) fn new(vcpu: Shared<VcpuObject>, fd: OwnedFd) -> Result<Self> {
        let run = RunPage::map(&fd)?;
        // SAFETY: the mapping that was just made.
        unsafe { vcpu.show_coalesced(run.address(), MMAP_SIZE, 0)? };
        Ok(VcpuFd { vcpu, fd, run })
    }

    /// `KVM_GET_REGS`.
    ///
    /// # Errors
    /// `EIO` in a forked child, as for every call here.
    pub fn get_regs(&self) -> Result<kvm_regs> {
        self.vcpu.get_regs()
    }

    /// `KVM_SET_REGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<()> {
        self.vcpu.set_regs(regs)
    }

    /// `KVM_GET_SREGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_sregs(&self) -> Result<kvm_sregs> {
        self.vcpu.get_sregs()
    }

    /// `KVM_SET_SREGS`.
    ///
    /// # Errors
    /// `EINVAL` for combinations that no CPU can be in.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<()> {
        self.vcpu.set_sregs(sregs)
    }

    /// `KVM_GET_FPU`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_fpu(&self) -> Result<kvm_fpu> {
        self.vcpu.get_fpu()
    }

    /// `KVM_SET_FPU`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_fpu(&self, fpu: &kvm_fpu) -> Result<()> {
        self.vcpu.set_fpu(fpu)
    }

    /// `KVM_SET_CPUID2`.
    ///
    /// # Errors
    /// `EINVAL` for a change after the first run.
    pub fn set_cpuid2(&self, cpuid: &CpuId) -> Result<()> {
        self.vcpu.set_cpuid(crate::heap::copy_of(cpuid.as_slice())?)
    }

    /// `KVM_GET_CPUID2`.
    ///
    /// # Errors
    /// `E2BIG` when there is not room for all entries, `ENOMEM` for more room than there can be.
    pub fn get_cpuid2(&self, num_entries: usize) -> Result<CpuId> {
        if num_entries > KVM_MAX_CPUID_ENTRIES {
            return fail(libc::ENOMEM);
        }
        let table = self.vcpu.get_cpuid()?;
        if num_entries < table.len() {
            return fail(libc::E2BIG);
        }
        CpuId::from_entries(&table).map_err(no_memory)
    }

    /// `KVM_ENABLE_CAP` of a vCPU: `KVM_CAP_ENFORCE_PV_FEATURE_CPUID`.
    ///
    /// # Errors
    /// `EINVAL` for any other, and for flags.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        self.vcpu.enable_cap(cap)
    }

    /// `KVM_GET_LAPIC`.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller.
    pub fn get_lapic(&self) -> Result<kvm_lapic_state> {
        self.vcpu.get_lapic()
    }

    /// `KVM_SET_LAPIC`.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller.
    pub fn set_lapic(&self, klapic: &kvm_lapic_state) -> Result<()> {
        self.vcpu.set_lapic(klapic)
    }

    /// `KVM_GET_MSRS`; returns how many were read.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_msrs(&self, msrs: &mut Msrs) -> Result<usize> {
        self.vcpu.get_msrs(msrs.as_mut_slice())
    }

    /// `KVM_SET_MSRS`; returns how many were written.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_msrs(&self, msrs: &Msrs) -> Result<usize> {
        self.vcpu.set_msrs(msrs.as_slice())
    }

    /// `KVM_GET_MP_STATE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_mp_state(&self) -> Result<kvm_mp_state> {
        self.vcpu.get_mp_state()
    }

    /// `KVM_SET_MP_STATE`.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn set_mp_state(&self, mp_state: kvm_mp_state) -> Result<()> {
        self.vcpu.set_mp_state(mp_state)
    }

    /// `KVM_GET_XSAVE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_xsave(&self) -> Result<kvm_xsave> {
        let area = self.vcpu.get_xsave()?;
        let mut xsave = kvm_xsave::default();
        for (word, bytes) in xsave.region.iter_mut().zip(area.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok(xsave)
    }

    /// `KVM_SET_XSAVE`.
    ///
    /// # Errors
    /// `EINVAL` for state components that the CPU does not have.
    ///
    /// # Safety
    /// None is needed: the area is of fixed size here. The method is unsafe because kvm-ioctls' is.
    pub unsafe fn set_xsave(&self, xsave: &kvm_xsave) -> Result<()> {
        let mut area = [0; 4096];
        for (bytes, word) in area.chunks_exact_mut(4).zip(&xsave.region) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        self.vcpu.set_xsave(&area)
    }

    /// `KVM_GET_XCRS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_xcrs(&self) -> Result<kvm_xcrs> {
        self.vcpu.get_xcrs()
    }

    /// `KVM_SET_XCRS`.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn set_xcrs(&self, xcrs: &kvm_xcrs) -> Result<()> {
        self.vcpu.set_xcrs(xcrs)
    }

    /// `KVM_GET_DEBUGREGS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_debug_regs(&self) -> Result<kvm_debugregs> {
        self.vcpu.get_debugregs()
    }

    /// `KVM_SET_DEBUGREGS`.
    ///
    /// # Errors
    /// `EINVAL` for reserved bits.
    pub fn set_debug_regs(&self, debug_regs: &kvm_debugregs) -> Result<()> {
        self.vcpu.set_debugregs(debug_regs)
    }

    /// `KVM_GET_VCPU_EVENTS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_vcpu_events(&self) -> Result<kvm_vcpu_events> {
        self.vcpu.get_vcpu_events()
    }

    /// `KVM_SET_VCPU_EVENTS`.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags and impossible events.
    pub fn set_vcpu_events(&self, vcpu_events: &kvm_vcpu_events) -> Result<()> {
        self.vcpu.set_vcpu_events(vcpu_events)
    }

    /// `KVM_KVMCLOCK_CTRL`.
    ///
    /// # Errors
    /// `EINVAL` when the guest does not use the clock.
    pub fn kvmclock_ctrl(&self) -> Result<()> {
        self.vcpu.kvmclock_ctrl()
    }

    /// `KVM_GET_TSC_KHZ`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_tsc_khz(&self) -> Result<u32> {
        self.vcpu.tsc_khz()
    }

    /// `KVM_TRANSLATE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn translate_gva(&self, gva: u64) -> Result<kvm_translation> {
        self.vcpu.translate(gva)
    }

    /// `KVM_NMI`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn nmi(&self) -> Result<()> {
        self.vcpu.nmi()
    }

    /// `KVM_INTERRUPT`, which kvm-ioctls does not have.
    ///
    /// # Errors
    /// `EINVAL` for a vector beyond 255, `ENXIO` when the VM has an interrupt controller.
    pub fn interrupt(&self, vector: u32) -> Result<()> {
        self.vcpu.interrupt(vector)
    }

    /// `KVM_SET_SIGNAL_MASK`, which kvm-ioctls does not have.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_signal_mask(&self, mask: Option<u64>) -> Result<()> {
        self.vcpu.set_signal_mask(mask)
    }

    /// `KVM_PRE_FAULT_MEMORY`, which kvm-ioctls does not have: maps a range of guest memory before the guest uses it. `range`
    /// becomes what is left.
    ///
    /// # Errors
    /// `EINVAL` for flags and a range that is empty or not of whole pages; and, when nothing was mapped: `ENOENT` without
    /// a memory slot, `EINTR` for a signal, `EFAULT` when the memory behind the slot is gone, `ENOMEM`.
    pub fn pre_fault_memory(&self, range: &mut kvm_pre_fault_memory) -> Result<()> {
        self.vcpu.pre_fault(range)
    }

    /// `KVM_GET_STATS_FD` of the vCPU, which kvm-ioctls does not have.
    ///
    /// # Errors
    /// What the host answers to making a file.
    pub fn get_stats_fd(&self) -> Result<StatsFd> {
        Ok(StatsFd::new(VcpuObject::stats(&self.vcpu)?))
    }

    /// Makes the ring of coalesced I/O readable, which it always is here.
    ///
    /// # Errors
    /// None.
    pub fn map_coalesced_mmio_ring(&mut self) -> Result<()> {
        Ok(())
    }

    /// Takes the oldest write out of the ring of coalesced I/O, which the vCPUs of a VM share.
    ///
    /// # Errors
    /// None.
    pub fn coalesced_mmio_read(&mut self) -> Result<Option<kvm_coalesced_mmio>> {
        Ok(self.vcpu.vm.coalesced.next())
    }

    /// `KVM_RUN`.
    ///
    /// # Errors
    /// `EINTR` for `immediate_exit` or a signal, `EFAULT` when the memory behind guest memory is gone, `EINVAL` for bad
    /// values in `kvm_run`, `EAGAIN` after waiting for INIT and SIPI.
    pub fn run(&mut self) -> Result<VcpuExit<'_>> {
        let result = self.vcpu.run();
        let start: *mut u8 = self.run.ptr().cast();
        let run = self.get_kvm_run();
        if let Err(error) = result {
            // The one exit that comes with an error.
            if error.errno() != libc::EFAULT || run.exit_reason != KVM_EXIT_MEMORY_FAULT {
                return Err(error);
            }
            // SAFETY: the field that this exit reason fills in.
            let fault = unsafe { run.__bindgen_anon_1.memory_fault };
            return Ok(VcpuExit::MemoryFault {
                flags: fault.flags,
                gpa: fault.gpa,
                size: fault.size,
            });
        }
        Ok(match run.exit_reason {
            KVM_EXIT_UNKNOWN => VcpuExit::Unknown,
            KVM_EXIT_IO => {
                // SAFETY: the field that this exit reason fills in.
                let io = unsafe { run.__bindgen_anon_1.io };
                let len = usize::from(io.size) * io.count as usize;
                assert!(len <= PAGE);
                // SAFETY: the port-data page is part of our mapping, which lives as long as `self`, and the slice borrows
                // `self`.
                let data = unsafe { std::slice::from_raw_parts_mut(start.add(PIO_OFFSET), len) };
                if u32::from(io.direction) == KVM_EXIT_IO_IN {
                    VcpuExit::IoIn(io.port, data)
                } else {
                    VcpuExit::IoOut(io.port, data)
                }
            }
            KVM_EXIT_MMIO => {
                // SAFETY: the field that this exit reason fills in.
                let mmio = unsafe { &mut run.__bindgen_anon_1.mmio };
                let data = &mut mmio.data[..mmio.len as usize];
                if mmio.is_write != 0 {
                    VcpuExit::MmioWrite(mmio.phys_addr, data)
                } else {
                    VcpuExit::MmioRead(mmio.phys_addr, data)
                }
            }
            KVM_EXIT_HYPERCALL => {
                // SAFETY: the field that this exit reason fills in.
                let hypercall = unsafe { &mut run.__bindgen_anon_1.hypercall };
                VcpuExit::Hypercall(HypercallExit {
                    nr: hypercall.nr,
                    args: hypercall.args,
                    ret: &mut hypercall.ret,
                    // SAFETY: both fields of the union are plain.
                    longmode: unsafe { hypercall.__bindgen_anon_1.longmode },
                })
            }
            reason @ (KVM_EXIT_X86_RDMSR | KVM_EXIT_X86_WRMSR) => {
                // SAFETY: the field that this exit reason fills in.
                let msr = unsafe { &mut run.__bindgen_anon_1.msr };
                let (index, error, data) = (msr.index, &mut msr.error, &mut msr.data);
                let why = MsrExitReason::from_bits_truncate(msr.reason);
                match reason {
                    KVM_EXIT_X86_RDMSR => VcpuExit::X86Rdmsr(ReadMsrExit {
                        error,
                        reason: why,
                        index,
                        data,
                    }),
                    _ => VcpuExit::X86Wrmsr(WriteMsrExit {
                        error,
                        reason: why,
                        index,
                        data: *data,
                    }),
                }
            }
            // SAFETY: the field that this exit reason fills in.
            KVM_EXIT_DEBUG => VcpuExit::Debug(unsafe { run.__bindgen_anon_1.debug }.arch),
            KVM_EXIT_HLT => VcpuExit::Hlt,
            KVM_EXIT_IRQ_WINDOW_OPEN => VcpuExit::IrqWindowOpen,
            KVM_EXIT_SHUTDOWN => VcpuExit::Shutdown,
            KVM_EXIT_INTR => VcpuExit::Intr,
            KVM_EXIT_INTERNAL_ERROR => VcpuExit::InternalError,
            reason => VcpuExit::Unsupported(reason),
        })
    }

    /// `KVM_SET_GUEST_DEBUG`.
    ///
    /// # Errors
    /// `EBUSY` when an exception is to be injected and another one waits.
    pub fn set_guest_debug(&self, debug: &kvm_guest_debug) -> Result<()> {
        self.vcpu.set_guest_debug(debug)
    }

    /// The `kvm_run` struct.
    pub fn get_kvm_run(&mut self) -> &mut kvm_run {
        // SAFETY: our own mapping of shared memory, plain data. The library changes it during calls that take `&mut self`;
        // as with the kernel's, nothing else here does.
        unsafe { &mut *self.run.ptr() }
    }

    /// Asks for `KVM_RUN` to return at once (1) or not (0).
    pub fn set_kvm_immediate_exit(&mut self, val: u8) {
        self.get_kvm_run().immediate_exit = val;
    }

    /// Asks for registers in `kvm_run` after every run.
    pub fn set_sync_valid_reg(&mut self, reg: SyncReg) {
        self.get_kvm_run().kvm_valid_regs |= reg as u64;
    }

    /// Has registers taken from `kvm_run` by the next run.
    pub fn set_sync_dirty_reg(&mut self, reg: SyncReg) {
        self.get_kvm_run().kvm_dirty_regs |= reg as u64;
    }

    /// Takes [`set_sync_valid_reg`](Self::set_sync_valid_reg) back.
    pub fn clear_sync_valid_reg(&mut self, reg: SyncReg) {
        self.get_kvm_run().kvm_valid_regs &= !(reg as u64);
    }

    /// Takes [`set_sync_dirty_reg`](Self::set_sync_dirty_reg) back.
    pub fn clear_sync_dirty_reg(&mut self, reg: SyncReg) {
        self.get_kvm_run().kvm_dirty_regs &= !(reg as u64);
    }

    /// The registers in `kvm_run`.
    pub fn sync_regs(&self) -> kvm_sync_regs {
        // SAFETY: our own mapping; plain data.
        unsafe { (*self.run.ptr()).s.regs }
    }

    /// The registers in `kvm_run`, to be changed.
    pub fn sync_regs_mut(&mut self) -> &mut kvm_sync_regs {
        // SAFETY: plain data; the other half of the union is padding.
        unsafe { &mut self.get_kvm_run().s.regs }
    }
}

impl AsRawFd for VcpuFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
