//! The live table. The upper part lists VMs or vCPUs; the lower part lists all counters of the selected VM or vCPU.

use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Row, Table, TableState};

use super::subject::{Earlier, HEADS, Key, Subject, cells, shown, subjects, times};
use super::{Process, ask, title};
use crate::args::Stat;
use crate::live::{self, View, bold};

const KEYS: &str = "up/down select   v by VM or vCPU   a all counters or those that are not 0";

/// The live view of `slat stat`.
pub struct Screen<'a> {
    options: &'a Stat,
    by_vcpu: bool,
    /// Whether counters with the value 0 are shown, too.
    all: bool,
    processes: Vec<Process>,
    subjects: Vec<Subject>,
    earlier: Earlier,
    selected: Option<Key>,
}

impl<'a> Screen<'a> {
    /// Makes the view with its first data.
    pub fn new(options: &'a Stat, processes: Vec<Process>) -> Self {
        let mut screen = Screen {
            options,
            by_vcpu: options.by_vcpu,
            all: false,
            processes: Vec::new(),
            subjects: Vec::new(),
            earlier: Earlier::default(),
            selected: None,
        };
        screen.take(processes);
        screen
    }

    /// Replaces the data by `processes`. Keeps the old data, to compute rates.
    fn take(&mut self, processes: Vec<Process>) {
        self.earlier.remember(&self.subjects);
        self.processes = processes;
        self.list();
    }

    /// Makes the list of VMs or vCPUs of the last refresh. Keeps the selected VM or vCPU if it is still in the list;
    /// otherwise selects the first one.
    fn list(&mut self) {
        self.subjects = subjects(&self.processes, self.by_vcpu);
        let keys = || self.subjects.iter().map(|subject| subject.key);
        let kept = keys().find(|key| Some(*key) == self.selected);
        self.selected = kept.or(keys().next());
    }

    fn index(&self) -> Option<usize> {
        let mut subjects = self.subjects.iter();
        subjects.position(|subject| Some(subject.key) == self.selected)
    }

    fn select(&mut self, by: isize) {
        let last = self.subjects.len().saturating_sub(1);
        let index = self
            .index()
            .unwrap_or(0)
            .saturating_add_signed(by)
            .min(last);
        self.selected = self.subjects.get(index).map(|subject| subject.key);
    }

    fn list_table(&self) -> Table<'_> {
        let rows = self.subjects.iter().map(|subject| {
            let cells = cells(subject, &self.earlier);
            let line = |(column, text): (usize, String)| match column {
                1 | 3 => Cell::from(text),
                _ => Cell::from(Line::from(text).right_aligned()),
            };
            Row::new(cells.into_iter().enumerate().map(line).collect::<Vec<_>>())
        });
        let widths = [7, 16, 5, 9, 8, 8, 9, 9, 9, 9, 7, 5].map(Constraint::Length);
        let heads = HEADS.iter().enumerate().map(|(column, text)| match column {
            1 | 3 => Cell::from(*text),
            _ => Cell::from(Line::from(*text).right_aligned()),
        });
        Table::new(rows, widths)
            .header(Row::new(heads.collect::<Vec<_>>()).style(bold()))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
    }

    /// Makes a table of counters, with as many columns as fit the table into `height` lines, but at most three.
    fn counter_table<'s>(&self, subject: &'s Subject, height: u16) -> Table<'s> {
        let mut rows: Vec<Vec<String>> = Vec::new();
        let height = usize::from(height).max(1);
        let shown_now = subject.counters().enumerate();
        let shown_now = shown_now.filter(|(_, (_, value))| self.all || *value != 0);
        for (place, (index, (name, value))) in shown_now.enumerate() {
            let of = |it: &Subject| it.counters().nth(index).map_or(0, |(_, value)| value);
            let rate = self.earlier.rate(subject, of);
            if place / height > 2 {
                break;
            }
            if rows.len() <= place % height {
                rows.push(Vec::new());
            }
            rows[place % height].extend([
                name.to_owned(),
                slat_kvm::report::grouped(value),
                format!("{}/s", shown(rate)),
            ]);
        }
        let rows = rows.into_iter().map(|row| {
            let cells = row.into_iter().enumerate();
            let cells = cells.map(|(column, text)| match column % 3 {
                0 => Cell::from(text),
                _ => Cell::from(Line::from(text).right_aligned()),
            });
            Row::new(cells.collect::<Vec<_>>())
        });
        Table::new(
            rows,
            [24, 16, 12].repeat(3).into_iter().map(Constraint::Length),
        )
    }
}

impl View for Screen<'_> {
    fn look(&mut self) {
        self.take(ask(self.options.pid));
    }

    fn press(&mut self, key: KeyCode) {
        match key {
            KeyCode::Up => self.select(-1),
            KeyCode::Down => self.select(1),
            KeyCode::Char('a') => self.all = !self.all,
            KeyCode::Char('v') => {
                self.by_vcpu = !self.by_vcpu;
                self.earlier = Earlier::default();
                self.list();
            }
            _ => {}
        }
    }

    fn draw(&mut self, frame: &mut Frame<'_>, paused: bool) {
        let silent = self.processes.iter().filter_map(|process| {
            let why = process.answer.as_ref().err()?;
            Some(format!("{} {} {why}", process.pid, process.command))
        });
        let silent: Vec<_> = silent.map(Line::from).collect();
        let height = frame.area().height;
        let list = (self.subjects.len() as u16 + 1).min((height / 2).max(3));
        let parts = [
            Constraint::Length(1),
            Constraint::Length(list),
            Constraint::Length(silent.len().min(3) as u16),
            Constraint::Length(1),
            Constraint::Min(0),
            Constraint::Length(1),
        ];
        let [head, vms, problems, name, counters, keys] =
            Layout::vertical(parts).areas(frame.area());
        let paused = if paused { ", paused" } else { "" };
        let what = if self.by_vcpu { "vCPUs" } else { "VMs" };
        let seconds = self.options.interval;
        let count = self.subjects.len();
        frame.render_widget(
            Line::from(format!(
                "slat stat: {count} {what}, every {seconds} s{paused}"
            )),
            head,
        );
        let mut state = TableState::default().with_selected(self.index());
        frame.render_stateful_widget(self.list_table(), vms, &mut state);
        frame.render_widget(ratatui::text::Text::from(silent), problems);
        if let Some(subject) = self.index().map(|index| &self.subjects[index]) {
            let text = format!("{}   {}", title(subject), times(subject));
            frame.render_widget(Line::from(text).style(bold()), name);
            frame.render_widget(self.counter_table(subject, counters.height), counters);
        }
        frame.render_widget(Line::from(format!("{}   {KEYS}", live::KEYS)), keys);
    }
}
