//! Stage 1 of the EL1&0 translation regime (VMSAv8-64; DDI 0487, D8): from a virtual to an intermediate physical
//! address, with permissions, memory attributes, and hardware updates of access flag and dirty state.
//!
//! [`translate`] is called for every access that misses the TLB, for cache maintenance, and for the AT instructions.
//! Module [`walk`] walks the tables.
//!
//! The contiguous hint has no effect: each descriptor of a contiguous range makes a translation of its own, as the
//! architecture permits, and TLBI by address drops only the translation of that address.

pub(crate) mod regime;
mod walk;

pub(crate) use walk::{Failure, Tables};

use crate::abort::{Right, status};
use regime::Regime;
use walk::descriptor::{
    ACCESS_FLAG, ADDRESS, AP_EL0, AP_READ_ONLY, AP_TABLE_NOT_EL0, AP_TABLE_READ_ONLY, DBM,
    NOT_GLOBAL, PXN, PXN_TABLE, SHAREABILITY_SHIFT, UXN, UXN_TABLE,
};
use walk::{Leaf, walk};

/// Whose rights an access has: the exception level, and at EL1 PSTATE.PAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Accessor {
    El0,
    El1,
    /// EL1 with PSTATE.PAN set.
    El1WithPan,
}

/// An access to translate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Want {
    pub(crate) accessor: Accessor,
    /// The right that the access needs. `None`: the address only has to be mapped.
    pub(crate) right: Option<Right>,
    /// Whether the access updates the access flag and the dirty state. Cache maintenance and AT do not update them.
    pub(crate) updates: bool,
}

/// Outer Shareable: the shareability of Device memory, and of Normal memory that is not cached.
const OUTER: u8 = 0b10;

/// The memory type of a translation, as in PAR_EL1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// The attribute byte, as in MAIR_EL1.
    pub(crate) attribute: u8,
    pub(crate) shareability: u8,
}

impl Memory {
    /// Device-nGnRnE.
    const DEVICE: Memory = Memory {
        attribute: 0,
        shareability: OUTER,
    };

    fn new(attribute: u8, shareability: u8) -> Self {
        // Normal memory, Inner and Outer Non-cacheable.
        const UNCACHED: u8 = 0x44;
        let shareability = match attribute {
            0..=0x0f | UNCACHED => OUTER,
            _ => shareability,
        };
        Self {
            attribute,
            shareability,
        }
    }

    /// Whether the memory is Device memory. Accesses to it must be aligned.
    pub(crate) fn is_device(self) -> bool {
        self.attribute & 0xf0 == 0
    }
}

/// The result of a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Translated {
    /// The intermediate physical address.
    pub(crate) ipa: u64,
    /// The accesses that this translation allows. If a write must first set the page's dirty state, `write` is false,
    /// and the write needs a translation of its own.
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) execute: bool,
    pub(crate) memory: Memory,
    /// The logarithm of the size, in bytes, of the range that the descriptor maps.
    pub(crate) bits: u32,
    /// The translation is valid under every ASID.
    pub(crate) is_global: bool,
}

/// Returns the accessor's rights: read, write, execute (AArch64.S1DirectBasePermissions).
fn rights(regime: &Regime, leaf: &Leaf, accessor: Accessor) -> [bool; 3] {
    let has = |bit: u64| leaf.descriptor & bit != 0;
    let is_below = |bit: u64| leaf.above & bit != 0;
    let for_el0 = has(AP_EL0) && !is_below(AP_TABLE_NOT_EL0);
    // With HD and DBM, a write makes a read-only page writable, so it is allowed.
    let is_dirty = !has(AP_READ_ONLY) || (regime.sets_dirty && has(DBM));
    let writable = is_dirty && !is_below(AP_TABLE_READ_ONLY);
    let [uxn, pxn] =
        [(UXN, UXN_TABLE), (PXN, PXN_TABLE)].map(|(at, above)| has(at) || is_below(above));
    let (data, never) = match accessor {
        Accessor::El0 => (for_el0, uxn),
        // EL1 may not execute a page that EL0 may write.
        Accessor::El1 => (true, pxn || (for_el0 && writable)),
        Accessor::El1WithPan => (!for_el0, pxn || (for_el0 && writable)),
    };
    let write = data && writable;
    [data, write, !(never || (regime.wxn && write))]
}

/// Translates an address while stage 1 is disabled (AArch64.S1DisabledOutput).
fn untranslated<R>(regime: &Regime, address: u64, want: &Want) -> Result<Translated, Failure<R>> {
    // If TBI is set, the top byte of the address is ignored.
    let ipa = match regime.half(address).has_tags {
        true => address << 8 >> 8,
        false => address,
    };
    if ipa >> regime::MAX_OUTPUT != 0 {
        return Err(Failure::Fault(status::ADDRESS_SIZE));
    }
    // Instructions are cacheable (write-through) if SCTLR_EL1.I is set, else not cacheable.
    let memory = match (want.right, regime.caches_instructions) {
        (Some(Right::Execute), true) => Memory::new(0xaa, OUTER),
        (Some(Right::Execute), false) => Memory::new(0x44, OUTER),
        _ => Memory::DEVICE,
    };
    Ok(Translated {
        ipa,
        read: true,
        write: true,
        execute: true,
        memory,
        bits: regime::MAX_OUTPUT,
        is_global: true,
    })
}

/// Translates the address of an access, checks its right, and updates the access flag and the dirty state.
pub(crate) fn translate<T: Tables>(
    regime: &Regime,
    address: u64,
    want: &Want,
    tables: &mut T,
) -> Result<Translated, Failure<T::Refusal>> {
    if !regime.is_enabled {
        return untranslated(regime, address, want);
    }
    let half = regime.half(address);
    loop {
        let leaf = walk(regime, &half, address, tables)?;
        let fault = |status: u8| Err(Failure::Fault(status | leaf.level));
        let descriptor = leaf.descriptor;
        if descriptor & ACCESS_FLAG == 0 && !regime.sets_access_flag {
            return fault(status::ACCESS_FLAG);
        }
        let [read, write, execute] = rights(regime, &leaf, want.accessor);
        let is_allowed = match want.right {
            None => true,
            Some(Right::Read) => read,
            Some(Right::Write) => write,
            Some(Right::Execute) => execute,
        };
        if !is_allowed {
            return fault(status::PERMISSION);
        }
        let mut new = descriptor;
        if want.updates {
            new |= ACCESS_FLAG;
            if want.right == Some(Right::Write) {
                new &= !AP_READ_ONLY;
            }
        }
        if new != descriptor {
            let found = tables.replace(leaf.at, descriptor, new);
            let found = found.map_err(|refusal| Failure::Refused {
                ipa: leaf.at,
                level: leaf.level,
                right: Right::Write,
                refusal,
            })?;
            // Another processor has changed the descriptor since the walk read it, so translate again.
            if found != descriptor {
                continue;
            }
        }
        let within = (1 << leaf.bits) - 1;
        return Ok(Translated {
            ipa: descriptor & ADDRESS & !within | address & within,
            read,
            write: write && new & AP_READ_ONLY == 0,
            execute,
            memory: Memory::new(
                regime.attribute(descriptor >> 2 & 7),
                (descriptor >> SHAREABILITY_SHIFT & 3) as u8,
            ),
            bits: leaf.bits,
            is_global: descriptor & NOT_GLOBAL == 0,
        });
    }
}
