//! The architectural state of a processor.

/// The flags N, Z, C, V in bits 31 to 28, as in NZCV and SPSR_EL1.
pub const NZCV_SHIFT: u32 = 28;

/// The address and the value of the last exclusive load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exclusive {
    /// The virtual address.
    pub address: u64,
    /// The logarithm of the number of bytes.
    pub size: u8,
    /// What was loaded.
    pub value: u128,
}

/// The registers of a processor at EL0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// X0 to X30.
    pub x: [u64; 31],
    /// The stack pointer.
    pub sp: u64,
    /// The address of the next instruction.
    pub pc: u64,
    /// N, Z, C, V.
    pub flags: [bool; 4],
    /// V0 to V31.
    pub v: [u128; 32],
    /// FPCR.
    pub fpcr: u32,
    /// FPSR.
    pub fpsr: u32,
    /// TPIDR_EL0.
    pub tpidr: u64,
    /// TPIDRRO_EL0, which EL0 only reads.
    pub tpidr_read_only: u64,
    /// PSTATE.DIT, which changes nothing here.
    pub data_independent_timing: bool,
    /// The local monitor of exclusive accesses.
    pub exclusive: Option<Exclusive>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            x: [0; 31],
            sp: 0,
            pc: 0,
            flags: [false; 4],
            v: [0; 32],
            fpcr: 0,
            fpsr: 0,
            tpidr: 0,
            tpidr_read_only: 0,
            data_independent_timing: false,
            exclusive: None,
        }
    }
}

impl State {
    /// Returns N, Z, C, V in bits 31 to 28.
    pub fn nzcv(&self) -> u32 {
        let bits = self
            .flags
            .iter()
            .fold(0, |bits, flag| bits << 1 | u32::from(*flag));
        bits << NZCV_SHIFT
    }

    /// Sets N, Z, C, V from bits 31 to 28.
    pub fn set_nzcv(&mut self, value: u32) {
        self.flags = core::array::from_fn(|i| value >> (31 - i) & 1 != 0);
    }
}
