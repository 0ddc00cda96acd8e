//! The syndrome of an access that stage 2 refuses. With it, an embedder can emulate an access to a device, and then
//! complete the instruction (DDI 0487, ISS encoding for an exception from a Data Abort, with ISV set).

use crate::abort::Stage2;
use crate::bits::{sign_extend, zero_extend};
use crate::insn::{Address, Insn, Loaded, Transfer};
use crate::state::State;
use crate::width::Width;

/// The access of an instruction that transfers one general register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Syndrome {
    /// SAS: the logarithm of the number of bytes accessed.
    pub size: u8,
    /// SSE: a load sign-extends the value.
    pub is_signed: bool,
    /// SRT: the general register; 31 is the zero register.
    pub register: u8,
    /// SF: a load writes 64 bits of the register instead of 32.
    pub is_64: bool,
    /// AR: the access is a load-acquire or store-release.
    pub is_ordered: bool,
    /// The access is a store.
    pub is_store: bool,
}

const ISV: u64 = 1 << 24;
const SAS_SHIFT: u32 = 22;
const SSE: u64 = 1 << 21;
const SRT_SHIFT: u32 = 16;
const SF: u64 = 1 << 15;
const AR: u64 = 1 << 14;
const CM: u64 = 1 << 8;
const S1PTW: u64 = 1 << 7;
const WNR: u64 = 1 << 6;
const IL: u64 = 1 << 25;
const CLASS_SHIFT: u32 = 26;
/// Exception classes (EC) of aborts from a lower exception level.
const FETCH_ABORT: u64 = 0x20;
const DATA_ABORT: u64 = 0x24;

impl Insn {
    /// Returns the access of a load or store of one general register. `None`: the instruction does something else, or
    /// it writes its base register back.
    pub(crate) fn syndrome(&self) -> Option<Syndrome> {
        let (transfer, size, rt, is_ordered) = match *self {
            Insn::Access {
                address: Address::Pre { .. } | Address::Post { .. },
                ..
            } => return None,
            Insn::Access {
                transfer, size, rt, ..
            } => (transfer, size, rt, false),
            Insn::Ordered {
                transfer, size, rt, ..
            } => (transfer, size, rt, true),
            _ => return None,
        };
        let (is_store, is_signed, is_64) = match transfer {
            Transfer::Store => (true, false, size == 3),
            Transfer::Load(Loaded::ZeroExtended) => (false, false, size == 3),
            Transfer::Load(Loaded::SignExtended(width)) => (false, true, width == Width::X),
            Transfer::LoadVector | Transfer::StoreVector => return None,
        };
        Some(Syndrome {
            size,
            is_signed,
            register: rt,
            is_64,
            is_ordered,
            is_store,
        })
    }
}

impl Syndrome {
    /// Returns the value that the instruction stores.
    pub fn stored(&self, state: &State) -> u64 {
        let value = state.x.get(usize::from(self.register)).copied();
        zero_extend(value.unwrap_or(0), 8 << self.size)
    }

    /// Completes the access: for a load, writes the loaded value to the register; then advances the program counter,
    /// which is the instruction's address. A store ignores `loaded`.
    pub fn complete(&self, state: &mut State, loaded: u64) {
        if !self.is_store
            && let Some(register) = state.x.get_mut(usize::from(self.register))
        {
            let value = match self.is_signed {
                true => sign_extend(loaded, 8 << self.size),
                false => zero_extend(loaded, 8 << self.size),
            };
            *register = match self.is_64 {
                true => value,
                false => zero_extend(value, 32),
            };
        }
        state.skip();
    }

    fn bits(&self) -> u64 {
        let bit = |is: bool, bit: u64| if is { bit } else { 0 };
        ISV | u64::from(self.size) << SAS_SHIFT
            | bit(self.is_signed, SSE)
            | u64::from(self.register) << SRT_SHIFT
            | bit(self.is_64, SF)
            | bit(self.is_ordered, AR)
    }
}

impl<E> Stage2<E> {
    /// Returns ESR_EL2 of this abort, with fault status code `status`. `syndrome` describes the instruction. It is
    /// ignored if the refused access was that of a table walk.
    pub fn esr(&self, syndrome: Option<Syndrome>, status: u8) -> u64 {
        let bit = |is: bool, bit: u64| if is { bit } else { 0 };
        let common = IL | bit(self.is_walk, S1PTW) | u64::from(status);
        if self.is_fetch {
            return FETCH_ABORT << CLASS_SHIFT | common;
        }
        let syndrome = syndrome.filter(|_| !self.is_walk);
        let details = syndrome.map_or(0, |syndrome| syndrome.bits());
        DATA_ABORT << CLASS_SHIFT
            | common
            | details
            | bit(self.is_maintenance, CM)
            | bit(self.is_write, WNR)
    }
}
