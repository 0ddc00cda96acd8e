//! One virtual machine's memory: its memslots, its tables, and what keeps the two in step.
//!
//! A file per mechanism: [`fault`], [`region`] (slot changes), [`invalidate`], [`dirty`].
//!
//! # Locks, from the outside in
//! 1. the slot writers' lock of an address space: held over a whole slot change, flush included. No
//!    vCPU takes it, so a flush may be awaited under it;
//! 2. the list of invalidations in progress, and each table's lock: short sections in which nothing
//!    is waited for ([`crate::table`], [`crate::sync::lock`]).
//!
//! A thread waits for a flush or an invalidation only from outside every reader section
//! ([`crate::sync::quiesce`]).

mod dirty;
mod fault;
mod invalidate;
mod region;

pub(crate) use dirty::DirtyLog;
pub use dirty::DirtyLogError;
pub use fault::{Stop, Translation};
pub use invalidate::Invalidation;
pub(crate) use invalidate::{InProgress, Sequence};

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

use crate::addr::{Gfn, Level, Pfn};
use crate::format::Format;
use crate::platform::{Platform, VmId, WaitFor};
use crate::policy::Policy;
use crate::slots::Slots;
use crate::stats::{Counters, Stats};
use crate::sync::quiesce::{Reader, Readers};
use crate::table::{OutOfMemory, Tree, Zapped};

/// How a VM is made.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Address spaces, each with its own memslots and tables (x86 has a second one for SMM).
    pub spaces: usize,
}

impl Default for Config {
    fn default() -> Self {
        Config { spaces: 1 }
    }
}

/// The memory of one VM, for walkers of format `F` on platform `P`.
///
/// All methods take `&self` and may be called from any thread. CPUs come in by
/// [`Vm::create_vcpu`].
pub struct Vm<P: Platform, F: Format> {
    pub(crate) id: VmId,
    pub(crate) platform: Arc<P>,
    pub(crate) policy: Policy,
    pub(crate) spaces: Vec<Space<P, F>>,
    pub(crate) in_progress: InProgress,
    /// Raised when translations have been taken away, and the value up to which they are flushed:
    /// who finds nothing to zap may still owe its caller the flush of somebody else's zap.
    flush_owed: AtomicU64,
    flush_paid: AtomicU64,
    /// Range operations that may have taken something away and do not owe its flush yet.
    zapping: AtomicUsize,
    /// Dropped last: sections refer to it.
    pub(crate) readers: Readers,
}

/// One address space: slots and the tables that translate them.
pub(crate) struct Space<P: Platform, F: Format> {
    pub(crate) slots: Slots,
    pub(crate) tree: Tree<P, F>,
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// A VM without memory and without CPUs.
    ///
    /// # Errors
    /// [`OutOfMemory`] if there is no frame for the root tables.
    pub fn new(platform: Arc<P>, config: Config) -> Result<Arc<Self>, OutOfMemory> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let mut spaces = Vec::new();
        spaces
            .try_reserve_exact(config.spaces)
            .map_err(|_| OutOfMemory)?;
        for _ in 0..config.spaces {
            spaces.push(Space {
                slots: Slots::new(),
                tree: Tree::new(platform.clone())?,
            });
        }
        let readers = Readers::new();
        readers.put_aside(readers.register()?);
        Ok(Arc::new(Vm {
            id: VmId(NEXT_ID.fetch_add(1, Relaxed)),
            platform,
            policy: Policy::default(),
            spaces,
            in_progress: InProgress::new(),
            flush_owed: AtomicU64::new(0),
            flush_paid: AtomicU64::new(0),
            zapping: AtomicUsize::new(0),
            readers,
        }))
    }

    /// Its identity towards the platform.
    pub fn id(&self) -> VmId {
        self.id
    }

    /// The platform it stands on.
    pub fn platform(&self) -> &Arc<P> {
        &self.platform
    }

    /// Its switches.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The frame of the root table of an address space: what EPTP, nCR3, VTTBR or hgatp point to.
    pub fn root(&self, space: usize) -> Option<Pfn> {
        Some(self.spaces.get(space)?.tree.root())
    }

    /// The sum of all counters. While CPUs run, counters of one event may be seen apart.
    pub fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        for reader in self.readers.iter() {
            sum.add(&reader.counters.snapshot());
        }
        sum
    }

    /// A reader section for the length of one operation of a thread that is no vCPU.
    pub(crate) fn section(&self) -> Section<'_> {
        let mut round = 0;
        let reader = loop {
            // A reader was put aside when the VM was made. It goes to operations only, so out of
            // memory means no more than to wait for the one before.
            match self.readers.borrow() {
                Ok(reader) => break reader,
                Err(OutOfMemory) => self.platform.wait(round, WaitFor::Lock),
            }
            round += 1;
        };
        let section = Section {
            readers: &self.readers,
            reader,
        };
        section.enter();
        section
    }

    /// Before a range operation looks at its first entry. Another one may find nothing left to do
    /// where this one has been, and must not believe that no flush is owed.
    pub(crate) fn begin_zap(&self) {
        self.zapping.fetch_add(1, SeqCst);
    }

    /// After it, when it owes its flush.
    pub(crate) fn end_zap(&self) {
        self.zapping.fetch_sub(1, SeqCst);
    }

    /// Notes that translations were taken away; a flush is owed from now on.
    pub(crate) fn owe_flush(&self) {
        self.flush_owed.fetch_add(1, SeqCst);
    }

    /// Makes sure that no CPU uses a translation that was taken away before this call, by whomever,
    /// and frees what `zapped` holds. The caller is outside every reader section and has called
    /// [`Vm::owe_flush`] after zapping.
    pub(crate) fn flush(
        &self,
        space: &Space<P, F>,
        range: Range<Gfn>,
        zapped: Zapped,
        counters: &Counters,
    ) {
        counters.remote_tlb_flush_requests.add(1);
        // In this order: an operation owes first, and is no longer counted after that.
        let quiet = self.zapping.load(SeqCst) == 0;
        let owed = self.flush_owed.load(SeqCst);
        if quiet && zapped.is_empty() && self.flush_paid.load(SeqCst) >= owed {
            return;
        }
        // First the software side: after it no late fault can still add a leaf to a detached table.
        // Then the hardware: it forgets what it may have walked there. Then nobody can reach them.
        self.readers.synchronize(|round, token| {
            self.platform.wait(round, WaitFor::Reader(token));
        });
        self.platform.flush(self.id, range);
        self.flush_paid.fetch_max(owed, SeqCst);
        counters.remote_tlb_flush.add(1);
        let mut counts = zapped.leaves;
        // SAFETY: all readers have passed since the tables were detached, and hardware is flushed.
        let freed = unsafe { space.tree.free(zapped.detached) };
        for (count, freed) in counts.iter_mut().zip(freed) {
            *count += freed;
        }
        counters.leaves_gone(&counts);
    }

    /// The largest level at which the page at `gfn` of `slot` may be mapped, if the host mapping
    /// around it has `host` level and begins at `pfn`.
    pub(crate) fn fitting_level(
        &self,
        gfns: &Range<Gfn>,
        gfn: Gfn,
        pfn: Pfn,
        host: Level,
    ) -> Level {
        if !self.policy.huge_pages() {
            return Level::PAGE;
        }
        let mut level = host.min(F::MAX_LEAF);
        while level > Level::PAGE {
            let base = gfn.align_down(level);
            let inside = gfns.start <= base && base.add(level.pages()) <= gfns.end;
            let congruent = (gfn.0 ^ pfn.0) & (level.pages() - 1) == 0;
            if inside && congruent {
                break;
            }
            level = level.below();
        }
        level
    }
}

/// Keeps a reader inside; gives it back when dropped.
pub(crate) struct Section<'a> {
    readers: &'a Readers,
    reader: &'a Reader,
}

impl<'a> Section<'a> {
    pub(crate) fn counters(&self) -> &'a Counters {
        &self.reader.counters
    }

    pub(crate) fn enter(&self) {
        self.reader.enter(self.readers, 0);
    }

    /// Ends the section; the reader, and the right to count, stay.
    pub(crate) fn leave(&self) {
        self.reader.leave();
    }
}

impl Drop for Section<'_> {
    fn drop(&mut self) {
        self.readers.put_aside(self.reader);
    }
}
