//! The page walker of a software CPU that fills a buffer, as a hardware walker may ([`crate::vm`], `drain.rs`).

use super::Vcpu;
use crate::addr::Gfn;
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::walker_buffer::WrittenPages;
use crate::table::Found;

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Sets accessed and dirty in the leaf `found`, which maps `gfn`, like a page walker that fills a buffer: drains
    /// the buffer if it is full, sets the bits, and writes `gfn` to the buffer. `Some(false)`: the page-table entry has
    /// changed and nothing was written to the buffer; walk again. `None`: there is no memory for a buffer.
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
