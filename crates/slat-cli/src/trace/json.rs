//! Formats the summary of a trace as JSON, for scripts.

use serde_json::{Map, Value, json};
use slat_trace::read::Trace;

use super::Names;
use super::summary::{Seen, Summary, hottest};
use super::written;

/// Returns the summary of `trace` as a JSON object. It has at most `top` addresses of each kind. Times are in
/// nanoseconds.
pub fn of(trace: &Trace, summary: &Summary, top: usize, names: &Names) -> String {
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
    let written = written::hottest(&summary.written, top).into_iter();
    let written = written
        .map(|range| json!({ "gfn": range.gfn, "pages": range.pages, "faults": range.faults }));
    let nameless = Names(None);
    let report = json!({
        "pid": trace.pid,
        "ns": summary.ns,
        "vcpus": summary.vcpus.len(),
        "threads": trace.threads.len(),
        "records": summary.records,
        "dropped": summary.dropped,
        "lost": trace.lost,
        "unpaired": summary.unpaired,
        "exits": exits,
        "counts": counts,
        "faults_by_slot": faults.collect::<Vec<_>>(),
        "written_again": written.collect::<Vec<_>>(),
        "gfns": addresses(&summary.gfns, top, &nameless),
        "gpas": addresses(&summary.gpas, top, &nameless),
        "ports": addresses(&summary.ports, top, &nameless),
        "rips": addresses(&summary.rips, top, names),
    });
    format!("{report:#}\n")
}

fn addresses(seen: &Seen, top: usize, names: &Names) -> Vec<Value> {
    let value = |(address, times)| match names.of(address) {
        None => json!({ "address": address, "times": times }),
        Some(name) => json!({ "address": address, "times": times, "name": name }),
    };
    hottest(seen, top).into_iter().map(value).collect()
}
