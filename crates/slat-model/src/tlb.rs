//! What a hardware page walker may have cached: every valid entry that it could have read since the last completed flush of its
//! range, leaves and entries that point to tables alike.
//!
//! Entries in the tables may be cached at any time, so they need not be recorded. An entry that was removed from the tables and
//! not flushed since is a *ghost*. The model keeps a copy of each table that a walker can reach, compares it with the table
//! whenever the engine asks the platform for that table, and before each flush, and makes a ghost of every entry that was
//! removed or has lost a right. A flush ends the ghosts of its range. A removed table is reached through its ghost and is
//! compared, too.
//!
//! * On formats with break-before-make, a new valid entry must not *conflict* with a ghost: map another frame, have another
//!   size or another memory type.
//! * On all formats, a table that a ghost points to is not freed ([`Tlb::freed`]), and the caller of an operation that has
//!   flushed finds no ghost ([`Tlb::stale`], [`Tlb::check_backing`], [`Tlb::check_slot`]).
//!
//! Where walkers obey a write-protected entry that refers to a table ([`Format::TABLE_WRITE`]), what is below one cannot be cached as
//! writable: when such an entry is found, the right that it had becomes a ghost, and so does that of each leaf below it. After that
//! leaves below it may lose the right without another flush.
//!
//! The model reads a table at certain moments only, so it may miss a ghost; it makes none that a walker could not have. A flush
//! that takes time ends the ghosts that existed when it began ([`Tlb::flush_begins`], [`Tlb::flush_ended`]).
//!
//! It needs no OS: the machines that [`crate`] runs operations on and the monitors in `metal` share this model.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

use slat::format::Entry;
use slat::{Entries, Format, Gfn, Granule, Level, MemoryType, Pfn, Stale, VmId};

#[cfg(feature = "std")]
use crate::host::HostMemory;
use crate::lock::Lock;

/// Conflicts that are kept as text until a caller asks for them.
const FINDINGS: usize = 20;

/// The model; it knows the tables of one VM, and nothing before `Tlb::watch`.
#[derive(Default)]
pub struct Tlb {
    watching: AtomicBool,
    conflicts: AtomicU64,
    inner: Lock<Inner>,
}

#[derive(Default)]
struct Inner {
    walker: Option<Walker>,
    /// Returns the entries in a table frame.
    entries: Option<Box<dyn Fn(Pfn) -> NonNull<Entries> + Send>>,
    /// Tables that a walker can reach.
    tables: BTreeMap<Pfn, Table>,
    ghosts: Vec<Ghost>,
    /// Number of all tables so far.
    made: u64,
    /// Tables that the engine asked for since they were last compared in a quiet moment.
    touched: BTreeSet<Pfn>,
    /// Whether there are ghosts that [`Tlb::stale`] has not seen.
    lost: bool,
    conflicts: u64,
    /// Texts of the first conflicts.
    findings: Vec<String>,
}

/// The model's knowledge of a format, and of the VM.
#[derive(Clone, Copy)]
struct Walker {
    vm: VmId,
    decode: fn(u64, Level) -> Entry,
    /// Whether an entry that refers to a table is write-protected.
    is_protected: fn(u64) -> bool,
    /// Takes the right to write from a leaf.
    protect: fn(u64) -> u64,
    /// The right to write of an entry that refers to a table, if it is cached as that of the whole path, as that of a leaf is; else 0.
    path_write: u64,
    break_before_make: bool,
    granule: Granule,
    top: Level,
}

/// Position of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    space: usize,
    /// That of the tables, the same for all.
    granule: Granule,
    level: Level,
    /// First frame that the entry covers.
    gfn: u64,
}

impl Place {
    fn pages(&self) -> u64 {
        self.granule.pages(self.level)
    }

    fn gfns(&self) -> Range<u64> {
        self.gfn..self.gfn + self.pages()
    }
}

/// A valid entry, as far as a walker cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Table {
        frame: Pfn,
        write: bool,
    },
    /// Of ghosts only: the right to write of an entry that refers to a table.
    TableWrite,
    Leaf {
        pfn: Pfn,
        memory: MemoryType,
        write: bool,
        execute: bool,
        /// A walker that has cached a dirty leaf does not set the bit again.
        dirty: bool,
    },
}

impl Value {
    /// Whether `now`, which is at the same position, allows all that `self` does.
    fn is_kept_by(&self, now: Option<Value>) -> bool {
        match (*self, now) {
            (
                Value::Leaf {
                    write,
                    execute,
                    dirty,
                    ..
                },
                Some(Value::Leaf {
                    write: now_write,
                    execute: now_execute,
                    dirty: now_dirty,
                    ..
                }),
            ) => {
                let kept = (!write || now_write) && (!execute || now_execute);
                kept && (!dirty || now_dirty) && now.is_some_and(|now| self.means(&now))
            }
            (
                Value::Table { frame, write },
                Some(Value::Table {
                    frame: now,
                    write: stays,
                }),
            ) => frame == now && (!write || stays),
            _ => false,
        }
    }

    /// Returns the table that the entry refers to.
    fn table(&self) -> Option<Pfn> {
        match self {
            Value::Table { frame, .. } => Some(*frame),
            _ => None,
        }
    }

    /// Whether both point to the same frame and, if they are leaves, have the same memory type.
    fn means(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::Table { frame, .. }, Value::Table { frame: other, .. }) => frame == other,
            (
                Value::Leaf { pfn, memory, .. },
                Value::Leaf {
                    pfn: other_pfn,
                    memory: other_memory,
                    ..
                },
            ) => pfn == other_pfn && memory == other_memory,
            _ => false,
        }
    }

    /// Returns the 4 KiB part at `offset` pages of a leaf.
    fn at(self, offset: u64) -> Value {
        match self {
            Value::Leaf {
                pfn,
                memory,
                write,
                execute,
                dirty,
            } => Value::Leaf {
                pfn: pfn.add(offset),
                memory,
                write,
                execute,
                dirty,
            },
            table => table,
        }
    }
}

struct Table {
    /// Position of the table's first entry.
    place: Place,
    entries: NonNull<Entries>,
    /// The table above, in which it was found.
    above: Option<Pfn>,
    seen: Box<[u64]>,
}

// SAFETY: the entries are read atomically, and are memory until the table is dropped from the model ([`Tlb::watch_at`]).
unsafe impl Send for Table {}

impl Table {
    /// Reads entry `index`.
    fn read(&self, index: usize) -> u64 {
        assert!(index < self.seen.len());
        // SAFETY: the promise of `Tlb::watch_at`. The model drops tables that were freed or forgotten.
        let entry = unsafe { self.entries.cast::<AtomicU64>().add(index).as_ref() };
        entry.load(Acquire)
    }

    fn place(&self, index: usize) -> Place {
        Place {
            gfn: self.place.gfn + index as u64 * self.place.pages(),
            ..self.place
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Ghost {
    place: Place,
    value: Value,
    /// Number of ghosts made before it.
    number: u64,
}

/// Returns the number of frames that one table of the root translates.
fn root_pages(granule: Granule, top: Level) -> u64 {
    granule.pages(top) * granule.entries() as u64
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Walker {
    fn value(&self, bits: u64, level: Level) -> Option<Value> {
        match (self.decode)(bits, level) {
            Entry::Table(frame) => Some(Value::Table {
                frame,
                write: !(self.is_protected)(bits),
            }),
            Entry::Leaf(leaf) => Some(Value::Leaf {
                pfn: leaf.pfn,
                memory: leaf.memory,
                write: leaf.write,
                execute: leaf.execute,
                dirty: leaf.dirty,
            }),
            Entry::Empty | Entry::Mmio { .. } | Entry::Broken(_) => None,
        }
    }

    /// Returns `bits`, read from a table of `level` whose path is write-protected, with the rights that a walker may cache.
    fn below_protected(&self, bits: u64, level: Level) -> u64 {
        match self.value(bits, level) {
            Some(Value::Leaf { write: true, .. }) => (self.protect)(bits),
            Some(Value::Table { .. }) => bits & !self.path_write,
            _ => bits,
        }
    }
}

impl Tlb {
    /// Makes walkers of `F` use the tables of `vm` from now on, whose root table (the first of several) in each address space
    /// is one of `roots`, and whose frames are memory at the addresses that their numbers say.
    ///
    /// # Safety
    /// - the frame of a table is memory at that address, and is accessed atomically only, until it is given to
    ///   [`Tlb::freed`], or [`Tlb::forget`] was called.
    pub unsafe fn watch<F: Format>(&self, vm: VmId, roots: &[Pfn]) {
        let at_its_address = |frame: Pfn| {
            NonNull::new(F::GRANULE.hpa(frame).0 as *mut Entries).expect("no frame is at address 0")
        };
        // SAFETY: the caller's promise.
        unsafe { self.watch_at::<F>(vm, roots, at_its_address) };
    }

    /// Like [`Tlb::watch`], but for frames whose memory is where `entries` says, which is called under the model's lock and
    /// must not call the model.
    ///
    /// # Safety
    /// - the memory that `entries` returns for the frame of a table is accessed atomically only, until the frame is given to
    ///   [`Tlb::freed`], or [`Tlb::forget`] was called.
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

    /// Call when no CPU can walk the tables any more: later changes of the tables do not matter.
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

    /// Returns the number of ghosts since [`Tlb::watch`]: entries that were removed or have lost a right.
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

    /// Call when the engine reaches the table in `frame`, before it reads or changes it.
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

    /// Call before a flush begins. Returns the moment, for [`Tlb::flush_ended`]: entries removed after it may be cached after
    /// the flush.
    pub fn flush_begins(&self) -> u64 {
        let moment = self.with(|inner| {
            inner.compare_touched();
            inner.made
        });
        moment.unwrap_or(0)
    }

    /// Call when a flush of `range` that began at `moment` is complete, and is only known to have dropped the entries in
    /// `stale`.
    pub fn flush_ended(&self, vm: VmId, range: &Range<Gfn>, stale: Stale, moment: u64) {
        self.with(|inner| {
            if inner.walker.is_some_and(|walker| walker.vm == vm) {
                inner.compare_touched();
                inner.flush(&(range.start.0..range.end.0), stale, moment);
            }
        });
    }

    /// Call for a flush of `range` that takes no time: where a machine would execute INVEPT, TLBI or HFENCE.
    pub fn flushed(&self, vm: VmId, range: &Range<Gfn>, stale: Stale) {
        self.flush_ended(vm, range, stale, self.flush_begins());
    }

    /// Call when a frame is freed, before anything is written to it.
    ///
    /// # Errors
    /// That a walker can still reach the table in the frame.
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

    /// Call in a quiet moment, when every operation has returned. Returns a conflict, or a cached entry that allows what the
    /// tables do not.
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

    /// Returns the conflicts since the last call, only the first if there are many.
    pub fn findings(&self) -> Vec<String> {
        core::mem::take(&mut self.inner.lock().findings)
    }

    /// Call while an invalidation of `pages` of host memory is in progress. The error is an entry that a walker may have
    /// cached, that is not in the tables, and that maps one of the pages.
    #[cfg(feature = "std")]
    pub fn check_backing(&self, pages: &Range<u64>) -> Result<(), String> {
        self.check_frames(|first, count| {
            let (page, _) = HostMemory::identify(first);
            overlap(&(page..page + count), pages)
        })
    }

    /// Like [`Tlb::check_backing`], but for frames: calls `are_wrong` with the first frame of a leaf and the number of frames.
    pub fn check_frames(&self, are_wrong: impl Fn(Pfn, u64) -> bool) -> Result<(), String> {
        self.check_ghosts(|place, value| match value {
            Value::Leaf { pfn, .. } => are_wrong(*pfn, place.pages()),
            Value::Table { .. } | Value::TableWrite => false,
        })
    }

    /// Call after a slot was deleted. The error is a leaf of `gfns` that a walker may have cached.
    pub fn check_gone(&self, space: usize, gfns: &Range<u64>) -> Result<(), String> {
        self.check_slot(space, gfns, |_, _| false)
    }

    /// Call after a slot was created or moved, for the frames where it is or was. The error is a leaf of `gfns` that a walker may
    /// have cached, and for whose first frames, the guest's and the host's, `is_of_slot` is false.
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

impl Inner {
    /// Adds the table in `frame`, which a walker can reach from now on, by an entry of the table `above`; its entries are at and
    /// after `place`.
    fn reach(&mut self, frame: Pfn, place: Place, above: Option<Pfn>) {
        let entries = self.entries.as_ref();
        let entries = entries.expect("tables are known while it watches")(frame);
        let seen = vec![0; place.granule.entries()].into_boxed_slice();
        let table = Table {
            place,
            entries,
            above,
            seen,
        };
        self.tables.insert(frame, table);
        self.touched.insert(frame);
        self.compare(frame);
    }

    fn compare_touched(&mut self) {
        let touched: Vec<_> = self.touched.iter().copied().collect();
        for frame in touched {
            self.compare(frame);
        }
    }

    /// Compares a table with its copy.
    fn compare(&mut self, frame: Pfn) {
        let protected = self.is_below_protected(frame);
        let Some((walker, table)) = self.walker.zip(self.tables.get_mut(&frame)) else {
            return;
        };
        let level = table.place.level;
        let mut changes = Vec::new();
        for i in 0..table.seen.len() {
            let now = match protected {
                true => walker.below_protected(table.read(i), level),
                false => table.read(i),
            };
            let was = core::mem::replace(&mut table.seen[i], now);
            if now != was {
                changes.push((i, was, now));
            }
        }
        for (i, was, now) in changes {
            if let Some(table) = self.tables.get(&frame) {
                let place = table.place(i);
                self.change(frame, place, was, now);
            }
        }
    }

    /// Whether the path to the table in `frame` is write-protected now.
    fn is_below_protected(&self, frame: Pfn) -> bool {
        let Some(walker) = self.walker else {
            return false;
        };
        let (mut frame, mut protected) = (frame, false);
        while let Some(table) = self.tables.get(&frame)
            && let Some(above) = table.above
            && let Some(upper) = self.tables.get(&above)
        {
            let level = upper.place.level;
            let bits = upper.read(level.index(Gfn(table.place.gfn)));
            match walker.value(bits, level) {
                Some(Value::Table {
                    frame: lower,
                    write,
                }) if lower == frame => protected |= !write,
                // It was removed: what is cached of it was cached before.
                _ => return false,
            }
            frame = above;
        }
        protected
    }

    /// Takes the right to write from what was seen in the table in `frame`, and below. A walker may still have cached it.
    fn protect_below(&mut self, frame: Pfn) {
        let Some((walker, table)) = self.walker.zip(self.tables.get_mut(&frame)) else {
            return;
        };
        let level = table.place.level;
        let mut lost = Vec::new();
        for i in 0..table.seen.len() {
            let was = table.seen[i];
            table.seen[i] = walker.below_protected(was, level);
            if table.seen[i] != was {
                lost.extend(walker.value(was, level).map(|value| match value {
                    Value::Table { .. } => (table.place(i), Value::TableWrite),
                    leaf => (table.place(i), leaf),
                }));
            }
        }
        for (place, value) in lost {
            self.add_ghost(place, value);
        }
        for below in self.below(frame) {
            self.protect_below(below);
        }
    }

    fn add_ghost(&mut self, place: Place, value: Value) {
        let number = self.made;
        self.made += 1;
        self.ghosts.push(Ghost {
            place,
            value,
            number,
        });
        self.lost = true;
    }

    /// Call when an entry of the table in `frame`, at `place`, was seen to change.
    fn change(&mut self, frame: Pfn, place: Place, was: u64, now: u64) {
        let walker = self.walker.expect("tables are known while it watches");
        let value = |bits| walker.value(bits, place.level);
        let (was, now) = (value(was), value(now));
        if let Some(value) = was
            && !value.is_kept_by(now)
        {
            let stays = value
                .table()
                .filter(|_| now.and_then(|now| now.table()) == value.table());
            if let Some(below) = stays {
                self.protect_below(below);
                self.add_ghost(place, Value::TableWrite);
            } else {
                if let Some(below) = value.table() {
                    self.compare_below(below);
                }
                self.add_ghost(place, value);
            }
        }
        let Some(value) = now else { return };
        if walker.break_before_make
            && let Some(ghost) = self.ghosts.iter().find(|g| g.conflicts(&place, &value))
        {
            self.conflicts += 1;
            if self.findings.len() < FINDINGS {
                let finding = format!("{value:x?} of {place:x?} conflicts with {ghost:x?}");
                self.findings.push(finding);
            }
        }
        if let Some(below) = value.table()
            && was.and_then(|was| was.table()) != Some(below)
        {
            let level = place.level.below();
            self.reach(below, Place { level, ..place }, Some(frame));
        }
    }

    fn compare_below(&mut self, frame: Pfn) {
        self.compare(frame);
        for below in self.below(frame) {
            self.compare_below(below);
        }
    }

    /// Returns the tables that entries of the table in `frame` point to.
    fn below(&self, frame: Pfn) -> Vec<Pfn> {
        let Some((walker, table)) = self.walker.zip(self.tables.get(&frame)) else {
            return Vec::new();
        };
        let level = table.place.level;
        if level == Level::PAGE {
            return Vec::new();
        }
        let values = table.seen.iter().map(|bits| walker.value(*bits, level));
        let tables = values.filter_map(|value| match value {
            Some(value) => value.table(),
            None => None,
        });
        tables.collect()
    }

    fn forget_below(&mut self, frame: Pfn) {
        for below in self.below(frame) {
            self.forget_below(below);
        }
        self.tables.remove(&frame);
        self.touched.remove(&frame);
    }

    /// Ends the ghosts of `range` that were made before `moment`, as far as `stale` includes them.
    fn flush(&mut self, range: &Range<u64>, stale: Stale, moment: u64) {
        let is_meant = |ghost: &Ghost| match ghost.value {
            Value::Leaf { .. } => stale.level.is_none_or(|level| level == ghost.place.level),
            Value::Table { .. } | Value::TableWrite => stale.tables,
        };
        let all = core::mem::take(&mut self.ghosts);
        let (gone, kept): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|g| g.number < moment && overlap(&g.place.gfns(), range) && is_meant(g));
        let mut left = Vec::new();
        for ghost in &gone {
            self.each_cached(ghost, &mut |place, value| {
                let leaf = matches!(value, Value::Leaf { .. });
                if leaf && !overlap(&place.gfns(), range) {
                    let number = ghost.number;
                    left.push(Ghost {
                        place,
                        value,
                        number,
                    });
                }
            });
        }
        for ghost in gone {
            if let Some(below) = ghost.value.table() {
                self.forget_below(below);
            }
        }
        self.ghosts = kept;
        self.ghosts.append(&mut left);
    }

    /// Calls `each` for a ghost, and for all that is reached through it.
    fn each_cached(&self, ghost: &Ghost, each: &mut impl FnMut(Place, Value)) {
        each(ghost.place, ghost.value);
        if let Some(frame) = ghost.value.table() {
            self.each_below(frame, each);
        }
    }

    fn each_below(&self, frame: Pfn, each: &mut impl FnMut(Place, Value)) {
        let Some((walker, table)) = self.walker.zip(self.tables.get(&frame)) else {
            return;
        };
        for (i, bits) in table.seen.iter().enumerate() {
            let place = table.place(i);
            if let Some(value) = walker.value(*bits, place.level) {
                each(place, value);
                if let Some(below) = value.table() {
                    self.each_below(below, each);
                }
            }
        }
    }

    /// Returns the leaf of the tables that translates `gfn`, as of the last comparison.
    fn leaf(&self, space: usize, gfn: u64) -> Option<(Place, Value)> {
        let walker = self.walker?;
        let root_pages = root_pages(walker.granule, walker.top);
        let root_place = Place {
            space,
            granule: walker.granule,
            level: walker.top,
            gfn: gfn / root_pages * root_pages,
        };
        let mut tables = self.tables.values();
        let mut table = tables.find(|table| table.place == root_place)?;
        loop {
            let index = walker.granule.index(Gfn(gfn), table.place.level);
            let place = table.place(index);
            match walker.value(table.seen[index], place.level)? {
                Value::Table { frame, .. } => table = self.tables.get(&frame)?,
                leaf => return Some((place, leaf)),
            }
        }
    }

    /// Whether the tables allow all that a ghost allows, as after a split in place.
    fn is_explained(&self, ghost: &Ghost) -> bool {
        if let Value::Table { .. } | Value::TableWrite = ghost.value {
            return false;
        }
        let gfns = ghost.place.gfns();
        let mut gfn = gfns.start;
        while gfn < gfns.end {
            let Some((place, leaf)) = self.leaf(ghost.place.space, gfn) else {
                return false;
            };
            let was = ghost.value.at(gfn - gfns.start);
            if !was.is_kept_by(Some(leaf.at(gfn - place.gfn))) {
                return false;
            }
            gfn = place.gfns().end;
        }
        true
    }
}

impl Ghost {
    /// Whether a walker that may hold this ghost must not find `value` at `place`.
    fn conflicts(&self, place: &Place, value: &Value) -> bool {
        if self.place.space != place.space || !overlap(&self.place.gfns(), &place.gfns()) {
            return false;
        }
        if self.place.level == place.level {
            return !self.value.means(value);
        }
        // A leaf that was reached through a removed table does not conflict with another table: only the entries in that table
        // matter. A leaf conflicts with all that is cached below it, and with a larger leaf.
        match (value, &self.value) {
            (Value::Leaf { .. }, Value::Leaf { .. }) => true,
            (Value::Leaf { .. }, Value::Table { .. }) => self.place.level < place.level,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
