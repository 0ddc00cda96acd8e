//! The memory of one VM: memslots, tables, and the operations that keep the tables consistent with the slots and with
//! the host.
//!
//! Each mechanism has a file: [`region`] (slot changes), [`fork`] (clones), [`snapshot`], [`invalidate`], [`dirty`], [`drain`],
//! [`ring`] and [`log_reader`], [`attributes`] (conversions), [`nx`], [`recover`] and [`promote`] (huge pages), [`age`]
//! and [`cold`]. [`leaf`] decides which leaf a page gets, and [`mapping`] looks up which leaf a page has. [`usage`]
//! reports the memory used. [`range_op`] has the common parts of range operations, and [`slot_op`] those of long
//! operations on one slot. Faults and prefetch belong to the vCPU ([`crate::vcpu`]).
//!
//! # Locks, in the order in which they are taken
//! 1. The lock of the list of dirty rings: held during a whole reset.
//! 2. The turn (a fair lock) of a slot's dirty log: held while logging starts, or during a whole harvest or clear.
//! 3. The slot writers' lock of an address space: held during a slot change (a deletion or move releases it before its
//!    flush), or during one step of an operation on a slot ([`slot_op`]). A conversion takes these locks of all address
//!    spaces, in their order, and releases them before it zaps. No thread takes this lock in a reader section, so its
//!    holder may wait for a flush.
//! 4. The list of the logs' readers: held while a slot change makes logs for them, which allocates.
//! 5. One of: the lock of the hull of the invalidations in progress, that of the snapshot's record, that of shadow pages, a table's lock, the lock
//!    of a walker's buffer. Held for a few instructions or one table. The holder waits for nothing, not even for
//!    another lock of this list ([`crate::table`], [`crate::sync::spin`]). But a thread that holds the lock of shadow
//!    pages may take the lock of a table of the tree beside them.
//!
//! Locks 1 to 4 are fair: first come, first served ([`crate::sync::fair`]). There is one exception to the order: a slot
//! change that starts dirty logging takes lock 2 of the new log while it holds lock 3. No other thread can find the new
//! log yet.
//!
//! A thread waits for a flush or an invalidation only from outside every reader section ([`crate::sync::quiesce`]).

mod age;
mod attributes;
mod cold;
mod departure;
mod dirty;
mod drain;
mod edge;
mod fork;
mod inspect;
mod invalidate;
mod leaf;
mod log_reader;
mod mapping;
mod mmu_pages;
mod nx;
mod promote;
pub(crate) mod range_op;
mod recover;
mod region;
mod ring;
mod shadow;
mod slot_op;
mod snapshot;
mod usage;

pub(crate) use crate::dirty_log::{DirtyLog, LogKind};
pub use cold::{ColdMap, ColdRange};
pub use dirty::DirtyLogError;
pub use invalidate::Invalidation;
pub(crate) use invalidate::{InProgress, Sequence};
pub(crate) use leaf::{is_executable, leaf_of};
pub use log_reader::{DirtyRange, Epoch, LogReader};
pub use mapping::Mapping;
pub use promote::Promotion;
pub(crate) use range_op::RangeOp;
pub(crate) use ring::RingSlot;
pub use ring::{DirtyGfn, DirtyRing, DirtyRingError};
pub use snapshot::{Snapshot, SnapshotError};
pub use usage::MemoryUsage;

use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::ops::RangeInclusive;

use crate::addr::{Granule, Pfn};
use crate::format::{Format, can_shadow, check_limits};
use crate::heap::{OutOfMemory, Shared};
use crate::mmu::{Mmu, MmuKind};
use crate::platform::{Platform, VmId, WaitFor};
use crate::policy::{AtomicPolicy, Policy};
use crate::shadow::Budget;
use crate::slots::Slots;
use crate::stats::{Counters, Stats};
use crate::sync::quiesce::{Inside, Readers};
use crate::sync::{FairLock, Guarded, InSection, held};
use crate::table::{Flushes, Root, TableFrames};

/// The configuration of a new VM.
///
/// ```
/// let config = slat::Config::default().with_spaces(2);
/// assert_eq!(config.spaces, 2);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Config {
    /// The number of address spaces, each with its own memslots and tables (x86 uses a second address space for SMM). 0
    /// counts as 1; the maximum is 65536.
    pub spaces: usize,
    /// The width of the machine's physical addresses in bits (MAXPHYADDR), from 32 to 56. If the format's MMIO entries
    /// need a reserved address bit that the machine does not have, MMIO is not cached.
    pub physical_bits: u32,
    /// The policies of the VM: the mechanisms that it uses.
    pub policy: Policy,
    /// The MMU that makes the VM's tables.
    pub mmu: MmuKind,
    /// Whether the VM shadows the tables that the guest, a hypervisor, makes for its own guests (nested paging).
    /// [`Vcpu::translate_virtual`](crate::Vcpu::translate_virtual) then translates addresses by these tables. Supported
    /// nested tables of x86's formats: EPT, NPT and x86's own. [`MmuKind::Shadow`] shadows nested tables even if this
    /// is `false`. If the guest makes no nested tables, `nested` costs a few KiB per VM with [`MmuKind::Tdp`], and 4
    /// KiB for each shadow page with [`MmuKind::Direct`].
    pub nested: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            spaces: 1,
            physical_bits: 48,
            policy: Policy::default(),
            mmu: MmuKind::default(),
            nested: false,
        }
    }
}

impl Config {
    /// Returns the configuration with `spaces` address spaces.
    #[must_use]
    pub fn with_spaces(self, spaces: usize) -> Self {
        Config { spaces, ..self }
    }

    /// Returns the configuration for a machine whose physical addresses have `bits` bits.
    #[must_use]
    pub fn with_physical_bits(self, bits: u32) -> Self {
        Config {
            physical_bits: bits,
            ..self
        }
    }

    /// Returns the configuration with tables of the kind `mmu`.
    #[must_use]
    pub fn with_mmu(self, mmu: MmuKind) -> Self {
        Config { mmu, ..self }
    }

    /// Returns the configuration with [`Self::nested`] set to `nested`.
    #[must_use]
    pub fn with_nested(self, nested: bool) -> Self {
        Config { nested, ..self }
    }
}

/// The widths of physical addresses in bits that architectures have: from x86 without PAE to RISC-V.
const PHYSICAL_BITS: RangeInclusive<u32> = 32..=56;

/// The reason why a VM was not created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CreateVmError {
    /// There is no MMU of the requested kind for tables of this format.
    NoSuchMmu {
        /// The requested MMU.
        mmu: MmuKind,
        /// The name of the format.
        format: &'static str,
    },
    /// The platform's pages do not have the size of the format's pages ([`Platform::granule`]).
    OtherGranule {
        /// The granule of the platform.
        platform: Granule,
        /// The granule of the format.
        format: Granule,
    },
    /// Tables of the format cannot shadow nested tables.
    NoNested {
        /// The name of the format.
        format: &'static str,
    },
    /// No machine has physical addresses with this number of bits ([`Config::physical_bits`]).
    NoSuchWidth(u32),
    /// The number of address spaces is above 65536: a ring entry could not distinguish them.
    TooManySpaces(usize),
    /// There was no frame for a root table, or no heap memory.
    OutOfMemory,
}

impl From<OutOfMemory> for CreateVmError {
    fn from(_: OutOfMemory) -> Self {
        CreateVmError::OutOfMemory
    }
}

impl fmt::Display for CreateVmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CreateVmError::NoSuchMmu { mmu, format } => write!(
                f,
                "creating a VM: there is no {} MMU for tables of format {format}; tdp is for all",
                mmu.name()
            ),
            CreateVmError::OtherGranule { platform, format } => write!(
                f,
                "creating a VM: the platform has pages of {:#x} bytes, the format's tables of {:#x}; take a format with the platform's",
                platform.bytes(),
                format.bytes()
            ),
            CreateVmError::NoNested { format } => write!(
                f,
                "creating a VM: tables of format {format} cannot shadow nested ones; leave Config::nested false"
            ),
            CreateVmError::NoSuchWidth(bits) => write!(
                f,
                "creating a VM: physical addresses of {bits} bits; give the width that the processor tells, from {} to {}",
                PHYSICAL_BITS.start(),
                PHYSICAL_BITS.end()
            ),
            CreateVmError::TooManySpaces(spaces) => write!(
                f,
                "creating a VM: {spaces} address spaces; ask for at most {}",
                RingSlot::SPACES
            ),
            CreateVmError::OutOfMemory => f.write_str("creating a VM: no memory"),
        }
    }
}

impl core::error::Error for CreateVmError {}

/// The memory of one VM, for page walkers of format `F` on platform `P`.
///
/// ```
/// # use slat_model::{HostMemory, SimPlatform};
/// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
/// use slat::{Access, Config, Ept, Gpa, Region, Vm};
///
/// let vm = Vm::<_, Ept>::new(platform, Config::default())?;
/// vm.set_memory_region(0, &Region::new(0, Gpa(0x10_0000), 0x20_0000, backing))?;
///
/// let mut vcpu = vm.create_vcpu()?;
/// let page = vcpu.enter(0).translate(Gpa(0x10_3000), Access::Write)?;
/// assert!(page.write);
/// assert_eq!(vm.stats().pf_fixed, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// All methods take `&self` and may be called from any thread. [`Vm::create_vcpu`] creates vCPUs.
///
/// Dropping a VM frees its tables without a flush. So no CPU may be able to walk them any more ([`Platform`],
/// "Safety").
pub struct Vm<P: Platform, F: Format> {
    pub(crate) id: VmId,
    pub(crate) platform: Arc<P>,
    pub(crate) policy: AtomicPolicy,
    pub(crate) spaces: Vec<Space<P, F>>,
    pub(crate) in_progress: InProgress,
    pub(crate) flushes: Shared<Flushes>,
    pub(crate) budget: Shared<Budget>,
    pub(crate) frames: Shared<TableFrames>,
    mmu: MmuKind,
    nested: bool,
    log_mode: LogMode,
    /// The dirty rings of all vCPUs. The lock serializes resets.
    rings: FairLock<Vec<Arc<DirtyRing>>>,
    /// The readers of the dirty logs, besides the client.
    log_readers: FairLock<log_reader::ReaderList>,
    /// The snapshot in progress.
    saving: snapshot::Saving,
    /// The position at which the next recovery of NX huge pages begins.
    nx_cursor: AtomicU64,
    /// Whether MMIO entries of the format work on this machine.
    mmio_entries: bool,
    /// Declared last, so that it is dropped last, after everything that readers use.
    pub(crate) readers: Readers,
}

/// Settings of the VM's dirty logs.
#[derive(Default)]
struct LogMode {
    /// Whether getting a log leaves its pages unprotected ([`Vm::set_manual_dirty_log`]).
    manual: AtomicBool,
    /// Whether new dirty logs have every page marked at first (KVM_DIRTY_LOG_INITIALLY_SET).
    initially_set: AtomicBool,
    /// Whether new logs write to rings and have no bitmap ([`Vm::use_dirty_rings`]).
    rings: AtomicBool,
    /// Whether there are readers of the logs besides the client ([`Vm::log_reader`]). If so, all logs have a bitmap,
    /// and slots without the flag [`SlotFlags::LOG_DIRTY_PAGES`](crate::SlotFlags) also log.
    readers: AtomicBool,
    /// Whether a log of the kind [`LogKind::Buffers`] has ever existed. If so, software CPUs fill their buffers.
    buffers: AtomicBool,
}

/// One address space of a VM: its slots, and its MMU.
pub(crate) struct Space<P: Platform, F: Format> {
    pub(crate) slots: Slots,
    /// Usable only by callers in a reader section.
    pub(crate) mmu: Guarded<Mmu<P, F>>,
    root: Root,
    /// The number of vCPUs that use the address space, if the VM has several address spaces ([`Vm::vcpu_moves`]).
    vcpus: AtomicUsize,
}

impl<P: Platform, F: Format> Space<P, F> {
    fn new(mmu: Mmu<P, F>) -> Result<Self, OutOfMemory> {
        Ok(Space {
            slots: Slots::new()?,
            root: mmu.context(),
            mmu: Guarded::new(mmu),
            vcpus: AtomicUsize::new(0),
        })
    }

    /// Returns the root from which walks by guest-physical addresses start in this address space.
    pub(crate) fn root(&self) -> Root {
        self.root
    }
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Makes a VM without memslots and vCPUs, in an [`Arc`]. If there is no heap memory for the [`Arc`], the program
    /// aborts; to avoid this, use [`Vm::unshared`].
    ///
    /// # Errors
    /// The errors of [`Vm::unshared`].
    pub fn new(platform: Arc<P>, config: Config) -> Result<Arc<Self>, CreateVmError> {
        Self::unshared(platform, config).map(Arc::new)
    }

    /// Makes a VM without memslots and vCPUs. The caller puts it in an [`Arc`], and can allocate the memory for it in
    /// advance in a way that does not abort.
    ///
    /// # Errors
    /// [`CreateVmError`].
    pub fn unshared(platform: Arc<P>, config: Config) -> Result<Self, CreateVmError> {
        const { check_limits::<F>() };
        static NEXT_ID: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);
        let (mmu, format) = (config.mmu, F::NAME);
        if !mmu.serves::<F>() {
            return Err(CreateVmError::NoSuchMmu { mmu, format });
        }
        if config.nested && !mmu.nests::<F>() {
            return Err(CreateVmError::NoNested { format });
        }
        // Check before any frame is accessed: the accesses are sound only if frames have the size that the format
        // assumes.
        if platform.granule() != F::GRANULE {
            return Err(CreateVmError::OtherGranule {
                platform: platform.granule(),
                format: F::GRANULE,
            });
        }
        if !PHYSICAL_BITS.contains(&config.physical_bits) {
            return Err(CreateVmError::NoSuchWidth(config.physical_bits));
        }
        if config.spaces > RingSlot::SPACES {
            return Err(CreateVmError::TooManySpaces(config.spaces));
        }
        let id = VmId(NEXT_ID.fetch_add(1, Relaxed));
        let flushes = Shared::try_new(Flushes::default())?;
        let budget = Shared::try_new(Budget::default())?;
        let frames = Shared::try_new(TableFrames::new(id))?;
        let mut spaces = Vec::new();
        spaces
            .try_reserve_exact(config.spaces.max(1))
            .map_err(|_| OutOfMemory)?;
        for _ in 0..config.spaces.max(1) {
            let (frames, flushes) = (frames.clone(), flushes.clone());
            let kind = (mmu, config.nested);
            let mmu = Mmu::new(kind, platform.clone(), frames, flushes, budget.clone())?;
            spaces.push(Space::new(mmu)?);
        }
        let readers = Readers::new();
        readers.prepare()?;
        Ok(Vm {
            id,
            platform,
            policy: AtomicPolicy::new(config.policy),
            spaces,
            in_progress: InProgress::new(),
            flushes,
            budget,
            frames,
            mmu: config.mmu,
            nested: config.nested,
            log_mode: LogMode::default(),
            rings: FairLock::new(Vec::new()),
            log_readers: FairLock::new(log_reader::ReaderList::new()),
            saving: snapshot::Saving::new(),
            nx_cursor: AtomicU64::new(0),
            mmio_entries: F::MMIO_GENERATION_BITS > 0
                && config.physical_bits <= F::MMIO_PHYSICAL_BITS,
            readers,
        })
    }

    /// Returns the id by which the platform knows the VM.
    pub fn id(&self) -> VmId {
        self.id
    }

    /// Returns the platform that the VM was made with.
    pub fn platform(&self) -> &Arc<P> {
        &self.platform
    }

    /// Returns the kind of MMU that makes the VM's tables.
    pub fn mmu(&self) -> MmuKind {
        self.mmu
    }

    /// Returns whether the VM shadows tables of the guest. With [`MmuKind::Shadow`] it shadows all of the guest's
    /// tables, otherwise only nested tables ([`Config::nested`]).
    pub fn shadows_nested(&self) -> bool {
        can_shadow::<F>() && (self.nested || self.mmu == MmuKind::Shadow)
    }

    /// Returns the current policies of the VM.
    pub fn policy(&self) -> Policy {
        self.policy.get()
    }

    /// Returns the frame of the root table of address space `space`, for the register or field from which a walk
    /// starts: nCR3, [`EPTP`](crate::Ept::eptp), [`VTTBR_EL2`](crate::format::Stage2::vttbr) or
    /// [`hgatp`](crate::format::GStage::hgatp). The frame never changes. `None`: there is no such address space.
    pub fn root(&self, space: usize) -> Option<Pfn> {
        Some(self.spaces.get(space)?.root().frame())
    }

    /// Returns the sum of all counters. While vCPUs run, an event that raises several counters may be included in only
    /// some of them.
    pub fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        for reader in self.readers.iter() {
            sum.add(&reader.counters.snapshot());
        }
        // Slot changes are counted by the slots, not by readers.
        sum.slot_changes = self.spaces.iter().map(|space| space.slots.changes()).sum();
        sum
    }

    /// Returns whether faults on frames without a slot install MMIO entries.
    pub(crate) fn caches_mmio(&self) -> bool {
        self.mmio_entries && self.policy.mmio_caching().is_on()
    }

    /// Begins a reader section for one operation. Do not use it for a vCPU, which has a reader of its own.
    pub(crate) fn section(&self) -> Section<'_> {
        let mut round = 0;
        let inside = loop {
            // `None`: all readers are in use, and there is no memory for another. Wait until an operation releases a
            // reader: one was made with the VM for operations alone.
            match self.readers.enter() {
                Ok(inside) => break inside,
                Err(OutOfMemory) => self.wait(round, WaitFor::Turn),
            }
            round += 1;
        };
        held::section_begins();
        Section {
            readers: &self.readers,
            noted: Noted,
            inside,
            budget: held::MOST_ENTRIES,
        }
    }
}

/// A reader section of an operation. Dropping it ends the section and releases the reader.
pub(crate) struct Section<'a> {
    readers: &'a Readers,
    noted: Noted,
    inside: Inside<'a>,
    /// The number of page-table entries that the operation may still read in this section.
    budget: u32,
}

impl<'a> Section<'a> {
    pub(crate) fn counters(&self) -> &'a Counters {
        &self.inside.reader().counters
    }

    /// Returns a token that proves that the caller is in a reader section.
    #[inline(always)]
    pub(crate) fn inside(&self) -> InSection<'_> {
        self.inside.inside()
    }

    /// Like [`Self::inside`], but also returns the number of page-table entries that may still be read in the section.
    pub(crate) fn inside_with_budget(&mut self) -> (InSection<'_>, &mut u32) {
        (self.inside.inside(), &mut self.budget)
    }

    /// Ends the section, runs `wait`, and begins another section with the same reader.
    pub(crate) fn outside<R>(&mut self, wait: impl FnOnce(&'a Counters) -> R) -> R {
        held::section_ends();
        let counters = self.counters();
        let result = (self.inside).outside(self.readers, || wait(counters));
        held::section_begins();
        self.budget = held::MOST_ENTRIES;
        result
    }

    /// Ends the section, but keeps the reader.
    pub(crate) fn end(self) -> Ended<'a> {
        drop(self.noted);
        self.inside.reader().leave();
        Ended(self.inside)
    }
}

/// For debug builds: when dropped, tells [`held`] that a section has ended.
struct Noted;

impl Drop for Noted {
    fn drop(&mut self) {
        held::section_ends();
    }
}

/// The reader of a section that has ended. Dropping this releases the reader for reuse.
pub(crate) struct Ended<'a>(Inside<'a>);

impl<'a> Ended<'a> {
    /// Returns the reader's counters. No other operation uses them as long as `self` exists.
    pub(crate) fn counters(&self) -> &'a Counters {
        &self.0.reader().counters
    }
}
