//! The registers that only GICv3 has: routes of SPIs, and redistributors.

use super::region::{Register, part, replace};
use crate::gic::Gic;
use crate::identity::{IMPLEMENTER, PRODUCT, PRODUCT_SHIFT};
use crate::memory::Memory;

/// GICR_CTLR.EnableLPIs: the LPIs of the vCPU are enabled.
const ENABLE_LPIS: u64 = 1 << 0;
/// GICR_CTLR.CES and GICR_CTLR.IR: LPIs can be disabled again, and invalidated by registers.
const CAN_DISABLE_AND_INVALIDATE: u64 = 1 << 1 | 1 << 2;
/// The first revision in GICD_IIDR with which GICR_CTLR has the bits CES and IR.
const INVALIDATE_REVISION: u8 = 3;

/// Fields of GICR_TYPER.
const TYPER_LPIS: u64 = 1 << 0;
const TYPER_LAST: u64 = 1 << 4;
const TYPER_NUMBER_SHIFT: u32 = 8;
const TYPER_AFFINITY_SHIFT: u32 = 32;

/// The offset of GICD_PIDR2 and GICR_PIDR2, and the architecture's version 3 in them.
const PIDR2: u32 = 0xffe8;
const PIDR2_VALUE: u64 = 0x3b;

/// The fields of an affinity in GICD_IROUTER: Aff0 to Aff2. Aff3 does not exist, as GICD_TYPER.A3V says.
const ROUTE: u32 = 0x00ff_ffff;

/// For GICR_PROPBASER and GICR_PENDBASER: masks of the bits that do not exist, and fields.
const PROPBASER_MISSING: u64 = 0x1f << 59 | 0xf << 52 | 3 << 5;
const PENDBASER_MISSING: u64 = 1 << 63 | 7 << 59 | 0xf << 52 | 0xf << 12 | 0x7f;
const PENDING_TABLE_ZERO: u64 = 1 << 62;
const REDISTRIBUTOR_INNER_SHIFT: u32 = 7;
const REDISTRIBUTOR_OUTER_SHIFT: u32 = 56;
const SHAREABILITY_SHIFT: u32 = 10;

/// Replaces the shareability and the cacheability in `value`, a register with the address of a table, by those that
/// KVM's guests get: nothing is outer shareable or uncached. `inner` and `outer` are the positions of the cacheability
/// fields.
pub(crate) fn with_attributes(value: u64, inner: u32, outer: u32) -> u64 {
    let with = |value: u64, shift: u32, mask: u64, choose: fn(u64) -> u64| {
        value & !(mask << shift) | choose(value >> shift & mask) << shift
    };
    let value = with(value, SHAREABILITY_SHIFT, 3, |field| match field {
        2 => 1,
        _ => field,
    });
    // Device memory and uncached memory become write-back.
    let value = with(value, inner, 7, |field| match field {
        0 | 1 => 3,
        _ => field,
    });
    // An outer cacheability of 1 (not cacheable) stays; any other value becomes 0, the same as the inner cacheability.
    with(value, outer, 7, |field| match field {
        1 => 1,
        _ => 0,
    })
}

impl Gic {
    /// Reads GICD_IROUTER. Aff3 and the routing mode read as zero: an SPI goes to the one vCPU of its affinity, as in
    /// KVM.
    pub(super) fn read_route(&self, intid: u32, offset: u32, width: usize) -> u64 {
        let route = self.interrupt(0, intid).map_or(0, |spi| spi.route);
        part(route.into(), offset, width)
    }

    /// Writes GICD_IROUTER. If no vCPU has the affinity, the SPI has no target.
    pub(super) fn write_route(&mut self, intid: u32, offset: u32, value: u64) {
        if offset & 4 != 0 {
            return;
        }
        let route = value as u32 & ROUTE;
        let target = self.vcpu_of(route);
        self.change(0, intid, |spi| {
            spi.route = route;
            spi.target = target;
        });
    }

    /// Reads a register of the redistributor of a vCPU.
    pub(super) fn read_redistributor(
        &self,
        vcpu: usize,
        register: Register,
        offset: u32,
        width: usize,
    ) -> u64 {
        let state = &self.vcpus[vcpu];
        match register {
            Register::Control => {
                let enable = if state.lpis_enabled { ENABLE_LPIS } else { 0 };
                match self.revision >= INVALIDATE_REVISION {
                    true => enable | CAN_DISABLE_AND_INVALIDATE,
                    false => enable,
                }
            }
            Register::Implementer => u64::from(PRODUCT << PRODUCT_SHIFT | IMPLEMENTER),
            Register::Type => {
                let lpis = if self.has_its { TYPER_LPIS } else { 0 };
                let last = if state.is_last { TYPER_LAST } else { 0 };
                let number = u64::from(state.name.id & 0xffff) << TYPER_NUMBER_SHIFT;
                let affinity = u64::from(state.name.affinity & ROUTE) << TYPER_AFFINITY_SHIFT;
                part(affinity | number | lpis | last, offset, width)
            }
            Register::ConfigurationTable => part(self.propbaser, offset, width),
            Register::PendingTable => part(state.pendbaser & !PENDING_TABLE_ZERO, offset, width),
            _ => 0,
        }
    }

    /// Writes a register of the redistributor of a vCPU.
    pub(super) fn write_redistributor(
        &mut self,
        vcpu: usize,
        register: Register,
        offset: u32,
        width: usize,
        value: u64,
        memory: &impl Memory,
    ) {
        let lpis_enabled = self.vcpus[vcpu].lpis_enabled;
        let (inner, outer) = (REDISTRIBUTOR_INNER_SHIFT, REDISTRIBUTOR_OUTER_SHIFT);
        // The upper halves of the registers that invalidate concern virtual processors, which do not exist.
        let is_lower = offset & 4 == 0;
        match register {
            Register::Control if self.has_its => {
                self.enable_lpis(vcpu, value & ENABLE_LPIS != 0, memory);
            }
            // All redistributors share one configuration table. While LPIs are enabled, neither the address of the
            // configuration table nor that of the pending table can change.
            Register::ConfigurationTable if !lpis_enabled => {
                let new = replace(self.propbaser, offset, width, value);
                self.propbaser = with_attributes(new, inner, outer) & !PROPBASER_MISSING;
            }
            Register::PendingTable if !lpis_enabled => {
                let new = replace(self.vcpus[vcpu].pendbaser, offset, width, value);
                let new = with_attributes(new, inner, outer) & !PENDBASER_MISSING;
                self.vcpus[vcpu].pendbaser = new;
            }
            // If an LPI's configuration is not in memory, the LPI keeps its earlier configuration.
            Register::InvalidateLpi if lpis_enabled && is_lower => {
                let _ = self.reload_lpi(value as u32, memory);
            }
            Register::InvalidateAll if lpis_enabled && is_lower => self.reload_lpis(vcpu, memory),
            _ => (),
        }
    }
}

/// Reads GICD_PIDR2 or GICR_PIDR2. The other identification registers read as zero, as in KVM.
pub(super) fn identification(offset: u32) -> u64 {
    match offset {
        PIDR2 => PIDR2_VALUE,
        _ => 0,
    }
}
