//! The VM on which these tests run operations, and the checks of its state.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::common::config;
use crate::interleave::{Holder, Scene};
use slat::{
    Access::{self, *},
    Attention, DirtyLogError, Format, Gfn, Gpa, Hva, Level, MmuKind, Region, SlotFlags, Stop, Vcpu,
    Vm,
};
use slat_model::{Harvests, HostChange, HostMemory, PageKind, SimPlatform, Witness, set_region};

// All page numbers are for tables of 4 KiB; [`World::at`] converts them to those of the format.
const PAGES: u64 = 2048;
/// The number of pages of the slot. Host pages 0..1024 back the slot at frame `base`.
pub const SLOT_PAGES: u64 = 1024;
/// The page at which the slot is divided: in the middle of a huge leaf, and of a word of the bitmap.
pub const CUT: u64 = 330;
pub const NONE: SlotFlags = SlotFlags(0);
pub const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;

/// A VM with one slot, and the expected state.
pub struct World<F: Format> {
    pub vm: Arc<Vm<SimPlatform, F>>,
    pub witness: Witness,
    /// The writes to pages of the slot, by their numbers in the slot.
    harvests: Harvests,
    base: Mutex<u64>,
    flags: Mutex<SlotFlags>,
    /// Whether every write must be in the log.
    logging: AtomicBool,
}

impl<F: Format> World<F> {
    /// Converts a page number: returns the page at the same distance from the start of the same huge leaf, in tables of
    /// `F`.
    pub const fn at(page: u64) -> u64 {
        let small = Level::MEGA.pages();
        page / small * F::GRANULE.pages(Level::MEGA) + page % small
    }

    fn all(pages: &Range<u64>) -> Range<u64> {
        Self::at(pages.start)..Self::at(pages.end)
    }

    /// Returns the frames `pages`, converted to the granule of `F`.
    pub fn frames(pages: Range<u64>) -> Range<Gfn> {
        let Range { start, end } = Self::all(&pages);
        Gfn(start)..Gfn(end)
    }

    pub fn hva(host_page: u64) -> Hva {
        F::GRANULE.add_pages(HostMemory::BASE, Self::at(host_page))
    }

    pub fn gpa(page: u64) -> Gpa {
        F::GRANULE.gpa(Gfn(Self::at(page)))
    }

    /// Returns a region of the frames `pages`, backed by the host pages from `host_page` on.
    pub fn region(id: u32, pages: Range<u64>, host_page: u64) -> Region {
        let (gpa, end) = (Self::gpa(pages.start), Self::gpa(pages.end));
        Region::new(id, gpa, end.0 - gpa.0, Self::hva(host_page))
    }

    pub fn allow(&self, pages: Range<u64>, host_page: u64) {
        self.witness.allow(Self::all(&pages), Self::at(host_page));
    }

    pub fn settle(&self, gone: Range<u64>, pages: Range<u64>) {
        self.witness.settle(Self::all(&gone), Self::all(&pages));
    }

    pub fn new(level: Level, flags: SlotFlags) -> Arc<Self> {
        Self::with_frames(level, flags, 4096)
    }

    /// Makes a world whose slot may move within `frames` guest frames.
    pub fn with_frames(level: Level, flags: SlotFlags, frames: u64) -> Arc<Self> {
        let platform = SimPlatform::with_granule(F::GRANULE, Self::at(PAGES));
        platform.host.change(&(0..Self::at(PAGES)), remap(level));
        let world = World::<F> {
            vm: Vm::new(platform.clone(), config()).unwrap(),
            witness: Witness::new(Self::at(frames)),
            harvests: Harvests::new(Self::at(SLOT_PAGES)),
            base: Mutex::new(0),
            flags: Mutex::new(flags),
            logging: AtomicBool::new(flags == LOGGED),
        };
        platform.watch(&world.vm, 1);
        world.create(0);
        Arc::new(world)
    }

    pub fn gfns(&self) -> Range<u64> {
        let base = *self.base.lock().unwrap();
        base..base + SLOT_PAGES
    }

    pub fn set(&self, gfns: Range<u64>, host_page: u64) {
        let flags = *self.flags.lock().unwrap();
        let region = Self::region(0, gfns, host_page).with_flags(flags);
        set_region(&self.vm, 0, &region).unwrap();
    }

    pub fn create(&self, host_page: u64) {
        self.allow(self.gfns(), host_page);
        self.set(self.gfns(), host_page);
        self.settle(0..0, self.gfns());
    }

    pub fn delete(&self) {
        self.set(0..0, 0);
        self.settle(self.gfns(), 0..0);
        let tlb = &self.vm.platform().tlb;
        self.expect(tlb.check_gone(0, &Self::all(&self.gfns())));
        self.harvests.forget();
    }

    pub fn shift(&self, base: u64) {
        let from = self.gfns();
        *self.base.lock().unwrap() = base;
        self.allow(self.gfns(), 0);
        self.set(self.gfns(), 0);
        self.settle(from, self.gfns());
    }

    pub fn flags(&self, flags: SlotFlags) {
        *self.flags.lock().unwrap() = flags;
        self.logging.store(false, SeqCst);
        self.set(self.gfns(), 0);
        self.logging.store(flags == LOGGED, SeqCst);
    }

    pub fn invalidate(&self, pages: Range<u64>, change: HostChange) {
        let guard = self
            .vm
            .invalidate(Self::hva(pages.start)..Self::hva(pages.end));
        let pages = Self::all(&pages);
        self.expect(self.vm.platform().tlb.check_backing(&pages));
        self.vm.platform().host.change(&pages, change);
        drop(guard);
    }

    pub fn slot_flags(&self) -> SlotFlags {
        *self.flags.lock().unwrap()
    }

    /// Gets the logs of all slots: slot 0, or slot 2 with the same begin; and slot 1, which begins at [`CUT`], if it
    /// exists.
    pub fn harvest(&self) {
        let all = Self::at(SLOT_PAGES);
        let mut bitmap = vec![0; all as usize / 64];
        self.harvests.harvest(&mut bitmap, |bitmap| {
            for (id, first) in [(0, 0), (1, CUT), (2, 0)] {
                let mut words = vec![0; bitmap.len()];
                match self.vm.get_dirty_log(0, id, &mut words) {
                    Ok(()) => {}
                    Err(DirtyLogError::NotLogged(_)) => continue,
                    Err(error) => panic!("{error}"),
                }
                for page in first..all {
                    let (from, to) = ((page - first) as usize, page as usize);
                    bitmap[to / 64] |= (words[from / 64] >> (from % 64) & 1) << (to % 64);
                }
            }
        });
    }

    /// Makes one access by a new vCPU, which uses the translation once.
    pub fn touch(&self, page: u64, access: Access) {
        let mut vcpu = self.vm.create_vcpu().unwrap();
        vcpu.enter_unguarded(1);
        vcpu.quiesce();
        self.access(&mut vcpu, Self::at(page), access);
        vcpu.leave();
    }

    /// Like [`Self::touch`], but by a vCPU that is in its section and keeps no translation.
    pub fn access(&self, vcpu: &mut Vcpu<SimPlatform, F>, gfn: u64, access: Access) {
        loop {
            match vcpu.translate(F::GRANULE.gpa(Gfn(gfn)), access) {
                Ok(translation) => {
                    self.use_page(gfn, &translation, access);
                    if access == Write {
                        self.wrote(&translation);
                    }
                    return;
                }
                Err(Stop::Retry) => vcpu.quiesce(),
                Err(Stop::Mmio { .. }) => return,
                // The memory of a device cannot be executed.
                Err(Stop::BadAddress { .. }) if access == Access::Execute => return,
                Err(other) => panic!("{other}"),
            }
        }
    }

    /// Notes a write that was made by `translation`. Finds the page by its backing, because the slot may be moving.
    pub fn wrote(&self, translation: &slat::Translation) {
        if self.logging.load(SeqCst) {
            let (page, _) = HostMemory::identify(F::GRANULE.pfn(translation.host));
            self.harvests.write(page % Self::at(SLOT_PAGES));
        }
    }

    pub fn use_page(&self, gfn: u64, translation: &slat::Translation, access: Access) {
        let platform = self.vm.platform();
        let used = self
            .witness
            .check(&platform.host, gfn, translation, access == Write);
        self.expect(used);
    }

    pub fn expect(&self, outcome: Result<(), String>) {
        if let Err(why) = outcome {
            self.vm.platform().note(why);
        }
    }
}

impl<F: Format> Drop for World<F> {
    fn drop(&mut self) {
        self.vm.platform().tlb.forget();
    }
}

pub const fn remap(level: Level) -> HostChange {
    HostChange::Remap {
        level,
        writable: true,
        kind: PageKind::Ordinary,
    }
}

pub type Act<F> = fn(&World<F>);
pub type Prepare<F> = fn() -> Arc<World<F>>;

impl<F: Format> Scene for World<F> {
    type Held = (u64, Access);

    /// With the direct MMU, a walk reaches no table for frames that nothing maps.
    fn may_be_still() -> bool {
        config().mmu == MmuKind::Direct
    }

    fn platform(&self) -> &SimPlatform {
        self.vm.platform()
    }

    /// Gets translations, and uses them until a flush is requested and neither operation can continue without it.
    fn hold(&self, held: &[(u64, Access)], holder: &Holder<'_>) {
        let mut vcpu = self.vm.create_vcpu().unwrap();
        vcpu.enter_unguarded(2);
        vcpu.quiesce();
        let mut tlb = Vec::new();
        let get = |vcpu: &mut Vcpu<SimPlatform, F>, tlb: &mut Vec<_>| {
            for &(page, access) in held {
                match vcpu.translate(Self::gpa(page), access) {
                    Ok(translation) => tlb.push((Self::at(page), access, translation)),
                    Err(Stop::Retry) => {
                        tlb.clear();
                        vcpu.quiesce();
                    }
                    Err(_) => {}
                }
            }
        };
        while tlb.len() < held.len() {
            tlb.clear();
            get(&mut vcpu, &mut tlb);
        }
        holder.is_ready();
        while !holder.is_over() {
            for (gfn, access, translation) in &tlb {
                self.use_page(*gfn, translation, *access);
                if *access == Write {
                    self.wrote(translation);
                }
            }
            let asked = vcpu.attention().flag().load(SeqCst) & Attention::FLUSH != 0;
            if asked && holder.may_quiesce() {
                tlb.clear();
                vcpu.quiesce();
                // The holder gets the translations again at once, and uses them if the tables still have them.
                get(&mut vcpu, &mut tlb);
            }
            thread::yield_now();
        }
        vcpu.leave();
    }

    fn check(&self) {
        let platform = self.vm.platform();
        platform.check();
        self.vm.audit().unwrap_or_else(|e| panic!("{e}"));
        for gfn in [0, 1, 2, 7, 8, 511, 512, 700, 1023, 1024, 1030] {
            self.touch(gfn, Read);
        }
        if self.logging.load(SeqCst) {
            self.harvest();
            assert_eq!(self.harvests.lost(), None, "a write is in no dirty log");
        }
        self.vm.audit().unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(platform.tlb.stale(), None);
        platform.check();
    }
}

/// The initial states of the tests, and the operations that the tests make on them.
impl<F: Format> World<F> {
    pub const SMALL: Prepare<F> = || Self::new(Level::PAGE, NONE);
    pub const HUGE: Prepare<F> = || Self::new(Level::MEGA, NONE);

    /// Every page is mapped and writable, by huge leaves.
    pub const MAPPED: Prepare<F> = || {
        let world = Self::HUGE();
        world.touch(1, Write);
        world.touch(700, Write);
        world
    };

    /// The slot logs, and pages 1 and 2 are write-protected for the log.
    pub const LOGGED_WORLD: Prepare<F> = || {
        let world = Self::new(Level::MEGA, LOGGED);
        world.touch(1, Read);
        world.touch(2, Write);
        world.harvest();
        world
    };

    pub const WRITE_1: Act<F> = |w| w.touch(1, Write);
    pub const READ_1: Act<F> = |w| w.touch(1, Read);
    pub const REMAP_1: Act<F> = |w| w.invalidate(1..2, remap(Level::PAGE));
    pub const REMAP_ALL_BUT_ENDS: Act<F> = |w| w.invalidate(1..1023, remap(Level::PAGE));
    pub const REMAP_HUGE: Act<F> = |w| w.invalidate(0..1024, remap(Level::MEGA));
    pub const REPLACE: Act<F> = |w| {
        w.delete();
        w.create(1024);
    };
    pub const SHIFT: Act<F> = |w| w.shift(1);
    pub const HARVEST: Act<F> = |w| w.harvest();
}
