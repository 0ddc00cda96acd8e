//! Measures the variants of a case in turns, so that a change of the machine's speed affects all of them.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::arch::Guests;
use crate::compared::{REAL_KVM, shown};
use crate::maps::Maps;
use crate::report::{Report, Sample};
use crate::{Failure, Others};

/// The amount of work in the measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Size {
    /// The size for tests: every step runs once, with little memory. The counters are right, but the times are
    /// meaningless.
    Tiny,
    /// The usual size. All experiments together end within 90 s on 2 processors.
    #[default]
    Usual,
    /// The size with which the published results were measured.
    Full,
}

impl Size {
    /// Returns the argument that belongs to this size.
    pub fn pick<T>(self, tiny: T, usual: T, full: T) -> T {
        match self {
            Size::Tiny => tiny,
            Size::Usual => usual,
            Size::Full => full,
        }
    }
}

/// The state of a run of experiments.
pub struct Bench {
    /// The amount of work in the measurements.
    pub size: Size,
    /// The KVMs whose guests are measured.
    pub guests: Guests,
    /// The programs besides this one that experiments may start.
    pub others: Others,
    experiment: &'static str,
    report: Report,
    progress: ProgressBar,
}

impl Bench {
    /// The number of rounds in which a real KVM is measured. There are few, because its numbers are only for
    /// orientation, and a KVM that is an interpreter takes a hundred times as long as slat.
    pub const KVM_ROUNDS: usize = 2;

    /// If a case takes longer than this, its results are printed to standard error at once, so that a waiting user sees
    /// progress.
    const LONG: Duration = Duration::from_secs(10);

    /// Makes a bench without measurements.
    ///
    /// # Errors
    /// If slat's KVM cannot be opened.
    pub fn new(size: Size) -> Result<Self, Failure> {
        // If standard error is not a terminal, the progress bar is hidden.
        let progress = ProgressBar::new(0);
        progress.set_style(
            ProgressStyle::with_template("{prefix:>9} [{bar:30}] {msg}").expect("a valid template"),
        );
        Ok(Bench {
            size,
            guests: Guests::open(size)?,
            others: Others::default(),
            experiment: "",
            report: Report::default(),
            progress,
        })
    }

    /// Makes all later measurements belong to `experiment`. Call before an experiment.
    pub(crate) fn begin(&mut self, experiment: &'static str) {
        self.experiment = experiment;
        // While memory is prepared, the bar has the length 1, because a bar of length 0 would look complete.
        self.progress.set_length(1);
        self.progress.set_position(0);
        self.progress.set_prefix(experiment);
        self.progress.enable_steady_tick(Duration::from_millis(200));
    }

    /// Returns the report of all experiments.
    pub(crate) fn finish(self) -> Report {
        self.progress.finish_and_clear();
        self.report
    }

    /// Measures all `variants` of `case` in each of `rounds` rounds, by calling `measure` with each variant. Every
    /// second round goes through the variants in reverse order, so that a variant does not always follow the same other
    /// variant. A real KVM is measured only in the first [`KVM_ROUNDS`](Self::KVM_ROUNDS) rounds.
    ///
    /// # Errors
    /// The errors of `measure`.
    pub fn in_turns(
        &mut self,
        case: &str,
        rounds: usize,
        variants: &[&'static str],
        mut measure: impl FnMut(&Self, &'static str) -> Result<Vec<Sample>, Failure>,
    ) -> Result<(), Failure> {
        let turns = |variant: &str| match variant {
            REAL_KVM => rounds.min(Self::KVM_ROUNDS),
            _ => rounds,
        };
        let all: usize = variants.iter().map(|variant| turns(variant)).sum();
        self.progress.inc_length(all as u64);
        let began = Instant::now();
        let mut order = variants.to_vec();
        for round in 0..rounds {
            for &variant in order.iter().filter(|variant| round < turns(variant)) {
                self.progress.set_message(format!("{case} {variant}"));
                let samples = measure(self, variant)
                    .map_err(|e| format!("{} {case} {variant}: {e}", self.experiment))?;
                for sample in samples {
                    self.report.add(self.experiment, case, variant, sample);
                }
                self.progress.inc(1);
            }
            order.reverse();
        }
        if began.elapsed() > Self::LONG {
            self.progress
                .suspend(|| eprint!("{}", self.measured(case, variants)));
        }
        Ok(())
    }

    /// Prints a sample to standard error at once. Call for samples that take longer than a whole case of other
    /// experiments. After all rounds of the case, its medians are printed, too.
    pub fn show(&self, case: &str, variant: &str, sample: &Sample) {
        let row = self.text(case, variant, sample);
        self.progress.suspend(|| eprint!("{row}"));
    }

    fn text(&self, case: &str, variant: &str, sample: &Sample) -> String {
        let (metric, value) = (sample.metric, shown(sample.value, sample.unit));
        format!("{} {case} {metric}: {variant} {value}\n", self.experiment)
    }

    /// Returns a text with one line for each metric of `case`. Each line has the values of all `variants`.
    fn measured(&self, case: &str, variants: &[&'static str]) -> String {
        let rows = self.report.rows();
        let rows = rows
            .iter()
            .filter(|row| row.experiment == self.experiment && row.case == case);
        let mut metrics: Vec<_> = rows.clone().map(|row| row.metric).collect();
        metrics.sort_unstable();
        metrics.dedup();
        let value = |metric, variant| {
            let row = rows
                .clone()
                .find(|row| row.metric == metric && row.variant == variant)?;
            Some(format!("{variant} {}", shown(row.value, row.unit)))
        };
        let line = |metric| {
            let values: Vec<_> = variants.iter().filter_map(|v| value(metric, *v)).collect();
            format!(
                "{} {case} {metric}: {}\n",
                self.experiment,
                values.join(", ")
            )
        };
        metrics.into_iter().map(line).collect()
    }

    /// Adds a sentence that is printed under the tables.
    pub fn note(&mut self, sentence: String) {
        self.report.note(sentence);
    }

    /// Adds a sentence that says which measurement was not made, and why.
    pub fn note_missing(&mut self, sentence: String) {
        self.report.note_missing(sentence);
    }

    /// Adds the maps of an experiment to the report.
    pub(crate) fn keep(&mut self, maps: Maps) {
        self.report.add_maps(maps.taken);
    }
}

/// Returns the processor time of this thread.
pub fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes to a local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Calls `run` several times, and returns the shortest time. A disturbance can only make a short run longer.
///
/// # Errors
/// The errors of `run`.
pub fn fastest(
    runs: usize,
    mut run: impl FnMut() -> Result<Duration, Failure>,
) -> Result<Duration, Failure> {
    let mut fastest = run()?;
    for _ in 1..runs {
        fastest = fastest.min(run()?);
    }
    Ok(fastest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Unit;

    #[test]
    fn variants_take_turns_there_and_back() {
        let mut bench = Bench::new(Size::Tiny).unwrap();
        bench.begin("cpu");
        let mut order = Vec::new();
        bench
            .in_turns("alu", 3, &["a", "b"], |_, variant| {
                order.push(variant);
                Ok(vec![Sample::new("mips", Unit::Mips, order.len() as f64)])
            })
            .unwrap();
        assert_eq!(order, ["a", "b", "b", "a", "a", "b"]);
        assert_eq!(
            bench.measured("alu", &["a", "b"]),
            "cpu alu mips: a 4.00 MIPS, b 3.00 MIPS\n"
        );
        let sample = Sample::new("mips", Unit::Mips, 4.0);
        assert_eq!(
            bench.text("alu", "a", &sample),
            "cpu alu mips: a 4.00 MIPS\n"
        );
        let report = bench.finish();
        assert_eq!(report.value("cpu", "alu", "a", "mips"), Some(4.0));
        assert_eq!(report.value("cpu", "alu", "b", "mips"), Some(3.0));
    }

    #[test]
    fn of_several_runs_the_shortest_counts() {
        let mut times = [3, 1, 2].into_iter().map(Duration::from_millis);
        let shortest = fastest(3, || Ok(times.next().unwrap())).unwrap();
        assert_eq!(shortest, Duration::from_millis(1));
        assert!(fastest(2, || Err("broken".into())).is_err());
    }

    #[test]
    fn an_error_says_where_it_came_from() {
        let mut bench = Bench::new(Size::Tiny).unwrap();
        bench.begin("cpu");
        let error = bench
            .in_turns("alu", 1, &["slat"], |_, _| Err("broken".into()))
            .unwrap_err();
        assert_eq!(error.to_string(), "cpu alu slat: broken");
    }
}
