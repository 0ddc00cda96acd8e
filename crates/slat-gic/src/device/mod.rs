//! The devices of KVM's API with their attributes: KVM_DEV_TYPE_ARM_VGIC_V2, _V3, and _ITS.
//!
//! The owner of a device copies the values of attributes between the VMM's memory and [`Device::set`] and
//! [`Device::get`]. A value has [`value_size`] bytes. While a vCPU runs, the owner refuses attributes for registers,
//! tables and initialization with EBUSY.

mod its;

use crate::addresses::Addresses;
use crate::error::Error;
use crate::gic::{DEFAULT_INTERRUPTS, Gic, INTERRUPTS, Model, VcpuName};
use crate::memory::Memory;
use crate::registers::Frame;
use alloc::vec::Vec;
pub use its::ItsDevice;

/// Groups of attributes, and attributes: KVM's numbers.
pub mod group {
    #![allow(missing_docs)]
    pub const ADDRESS: u32 = 0;
    pub const DISTRIBUTOR: u32 = 1;
    pub const CPU_INTERFACE: u32 = 2;
    pub const INTERRUPTS: u32 = 3;
    pub const CONTROL: u32 = 4;
    pub const REDISTRIBUTOR: u32 = 5;
    pub const SYSTEM_REGISTERS: u32 = 6;
    pub const LINES: u32 = 7;
    pub const ITS_REGISTERS: u32 = 8;
}
/// Attributes of [`group::ADDRESS`].
pub mod address {
    #![allow(missing_docs)]
    pub const V2_DISTRIBUTOR: u64 = 0;
    pub const V2_CPU_INTERFACE: u64 = 1;
    pub const V3_DISTRIBUTOR: u64 = 2;
    pub const REDISTRIBUTORS: u64 = 3;
    pub const ITS: u64 = 4;
    pub const REDISTRIBUTOR_REGION: u64 = 5;
}
/// Attributes of [`group::CONTROL`].
pub mod control {
    #![allow(missing_docs)]
    pub const INITIALIZE: u64 = 0;
    pub const SAVE_ITS_TABLES: u64 = 1;
    pub const RESTORE_ITS_TABLES: u64 = 2;
    pub const SAVE_PENDING_TABLES: u64 = 3;
    pub const RESET_ITS: u64 = 4;
}

/// Fields of an attribute's number: the offset of a register, and in the upper bits a vCPU's id (GICv2) or affinity
/// (GICv3).
const OFFSET: u64 = 0xffff_ffff;
const VCPU_SHIFT: u32 = 32;
const V2_VCPU: u64 = 0xff;
/// The encoding of a system register.
const ENCODING: u64 = 0xffff;
/// Fields of an attribute of [`group::LINES`]: the kind of information (only one kind exists), and the first interrupt.
const LINES_INFO: u64 = 0xffff_fc00;
const LINES_FIRST: u64 = 0x3ff;
/// Fields of the value that describes a region of redistributors (`KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION`).
const REGION_INDEX: u64 = 0xfff;
const REGION_FLAGS: u64 = 0xf000;
const REGION_BASE: u64 = 0x000f_ffff_ffff_0000;
const REGION_COUNT_SHIFT: u32 = 52;

/// The offsets of GICD_IIDR and GICD_TYPER2. A VMM of GICv3 may also access these registers before initialization.
const IIDR: u64 = 0x8;
const EARLY_REGISTERS: [u64; 2] = [IIDR, 0xc];

/// The parts of the VM that are needed to get and set attributes.
#[derive(Debug)]
pub struct Vm<'a, M> {
    /// The vCPUs, in the order of their creation.
    pub vcpus: &'a [VcpuName],
    /// The guest's memory.
    pub memory: &'a M,
    /// The number of bits of the guest's physical addresses.
    pub address_bits: u32,
}

/// Returns the size of an attribute's value in bytes. Zero: the attribute is a command without a value, such as
/// initialization.
pub fn value_size(group: u32) -> usize {
    match group {
        group::CONTROL => 0,
        group::ADDRESS | group::SYSTEM_REGISTERS | group::ITS_REGISTERS => 8,
        _ => 4,
    }
}

/// A GIC as a device of KVM's API: the VMM's settings before the GIC exists, and then the GIC itself.
#[derive(Clone, Debug)]
pub struct Device {
    model: Model,
    interrupts: Option<u32>,
    addresses: Addresses,
    has_its: bool,
    /// The value of GICD_IIDR that the VMM has set before initialization.
    identity: Option<u32>,
    gic: Option<Gic>,
}

impl Device {
    /// Creates the device. [`control::INITIALIZE`] creates its GIC.
    pub fn new(model: Model) -> Self {
        Device {
            model,
            interrupts: None,
            addresses: Addresses::default(),
            has_its: false,
            identity: None,
            gic: None,
        }
    }

    /// Returns the GIC, if it is initialized.
    pub fn gic(&mut self) -> Option<&mut Gic> {
        self.gic.as_mut()
    }

    /// Returns the first address and the size in bytes of each range in which [`find`](Self::find) finds a frame.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        self.addresses.ranges(self.model)
    }

    /// Returns the frame that contains the guest-physical address `gpa`, and the offset of `gpa` in the frame. `None`:
    /// no frame contains `gpa`.
    pub fn find(&self, gpa: u64) -> Option<(Frame, u64)> {
        self.addresses.find(self.model, gpa)
    }

    /// Records that the VMM has created an ITS. Until then the GIC says that it has no LPIs.
    pub fn attach_its(&mut self) {
        self.has_its = true;
        if let Some(gic) = &mut self.gic {
            gic.attach_its();
        }
    }

    /// Gives the redistributors of new vCPUs their places. The owner calls this when it has created a vCPU. As in KVM,
    /// this call checks frames for overlaps without the redistributor of the newest vCPU;
    /// [`check_ready`](Self::check_ready) includes it.
    ///
    /// # Errors
    /// [`Error::Invalid`]: frames overlap.
    pub fn vcpu_created(&mut self, vcpus: usize) -> Result<(), Error> {
        self.addresses.place_vcpus(vcpus, vcpus.saturating_sub(1))
    }

    /// Creates the GIC, unless it exists: KVM_DEV_ARM_VGIC_CTRL_INIT.
    ///
    /// # Errors
    /// [`Error::TooBig`]: there are too many vCPUs.
    pub fn initialize(&mut self, vcpus: &[VcpuName]) -> Result<(), Error> {
        if self.gic.is_some() {
            return Ok(());
        }
        let gic = self.new_gic(vcpus)?;
        self.interrupts = Some(gic.interrupts());
        self.gic = Some(gic);
        self.mark_last();
        Ok(())
    }

    /// Creates a GIC with the settings that the VMM has made so far.
    fn new_gic(&self, vcpus: &[VcpuName]) -> Result<Gic, Error> {
        let interrupts = self.interrupts.unwrap_or(DEFAULT_INTERRUPTS);
        let mut gic = Gic::new(self.model, interrupts, vcpus)?;
        if self.has_its {
            gic.attach_its();
        }
        if let Some(identity) = self.identity {
            gic.client_identity(identity)?;
        }
        Ok(gic)
    }

    /// Whether an attribute is a register that a GICv3 has before initialization.
    fn is_early(&self, group: u32, attribute: u64) -> bool {
        let is_v3 = self.gic.is_none() && self.model == Model::V3;
        let is_register = EARLY_REGISTERS.contains(&(attribute & OFFSET));
        is_v3 && group == group::DISTRIBUTOR && is_register
    }

    /// Prepares the first run of a vCPU. Initializes a GICv2 if the VMM has not done so. `address_bits` is the number
    /// of bits of the guest's physical addresses.
    ///
    /// # Errors
    /// [`Error::NoAttribute`]: a frame has no address. [`Error::Invalid`]: frames overlap, or a region has grown
    /// beyond the last address. [`Error::Busy`]: a GICv3 is
    /// not initialized.
    pub fn check_ready(&mut self, vcpus: &[VcpuName], address_bits: u32) -> Result<(), Error> {
        self.addresses
            .check(self.model, vcpus.len(), address_bits)?;
        match (self.model, &self.gic) {
            (Model::V2, _) => self.initialize(vcpus),
            (Model::V3, None) => Err(Error::Busy),
            (Model::V3, Some(_)) => Ok(()),
        }
    }

    /// Sets GICR_TYPER.Last of all redistributors.
    fn mark_last(&mut self) {
        if let Some(gic) = &mut self.gic {
            for vcpu in 0..gic.vcpus() {
                gic.set_last(vcpu, self.addresses.is_last(vcpu));
            }
        }
    }

    /// Sets an attribute: KVM_SET_DEVICE_ATTR.
    ///
    /// # Errors
    /// The errors are those of KVM for the attribute.
    pub fn set<M: Memory>(
        &mut self,
        vm: &Vm<'_, M>,
        group: u32,
        attribute: u64,
        value: u64,
    ) -> Result<(), Error> {
        match group {
            group::ADDRESS => self.set_address(vm, attribute, value),
            group::INTERRUPTS => self.set_interrupts(value as u32),
            group::CONTROL => match (attribute, self.model) {
                (control::INITIALIZE, _) => self.initialize(vm.vcpus),
                (control::SAVE_PENDING_TABLES, Model::V3) => {
                    let gic = self.gic.as_ref().ok_or(Error::NoAttribute)?;
                    gic.save_pending_tables(vm.memory)
                }
                _ => Err(Error::NoAttribute),
            },
            group::LINES if self.model == Model::V3 => {
                let (gic, vcpu) = self.target(vm, group, attribute)?;
                check_lines(attribute)?;
                gic.client_write_lines(vcpu, (attribute & LINES_FIRST) as u32, value as u32)
            }
            group::SYSTEM_REGISTERS if self.model == Model::V3 => {
                let (gic, vcpu) = self.target(vm, group, attribute)?;
                gic.client_write_icc(vcpu, (attribute & ENCODING) as u16, value)
            }
            _ if self.is_early(group, attribute) => {
                let vcpu = self.vcpu(vm.vcpus, group, attribute)?;
                let (frame, offset) = (frame(group, vcpu), attribute & OFFSET);
                let mut gic = self.new_gic(vm.vcpus)?;
                // A refused value is `Invalid`, not `Busy`, because before initialization a register can still be set,
                // but not to this value.
                gic.client_write(vcpu, frame, offset, value as u32, vm.memory)
                    .map_err(|_| Error::Invalid)?;
                self.identity = Some(gic.client_read(vcpu, frame, IIDR));
                Ok(())
            }
            _ => {
                self.check_frame(group)?;
                let (gic, vcpu) = self.target(vm, group, attribute)?;
                let frame = frame(group, vcpu);
                gic.client_write(vcpu, frame, attribute & OFFSET, value as u32, vm.memory)
            }
        }
    }

    /// Gets an attribute: KVM_GET_DEVICE_ATTR. `input` is the value in the VMM's memory before the call; only
    /// [`address::REDISTRIBUTOR_REGION`] uses it.
    ///
    /// # Errors
    /// The errors are those of KVM for the attribute.
    pub fn get<M: Memory>(
        &mut self,
        vm: &Vm<'_, M>,
        group: u32,
        attribute: u64,
        input: u64,
    ) -> Result<u64, Error> {
        match group {
            group::ADDRESS => self.get_address(attribute, input),
            group::INTERRUPTS => {
                let unset = crate::interrupt::PRIVATE;
                Ok(self.interrupts.unwrap_or(unset).into())
            }
            group::CONTROL => Err(Error::NoAttribute),
            group::LINES if self.model == Model::V3 => {
                let (gic, vcpu) = self.target(vm, group, attribute)?;
                check_lines(attribute)?;
                gic.client_read_lines(vcpu, (attribute & LINES_FIRST) as u32)
                    .map(u64::from)
            }
            group::SYSTEM_REGISTERS if self.model == Model::V3 => {
                let (gic, vcpu) = self.target(vm, group, attribute)?;
                gic.client_read_icc(vcpu, (attribute & ENCODING) as u16)
            }
            _ if self.is_early(group, attribute) => {
                let vcpu = self.vcpu(vm.vcpus, group, attribute)?;
                let mut gic = self.new_gic(vm.vcpus)?;
                Ok(gic
                    .client_read(vcpu, frame(group, vcpu), attribute & OFFSET)
                    .into())
            }
            _ => {
                self.check_frame(group)?;
                let (gic, vcpu) = self.target(vm, group, attribute)?;
                let frame = frame(group, vcpu);
                Ok(gic.client_read(vcpu, frame, attribute & OFFSET).into())
            }
        }
    }

    /// Whether an attribute exists: KVM_HAS_DEVICE_ATTR.
    ///
    /// # Errors
    /// [`Error::NoAttribute`]: the attribute does not exist. [`Error::Invalid`]: there is no such vCPU.
    pub fn has<M: Memory>(&self, vm: &Vm<'_, M>, group: u32, attribute: u64) -> Result<(), Error> {
        let exists = match (group, self.model) {
            (group::ADDRESS, Model::V2) => {
                matches!(
                    attribute,
                    address::V2_DISTRIBUTOR | address::V2_CPU_INTERFACE
                )
            }
            (group::ADDRESS, Model::V3) => matches!(
                attribute,
                address::V3_DISTRIBUTOR | address::REDISTRIBUTORS | address::REDISTRIBUTOR_REGION
            ),
            (group::INTERRUPTS, _) => true,
            (group::CONTROL, model) => match attribute {
                control::INITIALIZE => true,
                control::SAVE_PENDING_TABLES => model == Model::V3,
                _ => false,
            },
            (group::LINES, Model::V3) => attribute & LINES_INFO == 0,
            _ => return self.has_register(vm, group, attribute),
        };
        match exists {
            true => Ok(()),
            false => Err(Error::NoAttribute),
        }
    }

    /// Whether the GIC has the register that an attribute names. A GIC that is not initialized counts as having the
    /// number of interrupts that the VMM has set so far.
    fn has_register<M: Memory>(
        &self,
        vm: &Vm<'_, M>,
        group: u32,
        attribute: u64,
    ) -> Result<(), Error> {
        if group != group::SYSTEM_REGISTERS || self.model != Model::V3 {
            self.check_frame(group)?;
        }
        let vcpu = self.vcpu(vm.vcpus, group, attribute)?;
        let interrupts = self.interrupts.unwrap_or(crate::interrupt::PRIVATE);
        let exists = match group {
            group::SYSTEM_REGISTERS => crate::icc::is_of_client((attribute & ENCODING) as u16),
            _ => crate::registers::has_register(
                self.model,
                frame(group, vcpu),
                attribute & OFFSET,
                interrupts,
            ),
        };
        match exists {
            true => Ok(()),
            false => Err(Error::NoAttribute),
        }
    }

    /// Returns an error if GICs of this model do not have the group of registers.
    fn check_frame(&self, group: u32) -> Result<(), Error> {
        match (group, self.model) {
            (group::DISTRIBUTOR, _)
            | (group::CPU_INTERFACE, Model::V2)
            | (group::REDISTRIBUTOR, Model::V3) => Ok(()),
            _ => Err(Error::NoAttribute),
        }
    }

    /// Returns the GIC, and the vCPU that an attribute names.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is no such vCPU. [`Error::Busy`]: a GICv3 is not initialized. This function
    /// initializes a GICv2 that is not initialized.
    fn target<M: Memory>(
        &mut self,
        vm: &Vm<'_, M>,
        group: u32,
        attribute: u64,
    ) -> Result<(&mut Gic, usize), Error> {
        let vcpu = self.vcpu(vm.vcpus, group, attribute)?;
        if self.model == Model::V2 {
            self.initialize(vm.vcpus)?;
        }
        let gic = self.gic.as_mut().ok_or(Error::Busy)?;
        // A vCPU that was created after the GIC has no state in the GIC.
        match vcpu < gic.vcpus() {
            true => Ok((gic, vcpu)),
            false => Err(Error::Invalid),
        }
    }

    /// Returns the index of the vCPU that an attribute names. Attributes of GICv3's distributor name no vCPU, so the
    /// result is the first vCPU.
    fn vcpu(&self, vcpus: &[VcpuName], group: u32, attribute: u64) -> Result<usize, Error> {
        let name = attribute >> VCPU_SHIFT;
        let found = match (self.model, group) {
            (Model::V3, group::DISTRIBUTOR) => (!vcpus.is_empty()).then_some(0),
            (Model::V3, _) => vcpus
                .iter()
                .position(|vcpu| u64::from(vcpu.affinity) == name),
            (Model::V2, _) => {
                let id = name & V2_VCPU;
                vcpus.iter().position(|vcpu| u64::from(vcpu.id) == id)
            }
        };
        found.ok_or(Error::Invalid)
    }

    /// Sets the number of interrupts: KVM_DEV_ARM_VGIC_GRP_NR_IRQS.
    fn set_interrupts(&mut self, value: u32) -> Result<(), Error> {
        if !INTERRUPTS.contains(&value) || !value.is_multiple_of(32) {
            return Err(Error::Invalid);
        }
        // After initialization, the number of interrupts is set even if the VMM has not set it.
        if self.interrupts.is_some() {
            return Err(Error::Busy);
        }
        self.interrupts = Some(value);
        Ok(())
    }

    /// Sets the address of a frame. The address of a frame that only the other version of the GIC has is an unknown
    /// attribute.
    fn set_address<M: Memory>(
        &mut self,
        vm: &Vm<'_, M>,
        attribute: u64,
        value: u64,
    ) -> Result<(), Error> {
        let bits = vm.address_bits;
        let vcpus = vm.vcpus.len();
        match (attribute, self.model) {
            (address::V2_DISTRIBUTOR, Model::V2) | (address::V3_DISTRIBUTOR, Model::V3) => {
                self.addresses.set_distributor(self.model, value, bits)
            }
            (address::V2_CPU_INTERFACE, Model::V2) => self.addresses.set_cpu_interface(value, bits),
            (address::REDISTRIBUTORS, Model::V3) => {
                let added = self.addresses.add_region(0, value, None, vcpus, bits);
                self.mark_last();
                added
            }
            (address::REDISTRIBUTOR_REGION, Model::V3) => {
                let count = (value >> REGION_COUNT_SHIFT) as u32;
                if count == 0 || value & REGION_FLAGS != 0 {
                    return Err(Error::Invalid);
                }
                let (index, base) = ((value & REGION_INDEX) as usize, value & REGION_BASE);
                let added = self
                    .addresses
                    .add_region(index, base, Some(count), vcpus, bits);
                self.mark_last();
                added
            }
            _ => Err(Error::NoAttribute),
        }
    }

    fn get_address(&self, attribute: u64, input: u64) -> Result<u64, Error> {
        match (attribute, self.model) {
            (address::V2_DISTRIBUTOR, Model::V2) | (address::V3_DISTRIBUTOR, Model::V3) => {
                Ok(self.addresses.distributor())
            }
            (address::V2_CPU_INTERFACE, Model::V2) => Ok(self.addresses.cpu_interface()),
            (address::REDISTRIBUTORS, Model::V3) => Ok(self.addresses.redistributors()),
            (address::REDISTRIBUTOR_REGION, Model::V3) => {
                let index = input & REGION_INDEX;
                let region = self.addresses.region(index as usize);
                let (base, count) = region.ok_or(Error::NotFound)?;
                Ok(index | base | u64::from(count) << REGION_COUNT_SHIFT)
            }
            _ => Err(Error::NoAttribute),
        }
    }
}

/// Returns the frame of a group of registers.
fn frame(group: u32, vcpu: usize) -> Frame {
    match group {
        group::CPU_INTERFACE => Frame::CpuInterface,
        group::REDISTRIBUTOR => Frame::Redistributor(vcpu),
        _ => Frame::Distributor,
    }
}

fn check_lines(attribute: u64) -> Result<(), Error> {
    match attribute & LINES_INFO {
        0 => Ok(()),
        _ => Err(Error::Invalid),
    }
}
