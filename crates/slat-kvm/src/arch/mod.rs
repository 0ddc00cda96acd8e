//! The architecture of the guests, which is the host's.
//!
//! This is the only file that asks for which architecture slat is built. All others are neutral, or belong to one
//! architecture and are in its folder.

#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{
    Counters, Executor, Exit, Probe, ProbeHit, ProbeKind,
    caps::capability,
    chips::{Controllers, devices::Device},
    clock,
    clock::note_start,
    clock::{host_tsc as ticks, host_tsc_khz as ticks_khz},
    compiler,
    compiler::{start as start_compiler, why_not as why_not_compiled},
    counters,
    counters::reason,
    counters::{Exits, NEVER, NEVER_IN, meaning},
    cpuid, events, exit, fpu,
    gdb::{get as get_registers, set as set_register},
    guest_debug, hyperv,
    limits::{MAX_VCPU_ID, MAX_VCPUS},
    machine,
    machine::VcpuMachine,
    machine::frames::MOST as MOST_FRAMES,
    msr, msr_filter, nested, options, quirks, regs, same_fields,
    state::{VcpuShared, VmState, is_protected},
    target::Target,
    trace,
    trace::{enters as trace_entry, left as trace_exit},
    vcpu_map::VcpuMap,
    vcpu_state::VcpuState,
    vm,
};
#[cfg(target_arch = "x86_64")]
pub use x86_64::{
    Tier, for_other_crates,
    gdb::{BLOCK, REGISTERS},
    limits::ADDRESS_SPACES,
};
