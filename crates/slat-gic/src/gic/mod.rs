//! The distributor and the CPU interfaces. They determine which interrupt is signaled to each vCPU.

mod cpu;
mod lpi;
mod sgi;

use crate::error::Error;
use crate::identity::{ID_BITS, PRIORITY_BITS, REVISION};
use crate::interface::CpuInterface;
use crate::interrupt::{Group, Interrupt, LPIS, PRIVATE, Place, SGIS, Trigger};
use crate::pending::PendingSet;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
pub(crate) use lpi::Lpi;

/// The largest number of vCPUs with GICv2, in which the targets of an interrupt are the bits of one byte.
pub const V2_VCPUS: usize = 8;
/// The largest number of vCPUs with GICv3, as in KVM.
pub const V3_VCPUS: usize = 512;
/// The numbers of interrupts that a GIC may have, as KVM accepts them.
pub const INTERRUPTS: core::ops::RangeInclusive<u32> = 64..=1023;
/// The number of interrupts of a GIC whose VMM sets none.
pub const DEFAULT_INTERRUPTS: u32 = 256;

/// The version of the GIC's architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// GICv2 (IHI 0048): registers of the CPU interface in memory.
    V2,
    /// GICv3 (IHI 0069) with affinity routing and one security state.
    V3,
}

/// The numbers that identify a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuName {
    /// KVM's id of the vCPU: the processor number of its redistributor. With GICv2, the targets and the sources of
    /// interrupts are indices of vCPUs, so each vCPU's id has to be equal to its index.
    pub id: u32,
    /// Aff3, Aff2, Aff1 and Aff0 of MPIDR_EL1, from the highest byte to the lowest.
    pub affinity: u32,
}

/// The interrupt inputs of a vCPU that are asserted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signals {
    /// IRQ.
    pub irq: bool,
    /// FIQ.
    pub fiq: bool,
}

/// The part of a GIC that exists for each vCPU.
#[derive(Clone, Debug)]
pub(crate) struct Vcpu {
    pub(crate) name: VcpuName,
    pub(crate) private: [Interrupt; PRIVATE as usize],
    pub(crate) pending: PendingSet,
    pub(crate) interface: CpuInterface,
    /// GICR_CTLR.EnableLPIs: whether the LPIs of this vCPU are enabled.
    pub(crate) lpis_enabled: bool,
    pub(crate) pendbaser: u64,
    /// GICR_TYPER.Last: whether the redistributor is the last of contiguous redistributors.
    pub(crate) is_last: bool,
    /// The widths of priorities and of INTIDs that ICC_CTLR_EL1 shows. The VMM may have restored those of the machine
    /// on which the state was saved.
    pub(crate) priority_bits: u8,
    pub(crate) id_bits: u8,
    signals: Signals,
    /// Whether `signals` must be computed again.
    is_touched: bool,
    /// Whether the signals have changed since the last call of [`Gic::take_changed`].
    is_changed: bool,
}

/// A GIC: distributor, redistributors and CPU interfaces. An ITS is not part of it.
#[derive(Clone, Debug)]
pub struct Gic {
    pub(crate) model: Model,
    /// GICD_CTLR: whether the distributor forwards interrupts. As in KVM, one bit enables both groups.
    pub(crate) enabled: bool,
    /// The field Revision of GICD_IIDR.
    pub(crate) revision: u8,
    /// GICv2: whether the VMM has written GICD_IIDR. Before that, the VMM's writes of interrupt groups are ignored.
    pub(crate) client_knows_groups: bool,
    pub(crate) has_its: bool,
    pub(crate) propbaser: u64,
    pub(crate) spis: Vec<Interrupt>,
    pub(crate) lpis: BTreeMap<u32, Lpi>,
    pub(crate) vcpus: Vec<Vcpu>,
    by_affinity: BTreeMap<u32, usize>,
    /// The vCPUs for which [`Vcpu::is_touched`] is true, and those for which [`Vcpu::is_changed`] is true.
    touched: Vec<usize>,
    changed: Vec<usize>,
    /// The level-triggered SPIs that were deactivated since the last call of [`Gic::take_ended`].
    ended: Vec<u32>,
}

impl Vcpu {
    fn new(model: Model, index: usize, name: VcpuName) -> Self {
        let group = reset_group(model);
        let private = core::array::from_fn(|intid| {
            let is_sgi = intid < SGIS as usize;
            let trigger = match is_sgi {
                true => Trigger::Edge,
                false => Trigger::Level,
            };
            let mut interrupt = Interrupt::new(group, trigger, Some(index));
            interrupt.enabled = is_sgi;
            interrupt.route = match model {
                Model::V2 => 1 << index,
                Model::V3 => name.affinity,
            };
            interrupt
        });
        Vcpu {
            name,
            private,
            pending: PendingSet::default(),
            interface: CpuInterface::new(),
            lpis_enabled: false,
            pendbaser: lpi::RESET_BASE,
            is_last: false,
            priority_bits: PRIORITY_BITS,
            id_bits: ID_BITS,
            signals: Signals::default(),
            is_touched: false,
            is_changed: false,
        }
    }
}

/// Returns the group of interrupts after reset: group 0 with GICv2, as in a GIC without the security extensions; group
/// 1 with GICv3, as in KVM.
fn reset_group(model: Model) -> Group {
    Group::of(model == Model::V3)
}

impl Gic {
    /// Creates a GIC as after reset, with `interrupts` SGIs, PPIs and SPIs.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the number of interrupts is none of [`INTERRUPTS`], or no multiple of 32. [`Error::TooBig`]:
    /// there are too many vCPUs.
    pub fn new(model: Model, interrupts: u32, vcpus: &[VcpuName]) -> Result<Self, Error> {
        if !INTERRUPTS.contains(&interrupts) || !interrupts.is_multiple_of(32) {
            return Err(Error::Invalid);
        }
        let limit = match model {
            Model::V2 => V2_VCPUS,
            Model::V3 => V3_VCPUS,
        };
        if vcpus.len() > limit {
            return Err(Error::TooBig);
        }
        let first = (!vcpus.is_empty()).then_some(0);
        let by_affinity: BTreeMap<_, _> = vcpus.iter().map(|vcpu| vcpu.affinity).zip(0..).collect();
        // The target of an SPI is the first vCPU, until the guest writes the register for the SPI's target.
        let spi = Interrupt::new(reset_group(model), Trigger::Edge, first);
        let each = vcpus.iter().enumerate();
        Ok(Gic {
            model,
            enabled: false,
            revision: REVISION,
            client_knows_groups: false,
            has_its: false,
            propbaser: 0,
            spis: alloc::vec![spi; (interrupts - PRIVATE) as usize],
            lpis: BTreeMap::new(),
            vcpus: each
                .map(|(index, &name)| Vcpu::new(model, index, name))
                .collect(),
            by_affinity,
            touched: Vec::new(),
            changed: Vec::new(),
            ended: Vec::new(),
        })
    }

    /// Returns the version of the GIC architecture.
    pub fn model(&self) -> Model {
        self.model
    }

    /// Returns the number of SGIs, PPIs and SPIs.
    pub fn interrupts(&self) -> u32 {
        self.spis.len() as u32 + PRIVATE
    }

    /// Returns the number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.vcpus.len()
    }

    /// Returns the index of the vCPU with an affinity.
    pub fn vcpu_of(&self, affinity: u32) -> Option<usize> {
        self.by_affinity.get(&affinity).copied()
    }

    /// Returns the index of the vCPU with an id.
    pub fn vcpu_with_id(&self, id: u32) -> Option<usize> {
        // If no VMM has chosen another id, the id of each vCPU is its index. So the index `id` is tried first.
        let has_id = |index: &usize| self.vcpus[*index].name.id == id;
        let guess = Some(id as usize).filter(|index| *index < self.vcpus.len());
        let others = || (0..self.vcpus.len()).find(has_id);
        guess.filter(has_id).or_else(others)
    }

    /// Sets whether the redistributor of a vCPU is the last one of contiguous frames (GICR_TYPER.Last).
    pub fn set_last(&mut self, vcpu: usize, is_last: bool) {
        self.vcpus[vcpu].is_last = is_last;
    }

    /// Makes GICD_TYPER and GICR_TYPER say that there are LPIs. The owner calls this when it creates an ITS.
    pub fn attach_its(&mut self) {
        self.has_its = true;
        self.propbaser = lpi::RESET_BASE;
    }

    /// Returns the interrupt inputs of a vCPU that are asserted now. This reads one word.
    pub fn signals(&self, vcpu: usize) -> Signals {
        self.vcpus[vcpu].signals
    }

    /// Calls `kick` with each vCPU whose [`signals`](Self::signals) have changed since the last call. The owner calls
    /// this after each other method that takes `&mut self`.
    pub fn take_changed(&mut self, mut kick: impl FnMut(usize)) {
        for vcpu in self.changed.drain(..) {
            self.vcpus[vcpu].is_changed = false;
            kick(vcpu);
        }
    }

    /// Calls `ended` with the INTID of each level-triggered SPI that was deactivated since the last call. A resampling
    /// irqfd then asks its device whether the line is still high.
    pub fn take_ended(&mut self, mut ended: impl FnMut(u32)) {
        for intid in self.ended.drain(..) {
            ended(intid);
        }
    }

    /// Drives the line of an SPI.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is no such SPI.
    pub fn set_spi(&mut self, intid: u32, high: bool) -> Result<(), Error> {
        let index = intid.checked_sub(PRIVATE).ok_or(Error::Invalid)?;
        let spi = self.spis.get_mut(index as usize).ok_or(Error::Invalid)?;
        spi.set_line(high);
        self.requeue(0, intid);
        self.settle();
        Ok(())
    }

    /// Drives the line of a PPI of a vCPU.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is no such vCPU, or the INTID is not that of a PPI.
    pub fn set_ppi(&mut self, vcpu: usize, intid: u32, high: bool) -> Result<(), Error> {
        let is_ppi = (SGIS..PRIVATE).contains(&intid);
        let vcpu_state = self
            .vcpus
            .get_mut(vcpu)
            .filter(|_| is_ppi)
            .ok_or(Error::Invalid)?;
        vcpu_state.private[intid as usize].set_line(high);
        self.requeue(vcpu, intid);
        self.settle();
        Ok(())
    }

    /// Returns the interrupt `intid`. `vcpu` matters only for private interrupts (SGIs and PPIs).
    pub(crate) fn interrupt(&self, vcpu: usize, intid: u32) -> Option<&Interrupt> {
        match intid {
            ..PRIVATE => Some(&self.vcpus[vcpu].private[intid as usize]),
            PRIVATE..LPIS => self.spis.get((intid - PRIVATE) as usize),
            _ => self.lpis.get(&intid).map(|lpi| &lpi.interrupt),
        }
    }

    /// Returns an interrupt mutably. The caller must call [`requeue`](Self::requeue) after a change.
    pub(crate) fn interrupt_mut(&mut self, vcpu: usize, intid: u32) -> Option<&mut Interrupt> {
        match intid {
            ..PRIVATE => Some(&mut self.vcpus[vcpu].private[intid as usize]),
            PRIVATE..LPIS => self.spis.get_mut((intid - PRIVATE) as usize),
            _ => self.lpis.get_mut(&intid).map(|lpi| &mut lpi.interrupt),
        }
    }

    /// Changes an interrupt, if it exists, and then updates its entry in the pending sets.
    pub(crate) fn change(&mut self, vcpu: usize, intid: u32, change: impl FnOnce(&mut Interrupt)) {
        if let Some(interrupt) = self.interrupt_mut(vcpu, intid) {
            change(interrupt);
            self.requeue(vcpu, intid);
        }
    }

    /// Updates the entry of an interrupt in the pending sets after a change of the interrupt's state. `vcpu` matters
    /// only for private interrupts (SGIs and PPIs).
    pub(crate) fn requeue(&mut self, vcpu: usize, intid: u32) {
        let Some(interrupt) = self.interrupt(vcpu, intid) else {
            return;
        };
        let (old, mut new) = (interrupt.queued, interrupt.place());
        if intid >= LPIS {
            new = new.filter(|place| self.vcpus[place.vcpu].lpis_enabled);
        }
        if old == new {
            return;
        }
        if let Some(interrupt) = self.interrupt_mut(vcpu, intid) {
            interrupt.queued = new;
        }
        self.move_entry(intid, old, new);
    }

    /// Moves the entry of an interrupt in the pending sets from `old` to `new`. `None`: the interrupt is in no set.
    pub(crate) fn move_entry(&mut self, intid: u32, old: Option<Place>, new: Option<Place>) {
        if let Some(place) = old {
            self.vcpus[place.vcpu].pending.remove(intid, place);
            self.touch(place.vcpu);
        }
        if let Some(place) = new {
            self.vcpus[place.vcpu].pending.insert(intid, place);
            self.touch(place.vcpu);
        }
    }

    /// Makes [`settle`](Self::settle) compute the signals of a vCPU again.
    pub(crate) fn touch(&mut self, vcpu: usize) {
        if !self.vcpus[vcpu].is_touched {
            self.vcpus[vcpu].is_touched = true;
            self.touched.push(vcpu);
        }
    }

    /// Enables or disables the distributor.
    pub(crate) fn set_enabled(&mut self, enabled: bool) {
        if self.enabled != enabled {
            self.enabled = enabled;
            for vcpu in 0..self.vcpus.len() {
                self.touch(vcpu);
            }
        }
    }

    /// Computes the signals of all vCPUs for which [`touch`](Self::touch) was called. Each public function that changes
    /// the GIC calls this at its end.
    pub(crate) fn settle(&mut self) {
        while let Some(vcpu) = self.touched.pop() {
            let signals = self.compute_signals(vcpu);
            let state = &mut self.vcpus[vcpu];
            state.is_touched = false;
            if state.signals != signals {
                state.signals = signals;
                if !state.is_changed {
                    state.is_changed = true;
                    self.changed.push(vcpu);
                }
            }
        }
    }

    /// Records that a level-triggered SPI was deactivated.
    pub(crate) fn report_end(&mut self, intid: u32) {
        self.ended.push(intid);
    }
}
