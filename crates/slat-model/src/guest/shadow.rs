//! The engine's shadow MMU as a guest MMU.

use std::ops::Range;
use std::sync::Arc;

use slat::format::X86;
use slat::guest_walk::GuestPaging;
use slat::{
    Access, Config, DirtyLogReads, Gfn, Gpa, HostWords, Hpa, Hva, MmuKind, Pfn, Region, Setting,
    Stop, Vcpu, VirtualStop, Vm,
};

use super::CPUS;
use super::mmu::{GuestMmu, Invpcid, Outcome, Part, RegisterWrite, StoreKind};
use super::ram::{GuestMachine, GuestRam};
use super::registers::{CR0_PG, CR4_PAE, CR4_PCIDE, CR4_PGE, CR4_SMEP, Privilege, Registers};
use crate::platform::SimPlatform;
use crate::region::set_region;

/// Flushes of its own that an access may need: one for each table on the path, and for the page.
const MOST_RETRIES: usize = 16;

/// [`Vcpu::translate_virtual`] over a [`Vm`] that shadows the guest's tables.
pub struct ShadowMmu {
    vm: Arc<Vm<SimPlatform, X86<5>>>,
    vcpus: Vec<Vcpu<SimPlatform, X86<5>>>,
    registers: [Registers; CPUS],
    ram: Arc<GuestRam>,
}

/// The contents of host memory, for walks.
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
        let config = Config::default().with_mmu(MmuKind::Shadow);
        let vm = Vm::new(machine.platform.clone(), config).expect("there is memory");
        // So that logs are exact.
        vm.set_policy(Setting::DirtyLogReads(DirtyLogReads::Off));
        let vcpus = (0..CPUS).map(|_| vm.create_vcpu().expect("there is memory"));
        ShadowMmu {
            vcpus: vcpus.collect(),
            vm,
            registers: Default::default(),
            ram: machine.ram.clone(),
        }
    }

    /// Returns the VM.
    pub fn vm(&self) -> &Arc<Vm<SimPlatform, X86<5>>> {
        &self.vm
    }

    fn flush(&mut self, cpu: usize) {
        let mut vcpu = self.vcpus[cpu].enter(cpu);
        vcpu.flush_guest(&mut Words(&self.ram));
    }
}

/// Repeats `access` on `vcpu` while it is to be retried. `None`: it is retried for ever.
fn until_done<T>(
    vcpu: &mut Vcpu<SimPlatform, X86<5>>,
    mut access: impl FnMut(&mut Vcpu<SimPlatform, X86<5>>) -> Option<T>,
) -> T {
    for _ in 0..MOST_RETRIES {
        if let Some(done) = access(vcpu) {
            return done;
        }
        vcpu.quiesce();
    }
    panic!("an access is retried for ever");
}

/// Returns what an access comes to that has stopped. `None`: it is to be retried.
fn outcome(stop: Stop) -> Option<Outcome> {
    match stop {
        Stop::Retry => None,
        Stop::Mmio { gpa } => Some(Outcome::Mmio { gpa }),
        Stop::BadAddress { gpa, .. }
        | Stop::MemoryFault {
            gpa, absent: true, ..
        } => Some(Outcome::BadAddress { gpa }),
        Stop::NoExecute { gpa } => Some(Outcome::NoExecute { gpa }),
        stop => panic!("{stop}"),
    }
}

impl GuestMmu for ShadowMmu {
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
        let mut words = Words(&self.ram);
        let mut vcpu = self.vcpus[cpu].enter(cpu);
        until_done(&mut vcpu, |vcpu| {
            match vcpu.translate_virtual(gva, access, paging, &mut words) {
                Ok(page) => Some(Outcome::Page {
                    host: page.host,
                    tracked: page.tracked.is_some(),
                }),
                Err(VirtualStop::PageFault { code }) => Some(Outcome::PageFault { code }),
                Err(VirtualStop::Stop(stop)) => outcome(stop),
                Err(VirtualStop::Memory(never)) => match never {},
            }
        })
    }

    fn access_physical(&mut self, cpu: usize, gpa: Gpa, access: Access) -> Outcome {
        let mut vcpu = self.vcpus[cpu].enter(cpu);
        until_done(&mut vcpu, |vcpu| match vcpu.translate(gpa, access) {
            Ok(page) => Some(Outcome::Page {
                host: page.host,
                tracked: page.tracked,
            }),
            Err(stop) => outcome(stop),
        })
    }

    fn stored(&mut self, cpu: usize, _: StoreKind, parts: &[Part]) {
        let mut vcpu = self.vcpus[cpu].enter(cpu);
        for part in parts {
            let _no_cpu_remembers_any = vcpu.stored(part.gpa, part.bytes as u64);
        }
    }

    fn client_stored(&mut self) {
        self.vm.guest_memory_changed();
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
        let mut vcpu = self.vcpus[cpu].enter(cpu);
        let _no_cpu_remembers_any = vcpu.invlpg(gva, &paging, &mut Words(&self.ram));
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
        let set = set_region(&self.vm, 0, region);
        set.unwrap_or_else(|error| panic!("{region:?}: {error}"));
    }

    fn invalidate(&mut self, range: Range<Hva>, change: &mut dyn FnMut()) {
        let invalidation = self.vm.invalidate(range);
        change();
        drop(invalidation);
    }

    fn dirty_log(&mut self, slot: u32, bitmap: &mut [u64]) {
        let got = self.vm.get_dirty_log(0, slot, bitmap);
        got.unwrap_or_else(|error| panic!("slot {slot}: {error}"));
    }

    fn frame_of(&self, gfn: Gfn) -> Option<Option<Pfn>> {
        Some(self.vm.lookup(0, gfn).map(|mapping| mapping.pfn))
    }

    fn audit(&mut self) -> Result<(), String> {
        self.vm.audit().map_err(|error| error.to_string())
    }
}
