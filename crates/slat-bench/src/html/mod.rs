//! The report, and maps of guest memory, as HTML pages. Each page is one self-contained file that needs no network and
//! no script. It follows the reader's choice of a light or dark theme.
//!
//! | file | idea |
//! |---|---|
//! | `chart` | the contents of a chart: the table's lines as bars |
//! | `axis` | positions of values, linear or logarithmic |
//! | `picture` | the chart as inline SVG |
//! | `map` | maps of guest memory, by kinds of leaves |
//! | `table` | the same table as on the terminal |
//! | `facts` | the machine on which the measurements were made |

mod axis;
mod chart;
mod facts;
mod map;
mod picture;
mod table;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::Experiment;
use crate::compared::Line;
use crate::report::Report;
use crate::rounds::Size;
use crate::show::missed;

pub use map::Strip;

const STYLE: &str = include_str!("style.css");

/// Returns the page with the measurements of the experiments in `selection`, on this machine.
pub fn page(selection: &[&Experiment], report: &Report, size: Size) -> String {
    let contents = html! {
        p.lead {
            "What each mechanism of KVM\u{2019}s guest-memory system is worth: every one on and off \
             within one run"
            @if crate::missing().is_empty() { ", with real guests" }
            "."
        }
        dl.facts {
            @for (name, value) in facts::facts(size) {
                div { dt { (name) } dd { (value) } }
            }
        }
        (overview(selection, report))
        @for experiment in selection {
            (section(experiment, report))
        }
        @if !report.notes().is_empty() {
            section {
                h2 { "Notes" }
                @for note in report.notes() { p { (note) } }
            }
        }
    };
    document("slat bench", &contents)
}

/// Returns a page that shows how VMs' memory is mapped. `lead` is a text that says whose memory it is. Each group has a
/// name and [`Strip`]s.
pub fn memory_page(lead: &str, groups: &[(String, Vec<Strip<'_>>)]) -> String {
    let contents = html! {
        p.lead { (lead) }
        section { (map::memory(groups)) }
    };
    document("slat map", &contents)
}

/// Returns a complete HTML document with this title and these contents.
fn document(title: &str, contents: &Markup) -> String {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                (patterns())
                main {
                    h1 { (title) }
                    (contents)
                }
            }
        }
    }
    .into_string()
}

/// Defines the fill patterns that all pictures use: one for bars of published values, and one for pages that must not
/// be executed.
fn patterns() -> Markup {
    html! {
        svg.definitions width="0" height="0" aria-hidden="true" {
            defs {
                @for id in ["hatch", "nx"] {
                    pattern id=(id) width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)" {
                        line class=(id) x1="0" x2="0" y1="0" y2="5" {}
                    }
                }
            }
        }
    }
}

/// Lists the goals of each experiment with their results.
fn overview(selection: &[&Experiment], report: &Report) -> Markup {
    html! {
        nav aria-label="experiments" {
            @for experiment in selection {
                @let lines = (experiment.compare)(report);
                a href=(format!("#{}", experiment.name)) {
                    strong { (experiment.name) }
                    (reached(&lines))
                }
            }
        }
    }
}

fn reached(lines: &[Line]) -> Markup {
    let goals: Vec<_> = lines.iter().filter_map(Line::asked).collect();
    let met = goals.iter().filter(|goal| goal.met).count();
    html! {
        @if goals.is_empty() {
            span { "nothing asked for" }
        } @else {
            span class=(if met == goals.len() { "met" } else { "missed" }) {
                (met) " of " (goals.len()) " reached"
            }
        }
    }
}

fn section(experiment: &Experiment, report: &Report) -> Markup {
    let lines = (experiment.compare)(report);
    let missed = missed(experiment, report);
    html! {
        section id=(experiment.name) {
            h2 { (experiment.name) span { (experiment.title) } }
            (explained(experiment.explain))
            div.charts {
                @for chart in chart::charts(&lines) {
                    (picture::picture(&chart))
                }
            }
            @let maps: Vec<_> = report.maps(experiment.name).collect();
            (map::maps(&maps))
            @if !missed.is_empty() {
                div.misses {
                    p.missed { "Missed:" }
                    ul { @for line in missed { li { (line) } } }
                }
            }
            (table::table(experiment.rows, &lines))
        }
    }
}

/// Splits an explanation into paragraphs. A paragraph ends with a line that ends with the end of a sentence.
fn explained(text: &str) -> Markup {
    html! {
        div.explain {
            @for paragraph in text.split_inclusive(".\n") {
                p { (paragraph.trim_end()) }
            }
        }
    }
}

#[cfg(test)]
mod tests;
