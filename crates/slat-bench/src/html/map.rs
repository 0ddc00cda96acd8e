//! Maps of guest memory, drawn as rows of squares. The kinds of leaves that map the memory of a square determine how it
//! is filled. The maps of an experiment's phases are side by side.

use maud::{Markup, html};

use slat_kvm::memory_map::Cell;

use crate::compared::shown;
use crate::maps::{CELL, PageMap};
use crate::report::Unit;

/// The number of squares in a row; then their width, their height, and the gap between them.
const COLUMNS: usize = 32;
const WIDE: f64 = 14.0;
const HIGH: f64 = 11.0;
const GAP: f64 = 1.0;
/// The height of a mark at the edge of a square.
const EDGE: f64 = 2.0;

/// A kind of mapping: its CSS class, its name, and a function that returns the number of a cell's pages that are mapped
/// in this way.
type Kind = (&'static str, &'static str, fn(&Cell) -> u64);

/// The kinds that fill a square, from its bottom up.
const FILLS: [Kind; 4] = [
    ("giga", "in 1 GiB leaves", |cell| cell.by_level[2]),
    ("mega", "in 2 MiB leaves", |cell| cell.by_level[1]),
    ("small", "in 4 KiB leaves", |cell| cell.by_level[0]),
    ("mmio", "MMIO", |cell| cell.mmio),
];
/// The kinds that are drawn over the filled square. Not executable covers the whole square. Write-protected is at its
/// upper edge, and private below that. Dirty is at its lower edge, and accessed above that.
const NX: Kind = ("nx", "not executable", |cell| cell.nx);
const PROTECTED: Kind = ("protected", "write-protected for the log", |cell| {
    cell.protected
});
const DIRTY: Kind = ("dirty", "dirty", |cell| cell.dirty);
const ACCESSED: Kind = ("accessed", "accessed", |cell| cell.accessed);
const PRIVATE: Kind = ("private", "private", |cell| cell.private);
const OVER: [Kind; 5] = [NX, PROTECTED, DIRTY, ACCESSED, PRIVATE];

/// A part of guest memory that is to be drawn.
pub struct Strip<'a> {
    /// A short description of what the map shows.
    pub name: &'a str,
    /// The number of 4 KiB pages in each cell.
    pub cell_pages: u64,
    /// The cells, in the order of addresses.
    pub cells: &'a [Cell],
}

impl Strip<'_> {
    fn pages(&self, (.., pages): Kind) -> u64 {
        self.cells.iter().map(pages).sum()
    }
}

/// Draws the memory of VMs. Each group has a name and strips.
pub fn memory(groups: &[(String, Vec<Strip<'_>>)]) -> Markup {
    let strips = || groups.iter().flat_map(|(_, strips)| strips);
    html! {
        (legend("A square is as large as the figure says.", strips()))
        @for (name, strips) in groups {
            h2 { (name) }
            div.maps {
                @for strip in strips { figure { (draw(strip)) } }
            }
        }
    }
}

/// Draws the maps of an experiment, grouped by case and variant. Draws nothing if there are no maps.
pub fn maps(maps: &[&PageMap]) -> Markup {
    html! {
        @if !maps.is_empty() {
            h3 { "What maps the guest\u{2019}s memory" }
            @let strips: Vec<_> = maps.iter().map(|map| strip(map)).collect();
            (legend("Each square is 2 MiB.", strips.iter()))
            @let mut subjects = subjects(maps);
            div.maps {
                @for phases in &mut subjects {
                    figure {
                        figcaption { strong { (phases[0].case) } " " (phases[0].variant) }
                        @for map in phases { (draw(&strip(map))) }
                    }
                }
            }
        }
    }
}

/// Groups the maps by case and variant. In `maps`, variants alternate, because rounds measure the variants in turns.
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

fn strip(map: &PageMap) -> Strip<'_> {
    Strip {
        name: map.phase,
        cell_pages: CELL,
        cells: &map.cells,
    }
}

fn draw(strip: &Strip<'_>) -> Markup {
    let rows = strip.cells.len().div_ceil(COLUMNS);
    let columns = strip.cells.len().min(COLUMNS);
    let (width, height) = (COLUMNS as f64 * WIDE, rows as f64 * HIGH);
    let account = account(strip);
    html! {
        p.phase { strong { (strip.name) } " " (account) }
        svg.map viewBox=(format!("0 0 {width} {height}")) role="img" aria-label=(format!("{}: {account}", strip.name)) {
            title { (strip.name) ": " (account) }
            @for (row, cells) in strip.cells.chunks(COLUMNS).enumerate() {
                @let mut column = 0;
                // Equal squares next to each other are drawn as one rectangle. Lines that are drawn later separate the
                // squares.
                @for run in cells.chunk_by(|a, b| a == b) {
                    (draw_run(&run[0], strip.cell_pages, column, run.len(), row as f64 * HIGH))
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

/// Returns a text with the number of 4 KiB pages of each kind.
fn account(strip: &Strip<'_>) -> String {
    let mut parts = Vec::new();
    for kind in FILLS.into_iter().chain(OVER) {
        let pages = strip.pages(kind);
        if pages != 0 {
            parts.push(format!("{} {}", shown(pages as f64, Unit::Count), kind.1));
        }
    }
    if parts.is_empty() {
        return "nothing is mapped".to_owned();
    }
    format!("pages: {}", parts.join(" \u{b7} "))
}

fn draw_run(cell: &Cell, cell_pages: u64, column: usize, cells: usize, top: f64) -> Markup {
    let (x, width) = (column as f64 * WIDE, cells as f64 * WIDE - GAP);
    let full = HIGH - 2.0 * GAP;
    // Each kind in a square must be visible, even a kind with only one page.
    let share = |pages: u64, full: f64| match pages {
        0 => 0.0,
        pages => (pages as f64 / cell_pages as f64 * full).max(1.0),
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
        (rect(ACCESSED.0, bottom - EDGE, share((ACCESSED.2)(cell), EDGE)))
        @let private = share((PRIVATE.2)(cell), EDGE);
        (rect(PRIVATE.0, top + EDGE + private, private))
    }
}

fn legend<'a>(size: &str, strips: impl Iterator<Item = &'a Strip<'a>> + Clone) -> Markup {
    let kinds = FILLS.into_iter().chain(OVER);
    let seen = kinds.filter(|kind| strips.clone().any(|strip| strip.pages(*kind) != 0));
    html! {
        ul.legend {
            li { (size) }
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
