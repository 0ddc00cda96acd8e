//! The shadow MMU: faults that read the guest's tables, concurrent with stores to these tables, with flushes of the guest's, and
//! with operations that zap shadow pages.
//!
//! The guest has PAE paging, with page-directory-pointer entries that its CPUs have loaded: two levels, and entries of
//! 8 bytes. It uses virtual pages 0 and 1 alone, because a table has 2 entries here, and 512 in a walk of the guest's.
//! Its CPUs store to the tables by their guest-physical addresses, as with paging off.

use std::convert::Infallible;
use std::sync::Arc;

use super::{Machine, PLAIN, SmallX86, model, spawn};
use crate::addr::{Access, Access::*, Gpa, Hpa, Hva, Level, PAGE_SHIFT, PAGE_SIZE};
use crate::guest_walk::{GuestPaging, Mode};
use crate::slots::{Region, SlotFlags};
use crate::sync::atomic::{AtomicU64, Ordering::*};
use crate::vm::{Config, Vm};
use crate::{HostWords, MmuKind, Prefetch, Setting, Stop, Vcpu, VirtualStop};

type ShadowVm = Vm<Machine, SmallX86<2>>;

/// The frame of the page directory that most tests use.
const ROOT: u64 = 0;
/// The frame of the page table that it refers to first.
const TABLE: u64 = 1;
/// A frame that the table maps first, and that may also be a page directory.
const DATA: u64 = 2;
/// A frame that a store maps, and that is another page table: its first entry maps itself.
const OTHER: u64 = 3;

/// Returns an entry for `frame`: present, writable, user, accessed and dirty.
const fn entry(frame: u64) -> u64 {
    frame << PAGE_SHIFT | 0x67
}

/// A guest.
#[derive(Clone)]
struct Guest {
    vm: Arc<ShadowVm>,
    words: Words,
}

/// The first two words of each host page.
#[derive(Clone)]
struct Words(Arc<[[AtomicU64; 2]; Machine::PAGES as usize]>);

impl Words {
    fn at(&self, host: Hpa) -> &AtomicU64 {
        &self.0[host.pfn().0 as usize][(host.0 % PAGE_SIZE / 8) as usize]
    }
}

impl HostWords for Words {
    type Error = Infallible;

    fn read(&mut self, host: Hpa, _: usize) -> Result<u64, Infallible> {
        Ok(self.at(host).load(Acquire))
    }

    fn compare_exchange(
        &mut self,
        host: Hpa,
        _: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Infallible> {
        let done = (self.at(host)).compare_exchange(old, new, AcqRel, Relaxed);
        Ok(done.is_ok())
    }
}

impl Guest {
    /// Makes a guest with a slot of four pages. Its tables have `entries`: frame, index, and the frame that is referred
    /// to. All its frames are mapped; that of a table is writable, so that stores go unnoticed until the table is tracked.
    fn new(flags: SlotFlags, entries: &[(u64, usize, u64)]) -> Guest {
        let config = Config::default().with_mmu(MmuKind::Shadow);
        let vm = Vm::new(Machine::new(Level::PAGE), config).unwrap();
        vm.set_policy(Setting::Prefetch(Prefetch::Off));
        let region = Region {
            slot: 0,
            flags,
            gpa: Gpa(0),
            size: 4 << PAGE_SHIFT,
            backing: Hva(0),
            private: None,
        };
        vm.set_memory_region(0, &region).unwrap();
        let words = || core::array::from_fn(|_| core::array::from_fn(|_| AtomicU64::new(0)));
        let guest = Guest {
            vm,
            words: Words(Arc::new(words())),
        };
        guest.on_cpu(|cpu| {
            for &(table, index, to) in entries {
                cpu.store(table, index, entry(to));
            }
        });
        guest
    }

    /// Runs `code` on a new CPU.
    fn on_cpu<R>(&self, code: impl FnOnce(&mut Cpu) -> R) -> R {
        let mut cpu = Cpu {
            vcpu: self.vm.create_vcpu().unwrap(),
            words: self.words.clone(),
        };
        cpu.vcpu.enter_unguarded(1);
        cpu.vcpu.quiesce();
        let result = code(&mut cpu);
        cpu.vcpu.leave();
        result
    }

    /// Starts a CPU that runs `code`.
    fn spawn<R: Send + 'static>(
        &self,
        code: impl FnOnce(&mut Cpu) -> R + 'static,
    ) -> loom::thread::JoinHandle<R> {
        let guest = self.clone();
        spawn(move || guest.on_cpu(code))
    }
}

/// A CPU of the guest, which remembers no translation from one access to the next.
struct Cpu {
    vcpu: Vcpu<Machine, SmallX86<2>>,
    words: Words,
}

impl Cpu {
    fn paging(root: u64) -> GuestPaging {
        GuestPaging {
            cr3: 0,
            mode: Mode::Pae,
            user: false,
            write_protect: true,
            no_execute: false,
            smep: false,
            smap: false,
            pkru: 0,
            pdptes: Some([root << PAGE_SHIFT | 1; 4]),
            physical_bits: 36,
        }
    }

    /// Reads virtual page `page` by the page directory `ROOT`. Returns the host page; `None` is #PF.
    fn read(&mut self, page: u64) -> Option<u64> {
        self.access(ROOT, page, Read)
    }

    /// Accesses virtual page `page` by the page directory in frame `root`.
    fn access(&mut self, root: u64, page: u64, access: Access) -> Option<u64> {
        let (gva, paging) = (page << PAGE_SHIFT, Self::paging(root));
        loop {
            let words = &mut self.words;
            match self.vcpu.translate_virtual(gva, access, &paging, words) {
                Ok(page) => {
                    let pfn = page.host.pfn().0;
                    self.vcpu.vm().platform().pages[pfn as usize].alive.used();
                    return Some(pfn);
                }
                Err(VirtualStop::PageFault { .. }) => return None,
                Err(VirtualStop::Stop(Stop::Retry)) => self.vcpu.quiesce(),
                Err(stop) => panic!("{stop}"),
            }
        }
    }

    /// Stores `entry` at `index` of the table in frame `table`.
    fn store(&mut self, table: u64, index: usize, entry: u64) {
        let gpa = Gpa((table << PAGE_SHIFT) + 8 * index as u64);
        let found = loop {
            match self.vcpu.translate(gpa, Write) {
                Ok(found) => break found,
                Err(Stop::Retry) => self.vcpu.quiesce(),
                Err(stop) => panic!("{stop}"),
            }
        };
        let host = Hpa(found.host.0 + gpa.offset());
        self.words.at(host).store(entry, Release);
        if found.tracked {
            let _ = self.vcpu.stored(gpa, 8);
        }
    }

    /// Loads CR3 with what it has.
    fn flush(&mut self) {
        self.vcpu.flush_guest(&mut self.words);
    }

    /// Flushes virtual page `page` of the page directory `ROOT`.
    fn invlpg(&mut self, page: u64) {
        let gva = page << PAGE_SHIFT;
        let _ = (self.vcpu).invlpg(gva, &Self::paging(ROOT), &mut self.words);
    }
}

/// Runs `one` and `other` on a CPU each, concurrently; then `after` on a third, and the audit.
fn two_cpus(
    preemptions: usize,
    prepare: fn() -> Guest,
    one: fn(&mut Cpu),
    other: fn(&mut Cpu),
    after: fn(&mut Cpu),
) {
    model(preemptions, move || {
        let guest = prepare();
        let thread = guest.spawn(one);
        guest.on_cpu(other);
        thread.join().unwrap();
        guest.on_cpu(after);
        guest.vm.audit().unwrap();
    });
}

/// Two page tables, both with an entry for virtual page 0; the page directory refers to the first. Nothing is tracked yet.
const UNTRACKED: fn() -> Guest = || {
    let guest = Guest::new(
        PLAIN,
        &[(ROOT, 0, TABLE), (TABLE, 0, DATA), (OTHER, 0, OTHER)],
    );
    guest
};

/// The fault begins to track the page directory, in which the other CPU has stored, or stores with the right that its TLB has.
#[test]
fn no_link_is_left_from_before_a_store_to_a_table_that_begins_to_be_tracked() {
    two_cpus(
        3,
        UNTRACKED,
        |cpu| _ = cpu.read(0),
        |cpu| cpu.store(ROOT, 0, entry(OTHER)),
        |cpu| assert_eq!(cpu.read(0), Some(OTHER)),
    );
}

/// The page directory is tracked, and its shadow page has no entry: the store finds nothing to zap.
#[test]
fn no_link_is_left_from_before_a_store_to_a_tracked_table() {
    two_cpus(
        3,
        || {
            let guest = UNTRACKED();
            guest.on_cpu(|cpu| {
                cpu.read(0);
                cpu.store(ROOT, 0, entry(TABLE));
            });
            guest
        },
        |cpu| _ = cpu.read(0),
        |cpu| cpu.store(ROOT, 0, entry(OTHER)),
        |cpu| assert_eq!(cpu.read(0), Some(OTHER)),
    );
}

/// A page table with entries for virtual pages 0 and 1, which has a shadow page.
const SHADOWED: fn() -> Guest = || {
    let guest = Guest::new(
        PLAIN,
        &[(ROOT, 0, TABLE), (TABLE, 0, DATA), (TABLE, 1, OTHER)],
    );
    guest.on_cpu(|cpu| {
        cpu.read(1);
    });
    guest
};

/// Like [`SHADOWED`], but stores to the page table are not noticed.
const UNSYNCED: fn() -> Guest = || {
    let guest = SHADOWED();
    guest.on_cpu(|cpu| cpu.store(TABLE, 1, entry(OTHER)));
    guest
};

fn remap_and(flush: fn(&mut Cpu), cpu: &mut Cpu) {
    cpu.store(TABLE, 0, entry(OTHER));
    flush(cpu);
    assert_eq!(cpu.read(0), Some(OTHER));
}

#[test]
fn nothing_of_an_unsynced_table_is_installed_from_before_a_store_and_a_flush() {
    two_cpus(
        3,
        UNSYNCED,
        |cpu| _ = cpu.read(0),
        |cpu| remap_and(Cpu::flush, cpu),
        |cpu| assert_eq!(cpu.read(0), Some(OTHER)),
    );
}

#[test]
fn nothing_of_an_unsynced_table_is_installed_from_before_a_store_and_invlpg() {
    two_cpus(
        3,
        UNSYNCED,
        |cpu| _ = cpu.read(0),
        |cpu| remap_and(|cpu| cpu.invlpg(0), cpu),
        |cpu| assert_eq!(cpu.read(0), Some(OTHER)),
    );
}
