//! PSTATE, and its form in SPSR_EL1 (DDI 0487, C5.2.19).

/// The bits of the field DAIF, as in the operand of MSR DAIFSet.
pub const MASK_DEBUG: u8 = 8;
#[allow(missing_docs)]
pub const MASK_SERROR: u8 = 4;
#[allow(missing_docs)]
pub const MASK_IRQ: u8 = 2;
#[allow(missing_docs)]
pub const MASK_FIQ: u8 = 1;

/// Bits of SPSR_EL1.
const DIT: u64 = 1 << 24;
const PAN: u64 = 1 << 22;
pub(crate) const SS: u64 = 1 << 21;
const IL: u64 = 1 << 20;
const DAIF_SHIFT: u32 = 6;
/// Bits of the mode field. Bit 4 means AArch32, which this processor does not have. The next two constants are the bits
/// for EL1, and for its own stack pointer. The last constant is the whole field.
const AARCH32: u64 = 1 << 4;
const EL1: u64 = 1 << 2;
const OWN_STACK: u64 = 1 << 0;
const MODE: u64 = 0x1f;

/// PSTATE without the flags N, Z, C, V.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pstate {
    /// Whether the exception level is EL1. Otherwise it is EL0.
    pub el1: bool,
    /// SP: whether EL1 uses its own stack pointer, SP_EL1.
    pub own_stack: bool,
    /// The masks D, A, I, F.
    pub daif: u8,
    /// PAN: EL1 may not access data that EL0 may access.
    pub pan: bool,
    /// DIT: data-independent timing. It has no effect on this CPU.
    pub dit: bool,
    /// IL: whether the processor is in the illegal execution state.
    pub il: bool,
    /// SS: software step executes an instruction before it raises its exception.
    pub ss: bool,
}

impl Pstate {
    /// Returns this PSTATE in the form of SPSR_EL1, without the flags N, Z, C, V.
    pub fn bits(self) -> u64 {
        let bit = |is: bool, bit: u64| if is { bit } else { 0 };
        bit(self.dit, DIT)
            | bit(self.pan, PAN)
            | bit(self.il, IL)
            | bit(self.ss, SS)
            | u64::from(self.daif) << DAIF_SHIFT
            | bit(self.el1, EL1)
            | bit(self.own_stack, OWN_STACK)
    }

    /// Returns the PSTATE after an exception return with this SPSR_EL1. SS is clear in it. `None`: the return is
    /// illegal.
    pub fn returned(bits: u64) -> Option<Self> {
        let mode = bits & MODE;
        if mode & AARCH32 != 0 || !matches!(mode, 0 | EL1 | 0b101) {
            return None;
        }
        Some(Self {
            el1: mode & EL1 != 0,
            own_stack: mode & OWN_STACK != 0,
            ..Self::unprivileged(bits)
        })
    }

    /// Returns the fields of SPSR_EL1 except the exception level and the stack pointer, as a PSTATE of EL0.
    fn unprivileged(bits: u64) -> Self {
        Self {
            el1: false,
            own_stack: false,
            daif: (bits >> DAIF_SHIFT & 15) as u8,
            pan: bits & PAN != 0,
            dit: bits & DIT != 0,
            il: bits & IL != 0,
            ss: false,
        }
    }

    /// Returns the PSTATE after an illegal exception return with SPSR_EL1 `bits` (SetPSTATEFromPSR). The exception
    /// level, the stack pointer, PAN and similar fields keep their values.
    pub fn returned_illegally(self, bits: u64) -> Self {
        let returned = Self::unprivileged(bits);
        Self {
            daif: returned.daif,
            il: true,
            ..self
        }
    }
}
