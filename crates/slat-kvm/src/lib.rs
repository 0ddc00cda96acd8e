//! The KVM API in userspace.
//!
//! The crate has two interfaces to one set of objects:
//!
//! - [`Kvm`], [`VmFd`], [`VcpuFd`]: the types and methods of kvm-ioctls, for Rust programs.
//! - `ioctl::Object`: requests and pointers as `ioctl` passes them, for the preload library and the C library.
//!
//! `docs/api/slat-kvm.txt` lists the stable API. The other public modules are for slat's own crates and for tests, and
//! change without notice.
//!
//! | layer | file | idea |
//! |---|---|---|
//! | base | `errno`, `heap`, `messages` | errors; vectors that report `ENOMEM` instead of ending the process; messages to the user |
//! | | `requests`, `abi`, `user` | KVM's request numbers and structs; the client's memory |
//! | | `thread`, `signals`, `background`, `last_thread` | signals, masks, slat's own threads, their end |
//! | | `guarded` | the border between C and Rust: `errno`, panics |
//! | | `engine`, `entered` | the engine's VM and vCPU, for any table format; a guard by which a vCPU leaves the engine |
//! | | [`notify`], `memory_map` | changes of the host's mappings: MMU notifiers; numbers of pages that are mapped in each way |
//! | | `words`, `policy`, `parameters`, `recovery` | settings, module parameters; recovery of NX huge pages |
//! | | `symbols`, `profile` | the names of guest code; samples of guest code, for `slat run --profile` |
//! | | `trace` | tracepoints, for `slat run --trace` |
//! | parts | `fields`, `run_page` | the pages that a vCPU shares with the client |
//! | | `counters` | the counters of a vCPU |
//! | | `guest_memory` | guest memory, as a vCPU accesses it |
//! | | `dirty`, `guest_memfd`, `coalesced` | dirty rings, private memory, writes to devices that the client may see later |
//! | | `ioeventfd`, `eventfd` | guest writes that signal eventfds |
//! | | `io_bus`, `io_devices` | the devices that a guest reaches without the client, by ranges of addresses |
//! | | `vfio`, `file_id` | VFIO's device, and the identity of open files |
//! | | `exit` | how `KVM_RUN` describes an exit |
//! | | `compiler` | which VMs use the compiler of guest code, and when its threads start |
//! | | `ticker`, `exit_times` | timers; how long exits take |
//! | | `steal_time` | how long threads that run vCPUs wait for the host |
//! | | `gdb` | a register, as GDB describes it |
//! | | `debugger` | a debugger of the guest, which the client does not notice, for `slat gdb` |
//! | | `call` | a guard of a call: a call that panics makes the VM dead |
//! | shared | `vcpu_common` | the part of a vCPU that other threads use |
//! | | `vcpus` | the vCPUs of a VM, as the targets of interrupts |
//! | | `irqfd` | eventfds whose signals are interrupts |
//! | | `routing` | the lines and messages to which a GSI is routed |
//! | | `irq` | delivery of interrupts to vCPUs |
//! | | `report` | statistics at the end |
//! | | `caps` | capabilities |
//! | | [`publish`] | shows this process's VMs to `slat stat` (their counters) and to `slat map` (how their memory is mapped) |
//! | | [`filters`] | seccomp filters of the client |
//! | objects | `vm`, `system` | VMs and their calls; calls of `/dev/kvm` |
//! | | `log_reader` | readers of the dirty logs, besides the client |
//! | | `device` | devices |
//! | | `vcpu` | vCPUs and their calls |
//! | calls | `run` | `KVM_RUN` |
//! | | `prefault` | maps guest memory before the guest uses it |
//! | | `stats` | statistics, in KVM's binary format |
//! | interface | `ioctl` | the system-call interface: dispatch |
//! | | `api` | the Rust API |
//! | | `descriptors` | the descriptors of a C client that are KVM's |
//!
//! # Architectures
//! The modules of the table are neutral: they are the same for guests of every architecture. The module `arch` chooses
//! the architecture, whose root has another table with the same layers.
//!
//! # Layers
//! A module imports from its own layer and from lower layers, and no modules import one another in a circle
//! (`crates/slat/tests/architecture`). Modules for state, and for devices inside a VM, do not know the VM. A VM knows
//! its vCPUs only as targets of interrupts. A vCPU and its machine know their VM.

pub mod filters;
pub mod notify;
pub mod publish;

// These modules are public only for slat's own crates and for tests. Their API is not stable.
#[doc(hidden)]
pub mod abi;
#[doc(hidden)]
pub mod background;
#[doc(hidden)]
pub mod caps;
#[doc(hidden)]
pub mod debugger;
#[doc(hidden)]
pub mod descriptors;
#[doc(hidden)]
pub mod dirty;
#[doc(hidden)]
pub mod engine;
#[doc(hidden)]
pub mod guarded;
#[doc(hidden)]
pub mod guest_memfd;
#[doc(hidden)]
pub mod ioctl;
#[doc(hidden)]
pub mod memory_map;
#[doc(hidden)]
pub mod messages;
#[doc(hidden)]
pub mod parameters;
#[doc(hidden)]
pub mod policy;
#[doc(hidden)]
pub mod profile;
#[doc(hidden)]
pub mod report;
#[doc(hidden)]
pub mod run_page;
#[doc(hidden)]
pub mod symbols;
#[doc(hidden)]
pub mod system;
#[doc(hidden)]
pub mod thread;
#[doc(hidden)]
pub mod trace;
#[doc(hidden)]
pub mod user;
#[doc(hidden)]
pub mod vcpu;

mod api;
mod arch;
mod call;
mod coalesced;
mod compiler;
mod counters;
mod device;
mod entered;
mod errno;
mod eventfd;
mod exit;
mod exit_times;
mod fields;
mod file_id;
mod gdb;
mod guest_memory;
mod heap;
mod io_bus;
mod io_devices;
mod ioeventfd;
mod irq;
mod irqfd;
mod last_thread;
mod log_reader;
mod prefault;
mod recovery;
mod requests;
mod routing;
mod run;
mod signals;
mod stats;
mod steal_time;
mod ticker;
mod vcpu_common;
mod vcpus;
mod vfio;
mod vm;
mod words;

pub use api::{DeviceFd, GuestMemfdFd, Kvm, StatsFd, VcpuFd, VmFd};
/// The tiers of the compiler of guest code.
pub use arch::Tier;
/// The types and functions of the Rust API that not every architecture has.
pub use arch::for_clients::*;
/// The items of this architecture that slat's other crates and tests use. Their API is not stable.
#[doc(hidden)]
pub use arch::for_other_crates::*;
pub use errno::{Error, Result};
/// The types that kvm-ioctls and this crate share.
pub use kvm_ioctls::{Cap, HypercallExit, IoEventAddress, KvmRunWrapper, NoDatamatch, VcpuExit};
pub use log_reader::{DirtyRange, LogReader};
pub use run::watch_signals;
use slat_host::process;
pub use thread::signal_arrived;
pub use vcpu_common::interrupt_thread;
pub use words::Jit;
