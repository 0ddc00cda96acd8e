//! The VM of the stress tests, and the work of each of their threads.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex, RwLock};
use std::thread;
use std::time::Duration;

use crate::common::config;
use crate::guest::{HUGE, Memory, USED, paging};
use slat::{
    Access::{self, Execute, Read, Write},
    Attention, Format, Gfn, Gpa, Hva, Level, MmuKind, Pfn, Region, SlotFlags, Stop, Translation,
    Vcpu, VirtualStop, Vm,
};
use slat::{DirtyLogMethod, Setting};
use slat_model::{
    Harvests, HostChange, HostMemory, POLICIES, PageKind, RingClient, Rng, SimPlatform, Witness,
};

pub const HOST_PAGES: u64 = 4096;
const FRAMES: u64 = 8192;
/// The frames of slot 0, which exists during the whole test, also in the second address space.
pub const STABLE: Range<u64> = 0..1024;
/// The frames of slot 1, which exists during the whole test. Its log is harvested all the time.
pub const LOGGED: Range<u64> = 1024..1536;
/// The frames in which other slots are created, moved and deleted.
const BUSY: Range<u64> = 2048..6144;
/// Frames in which there is never a slot.
const NOTHING: Range<u64> = 7000..8192;

/// The method by which logs detect writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logs {
    /// Each harvest of a log protects its pages again.
    Bitmap,
    /// Clearing a log (manual protection) protects its pages again; a harvest does not.
    Manual,
    /// The log is kept in the leaves' dirty bits, if the format has them.
    DirtyBits,
    /// Walkers write the written pages to buffers, if the format has dirty bits.
    Buffers,
    /// Each vCPU writes the written pages to its ring.
    Rings,
}

/// Frames of [`STABLE`] that no vCPU uses as data: the guest's tables, the root first.
const TABLES: [u64; 3] = [1000, 1001, 1002];

/// Makes tables of a guest that map each address to itself, by pages of 2 MiB.
fn identity() -> Memory {
    let memory = Memory::new(HOST_PAGES);
    memory.link(&TABLES);
    for page in 0..FRAMES / 512 {
        memory.put(TABLES[2], page, page << 21 | USED | HUGE);
    }
    memory
}

pub struct World<F: Format> {
    pub platform: Arc<SimPlatform>,
    pub vm: Arc<Vm<SimPlatform, F>>,
    /// The guest's tables with the shadow MMU. The guest has paging on for half of its accesses in the first address
    /// space.
    guest: Option<Memory>,
    logs: Logs,
    /// The expected state of each address space.
    witnesses: [Witness; 2],
    harvests: Harvests,
    pub stop: AtomicBool,
    /// Each operation holds this lock shared. An audit holds it exclusively, so that no operation runs.
    batch: RwLock<()>,
    accesses: AtomicU64,
    /// The number of vCPUs that have made an access.
    arrived: AtomicU64,
    slot_changes: AtomicU64,
    invalidations: AtomicU64,
    audits: AtomicU64,
    rings: Mutex<Vec<RingClient>>,
}

pub fn region<F: Format>(slot: u32, gfns: Range<u64>, host_page: u64, flags: SlotFlags) -> Region {
    let (gpa, end) = (gpa::<F>(gfns.start), gpa::<F>(gfns.end));
    Region::new(slot, gpa, end.0 - gpa.0, hva::<F>(host_page)).with_flags(flags)
}

fn gpa<F: Format>(gfn: u64) -> Gpa {
    F::GRANULE.gpa(Gfn(gfn))
}

fn hva<F: Format>(host_page: u64) -> Hva {
    F::GRANULE.add_pages(HostMemory::BASE, host_page)
}

pub const fn remap(level: Level) -> HostChange {
    HostChange::Remap {
        level,
        writable: true,
        kind: PageKind::Ordinary,
    }
}

/// Translates a virtual address of the guest, which equals the physical address.
fn translate_virtual<F: Format>(
    vcpu: &mut Vcpu<SimPlatform, F>,
    gfn: u64,
    access: Access,
    guest: &Memory,
) -> Result<Translation, Stop> {
    let state = paging(TABLES[0] << 12);
    match vcpu.translate_virtual(gfn << 12, access, &state, &mut guest.words()) {
        Ok(page) => Ok(Translation {
            host: page.host,
            level: Level::PAGE,
            write: page.write,
            execute: page.execute,
            tracked: page.tracked.is_some(),
        }),
        Err(VirtualStop::Stop(stop)) => Err(stop),
        Err(other) => panic!("frame {gfn:#x}: {other:?}"),
    }
}

impl<F: Format> World<F> {
    pub fn new(logs: Logs) -> Self {
        let platform = SimPlatform::with_granule(F::GRANULE, HOST_PAGES);
        platform.host.change(&(0..HOST_PAGES), remap(Level::MEGA));
        let config = config().with_spaces(2);
        let guest = (config.mmu == MmuKind::Shadow).then(identity);
        let vm = Vm::new(platform.clone(), config).unwrap();
        match logs {
            Logs::Bitmap => {}
            Logs::Manual => vm.set_manual_dirty_log(true, false),
            Logs::DirtyBits => vm.set_policy(Setting::DirtyLog(DirtyLogMethod::DirtyBit)),
            Logs::Buffers => vm.set_policy(Setting::DirtyLog(DirtyLogMethod::Buffer)),
            Logs::Rings => vm.use_dirty_rings(),
        }
        let world = World {
            platform,
            vm,
            guest,
            logs,
            witnesses: [Witness::new(FRAMES), Witness::new(FRAMES)],
            harvests: Harvests::new(LOGGED.end - LOGGED.start),
            stop: AtomicBool::new(false),
            batch: RwLock::new(()),
            accesses: AtomicU64::new(0),
            arrived: AtomicU64::new(0),
            slot_changes: AtomicU64::new(0),
            invalidations: AtomicU64::new(0),
            audits: AtomicU64::new(0),
            rings: Mutex::default(),
        };
        world.set(0, STABLE, 0, SlotFlags::default(), 0..0);
        world.set(1, LOGGED, 1024, SlotFlags::LOG_DIRTY_PAGES, 0..0);
        // The slot has the same memory, shifted by a page, so that no huge leaf is possible.
        world.set_in(1, 0, STABLE, 1, SlotFlags::default(), 0..0);
        world
    }

    /// Like [`World::new`], but with hardware walkers. Their model lets only one thread at a time reach a table. So
    /// only worlds without walkers test what two threads do at the same moment.
    pub fn with_walkers(logs: Logs) -> Self {
        let world = Self::new(logs);
        world.platform.watch(&world.vm, 2);
        world
    }

    /// Creates a slot at `gfns`, or moves it there from `from`.
    pub fn set(&self, slot: u32, gfns: Range<u64>, page: u64, flags: SlotFlags, from: Range<u64>) {
        self.set_in(0, slot, gfns, page, flags, from);
    }

    fn set_in(
        &self,
        space: usize,
        slot: u32,
        gfns: Range<u64>,
        page: u64,
        flags: SlotFlags,
        from: Range<u64>,
    ) {
        let witness = &self.witnesses[space];
        witness.allow(gfns.clone(), page);
        let region = region::<F>(slot, gfns.clone(), page, flags);
        self.vm.set_memory_region(space, &region).unwrap();
        // After the change, no TLB caches other translations of these frames or of the slot's old frames.
        let is_of_slot = |gfn: u64, pfn: Pfn| {
            gfns.contains(&gfn) && HostMemory::identify(pfn).0 == page + (gfn - gfns.start)
        };
        for frames in [&from, &gfns] {
            self.expect(self.platform.tlb.check_slot(space, frames, is_of_slot));
        }
        witness.settle(from, gfns);
        self.slot_changes.fetch_add(1, Relaxed);
    }

    pub fn delete(&self, slot: u32, gfns: Range<u64>) {
        self.vm.remove_memory_region(0, slot).unwrap();
        self.expect(self.platform.tlb.check_gone(0, &gfns));
        self.witnesses[0].settle(gfns, 0..0);
        self.slot_changes.fetch_add(1, Relaxed);
    }

    fn runs(&self) -> bool {
        !self.stop.load(Relaxed)
    }

    /// Creates, moves and deletes slots and switches their logs. Each slot has its own quarter of [`BUSY`].
    pub fn change_slots(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        let mut slots: [Option<(Range<u64>, u64, SlotFlags)>; 4] = [const { None }; 4];
        while self.runs() {
            let _batch = self.batch.read();
            let quarter = rng.below(4);
            let id = 2 + quarter as u32;
            let area = BUSY.start + quarter * 1024;
            let place = |rng: &mut Rng| area + rng.pick(&[0, 0, 1, 7, 300, 512]);
            match (slots[quarter as usize].take(), rng.below(4)) {
                (None, _) => {
                    let base = place(&mut rng);
                    let gfns = base..base + rng.pick(&[1, 9, 500, 512]);
                    let page = rng.below(7) * 512 + base % 512;
                    let flags = SlotFlags(rng.below(2) as u32);
                    self.set(id, gfns.clone(), page, flags, 0..0);
                    slots[quarter as usize] = Some((gfns, page, flags));
                }
                (Some((gfns, ..)), 0) => self.delete(id, gfns),
                (Some((gfns, page, flags)), 1..3) => {
                    let base = place(&mut rng);
                    let to = base..base + (gfns.end - gfns.start);
                    self.set(id, to.clone(), page, flags, gfns);
                    slots[quarter as usize] = Some((to, page, flags));
                }
                (Some((gfns, page, flags)), _) => {
                    let flags = SlotFlags(flags.0 ^ 1);
                    self.set(id, gfns.clone(), page, flags, 0..0);
                    slots[quarter as usize] = Some((gfns, page, flags));
                }
            }
        }
    }

    /// Harvests logs. Now and then audits the VM, looks for young pages, recovers NX tables, or changes a policy.
    pub fn keep_house(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        while self.runs() {
            self.harvest();
            match rng.below(6) {
                0 => {
                    let _alone = self.batch.write();
                    self.expect(self.platform.tlb.stale().map_or(Ok(()), Err));
                    let audit = self.vm.audit();
                    audit.unwrap_or_else(|error| self.platform.note(error.to_string()));
                    self.audits.fetch_add(1, Relaxed);
                }
                1 => drop(self.vm.age(hva::<F>(0)..hva::<F>(HOST_PAGES), true)),
                2 => drop(self.vm.recover_nx_huge_pages()),
                3 => {
                    let (name, values) = rng.pick(&POLICIES);
                    let setting = Setting::parse(name, rng.pick(values));
                    self.vm.set_policy(setting.unwrap());
                }
                _ => thread::yield_now(),
            }
        }
    }

    /// Gets the log of slot 1, like a client.
    pub fn harvest(&self) {
        let pages = LOGGED.end - LOGGED.start;
        let mut bitmap = vec![0; pages as usize / 64];
        self.harvests
            .harvest(&mut bitmap, |bitmap| match self.logs {
                Logs::Bitmap | Logs::DirtyBits | Logs::Buffers => {
                    self.vm.get_dirty_log(0, 1, bitmap).unwrap()
                }
                Logs::Manual => {
                    self.vm.get_dirty_log(0, 1, bitmap).unwrap();
                    self.vm.clear_dirty_log(0, 1, 0, pages, bitmap).unwrap();
                }
                Logs::Rings => {
                    for ring in self.rings.lock().unwrap().iter_mut() {
                        while let Some(entry) = ring.collect() {
                            if (entry.space, entry.slot) == (0, 1) {
                                bitmap[entry.page as usize / 64] |= 1 << (entry.page % 64);
                            }
                        }
                    }
                    self.vm.reset_dirty_rings();
                }
            });
    }

    pub fn invalidate(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        while self.runs() {
            let _batch = self.batch.read();
            let pages = rng.pick(&[1, 5, 512, 1024]);
            let start = rng.below(HOST_PAGES - pages + 1);
            let start = if pages > 5 { start & !511 } else { start };
            let pages = start..start + pages;
            let guard = (self.vm).invalidate(hva::<F>(pages.start)..hva::<F>(pages.end));
            self.expect(self.platform.tlb.check_backing(&pages));
            let level = rng.pick(&[Level::PAGE, Level::MEGA, Level::MEGA]);
            self.platform.host.change(&pages, remap(level));
            drop(guard);
            self.invalidations.fetch_add(1, Relaxed);
        }
    }

    fn new_vcpu(&self, space: usize) -> Vcpu<SimPlatform, F> {
        let mut vcpu = self.vm.create_vcpu_in(space).unwrap();
        if self.logs == Logs::Rings {
            let client = RingClient::new();
            vcpu.set_dirty_ring(client.ring()).unwrap();
            self.rings.lock().unwrap().push(client);
        }
        vcpu
    }

    /// Runs a vCPU with a TLB, like a software CPU. One in four vCPUs uses the second address space.
    pub fn run_vcpu(&self, number: u64, pause: Option<Duration>) {
        let mut rng = Rng::new(number);
        let space = usize::from(number.is_multiple_of(4));
        let mut vcpu = self.new_vcpu(space);
        let mut tlb: HashMap<u64, Translation> = HashMap::new();
        let mut arrived = false;
        vcpu.enter_unguarded(number as usize);
        while self.runs() {
            let Ok(_batch) = self.batch.try_read() else {
                // Let an audit run. A vCPU in its section would delay the operations for which the audit waits.
                vcpu.leave();
                drop(self.batch.read());
                vcpu.enter_unguarded(number as usize);
                continue;
            };
            if vcpu.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
                tlb.clear();
                vcpu.quiesce();
            }
            if rng.one_in(64) {
                vcpu.leave();
                match pause {
                    Some(pause) => thread::sleep(pause),
                    None => thread::yield_now(),
                }
                // The vCPU's translations are valid unless its attention word says otherwise now.
                vcpu.enter_unguarded(number as usize);
                continue;
            }
            let gfn = self.some_frame(&mut rng);
            let access = rng.pick(&[Read, Write, Execute]);
            self.accesses.fetch_add(1, Relaxed);
            if !arrived {
                self.arrived.fetch_add(1, Relaxed);
                arrived = true;
            }
            let answer = if rng.one_in(128) {
                let range = gpa::<F>(gfn)..gpa::<F>(gfn + 100);
                vcpu.prefault(range).map(|_| None)
            } else {
                let guest = self.guest.as_ref();
                match guest.filter(|_| space == 0 && rng.one_in(2)) {
                    Some(guest) => translate_virtual(&mut vcpu, gfn, access, guest),
                    None => vcpu.translate(gpa::<F>(gfn), access),
                }
                .map(Some)
            };
            let is_memory = gfn < LOGGED.end && space == 0 || gfn < STABLE.end;
            match answer {
                Ok(Some(translation)) => {
                    tlb.insert(gfn, translation);
                    self.use_page(space, gfn, &translation, access == Write);
                }
                // The vCPU may have left its section. Its attention word tells whether its translations are void.
                Ok(None) => continue,
                Err(Stop::Retry) => {
                    tlb.clear();
                    vcpu.quiesce();
                }
                Err(Stop::DirtyRingFull) if self.logs == Logs::Rings => {
                    // Leave the section, because the thread that empties the ring may wait for this vCPU.
                    vcpu.leave();
                    thread::yield_now();
                    vcpu.enter_unguarded(number as usize);
                    continue;
                }
                Err(Stop::Mmio { .. }) if !is_memory => {}
                Err(other) => self.platform.note(other.to_string()),
            }
            for (gfn, translation) in tlb.iter().take(4) {
                self.use_page(space, *gfn, translation, translation.write);
            }
        }
        vcpu.leave();
        if !arrived {
            self.platform.note(format!("vCPU {number} came nowhere"));
        }
        // Dropping the vCPU protects the pages in its ring, and then flushes. No audit may run in between.
        let _batch = self.batch.read();
        drop(vcpu);
    }

    fn some_frame(&self, rng: &mut Rng) -> u64 {
        let place = rng.pick(&[STABLE.start, LOGGED.start, BUSY.start, NOTHING.start]);
        let frames = if place == BUSY.start { 4096 } else { 512 };
        place + rng.below(frames)
    }

    pub fn use_page(&self, space: usize, gfn: u64, translation: &Translation, write: bool) {
        let used = self.witnesses[space].check(&self.platform.host, gfn, translation, write);
        self.expect(used);
        if write && space == 0 && LOGGED.contains(&gfn) {
            self.harvests.write(gfn - LOGGED.start);
        }
    }

    fn expect(&self, outcome: Result<(), String>) {
        if let Err(why) = outcome {
            self.platform.note(why);
        }
    }

    /// Returns the numbers of accesses, slot changes, invalidations and audits.
    fn counts(&self) -> [u64; 4] {
        let counts = [
            &self.accesses,
            &self.slot_changes,
            &self.invalidations,
            &self.audits,
        ];
        counts.map(|count| count.load(Relaxed))
    }

    /// Whether every thread has made progress.
    pub fn has_progressed(&self, vcpus: u64) -> bool {
        let enough = [100 * vcpus.min(20), 10, 10, 0];
        self.arrived.load(Relaxed) == vcpus
            && self.counts().iter().zip(enough).all(|(n, few)| *n > few)
    }

    /// Call when all threads have ended. Checks that every thread has made progress.
    pub fn check_progress(&self, vcpus: u64) {
        let [accesses, changes, invalidations, audits] = self.counts();
        println!(
            "{}, {:?}, {vcpus} vCPUs: {accesses} accesses, {changes} slot changes, \
             {invalidations} invalidations, {audits} audits",
            F::NAME,
            self.logs
        );
        assert!(self.has_progressed(vcpus));
    }

    pub fn finish(self) {
        self.harvest();
        assert_eq!(self.harvests.lost(), None, "a write is in no dirty log");
        self.vm.audit().unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(self.platform.tlb.stale(), None);
        self.platform.check();
        self.platform.tlb.forget();
        let World { platform, vm, .. } = self;
        drop(vm);
        platform.check();
        assert_eq!(platform.live_frames(), 0, "table frames were leaked");
    }
}
