//! The walk of stage 1's translation tables (DDI 0487, D8.2 and D8.3).

use super::regime::{Half, Regime};
use crate::abort::{Right, status};

/// Bits of stage 1's descriptors (D8.3).
pub(super) mod descriptor {
    pub(crate) const VALID: u64 = 1 << 0;
    /// The descriptor is a table, or at level 3 a page.
    pub(crate) const TABLE: u64 = 1 << 1;
    /// The bits of a descriptor that contain its output address.
    pub(crate) const ADDRESS: u64 = 0x0000_ffff_ffff_f000;
    pub(crate) const AP_EL0: u64 = 1 << 6;
    pub(crate) const AP_READ_ONLY: u64 = 1 << 7;
    pub(crate) const SHAREABILITY_SHIFT: u32 = 8;
    pub(crate) const ACCESS_FLAG: u64 = 1 << 10;
    pub(crate) const NOT_GLOBAL: u64 = 1 << 11;
    pub(crate) const DBM: u64 = 1 << 51;
    pub(crate) const PXN: u64 = 1 << 53;
    pub(crate) const UXN: u64 = 1 << 54;
    pub(crate) const PXN_TABLE: u64 = 1 << 59;
    pub(crate) const UXN_TABLE: u64 = 1 << 60;
    pub(crate) const AP_TABLE_NOT_EL0: u64 = 1 << 61;
    pub(crate) const AP_TABLE_READ_ONLY: u64 = 1 << 62;
}
use descriptor::{ADDRESS, TABLE, VALID};

/// Access to descriptors in memory. Their addresses are multiples of 8.
pub(crate) trait Tables {
    /// Why the machine below refuses an access.
    type Refusal;
    /// Reads a descriptor.
    fn read(&mut self, ipa: u64) -> Result<u64, Self::Refusal>;
    /// Replaces a descriptor if it equals `old`. Returns the old descriptor.
    fn replace(&mut self, ipa: u64, old: u64, new: u64) -> Result<u64, Self::Refusal>;
}

/// The reason why a translation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure<R> {
    /// Stage 1 has a fault, with this fault status code.
    Fault(u8),
    /// The machine below refuses an access to the descriptor at this address.
    Refused {
        ipa: u64,
        level: u8,
        right: Right,
        refusal: R,
    },
}

/// The descriptor that maps an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    /// The descriptor's address.
    pub(super) at: u64,
    pub(super) descriptor: u64,
    /// All table descriptors of the walk, ORed: their permission bits restrict the leaf.
    pub(super) above: u64,
    pub(super) level: u8,
    /// The logarithm of the size, in bytes, of the range that the descriptor maps.
    pub(super) bits: u32,
}

/// The lowest-numbered level at which a descriptor may map a block.
fn first_block(granule: u32) -> u32 {
    if granule == 12 { 1 } else { 2 }
}

/// Walks the tables, and returns the descriptor that maps an address.
pub(super) fn walk<T: Tables>(
    regime: &Regime,
    half: &Half,
    address: u64,
    tables: &mut T,
) -> Result<Leaf, Failure<T::Refusal>> {
    let fault = |status: u8, level: u32| Failure::Fault(status | level as u8);
    let Some(input) = half.input.filter(|_| !half.is_disabled) else {
        return Err(fault(status::TRANSLATION, 0));
    };
    if !half.contains(address, input) {
        return Err(fault(status::TRANSLATION, 0));
    }
    // `stride` is the number of address bits that each level translates. The walk starts at level `level`.
    let stride = half.granule - 3;
    let mut level = 4 - (input - half.granule).div_ceil(stride);
    let shift = |level: u32| half.granule + (3 - level) * stride;
    // A table is aligned to its size. The first table may be smaller than other tables, because fewer input bits may be
    // left to index it.
    let mut top = input;
    let mut table = half.base & !((1 << (top - shift(level) + 3)) - 1);
    let mut above = 0;
    if table >> regime.output != 0 {
        return Err(fault(status::ADDRESS_SIZE, 0));
    }
    loop {
        let shift = shift(level);
        let index = address >> shift & ((1 << (top - shift)) - 1);
        let at = table | index << 3;
        let descriptor = tables.read(at).map_err(|refusal| Failure::Refused {
            ipa: at,
            level: level as u8,
            right: Right::Read,
            refusal,
        })?;
        let is_table = descriptor & TABLE != 0 && level < 3;
        let is_leaf = match descriptor & TABLE {
            0 => level < 3 && level >= first_block(half.granule),
            _ => level == 3,
        };
        if descriptor & VALID == 0 || !(is_table || is_leaf) {
            return Err(fault(status::TRANSLATION, level));
        }
        // The address in a descriptor is aligned to the page, block or table; lower bits are ignored.
        let low = if is_leaf { shift } else { half.granule };
        let next = descriptor & ADDRESS & !((1 << low) - 1);
        if next >> regime.output != 0 {
            return Err(fault(status::ADDRESS_SIZE, level));
        }
        if is_leaf {
            return Ok(Leaf {
                at,
                descriptor,
                above,
                level: level as u8,
                bits: shift,
            });
        }
        if !half.is_flat {
            above |= descriptor;
        }
        table = next;
        top = shift;
        level += 1;
    }
}
