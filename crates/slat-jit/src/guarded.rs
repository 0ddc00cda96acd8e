//! The guarded accesses of compiled code.

use cranelift_codegen::CompiledCode;
use cranelift_codegen::ir::TrapCode;

/// The trap code that marks an access to guest memory, which may fail.
pub const GUARDED: TrapCode = TrapCode::unwrap_user(1);

/// The guarded accesses of a function: their offsets in ascending order, and a number for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guarded(pub Box<[(u32, u32)]>);

impl Guarded {
    /// Returns the accesses of a compiled function whose trap code is [`GUARDED`]. The number of an access is its
    /// source location in Cranelift.
    pub fn of(compiled: &CompiledCode) -> Self {
        let places = compiled.buffer.get_srclocs_sorted();
        // Leave out other traps. They belong to divisions, which are emitted in a way that they never trap.
        let traps = compiled.buffer.traps().iter();
        let guarded = traps.filter(|trap| trap.code == GUARDED).map(|trap| {
            let after = places.partition_point(|place| place.start <= trap.offset);
            (trap.offset, places[after - 1].loc.bits())
        });
        Self(guarded.collect())
    }

    /// Returns the offsets of the guarded accesses.
    pub fn offsets(&self) -> impl Iterator<Item = u32> {
        self.0.iter().map(|access| access.0)
    }

    /// Returns the number of the guarded access at an offset.
    pub fn find(&self, offset: u32) -> Option<u32> {
        let found = self.0.binary_search_by_key(&offset, |access| access.0);
        Some(self.0[found.ok()?].1)
    }
}
