//! The terminal's table as HTML.

use maud::{Markup, html};

use crate::show::{COLUMNS, Line, groups};

/// A table that is longer is shown when it is asked for.
const LONG: usize = 40;

/// All lines, under the headings that the terminal gives them.
pub fn table(lines: &[Line]) -> Markup {
    html! {
        details open[lines.len() <= LONG] {
            summary { "All " (lines.len()) " values" }
            div.scroll {
                table {
                    thead {
                        tr {
                            @for name in COLUMNS {
                                th scope="col" { (name) }
                            }
                        }
                    }
                    @for (heading, group) in groups(lines) {
                        tbody {
                            tr.heading {
                                @for cell in heading { td { (cell) } }
                                @for _ in heading.len()..COLUMNS.len() { td {} }
                            }
                            @for line in group {
                                tr { (cells(line)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn cells(line: &Line) -> Markup {
    let [name, values @ .., goal] = line.cells();
    let mark = line
        .asked()
        .map(|goal| if goal.met { "met" } else { "missed" });
    html! {
        th scope="row" { (name) }
        @for value in values { td { (value) } }
        td class=[mark] { (goal) }
    }
}
