//! KVM's guest-memory system as a portable library: memslots, second-level page tables, faults, huge
//! pages, MMIO caching, dirty logging. `no_std` + `alloc`; knows no OS, no CPU emulator and no ioctl.
//!
//! # The pieces
//! * A [`Platform`] is the machine under the engine: table frames, host pages, hardware flushes.
//! * A [`Format`] says what an entry means to a page walker: [`format::Ept`].
//! * A [`Vm`] is the memory of one guest: [`Vm::set_memory_region`], [`Vm::remove_memory_region`],
//!   [`Vm::set_memory_attributes`], [`Vm::invalidate`], [`Vm::get_dirty_log`], [`Vm::lookup`], [`Vm::audit`]. One of two MMUs makes its tables ([`MmuKind`]).
//! * A [`Vcpu`] faults pages in: [`Vcpu::translate`].
//!
//! # Concurrency
//! Faults of different vCPUs run in parallel, with one short lock per table they install into (with the
//! direct MMU: one for each address space); walks and slot look-ups take no lock. The protocols are argued
//! where they live: `table` and `shadow` (who may change an entry), `sync::quiesce` (what readers may still
//! see, how flushes are acknowledged), `slots` (how a set of memslots is published), `vm::invalidate` (when
//! a fault may install).
//!
//! # Where rules come from
//! Observable behaviour is KVM's (Documentation/virt/kvm/api.rst), entry bits are the manuals'; each is
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
#[cfg(all(test, loom))]
mod loom_tests;
mod mmu;
mod platform;
mod policy;
mod shadow;
mod slots;
mod stats;
mod sync;
mod table;
mod vcpu;
mod vm;

pub use addr::{Access, Gfn, Gpa, Gva, Hpa, Hva, Level, PAGE_SHIFT, PAGE_SIZE, Pfn, Rights};
pub use audit::AuditError;
pub use format::{Ept, Format, MemoryType};
pub use frame::{ENTRIES, Entries, TableMeta};
pub use heap::{OutOfMemory, Shared};
pub use mmu::MmuKind;
pub use platform::{HostPage, HostRun, Platform, ResolveError, Stale, VmId, WaitFor, ZappedLeaf};
pub use policy::{
    AtomicPolicy, DirtyLogMethod, DirtyLogReads, Policy, PolicyError, Prefetch, Setting, SplitWalk,
    Switch,
};
pub use slots::{AttributesError, MAX_SLOTS, MemoryAttributes, Region, RegionError, SlotFlags};
pub use stats::Stats;
pub use sync::quiesce::Attention;
pub use vcpu::{
    AfterPageFault, CreateVcpuError, Entered, HostWords, Stop, Translation, Vcpu, VcpuStats,
    VirtualPage, VirtualStop,
};
pub use vm::{
    Config, CreateVmError, DirtyGfn, DirtyLogError, DirtyRing, DirtyRingError, Invalidation,
    Mapping, Vm,
};

/// What several threads may share, and what one may give to another, on every platform and format.
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
    given::<Vcpu<P, F>>();
    given::<Entered<'_, P, F>>();
}
