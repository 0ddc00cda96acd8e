//! The engine's shadow MMU while its VM is saved again and again: whatever way a store takes to guest memory, the
//! platform must have been given the page before.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use slat::format::{Format, X86};
use slat::guest_walk::GuestPaging;
use slat::{Access, Gfn, Gpa, Hva, MmuKind, PAGE_SIZE, Pfn, Region, Snapshot};

use super::layout::HOST_PAGES;
use super::mmu::{GuestMmu, Invpcid, Outcome, Part, RegisterWrite, StoreKind};
use super::ram::{GuestMachine, GuestRam, WORDS};
use super::registers::Registers;
use super::shadow::ShadowMmu;
use crate::host::HostMemory;
use crate::platform::{Event, SimPlatform};

/// The number of steps in one snapshot.
const STEPS: u64 = 24;

/// A [`ShadowMmu`] whose VM is saved most of the time, a page at a time. For guests whose client does not write to guest
/// memory.
pub struct SavedMmu<F: Format = X86<5>> {
    snapshot: Option<Snapshot<SimPlatform, F>>,
    mmu: ShadowMmu<F>,
    ram: Arc<GuestRam>,
    saved: Arc<Mutex<Saved>>,
    steps: u64,
}

/// What the platform must be given of the snapshot in progress.
#[derive(Default)]
struct Saved {
    /// The words of all pages when the snapshot began.
    words: Vec<u64>,
    owed: Vec<bool>,
    /// The first thing that was wrong.
    wrong: Option<String>,
}

impl Saved {
    /// Whether a page is as it was when the snapshot began.
    fn is_old(&self, page: u64, ram: &GuestRam) -> bool {
        (0..WORDS).all(|word| self.words[(page * WORDS + word) as usize] == ram.word(page, word))
    }

    fn take(&mut self, page: u64, ram: &GuestRam) {
        if !self.owed.get(page as usize).is_some_and(|owed| *owed) {
            self.wrong = Some(format!("page {page:#x} is given twice, or for nothing"));
        } else if !self.is_old(page, ram) {
            self.wrong = Some(format!("page {page:#x} was written before it is given"));
        } else {
            self.owed[page as usize] = false;
        }
    }
}

impl SavedMmu {
    /// Makes a VM like [`ShadowMmu::new`].
    pub fn new(machine: &GuestMachine) -> Self {
        SavedMmu::of(machine, ShadowMmu::new(machine))
    }
}

impl<F: Format> SavedMmu<F> {
    /// Makes a VM like [`ShadowMmu::nested`].
    pub fn nested(machine: &GuestMachine, mmu: MmuKind) -> Self {
        SavedMmu::of(machine, ShadowMmu::nested(machine, mmu))
    }

    fn of(machine: &GuestMachine, mmu: ShadowMmu<F>) -> Self {
        let saved = Arc::<Mutex<Saved>>::default();
        let (takes, ram) = (saved.clone(), machine.ram.clone());
        machine.platform.set_hook(move |event| {
            if let Event::Keep(start, end) = event {
                let mut saved = takes.lock().unwrap();
                pages(&(start..end)).for_each(|page| saved.take(page, &ram));
            }
        });
        SavedMmu {
            snapshot: None,
            mmu,
            ram: machine.ram.clone(),
            saved,
            steps: 0,
        }
    }

    /// Begins, continues or ends a snapshot, depending on the number of steps so far. Call between two instructions: a
    /// store may be made of two accesses, and a vCPU that has its translations is in a reader section.
    fn step(&mut self) {
        self.check();
        self.steps += 1;
        match self.steps % STEPS {
            0 => self.begin(),
            n if n == STEPS - 1 => self.end(!(self.steps / STEPS).is_multiple_of(3)),
            _ => self.snapshot.iter().for_each(|it| _ = it.keep_next(2)),
        }
    }

    fn begin(&mut self) {
        let words = (0..HOST_PAGES * WORDS).map(|i| self.ram.word(i / WORDS, i % WORDS));
        let mut saved = Saved {
            words: words.collect(),
            owed: vec![false; HOST_PAGES as usize],
            wrong: None,
        };
        let mut from = Gfn(0);
        while let Some(slot) = self.mmu.vm().memslot_from(0, from) {
            from = Gfn((slot.gpa.0 + slot.size) / PAGE_SIZE);
            let backing = slot.backing..Hva(slot.backing.0 + slot.size);
            pages(&backing).for_each(|page| saved.owed[page as usize] = true);
        }
        *self.saved.lock().unwrap() = saved;
        self.snapshot = Some(self.mmu.vm().begin_snapshot().expect("there is memory"));
    }

    /// Ends the snapshot. If `whole`, gives the platform all pages before.
    fn end(&mut self, whole: bool) {
        let Some(snapshot) = self.snapshot.take() else {
            return;
        };
        while whole && snapshot.keep_next(7) > 0 {}
        drop(snapshot);
        let mut saved = self.saved.lock().unwrap();
        for page in (0..HOST_PAGES).filter(|page| saved.owed[*page as usize]) {
            assert!(!whole, "page {page:#x} was never given");
            assert!(
                saved.is_old(page, &self.ram),
                "page {page:#x} was written, and not given"
            );
        }
        saved.owed.fill(false);
        drop(saved);
        self.check();
    }

    fn check(&self) {
        let wrong = self.saved.lock().unwrap().wrong.take();
        assert_eq!(wrong, None);
    }
}

/// Returns the numbers of the pages of host memory at `backing`.
fn pages(backing: &Range<Hva>) -> Range<u64> {
    let page = |hva: Hva| (hva.0 - HostMemory::BASE.0) / PAGE_SIZE;
    page(backing.start)..page(backing.end)
}

impl<F: Format> GuestMmu for SavedMmu<F> {
    fn access(
        &mut self,
        cpu: usize,
        gva: u64,
        access: Access,
        paging: Option<&GuestPaging>,
    ) -> Outcome {
        self.mmu.access(cpu, gva, access, paging)
    }

    fn access_physical(&mut self, cpu: usize, gpa: Gpa, access: Access) -> Outcome {
        self.mmu.access_physical(cpu, gpa, access)
    }

    fn stored(&mut self, cpu: usize, kind: StoreKind, parts: &[Part]) {
        self.mmu.stored(cpu, kind, parts);
    }

    fn client_stored(&mut self) {
        panic!("the client writes to guest memory and has not called Vm::keep_old_pages");
    }

    fn written(&mut self, cpu: usize, write: RegisterWrite, old: &Registers, new: &Registers) {
        self.step();
        self.mmu.written(cpu, write, old, new);
    }

    fn invlpg(&mut self, cpu: usize, gva: u64) {
        self.step();
        self.mmu.invlpg(cpu, gva);
    }

    fn invpcid(&mut self, cpu: usize, invpcid: Invpcid) {
        self.mmu.invpcid(cpu, invpcid);
    }

    fn set_region(&mut self, region: &Region) {
        self.step();
        self.mmu.set_region(region);
    }

    fn invalidate(&mut self, range: Range<Hva>, change: &mut dyn FnMut()) {
        self.step();
        self.mmu.invalidate(range, change);
    }

    fn dirty_log(&mut self, slot: u32, bitmap: &mut [u64]) {
        self.step();
        self.mmu.dirty_log(slot, bitmap);
    }

    fn frame_of(&self, gfn: Gfn) -> Option<Option<Pfn>> {
        self.mmu.frame_of(gfn)
    }

    fn audit(&mut self) -> Result<(), String> {
        self.check();
        self.mmu.audit()
    }
}
