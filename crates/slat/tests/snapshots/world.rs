//! A VM whose CPUs write all the time, in an order by which one can tell the memory of any moment.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex, RwLock};
use std::thread;

use slat::guest_walk::GuestPaging;
use slat::{
    Access, Attention, Format, Gfn, Gpa, Hpa, Hva, Level, MmuKind, Promotion, Region, Stop, Vcpu,
    VirtualStop, Vm,
};
use slat_model::{Event, HostChange, HostMemory, PageKind, Rng, SimPlatform};

use crate::bytes::{Bytes, Saved};
use crate::common::config;
use crate::guest::{HUGE, USED, paging};

pub const CPUS: u64 = 2;
/// The number of pages after those of the CPUs: the guest's tables, the root first.
const TABLES: u64 = 3;

/// In this word of its last page, each CPU notes the number of its last write.
const PROGRESS: u64 = 0;
/// In this word, each CPU notes the number that it has read from the other CPU's [`PROGRESS`].
const SEEN: u64 = 1;

pub struct World<F: Format> {
    pub platform: Arc<SimPlatform>,
    pub vm: Arc<Vm<SimPlatform, F>>,
    pub bytes: Arc<Bytes>,
    pub saved: Arc<Mutex<Saved>>,
    /// The number of pages of each CPU. It makes its writes in all but the last one.
    each: u64,
    /// Whether the CPUs access memory by tables of the guest.
    has_tables: bool,
    is_nested: bool,
    /// CPUs that write hold this lock shared.
    running: RwLock<()>,
    pub stop: AtomicBool,
    /// The number of the last write of each CPU that is done.
    written: [AtomicU64; CPUS as usize],
}

/// A CPU with its TLB.
struct Cpu<'w, F: Format> {
    world: &'w World<F>,
    number: u64,
    vcpu: Vcpu<SimPlatform, F>,
    /// For each frame, the page to which writes go.
    tlb: Vec<Option<Hpa>>,
}

impl<F: Format> World<F> {
    /// Makes a VM whose CPUs have `each` pages. `is_nested`: their accesses are those of a guest's guest.
    pub fn new(each: u64, is_nested: bool) -> Self {
        let pages = CPUS * each + TABLES;
        let platform = SimPlatform::with_granule(F::GRANULE, pages);
        let bytes = Arc::new(Bytes::new(F::GRANULE, pages));
        let config = config().with_nested(is_nested);
        let has_tables = is_nested || config.mmu == MmuKind::Shadow;
        let vm: Arc<Vm<SimPlatform, F>> = Vm::new(platform.clone(), config).unwrap();
        let size = F::GRANULE.gpa(Gfn(pages)).0;
        let region = Region::new(0, Gpa(0), size, HostMemory::BASE);
        vm.set_memory_region(0, &region).unwrap();
        let first = CPUS * each;
        if has_tables {
            for table in [first, first + 1] {
                bytes.put(table, 0, (table + 1) << 12 | USED);
            }
            for huge in 0..512 {
                bytes.put(first + 2, huge, huge << 21 | USED | HUGE);
            }
        }
        let saved = Arc::new(Mutex::new(Saved::new(&bytes, 0)));
        let (to, from) = (saved.clone(), bytes.clone());
        platform.set_hook(move |event| {
            if let Event::Keep(start, end) = event {
                let page = |hva| F::GRANULE.pages_between(HostMemory::BASE, hva);
                for page in page(start)..page(end) {
                    if page % 16 == 0 {
                        thread::yield_now();
                    }
                    to.lock().unwrap().take(page, &from);
                }
            }
        });
        let world = World {
            platform,
            vm,
            bytes,
            saved,
            each,
            has_tables,
            is_nested,
            running: RwLock::new(()),
            stop: AtomicBool::new(false),
            written: Default::default(),
        };
        world.remap(Level::MEGA);
        world
    }

    /// Returns the number of pages of the VM.
    pub fn pages(&self) -> u64 {
        CPUS * self.each + TABLES
    }

    /// Stops the CPUs between two writes while `what` runs.
    pub fn while_stopped<R>(&self, what: impl FnOnce() -> R) -> R {
        let _stopped = self.running.write().unwrap();
        what()
    }

    /// Returns the number of the last write of each CPU that is done.
    pub fn written(&self) -> [u64; CPUS as usize] {
        [0, 1].map(|cpu| self.written[cpu].load(SeqCst))
    }

    /// Moves all pages, as a host does that maps huge pages, or no longer does.
    fn remap(&self, level: Level) {
        let pages = 0..self.pages();
        let end = F::GRANULE.add_pages(HostMemory::BASE, pages.end);
        let guard = self.vm.invalidate(HostMemory::BASE..end);
        let change = HostChange::Remap {
            level,
            writable: true,
            kind: PageKind::Ordinary,
        };
        self.platform.host.change(&pages, change);
        drop(guard);
    }

    /// Changes the host's memory all the time: moves some pages, and makes huge leaves again.
    pub fn keep_house(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        while !self.stop.load(Relaxed) {
            match rng.below(8) {
                0 => self.remap(Level::MEGA),
                1 => self.remap(Level::PAGE),
                2 | 3 => drop(self.vm.promote(&mut Promotion::default(), 64)),
                _ => {
                    let page = |page| -> Hva { F::GRANULE.add_pages(HostMemory::BASE, page) };
                    let at = rng.below(self.pages());
                    drop(self.vm.invalidate(page(at)..page(at + 1)));
                }
            }
            for _ in 0..rng.below(20) {
                thread::yield_now();
            }
        }
    }

    /// Returns the number of words to which a CPU makes its writes.
    fn places(&self) -> u64 {
        (self.each - 1) * self.bytes.per_page()
    }

    /// Runs a CPU until the end.
    pub fn run_cpu(&self, number: u64) {
        let mut cpu = Cpu {
            world: self,
            number,
            vcpu: self.vm.create_vcpu().unwrap(),
            tlb: vec![None; self.pages() as usize],
        };
        let mut rng = Rng::new(number);
        let (own, other) = (number * self.each, (1 - number) * self.each);
        let last = self.each - 1;
        let mut n = 1;
        while !self.stop.load(Relaxed) {
            let running = self.running.read().unwrap();
            cpu.enter();
            for _ in 0..=rng.below(2000) {
                let place = n % self.places();
                cpu.store(own + place % last, place / last, n);
                self.written[number as usize].store(n, SeqCst);
                cpu.store(own + last, PROGRESS, n);
                if n.is_multiple_of(16) {
                    let seen = cpu.load(other + last, PROGRESS);
                    cpu.store(own + last, SEEN, seen);
                }
                n += 1;
            }
            cpu.vcpu.leave();
            drop(running);
            thread::yield_now();
        }
    }

    /// Checks that `saved` is the memory of one moment. At the moment each CPU had made at least the writes up to
    /// `before`, and no more than one after `after`.
    pub fn check_moment(
        &self,
        saved: &Saved,
        before: [u64; CPUS as usize],
        after: [u64; CPUS as usize],
    ) {
        let word =
            |page: u64, word: u64| saved.words[(page * self.bytes.per_page() + word) as usize];
        let last = self.each - 1;
        let places = self.places();
        for cpu in 0..CPUS {
            let own = cpu * self.each;
            let found = |place: u64| word(own + place % last, place / last);
            let n = (0..places).map(found).max().unwrap();
            let (least, most) = (before[cpu as usize], after[cpu as usize] + 1);
            assert!(
                (least..=most).contains(&n),
                "write {n}, not {least} to {most}"
            );
            // What each place has after the writes up to n.
            let (round, rest) = (n / places, n % places);
            for place in 0..places {
                let rounds = round + u64::from(place <= rest);
                let expected = rounds.checked_sub(1).map_or(0, |r| r * places + place);
                assert_eq!(
                    found(place),
                    expected,
                    "CPU {cpu}, place {place}, at write {n}"
                );
            }
            let progress = word(own + last, PROGRESS);
            assert!((n - 1..=n).contains(&progress), "{progress} at write {n}");
            let other = word((1 - cpu) * self.each + last, PROGRESS);
            let seen = word(own + last, SEEN);
            assert!(
                seen <= other,
                "CPU {cpu} has seen {seen} when it was {other}"
            );
        }
    }
}

impl<F: Format> Cpu<'_, F> {
    fn enter(&mut self) {
        self.vcpu.enter_unguarded(self.number as usize + 1);
        self.quiesce();
    }

    fn quiesce(&mut self) {
        self.tlb.fill(None);
        self.vcpu.quiesce();
    }

    fn store(&mut self, page: u64, word: u64, value: u64) {
        let host = self.access(page, Access::Write);
        self.world
            .bytes
            .at(Hpa(host.0 + word * 8))
            .store(value, Release);
    }

    fn load(&mut self, page: u64, word: u64) -> u64 {
        let host = self.access(page, Access::Read);
        self.world.bytes.at(Hpa(host.0 + word * 8)).load(Acquire)
    }

    /// Returns the host page that an access to `page` reaches until the CPU quiesces.
    fn access(&mut self, page: u64, access: Access) -> Hpa {
        loop {
            if self.vcpu.attention().flag().load(SeqCst) & Attention::FLUSH != 0 {
                self.quiesce();
            }
            if let Some(host) = self.tlb[page as usize] {
                return host;
            }
            match self.translate(page, access) {
                Ok(host) => {
                    if access == Access::Write {
                        self.tlb[page as usize] = Some(host);
                    }
                    return host;
                }
                Err(Stop::Retry) => self.quiesce(),
                Err(other) => panic!("page {page}: {other}"),
            }
        }
    }

    fn translate(&mut self, page: u64, access: Access) -> Result<Hpa, Stop> {
        let world = self.world;
        let gpa = F::GRANULE.gpa(Gfn(page));
        // A hypervisor with a guest of its own accesses memory itself, too.
        if !world.has_tables || world.is_nested && page.is_multiple_of(2) {
            let found = self.vcpu.translate(gpa, access)?;
            assert!(!found.tracked, "page {page} has no table of the guest");
            return Ok(found.host);
        }
        let state = GuestPaging {
            reserves_table_global: world.is_nested,
            ..paging((CPUS * world.each) << 12)
        };
        match (self.vcpu).translate_virtual(gpa.0, access, &state, &mut &*world.bytes) {
            Ok(found) => {
                assert_eq!(found.tracked, None);
                Ok(found.host)
            }
            Err(VirtualStop::Stop(stop)) => Err(stop),
            Err(other) => panic!("page {page}: {other:?}"),
        }
    }
}
