//! Formats the summary of a trace as text. The first table looks like that of `perf kvm stat report`.

use std::fmt::Write as _;

use slat_kvm::report::grouped;
use slat_trace::read::Trace;

use super::Names;
use super::summary::{Exits, Seen, Summary, hottest};
use super::written;

/// Returns the summary of `trace` as text. It has at most `top` addresses of each kind.
pub fn of(trace: &Trace, summary: &Summary, top: usize, names: &Names) -> String {
    let mut text = format!(
        "Process {}: {} vCPUs, {} threads, {} s; {} records",
        trace.pid,
        summary.vcpus.len(),
        trace.threads.len(),
        seconds(summary.ns),
        grouped(summary.records),
    );
    if summary.dropped != 0 {
        // Writing to a string cannot fail, so the results of all writes below are ignored.
        let _ = write!(text, ", {} older ones dropped", grouped(summary.dropped));
    }
    if trace.lost != 0 {
        let _ = write!(text, ", {} lost: too many threads", grouped(trace.lost));
    }
    text.push('\n');
    exits(&mut text, summary);
    let _ = writeln!(text, "\n{:<30} {:>15}", "Tracepoint", "Records, ever");
    for (name, count) in summary.counts.iter().filter(|(_, count)| *count != 0) {
        let _ = writeln!(text, "{name:<30} {:>15}", grouped(*count));
    }
    let nameless = Names(None);
    let mut addresses =
        |head, unit, seen, names| addresses(&mut text, [head, unit], seen, top, names);
    addresses("Page frame", "Faults", &summary.gfns, &nameless);
    addresses("Device at", "Accesses", &summary.gpas, &nameless);
    addresses("Port", "Accesses", &summary.ports, &nameless);
    addresses("Guest RIP", "Exits", &summary.rips, names);
    faults(&mut text, summary);
    written_again(&mut text, summary, top);
    text
}

fn seconds(ns: u64) -> String {
    format!("{:.3}", ns as f64 / 1e9)
}

fn micros(ns: u64) -> String {
    format!("{:.2} us", ns as f64 / 1e3)
}

fn share(part: u64, whole: u64) -> String {
    let percent = part as f64 * 100.0 / whole.max(1) as f64;
    format!("{percent:.2} %")
}

fn exits(text: &mut String, summary: &Summary) {
    if summary.exits.is_empty() {
        return;
    }
    let mut exits: Vec<_> = summary.exits.iter().collect();
    exits.sort_by_key(|(_, exits)| std::cmp::Reverse(exits.samples));
    let sum = |of: fn(&Exits) -> u64| -> u64 { exits.iter().map(|(_, exits)| of(exits)).sum() };
    let samples = sum(|exits| exits.samples);
    let total_ns = sum(|exits| exits.total_ns);
    let mut line = |cells: [&str; 7]| {
        let [name, rest @ ..] = cells;
        let _ = write!(text, "{name:<20}");
        for cell in rest {
            let _ = write!(text, " {cell:>13}");
        }
        text.push('\n');
    };
    line([
        "\nVM exit",
        "Samples",
        "Samples %",
        "Time %",
        "Min time",
        "Max time",
        "Avg time",
    ]);
    for (name, exits) in &exits {
        let time = |ns| match exits.timed {
            0 => "-".to_owned(),
            _ => micros(ns),
        };
        line([
            name,
            &grouped(exits.samples),
            &share(exits.samples, samples),
            &share(exits.total_ns, total_ns),
            &time(exits.min_ns),
            &time(exits.max_ns),
            &time(exits.mean_ns()),
        ]);
    }
    let _ = writeln!(
        text,
        "{} exits, {} s outside the guest",
        grouped(samples),
        seconds(total_ns)
    );
}

fn addresses(text: &mut String, [head, unit]: [&str; 2], seen: &Seen, top: usize, names: &Names) {
    let hottest = hottest(seen, top);
    if hottest.is_empty() {
        return;
    }
    let all: u64 = seen.values().sum();
    let _ = writeln!(text, "\n{head:<20} {unit:>13} {:>13}", "Share");
    for (address, times) in hottest {
        let name = names.of(address);
        let name = name.map_or_else(String::new, |name| format!("  {name}"));
        let address = format!("{address:#x}");
        let _ = writeln!(
            text,
            "{address:<20} {:>13} {:>13}{name}",
            grouped(times),
            share(times, all)
        );
    }
}

fn faults(text: &mut String, summary: &Summary) {
    if summary.faults.is_empty() {
        return;
    }
    let all: u64 = summary.faults.values().sum();
    let _ = writeln!(text, "\n{:<20} {:>13} {:>13}", "Memslot", "Faults", "Share");
    for (slot, times) in &summary.faults {
        let slot = match slot {
            None => "none".to_owned(),
            Some(slot) if slot.space == 0 => format!("VM {} slot {}", slot.vm, slot.id),
            Some(slot) => format!("VM {} slot {}:{}", slot.vm, slot.space, slot.id),
        };
        let _ = writeln!(
            text,
            "{slot:<20} {:>13} {:>13}",
            grouped(*times),
            share(*times, all)
        );
    }
}

fn written_again(text: &mut String, summary: &Summary, top: usize) {
    let ranges = written::hottest(&summary.written, top);
    if ranges.is_empty() {
        return;
    }
    let _ = writeln!(
        text,
        "\n{:<24} {:>9} {:>13} {:>13}",
        "Written again, frames", "Pages", "Faults", "For each page"
    );
    for range in ranges {
        let frames = match range.pages {
            1 => format!("{:#x}", range.gfn),
            pages => format!("{:#x}-{:#x}", range.gfn, range.gfn + (pages - 1)),
        };
        let _ = writeln!(
            text,
            "{frames:<24} {:>9} {:>13} {:>13.1}",
            grouped(range.pages),
            grouped(range.faults),
            range.faults as f64 / range.pages as f64
        );
    }
}
