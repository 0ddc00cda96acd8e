//! The same table as on the terminal, as HTML.

use maud::{Markup, html};

use crate::compared::{COLUMNS, Goal, Grid, Line, Rows, groups};

/// A table with more lines than this is collapsed until the reader opens it.
const LONG: usize = 40;

/// Makes a table of all lines. It has the same rows as on the terminal.
pub fn table(rows: Rows, lines: &[Line]) -> Markup {
    html! {
        details open[lines.len() <= LONG] {
            summary { "All " (lines.len()) " values" }
            div.scroll {
                @match rows {
                    Rows::Metrics => (metrics(lines)),
                    Rows::Cases => (cases(lines)),
                }
            }
        }
    }
}

fn metrics(lines: &[Line]) -> Markup {
    html! {
        table {
            (head(&COLUMNS))
            @for (heading, group) in groups(lines) {
                tbody {
                    tr.heading {
                        @for cell in heading { td { (cell) } }
                        @for _ in heading.len()..COLUMNS.len() { td {} }
                    }
                    @for line in group {
                        (row(&line.cells(), line.asked()))
                    }
                }
            }
        }
    }
}

fn cases(lines: &[Line]) -> Markup {
    let grid = Grid::new(lines);
    html! {
        table {
            (head(&grid.head))
            @for (family, rows) in &grid.families {
                tbody {
                    tr.heading {
                        td { (family) }
                        @for _ in 1..grid.head.len() { td {} }
                    }
                    @for case in rows {
                        (row(&case.cells, case.goal))
                    }
                }
            }
        }
    }
}

fn head(names: &[&str]) -> Markup {
    html! {
        thead {
            tr {
                @for name in names {
                    th scope="col" { (name) }
                }
            }
        }
    }
}

/// Makes a row from the texts of its cells and its goal.
fn row(cells: &[String], goal: Option<&Goal>) -> Markup {
    let mark = goal.map(|goal| if goal.met { "met" } else { "missed" });
    html! {
        tr {
            @if let [name, values @ .., asked] = cells {
                th scope="row" { (name) }
                @for value in values { td { (value) } }
                td class=[mark] { (asked) }
            }
        }
    }
}
