//! Guests of AArch64: the API of KVM for arm64, over the processor of slat-a64.
//!
//! A VM may have a GICv2 or a GICv3 with ITSs. A client that has its own interrupt controller sets the processors'
//! interrupt lines, and sees the outputs of the timers in `kvm_run`.
//!
//! The modules are in the layers of the crate's root, among its neutral modules.
//!
//! | layer | file | idea |
//! |---|---|---|
//! | base | `abi`, `plain` | KVM's request numbers and structs |
//! | | `limits`, `formats` | the limits of a VM; the formats of second-level tables |
//! | | `policy`, `parameters` | policies of the CPU; parameters of KVM's module |
//! | | `clock` | the host's counter |
//! | | `eager_split` | whether huge leaves are split when a memslot's dirty log begins |
//! | | `cpu` | the CPU of a vCPU: the processor, accesses that a device completes, and a debugger's probes |
//! | | `invalidated` | the invalidations by other vCPUs that a vCPU has to carry out |
//! | parts | `vcpu_state` | the other state of a vCPU |
//! | | `exits`, `guest_debug` | the exits that only arm64 has, and those of a debugged guest |
//! | | `timer` | the timers of a vCPU |
//! | | `counters`, `trace` | arm64's counters and tracepoints of a vCPU |
//! | | `gdb`, `perf`, `compiler` | the registers, as GDB numbers them; names of compiled code for perf, of which there are none; the thread that compiles |
//! | | `identification` | the registers that say which features a guest's processor has; a client can hide features |
//! | | `settings` | what a client chooses before its guest runs: the filter of firmware calls, the optional services |
//! | | `state` | arm64's state of a VM, and of the part of a vCPU that other threads use |
//! | | `devices`, `target` | devices on the bus; the destinations of a GSI |
//! | shared | `vcpu_map` | the map of the vCPUs' addresses |
//! | | `tables` | guest memory, as the interrupt controllers access it |
//! | | `chips`, `irq` | the interrupt controllers of a VM; lines, messages and routes |
//! | | `caps` | capabilities |
//! | objects | `vm` | calls of a VM |
//! | | `vm_device` | the interrupt controllers as devices of the API |
//! | | `firmware` | the firmware that a guest calls: SMCCC, PSCI, and services of a hypervisor |
//! | | `machine` | the machine around a CPU: guest memory, timers, registers, stolen time |
//! | | `vcpu` | calls of a vCPU |
//! | calls | `run` | arm64's part of `KVM_RUN` |
//! | interface | `ioctl` | requests that only arm64 has |
//! | | `api` | methods of the Rust API that only arm64 has |

pub mod abi;
pub mod perf;

mod api;
pub(crate) mod caps;
pub(crate) mod chips;
pub(crate) mod clock;
pub(crate) mod compiler;
pub(crate) mod counters;
pub(crate) mod cpu;
pub(crate) mod devices;
mod eager_split;
pub(crate) mod exits;
pub(crate) mod firmware;
pub(crate) mod formats;
pub(crate) mod gdb;
mod guest_debug;
mod identification;
mod invalidated;
pub(crate) mod ioctl;
mod irq;
pub(crate) mod limits;
pub(crate) mod machine;
pub(crate) mod parameters;
mod plain;
pub(crate) mod policy;
mod run;
mod settings;
pub(crate) mod state;
mod tables;
pub(crate) mod target;
mod timer;
pub(crate) mod trace;
mod vcpu;
pub(crate) mod vcpu_map;
pub(crate) mod vcpu_state;
mod vm;
pub(crate) mod vm_device;

pub use cpu::{Counters, Tier};
pub(crate) use cpu::{Executor, Exit, Probe, ProbeHit, ProbeKind};
pub(crate) use slat_a64::{Compile, Compiler};

/// The types and functions of the Rust API that not every architecture has.
pub mod for_clients {
    pub use kvm_ioctls::reg_size;
}

/// The items that slat's other crates and tests use.
pub mod for_other_crates {
    pub use super::perf;
}
