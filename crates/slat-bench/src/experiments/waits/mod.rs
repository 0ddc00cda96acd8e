//! Measures how long one thread waits for its calls while another thread works on a large memslot.

mod histogram;
mod operation;
mod unrelated;

use std::time::{Duration, Instant};

use crate::Failure;
use crate::compared::{Line, Rows, shown};
use crate::report::{Report, Sample, Unit};
use crate::rounds::Bench;
use crate::{Elsewhere, Experiment, Settable};
use histogram::Histogram;
use operation::{Operation, Subject};
use unrelated::Unrelated;

const NAME: &str = "waits";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "what an unrelated call waits beside a long operation on 64 GiB",
    explain: "\
One thread works on a slot of 64 GiB mapped by 4 KiB (begin-eager, begin-lazy: 2 MiB); another one
makes calls about other memory, one by one. invalidate: of a mapped page. slot: one of 16 pages is
created, or deleted. fault: a vCPU's, beside age. The engine alone, EPT; only its tables are real.
get, clear: the dirty log, every page dirty, by write protection or dirty bits. begin: of logging,
huge leaves split at once (eager) or not (lazy). end: of it; all may be huge again, as in promote.
cold: of cold_ranges, no page used since. The rest are of that name; ring-reset: 1 page in 64.
nothing: none. alone, operation: how long it took without and with the calls. calls: in progress
during it. p50, p99, p99.9, max: what they took; p99.9 of fewer than 1000 calls is left empty.
anytime: what 999 of 1000 would wait at most if they came at random moments: one call of a second
among a million of a microsecond is one call, but half of the moments. Asked for: p99.9 and anytime.",
    settable: Settable::None,
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Cases,
};

const SLAT: &str = "slat";
const ALONE: &str = "alone";

const OPERATION: &str = "operation_seconds";
const PER_PAGE: &str = "page_seconds";
const CALLS: &str = "calls";
const P50: &str = "p50_seconds";
const P99: &str = "p99_seconds";
const P999: &str = "p99.9_seconds";
const ANYTIME: &str = "anytime_seconds";
const MAX: &str = "max_seconds";

/// The quantiles: value, name, and the minimum number of calls with which the quantile is reported. With that number,
/// one call exceeds the quantile.
const QUANTILES: [(f64, &str, u64); 3] = [(0.5, P50, 10), (0.99, P99, 100), (0.999, P999, 1000)];

/// If the threads of a run did not have their processors for longer than this time, other programs have disturbed the
/// run.
const LOST: Duration = Duration::from_micros(500);

/// The goal for the longest wait, in seconds.
const ASKED: f64 = 2e-3;

fn run(bench: &mut Bench) -> Result<(), Failure> {
    let gib: u64 = 1 << 30 >> slat::PAGE_SHIFT;
    let pages = bench.size.pick(gib / 64, 64 * gib, 64 * gib);
    let plan = Plan {
        times: bench.size.pick(1, 3, 9),
        calls: bench.size.pick(1, 1000, 1000),
        limit: Duration::from_secs(bench.size.pick(10, 1, 10)),
    };
    let nothing = Duration::from_millis(bench.size.pick(2, 200, 1000));
    let (mut cases, mut disturbed) = (0, 0);
    for (operation, name) in Operation::ALL {
        let mut subject = Subject::new(operation, pages, nothing)?;
        let beside_it = |calls: &(Unrelated, _)| are_beside(calls.0, operation);
        for (calls, calls_name) in Unrelated::ALL.into_iter().filter(beside_it) {
            cases += 1;
            let case = format!("{calls_name}/{name}");
            // There is only one round, because quantiles are computed from all calls together, not as medians of
            // rounds.
            bench.in_turns(&case, 1, &[ALONE, SLAT], |_, variant| match variant {
                ALONE => alone(&mut subject, plan),
                _ => {
                    let (samples, was_disturbed) = beside(&mut subject, calls, plan)?;
                    disturbed += usize::from(was_disturbed);
                    Ok(samples)
                }
            })?;
        }
    }
    if disturbed > 0 {
        let reason = match std::thread::available_parallelism() {
            Ok(n) if n.get() == 1 => "the two threads shared one processor",
            _ => "other programs ran on these processors",
        };
        bench.note(format!(
            "{NAME}: {reason} in every run of {disturbed} cases of {cases}; the rows of nothing show what that alone \
             makes of a wait.",
        ));
    }
    Ok(())
}

/// Whether the calls `calls` are measured during `operation`.
fn are_beside(calls: Unrelated, operation: Operation) -> bool {
    calls != Unrelated::Fault || matches!(operation, Operation::Nothing | Operation::Age)
}

/// The amount of work that is measured.
#[derive(Clone, Copy)]
struct Plan {
    /// The number of operations. Without calls, exactly this many operations are made; with calls, at least this many.
    times: usize,
    /// The number of calls after which the measurement stops.
    calls: u64,
    /// The time after which no further operation is begun, nor the set-up for it.
    limit: Duration,
}

fn alone(subject: &mut Subject, plan: Plan) -> Result<Vec<Sample>, Failure> {
    let mut samples = Vec::new();
    for _ in 0..plan.times {
        subject.set_up()?;
        let began = Instant::now();
        let told = subject.perform()?;
        let time = began.elapsed();
        samples.push(Sample::seconds(OPERATION, time));
        subject.check(told)?;
        if matches!(subject.operation(), Operation::Age | Operation::Cold) {
            let seconds = time.as_secs_f64() / told as f64;
            samples.push(Sample::new(PER_PAGE, Unit::Seconds, seconds));
        }
    }
    Ok(samples)
}

/// The results of repeated operations during which another thread made calls.
struct Runs {
    times: Vec<Duration>,
    waits: Histogram,
}

/// Repeats the operation while another thread makes calls. Returns the results of the runs that no other program
/// disturbed, or of all runs if every run was disturbed. Also returns whether every run was disturbed.
fn beside(
    subject: &mut Subject,
    calls: Unrelated,
    plan: Plan,
) -> Result<(Vec<Sample>, bool), Failure> {
    let [mut quiet, mut disturbed] = [(), ()].map(|()| Runs {
        times: Vec::new(),
        waits: Histogram::new(),
    });
    let began = Instant::now();
    let mut times = 0;
    while times < plan.times || (quiet.waits.calls() < plan.calls && began.elapsed() < plan.limit) {
        subject.set_up()?;
        let (vm, mut waits) = (subject.vm().clone(), Histogram::new());
        let beside = unrelated::beside(&vm, calls, &mut waits, || subject.perform())?;
        subject.check(beside.result?)?;
        let runs = match beside.lost <= LOST {
            true => &mut quiet,
            false => &mut disturbed,
        };
        runs.times.push(beside.time);
        runs.waits.add(&waits);
        times += 1;
    }
    let was_disturbed = quiet.waits.calls() == 0;
    let Runs { times, waits } = if was_disturbed { disturbed } else { quiet };
    let times = times.into_iter();
    let mut samples: Vec<_> = times.map(|time| Sample::seconds(OPERATION, time)).collect();
    samples.push(Sample::count(CALLS, waits.calls()));
    for (share, metric, least) in QUANTILES {
        let time = waits.quantile(share).filter(|_| waits.calls() >= least);
        samples.extend(time.map(|time| Sample::seconds(metric, time)));
    }
    let anytime = waits.quantile_of_moments(0.999);
    samples.extend(anytime.map(|time| Sample::seconds(ANYTIME, time)));
    samples.extend(waits.max().map(|time| Sample::seconds(MAX, time)));
    Ok((samples, was_disturbed))
}

fn compare(report: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    for (kind, calls) in Unrelated::ALL {
        let beside_it = |operation: &(Operation, _)| are_beside(kind, operation.0);
        for (operation, name) in Operation::ALL.into_iter().filter(beside_it) {
            let case = format!("{calls}/{name}");
            let metric = |metric| Line::of(report, NAME, &case, metric, SLAT);
            lines.extend(Line::compare(report, NAME, &case, OPERATION, ALONE, SLAT));
            lines.extend(Line::of(report, NAME, &case, PER_PAGE, ALONE));
            lines.extend([CALLS, P50, P99].into_iter().filter_map(metric));
            let (p999, max) = (metric(P999), metric(MAX));
            // The limit applies to moments, not only to calls (P999). Otherwise many short calls could make the
            // operation's long waits rare among all calls, although not among all moments.
            let within = |line: &Line| line.after.1 <= ASKED;
            let asked = |line: Line| match operation {
                Operation::Nothing => line,
                _ => {
                    let met = within(&line) && p999.as_ref().is_none_or(within);
                    let text = format!("\u{2264} {}", shown(ASKED, Unit::Seconds));
                    line.goal(text, met).or_else(longest(report, calls, &case))
                }
            };
            let anytime = metric(ANYTIME).map(asked);
            lines.extend([p999, anytime, max].into_iter().flatten());
        }
    }
    lines
}

/// Returns a text that compares the longest waits with the operation. A call that waits for the whole operation takes
/// as long as the operation. But a call may also take so long without an operation, if the machine delays it.
fn longest(report: &Report, calls: &str, case: &str) -> String {
    let value = |case: &str, metric| report.value(NAME, case, SLAT, metric);
    let time = |case: &str, metric| {
        value(case, metric).map_or("?".to_owned(), |time| shown(time, Unit::Seconds))
    };
    format!(
        "longest of {}: {}; operation: {}; longest beside nothing: {}",
        value(case, CALLS).unwrap_or(0.0),
        time(case, MAX),
        time(case, OPERATION),
        time(&format!("{calls}/nothing"), MAX),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Size;

    #[test]
    fn beside_every_operation_calls_are_counted_and_longer_quantiles_are_longer() {
        // `run` itself checks the operations' results.
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        assert_eq!(report.cases(NAME).len(), 2 * Operation::ALL.len() + 2);
        for case in report.cases(NAME) {
            let value = |metric| report.value(NAME, case, SLAT, metric);
            assert!(value(CALLS) >= Some(1.0), "{case}");
            let times = [P50, P99, P999, MAX].into_iter().filter_map(value);
            assert!(times.is_sorted(), "{case}");
            assert!(value(ANYTIME) <= value(MAX), "{case}");
            assert_eq!(value(P999).is_some(), value(CALLS) >= Some(1000.0));
            assert!(report.value(NAME, case, ALONE, OPERATION) > Some(0.0));
        }
    }

    fn report(p999: Option<f64>, anytime: f64) -> Report {
        let mut report = Report::default();
        for name in ["slot/age", "slot/nothing"] {
            let mut add = |variant, metric, seconds: f64| {
                let sample = Sample::new(metric, Unit::Seconds, seconds);
                report.add(NAME, name, variant, sample);
            };
            add(ALONE, OPERATION, 0.25);
            add(SLAT, OPERATION, 0.5);
            p999.into_iter().for_each(|time| add(SLAT, P999, time));
            add(SLAT, ANYTIME, anytime);
            add(SLAT, MAX, 0.125);
            report.add(NAME, name, SLAT, Sample::count(CALLS, 5000));
        }
        report
    }

    #[test]
    fn neither_calls_nor_moments_may_wait_long() {
        for (p999, anytime, met) in [
            (Some(1e-3), 2e-3, true),
            (None, 2e-3, true),
            (Some(3e-3), 1e-3, false),
            (Some(1e-6), 3e-3, false),
            (None, 3e-3, false),
        ] {
            let lines = compare(&report(p999, anytime));
            let asked: Vec<_> = lines.iter().filter_map(Line::asked).collect();
            // The case without an operation has no goal, so only one line has a goal.
            assert_eq!(asked.len(), 1);
            assert_eq!(asked[0].met, met, "{p999:?} {anytime}");
        }
        let missed = crate::show::missed(&EXPERIMENT, &report(None, 0.125));
        let why = "longest of 5000: 125 ms; operation: 500 ms; longest beside nothing: 125 ms";
        assert_eq!(
            missed,
            [format!(
                "waits slot/age anytime_seconds: \u{2264} 2.00 ms: {why}"
            )]
        );
    }

    #[test]
    fn a_case_is_a_row_and_what_was_not_measured_is_empty() {
        let text = crate::show::table(&EXPERIMENT, &report(Some(1e-3), 2e-3), 100);
        let lines: Vec<Vec<_>> = (text.lines().skip(1))
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            lines[0].join(" "),
            "alone operation calls p99.9 anytime max asked"
        );
        assert_eq!(lines[1], ["slot"]);
        assert_eq!(lines[2][0], "nothing");
        assert_eq!(
            lines[3].join(" "),
            "age 250 ms 500 ms 5,000 1.00 ms 2.00 ms 125 ms \u{2713} \u{2264} 2.00 ms"
        );
        let text = crate::show::table(&EXPERIMENT, &report(None, 2e-3), 100);
        assert!(!text.contains("p99.9"));
        let page = crate::html::page(&[&EXPERIMENT], &report(None, 2e-3), Size::Tiny);
        assert!(page.contains("<tr class=\"heading\"><td>slot</td>"));
        assert!(page.contains("<th scope=\"row\">age</th><td>250 ms</td><td>500 ms</td>"));
    }
}
