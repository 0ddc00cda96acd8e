//! Changes of registered memory: what the requests of a userfaultfd and the client's own changes of mappings do.
//!
//! A caller that takes pages away from the guest (all functions here except [`fill`] and [`wake`]) calls these
//! functions inside an invalidation of the range in each VM.

use super::{
    COUNT, END, EVENT_REMOVE, Handler, Region, TABLE, announce, each_region, find, lock, rights,
    sleep, state,
};
use crate::process::Birth;
use crate::{mappings, procfs};
use slat_process::calls::{self, Call};
use slat_process::page_size;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering::*};

/// What a page gets from the handler.
#[derive(Clone, Copy, Debug)]
pub enum Content {
    /// The bytes at this address of this process.
    At(usize),
    /// Zeroes.
    Zeroes,
}

/// Changes the protection of pages whose state is `state`.
fn protect(pages: Range<usize>, state: u8) -> Result<(), i32> {
    let allowed = match state {
        _ if state & state::ABSENT != 0 => 0,
        _ if state & state::PROTECTED != 0 => state & !state::WRITE,
        _ => state,
    };
    let mut rights = libc::PROT_NONE;
    if allowed & state::READ != 0 {
        rights |= libc::PROT_READ;
    }
    if allowed & state::WRITE != 0 {
        rights |= libc::PROT_WRITE;
    }
    let arguments = [pages.start, pages.len(), rights as usize, 0, 0, 0];
    // SAFETY: the client has registered the pages, so it expects that accesses to them wait. The state allows no access
    // that the client itself would not allow.
    unsafe { calls::make(Call::Protect, arguments) }.map(drop)
}

/// Gives the kernel advice about memory that is registered.
fn advise(pages: Range<usize>, advice: i32) {
    let arguments = [pages.start, pages.len(), advice as usize, 0, 0, 0];
    // SAFETY: the callers drop only pages that have no content for the client.
    let _ = unsafe { calls::make(Call::Advise, arguments) };
}

/// Calls `visit` for each run of registered pages of `range` whose states are equal, with the state and the states'
/// bytes.
fn each_run(
    range: &Range<usize>,
    mut visit: impl FnMut(&'static Region, Range<usize>, u8, &'static [AtomicU8]),
) {
    let size = page_size();
    each_region(|_, region| {
        let start = range.start.max(region.range.start);
        let end = range.end.min(region.range.end);
        if start >= end {
            return true;
        }
        let base = region.range.start;
        let pages = &region.pages[(start - base) / size..(end - base).div_ceil(size)];
        let first = base + (start - base) / size * size;
        let mut at = 0;
        while at < pages.len() {
            let state = pages[at].load(SeqCst) & !state::ASKED;
            let alike = |page: &AtomicU8| page.load(SeqCst) & !state::ASKED == state;
            let count = 1 + pages[at + 1..]
                .iter()
                .take_while(|page| alike(page))
                .count();
            if state != 0 {
                let run = first + at * size..first + (at + count) * size;
                visit(region, run, state, &pages[at..at + count]);
            }
            at += count;
        }
        true
    });
}

/// Maps memory for the states of `count` pages.
fn states(count: usize) -> Result<&'static [AtomicU8], i32> {
    let bytes = count.next_multiple_of(page_size());
    let rights = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let arguments = [0, bytes, rights, flags as usize, usize::MAX, 0];
    // SAFETY: the call makes a new mapping, which is never unmapped.
    let start = unsafe { calls::make(Call::MapTables, arguments) }?;
    // SAFETY: the memory is zero, which is a valid value of the atomics, and is only used through this slice.
    Ok(unsafe { std::slice::from_raw_parts(start as *const AtomicU8, count) })
}

/// Registers `range`, which consists of whole pages, with `modes`: [`MODE_MISSING`](super::MODE_MISSING),
/// [`MODE_WP`](super::MODE_WP) or both. With the first, the pages without content become absent.
///
/// # Errors
/// `EINVAL` if nothing is mapped, or not only private anonymous memory with pages of the usual size; if the range is
/// registered already, with other modes or in part. `EBUSY` if another handler has registered a part. `ENOMEM`. Then
/// nothing has changed.
pub fn register(handler: &'static Handler, range: Range<usize>, modes: u64) -> Result<(), i32> {
    let _turn = lock();
    each_region(|_, region| {
        if !region.birth.is_here() {
            leave_to_child(region);
        }
        true
    });
    let modes = modes as u8;
    let mut known = 0;
    let mut refused = None;
    each_run(&range, |region, run, state, _| {
        known += run.len();
        if !std::ptr::eq(region.handler, handler) {
            refused = Some(libc::EBUSY);
        } else if state & (state::MISSING | state::WP) != modes {
            refused = refused.or(Some(libc::EINVAL));
        }
    });
    match refused {
        Some(errno) => return Err(errno),
        None if known == range.len() => return Ok(()),
        None if known != 0 => return Err(libc::EINVAL),
        None => {}
    }
    let mut parts = Vec::new();
    let mut at = range.start;
    while at < range.end {
        match procfs::mapping_at(at).map_err(|_| libc::EINVAL)? {
            None => at += page_size(),
            Some(raw) if raw.anonymous && raw.page_size == page_size() as u64 => {
                let end = raw.range.end.min(range.end);
                parts.push((at..end, rights(raw.readable, raw.writable)));
                at = end;
            }
            Some(_) => return Err(libc::EINVAL),
        }
    }
    if parts.is_empty() {
        return Err(libc::EINVAL);
    }
    let whole = range;
    let result = parts
        .into_iter()
        .try_for_each(|(range, rights)| begin(handler, range, modes | rights));
    if result.is_err() {
        let _complete = end(&whole);
    }
    mappings::changed(whole);
    announce();
    result
}

/// Begins the registration of a mapping, whose pages get the state `state`.
fn begin(handler: &'static Handler, range: Range<usize>, state: u8) -> Result<(), i32> {
    let pages = states(range.len() / page_size())?;
    // Until it is known which pages have content, accesses wait and nobody is asked.
    let waits = match state & state::MISSING {
        0 => 0,
        _ => state::ABSENT | state::ASKED,
    };
    for page in pages {
        page.store(state | waits, Relaxed);
    }
    let entry = TABLE
        .iter()
        .position(|entry| entry.load(Acquire).is_null())
        .ok_or(libc::ENOMEM)?;
    let region = Box::leak(Box::new(Region {
        range: range.clone(),
        birth: Birth::here(),
        handler,
        pages,
    }));
    TABLE[entry].store(region, SeqCst);
    END.fetch_max(entry + 1, SeqCst);
    COUNT.fetch_add(1, SeqCst);
    if waits == 0 {
        return Ok(());
    }
    // Otherwise the first byte that is written would give all pages around it memory.
    advise(range.clone(), libc::MADV_NOHUGEPAGE);
    protect(range.clone(), state | waits)?;
    let mut first = 0;
    procfs::each_content(&range, &mut |count, has_content| {
        let run = first..first + count;
        let at = |page: usize| range.start + page * page_size();
        let new = match has_content {
            true => {
                protect(at(run.start)..at(run.end), state)?;
                state
            }
            false => state | state::ABSENT,
        };
        for page in &pages[run] {
            page.store(new, SeqCst);
        }
        first += count;
        Ok(())
    })
}

/// Ends the registration of all of `range`: its pages get the client's rights back. Returns whether any page was
/// registered. If the kernel refuses to join the mappings, reports no error: there are fewer mappings than before.
fn end(range: &Range<usize>) -> bool {
    let mut any = false;
    each_run(range, |_, run, state, pages| {
        any = true;
        let free = state & (state::READ | state::WRITE);
        if state & (state::ABSENT | state::PROTECTED) != 0 {
            let _ = protect(run, free);
        }
        for page in pages {
            page.store(0, SeqCst);
        }
    });
    retire(range);
    any
}

/// Removes the regions in `range` that have no registered page any more.
fn retire(range: &Range<usize>) {
    each_region(|entry, region| {
        let touches = region.range.start < range.end && range.start < region.range.end;
        if touches && region.pages.iter().all(|page| page.load(SeqCst) == 0) {
            entry.store(std::ptr::null_mut(), SeqCst);
            COUNT.fetch_sub(1, SeqCst);
            let start = region.pages.as_ptr() as usize;
            let bytes = region.pages.len().next_multiple_of(page_size());
            // The states are zero, and stay so.
            advise(start..start + bytes, libc::MADV_DONTNEED);
        }
        true
    });
}

/// Ends the registration of `range`. Threads that wait for its pages go on.
pub fn unregister(range: &Range<usize>) {
    let _turn = lock();
    if end(range) {
        mappings::changed(range.clone());
    }
    announce();
}

/// Ends the registration of `range`, which the client is about to unmap or to replace.
pub fn forget(range: &Range<usize>) {
    if super::is_any() {
        unregister(range);
    }
}

/// Ends all registrations of `handler`, whose descriptor was closed. Returns their ranges, for [`unregister`].
pub fn release_all(handler: &'static Handler) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    each_region(|_, region| {
        if std::ptr::eq(region.handler, handler) {
            ranges.push(region.range.clone());
        }
        true
    });
    ranges
}

/// Gives a forked child the memory of a region that the child has inherited, without a handler. Async-signal-safe.
pub(super) fn leave_to_child(region: &'static Region) {
    let range = region.range.clone();
    each_run(&range, |other, run, state, pages| {
        if std::ptr::eq(other, region) {
            let _ = protect(run, state & (state::READ | state::WRITE));
            for page in pages {
                page.store(0, SeqCst);
            }
        }
    });
}

/// Returns the region and the state of the page at `address`, if `handler` has registered it.
fn belongs_to(handler: &Handler, address: usize) -> Option<(&'static Region, &'static AtomicU8)> {
    find(address).filter(|(region, _)| std::ptr::eq(region.handler, handler))
}

/// Provides the pages of `range` with content: `UFFDIO_COPY` and `UFFDIO_ZEROPAGE`. With `protected`, the pages are
/// protected from the beginning. Wakes nobody. Returns the number of bytes provided, and the errno if that is not all.
///
/// The errno is `EAGAIN` while the client has not read an event about a change, `ENOENT` for memory that is not
/// registered, `EEXIST` for a page that is there, `EFAULT` if the content cannot be read, `ENOMEM` if the process has
/// too many mappings.
pub fn fill(
    handler: &Handler,
    range: Range<usize>,
    content: Content,
    protected: bool,
) -> (usize, Option<i32>) {
    let _turn = lock();
    let size = page_size();
    let mut at = range.start;
    let mut failed = None;
    while at < range.end && failed.is_none() {
        if handler.changing.load(SeqCst) != 0 {
            failed = Some(libc::EAGAIN);
            break;
        }
        let Some((region, page)) = belongs_to(handler, at) else {
            failed = Some(libc::ENOENT);
            break;
        };
        let old = page.load(SeqCst) & !state::ASKED;
        if old & state::ABSENT == 0 {
            failed = Some(libc::EEXIST);
            break;
        }
        if protected && old & state::WP == 0 {
            failed = Some(libc::EINVAL);
            break;
        }
        let first = (at - region.range.start) / size;
        let most = (range.end - at) / size;
        let alike = |page: &AtomicU8| page.load(SeqCst) & !state::ASKED == old;
        let pages = &region.pages[first..];
        let count = pages
            .iter()
            .take(most)
            .take_while(|page| alike(page))
            .count();
        let mut run = at..at + count * size;
        if let Content::At(source) = content {
            let from = source + (at - range.start);
            let (written, errno) = procfs::write_memory(from, run.len(), run.start);
            run.end = run.start + written / size * size;
            if written % size != 0 {
                advise(run.end..run.end + size, libc::MADV_DONTNEED);
            }
            failed = errno;
        }
        let mut new = old & !(state::ABSENT | state::PROTECTED);
        if protected {
            new |= state::PROTECTED;
        }
        if let Err(errno) = protect(run.clone(), new) {
            advise(run.clone(), libc::MADV_DONTNEED);
            failed = Some(errno);
            break;
        }
        for page in &pages[..run.len() / size] {
            page.store(new, SeqCst);
        }
        at = run.end;
    }
    (at - range.start, failed)
}

/// Wakes the threads that wait for pages of `range`: they look again, and post events for pages that are missing still.
pub fn wake(range: &Range<usize>) {
    let _turn = lock();
    each_run(range, |_, _, _, pages| {
        for page in pages {
            page.fetch_and(!state::ASKED, SeqCst);
        }
    });
    announce();
}

/// Protects the pages of `range` from writes, or lifts the protection: `UFFDIO_WRITEPROTECT`. Wakes nobody.
///
/// # Errors
/// `ENOENT` if a part is not registered for this. `EAGAIN` while the client has not read an event about a change.
/// `ENOMEM` if the process has too many mappings; then a part may have changed.
pub fn set_protection(handler: &Handler, range: &Range<usize>, protected: bool) -> Result<(), i32> {
    let _turn = lock();
    if handler.changing.load(SeqCst) != 0 {
        return Err(libc::EAGAIN);
    }
    let mut known = 0;
    each_run(range, |region, run, state, _| {
        if std::ptr::eq(region.handler, handler) && state & state::WP != 0 {
            known += run.len();
        }
    });
    if known != range.len() {
        return Err(libc::ENOENT);
    }
    let mut result = Ok(());
    each_run(range, |_, run, state, pages| {
        let is_protected = state & state::PROTECTED != 0;
        // As on Linux, a page without content cannot be protected.
        if result.is_err() || is_protected == protected || state & state::ABSENT != 0 {
            return;
        }
        if protected {
            for page in pages {
                page.fetch_or(state::PROTECTED, SeqCst);
            }
            result = protect(run, state | state::PROTECTED);
        } else {
            result = protect(run, state & !state::PROTECTED);
            if result.is_ok() {
                for page in pages {
                    page.fetch_and(!state::PROTECTED, SeqCst);
                }
            }
        }
    });
    result
}

/// Tells the handlers that the client is about to drop the pages of `range`, and waits until they have read that. Until
/// [`Removal`] is dropped, they cannot provide pages.
pub fn removing(range: &Range<usize>) -> Removal {
    const REMOVE: u8 = 0x15;
    let mut handlers: Vec<&'static Handler> = Vec::new();
    each_run(range, |region, _, _, _| {
        let handler = region.handler;
        let is_new = !handlers.iter().any(|known| std::ptr::eq(*known, handler));
        if is_new && handler.has(EVENT_REMOVE) {
            handlers.push(handler);
        }
    });
    for handler in &handlers {
        handler.changing.fetch_add(1, SeqCst);
        let is_open = || !handler.is_closed.load(SeqCst);
        let words = [range.start as u64, range.end as u64, 0];
        while is_open() && !handler.post(REMOVE, words) {
            sleep(super::CHANGES.load(SeqCst));
        }
        while is_open() && handler.has_unread() {
            sleep(super::CHANGES.load(SeqCst));
        }
    }
    Removal(handlers)
}

/// A change of memory of which handlers have been told.
#[derive(Debug)]
pub struct Removal(Vec<&'static Handler>);

impl Drop for Removal {
    fn drop(&mut self) {
        for handler in &self.0 {
            handler.changing.fetch_sub(1, SeqCst);
        }
    }
}

/// Makes the pages of `range`, which the client is about to drop, absent. Accesses wait, and nobody is asked for the
/// pages before [`discarded`].
pub fn discarding(range: &Range<usize>) {
    let _turn = lock();
    each_run(range, |_, run, state, pages| {
        let mut new = state & !state::PROTECTED;
        if state & state::MISSING != 0 {
            new |= state::ABSENT | state::ASKED;
        }
        for page in pages {
            page.store(new, SeqCst);
        }
        if new & !state::ASKED != state {
            let _ = protect(run, new);
        }
    });
}

/// Call after the client has dropped the pages of `range`.
pub fn discarded(range: &Range<usize>) {
    wake(range);
}

/// Call after the client has changed its own rights of the pages of `range`. Pages that are absent or protected become
/// inaccessible again.
pub fn protected(range: &Range<usize>, readable: bool, writable: bool) {
    let _turn = lock();
    let rights = rights(readable, writable);
    each_run(range, |_, run, state, pages| {
        let new = state & !(state::READ | state::WRITE) | rights;
        for page in pages {
            page.store(new, SeqCst);
        }
        if state & (state::ABSENT | state::PROTECTED) != 0 {
            let _ = protect(run, new);
        }
    });
    announce();
}
