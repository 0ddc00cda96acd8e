//! An MMU that caches everything that the SDM allows. It consists of the engine, a TLB, paging-structure caches, and a
//! copy of each page-table entry. Calls of `stored` update the copies.

use std::collections::HashMap;
use std::ops::Range;

use slat::guest_walk::{GuestPaging, GuestTables, Mode, WalkError, error_code, walk};
use slat::{Access, Gpa, Hpa, Hva, PAGE_SIZE, Region};

use super::CPUS;
use super::caches::{Caches, Translation, Values};
use super::defects::{Defect, Flaw};
use super::engine::{EngineMmu, outcome};
use super::entry::{A, D, G, RW};
use super::mmu::{GuestMmu, Invpcid, Outcome, Part, RegisterWrite, StoreKind};
use super::ram::{GuestMachine, entry_in};
use super::registers::{CR0_PG, CR4_PAE, CR4_PCIDE, CR4_PGE, CR4_SMEP, Privilege, Registers};

/// An [`EngineMmu`] with caches that keep every entry until it is flushed, and perhaps with a [`Defect`].
///
/// This MMU tests the oracle: it uses stale translations wherever the SDM allows that.
pub struct CachingMmu {
    engine: EngineMmu,
    cpus: [Cpu; CPUS],
    /// The words of tables, by frame and by address. Stores to these frames are tracked, so they are reported to this
    /// MMU.
    tables: HashMap<u64, HashMap<u64, u64>>,
    flaw: Flaw,
}

#[derive(Default)]
struct Cpu {
    caches: Caches,
    registers: Registers,
}

impl CachingMmu {
    /// Makes a VM without memslots on `machine`.
    pub fn new(machine: &GuestMachine, defect: Option<Defect>) -> Self {
        CachingMmu {
            engine: EngineMmu::new(machine),
            cpus: Default::default(),
            tables: HashMap::new(),
            flaw: Flaw(defect),
        }
    }

    fn pcid(&self, cpu: usize) -> u16 {
        match self.flaw.is(Defect::IgnoresPcid) {
            true => 0,
            false => self.cpus[cpu].registers.pcid(),
        }
    }

    /// Returns the entry of `size` bytes at `gpa`: from the copy of the table, if the MMU has a copy.
    fn entry(&mut self, cpu: usize, gpa: Gpa, size: usize) -> Result<u64, Outcome> {
        let at = gpa.0 & !7;
        let copies = self.tables.entry(gpa.gfn().0).or_default();
        let word = match copies.get(&at) {
            Some(word) => *word,
            None => {
                let word = self.engine.read_entry(cpu, Gpa(at), 8)?;
                copies.insert(at, word);
                word
            }
        };
        Ok(entry_in(word, 8 * (gpa.0 % 8), size))
    }

    /// Sets accessed and dirty flags of an entry. Returns false if the entry was no longer `old`.
    fn mark(
        &mut self,
        cpu: usize,
        gpa: Gpa,
        size: usize,
        old: u64,
        flags: u64,
    ) -> Result<bool, Outcome> {
        self.forget_word(gpa.0);
        self.engine.mark_entry(cpu, gpa, size, old, old | flags)
    }

    fn forget_word(&mut self, gpa: u64) {
        if let Some(copies) = self.tables.get_mut(&(gpa >> 12)) {
            copies.remove(&(gpa & !7));
        }
    }

    /// Walks the guest's tables for an access, and caches the translation. Also caches the translation of the
    /// neighbouring page.
    fn walk(
        &mut self,
        cpu: usize,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
    ) -> Result<Translation, Outcome> {
        let (found, leaf) = self.fill(cpu, gva, access, paging, true)?;
        self.mark_wrongly(cpu, access, leaf, shifts(paging))?;
        // This walk only fills the caches, so its result is ignored.
        let _ = self.fill(cpu, gva ^ PAGE_SIZE, Access::Read, paging, false);
        Ok(found)
    }

    /// Walks the guest's tables, and caches the translation. Returns the translation and the address of the leaf. If
    /// `marks` is false, the walk sets no flags. Instead, it ends at an entry whose accessed or dirty flag would have
    /// to be set.
    fn fill(
        &mut self,
        cpu: usize,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        marks: bool,
    ) -> Result<(Translation, Gpa), Outcome> {
        let (pcid, flaw) = (self.pcid(cpu), self.flaw);
        let shifts = shifts(paging);
        let caches = &self.cpus[cpu].caches;
        let known = caches.structures(pcid, gva, shifts);
        let mut tables = Tables {
            cpu,
            top: shifts.len(),
            known,
            marks,
            read: Vec::new(),
            mmu: self,
        };
        let found = walk(&mut tables, paging, gva, access);
        let read = std::mem::take(&mut tables.read);
        // All entries except the last one reference tables. The MMU caches each of them whose accessed flag was already
        // set and that is not yet in the cache.
        let mut values = Values::default();
        let mut may_cache = true;
        for (i, (_, value)) in read.iter().enumerate() {
            let level = shifts.len() - i;
            values[level - 1] = *value;
            may_cache &= value & A != 0;
            let is_pointer = paging.mode == Mode::Pae && level == 3;
            let is_known = known.is_some_and(|(lowest, _)| level >= lowest as usize);
            if may_cache && i + 1 < read.len() && !is_pointer && !is_known {
                let caches = &mut self.cpus[cpu].caches;
                caches.insert_structure(pcid, level as u32, gva, shifts[level - 1], values);
            }
        }
        let page = match found {
            Ok(page) => flaw.page(page),
            Err(WalkError::PageFault { code }) => return Err(Outcome::PageFault { code }),
            Err(WalkError::Memory(outcome)) => return Err(outcome),
        };
        let (at, leaf) = *read.last().expect("a walk reads a leaf");
        let translation = Translation {
            page,
            writable: leaf & RW != 0,
            host: None,
        };
        let pge = self.cpus[cpu].registers.cr4 & CR4_PGE != 0;
        let global = pge && leaf & G != 0 || flaw.is(Defect::MakesAllGlobal);
        let owner = (!global).then_some(pcid);
        let caches = &mut self.cpus[cpu].caches;
        caches.insert(owner, gva, paging, translation);
        Ok((translation, at))
    }

    /// Sets flags that no MMU may set, if this MMU has such a defect. `leaf` is the address of the leaf.
    fn mark_wrongly(
        &mut self,
        cpu: usize,
        access: Access,
        leaf: Gpa,
        shifts: &[u32],
    ) -> Result<(), Outcome> {
        let size = if shifts == BITS32 { 4 } else { 8 };
        let (at, flag) = match self.flaw.0 {
            Some(Defect::SetsDirtyOnRead) if access == Access::Read => (leaf, D),
            Some(Defect::MarksNeighbour) => (Gpa(leaf.0 ^ size as u64), A),
            _ => return Ok(()),
        };
        let old = self.entry(cpu, at, size)?;
        if old & flag == 0 {
            self.mark(cpu, at, size, old, flag)?;
        }
        Ok(())
    }

    /// Returns the outcome of an access by a cached translation. `None`: no translation is cached, or the walk must be
    /// repeated.
    fn cached(
        &mut self,
        cpu: usize,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
    ) -> Option<Outcome> {
        let pcid = self.pcid(cpu);
        let found = *self.cpus[cpu].caches.find(pcid, gva, paging)?;
        let to_clean = access == Access::Write && found.writable;
        if found.allows(access) || to_clean && self.flaw.is(Defect::WritesToClean) {
            return Some(self.reach(cpu, gva, access, paging, found));
        }
        // The page may have become executable since the translation was cached. Then the fault is spurious, which
        // software must expect. If a page allows some access and forbids a fetch, then XD or SMEP forbids the fetch.
        let user = if paging.user { error_code::USER } else { 0 };
        let code = error_code::PRESENT | error_code::FETCH | user;
        (access == Access::Execute).then_some(Outcome::PageFault { code })
    }

    /// Returns the outcome of an access for which `translation` has the rights.
    fn reach(
        &mut self,
        cpu: usize,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        translation: Translation,
    ) -> Outcome {
        let keeps = self.flaw.is(Defect::KeepsHostPages);
        if let Some(host) = translation.host.filter(|_| keeps) {
            return self.tracked(translation.page.gpa, outcome(Ok(host)));
        }
        let reached =
            self.access_physical(cpu, Gpa(translation.page.gpa.0 + gva % PAGE_SIZE), access);
        if let Outcome::Page { host, .. } = reached {
            self.remember_host(cpu, gva, paging, host);
        }
        reached
    }

    fn remember_host(&mut self, cpu: usize, gva: u64, paging: &GuestPaging, host: Hpa) {
        let pcid = self.pcid(cpu);
        if let Some(found) = self.cpus[cpu].caches.find(pcid, gva, paging) {
            found.host = Some(host);
        }
    }

    /// Sets the field `tracked` of `outcome`: whether the page contains a table.
    fn tracked(&self, gpa: Gpa, outcome: Outcome) -> Outcome {
        match outcome {
            Outcome::Page { host, .. } => Outcome::Page {
                host,
                tracked: self.tables.contains_key(&gpa.gfn().0)
                    && !self.flaw.is(Defect::TracksNothing),
            },
            other => other,
        }
    }
}

const BITS32: &[u32] = &[12, 22];

/// Returns the lowest address bit of the index at each level, from level 1. Leaves out levels whose table is in
/// registers (PAE's PDPTEs).
fn shifts(paging: &GuestPaging) -> &'static [u32] {
    match paging.mode {
        Mode::Bits32 { .. } => BITS32,
        Mode::Pae if paging.pdptes.is_some() => &[12, 21],
        Mode::Pae => &[12, 21, 30],
        Mode::Level4 => &[12, 21, 30, 39],
        Mode::Level5 => &[12, 21, 30, 39, 48],
    }
}

/// The tables of a guest, for one walk by one vCPU.
struct Tables<'a> {
    mmu: &'a mut CachingMmu,
    cpu: usize,
    /// The number of levels of the guest's tables.
    top: usize,
    /// The lowest level at which an entry is cached, and the values of the cached entries from this level up.
    known: Option<(u32, Values)>,
    /// Whether the walk may set flags.
    marks: bool,
    /// The address of each entry that was read, from the top down, with its value in memory or in the cache.
    read: Vec<(Gpa, u64)>,
}

impl GuestTables for Tables<'_> {
    type Error = Outcome;

    fn read(&mut self, gpa: Gpa, size: usize) -> Result<u64, Outcome> {
        let level = self.top - self.read.len();
        let value = match &self.known {
            Some((lowest, values)) if level >= *lowest as usize => values[level - 1],
            _ => self.mmu.entry(self.cpu, gpa, size)?,
        };
        self.read.push((gpa, value));
        Ok(self.mmu.flaw.entry(value))
    }

    fn compare_exchange(
        &mut self,
        gpa: Gpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Outcome> {
        if !self.marks {
            return Err(Outcome::BadAddress { gpa });
        }
        let flags = self.mmu.flaw.flags(new & !old);
        // One entry may be read at two levels, because a table may be used at two levels. The read at the upper level
        // may have found a cached entry, in which the accessed flag is set. So the last read counts.
        let read = self.read.iter().rfind(|(at, _)| *at == gpa);
        let (_, value) = *read.expect("the walk has read it");
        let marked = flags == 0 || self.mmu.mark(self.cpu, gpa, size, value, flags)?;
        if !marked {
            // The walk restarts, so the entries are read again.
            self.read.clear();
        }
        Ok(marked)
    }
}

impl GuestMmu for CachingMmu {
    fn access(
        &mut self,
        cpu: usize,
        gva: u64,
        access: Access,
        paging: Option<&GuestPaging>,
    ) -> Outcome {
        let Some(paging) = paging else {
            return self.access_physical(cpu, Gpa(gva), access);
        };
        let seen = self.flaw.paging(paging);
        let outcome = match self.cached(cpu, gva, access, &seen) {
            Some(outcome) => outcome,
            None => match self.walk(cpu, gva, access, &seen) {
                Ok(found) => self.reach(cpu, gva, access, &seen, found),
                Err(outcome) => outcome,
            },
        };
        if matches!(outcome, Outcome::PageFault { .. }) && !self.flaw.is(Defect::KeepsOverFault) {
            let pcid = self.pcid(cpu);
            let caches = &mut self.cpus[cpu].caches;
            caches.flush_page(pcid, gva, true);
            caches.flush_structures_of(pcid, gva, shifts(&seen));
        }
        self.flaw.outcome(outcome)
    }

    fn access_physical(&mut self, cpu: usize, gpa: Gpa, access: Access) -> Outcome {
        let reached = self.engine.access_physical(cpu, gpa, access);
        self.tracked(gpa, reached)
    }

    fn stored(&mut self, cpu: usize, kind: StoreKind, parts: &[Part]) {
        for part in self.flaw.stored(cpu, kind, parts) {
            let first = part.gpa.0 & !7;
            for word in (first..part.gpa.0 + part.bytes as u64).step_by(8) {
                self.forget_word(word);
            }
        }
    }

    fn client_stored(&mut self) {
        self.tables.clear();
        for cpu in &mut self.cpus {
            cpu.caches.flush();
        }
    }

    fn written(&mut self, cpu: usize, write: RegisterWrite, old: &Registers, new: &Registers) {
        self.cpus[cpu].registers = *new;
        let (pcid, flaw) = (self.pcid(cpu), self.flaw);
        let caches = &mut self.cpus[cpu].caches;
        let (set, cleared) = (new.cr4 & !old.cr4, old.cr4 & !new.cr4);
        match write {
            RegisterWrite::Cr0 if (old.cr0 ^ new.cr0) & CR0_PG != 0 => caches.flush(),
            RegisterWrite::Cr0 | RegisterWrite::Efer => {}
            RegisterWrite::Cr3 { keep } => {
                if !keep && !flaw.is(Defect::KeepsOverCr3) {
                    caches.flush_context(pcid);
                }
            }
            RegisterWrite::Cr4 => {
                if (set | cleared) & CR4_PGE != 0 && !flaw.is(Defect::KeepsOverPge)
                    || cleared & CR4_PCIDE != 0
                {
                    caches.flush();
                }
                // This MMU flushes more than the SDM demands, because it caches rights, and not the entries' flags.
                if (set | cleared) & CR4_SMEP != 0 && !flaw.is(Defect::KeepsOverSmep) {
                    caches.flush();
                }
                if (set | cleared) & CR4_PAE != 0 {
                    caches.flush_context(pcid);
                }
            }
        }
    }

    fn invlpg(&mut self, cpu: usize, gva: u64) {
        let (pcid, flaw) = (self.pcid(cpu), self.flaw);
        let caches = &mut self.cpus[cpu].caches;
        if !flaw.is(Defect::ForgetsInvlpg) {
            caches.flush_page(pcid, gva, true);
        }
        if !flaw.is(Defect::KeepsStructuresOverInvlpg) {
            caches.flush_structures(pcid);
        }
    }

    fn invpcid(&mut self, cpu: usize, invpcid: Invpcid) {
        let flaw = self.flaw;
        let Cpu { caches, registers } = &mut self.cpus[cpu];
        match invpcid {
            Invpcid::Address { .. } if flaw.is(Defect::ForgetsInvpcidOfAddress) => {}
            Invpcid::Address { pcid, gva } => {
                caches.flush_page(pcid, gva, false);
                let paging = registers.paging(&Privilege::KERNEL).expect("paging is on");
                caches.flush_structures_of(pcid, gva, shifts(&paging));
            }
            Invpcid::Context { .. } if flaw.is(Defect::ForgetsInvpcidOfContext) => {}
            Invpcid::Context { pcid } => caches.flush_context(pcid),
            Invpcid::All if flaw.is(Defect::KeepsGlobalOverInvpcid) => caches.flush_contexts(),
            Invpcid::All => caches.flush(),
            Invpcid::AllButGlobal => caches.flush_contexts(),
        }
    }

    fn set_region(&mut self, region: &Region) {
        if !self.flaw.is(Defect::KeepsTablesOfSlots) {
            self.tables.clear();
        }
        self.engine.set_region(region);
    }

    fn invalidate(&mut self, range: Range<Hva>, change: &mut dyn FnMut()) {
        self.engine.invalidate(range, change);
    }

    fn dirty_log(&mut self, slot: u32, bitmap: &mut [u64]) {
        self.engine.dirty_log(slot, bitmap);
        if self.flaw.is(Defect::LosesDirtyPage)
            && let Some(word) = bitmap.iter_mut().find(|word| **word != 0)
        {
            *word &= *word - 1;
        }
    }

    fn audit(&mut self) -> Result<(), String> {
        self.engine.audit()
    }
}
