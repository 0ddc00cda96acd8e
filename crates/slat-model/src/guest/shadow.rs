//! The engine's shadow MMU as a guest MMU.

use std::ops::Range;
use std::sync::Arc;

use slat::format::{Format, X86};
use slat::guest_walk::GuestPaging;
use slat::{Access, Config, Gfn, Gpa, HostWords, Hpa, Hva, MmuKind, Pfn, Region, VirtualStop, Vm};

use super::CPUS;
use super::engine::{EngineMmu, stopped, until_done};
use super::mmu::{GuestMmu, Invpcid, Outcome, Part, RegisterWrite, StoreKind};
use super::ram::{GuestMachine, GuestRam};
use super::registers::{CR0_PG, CR4_PAE, CR4_PCIDE, CR4_PGE, CR4_SMEP, Privilege, Registers};
use crate::platform::SimPlatform;

/// A [`Vm`] that shadows tables of the guest. The vCPUs access memory by [`Vcpu::translate_virtual`](slat::Vcpu). The
/// shadowed tables are those of the guest's own paging; with [`Self::nested`], they are the nested tables that the
/// guest makes for its own guests.
pub struct ShadowMmu<F: Format = X86<5>> {
    engine: EngineMmu<F>,
    registers: [Registers; CPUS],
}

/// The guest's memory, for walks of the guest's tables.
struct Words<'r>(&'r GuestRam);

impl HostWords for Words<'_> {
    type Error = std::convert::Infallible;

    fn read(&mut self, host: Hpa, size: usize) -> Result<u64, Self::Error> {
        Ok(self.0.read(host, size))
    }

    fn compare_exchange(
        &mut self,
        host: Hpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Self::Error> {
        Ok(self.0.compare_exchange(host, size, old, new))
    }
}

impl ShadowMmu {
    /// Makes a VM without memslots on `machine`.
    pub fn new(machine: &GuestMachine) -> Self {
        ShadowMmu::with_config(machine, Config::default().with_mmu(MmuKind::Shadow))
    }
}

impl<F: Format> ShadowMmu<F> {
    /// Makes a VM without memslots on `machine`, with second-level tables that `mmu` makes. The VM shadows the guest's
    /// nested tables.
    pub fn nested(machine: &GuestMachine, mmu: MmuKind) -> Self {
        ShadowMmu::with_config(machine, Config::default().with_mmu(mmu).with_nested(true))
    }

    fn with_config(machine: &GuestMachine, config: Config) -> Self {
        ShadowMmu {
            engine: EngineMmu::with_config(machine, config),
            registers: Default::default(),
        }
    }

    /// Returns the VM.
    pub fn vm(&self) -> &Arc<Vm<SimPlatform, F>> {
        &self.engine.vm
    }

    /// Returns whether the tables used with `paging` are shadowed.
    fn shadows(&self, paging: &GuestPaging) -> bool {
        self.vm().mmu() == MmuKind::Shadow || paging.reserves_table_global
    }

    fn flush(&mut self, cpu: usize) {
        let mut vcpu = self.engine.vcpus[cpu].enter(cpu);
        vcpu.flush_guest(&mut Words(&self.engine.ram));
    }
}

impl<F: Format> GuestMmu for ShadowMmu<F> {
    fn access(
        &mut self,
        cpu: usize,
        gva: u64,
        access: Access,
        paging: Option<&GuestPaging>,
    ) -> Outcome {
        let Some(paging) = paging.filter(|paging| self.shadows(paging)) else {
            return self.engine.access(cpu, gva, access, paging);
        };
        let mut words = Words(&self.engine.ram);
        let mut vcpu = self.engine.vcpus[cpu].enter(cpu);
        until_done(&mut vcpu, |vcpu| {
            match vcpu.translate_virtual(gva, access, paging, &mut words) {
                Ok(page) => Some(Outcome::Page {
                    host: page.host,
                    tracked: page.tracked.is_some(),
                }),
                Err(VirtualStop::PageFault { code }) => Some(Outcome::PageFault { code }),
                Err(VirtualStop::Stop(stop)) => stopped(stop),
                Err(VirtualStop::Memory(never)) => match never {},
            }
        })
    }

    fn access_physical(&mut self, cpu: usize, gpa: Gpa, access: Access) -> Outcome {
        self.engine.access_physical(cpu, gpa, access)
    }

    fn stored(&mut self, cpu: usize, _: StoreKind, parts: &[Part]) {
        let mut vcpu = self.engine.vcpus[cpu].enter(cpu);
        for part in parts {
            let _no_cpu_remembers_any = vcpu.stored(part.gpa, part.bytes as u64);
        }
    }

    fn client_stored(&mut self) {
        self.vm().guest_memory_changed();
        (0..CPUS).for_each(|cpu| self.flush(cpu));
    }

    fn written(&mut self, cpu: usize, write: RegisterWrite, old: &Registers, new: &Registers) {
        self.registers[cpu] = *new;
        let (changed, cleared) = (new.cr4 ^ old.cr4, old.cr4 & !new.cr4);
        let flushes = match write {
            RegisterWrite::Cr0 => (old.cr0 ^ new.cr0) & CR0_PG != 0,
            RegisterWrite::Cr3 { keep } => !keep,
            RegisterWrite::Cr4 => {
                changed & (CR4_PGE | CR4_PAE | CR4_SMEP) != 0 || cleared & CR4_PCIDE != 0
            }
            RegisterWrite::Efer => false,
        };
        if flushes {
            self.flush(cpu);
        }
    }

    fn invlpg(&mut self, cpu: usize, gva: u64) {
        let Some(paging) = self.registers[cpu].paging(&Privilege::KERNEL) else {
            return;
        };
        if !self.shadows(&paging) {
            return;
        }
        let mut vcpu = self.engine.vcpus[cpu].enter(cpu);
        let _no_cpu_remembers_any = vcpu.invlpg(gva, &paging, &mut Words(&self.engine.ram));
    }

    fn invpcid(&mut self, cpu: usize, invpcid: Invpcid) {
        match invpcid {
            Invpcid::Address { pcid, gva } if pcid == self.registers[cpu].pcid() => {
                self.invlpg(cpu, gva);
            }
            _ => self.flush(cpu),
        }
    }

    fn set_region(&mut self, region: &Region) {
        self.engine.set_region(region);
    }

    fn invalidate(&mut self, range: Range<Hva>, change: &mut dyn FnMut()) {
        self.engine.invalidate(range, change);
    }

    fn dirty_log(&mut self, slot: u32, bitmap: &mut [u64]) {
        self.engine.dirty_log(slot, bitmap);
    }

    fn frame_of(&self, gfn: Gfn) -> Option<Option<Pfn>> {
        let found = self.engine.frame_of(gfn);
        // If the second level does not map a frame, shadow pages of nested tables may still map it.
        found.filter(|frame| frame.is_some() || self.vm().mmu() == MmuKind::Shadow)
    }

    fn audit(&mut self) -> Result<(), String> {
        self.engine.audit()
    }
}
