//! GICv3's system registers of a vCPU, ICC_*_EL1, for the guest and for the VMM.

use crate::error::Error;
use crate::gic::{Gic, Model};
use crate::interrupt::{Group, SPURIOUS};

/// Fields of ICC_CTLR_EL1.
const CTLR_COMMON_BINARY_POINT: u64 = 1 << 0;
const CTLR_SEPARATE_DEACTIVATION: u64 = 1 << 1;
const CTLR_PRIORITY_BITS_SHIFT: u32 = 8;
const CTLR_ID_BITS_SHIFT: u32 = 11;
const CTLR_SERRORS: u64 = 1 << 14;
/// A3V: SGIs can have targets whose Aff3 is not zero. Arm's own processors set this bit, and KVM shows the processor's
/// value.
const CTLR_AFF3: u64 = 1 << 15;

/// ICC_SRE_EL1: system registers are enabled, and nothing bypasses the GIC.
const SRE: u64 = 0b111;
const SRE_ENABLE: u64 = 1 << 0;
/// The field of the registers that contains an INTID.
const INTID: u64 = 0xff_ffff;

/// A system register of the CPU interface. A register that exists for each group has the group as its value. An active
/// priorities register also has its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Icc {
    Pmr,
    Iar(Group),
    Eoir(Group),
    Hppir(Group),
    Bpr(Group),
    Apr(Group, u8),
    Dir,
    Rpr,
    Sgi1r,
    Asgi1r,
    Sgi0r,
    Ctlr,
    Sre,
    Igrpen(Group),
}

/// The error of an access that the processor takes as an UNDEFINED instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Undefined;

/// Returns the encoding of a system register with op0 = 3 and op1 = 0, in the format of KVM's API.
const fn encoding(crn: u16, crm: u16, op2: u16) -> u16 {
    3 << 14 | crn << 7 | crm << 3 | op2
}

impl Icc {
    /// Returns the register with an encoding: op0, op1, CRn, CRm and op2 in the bits 15:14, 13:11, 10:7, 6:3 and 2:0.
    pub fn from_encoding(name: u16) -> Option<Self> {
        const PMR: u16 = encoding(4, 6, 0);
        const FIRST: u16 = encoding(12, 8, 0);
        if name == PMR {
            return Some(Icc::Pmr);
        }
        let (crm, op2) = (name >> 3 & 0xf, name & 7);
        if name & !0x7f != FIRST & !0x7f {
            return None;
        }
        Some(match (crm, op2) {
            (8, 0) => Icc::Iar(Group::Zero),
            (8, 1) => Icc::Eoir(Group::Zero),
            (8, 2) => Icc::Hppir(Group::Zero),
            (8, 3) => Icc::Bpr(Group::Zero),
            (8, 4..) => Icc::Apr(Group::Zero, op2 as u8 & 3),
            (9, ..4) => Icc::Apr(Group::One, op2 as u8),
            (11, 1) => Icc::Dir,
            (11, 3) => Icc::Rpr,
            (11, 5) => Icc::Sgi1r,
            (11, 6) => Icc::Asgi1r,
            (11, 7) => Icc::Sgi0r,
            (12, 0) => Icc::Iar(Group::One),
            (12, 1) => Icc::Eoir(Group::One),
            (12, 2) => Icc::Hppir(Group::One),
            (12, 3) => Icc::Bpr(Group::One),
            (12, 4) => Icc::Ctlr,
            (12, 5) => Icc::Sre,
            (12, 6) => Icc::Igrpen(Group::Zero),
            (12, 7) => Icc::Igrpen(Group::One),
            _ => return None,
        })
    }
}

/// Whether the VMM can access the register with the encoding `name`. The VMM can access the registers that hold state.
pub(crate) fn is_of_client(name: u16) -> bool {
    matches!(
        Icc::from_encoding(name),
        Some(Icc::Pmr | Icc::Bpr(_) | Icc::Apr(..) | Icc::Ctlr | Icc::Sre | Icc::Igrpen(_))
    )
}

impl Gic {
    /// Reads a system register for the guest.
    ///
    /// # Errors
    /// The register does not exist, or cannot be read.
    ///
    /// # Panics
    /// There is no such vCPU.
    pub fn read_icc(&mut self, vcpu: usize, register: Icc) -> Result<u64, Undefined> {
        if self.model != Model::V3 {
            return Err(Undefined);
        }
        let intid = match register {
            Icc::Iar(group) => {
                let signaled = self
                    .signaled(vcpu)
                    .filter(|signaled| signaled.group == group);
                signaled.map_or(SPURIOUS, |signaled| self.acknowledge(vcpu, signaled))
            }
            Icc::Hppir(group) => {
                let highest = self.highest_pending(vcpu);
                let highest = highest.filter(|highest| highest.group == group);
                highest.map_or(SPURIOUS, |highest| highest.intid)
            }
            Icc::Rpr => self.vcpus[vcpu].interface.running().into(),
            Icc::Apr(_, 1..) => return Err(Undefined),
            _ => return self.read_state(vcpu, register).ok_or(Undefined),
        };
        self.settle();
        Ok(intid.into())
    }

    /// Writes a system register for the guest.
    ///
    /// # Errors
    /// The register does not exist, or cannot be written.
    ///
    /// # Panics
    /// There is no such vCPU.
    pub fn write_icc(&mut self, vcpu: usize, register: Icc, value: u64) -> Result<(), Undefined> {
        if self.model != Model::V3 {
            return Err(Undefined);
        }
        let intid = (value & INTID) as u32;
        match register {
            Icc::Eoir(_) => self.end(vcpu, intid),
            Icc::Dir => self.deactivate(vcpu, intid),
            Icc::Sgi1r => self.generate_v3_sgi(vcpu, value, true),
            Icc::Asgi1r | Icc::Sgi0r => self.generate_v3_sgi(vcpu, value, false),
            Icc::Iar(_) | Icc::Hppir(_) | Icc::Rpr | Icc::Apr(_, 1..) => return Err(Undefined),
            Icc::Sre => (),
            _ => self.write_state(vcpu, register, value),
        }
        self.settle();
        Ok(())
    }

    /// Reads a register that holds state.
    fn read_state(&self, vcpu: usize, register: Icc) -> Option<u64> {
        let state = &self.vcpus[vcpu];
        let interface = &state.interface;
        Some(match register {
            Icc::Pmr => interface.mask.into(),
            Icc::Bpr(Group::Zero) => interface.binary_points[0].into(),
            Icc::Bpr(Group::One) => interface.group_one_binary_point().into(),
            Icc::Apr(group, _) => interface.active[group as usize].into(),
            Icc::Ctlr => {
                let flags = [
                    (interface.common_binary_point, CTLR_COMMON_BINARY_POINT),
                    (interface.separate_deactivation, CTLR_SEPARATE_DEACTIVATION),
                ];
                let flags = flags.iter().filter(|(is_set, _)| *is_set);
                flags.map(|(_, bit)| bit).sum::<u64>()
                    | u64::from(state.priority_bits - 1) << CTLR_PRIORITY_BITS_SHIFT
                    | u64::from(state.id_bits) << CTLR_ID_BITS_SHIFT
                    | CTLR_AFF3
            }
            Icc::Sre => SRE,
            Icc::Igrpen(group) => interface.enabled[group as usize].into(),
            _ => return None,
        })
    }

    /// Writes a register that holds state.
    fn write_state(&mut self, vcpu: usize, register: Icc, value: u64) {
        let interface = &mut self.vcpus[vcpu].interface;
        match register {
            Icc::Pmr => interface.set_mask(value),
            // With a common binary point (CBPR), the register of group 1 ignores writes.
            Icc::Bpr(Group::One) if interface.common_binary_point => (),
            Icc::Bpr(group) => interface.set_binary_point(group, value),
            Icc::Apr(group, _) => interface.active[group as usize] = value as u32,
            Icc::Ctlr => {
                interface.common_binary_point = value & CTLR_COMMON_BINARY_POINT != 0;
                interface.separate_deactivation = value & CTLR_SEPARATE_DEACTIVATION != 0;
            }
            Icc::Igrpen(group) => interface.enabled[group as usize] = value & 1 != 0,
            _ => (),
        }
        self.touch(vcpu);
    }

    /// Reads a system register for the VMM: KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS. `name` is the register's encoding, as for
    /// [`Icc::from_encoding`].
    ///
    /// # Errors
    /// [`Error::NoAttribute`]: there is no such register for the VMM. [`Error::Invalid`]: the register is an active
    /// priorities register other than the first, and only the first has priorities.
    ///
    /// # Panics
    /// There is no such vCPU.
    pub fn client_read_icc(&self, vcpu: usize, name: u16) -> Result<u64, Error> {
        let register = self.client_register(name)?;
        self.read_state(vcpu, register).ok_or(Error::NoAttribute)
    }

    fn client_register(&self, name: u16) -> Result<Icc, Error> {
        let exists = self.model == Model::V3 && is_of_client(name);
        let register = Icc::from_encoding(name).filter(|_| exists);
        match register.ok_or(Error::NoAttribute)? {
            Icc::Apr(_, 1..) => Err(Error::Invalid),
            register => Ok(register),
        }
    }

    /// Writes a system register for the VMM.
    ///
    /// # Errors
    /// [`Error::NoAttribute`]: there is no such register for the VMM. [`Error::Invalid`]: the register is an active
    /// priorities register other than the first; the value of ICC_SRE_EL1 disables system registers; or the value of
    /// ICC_CTLR_EL1 is that of a machine that has more priorities or INTIDs, reports SErrors, or has no Aff3.
    ///
    /// # Panics
    /// There is no such vCPU.
    pub fn client_write_icc(&mut self, vcpu: usize, name: u16, value: u64) -> Result<(), Error> {
        match self.client_register(name)? {
            Icc::Sre => {
                return if value & SRE_ENABLE != 0 {
                    Ok(())
                } else {
                    Err(Error::Invalid)
                };
            }
            Icc::Ctlr => {
                let priority_bits = (value >> CTLR_PRIORITY_BITS_SHIFT & 7) as u8 + 1;
                let id_bits = (value >> CTLR_ID_BITS_SHIFT & 7) as u8;
                let state = &mut self.vcpus[vcpu];
                let fits = priority_bits <= state.priority_bits && id_bits <= state.id_bits;
                if !fits || value & (CTLR_SERRORS | CTLR_AFF3) != CTLR_AFF3 {
                    return Err(Error::Invalid);
                }
                state.priority_bits = priority_bits;
                state.id_bits = id_bits;
                self.write_state(vcpu, Icc::Ctlr, value);
            }
            register => self.write_state(vcpu, register, value),
        }
        self.settle();
        Ok(())
    }
}
