//! The interface between a processor with stage 1 tables and the machine below it. The machine provides stage 2, and
//! the system registers that trap.

use crate::abort::Right;
use crate::insn::{AtomicOp, Order, SystemName};
use crate::state::State;

/// The memory that backs a 4 KiB page of intermediate physical addresses, and the rights to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// The address of the page's first byte in the machine's memory, for the accesses of [`Hypervisor`]. Pages with
    /// different memory have different addresses.
    pub base: u64,
    /// Whether the page may be written without another call of [`Hypervisor::page`].
    pub write: bool,
    /// Whether the page may be executed without another call of [`Hypervisor::page`].
    pub execute: bool,
}

/// The machine below EL1.
///
/// The processor caches pages until [`Cpu::forget_pages`](crate::Cpu::forget_pages) is called. The embedder calls it
/// before the memory that backs a page changes.
///
/// The machine may wait during an access that then fails. After such a failure the processor drops all pages, and asks
/// for the page of the access again. The machine may also wait in [`page`](Hypervisor::page). If the memory that backs
/// another page may have changed during that wait, `page` returns an error, and [`attention`](Hypervisor::attention)
/// returns `true` until the embedder has called `forget_pages`.
pub trait Hypervisor {
    /// The reason why the machine refuses an access. [`Stage2`](crate::Stage2) passes it to the embedder.
    type Fault;

    /// Returns how to access the page that contains an intermediate physical address.
    fn page(&mut self, ipa: u64, right: Right) -> Result<Page, Self::Fault>;

    /// Loads 1 << `size` bytes, at most 8, zero-extended, from one page.
    fn load(&mut self, at: u64, size: u8, order: Order) -> Result<u64, Self::Fault>;
    /// Stores the low 1 << `size` bytes, at most 8, in one page.
    fn store(&mut self, at: u64, size: u8, value: u64, order: Order) -> Result<(), Self::Fault>;
    /// Loads 16 bytes of one page. The load need not be atomic.
    fn load_wide(&mut self, at: u64) -> Result<u128, Self::Fault> {
        let [low, high] = [at, at + 8].map(|at| self.load(at, 3, Order::default()));
        Ok(u128::from(low?) | u128::from(high?) << 64)
    }
    /// Stores 16 bytes, which are in one page, at the address `at` of the machine's memory.
    fn store_wide(&mut self, at: u64, value: u128) -> Result<(), Self::Fault> {
        self.store(at, 3, value as u64, Order::default())?;
        self.store(at + 8, 3, (value >> 64) as u64, Order::default())
    }
    /// Compares 1 << `size` bytes, at most 16, with the first value, and stores the second value if they are equal, as
    /// one atomic operation. Returns the old bytes. The address is a multiple of the size.
    fn compare_exchange(
        &mut self,
        at: u64,
        size: u8,
        values: [u128; 2],
        order: Order,
    ) -> Result<u128, Self::Fault>;

    /// Executes an atomic operation on at most 8 bytes, and returns the old bytes. The address is a multiple of the
    /// size.
    fn atomic(
        &mut self,
        op: AtomicOp,
        at: u64,
        size: u8,
        operand: u64,
        order: Order,
    ) -> Result<u64, Self::Fault> {
        let mut old = self.load(at, size, Order::default())?;
        loop {
            let new = op.apply(old, operand, size);
            let values = [old, new].map(u128::from);
            let found = self.compare_exchange(at, size, values, order)? as u64;
            if found == old {
                return Ok(old);
            }
            old = found;
        }
    }

    /// Reads a system register that the processor does not hold itself: a timer, interrupt controller, counter or
    /// identification register. `None`: the access is UNDEFINED.
    fn read_system(&mut self, _state: &State, _name: SystemName) -> Option<u64> {
        None
    }
    /// Writes a system register that the processor does not hold itself. `None`: the access is UNDEFINED.
    fn write_system(&mut self, _state: &State, _name: SystemName, _value: u64) -> Option<()> {
        None
    }

    /// Whether the run is to end soon. The processor calls this every few dozen instructions.
    fn attention(&self) -> bool {
        false
    }
}
