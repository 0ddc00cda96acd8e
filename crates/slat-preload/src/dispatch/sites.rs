//! Rewriting of call sites. A dispatched call takes a signal, which costs several times as much as an exit of
//! `KVM_RUN`. A program makes `KVM_RUN` calls from one or two sites; after some calls slat replaces such a
//! site by a jump to slat.
//!
//! The `syscall` has two bytes, as has a jump by at most 128 bytes. The short jump leads to padding between two
//! functions, if there are five bytes of it; from there a longer jump leads to a stub in memory nearby. So no
//! instruction moves: a thread that returns from the kernel, or is about to make the call, finds what it expects. The
//! two bytes are replaced at once, by one store that does not cross a cache line: other processors see the old
//! instruction or the new one (AMD APM, volume 2, section 7.6.1).
//!
//! A site is not rewritten if it has no such padding, if its code is not private, readable and executable, or if the
//! process is traced (a debugger has breakpoints in code). With `SLAT_REWRITE=0` no site is.

use super::direct::{self, Site};
use super::scan;
use crate::guarded::guarded;
use crate::loaded;
use crate::real::{kernel, map_memory};
use std::arch::asm;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// The number of dispatched calls of a site after which it is rewritten.
const CALLS: u32 = 64;
/// The number of sites that are counted.
const SITES: usize = 32;
const PAGE: usize = 4096;

/// How often a site was dispatched. `back` is the address after it, where the program continues.
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

/// Whether a thread is rewriting a site. Only that thread changes the rights of pages, and chooses padding.
static BUSY: AtomicBool = AtomicBool::new(false);

/// Whether the user lets slat rewrite.
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

/// Rewrites the `syscall` before `back`. `None`: the site is not rewritten.
fn rewrite(back: usize) -> Option<()> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status
        .lines()
        .find(|line| line.split_whitespace().eq(["TracerPid:", "0"]))?;
    let text = text_around(back)?;
    // SAFETY: a private mapping, readable and executable; no other code changes it.
    let code = unsafe { std::slice::from_raw_parts(text.start as *const u8, text.len()) };
    let site = back - scan::SYSCALL.len();
    // A mapping begins with a page, so that offsets have the alignment of addresses.
    let padding = text.start + scan::padding(code, back - text.start, LONG.len())?;
    if !code[..back - text.start].ends_with(&scan::SYSCALL) || site % 64 == 63 {
        return None;
    }
    let short = i8::try_from(padding as isize - back as isize).ok()?;
    let stub = Stub::near(&text, back)?;
    let distance = i32::try_from(stub as isize - (padding + LONG.len()) as isize).ok()?;
    let pages =
        site.min(padding) & !(PAGE - 1)..(site.max(padding) + LONG.len()).next_multiple_of(PAGE);
    direct::prepare();
    protect(&pages, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC)?;
    let [low, high] = [0xeb, short as u8];
    // SAFETY: the pages are writable, and only this thread writes to them. The padding is not executed before the jump
    // to it is stored, which one store does.
    unsafe {
        let mut long = LONG;
        long[1..].copy_from_slice(&distance.to_le_bytes());
        (padding as *mut [u8; LONG.len()]).write(long);
        asm!(
            "mov word ptr [{site}], {jump:x}",
            site = in(reg) site,
            jump = in(reg) u16::from_le_bytes([low, high]),
            options(nostack, preserves_flags),
        );
    }
    protect(&pages, libc::PROT_READ | libc::PROT_EXEC)
}

/// `jmp`, with its distance.
const LONG: [u8; 5] = [0xe9, 0, 0, 0, 0];

/// Returns the addresses of the private mapping around `address`, if it is readable, executable and not writable.
fn text_around(address: usize) -> Option<Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let hexadecimal = |text| usize::from_str_radix(text, 16).ok();
        let range = hexadecimal(start)?..hexadecimal(end)?;
        (range.contains(&address) && rest.starts_with("r-xp")).then_some(range)
    })
}

fn protect(pages: &Range<usize>, access: i32) -> Option<()> {
    // SAFETY: pages of the program's text, which keep the rights that the program needs.
    unsafe { kernel!(libc::SYS_mprotect, pages.start, pages.len(), access) }.ok()?;
    Some(())
}

/// What a rewritten site jumps to: loads the address of `site`, and jumps to `entry`.
#[repr(C)]
struct Stub {
    enter: [u8; 16],
    site: Site,
    entry: usize,
}

impl Stub {
    /// Makes a stub in a page of its own, within reach of a jump from `text`. Returns its address.
    fn near(text: &Range<usize>, back: usize) -> Option<usize> {
        /// The distance between the addresses that are tried, and their number.
        const STEP: usize = 1 << 20;
        const TRIES: usize = 512;
        let below = (1..TRIES).map(|n| text.start.wrapping_sub(n * STEP));
        let above = (1..TRIES).map(|n| text.end + n * STEP);
        let places = below.zip(above).flat_map(|(below, above)| [below, above]);
        let flags = libc::MAP_FIXED_NOREPLACE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let page = places.map(|place| place & !(PAGE - 1)).find_map(|place| {
            // SAFETY: memory that is not in use.
            let page = unsafe { map_memory(place, PAGE, access, flags) }.ok()?;
            // Kernels before 4.17 treat the address as a hint.
            (page == place).then_some(page)
        })?;
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
        let stub = Stub {
            enter,
            site: Site { back, call },
            entry: direct::entry as *const () as usize,
        };
        // SAFETY: the new page, which is large enough.
        unsafe { (page as *mut Stub).write(stub) };
        protect(&(page..page + PAGE), libc::PROT_READ | libc::PROT_EXEC)?;
        Some(page)
    }
}
