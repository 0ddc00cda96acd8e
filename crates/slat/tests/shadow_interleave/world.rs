//! The VM of these tests: a guest with page tables of its own, its CPUs, and the pages that accesses may reach.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use slat::format::X86;
use slat::guest_walk::{GuestTables, WalkError, walk};
use slat::{
    Access::{self, *},
    Attention, Config, Gpa, HostWords, Hpa, Level, MmuKind, Prefetch, Region, Setting, SlotFlags,
    Stop, Translation, Vcpu, VirtualStop, Vm,
};
use slat_model::{Event, Harvests, HostChange, HostMemory, PageKind, SimPlatform};

use crate::guest::{Memory, USED, Words, paging};
use crate::interleave::{Holder, Scene};

const HOST_PAGES: u64 = 160;
/// The number of pages of slot 0: host pages 0..128 back the frames with the same numbers.
const PAGES: u64 = 128;
/// The host pages that back slot 1, which does not exist at first.
const MORE: Range<u64> = 128..160;
/// The frames of the guest's tables of level 4 and 3.
pub const ROOT: u64 = 16;
pub const UPPER: u64 = 17;
/// The frame of the page directory. Its first two entries refer to [`TABLE`].
pub const DIRECTORY: u64 = 18;
pub const TABLE: u64 = 19;
/// The frame of another table of level 1. No entry refers to it at first.
pub const OTHER: u64 = 20;
/// The frames that the first entries of [`TABLE`] map begin here.
pub const DATA: u64 = 64;
/// The frame that all entries of [`OTHER`] map, and that [`TABLE`] maps after a store.
pub const NEW: u64 = 80;
/// The frame at which slot 1 is created. An entry of [`TABLE`] maps it.
pub const FAR: u64 = 200;

/// The addresses that the tests access. The first entry of the directory translates four, and the second two.
pub const A: u64 = 0;
pub const B: u64 = 1 << 12;
/// An address that is mapped to [`FAR`].
pub const C: u64 = 2 << 12;
/// An address that is translated by the same entry of [`TABLE`] as [`A`], but through another entry of the directory.
pub const A2: u64 = 2 << 20;
pub const B2: u64 = A2 | B;
const ALL: [u64; 6] = [A, B, C, 3 << 12, A2, B2];

/// The result of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    HostPage(u64),
    PageFault,
    Mmio(u64),
}

pub type Act = fn(&World);

/// A function that the holder runs.
type Order = fn(&mut Cpu<'_>);

pub struct World {
    pub vm: Arc<Vm<SimPlatform, X86<5>>>,
    memory: Memory,
    /// The frame at which slot 1 is, if it exists.
    more: Mutex<Option<u64>>,
    flags: Mutex<SlotFlags>,
    harvests: Harvests,
    /// Whether every write must be in the log.
    logging: AtomicBool,
    /// The addresses for which CPUs have stored an entry and have not flushed.
    unflushed: Mutex<Vec<u64>>,
    order: Mutex<Option<Order>>,
    done: Condvar,
    has_holder: AtomicBool,
}

impl World {
    /// Makes a guest whose tables have all entries, and for which nothing is mapped yet.
    pub fn new() -> Arc<Self> {
        let platform = SimPlatform::new(HOST_PAGES);
        platform.host.change(&(0..HOST_PAGES), REMAP);
        let config = Config::default().with_mmu(MmuKind::Shadow);
        let vm = Vm::new(platform, config).unwrap();
        vm.set_policy(Setting::Prefetch(Prefetch::Off));
        let world = World {
            vm,
            memory: Memory::new(HOST_PAGES),
            more: Mutex::new(None),
            flags: Mutex::default(),
            harvests: Harvests::new(PAGES),
            logging: AtomicBool::new(false),
            unflushed: Mutex::default(),
            order: Mutex::default(),
            done: Condvar::new(),
            has_holder: AtomicBool::new(false),
        };
        world.set_slot_0();
        world.memory.link(&[ROOT, UPPER, DIRECTORY, TABLE]);
        world.put(DIRECTORY, 1, TABLE);
        (0..8).for_each(|page| world.put(TABLE, page, DATA + page));
        world.put(TABLE, 2, FAR);
        (0..8).for_each(|page| world.put(OTHER, page, NEW));
        Arc::new(world)
    }

    /// Writes an entry without a report to the MMU.
    fn put(&self, table: u64, index: u64, frame: u64) {
        self.memory.put(table, index, frame << 12 | USED);
    }

    /// Writes an entry like a client, which reports that to the VM. Each CPU flushes soon after.
    pub fn client_stores(&self, table: u64, index: u64, frame: u64) {
        self.put(table, index, frame);
        self.unflushed.lock().unwrap().extend(ALL);
        self.vm.guest_memory_changed();
    }

    fn set_slot_0(&self) {
        let flags = *self.flags.lock().unwrap();
        let region = Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0)).with_flags(flags);
        self.vm.set_memory_region(0, &region).unwrap();
    }

    /// Starts or stops dirty logging of slot 0.
    pub fn log(&self, logs: bool) {
        *self.flags.lock().unwrap() = match logs {
            true => SlotFlags::LOG_DIRTY_PAGES,
            false => SlotFlags::default(),
        };
        self.logging.store(false, SeqCst);
        self.set_slot_0();
        self.logging.store(logs, SeqCst);
    }

    pub fn harvest(&self) {
        let mut bitmap = [0; PAGES as usize / 64];
        self.harvests.harvest(&mut bitmap, |bitmap| {
            self.vm.get_dirty_log(0, 0, bitmap).unwrap();
        });
    }

    /// Creates slot 1 at frame `at`, moves it there, or deletes it.
    pub fn set_slot_1(&self, at: Option<u64>) {
        let set = match at {
            Some(frame) => {
                let (gpa, size) = (Gpa(frame << 12), (MORE.end - MORE.start) << 12);
                let region = Region::new(1, gpa, size, HostMemory::hva(MORE.start));
                self.vm.set_memory_region(0, &region)
            }
            None => self.vm.remove_memory_region(0, 1),
        };
        set.unwrap();
        *self.more.lock().unwrap() = at;
    }

    /// Replaces the host page that backs `frame` of slot 0, like a host that moves or swaps the page. The contents stay
    /// the same.
    pub fn invalidate(&self, frame: u64) {
        let pages = frame..frame + 1;
        let guard = self.vm.invalidate(HostMemory::hvas(&pages));
        self.vm.platform().host.change(&pages, REMAP);
        drop(guard);
    }

    /// Runs `work` on a CPU of its own.
    pub fn on_cpu<R>(&self, work: impl FnOnce(&mut Cpu<'_>) -> R) -> R {
        work(&mut Cpu::new(self))
    }

    /// Runs `order` on the holder, which may have old translations.
    pub fn by_holder(&self, order: Order) {
        if !self.has_holder.load(SeqCst) {
            return self.on_cpu(order);
        }
        let mut slot = self.order.lock().unwrap();
        *slot = Some(order);
        while slot.is_some() {
            slot = self.done.wait(slot).unwrap();
        }
    }

    /// Returns the host page that backs `gpa`.
    fn host_page(&self, gpa: Gpa) -> Option<u64> {
        let frame = gpa.gfn().0;
        let pages = MORE.end - MORE.start;
        let more = *self.more.lock().unwrap();
        match more {
            Some(at) if (at..at + pages).contains(&frame) => Some(MORE.start + frame - at),
            _ => (frame < PAGES).then_some(frame),
        }
    }

    /// Returns the result of an access by the guest's tables as they are now.
    fn expected(&self, gva: u64, access: Access) -> Found {
        match walk(&mut Now(self), &paging(ROOT << 12), gva, access) {
            Ok(page) => match self.host_page(page.gpa) {
                Some(host_page) => Found::HostPage(host_page),
                None => Found::Mmio(page.gpa.gfn().0),
            },
            Err(WalkError::PageFault { .. }) => Found::PageFault,
            Err(WalkError::Memory(never)) => match never {},
        }
    }

    fn compare(&self, gva: u64) {
        for access in [Read, Write, Execute] {
            let found = self.on_cpu(|cpu| cpu.access(gva, access));
            let expected = self.expected(gva, access);
            assert_eq!(found, expected, "{access:?} at {gva:#x}");
        }
    }

    /// Checks that a CPU may use the translation to `host` that it has.
    fn check_use(&self, host: Hpa) {
        let platform = self.vm.platform();
        let (page, _) = HostMemory::identify(host.pfn());
        let now = platform.host.get(page).map(|page| page.pfn.hpa());
        if now != Some(host) {
            platform.note(format!("{host:?} is used, host page {page} is {now:?}"));
        }
    }

    /// Notes a write of a CPU to host page `page`.
    fn wrote(&self, page: u64) {
        if self.logging.load(SeqCst) && page < PAGES {
            self.harvests.write(page);
        }
    }
}

const REMAP: HostChange = HostChange::Remap {
    level: Level::PAGE,
    writable: true,
    kind: PageKind::Ordinary,
};

/// The guest's tables as they are now, for a walk that changes nothing, because all flags are set.
struct Now<'w>(&'w World);

impl GuestTables for Now<'_> {
    type Error = Infallible;

    fn read(&mut self, gpa: Gpa, _: usize) -> Result<u64, Infallible> {
        let page = self.0.host_page(gpa);
        Ok(page.map_or(0, |page| self.0.memory.entry(page, gpa.offset() / 8)))
    }

    fn compare_exchange(&mut self, _: Gpa, _: usize, _: u64, _: u64) -> Result<bool, Infallible> {
        unreachable!("all flags are set");
    }
}

/// A CPU's access to the guest's tables. Other threads can run before and after it reads an entry.
struct Steps<'w> {
    world: &'w World,
    words: Words<'w>,
}

impl HostWords for Steps<'_> {
    type Error = Infallible;

    fn read(&mut self, host: Hpa, size: usize) -> Result<u64, Infallible> {
        let platform = self.world.vm.platform();
        // The tests use only the first 4 of the table's 512 entries, so only reads of these are steps.
        let is_used = host.0 % 4096 < 4 * 8;
        is_used.then(|| platform.guest_entry(host));
        let entry = self.words.read(host, size);
        self.world.check_use(Hpa(host.0 & !0xfff));
        is_used.then(|| platform.guest_entry(host));
        entry
    }

    fn compare_exchange(
        &mut self,
        host: Hpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Infallible> {
        self.words.compare_exchange(host, size, old, new)
    }
}

/// A CPU of the guest, in a reader section, with a TLB. The CPU does not check its attention word, and uses its
/// translations until a result says that they are void.
pub struct Cpu<'w> {
    world: &'w World,
    vcpu: Vcpu<SimPlatform, X86<5>>,
    /// The host pages to which accesses were translated, by virtual page.
    pages: Vec<(u64, Hpa)>,
    /// The translations that allow stores, by frame.
    stores: Vec<(u64, Translation)>,
    unflushed: Vec<u64>,
}

impl<'w> Cpu<'w> {
    fn new(world: &'w World) -> Self {
        let mut vcpu = world.vm.create_vcpu().unwrap();
        vcpu.enter_unguarded(1);
        vcpu.quiesce();
        Cpu {
            world,
            vcpu,
            pages: Vec::new(),
            stores: Vec::new(),
            unflushed: Vec::new(),
        }
    }

    fn words(&self) -> Steps<'w> {
        let words = self.world.memory.words();
        let world = self.world;
        Steps { world, words }
    }

    fn quiesce(&mut self) {
        self.forget();
        self.vcpu.quiesce();
    }

    fn forget(&mut self) {
        self.pages.clear();
        self.stores.clear();
    }

    /// Uses all translations that the CPU has. Call after every result that does not say that they are void.
    fn use_all(&self) {
        let stores = self.stores.iter().map(|(_, found)| found.host);
        let all = self.pages.iter().map(|(_, host)| *host).chain(stores);
        all.for_each(|host| self.world.check_use(host));
    }

    pub fn access(&mut self, gva: u64, access: Access) -> Found {
        let found = self.find(gva, access);
        self.use_all();
        found
    }

    fn find(&mut self, gva: u64, access: Access) -> Found {
        let (paging, mut words) = (paging(ROOT << 12), self.words());
        loop {
            match (self.vcpu).translate_virtual(gva, access, &paging, &mut words) {
                Ok(page) => {
                    self.pages.retain(|(other, _)| *other != gva);
                    self.pages.push((gva, page.host));
                    let (host_page, _) = HostMemory::identify(page.host.pfn());
                    if access == Write {
                        self.world.wrote(host_page);
                    }
                    return Found::HostPage(host_page);
                }
                Err(VirtualStop::PageFault { .. }) => return Found::PageFault,
                Err(VirtualStop::Stop(Stop::Mmio { gpa })) => return Found::Mmio(gpa.gfn().0),
                Err(VirtualStop::Stop(Stop::Retry)) => self.quiesce(),
                Err(other) => panic!("{other}"),
            }
        }
    }

    /// Gets a translation for stores to the table in `table`. Keeps the translation if it allows stores.
    fn translate(&mut self, table: u64) -> Translation {
        if let Some((_, found)) = self.stores.iter().find(|(frame, _)| *frame == table) {
            return *found;
        }
        loop {
            match self.vcpu.translate(Gpa(table << 12), Write) {
                Ok(found) => {
                    if found.write {
                        self.stores.push((table, found));
                    }
                    self.use_all();
                    return found;
                }
                Err(Stop::Retry) => self.quiesce(),
                Err(other) => panic!("{other}"),
            }
        }
    }

    /// Stores an entry that maps `frame`.
    pub fn store(&mut self, table: u64, index: u64, frame: u64) {
        self.store_word(table, index, frame << 12 | USED);
    }

    /// Stores an entry.
    pub fn store_word(&mut self, table: u64, index: u64, entry: u64) {
        let found = self.translate(table);
        self.world.check_use(found.host);
        (self.world.memory).store(Hpa(found.host.0 + 8 * index), entry);
        self.world.wrote(HostMemory::identify(found.host.pfn()).0);
        self.unflushed.extend(ALL);
        if found.tracked && self.vcpu.stored(Gpa((table << 12) + 8 * index), 8) {
            self.quiesce();
        }
        self.use_all();
    }

    pub fn invlpg(&mut self, gva: u64) {
        self.finds_its_stores(gva, |cpu| {
            let mut words = cpu.words();
            if cpu.vcpu.invlpg(gva, &paging(ROOT << 12), &mut words) {
                cpu.quiesce();
            }
            cpu.pages.retain(|(other, _)| *other != gva);
            cpu.use_all();
            cpu.unflushed.retain(|other| *other != gva);
        });
    }

    /// Loads CR3 with its current value, and accesses one address.
    pub fn flush(&mut self) {
        self.finds_its_stores(A, Self::load_cr3);
    }

    /// Like [`Self::flush`], but accesses nothing afterwards.
    pub fn load_cr3(&mut self) {
        let mut words = self.words();
        self.vcpu.flush_guest(&mut words);
        self.forget();
        self.unflushed.clear();
    }

    /// Checks that after `flush` the CPU translates `gva` as the guest's tables say, unless the tables changed
    /// meanwhile.
    fn finds_its_stores(&mut self, gva: u64, flush: impl FnOnce(&mut Self)) {
        let before = self.world.expected(gva, Read);
        flush(self);
        let found = self.access(gva, Read);
        if self.world.expected(gva, Read) == before && found != before {
            let platform = self.world.vm.platform();
            platform.note(format!(
                "{found:?} at {gva:#x} after a flush, and not {before:?}"
            ));
        }
    }
}

impl Drop for Cpu<'_> {
    fn drop(&mut self) {
        self.vcpu.leave();
        (self.world.unflushed.lock().unwrap()).append(&mut self.unflushed);
    }
}

impl Scene for World {
    /// A frame to which the holder may store.
    type Held = u64;

    /// An access may find its leaf in the shadow table, and then has no step.
    fn may_be_still() -> bool {
        true
    }

    /// Do not stop at walks without a lock: the loom models cover these.
    fn is_step(event: &Event) -> bool {
        !matches!(event, Event::Entries(_))
    }

    fn platform(&self) -> &SimPlatform {
        self.vm.platform()
    }

    fn hold(&self, held: &[u64], holder: &Holder<'_>) {
        self.has_holder.store(true, SeqCst);
        let mut cpu = Cpu::new(self);
        let get = |cpu: &mut Cpu<'_>| held.iter().for_each(|frame| _ = cpu.translate(*frame));
        get(&mut cpu);
        holder.is_ready();
        while !holder.is_over() {
            for (_, translation) in &cpu.stores {
                self.check_use(translation.host);
                self.wrote(HostMemory::identify(translation.host.pfn()).0);
            }
            let order = *self.order.lock().unwrap();
            if let Some(order) = order {
                order(&mut cpu);
                *self.order.lock().unwrap() = None;
                self.done.notify_all();
            }
            let asked = cpu.vcpu.attention().flag().load(SeqCst) & Attention::FLUSH != 0;
            if asked && holder.may_quiesce() {
                cpu.quiesce();
                get(&mut cpu);
            }
            thread::yield_now();
        }
    }

    fn check(&self) {
        self.vm.platform().check();
        self.vm.audit().unwrap();
        let unflushed = std::mem::take(&mut *self.unflushed.lock().unwrap());
        let flushed = ALL.iter().filter(|gva| !unflushed.contains(gva));
        flushed.for_each(|gva| self.compare(*gva));
        self.on_cpu(|cpu| cpu.flush());
        ALL.iter().for_each(|gva| self.compare(*gva));
        if self.logging.load(SeqCst) {
            self.harvest();
            assert_eq!(self.harvests.lost(), None, "a write is in no dirty log");
        }
        self.vm.audit().unwrap();
        self.vm.platform().check();
    }
}
