//! The registers by which a guest finds out what its processor has (DDI 0487, D23.2): a VM's client may take features
//! away from its guest (`KVM_SET_ONE_REG`), and ask which fields it may change (`KVM_ARM_GET_REG_WRITABLE_MASKS`,
//! api.rst 4.139).
//!
//! All vCPUs of a VM have the same registers. The processor's values after reset are the limits: a field may say less
//! than the processor has, never more. The processor behaves as before: a feature that is hidden works nevertheless.

use crate::errno::{Result, fail};
use kvm_bindings::KVM_ARM_FEATURE_ID_RANGE_SIZE;
use slat_a64::{State, SystemName};

/// CTR_EL0, and its fields that a client may change: DIC, IDC, and the logarithms of the sizes of cache lines.
const CTR: SystemName = SystemName::new(3, 3, 0, 0, 1);
const CTR_FLAGS: u64 = 1 << 29 | 1 << 28;
const CTR_SIZES: u64 = 0xf << 16 | 0xf;
/// CLIDR_EL1. This module does not hold this register, because each vCPU has a value of its own.
const CLIDR: SystemName = SystemName::new(3, 1, 0, 0, 1);

/// The index (8 * CRm + op2) of ID_AA64PFR0, and the value 1 of its field GIC: the CPU interface has the system
/// registers of GICv3.
const PFR0: usize = 8 * 4;
const PFR0_GIC: u64 = 0xf << 24;
const PFR0_GIC_V3: u64 = 1 << 24;

/// The number of registers with the names (3, 0, 0, CRm, op2). Those with CRm 0 are not identification registers of
/// this module.
const COUNT: usize = 64;
const CRM_32_BITS: std::ops::RangeInclusive<usize> = 1..=3;

/// A register of which a client may change fields.
struct Writable {
    crm: usize,
    op2: usize,
    /// The mask of the fields that a client can change. Fields have four bits each.
    mask: u64,
}

const fn writable(crm: usize, op2: usize, mask: u64) -> Writable {
    Writable { crm, op2, mask }
}

/// The registers of which a client may change fields, and these fields, as in Linux 7.3.
const WRITABLE: [Writable; 14] = [
    // ID_AA64PFR0: every field except AMU, MPAM, SVE, RAS, AdvSIMD, FP.
    writable(4, 0, 0xffff_00f0_0f00_ffff),
    // ID_AA64PFR1: DF2, CSV2_frac, SSBS, BT.
    writable(4, 1, 0x0f00_000f_0000_00ff),
    // ID_AA64PFR2: FPMR.
    writable(4, 2, 0x0000_000f_0000_0000),
    // ID_AA64ZFR0: every field.
    writable(4, 4, 0x0ff0_ff0f_0fff_00ff),
    // ID_AA64FPFR0: every field.
    writable(4, 7, 0x0000_0000_f000_0003),
    // ID_AA64DFR0: DoubleLock, WRPs, PMUVer, DebugVer.
    writable(5, 0, 0x0000_00f0_00f0_0f0f),
    // ID_AA64ISAR0: every field.
    writable(6, 0, 0xffff_ffff_ffff_fff0),
    // ID_AA64ISAR1: every field except those of pointer authentication.
    writable(6, 1, 0xffff_ffff_00ff_f00f),
    // ID_AA64ISAR2: every field except those of pointer authentication.
    writable(6, 2, 0xffff_0fff_ffff_00ff),
    // ID_AA64ISAR3: FPRCVT, LSUI, LSFE, FAMINMAX.
    writable(6, 3, 0x0000_0000_ff0f_00f0),
    // ID_AA64MMFR0: every field.
    writable(7, 0, 0xff00_ffff_ffff_ffff),
    // ID_AA64MMFR1: every field except XNX, VH, VMIDBits.
    writable(7, 1, 0xffff_ffff_0fff_f00f),
    // ID_AA64MMFR2: every field except EVT, FWB, IDS, NV, CCIDX.
    writable(7, 2, 0xf0ff_000f_f00f_ffff),
    // ID_AA64MMFR3: TCRX, SCTLRX, S1PIE, S1POE.
    writable(7, 3, 0x0000_0000_000f_0fff),
];

/// The rule that decides which of two values of a field means fewer features.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// The lesser unsigned number means fewer features.
    Unsigned,
    /// The lesser signed number means fewer features; -1 means that the feature is absent.
    Signed,
    /// The greater unsigned number means fewer features.
    Reversed,
    /// 1 means that the feature is absent. All other numbers are not ordered: none means fewer features than another.
    Granule,
}

/// The value of the field DebugVer for Armv8, the lowest value of a processor with AArch64.
const DEBUG_VERSION_8: u64 = 6;

fn order(crm: usize, op2: usize, shift: u32) -> Order {
    match (crm, op2, shift) {
        // PMUVer and DoubleLock of ID_AA64DFR0; TGran64 and TGran4 of ID_AA64MMFR0.
        (5, 0, 8 | 36) | (7, 0, 24 | 28) => Order::Signed,
        // The fields of ID_AA64MMFR0 for the granules of stage 2 (TGran16_2, TGran64_2, TGran4_2).
        (7, 0, 32 | 36 | 40) => Order::Granule,
        // SpecSEI of ID_AA64MMFR1.
        (7, 1, 24) => Order::Reversed,
        _ => Order::Unsigned,
    }
}

/// Whether a client may give a field `value` if the processor's field has the value `limit`.
fn is_safe(order: Order, value: u64, limit: u64) -> bool {
    let signed = |field: u64| (field << 60) as i64;
    match order {
        Order::Unsigned => value <= limit,
        Order::Signed => signed(value) <= signed(limit),
        Order::Reversed => value >= limit,
        Order::Granule => value == limit || value == 1,
    }
}

/// The identification registers of a VM's processors.
#[derive(Clone, Debug)]
pub(crate) struct Identification {
    values: [u64; COUNT],
    ctr: u64,
    /// The values of [`IMPLEMENTATION`]'s registers.
    implementation: [u64; IMPLEMENTATION.len()],
    /// Whether the client may change `implementation`.
    is_implementation_writable: bool,
}

/// The registers that name the processor's implementation, and their bits: MIDR_EL1, REVIDR_EL1, AIDR_EL1.
const IMPLEMENTATION: [(SystemName, u64); 3] = [
    (SystemName::new(3, 0, 0, 0, 0), u32::MAX as u64),
    (SystemName::new(3, 0, 0, 0, 6), u64::MAX),
    (SystemName::new(3, 1, 0, 0, 7), u64::MAX),
];

/// An identification register of this module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdRegister {
    /// The register (3, 0, 0, CRm, op2). The number is 8 * CRm + op2.
    Feature(usize),
    Ctr,
    /// A register of [`IMPLEMENTATION`].
    Implementation(usize),
}

impl IdRegister {
    /// Returns the register with this name.
    pub(crate) fn of(name: SystemName) -> Option<Self> {
        match name.parts() {
            [3, 0, 0, crm @ 1..=7, op2] => Some(Self::Feature((crm * 8 + op2).into())),
            _ if name == CTR => Some(Self::Ctr),
            _ => IMPLEMENTATION
                .iter()
                .position(|(known, _)| *known == name)
                .map(Self::Implementation),
        }
    }

    /// Returns the names of all registers of this module.
    pub(crate) fn names() -> impl Iterator<Item = SystemName> {
        let features = (1..=7).flat_map(|crm| (0..=7).map(move |op2| (crm, op2)));
        features
            .map(|(crm, op2)| SystemName::new(3, 0, 0, crm, op2))
            .chain([CTR])
            .chain(IMPLEMENTATION.map(|(name, _)| name))
    }
}

/// Returns the processor's values, which are the greatest that a client may set. These values include the system
/// registers of a GICv3.
fn limits() -> Identification {
    let state = State::reset();
    let mut limits = Identification {
        values: [0; COUNT],
        ctr: 0,
        implementation: [0; IMPLEMENTATION.len()],
        is_implementation_writable: false,
    };
    for name in IdRegister::names() {
        let value = state.system(name).unwrap_or(0);
        match IdRegister::of(name) {
            Some(IdRegister::Feature(place)) => limits.values[place] = value,
            Some(IdRegister::Implementation(place)) => limits.implementation[place] = value,
            _ => limits.ctr = value,
        }
    }
    limits.values[PFR0] |= PFR0_GIC_V3;
    limits
}

impl Default for Identification {
    fn default() -> Self {
        limits()
    }
}

impl Identification {
    /// Returns the value of a register.
    pub(crate) fn get(&self, register: IdRegister) -> u64 {
        match register {
            IdRegister::Feature(place) => self.values[place],
            IdRegister::Ctr => self.ctr,
            IdRegister::Implementation(place) => self.implementation[place],
        }
    }

    /// Enables `KVM_CAP_ARM_WRITABLE_IMP_ID_REGS`: the client may name another implementation. The processor behaves as
    /// before.
    pub(crate) fn allow_implementation(&mut self) {
        self.is_implementation_writable = true;
    }

    /// Sets a register for the client. Values for the identification registers of AArch32 are ignored, because the
    /// processor has no AArch32: a client may restore the values that it has saved on another host.
    ///
    /// # Errors
    /// `EINVAL` for a value that promises more than the processor has, and for another implementation if
    /// [`allow_implementation`](Self::allow_implementation) was not called. `EBUSY` for a change after a vCPU has run.
    pub(crate) fn set(&mut self, register: IdRegister, value: u64, has_run: bool) -> Result<()> {
        if let IdRegister::Feature(place) = register
            && CRM_32_BITS.contains(&(place / 8))
            && !is_hidden(place)
        {
            return Ok(());
        }
        match () {
            () if has_run && value == self.get(register) => return Ok(()),
            () if has_run => return fail(libc::EBUSY),
            () => {}
        }
        let limits = limits();
        let is_allowed = match register {
            IdRegister::Feature(place) => is_allowed(place, value, limits.values[place]),
            IdRegister::Ctr => is_allowed_ctr(value, limits.ctr),
            IdRegister::Implementation(place) => {
                let is_possible = value & !IMPLEMENTATION[place].1 == 0;
                value == self.get(register) || self.is_implementation_writable && is_possible
            }
        };
        if !is_allowed {
            return fail(libc::EINVAL);
        }
        match register {
            IdRegister::Feature(place) => self.values[place] = value,
            IdRegister::Ctr => self.ctr = value,
            IdRegister::Implementation(place) => self.implementation[place] = value,
        }
        Ok(())
    }

    /// Hides the system registers of a GICv3 from the guest.
    pub(crate) fn hide_gic(&mut self) {
        self.values[PFR0] &= !PFR0_GIC;
    }

    /// Sets the identification registers of a processor to these values.
    pub(crate) fn apply(&self, state: &mut State) {
        for name in IdRegister::names() {
            if let Some(register) = IdRegister::of(name) {
                // A register for which the processor holds no value is zero, and stays zero.
                state.identify(name, self.get(register));
            }
        }
    }

    /// Returns the bits that a client may change, for each register in the order of `KVM_ARM_GET_REG_WRITABLE_MASKS`:
    /// op1 0, 1 and 3, each with CRm and op2.
    pub(crate) fn writable_masks() -> [u64; KVM_ARM_FEATURE_ID_RANGE_SIZE as usize] {
        let mut masks = [0; KVM_ARM_FEATURE_ID_RANGE_SIZE as usize];
        for register in &WRITABLE {
            masks[register.crm * 8 + register.op2] = register.mask;
        }
        let [_, _, _, _, clidr] = CLIDR.parts();
        masks[COUNT + usize::from(clidr)] = u64::MAX;
        let [_, _, _, _, ctr] = CTR.parts();
        masks[2 * COUNT + usize::from(ctr)] = CTR_FLAGS | CTR_SIZES;
        for (name, mask) in IMPLEMENTATION {
            let [_, op1, _, crm, op2] = name.parts().map(usize::from);
            masks[op1 * COUNT + 8 * crm + op2] = mask;
        }
        masks
    }
}

/// Whether the register is always zero, as in KVM: ID_AFR0 and ID_DFR1, which KVM hides, and two encodings that are not
/// allocated.
fn is_hidden(place: usize) -> bool {
    matches!((place / 8, place % 8), (1, 3) | (3, 3 | 5 | 7))
}

fn is_allowed(place: usize, value: u64, limit: u64) -> bool {
    let (crm, op2) = (place / 8, place % 8);
    let found = WRITABLE.iter().find(|it| (it.crm, it.op2) == (crm, op2));
    let mask = found.map_or(0, |register| register.mask);
    let field = |word: u64, shift: u32| (word & mask) >> shift & 0xf;
    let is_debug_too_old =
        (crm, op2) == (5, 0) && value & 0xf < DEBUG_VERSION_8 && limit & 0xf >= DEBUG_VERSION_8;
    value & !mask == limit & !mask
        && !is_debug_too_old
        && (0..64).step_by(4).all(|shift| {
            is_safe(
                order(crm, op2, shift),
                field(value, shift),
                field(limit, shift),
            )
        })
}

fn is_allowed_ctr(value: u64, limit: u64) -> bool {
    let mask = CTR_FLAGS | CTR_SIZES;
    let size = |word: u64, shift: u32| word >> shift & 0xf;
    value & !mask == limit & !mask
        && value & CTR_FLAGS & !limit == 0
        && [0, 16]
            .iter()
            .all(|shift| size(value, *shift) <= size(limit, *shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feature(crm: u16, op2: u16) -> IdRegister {
        IdRegister::of(SystemName::new(3, 0, 0, crm, op2)).unwrap()
    }

    #[test]
    fn a_field_promises_less_or_as_much() {
        let mut registers = Identification::default();
        let mut set = |register, value| registers.set(register, value, false).is_ok();
        let mmfr1 = limits().get(feature(7, 1));
        // The processor's HAFDBS, the lowest field, is 2. A client may set 1.
        assert!(set(feature(7, 1), mmfr1 - 1));
        assert!(!set(feature(7, 1), mmfr1 + 1));
        // The processor's SpecSEI (bits 27:24) is 0. A greater value promises less, so a client may set it. VMIDBits
        // (bits 7:4) cannot change.
        assert!(set(feature(7, 1), mmfr1 | 1 << 24));
        assert!(!set(feature(7, 1), mmfr1 | 1 << 4));
        // TGran4 (bits 31:28) is signed: 0xf says that there is no granule of 4 KiB.
        let mmfr0 = limits().get(feature(7, 0));
        assert!(set(feature(7, 0), mmfr0 | 0xf << 28));
        assert!(!set(feature(7, 0), mmfr0 | 1 << 28));
        // TGran16_2 (bits 35:32): 1 says that stage 2 has no granule of 16 KiB.
        assert!(set(feature(7, 0), mmfr0 | 1 << 32));
        assert!(!set(feature(7, 0), mmfr0 | 2 << 32));
        // The processor's DIC is clear, so a client may not set it.
        let ctr = limits().get(IdRegister::Ctr);
        assert!(set(IdRegister::Ctr, ctr - 1));
        assert!(!set(IdRegister::Ctr, ctr | 1 << 29));
        assert!(!set(IdRegister::Ctr, ctr & !(1 << 31)));
    }

    #[test]
    fn a_register_keeps_its_value_after_a_run() {
        let mut registers = Identification::default();
        let isar0 = limits().get(feature(6, 0));
        registers
            .set(feature(6, 0), isar0 - (1 << 16), false)
            .unwrap();
        let busy = registers.set(feature(6, 0), isar0, true).unwrap_err();
        assert_eq!(busy.errno(), libc::EBUSY);
        registers
            .set(feature(6, 0), isar0 - (1 << 16), true)
            .unwrap();
        let mut state = State::reset();
        registers.apply(&mut state);
        let name = SystemName::new(3, 0, 0, 6, 0);
        assert_eq!(state.system(name), Some(isar0 - (1 << 16)));
    }

    #[test]
    fn registers_of_aarch32_are_zero_and_ignore_writes() {
        let mut registers = Identification::default();
        registers.set(feature(1, 0), 5, false).unwrap();
        assert_eq!(registers.get(feature(1, 0)), 0);
        let hidden = registers.set(feature(3, 5), 5, false).unwrap_err();
        assert_eq!(hidden.errno(), libc::EINVAL);
    }
}
