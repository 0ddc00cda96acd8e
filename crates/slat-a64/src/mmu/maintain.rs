//! Cache maintenance, TLBI, AT, and writes to the registers that control translation.

use super::{Mmu, Request, accessor};
use crate::abort::{Fault, Right};
use crate::hypervisor::Hypervisor;
use crate::insn::SystemName;
use crate::memory::{AddressTranslation, Invalidation, Machine, Maintenance};
use crate::stage1::{Accessor, Want};
use crate::state::State;
use crate::tier::Kind;

/// Fields of PAR_EL1, in this order: F; the position of FST; RES1; NS, which is UNKNOWN outside of Secure state and set
/// here, as in Arm's and other implementations; the positions of SH and ATTR; the address.
const PAR_F: u64 = 1 << 0;
const PAR_STATUS_SHIFT: u32 = 1;
const PAR_ONE: u64 = 1 << 11;
const PAR_NS: u64 = 1 << 9;
const PAR_SH_SHIFT: u32 = 7;
const PAR_ATTR_SHIFT: u32 = 56;
const PAR_ADDRESS: u64 = 0x0000_ffff_ffff_f000;

impl<H: Hypervisor> Mmu<'_, H> {
    /// Checks that the guest may maintain caches at an address. For IC IVAU, also drops the decoded code of this
    /// address.
    ///
    /// At EL1, the address must be mapped, without a needed right; at EL0 it must be readable. DC IVAC needs the right
    /// to write.
    pub(super) fn maintain_caches(
        &mut self,
        state: &State,
        maintenance: Maintenance,
        address: u64,
    ) -> Result<(), Fault<H::Fault>> {
        let request = Request {
            reported: None,
            want: Want {
                accessor: accessor(state, Kind::Ordinary),
                right: match (maintenance, state.pstate().el1) {
                    (Maintenance::Invalidate, _) => Some(Right::Write),
                    (_, false) => Some(Right::Read),
                    (_, true) => None,
                },
                updates: false,
            },
            is_maintenance: true,
            is_atomic: false,
        };
        if maintenance != Maintenance::Code {
            return self.stage1(state, address, &request).map(|_| ());
        }
        let at = self.place(state, address, &request)?.at;
        let invalidation = Invalidation::CodeLine(at);
        self.caches.invalidate(invalidation);
        self.caches.shared = Some(invalidation);
        Ok(())
    }
}

/// The name of ISR_EL1. Its value is in [`Caches`](crate::caches::Caches).
const ISR: SystemName = SystemName::new(3, 0, 12, 1, 0);

impl<H: Hypervisor> Machine for Mmu<'_, H> {
    fn read_system(&mut self, state: &State, name: SystemName) -> Option<u64> {
        if name == ISR {
            return state.pstate.el1.then_some(self.caches.pending);
        }
        self.below.read_system(state, name)
    }

    fn write_system(&mut self, state: &State, name: SystemName, value: u64) -> Option<()> {
        self.below.write_system(state, name, value)
    }

    fn system_written(&mut self, state: &State, name: SystemName) {
        self.caches.register_written(&state.system, name);
    }

    fn translate_address(
        &mut self,
        state: &State,
        translation: AddressTranslation,
        address: u64,
    ) -> Result<Option<u64>, Fault<H::Fault>> {
        let request = Request {
            reported: None,
            want: Want {
                accessor: match (translation.for_el0, translation.with_pan) {
                    (true, _) => Accessor::El0,
                    (false, true) => Accessor::El1WithPan,
                    (false, false) => Accessor::El1,
                },
                right: Some(match translation.is_write {
                    true => Right::Write,
                    false => Right::Read,
                }),
                updates: false,
            },
            is_maintenance: true,
            is_atomic: false,
        };
        let par = match self.stage1(state, address, &request) {
            Ok(translated) => {
                PAR_ONE
                    | PAR_NS
                    | translated.ipa & PAR_ADDRESS
                    | u64::from(translated.memory.shareability) << PAR_SH_SHIFT
                    | u64::from(translated.memory.attribute) << PAR_ATTR_SHIFT
            }
            Err(Fault::Stage1(abort)) => {
                PAR_ONE | PAR_F | u64::from(abort.status) << PAR_STATUS_SHIFT
            }
            Err(refused) => return Err(refused),
        };
        Ok(Some(par))
    }

    fn invalidate(&mut self, _: &State, invalidation: Invalidation, is_shared: bool) {
        self.caches.invalidate(invalidation);
        if is_shared {
            self.caches.shared = Some(invalidation);
        }
    }
}
