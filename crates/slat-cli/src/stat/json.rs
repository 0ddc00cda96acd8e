//! Formats one refresh of `slat stat` as JSON: all counters of all VMs and vCPUs, and their sums.

use serde_json::{Map, Value, json};

use super::Process;
use super::text::{Answer, Counters, Vcpu, Vm};

/// Returns one refresh as JSON text: an object with the member `processes`.
pub fn of(processes: &[Process]) -> String {
    let processes: Vec<_> = processes.iter().map(process).collect();
    format!("{:#}\n", json!({ "processes": processes }))
}

fn counters(counters: &Counters) -> Value {
    let all = counters.iter();
    Value::Object(
        all.map(|(name, value)| (name.to_owned(), value.into()))
            .collect(),
    )
}

fn process(process: &Process) -> Value {
    let mut members = Map::new();
    members.insert("pid".to_owned(), process.pid.into());
    members.insert("command".to_owned(), process.command.as_str().into());
    match &process.answer {
        Ok(answer) => {
            members.insert("interprets".to_owned(), json!(answer.interprets));
            members.insert("total".to_owned(), total(answer));
            let vms: Vec<_> = answer.vms.iter().map(vm).collect();
            members.insert("vms".to_owned(), vms.into());
        }
        Err(why) => {
            members.insert("error".to_owned(), why.as_str().into());
        }
    }
    Value::Object(members)
}

fn total(answer: &Answer) -> Value {
    let (memory, cpu) = answer.totals();
    json!({
        "vms": answer.ended + answer.vms.len() as u64,
        "ended_vms": answer.ended,
        "memory": counters(&memory),
        "cpu": counters(&cpu),
    })
}

fn vm(vm: &Vm) -> Value {
    let vcpus: Vec<_> = vm.vcpus.iter().map(vcpu).collect();
    json!({ "vm": vm.number, "memory": counters(&vm.memory), "vcpus": vcpus })
}

fn vcpu(vcpu: &Vcpu) -> Value {
    let times = vcpu.times.iter();
    let times: Map<_, _> = times
        .map(|(reason, of)| (reason.clone(), json!({ "ns": of.ns, "log2_ns": of.counts })))
        .collect();
    json!({
        "vcpu": vcpu.id,
        "state": vcpu.state,
        "memory": counters(&vcpu.memory),
        "cpu": counters(&vcpu.cpu),
        "exits": counters(&vcpu.exits),
        "halt_wait_log2_ns": vcpu.halts,
        "exit_times": times,
    })
}
