//! The samples and their medians, as a table on the terminal and as JSON rows.

use std::fmt;
use std::hint::black_box;

/// The quantity that is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// Nanoseconds for each 4 KiB page of the range.
    NsPerPage,
    /// The time of a call, in nanoseconds.
    NsPerOp,
    /// Faults per second of all threads together.
    FaultsPerS,
}

impl Metric {
    fn name(self) -> &'static str {
        match self {
            Metric::NsPerPage => "ns_per_page",
            Metric::NsPerOp => "ns_per_op",
            Metric::FaultsPerS => "faults_per_s",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Metric::NsPerPage | Metric::NsPerOp => "ns",
            Metric::FaultsPerS => "1/s",
        }
    }
}

struct Row {
    experiment: &'static str,
    case: String,
    variant: String,
    metric: Metric,
    values: Vec<f64>,
}

impl Row {
    /// Returns the smallest time, or the largest rate. If the median is far from this value, the machine was disturbed.
    fn best(&self) -> f64 {
        let values = self.values.iter().copied();
        match self.metric {
            Metric::FaultsPerS => values.fold(0.0, f64::max),
            _ => values.fold(f64::INFINITY, f64::min),
        }
    }

    fn median(&self) -> f64 {
        let mut values = self.values.clone();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }
}

/// The samples that were measured so far.
pub struct Samples {
    only: String,
    rows: Vec<Row>,
}

impl Samples {
    /// Makes an empty list. It keeps only samples of cases whose names begin with `only`.
    pub fn new(only: &str) -> Self {
        Samples {
            only: only.to_owned(),
            rows: Vec::new(),
        }
    }

    /// Whether the list keeps samples of a case. `case` may be only the beginning of a case's name.
    pub fn wants(&self, experiment: &str, case: &str) -> bool {
        let name = format!("{experiment}/{case}");
        name.starts_with(&self.only) || self.only.starts_with(&name)
    }

    pub fn clear(&mut self) {
        for row in &mut self.rows {
            row.values.clear();
        }
    }

    pub fn add(
        &mut self,
        experiment: &'static str,
        case: &str,
        variant: &str,
        metric: Metric,
        value: f64,
    ) {
        if !format!("{experiment}/{case}").starts_with(&self.only) {
            return;
        }
        let same = |row: &&mut Row| {
            row.experiment == experiment && row.case == case && row.variant == variant
        };
        match self.rows.iter_mut().find(same) {
            Some(row) => row.values.push(value),
            None => self.rows.push(Row {
                experiment,
                case: case.to_owned(),
                variant: variant.to_owned(),
                metric,
                values: vec![value],
            }),
        }
    }
}

/// Runs `work`. Returns the nanoseconds of processor time that this thread needs for `work`, and its result. Time in
/// which other programs run is not included.
pub fn time<R>(work: impl FnOnce() -> R) -> (f64, R) {
    let begin = thread_ns();
    let result = black_box(work());
    ((thread_ns() - begin) as f64, result)
}

/// Returns the processor time of this thread.
pub fn thread_ns() -> i64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes to a local variable.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    assert_eq!(failed, 0, "every thread has a clock");
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// The medians of all samples, for each case.
pub struct Report<'a> {
    rows: Vec<&'a Row>,
}

impl<'a> Report<'a> {
    pub fn of(samples: &'a Samples) -> Self {
        let mut rows: Vec<&Row> = samples.rows.iter().collect();
        let place = |row: &Row| {
            let same = |other: &Row| other.experiment == row.experiment && other.case == row.case;
            samples.rows.iter().position(same)
        };
        rows.sort_by_key(|row| place(row));
        Report { rows }
    }

    /// Returns the rows as JSON.
    pub fn json(&self) -> String {
        let rows: Vec<String> = self
            .rows
            .iter()
            .map(|row| {
                format!(
                    "{{\"experiment\":\"{}\",\"case\":\"{}\",\"variant\":\"{}\",\
                     \"metric\":\"{}\",\"value\":{},\"unit\":\"{}\"}}",
                    row.experiment,
                    row.case,
                    row.variant,
                    row.metric.name(),
                    row.median(),
                    row.metric.unit()
                )
            })
            .collect();
        format!("{{\"rows\":[\n{}\n]}}\n", rows.join(",\n"))
    }

    /// Returns the row with the best value among the other crates, for the case of `row`.
    fn best_peer(&self, row: &Row) -> Option<&Row> {
        self.rows
            .iter()
            .filter(|other| {
                other.experiment == row.experiment
                    && other.case == row.case
                    && !other.variant.starts_with("slat")
                    && other.variant != "limit"
            })
            .min_by(|a, b| a.median().total_cmp(&b.median()))
            .copied()
    }

    fn limit(&self, row: &Row) -> Option<f64> {
        self.rows
            .iter()
            .find(|other| {
                other.experiment == row.experiment
                    && other.case == row.case
                    && other.variant == "limit"
            })
            .map(|limit| limit.median())
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = None;
        for row in &self.rows {
            let case = format!("{}/{}", row.experiment, row.case);
            if last.as_ref() != Some(&case) {
                writeln!(f, "{case} ({})", row.metric.name())?;
                last = Some(case);
            }
            let (value, best) = (row.median(), row.best());
            let digits = if row.metric == Metric::FaultsPerS {
                0
            } else {
                2
            };
            let variant = &row.variant;
            write!(
                f,
                "  {variant:<22}{value:>12.digits$}  (best {best:.digits$})"
            )?;
            if row.variant.starts_with("slat") {
                if let Some(peer) = self.best_peer(row) {
                    let faster = peer.median() / value;
                    write!(f, "   {faster:.2} x as fast as {}", peer.variant)?;
                }
                if let Some(limit) = self.limit(row) {
                    write!(f, "   {:.2} x the limit", value / limit)?;
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_the_median_of_its_samples() {
        let mut samples = Samples::new("tables");
        for value in [3.0, 1.0, 2.0] {
            samples.add("tables", "map", "slat-ept", Metric::NsPerPage, value);
        }
        samples.add("slots", "update", "slat-ept", Metric::NsPerOp, 1.0);
        assert_eq!(
            Report::of(&samples).json(),
            "{\"rows\":[\n{\"experiment\":\"tables\",\"case\":\"map\",\"variant\":\"slat-ept\",\
             \"metric\":\"ns_per_page\",\"value\":2,\"unit\":\"ns\"}\n]}\n"
        );
    }

    #[test]
    fn only_takes_an_experiment_or_a_case() {
        let samples = Samples::new("tables/map");
        assert!(samples.wants("tables", ""));
        assert!(samples.wants("tables", "map"));
        assert!(!samples.wants("tables", "split"));
        assert!(!samples.wants("slots", ""));
    }
}
