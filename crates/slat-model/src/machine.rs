//! The trait of machines on which operations are run. An embedder's tests implement [`Machine`] for their own machine.

use std::ops::Range;
use std::sync::Arc;

use slat::{HostPage, Hva, Pfn, Platform, VmId};

use crate::host::HostChange;
use crate::tlb::Tlb;

/// Calls a function within an invalidation of one page in one VM. The function changes the backing of the page. The
/// arguments are the page's backing address, as the platform numbers them, and the frame that backs the page.
pub type Invalidate = Arc<dyn Fn(Hva, Pfn, &mut dyn FnMut()) + Send + Sync>;

/// A machine with a platform to be tested, and with memory that may back memslots.
///
/// An embedder implements this for its own [`Platform`] and runs operations on it with [`Subject`](crate::Subject).
/// Each run makes its own machine. All methods are called from one thread, with no engine lock held.
///
/// # What is tested
/// * [`Platform::resolve`] and [`Platform::resolve_resident`]: each result of the engine is compared with a plain
///   model, which asks [`Machine::page`] what backs each page. This finds a wrong page, a page that the host has
///   replaced, wrong rights, and levels that are too high.
/// * [`Platform::alloc_table`] and [`Platform::alloc_root`]: a frame must not be in use and must not be guest memory, a
///   root must be aligned, and each frame must have its own memory and its own [`TableMeta`](slat::TableMeta). Their
///   initial contents may be anything.
/// * [`Platform::flush`]: after each operation the TLBs have no entry that the engine has removed from the tables, and
///   no table is freed before that.
///
/// * [`Platform::share`], if [`Machine::as_seen_by`] is implemented: no VM reads what another one has written, and no
///   leaf lets a VM write to a page that it shares.
///
/// These tests never call the platform from several CPUs at once.
pub trait Machine: 'static {
    /// The platform under test.
    type Platform: Platform;

    /// Whether the platform reports each flush of its hardware to the [`Tlb`]. If not, a flush counts as complete when
    /// [`Platform::flush`] returns. Set it to `false` for a platform without hardware page walkers, whose flushes do
    /// nothing.
    const REPORTS_FLUSHES: bool = true;

    /// Makes a machine with `pages` pages of memory. It may have fewer pages, but at least 2048 (8 MiB). All pages are
    /// present. The machine also has enough frames for tables: 4096 suffice.
    ///
    /// `tlb` represents the TLBs of all its CPUs. Where a real platform would execute INVEPT, TLBI or HFENCE, this
    /// platform calls [`Tlb::flushed`]. If the flush waits for other CPUs, the platform instead calls
    /// [`Tlb::flush_begins`] before the flush and [`Tlb::flush_ended`] after it.
    fn new(pages: u64, tlb: Arc<Tlb>) -> Self;

    /// Returns the platform. All calls return the same platform.
    fn platform(&self) -> &Arc<Self::Platform>;

    /// Returns the first backing address of the memory. If huge pages are to be tested, the address is a multiple of 1
    /// GiB. The other pages have the following addresses.
    fn backing(&self) -> Hva;

    /// Returns the number of pages of the memory.
    fn pages(&self) -> u64;

    /// Returns the host page at page number `page` of the memory. `None`: nothing is mapped at this page number (a
    /// hole). The platform must resolve the page to this host page. Implement this method without the platform, for
    /// example from the test's own records. No two pages have the same frame.
    fn page(&self, page: u64) -> Option<HostPage>;

    /// Whether `page`, which is a hole now, will become present. For such a page the platform returns
    /// [`slat::ResolveError::Absent`].
    fn is_absent(&self, page: u64) -> bool {
        let _ = page;
        false
    }

    /// Changes the mapping at `pages`. The engine is informed before and after the change ([`slat::Vm::invalidate`]).
    ///
    /// A machine that cannot do `change` may do a part of it, or nothing: the model asks [`Machine::page`] afterwards.
    /// Pages outside of `pages` keep their frames and rights. But if they were in the same huge page as some of
    /// `pages`, their level may become lower.
    fn change(&self, pages: &Range<u64>, change: HostChange);

    /// Returns the machine as `vm` sees it: the methods of the returned machine concern the memory of this VM. Called
    /// for each VM after the VM is made, also for clones to which [`Platform::share`] has given memory. The result is
    /// dropped when the VM ends. To give the VM its own copy of a shared page, the platform calls `invalidate`, in
    /// place of [`Vm::invalidate`](slat::Vm::invalidate).
    ///
    /// `None`, the default: the platform shares no pages.
    fn as_seen_by(&self, vm: VmId, invalidate: Invalidate) -> Option<Self>
    where
        Self: Sized,
    {
        let _ = (vm, invalidate);
        None
    }

    /// Whether another VM may use the frame of `page`, too, so that no leaf may let the guest write to it. In contrast,
    /// [`HostPage::writable`] of [`Machine::page`] tells whether a write will succeed in the end.
    fn is_shared(&self, page: u64) -> bool {
        let _ = page;
        false
    }

    /// Returns the word that was last stored in `frame`, or that was copied to `frame` with its page. Returns 0
    /// initially. `None`: the machine does not keep contents.
    fn load(&self, frame: Pfn) -> Option<u64> {
        let _ = frame;
        None
    }

    /// Stores a word in `frame`. Called when the guest has written to `frame`.
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
