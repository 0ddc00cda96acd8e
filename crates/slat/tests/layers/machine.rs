//! A machine whose VMs have layered memory. It also records which frame backs each page of each VM, without layers.

use std::collections::{HashMap, HashSet};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};

use slat::layers::{PageCopy, PageFrames, Stack};
use slat::{
    Access, ForkError, Format, Gfn, Granule, HostPage, HostRun, Hva, Level, Pfn, Platform, Request,
    ResolveError, Stale, VmId, WaitFor,
};
use slat_model::{FailingHeap, HostChange, Invalidate, Machine, SimPlatform, Tlb};

/// The first backing address of each VM's memory.
pub const MEMORY: Hva = Hva(1 << 40);

/// The frames of pages. No frame is used again after it was freed, so a use after that is found.
pub struct Memory {
    next: AtomicU64,
    live: Mutex<HashMap<Pfn, u64>>,
    /// The number of copies that succeed before one fails.
    left: AtomicU64,
}

impl Default for Memory {
    fn default() -> Self {
        Memory {
            next: AtomicU64::new(1 << 20),
            live: Mutex::default(),
            left: AtomicU64::new(u64::MAX),
        }
    }
}

impl Memory {
    /// Allocates `pages` consecutive frames, full of zeros. The first one is aligned to `align` frames.
    pub fn block(&self, pages: u64, align: u64) -> Pfn {
        let first = self.next.load(SeqCst).next_multiple_of(align);
        self.next.store(first + pages, SeqCst);
        let frames = (first..first + pages).map(|frame| (Pfn(frame), 0));
        self.live.lock().unwrap().extend(frames);
        Pfn(first)
    }

    pub fn word(&self, frame: Pfn) -> u64 {
        let live = self.live.lock().unwrap();
        *live
            .get(&frame)
            .unwrap_or_else(|| panic!("{frame:?} was freed"))
    }

    pub fn set_word(&self, frame: Pfn, word: u64) {
        let old = self.live.lock().unwrap().insert(frame, word);
        assert!(old.is_some(), "{frame:?} was freed");
    }

    /// Returns the number of frames that are not freed.
    pub fn live(&self) -> usize {
        self.live.lock().unwrap().len()
    }

    /// Makes the copies after the next `n` fail.
    pub fn fail_after(&self, n: u64) {
        self.left.store(n, SeqCst);
    }
}

impl PageFrames for Memory {
    fn copy(&self, from: Option<Pfn>) -> Option<Pfn> {
        FailingHeap::spared(|| {
            let less = |left: u64| left.checked_sub(1);
            self.left.fetch_update(SeqCst, SeqCst, less).ok()?;
            let word = from.map_or(0, |from| self.word(from));
            let copy = self.block(1, 1);
            self.set_word(copy, word);
            Some(copy)
        })
    }

    fn free(&self, first: Pfn, pages: u64) {
        let mut live = self.live.lock().unwrap();
        for frame in (0..pages).map(|n| first.add(n)) {
            assert!(live.remove(&frame).is_some(), "{frame:?} is freed twice");
        }
    }
}

/// The memory of one VM.
pub struct View {
    granule: Granule,
    pub stack: Mutex<Stack<Memory>>,
    invalidate: Mutex<Option<Invalidate>>,
    record: Mutex<Record>,
}

/// The pages of one VM, without layers.
#[derive(Clone)]
struct Record {
    /// For each page that is there, its frame, and whether another VM may have it.
    pages: Vec<Option<(Pfn, bool)>>,
    /// For each stretch, whether it is still the block that the base has there.
    huge: Vec<bool>,
}

impl View {
    fn hva(&self, page: u64) -> Hva {
        self.granule.add_pages(MEMORY, page)
    }

    fn number(&self, backing: Hva) -> u64 {
        self.granule.pages_between(MEMORY, backing)
    }

    /// Returns a page by the record.
    fn recorded(&self, page: u64) -> Option<HostPage> {
        let record = self.record.lock().unwrap();
        let (frame, is_shared) = record.pages[page as usize]?;
        let is_huge = record.huge[(page / self.granule.pages(Level::MEGA)) as usize];
        let level = if is_huge { Level::MEGA } else { Level::PAGE };
        Some(HostPage::new(frame, level).with_writable(!is_shared))
    }

    /// Makes `copy` the VM's own copy of `page`.
    fn insert(&self, page: u64, copy: PageCopy<Memory>) {
        let mut stack = self.stack.lock().unwrap();
        stack.insert(copy);
        let found = stack.find(self.hva(page));
        if let Some(own) = found.filter(|found| found.writable) {
            let mut record = self.record.lock().unwrap();
            record.pages[page as usize] = Some((own.pfn, false));
            record.huge[(page / self.granule.pages(Level::MEGA)) as usize] = false;
        }
    }

    /// Gives the VM a page full of zeros, if it has none.
    fn fill(&self, page: u64) {
        let copy = self.stack.lock().unwrap().copy(self.hva(page)).unwrap();
        assert!(!copy.is_replacement());
        self.insert(page, copy);
    }

    /// Compares the stack with the record.
    fn check(&self) -> Result<(), String> {
        let stack = self.stack.lock().unwrap();
        let pages = self.record.lock().unwrap().pages.len() as u64;
        for page in 0..pages {
            let (found, recorded) = (stack.find(self.hva(page)), self.recorded(page));
            if found != recorded {
                return Err(format!("page {page:#x}: {found:?}, recorded {recorded:?}"));
            }
        }
        Ok(())
    }
}

/// The platform.
pub struct Layered {
    machine: Arc<SimPlatform>,
    pub memory: Arc<Memory>,
    /// The memory of the first VM, until it is made.
    first: Mutex<Option<Arc<View>>>,
    vms: Mutex<HashMap<VmId, Arc<View>>>,
}

impl Layered {
    /// Makes a machine whose first VM has `pages` pages. `fill` puts pages into its stack.
    pub fn new(
        granule: Granule,
        pages: u64,
        fill: impl FnOnce(&Memory, &mut Stack<Memory>),
    ) -> Arc<Self> {
        let memory = Arc::<Memory>::default();
        let backing = MEMORY..granule.add_pages(MEMORY, pages);
        let mut stack = Stack::new(memory.clone(), granule, backing);
        fill(&memory, &mut stack);
        let page = |page| {
            let found = stack.find(granule.add_pages(MEMORY, page));
            found.map(|page| (page.pfn, false))
        };
        let is_huge = |page| {
            let found = stack.find(granule.add_pages(MEMORY, page));
            found.is_some_and(|page| page.level == Level::MEGA)
        };
        let record = Record {
            pages: (0..pages).map(page).collect(),
            huge: (0..pages)
                .step_by(granule.pages(Level::MEGA) as usize)
                .map(is_huge)
                .collect(),
        };
        let first = View {
            granule,
            record: Mutex::new(record),
            stack: Mutex::new(stack),
            invalidate: Mutex::default(),
        };
        Arc::new(Layered {
            machine: SimPlatform::with_granule(granule, 1),
            memory,
            first: Mutex::new(Some(Arc::new(first))),
            vms: Mutex::default(),
        })
    }

    pub fn fail_allocation(&self, n: u64, stay: bool) {
        self.machine.fail_allocation(n, stay);
    }

    pub fn stop_failing(&self) -> bool {
        self.machine.stop_failing()
    }

    pub fn view(&self, vm: VmId) -> Arc<View> {
        self.vms.lock().unwrap()[&vm].clone()
    }

    /// Call for each VM after it is made.
    pub fn add(&self, vm: VmId, invalidate: Invalidate) -> Arc<View> {
        if let Some(first) = self.first.lock().unwrap().take() {
            self.vms.lock().unwrap().insert(vm, first);
        }
        let view = self.view(vm);
        *view.invalidate.lock().unwrap() = Some(invalidate);
        view
    }

    /// Call after a VM was dropped.
    pub fn remove(&self, vm: VmId) {
        self.vms.lock().unwrap().remove(&vm);
    }
}

// SAFETY: the methods for tables are those of `SimPlatform`. A stack returns a frame as writable to one VM only, and
// keeps it until the VM is dropped. No code accesses memory at these frames.
unsafe impl Platform for Layered {
    passes_tables!();

    fn granule(&self) -> Granule {
        self.machine.granule()
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        let view = self.view(request.vm);
        let page = view.number(request.backing);
        loop {
            let mut stack = view.stack.lock().unwrap();
            let found = stack.find(request.backing);
            if let Some(found) = found
                && (found.writable || request.access != Access::Write)
            {
                return Ok(found);
            }
            let copy = stack.copy(request.backing)?;
            drop(stack);
            let Some(found) = found else {
                view.insert(page, copy);
                continue;
            };
            assert!(copy.is_replacement());
            let mut copy = Some(copy);
            let invalidate = view.invalidate.lock().unwrap().clone();
            let invalidate = invalidate.expect("set when the VM was made");
            invalidate(request.backing, found.pfn, &mut || {
                view.insert(page, copy.take().expect("called once"));
            });
        }
    }

    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        let view = self.view(vm);
        let mut at = backing.start;
        loop {
            let run = view.stack.lock().unwrap().resident(at..backing.end);
            let Some(run) = run else {
                break;
            };
            found(run);
            at = view.granule.add_pages(run.backing, run.pages);
        }
    }

    fn share(&self, parent: VmId, child: VmId) -> Result<(), ForkError> {
        let parent = self.view(parent);
        let stack = parent.stack.lock().unwrap().share()?;
        let mut record = parent.record.lock().unwrap();
        (record.pages.iter_mut().flatten()).for_each(|(_, is_shared)| *is_shared = true);
        let view = View {
            granule: parent.granule,
            stack: Mutex::new(stack),
            invalidate: Mutex::default(),
            record: Mutex::new(record.clone()),
        };
        self.vms.lock().unwrap().insert(child, Arc::new(view));
        Ok(())
    }

    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale) {
        self.machine.flush(vm, range, stale);
    }

    fn wait(&self, round: u32, what: WaitFor) {
        self.machine.wait(round, what);
    }
}

/// The machine for random operations, as one VM sees it.
pub struct Rig<F> {
    platform: Arc<Layered>,
    pages: u64,
    vm: Option<(VmId, Arc<View>)>,
    format: PhantomData<fn() -> F>,
}

impl<F: Format> Machine for Rig<F> {
    type Platform = Layered;
    const REPORTS_FLUSHES: bool = false;

    /// Makes a machine whose memory begins with blocks of level 2, then has single frames, and then nothing yet.
    fn new(pages: u64, _: Arc<Tlb>) -> Self {
        let stretch = F::GRANULE.pages(Level::MEGA);
        let pages = pages.min(8 * stretch);
        let platform = Layered::new(F::GRANULE, pages, |memory, stack| {
            let blocks = pages / stretch / 2 * stretch;
            let first = memory.block(blocks, stretch);
            stack.put(MEMORY, first, blocks).unwrap();
            for page in blocks..blocks + stretch / 2 {
                let frame = memory.block(1, 1);
                let at = F::GRANULE.add_pages(MEMORY, page);
                stack.put(at, frame, 1).unwrap();
            }
        });
        Rig {
            platform,
            pages,
            vm: None,
            format: PhantomData,
        }
    }

    fn platform(&self) -> &Arc<Layered> {
        &self.platform
    }

    fn backing(&self) -> Hva {
        MEMORY
    }

    fn pages(&self) -> u64 {
        self.pages
    }

    fn page(&self, number: u64) -> Option<HostPage> {
        let (_, view) = self.vm.as_ref().expect("the VM is made");
        if view.recorded(number).is_none() {
            view.fill(number);
        }
        let found = view.recorded(number)?;
        Some(found.with_writable(true))
    }

    fn change(&self, _: &Range<u64>, _: HostChange) {}

    fn as_seen_by(&self, vm: VmId, invalidate: Invalidate) -> Option<Self> {
        let view = self.platform.add(vm, invalidate);
        Some(Rig {
            platform: self.platform.clone(),
            pages: self.pages,
            vm: Some((vm, view)),
            format: PhantomData,
        })
    }

    fn is_shared(&self, page: u64) -> bool {
        let (_, view) = self.vm.as_ref().expect("the VM is made");
        view.recorded(page).is_some_and(|page| !page.writable)
    }

    fn load(&self, frame: Pfn) -> Option<u64> {
        Some(if frame.0 == 0 {
            0
        } else {
            self.platform.memory.word(frame)
        })
    }

    fn store(&self, frame: Pfn, value: u64) {
        self.platform.memory.set_word(frame, value);
    }

    /// Compares each stack with its record. The frames that the records name, and no others, are those not freed, but
    /// for pages of a layer that all its VMs have replaced.
    fn check(&self) -> Result<(), String> {
        let vms: Vec<_> = self
            .platform
            .vms
            .lock()
            .unwrap()
            .values()
            .cloned()
            .collect();
        vms.iter().try_for_each(|view| view.check())?;
        let mut named = HashSet::new();
        for view in &vms {
            let record = view.record.lock().unwrap();
            named.extend(record.pages.iter().flatten().map(|(frame, _)| *frame));
        }
        let live = self.platform.memory.live.lock().unwrap();
        match named.iter().find(|frame| !live.contains_key(frame)) {
            Some(frame) => Err(format!("{frame:?} is in a VM and freed")),
            None if vms.is_empty() && !live.is_empty() => Err("frames were leaked".into()),
            None => Ok(()),
        }
    }
}

impl<F> Drop for Rig<F> {
    /// Drops the memory of the VM, which has ended.
    fn drop(&mut self) {
        if let Some((vm, _)) = self.vm.take() {
            self.platform.remove(vm);
        }
    }
}
