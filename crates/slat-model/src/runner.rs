//! Runs operations on an engine and a model side by side, and compares every answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use slat::{
    Access, Attention, Config, Format, Gpa, Level, MemoryType, RegionError, Stop, Translation,
    Vcpu, Vm,
};

use crate::host::HostMemory;
use crate::model::{Expected, GuestModel};
use crate::ops::Op;
use crate::platform::SimPlatform;

/// A bit of the attention word that the engine leaves to its client.
const BUSY: u32 = 1 << 8;

/// Flushes of its own that one fault can need: a table to clear, and on a walker that asks for
/// break-before-make two leaves to break.
const MOST_RETRIES: usize = 3;

/// A vCPU with the translations it remembers, as a TLB does.
struct Cpu<F: Format> {
    vcpu: Vcpu<SimPlatform, F>,
    tlb: BTreeMap<u64, Translation>,
}

/// An engine and its model. All on one thread: one vCPU is inside at a time.
pub struct Runner<F: Format> {
    platform: Arc<SimPlatform>,
    vm: Arc<Vm<SimPlatform, F>>,
    /// What the memory should be.
    pub model: GuestModel,
    cpus: Vec<Cpu<F>>,
    huge_pages: bool,
    /// NX huge pages were on at some time: leaves may be smaller, and huge ones not executable.
    nx: bool,
    failing: bool,
}

impl<F: Format> Runner<F> {
    /// A VM without memory on a host of `host_pages` pages, with that many vCPUs.
    pub fn new(host_pages: u64, vcpus: usize) -> Self {
        let platform = SimPlatform::new(host_pages);
        let vm = Vm::new(platform.clone(), Config::default()).expect("nothing fails yet");
        let mut runner = Runner {
            platform,
            vm,
            model: GuestModel::default(),
            cpus: Vec::new(),
            huge_pages: true,
            nx: false,
            failing: false,
        };
        for _ in 0..vcpus {
            let cpu = runner.new_cpu();
            runner.cpus.push(cpu);
        }
        runner
    }

    fn new_cpu(&self) -> Cpu<F> {
        Cpu {
            vcpu: self.vm.create_vcpu().expect("there is memory"),
            tlb: BTreeMap::new(),
        }
    }

    /// The engine.
    pub fn vm(&self) -> &Arc<Vm<SimPlatform, F>> {
        &self.vm
    }

    /// The machine.
    pub fn platform(&self) -> &Arc<SimPlatform> {
        &self.platform
    }

    /// Runs one operation. Panics if engine and model disagree.
    pub fn run(&mut self, op: &Op) {
        match op {
            Op::SetRegion(region) => {
                let answer = self.vm.set_memory_region(0, region);
                if answer == Err(RegionError::OutOfMemory) {
                    assert!(self.platform.stop_failing(), "{region:?}: out of memory");
                    self.failing = false;
                    return;
                }
                let errno = answer.as_ref().map_err(RegionError::errno).copied();
                let expected = self.model.set_region(region);
                assert_eq!(errno, expected, "{region:?}: {answer:?}");
            }
            Op::Translate { vcpu, gpa, access } => self.access(*vcpu, *gpa, *access),
            Op::Invalidate {
                pages,
                change,
                during,
            } => {
                let vm = self.vm.clone();
                let guard = vm.invalidate(HostMemory::hvas(pages));
                for (gfn, access) in during {
                    self.access_meanwhile(*gfn, *access, pages);
                }
                self.platform.host.change(pages, *change);
                for (gfn, access) in during {
                    self.access_meanwhile(*gfn, *access, pages);
                }
                drop(guard);
            }
            Op::DirtyLog(id) => self.dirty_log(*id),
            Op::Policy(name, value) => {
                self.vm.set_policy(name, value).unwrap();
                if *name == "dirty_log" {
                    self.model.logs_by_dirty_bit = *value == "dirty-bit";
                }
                if *name == "huge_pages" {
                    self.huge_pages = *value == "on";
                }
                if *name == "nx_huge_pages" && *value == "on" {
                    self.nx = true;
                }
            }
            Op::RecoverNx => drop(self.vm.recover_nx_huge_pages()),
            Op::Age(pages) => {
                let hvas = HostMemory::hvas(pages);
                self.vm.age(hvas.clone(), true);
                assert_eq!(self.vm.age(hvas, false), 0);
            }
            Op::Quiesce(i) => {
                let cpu = &mut self.cpus[*i];
                cpu.vcpu.enter(*i);
                cpu.tlb.clear();
                cpu.vcpu.quiesce();
                cpu.vcpu.leave();
            }
            Op::Replace(i) => self.cpus[*i] = self.new_cpu(),
            Op::FailAllocation(n) => {
                self.platform.fail_allocation(*n, false);
                self.failing = true;
            }
        }
    }

    /// Lets a vCPU in. What it remembers after that must be true.
    fn enter(&mut self, i: usize) {
        let cpu = &mut self.cpus[i];
        cpu.vcpu.enter(i + 1);
        if cpu
            .vcpu
            .attention()
            .flag()
            .load(std::sync::atomic::Ordering::SeqCst)
            & Attention::FLUSH
            != 0
        {
            cpu.tlb.clear();
            cpu.vcpu.quiesce();
        }
        for (gfn, translation) in &self.cpus[i].tlb {
            self.check_translation(*gfn, translation, "kept");
        }
    }

    fn access(&mut self, i: usize, gpa: u64, access: Access) {
        self.enter(i);
        let gfn = gpa >> 12;
        let before = self.cpus[i].vcpu.stats();
        let mut answer = self.cpus[i].vcpu.translate(Gpa(gpa), access);
        for _ in 0..MOST_RETRIES {
            if answer != Err(Stop::Retry) {
                break;
            }
            // Its own flush went by. Nobody else is there.
            self.cpus[i].tlb.clear();
            self.cpus[i].vcpu.quiesce();
            self.check_write_noted(gfn, access);
            answer = self.cpus[i].vcpu.translate(Gpa(gpa), access);
        }
        let did = self.cpus[i].vcpu.stats().since(&before);
        self.cpus[i].vcpu.leave();
        let expected = self.model.expect(&self.platform.host, gfn, access);
        match answer {
            Ok(translation) => {
                assert!(
                    matches!(expected, Expected::Page(_)),
                    "{access:?} at {gpa:#x}: {translation:?}, expected {expected:?}"
                );
                self.check_write_noted(gfn, access);
                let allowed = match access {
                    Access::Read => true,
                    Access::Write => translation.write,
                    Access::Execute => translation.execute,
                };
                assert!(allowed, "{access:?} at {gpa:#x}: {translation:?}");
                self.check_translation(gfn, &translation, "new");
                // A fault that asked slot and host has used the largest level there is.
                let Expected::Page(host) = expected else {
                    unreachable!()
                };
                if did.pf_fixed + did.pf_spurious > 0 && !self.nx {
                    let (_, slot) = self.model.slot_at(gfn).expect("a page is in a slot");
                    let level = match self.huge_pages {
                        true => slot.fitting_level(gfn, &host),
                        false => Level::PAGE,
                    };
                    assert_eq!(translation.level, level, "{access:?} at {gpa:#x}");
                }
                self.cpus[i].tlb.insert(gfn, translation);
            }
            Err(Stop::Mmio { gpa: at }) => {
                assert_eq!((expected, at.0), (Expected::Mmio, gpa), "{access:?}");
            }
            Err(Stop::BadAddress { gpa: at, hva, .. }) => {
                let (_, slot) = self.model.slot_at(gfn).expect("a bad address is in a slot");
                let page = slot.host_page(&self.platform.host, gfn);
                assert_eq!(
                    (expected, at.0, self.platform.host.page(hva)),
                    (Expected::BadAddress, gpa, page),
                    "{access:?}"
                );
            }
            Err(Stop::OutOfMemory { gpa: at }) => {
                assert!(at.0 == gpa && self.failing && self.platform.stop_failing());
                self.failing = false;
            }
            Err(Stop::DirtyRingFull) => panic!("this VM has no rings"),
            Err(Stop::MemoryFault { .. }) => panic!("this VM has no private memory"),
            Err(Stop::Retry) => panic!("{access:?} at {gpa:#x}: nothing was in its way"),
        }
        assert_eq!(did.pf_retried, 0, "{access:?} at {gpa:#x}");
    }

    /// An access while an invalidation of `pages` is in progress, by a vCPU that will not wait.
    fn access_meanwhile(&mut self, gfn: u64, access: Access, pages: &std::ops::Range<u64>) {
        let i = 0;
        self.enter(i);
        let cpu = &mut self.cpus[i];
        cpu.vcpu.attention().raise(BUSY);
        let answer = cpu.vcpu.translate(Gpa(gfn << 12), access);
        if answer == Err(Stop::Retry) {
            cpu.tlb.clear();
            cpu.vcpu.quiesce();
        }
        cpu.vcpu.attention().take(BUSY);
        cpu.vcpu.leave();
        // Also what was abandoned may have made a page writable, and noted it.
        match answer {
            Ok(translation) => {
                self.check_write_noted(gfn, access);
                let (_, slot) = self.model.slot_at(gfn).expect("a page is in a slot");
                let page = slot.host_page(&self.platform.host, gfn);
                assert!(
                    page.is_some_and(|page| !pages.contains(&page)),
                    "{access:?} at frame {gfn:#x}: {translation:?} while it is invalidated"
                );
                self.check_translation(gfn, &translation, "meanwhile");
                self.cpus[i].tlb.insert(gfn, translation);
            }
            Err(Stop::Mmio { .. }) => {
                let expected = self.model.expect(&self.platform.host, gfn, access);
                assert_eq!(expected, Expected::Mmio, "frame {gfn:#x}, meanwhile");
            }
            Err(Stop::BadAddress { .. }) => {
                let expected = self.model.expect(&self.platform.host, gfn, access);
                assert_eq!(expected, Expected::BadAddress, "frame {gfn:#x}, meanwhile");
            }
            Err(Stop::Retry) => {
                // With a flush of its own, the write was carried through before.
                let page = self
                    .model
                    .slot_at(gfn)
                    .and_then(|(_, slot)| slot.host_page(&self.platform.host, gfn));
                if page.is_some_and(|page| !pages.contains(&page)) && access == Access::Write {
                    self.uncertain_write(gfn);
                }
            }
            Err(Stop::DirtyRingFull) => panic!("this VM has no rings"),
            Err(Stop::MemoryFault { .. }) => panic!("this VM has no private memory"),
            Err(Stop::OutOfMemory { .. }) => {
                assert!(self.failing && self.platform.stop_failing());
                self.failing = false;
            }
        }
    }

    fn check_write_noted(&mut self, gfn: u64, access: Access) {
        if access == Access::Write {
            self.model.note_write(gfn);
        }
    }

    /// A write that may have been noted, or not: the log is taken, and the model believes it.
    fn uncertain_write(&mut self, gfn: u64) {
        let Some((id, slot)) = self.model.slot_at(gfn) else {
            return;
        };
        if slot.logs() {
            let page = gfn - slot.base;
            let mut words = self.engine_log(id).expect("it logs");
            let mut expected = self.model.take_dirty(id).expect("it logs");
            let (word, bit) = (page as usize / 64, 1 << (page % 64));
            words[word] &= !bit;
            expected[word] &= !bit;
            self.compare_logs(id, Ok(words), Ok(expected));
        }
    }

    /// A translation that a vCPU may use now must lead where the model says, with no right too many.
    fn check_translation(&self, gfn: u64, translation: &Translation, when: &str) {
        let host = &self.platform.host;
        let expected = self.model.expect(host, gfn, Access::Read);
        let Expected::Page(page) = expected else {
            panic!("{when} {translation:?} of frame {gfn:#x}, expected {expected:?}");
        };
        let at = || format!("{when} {translation:?} of frame {gfn:#x}, host {page:?}");
        assert_eq!(translation.host, page.pfn.hpa(), "{}", at());
        let (id, slot) = self.model.slot_at(gfn).expect("a page is in a slot");
        assert!(
            translation.level <= slot.bounded_level(gfn, &page),
            "{}",
            at()
        );
        if translation.write {
            assert!(self.model.may_write(host, gfn), "{}", at());
            let exact = slot.logs() && !self.model.is_loose(id);
            assert!(!exact || translation.level == Level::PAGE, "{}", at());
        }
        let executable = page.memory == MemoryType::WriteBack;
        let withheld = self.nx && translation.level > Level::PAGE && !translation.execute;
        assert!(translation.execute == executable || withheld, "{}", at());
    }

    fn engine_log(&self, id: u32) -> Result<Vec<u64>, i32> {
        let mut words = self
            .vm
            .dirty_log_words(0, id)
            .map(|n| vec![u64::MAX; n])
            .map_err(|e| e.errno())?;
        self.vm
            .get_dirty_log(0, id, &mut words)
            .map_err(|e| e.errno())?;
        Ok(words)
    }

    fn compare_logs(&self, id: u32, log: Result<Vec<u64>, i32>, expected: Result<Vec<u64>, i32>) {
        match (&log, &expected) {
            (Ok(log), Ok(expected)) if self.model.is_loose(id) => {
                let lost = log.iter().zip(expected).any(|(log, e)| e & !log != 0);
                assert!(
                    !lost,
                    "dirty log of slot {id}: {log:x?}, expected {expected:x?}"
                );
            }
            _ => assert_eq!(log, expected, "dirty log of slot {id}"),
        }
    }

    fn dirty_log(&mut self, id: u32) {
        let (log, expected) = (self.engine_log(id), self.model.take_dirty(id));
        self.compare_logs(id, log, expected);
    }

    /// Audits the engine and the machine, and compares the engine's dirty logs, all of them.
    pub fn check(&mut self) {
        self.platform.stop_failing();
        self.failing = false;
        self.vm.audit().unwrap_or_else(|e| panic!("{e}"));
        self.platform.check();
        for id in self.model.slots.keys().copied().collect::<Vec<_>>() {
            self.dirty_log(id);
        }
    }

    /// Ends the VM; every table frame must come back.
    pub fn finish(mut self) {
        self.check();
        let platform = self.platform.clone();
        drop(self);
        platform.check();
        assert_eq!(platform.live_frames(), 0, "table frames were leaked");
    }
}
