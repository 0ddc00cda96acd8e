//! The lines of the report's tables. A line compares the values of one metric of a case for two variants, called before
//! and after.

use slat_kvm::report::grouped;

use crate::published;
use crate::report::{Report, Unit};

/// The name of a real KVM's variant in measurements.
pub const REAL_KVM: &str = "kvm";

/// A line of a table. It has the values of one metric of one case for two variants, before and after a change.
#[derive(Clone, Debug)]
pub struct Line {
    pub(crate) case: String,
    pub(crate) metric: &'static str,
    pub(crate) unit: Unit,
    /// The variant that the line compares with, and its value. `None` if the line has only one variant.
    pub(crate) before: Option<(&'static str, f64)>,
    pub(crate) after: (&'static str, f64),
    pub(crate) change: Option<f64>,
    /// The relative change that was published.
    pub(crate) published: Option<f64>,
    pub(crate) limit: Option<(&'static str, f64)>,
    pub(crate) kvm: Option<f64>,
    goal: Option<Goal>,
}

/// A goal for a value: a limit that the value must not exceed, or must reach.
#[derive(Clone, Debug)]
pub struct Goal {
    /// The goal as a short text, for example in a cell of a table.
    pub text: String,
    /// Whether the goal was reached.
    pub met: bool,
    /// For a goal that was not reached, the part that dominates the value.
    pub(crate) why: Option<String>,
}

impl Goal {
    /// Returns the goal's text after a mark that shows whether the goal was reached.
    pub fn marked(&self) -> String {
        let mark = if self.met { '\u{2713}' } else { '\u{2717}' };
        format!("{mark} {}", self.text)
    }
}

impl Line {
    /// Makes a line with only `variant`. `None`: the variant was not measured.
    pub fn of(
        report: &Report,
        experiment: &str,
        case: &str,
        metric: &'static str,
        variant: &'static str,
    ) -> Option<Self> {
        let value = |variant| report.value(experiment, case, variant, metric);
        Some(Line {
            case: case.to_owned(),
            metric,
            unit: report.unit(experiment, case, variant, metric)?,
            before: None,
            after: (variant, value(variant)?),
            change: None,
            published: published::find(experiment, case, metric),
            limit: None,
            kvm: value(REAL_KVM).filter(|_| variant != REAL_KVM),
            goal: None,
        })
    }

    /// Makes a line that compares `after` with `before`. `None`: one of the two was not measured.
    pub fn compare(
        report: &Report,
        experiment: &str,
        case: &str,
        metric: &'static str,
        before: &'static str,
        after: &'static str,
    ) -> Option<Self> {
        let line = Self::of(report, experiment, case, metric, after)?;
        let ratio = report.ratio(experiment, case, metric, before, after);
        Some(Line {
            before: Some((before, report.value(experiment, case, before, metric)?)),
            change: ratio.map(|ratio| ratio - 1.0),
            ..line
        })
    }

    /// Adds a limit, which is the best value that is possible.
    pub fn with_limit(self, name: &'static str, value: Option<f64>) -> Self {
        Line {
            limit: value.map(|value| (name, value)),
            ..self
        }
    }

    /// Replaces the published change with which the line is compared. Without this call, it is the published change of
    /// the line's case and metric.
    pub fn with_published(self, change: Option<f64>) -> Self {
        Line {
            published: change,
            ..self
        }
    }

    /// Sets the goal that the change is at most `most` (−0.73 means 73 % less).
    pub fn change_at_most(self, most: f64) -> Self {
        let met = self.change.is_some_and(|change| change <= most);
        self.goal(format!("\u{2264} {}", percent(most)), met)
    }

    /// Sets the goal that the change is at least `least`.
    pub fn change_at_least(self, least: f64) -> Self {
        let met = self.change.is_some_and(|change| change >= least);
        self.goal(format!("\u{2265} {}", percent(least)), met)
    }

    /// Sets the goal that the value changes by at most `most`, up or down.
    pub fn change_within(self, most: f64) -> Self {
        let met = self.change.is_some_and(|change| change.abs() <= most);
        self.goal(format!("\u{b1} {:.1} %", most * 100.0), met)
    }

    /// Sets the goal that the value is at most `most`.
    pub fn at_most(self, most: f64) -> Self {
        let text = format!("\u{2264} {}", shown(most, self.unit));
        let met = self.after.1 <= most;
        self.goal(text, met)
    }

    /// Sets the goal that the value is at least `least`.
    pub fn at_least(self, least: f64) -> Self {
        let text = format!("\u{2265} {}", shown(least, self.unit));
        let met = self.after.1 >= least;
        self.goal(text, met)
    }

    /// Sets the goal that the value is at most `factor` times the limit.
    pub fn at_most_of_limit(self, factor: f64) -> Self {
        let (name, limit) = self.limit.unwrap_or(("limit", f64::NAN));
        let met = self.after.1 <= factor * limit;
        self.goal(format!("\u{2264} {factor}\u{d7} {name}"), met)
    }

    /// Sets a goal with the text `text`. `met` tells whether it was reached.
    pub fn goal(self, text: String, met: bool) -> Self {
        let why = None;
        Line {
            goal: Some(Goal { text, met, why }),
            ..self
        }
    }

    /// Adds to a goal that was not reached the part that dominates the value.
    pub fn or_else(mut self, why: String) -> Self {
        if let Some(goal) = &mut self.goal {
            goal.why = Some(why);
        }
        self
    }

    /// Returns the goal, if there is one. The goal also says whether it was reached.
    pub fn asked(&self) -> Option<&Goal> {
        self.goal.as_ref()
    }

    /// Returns the case and the metric as a text for people.
    pub fn name(&self) -> String {
        format!("{} {}", self.case, self.metric)
    }

    /// Returns the key of the line's group. Lines of one group share a heading in the table.
    fn group(&self) -> (&str, Option<&str>, &str) {
        let before = self.before.map(|(variant, _)| variant);
        (&self.case, before, self.after.0)
    }

    /// Returns the text of each column of the table.
    pub(crate) fn cells(&self) -> [String; COLUMNS.len()] {
        let value = |value: Option<f64>| value.map_or(String::new(), |v| shown(v, self.unit));
        let percent = |change: Option<f64>| change.map_or(String::new(), percent);
        [
            self.metric.to_owned(),
            value(self.before.map(|(_, value)| value)),
            value(Some(self.after.1)),
            percent(self.change),
            percent(self.published),
            value(self.limit.map(|(_, value)| value)),
            value(self.kvm),
            self.goal.as_ref().map_or(String::new(), Goal::marked),
        ]
    }
}

/// The meaning of a row in an experiment's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// A row is a metric of a case, under a heading with the case's name. The columns compare variants.
    Metrics,
    /// Each row of the table is a case, and each column a metric.
    Cases,
}

/// The table if rows are cases ([`Rows::Cases`]).
pub(crate) struct Grid<'a> {
    /// The headings of the columns.
    pub(crate) head: Vec<&'a str>,
    /// The cases, grouped by the first part of their name.
    pub(crate) families: Vec<(&'a str, Vec<GridRow<'a>>)>,
}

/// A row of a [`Grid`]: the rest of the case's name, the values, and the goals.
pub(crate) struct GridRow<'a> {
    pub(crate) cells: Vec<String>,
    pub(crate) goal: Option<&'a Goal>,
}

impl<'a> Grid<'a> {
    pub(crate) fn new(lines: &'a [Line]) -> Self {
        // The metrics, each with the variant with which it is compared, if there is one.
        let mut columns: Vec<(&'a str, Option<&'a str>)> = Vec::new();
        for line in lines {
            let before = line.before.map(|(variant, _)| (line.metric, Some(variant)));
            for column in before.into_iter().chain([(line.metric, None)]) {
                if !columns.contains(&column) {
                    columns.push(column);
                }
            }
        }
        // The headings have no units, because the values show them.
        let name = |(metric, before): &(&'a str, Option<&'a str>)| {
            before.unwrap_or_else(|| metric.trim_end_matches("_seconds"))
        };
        let head = [""].into_iter().chain(columns.iter().map(name));
        let head = head.chain(["asked"]).collect();
        let mut families: Vec<(&str, Vec<GridRow>)> = Vec::new();
        for case in lines.chunk_by(|a, b| a.case == b.case) {
            let (family, name) = case[0].case.split_once('/').unwrap_or(("", &case[0].case));
            let goal = case.iter().find_map(Line::asked);
            let mut cells = vec![name.to_owned()];
            cells.extend(columns.iter().map(|column| cell(case, *column)));
            cells.push(goal.map_or(String::new(), Goal::marked));
            let row = GridRow { cells, goal };
            match families.last_mut() {
                Some((last, rows)) if *last == family => rows.push(row),
                _ => families.push((family, vec![row])),
            }
        }
        Grid { head, families }
    }
}

/// Returns the text of a metric's value, or of the value of the variant with which it is compared. Returns an empty
/// text if the value does not exist.
fn cell(case: &[Line], (metric, before): (&str, Option<&str>)) -> String {
    let line = case.iter().find(|line| line.metric == metric);
    let value = line.and_then(|line| {
        let value = match before {
            None => line.after.1,
            Some(before) => line.before.filter(|(name, _)| *name == before)?.1,
        };
        Some(shown(value, line.unit))
    });
    value.unwrap_or_default()
}

/// Groups the lines of a table by heading. Returns for each group the columns of the heading, and the lines.
pub(crate) fn groups(lines: &[Line]) -> impl Iterator<Item = ([&str; 6], &[Line])> {
    lines.chunk_by(|a, b| a.group() == b.group()).map(|group| {
        let (case, before, after) = group[0].group();
        let limit = group.iter().find_map(|line| line.limit);
        let limit = limit.map_or("", |(name, _)| name);
        let heading = [case, before.unwrap_or_default(), after, "", "", limit];
        (heading, group)
    })
}

pub(crate) const COLUMNS: [&str; 8] = [
    "",
    "before",
    "after",
    "change",
    "published",
    "limit",
    REAL_KVM,
    "asked",
];

/// Formats a relative change.
pub(crate) fn percent(change: f64) -> String {
    let digits = if change.abs() >= 10.0 { 0 } else { 1 };
    format!("{:+.digits$} %", change * 100.0)
}

/// Formats a value with its unit, in about three digits.
pub fn shown(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Count => grouped(value.round() as u64),
        Unit::Nanoseconds => time(value * 1e-9),
        Unit::Seconds => time(value),
        Unit::PerSecond => match value {
            value if value >= 1e6 => format!("{:.2} M/s", value * 1e-6),
            value if value >= 1e3 => format!("{:.1} k/s", value * 1e-3),
            value => format!("{value:.1} /s"),
        },
        Unit::Mips => format!("{} MIPS", digits(value)),
        Unit::Share => format!("{} %", digits(value * 100.0)),
    }
}

fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        seconds if seconds >= 1.0 => (seconds, "s"),
        seconds if seconds >= 1e-3 => (seconds * 1e3, "ms"),
        seconds if seconds >= 1e-6 => (seconds * 1e6, "\u{b5}s"),
        seconds => (seconds * 1e9, "ns"),
    };
    format!("{} {unit}", digits(value))
}

/// Formats a value with at least three digits.
fn digits(value: f64) -> String {
    let behind = match value {
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.behind$}")
}
