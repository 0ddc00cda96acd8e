//! How interrupts reach vCPUs: by the GIC, or by the client's own interrupt controller.
//!
//! # Locks
//! A call acquires locks in this order, and may skip some: those of the irqfds and the routes; the lock of the vCPUs
//! (for reading); the lock of [`Chips::make_ready`]; the lock of the GIC with its ITSs. A call that has locked the GIC
//! acquires none of the other locks, because the GIC has its own list of its vCPUs. No thread waits while it holds the
//! lock of the GIC. The EOIs that a locked GIC reports are passed to irqfds after the GIC is unlocked.

use crate::arch::aarch64::chips::{Chips, Ended, InOrder, Parts, TimerPpis, names, refused};
use crate::arch::aarch64::devices::{Device, VmTimer};
use crate::arch::aarch64::state::{LINE_FIQ, LINE_IRQ};
use crate::arch::aarch64::target::{Msi, Target};
use crate::errno::{Result, fail};
use crate::irq::Interrupts;
use crate::routing::{MAX_ROUTES, Routes};
use crate::ticker::VmTimers;
use crate::vcpu_common::VcpuCommon;
use kvm_bindings::*;
use slat::Shared;
use slat_gic::device::ItsDevice;
use slat_gic::gic::{Model, VcpuName};
use slat_gic::icc::Icc;
use slat_gic::interrupt::{PRIVATE, SGIS};
use slat_gic::its::Delivery;
use std::sync::atomic::Ordering;

impl Interrupts {
    /// Whether the VM has an interrupt controller.
    pub(crate) fn exist(&self) -> bool {
        self.gic().is_some()
    }

    /// Returns the GIC and the ITSs, if there is a GIC.
    pub(crate) fn gic(&self) -> Option<&Chips> {
        let chips = self.arch.chips.get();
        chips.filter(|chips| chips.model().is_some())
    }

    /// Whether guests use the GIC by system registers.
    pub(crate) fn has_system_registers(&self) -> bool {
        let chips = self.arch.chips.get();
        chips.and_then(Chips::model) == Some(Model::V3)
    }

    /// Returns the vCPUs in the order of their creation.
    pub(crate) fn in_order(&self) -> InOrder {
        in_order(&self.vcpus.read())
    }

    /// Calls `work`, which may initialise the GIC, with the names of the vCPUs. If `work` initialises the GIC, sets
    /// KVM's default routes: each GSI leads to the SPI of the same number.
    ///
    /// # Errors
    /// The errors of `work`.
    pub(crate) fn initialising<R>(
        &self,
        chips: &Chips,
        work: impl FnOnce(&mut Parts, &[VcpuName]) -> R,
    ) -> R {
        let (result, is_new) = {
            // This lock is held to the end, because a vCPU that was created meanwhile would be missing in the GIC.
            let present = self.vcpus.read();
            let vcpus = in_order(&present);
            let names = names(&vcpus);
            chips.initialising(&vcpus, |parts| work(parts, &names))
        };
        if is_new {
            let interrupts = chips.change(|parts| parts.gic().map_or(0, |gic| gic.interrupts()));
            let spis = (0..(interrupts - PRIVATE).min(MAX_ROUTES)).map(|n| (n, Target::Spi(n)));
            self.replace_routes(Routes::new(spis.collect()));
        }
        result
    }

    /// Prepares the first run of a vCPU. `place` puts a range of guest-physical addresses on the bus.
    ///
    /// # Errors
    /// KVM's: `ENXIO` for a frame without an address, `EINVAL` for frames that overlap and for timers with the same
    /// PPI,
    /// `EBUSY` for a GICv3 that is not initialised. The errors of `place`.
    pub(crate) fn make_ready(&self, place: impl Fn(u64, u64) -> Result<()>) -> Result<()> {
        let Some(chips) = self.gic() else {
            return Ok(());
        };
        chips.make_ready(|| {
            let ranges = self.initialising(chips, |parts, names| match &mut parts.device {
                Some(device) => (device.check_ready(names, chips.address_bits))
                    .map(|()| device.ranges())
                    .map_err(refused),
                None => Ok(Vec::new()),
            })?;
            // If two timers have the same PPI, the PPIs stay changeable, so that the client can give one of the timers
            // another PPI.
            self.arch.timer_ppis(|timers| {
                let [one, other] = timers.ppis;
                timers.are_fixed = one != other;
                if timers.are_fixed {
                    Ok(())
                } else {
                    fail(libc::EINVAL)
                }
            })?;
            ranges
                .into_iter()
                .try_for_each(|(start, len)| place(start, len))
        })
    }

    /// Returns the GIC if its lines can be set. Initialises a GICv2 that is not initialised.
    ///
    /// # Errors
    /// `ENXIO` without GIC, `EBUSY` for a GICv3 that is not initialised, `E2BIG` for too many vCPUs.
    fn driven(&self) -> Result<&Chips> {
        let Some(chips) = self.gic() else {
            return fail(libc::ENXIO);
        };
        if chips.is_initialised() {
            return Ok(chips);
        }
        if chips.model() == Some(Model::V3) {
            return fail(libc::EBUSY);
        }
        self.initialising(chips, |parts, names| match &mut parts.device {
            Some(device) => device.initialize(names).map_err(refused),
            None => fail(libc::ENXIO),
        })?;
        Ok(chips)
    }

    /// Sets a line that `KVM_IRQ_LINE` names directly, without a GSI: an interrupt line of a vCPU's processor, a PPI,
    /// or an SPI. Returns the status of `KVM_IRQ_LINE_STATUS`.
    ///
    /// # Errors
    /// `ENXIO` for a line of an interrupt controller that does not exist, and for a processor's line if the VM has an
    /// interrupt controller. `EINVAL` for a vCPU that does not exist, and for an unknown type or number (api.rst 4.25).
    pub(crate) fn set_own_line(&self, line: u32, level: bool) -> Result<Option<i32>> {
        let field = |shift: u32, mask: u32| line >> shift & mask;
        // The index of the vCPU has 8 bits in the field KVM_ARM_IRQ_VCPU, and its upper bits in this field.
        let vcpu = field(KVM_ARM_IRQ_VCPU2_SHIFT, KVM_ARM_IRQ_VCPU2_MASK) << 8
            | field(KVM_ARM_IRQ_VCPU_SHIFT, KVM_ARM_IRQ_VCPU_MASK);
        let number = field(KVM_ARM_IRQ_NUM_SHIFT, KVM_ARM_IRQ_NUM_MASK);
        match field(KVM_ARM_IRQ_TYPE_SHIFT, KVM_ARM_IRQ_TYPE_MASK) {
            KVM_ARM_IRQ_TYPE_CPU if self.exist() => return fail(libc::ENXIO),
            KVM_ARM_IRQ_TYPE_CPU => self.set_processor_line(vcpu, number, level)?,
            KVM_ARM_IRQ_TYPE_PPI => {
                if !self.exist() {
                    return fail(libc::ENXIO);
                }
                let vcpus = self.vcpus.read();
                let Ok(place) = vcpus.place(vcpu) else {
                    return fail(libc::EINVAL);
                };
                let index = vcpus[place].arch.index;
                drop(vcpus);
                if !(SGIS..PRIVATE).contains(&number) {
                    return fail(libc::EINVAL);
                }
                let chips = self.driven()?;
                // As in KVM, only the timers drive their PPIs once a vCPU has run.
                let is_timers =
                    |timers: &mut TimerPpis| timers.are_fixed && timers.ppis.contains(&number);
                if self.arch.timer_ppis(is_timers) {
                    return Ok(Some(0));
                }
                chips.change(|parts| match parts.gic() {
                    Some(gic) => gic.set_ppi(index, number, level).map_err(refused),
                    None => fail(libc::EBUSY),
                })?;
            }
            KVM_ARM_IRQ_TYPE_SPI if number < PRIVATE && self.exist() => return fail(libc::EINVAL),
            KVM_ARM_IRQ_TYPE_SPI => {
                self.driven()?.change(|parts| match parts.gic() {
                    Some(gic) => gic.set_spi(number, level).map_err(refused),
                    None => fail(libc::EBUSY),
                })?;
            }
            _ => return fail(libc::EINVAL),
        }
        Ok(Some(0))
    }

    /// Sets a line of a vCPU's processor for a client that has its own interrupt controller.
    fn set_processor_line(&self, vcpu: u32, number: u32, level: bool) -> Result<()> {
        let bit = match number {
            KVM_ARM_IRQ_CPU_IRQ => LINE_IRQ,
            KVM_ARM_IRQ_CPU_FIQ => LINE_FIQ,
            _ => return fail(libc::EINVAL),
        };
        let vcpus = self.vcpus.read();
        let Ok(place) = vcpus.place(vcpu) else {
            return fail(libc::EINVAL);
        };
        let lines = &vcpus[place].arch.lines;
        let before = match level {
            true => lines.fetch_or(bit, Ordering::SeqCst),
            false => lines.fetch_and(!bit, Ordering::SeqCst),
        };
        // The vCPU is notified even when a line falls, because it must not take the interrupt then.
        if (before & bit != 0) != level {
            vcpus[place].notice();
        }
        Ok(())
    }

    /// Checks that irqfds can be added.
    ///
    /// # Errors
    /// `EAGAIN`, as long as the VM has no initialised interrupt controller.
    pub(crate) fn check_irqfd(&self) -> Result<()> {
        match self.gic().is_some_and(Chips::is_initialised) {
            true => Ok(()),
            false => fail(libc::EAGAIN),
        }
    }

    /// Whether the interrupt controllers report the guest's EOIs, as resampled irqfds need.
    pub(crate) fn can_resample(&self) -> bool {
        self.exist()
    }

    /// Returns the target that an entry of the client's routing table names.
    ///
    /// # Errors
    /// `EINVAL` for numbers beyond the limits, and for unknown kinds.
    pub(crate) fn target(&self, entry: &kvm_irq_routing_entry) -> Result<Target> {
        Target::of(entry)
    }

    /// Sets the level of a target. As in KVM for arm64, all sources of a line set the same level. Returns 0, or a
    /// negative number if the target does not exist.
    pub(crate) fn set_target(&self, target: Target, _source: u8, level: bool) -> i32 {
        match target {
            Target::Spi(number) => {
                let Some(chips) = self.gic() else {
                    return -1;
                };
                let is_set = chips.change(|parts| {
                    let gic = parts.gic()?;
                    gic.set_spi(PRIVATE + number, level).ok()
                });
                is_set.map_or(-1, |()| 0)
            }
            Target::Msi(msi) if level => self.send(msi).unwrap_or(-1),
            Target::Msi(_) => -1,
        }
    }

    /// Carries out the signal of an irqfd that is not resampled. As in KVM for arm64, a line is raised and not lowered:
    /// an edge-triggered SPI becomes pending, and the client lowers the line of a level-triggered one.
    pub(crate) fn pulse_target(&self, target: Target, source: u8) {
        match target {
            // An SPI that the GIC does not have has no effect, as in KVM.
            Target::Spi(_) => {
                let _absent = self.set_target(target, source, true);
            }
            Target::Msi(msi) => {
                // The error of a refused message is dropped, because the signal of an irqfd returns no error to anyone.
                let _refused = self.send(msi);
            }
        }
    }

    /// Does nothing on arm64, because no controller depends on the routes. Call after a change of the routes.
    pub(crate) fn routes_changed(&self, _: &Routes) {}

    /// Carries out `KVM_SIGNAL_MSI`. Returns 1 if the interrupt is pending, and 0 if the guest has not mapped the
    /// event.
    ///
    /// # Errors
    /// `ENODEV` without ITS. `EINVAL` for a message without the id of its device, and for an address without ITS.
    /// `EBUSY` while the ITS, or the LPIs of the vCPU, are disabled.
    pub(crate) fn signal_msi(&self, msi: &kvm_msi) -> Result<i32> {
        let address = [msi.address_lo, msi.address_hi];
        self.send(Msi::new(address, msi.data, msi.flags, msi.devid))
    }

    fn send(&self, msi: Msi) -> Result<i32> {
        let Some(chips) = self.arch.chips.get() else {
            return fail(libc::ENODEV);
        };
        chips.change(|parts| {
            if parts.itses.is_empty() {
                return fail(libc::ENODEV);
            }
            let Some(device) = msi.device else {
                return fail(libc::EINVAL);
            };
            let is_addressed = |its: &ItsDevice| its.find(msi.address).is_some();
            let Some(its) = parts.itses.iter().position(is_addressed) else {
                return fail(libc::EINVAL);
            };
            // Without an initialised GIC, the ITS cannot make an LPI pending.
            let Some((its, gic)) = parts.its(its) else {
                return fail(libc::EBUSY);
            };
            match its.its().signal(gic, device, msi.event) {
                Ok(Delivery::Pending) => Ok(1),
                Ok(Delivery::Unmapped) => Ok(0),
                Err(error) => Err(refused(error)),
            }
        })
    }

    /// Sets the lines of the PPIs of a vCPU's timers: the virtual timer's level is bit 0 of `levels`, and the physical
    /// timer's level is bit 1.
    pub(crate) fn drive_timers(&self, vcpu: &VcpuCommon, chips: &Chips, levels: u64) {
        let ppis = self.arch.timer_ppis(|timers| timers.ppis);
        let by = vcpu.arch.index;
        let ((), ended) = chips.with(Some(by), |parts| {
            for (ppi, bit) in ppis.into_iter().zip(0..) {
                if let Some(gic) = parts.gic() {
                    // No error is possible: the numbers are PPIs, and the GIC has this vCPU.
                    let _no_error = gic.set_ppi(by, ppi, levels >> bit & 1 != 0);
                }
            }
        });
        self.carry_out(ended);
    }

    /// Reads a system register of the GIC for the guest. `None`: the access is UNDEFINED.
    pub(crate) fn read_gic_register(&self, vcpu: &VcpuCommon, register: Icc) -> Option<u64> {
        let chips = self.gic()?;
        let by = vcpu.arch.index;
        let (value, ended) = chips.with(Some(by), |parts| {
            let gic = parts.gic()?;
            gic.read_icc(by, register).ok()
        });
        self.carry_out(ended);
        value
    }

    /// Writes a system register of the GIC for the guest. `None`: the access is UNDEFINED.
    pub(crate) fn write_gic_register(
        &self,
        vcpu: &VcpuCommon,
        register: Icc,
        value: u64,
    ) -> Option<()> {
        let chips = self.gic()?;
        let by = vcpu.arch.index;
        let (done, ended) = chips.with(Some(by), |parts| {
            let gic = parts.gic()?;
            gic.write_icc(by, register, value).ok()
        });
        self.carry_out(ended);
        done
    }

    /// Carries out the guest's reads of a device.
    pub(crate) fn read<'a>(
        &self,
        vcpu: &VcpuCommon,
        device: Device,
        address: u64,
        units: &mut impl Iterator<Item = &'a mut [u8]>,
    ) -> bool {
        let Some(chips) = self.arch.chips.get() else {
            return false;
        };
        let by = vcpu.arch.index;
        let (done, ended) = chips.with(Some(by), |parts| {
            units.all(|unit| parts.read(by, device, address, unit).is_some())
        });
        self.carry_out(ended);
        done
    }

    /// Carries out the guest's writes to a device.
    pub(crate) fn write<'a>(
        &self,
        vcpu: &VcpuCommon,
        device: Device,
        address: u64,
        units: &mut impl Iterator<Item = &'a [u8]>,
    ) -> bool {
        let Some(chips) = self.arch.chips.get() else {
            return false;
        };
        let by = vcpu.arch.index;
        let (done, ended) = chips.with(Some(by), |parts| {
            let tables = &chips.tables;
            units.all(|unit| parts.write(by, device, address, unit, tables).is_some())
        });
        self.carry_out(ended);
        done
    }

    /// Signals resampled irqfds for interrupts that the guest has ended (EOI, or deactivation). Call with the GIC
    /// unlocked.
    fn carry_out(&self, Ended(intids): Ended) {
        for intid in intids {
            let gsi = self.routes().gsi_of(Target::Spi(intid - PRIVATE));
            if let Some(gsi) = gsi {
                self.irqfds.resample(self, gsi);
            }
        }
    }
}

/// Sorts vCPUs by the order of their creation.
fn in_order(vcpus: &[Shared<VcpuCommon>]) -> InOrder {
    let mut vcpus = vcpus.to_vec();
    vcpus.sort_by_key(|vcpu| vcpu.arch.index);
    vcpus
}

impl VmTimers for Interrupts {
    fn expired(&self, timer: VmTimer) {
        match timer {}
    }
}
