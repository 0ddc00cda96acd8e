//! Runs operations on an MMU. The oracle judges each outcome.

mod control;
mod tallied;

use std::collections::HashSet;
use std::ops::Range;

use slat::{Access, Gfn, Gpa, Hpa, PAGE_SIZE, Region};

use super::entry::Meaning;
use super::mmu::{GuestMmu, Outcome, Part};
use super::ops::{GuestOp, How, Target};
use super::oracle::{GuestAccess, Oracle};
use super::ram::GuestMachine;
use super::registers::{Privilege, Registers};
use crate::host::{HostChange, HostMemory};
use crate::machine::Machine;
use crate::tally::Tally;
use control::canonical;
pub use tallied::{OF_CACHES, USUAL};

/// The number of operations after which the oracle forgets old values.
const BATCH: u64 = 64;

/// An MMU under test, and its oracle.
pub(super) struct Runner {
    mmu: Box<dyn GuestMmu>,
    oracle: Oracle,
    tally: Tally,
    ops: u64,
    /// The frames of tables that have translated an access since the memslots last changed.
    live: HashSet<u64>,
}

impl Runner {
    pub fn new(machine: GuestMachine, mmu: Box<dyn GuestMmu>, nested_tables: bool) -> Self {
        let mut oracle = Oracle::new(machine);
        // The first vCPU's tables are the hypervisor's own tables. Only the second vCPU's tables may be AMD's nested
        // tables.
        oracle.cpus[1].registers.reserves_table_global = nested_tables;
        Runner {
            mmu,
            oracle,
            tally: Tally::default(),
            ops: 0,
            live: HashSet::new(),
        }
    }

    pub fn registers(&self, cpu: usize) -> &Registers {
        &self.oracle.cpus[cpu].registers
    }

    /// Returns the addresses of the entries that now translate `gva`.
    pub fn path_to(&self, cpu: usize, gva: u64) -> Vec<u64> {
        let Some(paging) = self.registers(cpu).paging(&Privilege::KERNEL) else {
            return Vec::new();
        };
        let trace = self.oracle.trace(&paging, canonical(paging.mode, gva));
        trace.entries.iter().map(|(gpa, _)| *gpa).collect()
    }

    /// Returns the frame to which `gva` is mapped, if it is mapped.
    pub fn frame_at(&self, cpu: usize, gva: u64) -> Option<u64> {
        let paging = self.registers(cpu).paging(&Privilege::KERNEL)?;
        let gva = canonical(paging.mode, gva);
        match self.oracle.trace(&paging, gva).end {
            Meaning::Page { gpa, bits } => {
                let offset = (1 << bits) - 1;
                Some((gpa & !offset | gva & offset) >> 12)
            }
            _ => None,
        }
    }

    /// Returns the regions of the existing memslots.
    pub fn regions(&self) -> impl Iterator<Item = Region> {
        let slots = self.oracle.memory.model.slots.iter();
        slots.map(|(id, slot)| slot.region(*id))
    }

    /// Returns the number of accesses so far.
    pub fn accesses(&self) -> u64 {
        self.tally.of("access")
    }

    /// Returns the tally of the run.
    pub fn tally(self) -> Tally {
        self.tally
    }

    /// Runs one operation. Panics if the MMU breaks a rule.
    pub fn run(&mut self, op: &GuestOp) {
        self.ops += 1;
        if self.ops.is_multiple_of(BATCH) {
            self.oracle.forget();
        }
        match op {
            GuestOp::Access {
                cpu,
                gva,
                access,
                privilege,
            } => drop(self.access(*cpu, *gva, *access, privilege)),
            GuestOp::Store {
                cpu,
                target,
                how,
                operand,
                bytes,
            } => self.store(*cpu, target, *how, &operand[..*bytes]),
            GuestOp::ClientStore {
                gpa,
                operand,
                bytes,
            } => self.client_store(*gpa, &operand[..*bytes]),
            GuestOp::Invlpg { cpu, gva } => self.invlpg(*cpu, *gva),
            GuestOp::Invpcid { cpu, invpcid } => self.invpcid(*cpu, *invpcid),
            GuestOp::LoadCr3 { cpu, cr3, keep } => self.load_cr3(*cpu, *cr3, *keep),
            GuestOp::Toggle { cpu, control } => self.toggle(*cpu, *control),
            GuestOp::SetMode { cpu, mode, cr3 } => self.set_mode(*cpu, *mode, *cr3),
            GuestOp::SetRegion(region) => self.set_region(region),
            GuestOp::Invalidate { pages, change } => self.invalidate(pages, *change),
            GuestOp::DirtyLog { slot } => self.dirty_log(*slot),
            GuestOp::Audit => self
                .mmu
                .audit()
                .unwrap_or_else(|why| panic!("audit: {why}")),
        }
        let unchanged = self.oracle.unchanged();
        unchanged.unwrap_or_else(|why| panic!("{op:x?}: {why}"));
    }

    fn access(&mut self, cpu: usize, gva: u64, access: Access, privilege: &Privilege) -> Outcome {
        self.tally.count("access");
        let Some(paging) = self.registers(cpu).paging(privilege) else {
            let gpa = gva & 0xffff_ffff;
            let outcome = self.mmu.access(cpu, gpa, access, None);
            let judged = self.oracle.judge_physical(gpa, access, &outcome);
            judged.unwrap_or_else(|why| panic!("{access:?} at {gpa:#x}, no paging: {why}"));
            self.tally.count("paging is off");
            return outcome;
        };
        let gva = canonical(paging.mode, gva);
        let outcome = self.mmu.access(cpu, gva, access, Some(&paging));
        let attempt = GuestAccess {
            cpu,
            gva,
            access,
            paging: &paging,
        };
        let found = match self.oracle.judge(&attempt, &outcome) {
            Ok(found) => found,
            Err(why) => {
                let trace = self.oracle.trace(&paging, gva);
                panic!(
                    "vCPU {cpu}, {access:?} at {gva:#x}: {why}\n{paging:x?}\nthe tables now: {:x?}, {:x?}",
                    trace.entries, trace.end
                );
            }
        };
        if let Outcome::Page { host, .. } = outcome {
            self.look_up(host);
        }
        let trace = self.oracle.trace(&paging, gva);
        self.live
            .extend(trace.entries.iter().map(|(gpa, _)| gpa >> 12));
        self.tally_access(&attempt, &outcome, found, &trace);
        outcome
    }

    /// Checks that the MMU maps the guest frame at `host`, which an access has just reached, to this host frame.
    fn look_up(&mut self, host: Hpa) {
        let (page, _) = HostMemory::identify(host.pfn());
        let gfn = self.oracle.memory.gfn_of(page);
        let gfn = gfn.expect("the oracle has found the page there");
        if let Some(frame) = self.mmu.frame_of(Gfn(gfn)) {
            assert_eq!(frame, Some(host.pfn()), "frame {gfn:#x} is looked up");
            self.tally.count("frame looked up");
        }
    }

    fn store(&mut self, cpu: usize, target: &Target, how: How, operand: &[u8]) {
        let (start, privilege) = match target {
            Target::Virtual(gva, privilege) => (*gva, Some(privilege)),
            Target::Physical(gpa) => (*gpa, None),
        };
        let first = (PAGE_SIZE - start % PAGE_SIZE).min(operand.len() as u64);
        let second = operand.len() as u64 - first;
        let next = start.wrapping_add(first);
        // A store in two pages accesses the first page twice, because the walk for the second page may have turned the
        // first page into a table.
        let accesses: &[(u64, u64)] = match second {
            0 => &[(start, first)],
            _ => &[(start, first), (next, second), (start, first)],
        };
        let mut parts = Vec::new();
        let mut tracked = privilege.is_none();
        for (at, bytes) in accesses {
            let outcome = match privilege {
                Some(privilege) => self.access(cpu, *at, Access::Write, privilege),
                None => self.write_physical(cpu, *at),
            };
            let Outcome::Page { host, tracked: is } = outcome else {
                return;
            };
            tracked |= is;
            let (page, _) = HostMemory::identify(host.pfn());
            let gfn = self.oracle.memory.gfn_of(page);
            let gfn = gfn.expect("the oracle has found the page there");
            parts.push(Part {
                gpa: Gpa((gfn << 12) + at % PAGE_SIZE),
                bytes: *bytes as usize,
            });
        }
        if second != 0 {
            parts.swap_remove(0);
            parts.reverse();
        }
        self.tally_store(&parts, how, tracked);
        let now = self.oracle.tick();
        let mut rest = operand;
        for part in &parts {
            let (operand, later) = rest.split_at(part.bytes);
            rest = later;
            let memory = &mut self.oracle.memory;
            let bytes = operand.iter().enumerate().map(|(i, byte)| {
                let gpa = part.gpa.0 + i as u64;
                how.byte(memory.entry(gpa, 1) as u8, *byte)
            });
            let bytes: Vec<u8> = bytes.collect();
            memory.store(now, part.gpa.0, &bytes);
        }
        if tracked {
            self.mmu.stored(cpu, how.kind(), &parts);
        }
    }

    fn write_physical(&mut self, cpu: usize, gpa: u64) -> Outcome {
        let outcome = self.mmu.access_physical(cpu, Gpa(gpa), Access::Write);
        let judged = self.oracle.judge_physical(gpa, Access::Write, &outcome);
        judged.unwrap_or_else(|why| panic!("an emulated write to {gpa:#x}: {why}"));
        outcome
    }

    fn client_store(&mut self, gpa: u64, operand: &[u8]) {
        let room = (PAGE_SIZE - gpa % PAGE_SIZE).min(operand.len() as u64);
        let now = self.oracle.tick();
        self.oracle
            .memory
            .store(now, gpa, &operand[..room as usize]);
        self.mmu.client_stored();
        self.oracle.flush_all();
        self.tally.count("client store");
    }

    fn set_region(&mut self, region: &Region) {
        if !self.oracle.memory.accepts(region) {
            return;
        }
        let old = self.regions().find(|old| old.slot == region.slot);
        self.mmu.set_region(region);
        let now = self.oracle.tick();
        self.oracle.memory.set_region(now, region);
        let held = |gfn| old.is_some_and(|old| contains(&old, gfn));
        let live = self.live.drain().any(held);
        self.tally.count(match (old.is_some(), region.size) {
            (true, 0) => "slot deleted",
            (true, _) => "slot moved, or its flags changed",
            (false, _) => "slot created",
        });
        if live {
            self.tally.count("slot with live tables changed");
        }
    }

    fn invalidate(&mut self, pages: &Range<u64>, change: HostChange) {
        let sim = self.oracle.memory.machine.ram.sim().clone();
        let range = HostMemory::hvas(pages);
        let mut change_it = || sim.change(pages, change);
        self.mmu.invalidate(range, &mut change_it);
        self.tally.count(match change {
            HostChange::Protect { .. } => "host pages protected",
            _ => "host pages replaced",
        });
    }

    fn dirty_log(&mut self, id: u32) {
        let Ok(written) = self.oracle.memory.model.dirty_log(id) else {
            return;
        };
        let mut log = vec![0; written.len()];
        self.mmu.dirty_log(id, &mut log);
        let mut words = log.iter().zip(&written);
        let right = match self.mmu.logs_reads() {
            true => words.all(|(log, written)| written & !log == 0),
            false => log == written,
        };
        assert!(
            right,
            "the log of slot {id} is {log:x?}, expected {written:x?}"
        );
        self.tally
            .count(match written.iter().all(|word| *word == 0) {
                true => "dirty log without pages",
                false => "dirty log with pages",
            });
    }
}

/// Whether the memslot contains the frame.
fn contains(slot: &Region, gfn: u64) -> bool {
    (slot.gpa.0 >> 12..(slot.gpa.0 + slot.size) >> 12).contains(&gfn)
}
