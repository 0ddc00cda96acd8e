//! What a CPU knows about the guest's code in general, and about the code that it executes now.

use crate::clock::Clock;
use crate::code_pages::{CodePages, Member};
use crate::heap::OutOfMemory;
use crate::once::Once;
use crate::snapshot::Snapshots;
use crate::sync::Arc;

/// The value of [`Code::page`] that means "any page".
pub(crate) const ANY_PAGE: usize = 1;

/// What a CPU knows about the guest's code.
pub(crate) struct Code {
    /// The numbers that say when decoded code must be checked again.
    pub(crate) clock: Clock,
    /// This CPU's membership in the group of CPUs that share memory. The CPUs of the group tell each other of stores to
    /// code.
    pub(crate) member: Member,
    pub(crate) snapshots: Snapshots,
    pub(crate) once: Once,
    /// The host page of the running block; [`ANY_PAGE`] in compiled code, which may continue with blocks of other
    /// pages.
    pub(crate) page: usize,
    /// RIP at the start of the running block.
    pub(crate) rip: u64,
    /// Whether an instruction was abandoned because its page walk has set an accessed or dirty bit in a page that has
    /// decoded code. See `Cpu::finish_fetched`.
    pub(crate) walk_changed: bool,
}

impl Code {
    /// Makes the data of a CPU that belongs to the group `pages`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn try_new(pages: Arc<CodePages>) -> Result<Self, OutOfMemory> {
        Ok(Self {
            clock: Clock::new(),
            member: Member::try_new(pages)?,
            snapshots: Snapshots::new(),
            once: Once::new(),
            page: usize::MAX,
            rip: 0,
            walk_changed: false,
        })
    }

    /// Makes the CPU translate the page's address again before the page's code runs next. Returns whether compiled code
    /// of the page may be among the CPU's targets.
    pub(crate) fn outdate_page(&mut self, lin: u64) -> bool {
        self.once.outdate();
        self.snapshots.outdate(lin)
    }
}
