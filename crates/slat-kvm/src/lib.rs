//! The KVM API in userspace.
//!
//! Two ways in, over one set of objects:
//!
//! - [`Kvm`], [`VmFd`], [`VcpuFd`]: the shape of kvm-ioctls, for Rust programs.
//! - [`ioctl::Object`]: requests and pointers as the kernel takes them, for the preload library.
//!
//! | file | idea |
//! |---|---|
//! | [`api`] | the Rust API |
//! | [`ioctl`], [`abi`], [`user`] | the system-call interface: dispatch, request numbers, the client's memory |
//! | [`dirty`] | dirty logs and rings |
//! | [`guest_memfd`] | private memory |
//! | [`device`], `file_id` | devices, and the files they know |
//! | [`system`], [`vm`], [`vcpu`] | the objects |
//! | `call`, `entered` | what ends with a call, also with one that panics: the VM; the vCPU's time inside the engine |
//! | `run`, `exit`, [`run_page`] | `KVM_RUN`, what it tells of an exit, and the pages it shares with the client |
//! | `prefault` | guest memory mapped ahead of its use |
//! | [`stats`] | statistics, in KVM's binary format |
//! | [`coalesced`] | writes to devices that the client may see later |
//! | `mmu` | the software CPU's address translation, over the engine |
//! | `heap` | memory that may run out |
//! | `machine`, `msr`, [`cpuid`], [`clock`] | what the CPU sees of its machine |
//! | [`regs`], [`fpu`], [`events`] | its state in KVM's structs |
//! | `irq` | interrupts on their way to vCPUs |
//! | `ioeventfd`, `eventfd` | guest writes that signal eventfds |
//! | [`thread`], `signals`, `ticker` | signals, masks, timers |
//! | [`filters`] | seccomp filters of the client |
//! | [`notify`] | changes of the host's mappings: MMU notifiers |
//! | [`parameters`], `recovery` | module parameters; NX huge pages come back |
//! | [`policy`], [`report`], [`caps`], `quirks` | settings, words to people, capabilities, KVM's oddities |

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
