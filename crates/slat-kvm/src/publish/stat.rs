//! The answer to `stat`: the counters of all VMs and vCPUs.
//!
//! ```text
//! names memory pf_taken …      the names of the values in lines `memory`; alike for `cpu` and `exits`
//! interprets WHY               only if no code is compiled
//! ended 2                      the number of VMs that have ended
//! memory 17 …                  what the engine has counted for these VMs
//! cpu 812345 …                 what the CPUs of ended vCPUs have counted
//! vm 3                         a live VM, by the number of VMs that the process had created before it
//! memory 12 …                  what the engine has counted for this VM
//! vcpu 0 runs                  a vCPU of this VM, by the vCPU's id: runs, halted, or out of KVM_RUN
//! memory 12 …                  what the engine has counted for this vCPU
//! cpu 712345 …                 what the vCPU's CPU had counted at its last exit, at most 10 ms ago (`ticker`)
//! exits 5 …                    the numbers of the vCPU's exits, and its other counters
//! halts 0 …                    counts of the vCPU's waits in halts: one for each position of the highest set bit of
//!                              their nanoseconds
//! times io 5000 0 …            the sum of the measured times of the vCPU's exits for this reason, in nanoseconds, and
//!                              counts of these times, like those of halts
//! ```

use super::writer::{Writer, names, values};
use super::{vcpu_at, vm_from};
use crate::arch::{Counters, Exits};
use crate::compiler;
use crate::engine::EngineVm;
use crate::report;
use crate::vcpu_common::VcpuCommon;
use slat::Stats;
use std::fmt::{self, Write as _};
use std::sync::atomic::Ordering;

/// The first word of a request for counters.
pub const STAT: &str = "stat";

/// Calls `visit` for every live VM: first with `None`, for the VM itself, and then with each of the VM's vCPUs.
fn visit(mut visit: impl FnMut(u64, &EngineVm, Option<&VcpuCommon>) -> fmt::Result) -> fmt::Result {
    let mut from = 0;
    while let Some((number, vm)) = vm_from(from) {
        visit(number, &vm, None)?;
        let mut index = 0;
        while let Some(vcpu) = vcpu_at(number, index) {
            visit(number, &vm, Some(&vcpu))?;
            index += 1;
        }
        from = number + 1;
    }
    Ok(())
}

fn is_running(vcpu: &VcpuCommon) -> bool {
    vcpu.runner.load(Ordering::Relaxed) != 0
}

fn memory(to: &mut Writer<'_>, counted: &Stats) -> fmt::Result {
    to.write_str("memory")?;
    values(to, counted.iter().map(|(_, value)| value))?;
    to.write_char('\n')
}

fn cpu(to: &mut Writer<'_>, counted: &[u64; Counters::COUNT]) -> fmt::Result {
    to.write_str("cpu")?;
    values(to, counted.iter().copied())?;
    to.write_char('\n')
}

fn vcpu(to: &mut Writer<'_>, vcpu: &VcpuCommon) -> fmt::Result {
    let state = match (is_running(vcpu), vcpu.exits.halts.is_blocking()) {
        (true, false) => "runs",
        (true, true) => "halted",
        (false, _) => "out",
    };
    writeln!(to, "vcpu {} {state}", vcpu.id)?;
    memory(to, &vcpu.counted.get())?;
    let mut counted = [0; Counters::COUNT];
    vcpu.cpu.add_to(&mut counted);
    cpu(to, &counted)?;
    to.write_str("exits")?;
    let exits = 0..Exits::NAMES.len();
    values(to, exits.map(|index| vcpu.exits.value(index)))?;
    to.write_str("\nhalts")?;
    values(to, vcpu.exits.halts.wait_hist.iter())?;
    to.write_char('\n')?;
    for (name, times) in vcpu.times.iter() {
        write!(to, "times {name} {}", times.ns.get())?;
        values(to, times.hist.iter())?;
        to.write_char('\n')?;
    }
    Ok(())
}

/// Writes the answer to a request for counters.
pub(super) fn answer(to: &mut Writer<'_>) -> fmt::Result {
    names(to, "memory", Stats::NAMES)?;
    names(to, "cpu", &Counters::NAMES)?;
    names(to, "exits", Exits::NAMES)?;
    if let Some(why) = compiler::why_not() {
        writeln!(to, "interprets {why}")?;
    }
    let ended = report::ended();
    writeln!(to, "ended {}", ended.vms)?;
    memory(to, &ended.memory)?;
    cpu(to, &ended.cpu)?;
    visit(|number, vm, of| match of {
        Some(of) => vcpu(to, of),
        None => {
            writeln!(to, "vm {number}")?;
            memory(to, &vm.stats())
        }
    })
}
