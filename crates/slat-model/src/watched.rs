//! A platform between the engine and the platform under test. It watches how the engine uses the platform.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::*};
use std::sync::{Arc, Mutex, RwLock};

use slat::{
    Entries, Event, ForkError, Gfn, Granule, HostPage, HostRun, Hva, Pfn, Platform, Request,
    ResolveError, Stale, TableMeta, VmId, WaitFor,
};

use crate::host::HostMemory;
use crate::machine::Machine;
use crate::tlb::Tlb;
use crate::violations::Violations;
use crate::walker_buffers::WalkerBuffers;

/// A platform between the engine and another platform, `P`, to which it passes every call. The watching platform
/// reports the engine's actions to the [`Tlb`], makes allocations fail on request, and checks the frames that `P`
/// returns. For all machines, the memory has the same backing addresses on this platform, from [`HostMemory::BASE`] on.
pub struct Watched<P> {
    platform: Arc<P>,
    /// The TLB model of the first VM: the entries that hardware walkers may have cached from its tables.
    pub tlb: Arc<Tlb>,
    /// The TLB models of the first VM's clones.
    clones: RwLock<HashMap<VmId, Arc<Tlb>>>,
    /// Whether there are clones.
    cloned: AtomicBool,
    /// Whether `P` reports its flushes to `tlb`.
    reports_flushes: bool,
    /// The number that is added to a backing address of this platform to get the backing address of `P`.
    offset: u64,
    /// The number of allocations that succeed before an allocation fails. If it is negative, no allocation fails.
    fail_in: AtomicI64,
    /// Whether all later allocations fail, too.
    fail_on: AtomicBool,
    failed: AtomicBool,
    live: Mutex<Live>,
    violations: Violations,
    /// The pages that each VM has given to be kept for a snapshot.
    kept: Mutex<HashMap<VmId, Vec<Range<Hva>>>>,
    /// The entries that the walkers of hardware vCPUs have written to their buffers.
    pub(crate) buffers: WalkerBuffers,
}

/// The table frames that are allocated now.
#[derive(Default)]
struct Live {
    vms: BTreeMap<Pfn, VmId>,
    numbers: HashMap<VmId, usize>,
}

impl<P: Platform> Watched<P> {
    /// Makes a platform that watches the platform of `machine`. `tlb` is the machine's TLB model.
    pub(crate) fn of<M: Machine<Platform = P>>(machine: &M, tlb: Arc<Tlb>) -> Arc<Self> {
        Arc::new(Watched {
            platform: machine.platform().clone(),
            tlb,
            clones: RwLock::default(),
            cloned: AtomicBool::new(false),
            reports_flushes: M::REPORTS_FLUSHES,
            offset: machine.backing().0.wrapping_sub(HostMemory::BASE.0),
            fail_in: AtomicI64::new(-1),
            fail_on: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            live: Mutex::default(),
            violations: Violations::default(),
            kept: Mutex::default(),
            buffers: WalkerBuffers::default(),
        })
    }

    /// Makes an allocation fail after `n` other allocations have succeeded. If `stay`, all later allocations fail, too.
    pub fn fail_allocation(&self, n: u64, stay: bool) {
        self.fail_on.store(stay, SeqCst);
        self.fail_in.store(n as i64, SeqCst);
    }

    /// Lets allocations succeed again. Returns whether one has failed since the last call of this function.
    pub fn stop_failing(&self) -> bool {
        self.fail_in.store(-1, SeqCst);
        self.failed.swap(false, SeqCst)
    }

    /// Whether an allocation will fail, or one has failed since the last call of [`Watched::stop_failing`].
    pub(crate) fn is_failing(&self) -> bool {
        self.fail_in.load(SeqCst) >= 0 || self.failed.load(SeqCst)
    }

    /// Returns the number of frames that are allocated now.
    pub fn live_frames(&self) -> usize {
        self.live.lock().unwrap().vms.len()
    }

    /// Returns the number of frames that `vm` has now.
    pub(crate) fn live_frames_of(&self, vm: VmId) -> usize {
        let live = self.live.lock().unwrap();
        live.numbers.get(&vm).copied().unwrap_or(0)
    }

    /// Makes a model of the TLBs of `vm`, which is a clone, and returns it.
    pub(crate) fn add_clone(&self, vm: VmId) -> Arc<Tlb> {
        let tlb = Arc::<Tlb>::default();
        self.clones.write().unwrap().insert(vm, tlb.clone());
        self.cloned.store(true, SeqCst);
        tlb
    }

    /// Removes the TLB model of `vm`, if `vm` is a clone. Call when the VM has ended.
    pub(crate) fn remove_clone(&self, vm: VmId) {
        self.take_kept(vm);
        let mut clones = self.clones.write().unwrap();
        clones.remove(&vm);
        self.cloned.store(!clones.is_empty(), SeqCst);
    }

    /// Returns the pages that `vm` has given to be kept for a snapshot ([`Platform::keep`]) since the last call.
    pub fn take_kept(&self, vm: VmId) -> Vec<Range<Hva>> {
        self.kept.lock().unwrap().remove(&vm).unwrap_or_default()
    }

    /// Calls `then` with the model of each VM's TLBs.
    fn each_tlb(&self, mut then: impl FnMut(&Tlb)) {
        then(&self.tlb);
        if self.cloned.load(Relaxed) {
            let clones = self.clones.read().unwrap();
            clones.values().for_each(|tlb| then(tlb));
        }
    }

    /// Calls [`Tlb::stale`] for each VM. Call when no operation is in progress.
    pub(crate) fn stale(&self) -> Option<String> {
        let mut found = None;
        self.each_tlb(|tlb| found = found.take().or_else(|| tlb.stale()));
        found
    }

    /// Records a violation, for [`Watched::violations`].
    pub fn note(&self, violation: String) {
        self.violations.note(violation);
    }

    /// Returns the recorded violations, as an error.
    pub fn violations(&self) -> Result<(), String> {
        self.each_tlb(|tlb| {
            let findings = tlb.findings();
            findings.into_iter().for_each(|finding| self.note(finding));
        });
        self.violations.check()
    }

    /// Checks that each table has its own memory and metadata, and that no table's frame satisfies `is_guest_memory`.
    /// Call while no operation is in progress.
    pub(crate) fn check_frames(&self, is_guest_memory: impl Fn(Pfn) -> bool) -> Result<(), String> {
        let bytes = self.platform.granule().bytes() as usize;
        let mut used: Vec<(Range<usize>, Pfn)> = Vec::new();
        for frame in self.live.lock().unwrap().vms.keys().copied() {
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

    /// Counts an allocation. Returns whether it must fail.
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

    /// Checks a run of `tables` frames from `P` that begins with `frame`. If the run is wrong, returns `None`, so that
    /// the engine finds no memory.
    fn accept(&self, vm: VmId, frame: Pfn, tables: usize) -> Option<Pfn> {
        let frames = || (0..tables as u64).map(|i| frame.add(i));
        let mut live = self.live.lock().unwrap();
        let wrong = if frames().any(|frame| live.vms.contains_key(&frame)) {
            "is in use already"
        } else if !frame.0.is_multiple_of(tables as u64) {
            "is not aligned to the number of tables"
        } else {
            live.vms.extend(frames().map(|frame| (frame, vm)));
            *live.numbers.entry(vm).or_default() += tables;
            return Some(frame);
        };
        self.note(format!("{frame:?}, allocated for {tables} tables, {wrong}"));
        None
    }

    /// Records that `frame` is no longer allocated. Call before it is freed.
    fn release(&self, frame: Pfn) {
        self.each_tlb(|tlb| {
            if let Err(why) = tlb.freed(frame) {
                self.note(why);
            }
        });
        let mut live = self.live.lock().unwrap();
        match live.vms.remove(&frame) {
            Some(vm) => *live.numbers.entry(vm).or_default() -= 1,
            None => self.note(format!("{frame:?} was freed, and not allocated")),
        }
    }

    /// Returns this platform's backing address for the backing address `backing` of `P`.
    pub(crate) fn outer(&self, backing: Hva) -> Hva {
        Hva(backing.0.wrapping_sub(self.offset))
    }

    fn inner(&self, backing: Hva) -> Hva {
        Hva(backing.0.wrapping_add(self.offset))
    }
}

/// Returns the owners of two ranges that overlap. `None`: no two ranges overlap.
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

// SAFETY: `P` fulfils the contract, and this platform returns the results of `P` or an error.
unsafe impl<P: Platform> Platform for Watched<P> {
    fn granule(&self) -> Granule {
        self.platform.granule()
    }

    fn alloc_table(&self, vm: VmId) -> Option<Pfn> {
        if self.fails() {
            return None;
        }
        self.accept(vm, self.platform.alloc_table(vm)?, 1)
    }

    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn> {
        if self.fails() {
            return None;
        }
        self.accept(vm, self.platform.alloc_root(vm, tables)?, tables)
    }

    unsafe fn free_table(&self, vm: VmId, frame: Pfn) {
        self.release(frame);
        // SAFETY: the frame was allocated and is not used any more, as the trait's contract requires.
        unsafe { self.platform.free_table(vm, frame) };
    }

    fn alloc_tables(&self, vm: VmId, frames: usize, take: &mut dyn FnMut(Pfn)) {
        let frames = (0..frames).take_while(|_| !self.fails()).count();
        self.platform.alloc_tables(vm, frames, &mut |frame| {
            self.accept(vm, frame, 1).into_iter().for_each(&mut *take);
        });
    }

    unsafe fn free_tables(&self, vm: VmId, frames: &[Pfn]) {
        frames.iter().for_each(|frame| self.release(*frame));
        // SAFETY: the frames were allocated and are not used any more, as the trait's contract requires.
        unsafe { self.platform.free_tables(vm, frames) };
    }

    #[inline]
    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        let entries = self.platform.entries(frame);
        self.each_tlb(|tlb| tlb.reached(frame));
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
                backing: self.outer(run.backing),
                ..run
            });
        });
    }

    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale) {
        let clone = self.clones.read().unwrap().get(&vm).cloned();
        if self.reports_flushes && clone.is_none() {
            return self.platform.flush(vm, range, stale);
        }
        let tlb = clone.as_ref().unwrap_or(&self.tlb);
        let begun = tlb.flush_begins();
        self.platform.flush(vm, range.clone(), stale);
        tlb.flush_ended(vm, &range, stale, begun);
    }

    fn share(&self, parent: VmId, child: VmId) -> Result<(), ForkError> {
        self.platform.share(parent, child)
    }

    const KEEPS_OLD_PAGES: bool = true;

    fn keep(&self, vm: VmId, backing: Range<Hva>) {
        let inner = self.inner(backing.start)..self.inner(backing.end);
        self.platform.keep(vm, inner);
        self.kept
            .lock()
            .unwrap()
            .entry(vm)
            .or_default()
            .push(backing);
    }

    fn drain(&self, vm: VmId, take: &mut dyn FnMut(usize, Gfn)) {
        self.platform.drain(vm, take);
        self.buffers.drain(take);
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
