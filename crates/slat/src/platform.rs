//! The services that the engine needs from the machine under it.
//!
//! The engine does not itself allocate memory for tables, change mappings of the host or interrupt CPUs: it calls a
//! [`Platform`]. The userspace port (`slat-host`) and a bare-metal hypervisor implement the same trait, and use the
//! same engine.

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
    /// The frame of the requested page (if a huge mapping contains the page, not the first frame of that mapping).
    pub pfn: Pfn,
    /// The size of the host mapping: the naturally aligned region of this level around
    /// the page is contiguous both in the backing and in host-physical memory.
    pub level: Level,
    /// Whether the guest may write without another [`Platform::resolve`].
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

/// The page that [`Platform::resolve`] is to find, and the access that needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// The VM whose vCPU waits for the page: a platform may serve several VMs.
    pub vm: VmId,
    /// The number of the vCPU's address space.
    pub space: usize,
    /// The memslot that contained `gfn` when the engine looked it up.
    pub slot: u32,
    /// The frame that the guest accesses.
    pub gfn: Gfn,
    /// The backing address of the frame: [`Region::backing`](crate::Region) of the slot, or
    /// [`Region::private`](crate::Region) if the frame is private, plus the offset of the frame in the slot.
    pub backing: Hva,
    /// The kind of the access: the page must have the right to it.
    pub access: Access,
}

impl Request {
    /// Returns this request for a page at `backing`: for a platform that passes requests on to another platform.
    #[must_use]
    pub fn with_backing(self, backing: Hva) -> Self {
        Request { backing, ..self }
    }
}

/// A run of consecutive backing pages that are resident and contiguous in host-physical memory, and have equal
/// properties.
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

    /// Returns the part of the run that is in `backing`. `None`: no page of the run is in `backing`.
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

/// A zapped leaf, for [`Platform::zapped`]: says whether the guest has used and changed the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ZappedLeaf {
    /// First of the [`Granule::pages`] contiguous host frames.
    pub pfn: Pfn,
    /// The leaf's level.
    pub level: Level,
    /// Whether the guest has used the memory since the accessed bit was last cleared ([`crate::Vm::age`]).
    pub accessed: bool,
    /// Whether the guest has written to the memory. If walkers set no dirty bits: whether it may have written.
    pub dirty: bool,
}

/// The reason why a backing page cannot be resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResolveError {
    /// Nothing is mapped at this backing address, or the mapping lacks the requested rights.
    BadAddress,
    /// The host is out of memory.
    OutOfMemory,
    /// A signal interrupted the wait for the page: the vCPU should return to its client, and then retry.
    Interrupted,
    /// The page is not present yet, because its contents are still in a snapshot or on another machine. The access ends
    /// with [`Stop::MemoryFault`](crate::Stop::MemoryFault). The client provides the page, and runs the vCPU again. The
    /// page may also be one that contains page tables of the guest. [`Platform::resolve_resident`] must leave out
    /// absent pages, and no [`HostPage::level`] may be so large that it includes one.
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

/// The reason why cloning a VM failed ([`Vm::fork_from`](crate::Vm::fork_from)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForkError {
    /// The platform cannot give each VM its own copy of a page ([`Platform::share`]).
    Unsupported,
    /// No memory for the VM, its slots, its root, or the platform's records. The caller may repeat the call.
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

/// What the engine waits for: an argument of [`Platform::wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitFor {
    /// The thread that holds a spin lock. It holds the lock for a few instructions, or while it works on one table.
    Lock,
    /// Threads that requested the same lock earlier: slot changes or harvests of dirty logs. Each holds the lock during
    /// its whole work, including allocations and some flushes. Threads get the lock in the order of their requests.
    /// `round` ([`Platform::wait`]) restarts at 0 when the caller is the next to get the lock.
    Turn,
    /// A vCPU in a reader section that has not yet passed a quiescent point. The value is the token that the reader
    /// passed to [`crate::Vcpu::enter`] (a thread id in the userspace port, 0 when unknown).
    Reader(usize),
    /// An invalidation in progress over the page of a fault ([`crate::Vm::invalidate`]), a page that another thread is
    /// giving to [`Platform::keep`], or a leaf that another thread is replacing by break-before-make.
    Invalidation,
}

/// The kinds of cached entries that a [`Platform::flush`] must invalidate in its range, for machines that can flush
/// selectively.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    /// The level of all leaves that were zapped or have lost a right (AArch64: the TTL of a TLBI). TLBs cache them at
    /// this level, too. `None`: they have several levels, or the level is unknown. It is always `None` for formats
    /// whose leaves are split without a flush, because there a TLB may still cache the huge leaf.
    pub level: Option<Level>,
    /// Whether entries that refer to tables were cleared. `false`: only leaves were zapped, and a walker's cached
    /// entries on the path to these leaves are still valid (AArch64: TLBI IPAS2LE1 instead of IPAS2E1).
    pub tables: bool,
}

impl Stale {
    /// Any cached entries: leaves of any level, and entries that refer to tables.
    pub const ANYTHING: Stale = Stale {
        level: None,
        tables: true,
    };
}

/// The machine on which the engine runs. One platform may serve several VMs: a method that acts for one VM gets the
/// VM's [`VmId`].
///
/// # The state in which the engine calls the methods
/// The CPU or thread that calls the engine also runs the methods, on its own stack. Several may run methods at once.
/// The engine neither masks nor unmasks interrupts.
///
/// | method | in a reader section | under which locks of the engine | may wait | may allocate | may call the VM |
/// |---|---|---|---|---|---|
/// | `alloc_table`, `alloc_tables`, `free_table`, `free_tables` | yes | slots | for locks of its own | yes, but must not reclaim guest memory | no |
/// | `alloc_root` | no: the VM is being made | none | for anything | yes | there is none |
/// | `entries`, `meta` | yes | slots, a table's | no | no | no |
/// | `resolve` | no | none | for anything: it may sleep | yes | yes, except the calling vCPU |
/// | `populate` | no | none | for anything: it may sleep | yes | yes, except the calling vCPU |
/// | `resolve_resident` | yes | none; called by [`Vm::audit`](crate::Vm::audit): slots, a table's | for locks of its own | not the requested pages | no |
/// | `share` | no | slots | for locks of its own | yes | no |
/// | `flush` | no | slots | for CPUs in the guest | yes | no |
/// | `keep` | no | slots | for locks of its own, and for devices of the host | yes | no |
/// | `drain` | no | none | for CPUs in the guest | yes | yes |
/// | `wait` | yes | slots; while waiting for a table's lock, also the lock of shadow pages | for a short time: its purpose | no | no |
/// | `zapped` | yes | slots, a table's | no | no | no |
/// | `trace` | yes | slots, a table's | no | no | no |
///
/// "Yes" means that this is possible, and a named lock means that the caller may hold the lock. *Slots* is the lock of
/// slot changes of one address space. A thread may sleep while it holds this lock; other slot changes and harvests of
/// dirty logs wait for it. *A table's* is a spin lock: a thread that holds it must not sleep, nor call an allocator
/// that may sleep. A method that must not call the VM may nevertheless call [`Vm::id`](crate::Vm::id) and other methods
/// that return constants. `resolve` may call every method of the VM: it may invalidate, change slots, and run other
/// vCPUs.
///
/// [`crate::Vcpu::enter`] begins a *reader section*. Every operation of the engine is in a reader section while it
/// walks tables. Flushes and changes of slots wait until all sections that began before them have ended. If a thread in
/// a section waits for another thread that waits for a flush, both wait forever. So two things are forbidden. A method
/// that allocates a table must not reclaim memory from a guest ([`crate::Vm::invalidate`]). And a lock that methods
/// called in a section take must never be held during a call of the engine. `flush` and the table methods may be called
/// while a slot change of the same address space is in progress on the calling thread ([`crate::Vm::set_memory_region`]
/// holds its lock most of the time).
///
/// The engine calls the global allocator in the same states as `alloc_table`, so the allocator must obey the same
/// rules.
///
/// Under a table's lock the engine takes only spin locks, which are held for at most one table's entries. Threads that
/// need a lock that may be held longer wait with [`WaitFor::Turn`], in the order of their requests. So do not call the
/// engine from an interrupt handler, or from any code that may interrupt a caller of the engine on the same CPU, unless
/// that caller masks the interrupt.
///
/// # Safety
/// An implementation guarantees, for as long as it lives:
/// - [`granule`](Self::granule) never changes, and a frame number is an address divided by the granule's bytes;
/// - a frame from [`alloc_table`](Self::alloc_table) is one page, aligned to its size, that nothing else uses until
///   [`free_table`](Self::free_table). Page walkers see the frame's contents as the CPUs do (ordinary write-back
///   memory), and the frame's number fits the format's entries;
/// - [`entries`](Self::entries) of an allocated frame points to the frame's whole memory, and [`meta`](Self::meta) to a
///   [`TableMeta`] of its own (created by [`TableMeta::new`]). Both pointers are valid and constant until the frame is
///   freed;
/// - [`resolve`](Self::resolve) and [`resolve_resident`](Self::resolve_resident) return memory that the guest may use
///   with the given rights, until the platform withdraws it by [`crate::Vm::invalidate`];
/// - [`flush`](Self::flush) does what its documentation requires;
/// - before the hardware first walks a root of a VM, all TLB entries of any earlier VM with the same VMID, ASID, VPID
///   or root frame are flushed; and when a VM is dropped, no CPU can walk its roots any more. (A [`VmId`] is never
///   reused, but frames are.)
pub unsafe trait Platform: Send + Sync + 'static {
    /// Returns the size of the platform's pages: of the frames that it allocates for tables, and of the pages that
    /// [`Pfn`], [`Gfn`] and [`HostRun`] count. A VM can be made only if this size is the granule of the VM's format
    /// ([`Format::GRANULE`](crate::Format::GRANULE)).
    fn granule(&self) -> Granule {
        Granule::Kib4
    }

    /// Allocates a frame for one table of `vm`, with unspecified contents. `None`: there is no memory, which every
    /// caller handles. The engine calls this method before it needs the frame, never under a table's lock. The method
    /// must not wait for a vCPU, a flush, or an invalidation.
    fn alloc_table(&self, vm: VmId) -> Option<Pfn>;

    /// Allocates consecutive frames for a root of `vm` that has `tables` tables (a power of two, see
    /// [`crate::Format::ROOT_TABLES`]). The first frame is aligned to the size of the whole root. The engine frees each
    /// frame separately.
    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn>;

    /// Frees a frame. The engine calls this when no walker, software or hardware, can reach the frame any more.
    ///
    /// # Safety
    /// - `frame` came from [`alloc_table`](Self::alloc_table) or [`alloc_root`](Self::alloc_root) of this platform for
    ///   `vm`, and is freed once.
    unsafe fn free_table(&self, vm: VmId, frame: Pfn);

    /// Like [`alloc_table`](Self::alloc_table), but allocates up to `frames` frames at once (fewer if there is no
    /// memory), and passes each to `take`. Range operations call this, so that an allocator that has a lock takes the
    /// lock only once.
    fn alloc_tables(&self, vm: VmId, frames: usize, take: &mut dyn FnMut(Pfn)) {
        (0..frames)
            .map_while(|_| self.alloc_table(vm))
            .for_each(take);
    }

    /// Like [`free_table`](Self::free_table), but for several frames.
    ///
    /// # Safety
    /// - The requirements of [`free_table`](Self::free_table) hold for each frame.
    unsafe fn free_tables(&self, vm: VmId, frames: &[Pfn]) {
        for frame in frames {
            // SAFETY: each of the `frames` is from this platform for `vm` and is freed once, as this method's
            // `# Safety` asks of its caller.
            unsafe { self.free_table(vm, *frame) };
        }
    }

    /// Returns the entries in an allocated frame. The engine calls this at each step of a walk, so it must take only a
    /// few instructions.
    fn entries(&self, frame: Pfn) -> NonNull<Entries>;

    /// Returns the metadata that the engine keeps for an allocated frame, like `struct page` in Linux. The metadata may
    /// still have the contents from the frame's last allocation: the engine resets them when it begins to use the
    /// frame.
    fn meta(&self, frame: Pfn) -> NonNull<TableMeta>;

    /// Finds the host page that `request` names, and makes it resident.
    ///
    /// The calling vCPU holds no lock and is in no reader section. So the method may sleep for any time (swap,
    /// userfaultfd) without delaying other threads.
    ///
    /// For the same reason the memslot may change at any time. `resolve` may begin or still run after the slot was
    /// deleted or moved and [`crate::Vm::remove_memory_region`] has returned. By then, no memory or different memory
    /// may be mapped at the slot's backing addresses. `resolve` must notice this by the platform's own records. It then
    /// returns [`ResolveError::BadAddress`], or the page that is mapped there now. The engine ignores either result,
    /// because it checks again under the table's lock: if the slot has changed since its look-up, or the page was
    /// invalidated, the engine installs no leaf and reports no error.
    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError>;

    /// Like [`resolve`](Self::resolve), but for all already resident pages of `backing`, which backs part of a slot of
    /// `vm`. Never makes the host allocate memory, and never sleeps. Calls `found` for runs of pages in ascending
    /// order, and skips pages that are not resident, or whose state the host does not know.
    ///
    /// `found` takes the lock of a table. So the method must hold no lock while it calls `found`, and must not wait for
    /// a lock under which [`crate::Vm::invalidate`] is called. The host may change a run before the engine uses it: the
    /// engine installs pages of a run only if no invalidation has begun since the call. The engine may request more
    /// pages than it installs at once, and may install other pages of a run later, under the same condition.
    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun));

    /// Makes as many pages as possible of `backing`, in a slot of `vm`, resident.
    /// [`Vcpu::prefault`](crate::Vcpu::prefault) calls this for at most as many pages as a table has entries, some of
    /// which are not resident, and then calls [`resolve_resident`](Self::resolve_resident) again. So one system call of
    /// the host can make all of them resident (Linux: MADV_POPULATE_READ). As with [`resolve`](Self::resolve), the
    /// caller holds no lock and is in no reader section, and the memslot may be deleted during the call. The method may
    /// make fewer pages resident, or none, as the default implementation does: the engine resolves each page that is
    /// still not resident separately.
    fn populate(&self, vm: VmId, backing: Range<Hva>) {
        let _ = (vm, backing);
    }

    /// Makes the memory of the new VM `child` a copy-on-write copy of the current memory of `parent`: every page that
    /// backs the parent also backs the child, at the same backing address. [`Vm::fork_from`](crate::Vm::fork_from)
    /// calls this while no fault of the parent can install a leaf.
    ///
    /// From then on, as long as several VMs use a page,
    /// - [`resolve`](Self::resolve) and [`resolve_resident`](Self::resolve_resident) return the page to each of them as
    ///   not writable ([`HostPage::writable`]);
    /// - `resolve` for a write gives the requesting VM its own copy of the page, and returns the copy: it copies the page,
    ///   begins an invalidation of the page *of that VM* ([`Vm::invalidate_exact`](crate::Vm::invalidate_exact)), lets
    ///   the copy back the address, and ends the invalidation. (A failure after the invalidation has begun would be
    ///   ignored, and `resolve` called again without end);
    /// - an invalidation of one VM does not free the frame while another VM uses it.
    ///
    /// The engine does not tell the platform when a VM ends. The program that drops the VM must tell it.
    ///
    /// [`layers::Stack`](crate::layers::Stack) does this for the platform.
    ///
    /// # Errors
    /// [`ForkError`]. After an error nothing is shared.
    fn share(&self, parent: VmId, child: VmId) -> Result<(), ForkError> {
        let _ = (parent, child);
        Err(ForkError::Unsupported)
    }

    /// Whether the engine calls [`keep`](Self::keep). If not, [`Vm::begin_snapshot`](crate::Vm::begin_snapshot) is
    /// refused, and nothing else costs anything.
    const KEEPS_OLD_PAGES: bool = false;

    /// Keeps the contents of the pages `backing`, in slots of `vm`, for the snapshot in progress
    /// ([`Vm::begin_snapshot`](crate::Vm::begin_snapshot)): copies them, or writes them to a file. When this returns,
    /// the guest may write to them. Called once for each page of a snapshot, by several threads at once, for different
    /// pages: by a vCPU that is about to write, by [`Snapshot::keep_next`](crate::Snapshot::keep_next), and by an
    /// operation after which the host may reclaim the pages.
    ///
    /// The pages need not be resident, and may be holes of the host's mapping, or a device's registers, if the slot's
    /// are. Whether such pages belong to a snapshot is the platform's decision.
    ///
    /// A vCPU, an invalidation or a slot change waits for this method: it must not wait for one of these, nor
    /// for a flush. An invalidation that [`resolve`](Self::resolve) begins may call it.
    fn keep(&self, vm: VmId, backing: Range<Hva>) {
        let _ = (vm, backing);
    }

    /// Flushes: when this returns, no *hardware* walker uses an old translation of `range` of `vm`. Use INVEPT, TLBI or
    /// HFENCE on every CPU that may be running the guest. This is a contract, not a hint. A zapped huge leaf may reach
    /// beyond `range`: walkers must not use it outside `range` either. `stale` says which entries have to be flushed; a
    /// platform may ignore it and flush everything in the range. In a VM that has shadowed tables of the guest, the
    /// range is always all frames, because a TLB then caches translations by virtual address, or by the address of a
    /// nested guest.
    ///
    /// When the method returns, the following is true for each CPU that may run the guest:
    /// - its TLB has no leaves of the range, of any size, including those that the TLB has combined with the guest's
    ///   own translations. If `stale.tables`, the CPU also caches no entries that refer to tables: the tables of the
    ///   range are freed next, so a flush of only the last level is not enough;
    /// - its accesses through old translations are complete: the data is visible, and so are the accessed and dirty
    ///   bits that its walker sets for these accesses;
    /// - a CPU that is not in the guest may do all this later, but before it executes another instruction of the guest.
    ///
    /// The engine has changed the entries by ordinary atomic stores. Before it flushes, this method must do whatever
    /// else the machine needs to make these stores visible to page walkers (AArch64: DSB ISHST).
    ///
    /// The caller is outside every reader section. The caller may be a vCPU's thread between two runs of its guest,
    /// with interrupts masked, and several CPUs may call at once. So an implementation that interrupts other CPUs must
    /// either wait only for CPUs that are in the guest, or handle interrupts from other CPUs while it waits. The method
    /// need not wait for software CPUs: the engine itself waits for their acknowledgement ([`crate::Vcpu::quiesce`]).
    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale);

    /// Makes the CPUs of `vm` report the pages that their page walkers have written to buffers (Intel's PML, Arm's
    /// HDBSS). When it returns, each page that was written to a buffer before the call has been passed to `take`, with
    /// the number of its address space, or to [`Vm::drain`](crate::Vm::drain). A CPU that is in the guest must be
    /// interrupted, and its buffer drained before the CPU enters the guest again.
    ///
    /// With the policy `dirty_log=buffer`, each harvest of a log calls this method first. On a machine whose hardware
    /// fills no buffer, the method does nothing: the engine itself drains the buffers of software CPUs.
    fn drain(&self, vm: VmId, take: &mut dyn FnMut(usize, Gfn)) {
        let _ = (vm, take);
    }

    /// Whether the engine calls [`zapped`](Self::zapped). If `false`, the engine's code for these calls is compiled
    /// away.
    const WANTS_ZAPPED: bool = false;

    /// The engine calls this for each leaf that it has zapped, before the invalidation or slot change that zapped the
    /// leaf returns. So the host can mark pages as accessed or dirty (KVM: `kvm_set_pfn_dirty`). A page may be reported
    /// several times: for leaves of several memslots, or for pieces of a huge leaf.
    fn zapped(&self, leaf: ZappedLeaf) {
        let _ = leaf;
    }

    /// Records an event of the engine. The thread that causes the event calls this. The default implementation does
    /// nothing, so the calls are compiled away.
    #[inline(always)]
    fn trace(&self, event: Event) {
        let _ = event;
    }

    /// Waits for a short time. The engine calls this repeatedly until `what` is over, with `round` = 0, 1, 2, …. In the
    /// first rounds spin, later yield the processor. For [`WaitFor::Reader`], interrupt a reader that is blocked in a
    /// host page fault (the userspace port kicks the vCPU's thread). If no CPU is preempted while it holds a lock of
    /// the engine (as in a non-preemptible hypervisor), a spin hint is enough.
    fn wait(&self, round: u32, what: WaitFor);
}
