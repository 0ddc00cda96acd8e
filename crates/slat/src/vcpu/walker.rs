//! For software CPUs: a page walker that writes the pages whose dirty bits it sets to a buffer, like a hardware walker
//! with Intel's PML (see `drain.rs` of [`crate::vm`]).

use super::Vcpu;
use crate::addr::Gfn;
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::walker_buffer::WrittenPages;
use crate::table::Found;

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Sets the accessed and dirty bits of the leaf `found`, which maps `gfn`, and writes `gfn` to the vCPU's buffer;
    /// if the buffer is full, drains it first. Returns `Some(false)` if the page-table entry has changed: nothing was
    /// written to the buffer, and the caller must walk again. `None`: there is no memory for a buffer.
    pub(super) fn mark_logged(&self, found: &Found<'_>, gfn: Gfn) -> Option<bool> {
        let (vm, space) = (self.vm(), self.space_index());
        let buffer = self
            .presence
            .reader()
            .written
            .get_or_make(WrittenPages::buffer)
            .ok()?;
        let mut pages = buffer.lock(vm.lock_wait());
        if pages.is_full() {
            let noted = vm.note_written(&mut pages, self.section());
            self.counters().dirty_pages.add(noted);
        }
        let is_marked = found.mark::<F>(true);
        if is_marked {
            pages.push(space, gfn);
        }
        Some(is_marked)
    }
}
