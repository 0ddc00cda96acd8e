//! Rewriting of call sites. A dispatched call takes a signal, which costs several times as much as an exit of
//! `KVM_RUN`. A program makes its `KVM_RUN` calls from one or two sites. After some calls from a site, slat replaces
//! that site by a jump to slat.
//!
//! The `syscall` has two bytes, and so has a jump by at most 128 bytes. The short jump leads to padding between two
//! functions, if there are five bytes of padding; from there a longer jump leads to a stub in memory nearby. So no
//! instruction moves: a thread that returns from the kernel, or is about to make the call, finds the code that it
//! expects.
//!
//! A site is not rewritten in these cases: no such padding is near; the code is not private, readable and executable;
//! or, on some processors (below), the two bytes lie in two aligned quadwords. No site is rewritten with
//! `SLAT_REWRITE=0`, or in a process that is traced, because a debugger has breakpoints in code.
//!
//! # How text changes
//! No memory is ever writable and executable, nor does writable memory become executable. slat writes the changed copy
//! of one or two pages of text to a memfd by pwrite(2). Then slat maps the copy in place of these pages, readable and
//! executable, by one mmap(2) with `MAP_FIXED`. The stub is in the same memfd. So rewriting needs neither SELinux's
//! `execmem` nor `execmod`, and works under `PR_SET_MDWE` and under seccomp filters that forbid mappings which are
//! writable and executable. Rewriting needs memfd_create(2), and SELinux's `execute` for files in tmpfs. Where the
//! kernel refuses one of these, the site is not rewritten.
//!
//! Other threads may execute these pages meanwhile. The kernel holds the process's mmap lock during the mmap(2). The
//! kernel removes the old translations, makes each processor that may have cached them invalidate them, and then allows
//! new translations. A thread that fetches an instruction in between takes a page fault, and waits for the lock. So a
//! processor executes the old instruction or the new one, and never reaches the longer jump before that jump exists. It
//! remains to show that no processor joins the first byte of the old instruction to the second byte of the new one:
//!
//! * Intel SDM, volume 3A, "Handling Self- and Cross-Modifying Code" (section 10.1.3; in older editions 9.1.3 or 8.1.3)
//!   has one algorithm for changing code that another processor may execute: the other processor executes a serializing
//!   instruction before the new code. The SDM does not promise that a plain store of two bytes is seen as a whole. slat
//!   follows the algorithm, because each other processor is interrupted for the invalidation ("Propagation of
//!   Paging-Structure Changes to Multiple Processors", section 5.10.5, formerly 4.10.5), and INVLPG, MOV to CR3 and
//!   IRET are serializing ("Serializing Instructions", section 10.3, formerly 9.3 or 8.3).
//! * Processors of AMD with INVLPGB invalidate without an interrupt (Linux 6.15). AMD APM, volume 2, section 7.6.1,
//!   "Cross-Modifying Code", allows asynchronous modification by a change within a naturally aligned quadword. So on
//!   these processors slat does not rewrite sites that lie in two quadwords.
//!
//! slat also does not rewrite text that differs from its file: the kernel's own breakpoints (uprobes) work only in a
//! mapping of the file to which they belong. A mapping of the memfd has the name `/memfd:slat-text`; tools that find
//! symbols by the names of mappings find no symbols there. Before Linux 6.12, an mmap that exhausts the kernel's memory
//! may leave the pages unmapped.

use super::direct::{self, Site};
use super::scan;
use crate::guarded::guarded;
use crate::loaded;
use crate::real::{Opened, kernel};
use slat_kvm::cpuid::host_leaf;
use std::fs::File;
use std::mem::offset_of;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// The number of dispatched calls after which a site is rewritten.
const CALLS: u32 = 64;
/// The number of sites that are counted.
const SITES: usize = 32;
const PAGE: usize = 4096;

/// The number of times that a site was dispatched. `back` is the address after the site, where the program continues.
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

/// Whether a thread is rewriting a site. Only that thread replaces pages, and chooses padding.
static BUSY: AtomicBool = AtomicBool::new(false);

/// Whether the user allows slat to rewrite sites.
fn is_allowed() -> bool {
    std::env::var_os("SLAT_REWRITE").is_none_or(|value| value != "0")
}

/// Counts a dispatched `KVM_RUN` that ends before `back`, and rewrites its site when it is due.
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
    // Only one thread makes the count reach this number.
    if let Some(count) = of
        && count.calls.load(Ordering::Relaxed) < CALLS
        && count.calls.fetch_add(1, Ordering::Relaxed) + 1 == CALLS
    {
        guarded(|| {
            if BUSY.swap(true, Ordering::Acquire) {
                // Another thread is rewriting a site. This site is tried again after `CALLS` more calls.
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

/// Whether the two bytes at `site` lie within an aligned quadword. Then they may change while another processor, which
/// is not interrupted, executes them: see the module's documentation.
fn is_within_quadword(site: usize) -> bool {
    const QUADWORD: usize = 8;
    site % QUADWORD != QUADWORD - 1
}

/// Whether the processor has INVLPGB, by which Linux invalidates translations of other processors without an interrupt
/// (AMD APM, volume 3, appendix E.4.7).
fn has_invlpgb() -> bool {
    const LEAF: u32 = 0x8000_0008;
    const INVLPGB: u32 = 1 << 3;
    host_leaf(LEAF, 0).ebx & INVLPGB != 0
}

/// Rewrites the `syscall` before `back`. `None`: the site is not rewritten.
fn rewrite(back: usize) -> Option<()> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status
        .lines()
        .find(|line| line.split_whitespace().eq(["TracerPid:", "0"]))?;
    let text = Text::around(back)?;
    let at = |address: usize| address - text.range.start;
    let site = back - scan::SYSCALL.len();
    // A mapping begins at a page boundary, so offsets in the text have the same alignment as addresses.
    let padding = text.range.start + scan::padding(text.code(), at(back), LONG.len())?;
    if !text.code()[..at(back)].ends_with(&scan::SYSCALL) {
        return None;
    }
    if has_invlpgb() && !is_within_quadword(site) {
        return None;
    }
    let short = i8::try_from(padding as isize - back as isize).ok()?;
    let pages =
        site.min(padding) & !(PAGE - 1)..(site.max(padding) + LONG.len()).next_multiple_of(PAGE);
    if !text.is_original(&pages) {
        return None;
    }
    direct::prepare();
    let memory = Opened::memfd(c"slat-text", Opened::NOT_EXECUTED)?;
    memory.write_at(&Stub::new(back).bytes(), 0)?;
    let stub = map_near(&text.range, &memory)?;
    let distance = i32::try_from(stub as isize - (padding + LONG.len()) as isize).ok()?;
    let mut changed = text.code()[at(pages.start)..at(pages.end)].to_vec();
    let mut put = |address: usize, bytes: &[u8]| {
        changed[address - pages.start..][..bytes.len()].copy_from_slice(bytes);
    };
    let mut long = LONG;
    long[1..].copy_from_slice(&distance.to_le_bytes());
    put(padding, &long);
    put(site, &[0xeb, short as u8]);
    memory.write_at(&changed, PAGE)?;
    // SAFETY: a copy of these pages of text, with only the changes that the module's documentation describes.
    unsafe { map(&memory, PAGE, &pages, libc::MAP_FIXED)? };
    Some(())
}

/// `jmp`, with its distance.
const LONG: [u8; 5] = [0xe9, 0, 0, 0, 0];

/// Maps `memory` at `offset`, readable and executable. Returns its address.
///
/// # Safety
/// - With `MAP_FIXED`, the bytes may replace those at `place`.
unsafe fn map(memory: &Opened, offset: usize, place: &Range<usize>, flags: i32) -> Option<usize> {
    let access = libc::PROT_READ | libc::PROT_EXEC;
    let flags = libc::MAP_PRIVATE | flags;
    // SAFETY: the caller keeps this function's contract.
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

/// Maps the first page of `memory`, readable and executable, within reach of a jump from `text`. Returns its address.
fn map_near(text: &Range<usize>, memory: &Opened) -> Option<usize> {
    /// The distance between the addresses that are tried, and their number.
    const STEP: usize = 1 << 20;
    const TRIES: usize = 512;
    let below = (1..TRIES).map(|n| text.start.wrapping_sub(n * STEP));
    let above = (1..TRIES).map(|n| text.end + n * STEP);
    let mut places = below.zip(above).flat_map(|(below, above)| [below, above]);
    places.find_map(|place| {
        let place = place & !(PAGE - 1);
        let flags = libc::MAP_FIXED_NOREPLACE;
        // SAFETY: the memory is not in use.
        let page = unsafe { map(memory, 0, &(place..place + PAGE), flags) }?;
        // Kernels before 4.17 treat the address as a hint.
        (page == place).then_some(page)
    })
}

/// Private code that is readable and executable, and not writable. Its mappings have no gap between them.
struct Text {
    range: Range<usize>,
    /// The parts that map files.
    files: Vec<Range<usize>>,
}

impl Text {
    /// Returns the code around `address`.
    fn around(address: usize) -> Option<Self> {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let mut text = Text {
            range: 0..0,
            files: Vec::new(),
        };
        for line in maps.lines() {
            // The words of a line are addresses, access, offset, device, inode and name.
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

    /// Returns the code.
    fn code(&self) -> &[u8] {
        // SAFETY: mapped and readable; a program that changes it while it makes `KVM_RUN` calls from it is not supported.
        unsafe { std::slice::from_raw_parts(self.range.start as *const u8, self.range.len()) }
    }

    /// Whether the file-backed pages among `pages` still have the file's memory, not a changed private copy.
    fn is_original(&self, pages: &Range<usize>) -> bool {
        /// Bits of a pagemap entry (`Documentation/admin-guide/mm/pagemap.rst`): the page is present; it is swapped
        /// out; it is the file's or shared.
        const PRESENT: u64 = 1 << 63;
        const SWAPPED: u64 = 1 << 62;
        const FILES: u64 = 1 << 61;
        let Ok(entries) = File::open("/proc/self/pagemap") else {
            return false;
        };
        let is_files = |page: usize| {
            let mut entry = [0; size_of::<u64>()];
            let at = page / PAGE * entry.len();
            let read = entries.read_exact_at(&mut entry, at as u64);
            let entry = u64::from_le_bytes(entry);
            read.is_ok() && (entry & (PRESENT | SWAPPED) == 0 || entry & FILES != 0)
        };
        let mut of_files = pages
            .clone()
            .step_by(PAGE)
            .filter(|page| self.files.iter().any(|file| file.contains(page)));
        of_files.all(is_files)
    }
}

/// The code to which a rewritten site jumps. It loads the address of `site`, and jumps to `entry`. It works at any
/// address.
#[repr(C)]
struct Stub {
    enter: [u8; 16],
    site: Site,
    entry: usize,
}

impl Stub {
    /// Makes the stub of the site before `back`.
    fn new(back: usize) -> Self {
        let distance = |from: usize, to: usize| (to as i32 - from as i32).to_le_bytes();
        let site = offset_of!(Stub, site);
        let mut enter = [0xcc; 16];
        // lea rcx, [rip + site]; jmp [rip + entry]
        enter[..3].copy_from_slice(&[0x48, 0x8d, 0x0d]);
        enter[3..7].copy_from_slice(&distance(7, site + offset_of!(Site, back)));
        enter[7..9].copy_from_slice(&[0xff, 0x25]);
        enter[9..13].copy_from_slice(&distance(13, offset_of!(Stub, entry)));
        // syscall; jmp [rip + back]
        let mut call = [0x0f, 0x05, 0xff, 0x25, 0, 0, 0, 0];
        call[4..].copy_from_slice(&distance(
            offset_of!(Site, call) + 8,
            offset_of!(Site, back),
        ));
        Stub {
            enter,
            site: Site { back, call },
            entry: direct::entry as *const () as usize,
        }
    }

    /// Returns the stub's memory.
    fn bytes(&self) -> [u8; size_of::<Self>()] {
        // SAFETY: integers and arrays of bytes, without padding between them.
        unsafe { std::mem::transmute_copy(self) }
    }
}
