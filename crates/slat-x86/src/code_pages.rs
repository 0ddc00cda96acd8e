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
//! - **Trust.** A CPU first reads the slot and finds it trusted, then compares the code with memory. From then on the code is good
//!   as long as the slot does not change: a store that the comparison missed was made without a look before its CPU heeded the
//!   mark (but then the comparison has seen it: heeding is a release, reading what was heeded an acquire), or it changes the slot
//!   after the comparison.
//! - **When a change is seen.** A CPU looks at the version at each block boundary. So another CPU's store is seen before the next
//!   block; a CPU's own store ends its block (`Cpu::note_store`).
//! - **Stores by anyone else**, the client or a device, are not known here. Code is compared with memory again after each beginning
//!   of a run and each event that serialises instructions (`Cpu::serialize`).
//! - **Pages that hold code no more.** After [`STRIKES`] stores without a comparison in between, a page's mark is removed:
//!   otherwise stores to it would stay slow for ever.
//!
//! Slots and version change under one lock, the slot first: who has seen a version sees the slots of all earlier ones. A CPU that
//! does not run has heeded everything: it looks at the version before it executes. Beginning to run stores to the seat, then reads
//! the version; marking stores the version, then reads the seats; both have a full fence in between, so at least one sees the
//! other.
//!
//! A slot belongs to all host pages whose numbers agree in the low bits. That costs a comparison too many, nothing else.

use crate::heap::OutOfMemory;
use crate::sync::{Arc, AtomicU64, Mutex, MutexGuard, fence};
use slots::Slots;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// Stores to a marked page, without a comparison of its code in between, after which it is marked no more.
const STRIKES: u64 = 15;
/// Bits of a slot below the version: the number of such stores.
const STRIKE_BITS: u32 = 4;

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
    seats: Mutex<Vec<Arc<AtomicU64>>>,
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
        if self.slots.at(host as usize).load(Acquire) != 0 {
            self.lock().strike(host as usize);
        }
    }

    fn lock(&self) -> Change<'_> {
        Change {
            seats: self.seats.lock().unwrap_or_else(PoisonError::into_inner),
            pages: self,
        }
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
    seats: MutexGuard<'a, Vec<Arc<AtomicU64>>>,
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

    /// Gives the page of `host` a new version for a store, or removes its mark. Returns the version, and whether it is marked.
    fn strike(&self, host: usize) -> Option<(u64, bool)> {
        let now = self.pages.slots.at(host).load(Relaxed);
        let strikes = now % (1 << STRIKE_BITS) + 1;
        let stays = strikes < STRIKES;
        (now != 0).then(|| (self.next(host, stays, strikes), stays))
    }

    /// Returns the version that all running CPUs have heeded.
    fn heeded_by_all(&self) -> u64 {
        let version = self.pages.version.load(Relaxed);
        // Between the store of the version and the loads of the seats: see the module.
        fence(SeqCst);
        let seats = self.seats.iter().map(|seat| seat.load(Acquire));
        seats.fold(version, u64::min)
    }
}

/// One CPU among those that share a [`CodePages`].
pub(crate) struct Member {
    pages: Arc<CodePages>,
    /// The version that this CPU has heeded, for the others.
    seat: Arc<AtomicU64>,
    heeded: u64,
    /// A version that all running CPUs have heeded.
    heeded_by_all: u64,
}

impl Member {
    /// Makes a member that does not run yet.
    pub(crate) fn try_new(pages: Arc<CodePages>) -> Result<Self, OutOfMemory> {
        let seat = Arc::new(AtomicU64::new(STANDS_STILL));
        let mut change = pages.lock();
        change.seats.try_reserve(1).map_err(|_| OutOfMemory)?;
        change.seats.push(seat.clone());
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
        if now % (1 << STRIKE_BITS) != 0 || now == 0 {
            let pages = self.pages.clone();
            let change = pages.lock();
            now = slot.load(Relaxed) & !((1 << STRIKE_BITS) - 1);
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

    /// Call after a store of this CPU to the page of `host`. Returns whether the page is marked: then this CPU's decoded code of it
    /// may not be good any more.
    pub(crate) fn stored(&mut self, host: usize) -> Stored {
        if self.pages.slots.at(host).load(Acquire) == 0 {
            return Stored::NoCode;
        }
        let struck = self.pages.lock().strike(host);
        match struck {
            None => Stored::NoCode,
            Some((version, stays)) => {
                self.changed(version);
                match stays {
                    true => Stored::Code,
                    false => Stored::CodeNoMore,
                }
            }
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut change = self.pages.lock();
        change.seats.retain(|seat| !Arc::ptr_eq(seat, &self.seat));
    }
}

/// What a store found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// The page is not marked.
    NoCode,
    /// The page is marked.
    Code,
    /// The page was marked until this store.
    CodeNoMore,
}
