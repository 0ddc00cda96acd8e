//! Interrupts and eventfds of a [`VmFd`].

use super::VmFd;
use crate::errno::{Result, fail};
use kvm_bindings::*;
use kvm_ioctls::IoEventAddress;
use std::os::fd::AsRawFd;
use vmm_sys_util::eventfd::EventFd;

impl VmFd {
    /// Carries out `KVM_SIGNAL_MSI`. Returns how many vCPUs accepted the interrupt.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller, and for a bad message.
    pub fn signal_msi(&self, msi: kvm_msi) -> Result<std::os::raw::c_int> {
        self.vm.signal_msi(&msi)
    }

    /// Carries out `KVM_IRQ_LINE`.
    ///
    /// # Errors
    /// `ENXIO` without interrupt controllers.
    pub fn set_irq_line(&self, irq: u32, active: bool) -> Result<()> {
        self.vm.irq_line(irq, active).map(drop)
    }

    /// Carries out `KVM_SET_GSI_ROUTING`: replaces all GSI routes.
    ///
    /// # Errors
    /// `EINVAL` for invalid routes.
    pub fn set_gsi_routing(&self, irq_routing: &KvmIrqRouting) -> Result<()> {
        let table = irq_routing.as_fam_struct_ref();
        if table.nr as usize > irq_routing.as_slice().len() {
            return fail(libc::EINVAL);
        }
        self.vm.set_gsi_routing(table.flags, irq_routing.as_slice())
    }

    /// Carries out `KVM_IOEVENTFD`: makes guest writes to `addr` signal `fd`. With [`NoDatamatch`](crate::NoDatamatch),
    /// writes of any size and value signal `fd`; otherwise only writes of the value `datamatch` with the size of `T`.
    ///
    /// # Errors
    /// `EEXIST` if one write could match this registration and an earlier registration; `EINVAL`.
    pub fn register_ioevent<T: Into<u64>>(
        &self,
        fd: &EventFd,
        addr: &IoEventAddress,
        datamatch: T,
    ) -> Result<()> {
        self.vm.ioeventfd(&ioeventfd(fd, addr, datamatch, 0))
    }

    /// Removes the registration that [`register_ioevent`](Self::register_ioevent) made. When this method returns, no
    /// vCPU signals `fd` for that registration.
    ///
    /// # Errors
    /// `ENOENT` when there is no such registration.
    pub fn unregister_ioevent<T: Into<u64>>(
        &self,
        fd: &EventFd,
        addr: &IoEventAddress,
        datamatch: T,
    ) -> Result<()> {
        let deassign = 1 << kvm_ioeventfd_flag_nr_deassign;
        self.vm.ioeventfd(&ioeventfd(fd, addr, datamatch, deassign))
    }

    /// Carries out `KVM_IRQFD`: makes each signal of `fd` an interrupt of `gsi`.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controllers, `EBUSY` when `fd` is already an irqfd of any VM.
    pub fn register_irqfd(&self, fd: &EventFd, gsi: u32) -> Result<()> {
        self.vm.irqfd(&irqfd(fd, gsi))
    }

    /// Registers a level-triggered irqfd (KVM's resample irqfd): a signal of `fd` raises the line of `gsi`, and the
    /// guest's EOI lowers the line and signals `resamplefd`. For edges, see [`register_irqfd`](Self::register_irqfd).
    ///
    /// # Errors
    /// `EINVAL` without I/O APIC, `EBUSY` when `fd` is already an irqfd of any VM.
    pub fn register_irqfd_with_resample(
        &self,
        fd: &EventFd,
        resamplefd: &EventFd,
        gsi: u32,
    ) -> Result<()> {
        self.vm.irqfd(&kvm_irqfd {
            resamplefd: resamplefd.as_raw_fd() as u32,
            flags: KVM_IRQFD_FLAG_RESAMPLE,
            ..irqfd(fd, gsi)
        })
    }

    /// Removes the irqfd that [`register_irqfd`](Self::register_irqfd) made. When this method returns, `fd` injects no
    /// interrupt for `gsi` any more.
    ///
    /// # Errors
    /// `EBADF`, `EINVAL` for a descriptor that is no eventfd.
    pub fn unregister_irqfd(&self, fd: &EventFd, gsi: u32) -> Result<()> {
        self.vm.irqfd(&kvm_irqfd {
            flags: KVM_IRQFD_FLAG_DEASSIGN,
            ..irqfd(fd, gsi)
        })
    }
}

fn irqfd(fd: &EventFd, gsi: u32) -> kvm_irqfd {
    kvm_irqfd {
        fd: fd.as_raw_fd() as u32,
        gsi,
        ..Default::default()
    }
}

fn ioeventfd<T: Into<u64>>(
    fd: &EventFd,
    addr: &IoEventAddress,
    datamatch: T,
    flags: u32,
) -> kvm_ioeventfd {
    let (addr, pio) = match addr {
        IoEventAddress::Pio(port) => (*port, 1 << kvm_ioeventfd_flag_nr_pio),
        IoEventAddress::Mmio(gpa) => (*gpa, 0),
    };
    let compares = match size_of::<T>() {
        0 => 0,
        _ => 1 << kvm_ioeventfd_flag_nr_datamatch,
    };
    kvm_ioeventfd {
        datamatch: datamatch.into(),
        addr,
        len: size_of::<T>() as u32,
        fd: fd.as_raw_fd(),
        flags: flags | pio | compares,
        ..Default::default()
    }
}
