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
/// use [`compare_exchange`](Self::compare_exchange). On memory that processors on other threads share,
/// `compare_exchange` must be one atomic operation of the host. A lock is not enough, because plain stores of other
/// processors do not take it. An exclusive store fails if the memory's value has changed since the exclusive load. It
/// succeeds although another processor has stored, if the value is the same as before.
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
    /// Stores the low bytes of a value, at most 8.
    fn store(
        &mut self,
        state: &State,
        address: u64,
        size: u8,
        value: u64,
        access: Access,
    ) -> Result<(), Self::Fault>;
    /// Loads 16 bytes. The load need not be atomic.
    fn load_wide(
        &mut self,
        state: &State,
        address: u64,
        access: Access,
    ) -> Result<u128, Self::Fault>;
    /// Stores 16 bytes at a virtual address.
    fn store_wide(
        &mut self,
        state: &State,
        address: u64,
        value: u128,
        access: Access,
    ) -> Result<(), Self::Fault>;
    /// Checks that each of these bytes can be stored. An instruction with several stores calls this before its first
    /// store. If a later store fails nevertheless, because the page was unmapped meanwhile, the instruction is executed
    /// again from its start once the page is mapped again: the architecture permits that earlier stores of the
    /// instruction become visible.
    fn prepare_stores(
        &mut self,
        state: &State,
        address: u64,
        bytes: u32,
        access: Access,
    ) -> Result<(), Self::Fault>;
    /// Compares the bytes, at most 16, with the first value, and stores the second value if they are equal. Returns the
    /// old bytes. The address is a multiple of the size.
    fn compare_exchange(
        &mut self,
        state: &State,
        address: u64,
        size: u8,
        values: [u128; 2],
        access: Access,
    ) -> Result<u128, Self::Fault>;

    /// Executes an atomic operation on at most 8 bytes, and returns the old bytes. The address is a multiple of the
    /// size.
    fn atomic(
        &mut self,
        state: &State,
        op: AtomicOp,
        address: u64,
        size: u8,
        operand: u64,
        access: Access,
    ) -> Result<u64, Self::Fault> {
        // Check the right to write even if the operation leaves the value unchanged.
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

    /// Checks that the guest may maintain caches at an address, and drops the decoded code at the address for IC IVAU.
    /// The caller has checked that the instruction is allowed at this exception level.
    fn maintain(
        &mut self,
        _state: &State,
        _maintenance: Maintenance,
        _address: u64,
    ) -> Result<(), Self::Fault> {
        Ok(())
    }
}

/// An instruction of cache maintenance by address.
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
    /// Translates like an access by EL0.
    pub for_el0: bool,
    /// Translates like a write.
    pub is_write: bool,
    /// Applies PSTATE.PAN: S1E1RP, S1E1WP.
    pub with_pan: bool,
}

/// The translations or the code that TLBI and IC invalidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// All translations.
    All,
    /// The translations of an address space that are not global.
    Space(u16),
    /// The translations of a page: the global ones, and those of address space `space`.
    Page {
        /// An address in the page to drop.
        address: u64,
        /// The address space (ASID). `None`: all address spaces.
        space: Option<u16>,
    },
    /// All decoded code.
    Code,
    /// The decoded code of a cache line, by the line's address in the machine's memory.
    CodeLine(u64),
}

/// The services that the machine provides to a processor.
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
    /// Executes TLBI, or IC of all code. If `is_shared`, the invalidation applies to other processors, too.
    fn invalidate(&mut self, _state: &State, _invalidation: Invalidation, _is_shared: bool) {}
}

impl AtomicOp {
    /// Returns the new value of memory, from its old value and the operand, which have 1 << `size` bytes.
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
