//! Rewrites call sites: replaces the instruction that enters the kernel by a jump to slat. [`Plan`] says which bytes
//! change.
//!
//! If all sites in the program's code can be found and rewritten, slat rewrites them before the program begins
//! ([`rewrite_all`]). Otherwise the kernel dispatches the program's calls. A dispatched call takes a signal, which
//! costs several times as much as an exit of `KVM_RUN`. A program makes its `KVM_RUN` calls from one or two sites;
//! after some calls from a site, slat rewrites that site ([`count`]).
//!
//! slat rewrites a site only if its code is private, readable and executable. After the program has begun, there are
//! three more exceptions. With `SLAT_REWRITE=0`, slat rewrites nothing. In a process that is traced, slat rewrites
//! nothing, because a debugger sets breakpoints in code. Text that differs from its file stays unchanged, because the
//! kernel's own breakpoints (uprobes) work only in a mapping of the file to which they belong.
//!
//! # How text changes
//! No memory is ever writable and executable, nor does writable memory become executable. slat writes the changed copy
//! of some pages of text to a memfd by pwrite(2). Then slat maps the copy in place of these pages, readable and
//! executable, by one mmap(2) with `MAP_FIXED`. The stubs are in the same memfd. So rewriting needs neither SELinux's
//! `execmem` nor `execmod`, and works under `PR_SET_MDWE` and under seccomp filters that forbid mappings which are
//! writable and executable. Rewriting needs memfd_create(2), and SELinux's `execute` for files in tmpfs. Where the
//! kernel refuses one of these, the site is not rewritten. The kernel makes instruction caches coherent with the memory
//! that it maps as executable.
//!
//! Other threads may execute these pages during the mmap(2). The kernel holds the process's mmap lock during the
//! mmap(2). The kernel removes the old translations, makes each processor that may have cached them invalidate them,
//! and then allows new translations. A thread that fetches an instruction in between takes a page fault, and waits for
//! the lock. So a processor executes the old instruction or the new one. The architecture must ensure that a processor
//! never executes a mixture ([`arch::sites`](crate::arch::sites)).
//!
//! A mapping of the memfd has the name `/memfd:slat-text`; tools that find symbols by the names of mappings find no
//! symbols there. Before Linux 6.12, an mmap that exhausts the kernel's memory may leave the pages unmapped.

use super::direct;
use crate::arch::site_entry;
use crate::arch::sites::{Plan, REACH};
use crate::guarded::guarded;
use crate::loaded;
use crate::real::{Opened, kernel};
use slat_process::page_size;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// The number of dispatched calls from a call site after which the site is rewritten.
const CALLS: u32 = 64;
/// The maximum number of call sites whose calls are counted.
const SITES: usize = 32;

/// A call site, and the number of its `KVM_RUN` calls. `back` is the address after the site, where the program
/// continues.
struct Count {
    back: AtomicUsize,
    calls: AtomicU32,
}

static COUNTS: [Count; SITES] = [const {
    Count {
        back: AtomicUsize::new(0),
        calls: AtomicU32::new(0),
    }
}; SITES];

/// Whether a thread is rewriting a call site. Only that thread may replace pages and choose padding.
static BUSY: AtomicBool = AtomicBool::new(false);

/// Whether the user allows slat to rewrite call sites (`SLAT_REWRITE`).
fn is_allowed() -> bool {
    std::env::var_os("SLAT_REWRITE").is_none_or(|value| value != "0")
}

/// Counts a dispatched `KVM_RUN` whose instruction ends at `back`. Rewrites the call site after [`CALLS`] such calls.
pub fn count(back: usize) {
    if !loaded::is_loaded() {
        return;
    }
    let of = COUNTS.iter().find(|count| {
        let claimed = count
            .back
            .compare_exchange(0, back, Ordering::Relaxed, Ordering::Relaxed);
        claimed.is_ok() || claimed == Err(back)
    });
    // Only one thread raises the count to exactly this number.
    if let Some(count) = of
        && count.calls.load(Ordering::Relaxed) < CALLS
        && count.calls.fetch_add(1, Ordering::Relaxed) + 1 == CALLS
    {
        guarded(|| {
            if BUSY.swap(true, Ordering::Acquire) {
                // Another thread is rewriting a call site. This site is tried again after `CALLS` more calls.
                count.calls.store(0, Ordering::Relaxed);
                return Ok(0);
            }
            if is_allowed() {
                let _ = rewrite(back);
            }
            BUSY.store(false, Ordering::Release);
            Ok(0)
        });
    }
}

/// Rewrites the call site that ends at `back`. `None`: the site cannot be rewritten.
fn rewrite(back: usize) -> Option<()> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status
        .lines()
        .find(|line| line.split_whitespace().eq(["TracerPid:", "0"]))?;
    let text = Text::around(back)?;
    let plan = Plan::of_site(text.code(), text.range.start, back)?;
    if !text.is_original(&pages_of(&plan.changes())) {
        return None;
    }
    replace(&text.range, &[plan])
}

/// Rewrites all call sites of `texts`, which are executable and readable. Call before the program begins. Returns
/// `false` if `texts` is unknown, or if a site cannot be found or rewritten.
pub fn rewrite_all(texts: Option<&[Range<usize>]>) -> bool {
    let rewrite = |text: &Range<usize>| {
        // SAFETY: the text is mapped and readable, and no code changes it before the program begins.
        let code = unsafe { std::slice::from_raw_parts(text.start as *const u8, text.len()) };
        match Plan::of_all(code, text.start)? {
            plans if plans.is_empty() => Some(()),
            plans => replace(text, &plans),
        }
    };
    texts.is_some_and(|texts| !texts.is_empty() && texts.iter().all(|text| rewrite(text).is_some()))
}

/// Returns the pages that contain `addresses`.
fn pages_of(addresses: &Range<usize>) -> Range<usize> {
    addresses.start & !(page_size() - 1)..addresses.end.next_multiple_of(page_size())
}

/// Replaces pages of `text` by changed copies. `plans` says which bytes change, in ascending order of addresses.
fn replace(text: &Range<usize>, plans: &[Plan]) -> Option<()> {
    site_entry::prepare();
    let memory = Opened::memfd(c"slat-text", Opened::NOT_EXECUTED)?;
    let entry = direct::entry as *const () as usize;
    let mut offset = (plans.len() * Plan::STUB).next_multiple_of(page_size());
    // The memory is mapped before it is written, because the contents of a stub may depend on the stub's address.
    let mut stub = map_near(text, &memory, offset)?;
    for (index, plan) in plans.iter().enumerate() {
        let at = index * Plan::STUB;
        memory.write_at(&plan.stub(entry, stub + at)?, at)?;
    }
    let are_near =
        |one: &Plan, next: &Plan| pages_of(&next.changes()).start <= pages_of(&one.changes()).end;
    for run in plans.chunk_by(are_near) {
        let all = run[0].changes().start..run.last()?.changes().end;
        let pages = pages_of(&all);
        // SAFETY: pages of the text, which is mapped and readable. A program that changes code while it makes calls
        // from there is not supported.
        let code = unsafe { std::slice::from_raw_parts(pages.start as *const u8, pages.len()) };
        let mut changed = code.to_vec();
        for plan in run {
            plan.change(&mut changed, pages.start, stub)?;
            stub += Plan::STUB;
        }
        memory.write_at(&changed, offset)?;
        // SAFETY: the new pages are a copy of these pages of text, with only the changes that the module's
        // documentation describes.
        unsafe { map(&memory, offset, &pages, libc::MAP_FIXED)? };
        offset += pages.len();
    }
    Some(())
}

/// Maps `memory`, from `offset` on, readable and executable. Returns the mapping's address.
///
/// # Safety
/// - With `MAP_FIXED`, the mapping may replace the memory at `place`.
unsafe fn map(memory: &Opened, offset: usize, place: &Range<usize>, flags: i32) -> Option<usize> {
    let access = libc::PROT_READ | libc::PROT_EXEC;
    let flags = libc::MAP_PRIVATE | flags;
    // SAFETY: with `MAP_FIXED`, the bytes may replace those at `place`, as this function's contract requires.
    let mapped = unsafe {
        kernel!(
            libc::SYS_mmap,
            place.start,
            place.len(),
            access,
            flags,
            memory.fd(),
            offset
        )
    };
    mapped.ok().map(|mapped| mapped as usize)
}

/// Maps the first `len` bytes of `memory`, readable and executable, within reach of a jump from `text`. Returns the
/// mapping's address.
fn map_near(text: &Range<usize>, memory: &Opened, len: usize) -> Option<usize> {
    /// The distance between two addresses at which the mapping is tried.
    const STEP: usize = 1 << 20;
    const TRIES: usize = REACH / STEP;
    let below = (1..TRIES).map(|n| text.start.wrapping_sub(n * STEP + len));
    let above = (1..TRIES).map(|n| text.end + n * STEP);
    let mut places = below.zip(above).flat_map(|(below, above)| [below, above]);
    places.find_map(|place| {
        let place = place & !(page_size() - 1);
        let flags = libc::MAP_FIXED_NOREPLACE;
        // SAFETY: with `MAP_FIXED_NOREPLACE`, the mapping replaces no memory.
        let start = unsafe { map(memory, 0, &(place..place + len), flags) }?;
        // Kernels before 4.17 treat the address only as a hint, so the mapping may be at another address.
        (start == place).then_some(start)
    })
}

/// A range of private code that is readable, executable, and not writable. Its mappings have no gaps between them.
struct Text {
    range: Range<usize>,
    /// The parts of the range that map files.
    files: Vec<Range<usize>>,
}

impl Text {
    /// Returns the range of code that contains `address`.
    fn around(address: usize) -> Option<Self> {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let mut text = Text {
            range: 0..0,
            files: Vec::new(),
        };
        for line in maps.lines() {
            // The words of a line in /proc/self/maps are addresses, access, offset, device, inode and name.
            let mut words = line.split_whitespace();
            let (start, end) = words.next()?.split_once('-')?;
            let hexadecimal = |text| usize::from_str_radix(text, 16).ok();
            let range = hexadecimal(start)?..hexadecimal(end)?;
            if words.next() != Some("r-xp") {
                continue;
            }
            if range.start != text.range.end {
                if text.range.contains(&address) {
                    break;
                }
                text = Text {
                    range: range.clone(),
                    files: Vec::new(),
                };
            }
            text.range.end = range.end;
            if words.nth(2) != Some("0") {
                text.files.push(range);
            }
        }
        text.range.contains(&address).then_some(text)
    }

    /// Returns the bytes of the text.
    fn code(&self) -> &[u8] {
        // SAFETY: the text is mapped and readable. A program that changes its text while it makes `KVM_RUN` calls from
        // there is not supported.
        unsafe { std::slice::from_raw_parts(self.range.start as *const u8, self.range.len()) }
    }

    /// Whether the file-backed pages among `pages` still are the file's own pages, not changed private copies.
    fn is_original(&self, pages: &Range<usize>) -> bool {
        /// Bits of a pagemap entry (`Documentation/admin-guide/mm/pagemap.rst`). In this order: the page is present;
        /// the page is swapped out; the page belongs to the file or to shared memory.
        const PRESENT: u64 = 1 << 63;
        const SWAPPED: u64 = 1 << 62;
        const FILES: u64 = 1 << 61;
        let Ok(entries) = File::open("/proc/self/pagemap") else {
            return false;
        };
        let is_files = |page: usize| {
            let mut entry = [0; size_of::<u64>()];
            let at = page / page_size() * entry.len();
            let read = entries.read_exact_at(&mut entry, at as u64);
            let entry = u64::from_le_bytes(entry);
            read.is_ok() && (entry & (PRESENT | SWAPPED) == 0 || entry & FILES != 0)
        };
        let mut of_files = pages
            .clone()
            .step_by(page_size())
            .filter(|page| self.files.iter().any(|file| file.contains(page)));
        of_files.all(is_files)
    }
}
