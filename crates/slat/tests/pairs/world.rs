//! The common parts of the tests of pairs: a VM with one slot, and a thread that can be stopped.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use crate::access;
use slat::format::Entry;
use slat::{
    Access, Config, Format, Gfn, Gpa, Level, MemoryAttributes, Prefetch, Region, Setting,
    SlotFlags, Stop, Translation, Vcpu, Vm,
};
use slat_model::{Event, HostChange, HostMemory, PageKind, SimPlatform};

pub const MIB2: u64 = 512;
/// The number of frames of the slot. Host page n backs frame n where the frame is shared, and host page `PRIVATE + n`
/// where it is private.
pub const FRAMES: u64 = 8 * MIB2;
pub const PRIVATE: u64 = FRAMES;
pub const NONE: SlotFlags = SlotFlags(0);
pub const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;

pub type TestVm<F> = Vm<SimPlatform, F>;

/// A VM with slot 0, and a vCPU.
pub struct World<F: Format> {
    pub platform: Arc<SimPlatform>,
    pub vm: Arc<TestVm<F>>,
    pub vcpu: Vcpu<SimPlatform, F>,
}

impl<F: Format> World<F> {
    /// Makes a world without a slot, whose host memory is mapped at `level`.
    pub fn empty(level: Level) -> Self {
        Self::with(level, Config::default())
    }

    pub fn with(level: Level, config: Config) -> Self {
        let platform = SimPlatform::at_level(2 * FRAMES, level);
        let vm = Vm::new(platform.clone(), config).unwrap();
        vm.set_policy(Setting::Prefetch(Prefetch::Off));
        let vcpu = vm.create_vcpu().unwrap();
        World { platform, vm, vcpu }
    }

    /// Makes a world whose slot has `flags`, and no private backing.
    pub fn shared(level: Level, flags: SlotFlags) -> Self {
        let world = Self::empty(level);
        world.set(flags);
        world
    }

    /// Makes a world whose slot has shared and private backing.
    pub fn with_private(level: Level) -> Self {
        let world = Self::empty(level);
        let both = region().with_private(Some(HostMemory::hva(PRIVATE)));
        world.vm.set_memory_region(0, &both).unwrap();
        world
    }

    pub fn set(&self, flags: SlotFlags) {
        let region = region().with_flags(flags);
        self.vm.set_memory_region(0, &region).unwrap();
    }

    pub fn policy(&self, name: &str, value: &str) {
        self.vm.set_policy(Setting::parse(name, value).unwrap());
    }

    pub fn convert(&self, gfns: Range<u64>, private: bool) {
        convert(&self.vm, gfns, private);
    }

    pub fn touch(&mut self, gfn: u64, access: Access) -> Result<Translation, Stop> {
        access::touch(&mut self.vcpu, gfn, access)
    }

    /// Returns the host page that an access reaches, and the level of the page's leaf.
    pub fn page(&mut self, gfn: u64, access: Access) -> (u64, u8) {
        let found = self.touch(gfn, access).unwrap();
        (HostMemory::identify(found.host.pfn()).0, found.level.0)
    }

    /// Asserts that no leaf maps a frame of `gfns`.
    pub fn assert_unmapped(&self, gfns: Range<u64>) {
        assert_unmapped(&self.vm, gfns);
    }

    pub fn log(&self) -> Vec<u64> {
        log_of(&self.vm, 0)
    }

    /// Changes the host pages `pages`, in an invalidation.
    pub fn replace(&self, pages: Range<u64>, change: HostChange) {
        let guard = self.vm.invalidate(HostMemory::hvas(&pages));
        self.platform.host.change(&pages, change);
        drop(guard);
    }

    pub fn check(&self) {
        self.vm.audit().unwrap();
        self.platform.check();
    }
}

pub fn region() -> Region {
    Region::new(0, Gpa(0), FRAMES << 12, HostMemory::hva(0))
}

pub fn remap(level: Level) -> HostChange {
    HostChange::Remap {
        level,
        writable: true,
        kind: PageKind::Ordinary,
    }
}

pub fn convert<F: Format>(vm: &TestVm<F>, gfns: Range<u64>, private: bool) {
    let attributes = match private {
        true => MemoryAttributes::PRIVATE,
        false => MemoryAttributes::NONE,
    };
    let gfns = Gfn(gfns.start)..Gfn(gfns.end);
    vm.set_memory_attributes(gfns, attributes).unwrap();
}

/// Asserts that no leaf maps a frame of `gfns`.
pub fn assert_unmapped<F: Format>(vm: &TestVm<F>, gfns: Range<u64>) {
    let visit = &mut |gfn, level, entry| {
        assert!(
            !matches!(entry, Entry::Leaf(_)),
            "{entry:?} of {gfn:?} at {level:?}"
        );
    };
    vm.visit_leaves(0, Gfn(gfns.start)..Gfn(gfns.end), visit);
}

/// Returns the pages that are marked in the log of slot `id`.
pub fn log_of<F: Format>(vm: &TestVm<F>, id: u32) -> Vec<u64> {
    let mut bitmap = vec![0; FRAMES as usize / 64];
    vm.get_dirty_log(0, id, &mut bitmap).unwrap();
    let is_set = |page: &u64| bitmap[*page as usize / 64] >> (page % 64) & 1 != 0;
    (0..FRAMES).filter(is_set).collect()
}

pub fn memory_fault<T>(gfn: u64, access: Access, private: bool, absent: bool) -> Result<T, Stop> {
    Err(Stop::MemoryFault {
        gpa: Gpa(gfn << 12),
        access,
        private,
        absent,
    })
}

/// Runs `then` at the first event of this thread for which `is_it` is true.
pub fn once_at(
    platform: &SimPlatform,
    is_it: impl Fn(Event) -> bool + Send + Sync + 'static,
    then: impl Fn() + Send + Sync + 'static,
) {
    let (this, done) = (thread::current().id(), AtomicBool::new(false));
    platform.set_hook(move |event| {
        if thread::current().id() == this && is_it(event) && !done.swap(true, SeqCst) {
            then();
        }
    });
}

/// Makes a stopped thread continue, at the latest when this is dropped.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<Stopped>, Condvar)>);

#[derive(Default)]
struct Stopped {
    is_stopped: bool,
    goes_on: bool,
}

impl Gate {
    fn stop(&self) {
        let mut now = self.0.0.lock().unwrap();
        now.is_stopped = true;
        self.0.1.notify_all();
        while !now.goes_on {
            now = self.0.1.wait(now).unwrap();
        }
    }

    fn is_stopped(&self) -> bool {
        self.0.0.lock().unwrap().is_stopped
    }

    fn go_on(&self) {
        self.0.0.lock().unwrap().goes_on = true;
        self.0.1.notify_all();
    }
}

struct GoesOn(Gate);

impl Drop for GoesOn {
    fn drop(&mut self) {
        self.0.go_on();
    }
}

/// Runs `first` on another thread, and stops it at its first event for which `stops` is true. Then runs `second` on
/// this thread. `first` continues when `second` waits or is done. Returns the result of `second`.
pub fn stopped_at<R>(
    platform: &SimPlatform,
    first: impl FnOnce() + Send,
    stops: impl Fn(Event) -> bool + Send + Sync + 'static,
    second: impl FnOnce() -> R,
) -> R {
    let gate = Gate::default();
    let stopped = gate.clone();
    let at_first = move |event| {
        if !stopped.is_stopped() && stops(event) {
            stopped.stop();
        }
    };
    one_and_another(platform, gate, at_first, first, second)
}

/// Like [`stopped_at`], but stops `first` between two of its steps.
pub fn stopped_between_steps<R>(
    platform: &SimPlatform,
    first: impl FnOnce() + Send,
    second: impl FnOnce() -> R,
) -> R {
    let gate = Gate::default();
    let (this, stopped) = (thread::current().id(), gate.clone());
    platform.on_trace(move |event| {
        let is_first = thread::current().id() != this;
        if matches!(event, slat::Event::Yield) && is_first && !stopped.is_stopped() {
            stopped.stop();
        }
    });
    one_and_another(platform, gate, |_| (), first, second)
}

fn one_and_another<R>(
    platform: &SimPlatform,
    gate: Gate,
    at_first: impl Fn(Event) + Send + Sync + 'static,
    first: impl FnOnce() + Send,
    second: impl FnOnce() -> R,
) -> R {
    let (this, goes_on) = (thread::current().id(), gate.clone());
    platform.set_hook(move |event| match event {
        Event::Wait(_) if thread::current().id() == this => goes_on.go_on(),
        _ if thread::current().id() == this => {}
        event => at_first(event),
    });
    let result = thread::scope(|scope| {
        let first = scope.spawn(first);
        let _goes_on = GoesOn(gate.clone());
        while !gate.is_stopped() {
            assert!(!first.is_finished(), "the first operation was not stopped");
            thread::yield_now();
        }
        second()
    });
    platform.clear_hook();
    result
}
