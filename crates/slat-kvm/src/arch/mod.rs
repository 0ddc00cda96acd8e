//! The architecture of the guests. As with KVM, it is the architecture of the program that creates the VMs.
//!
//! Only this file has conditional compilation by architecture. Every other file is architecture-neutral, or is in the
//! folder of its architecture. Neutral files use the items that this file names, and no other item of an architecture
//! (`crates/slat/tests/architecture/arch.rs`). All calls are dispatched statically.
//!
//! # What an architecture provides
//! This file re-exports the architecture's types and functions. The architecture also adds methods to neutral types, in
//! its own `impl` blocks. These methods need no import.
//!
//! | for | types and functions | methods |
//! |---|---|---|
//! | ioctls | `requests`, `name_of_request`; `Plain` for its structs | |
//! | memory | `table_formats`, `USER_END`, `MEMORY_ATTRIBUTES` | |
//! | settings | `CpuPolicy` with `DEFAULTS`, `name`, `expected`, `value` and `parse`; `CpuPolicies` with `set`; `nests`; `parameter_names`, `parameter`, `WRITABLE_PARAMETERS`, `set_parameter` | |
//! | `/dev/kvm` | `capability`, `VmType` with `of` and `is_protected`, `note_start`, `system_ioctl`, `ADDRESS_SPACES`, `MAX_VCPUS`, `MAX_VCPU_ID` | |
//! | a VM | `VmState` with `new`, `check_slot` and `extension`, `vm_ioctl` | of `VmObject`: `enable_arch_cap`, `allows_vcpu_id`, `shared_of_vcpu`, `parts_of_vcpu` |
//! | devices | `VmDevice` with `exists`, `link`, `has`, `get` and `set` | of `VmObject`: `create_arch_device` |
//! | interrupts | `Controllers`, `Target` with `excludes`, `Device`, `VmTimer` | of `Interrupts`: `exist`, `set_own_line`, `check_irqfd`, `target`, `set_target`, `pulse_target`, `routes_changed`, `signal_msi`, `can_resample`, `read` and `write` of a device; `VmTimers` for each `VmTimer` |
//! | a vCPU, for other threads | `VcpuShared`, `VcpuMap` with `reserve` and `rebuild` | |
//! | a vCPU, for its own thread | `VcpuState`, `vcpu_ioctl` | of `Inner`: `begin_life`, `is_unfinished`, `flush_translations`; of `VcpuObject`: the state that every architecture has, as `get_mp_state` |
//! | its CPU | `Executor`, with `run`, `complete`, `is_unfinished`, `counters`, `state`, and probes; `Exit` | |
//! | its machine | `VcpuMachine`, which holds the engine's vCPU: `begin_to_run`, `stop_running`, `begin_execution`, `write_clocks`, `timer_rang`, `flush_shadowed`, `forget_pages`, `read_here`, `write_here`, `translate_for_client`, `stack` with `MOST_FRAMES` | |
//! | `KVM_RUN` | `reason`, `trace_entry`, `trace_exit` | of `VcpuObject`, in this order: `prepare`, `begin_run`, `update_guest`, `deliver_events`, `handle` for each exit, `has_late_exit`, `publish`; of `Inner`: `begin_requested`, `enters_guest`, `left_guest` |
//! | a debugger | `Probe`, `ProbeHit`, `ProbeKind`, `REGISTERS`, `BLOCK`, `get_registers`, `set_register` | |
//! | statistics | `Counters`, `Exits`, `Reason` with `NAMES`, `NEVER`, `NEVER_IN`, `meaning`, `ticks`, `ticks_khz` | |
//! | the compiler | `Compiler`, `Tier`, `Compile`; `Compiling` with `rule`, `start`, `compiler` and `WHY_NONE` | |
//! | the Rust API | `exit` for the exits that not every architecture has, `for_clients` | of `Kvm`: `create_vm`; kvm-ioctls' methods that only this architecture has |
//! | slat's other crates | `for_other_crates`, with `perf` | |
//!
//! If an architecture does not have some part yet, the part's type is an enum without variants, and the part's methods
//! consist of `match *self {}`.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
use aarch64 as chosen;
#[cfg(target_arch = "x86_64")]
use x86_64 as chosen;

pub(crate) use chosen::{
    Compile, Compiler, Counters, Executor, Exit, Probe, ProbeHit, ProbeKind,
    abi::name_of_request,
    caps::capability,
    chips::Controllers,
    clock::{note_start, ticks, ticks_khz},
    compiler::Compiling,
    counters::{Exits, NEVER, NEVER_IN, Reason, meaning, reason},
    devices::{Device, VmTimer},
    exits::exit,
    formats::table_formats,
    gdb::{get as get_registers, set as set_register},
    ioctl::{system::ioctl as system_ioctl, vcpu::ioctl as vcpu_ioctl, vm::ioctl as vm_ioctl},
    limits::{MAX_VCPU_ID, MAX_VCPUS, MEMORY_ATTRIBUTES, USER_END},
    machine::{MOST_FRAMES, VcpuMachine},
    parameters::{
        WRITABLE as WRITABLE_PARAMETERS, names as parameter_names, value as parameter,
        write as set_parameter,
    },
    policy::nests,
    state::{VcpuShared, VmState, VmType},
    target::Target,
    trace::{enters as trace_entry, left as trace_exit},
    vcpu_map::VcpuMap,
    vcpu_state::VcpuState,
    vm_device::VmDevice,
};
pub use chosen::{
    Tier, abi as requests, for_clients, for_other_crates,
    gdb::{BLOCK, REGISTERS},
    limits::ADDRESS_SPACES,
    policy::{CpuPolicies, CpuPolicy},
};

#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
compile_error!("slat-kvm has guests of aarch64 and x86_64");
