//! The machines on which operations are run: an embedder's tests implement [`Machine`] for their own.

use std::ops::Range;
use std::sync::Arc;

use slat::{HostPage, Hva, Pfn, Platform, VmId};

use crate::host::HostChange;
use crate::tlb::Tlb;

/// Begins an invalidation of the page at an address, which is the platform's and is backed by a frame, in one VM; calls
/// the function, which changes what backs the page; and ends the invalidation.
pub type Invalidate = Arc<dyn Fn(Hva, Pfn, &mut dyn FnMut()) + Send + Sync>;

/// A machine with a platform to be tested, and with memory that may back memslots.
///
/// An embedder implements this for its own [`Platform`] and runs operations on it with [`Subject`](crate::Subject).
/// Each run makes a machine of its own. All methods are called from one thread, with no engine lock held.
///
/// # What is tested
/// * [`Platform::resolve`] and [`Platform::resolve_resident`]: each result of the engine is compared with a plain
///   model, for which [`Machine::page`] says what backs each page. So another page is found, also one that was replaced
///   meanwhile, and so are other rights, and levels that are too high.
/// * [`Platform::alloc_table`] and [`Platform::alloc_root`]: a frame must not be in use, a root must be aligned,
///   each frame must have memory and a [`TableMeta`](slat::TableMeta) of its own, and must not be guest memory.
///   Contents may be anything.
/// * [`Platform::flush`]: after each operation the TLBs have no entry that the engine has removed from the tables, and
///   no table is freed before.
///
/// * [`Platform::share`], if [`Machine::as_seen_by`] is implemented: what one VM writes no other one reads, and no leaf
///   lets a VM write to a page that it shares.
///
/// What the platform does when several CPUs call it at once is not tested.
pub trait Machine: 'static {
    /// The platform under test.
    type Platform: Platform;

    /// Whether the platform tells the [`Tlb`] of each flush that its hardware does. If not, a flush counts as done when
    /// [`Platform::flush`] returns: for a platform without hardware walkers, whose flushes do nothing.
    const REPORTS_FLUSHES: bool = true;

    /// Makes a machine with `pages` pages of memory, or fewer, but at least 2048 (8 MiB); they are present. It has
    /// enough frames for tables: 4096 are.
    ///
    /// `tlb` represents the TLBs of all its CPUs. Where the platform would execute INVEPT, TLBI or HFENCE it calls
    /// [`Tlb::flushed`], or, if it waits for other CPUs, [`Tlb::flush_begins`] before and
    /// [`Tlb::flush_ended`] after that.
    fn new(pages: u64, tlb: Arc<Tlb>) -> Self;

    /// Returns the platform, always the same.
    fn platform(&self) -> &Arc<Self::Platform>;

    /// Returns the first backing address of the memory, a multiple of 1 GiB if huge pages are to be tested. The
    /// addresses of the other pages follow.
    fn backing(&self) -> Hva;

    /// Returns the number of pages of the memory.
    fn pages(&self) -> u64;

    /// Returns what is mapped at a page of the memory, counted from the first; `None` for a hole. What the
    /// platform must resolve the page to: best found without it, as in books of the test's own. No two pages
    /// have the same frame.
    fn page(&self, page: u64) -> Option<HostPage>;

    /// Whether `page`, a hole, is only not there yet: the platform says [`slat::ResolveError::Absent`].
    fn is_absent(&self, page: u64) -> bool {
        let _ = page;
        false
    }

    /// Changes what is mapped at `pages`. The engine was told before, and is told again afterwards
    /// ([`slat::Vm::invalidate`]).
    ///
    /// A machine that cannot do `change` may do a part of it, or nothing: the model asks [`Machine::page`]
    /// afterwards. Pages beside `pages` keep their frames and rights; if they were in one huge page with some of
    /// them, their level may fall.
    fn change(&self, pages: &Range<u64>, change: HostChange);

    /// Returns the machine as `vm` sees it: the other methods are about the memory of this VM then. Called for each VM
    /// when it has been made, the clones that [`Platform::share`] has given memory included; what is returned is
    /// dropped when the VM ends. Where the platform would call [`Vm::invalidate`](slat::Vm::invalidate), to give the VM
    /// a page of its own, it calls `invalidate`.
    ///
    /// `None`, as without an implementation: the platform shares no pages.
    fn as_seen_by(&self, vm: VmId, invalidate: Invalidate) -> Option<Self>
    where
        Self: Sized,
    {
        let _ = (vm, invalidate);
        None
    }

    /// Whether another VM may have the frame of `page`, too, so that the guest may not write to it unasked. In
    /// contrast, [`HostPage::writable`] of [`Machine::page`] says whether a write will succeed.
    fn is_shared(&self, page: u64) -> bool {
        let _ = page;
        false
    }

    /// Returns the word that was last stored in `frame`, or copied to it with the page; 0 at first. `None`: the machine
    /// does not keep contents.
    fn load(&self, frame: Pfn) -> Option<u64> {
        let _ = frame;
        None
    }

    /// Stores a word in `frame`: the guest has written to it.
    fn store(&self, frame: Pfn, value: u64) {
        let _ = (frame, value);
    }

    /// Runs checks of the machine's own. Called at every audit, while no operation is in progress.
    ///
    /// # Errors
    /// A description of the first check that failed.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}
