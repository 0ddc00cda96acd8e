//! A table of the host pages that hold decoded code, and of when they changed. From this table a CPU learns, without
//! comparing code with memory, that its decoded code still equals memory.
//!
//! All CPUs of a machine share one [`CodePages`]. It has a *version*, a number that only increases, and a slot for each
//! host page. A slot is 0, or the version at which the page was *marked* or last stored to. A CPU marks a page before
//! it decodes code of the page. Each CPU is a [`Member`].
//!
//! - **Stores by CPUs.** A store to a marked page never uses the TLB's fast path (see `tlb`). The slow path gives the
//!   slot a new version after the store ([`Member::stored`]). A CPU that marks a page drops its own TLB entry for
//!   writes to the page, and tells the other CPUs by their attention words ([`CodePages::CHANGED`]). At its next block
//!   boundary each other CPU drops its entries for writes to marked pages, and only then *heeds* the version: it
//!   records in its seat that it has acted on the version. (Compiled code remembers the page of its last access, but
//!   only until the next block boundary.) Until all running CPUs have heeded the version, the page is not *trusted*:
//!   its code is compared with memory at every entry.
//! - **Levels of the TLB.** Only the first level lets a store pass without a check. The first level has translations of
//!   the current address space and global translations, and `look_at_writes` visits all of them. The second level has
//!   translations of all address spaces, with the right to write, but no guest access uses it directly. When a store
//!   misses the first level, and an entry is copied there from the second level, the CPU reads the page's slot and
//!   records the store, as after a walk of the guest's tables. So a CPU that marks a page need not drop entries of the
//!   second level.
//! - **Trust.** A CPU first reads the slot and finds the page trusted, then compares the code with memory. From then on
//!   the code equals memory as long as the slot does not change, for two reasons. First, if a store passed without a
//!   check, its CPU made the store before it heeded the mark. The comparison sees that store, because heeding is a
//!   release and reading the heeded version is an acquire. Second, every other store that the comparison did not see
//!   changes the slot afterwards.
//! - **When a change is seen.** A CPU that changes the version sets a bit in the attention words of all other running
//!   CPUs, which read these words at each block boundary anyway. So a CPU sees another CPU's store before its next
//!   block. A CPU's own store ends its running block (`Cpu::note_store`). A CPU clears the bit before it reads the
//!   version, so a change after that sets the bit again.
//! - **Stores by the VMM or a device** are not recorded in this table. So code is compared with memory again when a run
//!   begins, and after each event that serialises instructions (`Clock::serialize`). An IRET to user code causes a
//!   comparison of user code alone (`Clock::serialize_return`).
//! - **Pages that no longer hold code.** After [`STRIKES`] stores without a comparison in between, a page's mark is
//!   removed. Otherwise stores to the page would stay slow forever.
//!
//! A slot and the version change under one lock, the slot first. So a CPU that has seen a version sees the slots of all
//! earlier versions. A CPU acquires the same lock when it begins to run and when it stops. If a change finds a CPU
//! running, the change sets the bit in the CPU's attention word. If a change finds a CPU stopped, the CPU reads the
//! version when it begins to run, before it uses any code. The bit is never set in the attention word of a stopped CPU.
//!
//! All host pages whose numbers agree in the low bits share a slot. Sharing costs an unnecessary comparison at most.

use crate::heap::{self, OutOfMemory};
use crate::sync::{Arc, AtomicPtr, AtomicU32, AtomicU64, Mutex, MutexGuard};
use slots::Slots;
use std::ptr::{self, NonNull};
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The number of stores to a marked page after which the mark is removed, unless the page's code was compared in
/// between.
const STRIKES: u64 = 15;
/// The number of low bits of a page's slot, below the version, that count the stores to the marked page.
const STRIKE_BITS: u32 = 4;
const STRIKE_MASK: u64 = (1 << STRIKE_BITS) - 1;

#[cfg(not(loom))]
mod slots {
    use crate::heap::{OutOfMemory, Pages, Zeroed};
    use crate::sync::AtomicU64;

    /// The number of slots: one for each page of 4 GiB of consecutive host memory. The host provides the memory of a
    /// slot at its first use.
    const SLOTS: usize = 1 << 20;

    struct Table([AtomicU64; SLOTS]);

    // SAFETY: the type consists of integers, for which zeroes are a valid value.
    unsafe impl Zeroed for Table {}

    pub(super) struct Slots(Pages<Table>);

    impl Slots {
        pub(super) fn try_new() -> Result<Self, OutOfMemory> {
            Pages::zeroed().map(Slots)
        }

        /// Returns the slot of the page that contains a host address.
        #[inline(always)]
        pub(super) fn at(&self, host: usize) -> &AtomicU64 {
            &self.0.0[host >> 12 & (SLOTS - 1)]
        }
    }
}

#[cfg(loom)]
mod slots {
    use crate::heap::OutOfMemory;
    use crate::sync::AtomicU64;

    /// The slots in model tests, which use only two pages.
    pub(super) struct Slots([AtomicU64; 2]);

    impl Slots {
        pub(super) fn try_new() -> Result<Self, OutOfMemory> {
            Ok(Slots([AtomicU64::new(0), AtomicU64::new(0)]))
        }

        pub(super) fn at(&self, host: usize) -> &AtomicU64 {
            &self.0[host >> 12 & 1]
        }
    }
}

/// The host pages that hold decoded code, for the CPUs of one machine.
pub struct CodePages {
    slots: Slots,
    version: AtomicU64,
    /// The seats of all CPUs. A thread holds this lock while it changes a slot, the version, or the attention word of a
    /// seat.
    seats: Mutex<Vec<SeatOf>>,
}

/// What the other CPUs can read of a [`Member`].
struct Seat {
    /// The version whose changes the CPU has acted on (heeded): the CPU does not use code from before this version.
    heeded: AtomicU64,
    /// The attention word of the CPU's current run; null if the CPU does not run. The word is alive until
    /// [`Member::leave`] has cleared this pointer.
    attention: AtomicPtr<AtomicU32>,
}

/// Points to the seat of a [`Member`]: the part of a CPU's state that other CPUs can read. The member owns the seat,
/// and removes it from the list before dropping it.
struct SeatOf(NonNull<Seat>);

// SAFETY: a seat consists of atomics, which any thread may use.
unsafe impl Send for SeatOf {}

impl std::fmt::Debug for CodePages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CodePages").finish_non_exhaustive()
    }
}

impl CodePages {
    /// The bit of an attention word that says that code has changed. A CPU sets this bit in the words of the other
    /// running CPUs (see [`Executor::run`](crate::Executor::run)).
    pub const CHANGED: u32 = 1 << 31;

    /// Makes the table for a machine's CPUs: 8 MiB of address space, for which the host provides memory at first use.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new() -> Result<Arc<Self>, OutOfMemory> {
        Ok(Arc::new(Self {
            slots: Slots::try_new()?,
            version: AtomicU64::new(0),
            seats: Mutex::new(Vec::new()),
        }))
    }

    /// Call after a store to the page of `host` on behalf of a CPU that was not made by one of its instructions. All
    /// CPUs see the store before their next block. Returns whether the page may hold decoded code, possibly of the
    /// running block.
    pub fn stored(&self, host: *const u8) -> bool {
        self.note_store(host as usize, ptr::null()).is_some()
    }

    /// Records a store to the page of `host` by the CPU with the seat `own`. If the page is marked, gives it a new
    /// version, or removes its mark, and returns the new version. Returns `None` if the page is not marked.
    fn note_store(&self, host: usize, own: *const Seat) -> Option<u64> {
        if self.slots.at(host).load(Acquire) == 0 {
            return None;
        }
        let change = self.lock();
        let now = self.slots.at(host).load(Relaxed);
        let strikes = (now & STRIKE_MASK) + 1;
        (now != 0).then(|| {
            slat_trace::point(|| slat_trace::CodeInvalidated { hva: host as u64 });
            change.next(host, strikes < STRIKES, strikes, own)
        })
    }

    fn lock(&self) -> Change<'_> {
        Change {
            seats: self.seats.lock().unwrap_or_else(PoisonError::into_inner),
            pages: self,
        }
    }

    /// Returns the version in the slot of the page of `host`. 0: the page is not marked.
    #[inline(always)]
    pub(crate) fn version_of(&self, host: usize) -> u64 {
        self.slots.at(host).load(Acquire) >> STRIKE_BITS
    }
}

/// A guard of the lock under which slots, the version, and the seats' attention words change.
struct Change<'a> {
    pages: &'a CodePages,
    seats: MutexGuard<'a, Vec<SeatOf>>,
}

impl Change<'_> {
    /// Returns the seats of the CPUs that run, and their attention words.
    fn running(&self) -> impl Iterator<Item = (&Seat, &AtomicU32)> {
        self.seats.iter().filter_map(|seat| {
            // SAFETY: a member removes its seat from the list before it frees the seat, and the list is locked here.
            let seat = unsafe { seat.0.as_ref() };
            // SAFETY: the word is alive while the seat refers to it, and the seat cannot change while the lock is held.
            let attention = unsafe { seat.attention.load(Relaxed).as_ref() };
            Some((seat, attention?))
        })
    }

    /// Increases the version, and sets the slot of `host`: to the new version with `strikes` if `marked`, else to 0.
    /// Sets [`CodePages::CHANGED`] for all running CPUs except the CPU with the seat `own`. Returns the new version.
    fn next(&self, host: usize, marked: bool, strikes: u64, own: *const Seat) -> u64 {
        let version = self.pages.version.load(Relaxed) + 1;
        let slot = if marked {
            version << STRIKE_BITS | strikes
        } else {
            0
        };
        self.pages.slots.at(host).store(slot, Release);
        self.pages.version.store(version, Release);
        for (_, attention) in self.running().filter(|(seat, _)| !ptr::eq(*seat, own)) {
            attention.fetch_or(CodePages::CHANGED, Release);
        }
        version
    }

    /// Returns the latest version whose changes all running CPUs have acted on (heeded).
    fn heeded_by_all(&self) -> u64 {
        let version = self.pages.version.load(Relaxed);
        let heeded = self.running().map(|(seat, _)| seat.heeded.load(Acquire));
        heeded.fold(version, u64::min)
    }
}

/// A CPU of the group of CPUs that share a [`CodePages`].
pub(crate) struct Member {
    pages: Arc<CodePages>,
    seat: Box<Seat>,
    /// A version whose changes all running CPUs have acted on (heeded). Stored here so that a comparison needs no lock.
    heeded_by_all: u64,
}

impl Member {
    /// Adds a CPU to the group of CPUs that share `pages`. The CPU does not run yet.
    pub(crate) fn try_new(pages: Arc<CodePages>) -> Result<Self, OutOfMemory> {
        let seat = heap::boxed(Seat {
            heeded: AtomicU64::new(0),
            attention: AtomicPtr::new(ptr::null_mut()),
        })?;
        let mut change = pages.lock();
        change.seats.try_reserve(1).map_err(|_| OutOfMemory)?;
        change.seats.push(SeatOf(NonNull::from(&*seat)));
        drop(change);
        Ok(Self {
            pages,
            seat,
            heeded_by_all: 0,
        })
    }

    pub(crate) fn pages(&self) -> &CodePages {
        &self.pages
    }

    fn heeded(&self) -> u64 {
        self.seat.heeded.load(Relaxed)
    }

    /// Call before the CPU executes. From now on, other CPUs report changes by a bit in `attention`. If another CPU
    /// marks a page, it does not trust the page until this CPU has heeded the mark: from then on, this CPU's stores to
    /// the page are noticed. If there were changes while the CPU did not run, sets the bit at once.
    ///
    /// # Safety
    /// The word lives until [`leave`](Self::leave) is called or the member is dropped.
    pub(crate) unsafe fn enter(&mut self, attention: &AtomicU32) {
        let _change = self.pages.lock();
        let word = ptr::from_ref(attention).cast_mut();
        self.seat.attention.store(word, Relaxed);
        if self.pages.version.load(Relaxed) != self.heeded() {
            attention.fetch_or(CodePages::CHANGED, Relaxed);
        }
    }

    /// Call after the CPU has executed. Other CPUs use its attention word no more. Clears the bit in the word.
    pub(crate) fn leave(&mut self) {
        let _change = self.pages.lock();
        let word = self.seat.attention.swap(ptr::null_mut(), Relaxed);
        // SAFETY: the caller of `enter` keeps the word alive until this function is called.
        if let Some(attention) = unsafe { word.as_ref() } {
            attention.fetch_and(!CodePages::CHANGED, Relaxed);
        }
    }

    /// Heeds the current version. Call when the bit in `attention` is set. `drop_writes` must drop the TLB's entries
    /// for writes to marked pages.
    pub(crate) fn heed(&mut self, attention: &AtomicU32, drop_writes: impl FnOnce(&CodePages)) {
        // Clear the bit before reading the version: a later change sets the bit again.
        attention.fetch_and(!CodePages::CHANGED, Acquire);
        let version = self.pages.version.load(Acquire);
        drop_writes(&self.pages);
        self.seat.heeded.store(version, Release);
    }

    /// Records that this CPU has acted on (heeded) `version`, a version that the CPU's own change has made. The CPU has
    /// nothing to drop for its own change. Does nothing if other CPUs have changed the version, too: they have set the
    /// bit in this CPU's attention word, so [`heed`](Self::heed) will be called.
    fn changed(&mut self, version: u64) {
        if self.heeded() == version - 1 {
            self.seat.heeded.store(version, Release);
        }
    }

    /// Marks the page of `host` if it is not marked, and then calls `drop_writes`, which must drop the TLB's entry for
    /// writes to the page. Returns the page's version if the page is trusted: if its code is compared with memory after
    /// this call and is equal, it stays equal as long as the page has this version.
    pub(crate) fn mark(&mut self, host: usize, drop_writes: impl FnOnce()) -> Option<u64> {
        let slot = self.pages.slots.at(host);
        let mut now = slot.load(Acquire);
        if now & STRIKE_MASK != 0 || now == 0 {
            let pages = self.pages.clone();
            let change = pages.lock();
            now = slot.load(Relaxed) & !STRIKE_MASK;
            if now == 0 {
                drop_writes();
                let version = change.next(host, true, 0, &raw const *self.seat);
                drop(change);
                self.changed(version);
                now = version << STRIKE_BITS;
            } else {
                slot.store(now, Relaxed);
            }
        }
        let version = now >> STRIKE_BITS;
        if self.heeded_by_all < version {
            self.heeded_by_all = self.pages.lock().heeded_by_all();
        }
        (self.heeded_by_all >= version).then_some(version)
    }

    /// Call after a store of this CPU to the page of `host`. Returns whether the page was marked. If it was, this CPU's
    /// decoded code of the page may be stale.
    pub(crate) fn stored(&mut self, host: usize) -> bool {
        let version = self.pages.note_store(host, &raw const *self.seat);
        if let Some(version) = version {
            self.changed(version);
        }
        version.is_some()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut change = self.pages.lock();
        let own = NonNull::from(&*self.seat);
        change.seats.retain(|seat| seat.0 != own);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::thread;

    const PAGE: usize = 0x1000;
    const OTHER_PAGE: usize = 0x2000;

    /// A CPU that stores to `PAGE`. If `without_look`, the CPU's TLB has an entry for writes to the page, so its stores
    /// do not check the slot.
    struct Storer {
        member: Member,
        attention: Box<AtomicU32>,
        without_look: bool,
    }

    impl Storer {
        fn new(pages: &Arc<CodePages>, without_look: bool) -> Self {
            Self {
                member: Member::try_new(pages.clone()).unwrap(),
                attention: Box::new(AtomicU32::new(0)),
                without_look,
            }
        }

        fn enter(&mut self) {
            // SAFETY: `self` owns the word `attention`, and drops it after `member`, because that field is declared
            // first.
            unsafe { self.member.enter(&self.attention) };
        }

        fn leave(&mut self) {
            self.member.leave();
            assert_eq!(self.attention.load(Relaxed), 0);
        }

        fn boundary(&mut self) {
            if self.attention.load(Acquire) != 0 {
                let without_look = &mut self.without_look;
                self.member.heed(&self.attention, |pages| {
                    *without_look &= pages.version_of(PAGE) == 0;
                });
            }
        }

        fn store(&mut self, byte: &AtomicU64, value: u64, marks: bool) {
            self.boundary();
            if marks {
                // Change the version by marking another page. Other CPUs may have changed the version since the
                // boundary.
                self.member.mark(OTHER_PAGE, || {});
            }
            byte.store(value, Relaxed);
            if !self.without_look {
                // This store missed the TLB. The new entry allows stores without a check only if the page had no mark
                // before the store.
                self.without_look = !self.member.stored(PAGE);
            }
        }
    }

    /// A CPU that decodes the byte in `PAGE` and executes it.
    struct Executor {
        member: Member,
        attention: Box<AtomicU32>,
        decoded: u64,
        version: Option<u64>,
    }

    impl Executor {
        fn new(pages: &Arc<CodePages>) -> Self {
            Self {
                member: Member::try_new(pages.clone()).unwrap(),
                attention: Box::new(AtomicU32::new(0)),
                decoded: u64::MAX,
                version: None,
            }
        }

        fn enter(&mut self) {
            // SAFETY: `self` owns the word `attention`, and drops it after `member`, because that field is declared
            // first.
            unsafe { self.member.enter(&self.attention) };
        }

        fn leave(&mut self) {
            self.member.leave();
            assert_eq!(self.attention.load(Relaxed), 0);
        }

        /// Enters a block with the byte. If its page has changed, decodes the byte again.
        fn execute(&mut self, byte: &AtomicU64) {
            if self.attention.load(Acquire) != 0 {
                self.member.heed(&self.attention, |_| {});
            }
            let now = self.member.pages().version_of(PAGE);
            if self.version != Some(now) {
                self.version = self.member.mark(PAGE, || {});
                self.decoded = byte.load(Relaxed);
            }
        }
    }

    fn bounded(model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(model);
    }

    /// Storers and an executor run. After the storers have stopped, checks that the executor's next entry sees the last
    /// store.
    fn sees_the_last_store(storers: usize, without_look: bool, runs: usize, marks: bool) {
        bounded(move || {
            let pages = CodePages::try_new().unwrap();
            let byte = Arc::new(AtomicU64::new(0));
            let threads: Vec<_> = (0..storers)
                .map(|_| {
                    let mut storer = Storer::new(&pages, without_look);
                    let byte = byte.clone();
                    thread::spawn(move || {
                        for run in 0..runs {
                            storer.enter();
                            storer.store(&byte, 1 + run as u64, marks);
                            storer.boundary();
                            storer.leave();
                        }
                    })
                })
                .collect();
            let mut executor = Executor::new(&pages);
            executor.enter();
            executor.execute(&byte);
            executor.execute(&byte);
            for thread in threads {
                thread.join().unwrap();
            }
            executor.execute(&byte);
            assert_eq!(executor.decoded, byte.load(Relaxed));
            // The page is trusted now, because no CPU stores any more.
            executor.execute(&byte);
            assert!(executor.version.is_some());
        });
    }

    #[test]
    fn a_store_without_a_look_is_seen() {
        sees_the_last_store(1, true, 1, false);
    }

    #[test]
    fn stores_of_two_runs_are_seen() {
        sees_the_last_store(1, true, 2, false);
    }

    #[test]
    fn stores_with_a_look_are_seen() {
        sees_the_last_store(1, false, 2, false);
    }

    #[test]
    fn stores_of_two_cpus_are_seen() {
        sees_the_last_store(2, true, 1, false);
    }

    #[test]
    fn a_store_of_a_cpu_that_marks_a_page_itself_is_seen() {
        sees_the_last_store(1, true, 1, true);
    }

    /// Two CPUs run: calls `before`, then one CPU runs `storing` while the other CPU executes. Checks that the second
    /// CPU sees the store afterwards.
    fn sees_the_store_of_a_cpu_that_runs(
        before: impl Fn(&mut Executor, &AtomicU64) + Sync + Send + 'static,
        storing: fn(&mut Storer, &AtomicU64),
    ) {
        bounded(move || {
            let pages = CodePages::try_new().unwrap();
            let byte = Arc::new(AtomicU64::new(0));
            let mut storer = Storer::new(&pages, true);
            let mut executor = Executor::new(&pages);
            storer.enter();
            executor.enter();
            before(&mut executor, &byte);
            let other = {
                let byte = byte.clone();
                thread::spawn(move || {
                    storing(&mut storer, &byte);
                    storer.boundary();
                    storer.leave();
                })
            };
            executor.execute(&byte);
            other.join().unwrap();
            executor.execute(&byte);
            assert_eq!(executor.decoded, byte.load(Relaxed));
        });
    }

    #[test]
    fn a_store_in_a_block_that_marks_a_page_and_began_before_another_mark_is_seen() {
        sees_the_store_of_a_cpu_that_runs(Executor::execute, |storer, byte| {
            storer.member.mark(OTHER_PAGE, || {});
            byte.store(1, Relaxed);
        });
    }

    #[test]
    fn a_store_after_a_change_was_heeded_while_the_next_one_is_made_is_seen() {
        let mark_other = |executor: &mut Executor, _: &AtomicU64| {
            executor.member.mark(OTHER_PAGE, || {});
        };
        sees_the_store_of_a_cpu_that_runs(mark_other, |storer, byte| storer.store(byte, 1, false));
    }

    #[test]
    fn two_cpus_that_mark_a_page_trust_it_together() {
        bounded(|| {
            let pages = CodePages::try_new().unwrap();
            let byte = Arc::new(AtomicU64::new(0));
            let other = {
                let (pages, byte) = (pages.clone(), byte.clone());
                thread::spawn(move || {
                    let mut executor = Executor::new(&pages);
                    executor.enter();
                    executor.execute(&byte);
                    executor.leave();
                })
            };
            let mut executor = Executor::new(&pages);
            executor.enter();
            executor.execute(&byte);
            other.join().unwrap();
            executor.execute(&byte);
            executor.execute(&byte);
            assert!(executor.version.is_some());
        });
    }
}
