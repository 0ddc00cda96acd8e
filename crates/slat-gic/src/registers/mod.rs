//! The registers in memory, for the guest and for the VMM of KVM's device attributes.
//!
//! The guest reaches registers by loads and stores in a [`Frame`]. An access that no register accepts reads as zero and
//! is ignored as a write, as in KVM. To save and restore the state, the VMM reads and writes most of these registers,
//! 32 bits at a time. The following registers differ for the VMM:
//!
//! | registers | guest | VMM |
//! |---|---|---|
//! | GICD_IIDR | ignores writes | sets the revision; another product is an error |
//! | GICv3: GICD_ISPENDR, GICR_ISPENDR0 | pending state; sets bits | the latch alone; replaces it |
//! | GICv3: GICD_ICPENDR, GICR_ICPENDR0 | pending state; clears the latch | zero, ignored |
//! | GICv2: GICD_ISPENDR0, GICD_ICPENDR0 of SGIs | ignored | the vCPU becomes the source; no source is left |
//! | GICv2: GICD_IGROUPR | changes groups | ignored before GICD_IIDR is written |
//! | GICv2: GICC_PMR | the mask in bits 7:3 | the mask in bits 4:0 |
//! | GICv2: registers with an effect, as GICC_IAR | have it | zero, ignored |

mod bits;
pub(crate) mod region;
mod v2;
pub(crate) mod v3;

use crate::error::Error;
use crate::gic::{Gic, Model};
use crate::identity::{IMPLEMENTER, OLDEST_REVISION, PRODUCT, PRODUCT_SHIFT, REVISION};
use crate::interrupt::PRIVATE;
use crate::memory::Memory;
use region::{
    Region, Register, V2_CPU_INTERFACE, V2_DISTRIBUTOR, V3_DISTRIBUTOR, V3_REDISTRIBUTOR, find,
};

const REVISION_SHIFT: u32 = 12;
const REVISION_MASK: u32 = 0xf << REVISION_SHIFT;

/// The size of GICv2's distributor in bytes.
pub const V2_DISTRIBUTOR_SIZE: u64 = 0x1000;
/// The size of GICv2's CPU interface in bytes.
pub const V2_CPU_INTERFACE_SIZE: u64 = 0x2000;
/// The size of GICv3's distributor in bytes.
pub const V3_DISTRIBUTOR_SIZE: u64 = 0x1_0000;
/// The size of a redistributor in bytes: its frames RD_base and SGI_base.
pub const REDISTRIBUTOR_SIZE: u64 = 0x2_0000;

/// Offsets in the distributor.
const CTLR: u32 = 0;
const TYPER: u32 = 4;
const IIDR: u32 = 8;

/// The enable bit of GICD_CTLR. As in KVM, there is only one enable bit: with GICv2 the bit of group 0, and with GICv3
/// the bit of group 1.
const V2_ENABLE: u32 = 1 << 0;
const V3_ENABLE: u32 = 1 << 1;
/// The bits of GICv3's GICD_CTLR that are always set: affinity routing is enabled, and there is one security state.
const V3_FIXED: u32 = 1 << 4 | 1 << 6;

/// Fields of GICD_TYPER.
const V2_CPUS_SHIFT: u32 = 5;
const V3_LPIS: u32 = 1 << 17;
const V3_ID_BITS_SHIFT: u32 = 19;
/// The number of bits of INTIDs, with and without LPIs.
const LPI_ID_BITS: u32 = 16;
const SPI_ID_BITS: u32 = 10;

/// A range of addresses with registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The distributor.
    Distributor,
    /// GICv2's CPU interface of the vCPU that makes the access.
    CpuInterface,
    /// GICv3's redistributor of the vCPU with this index: RD_base, and 64 KiB after it SGI_base.
    Redistributor(usize),
}

/// The origin of an access: the guest, or the VMM (KVM's client) by device attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Guest,
    Client,
}

/// An access that a register accepts.
#[derive(Clone, Copy)]
struct Accepted {
    region: Region<Register>,
    offset: u32,
    width: usize,
    access: Access,
}

impl Accepted {
    fn intid(&self) -> u32 {
        self.region.intid(self.offset)
    }

    /// Returns the number of interrupts that the access covers, in registers with `bits` bits for each interrupt.
    fn count(&self, bits: u32) -> u32 {
        self.width as u32 * 8 / bits
    }
}

impl Gic {
    /// Returns the access, and the vCPU whose registers are accessed.
    fn accept(
        &self,
        vcpu: usize,
        frame: Frame,
        offset: u64,
        width: usize,
        access: Access,
    ) -> Option<(Accepted, usize)> {
        let region = *find(regions(self.model, frame), offset, width, self.interrupts())?;
        let accepted = Accepted {
            region,
            offset: offset as u32,
            width,
            access,
        };
        let banked = match frame {
            Frame::Redistributor(of) => of,
            _ => vcpu,
        };
        // With GICv3, the registers of private interrupts are in the redistributors.
        let is_in_redistributor = self.model == Model::V3
            && frame == Frame::Distributor
            && region.is_of_interrupts()
            && accepted.intid() < PRIVATE;
        (!is_in_redistributor).then_some((accepted, banked))
    }

    /// Reads a register for the vCPU that makes the access.
    ///
    /// # Panics
    /// There is no such vCPU.
    pub fn read(&mut self, vcpu: usize, frame: Frame, offset: u64, data: &mut [u8]) {
        let accepted = self.accept(vcpu, frame, offset, data.len(), Access::Guest);
        let value = accepted.map_or(0, |(accepted, vcpu)| self.read_register(vcpu, accepted));
        self.settle();
        region::store(value, data);
    }

    /// Writes a register for the vCPU that makes the access. `memory` is the guest's memory, which holds the tables of
    /// LPIs.
    ///
    /// # Panics
    /// There is no such vCPU.
    pub fn write(
        &mut self,
        vcpu: usize,
        frame: Frame,
        offset: u64,
        data: &[u8],
        memory: &impl Memory,
    ) {
        let Some(value) = region::number(data) else {
            return;
        };
        if let Some((accepted, vcpu)) = self.accept(vcpu, frame, offset, data.len(), Access::Guest)
        {
            self.write_register(vcpu, accepted, value, memory);
            self.settle();
        }
    }

    fn read_register(&mut self, vcpu: usize, of: Accepted) -> u64 {
        let (first, register) = (of.intid(), of.region.register);
        match register {
            Register::Zero | Register::GenerateSgi => 0,
            Register::Ones => u32::MAX.into(),
            Register::Distributor => self.read_distributor(of.offset).into(),
            Register::Identification => v3::identification(of.offset),
            Register::Group
            | Register::SetEnable
            | Register::ClearEnable
            | Register::SetPending
            | Register::ClearPending
            | Register::SetActive
            | Register::ClearActive => {
                self.read_bits(vcpu, register, first, of.count(1), of.access)
            }
            Register::Priority => self.read_priorities(vcpu, first, of.count(8)),
            Register::Configuration => self.read_configuration(vcpu, first, of.count(2)),
            Register::Targets => self.read_targets(vcpu, first, of.count(8)),
            Register::SetSgiSources | Register::ClearSgiSources => {
                self.read_sgi_sources(vcpu, first, of.count(8))
            }
            Register::Router => self.read_route(first, of.offset, of.width),
            _ if self.model == Model::V2 => self
                .read_cpu_interface(vcpu, register, of.offset, of.access)
                .into(),
            _ => self.read_redistributor(vcpu, register, of.offset, of.width),
        }
    }

    fn write_register(&mut self, vcpu: usize, of: Accepted, value: u64, memory: &impl Memory) {
        let (first, register) = (of.intid(), of.region.register);
        match register {
            Register::Zero | Register::Ones | Register::Identification => (),
            Register::Distributor => self.write_distributor(of.offset, value as u32),
            Register::Group
            | Register::SetEnable
            | Register::ClearEnable
            | Register::SetPending
            | Register::ClearPending
            | Register::SetActive
            | Register::ClearActive => {
                self.write_bits(vcpu, register, first, of.count(1), value, of.access);
            }
            Register::Priority => self.write_priorities(vcpu, first, of.count(8), value),
            Register::Configuration => self.write_configuration(vcpu, first, of.count(2), value),
            Register::Targets => self.write_targets(first, of.count(8), value),
            Register::SetSgiSources | Register::ClearSgiSources => {
                self.write_sgi_sources(vcpu, register, first, of.count(8), value);
            }
            Register::GenerateSgi => self.generate_v2_sgi(vcpu, value as u32),
            Register::Router => self.write_route(first, of.offset, value),
            _ if self.model == Model::V2 => {
                self.write_cpu_interface(vcpu, register, of.offset, value as u32, of.access);
            }
            _ => self.write_redistributor(vcpu, register, of.offset, of.width, value, memory),
        }
    }

    fn identity(&self) -> u32 {
        let revision = u32::from(self.revision) << REVISION_SHIFT;
        PRODUCT << PRODUCT_SHIFT | revision | IMPLEMENTER
    }

    /// Reads GICD_CTLR, GICD_TYPER, GICD_IIDR, or GICD_TYPER2, which is zero.
    fn read_distributor(&self, offset: u32) -> u32 {
        let lines = self.interrupts() / 32 - 1;
        match (offset, self.model) {
            (CTLR, Model::V2) if self.enabled => V2_ENABLE,
            (CTLR, Model::V2) => 0,
            (CTLR, Model::V3) if self.enabled => V3_ENABLE | V3_FIXED,
            (CTLR, Model::V3) => V3_FIXED,
            (TYPER, Model::V2) => {
                lines | (self.vcpus.len() as u32).saturating_sub(1) << V2_CPUS_SHIFT
            }
            (TYPER, Model::V3) if self.has_its => {
                lines | V3_LPIS | (LPI_ID_BITS - 1) << V3_ID_BITS_SHIFT
            }
            (TYPER, Model::V3) => lines | (SPI_ID_BITS - 1) << V3_ID_BITS_SHIFT,
            (IIDR, _) => self.identity(),
            _ => 0,
        }
    }

    fn write_distributor(&mut self, offset: u32, value: u32) {
        let enable = match self.model {
            Model::V2 => V2_ENABLE,
            Model::V3 => V3_ENABLE,
        };
        if offset == CTLR {
            self.set_enabled(value & enable != 0);
        }
    }

    /// Reads 32 bits for the VMM: KVM_DEV_ARM_VGIC_GRP_DIST_REGS, _CPU_REGS and _REDIST_REGS. As in KVM, offsets
    /// without a register read as zero.
    ///
    /// # Panics
    /// There is no such vCPU.
    pub fn client_read(&mut self, vcpu: usize, frame: Frame, offset: u64) -> u32 {
        let accepted = self.accept(vcpu, frame, offset, 4, Access::Client);
        accepted.map_or(0, |(accepted, vcpu)| self.read_register(vcpu, accepted)) as u32
    }

    /// Writes 32 bits for the VMM. `memory` is the guest's memory, which holds the tables of LPIs. As in KVM, a write
    /// to an offset without a register is ignored.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the value of GICD_IIDR is that of another product, or of a revision that does not exist.
    /// [`Error::Busy`]: the value of GICD_TYPER2 is not the one that the register has.
    ///
    /// # Panics
    /// There is no such vCPU.
    pub fn client_write(
        &mut self,
        vcpu: usize,
        frame: Frame,
        offset: u64,
        value: u32,
        memory: &impl Memory,
    ) -> Result<(), Error> {
        let Some((accepted, vcpu)) = self.accept(vcpu, frame, offset, 4, Access::Client) else {
            return Ok(());
        };
        match accepted.region.register {
            Register::Distributor if accepted.offset == IIDR => self.client_identity(value),
            Register::Distributor if accepted.offset > IIDR && value != 0 => Err(Error::Busy),
            Register::Group if self.model == Model::V2 && !self.client_knows_groups => Ok(()),
            _ => {
                self.write_register(vcpu, accepted, value.into(), memory);
                self.settle();
                Ok(())
            }
        }
    }

    /// Sets the revision of GICD_IIDR.
    pub(crate) fn client_identity(&mut self, value: u32) -> Result<(), Error> {
        let revision = (value & REVISION_MASK) >> REVISION_SHIFT;
        let is_known = (u32::from(OLDEST_REVISION)..=u32::from(REVISION)).contains(&revision);
        if (value ^ self.identity()) & !REVISION_MASK != 0 || !is_known {
            return Err(Error::Invalid);
        }
        self.revision = revision as u8;
        self.client_knows_groups = true;
        Ok(())
    }

    /// Reads the lines of 32 interrupts: KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `first` is no multiple of 32.
    ///
    /// # Panics
    /// There is no such vCPU.
    pub fn client_read_lines(&self, vcpu: usize, first: u32) -> Result<u32, Error> {
        match first.is_multiple_of(32) {
            true => Ok(self.read_lines(vcpu, first)),
            false => Err(Error::Invalid),
        }
    }

    /// Writes the lines of 32 interrupts: KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `first` is no multiple of 32.
    ///
    /// # Panics
    /// There is no such vCPU.
    pub fn client_write_lines(&mut self, vcpu: usize, first: u32, value: u32) -> Result<(), Error> {
        if !first.is_multiple_of(32) {
            return Err(Error::Invalid);
        }
        self.write_lines(vcpu, first, value);
        self.settle();
        Ok(())
    }
}

fn regions(model: Model, frame: Frame) -> &'static [Region<Register>] {
    match (model, frame) {
        (Model::V2, Frame::Distributor) => &V2_DISTRIBUTOR,
        (Model::V2, Frame::CpuInterface) => &V2_CPU_INTERFACE,
        (Model::V3, Frame::Distributor) => &V3_DISTRIBUTOR,
        (Model::V3, Frame::Redistributor(_)) => &V3_REDISTRIBUTOR,
        _ => &[],
    }
}

/// Whether the VMM of a GIC with `interrupts` interrupts has a register at `offset`.
pub(crate) fn has_register(model: Model, frame: Frame, offset: u64, interrupts: u32) -> bool {
    let region = find(regions(model, frame), offset, 4, interrupts);
    let effects = [
        Register::Acknowledge,
        Register::AliasedAcknowledge,
        Register::End,
        Register::AliasedEnd,
        Register::Running,
        Register::HighestPending,
        Register::AliasedHighestPending,
        Register::Deactivate,
    ];
    region.is_some_and(|region| !effects.contains(&region.register))
}
