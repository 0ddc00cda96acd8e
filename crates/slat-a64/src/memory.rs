//! The memory that a processor accesses, and the other services of its machine.

use crate::insn::{AtomicOp, SystemName};
use crate::state::State;
use crate::tier::Access;

/// Accesses to memory by virtual addresses, little-endian.
///
/// A size is the logarithm of the number of bytes. An access that fails has changed nothing. The instruction that made
/// the failed access changes nothing, either.
///
/// An aligned access of at most 8 bytes is single-copy atomic (DDI 0487, B2.2). Exclusive stores and atomic operations
/// are made by [`compare_exchange`](Self::compare_exchange). On memory that processors on other threads share, it must
/// be one atomic operation of the host. A lock cannot make it atomic, because plain stores of other processors would
/// not take the lock. An exclusive store notices another processor's store since the exclusive load only if the value
/// has changed.
pub trait Memory {
    /// The reason why an access fails.
    type Fault;

    /// Fetches the instruction at an address, which is a multiple of 4.
    fn fetch(&mut self, state: &State, address: u64) -> Result<u32, Self::Fault>;
    /// Loads at most 8 bytes, zero-extended.
    fn load(
        &mut self,
        state: &State,
        address: u64,
        size: u8,
        access: Access,
    ) -> Result<u64, Self::Fault>;
    /// Stores the low bytes, at most 8, of a value.
    fn store(
        &mut self,
        state: &State,
        address: u64,
        size: u8,
        value: u64,
        access: Access,
    ) -> Result<(), Self::Fault>;
    /// Loads 16 bytes, which need not be of one moment.
    fn load_wide(
        &mut self,
        state: &State,
        address: u64,
        access: Access,
    ) -> Result<u128, Self::Fault>;
    /// Stores 16 bytes.
    fn store_wide(
        &mut self,
        state: &State,
        address: u64,
        value: u128,
        access: Access,
    ) -> Result<(), Self::Fault>;
    /// Checks that each of these bytes can be stored. An instruction with several stores calls this before the first
    /// one. If a store fails nevertheless, because the page was unmapped meanwhile, the instruction is executed again
    /// from its start once the page is back: the architecture lets earlier stores of such an instruction be seen.
    fn prepare_stores(
        &mut self,
        state: &State,
        address: u64,
        bytes: u32,
        access: Access,
    ) -> Result<(), Self::Fault>;
    /// Stores the second value if the bytes, at most 16, are the first. Returns the bytes that were there. The address
    /// is a multiple of the size.
    fn compare_exchange(
        &mut self,
        state: &State,
        address: u64,
        size: u8,
        values: [u128; 2],
        access: Access,
    ) -> Result<u128, Self::Fault>;

    /// Executes an atomic operation on at most 8 bytes, and returns the bytes that were there. The address is a
    /// multiple of the size.
    fn atomic(
        &mut self,
        state: &State,
        op: AtomicOp,
        address: u64,
        size: u8,
        operand: u64,
        access: Access,
    ) -> Result<u64, Self::Fault> {
        // Checks the right to write, also where the operation changes nothing.
        self.prepare_stores(state, address, 1 << size, access)?;
        let mut old = self.load(state, address, size, Access::default())?;
        loop {
            let new = op.apply(old, operand, size);
            let values = [old, new].map(u128::from);
            let found = self.compare_exchange(state, address, size, values, access)? as u64;
            if found == old {
                return Ok(old);
            }
            old = found;
        }
    }

    /// Checks that an address may be maintained, and drops the processor's decoded code of that address. The caller has
    /// checked that the instruction is allowed at this level.
    fn maintain(
        &mut self,
        _state: &State,
        _maintenance: Maintenance,
        _address: u64,
    ) -> Result<(), Self::Fault> {
        Ok(())
    }
}

/// Cache maintenance by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maintenance {
    /// DC CVAC, DC CVAU, DC CVAP, DC CIVAC.
    Clean,
    /// DC IVAC.
    Invalidate,
    /// IC IVAU.
    Code,
}

/// An AT instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressTranslation {
    /// Translates as for an access of EL0.
    pub for_el0: bool,
    /// Translates as for a write.
    pub is_write: bool,
    /// With PSTATE.PAN: S1E1RP, S1E1WP.
    pub with_pan: bool,
}

/// The translations or the code that TLBI and IC invalidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// All translations.
    All,
    /// The translations of an address space that are not global.
    Space(u16),
    /// The translations of a page: global ones, and those of an address space.
    Page {
        /// An address in the page.
        address: u64,
        /// The address space. `None`: all of them.
        space: Option<u16>,
    },
    /// All decoded code.
    Code,
    /// The decoded code of a cache line, at the machine's address for it.
    CodeLine(u64),
}

/// The services of the machine around a processor.
pub trait Machine: Memory {
    /// Reads a system register that the processor does not hold itself. `None`: the access is UNDEFINED.
    fn read_system(&mut self, _state: &State, _name: SystemName) -> Option<u64> {
        None
    }
    /// Writes a system register that the processor does not hold itself. `None`: the access is UNDEFINED.
    fn write_system(&mut self, _state: &State, _name: SystemName, _value: u64) -> Option<()> {
        None
    }
    /// The processor calls this after the guest has written a system register that the processor holds. Translation
    /// may have changed.
    fn system_written(&mut self, _state: &State, _name: SystemName) {}
    /// Executes an AT instruction, and returns the value of PAR_EL1. `None`: the instruction is UNDEFINED.
    fn translate_address(
        &mut self,
        _state: &State,
        _translation: AddressTranslation,
        _address: u64,
    ) -> Result<Option<u64>, Self::Fault> {
        Ok(None)
    }
    /// Executes TLBI, or IC of all code. `is_shared`: for the other processors, too.
    fn invalidate(&mut self, _state: &State, _invalidation: Invalidation, _is_shared: bool) {}
}

impl AtomicOp {
    /// Returns the result of the operation on `old` and `operand`, which have 1 << `size` bytes.
    pub fn apply(self, old: u64, operand: u64, size: u8) -> u64 {
        let bits = 8 << size;
        let signed = |v| crate::bits::sign_extend(v, bits) as i64;
        let new = match self {
            AtomicOp::Add => old.wrapping_add(operand),
            AtomicOp::Clear => old & !operand,
            AtomicOp::Xor => old ^ operand,
            AtomicOp::Set => old | operand,
            AtomicOp::SignedMax => signed(old).max(signed(operand)) as u64,
            AtomicOp::SignedMin => signed(old).min(signed(operand)) as u64,
            AtomicOp::UnsignedMax => old.max(operand),
            AtomicOp::UnsignedMin => old.min(operand),
            AtomicOp::Swap => operand,
        };
        crate::bits::zero_extend(new, bits)
    }
}
