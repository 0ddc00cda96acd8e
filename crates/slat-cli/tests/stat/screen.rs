//! Tests the live views in a terminal of tmux.

use std::process::Command;
use std::time::{Duration, Instant};

use super::harness::{Scratch, text};

/// A terminal of 140 by 30 characters. It has its own tmux server.
struct Terminal(String);

impl Terminal {
    /// Returns `None`, and prints so, if there is no tmux.
    fn new(scratch: &Scratch, command: &str) -> Option<Self> {
        let name = scratch.0.file_name().unwrap().to_str().unwrap();
        let name = format!("slat-{name}-{}", std::process::id());
        let started = Command::new("tmux")
            .args(["-L", &name, "-f", "/dev/null", "new-session", "-d"])
            .args(["-x", "140", "-y", "30", command])
            .env("XDG_RUNTIME_DIR", &scratch.0)
            .env("TERM", "xterm-256color")
            .status();
        match started {
            Ok(status) => assert!(status.success()),
            Err(error) => {
                eprintln!("skipped: tmux does not start: {error}");
                return None;
            }
        }
        Some(Terminal(name))
    }

    fn tmux(&self, arguments: &[&str]) -> String {
        let output = Command::new("tmux")
            .args(["-L", &self.0])
            .args(arguments)
            .output();
        text(&output.unwrap().stdout)
    }

    fn press(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }

    /// Waits until `condition` holds for the lines of the screen. Returns these lines.
    fn shows(&self, condition: impl Fn(&[&str]) -> bool) -> String {
        let begin = Instant::now();
        loop {
            let screen = self.tmux(&["capture-pane", "-p"]);
            let lines: Vec<_> = screen.lines().collect();
            if condition(&lines) {
                return screen;
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "{screen}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

/// Returns the words of the first line that begins with `word`.
fn row<'a>(lines: &[&'a str], word: &str) -> Vec<&'a str> {
    let words = lines
        .iter()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    words
        .into_iter()
        .find(|words| words.first() == Some(&word))
        .unwrap_or_default()
}

#[test]
fn the_live_table_shows_rates_and_follows_keys() {
    let scratch = Scratch::new("screen");
    let client = scratch.start(&[], "computes");
    let pid = client.pid().to_string();
    scratch.published(client.pid());
    let command = format!(
        "'{}' stat {pid} --interval 0.2; echo ended; sleep 100",
        env!("CARGO_BIN_EXE_slat")
    );
    let Some(terminal) = Terminal::new(&scratch, &command) else {
        return;
    };
    // There is one VM with one vCPU that computes. Its speed is in the fifth column.
    let is_fast = |lines: &[&str]| {
        let row = row(lines, &pid);
        row.get(4)
            .and_then(|mips| mips.parse().ok())
            .is_some_and(|mips: f64| mips > 0.1)
    };
    let screen = terminal.shows(is_fast);
    let lines: Vec<_> = screen.lines().collect();
    assert_eq!(lines[0], "slat stat: 1 VMs, every 0.2 s");
    let heads: Vec<_> = lines[1].split_whitespace().collect();
    assert_eq!(heads[..5], ["PID", "COMMAND", "VM", "VCPUS", "MIPS"]);
    assert_eq!(row(&lines, &pid)[2..4], ["0", "1"]);
    assert!(screen.contains("instructions"), "{screen}");
    assert!(!screen.contains("pf_retried"), "{screen}");

    terminal.press("v");
    terminal.shows(|lines| lines[0].contains("1 vCPUs") && row(lines, &pid).contains(&"runs"));
    terminal.press("a");
    terminal.shows(|lines| lines.iter().any(|line| line.contains("pf_retried")));
    terminal.press("q");
    terminal.shows(|lines| lines.contains(&"ended"));
}

#[test]
fn the_live_map_follows_the_guest_and_says_when_it_is_killed() {
    let scratch = Scratch::new("map-screen");
    let mut client = scratch.start(&[], "maps");
    let pid = client.pid().to_string();
    scratch.published(client.pid());
    let command = format!(
        "'{}' map {pid} --interval 0.2; echo ended; sleep 100",
        env!("CARGO_BIN_EXE_slat")
    );
    let Some(terminal) = Terminal::new(&scratch, &command) else {
        return;
    };
    let leaves = |leaves: u64| {
        move |lines: &[&str]| {
            let wanted = format!("leaves: {leaves} of 4 KiB, 0 of 2 MiB, 0 of 1 GiB");
            lines.contains(&wanted.as_str())
        }
    };
    let screen = terminal.shows(leaves(16));
    assert!(
        screen.starts_with("slat map: memory of process"),
        "{screen}"
    );
    // The client deletes its first memslot.
    client.proceed();
    terminal.shows(leaves(0));
    client.kill();
    terminal.shows(|lines| {
        lines
            .iter()
            .any(|line| line.contains("there is no process"))
    });
    terminal.press("q");
    terminal.shows(|lines| lines.contains(&"ended"));
}
