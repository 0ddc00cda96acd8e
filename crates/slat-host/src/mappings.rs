//! What the host maps where: rights, and how large a page KVM would see there.
//!
//! The kernel is asked once per mapping (PROCMAP_QUERY where it exists, `/proc/self/smaps`
//! elsewhere), and whoever changes mappings says so ([`changed`], [`advised`]): the preload library
//! for an unmodified program, the VMM itself when it uses the crate. That call comes *inside* the
//! invalidation of the range ([`slat::Vm::invalidate`]), after the change: a fault that used the old
//! answer is stale then, and one that comes later asks again.
//!
//! A look-up on the fault path takes no lock: each thread remembers the mappings it used last, valid
//! as long as the global epoch stands.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::*};
use std::sync::{Mutex, MutexGuard, Once, OnceLock};

use slat::Level;

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
type Advice = Mutex<BTreeMap<usize, (usize, HugePages)>>;
/// Null before the first use. A forked child begins with a new one: its parent's may be locked for ever, by a thread that the
/// child does not have.
static ADVICE: AtomicPtr<Advice> = AtomicPtr::new(std::ptr::null_mut());

/// Mappings a thread remembers: a VM's memory is a handful of them.
const REMEMBERED: usize = 4;

#[derive(Default)]
struct Recent {
    epoch: u64,
    mappings: Vec<Mapping>,
}

thread_local! {
    static RECENT: RefCell<Recent> = RefCell::default();
}

/// This process's advice, if any was given. Allocates nothing: faults ask.
fn advice_so_far() -> Option<MutexGuard<'static, BTreeMap<usize, (usize, HugePages)>>> {
    // SAFETY: once published, a value is never freed.
    let advice = unsafe { ADVICE.load(Acquire).as_ref()? };
    Some(advice.lock().unwrap_or_else(|e| e.into_inner()))
}

/// This process's advice.
fn advice() -> MutexGuard<'static, BTreeMap<usize, (usize, HugePages)>> {
    static WATCHING: Once = Once::new();
    extern "C" fn in_child() {
        ADVICE.store(std::ptr::null_mut(), Release);
    }
    WATCHING.call_once(|| {
        // SAFETY: the handler is async-signal-safe: it stores to an atomic.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    loop {
        if let Some(advice) = advice_so_far() {
            return advice;
        }
        let new = Box::into_raw(Box::default());
        if (ADVICE.compare_exchange(std::ptr::null_mut(), new, AcqRel, Relaxed)).is_err() {
            // SAFETY: not published.
            drop(unsafe { Box::from_raw(new) });
        }
    }
}

/// The mappings in `range` were made, removed or given other rights.
pub fn changed(range: Range<usize>) {
    let mut advice = advice();
    carve(&mut advice, &range);
    EPOCH.fetch_add(1, SeqCst);
}

/// The rights of the mappings in `range` were changed, nothing else.
pub fn protected() {
    EPOCH.fetch_add(1, SeqCst);
}

/// The program has given advice about huge pages.
pub fn advised(range: Range<usize>, wish: HugePages) {
    let mut advice = advice();
    carve(&mut advice, &range);
    advice.insert(range.start, (range.end, wish));
    EPOCH.fetch_add(1, SeqCst);
}

/// Removes `range` from the map, keeping what sticks out of it.
fn carve(advice: &mut BTreeMap<usize, (usize, HugePages)>, range: &Range<usize>) {
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
            recent.mappings.clear();
            recent.epoch = epoch;
        }
        if let Some(hit) = recent.mappings.iter().find(|m| m.range.contains(&address)) {
            return Some(hit.clone());
        }
        let mapping = ask(address)?;
        // Asked before the epoch was raised, forgotten at the next look.
        if recent.mappings.len() == REMEMBERED {
            recent.mappings.remove(0);
        }
        // Without memory it is asked for again the next time.
        if recent.mappings.try_reserve(1).is_ok() {
            recent.mappings.push(mapping.clone());
        }
        Some(mapping)
    })
}

/// What the kernel says about one mapping.
struct Raw {
    range: Range<usize>,
    readable: bool,
    writable: bool,
    anonymous: bool,
    page_size: u64,
}

fn ask(address: usize) -> Option<Mapping> {
    let raw = match procmap::query(address) {
        Ok(raw) => raw?,
        Err(_) => from_smaps(address)?,
    };
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
    if mapping.level == Level::PAGE {
        transparent(&mut mapping, raw.anonymous, address);
    }
    Some(mapping)
}

/// Applies the system's mode for transparent huge pages and the program's advice. The mapping is
/// narrowed to the part around `address` for which the answer is the same.
fn transparent(mapping: &mut Mapping, anonymous: bool, address: usize) {
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
        _ if !anonymous => false,
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

/// PROCMAP_QUERY: since Linux 6.11 (`include/uapi/linux/fs.h`).
mod procmap {
    use super::Raw;
    use rustix::ioctl::{Updater, ioctl, opcode};
    use std::fs::File;
    use std::io;

    #[repr(C)]
    #[derive(Default)]
    struct Query {
        size: u64,
        query_flags: u64,
        query_addr: u64,
        vma_start: u64,
        vma_end: u64,
        vma_flags: u64,
        vma_page_size: u64,
        vma_offset: u64,
        inode: u64,
        dev_major: u32,
        dev_minor: u32,
        vma_name_size: u32,
        build_id_size: u32,
        vma_name_addr: u64,
        build_id_addr: u64,
    }

    const PROCMAP_QUERY: rustix::ioctl::Opcode = opcode::read_write::<Query>(b'f', 17);
    const READABLE: u64 = 1;
    const WRITABLE: u64 = 2;
    const SHARED: u64 = 8;

    /// `Ok(None)`: nothing is mapped there. `Err`: the kernel cannot tell.
    pub(super) fn query(address: usize) -> io::Result<Option<Raw>> {
        let maps = File::open("/proc/self/maps")?;
        let mut query = Query {
            size: size_of::<Query>() as u64,
            query_addr: address as u64,
            ..Query::default()
        };
        // SAFETY: the opcode takes a pointer to exactly this structure and writes nothing else, as
        // no name and no build id are asked for.
        let answer = unsafe { ioctl(&maps, Updater::<PROCMAP_QUERY, Query>::new(&mut query)) };
        match answer {
            Ok(()) => Ok(Some(Raw {
                range: query.vma_start as usize..query.vma_end as usize,
                readable: query.vma_flags & READABLE != 0,
                writable: query.vma_flags & WRITABLE != 0,
                anonymous: query.inode == 0 && query.vma_flags & SHARED == 0,
                page_size: query.vma_page_size,
            })),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// The same from `/proc/self/smaps`, as far as needed.
fn from_smaps(address: usize) -> Option<Raw> {
    let file = fs::File::open("/proc/self/smaps").ok()?;
    let mut found: Option<Raw> = None;
    for line in BufReader::new(file).lines() {
        let line = line.ok()?;
        if let Some(size) = line.strip_prefix("KernelPageSize:") {
            if let Some(mut raw) = found.take() {
                let kib: u64 = size.trim().trim_end_matches("kB").trim().parse().ok()?;
                raw.page_size = kib << 10;
                return Some(raw);
            }
        } else if let Some(raw) = smaps_header(&line) {
            if raw.range.contains(&address) {
                found = Some(raw);
            } else if raw.range.start > address {
                return None;
            }
        }
    }
    None
}

/// `start-end rwxp offset dev inode name`
fn smaps_header(line: &str) -> Option<Raw> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    let rights = words.next()?.as_bytes();
    let inode = words.nth(2)?;
    Some(Raw {
        range,
        readable: rights.first() == Some(&b'r'),
        writable: rights.get(1) == Some(&b'w'),
        anonymous: inode == "0" && rights.get(3) == Some(&b'p'),
        page_size: 4096,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_and_smaps_agree() {
        let here = Box::new(0u64);
        let address = &raw const *here as usize;
        let smaps = from_smaps(address).unwrap();
        assert!(smaps.range.contains(&address) && smaps.readable && smaps.writable);
        if let Ok(Some(query)) = procmap::query(address) {
            assert_eq!(query.range, smaps.range);
            assert_eq!(query.page_size, smaps.page_size);
            assert_eq!(query.anonymous, smaps.anonymous);
        }
        assert!(from_smaps(0x1000).is_none());
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
