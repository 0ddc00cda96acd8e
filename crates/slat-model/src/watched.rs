//! A platform whose use is watched: it goes between the engine and the platform under test.

use std::collections::BTreeSet;
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::*};
use std::sync::{Arc, Mutex};

use slat::{
    Entries, Event, Gfn, Granule, HostPage, HostRun, Hva, Pfn, Platform, Request, ResolveError,
    Stale, TableMeta, VmId, WaitFor,
};

use crate::host::HostMemory;
use crate::machine::Machine;
use crate::tlb::Tlb;
use crate::violations::Violations;

/// A platform between the engine and another one, `P`, to which it passes every call. It tells the [`Tlb`] what the engine
/// does, makes allocations fail when told to, and checks the frames that `P` returns. The memory of all machines has the same
/// backing addresses here, from [`HostMemory::BASE`] on.
pub struct Watched<P> {
    platform: Arc<P>,
    /// The entries that hardware walkers may have cached.
    pub tlb: Arc<Tlb>,
    /// Whether `P` tells `tlb` of flushes.
    reports_flushes: bool,
    /// To be added to a backing address, to get that of `P`.
    offset: u64,
    /// Allocations until one fails; negative: none fails.
    fail_in: AtomicI64,
    /// Whether every later one fails, too.
    fail_on: AtomicBool,
    failed: AtomicBool,
    /// Frames that are allocated now.
    live: Mutex<BTreeSet<Pfn>>,
    violations: Violations,
}

impl<P: Platform> Watched<P> {
    /// Watches the platform of `machine`, which has `tlb`.
    pub(crate) fn of<M: Machine<Platform = P>>(machine: &M, tlb: Arc<Tlb>) -> Arc<Self> {
        Arc::new(Watched {
            platform: machine.platform().clone(),
            tlb,
            reports_flushes: M::REPORTS_FLUSHES,
            offset: machine.backing().0.wrapping_sub(HostMemory::BASE.0),
            fail_in: AtomicI64::new(-1),
            fail_on: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            live: Mutex::default(),
            violations: Violations::default(),
        })
    }

    /// Makes the `n`-th allocation from now on fail (0: the next), and with `stay` all later ones.
    pub fn fail_allocation(&self, n: u64, stay: bool) {
        self.fail_on.store(stay, SeqCst);
        self.fail_in.store(n as i64, SeqCst);
    }

    /// Lets allocations succeed again. Returns whether one has failed since the last call of this.
    pub fn stop_failing(&self) -> bool {
        self.fail_in.store(-1, SeqCst);
        self.failed.swap(false, SeqCst)
    }

    /// Returns the number of frames that are allocated now.
    pub fn live_frames(&self) -> usize {
        self.live.lock().unwrap().len()
    }

    /// Records a violation, for [`Watched::violations`].
    pub fn note(&self, violation: String) {
        self.violations.note(violation);
    }

    /// Returns the violations that were recorded as the error.
    pub fn violations(&self) -> Result<(), String> {
        self.tlb
            .findings()
            .into_iter()
            .for_each(|finding| self.note(finding));
        self.violations.check()
    }

    /// Checks that each table has a page of memory and metadata of its own, and no frame that `is_guest_memory`. Call while
    /// no operation is in progress.
    pub(crate) fn check_frames(&self, is_guest_memory: impl Fn(Pfn) -> bool) -> Result<(), String> {
        let bytes = self.platform.granule().bytes() as usize;
        let mut used: Vec<(Range<usize>, Pfn)> = Vec::new();
        for frame in self.live.lock().unwrap().iter().copied() {
            let entries = self.platform.entries(frame).as_ptr() as usize;
            let meta = self.platform.meta(frame).as_ptr() as usize;
            if !entries.is_multiple_of(bytes) {
                return Err(format!("{frame:?}: its entries are at {entries:#x}"));
            }
            if is_guest_memory(frame) {
                return Err(format!("{frame:?} is a table, and memory of the guest"));
            }
            used.push((entries..entries + bytes, frame));
            used.push((meta..meta + size_of::<TableMeta>(), frame));
        }
        match overlap(&mut used) {
            Some((a, b)) => Err(format!("{a:?} and {b:?} have memory in common")),
            None => Ok(()),
        }
    }

    /// Counts an allocation. Returns whether it is to fail.
    fn fails(&self) -> bool {
        if self.fail_in.load(Relaxed) < 0 {
            return false;
        }
        let stay = self.fail_on.load(SeqCst);
        let left = self.fail_in.fetch_sub(1, SeqCst);
        if left > 0 || left < 0 && !stay {
            return false;
        }
        if stay {
            self.fail_in.store(0, SeqCst);
        }
        self.failed.store(true, SeqCst);
        true
    }

    /// Accepts a run of `tables` frames from `P`, of which the first is `frame`. A run that is wrong is refused: to the engine
    /// memory is out.
    fn accept(&self, frame: Pfn, tables: usize) -> Option<Pfn> {
        let frames = || (0..tables as u64).map(|i| frame.add(i));
        let mut live = self.live.lock().unwrap();
        let wrong = if frames().any(|frame| live.contains(&frame)) {
            "is in use already"
        } else if !frame.0.is_multiple_of(tables as u64) {
            "is not aligned to the number of tables"
        } else {
            live.extend(frames());
            return Some(frame);
        };
        self.note(format!("{frame:?}, allocated for {tables} tables, {wrong}"));
        None
    }

    /// Call before `frame` is freed.
    fn release(&self, frame: Pfn) {
        if let Err(why) = self.tlb.freed(frame) {
            self.note(why);
        }
        if !self.live.lock().unwrap().remove(&frame) {
            self.note(format!("{frame:?} was freed, and not allocated"));
        }
    }

    fn inner(&self, backing: Hva) -> Hva {
        Hva(backing.0.wrapping_add(self.offset))
    }
}

/// Returns the owners of two ranges that overlap.
fn overlap(used: &mut [(Range<usize>, Pfn)]) -> Option<(Pfn, Pfn)> {
    used.sort_unstable_by_key(|(range, _)| range.start);
    let pair = used
        .windows(2)
        .find(|pair| pair[1].0.start < pair[0].0.end)?;
    Some((pair[0].1, pair[1].1))
}

impl<P> Deref for Watched<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.platform
    }
}

// SAFETY: `P` keeps the contract; what it returns is passed on, or refused.
unsafe impl<P: Platform> Platform for Watched<P> {
    fn granule(&self) -> Granule {
        self.platform.granule()
    }

    fn alloc_table(&self, vm: VmId) -> Option<Pfn> {
        if self.fails() {
            return None;
        }
        self.accept(self.platform.alloc_table(vm)?, 1)
    }

    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn> {
        if self.fails() {
            return None;
        }
        self.accept(self.platform.alloc_root(vm, tables)?, tables)
    }

    unsafe fn free_table(&self, vm: VmId, frame: Pfn) {
        self.release(frame);
        // SAFETY: the caller's promise.
        unsafe { self.platform.free_table(vm, frame) };
    }

    fn alloc_tables(&self, vm: VmId, frames: usize, take: &mut dyn FnMut(Pfn)) {
        let frames = (0..frames).take_while(|_| !self.fails()).count();
        self.platform.alloc_tables(vm, frames, &mut |frame| {
            self.accept(frame, 1).into_iter().for_each(&mut *take);
        });
    }

    unsafe fn free_tables(&self, vm: VmId, frames: &[Pfn]) {
        frames.iter().for_each(|frame| self.release(*frame));
        // SAFETY: the caller's promise.
        unsafe { self.platform.free_tables(vm, frames) };
    }

    #[inline]
    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        let entries = self.platform.entries(frame);
        self.tlb.reached(frame);
        entries
    }

    #[inline]
    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        self.platform.meta(frame)
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        let backing = self.inner(request.backing);
        self.platform.resolve(&request.with_backing(backing))
    }

    fn populate(&self, vm: VmId, backing: Range<Hva>) {
        let inner = self.inner(backing.start)..self.inner(backing.end);
        self.platform.populate(vm, inner);
    }

    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        let inner = self.inner(backing.start)..self.inner(backing.end);
        self.platform.resolve_resident(vm, inner, &mut |run| {
            found(HostRun {
                backing: Hva(run.backing.0.wrapping_sub(self.offset)),
                ..run
            });
        });
    }

    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale) {
        if self.reports_flushes {
            return self.platform.flush(vm, range, stale);
        }
        let begun = self.tlb.flush_begins();
        self.platform.flush(vm, range.clone(), stale);
        self.tlb.flush_ended(vm, &range, stale, begun);
    }

    #[inline]
    fn trace(&self, event: Event) {
        self.platform.trace(event);
    }

    fn wait(&self, round: u32, what: WaitFor) {
        self.platform.wait(round, what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_with_a_common_byte_overlap() {
        let (a, b) = (Pfn(1), Pfn(2));
        assert_eq!(overlap(&mut [(8..12, a), (0..9, b)]), Some((b, a)));
        assert_eq!(overlap(&mut [(9..12, a), (0..9, b)]), None);
    }
}
