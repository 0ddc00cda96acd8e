//! What the host maps where: rights, and how large a page KVM would see there.
//!
//! The kernel is asked once per mapping (PROCMAP_QUERY where it exists, `/proc/self/smaps`
//! elsewhere), and whoever changes mappings says so ([`changed`], [`advised`]): the preload library
//! for an unmodified program, the VMM itself when it uses the crate. That call comes *inside* the
//! invalidation of the range ([`slat::Vm::invalidate`]), after the change: a fault that used the old
//! answer is stale then, and one that comes later asks again.
//!
//! While the process has no VM, nobody needs to say anything, except that there was advice at all ([`advice_passed_by`]): then
//! the first VM reads all advice from the kernel ([`begin`]).
//!
//! A look-up on the fault path takes no lock: each thread remembers the mappings it used last, valid
//! as long as the global epoch stays the same.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Mutex, MutexGuard, OnceLock};

use slat::Level;

use crate::process::PerProcess;
use crate::procfs;

/// What the program has asked of the kernel for a range (madvise).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// MADV_HUGEPAGE.
    Wanted,
    /// MADV_NOHUGEPAGE, or userfaultfd is registered there: pages arrive one by one.
    Unwanted,
}

/// One mapping of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: Range<usize>,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Largest naturally aligned host page there can be: hugetlb or transparent.
    pub(crate) level: Level,
}

/// Raised whenever an answer may have become wrong.
static EPOCH: AtomicU64 = AtomicU64::new(0);
/// Start to end and advice. Non-overlapping.
type Advice = BTreeMap<usize, (usize, HugePages)>;
/// The advice for this process's memory.
static ADVICE: PerProcess<Mutex<Advice>> = PerProcess::new();
/// There may be advice that is not in [`ADVICE`], or there that is no longer true: the kernel has to be asked.
static INCOMPLETE: AtomicBool = AtomicBool::new(false);

/// Mappings a thread remembers: a VM's memory is a handful of them.
const REMEMBERED: usize = 4;

struct Recent {
    epoch: u64,
    /// The index that the next mapping takes.
    next: usize,
    mappings: [Option<Mapping>; REMEMBERED],
}

thread_local! {
    // Without a destructor: registering one allocates with the program's own malloc.
    static RECENT: RefCell<Recent> = const {
        RefCell::new(Recent {
            epoch: 0,
            next: 0,
            mappings: [const { None }; REMEMBERED],
        })
    };
}

/// This process's advice, if any was given. Allocates nothing: faults ask.
fn advice_so_far() -> Option<MutexGuard<'static, Advice>> {
    let advice = ADVICE.peek()?;
    Some(advice.lock().unwrap_or_else(|e| e.into_inner()))
}

/// This process's advice.
fn advice() -> MutexGuard<'static, Advice> {
    ADVICE.get().lock().unwrap_or_else(|e| e.into_inner())
}

/// Call when the process gets its first VM, or its first again, before it has memory: what changed meanwhile was not told.
pub fn begin() {
    let mut advice = advice();
    if !advice.is_empty() {
        advice.clear();
        INCOMPLETE.store(true, Relaxed);
    }
    EPOCH.fetch_add(1, SeqCst);
    procfs::open();
}

/// Call when the process's last VM is gone.
pub fn end() {
    procfs::close();
}

/// Call after advice about huge pages that was given while the process had no VM. One store: this may come from the program's
/// `malloc`, or from a signal handler.
pub fn advice_passed_by() {
    INCOMPLETE.store(true, Relaxed);
}

/// Call after mappings in `range` were made, removed or replaced.
pub fn changed(range: Range<usize>) {
    carve(&mut advice(), &range);
    EPOCH.fetch_add(1, SeqCst);
}

/// Call after a change of rights, which changes no advice.
pub fn protected() {
    EPOCH.fetch_add(1, SeqCst);
}

/// Call after the program has given advice about huge pages in `range`.
pub fn advised(range: Range<usize>, wish: HugePages) {
    let mut advice = advice();
    carve(&mut advice, &range);
    advice.insert(range.start, (range.end, wish));
    EPOCH.fetch_add(1, SeqCst);
}

/// Removes `range` from the map, keeping what sticks out of it.
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

/// The mapping around `address`; `None` if there is none.
pub(crate) fn find(address: usize) -> Option<Mapping> {
    let epoch = EPOCH.load(SeqCst);
    RECENT.with_borrow_mut(|recent| {
        if recent.epoch != epoch {
            recent.mappings = [const { None }; REMEMBERED];
            recent.epoch = epoch;
        }
        let mut known = recent.mappings.iter().flatten();
        if let Some(hit) = known.find(|mapping| mapping.range.contains(&address)) {
            return Some(hit.clone());
        }
        // Asked before the epoch was raised, forgotten at the next look.
        let mapping = ask(address)?;
        recent.mappings[recent.next] = Some(mapping.clone());
        recent.next = (recent.next + 1) % REMEMBERED;
        Some(mapping)
    })
}

fn ask(address: usize) -> Option<Mapping> {
    let raw = procfs::mapping_at(address)?;
    let mut mapping = Mapping {
        range: raw.range,
        readable: raw.readable,
        writable: raw.writable,
        level: match raw.page_size {
            size if size >= 1 << 30 => Level::GIGA,
            size if size >= 2 << 20 => Level::MEGA,
            _ => Level::PAGE,
        },
    };
    if mapping.level == Level::PAGE && raw.anonymous && thp_mode() != Thp::Never {
        transparent(&mut mapping, address);
    }
    Some(mapping)
}

/// Applies the system's mode for transparent huge pages and the program's advice to an anonymous mapping. The mapping is
/// narrowed to the part around `address` for which the answer is the same.
fn transparent(mapping: &mut Mapping, address: usize) {
    if INCOMPLETE.load(Relaxed) {
        // Under the lock: who comes meanwhile waits for the answer.
        let mut advice = advice();
        if INCOMPLETE.swap(false, Relaxed) {
            *advice = all_advice();
        }
    }
    let mut wish = None;
    if let Some(advice) = advice_so_far() {
        if let Some((&start, &(end, found))) = advice.range(..=address).next_back() {
            if address < end {
                wish = Some(found);
                mapping.range.end = mapping.range.end.min(end);
                mapping.range.start = mapping.range.start.max(start);
            } else {
                mapping.range.start = mapping.range.start.max(end);
            }
        }
        if let Some((&start, _)) = advice.range(address + 1..).next() {
            mapping.range.end = mapping.range.end.min(start);
        }
    }
    let eligible = match thp_mode() {
        Thp::Always => wish != Some(HugePages::Unwanted),
        Thp::Madvise => wish == Some(HugePages::Wanted),
        Thp::Never => false,
    };
    if eligible {
        mapping.level = Level::MEGA;
    }
}

/// The system's mode for transparent huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thp {
    /// Everywhere but where unwanted.
    Always,
    /// Where wanted.
    Madvise,
    /// Nowhere.
    Never,
}

/// The mode in `/sys/kernel/mm/transparent_hugepage/enabled` when it was first asked for;
/// [`Thp::Never`] where there is none.
pub fn thp_mode() -> Thp {
    static MODE: OnceLock<Thp> = OnceLock::new();
    *MODE.get_or_init(|| {
        let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        match text.unwrap_or_default() {
            text if text.contains("[always]") => Thp::Always,
            text if text.contains("[madvise]") => Thp::Madvise,
            _ => Thp::Never,
        }
    })
}

/// The advice that the kernel keeps: the flags `hg`, `nh` and those of userfaultfd in `/proc/self/smaps`.
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

    /// The address of a new mapping of `len` bytes for whose `part` huge pages are wanted. `None` where the kernel has none.
    fn advised(len: usize, part: Range<usize>) -> Option<usize> {
        // SAFETY: a new mapping, and advice for a part of it.
        unsafe {
            let (prot, flags) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let start = libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            let answer = libc::madvise(start.add(part.start), part.len(), libc::MADV_HUGEPAGE);
            (answer == 0).then_some(start as usize)
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
            return;
        }
        let Some(start) = advised(LEN, 0..LEN) else {
            return;
        };
        for _ in 0..200 {
            advice().clear();
            advice_passed_by();
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| assert_eq!(ask(start).unwrap().level, Level::MEGA));
                }
            });
        }
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
