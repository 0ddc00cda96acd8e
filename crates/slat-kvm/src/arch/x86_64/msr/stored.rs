//! The MSRs whose only effect is to store a value.

use super::index::*;

/// The values of the MSRs whose only effect is to store a value.
#[derive(Clone, Debug)]
pub(crate) struct Stored([Option<u64>; Stored::LEN]);

impl Stored {
    const ONE_BY_ONE: [u32; 20] = [
        FEATURE_CONTROL,
        ARCH_CAPABILITIES,
        TSC_ADJUST,
        PLATFORM_INFO,
        MISC_FEATURES,
        MISC_ENABLE,
        DEBUGCTL,
        MTRR_DEF_TYPE,
        KVM_WALL_CLOCK_NEW,
        KVM_SYSTEM_TIME_NEW,
        AMD_HWCR,
        POWER_CTL,
        SMI_COUNT,
        UCODE_REV,
        KVM_STEAL_TIME,
        KVM_PV_EOI,
        KVM_ASYNC_PF_EN,
        KVM_ASYNC_PF_INT,
        SPEC_CTRL,
        AMD_VIRT_SPEC_CTRL,
    ];
    /// The MSRs of the memory type ranges (MTRRs): ranges of consecutive numbers.
    const RANGES: [(u32, u32); 4] = [
        (MTRR_PHYS_FIRST, MTRR_PHYS_LAST),
        (MTRR_FIX_64K, MTRR_FIX_64K),
        (MTRR_FIX_16K, MTRR_FIX_16K_LAST),
        (MTRR_FIX_4K, MTRR_FIX_4K_LAST),
    ];
    const LEN: usize = Self::ONE_BY_ONE.len() + 16 + 1 + 2 + 8;

    fn place(index: u32) -> Option<usize> {
        if let Some(place) = Self::ONE_BY_ONE.iter().position(|known| *known == index) {
            return Some(place);
        }
        let mut place = Self::ONE_BY_ONE.len();
        for (first, last) in Self::RANGES {
            if (first..=last).contains(&index) {
                return Some(place + (index - first) as usize);
            }
            place += (last - first) as usize + 1;
        }
        None
    }

    /// Returns the value that was stored last. `None` before the first store, and for MSRs that do more than store a
    /// value.
    pub(crate) fn get(&self, index: u32) -> Option<u64> {
        self.0[Self::place(index)?]
    }

    /// Stores the value of the MSR `index`.
    ///
    /// # Panics
    /// The method panics if `index` is not among the MSRs whose only effect is to store a value.
    pub(crate) fn set(&mut self, index: u32, value: u64) {
        let place = Self::place(index).expect("an MSR that is stored has a place");
        self.0[place] = Some(value);
    }
}

impl Default for Stored {
    fn default() -> Self {
        Stored([None; Self::LEN])
    }
}
