//! The machines on which operations are run. An embedder's tests implement [`Machine`] for their own machine.

use std::ops::Range;
use std::sync::Arc;

use slat::{HostPage, Hva, Pfn, Platform, VmId};

use crate::host::HostChange;
use crate::tlb::Tlb;

/// Runs a function in an invalidation of one page in one VM. The page is given by its backing address, in the numbering
/// of the platform, and by the frame that backs it. The function changes the backing of the page.
pub type Invalidate = Arc<dyn Fn(Hva, Pfn, &mut dyn FnMut()) + Send + Sync>;

/// A machine with a platform to be tested, and with memory that may back memslots.
///
/// An embedder implements this for its own [`Platform`] and runs operations on it with [`Subject`](crate::Subject).
/// Each run makes a machine of its own. All methods are called from one thread, with no engine lock held.
///
/// # What is tested
/// * [`Platform::resolve`] and [`Platform::resolve_resident`]: each result of the engine is compared with a plain
///   model, which asks [`Machine::page`] what backs each page. This finds a wrong page, a page that was replaced
///   meanwhile, wrong rights, and levels that are too high.
/// * [`Platform::alloc_table`] and [`Platform::alloc_root`]: a frame must not be in use and must not be guest memory, a
///   root must be aligned, and each frame must have memory and a [`TableMeta`](slat::TableMeta) of its own. The
///   contents may be anything.
/// * [`Platform::flush`]: after each operation the TLBs have no entry that the engine has removed from the tables, and
///   no table is freed before that.
///
/// * [`Platform::share`], if [`Machine::as_seen_by`] is implemented: no VM reads what another one has written, and no
///   leaf lets a VM write to a page that it shares.
///
/// This does not test several CPUs that call the platform at once.
pub trait Machine: 'static {
    /// The platform under test.
    type Platform: Platform;

    /// Whether the platform reports each flush of its hardware to the [`Tlb`]. If not, a flush counts as done when
    /// [`Platform::flush`] returns: for a platform without hardware walkers, whose flushes do nothing.
    const REPORTS_FLUSHES: bool = true;

    /// Makes a machine with `pages` pages of memory, or fewer, but at least 2048 (8 MiB). The pages are present. The
    /// machine has enough frames for tables: 4096 suffice.
    ///
    /// `tlb` represents the TLBs of all its CPUs. Where the platform would execute INVEPT, TLBI or HFENCE it calls
    /// [`Tlb::flushed`], or, if it waits for other CPUs, [`Tlb::flush_begins`] before and
    /// [`Tlb::flush_ended`] after that.
    fn new(pages: u64, tlb: Arc<Tlb>) -> Self;

    /// Returns the platform, always the same.
    fn platform(&self) -> &Arc<Self::Platform>;

    /// Returns the first backing address of the memory. The address is a multiple of 1 GiB if huge pages are to be
    /// tested. The addresses of the other pages follow.
    fn backing(&self) -> Hva;

    /// Returns the number of pages of the memory.
    fn pages(&self) -> u64;

    /// Returns the host page mapped at a page of the memory, counted from the first; `None` for a hole. The platform
    /// must resolve the page to it. Find the result without the platform, for example in records of the test. No two
    /// pages have the same frame.
    fn page(&self, page: u64) -> Option<HostPage>;

    /// Whether `page`, a hole, is only not present yet: the platform returns [`slat::ResolveError::Absent`].
    fn is_absent(&self, page: u64) -> bool {
        let _ = page;
        false
    }

    /// Changes the mapping at `pages`. The engine is informed before and after the change ([`slat::Vm::invalidate`]).
    ///
    /// A machine that cannot do `change` may do a part of it, or nothing: the model asks [`Machine::page`] afterwards.
    /// Pages outside of `pages` keep their frames and rights. But their level may become smaller if they were in one
    /// huge page with some of `pages`.
    fn change(&self, pages: &Range<u64>, change: HostChange);

    /// Returns the machine as `vm` sees it: its other methods are about the memory of this VM. Called for each VM after
    /// it is made, including clones to which [`Platform::share`] has given memory. The result is dropped when the VM
    /// ends. Where the platform would call [`Vm::invalidate`](slat::Vm::invalidate), to give the VM a page of its own,
    /// it calls `invalidate`.
    ///
    /// `None`, the default: the platform shares no pages.
    fn as_seen_by(&self, vm: VmId, invalidate: Invalidate) -> Option<Self>
    where
        Self: Sized,
    {
        let _ = (vm, invalidate);
        None
    }

    /// Whether another VM may have the frame of `page`, too, so that the guest may not write to it without asking. In
    /// contrast, [`HostPage::writable`] of [`Machine::page`] tells whether a write will succeed.
    fn is_shared(&self, page: u64) -> bool {
        let _ = page;
        false
    }

    /// Returns the word that was last stored in `frame`, or copied to it with the page; 0 initially. `None`: the
    /// machine does not keep contents.
    fn load(&self, frame: Pfn) -> Option<u64> {
        let _ = frame;
        None
    }

    /// Stores a word in `frame`: the guest has written to it.
    fn store(&self, frame: Pfn, value: u64) {
        let _ = (frame, value);
    }

    /// Runs checks that belong to the machine. Called at every audit, while no operation is in progress.
    ///
    /// # Errors
    /// A description of the first check that failed.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}
