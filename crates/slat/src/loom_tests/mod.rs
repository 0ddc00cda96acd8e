//! Tests of pairs of concurrent operations: the engine's own code under the model checker loom. To run them:
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom_tests`
//!
//! With loom, tables have only two entries, and leaves of the slot index have four ([`crate::sync::atomic`] lists the
//! other differences). Each test runs two or three threads in all interleavings with a limited number of preemptions,
//! and with all values that loads may return by the memory model. The environment variable `LOOM_MAX_PREEMPTIONS` sets
//! the limit; otherwise each test has its own, usually 2.
//!
//! Memory that is freed or reclaimed contains a [`Watch`]. When a thread takes such memory over for exclusive use, loom
//! reports every other use that does not *happen before* this. For table frames, nodes, slots and slot sets, this is
//! when they are freed; for host pages, when the host reclaims them.

mod beside;
mod dirty;
mod faults;
mod flushes;
mod fork;
mod guest_tables;
mod layers;
mod locks;
mod metas;
mod promote;
mod readers;
mod shadow;
mod slots;
mod snapshot;
mod tables;
mod vmids;

use std::boxed::Box;
use std::ops::Range;
use std::sync::atomic::{AtomicU64 as Plain, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::vec::Vec;

use crate::Vcpu;
use crate::addr::{Access, Gfn, Gpa, Hva, Level, PAGE_SHIFT, Pfn};
use crate::format::{Entry, Ept, Format, Leaf, Stage2, X86};
use crate::frame::{Entries, TableMeta};
use crate::platform::{
    ForkError, HostPage, HostRun, Platform, Request, ResolveError, Stale, VmId, WaitFor,
};
use crate::slots::{Region, SlotFlags};
use crate::sync::atomic::{AtomicU64, Watch};
use crate::vm::{Config, Vm};
use crate::{MmuKind, Prefetch, Setting};
use crate::{Stop, Translation};

/// Runs `test` through all its interleavings with at most `preemptions` preemptions.
fn model(preemptions: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    builder.max_branches = builder.max_branches.max(20_000);
    let runs = Arc::new(Plain::new(0));
    let counted = runs.clone();
    let test = Arc::new(test);
    builder.check(move || {
        counted.fetch_add(1, Relaxed);
        // Run the test in another thread, because the stack of the model's first thread cannot be enlarged.
        let test = test.clone();
        spawn(move || test()).join().unwrap();
    });
    std::println!("{} interleavings", runs.load(Relaxed));
}

/// Starts another thread. Loom's messages call such a thread 2 or 3, and the test's own thread 1.
fn spawn<R: Send + 'static>(thread: impl FnOnce() -> R + 'static) -> loom::thread::JoinHandle<R> {
    let thread = OneThread(thread);
    // Loom's default stack of 32 KiB is too small for a vCPU and a fault, because loom's atomics are large.
    let builder = loom::thread::Builder::new().stack_size(STACK_WORDS);
    builder.spawn(move || thread.run()).unwrap()
}

/// The stack size of a thread, in words of 8 bytes.
const STACK_WORDS: usize = 0x4000;

/// The closure that a thread of loom runs. It need not be `Send`, because loom's threads are coroutines of one thread.
struct OneThread<T>(T);

// SAFETY: the closure never leaves the thread that runs the model.
unsafe impl<T> Send for OneThread<T> {}

impl<R, T: FnOnce() -> R> OneThread<T> {
    fn run(self) -> R {
        (self.0)()
    }
}

/// Waits for one round of waiting, which has the number `round`. Interleavings with many rounds are not explored. They
/// would show nothing new, because other threads could already run in each earlier round, and two waiting threads could
/// alternate forever.
fn wait(round: u32) {
    if round >= 2 {
        loom::skip_branch();
    }
    loom::thread::yield_now();
}

/// A format with few levels and the entries of `Ept`.
struct Small<const TOP: u8>;

/// A format with few levels and the entries of AArch64, which require break-before-make.
struct SmallStage2<const TOP: u8>;

/// A format with few levels and the entries of x86, which can shadow the tables of a guest.
struct SmallX86<const TOP: u8>;

macro_rules! small_format {
    ($name:ident, $of:ty, $breaks:expr, $dirty:expr) => {
        // SAFETY: only the tests' own walkers, which use `decode`, walk these tables; the entries are those of `$of`, a
        // valid format.
        unsafe impl<const TOP: u8> Format for $name<TOP> {
            const NAME: &'static str = "small";
            const TOP: Level = Level(TOP);
            const ROOT_TABLES: usize = 1;
            const MAX_LEAF: Level = Level::MEGA;
            const BREAK_BEFORE_MAKE: bool = $breaks;
            const TABLE: u64 = <$of>::TABLE;
            const TABLE_WRITE: u64 = <$of>::TABLE_WRITE;
            const PROTECT_FROM: Level = <$of>::PROTECT_FROM;
            const FRAME: u64 = <$of>::FRAME;
            const WRITE: u64 = <$of>::WRITE;
            const MAY_WRITE: u64 = <$of>::MAY_WRITE;
            const ACCESSED: u64 = <$of>::ACCESSED;
            const DIRTY: u64 = <$of>::DIRTY;
            const SETS_DIRTY: bool = $dirty;
            // With `false`, a read of a page in a logged slot leaves the page protected, so that the tests also explore
            // the fault of a later write.
            const LOGS_READS: bool = false;
            const MMIO_GENERATION_BITS: u32 = <$of>::MMIO_GENERATION_BITS;
            const MMIO_NOTE_BITS: u32 = <$of>::MMIO_NOTE_BITS;
            const SHADOWS: bool = <$of>::SHADOWS;
            const MMIO_PHYSICAL_BITS: u32 = <$of>::MMIO_PHYSICAL_BITS;

            fn decode(bits: u64, level: Level) -> Entry {
                <$of>::decode(bits, level)
            }
            fn decode_leaf(bits: u64) -> Leaf {
                <$of>::decode_leaf(bits)
            }
            fn ready(access: Access) -> (u64, u64) {
                <$of>::ready(access)
            }
            fn leaf(leaf: Leaf, level: Level) -> u64 {
                <$of>::leaf(leaf, level)
            }
            fn mmio(generation: u64, note: u64) -> u64 {
                <$of>::mmio(generation, note)
            }
            fn broken(bits: u64) -> u64 {
                <$of>::broken(bits)
            }
            fn is_absent(bits: u64) -> bool {
                <$of>::is_absent(bits)
            }
            fn cleared(flush: u64) -> u64 {
                <$of>::cleared(flush)
            }
            fn cleared_by(bits: u64) -> Option<u64> {
                <$of>::cleared_by(bits)
            }
        }
    };
}

small_format!(Small, Ept, false, true);
small_format!(SmallStage2, Stage2<39>, true, false);
small_format!(SmallX86, X86<5>, false, true);

/// A table frame. The memory of freed frames is kept, so that loom can report a use after free.
struct Frame {
    entries: Entries,
    meta: TableMeta,
    alive: Watch,
    free: Plain,
}

/// A page of host memory.
struct Page {
    /// Watches the page: guests may use it until the host reclaims it.
    alive: Watch,
    /// The value that the guest has written last.
    content: AtomicU64,
}

/// The platform of these tests. Its own locks are never held during an operation that loom models.
struct Machine {
    frames: Mutex<Vec<Box<Frame>>>,
    /// The host page to which each backing page is mapped.
    mapped: Mutex<Vec<HostPage>>,
    pages: Arc<Vec<Page>>,
    /// The pages that a VM and its clone share.
    sharing: fork::Sharing,
    layers: layers::Layers,
    kept: snapshot::Kept,
}

impl Machine {
    const PAGES: u64 = 8;

    /// Makes a machine on which backing page n is host page n, mapped at `level`.
    fn new(level: Level) -> Arc<Machine> {
        let mapped = |n| HostPage::new(Pfn(n), level);
        let page = |_| Page {
            alive: Watch::new(),
            content: AtomicU64::new(0),
        };
        Arc::new(Machine {
            frames: Mutex::new(Vec::new()),
            mapped: Mutex::new((0..Self::PAGES).map(mapped).collect()),
            pages: Arc::new((0..Self::PAGES).map(page).collect()),
            sharing: fork::Sharing::default(),
            layers: layers::Layers::default(),
            kept: snapshot::Kept::default(),
        })
    }

    fn live_frames(&self) -> usize {
        let frames = self.frames.lock().unwrap();
        let live = frames.iter().filter(|frame| frame.free.load(Relaxed) == 0);
        live.count()
    }

    fn frame(&self, frame: Pfn) -> *const Frame {
        &*self.frames.lock().unwrap()[frame.0 as usize - 1]
    }

    /// Maps the backing page `page` to host page `to`.
    fn remap(&self, page: u64, to: u64) {
        let mapped = &mut self.mapped.lock().unwrap()[page as usize];
        mapped.pfn = Pfn(to);
        mapped.level = Level::PAGE;
    }

    /// Returns the host page that backs `page` of `vm`.
    fn backs(&self, vm: VmId, page: u64) -> HostPage {
        let own = || {
            let mapped = self.mapped.lock().unwrap()[page as usize];
            mapped.with_writable(!self.sharing.is_shared(page))
        };
        self.sharing.of_clone(vm, page).unwrap_or_else(own)
    }

    fn page(&self, translation: &Translation) -> &Page {
        &self.pages[translation.host.pfn().0 as usize]
    }
}

// SAFETY: frames are neither moved nor freed before the machine is dropped; the pages that `resolve` returns are never
// dereferenced; no hardware walks these tables.
unsafe impl Platform for Machine {
    fn alloc_table(&self, _: VmId) -> Option<Pfn> {
        let frame = Box::new(Frame {
            entries: Entries::default(),
            meta: TableMeta::new(),
            alive: Watch::new(),
            free: Plain::new(0),
        });
        let mut frames = self.frames.lock().unwrap();
        frames.push(frame);
        Some(Pfn(frames.len() as u64))
    }

    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn> {
        assert_eq!(tables, 1);
        self.alloc_table(vm)
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        // SAFETY: frames live as long as `self`.
        let frame = unsafe { &*self.frame(frame) };
        frame.alive.owned();
        assert_eq!(frame.free.swap(1, Relaxed), 0, "a frame is freed twice");
    }

    fn entries(&self, frame: Pfn) -> std::ptr::NonNull<Entries> {
        if loom::thread::panicking() {
            // The frame was freed. Do not panic here: during another panic, a second one from a destructor would abort
            // the process.
            return Box::leak(Box::<Entries>::default()).into();
        }
        // SAFETY: frames live as long as `self`.
        let frame = unsafe { &*self.frame(frame) };
        frame.alive.used();
        assert_eq!(frame.free.load(Relaxed), 0, "a freed frame is used");
        (&frame.entries).into()
    }

    fn meta(&self, frame: Pfn) -> std::ptr::NonNull<TableMeta> {
        // SAFETY: frames live as long as `self`.
        (unsafe { &(*self.frame(frame)).meta }).into()
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        if let Some(layered) = self.layers.resolve(request) {
            return layered;
        }
        let page = request.backing.0 >> PAGE_SHIFT;
        if request.access == Access::Write && self.sharing.is_shared(page) {
            self.sharing.copy(self, page);
        }
        Ok(self.backs(request.vm, page))
    }

    fn share(&self, parent: VmId, clone: VmId) -> Result<(), ForkError> {
        if self.layers.share(parent, clone) {
            return Ok(());
        }
        let originals = self.mapped.lock().unwrap().clone();
        self.sharing.begin(clone, originals);
        Ok(())
    }

    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        if let Some(runs) = self.layers.resident(vm, &backing) {
            return runs.into_iter().for_each(found);
        }
        for page in backing.start.0 >> PAGE_SHIFT..backing.end.0 >> PAGE_SHIFT {
            found(HostRun {
                backing: Hva(page << PAGE_SHIFT),
                pages: 1,
                first: self.backs(vm, page),
            });
        }
    }

    const KEEPS_OLD_PAGES: bool = true;

    fn keep(&self, vm: VmId, backing: Range<Hva>) {
        self.kept.keep(self, vm, backing);
    }

    fn flush(&self, _: VmId, _: Range<Gfn>, _: Stale) {}

    fn wait(&self, round: u32, _: WaitFor) {
        wait(round);
    }
}

type SmallVm = Vm<Machine, Small<2>>;
type SmallVcpu = Vcpu<Machine, Small<2>>;

const PLAIN: SlotFlags = SlotFlags(0);
const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;

/// Makes a VM in which slot 0 contains `pages` pages from frame 0 on. If `pages` is 0, the VM has no slot.
fn vm(level: Level, pages: u64, flags: SlotFlags) -> Arc<SmallVm> {
    vm_with(MmuKind::Tdp, level, pages, flags)
}

/// Makes a VM like [`vm`], but with the MMU `mmu`.
fn vm_with(mmu: MmuKind, level: Level, pages: u64, flags: SlotFlags) -> Arc<SmallVm> {
    let config = Config::default().with_mmu(mmu);
    let vm = Vm::new(Machine::new(level), config).unwrap();
    vm.set_policy(Setting::Prefetch(Prefetch::Off));
    if pages > 0 {
        set_slot(&vm, 0, pages, flags);
    }
    vm
}

/// Creates, moves or changes slot 0: afterwards it contains `pages` pages from frame `base` on, with the backing as in
/// [`vm`]. If `pages` is 0, deletes it.
fn set_slot(vm: &SmallVm, base: u64, pages: u64, flags: SlotFlags) {
    if pages == 0 {
        return vm.remove_memory_region(0, 0).unwrap();
    }
    let (gpa, size) = (Gpa(base << PAGE_SHIFT), pages << PAGE_SHIFT);
    let region = Region::new(0, gpa, size, Hva(0)).with_flags(flags);
    vm.set_memory_region(0, &region).unwrap();
}

fn hvas(pages: Range<u64>) -> Range<Hva> {
    Hva(pages.start << PAGE_SHIFT)..Hva(pages.end << PAGE_SHIFT)
}

/// Runs `guest` on a new vCPU in its reader section.
fn on_cpu<R>(vm: &Arc<SmallVm>, guest: impl FnOnce(&mut SmallVcpu) -> R) -> R {
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    let result = guest(&mut vcpu);
    vcpu.leave();
    result
}

/// Returns the translation of frame `gfn`. `None`: MMIO. If a flush is requested, quiesces, so the caller must have
/// cached no other translation.
fn get(vcpu: &mut SmallVcpu, gfn: u64, access: Access) -> Option<Translation> {
    loop {
        match vcpu.translate(Gpa(gfn << PAGE_SHIFT), access) {
            Ok(translation) => return Some(translation),
            Err(Stop::Mmio { .. }) => return None,
            Err(Stop::Retry) => vcpu.quiesce(),
            Err(stop) => panic!("{stop}"),
        }
    }
}

/// Uses frame `gfn` once, on a new vCPU. Returns the host page. `None`: MMIO.
fn touch(vm: &Arc<SmallVm>, gfn: u64, access: Access) -> Option<Pfn> {
    on_cpu(vm, |vcpu| {
        let translation = get(vcpu, gfn, access)?;
        vm.platform().page(&translation).alive.used();
        Some(translation.host.pfn())
    })
}
