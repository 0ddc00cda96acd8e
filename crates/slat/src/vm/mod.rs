//! One virtual machine's memory: its memslots, its tables, and what keeps the two in step.
//!
//! A file per mechanism: [`fault`], [`region`] (slot changes), [`invalidate`], [`dirty`] and [`ring`],
//! [`attributes`], [`prefetch`], [`nx`], [`age`]. What range operations share is [`range_op`].
//!
//! # Locks, from the outside in
//! 1. the list of dirty rings: held over a whole reset;
//! 2. the slot writers' lock of an address space: held over a whole slot change, or a whole harvest, flush
//!    included. No vCPU takes it inside, so a flush may be awaited under it. A conversion ([`attributes`])
//!    takes those of all address spaces, in their order. Both are fair ([`crate::sync::fair`]): whoever comes
//!    first goes first;
//! 3. one of: the hull of the invalidations in progress, a table's lock. Short sections in which nothing
//!    is waited for, not even another such lock ([`crate::table`], [`crate::sync::spin`]).
//!
//! A thread waits for a flush or an invalidation only from outside every reader section
//! ([`crate::sync::quiesce`]).

mod age;
mod attributes;
mod dirty;
mod fault;
mod inspect;
mod invalidate;
mod nx;
mod prefetch;
mod range_op;
mod region;
mod ring;
mod slot_op;

pub(crate) use crate::dirty_log::{DirtyLog, LogKind};
pub use dirty::DirtyLogError;
pub use fault::{Stop, Translation};
pub use invalidate::Invalidation;
pub(crate) use invalidate::{InProgress, Sequence};
pub(crate) use prefetch::Window;
pub(crate) use range_op::RangeOp;
pub use ring::{DirtyGfn, DirtyRing};

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use crate::addr::{Gfn, Hva, Level, Pfn};
use crate::format::Format;
use crate::heap::Shared;
use crate::platform::{Platform, VmId, WaitFor};
use crate::policy::Policy;
use crate::slots::Slots;
use crate::stats::{Counters, Stats};
use crate::sync::quiesce::{Reader, Readers};
use crate::sync::{FairLock, Guarded, InSection, held};
use crate::table::{Flushes, OutOfMemory, Tree};

/// How a VM is made.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Address spaces, each with its own memslots and tables (x86 has a second one for SMM).
    pub spaces: usize,
    /// Width of the machine's physical addresses (MAXPHYADDR). Where the format's MMIO entries need a
    /// reserved address bit that the machine does not have, MMIO is not cached.
    pub physical_bits: u32,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            spaces: 1,
            physical_bits: 48,
        }
    }
}

/// The memory of one VM, for walkers of format `F` on platform `P`.
///
/// All methods take `&self` and may be called from any thread. CPUs come in by
/// [`Vm::create_vcpu`].
///
/// When a VM is dropped its tables go back to the platform without a flush: no CPU may be able to walk them
/// any more ([`Platform`], "Safety").
pub struct Vm<P: Platform, F: Format> {
    pub(crate) id: VmId,
    pub(crate) platform: Arc<P>,
    pub(crate) policy: Policy,
    pub(crate) spaces: Vec<Space<P, F>>,
    pub(crate) in_progress: InProgress,
    pub(crate) flushes: Shared<Flushes>,
    log_mode: LogMode,
    /// Every vCPU's, while they are in use. The lock serializes resets.
    rings: FairLock<Vec<Arc<DirtyRing>>>,
    /// Where the next recovery of NX huge pages begins.
    nx_cursor: AtomicU64,
    /// The format has MMIO entries that work on this machine.
    mmio_entries: bool,
    /// Dropped last: sections refer to it.
    pub(crate) readers: Readers,
}

/// How slots that begin to log do it.
#[derive(Default)]
struct LogMode {
    manual: AtomicBool,
    initially_set: AtomicBool,
    rings: AtomicBool,
}

/// One address space: slots and the tables that translate them.
pub(crate) struct Space<P: Platform, F: Format> {
    pub(crate) slots: Slots,
    /// All that [`Tree`] does, it does for a caller in a reader section.
    pub(crate) tree: Guarded<Tree<P, F>>,
    root: Pfn,
}

impl<P: Platform, F: Format> Space<P, F> {
    fn new(platform: Arc<P>, flushes: Shared<Flushes>) -> Result<Self, OutOfMemory> {
        let tree = Tree::new(platform, flushes)?;
        Ok(Space {
            slots: Slots::new()?,
            root: tree.root(),
            tree: Guarded::new(tree),
        })
    }

    /// The frame of its root table.
    pub(crate) fn root(&self) -> Pfn {
        self.root
    }
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// A VM without memory and without CPUs, shared: [`Vm::unshared`] in `Arc::new`, which aborts if
    /// there is no heap memory for so much as this struct.
    ///
    /// # Errors
    /// As [`Vm::unshared`].
    pub fn new(platform: Arc<P>, config: Config) -> Result<Arc<Self>, OutOfMemory> {
        Self::unshared(platform, config).map(Arc::new)
    }

    /// A VM without memory and without CPUs. Whoever runs it shares it; where that allocation may fail,
    /// too, the room for it (`Arc::new_uninit`) is got in good time.
    ///
    /// # Errors
    /// [`OutOfMemory`] if there is no frame for the root tables, or no heap memory.
    pub fn unshared(platform: Arc<P>, config: Config) -> Result<Self, OutOfMemory> {
        static NEXT_ID: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);
        let flushes = Shared::try_new(Flushes::default())?;
        let mut spaces = Vec::new();
        spaces
            .try_reserve_exact(config.spaces)
            .map_err(|_| OutOfMemory)?;
        for _ in 0..config.spaces {
            spaces.push(Space::new(platform.clone(), flushes.clone())?);
        }
        let readers = Readers::new();
        readers.put_aside(readers.register()?);
        Ok(Vm {
            id: VmId(NEXT_ID.fetch_add(1, Relaxed)),
            platform,
            policy: Policy::default(),
            spaces,
            in_progress: InProgress::new(),
            flushes,
            log_mode: LogMode::default(),
            rings: FairLock::new(Vec::new()),
            nx_cursor: AtomicU64::new(0),
            mmio_entries: config.physical_bits <= F::MMIO_PHYSICAL_BITS,
            readers,
        })
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

    /// The frame of the root table of an address space, for as long as the VM lives: what nCR3,
    /// [`EPTP`](crate::Ept::eptp), [`VTTBR_EL2`](crate::format::Stage2::vttbr) or
    /// [`hgatp`](crate::format::GStage::hgatp) point to.
    pub fn root(&self, space: usize) -> Option<Pfn> {
        Some(self.spaces.get(space)?.root())
    }

    /// The sum of all counters. While CPUs run, counters of one event may be seen apart.
    pub fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        for reader in self.readers.iter() {
            sum.add(&reader.counters.snapshot());
        }
        // Their writers are no readers, but count for themselves.
        sum.slot_changes = self.spaces.iter().map(|space| space.slots.changes()).sum();
        sum
    }

    pub(crate) fn caches_mmio(&self) -> bool {
        self.mmio_entries && self.policy.caches_mmio()
    }

    /// A reader section for the length of one operation of a thread that is no vCPU.
    pub(crate) fn section(&self) -> Section<'_> {
        let mut round = 0;
        let reader = loop {
            // A reader was put aside when the VM was made. It goes to operations only, so out of
            // memory means no more than to wait for the one before.
            match self.readers.borrow() {
                Ok(reader) => break reader,
                Err(OutOfMemory) => self.wait(round, WaitFor::Turn),
            }
            round += 1;
        };
        reader.enter(&self.readers, 0);
        held::section_begins();
        Section {
            readers: &self.readers,
            reader,
            left: held::MOST_ENTRIES,
        }
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
        if !self.policy.maps_huge() {
            return Level::PAGE;
        }
        let mut level = host.min(F::MAX_LEAF);
        while level > Level::PAGE {
            let block = gfn.block(level);
            let inside = gfns.start <= block.start && block.end <= gfns.end;
            let congruent = (gfn.0 ^ pfn.0) & (level.pages() - 1) == 0;
            if inside && congruent {
                break;
            }
            level = level.below();
        }
        level
    }
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// The largest level at which `gfn`, backed by `hva`, of the slot at `gfns` could be mapped as the host is
    /// now.
    fn host_level(&self, gfns: &Range<Gfn>, gfn: Gfn, hva: Hva) -> Level {
        let mut level = Level::PAGE;
        held::assert_none("to ask the host");
        self.platform
            .resolve_resident(hva..hva.add_pages(1), &mut |run| {
                level = self.fitting_level(gfns, gfn, run.first.pfn, run.first.level);
            });
        level
    }
}

/// A reader that is in a section; given back when dropped.
pub(crate) struct Section<'a> {
    readers: &'a Readers,
    reader: &'a Reader,
    /// How many entries may still be looked at in it.
    left: u32,
}

impl<'a> Section<'a> {
    pub(crate) fn counters(&self) -> &'a Counters {
        &self.reader.counters
    }

    #[inline(always)]
    pub(crate) fn inside(&self) -> InSection<'_> {
        // SAFETY: the reader is nobody else's (`Readers::borrow`), is in a section, and leaves it only when
        // `self` is borrowed mutably or given away.
        unsafe { InSection::assume() }
    }

    /// The proof, and how many entries may still be looked at with it.
    pub(crate) fn inside_with_leave(&mut self) -> (InSection<'_>, &mut u32) {
        // SAFETY: as in `inside`: both borrow `self` as long as they are used.
        (unsafe { InSection::assume() }, &mut self.left)
    }

    /// Runs `wait` between this section and the next of the same reader.
    pub(crate) fn outside<R>(&mut self, wait: impl FnOnce(&'a Counters) -> R) -> R {
        self.leave();
        let result = wait(&self.reader.counters);
        self.reader.enter(self.readers, 0);
        held::section_begins();
        self.left = held::MOST_ENTRIES;
        result
    }

    /// Ends the section. Who had it may still count.
    pub(crate) fn end(&mut self) -> &'a Counters {
        self.leave();
        &self.reader.counters
    }

    fn leave(&self) {
        held::section_ends();
        self.reader.leave();
    }
}

impl Drop for Section<'_> {
    fn drop(&mut self) {
        held::section_ends();
        self.readers.put_aside(self.reader);
    }
}
