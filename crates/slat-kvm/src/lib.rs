//! The KVM API in userspace.
//!
//! Two interfaces to one set of objects:
//!
//! - [`Kvm`], [`VmFd`], [`VcpuFd`]: the types and methods of kvm-ioctls, for Rust programs.
//! - [`ioctl::Object`]: requests and pointers as `ioctl` passes them, for the preload library and the C library.
//!
//! | file | idea |
//! |---|---|
//! | [`api`] | the Rust API |
//! | [`ioctl`], [`abi`], [`user`] | the system-call interface: dispatch, request numbers, the client's memory |
//! | [`descriptors`], [`guarded`] | which descriptors of a C client are KVM's; the border between C and Rust: `errno`, panics |
//! | [`system`], [`vm`], [`vcpu`] | the objects and their calls |
//! | `run`, `exit`, `guest_debug` | `KVM_RUN`, and how it describes an exit |
//! | [`stats`], `counters`, `exit_times` | statistics, in KVM's binary format; what a vCPU counts for them, and how long its exits take |
//! | [`device`], [`device_attr`], `vfio`, `file_id` | devices and device attributes, and the identity of open files |
//! | `prefault` | guest memory mapped before its use |
//! | `machine` | what the CPU sees of its machine: address translation, MSRs, hypercalls, paravirtual features |
//! | [`caps`] | capabilities |
//! | `vcpu_common` | the part of a vCPU that other threads use |
//! | `irq` | delivery of interrupts to vCPUs |
//! | `hyperv` | Hyper-V's interface: what the vCPUs of a VM share of it |
//! | [`dirty`], [`guest_memfd`], [`coalesced`] | dirty rings, private memory, writes to devices that the client may see later |
//! | `ioeventfd`, `eventfd` | guest writes that signal eventfds |
//! | [`run_page`], `page_cache` | the pages that a vCPU shares with the client; the translations that it used last |
//! | [`regs`], [`fpu`], [`events`], [`nested`], `same_fields` | the CPU's state in KVM's structs |
//! | `msr`, [`cpuid`], [`cpu_features`], [`clock`], `steal_time` | MSRs, CPUID leaves, time |
//! | `options`, `quirks`, `msr_filter` | what a client sets for a VM |
//! | [`debugger`] | a debugger of the guest that the client does not know of, for `slat gdb` |
//! | `call`, `entered` | guards of a call: one that panics makes the VM dead, and its vCPU still leaves the engine |
//! | [`thread`], `signals`, `ticker`, `background`, `last_thread` | signals, masks, timers, slat's own threads, their end |
//! | [`filters`] | seccomp filters of the client |
//! | [`notify`] | changes of the host's mappings: MMU notifiers |
//! | [`policy`], [`parameters`], `recovery` | settings, module parameters; recovery of NX huge pages |
//! | [`publish`] | the counters of this process's VMs, and how their memory is mapped, for `slat stat` and `slat map` |
//! | [`memory_map`] | how guest memory is mapped, in numbers of pages |
//! | [`profile`] | samples of guest code, for `slat run --profile` |
//! | [`symbols`], [`perf`] | the names of guest code; compiled code, named for perf |
//! | [`trace`] | tracepoints, for `slat run --trace` |
//! | [`messages`], [`report`], [`errno`], `heap` | messages to the user, statistics at the end, errors, vectors that report `ENOMEM` instead of ending the process |
//! | [`engine`] | the engine's VM and vCPU, whatever their table format |
//!
//! # Layers
//! No modules import one another in a circle (`tests/architecture.rs`). State and the devices inside a VM know no VM; a VM knows its
//! vCPUs only as targets of interrupts; a vCPU and its machine know their VM; [`device`], [`stats`], `run`, [`api`] and [`ioctl`] know
//! all that they need.

pub mod abi;
pub mod api;
mod background;
mod call;
pub mod caps;
pub mod clock;
pub mod coalesced;
mod compiler;
mod counters;
pub mod cpu_features;
pub mod cpuid;
pub mod debugger;
pub mod descriptors;
pub mod device;
pub mod device_attr;
pub mod dirty;
pub mod engine;
mod entered;
pub mod errno;
mod eventfd;
pub mod events;
mod exit;
mod exit_times;
mod file_id;
pub mod filters;
pub mod fpu;
pub mod guarded;
mod guest_debug;
pub mod guest_memfd;
mod heap;
mod hyperv;
pub mod ioctl;
mod ioeventfd;
mod irq;
mod last_thread;
mod machine;
pub mod memory_map;
pub mod messages;
mod msr;
mod msr_filter;
pub mod nested;
pub mod notify;
mod options;
mod page_cache;
pub mod parameters;
pub mod perf;
pub mod policy;
mod prefault;
pub mod profile;
pub mod publish;
mod quirks;
mod recovery;
pub mod regs;
pub mod report;
mod run;
pub mod run_page;
mod same_fields;
mod signals;
pub mod stats;
mod steal_time;
pub mod symbols;
pub mod system;
pub mod thread;
mod ticker;
pub mod trace;
pub mod user;
pub mod vcpu;
mod vcpu_common;
mod vfio;
pub mod vm;

pub use api::{DeviceFd, GuestMemfdFd, Kvm, VcpuFd, VmFd};
pub use errno::{Error, Result};
/// The types that kvm-ioctls and this crate share.
pub use kvm_ioctls::{
    Cap, HypercallExit, IoEventAddress, KvmNestedStateBuffer, KvmRunWrapper, MsrExitReason,
    MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, NoDatamatch, ReadMsrExit, SyncReg,
    VcpuExit, WriteMsrExit, reg_size,
};
pub use run::watch_signals;
pub use slat_host::process;
pub use thread::signal_arrived;
pub use vcpu_common::interrupt_thread;
