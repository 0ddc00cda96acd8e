//! The simulated machine: a [`Platform`] whose results a test can choose, and which a test can interrupt at every call.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, OnceLock, RwLock};
use std::time::Duration;

use slat::{
    Access, Entries, ForkError, Format, Gfn, Granule, HostPage, HostRun, Hpa, Hva, Level, Pfn,
    Platform, Request, ResolveError, Stale, TableMeta, Vm, VmId, WaitFor,
};

use crate::frames::Frames;
use crate::host::{HostChange, HostMemory, PageKind};
use crate::sharing::Sharing;
use crate::watched::Watched;

/// A moment at which a test can run code, to cause an interleaving of threads that rarely happens by chance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The engine requests a frame for a table.
    Alloc,
    /// A walk reaches this table.
    Entries(Pfn),
    /// A backing page is about to be resolved.
    Resolve(Hva),
    /// A backing page was resolved, but the engine has not got the result yet.
    Resolved(Hva),
    /// The platform has found resident pages from this address on, but the engine has not got them yet.
    Resident(Hva),
    /// An entry of the guest's own tables is about to be read, or was just read, but the engine has not got the value
    /// yet ([`SimMachine::guest_entry`]).
    GuestEntry(Hpa),
    /// The engine waits for a lock, a reader or a flush.
    Wait(WaitFor),
    /// The engine flushes hardware for a range of frames: from the first value up to, but excluding, the second value.
    Flush(Gfn, Gfn),
    /// The platform is given the pages from the first address up to, but not including, the second one, to keep them.
    Keep(Hva, Hva),
}

type Hook = Arc<dyn Fn(Event) + Send + Sync>;
type TraceHook = Box<dyn Fn(slat::Event) + Send + Sync>;

/// A gate of the test: every thread that resolves a page in `closed` sleeps until the test opens the gate.
#[derive(Default)]
struct Gate {
    closed: Mutex<Option<Range<Hva>>>,
    opened: Condvar,
    waiting: AtomicUsize,
}

/// A simulated machine.
pub struct SimMachine {
    /// The machine's host memory. If the VM was cloned, this is the memory of the first VM.
    pub host: Arc<HostMemory>,
    pub(crate) sharing: Sharing,
    frames: Frames,
    flushes: AtomicU64,
    resolves: AtomicU64,
    hooked: AtomicBool,
    hook: RwLock<Option<Hook>>,
    trace_hook: OnceLock<TraceHook>,
    gate: Gate,
}

/// The simulated machine as a platform that watches how the engine uses it.
pub type SimPlatform = Watched<SimMachine>;

impl SimPlatform {
    /// Makes a machine with `pages` pages of host memory, which is mapped at `level`.
    pub fn at_level(pages: u64, level: Level) -> Arc<Self> {
        let platform = Self::new(pages);
        let remap = HostChange::Remap {
            level,
            writable: true,
            kind: PageKind::Ordinary,
        };
        platform.host.change(&(0..pages), remap);
        platform
    }

    /// Makes hardware walkers walk the tables of `vm` from now on. `vm` has `spaces` address spaces.
    pub fn watch<F: Format>(&self, vm: &Vm<SimPlatform, F>, spaces: usize) {
        let root = |space| vm.root(space).expect("an address space of the VM");
        let roots: Vec<_> = (0..spaces).map(root).collect();
        // SAFETY: frames stay allocated until the platform is dropped, and the engine accesses them atomically.
        unsafe { self.tlb.watch::<F>(vm.id(), &roots) };
    }

    /// Panics if any violation was recorded.
    pub fn check(&self) {
        let found = self.violations().and_then(|()| self.check_tables());
        found.unwrap_or_else(|violations| panic!("{violations}"));
    }
}

impl SimMachine {
    /// Makes a machine with `pages` pages of host memory, each the size of `granule`.
    pub(crate) fn with_memory(granule: Granule, pages: u64) -> Arc<Self> {
        Arc::new(SimMachine {
            host: Arc::new(HostMemory::with_granule(granule, pages)),
            sharing: Sharing::default(),
            frames: Frames::new(granule),
            flushes: AtomicU64::new(0),
            resolves: AtomicU64::new(0),
            hooked: AtomicBool::new(false),
            hook: RwLock::new(None),
            trace_hook: OnceLock::new(),
            gate: Gate::default(),
        })
    }

    /// Checks that no table frame was misused.
    pub(crate) fn check_tables(&self) -> Result<(), String> {
        self.frames.check()
    }

    /// Returns the number of hardware flushes so far.
    pub fn flushes(&self) -> u64 {
        self.flushes.load(SeqCst)
    }

    /// Returns the number of backing pages resolved so far.
    pub fn resolves(&self) -> u64 {
        self.resolves.load(SeqCst)
    }

    /// Calls `hook` at every [`Event`], on the thread that causes it.
    pub fn set_hook(&self, hook: impl Fn(Event) + Send + Sync + 'static) {
        *self.hook.write().unwrap() = Some(Arc::new(hook));
        self.hooked.store(true, SeqCst);
    }

    /// Calls `hook` for every event that the engine traces from now on ([`Platform::trace`]). (The trait's
    /// documentation says in which state it calls.) If this function is called again, the first hook stays.
    pub fn on_trace(&self, hook: impl Fn(slat::Event) + Send + Sync + 'static) {
        let _ = self.trace_hook.set(Box::new(hook));
    }

    /// Calls the hook for a read of an entry of the guest's own tables, at `host`. Call before and after a test's CPU
    /// reads such an entry.
    pub fn guest_entry(&self, host: Hpa) {
        self.event(Event::GuestEntry(host));
    }

    /// Removes the hook of [`set_hook`](Self::set_hook).
    pub fn clear_hook(&self) {
        self.hooked.store(false, SeqCst);
        *self.hook.write().unwrap() = None;
    }

    /// From now on, makes threads that resolve a page of `range` sleep, as on a page that a userfaultfd handler has not
    /// filled yet.
    pub fn close_gate(&self, range: Range<Hva>) {
        *self.gate.closed.lock().unwrap() = Some(range);
    }

    /// Opens the gate, and wakes all threads that sleep because they resolved a page that the gate had closed.
    pub fn open_gate(&self) {
        *self.gate.closed.lock().unwrap() = None;
        self.gate.opened.notify_all();
    }

    /// Returns the number of threads that sleep because they resolved a page that the gate has closed.
    pub fn waiting_at_gate(&self) -> usize {
        self.gate.waiting.load(SeqCst)
    }

    #[inline]
    fn event(&self, event: Event) {
        if self.hooked.load(Relaxed) {
            let hook = self.hook.read().unwrap().clone();
            if let Some(hook) = hook {
                hook(event);
            }
        }
    }

    fn pass_gate(&self, hva: Hva) {
        let shut = |closed: &Option<Range<Hva>>| closed.as_ref().is_some_and(|r| r.contains(&hva));
        let mut closed = self.gate.closed.lock().unwrap();
        if !shut(&closed) {
            return;
        }
        self.gate.waiting.fetch_add(1, SeqCst);
        while shut(&closed) {
            closed = self.gate.opened.wait(closed).unwrap();
        }
        self.gate.waiting.fetch_sub(1, SeqCst);
    }
}

/// Whether `page` is the next page after `run`, with the same attributes, so that `run` can be extended by `page`.
fn continues(run: &HostRun, page: &HostPage) -> bool {
    let next = run.first.with_pfn(run.first.pfn.add(run.pages));
    next == *page
}

// SAFETY:
// - frames and their metadata: see `frames`; the memory of a frame stays until the platform is dropped;
// - no code accesses memory at the addresses that `resolve` returns;
// - no hardware walks these tables.
unsafe impl Platform for SimMachine {
    fn granule(&self) -> Granule {
        self.host.granule()
    }

    fn alloc_table(&self, _: VmId) -> Option<Pfn> {
        self.event(Event::Alloc);
        Some(self.frames.alloc())
    }

    fn alloc_root(&self, _: VmId, tables: usize) -> Option<Pfn> {
        self.event(Event::Alloc);
        Some(self.frames.alloc_run(tables as u64))
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        self.frames.free(frame);
    }

    #[inline]
    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        self.event(Event::Entries(frame));
        self.frames.entries(frame)
    }

    #[inline]
    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        self.frames.meta(frame)
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        let (backing, access) = (request.backing, request.access);
        self.event(Event::Resolve(backing));
        self.pass_gate(backing);
        self.resolves.fetch_add(1, Relaxed);
        let memory = self.memory_of(request.vm);
        let number = memory.page(backing);
        if let Some(page) = number
            && access == Access::Write
            && memory.is_shared(page)
            && memory.get(page).is_some_and(|page| page.writable)
        {
            self.make_own(request.vm, page);
        }
        let page = number.and_then(|page| memory.usable(page));
        self.event(Event::Resolved(backing));
        match page {
            Some(page) if page.writable || access != Access::Write => Ok(page),
            None if number.is_some_and(|page| memory.is_absent(page)) => Err(ResolveError::Absent),
            _ => Err(ResolveError::BadAddress),
        }
    }

    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        let mut give = |run: HostRun| {
            self.event(Event::Resident(run.backing));
            found(run);
        };
        let memory = self.memory_of(vm);
        let mut run: Option<HostRun> = None;
        let mut at = backing.start;
        while at < backing.end {
            let page = memory.page(at).and_then(|page| memory.usable(page));
            match (&mut run, page) {
                (Some(run), Some(page)) if continues(run, &page) => run.pages += 1,
                (before, page) => {
                    let first = page.map(|first| HostRun {
                        backing: at,
                        pages: 1,
                        first,
                    });
                    before.take().into_iter().for_each(&mut give);
                    *before = first;
                }
            }
            at = self.granule().add_pages(at, 1);
        }
        run.into_iter().for_each(give);
    }

    fn share(&self, parent: VmId, child: VmId) -> Result<(), ForkError> {
        self.share_memory(parent, child);
        Ok(())
    }

    const KEEPS_OLD_PAGES: bool = true;

    fn keep(&self, _: VmId, backing: Range<Hva>) {
        self.event(Event::Keep(backing.start, backing.end));
    }

    fn flush(&self, _: VmId, range: Range<Gfn>, _: Stale) {
        self.event(Event::Flush(range.start, range.end));
        self.flushes.fetch_add(1, Relaxed);
    }

    #[inline]
    fn trace(&self, event: slat::Event) {
        if let Some(hook) = self.trace_hook.get() {
            hook(event);
        }
    }

    fn wait(&self, round: u32, what: WaitFor) {
        self.event(Event::Wait(what));
        const SPINS: u32 = 8;
        const YIELDS: u32 = 64;
        if round < SPINS {
            std::hint::spin_loop();
        } else if round < SPINS + YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_in_guest_memory_is_found() {
        let platform = SimPlatform::new(1);
        let vm = VmId(0);
        let (a, b) = (platform.alloc_table(vm).unwrap(), platform.alloc_table(vm));
        assert!(b.is_some());
        assert_eq!(platform.check_frames(|_| false), Ok(()));
        assert!(platform.check_frames(|frame| frame == a).is_err());
    }
}
