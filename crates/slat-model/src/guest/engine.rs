//! The engine as a guest MMU without a guest TLB: it walks the guest's tables for each access.

use std::ops::Range;
use std::sync::Arc;

use slat::format::{Format, Npt};
use slat::guest_walk::{GuestPaging, GuestTables, WalkError, walk};
use slat::{
    Access, Config, DirtyLogReads, Gfn, Gpa, Hpa, Hva, MmuKind, PAGE_SIZE, Pfn, Region, Setting,
    Stop, Translation, Vcpu, Vm,
};

use super::CPUS;
use super::mmu::{GuestMmu, Invpcid, Outcome, Part, RegisterWrite, StoreKind};
use super::ram::{GuestMachine, GuestRam};
use super::registers::Registers;
use crate::platform::SimPlatform;
use crate::region::set_region;

/// The maximum number of times that an access is tried. The engine may stop an access once for each table on the path
/// and once for the page, to flush; after each flush the access is tried again.
const MOST_RETRIES: usize = 16;

/// Runs [`slat::guest_walk::walk`] on a [`Vm`] with second-level tables. By default, these are AMD's nested page tables
/// (NPT).
pub struct EngineMmu<F: Format = Npt> {
    pub(super) vm: Arc<Vm<SimPlatform, F>>,
    pub(super) vcpus: Vec<Vcpu<SimPlatform, F>>,
    pub(super) ram: Arc<GuestRam>,
}

impl EngineMmu {
    /// Makes a VM without memslots on `machine`.
    pub fn new(machine: &GuestMachine) -> Self {
        EngineMmu::with_mmu(machine, MmuKind::Tdp)
    }

    /// Makes an MMU under test like [`EngineMmu::new`], but with second-level tables that the engine makes in the way
    /// `mmu`.
    pub fn with_mmu(machine: &GuestMachine, mmu: MmuKind) -> Self {
        EngineMmu::with_config(machine, Config::default().with_mmu(mmu))
    }
}

/// Calls `access` on `vcpu` until it returns a result that is not a retry.
pub(super) fn until_done<F: Format, T>(
    vcpu: &mut Vcpu<SimPlatform, F>,
    mut access: impl FnMut(&mut Vcpu<SimPlatform, F>) -> Option<T>,
) -> T {
    for _ in 0..MOST_RETRIES {
        if let Some(done) = access(vcpu) {
            return done;
        }
        // Between two reader sections, the CPU keeps no translation.
        vcpu.quiesce();
    }
    panic!("an access is retried for ever");
}

/// Returns the outcome of an access that the engine has stopped. `None`: the access must be tried again.
pub(super) fn stopped(stop: Stop) -> Option<Outcome> {
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

impl<F: Format> EngineMmu<F> {
    /// Makes a VM without memslots on `machine`.
    pub(super) fn with_config(machine: &GuestMachine, config: Config) -> Self {
        let vm = Vm::new(machine.platform.clone(), config).expect("there is memory");
        // Only writes are logged, so that the logs contain exactly the written pages.
        vm.set_policy(Setting::DirtyLogReads(DirtyLogReads::Off));
        let vcpus = (0..CPUS).map(|_| vm.create_vcpu().expect("there is memory"));
        EngineMmu {
            vcpus: vcpus.collect(),
            vm,
            ram: machine.ram.clone(),
        }
    }

    /// Translates a guest-physical address by the second level.
    fn translate(&mut self, cpu: usize, gpa: Gpa, access: Access) -> Result<Translation, Outcome> {
        let mut vcpu = self.vcpus[cpu].enter(cpu);
        until_done(&mut vcpu, |vcpu| match vcpu.translate(gpa, access) {
            Ok(found) => Some(Ok(found)),
            Err(stop) => stopped(stop).map(Err),
        })
    }

    /// Returns the host page to which the second level translates a guest-physical address.
    pub(super) fn reach(&mut self, cpu: usize, gpa: Gpa, access: Access) -> Result<Hpa, Outcome> {
        self.translate(cpu, gpa, access).map(|found| found.host)
    }

    /// Reads a page-table entry. `Err`: the outcome of the access that needs the entry.
    pub(super) fn read_entry(&mut self, cpu: usize, gpa: Gpa, size: usize) -> Result<u64, Outcome> {
        match self.reach(cpu, gpa, Access::Read) {
            Ok(host) => Ok(self.ram.read(Hpa(host.0 + gpa.offset()), size)),
            // The table is in no memslot, so its entries read as 0.
            Err(Outcome::Mmio { .. }) => Ok(0),
            Err(outcome) => Err(outcome),
        }
    }

    /// Sets accessed and dirty flags of a page-table entry. Returns false if the entry was no longer `old`.
    pub(super) fn mark_entry(
        &mut self,
        cpu: usize,
        gpa: Gpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Outcome> {
        match self.reach(cpu, gpa, Access::Write) {
            Ok(host) => {
                let host = Hpa(host.0 + gpa.offset());
                Ok(self.ram.compare_exchange(host, size, old, new))
            }
            // In read-only memory, flags of page-table entries are not set.
            Err(Outcome::Mmio { .. }) => Ok(true),
            Err(outcome) => Err(outcome),
        }
    }
}

/// Returns the outcome of an access that has reached the host page in `reached`, or else the outcome that has stopped
/// the access.
pub(super) fn outcome(reached: Result<Hpa, Outcome>) -> Outcome {
    reached.map_or_else(
        |outcome| outcome,
        |host| Outcome::Page {
            host,
            tracked: false,
        },
    )
}

/// The tables of a guest, for walks of one vCPU.
struct Tables<'a, F: Format> {
    mmu: &'a mut EngineMmu<F>,
    cpu: usize,
}

impl<F: Format> GuestTables for Tables<'_, F> {
    type Error = Outcome;

    fn read(&mut self, gpa: Gpa, size: usize) -> Result<u64, Outcome> {
        self.mmu.read_entry(self.cpu, gpa, size)
    }

    fn compare_exchange(
        &mut self,
        gpa: Gpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Outcome> {
        self.mmu.mark_entry(self.cpu, gpa, size, old, new)
    }
}

impl<F: Format> GuestMmu for EngineMmu<F> {
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
        let mut tables = Tables { mmu: self, cpu };
        match walk(&mut tables, paging, gva, access) {
            Ok(page) => self.access_physical(cpu, Gpa(page.gpa.0 + gva % PAGE_SIZE), access),
            Err(WalkError::PageFault { code }) => Outcome::PageFault { code },
            Err(WalkError::Memory(outcome)) => outcome,
        }
    }

    fn access_physical(&mut self, cpu: usize, gpa: Gpa, access: Access) -> Outcome {
        match self.translate(cpu, gpa, access) {
            Ok(Translation { host, tracked, .. }) => Outcome::Page { host, tracked },
            Err(outcome) => outcome,
        }
    }

    fn stored(&mut self, _: usize, _: StoreKind, _: &[Part]) {}

    fn client_stored(&mut self) {}

    fn written(&mut self, _: usize, _: RegisterWrite, _: &Registers, _: &Registers) {}

    fn invlpg(&mut self, _: usize, _: u64) {}

    fn invpcid(&mut self, _: usize, _: Invpcid) {}

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
