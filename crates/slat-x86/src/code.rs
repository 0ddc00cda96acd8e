//! The CPU's data about its guest's code, and about the code that the CPU executes now.

use crate::clock::Clock;
use crate::code_pages::{CodePages, Member};
use crate::heap::OutOfMemory;
use crate::once::Once;
use crate::snapshot::Snapshots;
use crate::sync::Arc;

/// The value of [`Code::page`] that stands for any page.
pub(crate) const ANY_PAGE: usize = 1;

/// The code of a CPU.
pub(crate) struct Code {
    /// Tells when decoded code must be checked again.
    pub(crate) clock: Clock,
    /// This CPU's membership in the group of CPUs that share memory: through this membership, the CPUs tell each other
    /// of stores to code.
    pub(crate) member: Member,
    pub(crate) snapshots: Snapshots,
    pub(crate) once: Once,
    /// The host page of the running block; [`ANY_PAGE`] in compiled code, where blocks of other pages may follow.
    pub(crate) page: usize,
    /// RIP at the start of the running block.
    pub(crate) rip: u64,
    /// Whether an instruction was abandoned because its page walk set a bit in a page of decoded code: see
    /// `Cpu::finish_fetched`.
    pub(crate) walk_changed: bool,
}

impl Code {
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

    /// Makes the CPU look a page up again before the page's code runs next. Returns whether the CPU may have compiled
    /// code of the page among its targets.
    pub(crate) fn outdate_page(&mut self, lin: u64) -> bool {
        self.once.outdate();
        self.snapshots.outdate(lin)
    }
}
