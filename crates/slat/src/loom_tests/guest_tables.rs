//! The shadow MMU: faults that read the guest's tables, concurrent with stores to these tables, with flushes by the
//! guest, and with operations that zap shadow pages.
//!
//! The guest uses PAE paging, with page-directory-pointer entries that its CPUs have already loaded. So its tables have
//! two levels, and entries of 8 bytes. It uses only virtual pages 0 and 1, because shadow tables have only 2 entries in
//! these tests (a guest's table has 512). Its CPUs store to the tables by guest-physical addresses, as with paging off.

use std::convert::Infallible;
use std::sync::Arc;

use super::faults::replace_page;
use super::{Machine, SmallX86, hvas, model, spawn};
use crate::addr::{Access, Access::*, Gfn, Gpa, Hpa, Hva, Level, PAGE_SHIFT, PAGE_SIZE};
use crate::guest_walk::{GuestPaging, Mode};
use crate::slots::Region;
use crate::sync::atomic::{AtomicU64, Ordering::*};
use crate::vm::{Config, Vm};
use crate::{HostWords, MmuKind, Prefetch, Setting, Stop, Translation, Vcpu, VirtualStop};

type ShadowVm = Vm<Machine, SmallX86<2>>;

/// The frame of the page directory that most tests use.
pub(super) const ROOT: u64 = 0;
/// The frame of the page table to which the page directory refers at first.
pub(super) const TABLE: u64 = 1;
/// The frame that the page table's first entry maps at first. In some tests it contains a page directory.
pub(super) const DATA: u64 = 2;
/// A frame that a later store maps. It contains another page table, whose first entry maps this frame itself.
pub(super) const OTHER: u64 = 3;

/// Returns an entry for `frame`: present, writable, user, accessed and dirty.
pub(super) const fn entry(frame: u64) -> u64 {
    frame << PAGE_SHIFT | 0x67
}

/// A guest that has its own page tables, which the shadow MMU shadows.
#[derive(Clone)]
pub(super) struct Guest {
    pub(super) vm: Arc<ShadowVm>,
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
    /// Makes a guest with a slot of four pages. Its tables contain `entries`: for each, the table's frame, the index,
    /// and the frame to which the entry refers. All four frames are mapped writable, so that stores to tables are not
    /// noticed before the tables are tracked.
    fn new(entries: &[(u64, usize, u64)]) -> Guest {
        Self::with_pages(Level::PAGE, entries)
    }

    /// Makes a guest like [`Self::new`], but with host pages of `level`.
    fn with_pages(level: Level, entries: &[(u64, usize, u64)]) -> Guest {
        let config = Config::default().with_mmu(MmuKind::Shadow);
        Self::with_config(config, level, entries)
    }

    /// Makes a guest like [`Self::with_pages`], but in a VM with the configuration `config`.
    pub(super) fn with_config(
        config: Config,
        level: Level,
        entries: &[(u64, usize, u64)],
    ) -> Guest {
        let vm = Vm::new(Machine::new(level), config).unwrap();
        vm.set_policy(Setting::Prefetch(Prefetch::Off));
        let words = || core::array::from_fn(|_| core::array::from_fn(|_| AtomicU64::new(0)));
        let guest = Guest {
            vm,
            words: Words(Arc::new(words())),
        };
        guest.set_slot(0, 4);
        guest.on_cpu(|cpu| {
            for &(table, index, to) in entries {
                cpu.store(table, index, entry(to));
            }
        });
        guest
    }

    /// Creates slot 0 with `pages` pages from frame 0 on, backed by host pages from `backing` on. If `pages` is 0,
    /// deletes the slot.
    fn set_slot(&self, backing: u64, pages: u64) {
        if pages == 0 {
            return self.vm.remove_memory_region(0, 0).unwrap();
        }
        let backing = Hva(backing << PAGE_SHIFT);
        let region = Region::new(0, Gpa(0), pages << PAGE_SHIFT, backing);
        self.vm.set_memory_region(0, &region).unwrap();
    }

    /// Runs `code` on a new CPU of the guest.
    pub(super) fn on_cpu<R>(&self, code: impl FnOnce(&mut Cpu) -> R) -> R {
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

    /// Starts a thread with a new CPU of the guest that runs `code`.
    fn spawn<R: Send + 'static>(
        &self,
        code: impl FnOnce(&mut Cpu) -> R + 'static,
    ) -> loom::thread::JoinHandle<R> {
        let guest = self.clone();
        spawn(move || guest.on_cpu(code))
    }
}

/// A CPU of the guest. It caches no translation between two accesses.
pub(super) struct Cpu {
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
            reserves_table_global: false,
        }
    }

    /// Reads virtual page `page` through the page directory in frame `ROOT`. Returns the number of the host page.
    /// `None`: #PF or MMIO.
    pub(super) fn read(&mut self, page: u64) -> Option<u64> {
        self.access(ROOT, page, Read)
    }

    /// Accesses virtual page `page` through the page directory in frame `root`. Returns the same as [`Self::read`].
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
                Err(VirtualStop::PageFault { .. } | VirtualStop::Stop(Stop::Mmio { .. })) => {
                    return None;
                }
                Err(VirtualStop::Stop(Stop::Retry)) => self.vcpu.quiesce(),
                Err(stop) => panic!("{stop}"),
            }
        }
    }

    /// Stores `entry` at index `index` of the table in frame `table`.
    pub(super) fn store(&mut self, table: u64, index: usize, entry: u64) {
        let found = self.translate_store(table);
        self.store_by(found, table, index, entry);
    }

    /// Translates the guest-physical address of the table in frame `table`, for a store.
    fn translate_store(&mut self, table: u64) -> Translation {
        loop {
            match self.vcpu.translate(Gpa(table << PAGE_SHIFT), Write) {
                Ok(found) => return found,
                Err(Stop::Retry) => self.vcpu.quiesce(),
                Err(stop) => panic!("{stop}"),
            }
        }
    }

    /// Like [`Self::store`], but uses the translation `found` of the table.
    fn store_by(&mut self, found: Translation, table: u64, index: usize, entry: u64) {
        let offset = 8 * index as u64;
        (self.words.at(Hpa(found.host.0 + offset))).store(entry, Release);
        if found.tracked {
            let _ = (self.vcpu).stored(Gpa((table << PAGE_SHIFT) + offset), 8);
        }
    }

    /// Flushes the TLB, as by loading CR3 with its current value.
    pub(super) fn flush(&mut self) {
        self.vcpu.flush_guest(&mut self.words);
    }

    /// Reads virtual page 0, passes a quiescent point, and reads it again.
    pub(super) fn read_twice(&mut self) {
        self.read(0);
        self.vcpu.quiesce();
        self.read(0);
    }

    /// Executes INVLPG for virtual page `page`, in the address space of the page directory `ROOT`.
    fn invlpg(&mut self, page: u64) {
        let gva = page << PAGE_SHIFT;
        let _ = (self.vcpu).invlpg(gva, &Self::paging(ROOT), &mut self.words);
    }
}

/// Runs `one` and `other` concurrently, each on its own CPU. After both have ended, runs `after` on a third CPU, and
/// then the audit.
pub(super) fn two_cpus(
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

/// Two page tables, each with an entry for virtual page 0. The page directory refers to the first page table. No table
/// is tracked yet.
const UNTRACKED: fn() -> Guest =
    || Guest::new(&[(ROOT, 0, TABLE), (TABLE, 0, DATA), (OTHER, 0, OTHER)]);

/// The fault of one CPU begins to track the page directory. At the same time the other CPU stores to it, perhaps
/// through a writable translation that it has cached.
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

/// The page directory is tracked, and its shadow page has no entry, so the store finds no entry to zap.
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

/// A guest whose page table has entries for virtual pages 0 and 1, and has a shadow page.
const SHADOWED: fn() -> Guest = || {
    let guest = Guest::new(&[(ROOT, 0, TABLE), (TABLE, 0, DATA), (TABLE, 1, OTHER)]);
    guest.on_cpu(|cpu| {
        cpu.read(1);
    });
    guest
};

/// Like [`SHADOWED`], but the shadow page is unsynced: stores to the page table are not noticed.
const UNSYNCED: fn() -> Guest = || {
    let guest = SHADOWED();
    guest.on_cpu(|cpu| cpu.store(TABLE, 1, entry(OTHER)));
    guest
};

/// Like [`SHADOWED`], but the shadow page has leaves for virtual pages 0 and 1.
const MAPPED: fn() -> Guest = || {
    let guest = SHADOWED();
    guest.on_cpu(|cpu| cpu.read(0));
    guest
};

/// Maps virtual page 0 to `OTHER`, flushes, and reads the page.
fn remap(cpu: &mut Cpu) {
    cpu.store(TABLE, 0, entry(OTHER));
    cpu.flush();
    assert_eq!(cpu.read(0), Some(OTHER));
}

#[test]
fn nothing_of_an_unsynced_table_is_installed_from_before_a_store_and_a_flush() {
    two_cpus(
        2,
        UNSYNCED,
        |cpu| _ = cpu.read(0),
        |cpu| {
            cpu.store(TABLE, 0, entry(OTHER));
            cpu.flush();
        },
        |cpu| assert_eq!(cpu.read(0), Some(OTHER)),
    );
}

#[test]
fn nothing_of_an_unsynced_table_is_installed_from_before_a_store_and_invlpg() {
    two_cpus(
        2,
        UNSYNCED,
        |cpu| _ = cpu.read(0),
        |cpu| {
            cpu.store(TABLE, 0, entry(OTHER));
            cpu.invlpg(0);
        },
        |cpu| assert_eq!(cpu.read(0), Some(OTHER)),
    );
}

#[test]
fn nothing_stale_is_left_of_a_table_that_two_cpus_make_unsynced() {
    two_cpus(
        2,
        MAPPED,
        remap,
        |cpu| cpu.store(TABLE, 1, entry(DATA)),
        |cpu| {
            cpu.flush();
            assert_eq!(cpu.read(0), Some(OTHER));
            assert_eq!(cpu.read(1), Some(DATA));
        },
    );
}

#[test]
fn nothing_stale_is_left_of_a_table_that_two_cpus_compare() {
    two_cpus(
        1,
        MAPPED,
        remap,
        |cpu| {
            cpu.store(TABLE, 1, entry(DATA));
            cpu.flush();
            assert_eq!(cpu.read(1), Some(DATA));
        },
        |cpu| {
            assert_eq!(cpu.read(0), Some(OTHER));
            assert_eq!(cpu.read(1), Some(DATA));
        },
    );
}

/// Runs `host` concurrently with a CPU that runs `code`. After both have ended, runs `after` on another CPU, and then
/// the audit.
pub(super) fn beside_host(
    preemptions: usize,
    prepare: fn() -> Guest,
    code: fn(&mut Cpu),
    host: fn(&Guest),
    after: fn(&mut Cpu),
) {
    model(preemptions, move || {
        let guest = prepare();
        let thread = guest.spawn(code);
        host(&guest);
        thread.join().unwrap();
        guest.on_cpu(after);
        guest.vm.audit().unwrap();
    });
}

#[test]
fn no_shadow_leaf_is_left_of_a_page_that_is_invalidated() {
    for prepare in [SHADOWED, MAPPED] {
        beside_host(
            2,
            prepare,
            Cpu::read_twice,
            |guest| replace_page(&guest.vm, DATA, 6),
            |cpu| assert_eq!(cpu.read(0), Some(6)),
        );
    }
}

/// The slot gets other memory, which contains other tables.
#[test]
fn nothing_is_left_of_tables_whose_slot_is_replaced() {
    for prepare in [SHADOWED, MAPPED] {
        beside_host(
            2,
            prepare,
            |cpu| _ = cpu.read(0),
            |guest| {
                let new = |frame: u64| &guest.words.0[4 + frame as usize][0];
                new(ROOT).store(entry(TABLE), Release);
                new(TABLE).store(entry(OTHER), Release);
                guest.set_slot(0, 0);
                guest.set_slot(4, 4);
            },
            |cpu| assert_eq!(cpu.read(0), Some(4 + OTHER)),
        );
    }
}

/// Zaps the shadow page of the page directory, as if the host had replaced the memory of the directory.
fn forget_root(guest: &Guest) {
    let vm = &guest.vm;
    vm.forget_tables(&vm.spaces[0], &(Gfn(ROOT)..Gfn(ROOT + 1)));
}

/// The walk takes no lock. It begins with a root that the CPU has found before its last quiescent point.
#[test]
fn no_walk_begins_with_a_root_that_is_zapped() {
    beside_host(3, MAPPED, Cpu::read_twice, forget_root, |cpu| {
        assert_eq!(cpu.read(0), Some(DATA));
    });
}

#[test]
fn shadow_pages_are_recycled_beside_a_walk() {
    beside_host(
        2,
        MAPPED,
        Cpu::read_twice,
        |guest| guest.vm.recycle(&guest.vm.spaces[0], 8),
        |cpu| assert_eq!(cpu.read(0), Some(DATA)),
    );
}

/// The guest's directory maps a huge page. While the fault resolves the page, the directory's shadow page is zapped,
/// and its table is freed. Afterwards the fault must not read that table.
#[test]
fn no_fault_walks_from_a_root_that_is_zapped_meanwhile() {
    const DIRECTORY: u64 = 2;
    beside_host(
        2,
        || {
            let guest = Guest::with_pages(Level::MEGA, &[]);
            let on = Setting::NxHugePages(crate::Switch::On);
            guest.vm.set_policy(on);
            guest.on_cpu(|cpu| {
                // The entry maps a page of 2 MiB (bit 7) at address 0.
                cpu.store(DIRECTORY, 0, entry(0) | 1 << 7);
                assert_eq!(cpu.access(DIRECTORY, 0, Read), Some(0));
            });
            drop(guest.vm.invalidate(hvas(0..1)));
            guest
        },
        |cpu| _ = cpu.access(DIRECTORY, 0, Read),
        |guest| {
            let vm = &guest.vm;
            vm.forget_tables(&vm.spaces[0], &(Gfn(DIRECTORY)..Gfn(DIRECTORY + 1)));
        },
        |cpu| assert_eq!(cpu.access(DIRECTORY, 0, Read), Some(0)),
    );
}

/// A guest with two page directories that refer to one page table. The page table's shadow page is unsynced, and has a
/// leaf for virtual page 0. The second directory is tracked, and its shadow page has no entry yet.
const TWO_DIRECTORIES: fn() -> Guest = || {
    let guest = Guest::new(&[
        (ROOT, 0, TABLE),
        (TABLE, 0, DATA),
        (TABLE, 1, OTHER),
        (DATA, 0, TABLE),
    ]);
    guest.on_cpu(|cpu| {
        cpu.read(0);
        cpu.access(DATA, 1, Read);
        cpu.store(DATA, 0, entry(TABLE));
        cpu.store(TABLE, 1, entry(OTHER));
    });
    guest
};

/// A CPU begins to compare the page table with its shadow page. For this it waits until a second CPU, which may still
/// store through a writable translation that it has cached, has passed a quiescent point. Meanwhile a third CPU reaches
/// the page table through the other directory, and also compares it. The second CPU's store must be noticed, or the
/// second CPU's flush must compare the table once more.
#[test]
fn a_table_is_not_synced_before_all_stores_to_it_are_noticed() {
    model(1, || {
        let guest = TWO_DIRECTORIES();
        let flushing = guest.spawn(Cpu::flush);
        guest.on_cpu(|cpu| {
            let found = cpu.translate_store(TABLE);
            guest.on_cpu(|third| third.access(DATA, 1, Read));
            cpu.store_by(found, TABLE, 0, entry(OTHER));
            cpu.flush();
            assert_eq!(cpu.read(0), Some(OTHER));
        });
        flushing.join().unwrap();
        guest.vm.audit().unwrap();
    });
}
