//! The live picture of memory, which the user can scroll.

use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::picture::{LEGEND, lines, whose};
use super::{Process, ask, why_not};
use crate::args::Map;
use crate::live::{self, View, bold};

const KEYS: &str = "up/down, page up/page down scroll";

/// The live view of `slat map`.
pub struct Screen<'a> {
    options: &'a Map,
    head: String,
    lines: Vec<String>,
    /// The index of the first line that is shown.
    top: usize,
    /// The number of lines that the screen had for the picture at the last drawing.
    height: usize,
}

impl<'a> Screen<'a> {
    /// Makes the view with its first data.
    pub fn new(options: &'a Map, process: Process) -> Self {
        let mut screen = Screen {
            options,
            head: whose(&process),
            lines: Vec::new(),
            top: 0,
            height: 1,
        };
        screen.take(Some(process));
        screen
    }

    fn take(&mut self, process: Option<Process>) {
        self.lines = match process.map(|process| process.answer) {
            // The lines of each VM begin with an empty line; `skip` drops the first of these.
            Some(Ok(vms)) => vms.iter().flat_map(lines).skip(1).collect(),
            Some(Err(why)) => vec![format!("process {} {why}", self.options.pid)],
            None => vec![why_not(self.options.pid)],
        };
    }

    fn scroll(&mut self, by: isize) {
        let last = self.lines.len().saturating_sub(self.height);
        self.top = self.top.saturating_add_signed(by).min(last);
    }
}

impl View for Screen<'_> {
    fn look(&mut self) {
        self.take(ask(self.options));
        self.scroll(0);
    }

    fn press(&mut self, key: KeyCode) {
        let page = self.height as isize;
        match key {
            KeyCode::Up => self.scroll(-1),
            KeyCode::Down => self.scroll(1),
            KeyCode::PageUp => self.scroll(-page),
            KeyCode::PageDown => self.scroll(page),
            _ => {}
        }
    }

    fn draw(&mut self, frame: &mut Frame<'_>, paused: bool) {
        let parts = [
            Constraint::Length(1),
            Constraint::Min(0),
            Constraint::Length(1),
        ];
        let [head, picture, keys] = Layout::vertical(parts).areas(frame.area());
        self.height = usize::from(picture.height).max(1);
        let paused = if paused { ", paused" } else { "" };
        let title = format!("slat map: {}{paused}   {LEGEND}", self.head);
        frame.render_widget(Line::from(title).style(bold()), head);
        let shown = self.lines.iter().skip(self.top).take(self.height);
        let shown: Vec<_> = shown.map(|line| Line::from(line.as_str())).collect();
        frame.render_widget(Paragraph::new(shown), picture);
        frame.render_widget(Line::from(format!("{}   {KEYS}", live::KEYS)), keys);
    }
}
