//! Sets of virtual processors, as hypercalls name them: by their VP index.

/// The number of virtual processors in one bank of a sparse set.
const BANK: u32 = 64;
/// The number of banks of a sparse set.
pub const BANKS: usize = 64;

/// A set of virtual processors: banks of 64, of which only some are present (`HV_GENERIC_SET_SPARSE_4K`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VpSet {
    /// The mask of the banks that are present: bit n for bank n.
    pub valid: u64,
    /// The banks that are present, in ascending order. Each bank has a bit for each of its 64 virtual processors.
    pub banks: [u64; BANKS],
}

impl VpSet {
    /// Returns the set of all virtual processors of the partition.
    pub fn all() -> Self {
        VpSet {
            valid: u64::MAX,
            banks: [u64::MAX; BANKS],
        }
    }

    /// Returns the set of those virtual processors 0 to 63 whose bit in `mask` is set.
    pub fn from_mask(mask: u64) -> Self {
        let mut banks = [0; BANKS];
        banks[0] = mask;
        VpSet { valid: 1, banks }
    }

    /// Whether the virtual processor with this index is in the set.
    pub fn contains(&self, index: u32) -> bool {
        let bank = index / BANK;
        if bank >= u64::BITS || self.valid >> bank & 1 == 0 {
            return false;
        }
        // The index in `banks` of the processor's bank: the number of present banks before it.
        let before = (self.valid & ((1 << bank) - 1)).count_ones() as usize;
        self.banks[before] >> (index % BANK) & 1 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banks_that_are_not_there_take_no_place() {
        let mut banks = [0; BANKS];
        (banks[0], banks[1]) = (1 << 5, 1 << 1 | 1 << 63);
        let set = VpSet {
            valid: 1 << 2 | 1 << 63,
            banks,
        };
        let inside: std::vec::Vec<u32> = (0..5000).filter(|index| set.contains(*index)).collect();
        assert_eq!(inside, [2 * 64 + 5, 63 * 64 + 1, 63 * 64 + 63]);
    }

    #[test]
    fn a_mask_names_the_first_64() {
        let set = VpSet::from_mask(1 << 3);
        assert!(set.contains(3) && !set.contains(67) && !set.contains(4));
        assert!((0..4096).all(|index| VpSet::all().contains(index)));
        assert!(!VpSet::from_mask(u64::MAX).contains(u32::MAX));
    }
}
