//! The parameters of the EL1&0 translation regime, as EL1's system registers define them (DDI 0487, D8.2).

use crate::registers::{
    MAIR, SCTLR, SCTLR_I, SCTLR_M, SCTLR_WXN, TCR, TCR_A1, TCR_AS, TCR_HA, TCR_HD, TCR_IPS_SHIFT,
    TTBR0, TTBR1, Values,
};

/// The number of bits of output addresses: ID_AA64MMFR0_EL1.PARange says 48.
pub(super) const MAX_OUTPUT: u32 = 48;
/// The least and the greatest TxSZ (FEAT_LVA and FEAT_TTST are absent).
const TXSZ: core::ops::RangeInclusive<u64> = 16..=39;

/// The settings of the EL1&0 translation regime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Regime {
    /// SCTLR_EL1.M: whether stage 1 translation is enabled.
    pub(crate) is_enabled: bool,
    /// SCTLR_EL1.I: instructions are cacheable while stage 1 is disabled.
    pub(crate) caches_instructions: bool,
    /// SCTLR_EL1.WXN: writable pages cannot be executed.
    pub(crate) wxn: bool,
    /// TCR_EL1.HA: the processor sets access flags.
    pub(crate) sets_access_flag: bool,
    /// TCR_EL1.HD, if HA is set: a write by the processor makes a read-only page with DBM writable.
    pub(crate) sets_dirty: bool,
    /// The number of bits of output addresses.
    pub(crate) output: u32,
    mair: u64,
    tcr: u64,
    tables: [u64; 2],
}

/// Translation of one half of the address space: by TTBR0_EL1, or by TTBR1_EL1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Half {
    /// TTBRn_EL1 without the ASID: the address of the first table.
    pub(crate) base: u64,
    /// The base-2 logarithm of the granule's size in bytes.
    pub(crate) granule: u32,
    /// The number of address bits that are translated. `None`: TxSZ has an unsupported value.
    pub(crate) input: Option<u32>,
    /// TCR_EL1.EPD: all walks with this table base register fail.
    pub(crate) is_disabled: bool,
    /// HPD: the permissions in table descriptors have no effect.
    pub(crate) is_flat: bool,
    /// TBI: the top byte of addresses is ignored.
    pub(crate) has_tags: bool,
    /// The value that all address bits above the input bits must have.
    pub(crate) is_upper: bool,
}

/// Whether bit `n` of `value` is set.
fn bit(value: u64, n: u32) -> bool {
    value >> n & 1 != 0
}

/// Replaces the tag of an address, its top byte, by copies of bit 55.
fn untagged(address: u64) -> u64 {
    (address << 8) as i64 as u64 >> 8 | if bit(address, 55) { 0xff << 56 } else { 0 }
}

impl Regime {
    pub(crate) fn of(system: &Values) -> Self {
        let (sctlr, tcr) = (system.get(SCTLR), system.get(TCR));
        let sets_access_flag = tcr & TCR_HA != 0;
        // Reserved values mean the greatest size.
        let output = match tcr >> TCR_IPS_SHIFT & 7 {
            0 => 32,
            1 => 36,
            2 => 40,
            3 => 42,
            4 => 44,
            _ => MAX_OUTPUT,
        };
        Self {
            is_enabled: sctlr & SCTLR_M != 0,
            caches_instructions: sctlr & SCTLR_I != 0,
            wxn: sctlr & SCTLR_WXN != 0,
            sets_access_flag,
            sets_dirty: sets_access_flag && tcr & TCR_HD != 0,
            output,
            mair: system.get(MAIR),
            tcr,
            tables: [system.get(TTBR0), system.get(TTBR1)],
        }
    }

    /// Returns the attribute of MAIR_EL1 with this index.
    pub(crate) fn attribute(&self, index: u64) -> u8 {
        (self.mair >> (index * 8)) as u8
    }

    /// Whether the top byte of addresses is ignored (TBI), in the upper or in the lower half of the address space.
    fn has_tags(&self, is_upper: bool) -> bool {
        bit(self.tcr, 37 + u32::from(is_upper))
    }

    /// Returns the half of the address space that contains an address. Bit 55 selects the half, even without TBI.
    pub(crate) fn half(&self, address: u64) -> Half {
        let is_upper = bit(address, 55);
        let tcr = self.tcr;
        let (size, granule) = match is_upper {
            false => (tcr & 0x3f, tcr >> 14 & 3),
            true => (tcr >> 16 & 0x3f, tcr >> 30 & 3),
        };
        // A reserved value means a granule of 4 KiB.
        let granule = match (is_upper, granule) {
            (false, 1) | (true, 3) => 16,
            (false, 2) | (true, 1) => 14,
            _ => 12,
        };
        let n = u32::from(is_upper);
        Half {
            base: self.tables[n as usize] & ((1 << MAX_OUTPUT) - 1),
            granule,
            input: TXSZ.contains(&size).then_some(64 - size as u32),
            is_disabled: bit(tcr, 7 + 16 * n),
            is_flat: bit(tcr, 41 + n),
            has_tags: self.has_tags(is_upper),
            is_upper,
        }
    }

    /// Returns an address without its tag, if TBI is set for its half.
    pub(crate) fn canonical(&self, address: u64) -> u64 {
        match self.has_tags(bit(address, 55)) {
            true => untagged(address),
            false => address,
        }
    }
}

/// Returns the current ASID.
pub(crate) fn asid(system: &Values) -> u16 {
    let tcr = system.get(TCR);
    let table = if tcr & TCR_A1 != 0 { TTBR1 } else { TTBR0 };
    let asid = (system.get(table) >> 48) as u16;
    if tcr & TCR_AS != 0 { asid } else { asid & 0xff }
}

impl Half {
    /// Whether an address is in the range that this half translates. `input`: the number of input bits.
    pub(crate) fn contains(&self, address: u64, input: u32) -> bool {
        let address = match self.has_tags {
            true => untagged(address),
            false => address,
        };
        let above = (address as i64 >> input) as u64;
        above == if self.is_upper { u64::MAX } else { 0 }
    }
}
