//! A model of the entries that a hardware page walker may have cached. These are all valid entries, leaves or not, that
//! the walker could have read since the last completed flush of the entry's range.
//!
//! A walker may cache an entry in the tables at any time, so the model need not record such entries. An entry that was
//! removed from the tables and was not flushed since is a *ghost*. The model keeps a copy of each table that a walker
//! can reach. Whenever the engine asks the platform for a table, and before each flush, the model compares the table
//! with its copy. Every entry that was removed or has lost a right becomes a ghost. A flush ends the ghosts of its
//! range. A walker may still reach a removed table through its ghost, so such a table is compared, too.
//!
//! * On formats with break-before-make, a new valid entry must not *conflict* with a ghost. Entries conflict if they
//!   map different frames or have different sizes or memory types.
//! * On all formats, a table to which a ghost refers must not be freed ([`Tlb::freed`]), and after an operation that
//!   flushes, there must be no ghost ([`Tlb::stale`], [`Tlb::check_backing`], [`Tlb::check_slot`]).
//!
//! Some walkers obey a missing right to write in an entry that refers to a table ([`Format::TABLE_WRITE`]): leaves
//! below such an entry cannot be cached as writable. When the model finds that an entry has lost this right, the right
//! becomes a ghost, and so does the right of each leaf below the entry. After the flush of these ghosts, the leaves
//! below may lose their right without another flush.
//!
//! The model reads a table only at certain moments, so it may miss a ghost. But a hardware TLB could really hold each
//! of its ghosts. A flush that takes time ends only the ghosts that existed when the flush began
//! ([`Tlb::flush_begins`], [`Tlb::flush_ended`]).
//!
//! The model needs no OS: the machines on which [`crate`] runs operations and the monitors in `metal` share it.

mod cached;
mod comparison;
mod entry;
mod table;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

use slat::{Entries, Format, Gfn, Level, Pfn, Stale, VmId};

#[cfg(feature = "std")]
use crate::host::HostMemory;
use crate::lock::Lock;
use entry::{Ghost, Place, Value, overlap};
use table::{Table, Walker, root_pages};

/// The maximum number of conflicts that are kept as text until a caller asks for them.
const FINDINGS: usize = 20;

/// The model of the TLBs of one VM's CPUs. It reads the VM's tables from the call of `Tlb::watch` on.
#[derive(Default)]
pub struct Tlb {
    watching: AtomicBool,
    conflicts: AtomicU64,
    inner: Lock<Inner>,
}

#[derive(Default)]
struct Inner {
    walker: Option<Walker>,
    /// The function that returns the entries in a table frame.
    entries: Option<Box<dyn Fn(Pfn) -> NonNull<Entries> + Send>>,
    /// The tables that a page walker can reach.
    tables: BTreeMap<Pfn, Table>,
    ghosts: Vec<Ghost>,
    /// The number of ghosts made so far.
    made: u64,
    /// The tables for which the engine has asked since [`Tlb::stale`] last compared them.
    touched: BTreeSet<Pfn>,
    /// Whether ghosts may exist that [`Tlb::stale`] has not checked.
    lost: bool,
    conflicts: u64,
    /// The texts of the first conflicts.
    findings: Vec<String>,
}

impl Tlb {
    /// Makes page walkers of `F` use the tables of `vm` from now on. `roots` contains the root table of each address
    /// space; for a root of several tables, the first table. A table's frame number gives the address of its memory in
    /// this process.
    ///
    /// # Safety
    /// - the frame of a table is memory at that address, and is accessed atomically only, until it is given to
    ///   [`Tlb::freed`], or [`Tlb::forget`] was called.
    pub unsafe fn watch<F: Format>(&self, vm: VmId, roots: &[Pfn]) {
        let at_its_address = |frame: Pfn| {
            NonNull::new(F::GRANULE.hpa(frame).0 as *mut Entries).expect("no frame is at address 0")
        };
        // SAFETY: the frame of each table is memory at its address, which is accessed atomically only, as this
        // function's contract requires.
        unsafe { self.watch_at::<F>(vm, roots, at_its_address) };
    }

    /// Watches the tables like [`Tlb::watch`], but calls `entries` to find the memory of a frame. The model calls
    /// `entries` under its lock, so `entries` must not call the model.
    ///
    /// # Safety
    /// - the memory that `entries` returns for the frame of a table is accessed atomically only, until the frame is
    ///   given to [`Tlb::freed`], or [`Tlb::forget`] was called.
    pub unsafe fn watch_at<F: Format>(
        &self,
        vm: VmId,
        roots: &[Pfn],
        entries: impl Fn(Pfn) -> NonNull<Entries> + Send + 'static,
    ) {
        let mut inner = self.inner.lock();
        *inner = Inner {
            walker: Some(Walker {
                vm,
                decode: F::decode,
                is_protected: F::is_protected,
                protect: F::write_protect,
                path_write: match F::PROTECT_FROM > Level::MEGA {
                    true => F::TABLE_WRITE,
                    false => 0,
                },
                break_before_make: F::BREAK_BEFORE_MAKE,
                granule: F::GRANULE,
                top: F::TOP,
            }),
            entries: Some(Box::new(entries)),
            ..Inner::default()
        };
        for (space, root) in roots.iter().enumerate() {
            for i in 0..F::ROOT_TABLES as u64 {
                let place = Place {
                    space,
                    granule: F::GRANULE,
                    level: F::TOP,
                    gfn: i * root_pages(F::GRANULE, F::TOP),
                };
                inner.reach(root.add(i), place, None);
            }
        }
        self.watching.store(true, SeqCst);
    }

    /// Makes the model ignore all later changes of the tables. Call when no CPU can walk the tables any more.
    pub fn forget(&self) {
        self.watching.store(false, SeqCst);
        let mut inner = self.inner.lock();
        inner.walker = None;
        inner.entries = None;
        inner.tables.clear();
        inner.ghosts.clear();
        inner.touched.clear();
    }

    /// Returns the number of conflicts so far.
    pub fn conflicts(&self) -> u64 {
        self.conflicts.load(SeqCst)
    }

    /// Returns the number of ghosts since [`Tlb::watch`], which are the entries that were removed or have lost a right.
    pub fn ghosts(&self) -> u64 {
        self.inner.lock().made
    }

    fn with<R>(&self, then: impl FnOnce(&mut Inner) -> R) -> Option<R> {
        if !self.watching.load(Relaxed) {
            return None;
        }
        let mut inner = self.inner.lock();
        let before = inner.conflicts;
        let result = then(&mut inner);
        self.conflicts.fetch_add(inner.conflicts - before, SeqCst);
        Some(result)
    }

    /// Compares the table in `frame` with its copy. Call when the engine reaches the table, before it reads or changes
    /// it.
    #[inline]
    pub fn reached(&self, frame: Pfn) {
        if self.watching.load(Relaxed) {
            self.with(|inner| {
                inner.compare(frame);
                if inner.tables.contains_key(&frame) {
                    inner.touched.insert(frame);
                }
            });
        }
    }

    /// Returns the moment to pass to [`Tlb::flush_ended`]. Entries that are removed after this moment may still be
    /// cached after the flush. Call before a flush begins.
    pub fn flush_begins(&self) -> u64 {
        let moment = self.with(|inner| {
            inner.compare_touched();
            inner.made
        });
        moment.unwrap_or(0)
    }

    /// Ends the ghosts that a flush of `range` has dropped from the TLBs. The flush began at `moment`, and is known to
    /// drop only the kinds of entries in `stale`. Call when the flush is complete.
    pub fn flush_ended(&self, vm: VmId, range: &Range<Gfn>, stale: Stale, moment: u64) {
        self.with(|inner| {
            if inner.walker.is_some_and(|walker| walker.vm == vm) {
                inner.compare_touched();
                inner.flush(&(range.start.0..range.end.0), stale, moment);
            }
        });
    }

    /// Ends the ghosts of `range`, for a flush that takes no time. Call where a machine would execute INVEPT, TLBI or
    /// HFENCE.
    pub fn flushed(&self, vm: VmId, range: &Range<Gfn>, stale: Stale) {
        self.flush_ended(vm, range, stale, self.flush_begins());
    }

    /// Removes a freed table from the model. Call when its frame is freed, before anything is written to the frame.
    ///
    /// # Errors
    /// A page walker can still reach the table in the frame.
    pub fn freed(&self, frame: Pfn) -> Result<(), String> {
        let known = self.with(|inner| {
            if inner.tables.contains_key(&frame) {
                inner.compare_touched();
            }
            let known = inner.tables.get(&frame).map(|table| table.place);
            inner.forget_below(frame);
            known
        });
        match known.flatten() {
            Some(place) => Err(format!("the table of {place:x?} is freed and not flushed")),
            None => Ok(()),
        }
    }

    /// Returns a message about an entry that broke break-before-make, or about a cached entry that allows an access
    /// that the tables do not allow. `None` if there is no such entry. Call when no operation is in progress.
    pub fn stale(&self) -> Option<String> {
        self.with(|inner| {
            inner.compare_touched();
            inner.touched.clear();
            if let Some(finding) = inner.findings.pop() {
                return Some(finding);
            }
            if !core::mem::take(&mut inner.lost) {
                return None;
            }
            let stale = inner.ghosts.iter().find(|ghost| !inner.is_explained(ghost));
            stale.map(|ghost| {
                let now = inner.leaf(ghost.place.space, ghost.place.gfn);
                format!("{ghost:x?} is still cached; the tables have {now:x?}")
            })
        })
        .flatten()
    }

    /// Returns the texts of the conflicts since the last call. If there were many conflicts, returns only the first of
    /// them.
    pub fn findings(&self) -> Vec<String> {
        core::mem::take(&mut self.inner.lock().findings)
    }

    /// Checks that no ghost maps one of `pages` of host memory. The error describes such a ghost: a page walker may
    /// have cached it, and it is not in the tables. Call during an invalidation of `pages`.
    #[cfg(feature = "std")]
    pub fn check_backing(&self, pages: &Range<u64>) -> Result<(), String> {
        self.check_frames(|first, count| {
            let (page, _) = HostMemory::identify(first);
            overlap(&(page..page + count), pages)
        })
    }

    /// Checks like [`Tlb::check_backing`] that no ghost maps a frame that is wrong: calls `are_wrong` with the first
    /// frame of a leaf and the number of the leaf's frames.
    pub fn check_frames(&self, are_wrong: impl Fn(Pfn, u64) -> bool) -> Result<(), String> {
        self.check_ghosts(|place, value| match value {
            Value::Leaf { pfn, .. } => are_wrong(*pfn, place.pages()),
            Value::Table { .. } | Value::TableWrite => false,
        })
    }

    /// Checks that no page walker can have cached a leaf for `gfns`. The error describes such a leaf. Call after
    /// deleting a slot.
    pub fn check_gone(&self, space: usize, gfns: &Range<u64>) -> Result<(), String> {
        self.check_slot(space, gfns, |_, _| false)
    }

    /// Checks the leaves of `gfns` that a page walker may have cached, by calling `is_of_slot` with the first guest
    /// frame and the first host frame of each. The error describes a leaf for which `is_of_slot` returns false. Call
    /// after creating or moving a slot, for the slot's old frames and for its new frames.
    pub fn check_slot(
        &self,
        space: usize,
        gfns: &Range<u64>,
        is_of_slot: impl Fn(u64, Pfn) -> bool,
    ) -> Result<(), String> {
        self.check_ghosts(|place, value| match value {
            Value::Leaf { pfn, .. } => {
                let is_there = place.space == space && overlap(&place.gfns(), gfns);
                is_there && !is_of_slot(place.gfn, *pfn)
            }
            Value::Table { .. } | Value::TableWrite => false,
        })
    }

    fn check_ghosts(&self, is_wrong: impl Fn(&Place, &Value) -> bool) -> Result<(), String> {
        let wrong = self.with(|inner| {
            inner.compare_touched();
            let mut wrong = None;
            for ghost in &inner.ghosts {
                inner.each_cached(ghost, &mut |place, value| {
                    if is_wrong(&place, &value) {
                        wrong = Some(format!("{value:x?} of {place:x?} is still cached"));
                    }
                });
            }
            wrong
        });
        wrong.flatten().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests;
