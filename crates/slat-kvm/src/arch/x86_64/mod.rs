//! Guests of x86-64.
//!
//! The modules are in the layers of the crate's root, among its neutral modules.
//!
//! | layer | file | idea |
//! |---|---|---|
//! | base | `abi`, `plain` | KVM's request numbers and structs |
//! | | `limits`, `formats` | the limits of a VM; the formats of second-level tables |
//! | | `policy`, `cpu_policies`, `parameters` | policies of the CPU, and those of this process; parameters of KVM's modules |
//! | parts | `port_data` | the port-data page of a vCPU |
//! | | `exits` | the exits that only x86 has, for the Rust API |
//! | | `table_cache` | the last translations by the guest's tables that the CPU's TLB cannot hold |
//! | | `hyperv` | Hyper-V's interface: the state that the vCPUs of a VM share |
//! | | `quirks`, `msr_filter`, `options` | the settings that a client makes for a VM |
//! | | `cpuid`, `cpu_features`, `clock`, `msr` | CPUID leaves, time, MSRs |
//! | | `regs`, `fpu`, `events`, `nested`, `same_fields` | the CPU's state in KVM's structs |
//! | | `exit`, `guest_debug` | how `KVM_RUN` describes x86's exits, and those of a debugged guest |
//! | | `counters`, `trace` | x86's counters and tracepoints of a vCPU |
//! | | `gdb` | the registers, as GDB numbers them |
//! | | `perf`, `compiler` | the names of compiled code, for perf; the threads that compile |
//! | | `state` | x86's state of a VM, and of the part of a vCPU that other threads use |
//! | | `devices` | the addresses of a PC's controllers on the bus, and their timers |
//! | | `target` | the line, the message or the source to which a GSI is routed |
//! | shared | `vcpu_common`, `vcpu_map` | how other threads interrupt a vCPU; the map of the local APICs' addresses |
//! | | `chips`, `irq` | the interrupt controllers of a PC; how interrupts reach vCPUs by them |
//! | | `caps` | capabilities |
//! | objects | `vm`, `system` | calls of a VM and of `/dev/kvm` |
//! | | `vm_device` | the devices of the API that only x86 has: none |
//! | | `vcpu_state`, `vcpu` | x86's state of a vCPU; calls of a vCPU |
//! | | `machine` | the machine around a CPU: address translation, MSRs, hypercalls, paravirtual features |
//! | calls | `run` | x86's part of `KVM_RUN` |
//! | | `device_attr` | device attributes |
//! | interface | `ioctl` | requests that only x86 has |
//! | | `api` | methods of the Rust API that only x86 has |

pub mod abi;
pub mod cpuid;
pub mod perf;

mod api;
pub(crate) mod caps;
pub(crate) mod chips;
pub(crate) mod clock;
pub(crate) mod compiler;
pub(crate) mod counters;
pub(crate) mod cpu_features;
mod cpu_policies;
mod device_attr;
pub(crate) mod devices;
pub(crate) mod events;
pub(crate) mod exit;
pub(crate) mod exits;
pub(crate) mod formats;
pub(crate) mod fpu;
pub(crate) mod gdb;
pub(crate) mod guest_debug;
pub(crate) mod hyperv;
pub(crate) mod ioctl;
mod irq;
pub(crate) mod limits;
pub(crate) mod machine;
pub(crate) mod msr;
pub(crate) mod msr_filter;
pub(crate) mod nested;
pub(crate) mod options;
pub(crate) mod parameters;
mod plain;
pub(crate) mod policy;
pub(crate) mod port_data;
pub(crate) mod quirks;
pub(crate) mod regs;
mod run;
pub(crate) mod same_fields;
pub(crate) mod state;
mod system;
pub(crate) mod table_cache;
pub(crate) mod target;
pub(crate) mod trace;
mod vcpu;
mod vcpu_common;
pub(crate) mod vcpu_map;
pub(crate) mod vcpu_state;
pub(crate) mod vm;
pub(crate) mod vm_device;

pub use slat_x86::{Compile, Compiler, Counters, Executor, Exit, Probe, ProbeHit, ProbeKind, Tier};

/// The types and functions of the Rust API that not every architecture has.
pub mod for_clients {
    pub use kvm_ioctls::{
        KvmNestedStateBuffer, MsrExitReason, MsrFilterDefaultAction, MsrFilterRange,
        MsrFilterRangeFlags, ReadMsrExit, SyncReg, WriteMsrExit, reg_size,
    };
}

/// The items that slat's other crates and tests use.
pub mod for_other_crates {
    pub use super::{cpuid, perf};
}
