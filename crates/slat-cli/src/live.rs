//! The common part of all live views in a terminal: fetching new data at intervals, drawing the view, and the keys to
//! quit and pause.

use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::style::{Modifier, Style};
use ratatui::{DefaultTerminal, Frame};

use crate::output::complain;

/// The description of the keys that [`show`] itself handles.
pub const KEYS: &str = "q quit   space pause";

/// A view in the terminal that is drawn again with new data, until the user quits.
pub trait View {
    /// Fetches new data.
    fn look(&mut self);

    /// Draws the data that was fetched last.
    fn draw(&mut self, frame: &mut Frame<'_>, paused: bool);

    /// Handles a key that is not among [`KEYS`].
    fn press(&mut self, key: KeyCode);
}

/// Shows a view until the user quits. `command` is the command's name, for error messages. The view gets new data every
/// `interval`; it must already have its first data.
pub fn show(command: &str, interval: Duration, view: &mut impl View) -> ExitCode {
    let shown = ratatui::try_init().and_then(|mut terminal| {
        let result = run(&mut terminal, interval, view);
        ratatui::try_restore()?;
        result
    });
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{command}: the terminal: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(terminal: &mut DefaultTerminal, interval: Duration, view: &mut impl View) -> io::Result<()> {
    let mut paused = false;
    let mut looked = Instant::now();
    loop {
        terminal.draw(|frame| view.draw(frame, paused))?;
        let left = interval.saturating_sub(looked.elapsed());
        if !event::poll(left)? {
            looked = Instant::now();
            if !paused {
                view.look();
            }
            continue;
        }
        let Event::Key(key) = event::read()? else {
            continue;
        };
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            _ if key.kind != KeyEventKind::Press => {}
            KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
            KeyCode::Char('c') if control => return Ok(()),
            KeyCode::Char(' ') => paused = !paused,
            code => view.press(code),
        }
    }
}

/// Returns the style of column headings.
pub fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}
