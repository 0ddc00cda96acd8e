//! The summary for scripts.

use serde_json::{Map, Value, json};
use slat_trace::read::Trace;

use super::summary::{Seen, Summary, hottest};

/// Returns the summary of `trace` as an object, with `top` addresses of each kind. Times are nanoseconds.
pub fn of(trace: &Trace, summary: &Summary, top: usize) -> String {
    let exits: Map<_, _> = (summary.exits.iter())
        .map(|(reason, exits)| {
            let of_reason = json!({
                "samples": exits.samples,
                "timed": exits.timed,
                "total_ns": exits.total_ns,
                "min_ns": exits.min_ns,
                "max_ns": exits.max_ns,
                "mean_ns": exits.mean_ns(),
            });
            (reason.clone(), of_reason)
        })
        .collect();
    let counts: Map<_, _> = (summary.counts.iter())
        .map(|(name, count)| (name.clone(), Value::from(*count)))
        .collect();
    let faults = summary.faults.iter().map(|(slot, times)| match slot {
        Some(slot) => {
            json!({ "vm": slot.vm, "as_id": slot.space, "slot": slot.id, "faults": times })
        }
        None => json!({ "slot": null, "faults": times }),
    });
    let report = json!({
        "pid": trace.pid,
        "ns": summary.ns,
        "vcpus": summary.vcpus.len(),
        "threads": trace.threads.len(),
        "records": summary.records,
        "dropped": summary.dropped,
        "lost": trace.lost,
        "exits": exits,
        "counts": counts,
        "faults_by_slot": faults.collect::<Vec<_>>(),
        "gfns": addresses(&summary.gfns, top),
        "gpas": addresses(&summary.gpas, top),
        "ports": addresses(&summary.ports, top),
        "rips": addresses(&summary.rips, top),
    });
    format!("{report:#}\n")
}

fn addresses(seen: &Seen, top: usize) -> Vec<Value> {
    let hottest = hottest(seen, top).into_iter();
    let value = |(address, times)| json!({ "address": address, "times": times });
    hottest.map(value).collect()
}
