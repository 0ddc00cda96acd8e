//! Runs instructions that flush, and instructions that write control registers.

use slat::guest_walk::Mode;

use super::Runner;
use crate::guest::entry::may_load_pdpte;
use crate::guest::mmu::{Invpcid, RegisterWrite};
use crate::guest::ops::Control;
use crate::guest::registers::*;

impl Runner {
    pub(super) fn invlpg(&mut self, cpu: usize, gva: u64) {
        // Without paging, the instruction has no effect on translations.
        if let Some(paging) = self.registers(cpu).paging(&Privilege::KERNEL) {
            let gva = canonical(paging.mode, gva);
            self.mmu.invlpg(cpu, gva);
            self.oracle.invlpg(cpu, gva, &paging);
            self.tally.count("INVLPG");
        }
    }

    pub(super) fn invpcid(&mut self, cpu: usize, invpcid: Invpcid) {
        let registers = self.registers(cpu);
        let Some(mode) = registers.mode() else { return };
        let pcids = registers.cr4 & CR4_PCIDE != 0;
        let pcid_of = |pcid| if pcids { pcid } else { 0 };
        let (invpcid, name) = match invpcid {
            Invpcid::Address { pcid, gva } => {
                let (pcid, gva) = (pcid_of(pcid), canonical(mode, gva));
                (Invpcid::Address { pcid, gva }, "INVPCID of an address")
            }
            Invpcid::Context { pcid } => {
                let pcid = pcid_of(pcid);
                (Invpcid::Context { pcid }, "INVPCID of a context")
            }
            Invpcid::All => (invpcid, "INVPCID of all"),
            Invpcid::AllButGlobal => (invpcid, "INVPCID of all but global"),
        };
        self.mmu.invpcid(cpu, invpcid);
        self.oracle.invpcid(cpu, invpcid);
        self.tally.count(name);
    }

    /// Writes a register, and the PDPTEs if the write loads them. Returns false and does nothing if the write causes a
    /// general-protection exception.
    fn write(&mut self, cpu: usize, write: RegisterWrite, mut new: Registers) -> bool {
        let old = *self.registers(cpu);
        let loads = match write {
            RegisterWrite::Cr4 => {
                (old.cr4 ^ new.cr4) & (CR4_PAE | CR4_PGE | CR4_PSE | CR4_SMEP) != 0
            }
            RegisterWrite::Cr0 => old.mode() != new.mode(),
            RegisterWrite::Cr3 { .. } => true,
            RegisterWrite::Efer => false,
        };
        if loads && new.mode() == Some(Mode::Pae) {
            let table = new.cr3 & 0xffff_ffe0;
            new.pdptes = [0, 8, 16, 24].map(|at| self.oracle.memory.entry(table + at, 8));
            if !new.pdptes.iter().all(|pdpte| may_load_pdpte(*pdpte)) {
                self.tally.count("bad PDPTE");
                return false;
            }
        }
        self.mmu.written(cpu, write, &old, &new);
        self.oracle.written(cpu, write, &new);
        true
    }

    pub(super) fn load_cr3(&mut self, cpu: usize, cr3: u64, keep: bool) {
        let old = *self.registers(cpu);
        let keep = keep && old.cr4 & CR4_PCIDE != 0;
        let new = Registers { cr3, ..old };
        if old.mode().is_some() && self.write(cpu, RegisterWrite::Cr3 { keep }, new) {
            self.tally.count(match (keep, new.pcid()) {
                (true, _) => "MOV to CR3, nothing flushed",
                (false, 0) => "MOV to CR3",
                (false, _) => "MOV to CR3 with a PCID",
            });
        }
    }

    pub(super) fn toggle(&mut self, cpu: usize, control: Control) {
        let old = *self.registers(cpu);
        let Some(mode) = old.mode() else { return };
        let mut new = old;
        let (write, name) = match control {
            Control::WriteProtect => {
                new.cr0 ^= CR0_WP;
                (RegisterWrite::Cr0, "CR0.WP")
            }
            Control::NoExecute => {
                new.efer ^= EFER_NXE;
                (RegisterWrite::Efer, "EFER.NXE")
            }
            _ => {
                let (bit, name) = match control {
                    Control::GlobalPages => (CR4_PGE, "CR4.PGE"),
                    Control::Pcids => (CR4_PCIDE, "CR4.PCIDE"),
                    Control::Smep => (CR4_SMEP, "CR4.SMEP"),
                    Control::Smap => (CR4_SMAP, "CR4.SMAP"),
                    _ => (CR4_PKE, "CR4.PKE"),
                };
                new.cr4 ^= bit;
                (RegisterWrite::Cr4, name)
            }
        };
        let long = matches!(mode, Mode::Level4 | Mode::Level5);
        let pcids_begin = new.cr4 & !old.cr4 & CR4_PCIDE != 0;
        if pcids_begin && (!long || new.cr3 & 0xfff != 0) || !self.write(cpu, write, new) {
            return;
        }
        self.tally.count(name);
        if control == Control::NoExecute {
            // After a change of EFER.NXE, software must flush all translations. The guest does so by changing CR4.PGE
            // twice.
            for _ in 0..2 {
                new = *self.registers(cpu);
                new.cr4 ^= CR4_PGE;
                // With PAE paging, the PDPTEs in memory may have become invalid. Then MOV to CR4 fails, and MOV to CR0
                // turns paging off.
                if !self.write(cpu, RegisterWrite::Cr4, new) {
                    self.paging_off(cpu);
                    return;
                }
            }
        }
    }

    fn paging_off(&mut self, cpu: usize) {
        let mut new = *self.registers(cpu);
        if new.cr4 & CR4_PCIDE != 0 {
            new.cr4 &= !CR4_PCIDE;
            self.write(cpu, RegisterWrite::Cr4, new);
        }
        if new.cr0 & CR0_PG != 0 {
            new.cr0 &= !CR0_PG;
            new.efer &= !EFER_LMA;
            self.write(cpu, RegisterWrite::Cr0, new);
            self.tally.count("CR0.PG");
        }
    }

    pub(super) fn set_mode(&mut self, cpu: usize, mode: Option<Mode>, cr3: u64) {
        self.paging_off(cpu);
        let Some(mode) = mode else { return };
        let mut new = *self.registers(cpu);
        new.cr4 &= !(CR4_PSE | CR4_PAE | CR4_LA57);
        new.efer &= !EFER_LME;
        match mode {
            Mode::Bits32 { pse: false } => {}
            Mode::Bits32 { pse: true } => new.cr4 |= CR4_PSE,
            Mode::Pae => new.cr4 |= CR4_PAE,
            Mode::Level4 => {
                new.cr4 |= CR4_PAE;
                new.efer |= EFER_LME;
            }
            Mode::Level5 => {
                new.cr4 |= CR4_PAE | CR4_LA57;
                new.efer |= EFER_LME;
            }
        }
        self.write(cpu, RegisterWrite::Cr4, new);
        self.write(cpu, RegisterWrite::Efer, new);
        new.cr3 = cr3;
        self.write(cpu, RegisterWrite::Cr3 { keep: false }, new);
        new.cr0 |= CR0_PG;
        if new.efer & EFER_LME != 0 {
            new.efer |= EFER_LMA;
        }
        self.write(cpu, RegisterWrite::Cr0, new);
    }
}

/// Returns the canonical address for `gva` in this paging mode (sign-extended).
pub(super) fn canonical(mode: Mode, gva: u64) -> u64 {
    let unused = match mode {
        Mode::Bits32 { .. } | Mode::Pae => return gva & 0xffff_ffff,
        Mode::Level4 => 16,
        Mode::Level5 => 7,
    };
    ((gva << unused) as i64 >> unused) as u64
}
