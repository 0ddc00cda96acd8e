//! The contents of a chart, made from the lines of a table: each value is a bar.

use crate::compared::{Goal, Line, REAL_KVM};
use crate::report::Unit;

/// The maximum number of cases in a chart. A metric with more cases gets one chart for each first part of the cases'
/// names.
const CASES: usize = 6;

/// The meaning of a bar, which determines the bar's colour and pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The variant with which the others are compared.
    Before,
    /// The n-th variant that is compared with `Before`.
    After(usize),
    /// The value that the variant `Before` would have after the published change.
    Published,
    /// A real KVM.
    Kvm,
}

/// One bar of a chart.
#[derive(Debug)]
pub struct Bar<'a> {
    /// The meaning of the bar.
    pub role: Role,
    /// The name of the variant whose value the bar shows.
    pub name: &'a str,
    /// The value in the chart's unit.
    pub value: f64,
    /// The change relative to the bar `Before`.
    pub change: Option<f64>,
    /// The name and the value of the limit, which is the best possible result.
    pub limit: Option<(&'a str, f64)>,
    /// The goal for the bar's value.
    pub goal: Option<&'a Goal>,
}

/// The bars of one case.
#[derive(Debug)]
pub struct Case<'a> {
    /// The case's name in the report.
    pub name: &'a str,
    /// The bars. The bar `Before` comes first.
    pub bars: Vec<Bar<'a>>,
}

/// A chart of one metric, for several cases.
#[derive(Debug)]
pub struct Chart<'a> {
    /// The first part of the cases' names. `None` if the chart has all cases of the metric.
    pub family: Option<&'a str>,
    /// The name of the metric.
    pub metric: &'a str,
    /// The metric's unit.
    pub unit: Unit,
    /// The cases in the order of the table.
    pub cases: Vec<Case<'a>>,
}

/// Makes the charts of an experiment.
pub fn charts(lines: &[Line]) -> Vec<Chart<'_>> {
    let mut charts: Vec<Chart> = Vec::new();
    for line in lines {
        let family = family(lines, line);
        let known = charts
            .iter()
            .position(|chart| chart.metric == line.metric && chart.family == family);
        let index = known.unwrap_or_else(|| {
            charts.push(Chart {
                family,
                metric: line.metric,
                unit: line.unit,
                cases: Vec::new(),
            });
            charts.len() - 1
        });
        charts[index].add(line);
    }
    let mut variants = Vec::new();
    for case in charts.iter_mut().flat_map(|chart| &mut chart.cases) {
        case.tell_variants_apart(&mut variants);
        // A real KVM is only for orientation, so its bar comes last, unless it is the bar `Before`.
        case.bars[1..].sort_by_key(|bar| bar.role == Role::Kvm);
    }
    charts
}

/// Returns the first part of the case's name, if the line's metric has one chart for each first part. `None` if the
/// metric has only one chart.
fn family<'a>(lines: &[Line], line: &'a Line) -> Option<&'a str> {
    let mut cases: Vec<_> = lines
        .iter()
        .filter(|other| other.metric == line.metric)
        .map(|other| &other.case)
        .collect();
    cases.sort_unstable();
    cases.dedup();
    let (first, _) = line.case.split_once('/')?;
    (cases.len() > CASES).then_some(first)
}

impl<'a> Chart<'a> {
    fn add(&mut self, line: &'a Line) {
        let case = match self.cases.iter().position(|case| case.name == line.case) {
            Some(index) => &mut self.cases[index],
            None => {
                self.cases.push(Case {
                    name: &line.case,
                    bars: Vec::new(),
                });
                self.cases.last_mut().expect("just pushed")
            }
        };
        let bar = |role, name, value| Bar {
            role,
            name,
            value,
            change: None,
            limit: line.limit,
            goal: None,
        };
        if let Some((name, value)) = line.before {
            let role = match name {
                REAL_KVM => Role::Kvm,
                _ => Role::Before,
            };
            case.add_once(bar(role, name, value));
        }
        let (name, value) = line.after;
        case.add_once(Bar {
            change: line.change,
            goal: line.asked(),
            ..bar(Role::After(0), name, value)
        });
        if let (Some((_, before)), Some(change)) = (line.before, line.published) {
            case.bars.push(Bar {
                change: Some(change),
                ..bar(Role::Published, "published", before * (1.0 + change))
            });
        }
        if let Some(value) = line.kvm {
            case.add_once(bar(Role::Kvm, REAL_KVM, value));
        }
    }

    /// Returns all bars.
    pub fn bars(&self) -> impl Iterator<Item = &Bar<'a>> {
        self.cases.iter().flat_map(|case| &case.bars)
    }
}

impl<'a> Case<'a> {
    /// Numbers the compared variants, so that a variant has the same colour in all charts of an experiment. `known` has
    /// the variants that are already numbered.
    fn tell_variants_apart(&mut self, known: &mut Vec<&'a str>) {
        for bar in &mut self.bars {
            if let Role::After(number) = &mut bar.role {
                *number = known
                    .iter()
                    .position(|name| *name == bar.name)
                    .unwrap_or_else(|| {
                        known.push(bar.name);
                        known.len() - 1
                    });
            }
        }
    }

    /// Adds a bar, unless the case already has the same bar. Several lines may compare different variants with the same
    /// bar.
    fn add_once(&mut self, bar: Bar<'a>) {
        if !self.bars.iter().any(|known| known.name == bar.name) {
            self.bars.push(bar);
        }
    }
}
