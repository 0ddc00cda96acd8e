//! Accesses by vCPUs, and checks of their results.

use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;

use slat::{Access, Attention, Format, Gfn, Gpa, Hva, Level, Mapping, Stop, Translation};

use super::Runner;
use crate::machine::Machine;
use crate::model::{Expected, is_executable};
use crate::setup::{SPACES, VCPUS};

/// A bit of the attention word (the word of requests to a vCPU) that the engine leaves to the VMM.
const BUSY: u32 = 1 << 8;

/// The maximum number of flushes that one fault itself can need. Clearing a table needs one flush. On formats with
/// break-before-make, two more flushes are needed for leaves that are broken first.
const MOST_RETRIES: usize = 3;

/// The number of recently accessed frames that are kept, to be looked up again.
const ACCESSED: usize = 64;

/// The number of a slot's pages whose mappings are compared before and after a change of the slot.
const SAMPLES: usize = 4;
/// The word by which messages name a translation that a vCPU got in an earlier operation.
const KEPT: &str = "kept";

impl<M: Machine, F: Format> Runner<M, F> {
    /// Enters a reader section on vCPU `i`. Checks the translations that the vCPU still remembers.
    pub(super) fn enter(&mut self, i: usize) {
        let cpu = &mut self.cpus[i];
        cpu.vcpu.enter_unguarded(i + 1);
        if cpu.vcpu.attention().flag().load(SeqCst) & Attention::FLUSH != 0 {
            cpu.tlb.clear();
            cpu.vcpu.quiesce();
        }
        self.check_kept(i);
    }

    /// Checks the translations that a vCPU remembers, because the vCPU continues to use them. Call also after each
    /// result except [`Stop::Retry`], before the attention word is checked.
    fn check_kept(&self, i: usize) {
        for (gfn, translation) in &self.cpus[i].tlb {
            self.check_translation(i, *gfn, translation, KEPT);
        }
    }

    /// Checks the translations that vCPUs still remember. If a leaf was split in place, reduces the vCPUs' translations
    /// by this leaf to the size that the slots now require. Call after a change of several slots in `space`.
    pub(super) fn split_kept(&mut self, space: usize) {
        for i in 0..VCPUS {
            if self.cpus[i].space != space {
                continue;
            }
            self.enter(i);
            let (cpu, model) = (&mut self.cpus[i], &self.models[space]);
            cpu.vcpu.leave();
            cpu.tlb.retain(|gfn, translation| {
                let slot = model.slot_at(*gfn);
                let Expected::Page(page) = model.expect(&*self.machine, *gfn, Access::Read) else {
                    return true;
                };
                let largest = slot.map_or(Level::PAGE, |(_, slot)| slot.bounded_level(*gfn, &page));
                let largest = model.shared_level(*gfn, largest);
                let split = translation.level > largest;
                translation.level = translation.level.min(largest);
                // NX huge pages make a huge leaf not executable; a piece of it may be executable.
                !split || translation.execute
            });
        }
    }

    /// Lets a vCPU in its reader section retry an access as long as only its own flushes interrupt the access. No other
    /// vCPU runs.
    fn insist<R>(
        &mut self,
        i: usize,
        mut attempt: impl FnMut(&mut Self) -> Result<R, Stop>,
    ) -> Result<R, Stop> {
        let mut answer = attempt(self);
        for _ in 0..MOST_RETRIES {
            if !matches!(answer, Err(Stop::Retry)) {
                break;
            }
            self.cpus[i].tlb.clear();
            self.cpus[i].vcpu.quiesce();
            answer = attempt(self);
        }
        answer
    }

    /// Makes one access by a vCPU, in its own reader section.
    pub(super) fn access(
        &mut self,
        i: usize,
        gpa: u64,
        access: Access,
    ) -> Result<Translation, Stop> {
        self.enter(i);
        let gfn = gpa >> F::GRANULE.shift();
        let before = self.cpus[i].vcpu.stats();
        let was_full = self.is_ring_full(i);
        let copies = access == Access::Write && self.is_shared(i, gfn);
        let known = self.look_up(i, gfn);
        let saved = self.kept_level(i, gfn, access, Level::GIGA);
        let answer = self.insist(i, |runner| runner.cpus[i].vcpu.translate(Gpa(gpa), access));
        let did = self.cpus[i].vcpu.stats().since(&before);
        let now = self.look_up(i, gfn);
        self.cpus[i].vcpu.leave();
        self.tally_kept("page kept before a write");
        self.check_known(gpa, access, known, &answer, did.pf_taken);
        self.check_now(gpa, access, now, &answer);
        if self.accessed.len() == ACCESSED {
            self.accessed.pop_front();
        }
        self.accessed.push_back(gfn);
        let pushed = self.note_pushes(i, gfn..gfn + 1, access, was_full);
        let model = &self.models[self.cpus[i].space];
        let expected = model.expect(&*self.machine, gfn, access);
        if answer.is_err() {
            self.check_kept(i);
        }
        match answer {
            Ok(translation) => {
                let Expected::Page(host) = expected else {
                    panic!("{access:?} at {gpa:#x}: {translation:?}, expected {expected:?}");
                };
                // If a fault was not handled by the fast path, it has looked up slot and host page, and so has mapped
                // at the highest possible level.
                if did.pf_fixed + did.pf_spurious > did.pf_fast && !self.nx {
                    let (_, slot) = model.slot_at(gfn).expect("a page is in a slot");
                    let level = match self.is_on("huge_pages", true) {
                        true => model.shared_level(gfn, slot.fitting_level(gfn, &host)),
                        false => Level::PAGE,
                    };
                    assert_eq!(
                        translation.level,
                        level.min(saved),
                        "{access:?} at {gpa:#x}: {translation:?}"
                    );
                }
                self.note_access(i, gfn, access, &did, &translation);
                self.check_granted(gpa, access, &translation);
                self.check_translation(i, gfn, &translation, "new");
                self.touch(i, gfn, access, &translation);
                self.cpus[i].remember(gfn, translation);
                self.check_kept(i);
                self.tally_page(i, access, &translation);
            }
            Err(Stop::Mmio { gpa: at }) => {
                assert_eq!((expected, at.0), (Expected::Mmio, gpa), "{access:?}");
                self.tally.count("MMIO");
                self.repeat_mmio(i, gpa, access);
            }
            Err(Stop::BadAddress { gpa: at, hva, .. }) => {
                let (_, slot) = model.slot_at(gfn).expect("a bad address is in a slot");
                let page = Self::hva(slot.host_page(gfn));
                assert_eq!(
                    (expected, at.0, Hva(hva.0 & !(F::GRANULE.bytes() - 1))),
                    (Expected::BadAddress, gpa, page),
                    "{access:?}"
                );
                self.tally.count("bad address");
            }
            Err(Stop::MemoryFault {
                gpa: at,
                access: of,
                private: false,
                absent: true,
            }) => {
                assert_eq!((expected, at.0, of), (Expected::Absent, gpa, access));
                self.tally.count("page not there yet");
            }
            Err(Stop::MemoryFault {
                gpa: at,
                access: of,
                private: true,
                absent: false,
            }) => {
                assert_eq!((expected, at.0, of), (Expected::Private, gpa, access));
                assert_eq!(
                    now, None,
                    "{access:?} at {gpa:#x}: a private frame is mapped"
                );
                self.tally.count("private frame");
            }
            Err(Stop::NoExecute { gpa: at }) => {
                assert_eq!((expected, at.0), (Expected::NoExecute, gpa), "{access:?}");
                self.tally.count("fetch refused by a slot");
            }
            Err(Stop::OutOfMemory { gpa: at }) => {
                assert_eq!(at.0, gpa);
                self.allocation_failed();
            }
            Err(Stop::DirtyRingFull) => {
                let logs = model.slot_at(gfn).is_some_and(|(_, slot)| slot.logs());
                assert!(
                    logs && model.mode.rings && was_full && pushed == 0,
                    "{access:?} at {gpa:#x}: the ring is said to be full"
                );
                assert!(access == Access::Write && expected != Expected::Mmio);
                self.tally.count("ring full");
            }
            // `Retry` is impossible, because no other operation runs. Other `MemoryFault`s are impossible, because no
            // slot has private memory.
            Err(stop) => panic!("{access:?} at {gpa:#x}: {stop:?}"),
        }
        // If the page has to be copied for this write, the invalidation for the copy interrupts the fault.
        let most = u64::from(copies);
        if copies && !self.is_shared(i, gfn) {
            self.tally.count("page copied for a write");
        }
        assert!(did.pf_retried <= most, "{access:?} at {gpa:#x}: {did:?}");
        answer
    }

    /// Looks up the mapping of a frame, both by the VM and by the vCPU, which is in its reader section.
    fn look_up(&self, i: usize, gfn: u64) -> Option<Mapping> {
        let by_vcpu = self.cpus[i].vcpu.lookup(Gfn(gfn));
        let by_vm = self.vm.lookup(self.cpus[i].space, Gfn(gfn));
        assert_eq!(
            by_vcpu, by_vm,
            "frame {gfn:#x}: vCPU on the left, VM on the right"
        );
        by_vm
    }

    /// Checks `faults`, the number of faults that an access took. The number must be 0 if the earlier mapping `known`
    /// allowed the access. Otherwise it must not be 0, unless the access has failed.
    fn check_known(
        &mut self,
        gpa: u64,
        access: Access,
        known: Option<Mapping>,
        answer: &Result<Translation, Stop>,
        faults: u64,
    ) {
        let allowed = known.is_some_and(|mapping| mapping.rights.allow(access));
        let at = || format!("{access:?} at {gpa:#x}: {known:?}, then {answer:?}");
        assert!(!allowed || answer.is_ok() && faults == 0, "{}", at());
        assert!(allowed || answer.is_err() || faults > 0, "{}", at());
        self.tally.count(match (known, allowed) {
            (None, _) => "access to a frame not mapped",
            (Some(_), true) => "access that the mapping allows",
            (Some(_), false) => "access that the mapping does not allow",
        });
    }

    /// Checks that the mapping `now`, which was looked up after an access, is the mapping that the access has used.
    fn check_now(
        &self,
        gpa: u64,
        access: Access,
        now: Option<Mapping>,
        answer: &Result<Translation, Stop>,
    ) {
        let at = || format!("{access:?} at {gpa:#x}: {answer:?}, and then {now:?}");
        match (answer, now) {
            (Ok(page), Some(now)) => {
                assert_eq!(
                    (page.host, page.level),
                    (F::GRANULE.hpa(now.pfn), now.level),
                    "{}",
                    at()
                );
                assert!(now.rights.allow(access), "{}", at());
                let rights = (page.write && !now.rights.write, page.execute);
                assert_eq!(rights, (false, now.rights.execute), "{}", at());
            }
            (Ok(_), None) => panic!("{}", at()),
            // A page that is mapped must be in a slot. But its mapping may forbid this access.
            (Err(_), now) => {
                let none = matches!(answer, Err(Stop::Mmio { .. })) && access != Access::Write;
                assert!(!(none && now.is_some()), "{}", at());
            }
        }
    }

    /// Looks up the frame that was accessed last, and a frame near a recently accessed one.
    pub(super) fn look_up_some_frames(&mut self) {
        let near = self.accessed.get(self.ops % ACCESSED).copied();
        let near = near.map(|gfn| gfn.wrapping_add(self.ops as u64 / 7 % 5).wrapping_sub(2));
        let last = self.accessed.back().copied();
        last.into_iter()
            .chain(near)
            .for_each(|gfn| self.look_up_frame(gfn));
    }

    /// Looks up a frame, and compares its mapping with the model's.
    fn look_up_frame(&mut self, gfn: u64) {
        for space in 0..=SPACES {
            let Some(mapping) = self.vm.lookup(space, Gfn(gfn)) else {
                continue;
            };
            let page = Translation {
                host: F::GRANULE.hpa(mapping.pfn),
                level: mapping.level,
                write: mapping.rights.write,
                execute: mapping.rights.execute,
                tracked: false,
            };
            self.check_page(space, gfn, &page, "looked up");
            let Expected::Page(host) = self.models[space].expect(&*self.machine, gfn, Access::Read)
            else {
                panic!("frame {gfn:#x} is mapped: {mapping:?}");
            };
            assert_eq!(mapping.memory, host.memory, "frame {gfn:#x}");
            self.tally.count("mapping looked up");
            let page = self.models[space]
                .slot_at(gfn)
                .map(|(_, slot)| slot.host_page(gfn));
            let of_host = page.and_then(|page| self.machine.page(page));
            if of_host.is_some_and(|page| page.memory != mapping.memory) {
                self.tally.count("mapping cached less than the host has it");
            }
        }
    }

    fn tally_page(&mut self, i: usize, access: Access, translation: &Translation) {
        self.tally.count(match access {
            Access::Read => "page read",
            Access::Write => "page written",
            Access::Execute => "page executed",
        });
        if translation.level > Level::PAGE {
            self.tally.count("huge page");
        }
        if self.cpus[i].space == 1 {
            self.tally.count("page of space 1");
        }
    }

    fn check_granted(&self, gpa: u64, access: Access, translation: &Translation) {
        let granted = match access {
            Access::Read => true,
            Access::Write => translation.write,
            Access::Execute => translation.execute,
        };
        assert!(granted, "{access:?} at {gpa:#x}: {translation:?}");
    }

    /// Repeats an access to an address without a slot. The first access leaves an MMIO entry in the tables; the second
    /// access uses this entry, without looking up a slot.
    fn repeat_mmio(&mut self, i: usize, gpa: u64, access: Access) {
        let model = &self.models[self.cpus[i].space];
        let gfn = gpa >> F::GRANULE.shift();
        let nowhere = model.slot_at(gfn).is_none() && gfn < model.capacity;
        let caches = F::MMIO_GENERATION_BITS > 0 && self.is_on("mmio_caching", true);
        if !nowhere || !caches || self.platform.is_failing() {
            return;
        }
        self.enter(i);
        let vcpu = &mut self.cpus[i].vcpu;
        let before = vcpu.stats();
        let answer = vcpu.translate(Gpa(gpa), access);
        let did = vcpu.stats().since(&before);
        vcpu.leave();
        assert_eq!(answer, Err(Stop::Mmio { gpa: Gpa(gpa) }));
        assert_eq!(
            (did.mmio_cached, did.slot_lookups + did.slot_lookups_saved),
            (1, 0),
            "{access:?} at {gpa:#x}: MMIO answered, and looked up again"
        );
        self.tally.count("MMIO from an entry");
    }

    /// Makes an access during an invalidation of `pages`, by a vCPU that must not wait for the end of the invalidation.
    pub(super) fn access_meanwhile(&mut self, gfn: u64, access: Access, pages: &Range<u64>) {
        let i = 0;
        self.enter(i);
        let was_full = self.is_ring_full(i);
        let cpu = &mut self.cpus[i];
        let before = cpu.vcpu.stats();
        cpu.vcpu.attention().raise(BUSY);
        let answer = cpu.vcpu.translate(Gpa(gfn << F::GRANULE.shift()), access);
        if answer == Err(Stop::Retry) {
            cpu.tlb.clear();
            cpu.vcpu.quiesce();
        }
        cpu.vcpu.attention().take(BUSY);
        let did = cpu.vcpu.stats().since(&before);
        cpu.vcpu.leave();
        if answer.is_err() {
            self.check_kept(i);
        }
        self.note_pushes(i, gfn..gfn + 1, access, was_full);
        let model = &self.models[self.cpus[i].space];
        let expected = model.expect(&*self.machine, gfn, access);
        let page = model.slot_at(gfn).map(|(_, slot)| slot.host_page(gfn));
        match answer {
            Ok(translation) => {
                assert!(
                    page.is_some_and(|page| !pages.contains(&page)),
                    "{access:?} at frame {gfn:#x}: {translation:?} while it is invalidated"
                );
                self.note_access(i, gfn, access, &did, &translation);
                self.check_granted(gfn << F::GRANULE.shift(), access, &translation);
                self.check_translation(i, gfn, &translation, "meanwhile");
                self.cpus[i].remember(gfn, translation);
            }
            Err(Stop::Mmio { .. }) => {
                assert_eq!(expected, Expected::Mmio, "frame {gfn:#x}, meanwhile");
            }
            Err(Stop::BadAddress { .. }) => {
                assert_eq!(expected, Expected::BadAddress, "frame {gfn:#x}, meanwhile");
            }
            Err(Stop::NoExecute { .. }) => {
                assert_eq!(expected, Expected::NoExecute, "frame {gfn:#x}, meanwhile");
            }
            Err(Stop::MemoryFault {
                private, absent, ..
            }) => {
                let why = match (private, absent) {
                    (false, true) => Expected::Absent,
                    (true, false) => Expected::Private,
                    _ => panic!("frame {gfn:#x}, meanwhile: no slot has private backing"),
                };
                assert_eq!(expected, why, "frame {gfn:#x}, meanwhile");
            }
            Err(Stop::Retry) => {
                self.tally.count("retried meanwhile");
                // If only the vCPU's own flush has interrupted the write, the engine had already recorded it.
                let noted = access == Access::Write || self.logs_reads();
                if page.is_some_and(|page| !pages.contains(&page)) && noted {
                    self.uncertain_writes(self.cpus[i].space, gfn..gfn + 1);
                }
            }
            Err(Stop::DirtyRingFull) => {
                assert!(was_full && access == Access::Write, "frame {gfn:#x}");
            }
            Err(Stop::OutOfMemory { .. }) => self.allocation_failed(),
            Err(stop) => panic!("{stop:?}"),
        }
    }

    /// Executes KVM_PRE_FAULT_MEMORY. Like a VMM, repeats the call for the remaining range.
    pub(super) fn prefault(&mut self, i: usize, gpa: u64, bytes: u64) {
        let end = gpa.saturating_add(bytes);
        if end == gpa {
            return;
        }
        let mut at = gpa;
        self.enter(i);
        let was_full = self.is_ring_full(i);
        let stop = loop {
            let answer = self.insist(i, |runner| {
                let range = Gpa(at)..Gpa(end);
                runner.cpus[i].vcpu.prefault(range)
            });
            match answer {
                Ok(mapped) => {
                    assert!(
                        mapped > 0 && mapped <= end - at,
                        "{mapped} bytes at {at:#x}"
                    );
                    at += mapped;
                }
                Err(stop) => break Some(stop),
            }
            if at == end {
                break None;
            }
        };
        self.cpus[i].vcpu.leave();
        // The prefault has mapped memory up to the first page that cannot be read, and has returned the address of that
        // page.
        let mapped = match at == gpa {
            true => 0..0,
            false => gpa >> F::GRANULE.shift()..at.div_ceil(F::GRANULE.bytes()),
        };
        // The page that could not be mapped may have been recorded in a log before the call stopped.
        let noted = gpa >> F::GRANULE.shift()..at.div_ceil(F::GRANULE.bytes()) + 1;
        self.note_pushes(i, noted.clone(), Access::Read, was_full);
        if self.logs_reads() {
            self.uncertain_writes(self.cpus[i].space, noted);
        }
        let model = &self.models[self.cpus[i].space];
        let expect =
            |gpa: u64| model.expect(&*self.machine, gpa >> F::GRANULE.shift(), Access::Read);
        let mut pages = mapped
            .clone()
            .map(|gfn| (gfn, expect(gfn << F::GRANULE.shift())));
        let wrong = pages.find(|(_, expected)| !matches!(expected, Expected::Page(_)));
        assert_eq!(wrong, None, "prefaulted from {gpa:#x} to {at:#x}");
        match stop {
            None => self.tally.count("prefaulted to the end"),
            Some(Stop::OutOfMemory { .. }) => self.allocation_failed(),
            Some(stop) => {
                let why = match stop {
                    Stop::Mmio { .. } => Expected::Mmio,
                    Stop::BadAddress { .. } => Expected::BadAddress,
                    Stop::MemoryFault { absent: true, .. } => Expected::Absent,
                    Stop::MemoryFault { private: true, .. } => Expected::Private,
                    stop => panic!("prefault at {at:#x}: {stop:?}"),
                };
                assert_eq!(expect(at), why, "prefault at {at:#x}: {stop:?}");
                self.tally.count("prefaulted in part");
            }
        }
        let step = (mapped.end - mapped.start) as usize / SAMPLES;
        let sample: Vec<_> = mapped.step_by(step.max(1)).map(|gfn| (i, gfn)).collect();
        self.check_still_mapped(&sample, false);
    }

    /// Returns some pages of `gfns` that vCPUs remember.
    pub(super) fn mapped(&mut self, space: usize, gfns: Range<u64>) -> Vec<(usize, u64)> {
        assert!(space < SPACES);
        let mut found = Vec::new();
        for i in 0..VCPUS {
            if self.cpus[i].space != space {
                continue;
            }
            // Entering the vCPU drops the translations that were flushed.
            self.enter(i);
            self.cpus[i].vcpu.leave();
            let known = self.cpus[i].tlb.range(gfns.clone());
            found.extend(known.map(|(gfn, _)| (i, *gfn)).take(SAMPLES));
        }
        found
    }

    /// Checks that these pages can be read without a fault, unless the MMU has recycled shadow pages during the
    /// operation. If `split`, also checks that no huge leaf maps them.
    pub(super) fn check_still_mapped(&mut self, pages: &[(usize, u64)], split: bool) {
        for (i, gfn) in pages {
            let before = self.cpus[*i].vcpu.stats().pf_taken;
            let answer = self.access(*i, gfn << F::GRANULE.shift(), Access::Read);
            let faults = self.cpus[*i].vcpu.stats().pf_taken - before;
            if self.vm.stats().mmu_recycled > self.recycled {
                self.tally.count("recycled during an operation");
                return;
            }
            let translation = answer.unwrap();
            assert_eq!(faults, 0, "frame {gfn:#x} was unmapped");
            self.check_level(*gfn, &translation, split);
        }
    }

    /// Checks that no huge leaf maps a part of `gfns` after an eager split of `gfns`.
    pub(super) fn check_split(&mut self, space: usize, gfns: Range<u64>) {
        let Some(i) = (0..VCPUS).find(|i| self.cpus[*i].space == space) else {
            return;
        };
        let step = (gfns.end - gfns.start) as usize / SAMPLES;
        for gfn in gfns.step_by(step.max(1)) {
            let before = self.cpus[i].vcpu.stats().pf_taken;
            let answer = self.access(i, gfn << F::GRANULE.shift(), Access::Read);
            let known = self.cpus[i].vcpu.stats().pf_taken == before;
            if let (true, Ok(page)) = (known, answer) {
                self.check_level(gfn, &page, true);
            }
        }
    }

    /// Checks, if `split`, that no huge leaf maps this frame.
    fn check_level(&mut self, gfn: u64, page: &Translation, split: bool) {
        if split && self.is_on("eager_page_split", true) && !self.platform.is_failing() {
            assert_eq!(page.level, Level::PAGE, "frame {gfn:#x} stayed huge");
            self.tally.count("split eagerly");
        }
    }

    /// Checks a translation that a vCPU may use now.
    fn check_translation(&self, i: usize, gfn: u64, translation: &Translation, when: &str) {
        self.check_page(self.cpus[i].space, gfn, translation, when);
    }

    /// Checks the translation of a frame: it must map the page that the model expects, and must not have more rights.
    fn check_page(&self, space: usize, gfn: u64, translation: &Translation, when: &str) {
        let machine = &*self.machine;
        let model = &self.models[space];
        let expected = model.expect(machine, gfn, Access::Read);
        let Expected::Page(page) = expected else {
            panic!("{when} {translation:?} of frame {gfn:#x}, expected {expected:?}");
        };
        let at = || format!("{when} {translation:?} of frame {gfn:#x}, host {page:?}");
        assert_eq!(translation.host, F::GRANULE.hpa(page.pfn), "{}", at());
        let (id, slot) = model.slot_at(gfn).expect("a page is in a slot");
        let block = F::GRANULE.block(Gfn(gfn), translation.level);
        let block = block.start.0..block.end.0;
        let largest = model.shared_level(gfn, slot.bounded_level(gfn, &page));
        let fits = translation.level <= largest;
        if !fits {
            // A change of several slots has split the leaf in place. A vCPU that has used the leaf before may still use
            // its translation, if the slots still have the same memory for all of the leaf's pages.
            let here = F::GRANULE.pfn(translation.host).0;
            let same = |other: u64| match model.expect(machine, other, Access::Read) {
                Expected::Page(page) => page.pfn.0 == here.wrapping_add(other).wrapping_sub(gfn),
                _ => false,
            };
            assert!(when == KEPT && block.clone().all(same), "{}", at());
        }
        if translation.write {
            // Checks all pages of the leaf, because the vCPU can use the translation for all of them.
            let mut gfns = match !fits || slot.logs() && !model.is_loose(id) {
                true => block,
                false => gfn..gfn + 1,
            };
            assert!(gfns.all(|gfn| model.may_write(machine, gfn)), "{}", at());
        }
        if translation.write {
            let pages = F::GRANULE.pages(translation.level);
            let first = slot.host_page(gfn) & !(pages - 1);
            let pages = if fits {
                first..first + pages
            } else {
                slot.host_page(gfn)..slot.host_page(gfn) + 1
            };
            self.check_saved(pages, || format!("writable by {}", at()));
        }
        let executable = is_executable(&page);
        let huge = translation.level > Level::PAGE;
        let withheld = self.nx && huge && !translation.execute;
        assert!(translation.execute == executable || withheld, "{}", at());
        let forbidden = huge && self.is_on("nx_huge_pages", false);
        assert!(!(forbidden && translation.execute), "{}", at());
    }
}
