//! Maps of guest memory: each square 2 MiB, filled by the leaves that map it, phase beside phase.

use maud::{Markup, html};

use crate::maps::{CELL, Cell, PageMap};
use crate::report::Unit;
use crate::show::shown;

/// Squares in a row, their width and height, and the gap between them.
const COLUMNS: usize = 32;
const WIDE: f64 = 14.0;
const HIGH: f64 = 11.0;
const GAP: f64 = 1.0;
/// Height of a mark on an edge.
const EDGE: f64 = 2.5;

/// A way to map a share of a square's pages: class, name, and how many pages of a cell are mapped
/// so.
type Kind = (&'static str, &'static str, fn(&Cell) -> u64);

/// The kinds that fill a square from the bottom.
const FILLS: [Kind; 4] = [
    ("giga", "in 1 GiB leaves", |cell| cell.by_level[2]),
    ("mega", "in 2 MiB leaves", |cell| cell.by_level[1]),
    ("small", "in 4 KiB leaves", |cell| cell.by_level[0]),
    ("mmio", "MMIO", |cell| cell.mmio),
];
/// The kinds that are drawn over the fills: over the whole square, on its upper and on its lower
/// edge.
const NX: Kind = ("nx", "not executable", |cell| cell.nx);
const PROTECTED: Kind = ("protected", "write-protected for the log", |cell| {
    cell.protected
});
const DIRTY: Kind = ("dirty", "dirty", |cell| cell.dirty);
const OVER: [Kind; 3] = [NX, PROTECTED, DIRTY];

/// Draws the maps of an experiment, those of one case and variant together; nothing if there are
/// none.
pub fn maps(maps: &[&PageMap]) -> Markup {
    html! {
        @if !maps.is_empty() {
            h3 { "What maps the guest\u{2019}s memory" }
            (legend(maps))
            @let mut subjects = subjects(maps);
            div.maps {
                @for phases in &mut subjects {
                    figure {
                        figcaption { strong { (phases[0].case) } " " (phases[0].variant) }
                        @for map in phases { (draw(map)) }
                    }
                }
            }
        }
    }
}

/// Groups the maps by case and variant: rounds measure phases in turns.
fn subjects<'a>(maps: &[&'a PageMap]) -> Vec<Vec<&'a PageMap>> {
    let mut subjects: Vec<Vec<&PageMap>> = Vec::new();
    for map in maps {
        let same = |phases: &&mut Vec<&PageMap>| {
            (&phases[0].case, phases[0].variant) == (&map.case, map.variant)
        };
        match subjects.iter_mut().find(same) {
            Some(phases) => phases.push(map),
            None => subjects.push(vec![map]),
        }
    }
    subjects
}

fn pages(cells: &[Cell], (.., pages): Kind) -> u64 {
    cells.iter().map(pages).sum()
}

fn draw(map: &PageMap) -> Markup {
    let rows = map.cells.len().div_ceil(COLUMNS);
    let columns = map.cells.len().min(COLUMNS);
    let (width, height) = (COLUMNS as f64 * WIDE, rows as f64 * HIGH);
    let account = account(map);
    html! {
        p.phase { strong { (map.phase) } " " (account) }
        svg.map viewBox=(format!("0 0 {width} {height}")) role="img" aria-label=(format!("{}: {account}", map.phase)) {
            title { (map.phase) ": " (account) }
            @for (row, cells) in map.cells.chunks(COLUMNS).enumerate() {
                @let mut column = 0;
                // Equal adjacent squares are one rectangle, cut apart by the lines below.
                @for run in cells.chunk_by(|a, b| a == b) {
                    (draw_run(&run[0], column, run.len(), row as f64 * HIGH))
                    @let () = column += run.len();
                }
            }
            @for column in 1..columns {
                @let x = column as f64 * WIDE - GAP / 2.0;
                line.cut x1=(x) x2=(x) y1="0" y2=(height) {}
            }
        }
    }
}

/// Counts the pages of 4 KiB of each kind.
fn account(map: &PageMap) -> String {
    let mut parts = Vec::new();
    for kind in FILLS.into_iter().chain(OVER) {
        let pages = pages(&map.cells, kind);
        if pages != 0 {
            parts.push(format!("{} {}", shown(pages as f64, Unit::Count), kind.1));
        }
    }
    if parts.is_empty() {
        return "nothing is mapped".to_owned();
    }
    format!("pages: {}", parts.join(" \u{b7} "))
}

fn draw_run(cell: &Cell, column: usize, cells: usize, top: f64) -> Markup {
    let (x, width) = (column as f64 * WIDE, cells as f64 * WIDE - GAP);
    let full = HIGH - 2.0 * GAP;
    // Every kind in a square is to be seen, be it one page.
    let share = |pages: u64, full: f64| match pages {
        0 => 0.0,
        pages => (pages as f64 / CELL as f64 * full).max(1.0),
    };
    let bottom = top + full;
    let rect = |class: &str, bottom: f64, height: f64| {
        html! {
            @if height > 0.0 {
                rect class=(class) x=(x) y=(format!("{:.1}", bottom - height)) width=(width) height=(format!("{height:.1}")) {}
            }
        }
    };
    html! {
        (rect("empty", bottom, full))
        @let mut filled = 0.0;
        @for (class, _, pages) in FILLS {
            @let height = share(pages(cell), full).min(full - filled);
            (rect(class, bottom - filled, height))
            @let () = filled += height;
        }
        (rect(NX.0, bottom, share((NX.2)(cell), full)))
        @let protected = share((PROTECTED.2)(cell), EDGE);
        (rect(PROTECTED.0, top + protected, protected))
        (rect(DIRTY.0, bottom, share((DIRTY.2)(cell), EDGE)))
    }
}

fn legend(maps: &[&PageMap]) -> Markup {
    let kinds = FILLS.into_iter().chain(OVER);
    let seen = kinds.filter(|kind| maps.iter().any(|map| pages(&map.cells, *kind) != 0));
    html! {
        ul.legend {
            li { "Each square is 2 MiB." }
            @for (class, name, _) in seen {
                li {
                    svg viewBox="0 0 16 12" width="16" height="12" aria-hidden="true" {
                        rect.before width="16" height="12" {}
                        rect class=(class) width="16" height="12" {}
                    }
                    (name)
                }
            }
        }
    }
}
