//! The host pages that hold decoded code, and when they changed: what tells CPUs that their decoded code is still good without a
//! look at memory.
//!
//! All CPUs of a machine share one [`CodePages`]. It has a *version*, a number that only rises, and a slot for each host page: 0,
//! or the version at which the page was *marked* or last stored to. A CPU marks a page before it decodes code of it. Each CPU is a
//! [`Member`].
//!
//! - **Stores by CPUs.** No CPU has a marked page in its TLB for writes without a look (see `tlb`): a store to one takes the slow
//!   path, and after it is made gives the slot a new version ([`Member::stored`]). A CPU that begins to mark drops its own entries
//!   for writes. The others see at their next block boundary that the version has changed, drop theirs of all marked pages, and
//!   only then *heed* that version. Until all running CPUs have heeded it, the page is not *trusted*: its code is compared with
//!   memory at every entry.
//!   Only the first level of the TLB can be written through without a look, and it holds translations of the current address space and
//!   global ones: `look_at_writes` visits all of it. The second level keeps the right to write, of all spaces, but no guest access hits
//!   there: when a page goes from it to the first level, its slot is read, exactly as after a walk of the guest's tables, and the store
//!   that missed is noted. So nothing there has to be dropped for a mark.
//! - **Trust.** A CPU first reads the slot and finds it trusted, then compares the code with memory. From then on the code is good
//!   as long as the slot does not change: a store that the comparison missed was made without a look before its CPU heeded the
//!   mark (but then the comparison has seen it: heeding is a release, reading what was heeded an acquire), or it changes the slot
//!   after the comparison.
//! - **When a change is seen.** A CPU looks at the version at each block boundary. So another CPU's store is seen before the next
//!   block; a CPU's own store ends its block (`Cpu::note_store`).
//! - **Stores by anyone else**, the client or a device, are not known here. Code is compared with memory again after each beginning
//!   of a run and each event that serialises instructions (`Cpu::serialize`). The exception is an IRET to a user, after which a
//!   user's code is compared, but no supervisor's (`Cpu::serialize_return`).
//! - **Pages that hold code no more.** After [`STRIKES`] stores without a comparison in between, a page's mark is removed:
//!   otherwise stores to it would stay slow for ever.
//!
//! Slots and version change under one lock, the slot first: who has seen a version sees the slots of all earlier ones. A CPU that
//! does not run has heeded everything: it looks at the version before it executes. Beginning to run stores to the seat, then reads
//! the version; marking stores the version, then reads the seats; both have a full fence in between, so at least one sees the
//! other.
//!
//! A slot belongs to all host pages whose numbers agree in the low bits. That costs a comparison too many, nothing else.

use crate::heap::{self, OutOfMemory};
use crate::sync::{Arc, AtomicU64, Mutex, MutexGuard, fence};
use slots::Slots;
use std::ptr::NonNull;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// Stores to a marked page, without a comparison of its code in between, after which it is marked no more.
const STRIKES: u64 = 15;
/// Bits of a slot below the version: the number of such stores.
const STRIKE_BITS: u32 = 4;
const STRIKE_MASK: u64 = (1 << STRIKE_BITS) - 1;

/// The seat of a CPU that does not run: it has heeded every version.
const STANDS_STILL: u64 = u64::MAX;

#[cfg(not(loom))]
mod slots {
    use crate::heap::{OutOfMemory, Pages, Zeroed};
    use crate::sync::AtomicU64;

    /// Slots: 4 GiB of consecutive host pages have one each. The host provides their memory at first use.
    const SLOTS: usize = 1 << 20;

    struct Table([AtomicU64; SLOTS]);

    // SAFETY: integers.
    unsafe impl Zeroed for Table {}

    pub(super) struct Slots(Pages<Table>);

    impl Slots {
        pub(super) fn try_new() -> Result<Self, OutOfMemory> {
            Pages::zeroed().map(Slots)
        }

        /// Returns the slot of the page of a host address.
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

    /// The models have two pages.
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

/// The host pages with decoded code of the CPUs of one machine.
pub struct CodePages {
    slots: Slots,
    version: AtomicU64,
    /// The versions that the CPUs have heeded. Its lock is held while a slot or the version changes.
    seats: Mutex<Vec<Seat>>,
}

/// Points to the seat of a [`Member`], which owns it and takes it off the list before it is dropped.
struct Seat(NonNull<AtomicU64>);

// SAFETY: a reference to an atomic.
unsafe impl Send for Seat {}

impl Seat {
    fn heeded(&self) -> u64 {
        // SAFETY: the member is alive as long as its seat is on the list, which the caller has locked.
        unsafe { self.0.as_ref() }.load(Acquire)
    }
}

impl std::fmt::Debug for CodePages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CodePages").finish_non_exhaustive()
    }
}

impl CodePages {
    /// Makes the table for a machine's CPUs: 8 MiB of address space, of which the host provides what is used.
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

    /// Tells the CPUs of a store to the page of `host` that was made for one of them outside its own instructions. All of them see
    /// it before their next block.
    pub fn stored(&self, host: *const u8) {
        self.note_store(host as usize);
    }

    /// Gives the page of `host` a new version for a store, or removes its mark. Returns the version; `None`: it is not marked.
    fn note_store(&self, host: usize) -> Option<u64> {
        if self.slots.at(host).load(Acquire) == 0 {
            return None;
        }
        let change = self.lock();
        let now = self.slots.at(host).load(Relaxed);
        let strikes = (now & STRIKE_MASK) + 1;
        (now != 0).then(|| change.next(host, strikes < STRIKES, strikes))
    }

    fn lock(&self) -> Change<'_> {
        Change {
            seats: self.seats.lock().unwrap_or_else(PoisonError::into_inner),
            pages: self,
        }
    }

    /// Returns the version, for compiled code to look at.
    #[cfg(feature = "jit")]
    pub(crate) fn version(&self) -> &AtomicU64 {
        &self.version
    }

    /// Returns the version of the page of `host`: 0 if it is not marked.
    #[inline(always)]
    pub(crate) fn version_of(&self, host: usize) -> u64 {
        self.slots.at(host).load(Acquire) >> STRIKE_BITS
    }
}

/// The right to change slots and version.
struct Change<'a> {
    pages: &'a CodePages,
    seats: MutexGuard<'a, Vec<Seat>>,
}

impl Change<'_> {
    /// Changes the slot of `host` to the next version with `strikes`, or to 0. Returns the version.
    fn next(&self, host: usize, marked: bool, strikes: u64) -> u64 {
        let version = self.pages.version.load(Relaxed) + 1;
        let slot = if marked {
            version << STRIKE_BITS | strikes
        } else {
            0
        };
        self.pages.slots.at(host).store(slot, Release);
        self.pages.version.store(version, Release);
        version
    }

    /// Returns the version that all running CPUs have heeded.
    fn heeded_by_all(&self) -> u64 {
        let version = self.pages.version.load(Relaxed);
        // Between the store of the version and the loads of the seats: see the module.
        fence(SeqCst);
        let seats = self.seats.iter().map(Seat::heeded);
        seats.fold(version, u64::min)
    }
}

/// One CPU among those that share a [`CodePages`].
pub(crate) struct Member {
    pages: Arc<CodePages>,
    /// The version that this CPU has heeded, for the others.
    seat: Box<AtomicU64>,
    pub(crate) heeded: u64,
    /// A version that all running CPUs have heeded.
    heeded_by_all: u64,
}

impl Member {
    /// Makes a member that does not run yet.
    pub(crate) fn try_new(pages: Arc<CodePages>) -> Result<Self, OutOfMemory> {
        let seat = heap::boxed(AtomicU64::new(STANDS_STILL))?;
        let mut change = pages.lock();
        change.seats.try_reserve(1).map_err(|_| OutOfMemory)?;
        change.seats.push(Seat(NonNull::from(&*seat)));
        drop(change);
        Ok(Self {
            pages,
            seat,
            heeded: 0,
            heeded_by_all: 0,
        })
    }

    pub(crate) fn pages(&self) -> &CodePages {
        &self.pages
    }

    /// Call before the CPU executes. Others wait for this CPU from now on.
    pub(crate) fn enter(&mut self) {
        self.seat.store(self.heeded, Relaxed);
        // Between the store to the seat and the load of the version: see the module.
        fence(SeqCst);
    }

    /// Call after the CPU has executed.
    pub(crate) fn leave(&mut self) {
        self.seat.store(STANDS_STILL, Release);
    }

    /// Whether marks or stores of others have to be heeded.
    #[inline(always)]
    pub(crate) fn has_news(&self) -> bool {
        self.pages.version.load(Acquire) != self.heeded
    }

    /// Heeds the current version: has `drop_writes` drop the TLB's entries for writes to pages that are marked.
    pub(crate) fn heed(&mut self, drop_writes: impl FnOnce(&CodePages)) {
        let version = self.pages.version.load(Acquire);
        drop_writes(&self.pages);
        self.has_heeded(version);
    }

    fn has_heeded(&mut self, version: u64) {
        self.heeded = version;
        self.seat.store(version, Release);
    }

    /// Call after this CPU has changed the version itself and has nothing to drop for it. If others have changed it, too, this is
    /// left to [`heed`](Self::heed).
    fn changed(&mut self, version: u64) {
        if self.heeded == version - 1 {
            self.has_heeded(version);
        }
    }

    /// Marks the page of `host` if it is not: then has `drop_writes` drop the TLB's entry for writes to it. Returns its version if it
    /// is trusted: code that is compared with memory from now on is good as long as the page has this version.
    pub(crate) fn mark(&mut self, host: usize, drop_writes: impl FnOnce()) -> Option<u64> {
        let slot = self.pages.slots.at(host);
        let mut now = slot.load(Acquire);
        if now & STRIKE_MASK != 0 || now == 0 {
            let pages = self.pages.clone();
            let change = pages.lock();
            now = slot.load(Relaxed) & !STRIKE_MASK;
            if now == 0 {
                drop_writes();
                let version = change.next(host, true, 0);
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

    /// Call after a store of this CPU to the page of `host`. Returns whether the page was marked: then this CPU's decoded code of it
    /// may not be good any more.
    pub(crate) fn stored(&mut self, host: usize) -> bool {
        let version = self.pages.note_store(host);
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

    /// A CPU that has the page in its TLB, for writes without a look or not, and stores to it.
    struct Storer {
        member: Member,
        without_look: bool,
    }

    impl Storer {
        fn new(pages: &Arc<CodePages>, without_look: bool) -> Self {
            Self {
                member: Member::try_new(pages.clone()).unwrap(),
                without_look,
            }
        }

        fn boundary(&mut self) {
            if self.member.has_news() {
                let without_look = &mut self.without_look;
                self.member.heed(|pages| {
                    *without_look &= pages.version_of(PAGE) == 0;
                });
            }
        }

        fn store(&mut self, byte: &AtomicU64, value: u64, marks: bool) {
            self.boundary();
            if marks {
                // Changes the version itself, maybe after others have.
                self.member.mark(OTHER_PAGE, || {});
            }
            byte.store(value, Relaxed);
            if !self.without_look {
                // As a miss in the TLB does: the entry follows the mark as it is before the store.
                self.without_look = !self.member.stored(PAGE);
            }
        }
    }

    /// A CPU that decodes the byte and executes it.
    struct Executor {
        member: Member,
        decoded: u64,
        version: Option<u64>,
    }

    impl Executor {
        fn new(pages: &Arc<CodePages>) -> Self {
            Self {
                member: Member::try_new(pages.clone()).unwrap(),
                decoded: u64::MAX,
                version: None,
            }
        }

        /// Enters the block: looks at it if it has to.
        fn execute(&mut self, byte: &AtomicU64) {
            if self.member.has_news() {
                self.member.heed(|_| {});
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

    /// After all CPUs have stopped: the executor sees the last store at its next entry.
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
                            storer.member.enter();
                            storer.store(&byte, 1 + run as u64, marks);
                            storer.boundary();
                            storer.member.leave();
                        }
                    })
                })
                .collect();
            let mut executor = Executor::new(&pages);
            executor.member.enter();
            executor.execute(&byte);
            executor.execute(&byte);
            for thread in threads {
                thread.join().unwrap();
            }
            executor.execute(&byte);
            assert_eq!(executor.decoded, byte.load(Relaxed));
            // Trusted now that nobody stores.
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

    #[test]
    fn two_cpus_that_mark_a_page_trust_it_together() {
        bounded(|| {
            let pages = CodePages::try_new().unwrap();
            let byte = Arc::new(AtomicU64::new(0));
            let other = {
                let (pages, byte) = (pages.clone(), byte.clone());
                thread::spawn(move || {
                    let mut executor = Executor::new(&pages);
                    executor.member.enter();
                    executor.execute(&byte);
                    executor.member.leave();
                })
            };
            let mut executor = Executor::new(&pages);
            executor.member.enter();
            executor.execute(&byte);
            other.join().unwrap();
            executor.execute(&byte);
            executor.execute(&byte);
            assert!(executor.version.is_some());
        });
    }
}
