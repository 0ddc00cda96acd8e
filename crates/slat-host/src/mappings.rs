//! The host's mappings: for each, its addresses, its rights, and the size of the host page that KVM would find.
//!
//! The kernel is asked once per mapping (by PROCMAP_QUERY where it exists, otherwise by `/proc/self/smaps`), usually
//! when the mapping begins to back a memslot ([`learn`]). The caller that changes mappings reports the changes
//! ([`changed`], [`protected`], [`advised`]): the preload library for an unmodified program, the VMM itself if it uses
//! the crate. The caller must report a change *during* the invalidation of the range ([`slat::Vm::invalidate`]), after
//! the change was made. So a fault that has used the old mapping is stale, and a later fault asks the kernel again.
//! When a change is reported, slat forgets the mappings that overlap the range or are adjacent to it, and no others. So
//! mappings that are not guest memory do not slow guests down when a program makes and removes them.
//!
//! If a change is not reported (for example, of the C library's own `mmap`), a later access fails, and then slat
//! forgets the mapping (`forget`).
//!
//! In a root directory without `/proc`, the kernel does not tell what is mapped (`Untold`). Then slat treats each page
//! as small, and finds out the rights to it by accessing it.
//!
//! While the process has no VM, changes need not be reported. Only the fact that the program has given advice is
//! recorded ([`advice_passed_by`]). When a VM is created, all advice is read from the kernel ([`begin`]).
//!
//! # Concurrency
//! A look-up in a fault usually takes no lock: each thread remembers the mappings that it used last, which are valid as
//! long as the global epoch is unchanged. Every mapping that a thread remembers is also in the process's `Table`, and
//! when a mapping is removed from the table, the epoch is raised, under the table's lock. A reply of the kernel is put
//! in the table only if no change was reported since the query that could make it wrong. Otherwise only the fault that
//! has asked uses the reply; this fault is stale and will be retried.

use slat_process::once::Computed;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Mutex, MutexGuard};

use slat_process::page_size;

use crate::process::PerProcess;
use crate::procfs::{self, Untold};

/// The program's advice to the kernel about huge pages in a range (madvise).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// The program has given the advice MADV_HUGEPAGE.
    Wanted,
    /// The program has given the advice MADV_NOHUGEPAGE, or has registered the range with userfaultfd, so that pages
    /// arrive one by one.
    Unwanted,
}

/// A mapping of this process: consecutive pages with the same properties, like a VMA of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: Range<usize>,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// The size in bytes of the largest host page (hugetlb or transparent) that the mapping can contain.
    pub(crate) page_bytes: usize,
}

/// A counter that is raised whenever a known mapping is forgotten. If it has changed, the mappings that a thread
/// remembers may be wrong.
static EPOCH: AtomicU64 = AtomicU64::new(0);
/// Whether the advice in the table may differ from the kernel's. If so, all advice must be read from the kernel.
static INCOMPLETE: AtomicBool = AtomicBool::new(false);

/// The program's advice for ranges, which do not overlap: by start address, the end of the range and the advice.
type Advice = BTreeMap<usize, (usize, HugePages)>;

/// The number of most recent changes whose ranges are remembered. If more changes are reported during a query, its
/// result is not put in the table.
const CHANGES: usize = 16;

/// The known mappings and advice of this process.
#[derive(Debug, Default)]
struct Table {
    advice: Advice,
    /// The known mappings, sorted by address and not overlapping. Faults add mappings, so a failure to allocate memory
    /// for this list must be tolerated.
    known: Vec<Mapping>,
    /// The number of changes reported so far. `ranges` contains the ranges of the last ones: that of change number `n`
    /// is at index `n % CHANGES`.
    changes: usize,
    last_changes: [Range<usize>; CHANGES],
}

static TABLE: PerProcess<Mutex<Table>> = PerProcess::new();

fn table() -> MutexGuard<'static, Table> {
    TABLE.get().lock().unwrap_or_else(|e| e.into_inner())
}

fn touches(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start <= other.end && other.start <= one.end
}

impl Table {
    /// Returns the known mapping that contains `address`.
    fn at(&self, address: usize) -> Option<&Mapping> {
        let at = (self.known).partition_point(|mapping| mapping.range.end <= address);
        let mapping = self.known.get(at)?;
        mapping.range.contains(&address).then_some(mapping)
    }

    /// Records a change in `range`: forgets the mappings that the change may have made wrong.
    fn change(&mut self, range: &Range<usize>) {
        self.last_changes[self.changes % CHANGES] = range.clone();
        self.changes += 1;
        let first = (self.known).partition_point(|mapping| mapping.range.end < range.start);
        let touched = self.known[first..].partition_point(|mapping| touches(&mapping.range, range));
        if touched != 0 {
            self.known.drain(first..first + touched);
            EPOCH.fetch_add(1, SeqCst);
        }
    }

    /// Inserts the mapping that a query has returned. `changes` is the number of changes that were reported before the
    /// query began. Returns `false` if a later change may have made the result wrong, or there is no memory for it.
    fn insert(&mut self, mapping: &Mapping, changes: usize) -> bool {
        let since = changes..self.changes;
        if since.len() > CHANGES
            || (since.into_iter()).any(|n| touches(&self.last_changes[n % CHANGES], &mapping.range))
            || self.known.try_reserve(1).is_err()
        {
            return false;
        }
        // Parts of the mapping may already be known, and are also correct. Replace them.
        let (start, end) = (mapping.range.start, mapping.range.end);
        let first = (self.known).partition_point(|other| other.range.end <= start);
        let parts = self.known[first..].partition_point(|other| other.range.start < end);
        self.known.drain(first..first + parts);
        self.known.insert(first, mapping.clone());
        true
    }

    /// Removes the advice for `range`. Advice for a larger range stays for the parts outside `range`.
    fn carve(&mut self, range: &Range<usize>) {
        carve(&mut self.advice, range);
    }
}

/// The number of mappings that a thread remembers. A VM's memory usually has few mappings.
const REMEMBERED: usize = 4;

struct Recent {
    epoch: u64,
    /// The index at which the next mapping will be stored.
    next: usize,
    mappings: [Option<Mapping>; REMEMBERED],
}

thread_local! {
    // This variable has no destructor, because to register a destructor, the program's own `malloc` would be called.
    static RECENT: RefCell<Recent> = const {
        RefCell::new(Recent {
            epoch: 0,
            next: 0,
            mappings: [const { None }; REMEMBERED],
        })
    };
}

/// Call when the process creates a VM and has no other, before the VM has memory. Forgets all known mappings, because
/// changes were not reported while there was no VM.
pub fn begin() {
    let mut table = table();
    if !table.advice.is_empty() {
        table.advice.clear();
        INCOMPLETE.store(true, Relaxed);
    }
    table.change(&(0..usize::MAX));
    drop(table);
    procfs::open();
    thp_mode();
}

/// Call after deleting the process's last VM.
pub fn end() {
    procfs::close();
}

/// Call after the program has given advice about huge pages while the process had no VM. This only stores one value,
/// because the caller may be in the program's `malloc` or in a signal handler.
pub fn advice_passed_by() {
    INCOMPLETE.store(true, Relaxed);
}

/// Call after making, removing or replacing mappings in `range`.
pub fn changed(range: Range<usize>) {
    let mut table = table();
    table.carve(&range);
    table.change(&range);
}

/// Call after changing only the rights of mappings in `range`. The advice for the range stays.
pub fn protected(range: Range<usize>) {
    table().change(&range);
}

/// Call after the program has given advice about huge pages in `range`.
pub fn advised(range: Range<usize>, wish: HugePages) {
    let mut table = table();
    table.carve(&range);
    table.advice.insert(range.start, (range.end, wish));
    table.change(&range);
}

/// Call when an access to `address` has failed although its known mapping allows the access: a change was not reported.
pub(crate) fn forget(address: usize) {
    let mut table = table();
    table.change(&(address..address + 1));
    // Raise the epoch in any case, because a thread may remember a mapping that a later query has replaced in the
    // table.
    EPOCH.fetch_add(1, SeqCst);
}

/// Call when `range` begins to back a memslot: asks the kernel for its mappings now, so that a vCPU need not.
pub fn learn(range: Range<usize>) {
    /// The largest number of mappings to look up now. Further mappings are looked up when they are needed.
    const MOST: usize = 64;
    let mut at = range.start;
    for _ in 0..MOST {
        let known = table().at(at).map(|mapping| mapping.range.end);
        let asked = || Some(ask(at).ok()??.0.range.end);
        let Some(end) = known.or_else(asked) else {
            return;
        };
        if end >= range.end {
            return;
        }
        at = end;
    }
}

/// Removes the advice for `range` from the map. Advice for a larger range stays for the parts outside `range`.
fn carve(advice: &mut Advice, range: &Range<usize>) {
    let touched: Vec<_> = advice
        .range(..range.end)
        .rev()
        .take_while(|(_, (end, _))| *end > range.start)
        .map(|(start, (end, wish))| (*start, *end, *wish))
        .collect();
    for (start, end, wish) in touched {
        advice.remove(&start);
        if start < range.start {
            advice.insert(start, (range.start, wish));
        }
        if end > range.end {
            advice.insert(range.end, (end, wish));
        }
    }
}

/// The result of [`find`].
pub(crate) struct Found {
    pub(crate) mapping: Mapping,
    /// Whether the mapping is from a query of the kernel during this look-up.
    pub(crate) fresh: bool,
}

/// Returns the mapping that contains `address`. `None`: nothing is mapped at `address`.
///
/// # Errors
/// [`Untold`]: the kernel does not tell what is mapped.
pub(crate) fn find(address: usize) -> Result<Option<Found>, Untold> {
    let epoch = EPOCH.load(SeqCst);
    RECENT.with_borrow_mut(|recent| {
        if recent.epoch != epoch {
            recent.mappings = [const { None }; REMEMBERED];
            recent.epoch = epoch;
        }
        let mut last = recent.mappings.iter().flatten();
        if let Some(hit) = last.find(|mapping| mapping.range.contains(&address)) {
            return Ok(Some(Found {
                mapping: hit.clone(),
                fresh: false,
            }));
        }
        let known = table().at(address).cloned();
        let fresh = known.is_none();
        let (mapping, stays) = match known {
            Some(mapping) => (mapping, true),
            None => match ask(address)? {
                Some(asked) => asked,
                None => return Ok(None),
            },
        };
        // Remember the mapping with the epoch that was read before the query: if a mapping was forgotten meanwhile, the
        // next look-up of this thread drops this one, too.
        if stays {
            recent.mappings[recent.next] = Some(mapping.clone());
            recent.next = (recent.next + 1) % REMEMBERED;
        }
        Ok(Some(Found { mapping, fresh }))
    })
}

/// Asks the kernel. Returns the mapping that contains `address`, and whether the mapping was put in the table.
///
/// # Errors
/// [`Untold`]: the kernel does not tell what is mapped.
fn ask(address: usize) -> Result<Option<(Mapping, bool)>, Untold> {
    let changes = table().changes;
    let Some(raw) = procfs::mapping_at(address)? else {
        return Ok(None);
    };
    let mut mapping = Mapping {
        range: raw.range,
        readable: raw.readable,
        writable: raw.writable,
        page_bytes: raw.page_size as usize,
    };
    let mut table = table();
    if mapping.page_bytes == page_size() && raw.anonymous && thp_mode() != Thp::Never {
        transparent(&mut table, &mut mapping, address);
    }
    let stays = table.insert(&mapping, changes);
    Ok(Some((mapping, stays)))
}

/// Sets the page size of an anonymous mapping by the system's mode for transparent huge pages and the program's advice.
/// Narrows the mapping to the part that contains `address` and has the same advice.
fn transparent(table: &mut Table, mapping: &mut Mapping, address: usize) {
    // Read the advice under the table's lock, so that other threads wait for the result.
    if INCOMPLETE.swap(false, Relaxed) {
        table.advice = all_advice();
    }
    let mut wish = None;
    if let Some((&start, &(end, found))) = table.advice.range(..=address).next_back() {
        if address < end {
            wish = Some(found);
            mapping.range.end = mapping.range.end.min(end);
            mapping.range.start = mapping.range.start.max(start);
        } else {
            mapping.range.start = mapping.range.start.max(end);
        }
    }
    if let Some((&start, _)) = table.advice.range(address + 1..).next() {
        mapping.range.end = mapping.range.end.min(start);
    }
    let eligible = match thp_mode() {
        Thp::Always => wish != Some(HugePages::Unwanted),
        Thp::Madvise => wish == Some(HugePages::Wanted),
        Thp::Never => false,
    };
    if eligible {
        mapping.page_bytes = transparent_bytes();
    }
}

/// Returns the size of a transparent huge page in bytes: what one page table of the kernel maps.
fn transparent_bytes() -> usize {
    page_size() * (page_size() / size_of::<u64>())
}

/// The system's mode for transparent huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thp {
    /// The kernel uses huge pages, except where the program has given the advice MADV_NOHUGEPAGE.
    Always,
    /// The kernel uses huge pages only where the program has given the advice MADV_HUGEPAGE.
    Madvise,
    /// The kernel uses no huge pages.
    Never,
}

/// Returns the mode from `/sys/kernel/mm/transparent_hugepage/enabled`, which is read once. If there is no such file,
/// returns [`Thp::Never`].
pub fn thp_mode() -> Thp {
    static MODE: Computed<Thp> = Computed::new();
    *MODE.get_or_init(|| {
        let mut text = [0; 64];
        match procfs::read_small(c"/sys/kernel/mm/transparent_hugepage/enabled", &mut text) {
            text if text.contains("[always]") => Thp::Always,
            text if text.contains("[madvise]") => Thp::Madvise,
            _ => Thp::Never,
        }
    })
}

/// Returns all advice that the kernel knows, from the flags `hg`, `nh` and those of userfaultfd in `/proc/self/smaps`.
fn all_advice() -> Advice {
    let mut advice = Advice::new();
    procfs::each_mapping(&mut |raw, flags| {
        let has = |flag: &str| flags.split_ascii_whitespace().any(|other| other == flag);
        if ["nh", "um", "uw", "ui"].into_iter().any(has) {
            advice.insert(raw.range.start, (raw.range.end, HugePages::Unwanted));
        } else if has("hg") {
            advice.insert(raw.range.start, (raw.range.end, HugePages::Wanted));
        }
        ControlFlow::Continue(())
    });
    advice
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maps `len` bytes, with the advice MADV_HUGEPAGE for `part`. Returns the address. If the kernel has no huge
    /// pages, or is an emulator that accepts and ignores all advice, prints a message and returns `None`.
    fn advised(len: usize, part: Range<usize>) -> Option<usize> {
        // SAFETY: the calls make a new mapping, and give advice for a part of it.
        unsafe {
            let (prot, flags) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let start = libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            let answer = libc::madvise(start.add(part.start), part.len(), libc::MADV_HUGEPAGE);
            if answer != 0 || libc::madvise(start, len, -1) == 0 {
                eprintln!("skipped: this kernel takes no advice about huge pages");
                return None;
            }
            Some(start as usize)
        }
    }

    #[test]
    fn advice_is_found_that_nobody_told() {
        const LEN: usize = 8 << 20;
        let Some(start) = advised(LEN, LEN / 4..LEN / 2) else {
            return;
        };
        let found = all_advice();
        let expected = (start + LEN / 2, HugePages::Wanted);
        assert_eq!(found.get(&(start + LEN / 4)), Some(&expected));
        assert!(!found.contains_key(&start) && !found.contains_key(&(start + LEN / 2)));
    }

    #[test]
    fn threads_that_ask_together_all_hear_of_the_advice() {
        const LEN: usize = 4 << 20;
        if thp_mode() == Thp::Never {
            return eprintln!("skipped: this kernel has no transparent huge pages");
        }
        let Some(start) = advised(LEN, 0..LEN) else {
            return;
        };
        for _ in 0..200 {
            table().advice.clear();
            advice_passed_by();
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let (mapping, _) = ask(start).unwrap().unwrap();
                        assert_eq!(mapping.page_bytes, transparent_bytes());
                    });
                }
            });
        }
    }

    fn mapping(range: Range<usize>) -> Mapping {
        Mapping {
            range,
            readable: true,
            writable: true,
            page_bytes: page_size(),
        }
    }

    #[test]
    fn a_change_forgets_what_it_overlaps_or_touches() {
        let mut table = Table::default();
        for start in [10, 20, 30, 50] {
            assert!(table.insert(&mapping(start..start + 10), table.changes));
        }
        let left = |table: &Table| {
            let starts = table.known.iter().map(|mapping| mapping.range.start);
            starts.collect::<Vec<_>>()
        };
        table.change(&(61..70));
        assert_eq!(left(&table), [10, 20, 30, 50]);
        table.change(&(25..30));
        assert_eq!(left(&table), [10, 50]);
        table.change(&(0..usize::MAX));
        assert!(left(&table).is_empty());
    }

    #[test]
    fn an_answer_that_a_change_overtook_is_not_kept() {
        let mut table = Table::default();
        let asked = table.changes;
        table.change(&(100..200));
        assert!(!table.insert(&mapping(150..300), asked));
        assert!(table.insert(&mapping(300..400), asked));
        assert!(table.insert(&mapping(150..300), table.changes));
        for _ in 0..CHANGES {
            table.change(&(1000..2000));
        }
        assert!(table.insert(&mapping(400..500), asked + 1));
        assert!(!table.insert(&mapping(500..600), asked));
    }

    #[test]
    fn a_larger_answer_takes_in_what_is_known() {
        let mut table = Table::default();
        for range in [0..10, 10..20, 40..50] {
            assert!(table.insert(&mapping(range), 0));
        }
        assert!(table.insert(&mapping(5..30), 0));
        assert_eq!(
            table.at(7).map(|mapping| mapping.range.clone()),
            Some(5..30)
        );
        assert_eq!(table.at(35), None);
        assert!(table.at(45).is_some());
    }

    #[test]
    fn advice_is_carved_by_later_advice() {
        let mut advice = BTreeMap::new();
        advice.insert(10, (100, HugePages::Wanted));
        carve(&mut advice, &(40..60));
        let left: Vec<_> = advice.iter().map(|(s, (e, _))| (*s, *e)).collect();
        assert_eq!(left, [(10, 40), (60, 100)]);
    }
}
