//! Tests a hypervisor whose nested tables, and whose guest's tables, are random and change at random. This tests
//! everything between these tables and the host's memory: the CPU with its TLB, the two-dimensional walk, and the
//! engine's shadow of the nested tables.
//!
//! Two vCPUs share memory. The hypervisor and its guest store to the tables of both dimensions. Some pages are tables
//! of both. They flush by TLB_CONTROL, INVLPGA, INVLPG and MOV to CR3, or do not flush. Memslots are created and
//! deleted, and become read-only. The test checks that each access of the guest has an outcome that the manual allows
//! (`oracle`), sets the flags that it must set, and sets no other flags.
//!
//! `cargo test -p slat-kvm --release --test nested_tables`, with SLAT_STEPS=…, SLAT_SEED=… and SLAT_MMU=… for another
//! number of accesses, other seeds, and one MMU.
#![cfg(target_arch = "x86_64")]

#[path = "../common/mod.rs"]
mod common;
mod layout;
mod machine;
mod oracle;

use common::hypervisors::{chosen_mmus, number};
use kvm_bindings::*;
use layout::*;
use machine::{ASIDS, CPUS, Machine};
use oracle::{Access, Kind, Marks, Outcome};
use slat::MmuKind;
use std::collections::{BTreeSet, HashMap};

/// The number of accesses of one run.
const RUN: u64 = 20_000;

/// The exit code of an intercepted page fault. The next constants are the exit codes of the other exits.
const PAGE_FAULT: u64 = 0x4e;
const VMMCALL: u64 = 0x81;
const NESTED_FAULT: u64 = 0x400;

impl Machine {
    /// Returns an address for the guest. In half of the cases it is in a page that the guest has accessed recently,
    /// for which a processor may have kept a translation.
    fn address(&mut self) -> u64 {
        match self.random.one_in(2) {
            true => self.recent[self.random.below(4) as usize],
            false => self.random.address(),
        }
    }

    /// Returns all outcomes that an access of the guest with `asid` may have.
    fn outcomes(&self, cpu: usize, asid: u64, access: &Access) -> BTreeSet<Outcome> {
        let since = self.flushed[cpu][asid as usize].since(access.address);
        self.tables.outcomes(access, since).0
    }

    /// Makes the guest execute a random access, and checks the outcome.
    fn access(&mut self, cpu: usize) {
        let address = self.address();
        let random = &mut self.random;
        let asid = match random.below(3) {
            0 => 1 + random.below(ASIDS),
            _ => 1,
        };
        let mut access = Access {
            address,
            kind: [Kind::Read, Kind::Write, Kind::Execute][random.below(3) as usize],
            user: random.one_in(3),
            write_protect: random.one_in(2),
        };
        // Most addresses lead to no page, so tries several addresses.
        let mut all = self.outcomes(cpu, asid, &access);
        for _ in 0..self.random.below(12) {
            if (all.iter()).any(|outcome| matches!(outcome, Outcome::Page(_) | Outcome::Mmio(_))) {
                break;
            }
            access.address = self.random.address();
            all = self.outcomes(cpu, asid, &access);
        }
        let replaced = self.random.below(4) as usize;
        self.recent[replaced] = access.address;
        if (all.iter()).any(|outcome| matches!(outcome, Outcome::Mmio(_)))
            && access.kind == Kind::Execute
        {
            // slat does not fetch instructions from a device, so reads instead.
            access.kind = Kind::Read;
        }
        let random = &mut self.random;
        let is_entry = access.kind == Kind::Write && random.one_in(2);
        let (rip, offset) = match access.kind {
            Kind::Read => (LOAD, NAME_AT),
            Kind::Execute => (JUMP, CODE_AT),
            Kind::Write if is_entry => (NESTED_STORE, 8 * random.below(USED)),
            Kind::Write => (NESTED_STORE, DATA_AT),
        };
        access.address |= offset;
        let value = match is_entry {
            true => {
                let like = random.entry_address();
                random.entry(like)
            }
            false => random.next(),
        };
        let before: Vec<u64> = reached().map(|page| self.get(page + DATA_AT)).collect();
        let ([code, info_1, info_2, rax], device) = self.run_guest(cpu, asid, rip, &access, value);
        let since = self.flushed[cpu][asid as usize].since(access.address);
        let (allowed, marks) = self.tables.outcomes(&access, since);
        self.used = marks.keys().copied().filter(|at| changes(*at)).collect();
        let is_flushed = since.nested == self.now;
        let written = self.look_at_entries(&marks, (offset, value), &allowed, is_entry);
        let outcome = match (code, access.kind) {
            (VMMCALL, _) if device.is_some() => Outcome::Mmio(device.unwrap()),
            (VMMCALL, Kind::Write) if is_entry => Outcome::Page(written.expect("a store")),
            (VMMCALL, Kind::Write) => {
                let changed = reached().zip(before);
                let mut changed = changed.filter(|(page, old)| self.get(page + DATA_AT) != *old);
                let (page, _) = changed.next().expect("a store");
                assert!(changed.next().is_none() && self.get(page + DATA_AT) == value);
                Outcome::Page(page / PAGE)
            }
            (VMMCALL, _) => Outcome::Page(rax),
            (PAGE_FAULT, _) => {
                assert_eq!(info_2, access.address);
                Outcome::PageFault(info_1)
            }
            (NESTED_FAULT, _) => Outcome::NestedFault(info_1, info_2),
            _ => panic!("exit code {code:#x}: {info_1:#x}, {info_2:#x}"),
        };
        assert!(
            allowed.contains(&outcome),
            "vCPU {cpu}, {access:x?}: {outcome:x?}, allowed: {allowed:x?}; {:x?}",
            self.path(access.address)
        );
        if is_flushed && !is_entry && matches!(outcome, Outcome::Page(_)) {
            self.check_flags(&marks);
        }
        self.count("access");
        self.count(match outcome {
            Outcome::Page(_) => "page",
            Outcome::Mmio(_) => "device",
            Outcome::PageFault(_) => "page fault",
            Outcome::NestedFault(info, _) if info >> 33 != 0 => "nested fault at a table",
            Outcome::NestedFault(..) => "nested fault at a page",
        });
        if allowed.len() > 1 {
            self.count("several outcomes");
        }
    }

    /// Checks that the flags in `marks` are set, after an access that has reached a page without using an earlier
    /// translation.
    fn check_flags(&mut self, marks: &Marks) {
        for (at, flags) in marks {
            let entry = self.get(*at);
            assert!(
                entry & flags == *flags || self.tables.memory(*at) == Some(true),
                "the entry at {at:#x} is {entry:#x}, without {flags:#x}"
            );
        }
        self.count("flags checked");
    }

    /// Returns the entries of the guest's tables for `address`. Reads each table as if there were no nested tables,
    /// and stops at the end of memory.
    fn path(&self, address: u64) -> Vec<(u64, u64)> {
        let mut table = GUEST_ROOT;
        let mut path = Vec::new();
        for level in (1..=4).rev() {
            let at = table + 8 * (address >> (12 + 9 * (level - 1)) & 511);
            if at >= self.memory.len as u64 {
                break;
            }
            let entry = self.get(at);
            path.push((at, entry));
            table = entry & ADDRESS;
        }
        path
    }

    /// Finds the entries that have changed since the last call. The flags of entries in `marks` may have changed, and
    /// one entry may be the one to which a store has written. Returns the page of that entry.
    fn look_at_entries(
        &mut self,
        marks: &Marks,
        (offset, value): (u64, u64),
        allowed: &BTreeSet<Outcome>,
        is_entry: bool,
    ) -> Option<u64> {
        let can_store = |at: u64| {
            is_entry && at % PAGE == offset && allowed.contains(&Outcome::Page(at / PAGE))
        };
        let mut written = None;
        let mut same = None;
        self.now += 1;
        for at in entries() {
            let (old, new) = (self.copies[&at], self.get(at));
            if new == value && can_store(at) {
                match new == old {
                    true => same = Some(at),
                    false => {
                        self.tables.store(self.now, at, value);
                        // If several entries have this value now, only flags of the others have changed.
                        if written.is_none() || (new ^ old) & !(A | D) != 0 {
                            written = Some(at);
                        }
                    }
                }
            } else if new != old {
                let marked = (new ^ old) & !(A | D) == 0 && new & old == old;
                assert!(
                    marked && marks.contains_key(&at),
                    "the entry at {at:#x} was {old:#x} and is {new:#x}; stored: {value:#x}, allowed: {allowed:x?}"
                );
                let is_read_only = self.tables.memory(at) == Some(true);
                assert!(!is_read_only, "{at:#x} is in a read-only slot");
            }
            self.copies.insert(at, new);
        }
        written.or(same).map(|at| at / PAGE)
    }

    /// Makes the hypervisor store to an entry.
    fn store(&mut self, cpu: usize) {
        let at = match self.used.len() as u64 {
            n if n > 0 && self.random.one_in(2) => self.used[self.random.below(n) as usize],
            _ => self.random.entry_address(),
        };
        if self.tables.memory(at) != Some(false) {
            return;
        }
        let value = self.random.entry(at);
        let registers = kvm_regs {
            rdi: at,
            rsi: value,
            ..Default::default()
        };
        assert_eq!(self.run(cpu, STORE, registers), None);
        assert_eq!(self.get(at), value);
        self.now += 1;
        self.tables.store(self.now, at, value);
        self.copies.insert(at, value);
        self.count("store");
    }

    /// Makes the hypervisor or its guest flush the translations of a page, or makes the guest flush all of its own
    /// translations.
    fn flush(&mut self, cpu: usize) {
        let asid = 1 + self.random.below(ASIDS);
        let address = self.address();
        self.now += 1;
        let now = self.now;
        match self.random.below(3) {
            0 => {
                let registers = kvm_regs {
                    rax: address,
                    rcx: asid,
                    ..Default::default()
                };
                self.run(cpu, INVLPGA, registers);
                self.flushed[cpu][asid as usize]
                    .page
                    .insert(address / PAGE, now);
            }
            how => {
                let access = Access {
                    address,
                    kind: Kind::Read,
                    user: false,
                    write_protect: false,
                };
                let rip = if how == 1 { INVLPG } else { LOAD_CR3 };
                let ([code, ..], _) = self.run_guest(cpu, asid, rip, &access, 0);
                assert_eq!(code, VMMCALL);
                let flushed = &mut self.flushed[cpu][asid as usize];
                match how {
                    1 => drop(flushed.guest_page.insert(address / PAGE, now)),
                    _ => flushed.guest = now,
                }
            }
        }
        self.count("flush");
    }

    /// Deletes a memslot, or creates it anew.
    fn change_slot(&mut self) {
        let slot = self.random.below(self.tables.slots.len() as u64) as usize;
        let old = self.tables.slots[slot].take();
        if old.is_some() {
            let gpa = POOL + slot as u64 * SLOT_PAGES * PAGE;
            self.set_slot(slot as u32 + 1, gpa, 0, 0);
        }
        if old.is_none() || self.random.one_in(2) {
            let is_read_only = self.random.one_in(4);
            self.create(slot, is_read_only);
        }
        self.count("slot changed");
    }

    fn step(&mut self) {
        let cpu = self.random.below(CPUS as u64) as usize;
        match self.random.below(64) {
            0..40 => self.access(cpu),
            40..58 => self.store(cpu),
            58..62 => self.flush(cpu),
            // A missing slot is created again more often than a slot is deleted.
            62 if self.tables.slots.iter().all(Option::is_some) => self.change_slot(),
            _ => {
                let gone = self.tables.slots.iter().position(Option::is_none);
                if let Some(slot) = gone {
                    self.create(slot, false);
                }
                let oldest = self.flushed.iter().flatten().map(|flushed| flushed.all);
                self.tables.forget(oldest.min().unwrap_or(0));
            }
        }
    }
}

#[test]
fn a_nested_guest_reaches_what_the_tables_say() {
    let accesses = number("SLAT_STEPS", 3 * RUN);
    let first = number("SLAT_SEED", 1);
    let runs = accesses.div_ceil(MmuKind::ALL.len() as u64 * RUN);
    for mmu in chosen_mmus() {
        let mut counts = HashMap::<_, u64>::new();
        for seed in first..first + runs {
            let mut machine = Machine::new(mmu, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            println!("{mmu:?}, seed {seed}");
            while machine.counts.get("access").is_none_or(|n| *n < RUN) {
                machine.step();
            }
            for (what, n) in machine.counts {
                *counts.entry(what).or_default() += n;
            }
        }
        println!("{mmu:?}: {counts:?}");
        for what in [
            "page",
            "device",
            "page fault",
            "nested fault at a table",
            "nested fault at a page",
            "several outcomes",
            "flags checked",
        ] {
            assert!(
                counts.get(what).is_some_and(|n| *n > RUN / 100),
                "{mmu:?}: {what}"
            );
        }
    }
}
