//! The history of a vCPU: the periods in which it used the same root tables, and its flushes. From this history follows
//! which entries the vCPU may still have cached.

use std::ops::Range;

use super::memory::Time;
use super::registers::Registers;

/// The entries that a flush invalidates.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flush {
    /// The PCID whose entries are invalidated. `None`: the entries of every PCID are invalidated.
    pub pcid: Option<u16>,
    /// Whether global translations are invalidated, too.
    pub globals: bool,
    /// The page whose translations are invalidated: the page of 2^bits bytes that contains an address. `None`: the
    /// translations of all pages.
    pub page: Option<(u64, u32)>,
    /// The address for which entries of the paging-structure caches are invalidated. `None`: all such entries of the
    /// PCID.
    pub structures: Option<u64>,
}

impl Flush {
    /// Describes a flush of everything that belongs to a PCID, except global translations.
    pub fn context(pcid: impl Into<Option<u16>>) -> Flush {
        Flush {
            pcid: pcid.into(),
            globals: false,
            page: None,
            structures: None,
        }
    }

    fn concerns(&self, pcid: u16) -> bool {
        self.pcid.is_none_or(|flushed| flushed == pcid)
    }
}

/// A period in which CR3, the PCID and the PDPTEs did not change.
#[derive(Clone, Debug)]
pub(super) struct Period {
    pub time: Range<Time>,
    pub pcid: u16,
    pub registers: Registers,
}

/// A TLB entry that a vCPU may have cached.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cached {
    /// The PCID under which the translation was created.
    pub pcid: u16,
    pub gva: u64,
    /// The size of the translation's page is 2^`bits` bytes.
    pub bits: u32,
    pub global: bool,
}

/// The history of a vCPU since the last flush of everything.
#[derive(Default)]
pub(super) struct Flushes {
    periods: Vec<Period>,
    /// The flushes in chronological order. A flush invalidates entries that were read before its time.
    flushes: Vec<(Time, Flush)>,
}

impl Flushes {
    /// Begins a new history. Call after a flush of everything, for all PCIDs. `registers` is `None` if paging is off.
    pub fn restart(&mut self, now: Time, registers: Option<&Registers>) {
        self.flushes.clear();
        self.periods.clear();
        if let Some(registers) = registers {
            self.load(now, registers);
        }
    }

    /// Begins a new period. Call after CR3, the PCID or the PDPTEs have changed, while paging is on.
    pub fn load(&mut self, now: Time, registers: &Registers) {
        if let Some(last) = self.periods.last_mut() {
            last.time.end = now;
        }
        self.periods.push(Period {
            time: now..Time::MAX,
            pcid: registers.pcid(),
            registers: *registers,
        });
    }

    pub fn flush(&mut self, now: Time, flush: Flush) {
        self.flushes.push((now, flush));
    }

    /// Returns the earliest moment at which an entry that is still cached may have been read.
    pub fn start(&self) -> Option<Time> {
        self.periods.first().map(|period| period.time.start)
    }

    /// Returns the periods, newest first.
    pub fn periods(&self) -> impl Iterator<Item = &Period> {
        self.periods.iter().rev()
    }

    /// Returns the smallest range that contains the moments of `range` at which `pcid` was the current PCID. `None`:
    /// there are no such moments.
    pub fn within(&self, pcid: u16, range: &Range<Time>) -> Option<Range<Time>> {
        let common = |period: &&Period| {
            period.pcid == pcid && period.time.start < range.end && range.start < period.time.end
        };
        let mut periods = self.periods.iter().filter(common);
        let first = periods.next()?;
        let last = periods.next_back().unwrap_or(first);
        Some(range.start.max(first.time.start)..range.end.min(last.time.end))
    }

    /// Returns the moment until which an entry of a paging-structure cache may exist. That moment is the first flush
    /// after `read` that drops the entry. The entry was read at the moment `read`, under `pcid`. It is for all
    /// addresses that equal `gva` except for the lowest `shift` bits.
    pub fn cached_until(&self, pcid: u16, gva: u64, shift: u32, read: Time) -> Time {
        let first = self.flushes.partition_point(|(time, _)| *time < read);
        let drops = |flush: &Flush| {
            let meant = flush
                .structures
                .is_none_or(|at| at >> shift == gva >> shift);
            meant && flush.concerns(pcid)
        };
        let mut later = self.flushes[first..].iter();
        let flush = later.find(|(_, flush)| drops(flush));
        flush.map_or(Time::MAX, |(time, _)| *time)
    }

    /// Returns the earliest moment at which an existing TLB entry may have been created. This is the moment of the last
    /// flush that drops such an entry.
    pub fn flushed_at(&self, cached: &Cached) -> Time {
        let drops = |flush: &Flush| {
            let meant = flush
                .page
                .is_none_or(|(at, bits)| (at ^ cached.gva) >> bits.min(cached.bits) == 0);
            let concerns = match cached.global {
                true => flush.globals,
                false => flush.concerns(cached.pcid),
            };
            meant && concerns
        };
        let mut latest_first = self.flushes.iter().rev();
        let flush = latest_first.find(|(_, flush)| drops(flush));
        flush.map_or(0, |(time, _)| *time)
    }
}
