//! The bus of a VM: the devices that serve guest accesses without an exit to the client, each with its address range.
//! KVM's counterpart is `kvm_io_bus`.
//!
//! An access is offered to the devices whose range contains it. Their order is that of KVM's bus: by the first address
//! of the range, then by its end, then by the time of registration. The first device that accepts the access serves it.
//! The devices themselves are in `io_devices`.
//!
//! # Concurrency
//! The registrations are an immutable [`Table`]; a change replaces the whole table. Each vCPU holds the table that it
//! saw last. The vCPU compares one number to learn whether that table is still current, so an access takes no lock. A
//! change publishes the new table, increments the number and then waits until every vCPU has passed a quiescent point
//! of the engine or has left the engine ([`slat::Vm::synchronize`]). A vCPU looks up the table and carries out the
//! access between two quiescent points. So a device serves no access after the call that removes it has returned. If
//! the client reads an eventfd, or the ring of coalesced I/O, after such a call, it sees all writes.

use crate::engine::EngineVm;
use crate::errno::{Result, no_memory};
use crate::heap;
use slat::Shared;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The kind of address that a guest accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Space {
    /// MMIO: the space of guest-physical addresses.
    Memory,
    Ports,
    /// An address space that only another architecture has. An x86 guest cannot write to this space, but KVM accepts
    /// registrations for it.
    VirtioCcw,
}

/// A range of addresses. Ranges are ordered as on KVM's bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Range {
    pub(crate) space: Space,
    pub(crate) start: u64,
    end: u64,
}

impl Range {
    /// Makes the range of `len` addresses from `start` on. A range that would wrap around ends at the last address.
    pub(crate) const fn new(space: Space, start: u64, len: u64) -> Self {
        Range {
            space,
            start,
            end: start.saturating_add(len),
        }
    }

    /// Returns the number of addresses.
    pub(crate) fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Whether this range contains `other`, which is not empty.
    pub(crate) fn contains(&self, other: &Range) -> bool {
        self.space == other.space && other.start >= self.start && other.end <= self.end
    }
}

/// A registration: a range of addresses, and the device that serves the range.
#[derive(Clone, Debug)]
pub(crate) struct Entry<D> {
    pub(crate) range: Range,
    pub(crate) device: D,
    /// The greatest end of this range and of all earlier ranges of the table in the same space.
    reach: u64,
}

/// All registrations, sorted by range.
#[derive(Debug)]
struct Table<D>(Vec<Entry<D>>);

impl<D> Table<D> {
    /// Makes a table of the registrations, sorted by range.
    fn new(mut entries: Vec<Entry<D>>) -> Self {
        // An insertion sort keeps the order of registrations of equal ranges, as it must. `sort_by_key` would keep this
        // order, too, but allocates.
        for last in 1..entries.len() {
            let at = entries[..last].partition_point(|entry| entry.range <= entries[last].range);
            entries[at..=last].rotate_right(1);
        }
        let mut before: Option<(Space, u64)> = None;
        for entry in &mut entries {
            let Range { space, end, .. } = entry.range;
            let reach = before.filter(|(other, _)| *other == space);
            entry.reach = reach.map_or(end, |(_, reach)| reach.max(end));
            before = Some((space, entry.reach));
        }
        Table(entries)
    }

    /// Returns the registrations that may contain an access at `start`. These begin at or before `start`. The result
    /// leaves out registrations at the beginning of the table that all end at or before `start`.
    fn around(&self, space: Space, start: u64) -> &[Entry<D>] {
        let end = self
            .0
            .partition_point(|entry| (entry.range.space, entry.range.start) <= (space, start));
        let begin = self.0[..end]
            .partition_point(|entry| (entry.range.space, entry.reach) <= (space, start));
        &self.0[begin..end]
    }
}

/// The registrations of a VM.
#[derive(Debug)]
pub(crate) struct IoBus<D> {
    /// The present table. `None`: the VM has never had a registration.
    table: Mutex<Option<Shared<Table<D>>>>,
    /// The number of times that the table was replaced.
    changes: AtomicU64,
}

impl<D> Default for IoBus<D> {
    fn default() -> Self {
        IoBus {
            table: Mutex::default(),
            changes: AtomicU64::new(0),
        }
    }
}

/// The bus's table that a vCPU has used last.
#[derive(Debug)]
pub(crate) struct KnownBus<D> {
    table: Option<Shared<Table<D>>>,
    changes: u64,
}

impl<D> Default for KnownBus<D> {
    fn default() -> Self {
        KnownBus {
            table: None,
            changes: 0,
        }
    }
}

impl<D> KnownBus<D> {
    /// Returns the registrations that may contain an access at `start`, in order. Call inside the engine's reader
    /// section. The vCPU must not pass a quiescent point while it uses the result.
    pub(crate) fn around(&mut self, bus: &IoBus<D>, space: Space, start: u64) -> &[Entry<D>] {
        let changes = bus.changes.load(Ordering::SeqCst);
        if self.changes != changes {
            self.table = bus.lock().clone();
            self.changes = changes;
        }
        match self.table.as_deref() {
            Some(table) => table.around(space, start),
            None => &[],
        }
    }
}

impl<D: Clone> IoBus<D> {
    /// Adds the devices that `make` returns. The argument of `make` is the list of present devices. `create` runs
    /// before an access can reach the new devices. If `make` or `create` fails, nothing changes.
    ///
    /// # Errors
    /// The errors of `make` and `create`; `ENOMEM`.
    pub(crate) fn add<const N: usize>(
        &self,
        engine: &EngineVm,
        make: impl FnOnce(&[Entry<D>]) -> Result<[(Range, D); N]>,
        create: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut table = self.lock();
        let old = entries(&table);
        let added = make(old)?;
        let mut new = heap::with_room(old.len() + N)?;
        new.extend_from_slice(old);
        new.extend(added.map(|(range, device)| Entry {
            range,
            device,
            reach: 0,
        }));
        let new = Shared::try_new(Table::new(new)).map_err(no_memory)?;
        create()?;
        *table = Some(new);
        self.publish(engine, table);
        Ok(())
    }

    /// Removes the devices for which `is_removed` returns true. Returns the number of removed devices.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn remove(
        &self,
        engine: &EngineVm,
        is_removed: impl Fn(&Entry<D>) -> bool,
    ) -> Result<usize> {
        let mut table = self.lock();
        let old = entries(&table);
        let removed = old.iter().filter(|entry| is_removed(entry)).count();
        if removed == 0 {
            return Ok(0);
        }
        let mut new = heap::with_room(old.len() - removed)?;
        new.extend(old.iter().filter(|entry| !is_removed(entry)).cloned());
        *table = Some(Shared::try_new(Table::new(new)).map_err(no_memory)?);
        self.publish(engine, table);
        Ok(removed)
    }

    /// Makes all vCPUs use the new table.
    fn publish(&self, engine: &EngineVm, table: MutexGuard<'_, Option<Shared<Table<D>>>>) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        // The table is unlocked before the wait, because a vCPU that waits for this lock would pass no quiescent point.
        drop(table);
        engine.synchronize();
    }
}

impl<D> IoBus<D> {
    fn lock(&self) -> MutexGuard<'_, Option<Shared<Table<D>>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn entries<D>(table: &Option<Shared<Table<D>>>) -> &[Entry<D>] {
    table.as_ref().map_or(&[], |table| &table.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(start: u64, len: u64) -> Range {
        Range::new(Space::Memory, start, len)
    }

    /// Returns the devices whose ranges contain the access, in the order in which the access is offered to them.
    fn offered(table: &Table<u32>, access: Range) -> Vec<u32> {
        let around = table.around(access.space, access.start).iter();
        let containing = around.filter(|entry| entry.range.contains(&access));
        containing.map(|entry| entry.device).collect()
    }

    #[test]
    fn an_access_is_offered_to_all_ranges_that_contain_it_in_the_order_of_kvms_bus() {
        let ranges = [
            memory(0x1100, 4),
            memory(0x1000, 0x1000),
            memory(0x1000, 4),
            memory(0x1000, 4),
            Range::new(Space::Ports, 0x40, 4),
            Range::new(Space::Ports, 0x20, 2),
            memory(u64::MAX - 3, 8),
            memory(0x3000, 0),
        ];
        let entries = ranges.iter().zip(0..).map(|(range, device)| Entry {
            range: *range,
            device,
            reach: 0,
        });
        let table = Table::new(entries.collect());
        let port = |start, len| Range::new(Space::Ports, start, len);
        assert_eq!(offered(&table, memory(0x1000, 4)), [2, 3, 1]);
        assert_eq!(offered(&table, memory(0x1000, 8)), [1]);
        assert_eq!(offered(&table, memory(0x1100, 4)), [1, 0]);
        assert_eq!(offered(&table, memory(0x1800, 8)), [1]);
        assert_eq!(offered(&table, memory(0x1ffc, 8)), []);
        assert_eq!(offered(&table, memory(0x2000, 1)), []);
        assert_eq!(offered(&table, memory(0x3000, 1)), []);
        assert_eq!(offered(&table, memory(0xfff, 2)), []);
        assert_eq!(offered(&table, memory(0x20, 1)), []);
        assert_eq!(offered(&table, port(0x20, 2)), [5]);
        assert_eq!(offered(&table, port(0x21, 2)), []);
        assert_eq!(offered(&table, port(0x43, 1)), [4]);
        assert_eq!(offered(&table, port(0x1100, 4)), []);
        assert_eq!(offered(&table, memory(u64::MAX - 1, 1)), [6]);
    }

    #[test]
    fn a_look_up_agrees_with_a_search_of_all_ranges() {
        let mut seed = 1u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (seed >> 33) % below
        };
        for _ in 0..200 {
            let entries = (0..random(40)).map(|number| Entry {
                range: Range::new(
                    [Space::Memory, Space::Ports][random(2) as usize],
                    random(64),
                    random(16),
                ),
                device: number as u32,
                reach: 0,
            });
            let table = Table::new(entries.collect());
            for _ in 0..50 {
                let access = Range::new(
                    [Space::Memory, Space::Ports][random(2) as usize],
                    random(64),
                    1 + random(8),
                );
                let all = table.0.iter().filter(|entry| entry.range.contains(&access));
                let all: Vec<_> = all.map(|entry| entry.device).collect();
                assert_eq!(offered(&table, access), all, "{access:?} in {table:?}");
            }
        }
    }
}
