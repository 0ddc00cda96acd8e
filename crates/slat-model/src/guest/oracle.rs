//! The judge of an MMU decides which outcomes of an access the SDM allows.
//!
//! # The rules
//! (SDM 3A, chapter "Paging", section "Caching Translation Information"; the names in quotes are its subsections.)
//!
//! A processor translates an address by a path of page-table entries. The processor reads the entries from the top
//! down, and may read each of them at any moment. By "Translation Lookaside Buffers" and "Paging-Structure Caches", it
//! may cache a translation, or the entries that reference tables, as soon as an access could use them, even if no such
//! access is ever made. The processor may combine a cached upper entry with a lower entry that it reads later, and may
//! use cached entries until they are invalidated. The processor may also read all entries again at any time. So an
//! outcome is allowed if, and only if, there is a path whose entries had values at *some* moments that lead to the
//! outcome, and the moments fit together. The moments fit together if all of these conditions hold:
//!
//! 1. no entry was read before an entry above it;
//! 2. at each of the moments the PCID of the path was the current one, and the first entry was read through the CR3
//!    (with PAE: the PDPTEs) of its moment;
//! 3. between the reading of an entry and of the next one, no flush dropped the first entry from the paging-structure
//!    caches, and between the reading of the leaf and now, no flush dropped the translation from the TLBs ("Operations
//!    that Invalidate TLBs and Paging-Structure Caches": INVLPG, INVPCID, MOV to CR0, CR3 and CR4, page faults);
//! 4. an entry that was read before now had its accessed flag set. Entries without that flag are not cached, nor are
//!    entries that are not present or have a reserved bit. So a page fault for such an entry comes from the entry that
//!    is in memory now, though perhaps from a table that was referenced before. A page fault for a missing right may
//!    come from a stale translation ("Optional Invalidation"), but not twice: the fault itself invalidates the
//!    translation;
//! 5. a write needs a leaf whose dirty flag is set; a translation that is cached with a clean leaf is read again;
//! 6. the path belongs to the current PCID, or the leaf is global ("Global Pages").
//!
//! `search` has the algorithm, `flushes` the times, `memory` the values, and `entry` the meanings of the values.
//!
//! # Why the rules are not too strict
//! Every choice that the SDM leaves to the processor is also a choice of the search: the moment at which the processor
//! reads an entry, and the entries that are cached then; whether the processor caches at all; the moment at which it
//! acts on a store and a flush ("Delayed Invalidation"); and whether it splits a large page. If a large page is split,
//! a flush of one address drops only what the current tables translate together with this address ("Details of TLB
//! Use"). The rights of a path are checked with the CR0.WP, CR4.SMEP, CR4.SMAP and PKRU of the access, because a TLB
//! stores the flags of the entries and not the resulting rights. Where the SDM does not define what happens to cached
//! translations, the generator obeys the rules for software: it flushes everything after a change of EFER.NXE, and
//! changes CR4.PSE only while paging is off. Another vCPU sees a store when it reads the entry again ("Propagation of
//! Paging-Structure Changes to Multiple Processors"). As in KVM, an entry at an address without a memslot is not
//! present, and entries in read-only memslots need no flags.
//!
//! # Why the rules are not too lax
//! All six conditions are checked for the same choice of values. So two stale entries are not combined if no processor
//! could have had both. Error codes are compared exactly. The search uses the second level (memslots, host pages, dirty
//! logs) as it is now, because the hypervisor flushes after its own changes, and the guest need not (chapter "VMX
//! Support for Address Translation"). After an access, the accessed and dirty flags that its path needs are in memory:
//! the search sees them as values of this moment ("Accessed and Dirty Flags"). A flag that was set must be in an entry
//! that a walk for this address may have read now. A dirty flag must be in the entry where that walk ended, for a write
//! that has the right. This last rule is stricter than the SDM, which allows speculation. An MMU in software has no
//! reason to write speculatively.
//!
//! KVM's shadow MMU breaks these rules in two cases, which hardly any software notices. This oracle reports both.
//! First, after a page fault for an entry that is not present, KVM's MMU keeps its entries for the address. Second, its
//! shadow pages belong to no PCID, so KVM's MMU may use an entry that it has read while another PCID was current.

use slat::Access;
use slat::guest_walk::{GuestPaging, Mode};

use super::CPUS;
use super::entry::{A, D, Layout, Meaning, P};
use super::flushes::{Flush, Flushes};
use super::memory::{Memory, Time};
use super::mmu::{Invpcid, Outcome, RegisterWrite};
use super::ram::{Change, GuestMachine};
use super::registers::{CR0_PG, CR4_PAE, CR4_PCIDE, CR4_PGE, CR4_SMEP, Registers};
use super::search::{Found, Goal, Search, is_same};
use crate::host::HostMemory;

/// What the oracle knows about a vCPU.
#[derive(Default)]
pub(super) struct Cpu {
    pub registers: Registers,
    flushes: Flushes,
}

/// An access by a vCPU whose paging is on.
#[derive(Clone, Copy, Debug)]
pub(super) struct GuestAccess<'a> {
    pub cpu: usize,
    pub gva: u64,
    pub access: Access,
    pub paging: &'a GuestPaging,
}

/// The entries that would translate an address now.
pub(super) struct Trace {
    /// The address and the value of each entry, from the top down. The last entry maps a page, or causes a page fault.
    pub entries: Vec<(u64, u64)>,
    /// The meaning of the last entry.
    pub end: Meaning,
}

impl Trace {
    /// Returns log2 of the size of the mapped page, or of the smallest page if no page is mapped.
    fn bits(&self) -> u32 {
        match self.end {
            Meaning::Page { bits, .. } => bits,
            _ => 12,
        }
    }
}

pub(super) struct Oracle {
    pub memory: Memory,
    pub cpus: [Cpu; CPUS],
    now: Time,
}

impl Oracle {
    pub fn new(machine: GuestMachine) -> Self {
        Oracle {
            memory: Memory::new(machine),
            cpus: Default::default(),
            now: 0,
        }
    }

    /// Begins the next moment.
    pub fn tick(&mut self) -> Time {
        self.now += 1;
        self.now
    }

    /// Judges whether an access may have the outcome `outcome`. Returns how a processor may have reached that outcome.
    /// The error describes the violation.
    pub fn judge(&mut self, access: &GuestAccess, outcome: &Outcome) -> Result<Found, String> {
        self.tick();
        let changes = self.memory.machine.ram.take_changes();
        let mut marks = Vec::new();
        for change in changes {
            let gpa = self.record(&change)?;
            let size = Layout::of(access.paging).entry_size();
            for at in (0..8).step_by(size) {
                let mask = u64::MAX >> (64 - 8 * size) << (8 * at);
                let set = ((change.old ^ change.new) & mask) >> (8 * at);
                if set & !(A | D) != 0 || set & !(change.new >> (8 * at)) != 0 {
                    let Change { old, new, .. } = change;
                    return Err(format!("the word at {gpa:#x} was {old:#x} and is {new:#x}"));
                }
                marks.extend((set & A != 0).then_some((gpa + at, false)));
                marks.extend((set & D != 0).then_some((gpa + at, true)));
            }
        }
        for (gpa, dirty) in marks {
            if self
                .search(access)
                .find(Goal::Marks { gpa, dirty })
                .is_none()
            {
                let flag = if dirty { "dirty" } else { "accessed" };
                return Err(format!(
                    "the {flag} flag of the entry at {gpa:#x} was set without reason"
                ));
            }
        }
        let found = self.search(access).find(Goal::Outcome(*outcome));
        if let Outcome::PageFault { .. } = outcome {
            self.page_fault(access);
        }
        self.note_access(access.access, outcome);
        found.ok_or_else(|| format!("{outcome:x?} is no outcome that the tables allow"))
    }

    /// Judges an access to a physical address, without a translation by the guest's tables.
    pub fn judge_physical(
        &mut self,
        gpa: u64,
        access: Access,
        outcome: &Outcome,
    ) -> Result<(), String> {
        self.tick();
        self.unchanged()?;
        let expected = self.memory.access(gpa, access);
        if !is_same(&expected, outcome) {
            return Err(format!("{outcome:x?}, expected {expected:x?}"));
        }
        self.note_access(access, outcome);
        Ok(())
    }

    /// Checks that the MMU has written nothing.
    pub fn unchanged(&self) -> Result<(), String> {
        match self.memory.machine.ram.take_changes().first() {
            None => Ok(()),
            Some(change) => Err(format!(
                "no access, and guest memory was written: {change:x?}"
            )),
        }
    }

    /// Records a change of a word by the MMU. Returns the word's guest-physical address.
    fn record(&mut self, change: &Change) -> Result<u64, String> {
        let page = change.page;
        let gfn = self.memory.gfn_of(page);
        let gfn =
            gfn.ok_or_else(|| format!("host page {page:#x} was written: it is in no slot"))?;
        let gpa = (gfn << 12) + 8 * change.word;
        if self.memory.is_read_only(gpa) {
            return Err(format!("{gpa:#x} was written: it is in a read-only slot"));
        }
        self.memory.marked(self.now, gpa, change.old);
        Ok(gpa)
    }

    fn note_access(&mut self, access: Access, outcome: &Outcome) {
        if let Outcome::Page { host, .. } = outcome
            && access == Access::Write
            && let Some(gfn) = self.memory.gfn_of(HostMemory::identify(host.pfn()).0)
        {
            self.memory.model.note_write(gfn);
        }
    }

    fn search<'a>(&'a self, access: &GuestAccess<'a>) -> Search<'a> {
        let cpu = &self.cpus[access.cpu];
        Search {
            memory: &self.memory,
            flushes: &cpu.flushes,
            now: self.now,
            gva: access.gva,
            access: access.access,
            paging: access.paging,
            globals: cpu.registers.has_global_pages(),
            pcid: cpu.registers.pcid(),
        }
    }

    /// Returns the entries that translate `gva` now.
    pub fn trace(&self, paging: &GuestPaging, gva: u64) -> Trace {
        let layout = Layout::of(paging);
        let mut level = layout.top();
        let mut entries = Vec::new();
        let mut table = match paging.pdptes {
            Some(pdptes) => pdptes[(gva >> 30 & 3) as usize],
            None => paging.cr3,
        };
        let end = loop {
            if layout.mode == Mode::Pae && level == layout.top() && table & P == 0 {
                break Meaning::NotPresent;
            }
            let gpa = layout.entry_at(table & 0x000f_ffff_ffff_f000, level, gva);
            let entry = self.memory.entry(gpa, layout.entry_size());
            entries.push((gpa, entry));
            match layout.meaning(level, entry) {
                Meaning::Table(next) => table = next,
                end => break end,
            }
            level -= 1;
        };
        Trace { entries, end }
    }

    /// Records a page fault, which invalidates everything that the vCPU may have cached for the address. So the fault
    /// does not recur unless the tables in memory cause it ("Operations that Invalidate TLBs and Paging-Structure
    /// Caches"). Call after the page fault.
    fn page_fault(&mut self, access: &GuestAccess) {
        let bits = self.trace(access.paging, access.gva).bits();
        let now = self.tick();
        let cpu = &mut self.cpus[access.cpu];
        let flush = Flush {
            pcid: Some(cpu.registers.pcid()),
            globals: true,
            page: Some((access.gva, bits)),
            structures: Some(access.gva),
        };
        cpu.flushes.flush(now, flush);
    }

    /// Records the flush by an INVLPG. Call after the instruction.
    pub fn invlpg(&mut self, cpu: usize, gva: u64, paging: &GuestPaging) {
        let bits = self.trace(paging, gva).bits();
        let now = self.tick();
        let cpu = &mut self.cpus[cpu];
        let flush = Flush {
            pcid: Some(cpu.registers.pcid()),
            globals: true,
            page: Some((gva, bits)),
            structures: None,
        };
        cpu.flushes.flush(now, flush);
    }

    /// Records the flush by an INVPCID. Call after the instruction.
    pub fn invpcid(&mut self, cpu: usize, invpcid: Invpcid) {
        let now = self.tick();
        let Cpu { registers, flushes } = &mut self.cpus[cpu];
        match invpcid {
            Invpcid::Address { pcid, gva } => flushes.flush(
                now,
                Flush {
                    page: Some((gva, 12)),
                    structures: Some(gva),
                    ..Flush::context(pcid)
                },
            ),
            Invpcid::Context { pcid } => flushes.flush(now, Flush::context(pcid)),
            Invpcid::All => flushes.restart(now, Some(registers)),
            Invpcid::AllButGlobal => flushes.flush(now, Flush::context(None)),
        }
    }

    /// Records a write of a register, and the flush that it causes. Call after the write.
    pub fn written(&mut self, cpu: usize, write: RegisterWrite, new: &Registers) {
        let now = self.tick();
        let Cpu { registers, flushes } = &mut self.cpus[cpu];
        let old = std::mem::replace(registers, *new);
        let is_on = new.mode().is_some();
        let (set, cleared) = (new.cr4 & !old.cr4, old.cr4 & !new.cr4);
        let flushes_all = match write {
            RegisterWrite::Cr0 => (old.cr0 ^ new.cr0) & CR0_PG != 0,
            RegisterWrite::Cr4 => (set | cleared) & CR4_PGE | cleared & CR4_PCIDE != 0,
            RegisterWrite::Cr3 { .. } | RegisterWrite::Efer => false,
        };
        if flushes_all || !is_on {
            return flushes.restart(now, is_on.then_some(new));
        }
        let flushes_context = match write {
            RegisterWrite::Cr3 { keep } => !keep,
            RegisterWrite::Cr4 => set & CR4_SMEP | (set | cleared) & CR4_PAE != 0,
            RegisterWrite::Cr0 | RegisterWrite::Efer => false,
        };
        if flushes_context {
            flushes.flush(now, Flush::context(new.pcid()));
        }
        if (old.cr3, old.pcid(), old.pdptes) != (new.cr3, new.pcid(), new.pdptes) {
            flushes.load(now, new);
        }
    }

    /// Records a flush of all vCPUs. Call after the VMM has set the registers of all vCPUs.
    pub fn flush_all(&mut self) {
        let now = self.tick();
        for Cpu { registers, flushes } in &mut self.cpus {
            let is_on = registers.mode().is_some();
            flushes.restart(now, is_on.then_some(registers));
        }
    }

    /// Forgets the old values that no vCPU can have cached any more.
    pub fn forget(&mut self) {
        let starts = self.cpus.iter().filter_map(|cpu| cpu.flushes.start());
        let oldest = starts.min().unwrap_or(self.now);
        self.memory.forget_before(oldest);
    }
}

#[cfg(test)]
mod tests;
