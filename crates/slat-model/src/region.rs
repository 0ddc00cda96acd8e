//! Sets memslots as VMMs do.

use slat::{Format, Platform, Region, RegionError, Vm};

/// Executes KVM_SET_USER_MEMORY_REGION. Size 0 deletes the memslot.
///
/// # Errors
/// The errors of [`Vm::set_memory_region`] and [`Vm::remove_memory_region`].
pub fn set_region<P: Platform, F: Format>(
    vm: &Vm<P, F>,
    space: usize,
    region: &Region,
) -> Result<(), RegionError> {
    match vm.set_memory_region(space, region) {
        Err(RegionError::Empty(slot)) => vm.remove_memory_region(space, slot),
        set => set,
    }
}
