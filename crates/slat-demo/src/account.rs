//! A report that lists the steps of a program, and the time of each step.

use std::time::Duration;

/// A report about a program.
pub struct Account {
    lines: Vec<String>,
}

impl Account {
    /// Begins a report without steps. `title` may have several lines. `heading` is the line above the steps.
    pub fn new(title: impl Into<String>, heading: &str) -> Self {
        Account {
            lines: vec![title.into(), String::new(), heading.to_owned()],
        }
    }

    /// Adds a step of the program, and the time that the step took.
    pub fn step(&mut self, what: impl Into<String>, time: Duration) {
        let what = what.into();
        self.lines
            .push(format!("  {what:<64} {:>9}", milliseconds(time)));
    }

    /// Returns the report's text, with the total time. The text ends with an empty line.
    pub fn text(mut self, total: Duration) -> String {
        self.step("all together", total);
        self.lines.join("\n") + "\n\n"
    }
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}
