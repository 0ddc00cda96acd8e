//! What the host maps at which addresses: rights, and the size of the page that KVM would find there.
//!
//! The kernel is asked once per mapping (by PROCMAP_QUERY where it exists, otherwise by `/proc/self/smaps`), usually
//! when the mapping begins to back a memslot ([`learn`]). The caller that changes mappings reports the changes
//! ([`changed`], [`protected`], [`advised`]): the preload library for an unmodified program, the VMM itself if it uses
//! the crate. The caller reports *inside* the invalidation of the range ([`slat::Vm::invalidate`]), after the change.
//! So a fault that has used the old mapping is stale, and a later fault asks the kernel again. A change makes slat
//! forget the mappings that it overlaps or touches, and no others. So mappings that a program makes and removes besides
//! its guests' memory do not slow the guests down.
//!
//! If a change is not reported (the C library's own `mmap`), an access fails later, and slat then forgets
//! the mapping: `forget`.
//!
//! In a root without `/proc` the kernel tells nothing (`Untold`). Then each page is small, and has the rights that an
//! access of the platform has just shown.
//!
//! While the process has no VM, changes need no report. Only the fact that the program gave advice is recorded
//! ([`advice_passed_by`]); the first VM then reads all advice from the kernel ([`begin`]).
//!
//! # Concurrency
//! A look-up on the fault path takes no lock: each thread remembers the mappings that it used last, which are valid as
//! long as the global epoch does not change. Every mapping that a thread remembers is in the process's `Table`.
//! Removing a mapping from the table raises the epoch, under the table's lock. The kernel's result enters the table
//! only if no change that could make it wrong was reported since the query. Otherwise only the fault that asked uses
//! the result, and that fault is then stale and is retried.

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
    /// The program has asked for no huge pages (MADV_NOHUGEPAGE), or userfaultfd is registered for the range, so that
    /// pages arrive one by one.
    Unwanted,
}

/// One mapping of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: Range<usize>,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// The bytes of the largest naturally aligned host page that the mapping can have: hugetlb or transparent.
    pub(crate) page_bytes: usize,
}

/// A counter that is raised whenever a known mapping is forgotten: so threads learn that the mappings which they
/// remember may be wrong.
static EPOCH: AtomicU64 = AtomicU64::new(0);
/// Whether the kernel may have advice that the table lacks, or the table may have advice that no longer holds. If so,
/// the kernel has to be asked.
static INCOMPLETE: AtomicBool = AtomicBool::new(false);

/// The program's advice by start address: the end of the range, and the advice. The ranges do not overlap.
type Advice = BTreeMap<usize, (usize, HugePages)>;

/// The number of changes whose ranges are remembered: as many as may be reported during one query.
const CHANGES: usize = 16;

/// The known mappings and advice of this process.
#[derive(Debug, Default)]
struct Table {
    advice: Advice,
    /// The known mappings, sorted by address and not overlapping. Faults add mappings, so an allocation for this list
    /// may fail.
    known: Vec<Mapping>,
    /// The number of changes reported, and the ranges of the last ones: change number `n` is at index `n % CHANGES`.
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
    /// Returns the known mapping around `address`.
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

    /// Inserts the result of a query that began when `changes` changes had been reported. Returns `false` if the result
    /// may be wrong by now, or there is no memory for it.
    fn insert(&mut self, mapping: &Mapping, changes: usize) -> bool {
        let since = changes..self.changes;
        if since.len() > CHANGES
            || (since.into_iter()).any(|n| touches(&self.last_changes[n % CHANGES], &mapping.range))
            || self.known.try_reserve(1).is_err()
        {
            return false;
        }
        // Parts of the mapping may already be known. The known parts are as right as the new ones.
        let (start, end) = (mapping.range.start, mapping.range.end);
        let first = (self.known).partition_point(|other| other.range.end <= start);
        let parts = self.known[first..].partition_point(|other| other.range.start < end);
        self.known.drain(first..first + parts);
        self.known.insert(first, mapping.clone());
        true
    }

    /// Removes the advice for `range`, except for parts outside it.
    fn carve(&mut self, range: &Range<usize>) {
        carve(&mut self.advice, range);
    }
}

/// The number of mappings that a thread remembers. A VM's memory has few.
const REMEMBERED: usize = 4;

struct Recent {
    epoch: u64,
    /// The index at which the next mapping is stored.
    next: usize,
    mappings: [Option<Mapping>; REMEMBERED],
}

thread_local! {
    // This variable has no destructor, because registering one allocates with the program's own malloc.
    static RECENT: RefCell<Recent> = const {
        RefCell::new(Recent {
            epoch: 0,
            next: 0,
            mappings: [const { None }; REMEMBERED],
        })
    };
}

/// Call when the process creates a VM and has no other, before the VM has memory. Changes were not reported while there
/// was no VM.
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

/// Call after the program has given advice about huge pages while the process had no VM. Only stores one value, because
/// the caller may be in the program's `malloc`, or in a signal handler.
pub fn advice_passed_by() {
    INCOMPLETE.store(true, Relaxed);
}

/// Call after making, removing or replacing mappings in `range`.
pub fn changed(range: Range<usize>) {
    let mut table = table();
    table.carve(&range);
    table.change(&range);
}

/// Call after changing rights in `range`. Advice does not change.
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
    // A thread may remember a mapping that a later query has replaced in the table.
    EPOCH.fetch_add(1, SeqCst);
}

/// Call when `range` begins to back a memslot: asks the kernel for its mappings now, so that a vCPU need not.
pub fn learn(range: Range<usize>) {
    /// The most mappings to learn: further mappings are looked up when they are needed.
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

/// Removes the advice for `range` from the map. Entries that reach beyond `range` keep their parts outside `range`.
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
    /// Whether the kernel was asked during this look-up.
    pub(crate) fresh: bool,
}

/// Returns the mapping around `address`; `None` if there is none.
///
/// # Errors
/// `Untold`.
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
        // The mapping is stored with the epoch read before: if a mapping was forgotten meanwhile, the next
        // look-up drops this one.
        if stays {
            recent.mappings[recent.next] = Some(mapping.clone());
            recent.next = (recent.next + 1) % REMEMBERED;
        }
        Ok(Some(Found { mapping, fresh }))
    })
}

/// Asks the kernel. Returns the mapping around `address`, and whether the table has the mapping now.
///
/// # Errors
/// `Untold`.
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

/// Applies the system's mode for transparent huge pages, and the program's advice, to an anonymous mapping. Narrows the
/// mapping to the part around `address` to which the same mode and advice apply.
fn transparent(table: &mut Table, mapping: &mut Mapping, address: usize) {
    // Ask under the table's lock, so that other threads wait for the result.
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

/// Returns the bytes of a transparent huge page: as many as a table of the kernel's pages maps.
fn transparent_bytes() -> usize {
    page_size() * (page_size() / size_of::<u64>())
}

/// The system's mode for transparent huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thp {
    /// The kernel uses huge pages, except where the program has advised against them.
    Always,
    /// The kernel uses huge pages only where the program has asked for them.
    Madvise,
    /// The kernel uses no huge pages.
    Never,
}

/// Returns the mode from `/sys/kernel/mm/transparent_hugepage/enabled`, which is read once;
/// [`Thp::Never`] without that file.
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

/// Returns the advice that the kernel keeps: the flags `hg`, `nh` and those of userfaultfd in `/proc/self/smaps`.
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

    /// Maps `len` bytes with MADV_HUGEPAGE for `part`. Returns the address. Returns `None` and prints a message if the
    /// kernel has no huge pages, or is an emulator that accepts any advice and ignores it.
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
