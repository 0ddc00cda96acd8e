//! A software CPU with a TLB: its loop, and its reaction when the host or the guest changes a mapping. Also shows how a
//! client uses policies, a dirty ring and private memory.
//!
//! `docs/hypervisor.md` of the repository explains it. Run it: `cargo run -p slat --example software_cpu`.

mod plain_memory;
#[path = "plain_memory/relocate.rs"]
mod relocate;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::error::Error;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::thread;

use plain_memory::PlainMemory;
use relocate::relocate;
use slat::format::X86;
use slat::guest_walk::{GuestPaging, Mode};
use slat::{
    Access, Attention, Config, DirtyGfn, DirtyRing, Entered, Gfn, Gpa, HostWords, Hpa, Hva,
    MemoryAttributes, MmuKind, PAGE_SIZE, Region, Setting, SlotFlags, Stop, Translation, Vcpu,
    VirtualPage, VirtualStop, Vm,
};

type Tables = X86<5>;

const PAGES: u64 = 256;
const SLOT: u32 = 0;

/// A software CPU. Its TLB has a translation of each page that the guest has accessed.
struct SoftwareCpu {
    vcpu: Vcpu<PlainMemory, Tables>,
    tlb: BTreeMap<Gfn, Translation>,
}

/// The CPU while it runs the guest: it is in a reader section, which ends when this is dropped.
struct Running<'c> {
    vcpu: Entered<'c, PlainMemory, Tables>,
    tlb: &'c mut BTreeMap<Gfn, Translation>,
}

impl SoftwareCpu {
    fn new(vm: &Arc<Vm<PlainMemory, Tables>>) -> Result<Self, Box<dyn Error>> {
        Ok(SoftwareCpu {
            vcpu: vm.create_vcpu()?,
            tlb: BTreeMap::new(),
        })
    }

    /// Executes `block` of guest code again and again, until it returns a value.
    fn run<R>(
        &mut self,
        mut block: impl FnMut(&mut Running<'_>) -> Result<Option<R>, Stop>,
    ) -> Result<R, Stop> {
        // The argument is the token that `Platform::wait` gets, to know which CPU to kick. This platform kicks none.
        let mut cpu = Running {
            vcpu: self.vcpu.enter(0),
            tlb: &mut self.tlb,
        };
        loop {
            if cpu.vcpu.attention().flag().load(SeqCst) & Attention::FLUSH != 0 {
                cpu.flush();
            }
            match block(&mut cpu) {
                Ok(Some(result)) => return Ok(result),
                Ok(None) => {}
                // A flush took place while the engine waited for host memory, so the translations in the TLB are void.
                Err(Stop::Retry) => cpu.flush(),
                // The client handles the stop. Before that, dropping `cpu` ends the reader section.
                Err(stop) => return Err(stop),
            }
        }
    }
}

impl Running<'_> {
    /// Drops every translation, and only then tells the engine so.
    fn flush(&mut self) {
        self.tlb.clear();
        self.vcpu.quiesce();
    }

    fn page(&mut self, gpa: Gpa, access: Access) -> Result<Hpa, Stop> {
        let kept = self.tlb.get(&gpa.gfn());
        let page = match kept.filter(|page| access == Access::Read || page.write) {
            Some(page) => *page,
            None => {
                let page = self.vcpu.translate(gpa, access)?;
                self.tlb.insert(gpa.gfn(), page);
                page
            }
        };
        Ok(Hpa(page.host.0 + gpa.offset()))
    }

    fn load(&mut self, gpa: Gpa) -> Result<u64, Stop> {
        let at = self.page(gpa, Access::Read)?;
        Ok(self.vcpu.vm().platform().word(at).load(Relaxed))
    }

    fn store(&mut self, gpa: Gpa, value: u64) -> Result<(), Stop> {
        let at = self.page(gpa, Access::Write)?;
        self.vcpu.vm().platform().word(at).store(value, Relaxed);
        Ok(())
    }
}

fn memory() -> Region {
    Region::new(SLOT, Gpa(0), PAGES * PAGE_SIZE, Hva(0))
}

/// Makes a VM with `policies`, each a name and a value as on a command line.
fn create(
    host: &Arc<PlainMemory>,
    policies: &[(&str, &str)],
) -> Result<Arc<Vm<PlainMemory, Tables>>, Box<dyn Error>> {
    let mut config = Config::default();
    for (name, value) in policies {
        let setting = Setting::parse(name, value);
        let setting = setting.map_err(|error| format!("{name}={value}: {error}"))?;
        config.policy.set(setting);
    }
    Ok(Vm::new(host.clone(), config)?)
}

/// A CPU polls a word while the host moves the word's page to another frame and then writes there. If the CPU kept its
/// old translation, it would poll forever.
fn the_host_moves_a_page(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    const WORD: Gpa = Gpa(5 * PAGE_SIZE);
    let host = Arc::new(PlainMemory::new(512, PAGES as usize));
    let vm = create(&host, &[("prefetch", "off")])?;
    vm.set_memory_region(0, &memory())?;
    let mut cpu = SoftwareCpu::new(&vm)?;
    cpu.run(|cpu| cpu.store(WORD, 0).map(Some))?;
    let value = thread::scope(|scope| {
        let cpu = scope.spawn(|| cpu.run(|cpu| Ok(Some(cpu.load(WORD)?).filter(|v| *v != 0))));
        let page = Hva(WORD.0)..Hva(WORD.0 + PAGE_SIZE);
        let invalidation = vm.invalidate(page.clone());
        let moved = relocate(&host, page.start);
        drop(invalidation);
        if let Some((_, new)) = moved {
            host.word(new.hpa()).store(0x5107, Relaxed);
        }
        cpu.join().expect("the CPU does not panic")
    })?;
    writeln!(
        out,
        "the host moves a page under a CPU, which reads {value:#x} there"
    )?;
    vm.audit()?;
    Ok(())
}

/// Collects the pages from the ring, beginning with ring entry `next`. Advances `next`.
fn collect(ring: &[DirtyGfn], next: &mut usize, pages: &mut Vec<u64>) {
    while let Some((_slot, page)) = ring[*next % ring.len()].collect() {
        *next += 1;
        pages.push(page);
    }
}

fn the_guest_fills_its_ring(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let host = Arc::new(PlainMemory::new(512, PAGES as usize));
    let vm = create(&host, &[("prefetch", "off"), ("dirty_log_reads", "off")])?;
    // Dirty rings have to be enabled before there are slots.
    vm.use_dirty_rings();
    vm.set_memory_region(0, &memory().with_flags(SlotFlags::LOG_DIRTY_PAGES))?;
    let mut cpu = SoftwareCpu::new(&vm)?;
    let ring: Arc<[DirtyGfn]> = (0..128).map(|_| DirtyGfn::new()).collect();
    cpu.vcpu
        .set_dirty_ring(Arc::new(DirtyRing::new(ring.clone())?))?;

    let (mut next, mut pages, mut exits) = (0, Vec::new(), 0);
    let mut page = 0;
    loop {
        let stores = cpu.run(|cpu| {
            cpu.store(Gpa(page * PAGE_SIZE), page)?;
            page += 1;
            Ok((page == PAGES).then_some(()))
        });
        match stores {
            Ok(()) => break,
            Err(Stop::DirtyRingFull) => {
                exits += 1;
                collect(&ring, &mut next, &mut pages);
                // After this call, a write to one of these pages is logged again. So copy the pages after this call,
                // not before.
                vm.reset_dirty_rings();
            }
            Err(stop) => return Err(stop.into()),
        }
    }
    collect(&ring, &mut next, &mut pages);
    vm.reset_dirty_rings();
    writeln!(
        out,
        "{} pages are in a ring of {}, with {exits} exits",
        pages.len(),
        ring.len()
    )?;
    vm.audit()?;
    Ok(())
}

/// A guest with private memory, as with KVM's guest_memfd: two host pages back each frame, and the frame's attribute
/// decides which of them the guest uses.
fn a_page_becomes_private(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    const PAGE: Gpa = Gpa(3 * PAGE_SIZE);
    let private = Hva(PAGES * PAGE_SIZE);
    let host = Arc::new(PlainMemory::new(1024, 2 * PAGES as usize));
    let vm = create(&host, &[])?;
    vm.set_memory_region(0, &memory().with_private(private))?;
    let mut cpu = SoftwareCpu::new(&vm)?;
    cpu.run(|cpu| cpu.store(PAGE, 0x5a).map(Some))?;
    let gfns = PAGE.gfn()..PAGE.gfn().add(1);
    vm.set_memory_attributes(gfns.clone(), MemoryAttributes::PRIVATE)?;
    let as_private = cpu.run(|cpu| cpu.load(PAGE).map(Some))?;
    vm.set_memory_attributes(gfns, MemoryAttributes::NONE)?;
    let as_shared = cpu.run(|cpu| cpu.load(PAGE).map(Some))?;
    writeln!(
        out,
        "a page reads {as_private:#x} as private memory, {as_shared:#x} as shared"
    )?;
    vm.audit()?;
    Ok(())
}

/// Accesses the guest's page tables for the engine.
struct Words<'h>(&'h PlainMemory);

impl HostWords for Words<'_> {
    type Error = Infallible;

    fn read(&mut self, host: Hpa, size: usize) -> Result<u64, Infallible> {
        assert_eq!(size, 8, "the guest is in long mode");
        Ok(self.0.word(host).load(SeqCst))
    }

    fn compare_exchange(
        &mut self,
        host: Hpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Infallible> {
        assert_eq!(size, 8, "the guest is in long mode");
        let word = self.0.word(host);
        Ok(word.compare_exchange(old, new, SeqCst, SeqCst).is_ok())
    }
}

/// The guest's page directory. There are four tables in a row, one for each level, and entry 0 of each of the first
/// three refers to the next table.
const CR3: Gpa = Gpa(0x1000);
const PRESENT_AND_WRITABLE: u64 = 0b11;

/// A CPU that uses guest-virtual addresses, which the engine translates.
struct VirtualCpu {
    vcpu: Vcpu<PlainMemory, Tables>,
    /// Translations by the number of the guest-virtual page.
    tlb: BTreeMap<u64, VirtualPage>,
    paging: GuestPaging,
}

impl VirtualCpu {
    fn new(vm: &Arc<Vm<PlainMemory, Tables>>) -> Result<Self, Box<dyn Error>> {
        Ok(VirtualCpu {
            vcpu: vm.create_vcpu()?,
            tlb: BTreeMap::new(),
            paging: GuestPaging {
                cr3: CR3.0,
                mode: Mode::Level4,
                user: false,
                write_protect: true,
                no_execute: true,
                smep: false,
                smap: false,
                pkru: 0,
                pdptes: None,
                physical_bits: 48,
                reserves_table_global: false,
            },
        })
    }

    /// Accesses the word at `gva`: stores `value`, or loads. The CPU is in a reader section only during this call, so
    /// its TLB may have become void since the last call.
    fn access(&mut self, gva: u64, value: Option<u64>) -> Result<u64, VirtualStop<Infallible>> {
        let VirtualCpu { vcpu, tlb, paging } = self;
        let host = vcpu.vm().platform().clone();
        let mut vcpu = vcpu.enter(0);
        let access = value.map_or(Access::Read, |_| Access::Write);
        loop {
            if vcpu.attention().flag().load(SeqCst) & Attention::FLUSH != 0 {
                tlb.clear();
                vcpu.quiesce();
            }
            let kept = tlb.get(&(gva / PAGE_SIZE)).copied();
            let page = match kept.filter(|page| value.is_none() || page.write) {
                Some(page) => page,
                None => match vcpu.translate_virtual(gva, access, paging, &mut Words(&host)) {
                    Ok(page) => page,
                    Err(VirtualStop::Stop(Stop::Retry)) => {
                        vcpu.attention().raise(Attention::FLUSH);
                        continue;
                    }
                    Err(stop) => return Err(stop),
                },
            };
            tlb.insert(gva / PAGE_SIZE, page);
            let word = host.word(Hpa(page.host.0 + gva % PAGE_SIZE));
            let Some(value) = value else {
                return Ok(word.load(Relaxed));
            };
            word.store(value, Relaxed);
            if let Some(table) = page.tracked {
                // The page holds a page table of the guest: the engine zaps its entries that came from the old table
                // entry.
                let gpa = Gpa(table.0 + gva % PAGE_SIZE);
                if vcpu.stored(gpa, 8) {
                    tlb.clear();
                }
            }
            return Ok(value);
        }
    }

    /// INVLPG.
    fn invalidate(&mut self, gva: u64) {
        let VirtualCpu { vcpu, tlb, paging } = self;
        let host = vcpu.vm().platform().clone();
        tlb.remove(&(gva / PAGE_SIZE));
        if vcpu.enter(0).invlpg(gva, paging, &mut Words(&host)) {
            tlb.clear();
        }
    }
}

/// The guest maps another page at an address, and executes INVLPG.
fn the_guest_changes_its_tables(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    const LAST_TABLE: u64 = CR3.0 + 3 * PAGE_SIZE;
    const ADDRESS: u64 = 0x10 * PAGE_SIZE;
    let host = Arc::new(PlainMemory::new(512, PAGES as usize));
    let config = Config::default().with_mmu(MmuKind::Shadow);
    let vm = Vm::new(host.clone(), config)?;
    vm.set_memory_region(0, &memory())?;
    // The guest's boot code has written four tables, which map each of the first 256 pages to the frame with the same
    // number. It has also written one word to each of two pages.
    let write = |gpa: u64, value| -> Result<(), Box<dyn Error>> {
        let page = host
            .make_resident(Hva(gpa))
            .map_err(|error| error.to_string())?;
        host.word(Hpa(page.hpa().0 + gpa % PAGE_SIZE))
            .store(value, Relaxed);
        Ok(())
    };
    for table in 0..3 {
        let lower = CR3.0 + (table + 1) * PAGE_SIZE;
        write(CR3.0 + table * PAGE_SIZE, lower | PRESENT_AND_WRITABLE)?;
    }
    for page in 0..PAGES {
        write(
            LAST_TABLE + page * 8,
            (page * PAGE_SIZE) | PRESENT_AND_WRITABLE,
        )?;
    }
    write(0x10 * PAGE_SIZE, 1)?;
    write(0x20 * PAGE_SIZE, 2)?;

    let mut cpu = VirtualCpu::new(&vm)?;
    let before = cpu.access(ADDRESS, None)?;
    // The tables themselves are mapped at their guest-physical addresses.
    cpu.access(
        LAST_TABLE + 0x10 * 8,
        Some((0x20 * PAGE_SIZE) | PRESENT_AND_WRITABLE),
    )?;
    cpu.invalidate(ADDRESS);
    let after = cpu.access(ADDRESS, None)?;
    writeln!(
        out,
        "the guest maps another page: it reads {before}, then {after}"
    )?;
    vm.audit()?;
    Ok(())
}

fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    the_host_moves_a_page(out)?;
    the_guest_changes_its_tables(out)?;
    the_guest_fills_its_ring(out)?;
    a_page_becomes_private(out)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = String::new();
    let result = run(&mut out);
    print!("{out}");
    result
}

#[test]
fn the_readme_shows_what_it_prints() {
    let mut out = String::new();
    run(&mut out).unwrap();
    assert!(include_str!("../README.md").contains(&out), "{out}");
}
