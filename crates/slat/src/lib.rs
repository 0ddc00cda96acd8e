//! KVM's guest-memory system as a portable library: memslots, second-level page tables, faults, huge pages, MMIO
//! caching, dirty logging. `no_std` + `alloc`; knows no OS, no CPU emulator and no ioctl.
//!
//! ```
//! # use slat_model::{HostMemory, SimPlatform};
//! # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
//! use slat::{Access, Config, Ept, Gfn, Gpa, Region, Stop, Vm};
//!
//! // `platform` is yours: it implements `Platform`, and what backs guest memory is at `backing`.
//! let vm = Vm::<_, Ept>::new(platform, Config::default())?;
//! let eptp = Ept::eptp(vm.root(0).ok_or("there is an address space")?);
//!
//! // 2 MiB of memory at 1 MiB. It is mapped when the guest uses it.
//! vm.set_memory_region(0, &Region::new(0, Gpa(0x10_0000), 0x20_0000, backing))?;
//!
//! // The guest runs, and its CPU takes an EPT violation.
//! let mut vcpu = vm.create_vcpu()?;
//! vcpu.hardware_fault(Gpa(0x10_3000), Access::Write)?;
//! assert!(vm.lookup(0, Gfn(0x103)).is_some_and(|page| page.rights.write));
//!
//! // No memslot contains this address, so it belongs to a device.
//! let device = vcpu.hardware_fault(Gpa(0xfee0_0000), Access::Read);
//! assert!(matches!(device, Err(Stop::Mmio { .. })));
//!
//! // The host takes a page back. When `invalidate` returns, no CPU uses the page, and faults on it wait.
//! let invalidation = vm.invalidate(backing.add_pages(3)..backing.add_pages(4));
//! // Here the host changes what backs the page.
//! drop(invalidation);
//! assert_eq!(vm.lookup(0, Gfn(0x103)), None);
//! # let _ = eptp;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `docs/hypervisor.md` of the repository walks through a hypervisor, from the platform to the flush. A complete
//! platform, of 140 lines, is in the crate's `examples/plain_memory`.
//!
//! # The pieces
//! * A [`Platform`] is the machine under the engine: it provides table frames, host pages and hardware flushes.
//! * A [`Format`] defines the meaning of page-table entries for a page walker: see the table below.
//! * A [`Vm`] is the memory of one guest: [`Vm::set_memory_region`], [`Vm::set_memory_regions`],
//!   [`Vm::remove_memory_region`], [`Vm::set_memory_attributes`], [`Vm::invalidate`], [`Vm::get_dirty_log`],
//!   [`Vm::lookup`], [`Vm::audit`]. Its tables are made by the MMU that [`MmuKind`] names.
//! * A [`Vcpu`] faults pages in: [`Vcpu::translate`].
//! * A [`layers::Stack`] is a part for a platform: memory that many VMs share, and that each VM writes for itself.
//! * A [`VmidAllocator`] assigns VMIDs, ASIDs or VPIDs to VMs. The engine itself does not use it.
//!
//! # Formats
//! | type | page walker | levels | largest leaf | MMUs |
//! |---|---|---|---|---|
//! | [`Ept`], [`format::Ept5`] | Intel VMX, EPT | 4, 5 | 1 GiB | tdp, direct |
//! | [`format::Npt`], [`format::Npt5`] | AMD SVM, nested paging | 4, 5 | 1 GiB | tdp, direct |
//! | [`format::X86<5>`](format::X86) | x86's own, 5-level paging | 5 | 1 GiB | tdp, shadow |
//! | [`format::Stage2<IPA_BITS>`](format::Stage2) | AArch64 stage 2, 4 KiB granule | 2 to 4, by `IPA_BITS`; up to 16 tables side by side as root | 1 GiB | tdp |
//! | [`format::Stage2<52>`](format::Stage2) | the same with FEAT_LPA2: 52 bits of both addresses | 4; 16 tables side by side as root | 1 GiB | tdp |
//! | [`format::Stage2Kib16`], [`format::Stage2Kib64`] | the same with pages and tables of 16 or 64 KiB ([`Granule`]) | 2 to 4, 2 to 3 | 32 MiB, 512 MiB; for more than 48 bits 64 GiB, 4 TiB | tdp |
//! | [`format::Stage2<IPA_BITS, true>`](format::Stage2) | the same with FEAT_HAFDBS: it sets accessed and dirty | as above | 1 GiB | tdp |
//! | [`format::Sv39x4`], [`format::Sv48x4`], [`format::Sv57x4`] | RISC-V G-stage | 3, 4, 5; 4 tables as root | 1 GiB | tdp |
//!
//! # Concurrency
//! Faults of different vCPUs run in parallel. Each takes one short lock for each table in which it installs an entry
//! (with the direct MMU: one lock for each address space). Walks and slot look-ups take no lock. The modules that
//! implement the protocols explain them: `table` and `shadow` (who may change an entry), `sync::quiesce` (when old data
//! may be freed that readers may still see, and how vCPUs acknowledge flushes), `slots` (how a set of memslots is
//! published), `vm::invalidate` (when a fault may install).
//!
//! # Sources of the rules
//! Observable behaviour follows KVM (Documentation/virt/kvm/api.rst), and entry bits follow the manuals. Each rule is
//! cited where it is used.
#![no_std]
#![warn(missing_docs)]

extern crate alloc;
#[cfg(any(test, feature = "lock-checks"))]
extern crate std;

mod addr;
mod audit;
mod dirty_log;
pub mod format;
mod frame;
pub mod guest_walk;
mod heap;
pub mod layers;
#[cfg(all(test, loom))]
mod loom_tests;
mod meta_map;
mod mmu;
mod old_pages;
mod platform;
mod policy;
mod shadow;
mod slots;
mod stats;
mod sync;
mod table;
mod trace;
mod vcpu;
mod vm;
mod vmid;

pub use addr::{
    Access, Gfn, Gpa, Granule, Gva, Hpa, Hva, Level, PAGE_SHIFT, PAGE_SIZE, Pfn, Rights,
};
pub use audit::AuditError;
pub use format::{Ept, Format, MemoryType};
pub use frame::{ENTRIES, Entries, TableMeta};
pub use heap::{OutOfMemory, Shared};
pub use meta_map::MetaMap;
pub use mmu::MmuKind;
pub use platform::{
    ForkError, HostPage, HostRun, Platform, Request, ResolveError, Stale, VmId, WaitFor, ZappedLeaf,
};
pub use policy::{
    AtomicPolicy, DirtyLogMethod, DirtyLogReads, Policy, PolicyError, Prefetch, Setting, SplitWalk,
    Switch,
};
pub use slots::{
    AttributesError, Change, MAX_SLOTS, MemoryAttributes, Region, RegionError, SlotFlags,
};
pub use stats::Stats;
pub use sync::quiesce::Attention;
pub use trace::{Event, PageRole};
pub use vcpu::{
    AfterPageFault, CreateVcpuError, Entered, HostWords, Stop, Translation, Vcpu, VcpuStats,
    VirtualPage, VirtualStop,
};
pub use vm::{
    ColdMap, ColdRange, Config, CreateVmError, DirtyGfn, DirtyLogError, DirtyRange, DirtyRing,
    DirtyRingError, Epoch, Invalidation, LogReader, Mapping, MemoryUsage, Promotion, Snapshot,
    SnapshotError, Vm,
};
pub use vmid::{RunningVmid, Vmid, VmidAllocator, VmidError};

/// Checks at compile time, for every platform and format, which types threads may share, and which types one thread may
/// send to another.
const fn _threads<P: Platform, F: Format>() {
    const fn shared<T: Send + Sync>() {}
    const fn given<T: Send>() {}
    shared::<Vm<P, F>>();
    shared::<Invalidation<'_, P, F>>();
    shared::<DirtyRing>();
    shared::<DirtyGfn>();
    shared::<Attention>();
    shared::<AtomicPolicy>();
    shared::<VcpuStats>();
    shared::<VmidAllocator>();
    shared::<Vmid>();
    given::<Vcpu<P, F>>();
    given::<Entered<'_, P, F>>();
}
