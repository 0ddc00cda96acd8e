//! A chart as inline SVG: horizontal bars, with their numbers in columns to the right. Colours are CSS variables of the
//! page, so the same picture is used for the light and the dark theme.

use maud::{Markup, html};

use super::axis::Axis;
use super::chart::{Bar, Case, Chart, Role};
use crate::compared::{percent, shown};
use crate::report::Unit;

const WIDTH: f64 = 650.0;
/// The left end of the bars, and then their right end. Numbers are to the right of the bars.
const LEFT: f64 = 100.0;
const RIGHT: f64 = 360.0;
const VALUE: f64 = 438.0;
const CHANGE: f64 = 511.0;
const GOAL: f64 = 521.0;
/// The height of the axis at the top; then the height of a case's name, and of a bar with its distance to the next bar.
const AXIS: f64 = 22.0;
const HEADING: f64 = 24.0;
const BAR: f64 = 18.0;
const THICK: f64 = 12.0;

/// Draws the chart with its legend.
pub fn picture(chart: &Chart) -> Markup {
    let limits = chart.bars().filter_map(|bar| bar.limit);
    let values: Vec<_> = chart
        .bars()
        .map(|bar| bar.value)
        .chain(limits.map(|(_, value)| value))
        .collect();
    let axis = Axis::over(&values);
    let height = AXIS
        + chart
            .cases
            .iter()
            .map(|case| HEADING + BAR * case.bars.len() as f64)
            .sum::<f64>()
        + 4.0;
    let title = match chart.family {
        Some(family) => format!("{family}: {}", chart.metric),
        None => chart.metric.to_owned(),
    };
    html! {
        figure {
            figcaption {
                strong { (title) }
                @if matches!(axis, Axis::Logarithmic { .. }) { " logarithmic" }
            }
            (legend(chart))
            svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(format!("{title}: bars; the table has all values")) {
                (grid(chart, &axis, height))
                @let mut top = AXIS;
                @for case in &chart.cases {
                    (draw_case(chart, &axis, case, top))
                    @let () = top += HEADING + BAR * case.bars.len() as f64;
                }
            }
        }
    }
}

fn x(axis: &Axis, value: f64) -> f64 {
    LEFT + axis.place(value) * (RIGHT - LEFT)
}

/// Formats a coordinate with one decimal, because smaller differences are invisible.
fn number(value: f64) -> String {
    format!("{value:.1}")
}

/// Formats a value for the axis, in as few characters as possible.
fn round(value: f64, unit: Unit) -> String {
    match (unit, value) {
        (_, 0.0) => "0".to_owned(),
        (Unit::Count, value) if value >= 1e6 => format!("{} M", value * 1e-6),
        (Unit::Count, value) if value >= 1e3 => format!("{} k", value * 1e-3),
        _ => shown(value, unit).replace(".00 ", " ").replace(".0 ", " "),
    }
}

fn grid(chart: &Chart, axis: &Axis, height: f64) -> Markup {
    html! {
        @for mark in axis.marks() {
            @let x = number(x(axis, mark));
            line.grid x1=(x) x2=(x) y1=(number(AXIS - 4.0)) y2=(number(height)) {}
            text.mark x=(x) y="12" text-anchor="middle" { (round(mark, chart.unit)) }
        }
    }
}

fn draw_case(chart: &Chart, axis: &Axis, case: &Case, top: f64) -> Markup {
    let limit = case.bars.iter().find_map(|bar| bar.limit);
    html! {
        text.case x="0" y=(number(top + 17.0)) { (case.name) }
        @if let Some((name, value)) = limit {
            text.limit x=(number(VALUE)) y=(number(top + 17.0)) text-anchor="end" {
                "limit: " (name) " " (shown(value, chart.unit))
            }
        }
        @for (index, bar) in case.bars.iter().enumerate() {
            (draw_bar(chart, axis, case, bar, top + HEADING + BAR * index as f64))
        }
    }
}

fn draw_bar(chart: &Chart, axis: &Axis, case: &Case, bar: &Bar, top: f64) -> Markup {
    let value = shown(bar.value, chart.unit);
    let change = bar.change.map(percent);
    let mut label = format!("{} {}: {value}", case.name, bar.name);
    if let Some(change) = &change {
        label += &format!(", {change}");
    }
    if let Some((name, limit)) = bar.limit {
        label += &format!("; limit {name} {}", shown(limit, chart.unit));
    }
    let base = number(top + BAR - 5.0);
    html! {
        g role="img" aria-label=(label) {
            title { (label) }
            text.variant x=(number(LEFT - 8.0)) y=(base) text-anchor="end" { (bar.name) }
            rect class=(class(bar.role)) x=(number(LEFT)) y=(number(top + 3.0)) height=(number(THICK))
                width=(number(x(axis, bar.value) - LEFT)) {}
            @if let Some((_, limit)) = bar.limit {
                @let x = number(x(axis, limit));
                line.limit x1=(x) x2=(x) y1=(number(top)) y2=(number(top + BAR)) {}
            }
            text.value x=(number(VALUE)) y=(base) text-anchor="end" { (value) }
            @if let Some(change) = &change {
                text.change x=(number(CHANGE)) y=(base) text-anchor="end" { (change) }
            }
            @if let Some(goal) = bar.goal {
                text class=(if goal.met { "met" } else { "missed" }) x=(number(GOAL)) y=(base) {
                    (goal.marked())
                }
            }
        }
    }
}

/// Returns the CSS class of bars of a role.
fn class(role: Role) -> &'static str {
    match role {
        Role::Before => "before",
        Role::After(0) => "after-0",
        Role::After(1) => "after-1",
        Role::After(_) => "after-2",
        Role::Published => "published",
        Role::Kvm => "kvm",
    }
}

fn legend(chart: &Chart) -> Markup {
    let mut entries: Vec<(&str, String)> = Vec::new();
    for bar in chart.bars() {
        let text = match bar.role {
            Role::Published => {
                "published: what the published change makes of \u{201c}before\u{201d}".to_owned()
            }
            Role::Kvm => "a real /dev/kvm".to_owned(),
            Role::Before => format!("before: {}", bar.name),
            Role::After(_) => bar.name.to_owned(),
        };
        let entry = (class(bar.role), text);
        if !entries.contains(&entry) {
            entries.push(entry);
        }
    }
    if let Some((name, _)) = chart.bars().find_map(|bar| bar.limit) {
        entries.push(("limit", format!("limit: {name}")));
    }
    html! {
        ul.legend {
            @for (class, text) in entries {
                li {
                    svg viewBox="0 0 16 12" width="16" height="12" aria-hidden="true" {
                        @if class == "limit" {
                            line.limit x1="8" x2="8" y1="0" y2="12" {}
                        } @else {
                            rect class=(class) width="16" height="12" {}
                        }
                    }
                    (text)
                }
            }
        }
    }
}
