//! The services that the engine needs from the machine under it.
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

/// Identifies a VM to its [`Platform`]. No two VMs of a process have the same id.
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
    /// The frame of the requested page (not of the start of the huge mapping around it).
    pub pfn: Pfn,
    /// The size of the host mapping: the naturally aligned region of this level around
    /// the page is contiguous both in the backing and in host-physical memory.
    pub level: Level,
    /// Whether the guest may write without another request.
    pub writable: bool,
    /// Whether the guest may execute. Only write-back memory can be executed.
    pub execute: bool,
    /// The cache type of the page.
    pub memory: MemoryType,
}

impl HostPage {
    /// Returns a page of ordinary memory that may be written and executed.
    pub fn new(pfn: Pfn, level: Level) -> Self {
        HostPage {
            pfn,
            level,
            writable: true,
            execute: true,
            memory: MemoryType::WriteBack,
        }
    }

    /// Returns this page with another frame.
    #[must_use]
    pub fn with_pfn(self, pfn: Pfn) -> Self {
        HostPage { pfn, ..self }
    }

    /// Returns this page in a host mapping of `level`.
    #[must_use]
    pub fn with_level(self, level: Level) -> Self {
        HostPage { level, ..self }
    }

    /// Returns this page, writable or not.
    #[must_use]
    pub fn with_writable(self, writable: bool) -> Self {
        HostPage { writable, ..self }
    }

    /// Returns this page, executable or not.
    #[must_use]
    pub fn with_execute(self, execute: bool) -> Self {
        HostPage { execute, ..self }
    }

    /// Returns this page with memory of type `memory`.
    #[must_use]
    pub fn with_memory(self, memory: MemoryType) -> Self {
        HostPage { memory, ..self }
    }
}

/// The arguments of [`Platform::resolve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// The VM whose vCPU waits for the page: a platform may serve several VMs.
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
    /// The right that the access needs.
    pub access: Access,
}

impl Request {
    /// Returns this request for a page at `backing`: for a platform that passes requests on to another platform.
    #[must_use]
    pub fn with_backing(self, backing: Hva) -> Self {
        Request { backing, ..self }
    }
}

/// A run of backing pages that are resident, contiguous in host-physical memory, and otherwise equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRun {
    /// Backing address of the first page.
    pub backing: Hva,
    /// Number of pages; a page has the size of the granule.
    pub pages: u64,
    /// The first page. The other pages have consecutive `pfn`s, and have the same rights and memory type.
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

    /// Returns the part of the run in `backing`; `None` if no page of the run is there.
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

/// A zapped leaf, as passed to [`Platform::zapped`]: the state in which the guest has left its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ZappedLeaf {
    /// First of the [`Granule::pages`] contiguous host frames.
    pub pfn: Pfn,
    /// The leaf's level.
    pub level: Level,
    /// Whether the guest has used the memory since the accessed bit was last cleared ([`crate::Vm::age`]).
    pub accessed: bool,
    /// Whether the guest has written to the memory. Where walkers set no dirty bit: whether it may have written.
    pub dirty: bool,
}

/// The reason why a backing page cannot be resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResolveError {
    /// Nothing is mapped at this backing address, or not with the requested rights.
    BadAddress,
    /// The host is out of memory.
    OutOfMemory,
    /// The wait was interrupted (by a signal): the vCPU should leave and retry.
    Interrupted,
    /// The page is not present yet, because its contents are still in a snapshot or on another machine. The access ends
    /// with [`Stop::MemoryFault`](crate::Stop::MemoryFault). The caller provides the page, and runs the vCPU again.
    /// This also applies to pages with page tables of the guest. [`Platform::resolve_resident`] leaves out such pages,
    /// and no [`HostPage::level`] may include one.
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

/// The reason why a VM was not cloned ([`Vm::fork_from`](crate::Vm::fork_from)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForkError {
    /// The platform cannot give each VM its own copy of a page ([`Platform::share`]).
    Unsupported,
    /// No memory for the VM, its slots, its root, or the platform's records. The call can be repeated.
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
    /// The holder of a spin lock, which is held for a few instructions or for one table.
    Lock,
    /// Earlier operations on the same lock: slot changes, harvests of dirty logs. Each holds the lock during its whole
    /// work, including allocations and some flushes. Threads get the lock in the order of their requests. `round`
    /// restarts at 0 when the caller is next.
    Turn,
    /// An entered reader that has not passed a quiescent point yet. The value is the token that the reader passed to
    /// [`crate::Vcpu::enter`] (a thread id in the userspace port, 0 when unknown).
    Reader(usize),
    /// An invalidation in progress over the page of a fault ([`crate::Vm::invalidate`]), or a leaf
    /// that another thread is replacing by break-before-make.
    Invalidation,
}

/// Says which entries a flush must invalidate in its range, for machines that can flush less than everything
/// ([`Platform::flush`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    /// The level of all leaves that were zapped or have lost a right, in the tables and in every TLB (AArch64: the TTL
    /// of a TLBI). `None`: several levels, or unknown. It is always `None` where leaves are split without a flush,
    /// because a TLB may still cache the huge leaf.
    pub level: Option<Level>,
    /// Whether entries that refer to tables were cleared. If not, only leaves were zapped, and a walker's cached
    /// entries on the path to these leaves are still valid (AArch64: TLBI IPAS2LE1 instead of IPAS2E1).
    pub tables: bool,
}

impl Stale {
    /// Leaves of any level, and entries that refer to tables.
    pub const ANYTHING: Stale = Stale {
        level: None,
        tables: true,
    };
}

/// The machine under the engine. One platform may serve several VMs: a method that acts for one VM gets its [`VmId`].
///
/// # The state in which the engine calls the methods
/// Any CPU or thread that uses the engine calls the methods, several at once, and on the stack of the engine's caller.
/// The engine neither masks nor unmasks interrupts.
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
/// "Yes" means that it may be the case, and a named lock means that the caller may hold the lock. *Slots* is the lock
/// of slot changes of one address space. A thread may sleep under it; other slot changes, and harvests of dirty logs,
/// wait meanwhile. *A table's* is a spin lock: a thread that holds it must not sleep, nor call an allocator that may
/// sleep. A method that may not call the VM may still call [`Vm::id`](crate::Vm::id) and other methods that return
/// constants. `resolve` may call everything: it may invalidate, change slots, and run other vCPUs.
///
/// [`crate::Vcpu::enter`] begins a *reader section*. Every operation of the engine is in a reader section while it
/// walks. Flushes and changes of slots wait until all sections that began before them have ended. If a thread in a
/// section waits for another thread that waits for a flush, both wait forever. So a method that allocates a table does
/// not reclaim memory from a guest ([`crate::Vm::invalidate`]), and a lock that these methods take is never held around
/// a call of the engine. `flush` and the table methods may be called while a slot change of the same address space is
/// in progress on the calling thread ([`crate::Vm::set_memory_region`] holds its lock most of the time).
///
/// The global allocator is called where tables are allocated, and must obey the same rules.
///
/// Under a table's lock the engine takes only spin locks, which are held for at most one table's entries. For a lock
/// that is held longer, threads wait with [`WaitFor::Turn`], in the order of requests. So do not call the engine from
/// an interrupt handler, or from any code that may interrupt a caller of the engine on the same CPU, unless that caller
/// masks the interrupt.
///
/// # Safety
/// An implementation guarantees, for as long as it lives:
/// - [`granule`](Self::granule) never changes, and a frame number is an address divided by its bytes;
/// - a frame from [`alloc_table`](Self::alloc_table) is one page, aligned to its size, that nothing else uses until
///   [`free_table`](Self::free_table). Page walkers see it as the CPUs do (ordinary write-back memory), and its number
///   fits the format's entries;
/// - [`entries`](Self::entries) of an allocated frame points to the frame's whole memory, and [`meta`](Self::meta) to a
///   [`TableMeta`] of its own (created by [`TableMeta::new`]). Both pointers are valid and constant until the frame is
///   freed;
/// - [`resolve`](Self::resolve) and [`resolve_resident`](Self::resolve_resident) return memory that the guest may use
///   with the given rights, until the platform withdraws it by [`crate::Vm::invalidate`];
/// - [`flush`](Self::flush) fulfils its contract;
/// - before the hardware first walks a root of a VM, it has dropped all entries of any earlier VM with the same VMID,
///   ASID, VPID or root frame; and no CPU can walk a root when its VM is dropped. A [`VmId`] is never reused; frames
///   are.
pub unsafe trait Platform: Send + Sync + 'static {
    /// Returns the size of the platform's pages: of the frames that it gives for tables, and of those that [`Pfn`],
    /// [`Gfn`] and [`HostRun`] count. A VM can be made only if this is the granule of its format
    /// ([`Format::GRANULE`](crate::Format::GRANULE)).
    fn granule(&self) -> Granule {
        Granule::Kib4
    }

    /// Allocates a frame for one table of `vm`, with unspecified contents. `None`: there is no memory; every caller
    /// handles this. The engine calls it before it needs the frame, never under a table's lock. Must not wait for a
    /// vCPU, a flush, or an invalidation.
    fn alloc_table(&self, vm: VmId) -> Option<Pfn>;

    /// Allocates frames for a root of `tables` tables of `vm` (a power of two, see [`crate::Format::ROOT_TABLES`]):
    /// consecutive frames, the first aligned to the size of all. Each is freed separately.
    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn>;

    /// Frees a frame. Called when no walker, software or hardware, can reach it any more.
    ///
    /// # Safety
    /// - `frame` came from [`alloc_table`](Self::alloc_table) or [`alloc_root`](Self::alloc_root) of this platform for
    ///   `vm`, and is freed once.
    unsafe fn free_table(&self, vm: VmId, frame: Pfn);

    /// Like [`alloc_table`](Self::alloc_table), but allocates up to `frames` tables at once, and passes each to `take`;
    /// fewer if there is no memory. Range operations call it, so that an allocator with a lock takes the lock only
    /// once.
    fn alloc_tables(&self, vm: VmId, frames: usize, take: &mut dyn FnMut(Pfn)) {
        (0..frames)
            .map_while(|_| self.alloc_table(vm))
            .for_each(take);
    }

    /// Like [`free_table`](Self::free_table), but for several frames.
    ///
    /// # Safety
    /// - the requirements of [`free_table`](Self::free_table) hold for each frame.
    unsafe fn free_tables(&self, vm: VmId, frames: &[Pfn]) {
        for frame in frames {
            // SAFETY: each of the `frames` is from this platform for `vm` and is freed once, as this method's
            // `# Safety` asks of its caller.
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
    /// Called with no lock held and the vCPU outside every reader section: it may sleep for any time (swap,
    /// userfaultfd) without delaying other threads.
    ///
    /// So the memslot may change meanwhile. `resolve` may be called, and may still run, after the slot was deleted or
    /// moved and [`crate::Vm::remove_memory_region`] has returned, even if the slot's backing is no memory any more, or
    /// is other memory. `resolve` must detect this by the platform's own records. It then returns
    /// [`ResolveError::BadAddress`], or the page that is there now. The engine ignores either result, because it checks
    /// again under the table's lock: if the slot has changed since its look-up, or the page was invalidated, the engine
    /// installs no leaf and reports no error.
    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError>;

    /// Like [`resolve`](Self::resolve), but for all pages of `backing`, in a slot of `vm`, that are already resident.
    /// Never makes the host allocate, and never sleeps. Calls `found` for runs of pages in ascending order, and skips
    /// pages that are not resident, or about which the host knows nothing.
    ///
    /// `found` takes the lock of a table. So this method holds no lock while it calls `found`, and waits for no lock
    /// under which [`crate::Vm::invalidate`] is called. The runs may be out of date by then: the engine installs them
    /// only if no invalidation began meanwhile. The engine may ask for more pages than it installs, and may install
    /// other pages of a run later, under the same condition.
    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun));

    /// Makes the pages of `backing`, in a slot of `vm`, resident, as far as possible.
    /// [`Vcpu::prefault`](crate::Vcpu::prefault) calls it for up to a table's pages, some of which are not resident,
    /// and then calls [`resolve_resident`](Self::resolve_resident) again. So one system call of the host makes all of
    /// them resident (Linux: MADV_POPULATE_READ). The caller holds no lock and is in no reader section, as for
    /// [`resolve`](Self::resolve), and the memslot may be deleted meanwhile, too. The method may make fewer pages
    /// resident, or none, like the default: each page that is not resident afterwards is resolved separately.
    fn populate(&self, vm: VmId, backing: Range<Hva>) {
        let _ = (vm, backing);
    }

    /// Makes the memory of the new VM `child` a copy of that of `parent` as it is now: every page that backs the parent
    /// backs the child at the same backing address. [`Vm::fork_from`](crate::Vm::fork_from) calls it, while no fault of
    /// the parent installs a leaf.
    ///
    /// From now on, while a page has several users,
    /// - [`resolve`](Self::resolve) and [`resolve_resident`](Self::resolve_resident) return it as not writable, to both
    ///   VMs ([`HostPage::writable`]);
    /// - `resolve` for a write gives the requesting VM a copy of its own, and returns the copy: it begins an
    ///   invalidation of the page *of that VM* ([`Vm::invalidate`](crate::Vm::invalidate)), copies, changes what backs
    ///   the page, and ends the invalidation;
    /// - invalidations of one VM do not free the frame while the other VM uses it.
    ///
    /// The engine does not tell the platform when a VM ends. The program that drops the VM does.
    ///
    /// # Errors
    /// [`ForkError`]; then nothing is shared.
    fn share(&self, parent: VmId, child: VmId) -> Result<(), ForkError> {
        let _ = (parent, child);
        Err(ForkError::Unsupported)
    }

    /// Flushes: when this returns, no *hardware* walker uses an old translation of `range` of `vm`. Use INVEPT, TLBI or
    /// HFENCE on every CPU that may be running the guest. This is a contract, not a hint. A zapped huge leaf may reach
    /// beyond `range`: walkers must not use it outside `range` either. `stale` says which entries have to be flushed; a
    /// platform may ignore it and flush everything in the range. In a VM that has shadowed tables of the guest, the
    /// range is always all frames, because a TLB then caches translations by virtual address, or by the address of a
    /// nested guest.
    ///
    /// When it returns, this holds for each CPU that may run the guest:
    /// - all leaves in its TLB are void, of any size, including those that the TLB has combined with the guest's own
    ///   translations. If `stale.tables`, cached entries that refer to tables are void, too: the tables in the range
    ///   are freed next, so a flush of last levels is not enough;
    /// - its accesses by old translations are done: their data, and the accessed and dirty bits that its walker sets
    ///   for them;
    /// - a CPU that is not in the guest may do all this later, but before it executes another instruction of the guest.
    ///
    /// The engine has changed the entries by ordinary atomic stores. Before this method flushes, it does what else the
    /// CPU needs to make these stores visible to its walkers (AArch64: DSB ISHST).
    ///
    /// The caller is outside every reader section. The caller may be a vCPU's thread between two runs of its guest,
    /// with interrupts masked, and several CPUs may call at once. So an implementation that interrupts other CPUs
    /// either waits only for CPUs that are in the guest, or handles the interrupts of others while it waits. The method
    /// need not wait for software CPUs: the engine itself waits for their acknowledgement ([`crate::Vcpu::quiesce`]).
    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale);

    /// Makes the CPUs of `vm` report the pages that their page walkers have written to buffers (Intel's PML, Arm's
    /// HDBSS). When it returns, each entry written before the call was given to `take`, with the address space of the
    /// walk, or to [`Vm::drain`](crate::Vm::drain). A CPU that is in the guest is interrupted, and its buffer is
    /// drained before it enters again.
    ///
    /// With the policy `dirty_log=buffer`, each harvest of a log calls this method first. It has nothing to do if no
    /// hardware fills a buffer: the engine itself drains the buffers of software CPUs.
    fn drain(&self, vm: VmId, take: &mut dyn FnMut(usize, Gfn)) {
        let _ = (vm, take);
    }

    /// Whether the engine calls [`zapped`](Self::zapped). If not, this costs nothing.
    const WANTS_ZAPPED: bool = false;

    /// Called for each leaf that the engine has zapped, before the invalidation or slot change that zapped it returns.
    /// The host can mark the pages (KVM: `kvm_set_pfn_dirty`). A page may be reported several times: for leaves of
    /// several memslots, or for pieces of a huge leaf.
    fn zapped(&self, leaf: ZappedLeaf) {
        let _ = leaf;
    }

    /// Called at each event, by the thread that causes it, to record what the engine does. The default does nothing,
    /// and the calls are then compiled away.
    #[inline(always)]
    fn trace(&self, event: Event) {
        let _ = event;
    }

    /// Waits for a short time while the engine waits. `round` counts up from 0 for one wait. Spin first, then yield the
    /// processor. For [`WaitFor::Reader`], interrupt a reader that is stuck in a host page fault (the kick of the
    /// userspace port). If a CPU is never preempted while it holds the engine's locks (as in a hypervisor that does not
    /// preempt itself), a spin hint is enough.
    fn wait(&self, round: u32, what: WaitFor);
}
