//! The events of a run that its tally counts.

use slat::Access;
use slat::guest_walk::{Mode, error_code};

use super::Runner;
use crate::guest::entry::{Meaning, PS};
use crate::guest::mmu::{Outcome, Part};
use crate::guest::ops::How;
use crate::guest::oracle::{GuestAccess, Trace};
use crate::guest::search::Found;

/// The names that a long run must count, with every MMU under test.
pub const USUAL: [&str; 57] = [
    "paging is off",
    "32-bit paging",
    "32-bit paging with PSE",
    "PAE paging",
    "4-level paging",
    "5-level paging",
    "page read",
    "page written",
    "page executed",
    "2 MiB page",
    "4 MiB page",
    "1 GiB page",
    "MMIO",
    "bad address",
    "fetch refused by a slot",
    "table at two levels",
    "table in a read-only slot",
    "table in no slot",
    "fault, not present",
    "fault, present",
    "fault, write",
    "fault, user",
    "fault, reserved bit",
    "fault, fetch",
    "fault, protection key",
    "store",
    "locked store",
    "store to a live table",
    "store to two entries of a live table",
    "store to two pages, a live table",
    "store to an entry with PS",
    "client store",
    "INVLPG",
    "INVPCID of an address",
    "INVPCID of a context",
    "INVPCID of all",
    "INVPCID of all but global",
    "MOV to CR3",
    "MOV to CR3 with a PCID",
    "MOV to CR3, nothing flushed",
    "bad PDPTE",
    "CR0.PG",
    "CR0.WP",
    "CR4.PGE",
    "CR4.PCIDE",
    "CR4.SMEP",
    "CR4.SMAP",
    "CR4.PKE",
    "EFER.NXE",
    "slot created",
    "slot deleted",
    "slot moved, or its flags changed",
    "slot with live tables changed",
    "host pages protected",
    "host pages replaced",
    "dirty log without pages",
    "dirty log with pages",
];
/// The names that a long run must also count if its MMU uses stale translations and tracks the pages of tables.
pub const OF_CACHES: [&str; 5] = [
    "stale table",
    "stale translation",
    "stale page fault",
    "tracked page",
    "store to a live table, not tracked",
];

impl Runner {
    pub(super) fn tally_access(
        &mut self,
        access: &GuestAccess,
        outcome: &Outcome,
        found: Found,
        trace: &Trace,
    ) {
        let paging = access.paging;
        self.tally.count(match paging.mode {
            Mode::Bits32 { pse: false } => "32-bit paging",
            Mode::Bits32 { pse: true } => "32-bit paging with PSE",
            Mode::Pae => "PAE paging",
            Mode::Level4 => "4-level paging",
            Mode::Level5 => "5-level paging",
        });
        match outcome {
            Outcome::Page { tracked, .. } => {
                self.tally.count(match access.access {
                    Access::Read => "page read",
                    Access::Write => "page written",
                    Access::Execute => "page executed",
                });
                if *tracked {
                    self.tally.count("tracked page");
                }
                match found {
                    Found::Fresh => {}
                    Found::StaleTable => return self.tally.count("stale table"),
                    Found::StaleTranslation => return self.tally.count("stale translation"),
                }
                match trace.end {
                    Meaning::Page { bits: 21, .. } => self.tally.count("2 MiB page"),
                    Meaning::Page { bits: 22, .. } => self.tally.count("4 MiB page"),
                    Meaning::Page { bits: 30, .. } => self.tally.count("1 GiB page"),
                    _ => {}
                }
                let tables = || trace.entries.iter().map(|(gpa, _)| *gpa);
                if tables().any(|gpa| self.oracle.memory.is_read_only(gpa)) {
                    self.tally.count("table in a read-only slot");
                }
                let mut frames: Vec<u64> = tables().map(|gpa| gpa >> 12).collect();
                frames.sort_unstable();
                frames.dedup();
                if frames.len() < trace.entries.len() {
                    self.tally.count("table at two levels");
                }
            }
            Outcome::PageFault { code } => {
                self.tally_fault(*code, trace);
                if found != Found::Fresh {
                    self.tally.count("stale page fault");
                }
            }
            Outcome::Mmio { .. } => self.tally.count("MMIO"),
            Outcome::BadAddress { .. } => self.tally.count("bad address"),
            Outcome::NoExecute { .. } => self.tally.count("fetch refused by a slot"),
        }
    }

    fn tally_fault(&mut self, code: u32, trace: &Trace) {
        let bits = [
            (error_code::PRESENT, "fault, present"),
            (error_code::WRITE, "fault, write"),
            (error_code::USER, "fault, user"),
            (error_code::RESERVED, "fault, reserved bit"),
            (error_code::FETCH, "fault, fetch"),
            (error_code::PROTECTION_KEY, "fault, protection key"),
        ];
        for (bit, name) in bits {
            if code & bit != 0 {
                self.tally.count(name);
            }
        }
        if code & error_code::PRESENT == 0 {
            self.tally.count("fault, not present");
            let table = trace.entries.last();
            let memory = &self.oracle.memory;
            if table.is_some_and(|(gpa, _)| memory.model.slot_at(gpa >> 12).is_none()) {
                self.tally.count("table in no slot");
            }
        }
    }

    pub(super) fn tally_store(&mut self, parts: &[Part], how: How, tracked: bool) {
        self.tally.count("store");
        if how != How::Mov {
            self.tally.count("locked store");
        }
        let live = |part: &Part| self.live.contains(&(part.gpa.0 >> 12));
        if !parts.iter().any(live) {
            return;
        }
        self.tally.count(match tracked {
            true => "store to a live table",
            false => "store to a live table, not tracked",
        });
        let straddles = |part: &Part| {
            let last = part.gpa.0 + part.bytes as u64 - 1;
            part.gpa.0 / 8 != last / 8
        };
        if parts.iter().any(straddles) {
            self.tally.count("store to two entries of a live table");
        }
        if parts.len() > 1 {
            self.tally.count("store to two pages, a live table");
        }
        let large = |part: &Part| self.oracle.memory.entry(part.gpa.0 & !7, 8) & PS != 0;
        if parts.iter().any(large) {
            self.tally.count("store to an entry with PS");
        }
    }
}
