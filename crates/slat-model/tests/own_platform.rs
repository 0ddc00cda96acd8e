//! Runs random operations on an embedder's own platform: a correct platform passes, and each defect is found that such
//! a platform may have.

mod own;

use std::collections::HashMap;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use slat::format::Stage2;
use slat::{
    Config, Entries, Ept, ForkError, Gfn, HostPage, HostRun, Hva, Level, Pfn, Platform, Request,
    ResolveError, Stale, TableMeta, Vm, VmId, WaitFor,
};
use slat_model::{Failure, HostChange, Machine, Setup, Subject, Tlb};

use own::{BACKING, Own};

/// A defect of a platform. The methods that an implementation overrides are defective.
trait Defect: Send + Sync {
    fn alloc_table(&self, own: &Own, vm: VmId) -> Option<Pfn> {
        own.alloc_table(vm)
    }

    fn alloc_root(&self, own: &Own, vm: VmId, tables: usize) -> Option<Pfn> {
        own.alloc_root(vm, tables)
    }

    fn resolve(&self, own: &Own, request: &Request) -> Result<HostPage, ResolveError> {
        own.resolve(request)
    }

    fn resident(&self, page: HostPage) -> HostPage {
        page
    }

    fn flush(&self, own: &Own, vm: VmId, range: Range<Gfn>, stale: Stale) {
        own.flush(vm, range, stale);
    }

    /// Returns the host page of page `number`, by the machine's own records.
    fn page(&self, own: &Own, number: u64) -> Option<HostPage> {
        own.page(number)
    }
}

/// A platform with a defect. One type serves all defects, so that the engine is compiled for it only once.
struct With {
    own: Own,
    defect: Box<dyn Defect>,
}

// SAFETY: this platform is unsound on purpose. No hardware walks its tables, and no code uses the memory that it
// resolves.
unsafe impl Platform for With {
    fn alloc_table(&self, vm: VmId) -> Option<Pfn> {
        self.defect.alloc_table(&self.own, vm)
    }

    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn> {
        self.defect.alloc_root(&self.own, vm, tables)
    }

    unsafe fn free_table(&self, vm: VmId, frame: Pfn) {
        // SAFETY: the frame was allocated and is not used any more, as the trait's contract requires.
        unsafe { self.own.free_table(vm, frame) };
    }

    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        self.own.entries(frame)
    }

    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        self.own.meta(frame)
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        self.defect.resolve(&self.own, request)
    }

    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        self.own.resolve_resident(vm, backing, &mut |run| {
            let first = self.defect.resident(run.first);
            found(HostRun { first, ..run });
        });
    }

    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale) {
        self.defect.flush(&self.own, vm, range, stale);
    }

    fn wait(&self, round: u32, what: WaitFor) {
        self.own.wait(round, what);
    }
}

/// A machine with such a platform.
struct Rig<D>(Arc<With>, PhantomData<fn() -> D>);

impl<D> Deref for Rig<D> {
    type Target = Own;
    fn deref(&self) -> &Own {
        &self.0.own
    }
}

impl<D: Defect + Default + 'static> Machine for Rig<D> {
    type Platform = With;

    fn new(pages: u64, tlb: Arc<Tlb>) -> Self {
        let own = Own::new(pages, tlb);
        let defect = Box::<D>::default();
        Rig(Arc::new(With { own, defect }), PhantomData)
    }

    fn platform(&self) -> &Arc<With> {
        &self.0
    }

    fn backing(&self) -> Hva {
        BACKING
    }

    fn pages(&self) -> u64 {
        Own::pages(self)
    }

    fn page(&self, page: u64) -> Option<HostPage> {
        self.0.defect.page(self, page)
    }

    fn change(&self, pages: &Range<u64>, change: HostChange) {
        Own::change(self, pages, change);
    }
}

#[derive(Default)]
struct Sound;
impl Defect for Sound {}

#[test]
fn a_sound_platform_passes() {
    for subject in [
        Subject::of::<Rig<Sound>, Ept>("own, EPT"),
        Subject::of::<Rig<Sound>, Stage2<40>>("own, stage 2 with a concatenated root"),
    ] {
        let tally = subject.run_seeds(0..8, 2_000);
        for what in ["page written", "huge page", "bad address", "out of memory"] {
            assert!(tally.of(what) > 0, "{what}");
        }
    }
}

/// Returns the first failure of a platform with defect `D`.
fn failure<D: Defect + Default + 'static>() -> Failure {
    let subject = Subject::of::<Rig<D>, Ept>("defective");
    let mut results = (0..16).map(|seed| subject.try_seed(seed, Setup::of_seed(seed), 2_000));
    let failure = results.find_map(Result::err);
    failure.expect("a defect is found")
}

/// Checks that defect `D` is found by few operations, and that the message contains `why`.
fn finds<D: Defect + Default + 'static>(why: &str) {
    let failure = failure::<D>();
    assert!(failure.why.contains(why), "{failure}");
    assert!(failure.ops.len() <= 12, "{failure}");
}

/// Flushes of few pages are skipped.
#[derive(Default)]
struct DropsFlushes;

impl Defect for DropsFlushes {
    fn flush(&self, own: &Own, vm: VmId, range: Range<Gfn>, stale: Stale) {
        if range.end.0 - range.start.0 >= 512 {
            own.flush(vm, range, stale);
        }
    }
}

#[test]
fn a_dropped_flush_is_found() {
    finds::<DropsFlushes>("is still cached");
}

/// A flush does not reach the last page of its range.
#[derive(Default)]
struct FlushesTooFew;

impl Defect for FlushesTooFew {
    fn flush(&self, own: &Own, vm: VmId, range: Range<Gfn>, stale: Stale) {
        own.flush(vm, range.start..Gfn(range.end.0 - 1), stale);
    }
}

#[test]
fn a_flush_of_too_few_pages_is_found() {
    finds::<FlushesTooFew>("is still cached");
}

/// A flush keeps the entries that refer to tables.
#[derive(Default)]
struct FlushesLeaves;

impl Defect for FlushesLeaves {
    fn flush(&self, own: &Own, vm: VmId, range: Range<Gfn>, stale: Stale) {
        own.flush(
            vm,
            range,
            Stale {
                tables: false,
                ..stale
            },
        );
    }
}

#[test]
fn a_platform_that_shares_nothing_says_so_at_a_fork() {
    let own = Arc::new(Own::new(512, Arc::default()));
    let vm = Vm::<_, Ept>::new(own, Config::default()).unwrap();
    assert_eq!(Vm::fork_from(&vm).err(), Some(ForkError::Unsupported));
    vm.audit().unwrap();
}

#[test]
fn a_flush_without_tables_is_found() {
    finds::<FlushesLeaves>("Table");
}

/// The frame of a page is kept for later faults, even after the page was replaced.
#[derive(Default)]
struct Remembers(Mutex<HashMap<Hva, HostPage>>);

impl Defect for Remembers {
    fn resolve(&self, own: &Own, request: &Request) -> Result<HostPage, ResolveError> {
        let page = own.resolve(request)?;
        Ok(*self
            .0
            .lock()
            .unwrap()
            .entry(request.backing)
            .or_insert(page))
    }
}

#[test]
fn a_page_that_was_replaced_is_found() {
    finds::<Remembers>("Translation");
}

/// The last page of 64 resolves to its neighbour's frame.
#[derive(Default)]
struct ResolvesNeighbours;

impl Defect for ResolvesNeighbours {
    fn resolve(&self, own: &Own, request: &Request) -> Result<HostPage, ResolveError> {
        let at = request.backing;
        let wrong = Own::number(at) % 64 == 63;
        let neighbour = if wrong { Hva(at.0 - 4096) } else { at };
        own.resolve(&request.with_backing(neighbour))
    }
}

#[test]
fn a_wrong_page_is_found() {
    finds::<ResolvesNeighbours>("Translation");
}

/// The platform returns wrong frames for the pages around a fault: each is off by one.
#[derive(Default)]
struct MisplacesNeighbours;

impl Defect for MisplacesNeighbours {
    fn resident(&self, page: HostPage) -> HostPage {
        page.with_pfn(page.pfn.add(1))
    }
}

#[test]
fn a_wrong_resident_page_is_found() {
    let failure = failure::<MisplacesNeighbours>();
    // The audit finds this defect, or an access to a page that was mapped ahead.
    let whys = ["its backing is", "of frame"];
    assert!(
        whys.iter().any(|why| failure.why.contains(why)),
        "{failure}"
    );
    assert!(failure.ops.len() <= 12, "{failure}");
}

/// Pages that are mapped one by one are reported as huge.
#[derive(Default)]
struct ClaimsHuge;

impl Defect for ClaimsHuge {
    fn resolve(&self, own: &Own, request: &Request) -> Result<HostPage, ResolveError> {
        Ok(own.resolve(request)?.with_level(Level::MEGA))
    }
}

#[test]
fn a_page_that_is_not_huge_is_found() {
    finds::<ClaimsHuge>("Level(2)");
}

/// Read faults map pages writable that must not be written.
#[derive(Default)]
struct GrantsWrites;

impl Defect for GrantsWrites {
    fn resolve(&self, own: &Own, request: &Request) -> Result<HostPage, ResolveError> {
        Ok(own.resolve(request)?.with_writable(true))
    }
}

#[test]
fn a_right_too_many_is_found() {
    finds::<GrantsWrites>("write: true");
}

/// Every 16th frame for a table was already allocated before.
#[derive(Default)]
struct GivesTwice(Mutex<Vec<Pfn>>);

impl Defect for GivesTwice {
    fn alloc_table(&self, own: &Own, vm: VmId) -> Option<Pfn> {
        let mut given = self.0.lock().unwrap();
        let again = given.get(given.len() / 16).copied();
        let frame = match again {
            Some(frame) if given.len() % 16 == 15 => frame,
            _ => own.alloc_table(vm)?,
        };
        given.push(frame);
        Some(frame)
    }
}

#[test]
fn a_table_that_is_given_twice_is_found() {
    finds::<GivesTwice>("is in use already");
}

/// A root begins at any frame.
#[derive(Default)]
struct MisalignsRoots;

impl Defect for MisalignsRoots {
    fn alloc_root(&self, own: &Own, vm: VmId, tables: usize) -> Option<Pfn> {
        let root = own.alloc_root(vm, 2 * tables)?;
        Some(root.add(1))
    }
}

#[test]
fn a_root_that_is_not_aligned_is_found() {
    let subject = Subject::of::<Rig<MisalignsRoots>, Stage2<40>>("misaligned");
    let failure = subject.try_seed(0, Setup::SMALL, 1).unwrap_err();
    assert!(failure.why.contains("is not aligned"), "{failure}");
}

/// Two pages have the same frame, also in the machine's own records.
#[derive(Default)]
struct HasAliases;

impl HasAliases {
    fn alias(page: HostPage) -> HostPage {
        let pfn = Pfn(page.pfn.0 & !1);
        let level = Level::PAGE;
        page.with_pfn(pfn).with_level(level)
    }
}

impl Defect for HasAliases {
    fn resolve(&self, own: &Own, request: &Request) -> Result<HostPage, ResolveError> {
        own.resolve(request).map(Self::alias)
    }

    fn resident(&self, page: HostPage) -> HostPage {
        Self::alias(page)
    }

    fn page(&self, own: &Own, number: u64) -> Option<HostPage> {
        own.page(number).map(Self::alias)
    }
}

#[test]
fn two_pages_with_one_frame_are_found() {
    finds::<HasAliases>("two pages of the memory are");
}
