//! The KVM API in userspace.
//!
//! Two interfaces to one set of objects:
//!
//! - [`Kvm`], [`VmFd`], [`VcpuFd`]: the types and methods of kvm-ioctls, for Rust programs.
//! - [`ioctl::Object`]: requests and pointers as `ioctl` passes them, for the preload library.
//!
//! | file | idea |
//! |---|---|
//! | [`api`] | the Rust API |
//! | [`ioctl`], [`abi`], [`user`] | the system-call interface: dispatch, request numbers, the client's memory |
//! | [`dirty`] | dirty logs and rings |
//! | [`guest_memfd`] | private memory |
//! | [`device`], `file_id` | devices, and the identity of open files |
//! | [`system`], [`vm`], [`vcpu`] | the objects |
//! | `call`, `entered` | guards of a call: one that panics makes the VM dead, and its vCPU still leaves the engine |
//! | `run`, `exit`, [`run_page`] | `KVM_RUN`, how it describes an exit, and the pages it shares with the client |
//! | `prefault` | guest memory mapped before its use |
//! | [`stats`] | statistics, in KVM's binary format |
//! | [`coalesced`] | writes to devices that the client may see later |
//! | `mmu` | the software CPU's address translation, by the engine |
//! | `heap` | vectors that report `ENOMEM` instead of ending the process |
//! | `machine`, `msr`, [`cpuid`], [`clock`] | what the CPU sees of its machine |
//! | [`regs`], [`fpu`], [`events`] | the CPU's state in KVM's structs |
//! | `irq` | delivery of interrupts to vCPUs |
//! | `ioeventfd`, `eventfd` | guest writes that signal eventfds |
//! | [`thread`], `signals`, `ticker` | signals, masks, timers |
//! | [`filters`] | seccomp filters of the client |
//! | [`notify`] | changes of the host's mappings: MMU notifiers |
//! | [`parameters`], `recovery` | module parameters; recovery of NX huge pages |
//! | [`policy`], [`report`], [`caps`], `quirks` | settings, messages to the user, capabilities, KVM's quirks |

pub mod abi;
pub mod api;
mod background;
mod call;
pub mod caps;
pub mod clock;
pub mod coalesced;
pub mod cpu_features;
pub mod cpuid;
pub mod device;
pub mod device_attr;
pub mod dirty;
pub mod engine;
mod entered;
pub mod errno;
mod eventfd;
pub mod events;
mod exit;
mod file_id;
pub mod filters;
pub mod fpu;
mod guest_debug;
pub mod guest_memfd;
mod heap;
mod hypercall;
pub mod ioctl;
mod ioeventfd;
mod irq;
mod machine;
mod mmu;
mod msr;
mod msr_filter;
pub mod nested;
pub mod notify;
mod options;
pub mod parameters;
pub mod policy;
mod prefault;
mod pv_eoi;
mod quirks;
mod recovery;
pub mod regs;
pub mod report;
mod run;
pub mod run_page;
mod signals;
pub mod stats;
mod steal_time;
pub mod system;
pub mod thread;
mod ticker;
pub mod user;
mod vapic;
pub mod vcpu;
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
pub use vcpu::interrupt_thread;
