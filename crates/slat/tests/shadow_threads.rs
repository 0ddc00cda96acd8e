//! Two CPUs of a guest with the shadow MMU. One changes the guest's tables, and flushes as the manual requires. The
//! other uses the tables meanwhile, and the host replaces pages. After its own flush, the first CPU must find the
//! mappings that it has stored, even if faults of the other CPU were in progress.

#[path = "common/guest.rs"]
mod guest;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::thread;
use std::time::{Duration, Instant};

use guest::{Memory, USED, Words, paging};
use slat::format::X86;
use slat::{
    Access::{self, *},
    Attention, Config, Gpa, HostWords, Hpa, Level, MmuKind, Prefetch, Region, Setting, SlotFlags,
    Stop, Vcpu, VirtualStop, Vm,
};
use slat_model::{HostChange, HostMemory, PageKind, SimPlatform};

const PAGES: u64 = 512;
/// The frame of the table of level 4. The next frames contain the tables of levels 3 and 2.
const ROOT: u64 = 16;
/// The frames of two level 1 tables for the same addresses.
const LAST: [u64; 2] = [19, 20];
/// The frames of the guest's data. The first page is mapped to one of these two frames.
const DATA: [u64; 2] = [64, 65];

const REMAP: HostChange = HostChange::Remap {
    level: Level::PAGE,
    writable: true,
    kind: PageKind::Ordinary,
};

const LONGEST: Duration = Duration::from_secs(10);

/// A CPU with a TLB. The CPU uses its TLB entries until a result says that they are void.
struct Cpu<'m> {
    vcpu: Vcpu<SimPlatform, X86<5>>,
    words: Words<'m>,
    /// The host pages to which accesses were translated, by virtual page.
    tlb: [Option<Hpa>; 8],
}

impl<'m> Cpu<'m> {
    fn new(vm: &Arc<Vm<SimPlatform, X86<5>>>, words: Words<'m>) -> Self {
        Cpu {
            vcpu: vm.create_vcpu().unwrap(),
            words,
            tlb: [None; 8],
        }
    }

    fn quiesce(&mut self) {
        self.tlb = [None; 8];
        self.vcpu.quiesce();
    }

    /// Uses the translations in the TLB, and checks that the host has not replaced their pages.
    fn use_all(&self) {
        for host in self.tlb.iter().flatten() {
            let (page, _) = HostMemory::identify(host.pfn());
            let now = self
                .vcpu
                .vm()
                .platform()
                .host
                .get(page)
                .map(|page| page.pfn);
            assert_eq!(
                now,
                Some(host.pfn()),
                "host page {page} is used, and was replaced"
            );
        }
    }

    /// Flushes like a load of CR3.
    fn flush(&mut self) {
        let mut words = self.words;
        self.vcpu.flush_guest(&mut words);
        self.tlb = [None; 8];
    }

    /// Acknowledges flushes that wait for this CPU.
    fn pass(&mut self) {
        if self.vcpu.attention().flag().load(SeqCst) & Attention::FLUSH != 0 {
            self.quiesce();
        }
    }

    fn let_others_run(&mut self) {
        for _ in 0..8 {
            self.pass();
            thread::yield_now();
        }
        self.pass();
    }

    /// Returns the host page to which `gva` is translated. `None`: the guest gets a page fault.
    fn access(&mut self, gva: u64, access: Access) -> Option<u64> {
        let mut words = self.words;
        let kept = (gva >> 12) as usize % self.tlb.len();
        let answer = loop {
            match (self.vcpu).translate_virtual(gva, access, &paging(ROOT << 12), &mut words) {
                Err(VirtualStop::Stop(Stop::Retry)) => self.quiesce(),
                answer => break answer,
            }
        };
        let found = match answer {
            Ok(page) => Some(page.host),
            Err(VirtualStop::PageFault { .. }) => None,
            Err(other) => panic!("{other:?}"),
        };
        self.tlb[kept] = found;
        self.use_all();
        found.map(|host| HostMemory::identify(host.pfn()).0)
    }

    fn store(&mut self, table: u64, index: u64, entry: u64) {
        let gpa = Gpa((table << 12) + 8 * index);
        let found = loop {
            match self.vcpu.translate(gpa, Write) {
                Err(Stop::Retry) => self.quiesce(),
                answer => break answer.unwrap(),
            }
        };
        self.use_all();
        let host = Hpa(found.host.0 + gpa.offset());
        self.words.memory.store(host, entry);
        if found.tracked && self.vcpu.stored(gpa, 8) {
            self.quiesce();
        }
        self.use_all();
    }
}

#[test]
fn a_cpu_that_has_flushed_finds_what_it_has_stored() {
    let platform = SimPlatform::new(PAGES);
    let config = Config::default().with_mmu(MmuKind::Shadow);
    let vm = Vm::<_, X86<5>>::new(platform.clone(), config).unwrap();
    let region = all_memory();
    vm.set_memory_region(0, &region).unwrap();
    let memory = Memory::new(PAGES);
    memory.link(&[ROOT, ROOT + 1, ROOT + 2, LAST[0]]);
    for (table, data) in LAST.into_iter().zip(DATA) {
        (0..8).for_each(|page| memory.put(table, page, data << 12 | USED));
    }
    let new_cpu = |dawdles| {
        let memory = &memory;
        Cpu::new(&vm, Words { memory, dawdles })
    };
    vm.set_policy(Setting::Prefetch(Prefetch::Window(8)));
    let stop = AtomicBool::new(false);
    let rounds = if cfg!(debug_assertions) {
        4_000
    } else {
        20_000
    };
    // On a busy machine, a round takes longer. So the number of rounds depends on the time.
    let begin = Instant::now();
    thread::scope(|scope| {
        // The other CPU faults all the time, and flushes sometimes, so that tables are synced while the first CPU
        // changes them.
        scope.spawn(|| {
            let mut other = new_cpu(true);
            other.vcpu.enter_unguarded(1);
            let mut round = 0u64;
            while !stop.load(SeqCst) {
                round += 1;
                let found = other.access((round % 8) << 12, Read);
                assert!(found.is_none_or(|page| DATA.contains(&page)), "{found:?}");
                other.pass();
                if round.is_multiple_of(7) {
                    other.flush();
                }
                other.pass();
            }
            other.vcpu.leave();
        });
        // The host replaces the pages that contain tables and data.
        scope.spawn(|| {
            let mut round = 0;
            while !stop.load(SeqCst) {
                let page = [LAST[0], DATA[0], ROOT + 1, LAST[1], DATA[1]][round % 5];
                round += 1;
                let pages = page..page + 1;
                let guard = vm.invalidate(HostMemory::hvas(&pages));
                platform.host.change(&pages, REMAP);
                drop(guard);
                thread::yield_now();
            }
        });
        let stopped = Stopper(&stop);
        let mut cpu = new_cpu(false);
        cpu.vcpu.enter_unguarded(0);
        for round in (0..rounds).take_while(|_| begin.elapsed() < LONGEST) {
            // Meanwhile the host zaps leaves, and the other CPU takes faults.
            cpu.let_others_run();
            let page = round % 8;
            let (entry, mapped) = match round % 3 {
                0 => (DATA[0] << 12 | USED, Some(DATA[0])),
                1 => (DATA[1] << 12 | USED, Some(DATA[1])),
                _ => (0, None),
            };
            match round % 5 {
                // Changes a table of level 2: it then refers to the other level 1 table, which contains this entry.
                4 => {
                    let table = LAST[(round / 5 % 2) as usize];
                    cpu.store(table, page, entry);
                    cpu.store(ROOT + 2, 0, table << 12 | USED);
                    cpu.flush();
                }
                _ => {
                    let table = memory.entry(ROOT + 2, 0) >> 12;
                    cpu.store(table, page, entry);
                    if cpu
                        .vcpu
                        .invlpg(page << 12, &paging(ROOT << 12), &mut { cpu.words })
                    {
                        cpu.quiesce();
                    }
                    cpu.use_all();
                }
            }
            cpu.let_others_run();
            assert_eq!(cpu.access(page << 12, Read), mapped, "round {round}");
        }
        cpu.vcpu.leave();
        drop(stopped);
    });
    vm.audit().unwrap();
    let stats = vm.stats();
    assert!(stats.mmu_pte_write > 0 && stats.mmu_pde_zapped > 0);
}

/// Ends the other threads when dropped, also if this thread fails.
struct Stopper<'s>(&'s AtomicBool);

impl Drop for Stopper<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn all_memory() -> Region {
    Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0))
}

/// Returns a VM whose guest has one table, with entries whose accessed flag is clear.
fn with_unused_entries() -> (Arc<SimPlatform>, Arc<Vm<SimPlatform, X86<5>>>, Memory) {
    const UNUSED: u64 = 7;
    let platform = SimPlatform::new(PAGES);
    let config = Config::default().with_mmu(MmuKind::Shadow);
    let vm = Vm::<_, X86<5>>::new(platform.clone(), config).unwrap();
    vm.set_policy(Setting::Prefetch(Prefetch::Off));
    vm.set_memory_region(0, &all_memory()).unwrap();
    let memory = Memory::new(PAGES);
    memory.link(&[ROOT, ROOT + 1, ROOT + 2, LAST[0]]);
    memory.map(LAST[0], DATA[0], UNUSED);
    (platform, vm, memory)
}

/// When the MMU sets a flag in a guest's table, the log notes that like any other store, also if dirty logging has
/// started after the MMU last set a flag there.
#[test]
fn a_table_in_which_a_flag_is_set_is_logged() {
    let (_, vm, memory) = with_unused_entries();
    let (allowed, done) = (AtomicU64::new(32), AtomicU64::new(0));
    let mut logged = Vec::new();
    let reached = |count: u64| {
        while done.load(SeqCst) < count {
            thread::yield_now();
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut cpu = Cpu::new(&vm, memory.words());
            cpu.vcpu.enter_unguarded(0);
            for page in 0..96 {
                while allowed.load(SeqCst) <= page {
                    cpu.pass();
                    thread::yield_now();
                }
                // A read is enough to set a flag, and its leaf need not be protected when dirty logging starts.
                assert!(cpu.access(page << 12, Read).is_some());
                done.store(page + 1, SeqCst);
            }
            cpu.vcpu.leave();
        });
        reached(32);
        let with_log = all_memory().with_flags(SlotFlags::LOG_DIRTY_PAGES);
        vm.set_memory_region(0, &with_log).unwrap();
        for pages in [64, 96] {
            allowed.store(pages, SeqCst);
            reached(pages);
            let mut log = [0; PAGES as usize / 64];
            vm.get_dirty_log(0, 0, &mut log).unwrap();
            logged.push(log[LAST[0] as usize / 64] >> (LAST[0] % 64) & 1 != 0);
        }
    });
    assert_eq!(logged, [true, true]);
}

/// Access to the guest's tables. Checks that the accessed host pages are those that back the tables now.
struct Backed<'m> {
    words: Words<'m>,
    platform: &'m SimPlatform,
}

impl HostWords for Backed<'_> {
    type Error = Infallible;

    fn read(&mut self, host: Hpa, size: usize) -> Result<u64, Infallible> {
        self.words.read(host, size)
    }

    fn compare_exchange(
        &mut self,
        host: Hpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Infallible> {
        let (page, _) = HostMemory::identify(host.pfn());
        let now = self.platform.host.get(page).map(|page| page.pfn);
        assert_eq!(
            now,
            Some(host.pfn()),
            "a flag is set in a page that is gone"
        );
        self.words.compare_exchange(host, size, old, new)
    }
}

/// The CPU stays in its reader section, and remembers the table in which it has set flags.
#[test]
fn a_flag_is_set_in_the_table_where_it_is_after_an_invalidation() {
    let (platform, vm, memory) = with_unused_entries();
    let moved = AtomicBool::new(false);
    thread::scope(|scope| {
        let mut vcpu = vm.create_vcpu().unwrap();
        let mut words = Backed {
            words: memory.words(),
            platform: &platform,
        };
        vcpu.enter_unguarded(0);
        let mut read = |vcpu: &mut Vcpu<_, _>, page: u64| {
            let paging = paging(ROOT << 12);
            while let Err(stop) = vcpu.translate_virtual(page << 12, Read, &paging, &mut words) {
                assert_eq!(stop, VirtualStop::Stop(Stop::Retry));
                vcpu.quiesce();
            }
        };
        (0..8).for_each(|page| read(&mut vcpu, page));
        scope.spawn(|| {
            let pages = LAST[0]..LAST[0] + 1;
            let guard = vm.invalidate(HostMemory::hvas(&pages));
            platform.host.change(&pages, REMAP);
            drop(guard);
            moved.store(true, SeqCst);
        });
        while !moved.load(SeqCst) {
            if vcpu.attention().flag().load(SeqCst) & Attention::FLUSH != 0 {
                vcpu.quiesce();
            }
            thread::yield_now();
        }
        (8..16).for_each(|page| read(&mut vcpu, page));
        vcpu.leave();
    });
}
