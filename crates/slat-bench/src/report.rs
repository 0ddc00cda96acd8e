//! The results of a run: samples, the rows of the JSON output, and ratios of variants.

use serde::Serialize;

use crate::maps::PageMap;

/// The unit of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Unit {
    /// Seconds.
    #[serde(rename = "s")]
    Seconds,
    /// Nanoseconds.
    #[serde(rename = "ns")]
    Nanoseconds,
    /// A number of events or objects.
    #[serde(rename = "count")]
    Count,
    /// A number of events per second.
    #[serde(rename = "1/s")]
    PerSecond,
    /// Millions of guest instructions per second.
    #[serde(rename = "MIPS")]
    Mips,
    /// A fraction of a whole.
    #[serde(rename = "share")]
    Share,
}

/// A sample: one measured value of one metric.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The metric's name in the JSON output.
    pub metric: &'static str,
    /// The metric's unit.
    pub unit: Unit,
    /// The measured value, in `unit`.
    pub value: f64,
}

impl Sample {
    /// Makes a sample of `metric`.
    pub fn new(metric: &'static str, unit: Unit, value: f64) -> Self {
        Sample {
            metric,
            unit,
            value,
        }
    }

    /// Makes a sample of a metric that counts.
    pub fn count(metric: &'static str, value: u64) -> Self {
        Self::new(metric, Unit::Count, value as f64)
    }

    /// Makes a sample of a time, in seconds.
    pub fn seconds(metric: &'static str, time: std::time::Duration) -> Self {
        Self::new(metric, Unit::Seconds, time.as_secs_f64())
    }
}

/// A row of the report: the median of all samples of one metric.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The experiment's name: `prefetch`, …
    pub experiment: &'static str,
    /// The case. `/` separates the parts of its name.
    pub case: String,
    /// The variant: a policy, an implementation, `kvm`.
    pub variant: &'static str,
    /// The metric's name.
    pub metric: &'static str,
    /// The median of the measured values.
    pub value: f64,
    /// The metric's unit.
    pub unit: Unit,
}

/// All samples of one metric of one variant of a case, in the order of the rounds.
#[derive(Debug)]
struct Series {
    experiment: &'static str,
    case: String,
    variant: &'static str,
    metric: &'static str,
    unit: Unit,
    values: Vec<f64>,
}

/// All measurements of one run.
#[derive(Debug, Default)]
pub struct Report {
    series: Vec<Series>,
    notes: Vec<String>,
    is_partial: bool,
    maps: Vec<PageMap>,
}

#[derive(Serialize)]
struct Document {
    rows: Vec<Row>,
}

impl Report {
    /// Adds a sample.
    ///
    /// # Panics
    /// If the value is not finite, or has another unit than earlier samples of its metric.
    pub fn add(
        &mut self,
        experiment: &'static str,
        case: &str,
        variant: &'static str,
        sample: Sample,
    ) {
        let Sample {
            metric,
            unit,
            value,
        } = sample;
        assert!(
            value.is_finite(),
            "{experiment} {case} {variant}: {metric} is {value}"
        );
        match self
            .series
            .iter_mut()
            .find(|series| series.is(experiment, case, variant, metric))
        {
            Some(series) => {
                assert_eq!(series.unit, unit, "{experiment} {case} {variant}: {metric}");
                series.values.push(value);
            }
            None => self.series.push(Series {
                experiment,
                case: case.to_owned(),
                variant,
                metric,
                unit,
                values: vec![value],
            }),
        }
    }

    /// Adds a sentence that is printed under the tables.
    pub fn note(&mut self, sentence: String) {
        if !self.notes.contains(&sentence) {
            self.notes.push(sentence);
        }
    }

    /// Adds a sentence that says which measurement was not made, and why.
    pub fn note_missing(&mut self, sentence: String) {
        self.is_partial = true;
        self.note(sentence);
    }

    /// Whether a part of the experiments was not measured. A note says which part.
    pub fn is_partial(&self) -> bool {
        self.is_partial
    }

    /// Returns the sentences that are printed under the tables.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Adds maps of guest memory.
    pub(crate) fn add_maps(&mut self, maps: Vec<PageMap>) {
        self.maps.extend(maps);
    }

    /// Returns the maps of an experiment.
    pub fn maps(&self, experiment: &str) -> impl Iterator<Item = &PageMap> {
        let maps = self.maps.iter();
        maps.filter(move |map| map.experiment == experiment)
    }

    /// Returns the rows, in the order in which they were measured.
    pub fn rows(&self) -> Vec<Row> {
        self.series
            .iter()
            .map(|series| Row {
                experiment: series.experiment,
                case: series.case.clone(),
                variant: series.variant,
                metric: series.metric,
                value: median(&series.values),
                unit: series.unit,
            })
            .collect()
    }

    /// Formats the rows as `{"rows":[…]}`, with one row on each line.
    pub fn to_json(&self) -> String {
        let document = Document { rows: self.rows() };
        let text = serde_json::to_string(&document).expect("rows are plain data");
        text.replace("},{", "},\n{") + "\n"
    }

    /// Returns the names of an experiment's cases, in the order in which they were measured.
    pub fn cases(&self, experiment: &str) -> Vec<&str> {
        let mut cases = Vec::new();
        for series in &self.series {
            if series.experiment == experiment && !cases.contains(&series.case.as_str()) {
                cases.push(&series.case);
            }
        }
        cases
    }

    /// Returns the median of a metric's samples. `None`: the metric was not measured.
    pub fn value(&self, experiment: &str, case: &str, variant: &str, metric: &str) -> Option<f64> {
        let series = self.find(experiment, case, variant, metric)?;
        Some(median(&series.values))
    }

    /// Returns the metric's unit.
    pub(crate) fn unit(
        &self,
        experiment: &str,
        case: &str,
        variant: &str,
        metric: &str,
    ) -> Option<Unit> {
        Some(self.find(experiment, case, variant, metric)?.unit)
    }

    /// Returns the ratio of `after` to `before`, which is the median of the ratios of the rounds. If a whole round is
    /// disturbed, both values of its ratio change, so the ratio hardly does.
    pub fn ratio(
        &self,
        experiment: &str,
        case: &str,
        metric: &str,
        before: &str,
        after: &str,
    ) -> Option<f64> {
        self.ratio_between(experiment, metric, (case, before), (case, after))
    }

    /// Returns a ratio like [`Report::ratio`], but of two measurements that may differ in case and variant. Both must
    /// have been measured in the same rounds.
    pub fn ratio_between(
        &self,
        experiment: &str,
        metric: &str,
        (case, before): (&str, &str),
        (other, after): (&str, &str),
    ) -> Option<f64> {
        let before = &self.find(experiment, case, before, metric)?.values;
        let after = &self.find(experiment, other, after, metric)?.values;
        if before.len() != after.len() || before.contains(&0.0) {
            let before = median(before);
            return (before != 0.0).then(|| median(after) / before);
        }
        let ratios: Vec<f64> = before.iter().zip(after).map(|(b, a)| a / b).collect();
        Some(median(&ratios))
    }

    fn find(&self, experiment: &str, case: &str, variant: &str, metric: &str) -> Option<&Series> {
        self.series
            .iter()
            .find(|series| series.is(experiment, case, variant, metric))
    }
}

impl Series {
    fn is(&self, experiment: &str, case: &str, variant: &str, metric: &str) -> bool {
        self.experiment == experiment
            && self.case == case
            && self.variant == variant
            && self.metric == metric
    }
}

/// Returns the middle value, or the mean of the two middle values.
///
/// # Panics
/// If `values` is empty.
pub fn median(values: &[f64]) -> f64 {
    assert!(!values.is_empty(), "the median of nothing");
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    } else {
        sorted[middle]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(report: &mut Report, variant: &'static str, value: f64) {
        let sample = Sample::new("seconds", Unit::Seconds, value);
        report.add("mmio", "ordinary", variant, sample);
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(median(&[5.0]), 5.0);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 100.0, 2.0]), 3.0);
    }

    #[test]
    fn a_row_is_the_median_of_its_samples_and_has_the_fields_of_the_contract() {
        let mut report = Report::default();
        for value in [0.5, 9.0, 0.25] {
            add(&mut report, "cached", value);
        }
        let json: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"rows": [{
                "experiment": "mmio", "case": "ordinary", "variant": "cached",
                "metric": "seconds", "value": 0.5, "unit": "s",
            }]})
        );
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        let mut report = Report::default();
        // In the second round the whole machine was ten times slower. In the third round, only one of the two
        // measurements was disturbed.
        for (before, after) in [(1.0, 0.5), (10.0, 5.0), (1.0, 4.0)] {
            add(&mut report, "uncached", before);
            add(&mut report, "cached", after);
        }
        let ratio =
            |report: &Report| report.ratio("mmio", "ordinary", "seconds", "uncached", "cached");
        assert_eq!(ratio(&report), Some(0.5));
        // If `before` and `after` were not measured in the same round, the ratio of their medians is used.
        add(&mut report, "cached", 4.0);
        assert_eq!(ratio(&report), Some(4.0));
        assert_eq!(
            report.ratio("mmio", "rr", "seconds", "uncached", "cached"),
            None
        );
    }

    #[test]
    #[should_panic(expected = "is NaN")]
    fn what_is_not_a_number_is_not_reported() {
        add(&mut Report::default(), "cached", f64::NAN);
    }
}
