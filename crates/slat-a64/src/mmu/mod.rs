//! The memory that a processor sees by virtual addresses: stage 1, its TLB, and the machine below.
//!
//! If the TLB has the page, an access is one call of the machine. Otherwise [`Mmu::place`] translates all pages of the
//! access before the first byte is accessed.

mod access;
mod maintain;

use crate::abort::{Abort, Fault, Right, Stage2, status};
use crate::caches::Caches;
use crate::code;
use crate::decode::decode;
use crate::hypervisor::Hypervisor;
use crate::insn::Order;
use crate::registers::{SCTLR, SCTLR_A};
use crate::stage1::regime::Regime;
use crate::stage1::{Accessor, Failure, Tables, Translated, Want, translate};
use crate::state::State;
use crate::tier::{Access, Kind};
use crate::tlb;

const PAGE: u64 = 1 << tlb::PAGE_BITS;

/// A processor's translations and decoded code, and the machine below, for the time of a run.
pub(crate) struct Mmu<'a, H> {
    pub(crate) caches: &'a mut Caches,
    pub(crate) below: &'a mut H,
}

/// Where the part of an access in one page is.
#[derive(Clone, Copy)]
struct Place {
    /// The address in the machine's memory.
    at: u64,
    ipa: u64,
    is_device: bool,
}

/// What decides which faults an access can have.
#[derive(Clone, Copy)]
struct Request {
    /// The address that an abort reports. `None`: an abort reports the address that was translated.
    reported: Option<u64>,
    want: Want,
    /// The access belongs to a cache maintenance instruction or AT.
    is_maintenance: bool,
    /// The instruction both reads and writes. A fault that a read would have, too, is reported as a read's.
    is_atomic: bool,
}

/// Accesses to descriptors in the memory of the machine below.
struct Below<'a, H>(&'a mut H);

impl<H: Hypervisor> Tables for Below<'_, H> {
    type Refusal = H::Fault;

    fn read(&mut self, ipa: u64) -> Result<u64, H::Fault> {
        let page = self.0.page(ipa, Right::Read)?;
        self.0.load(page.base + ipa % PAGE, 3, Order::default())
    }
    fn replace(&mut self, ipa: u64, old: u64, new: u64) -> Result<u64, H::Fault> {
        let page = self.0.page(ipa, Right::Write)?;
        let at = page.base + ipa % PAGE;
        let values = [old, new].map(u128::from);
        let found = self.0.compare_exchange(at, 3, values, Order::default());
        found.map(|found| found as u64)
    }
}

/// Translates an address like a read by EL1, but changes no flags in the tables.
pub(crate) fn peek<H: Hypervisor>(state: &State, below: &mut H, address: u64) -> Option<u64> {
    let want = Want {
        accessor: Accessor::El1,
        right: None,
        updates: false,
    };
    let regime = Regime::of(&state.system);
    let translated = translate(&regime, address, &want, &mut Below(below)).ok()?;
    Some(translated.ipa)
}

/// Returns whose rights an access of this kind has.
#[inline(always)]
pub(crate) fn accessor(state: &State, kind: Kind) -> Accessor {
    let pstate = state.pstate();
    match (pstate.el1 && kind != Kind::Unprivileged, pstate.pan) {
        (false, _) => Accessor::El0,
        (true, false) => Accessor::El1,
        (true, true) => Accessor::El1WithPan,
    }
}

impl<H: Hypervisor> Mmu<'_, H> {
    /// Translates an address by stage 1 (AArch64.TranslateAddress).
    fn stage1(
        &mut self,
        state: &State,
        address: u64,
        request: &Request,
    ) -> Result<Translated, Fault<H::Fault>> {
        let regime = Regime::of(&state.system);
        let failure = match translate(&regime, address, &request.want, &mut Below(self.below)) {
            Ok(translated) => return Ok(translated),
            Err(failure) => failure,
        };
        let reported = request.reported.unwrap_or(address);
        let is_write = request.is_write();
        Err(match failure {
            Failure::Fault(status) => Fault::Stage1(Abort {
                address: reported,
                status,
                is_write,
                is_maintenance: request.is_maintenance,
            }),
            Failure::Refused {
                ipa,
                level,
                right,
                refusal,
            } => Fault::Stage2(Stage2 {
                address: reported,
                ipa,
                right,
                is_write,
                is_walk: true,
                is_fetch: request.want.right == Some(Right::Execute),
                level,
                is_maintenance: request.is_maintenance,
                reason: refusal,
            }),
        })
    }

    /// Describes an access that the machine below has refused.
    fn refused(address: u64, ipa: u64, request: &Request, reason: H::Fault) -> Fault<H::Fault> {
        Fault::Stage2(Stage2 {
            address: request.reported.unwrap_or(address),
            ipa,
            right: request.want.right.unwrap_or(Right::Read),
            is_write: request.is_write(),
            is_walk: false,
            is_fetch: request.want.right == Some(Right::Execute),
            level: 0,
            is_maintenance: request.is_maintenance,
            reason,
        })
    }

    /// Translates an address by stage 1 and asks the machine for the page. Enters the page into the TLB.
    fn place_once(
        &mut self,
        state: &State,
        address: u64,
        request: &Request,
    ) -> Result<Place, Fault<H::Fault>> {
        let translated = self.stage1(state, address, request)?;
        let ipa = translated.ipa;
        let right = request.want.right.unwrap_or(Right::Read);
        let page = match self.below.page(ipa, right) {
            Ok(page) => page,
            Err(reason) => return Err(Self::refused(address, ipa, request, reason)),
        };
        let is_device = translated.memory.is_device();
        // Data accesses that need a check each time must miss the TLB, so the rights for data are not entered.
        let data = !is_device && !self.checks_each_access(state);
        let entered = tlb::Page {
            base: page.base,
            rights: [
                data && translated.read,
                data && translated.write && page.write,
                translated.execute && page.execute,
            ],
            bits: translated.bits,
            is_global: translated.is_global,
        };
        if request.want.updates {
            self.caches
                .tlb
                .fill(request.want.accessor, address, &entered);
        }
        Ok(Place {
            at: page.base + ipa % PAGE,
            ipa,
            is_device,
        })
    }

    /// Translates an address like [`place_once`](Self::place_once). If the translation fails for an atomic
    /// read-modify-write, and would fail in the same way for a read, the fault is reported as that of a read.
    fn place(
        &mut self,
        state: &State,
        address: u64,
        request: &Request,
    ) -> Result<Place, Fault<H::Fault>> {
        let mut failed = self.place_once(state, address, request);
        if let Err(Fault::Stage1(abort)) = &mut failed
            && request.is_atomic
        {
            let read = Request {
                want: Want {
                    right: Some(Right::Read),
                    updates: false,
                    ..request.want
                },
                ..*request
            };
            abort.is_write = self.stage1(state, address, &read).is_ok();
        }
        failed
    }

    /// Whether each data access needs a check: SCTLR_EL1.A demands alignment, or there are watchpoints or probes.
    fn checks_each_access(&self, state: &State) -> bool {
        state.system.get(SCTLR) & SCTLR_A != 0 || state.watches() || !self.caches.probes.is_empty()
    }

    /// Returns the index of the decoded instruction at an address; decodes the instruction if needed.
    #[inline(always)]
    pub(crate) fn instruction(
        &mut self,
        state: &State,
        address: u64,
    ) -> Result<code::Place, Fault<H::Fault>> {
        let accessor = accessor(state, Kind::Ordinary);
        if let Some(at) = self.caches.tlb.find(accessor, Right::Execute, address, 4)
            && let Some(place) = self.caches.code.find(at)
        {
            return Ok(place);
        }
        self.new_instruction(state, address)
    }

    #[cold]
    fn new_instruction(
        &mut self,
        state: &State,
        address: u64,
    ) -> Result<code::Place, Fault<H::Fault>> {
        let request = Request::access(state, Right::Execute, Access::default());
        let place = self.place(state, address, &request)?;
        if let Some(known) = self.caches.code.find(place.at) {
            return Ok(known);
        }
        match self.below.load(place.at, 2, Order::default()) {
            Ok(word) => Ok(self.caches.code.enter(place.at, decode(word as u32))),
            Err(reason) => Err(Self::refused(address, place.ipa, &request, reason)),
        }
    }
}

impl Request {
    /// Returns the request for an ordinary access to memory.
    fn access(state: &State, right: Right, access: Access) -> Self {
        Self {
            reported: match access.kind {
                Kind::ZeroBlock(operand) => Some(operand),
                _ => None,
            },
            want: Want {
                accessor: accessor(state, access.kind),
                right: Some(right),
                updates: true,
            },
            is_maintenance: false,
            is_atomic: access.kind == Kind::Atomic && right == Right::Write,
        }
    }

    /// Returns the WnR bit that aborts of the request have.
    fn is_write(&self) -> bool {
        self.want.right == Some(Right::Write) || self.is_maintenance
    }
}

/// Returns the abort of a misaligned access.
fn misaligned<F>(address: u64, is_write: bool) -> Fault<F> {
    Fault::Stage1(Abort {
        address,
        status: status::ALIGNMENT,
        is_write,
        is_maintenance: false,
    })
}
