//! What the machine under the engine provides.
//!
//! The engine allocates no table memory, touches no host mapping and interrupts no CPU by itself:
//! it asks a [`Platform`]. The userspace port (`slat-host`) and a bare-metal hypervisor implement
//! the same trait; the engine's source is the same for both.

use core::fmt;
use core::ops::Range;
use core::ptr::NonNull;

use crate::addr::{Access, Gfn, Granule, Hva, Level, Pfn};
use crate::format::MemoryType;
use crate::frame::{Entries, TableMeta};
use crate::heap::OutOfMemory;
use crate::trace::Event;

/// Identifies a VM towards its [`Platform`], for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VmId(pub u64);

/// The host page that [`Platform::resolve`] found at a backing address.
///
/// ```
/// use slat::{HostPage, Level, MemoryType, Pfn};
/// let memory = HostPage::new(Pfn(0x1234), Level::PAGE);
/// let rom = memory.with_writable(false);
/// let frame_buffer = memory.with_memory(MemoryType::WriteCombining).with_execute(false);
/// # let _ = (rom, frame_buffer);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostPage {
    /// The frame of the page asked for (not of the start of the huge mapping around it).
    pub pfn: Pfn,
    /// The size of the host mapping: the naturally aligned region of this level around
    /// the page is contiguous both in the backing and in host-physical memory.
    pub level: Level,
    /// The guest may be allowed to write without asking again.
    pub writable: bool,
    /// The guest may be allowed to execute. Only write-back memory is ever executed.
    pub execute: bool,
    /// How it is cached.
    pub memory: MemoryType,
}

impl HostPage {
    /// A page of ordinary memory that may be written and executed.
    pub fn new(pfn: Pfn, level: Level) -> Self {
        HostPage {
            pfn,
            level,
            writable: true,
            execute: true,
            memory: MemoryType::WriteBack,
        }
    }

    /// Returns the same mapping of another frame.
    #[must_use]
    pub fn with_pfn(self, pfn: Pfn) -> Self {
        HostPage { pfn, ..self }
    }

    /// Returns the same page in a host mapping of `level`.
    #[must_use]
    pub fn with_level(self, level: Level) -> Self {
        HostPage { level, ..self }
    }

    /// Returns the same page, writable or not.
    #[must_use]
    pub fn with_writable(self, writable: bool) -> Self {
        HostPage { writable, ..self }
    }

    /// Returns the same page, executable or not.
    #[must_use]
    pub fn with_execute(self, execute: bool) -> Self {
        HostPage { execute, ..self }
    }

    /// Returns the same page, cached as `memory` says.
    #[must_use]
    pub fn with_memory(self, memory: MemoryType) -> Self {
        HostPage { memory, ..self }
    }
}

/// The arguments of [`Platform::resolve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// The VM whose vCPU waits for the page: a platform may serve several.
    pub vm: VmId,
    /// The vCPU's address space.
    pub space: usize,
    /// The memslot that held `gfn` when it was looked up.
    pub slot: u32,
    /// The frame that the guest accesses.
    pub gfn: Gfn,
    /// The backing address of the frame: [`Region::backing`](crate::Region) of the slot, or
    /// [`Region::private`](crate::Region) if the frame is private, plus the offset of the frame in the slot.
    pub backing: Hva,
    /// The right that is needed.
    pub access: Access,
}

impl Request {
    /// Returns the same request for a page at `backing`: for a platform that passes requests on to another one.
    #[must_use]
    pub fn with_backing(self, backing: Hva) -> Self {
        Request { backing, ..self }
    }
}

/// A stretch of backing pages that are resident, contiguous in host-physical memory and alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRun {
    /// Backing address of the first page.
    pub backing: Hva,
    /// Number of pages, of the granule.
    pub pages: u64,
    /// The first page; its `pfn` counts up from there, the rest holds for all.
    pub first: HostPage,
}

impl HostRun {
    /// Returns the address after the last page.
    fn end(&self, granule: Granule) -> Hva {
        granule.add_pages(self.backing, self.pages)
    }

    /// Whether all of `backing` is in the run.
    pub(crate) fn covers(&self, backing: &Range<Hva>, granule: Granule) -> bool {
        self.backing <= backing.start && backing.end <= self.end(granule)
    }

    /// Returns the part in `backing`; `None` if that is empty.
    pub(crate) fn within(&self, backing: &Range<Hva>, granule: Granule) -> Option<HostRun> {
        let (start, end) = (
            self.backing.max(backing.start),
            self.end(granule).min(backing.end),
        );
        let pages = |from: Hva, to: Hva| granule.pages_between(from, to);
        (start < end).then(|| HostRun {
            backing: start,
            pages: pages(start, end),
            first: (self.first).with_pfn(self.first.pfn.add(pages(self.backing, start))),
        })
    }
}

/// A zapped leaf, as [`Platform::zapped`] is told of it: the state in which the guest has left its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ZappedLeaf {
    /// First of the [`Granule::pages`] contiguous host frames.
    pub pfn: Pfn,
    /// Its level.
    pub level: Level,
    /// The guest has used the memory since the accessed bit was last cleared ([`crate::Vm::age`]).
    pub accessed: bool,
    /// The guest has written to the memory, or may have where walkers set no dirty bit.
    pub dirty: bool,
}

/// Why a backing page cannot be resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResolveError {
    /// Nothing is mapped at this backing address, or not with the rights asked for.
    BadAddress,
    /// The host is out of memory.
    OutOfMemory,
    /// The wait was interrupted (a signal): the vCPU should leave and come again.
    Interrupted,
    /// The page is not there yet, because its contents are still in a snapshot or on another machine. The access ends
    /// with [`Stop::MemoryFault`](crate::Stop::MemoryFault); the caller brings the page, and runs the vCPU again. It is
    /// the same for pages with page tables of the guest.
    /// [`Platform::resolve_resident`] leaves such pages out, and no [`HostPage::level`] reaches over one.
    Absent,
}

impl fmt::Display for ResolveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ResolveError::BadAddress => "no host memory with these rights is mapped there",
            ResolveError::OutOfMemory => "the host is out of memory",
            ResolveError::Interrupted => "the wait for host memory was interrupted",
            ResolveError::Absent => "the page is not there yet",
        })
    }
}

impl core::error::Error for ResolveError {}

/// Why a VM was not cloned ([`Vm::fork_from`](crate::Vm::fork_from)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForkError {
    /// The platform does not give each VM pages of its own ([`Platform::share`]).
    Unsupported,
    /// No memory for the VM, its slots or its root, or for what the platform keeps. The call can be repeated.
    OutOfMemory,
}

impl From<OutOfMemory> for ForkError {
    fn from(_: OutOfMemory) -> Self {
        ForkError::OutOfMemory
    }
}

impl fmt::Display for ForkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ForkError::Unsupported => {
                "cloning a VM: the platform shares no pages between VMs; implement Platform::share"
            }
            ForkError::OutOfMemory => "cloning a VM: no memory",
        })
    }
}

impl core::error::Error for ForkError {}

/// The event for which the engine waits, an argument of [`Platform::wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitFor {
    /// The holder of a spin lock: a table's, or another that is held for a few instructions.
    Lock,
    /// Earlier operations that hold a lock over all they do, allocations and some flushes included: slot
    /// changes, harvests of dirty logs. Threads get it in the order of their requests. `round` counts from 0 again when
    /// the caller is next.
    Turn,
    /// An entered reader that has not yet passed a quiescent point; the value is what it gave to
    /// [`crate::Vcpu::enter`] (a thread id in the userspace port, 0 when unknown).
    Reader(usize),
    /// An invalidation in progress over the page of a fault ([`crate::Vm::invalidate`]), or a leaf
    /// that another thread is replacing by break-before-make.
    Invalidation,
}

/// The cached entries that a flush must void in its range, for machines that can flush less than everything
/// ([`Platform::flush`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    /// All leaves that were zapped, or have lost a right, are of this level, in the tables and in every TLB
    /// (AArch64: the TTL of a TLBI). `None`: of several, or not known; always so where leaves are split without a
    /// flush, because a TLB may still hold the huge one.
    pub level: Option<Level>,
    /// Entries that refer to tables were cleared. Otherwise only leaves were zapped: what a walker has cached on the
    /// path to them is still valid (AArch64: TLBI IPAS2LE1 in the place of IPAS2E1).
    pub tables: bool,
}

impl Stale {
    /// Leaves of any level, and tables.
    pub const ANYTHING: Stale = Stale {
        level: None,
        tables: true,
    };
}

/// The machine under the engine. One platform may serve several VMs: a method that works for one VM gets its [`VmId`].
///
/// # In which state its methods are called
/// The methods are called from any CPU or thread that uses the engine, from several at once, and on the
/// stack of the engine's caller. The engine masks no interrupt and unmasks none: they are as its caller has
/// them.
///
/// | method | in a reader section | under which locks of the engine | may wait | may allocate | may call the VM |
/// |---|---|---|---|---|---|
/// | `alloc_table`, `alloc_tables`, `free_table`, `free_tables` | yes | slots | for locks of its own | yes, no guest's memory is reclaimed for it | no |
/// | `alloc_root` | no: the VM is being made | none | for anything | yes | there is none |
/// | `entries`, `meta` | yes | slots, a table's | no | no | no |
/// | `resolve` | no | none | for anything: it may sleep | yes | yes, but for this vCPU |
/// | `populate` | no | none | for anything: it may sleep | yes | yes, but for this vCPU |
/// | `resolve_resident` | yes | none; by [`Vm::audit`](crate::Vm::audit) slots and a table's | for locks of its own | not the pages asked for | no |
/// | `share` | no | slots | for locks of its own | yes | no |
/// | `flush` | no | slots | for CPUs in the guest | yes | no |
/// | `drain` | no | none | for CPUs in the guest | yes | yes |
/// | `wait` | yes | slots; for a table's, that of shadow pages | shortly, that is its purpose | no | no |
/// | `zapped` | yes | slots, a table's | no | no | no |
/// | `trace` | yes | slots, a table's | no | no | no |
///
/// "Yes", and a lock that is named, mean that it may be so. *Slots* is the lock of slot changes of one address space,
/// under which a thread may sleep; other slot changes, and harvests of dirty logs, wait meanwhile. *A table's* is a
/// spin lock: with it held there is no sleep, and no call of an allocator that may sleep. A method that may not call
/// the VM may still call [`Vm::id`](crate::Vm::id) and others that return what never changes. `resolve` may take part
/// in anything: it may invalidate, change slots, and run other vCPUs.
///
/// A *reader section* is what [`crate::Vcpu::enter`] begins. Every operation of the engine is in one while it walks.
/// Flushes and changes of slots wait until the sections end that began before. If a thread in a section waits for
/// another thread that waits for a flush, both wait for ever. So a method that allocates a table does not reclaim
/// memory from a guest ([`crate::Vm::invalidate`]), and a lock that these methods take is never held around a call of
/// the engine. `flush` and the table methods may be called while a slot change of the same address space is in progress
/// on the calling thread ([`crate::Vm::set_memory_region`] holds its lock most of the time).
///
/// The global allocator is used where tables are allocated, and obeys the same.
///
/// Under a table's lock the engine takes spin locks only, held for at most one table's entries. Locks that are held
/// for longer are waited for with [`WaitFor::Turn`], in the order of requests. So the engine is not called from an
/// interrupt handler, or from anything else that may interrupt a caller of the engine on the same CPU, unless
/// that caller masks it.
///
/// # Safety
/// An implementation promises, for as long as it lives:
/// - [`granule`](Self::granule) never changes, and a frame number is an address divided by its bytes;
/// - a frame given by [`alloc_table`](Self::alloc_table) is one page of it, aligned to its size,
///   that nobody else uses until [`free_table`](Self::free_table); page walkers see it as the CPUs do
///   (ordinary write-back memory), and its number fits the format's entries;
/// - [`entries`](Self::entries) and [`meta`](Self::meta) of an allocated frame point to that memory, all of it,
///   and to a [`TableMeta`] of its own (created by [`TableMeta::new`]), both valid and at the same
///   place until the frame is freed;
/// - [`resolve`](Self::resolve) and [`resolve_resident`](Self::resolve_resident) answer with memory that the
///   guest may use with the rights given, until the platform announces its end by
///   [`crate::Vm::invalidate`];
/// - [`flush`](Self::flush) keeps its contract;
/// - before the hardware walks a root of a VM for the first time it has forgotten the VM that it knew by the
///   same VMID, ASID, VPID or root frame; and no CPU can walk a root when its VM is dropped. A [`VmId`]
///   is never used twice, frames are.
pub unsafe trait Platform: Send + Sync + 'static {
    /// Returns the size of its pages: of the frames that it gives for tables, and of those that it counts in [`Pfn`],
    /// [`Gfn`] and [`HostRun`]. A VM is made only if that is the granule of its format
    /// ([`Format::GRANULE`](crate::Format::GRANULE)).
    fn granule(&self) -> Granule {
        Granule::Kib4
    }

    /// Allocates a frame for one table of `vm`, contents unspecified; `None` when memory is out, which every caller
    /// survives. Called ahead of need, never under a table's lock; must not wait for a vCPU, a flush,
    /// or an invalidation.
    fn alloc_table(&self, vm: VmId) -> Option<Pfn>;

    /// Allocates frames for a root of `tables` tables of `vm` (a power of two, see [`crate::Format::ROOT_TABLES`]):
    /// next to each other, the first aligned to them all. Each is freed alone.
    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn>;

    /// Takes a frame back. Called when no walker, software or hardware, can reach it any more.
    ///
    /// # Safety
    /// - `frame` came from [`alloc_table`](Self::alloc_table), or is one of an [`alloc_root`](Self::alloc_root), of
    ///   this platform for `vm`, and is freed once.
    unsafe fn free_table(&self, vm: VmId, frame: Pfn);

    /// Like [`alloc_table`](Self::alloc_table), but for up to `frames` tables at once, each given to
    /// `take`; fewer when memory is out. For range operations: a source with a lock takes it once.
    fn alloc_tables(&self, vm: VmId, frames: usize, take: &mut dyn FnMut(Pfn)) {
        (0..frames)
            .map_while(|_| self.alloc_table(vm))
            .for_each(take);
    }

    /// Like [`free_table`](Self::free_table), but for several.
    ///
    /// # Safety
    /// - as [`free_table`](Self::free_table), for each.
    unsafe fn free_tables(&self, vm: VmId, frames: &[Pfn]) {
        for frame in frames {
            // SAFETY: the caller's promise.
            unsafe { self.free_table(vm, *frame) };
        }
    }

    /// Returns the entries in an allocated frame. Called at each step of a walk: must be a few instructions.
    fn entries(&self, frame: Pfn) -> NonNull<Entries>;

    /// Returns the metadata that the engine keeps for an allocated frame, as Linux does in `struct page`. The engine
    /// resets the metadata when it takes the frame into use, so the metadata may be left over from the frame's last
    /// allocation.
    fn meta(&self, frame: Pfn) -> NonNull<TableMeta>;

    /// Finds, and makes resident, the host page that `request` names.
    ///
    /// Called with no lock held and the vCPU outside every reader section: it may sleep for as long
    /// as it likes (swap, userfaultfd) and holds up nobody.
    ///
    /// So the memslot may change meanwhile. `resolve` may be called, and may still run, after the slot was deleted or
    /// moved and [`crate::Vm::remove_memory_region`] has returned, also when its backing is no memory any more, or is
    /// other memory. `resolve` must find that out by the platform's own records, and returns
    /// [`ResolveError::BadAddress`], or the page that is there now. The engine then uses neither, because it checks
    /// again under the table's lock: it installs no leaf, and reports no error, for a slot that has changed since it
    /// was looked up, nor for a page that was invalidated.
    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError>;

    /// Like [`resolve`](Self::resolve), but for all pages of `backing`, in a slot of `vm`, that are resident already;
    /// never makes the host allocate, never sleeps. Calls `found` for stretches in ascending order, and skips what is
    /// not resident or not known.
    ///
    /// `found` takes the lock of a table. So it holds no lock while it calls `found`, and waits for none under which
    /// [`crate::Vm::invalidate`] is called. What it finds may be out of date then: the engine installs it only if no
    /// invalidation began meanwhile. The engine may ask for more pages than it installs, and install others of a run
    /// later, under the same condition.
    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun));

    /// Makes the pages of `backing`, in a slot of `vm`, resident, as far as that is possible.
    /// [`Vcpu::prefault`](crate::Vcpu::prefault) calls it for up to a table's pages, of which some are not resident,
    /// and then calls [`resolve_resident`](Self::resolve_resident) again, so that one call of the host serves all pages
    /// (Linux: MADV_POPULATE_READ). The state of the caller is as for [`resolve`](Self::resolve), and the memory may be
    /// gone, too. The method may make fewer pages resident, or none, as the default does: each page that is not
    /// resident after the call is resolved by itself.
    fn populate(&self, vm: VmId, backing: Range<Hva>) {
        let _ = (vm, backing);
    }

    /// Makes the memory of the new VM `child` a copy of that of `parent` as it is now: every page that backs the parent
    /// backs the child at the same backing address. [`Vm::fork_from`](crate::Vm::fork_from) calls it, while no fault of
    /// the parent installs a leaf.
    ///
    /// From now on, until the page has one user left,
    /// - [`resolve`](Self::resolve) and [`resolve_resident`](Self::resolve_resident) return it as not writable, to both
    ///   VMs ([`HostPage::writable`]);
    /// - `resolve` for a write gives the VM that asks a copy of its own, and returns that: it begins an invalidation of
    ///   the page *of that VM* ([`Vm::invalidate`](crate::Vm::invalidate)), copies, changes what backs the page, and
    ///   ends the invalidation;
    /// - the frame is not taken back, whatever invalidations of the other VM do.
    ///
    /// The engine does not tell the platform that a VM ends. The program that drops the VM does.
    ///
    /// # Errors
    /// [`ForkError`]; then nothing is shared.
    fn share(&self, parent: VmId, child: VmId) -> Result<(), ForkError> {
        let _ = (parent, child);
        Err(ForkError::Unsupported)
    }

    /// No *hardware* walker uses an old translation of `range` of `vm` once this has returned:
    /// INVEPT, TLBI or HFENCE on every CPU that may be running the guest. A contract, not a hint.
    /// A huge leaf that was zapped may reach out of `range`: nothing of it is used either. `stale` says what
    /// is enough; a platform that does not look at it flushes everything in the range.
    /// In a VM that has shadowed tables of the guest's, the range is always that of all frames: what a TLB holds then
    /// is known by virtual address, or by that of a nested guest.
    ///
    /// When it returns, for each CPU that may run the guest:
    /// - leaves that its TLB holds are void, whatever their size, also those combined with translations
    ///   of the guest's own, and so, if `stale.tables`, are entries to tables that it has cached on the way:
    ///   tables that were in the range are freed next, so a flush of last levels is not enough;
    /// - accesses that it made by an old translation are done: their data, and the accessed and dirty bits
    ///   that its walker sets for them;
    /// - or it is not in the guest, and will do all this before it executes another instruction of it.
    ///
    /// The entries were changed before by ordinary atomic stores. This method does what a CPU needs beside that for its
    /// walkers to see them, before it flushes (AArch64: DSB ISHST).
    ///
    /// The caller is outside every reader section. It may be a vCPU's thread between two runs of its guest, with
    /// interrupts masked, and several CPUs may call at once. So an implementation that interrupts other CPUs either
    /// waits only for CPUs that are in the guest, or answers the interrupts of others while it waits. Software CPUs are
    /// not its concern: the engine itself waits for their acknowledgement ([`crate::Vcpu::quiesce`]).
    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale);

    /// Has the CPUs of `vm` give the engine what their page walkers have written to their buffers (Intel's PML, Arm's
    /// HDBSS). When it returns, each entry that was written before the call was given to `take`, with the address space
    /// of the walk, or to [`Vm::drain`](crate::Vm::drain): a CPU that is in the guest is interrupted, and its buffer is
    /// drained before it enters again.
    ///
    /// A harvest of a log by the policy `dirty_log=buffer` begins with it. Does nothing where no hardware fills a
    /// buffer: those of software CPUs are the engine's own.
    fn drain(&self, vm: VmId, take: &mut dyn FnMut(usize, Gfn)) {
        let _ = (vm, take);
    }

    /// Whether [`zapped`](Self::zapped) is called. If not, nothing is paid for it.
    const WANTS_ZAPPED: bool = false;

    /// Called for each leaf that the engine has zapped, before the invalidation or slot change that zaps it returns.
    /// The host can mark the pages (KVM: `kvm_set_pfn_dirty`). A page may be reported several times: by leaves of
    /// several memslots, or by pieces of a huge leaf.
    fn zapped(&self, leaf: ZappedLeaf) {
        let _ = leaf;
    }

    /// Called at each event, by the thread that makes it. For a record of what the engine does; does nothing otherwise,
    /// and then it is compiled away.
    #[inline(always)]
    fn trace(&self, event: Event) {
        let _ = event;
    }

    /// Passes time while the engine waits; `round` counts up from 0 for one wait. Spin first, then
    /// yield the processor; for [`WaitFor::Reader`], interrupt a reader that is stuck in a host page
    /// fault (the kick of the userspace port). Where CPUs are never taken from those who hold
    /// the engine's locks (a hypervisor that does not preempt itself), a spin hint is enough.
    fn wait(&self, round: u32, what: WaitFor);
}
