//! The interrupt controllers of a VM: a GIC and its ITSs, under one lock. The crate `slat-gic` implements both.
//!
//! # Concurrency
//! All accesses to the GIC are made in [`Chips::with`]. When interrupt lines of a vCPU have changed, this function
//! stores them in that vCPU's word ([`VcpuShared::lines`](crate::arch::aarch64::state::VcpuShared)), then raises the
//! vCPU's attention bit, and then unlocks the GIC. Each time before a vCPU enters the guest, it clears its attention
//! bits, and then reads the word. So a vCPU that has no interrupt takes no lock. All four accesses are sequentially
//! consistent: a vCPU that has read an old word finds the bit raised, and leaves the guest. Stores to one word are
//! ordered by the lock, so the last store is that of the GIC's present lines.
//!
//! A vCPU whose own access changes its lines also gets its attention bit. The processor checks the attention word after
//! each instruction that can unmask interrupts, so the vCPU does not take an interrupt a second time that it has
//! already acknowledged.

use crate::arch::aarch64::devices::Device as OnBus;
use crate::arch::aarch64::state::{LINE_FIQ, LINE_IRQ, most_vcpus};
use crate::arch::aarch64::tables::Tables;
use crate::errno::{Error, Result, fail};
use crate::thread::bits;
use crate::vcpu_common::VcpuCommon;
use slat::Shared;
use slat_gic::device::{Device, ItsDevice};
use slat_gic::gic::{Gic, Model, VcpuName};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The PPIs of the virtual and the physical timer, unless the client sets others.
const TIMER_PPIS: [u32; 2] = [27, 30];

/// arm64's part of the interrupts of a VM: the interrupt controllers.
#[derive(Default)]
pub(crate) struct Controllers {
    /// The GIC and the ITSs, as soon as the client has created one of them.
    pub(crate) chips: OnceLock<Chips>,
    timers: Mutex<TimerPpis>,
}

/// The PPIs of the timers' outputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimerPpis {
    /// The PPIs of the virtual and the physical timer.
    pub(crate) ppis: [u32; 2],
    /// Whether a vCPU has run, after which the PPIs cannot change.
    pub(crate) are_fixed: bool,
}

impl Default for TimerPpis {
    fn default() -> Self {
        TimerPpis {
            ppis: TIMER_PPIS,
            are_fixed: false,
        }
    }
}

impl Controllers {
    /// Calls `work` with the PPIs of the timers.
    pub(crate) fn timer_ppis<R>(&self, work: impl FnOnce(&mut TimerPpis) -> R) -> R {
        work(&mut self.timers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The GIC and the ITSs of a VM.
pub(crate) struct Chips {
    pub(crate) tables: Tables,
    pub(crate) address_bits: u32,
    /// The model of the GIC, once the client has created it.
    model: OnceLock<Model>,
    is_initialised: AtomicBool,
    /// Whether the GIC's MMIO frames were added to the VM's MMIO bus. The first vCPU that runs adds them.
    is_ready: AtomicBool,
    /// The lock that is held while the GIC's MMIO frames are put on the bus.
    setup: Mutex<()>,
    /// The number of times that the client has written attributes of the GIC. When this number has changed, each vCPU
    /// drives its timers' lines again.
    restores: AtomicU32,
    parts: Mutex<Parts>,
}

/// The part of [`Chips`] that the GIC's lock protects.
#[derive(Default)]
pub(crate) struct Parts {
    pub(crate) device: Option<Device>,
    pub(crate) itses: Vec<ItsDevice>,
    /// The vCPUs that the GIC has, by index.
    vcpus: Vec<Shared<VcpuCommon>>,
    /// The vCPUs whose lines have changed. The vector is kept between calls to reuse its allocation.
    changed: Vec<usize>,
}

/// The level-triggered SPIs whose interrupts the guest has ended (EOI, or deactivation).
#[must_use]
pub(crate) struct Ended(pub(crate) Vec<u32>);

/// The vCPUs of a VM, in the order of their creation.
pub(crate) type InOrder = Vec<Shared<VcpuCommon>>;

/// Returns the ids and the affinities of the vCPUs, as the GIC needs them.
pub(crate) fn names(vcpus: &InOrder) -> Vec<VcpuName> {
    // MPIDR_EL1 has Aff3 in the bits 39:32, apart from the other three fields in the bits 23:0.
    let packed = |affinity: u64| (affinity >> 32 << 24) as u32 | affinity as u32 & 0xff_ffff;
    let name = |vcpu: &Shared<VcpuCommon>| VcpuName {
        id: vcpu.id,
        affinity: packed(vcpu.arch.affinity()),
    };
    vcpus.iter().map(name).collect()
}

/// Converts an error of the GIC to KVM's error number.
pub(crate) fn refused(error: slat_gic::error::Error) -> Error {
    Error::new(error.errno())
}

impl Parts {
    /// Returns the GIC, if it is initialised.
    pub(crate) fn gic(&mut self) -> Option<&mut Gic> {
        self.device.as_mut()?.gic()
    }

    /// Returns an ITS and the GIC, if both exist.
    pub(crate) fn its(&mut self, number: usize) -> Option<(&mut ItsDevice, &mut Gic)> {
        let gic = self.device.as_mut()?.gic()?;
        Some((self.itses.get_mut(number)?, gic))
    }

    /// Reads from a device for the vCPU with this index. `None`: there is no such device at the address.
    pub(crate) fn read(
        &mut self,
        vcpu: usize,
        device: OnBus,
        gpa: u64,
        data: &mut [u8],
    ) -> Option<()> {
        match device {
            OnBus::Gic => {
                let (frame, offset) = self.device.as_ref()?.find(gpa)?;
                self.gic()?.read(vcpu, frame, offset, data);
            }
            OnBus::Its(number) => {
                let its = self.itses.get_mut(number)?;
                let offset = its.find(gpa)?;
                its.its().read(offset, data);
            }
        }
        Some(())
    }

    /// Writes to a device for the vCPU with this index. `None`: there is no such device at the address.
    pub(crate) fn write(
        &mut self,
        vcpu: usize,
        device: OnBus,
        gpa: u64,
        data: &[u8],
        tables: &Tables,
    ) -> Option<()> {
        match device {
            OnBus::Gic => {
                let (frame, offset) = self.device.as_ref()?.find(gpa)?;
                self.gic()?.write(vcpu, frame, offset, data, tables);
            }
            OnBus::Its(number) => {
                let (its, gic) = self.its(number)?;
                let offset = its.find(gpa)?;
                its.its().write(offset, data, gic, tables);
            }
        }
        Some(())
    }

    /// Stores the lines of the vCPUs whose lines have changed, and notifies these vCPUs. Returns the interrupts that
    /// have ended. `by` is the index of the vCPU that runs on this thread.
    fn publish(&mut self, by: Option<usize>) -> Ended {
        let mut ended = Vec::new();
        let Some(gic) = self.device.as_mut().and_then(Device::gic) else {
            return Ended(ended);
        };
        gic.take_ended(|intid| ended.push(intid));
        gic.take_changed(|vcpu| self.changed.push(vcpu));
        for index in self.changed.drain(..) {
            let Some(vcpu) = self.vcpus.get(index) else {
                continue;
            };
            let signals = gic.signals(index);
            let line = |is_high, bit| if is_high { bit } else { 0 };
            let lines = line(signals.irq, LINE_IRQ) | line(signals.fiq, LINE_FIQ);
            vcpu.arch.lines.store(lines, Ordering::SeqCst);
            match by == Some(index) {
                // The vCPU runs on this thread, so it does not sleep and needs no wake-up.
                true => vcpu.attention.raise(bits::IRQ),
                false => vcpu.notice(),
            }
        }
        Ended(ended)
    }
}

impl Chips {
    pub(crate) fn new(tables: Tables, address_bits: u32) -> Self {
        Chips {
            tables,
            address_bits,
            model: OnceLock::new(),
            is_initialised: AtomicBool::new(false),
            is_ready: AtomicBool::new(false),
            setup: Mutex::default(),
            restores: AtomicU32::new(0),
            parts: Mutex::default(),
        }
    }

    /// Returns the model of the GIC, if there is one.
    pub(crate) fn model(&self) -> Option<Model> {
        self.model.get().copied()
    }

    /// Whether the GIC is initialised, after which no vCPU can be created.
    pub(crate) fn is_initialised(&self) -> bool {
        self.is_initialised.load(Ordering::SeqCst)
    }

    /// Calls `work` with the locked GIC. `by`: the index of the vCPU that runs on this thread and makes the access.
    /// Returns the result of `work`, and the interrupts that have ended, which the caller reports after the GIC is
    /// unlocked.
    pub(crate) fn with<R>(
        &self,
        by: Option<usize>,
        work: impl FnOnce(&mut Parts) -> R,
    ) -> (R, Ended) {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let result = work(&mut parts);
        let ended = parts.publish(by);
        (result, ended)
    }

    /// Calls `work` with the locked GIC. Call for work that ends no interrupt.
    pub(crate) fn change<R>(&self, work: impl FnOnce(&mut Parts) -> R) -> R {
        let (result, Ended(_)) = self.with(None, work);
        result
    }

    /// Creates the GIC. The VM has `vcpus` vCPUs.
    ///
    /// # Errors
    /// `EEXIST` when there is a GIC, `E2BIG` when the model cannot have `vcpus` vCPUs.
    pub(crate) fn create_gic(&self, model: Model, vcpus: usize) -> Result<()> {
        self.change(|parts| {
            if parts.device.is_some() {
                return fail(libc::EEXIST);
            }
            if vcpus > most_vcpus(model) {
                return fail(libc::E2BIG);
            }
            let mut device = Device::new(model);
            if !parts.itses.is_empty() {
                device.attach_its();
            }
            device.vcpu_created(vcpus).map_err(refused)?;
            parts.device = Some(device);
            let _first = self.model.set(model);
            Ok(())
        })
    }

    /// Creates an ITS. Returns its number.
    pub(crate) fn create_its(&self) -> usize {
        self.change(|parts| {
            parts.itses.push(ItsDevice::new());
            if let Some(device) = &mut parts.device {
                device.attach_its();
            }
            parts.itses.len() - 1
        })
    }

    /// Adds a vCPU to the GIC, if there is a GIC. `vcpus`: the number of vCPUs that the VM already has.
    ///
    /// # Errors
    /// `EBUSY` when the GIC is initialised. `EINVAL` when the GIC supports no more vCPUs, and when frames overlap.
    pub(crate) fn vcpu_created(&self, vcpus: usize) -> Result<()> {
        let Some(model) = self.model() else {
            return Ok(());
        };
        if self.is_initialised() {
            return fail(libc::EBUSY);
        }
        if vcpus >= most_vcpus(model) {
            return fail(libc::EINVAL);
        }
        self.change(|parts| match &mut parts.device {
            Some(device) => device.vcpu_created(vcpus + 1).map_err(refused),
            None => Ok(()),
        })
    }

    /// Calls `work`, which may initialise the GIC for the vCPUs `vcpus`. Returns the result of `work`, and whether
    /// `work` has initialised the GIC.
    pub(crate) fn initialising<R>(
        &self,
        vcpus: &InOrder,
        work: impl FnOnce(&mut Parts) -> R,
    ) -> (R, bool) {
        self.change(|parts| {
            let result = work(parts);
            let is_new = !self.is_initialised() && parts.gic().is_some();
            if is_new {
                parts.vcpus.clone_from(vcpus);
                self.is_initialised.store(true, Ordering::SeqCst);
            }
            (result, is_new)
        })
    }

    /// Adds the GIC's MMIO frames to the VM's MMIO bus by calling `work`, unless another vCPU has already added them.
    ///
    /// # Errors
    /// The errors of `work`.
    pub(crate) fn make_ready(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.is_ready.load(Ordering::SeqCst) {
            return Ok(());
        }
        let _turn = self.setup.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_ready.load(Ordering::SeqCst) {
            work()?;
            self.is_ready.store(true, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Makes the vCPUs pass the outputs of their timers to the GIC again. Call after the client has written attributes
    /// of the GIC, which may have changed the lines of the timers.
    pub(crate) fn restored(&self) {
        self.restores.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns a number that changes when the client writes attributes of the GIC.
    pub(crate) fn restores(&self) -> u32 {
        self.restores.load(Ordering::SeqCst)
    }
}
