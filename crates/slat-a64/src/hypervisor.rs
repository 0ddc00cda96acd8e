//! The interface between a processor with translation tables and the machine below it: stage 2, and the system
//! registers that trap to the machine.

use crate::abort::Right;
use crate::insn::{AtomicOp, Order, SystemName};
use crate::state::State;

/// The machine's memory for a 4 KiB page of intermediate physical addresses, and the rights to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// The machine's address of the page's first byte, for the accesses of [`Hypervisor`]. Two pages with different
    /// memory have different addresses.
    pub base: u64,
    /// Whether writes need no other call of [`Hypervisor::page`].
    pub write: bool,
    /// Whether fetches need no other call of [`Hypervisor::page`].
    pub execute: bool,
}

/// The machine below EL1.
///
/// The processor keeps pages until [`Cpu::forget_pages`](crate::Cpu::forget_pages) is called: the embedder calls it
/// before the memory behind a page changes.
///
/// The machine may wait during an access that fails. After such a failure the processor drops all pages, and asks for
/// the page of the access again. The machine may also wait in [`page`](Hypervisor::page). If the memory behind another
/// page may have changed during that wait, `page` returns an error, and [`attention`](Hypervisor::attention) returns
/// `true` until the embedder has called `forget_pages`.
pub trait Hypervisor {
    /// The reason why the machine refuses an access. The embedder learns of it by [`Stage2`](crate::Stage2).
    type Fault;

    /// Returns how to access the page that contains an intermediate physical address.
    fn page(&mut self, ipa: u64, right: Right) -> Result<Page, Self::Fault>;

    /// Loads 1 << `size` bytes, at most 8, zero-extended, from one page.
    fn load(&mut self, at: u64, size: u8, order: Order) -> Result<u64, Self::Fault>;
    /// Stores the low 1 << `size` bytes, at most 8, in one page.
    fn store(&mut self, at: u64, size: u8, value: u64, order: Order) -> Result<(), Self::Fault>;
    /// Loads 16 bytes of one page, which need not be of one moment.
    fn load_wide(&mut self, at: u64) -> Result<u128, Self::Fault>;
    /// Stores 16 bytes in one page.
    fn store_wide(&mut self, at: u64, value: u128) -> Result<(), Self::Fault>;
    /// Stores the second value if the 1 << `size` bytes, at most 16, are the first, as one atomic operation. Returns
    /// the bytes that were there. The address is a multiple of the size.
    fn compare_exchange(
        &mut self,
        at: u64,
        size: u8,
        values: [u128; 2],
        order: Order,
    ) -> Result<u128, Self::Fault>;

    /// Executes an atomic operation on at most 8 bytes, and returns the bytes that were there. The address is a
    /// multiple of the size.
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

    /// Reads a system register that the processor does not hold itself: of timers, interrupt controllers, counters, and
    /// for identification. `None`: the access is UNDEFINED.
    fn read_system(&mut self, _state: &State, _name: SystemName) -> Option<u64> {
        None
    }
    /// Writes a system register that the processor does not hold itself. `None`: the access is UNDEFINED.
    fn write_system(&mut self, _state: &State, _name: SystemName, _value: u64) -> Option<()> {
        None
    }

    /// Whether the run is to end soon. The processor asks every few dozen instructions.
    fn attention(&self) -> bool {
        false
    }
}
