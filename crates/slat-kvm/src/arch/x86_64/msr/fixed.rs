//! MSRs that old guests and firmware access without asking CPUID. Reads return the same values as in KVM, and writes
//! have no effect.

use super::index::*;
use slat_x86::MsrFault;

/// Returns the value of an MSR with a fixed value. `None`: `index` is no MSR with a fixed value.
pub(crate) fn read(index: u32) -> Option<u64> {
    Some(match index {
        PLATFORM_ID | EBL_CR_POWERON | UCODE_WRITE | PERF_CTL => 0,
        // MSRs of performance counters, branch records and power meters. The CPU has none of these features.
        P6_PERFCTR_FIRST..=P6_PERFCTR_LAST
        | P6_EVNTSEL_FIRST..=P6_EVNTSEL_LAST
        | K7_EVNTSEL_FIRST..=K7_PERFCTR_LAST
        | LAST_BRANCH_FIRST..=LAST_BRANCH_LAST
        | RAPL_POWER_UNIT
        | PKG_ENERGY_STATUS
        | DRAM_ENERGY_STATUS
        | PP0_ENERGY_STATUS
        | PP1_ENERGY_STATUS => 0,
        AMD_SYSCFG | AMD_NB_CFG | AMD_INT_PENDING | AMD_MMIO_CONF_BASE | AMD_TSEG_ADDR
        | AMD_TSEG_MASK | VM_HSAVE_PA | AMD_DC_CFG | AMD_TW_CFG | AMD_BU_CFG2 | AMD_EX_CFG => 0,
        // Guests divide by these values, so they must not be 0. The values mean a bus of 100 MHz and the ratio 1.
        FSB_FREQ => 3,
        EBC_FREQUENCY_ID => 1 << 24,
        PERF_STATUS => 4 << 40 | 1000,
        // This value means that there is an enabled level-2 cache of 256 KiB.
        BBL_CR_CTL3 => 0xbe70_2111,
        K7_CLK_CTL => 0x2000_0000,
        _ => return None,
    })
}

/// Writes an MSR whose writes have no effect.
///
/// # Errors
/// `Unknown` for other MSRs, `Invalid` for a value that would have an effect.
pub(crate) fn write(index: u32, value: u64) -> Result<(), MsrFault> {
    match index {
        UCODE_WRITE | BBL_CR_CTL3 | K7_CLK_CTL => Ok(()),
        P6_PERFCTR_FIRST..=P6_PERFCTR_LAST
        | P6_EVNTSEL_FIRST..=P6_EVNTSEL_LAST
        | K7_EVNTSEL_FIRST..=K7_PERFCTR_LAST => Ok(()),
        AMD_NB_CFG | AMD_PATCH_LOADER | VM_HSAVE_PA | AMD_DC_CFG | AMD_TW_CFG | AMD_BU_CFG2
        | AMD_EX_CFG => Ok(()),
        AMD_MMIO_CONF_BASE if value == 0 => Ok(()),
        AMD_MMIO_CONF_BASE => Err(MsrFault::Invalid),
        _ => Err(MsrFault::Unknown),
    }
}
